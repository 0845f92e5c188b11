"""Pre-training under Ray Train: the driver's function, and what starts its workers.

Enters: a `Run`, prepared. Leaves, in the run directory: metrics.jsonl, what trackers keep, and checkpoints. Workers
that end before the run's limit are started again (elastic.py), a job that dies by its user; both go on from the newest
checkpoint that verifies.
"""

from __future__ import annotations

import contextlib
import pickle
import uuid
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

from ray.exceptions import ActorDiedError, RayError
from ray.train import FailureConfig, RunConfig, ScalingConfig, TrainingFailedError
from ray.train.torch import TorchConfig, TorchTrainer

from domext_ray.errors import RunError, StorageError, find_user_error
from domext_ray.runs.attempts import Attempt
from domext_ray.runs.events import WORKERS, enter_phase, notify_driver
from domext_ray.runtime.machine import is_cluster
from domext_ray.runtime.ray_cluster import (
    check_shared_storage,
    describe_nodes,
    describe_waiting,
    list_nodes,
    resolve_gpu,
)
from domext_ray.runtime.stopping import Stopped, find_kill_timer, is_stopped, save_first, signal_name
from domext_ray.storage import Place
from domext_ray.training.checkpoint import describe_resumption, list_steps
from domext_ray.training.elastic import (
    Growth,
    Interruptions,
    Resources,
    ask_autoscaler,
    check_room,
    count_workers,
)
from domext_ray.training.entry import make_heeding_callback, make_plain_policy, train_worker
from domext_ray.training.metrics import RunProgress, find_last_step
from domext_ray.training.notices import ASKED, LIMIT, TAKEN, TOLD
from domext_ray.training.router import fit_beside
from domext_ray.training.run import Run

COLLECTIVE_TIMEOUT_SECONDS = 300
SHORT_SECONDS = 30.0
"""From SIGTERM to SIGKILL, which many a step and its checkpoint take."""
CROWDED_CPUS = 0.5
"""Workers that have less each, unless that is asked for, are too many for a machine."""
PREEMPTIONS = {TAKEN: "a machine of the workers' is taken back", TOLD: "a worker was sent SIGTERM"}


class _Trainer(TorchTrainer):
    """Ray Train's own, less what a job does not need; each method overrides a private one of its.

    Ctrl-C is left to the job: Ray Train's own handler gives up the step and exits with code 0 or 1. A process is spared
    that hands out datasets, for ranks read by themselves, and two on this machine alone, where all of Ray ends with the
    driver: one that outlives it to clean up, and one that asks an autoscaler for room, whose start workers would wait
    for. Each would wake a hundred times per second, and two cores would train 3 % slower.
    """

    def _register_sigint_handler(self, controller: Any) -> None:
        pass

    def _create_default_callbacks(self) -> list[Any]:
        spared = ("DatasetsCallback", *(() if is_cluster() else ("PlacementGroupCleanerCallback",)))
        callbacks = super()._create_default_callbacks()  # type: ignore[misc]
        return [callback for callback in callbacks if type(callback).__name__ not in spared]

    def _initialize_and_run_controller(self, **given: Any) -> Any:
        if not is_cluster():
            given["scaling_policy"] = make_plain_policy(self.scaling_config)
        return super()._initialize_and_run_controller(**given)  # type: ignore[misc]


def pretrain(run: Run, note_evaluation: Callable[[], None] = lambda: None) -> None:
    """Train until a limit (`train.max_steps`, `max_tokens`, `max_seconds`), going on from the newest checkpoint.

    Ray is initialised, and the run is held. `note_evaluation` is called in a thread of the driver when the run has
    evaluated itself. A signal is `Stopped`: the step under way was saved if there was time.
    """
    # Nodes with GPUs that the job waited for at its start may have gone while its text was prepared.
    config, run_dir = run.config, run.paths.run
    resolve_gpu(config, config.scale.least_workers, "--scale.num_workers")  # nothing is open: it waits for GPUs
    enter_phase(run_dir, "starting the workers", WORKERS)
    attempt = run_dir.fence
    assert isinstance(attempt, Attempt), "the run is held"
    check_room(config.scale)
    if (timer := find_kill_timer()) and timer.seconds < SHORT_SECONDS:
        print(
            f"note: {timer.describe()}. A stop loses the steps since the last checkpoint where a step and its "
            "checkpoint take longer.",
            flush=True,
        )
    metrics = run_dir / "metrics.jsonl"
    with RunProgress(metrics, config.train, "starting the workers", describe_waiting, note_evaluation):
        try:
            with fit_beside(run) as own, save_first(*_plan_save(attempt)):
                _train_to_the_end(own, attempt)
        except KeyboardInterrupt:
            with contextlib.suppress(RunError, StorageError, OSError):  # another job has the run, or it is gone
                attempt.shut_out_workers()  # a step under way shall not be saved behind the sentence
            raise Stopped(_describe_stop(run_dir)) from None
        except Exception as error:
            raise find_user_error(error) or error from None
        finally:
            with contextlib.suppress(RayError):
                ask_autoscaler(0, {})


def _train_to_the_end(run: Run, attempt: Attempt) -> None:
    """Start workers, as many as there is room for, again and again until the run has reached its limit."""
    scale, run_dir = run.config.scale, run.paths.run
    interruptions, asked_with = Interruptions(run_dir, scale), 0
    while True:
        number, resources = count_workers(scale)
        check_shared_storage(run_dir, run.inputs.domain.folder.parent)
        if number != scale.num_workers:
            notify_driver(run_dir, f"{number} of {scale.num_workers} workers train.")
        if resources["CPU"] < min(CROWDED_CPUS, scale.cpus_per_worker or 1.0):
            print(
                f"note: {number} workers have {resources['CPU']:g} CPUs each on {describe_nodes(list_nodes())}, and "
                "start and train slowly; lower --scale.num_workers.",
                flush=True,
            )
        most = replace(scale, num_workers=number) if number <= asked_with else scale  # others took the room
        try:
            with Growth(most, number, resources, attempt.ask_to_end) as growth:
                end = _launch(run, attempt, number, resources)
        except (TrainingFailedError, ActorDiedError) as failure:
            if is_stopped():
                return
            interruptions.note_failure(failure)
            asked_with = 0
        else:
            if end == LIMIT or is_stopped():
                return
            if end == ASKED:
                notify_driver(run_dir, f"there is room for {growth.room} more; training starts again.")
            else:
                interruptions.note_preemption(PREEMPTIONS[end])
            asked_with = number if end == ASKED else 0
        attempt.shut_out_workers()  # one that was cut off may still be at work


def _launch(run: Run, attempt: Attempt, number: int, resources: Resources) -> str:
    """Train with so many workers until they end; return why they did."""
    scale = run.config.scale
    never: Any = {"max_failures": 0, "controller_failure_limit": 0, "max_preemption_failures": 0}
    trainer = _Trainer(
        cast(Any, train_worker),
        train_loop_config={"run": pickle.dumps(run), "in_cluster": is_cluster()},  # unpickled by those who train
        scaling_config=ScalingConfig(
            num_workers=number,
            use_gpu=scale.uses_gpu,
            resources_per_worker=dict(resources),
            placement_strategy="PACK" if scale.uses_gpu else "SPREAD",  # cards of one node talk faster
        ),
        run_config=RunConfig(
            name=f"attempt-{attempt.number}-{uuid.uuid4().hex[:8]}",  # a known name would be gone on with
            storage_path=str(run.paths.scratch / "ray"),
            failure_config=FailureConfig(**never),  # they start again from here, as many as there is room for
            callbacks=cast(Any, [make_heeding_callback()]),  # typed as Ray Tune's
        ),
        torch_config=TorchConfig(
            # What is counted on the host is added up there: no rank waits for its GPU to count.
            backend="cpu:gloo,cuda:nccl" if scale.uses_gpu else "gloo",
            timeout_s=COLLECTIVE_TIMEOUT_SECONDS,
        ),
    )
    return str(cast(Any, trainer.fit()).return_value)


def _plan_save(attempt: Attempt) -> tuple[Callable[[], bool], Callable[[], bool]]:
    """Ask workers to save at the next step and end, unless the newest checkpoint has all steps; see `save_first`."""
    run = attempt.run

    def ask() -> bool:
        # In a bucket metrics.jsonl is some seconds behind, so there they are asked once a step was made.
        if find_last_step(run / "metrics.jsonl") <= (_find_saved(run) if run.is_local else 0):
            return False
        attempt.ask_to_end()
        return True

    return ask, attempt.is_end_confirmed


def _find_saved(run: Place) -> int:
    return max(list_steps(run / "checkpoints"), default=0)


def _describe_stop(run_dir: Place) -> str:
    step, saved = find_last_step(run_dir / "metrics.jsonl"), _find_saved(run_dir)
    if step <= saved:
        return f"stopped at step {saved:,} by {signal_name()}; the same command goes on from there."
    again = describe_resumption(run_dir / "checkpoints")
    return f"stopped at step {step:,} by {signal_name()}, before it was saved; the same command {again}."
