"""What looks on while a sweep's trials run: Optuna, the terminal and trackers."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

from domext_ray.config.sweep import OBJECTIVES
from domext_ray.runtime.trials import Outcome, Watch
from domext_ray.storage import Place
from domext_ray.studies.sweep.searcher import Search
from domext_ray.studies.sweep.space import describe_point
from domext_ray.training.tracking import CLOSE, CLOSE_SECONDS, Tracked, Tracking

TUNE = "tune"
"""Folder of what trackers keep, a folder a trial."""


class SweepWatch(Watch):
    """Says what every trial scored and how long the others will take, and hands scores on.

    To trackers each trial is a run, whose steps are the resources of its rungs.
    """

    def __init__(self, folder: Place, search: Search, trackers: Sequence[str]) -> None:
        super().__init__(search.number, search.num_ended)
        self.folder, self.search, self.trackers = folder, search, list(trackers)
        self.begun: dict[str, Tracking] = {}

    def begin(self, outcome: Outcome) -> None:
        """Begin a trial, or go on with it."""
        self.search.begin(outcome)
        name = outcome.name
        tracked = Tracked(self.folder / TUNE / name, self.folder, outcome.config)
        self.begun[name] = Tracking(self.trackers, tracked, self._list_scores(outcome), self._leave)

    def step(self, outcome: Outcome) -> bool:
        """Hand on what a rung has scored; return whether its trial is to be stopped."""
        self.begun[outcome.name].write(self._list_scores(outcome)[-1])
        return self.search.judge(outcome)

    def end(self, outcome: Outcome) -> None:
        """Say what a trial scored, or why it failed."""
        self.search.end(outcome)
        self.begun[outcome.name].write(CLOSE)
        objectives, last = self.search.search.objectives, outcome.steps[-1] if outcome.steps else {}
        figures = ", ".join(f"{name} {last[name]:.4g}" for name in objectives if last.get(name) is not None)
        resource = self._list_scores(outcome)[-1]["step"] if outcome.steps else 0
        self.line.keep(
            f"[{self.num_ended} of {self.number}] {describe_point(outcome.config)}: "
            f"{outcome.failure or figures} (resource {resource}, {outcome.seconds:.0f} s; {self.describe_left()})",
            self.num_ended / self.number,
        )

    def close(self) -> None:
        """Wait for what trackers have not taken yet, but not for long."""
        until = time.monotonic() + CLOSE_SECONDS
        for tracking in self.begun.values():
            tracking.close(until)

    def _list_scores(self, outcome: Outcome) -> list[dict[str, Any]]:
        reduction = self.search.search.reduction
        return [
            {"step": reduction**i, **{name: step[name] for name in OBJECTIVES if name in step}}
            for i, step in enumerate(outcome.steps)
        ]

    def _leave(self, tracker: str, sentence: str) -> None:
        if tracker in self.trackers:  # it is told once, and trials to come do without
            self.trackers.remove(tracker)
            print(sentence, file=sys.stderr, flush=True)
