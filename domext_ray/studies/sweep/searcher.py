"""What is tried next, and what is stopped: a sweep's points in order, or those that Optuna suggests.

Enters: the space, and what earlier starts have left. Leaves: trials, and for every rung whether its trial is stopped.
All that a sweep knows is in its trials' records, so that it goes on with other options of --search, more trials, or in
a folder that was moved.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

import optuna
from optuna.trial import TrialState

from domext_ray.config.sweep import OBJECTIVES, SearchConfig
from domext_ray.runtime.trials import Outcome, Trial
from domext_ray.storage import hash_text
from domext_ray.studies.sweep.space import Point, Space, make_study


class Search:
    """An Optuna study (TPE or, for several objectives, NSGA-II; ASHA) that is told of every trial, whoever chose it.

    `points` are all of a searcher that knows them beforehand; empty: Optuna suggests them. `begun` is what trials have
    left before.
    """

    def __init__(self, search: SearchConfig, space: Space, points: Sequence[Point], begun: Sequence[Outcome]) -> None:
        self.search, self.space, self.points, self.begun = search, space, points, begun
        ended = [outcome for outcome in begun if outcome.has_ended]
        self.number, self.num_ended = count_trials(search, points, begun)
        seed = search.seed + len(ended)  # a sampler that goes on must not draw its first points again
        is_one = len(search.objectives) == 1
        sampler: Any = optuna.samplers.TPESampler if is_one else optuna.samplers.NSGAIISampler
        asha = optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=search.reduction)
        self.study = make_study(
            sampler(seed=seed),
            directions=[f"{OBJECTIVES[name]}imize" for name in search.objectives],
            pruner=asha if search.scheduler == "asha" else optuna.pruners.NopPruner(),
        )
        self.asked: dict[str, optuna.Trial] = {}
        for outcome in ended:
            self.begin(outcome)
            self.end(outcome)

    def list_trials(self) -> Iterator[Trial]:
        """Return the trials that have not ended, those that were begun under the name that they have."""
        begun = {json.dumps(outcome.config): outcome.trial for outcome in self.begun}
        for point in self.points:
            trial = begun.setdefault(json.dumps(point), Trial(name_trial(len(begun), point), point))
            yield trial
        left = 0 if self.points else self.number - self.num_ended
        waiting = [outcome.trial for outcome in self.begun if not outcome.has_ended][:left]
        yield from waiting if not self.points else ()
        for number in range(len(self.begun), len(self.begun) + left - len(waiting)):
            asked = self.study.ask()
            trial = Trial(name_trial(number, point := self.space.suggest(asked)), point)
            self.asked[trial.name] = asked
            yield trial

    def begin(self, outcome: Outcome) -> None:
        """Take a trial with what it has scored."""
        if outcome.name not in self.asked:
            self.study.enqueue_trial(outcome.config)
            self.asked[outcome.name] = asked = self.study.ask()
            self.space.suggest(asked)
        for i in range(len(outcome.steps)):
            self.judge(Outcome(outcome.trial, outcome.steps[: i + 1]))

    def judge(self, outcome: Outcome) -> bool:
        """Take a trial's newest rung; return whether the trial is to be stopped."""
        asked, rung = self.asked[outcome.name], len(outcome.steps) - 1
        if len(self.search.objectives) > 1 or rung + 1 == self.search.rungs:  # Optuna prunes for one objective
            return False
        asked.report(self._read(outcome)[0], self.search.reduction**rung)
        return asked.should_prune()

    def end(self, outcome: Outcome) -> None:
        """Take what a trial has reached, failed with, or was stopped at."""
        asked, values = self.asked.pop(outcome.name), self._read(outcome)
        if outcome.status == "failed" or any(map(math.isnan, values)):
            self.study.tell(asked, state=TrialState.FAIL)
        elif outcome.status == "pruned":
            self.study.tell(asked, state=TrialState.PRUNED)
        else:
            self.study.tell(asked, values)

    def _read(self, outcome: Outcome) -> list[float]:
        return [outcome.get(name) for name in self.search.objectives]


def count_trials(search: SearchConfig, points: Sequence[Point], begun: Sequence[Outcome]) -> tuple[int, int]:
    """Return the trials of a sweep, and those of them that have ended; see `Search`."""
    ended = [json.dumps(outcome.config) for outcome in begun if outcome.has_ended]
    if not points:
        return max(search.trials, len(ended)), len(ended)
    return len(points), sum(json.dumps(point) in ended for point in points)


def name_trial(number: int, point: Point) -> str:
    """Return the name of a new trial, given the number of those before it."""
    return f"{number:05d}_{hash_text(json.dumps(point))[:8]}"
