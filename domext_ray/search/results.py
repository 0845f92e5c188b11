"""What a sweep's trials left -> a leaderboard, the front of several objectives, and what mattered.

Enters: the trials' directories. Leaves: frozen records for the report and summary.json. Nothing is unpickled.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from domext_ray.config.sweep import OBJECTIVES
from domext_ray.files import read_json
from domext_ray.intervals import Estimate
from domext_ray.report.compare import find_undominated
from domext_ray.search.space import Dimension, Point, Space
from domext_ray.search.trial import FAILURE, TRIAL_REMEDY, read_rungs

MIN_FOR_IMPORTANCE = 4
"""Trials below which no importance is estimated."""


@dataclass(frozen=True)
class TrialResult:
    """What one trial left.

    Args:
        id: name of its directory.
        point: its point.
        rungs: records of its scored rungs, in order.
        num_rungs: rungs of a trial that is not pruned.
        failure: why it could not be trained; empty: it could.
    """

    id: str
    point: Point
    rungs: tuple[dict[str, Any], ...]
    num_rungs: int
    failure: str = ""

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


def read_trials(folder: Path, num_rungs: int) -> list[TrialResult]:
    """Read the trials of a sweep, in the order of their names."""
    results = []
    for path in sorted(folder.glob("*/point.json")):
        failure = path.parent / FAILURE
        results.append(
            TrialResult(
                path.parent.name,
                read_json(path, TRIAL_REMEDY),
                tuple(read_rungs(path.parent)),
                num_rungs,
                failure.read_text(encoding="utf-8") if failure.exists() else "",
            )
        )
    return results


def rank_trials(trials: Sequence[TrialResult], objectives: Sequence[str]) -> list[TrialResult]:
    """Return the scored trials, those of the whole budget first, the best first by the first objective."""
    sign = -1.0 if OBJECTIVES[objectives[0]] == "max" else 1.0
    scored = [each for each in trials if not math.isnan(each.get(objectives[0]))]
    return sorted(scored, key=lambda each: (-len(each.rungs), sign * each.get(objectives[0]), each.id))


def find_front(trials: Sequence[TrialResult], objectives: Sequence[str]) -> list[TrialResult]:
    """Return the trials of the whole budget that no other one is better than in every objective (Pareto front)."""
    complete = [each for each in trials if each.status == "complete"]
    complete = [each for each in complete if not any(math.isnan(each.get(name)) for name in objectives)]
    signs = [1.0 if OBJECTIVES[name] == "max" else -1.0 for name in objectives]
    values = [[each.get(name) * sign for name, sign in zip(objectives, signs, strict=True)] for each in complete]
    return [complete[i] for i in find_undominated(values)]


def measure_importance(space: Space, trials: Sequence[TrialResult], objective: str) -> dict[str, float]:
    """Return each dimension's share of what the objective's variance over trials comes from (fANOVA).

    Optuna's estimate by random forests (Hutter, Hoos and Leyton-Brown 2014), at the last rung that half of the trials
    have reached. Dimensions with a condition are left out, and so is everything where trials are few or all alike.

    Args:
        space: the space.
        trials: all trials.
        objective: what was searched for.
    """
    reached = sorted(len(each.rungs) for each in trials if each.rungs)
    rung = reached[len(reached) // 2] - 1 if reached else 0
    scored = [each for each in trials if not math.isnan(each.get(objective, rung))]
    dimensions = [each for each in space.dimensions if not each.condition]
    varied = [each for each in dimensions if len({repr(trial.point[each.name]) for trial in scored}) > 1]
    if len(scored) < MIN_FOR_IMPORTANCE or not varied or len({each.get(objective, rung) for each in scored}) == 1:
        return {}
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(direction="maximize" if OBJECTIVES[objective] == "max" else "minimize")
    distributions = {each.name: _make_distribution(each) for each in varied}
    for trial in scored:
        params = {each.name: _to_param(each, trial.point[each.name]) for each in varied}
        study.add_trial(
            optuna.trial.create_trial(params=params, distributions=distributions, value=trial.get(objective, rung))
        )
    evaluator = optuna.importance.FanovaImportanceEvaluator(seed=0)
    return dict(optuna.importance.get_param_importances(study, evaluator=evaluator))


def _make_distribution(dimension: Dimension) -> Any:
    if dimension.kind == "choice":
        return CategoricalDistribution([_to_param(dimension, each) for each in dimension.choices])
    if dimension.kind in ("int", "log_int"):
        return IntDistribution(int(dimension.low), int(dimension.high), log=dimension.kind == "log_int")
    return FloatDistribution(dimension.low, dimension.high, log=dimension.kind == "log")


def _to_param(dimension: Dimension, value: Any) -> Any:
    is_plain = value is None or isinstance(value, (bool, int, float, str))
    return value if is_plain or dimension.kind != "choice" else json.dumps(value)
