"""What a sweep's trials left -> a leaderboard, the front of several objectives, and what mattered.

Enters: the records of the trials, whose configurations are points of the space and whose steps are rungs. Leaves: what
the report and summary.json say of them. Nothing is unpickled.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import optuna

from domext_ray.config.sweep import OBJECTIVES
from domext_ray.intervals import Estimate
from domext_ray.report.compare import find_undominated
from domext_ray.runtime.trials import Ledger, Outcome
from domext_ray.storage import Place
from domext_ray.studies.sweep.space import Space, make_study

TRIALS = "trials"
MIN_FOR_IMPORTANCE = 4
"""Trials below which no importance is estimated."""


def read_trials(folder: Place) -> list[Outcome]:
    """Read the trials of a sweep, in the order of their names; one that was left in the middle counts as pruned."""
    trials = Ledger(folder).list()
    return [replace(trial, status=trial.status or ("pruned" if trial.steps else "unfinished")) for trial in trials]


def estimate(trial: Outcome, objective: str) -> Estimate:
    """Return an objective at the last rung, with its interval where it has one."""
    bounds = trial.reached.get(f"{objective}_interval") or ()
    return Estimate(trial.get(objective), *bounds)


def rank_trials(trials: Sequence[Outcome], objectives: Sequence[str]) -> list[Outcome]:
    """Return the scored trials, those of the whole budget first, the best first by the first objective."""
    sign = -1.0 if OBJECTIVES[objectives[0]] == "max" else 1.0
    scored = [trial for trial in trials if not math.isnan(trial.get(objectives[0]))]
    return sorted(scored, key=lambda each: (-len(each.steps), sign * each.get(objectives[0]), each.name))


def find_front(trials: Sequence[Outcome], objectives: Sequence[str]) -> list[Outcome]:
    """Return the trials of the whole budget that no other one is better than in every objective (Pareto front)."""
    complete = [trial for trial in trials if trial.is_complete]
    complete = [trial for trial in complete if not any(math.isnan(trial.get(name)) for name in objectives)]
    signs = [1.0 if OBJECTIVES[name] == "max" else -1.0 for name in objectives]
    values = [[trial.get(name) * sign for name, sign in zip(objectives, signs, strict=True)] for trial in complete]
    return [complete[i] for i in find_undominated(values)]


def measure_importance(space: Space, trials: Sequence[Outcome], objective: str) -> dict[str, float]:
    """Return each dimension's share of what the objective's variance over trials comes from (fANOVA).

    Optuna's estimate by random forests (Hutter, Hoos and Leyton-Brown 2014), at the last rung that half of the trials
    have reached. Dimensions with a condition are left out, and so is everything where trials are few or all alike.
    """
    reached = sorted(len(trial.steps) for trial in trials if trial.steps)
    rung = reached[len(reached) // 2] - 1 if reached else 0
    scored = [trial for trial in trials if not math.isnan(trial.get(objective, rung))]
    dimensions = [dimension for dimension in space.dimensions if not dimension.condition]
    varied = [
        dimension for dimension in dimensions if len({repr(trial.config[dimension.name]) for trial in scored}) > 1
    ]
    if len(scored) < MIN_FOR_IMPORTANCE or not varied or len({trial.get(objective, rung) for trial in scored}) == 1:
        return {}
    study = make_study(None, direction=f"{OBJECTIVES[objective]}imize")
    for trial in scored:
        fixed = optuna.trial.FixedTrial(trial.config)
        space.suggest(fixed)
        study.add_trial(
            optuna.trial.create_trial(
                params=fixed.params, distributions=fixed.distributions, value=trial.get(objective, rung)
            )
        )
    evaluator, names = optuna.importance.FanovaImportanceEvaluator(seed=0), [dimension.name for dimension in varied]
    return dict(optuna.importance.get_param_importances(study, evaluator=evaluator, params=names))
