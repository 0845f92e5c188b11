"""What a sweep's trials left -> a leaderboard, the front of several objectives, and what mattered.

Enters: the trials' directories. Leaves: frozen records for the report and summary.json. Nothing is unpickled.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import optuna

from domext_ray.config.sweep import OBJECTIVES
from domext_ray.intervals import Estimate
from domext_ray.report.compare import find_undominated
from domext_ray.runtime.trials import Ledger
from domext_ray.search.space import Point, Space, make_study
from domext_ray.storage import Place

TRIALS = "trials"
MIN_FOR_IMPORTANCE = 4
"""Trials below which no importance is estimated."""


@dataclass(frozen=True)
class TrialResult:
    """What one trial left."""

    id: str  # name of its directory
    point: Point
    rungs: tuple[dict[str, Any], ...]  # records of its scored rungs, in order
    num_rungs: int  # of a trial that is not pruned
    failure: str = ""  # why it could not be trained; empty: it could

    @property
    def status(self) -> str:
        """Return complete, pruned, failed or unfinished."""
        if self.failure:
            return "failed"
        return "complete" if len(self.rungs) == self.num_rungs else "pruned" if self.rungs else "unfinished"

    def get(self, objective: str, rung: int = -1) -> float:
        """Return an objective at a rung, the last one of all by default; NaN where that was not scored."""
        is_scored = -len(self.rungs) <= rung < len(self.rungs)
        value = self.rungs[rung][objective] if is_scored else None
        return math.nan if value is None else float(value)

    def estimate(self, objective: str) -> Estimate:
        """Return an objective at the last rung, with its interval where it has one."""
        bounds = self.rungs[-1].get(f"{objective}_interval") or ()
        return Estimate(self.get(objective), *bounds)


def read_trials(folder: Place, num_rungs: int) -> list[TrialResult]:
    """Read the trials of a sweep, in the order of their names."""
    return [
        TrialResult(outcome.trial.name, outcome.trial.config, outcome.steps, num_rungs, outcome.failure)
        for outcome in Ledger(folder).list()
    ]


def rank_trials(trials: Sequence[TrialResult], objectives: Sequence[str]) -> list[TrialResult]:
    """Return the scored trials, those of the whole budget first, the best first by the first objective."""
    sign = -1.0 if OBJECTIVES[objectives[0]] == "max" else 1.0
    scored = [trial for trial in trials if not math.isnan(trial.get(objectives[0]))]
    return sorted(scored, key=lambda each: (-len(each.rungs), sign * each.get(objectives[0]), each.id))


def find_front(trials: Sequence[TrialResult], objectives: Sequence[str]) -> list[TrialResult]:
    """Return the trials of the whole budget that no other one is better than in every objective (Pareto front)."""
    complete = [trial for trial in trials if trial.status == "complete"]
    complete = [trial for trial in complete if not any(math.isnan(trial.get(name)) for name in objectives)]
    signs = [1.0 if OBJECTIVES[name] == "max" else -1.0 for name in objectives]
    values = [[trial.get(name) * sign for name, sign in zip(objectives, signs, strict=True)] for trial in complete]
    return [complete[i] for i in find_undominated(values)]


def measure_importance(space: Space, trials: Sequence[TrialResult], objective: str) -> dict[str, float]:
    """Return each dimension's share of what the objective's variance over trials comes from (fANOVA).

    Optuna's estimate by random forests (Hutter, Hoos and Leyton-Brown 2014), at the last rung that half of the trials
    have reached. Dimensions with a condition are left out, and so is everything where trials are few or all alike.
    """
    reached = sorted(len(trial.rungs) for trial in trials if trial.rungs)
    rung = reached[len(reached) // 2] - 1 if reached else 0
    scored = [trial for trial in trials if not math.isnan(trial.get(objective, rung))]
    dimensions = [dimension for dimension in space.dimensions if not dimension.condition]
    varied = [dimension for dimension in dimensions if len({repr(trial.point[dimension.name]) for trial in scored}) > 1]
    if len(scored) < MIN_FOR_IMPORTANCE or not varied or len({trial.get(objective, rung) for trial in scored}) == 1:
        return {}
    study = make_study(None, direction=f"{OBJECTIVES[objective]}imize")
    for trial in scored:
        fixed = optuna.trial.FixedTrial(trial.point)
        space.suggest(fixed)
        study.add_trial(
            optuna.trial.create_trial(
                params=fixed.params, distributions=fixed.distributions, value=trial.get(objective, rung)
            )
        )
    evaluator, names = optuna.importance.FanovaImportanceEvaluator(seed=0), [dimension.name for dimension in varied]
    return dict(optuna.importance.get_param_importances(study, evaluator=evaluator, params=names))
