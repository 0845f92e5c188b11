"""What the ranks of a run tell each other: what their step has together, and that they are to end.

One rank hears that its machine is going, or the driver asks rank 0, and all must save at the same step. So what one of
them knows is added up with what a step counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from domext_ray.training.notices import ASKED, LIMIT, TAKEN, TOLD, EndAsked, Notices

ASK_SECONDS = 5.0
"""Between two questions that all ranks ask at once."""


class Ranks:
    """The ranks of a run, as one of them hears them; every method is collective.

    What they add up are tensors of the CPU: ranks talk while their GPUs are at the step before. `sum_over_ranks`
    replaces a tensor by its sum. `is_asked` says whether the driver has asked for the end; rank 0 alone is told.
    """

    def __init__(
        self,
        rank: int,
        sum_over_ranks: Callable[[Tensor], None],
        notices: Notices,
        is_asked: Callable[[], bool] = lambda: False,
    ) -> None:
        self.rank, self.notices, self._sum, self._is_asked = rank, notices, sum_over_ranks, is_asked
        self._ask_due = 0.0
        self.end = ""
        """Why all of them save and end; empty: they go on."""

    def add_up(self, *figures: float) -> list[float]:
        """Add figures up over the ranks, and hear whether one of them was asked or told to end."""
        notices = self.notices
        here = [
            self._is_asked(),
            notices.is_told(),
            self.rank == 0 and notices.is_taken is not None and time.monotonic() >= self._ask_due,
            *figures,
        ]
        sums = torch.tensor(here, dtype=torch.float64)
        self._sum(sums)
        asked, told, asks, *totals = sums.tolist()
        taken = False
        if asks and notices.is_taken is not None:
            taken, self._ask_due = notices.is_taken(), time.monotonic() + ASK_SECONDS
        self.end = self.end or (ASKED if asked else TOLD if told else TAKEN if taken else "")
        return totals

    def listen(self, *figures: float) -> list[float]:
        """Break an evaluation off (EndAsked) where a rank has heard that all are to end, or add up figures."""
        totals = self.add_up(*figures)
        if self.end not in ("", LIMIT):  # a run that has reached it may be asked for more figures
            raise EndAsked
        return totals
