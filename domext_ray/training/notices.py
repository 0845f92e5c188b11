"""What tells a rank that its machine is going: SIGTERM to its process, or Ray, to which nodes say so; without torch."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType

LIMIT, ASKED, TOLD, TAKEN = "limit", "asked", "told", "taken"
"""Why ranks end: the run's limit, its driver asked, a rank was sent SIGTERM, a machine is taken back."""


@dataclass(frozen=True)
class Notices:
    """Where a rank hears of it."""

    is_told: Callable[[], bool] = lambda: False
    """Whether its own process was told to end."""
    is_taken: Callable[[], bool] | None = None
    """Whether a machine of the ranks' is taken back; all ranks ask at the same step. None: nobody could tell."""


class EndAsked(Exception):
    """An evaluation is broken off on all ranks, because one of them has heard that they are to end."""


_TOLD, _HAS_ENDED = threading.Event(), threading.Event()


def heed_sigterm() -> None:
    """Note the first SIGTERM to this process instead of ending by it; called in the main thread."""
    before = signal.getsignal(signal.SIGTERM)

    def note(number: int, frame: FrameType | None) -> None:
        is_first = not _TOLD.is_set()
        _TOLD.set()
        if callable(before) and (_HAS_ENDED.is_set() or not is_first):
            before(number, frame)

    signal.signal(signal.SIGTERM, note)


def is_told() -> bool:
    """Whether SIGTERM was noted (`heed_sigterm`)."""
    return _TOLD.is_set()


def end_heeding() -> None:
    """From now on a SIGTERM ends the process as it did before."""
    _HAS_ENDED.set()
