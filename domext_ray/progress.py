"""How long work shows how far it is: one line on standard error.

On a terminal the line is rewritten in place; elsewhere, in a log, a plain line appears every ten seconds.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable

TERMINAL_SECONDS = 0.5
PLAIN_SECONDS = 10.0
PATIENCE_SECONDS = 30.0


class StatusLine:
    """A line that says how far some work is.

    Args:
        is_due: the first line may be shown at once; else after the usual time.
    """

    def __init__(self, *, is_due: bool = True) -> None:
        self.is_terminal = sys.stderr.isatty()
        self.started = time.monotonic()
        self._shown = -PLAIN_SECONDS if is_due else self.started

    @property
    def seconds(self) -> float:
        """Seconds since the work began, above 0."""
        return max(time.monotonic() - self.started, 1e-9)

    @property
    def is_due(self) -> bool:
        """Whether it is time for another line: making one up may cost something."""
        return time.monotonic() - self._shown >= (TERMINAL_SECONDS if self.is_terminal else PLAIN_SECONDS)

    def show(self, text: str) -> None:
        """Show a line, if it is time for one."""
        if self.is_due:
            self._shown = time.monotonic()
            self._print(text, "" if self.is_terminal else "\n")

    def keep(self, text: str) -> None:
        """Show a line that stays, whatever the time."""
        self._print(text, "\n")

    def end(self) -> None:
        """Leave the line that was shown last on the terminal."""
        if self.is_terminal:
            self._write("\n")

    def _print(self, text: str, end: str) -> None:
        start = "\r\033[K" if self.is_terminal else ""
        self._write(f"{start}{text}{end}")

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError):  # a terminal that has closed is no reason for the work to end
            print(text, end="", file=sys.stderr, flush=True)


class StallTimer:
    """Says when nothing has moved for so long that a user wants to know why: after 30 s, then after twice as long."""

    def __init__(self) -> None:
        self.note_move()

    @property
    def seconds(self) -> float:
        """Seconds since something moved."""
        return time.monotonic() - self._moved

    def note_move(self) -> None:
        """Something has moved."""
        self._moved, self._limit = time.monotonic(), PATIENCE_SECONDS

    def is_over(self) -> bool:
        """Return True once for every limit that is passed."""
        if self.seconds < self._limit:
            return False
        self._limit *= 2
        return True


class Watch:
    """A thread that says what is waited for when nothing has moved for a while.

    Args:
        work: what is being done, such as "preparing".
        describe_waiting: says what Ray cannot place; empty: nothing.
    """

    def __init__(self, work: str, describe_waiting: Callable[[], str]) -> None:
        self.work, self.describe_waiting = work, describe_waiting
        self.patience, self.line, self.ended = StallTimer(), StatusLine(), threading.Event()
        self.thread = threading.Thread(target=self._watch, name="watch", daemon=True)

    def __enter__(self) -> Watch:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.thread.join(timeout=5)

    def _watch(self) -> None:
        while not self.ended.wait(1.0):
            if self.patience.is_over():
                self.line.keep(describe_stillness(self.work, self.patience.seconds, self.describe_waiting()))


def describe_stillness(work: str, seconds: float, waiting: str) -> str:
    """Return what a user reads when nothing has moved for a while."""
    return f"{work}: nothing has moved for {seconds:,.0f} s{f' ({waiting})' if waiting else ''}; Ctrl-C stops."


def format_seconds(seconds: float) -> str:
    """Return a duration as M:SS or H:MM:SS."""
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}" if minutes >= 60 else f"{minutes}:{rest:02d}"
