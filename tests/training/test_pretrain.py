"""What a run's workers do to each other and to the driver, on real Ray processes."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from typing import Any, cast

import pytest
from conftest import write_corpus
from ray.exceptions import ActorDiedError, RayActorError
from ray.train import ScalingConfig, WorkerGroupError
from ray.train.torch import TorchTrainer
from ray.train.v2._internal.exceptions import WorkerHealthCheckFailedError
from ray.train.v2._internal.execution.scaling_policy import NoopDecision, ResizeDecision, create_scaling_policy
from small_runs import make_train

from domext_ray.config.pretrain import EngineConfig, PretrainConfig, RunConfig, ScaleConfig
from domext_ray.errors import RunError, StorageError, TrainingError
from domext_ray.pretraining.pipeline import run_pretraining
from domext_ray.runs.attempts import Attempt, supersede
from domext_ray.runs.events import EVENTS, EventReader
from domext_ray.runtime import ray_cluster
from domext_ray.runtime.ray_cluster import Node, check_shared_storage, find_shortage
from domext_ray.storage import Place, write_text
from domext_ray.text.corpus.stream import READ_CPUS
from domext_ray.training.checkpoint import MANIFEST, list_steps
from domext_ray.training.elastic import ENOUGH_CPUS, Interruptions, count_room, fit_workers
from domext_ray.training.metrics import MetricsLog
from domext_ray.training.pretrain import _plan_save, _Trainer


@pytest.mark.parametrize(
    ("address", "spared"),
    [("", {"DatasetsCallback", "PlacementGroupCleanerCallback"}), ("10.0.0.1:6379", {"DatasetsCallback"})],
)
def test_processes_that_a_job_does_not_need_are_spared(
    address: str, spared: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are there by these names in Ray Train's own; a cluster keeps the one that cleans up."""
    monkeypatch.setenv("RAY_ADDRESS", address)
    trainers = [made(lambda: None, scaling_config=ScalingConfig()) for made in (_Trainer, TorchTrainer)]
    own, theirs = ([type(made).__name__ for made in trainer._create_default_callbacks()] for trainer in trainers)
    assert set(theirs) - set(own) == spared
    assert own == [name for name in theirs if name not in spared]


@pytest.mark.parametrize("address", ["", "10.0.0.1:6379"])
def test_workers_of_this_machine_wait_for_no_autoscaler(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray Train's policy would start a process to ask it; else the number of workers is decided as there."""
    monkeypatch.setenv("RAY_ADDRESS", address)
    given = dict[str, Any]()
    monkeypatch.setattr(TorchTrainer, "_initialize_and_run_controller", lambda self, **parts: given.update(parts))
    scaling: Any = ScalingConfig(num_workers=3)
    theirs = create_scaling_policy(scaling)
    trainer: Any = _Trainer(lambda: None, scaling_config=scaling)
    trainer._initialize_and_run_controller(scaling_policy=theirs)
    policy = given["scaling_policy"]
    assert (policy is theirs) == bool(address)
    if not address:
        policy.after_controller_start(None)
        assert policy.make_decision_for_non_running_worker_group() == ResizeDecision(3, {"CPU": 1})
        assert policy.make_decision_for_running_worker_group(None, None) == NoopDecision()
        policy.before_controller_abort()


def test_a_checkpoint_that_was_due_is_not_yet_the_one_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The workers, asked while they save it, save the step that is under way."""
    monkeypatch.setattr("domext_ray.training.metrics.CHECK_REST", 0)  # they look at every step
    run = supersede(Place(tmp_path))
    assert isinstance(run.fence, Attempt)
    ask, is_done = _plan_save(run.fence)
    log = MetricsLog(run, 0)
    assert not ask(), "nothing to save"
    log.write({"step": 5})
    assert ask()
    write_text(Place(tmp_path / "checkpoints" / "step-00000005" / MANIFEST), "{}")
    assert list_steps(Place(tmp_path / "checkpoints")) == [5]
    assert not is_done()
    log.write({"step": 6})
    assert log.is_asked_to_end()
    log.confirm_end()
    assert is_done()
    log.close()


@pytest.mark.jobs  # jobs/test_pipeline.py has one of a single worker
@pytest.mark.usefixtures("local_ray")
@pytest.mark.timeout(600)
def test_a_user_s_mistake_on_one_worker_ends_all(
    tiny_base_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "runs" / "two"
    run_dir.mkdir(parents=True)
    (run_dir / "checkpoints").symlink_to("/dev/null/nowhere")  # no checkpoint can be written there, not even by root
    config = PretrainConfig(
        base=str(tiny_base_folder),
        corpus=str(write_corpus(tmp_path / "corpus.txt", 400)),
        run=RunConfig(name="two", dir=str(tmp_path / "runs"), trackers=()),
        train=make_train(40, global_batch_size=8, save_every=2),
        engine=EngineConfig(precision="fp32"),
        scale=ScaleConfig(num_workers=2, use_gpu=False),
    )
    started = time.monotonic()
    with pytest.raises(StorageError, match=r"the checkpoint of step 2 cannot be written to .*: free space there"):
        run_pretraining(config)
    print(f"{time.monotonic() - started:.1f} s")
    said = (run_dir / EVENTS).read_text(encoding="utf-8")
    assert said.count("saving the checkpoint of step 2") == 1, "it was not tried again"
    assert "start again" not in said + capfd.readouterr().err


def test_what_ends_workers_is_said_counted_and_limited(tmp_path: Path) -> None:
    own = Interruptions(Place(tmp_path), ScaleConfig(max_failures=1, max_preemptions=2))
    reader = EventReader(Place(tmp_path))

    def fail(failures: dict[int, Exception]) -> list[str]:
        own.note_failure(cast(Any, WorkerGroupError("", failures)))
        return [event.text for event in reader.read()]

    death = RayActorError("The actor died.\n\tits pid: 1")
    assert fail({1: RayActorError(preempted=True)}) == [  # which is no failure
        f"worker 1 failed ({death.BASE_ERROR_MSG}): its machine was taken back; training starts again."
    ]
    (first,) = fail({1: WorkerHealthCheckFailedError("A worker health check failed.", death)})
    assert first.startswith("worker 1 failed (The actor experienced an error") and first.endswith(
        "failure 1 of at most 1 (--scale.max_failures); all workers start again."
    )
    died_again = WorkerHealthCheckFailedError("A worker health check failed.", death)
    with pytest.raises(TrainingError) as raised:
        fail({0: died_again, 1: death})
    said = str(raised.value)
    assert said.startswith("workers died more than --scale.max_failures (1) times, the last time worker 0 (The actor")
    assert said.endswith("; the same command goes on from the newest checkpoint.") and "\n" not in said
    (second,) = (event.text for event in reader.read())
    assert second.startswith("worker 0 failed (") and second.endswith("failure 2 of at most 1; the job gives up.")
    assert not {"\n", "\t"} & set(first + second)
    with pytest.raises(WorkerGroupError):  # a defect keeps its traceback
        fail({0: KeyError("a defect")})
    assert [event.text for event in reader.read()] == [
        "worker 0 failed ('a defect'): failure 3 of at most 1; the job gives up."
    ]
    with pytest.raises(RunError, match="no space"):
        fail({0: death, 1: RunError("no space.")})
    assert reader.read() == []
    own.note_preemption("a worker was sent SIGTERM")
    assert [event.text for event in reader.read()] == ["a worker was sent SIGTERM; training starts again."]
    with pytest.raises(TrainingError, match=r"^machines were taken back more than --scale.max_preemptions \(2\)"):
        own.note_preemption("a worker was sent SIGTERM")
    own = Interruptions(Place(tmp_path), ScaleConfig(max_failures=1))
    own.note_failure(ActorDiedError())  # which is counted like a worker
    what = "the process that leads the workers was killed, as happens where memory is short"
    counted = f"{what}: failure 1 of at most 1 (--scale.max_failures); all workers start again."
    assert [event.text for event in reader.read()][-1] == counted
    with pytest.raises(
        TrainingError, match=rf"^workers died more than --scale.max_failures \(1\) times, .* {what}; the"
    ):
        own.note_failure(ActorDiedError())


@pytest.mark.parametrize(
    ("workers", "nodes", "number", "cpus"),
    [
        (4, [Node(2, 0)], 4, 0.37),  # as asked, though they are crowded
        ("1-8", [Node(1, 0)] * 3, 3, 0.5),
        ("1-8", [Node(2, 0)], 2, 0.75),
        ("1-8", [Node(64, 0)], 8, 1.0),
        ("2-3", [Node(1, 0)] * 8, 3, 0.5),
        ("3-8", [Node(1, 0)], 3, 0.16),  # the least
        ("5-8", [Node(0, 0)], 0, 0.0),
        ("1-2", [], 0, 0.0),
    ],
)
def test_as_many_workers_as_there_is_room_for(workers: Any, nodes: list[Node], number: int, cpus: float) -> None:
    scale = ScaleConfig(num_workers=workers, use_gpu=False)
    found, resources = fit_workers(scale, nodes)
    assert (found, resources.get("CPU", 0.0)) == (number, cpus)
    if found < scale.most_workers and found > scale.least_workers:
        free = [Node(node.cpus - resources["CPU"] * (found / len(nodes)), 0) for node in nodes]
        assert count_room(free, max(ENOUGH_CPUS, resources["CPU"]), with_gpu=False) == 0, "it would start anew for ever"


def test_every_gpu_has_a_worker_and_a_card_that_is_held_has_none() -> None:
    scale = ScaleConfig(num_workers="1-8", use_gpu=True)
    assert fit_workers(scale, [Node(8, 1), Node(8, 2), Node(8, 0)]) == (3, {"CPU": 3.75, "GPU": 1.0})
    assert fit_workers(scale, [Node(8, 0)])[0] == 0


def fit_by_trying_all(scale: ScaleConfig, nodes: list[Node]) -> tuple[int, float]:
    """Try every number from the most to the least, with every share from the largest to the smallest."""
    with_gpu = scale.uses_gpu
    room = count_room(nodes, scale.cpus_per_worker or ENOUGH_CPUS, with_gpu=with_gpu)

    def find_share(number: int) -> float:
        for spare in (2 * READ_CPUS, READ_CPUS):
            for share in (hundredths / 100 for hundredths in range(400 if with_gpu else 100, 0, -1)):
                if sum(max(0, node.hold(share, with_gpu=with_gpu, spare=spare)) for node in nodes) >= number:
                    return share
        return 0.0

    for number in range(scale.most_workers, scale.least_workers - 1, -1):
        cpus = scale.cpus_per_worker or find_share(number)
        is_chosen = number <= room or number == scale.least_workers
        if is_chosen and cpus and not find_shortage(nodes, number, cpus, with_gpu=with_gpu, read_cpus=READ_CPUS):
            return number, cpus
    return 0, 0.0


def test_the_number_of_workers_is_found_without_trying_all() -> None:
    draw, sizes = random.Random(0), (0.0, 0.1, 0.2, 0.25, 0.5, 1.0, 1.5, 2.0, 4.0)
    for _ in range(300):
        nodes = [Node(draw.choice(sizes), draw.choice((0.0, 1.0, 2.0))) for _ in range(draw.randint(0, 4))]
        least, share = draw.randint(1, 4), draw.choice((0.0, 0.0, 0.1, 0.25, 0.75, 1.0, 2.0))
        workers = f"{least}-{least + draw.randint(1, 4)}"
        scale = ScaleConfig(num_workers=workers, cpus_per_worker=share, use_gpu=draw.random() < 0.3)
        found, resources = fit_workers(scale, nodes)
        assert (found, resources.get("CPU", 0.0)) == fit_by_trying_all(scale, nodes), (scale, nodes)
    started = time.monotonic()
    many = [Node(number % 7 + 0.5, 0) for number in range(1000)]
    assert fit_workers(ScaleConfig(num_workers="2-8000", use_gpu=False), many) == (3996, {"CPU": 0.66})
    assert time.monotonic() - started < 5, "a job that waits asks every two seconds"


def test_nodes_that_do_not_share_a_disk_are_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what is in a bucket they see everything."""
    asked: list[str] = []

    def ask(function: Any, path: str, *, own: bool) -> list[tuple[str, bool]]:
        assert function(path) and not own
        asked.append(path)
        return [("node-1", True), ("node-2", False)]

    monkeypatch.setattr(ray_cluster, "run_on_each_node", ask)
    with pytest.raises(
        RunError, match=f"the run directory {tmp_path / 'run'} is not visible on node node-2; give --run"
    ):
        check_shared_storage(Place(tmp_path / "run"))
    bucket = Place("s3://bucket/runs")
    with pytest.raises(RunError, match=r"corpora is not visible on node node-2; give --prepare.cache_dir a folder"):
        check_shared_storage(bucket / "af", Place(tmp_path / "corpora"))
    assert len(asked) == 2 and not any(map(os.path.exists, asked))
    check_shared_storage(bucket / "af", bucket / ".corpora")
    assert len(asked) == 2
