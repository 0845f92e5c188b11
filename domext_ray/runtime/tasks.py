"""Tasks on Ray whose results outlive the job: the same command goes on with those that are missing.

Enters: numbered tasks, and what to do with one. Leaves: a record per task, written after everything that the task
makes, in a folder or a bucket. A task depends on what it is given alone, so a job that was killed ends as one that was
not.

Ray is handed a bounded number of tasks at a time, and more than there are CPUs for, so that a cluster that can grow
does. Results come in the order of the tasks, and no more of them are kept than tasks are under way. A job of whose
tasks none has room for as long as it may wait (`runtime.waiting`) ends.
"""

from __future__ import annotations

import contextlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeAlias

import ray
from ray import exceptions

from domext_ray.errors import RunError, find_storage_error, find_user_error
from domext_ray.progress import StatusLine, format_seconds
from domext_ray.runtime.ray_cluster import ask_waiting, describe_waiting
from domext_ray.runtime.records import Records, Result
from domext_ray.runtime.waiting import RoomTimer, StallTimer

MOST_DEATHS = 3
"""Workers that a task may lose: a node that goes away is no reason to stop, a text that kills its worker is."""
_DEATHS = (
    exceptions.NodeDiedError,
    exceptions.ObjectLostError,
    exceptions.OutOfMemoryError,
    exceptions.RayActorError,
    exceptions.WorkerCrashedError,
)
SPARE_TASKS = 32
"""Tasks that wait beyond twice the CPUs that there are."""
END_SECONDS = 10.0
"""How long tasks that are told to end may take to: what they write would come after what their job tidies up."""

Function: TypeAlias = Callable[[Any], Result]


@dataclass(frozen=True)
class Task:
    """A part of some work."""

    number: int  # its place in the order, from 0
    item: Any  # what the function is given; pickled
    size: float  # how much work it is
    name: str  # a file that it reads, for messages
    key: str = ""  # all that decides its result, beside what decides that of every task


@dataclass(frozen=True)
class Pool:
    """Processes that make something once, such as a model, and are given one task after another."""

    make: Callable[[], Function]  # called in each of them, returns what does a task
    workers: int  # how many
    cpus: float  # of each
    gpus: float = 0.0


def run_tasks(
    work: Function | Pool,
    tasks: Iterable[Task],
    records: Records | None,
    *,
    verb: str,
    total: float,
    unit: str,
    remedy: str,
    before: float = 0.0,
    cpus: float = 1.0,
    gpus: float = 0.0,
) -> Iterator[Result]:
    """Carry out tasks on Ray, but for those that have a record, showing progress; Ray is initialised.

    Results come in the order of the tasks, which are taken as they are needed. `total` is the size of all, in `unit`,
    with those that were done `before` and are left out. `remedy` says what to do where tasks need too much memory.
    `cpus` and `gpus` are those of a task without a pool; Ray gives it a process that has done another one, where there
    is one.
    """
    runner, progress = (
        _Runner(work, records, {"num_cpus": cpus, "num_gpus": gpus}),
        _Progress(verb, total, unit, before),
    )
    coming, order, ready, deaths = iter(tasks), deque[int](), dict[int, Result](), Counter[int]()
    stall, room = StallTimer(progress.line, describe_waiting), RoomTimer(ask_waiting)
    try:
        while True:
            for task in islice(coming, max(0, count_window() - len(order))):
                order.append(task.number)
                runner.submit(task)
            if not order:
                break
            stall.note_move()
            room.note_work()
            while (ended := runner.wait()) is None:
                stall.look(verb)
                room.note_work() if runner.begun else room.check(verb, runner.num_waiting)
            task, found = ended
            if isinstance(found, Exception):
                deaths[task.number] += 1
                if deaths[task.number] > MOST_DEATHS:
                    raise RunError(
                        f"{verb}: the task that reads {task.name} lost its worker {deaths[task.number]} times, as "
                        f"happens where memory is short; {remedy}, and the same command goes on."
                    ) from found
                progress.line.keep(f"{verb}: a worker died ({type(found).__name__}); its task is done again")
                runner.submit(task)
                continue
            ready[task.number], is_kept, fault = found
            if fault:
                progress.line.keep(f"{verb}: {fault}; that part is made anew")
            progress.advance(task.size, is_kept=is_kept)
            while order and order[0] in ready:
                yield ready.pop(order.popleft())
    finally:
        runner.end()
    progress.finish()


def count_window() -> int:
    """Return how many tasks may be under way: more, as a cluster grows."""
    return SPARE_TASKS + 2 * int(ray.cluster_resources().get("CPU", 1.0))


class _Runner:
    """Tasks that Ray has."""

    def __init__(self, work: Function | Pool, records: Records | None, share: dict[str, float]) -> None:
        self.pool = work if isinstance(work, Pool) else None
        self.perform = _perform.options(**share)
        self.work: Any = ray.put(work)
        self.records = ray.put(records)
        self.running: dict[Any, tuple[Task, Any]] = {}
        self.begun = set[Any]()  # those of them that have a process
        self.waiting = deque[Task]()
        self.idle = list[Any]()
        self.starting = dict[Any, Any]()  # workers without a process so far, by what says that they have one
        self.lost_starts = 0  # in a row
        for _ in range(self.pool.workers if self.pool else 0):
            self._start_worker()

    def _start_worker(self) -> None:
        assert self.pool is not None
        options = {"num_cpus": self.pool.cpus, "num_gpus": self.pool.gpus}
        worker = _Worker.options(**options).remote(self.work, self.records)  # type: ignore[attr-defined]
        self.starting[worker.begin.remote()] = worker

    @property
    def num_waiting(self) -> int:
        """How many tasks, or processes of a pool, Ray has not started yet."""
        return len(self.running) - len(self.begun) + len(self.starting)

    def submit(self, task: Task) -> None:
        self.waiting.append(task)
        self._hand_out()

    def _hand_out(self) -> None:
        while self.waiting and (self.pool is None or self.idle):
            task = self.waiting.popleft()
            if self.pool is None:
                self.running[self.perform.remote(self.work, self.records, task)] = task, None
            else:
                worker = self.idle.pop()
                answer = worker.perform.remote(task)
                self.running[answer] = task, worker
                self.begun.add(answer)

    def wait(self) -> tuple[Task, Any] | None:
        """Return a task that has ended, with its result or how its worker died; None: none within a second."""
        ready, _ = ray.wait([*self.running, *self.starting], timeout=1.0)
        if not ready:
            return None
        answer: Any = ready[0]
        if self.pool is not None and answer in self.starting:
            self._take_worker(self.pool, answer)
            return None
        reference = next(answer) if self.pool is None else answer
        try:
            found = ray.get(reference)
        except exceptions.RayTaskError as error:
            raise find_user_error(error) or error from None
        except _DEATHS as error:
            found = error
        if found is None:  # a task without a pool has begun
            self.begun.add(answer)
            return None
        self.begun.discard(answer)
        task, worker = self.running.pop(answer)
        if worker is not None and isinstance(found, Exception):
            ray.kill(worker)  # it may be there, and not be heard
            self._start_worker()
        elif worker is not None:
            self.idle.append(worker)
        self._hand_out()
        return task, found

    def _take_worker(self, pool: Pool, answer: Any) -> None:
        """Give a worker that has a process its first task; another one is started for one that has died before."""
        worker = self.starting.pop(answer)
        try:
            ray.get(answer)
        except _DEATHS as error:
            self.lost_starts += 1
            if self.lost_starts > MOST_DEATHS * pool.workers:
                reason = " ".join(str(error).split())
                raise RunError(
                    f"{self.lost_starts} processes died before they had begun, and none has begun ({reason}); see what "
                    "is wrong with the nodes, and the same command goes on."
                ) from error
            self._start_worker()
        else:
            self.lost_starts = 0
            self.idle.append(worker)
            self._hand_out()

    def end(self) -> None:
        """End what is still running."""
        for answer, (_, worker) in self.running.items():
            with contextlib.suppress(exceptions.RayError, ValueError):
                ray.kill(worker) if worker is not None else ray.cancel(answer, force=True)
        for worker in (*self.idle, *self.starting.values()):
            ray.kill(worker)
        ends = [reference.completed() if self.pool is None else reference for reference in self.running]
        if ends:
            ray.wait(ends, num_returns=len(ends), timeout=END_SECONDS)


def _do_task(work: Function, records: Records | None, task: Task) -> tuple[Result, bool, str]:
    """Return a task's result, whether it was there before, and what was wrong with the one that was."""
    if records is None:
        return work(task.item), False, ""
    result, fault = records.read(task.number, task.key)
    if result is not None:
        return result, True, fault
    try:
        result = work(task.item)
        records.write(task.number, result, task.key)
    except OSError as error:  # of writing: what goes wrong with reading is the input's mistake
        raise find_storage_error(error, error.filename or records.place) or error from error
    return result, False, fault


@ray.remote(max_retries=0, scheduling_strategy="SPREAD", num_returns="streaming")  # `run_tasks` itself tries again
def _perform(work: Function, records: Records | None, task: Task) -> Iterator[tuple[Result, bool, str] | None]:
    yield None  # it has begun
    yield _do_task(work, records, task)


@ray.remote(max_restarts=0)
class _Worker:
    """A process of a pool."""

    def __init__(self, pool: Pool, records: Records | None) -> None:
        self.pool, self.records = pool, records
        self.function: Function | None = None

    def begin(self) -> None:
        """Say that there is a process."""

    def perform(self, task: Task) -> tuple[Result, bool, str]:
        self.function = self.function or self.pool.make()  # here, where an error comes back as what it is
        return _do_task(self.function, self.records, task)


class _Progress:
    """How much is done, how fast, how long still."""

    def __init__(self, verb: str, total: float, unit: str, before: float) -> None:
        self.verb, self.total, self.unit = verb, total, unit
        self.before, self.now, self.num_kept = before, 0.0, 0
        self.line = StatusLine(is_due=False)
        if before:
            self.line.keep(f"{verb}: {before:,.0f} of {total:,.0f} {unit} were done before")

    def advance(self, size: float, *, is_kept: bool) -> None:
        """Count a task; one that had its record says nothing of how fast this goes."""
        self.before, self.now = self.before + size * is_kept, self.now + size * (not is_kept)
        self.num_kept += is_kept
        done, rate = self.before + self.now, self.now / self.line.seconds
        left = f", {format_seconds((self.total - done) / rate)} left" if self.now else ""
        shown = f"{self.verb}: {done:,.0f} of {self.total:,.0f} {self.unit}, {rate:,.1f} {self.unit}/s{left}"
        self.line.show(shown, done / (self.total or 1.0))

    def finish(self) -> None:
        if self.num_kept:
            self.line.keep(f"{self.verb}: {self.num_kept:,} parts were finished before")
        seconds = self.line.seconds
        rate = f"{self.now / seconds:,.1f} {self.unit}/s"
        self.line.keep(f"{self.verb}: {self.now:,.0f} {self.unit} in {format_seconds(seconds)}, {rate}", 1.0)
