"""`ray job stop`, on a cluster that is started as cluster/README.md says, and without the variable that it sets."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster_files import read_text
from conftest import REPOSITORY, write_corpus
from pretrain_jobs import write_command
from raylets import Cluster, run_raylets

from domext_ray.runtime.stopping import RAY_GIVEN
from domext_ray.storage import Place
from domext_ray.training.checkpoint import find_latest, list_steps
from domext_ray.training.metrics import read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
INJECT = REPOSITORY / "tests" / "faults" / "inject"
STEP = "domext_ray.training.engine:Engine.launch_step"
EVALUATED = "domext_ray.training.worker:PretrainWorker._evaluate_step"
NUM_STEPS, EVALUATE_EVERY, SAVE_EVERY = 8, 5, 3
PATIENCE_SECONDS = 400


def read_exports() -> dict[str, str]:
    """What README's commands export before `ray start`, apart from what is the raylets' own (the token, the memory)."""
    section = read_text("README.md").partition("\n## Machines of your own\n")[2].partition("ray start --head")[0]
    return dict(re.findall(rf"({RAY_GIVEN})=(\S+)", section))


@pytest.fixture(scope="module", params=["README", "bare"])
def cluster(request: pytest.FixtureRequest) -> Iterator[tuple[str, Cluster]]:
    assert read_exports() == {RAY_GIVEN: "300"}
    with run_raylets([2], read_exports() if request.param == "README" else {}) as started:
        yield request.param, started


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("text") / "corpus.txt", 400)


class Job:
    """A run that is submitted, with something slow in it."""

    def __init__(self, cluster: Cluster, command: list[str], folder: Path, faults: list[dict[str, Any]]) -> None:
        self.cluster, self.folder, self.id = cluster, folder, f"job-{time.time_ns()}"
        path = os.pathsep.join([str(INJECT), str(REPOSITORY)])
        given = {"PYTHONPATH": path, "FAULTS": json.dumps(faults), "FAULTS_DIR": str(folder)}
        environment = json.dumps({"env_vars": given})
        options = ("--no-wait", "--submission-id", self.id, "--runtime-env-json", environment)
        done = cluster.submit(*options, "--", *command)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]

    def read_fired(self) -> list[dict[str, Any]]:
        path = self.folder / "fired"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def wait_until(self, happened: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not happened():
            assert time.monotonic() < deadline, self.read_log()[-6000:]
            time.sleep(0.2)

    def get_status(self) -> str:
        return str(self.cluster.get(f"/api/jobs/{self.id}")["status"])

    def read_log(self) -> str:
        return str(self.cluster.get(f"/api/jobs/{self.id}/logs")["logs"])

    def stop(self) -> str:
        """Ask what `ray job stop` asks, which takes seconds to start, and return what the job said."""
        assert self.cluster.get(f"/api/jobs/{self.id}/stop", method="POST") == {"stopped": True}
        self.wait_until(lambda: self.get_status() == "STOPPED")
        return self.read_log()


def list_command(base: Path, corpus: Path, folder: Path) -> list[str]:
    cadence = f"--train.save_every {SAVE_EVERY} --train.evaluate_every {EVALUATE_EVERY} --train.max_steps {NUM_STEPS}"
    options = (
        f"{cadence} --optim.decay_steps {NUM_STEPS} --optim.warmup_steps 1 --replay.corpus none --scale.use_gpu false"
    )
    return write_command("af", base, corpus, folder, "run", options, "--run.trackers", "[]")


CASES: dict[str, tuple[list[dict[str, Any]], int]] = {
    "step": ([{"point": STEP, "call": 5, "action": "sleep_long"}], 5),
    "middle evaluation": ([{"point": EVALUATED, "call": 2, "action": "sleep_long"}], 5),
    "last evaluation": ([{"point": EVALUATED, "call": 3, "action": "sleep_long"}], 8),
}
"""What is slow, and the step that is saved."""


@pytest.mark.parametrize("case", CASES)
def test_what_was_promised_is_there(
    case: str, cluster: tuple[str, Cluster], tiny_base_folder: Path, corpus: Path, tmp_path: Path
) -> None:
    kind, started = cluster
    faults, step = CASES[case]
    run, command = tmp_path / "run", list_command(tiny_base_folder, corpus, tmp_path)
    job = Job(started, command, tmp_path, faults)
    job.wait_until(lambda: bool(job.read_fired()))
    began = time.monotonic()
    said = job.stop()
    print(kind, case, f"{time.monotonic() - began:.1f} s", said[-700:])
    note = f"note: the job is killed 3 s after it is told to end: {RAY_GIVEN} was not set at `ray start`."
    assert (note in said) == (kind == "bare")
    newest = max(list_steps(Place(run / "checkpoints")))
    if kind == "README" or case != "step":
        assert newest == step
        # A busy machine takes more than three seconds to say anything.
        assert kind == "bare" or said.endswith(
            f"stopped at step {step} by SIGTERM; the same command goes on from there.\n"
        )
    else:
        assert "the next step is saved if that takes at most 2 s (the job is killed 3 s after it is told" in said
        assert newest == 3
    again = Job(started, command, tmp_path, [])
    again.wait_until(lambda: again.get_status() in ("SUCCEEDED", "FAILED", "STOPPED"))
    assert again.get_status() == "SUCCEEDED", again.read_log()[-6000:]
    records = read_metrics(Place(run / "metrics.jsonl"))
    assert [record["step"] for record in records] == [*range(NUM_STEPS + 1)]
    assert [record["step"] for record in records if "eval/domain_mlm_loss" in record] == [0, EVALUATE_EVERY, NUM_STEPS]
    assert find_latest(Place(run / "checkpoints")).step == NUM_STEPS and (run / "export" / "config.json").is_file()
