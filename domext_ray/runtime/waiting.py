"""Work that does not move: what it waits for is said, and where Ray has no room for it, it ends after a while."""

from __future__ import annotations

import time
from collections.abc import Callable

from domext_ray.errors import RunError
from domext_ray.progress import StatusLine
from domext_ray.runtime.stopping import name_stop

PATIENCE_SECONDS = 30.0
WAIT_SECONDS = 600.0
"""How long work waits for room where nobody says otherwise, as the default of `--scale.wait` has it."""
START_SECONDS = 600.0
"""How long Ray may take to start a process that it has room for."""
_limit = WAIT_SECONDS


def set_limit(seconds: float) -> None:
    """Let this process's work wait so long for room from now on (`--scale.wait`)."""
    global _limit
    _limit = seconds


class StallTimer:
    """Says what work waits for when nothing has moved for 30 s, then for twice as long.

    `describe_waiting` says what Ray cannot place; empty: nothing.
    """

    def __init__(self, line: StatusLine, describe_waiting: Callable[[], str]) -> None:
        self._line, self._describe_waiting = line, describe_waiting
        self.note_move()

    def note_move(self) -> None:
        """Something has moved."""
        self._moved, self._limit = time.monotonic(), PATIENCE_SECONDS

    def look(self, work: str) -> None:
        """Say it, once for every limit that is passed; `work` is what is being done, such as "preparing"."""
        seconds = time.monotonic() - self._moved
        if seconds >= self._limit:
            self._limit *= 2
            waiting = f" ({said})" if (said := self._describe_waiting()) else ""
            cure = f"wait, or end the job with {name_stop()}: the same command goes on"
            self._line.keep(f"{work}: no news for {seconds:,.0f} s{waiting}; {cure}.")


class RoomTimer:
    """Ends work that has had no room on Ray for as long as a job may wait for it.

    `ask` says how many tasks and processes Ray cannot place, and a clause about them and what has the room. `seconds`
    None: as long as this process's work may.
    """

    def __init__(self, ask: Callable[[], tuple[int, str]], seconds: float | None = None) -> None:
        self._ask, self._seconds = ask, seconds
        self.note_work()

    def note_work(self) -> None:
        """Some of the work has a process."""
        self._worked = self._had_room = time.monotonic()

    def check(self, work: str, number: int = 1) -> None:
        """End work of which no part has a process, once it has waited long enough.

        `number` counts its parts: where Ray cannot place fewer, it starts a process for one, which takes a while.
        """
        limit, now = _limit if self._seconds is None else self._seconds, time.monotonic()
        num_waiting, said = self._ask()
        if num_waiting < number:
            self._had_room = now
        if now - self._had_room > limit:
            raise RunError(
                f"{work}: nothing of it runs after {limit:g} s (--scale.wait): {said}; end what has the room, add "
                "nodes, or wait longer, and the same command goes on."
            )
        if now - self._worked > limit + START_SECONDS:
            raise RunError(
                f"{work}: Ray has room, and has started no process within {now - self._worked:.0f} s; see what is "
                "wrong with its nodes, and the same command goes on."
            )
