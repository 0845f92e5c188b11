"""How many workers a run has, when their number changes, and when it gives up: what the driver decides.

Between the two numbers of `--scale.num_workers` a run has as many workers as its cluster has room for. When there is
room for more, when a machine is taken back or a worker dies, those that are left save if they can, and training starts
again with as many as there is room for then. Rows, masks and batches follow from their own numbers, never from this.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ray.exceptions import ActorDiedError, RayError
from ray.train import PreemptionError, TrainingFailedError, WorkerGroupError

from domext_ray.config.pretrain import ScaleConfig
from domext_ray.errors import ConfigError, RunError, StorageError, TrainingError, find_user_error
from domext_ray.runs.events import notify_driver
from domext_ray.runtime.machine import is_cluster
from domext_ray.runtime.ray_cluster import (
    Node,
    describe_hold,
    describe_nodes,
    find_shortage,
    list_nodes,
    request_room,
    share_cpus,
)
from domext_ray.runtime.ray_private import is_growing
from domext_ray.storage import Place
from domext_ray.text.corpus.stream import READ_CPUS

ENOUGH_CPUS = 0.75
"""Of a worker: of a range no number is chosen whose workers may have less, but for the least."""
LOOK_SECONDS, SAY_SECONDS = 2.0, 30.0
"""Between two looks at the room of a cluster, and between two sentences of a job that waits for it."""
GROW_SECONDS = 60.0
"""How long workers go on before more of them start anew: that costs about as much."""
Resources = Mapping[str, float]
"""What Ray gives a worker."""


def fit_workers(scale: ScaleConfig, nodes: list[Node]) -> tuple[int, Resources]:
    """Return the largest number of workers that nodes have room for, 0: not even for the least; and what each gets."""
    with_gpu = scale.uses_gpu
    room = count_room(nodes, scale.cpus_per_worker or ENOUGH_CPUS, with_gpu=with_gpu)
    # As many as there is room for beside reading tasks do run; the least may have less.
    number = max(scale.least_workers, min(scale.most_workers, room))
    share = scale.cpus_per_worker or share_cpus(
        nodes, number, most=4.0 if with_gpu else 1.0, with_gpu=with_gpu, read_cpus=READ_CPUS
    )
    if not share or find_shortage(nodes, number, share, with_gpu=with_gpu, read_cpus=READ_CPUS):
        return 0, {}
    return number, _make_resources(scale, share)


def count_room(nodes: list[Node], share: float, *, with_gpu: bool) -> int:
    """Return how many workers of a CPU share fit beside a reading task on every node."""
    return sum(max(0, node.hold(share, with_gpu=with_gpu, spare=READ_CPUS)) for node in nodes)


def check_room(scale: ScaleConfig) -> None:
    """Refuse more workers than the cluster has, or can bring, with the tasks that read for them."""
    nodes = list_nodes()
    if not fit_workers(scale, nodes)[0] and not (is_cluster() and is_growing()):
        shortage = find_shortage(
            nodes,
            scale.least_workers,
            scale.cpus_per_worker or READ_CPUS,
            with_gpu=scale.uses_gpu,
            read_cpus=READ_CPUS,
        )
        raise ConfigError(
            f"{_describe_need(scale)}, and on {describe_nodes(nodes)} "
            f"{shortage or 'they leave no room for a reading task'}{describe_hold()}; lower one of the two, or add "
            "nodes."
        )


def _describe_need(scale: ScaleConfig) -> str:
    cpus = scale.cpus_per_worker or READ_CPUS
    each = f"{cpus:g} CPU{'' if cpus == 1 else 's'}{' and a GPU' if scale.uses_gpu else ''}"
    return f"--scale.num_workers {scale.num_workers} needs {each} for each worker (--scale.cpus_per_worker)"


def _make_resources(scale: ScaleConfig, share: float) -> Resources:
    return {"CPU": share, **({"GPU": 1.0} if scale.uses_gpu else {})}


def count_workers(scale: ScaleConfig) -> tuple[int, Resources]:
    """Return how many workers of a run there is room for now, and what each of them gets.

    On a cluster it waits for room for the least of them, and for what workers held that have just ended.
    """
    started, said, before = time.monotonic(), 0, 0
    while True:
        nodes = list_nodes(free=is_cluster())
        number, resources = fit_workers(scale, nodes)
        if number and (number in (scale.most_workers, before) or not is_cluster()):
            return number, resources
        waited, before = time.monotonic() - started, number
        if not number and waited > scale.wait_seconds:
            raise RunError(
                f"{_describe_need(scale)}, and free are {describe_nodes(nodes) or 'no nodes'} after --scale.wait "
                f"{scale.wait}{describe_hold()}; wait longer, add nodes, or lower one of the two, and the same command "
                "goes on."
            )
        if not number and waited >= (said + 1) * SAY_SECONDS:
            said += 1
            print(
                f"waiting for room for {scale.least_workers} worker{'s' * (scale.least_workers > 1)}: free are "
                f"{describe_nodes(nodes)}; {waited:.0f} of {scale.wait_seconds:g} s (--scale.wait)",
                flush=True,
            )
        ask_autoscaler(scale.most_workers, resources or _make_resources(scale, scale.cpus_per_worker or ENOUGH_CPUS))
        time.sleep(LOOK_SECONDS)


def ask_autoscaler(number: int, resources: Resources) -> None:
    """Ask a cluster that grows for room for so many workers; 0: for none any more.

    Asked again and again: Ray Train asks for as many as a run has, and the last word counts.
    """
    if is_cluster() and is_growing():
        request_room(number, resources)


class Growth:
    """A thread that asks workers to save and end, once their cluster has had room for more of them for a while."""

    def __init__(self, scale: ScaleConfig, number: int, resources: Resources, ask_to_end: Callable[[], None]) -> None:
        self.scale, self.number, self.resources, self._ask_to_end = scale, number, resources, ask_to_end
        self._cpus = max(scale.cpus_per_worker or ENOUGH_CPUS, resources["CPU"])
        self.room = 0
        """For so many more there was room when they were asked; 0: they were not."""
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="growth", daemon=True)

    def __enter__(self) -> Growth:
        if is_cluster() and self.number < self.scale.most_workers:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._has_ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def _watch(self) -> None:
        since = time.monotonic()
        while not self._has_ended.wait(LOOK_SECONDS):
            try:
                ask_autoscaler(self.scale.most_workers, self.resources)
                room = count_room(list_nodes(free=True), self._cpus, with_gpu=self.scale.uses_gpu)
                if not room:
                    since = time.monotonic()
                elif time.monotonic() - since >= GROW_SECONDS:
                    self.room = min(room, self.scale.most_workers - self.number)
                    return self._ask_to_end()
            except (RayError, RunError, StorageError, OSError):  # the cluster, or the storage, does not answer just now
                since = time.monotonic()


@dataclass
class Interruptions:
    """Why a run's workers ended before its limit, how often, and whether it may go on."""

    run_dir: Place
    scale: ScaleConfig
    num_failures: int = 0
    num_preemptions: int = 0

    def note_failure(self, failure: TrainingFailedError | ActorDiedError) -> None:
        """Count what Ray Train gave up for, or that its own process died, and say it.

        A user's mistake is raised, and so is what happens too often; a defect keeps its traceback.
        """
        if (mistake := find_user_error(failure)) is not None:
            raise mistake
        errors: dict[int, Exception] = {}
        if isinstance(failure, WorkerGroupError):
            own = failure.worker_failures.items()
            errors = {rank: getattr(raised, "health_check_failure", None) or raised for rank, raised in own}
        dead = [rank for rank, raised in errors.items() if isinstance(raised, RayError)]  # others miss those
        rank = min(dead or errors, default=0)
        error = errors.get(rank) or getattr(failure, "controller_failure", failure)
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        what = f"worker {rank} failed ({reason})" if errors else f"the workers have not started ({reason})"
        if is_alone := isinstance(failure, ActorDiedError):
            what = "the process that leads the workers was killed, as happens where memory is short"
        if isinstance(failure, PreemptionError) or any(
            getattr(raised, "preempted", False) for raised in errors.values()
        ):
            self.note_preemption(f"{what}: its machine was taken back")
            return
        self.num_failures += 1
        limit, option = self.scale.max_failures, "--scale.max_failures"
        count, ends = f"failure {self.num_failures} of at most {limit}", self.num_failures > limit
        notify_driver(
            self.run_dir,
            f"{what}: {count}; the job gives up." if ends else f"{what}: {count} ({option}); all workers start again.",
        )
        if ends and not (dead or is_alone):
            raise failure
        if ends:
            last = what if is_alone else f"worker {rank} ({' '.join(str(error).split())})"
            raise TrainingError(
                f"workers died more than {option} ({limit}) times, the last time {last}; the same command goes on from "
                "the newest checkpoint."
            )

    def note_preemption(self, what: str) -> None:
        """Count a machine that is taken back, and say it."""
        self.num_preemptions += 1
        limit = self.scale.max_preemptions
        if limit != "any" and self.num_preemptions > limit:
            raise TrainingError(
                f"machines were taken back more than --scale.max_preemptions ({limit}) times; the same command goes on "
                "from the newest checkpoint."
            )
        notify_driver(self.run_dir, f"{what}; training starts again.")
