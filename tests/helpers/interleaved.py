"""Threads that take turns: every order in which they can ask a storage, one after another."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

from obstore.store import MemoryStore

LIMIT_SECONDS = 30.0


class Schedule:
    """One order: at every question to the storage it is settled which thread goes on."""

    def __init__(self, chosen: list[int]) -> None:
        self.chosen = chosen  # of each turn, which of those that could; beyond its end the first one
        self.options: list[int] = []  # how many could
        self.errors: dict[str, Exception] = {}
        self._gates: dict[threading.Thread, threading.Semaphore] = {}
        self._waits_for: dict[threading.Thread, Lock] = {}
        self._ended: set[threading.Thread] = set()
        self._back = threading.Semaphore(0)

    def run(self, **works: Callable[[], object]) -> None:
        """Run threads by their names until all have ended; `errors` has what they raised."""
        for name, work in works.items():
            thread = threading.Thread(target=self._work, args=(name, work), daemon=True)
            self._gates[thread] = threading.Semaphore(0)
            thread.start()
        while living := [worker for worker in self._gates if worker.is_alive()]:
            able = [
                worker for worker in living if worker not in self._waits_for or self._waits_for[worker].owner is None
            ]
            assert able, "they wait for each other"
            turn = len(self.options)
            self.options.append(len(able))
            thread = able[self.chosen[turn] if turn < len(self.chosen) else 0]
            self._gates[thread].release()
            assert self._back.acquire(timeout=LIMIT_SECONDS)
            if thread in self._ended:
                thread.join()

    def _work(self, name: str, work: Callable[[], object]) -> None:
        me = threading.current_thread()
        assert self._gates[me].acquire(timeout=LIMIT_SECONDS)
        try:
            work()
        except Exception as error:
            self.errors[name] = error
        self._ended.add(me)
        self._back.release()

    def pause(self) -> None:
        """Let another thread go on, or this one; nothing, in a thread that is none of the schedule's."""
        if (gate := self._gates.get(threading.current_thread())) is not None:
            self._back.release()
            assert gate.acquire(timeout=LIMIT_SECONDS)

    def wait_for(self, lock: Lock) -> None:
        me = threading.current_thread()
        self._waits_for[me] = lock
        self.pause()
        del self._waits_for[me]


class Lock:
    """A lock that a thread may take again, in whose place another thread goes on."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.owner: threading.Thread | None = None
        self.depth = 0

    def __enter__(self) -> None:
        while self.owner not in (None, threading.current_thread()):
            self.schedule.wait_for(self)
        self.owner, self.depth = threading.current_thread(), self.depth + 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1
        self.owner = self.owner if self.depth else None


class PausingStore:
    """A store that lets another thread go on before each question."""

    def __init__(self, schedule: Schedule) -> None:
        self.store, self.schedule = MemoryStore(), schedule

    def __getattr__(self, name: str) -> Any:
        ask = getattr(self.store, name)

        def asked(*args: Any, **settings: Any) -> Any:
            self.schedule.pause()
            return ask(*args, **settings)

        return asked


def list_schedules() -> Iterator[Schedule]:
    """Yield a schedule for every order that there is; each is to be run before the next one is asked for."""
    chosen: list[int] | None = []
    while chosen is not None:
        schedule = Schedule(chosen)
        yield schedule
        taken = [*chosen, *[0] * (len(schedule.options) - len(chosen))]
        open_turns = [turn for turn, number in enumerate(schedule.options) if taken[turn] + 1 < number]
        chosen = [*taken[: open_turns[-1]], taken[open_turns[-1]] + 1] if open_turns else None
