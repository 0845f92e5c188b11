"""Which points a sweep tries next, in Ray Tune's terms: those that wait, then what Optuna suggests.

Enters: the trials that earlier starts have left, and the points of a searcher that knows them beforehand. Leaves: for
every trial its point, and the name of its directory. All that a sweep knows is in these directories, so that it goes on
with other options of --search, more trials, or in a folder that was moved.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import optuna
from ray.tune.search import Searcher

from domext_ray.config.sweep import OBJECTIVES, SearchConfig
from domext_ray.search.results import TrialResult
from domext_ray.search.space import Point, Space


@dataclass(frozen=True)
class NamedPoint:
    """A point to try, and its directory's name."""

    name: str
    point: Point


def list_waiting(
    points: Sequence[Point], begun: Sequence[TrialResult], ended: Sequence[TrialResult]
) -> list[NamedPoint]:
    """Return the points that are still to be tried, those that were begun under the name that they have.

    Args:
        points: all points of a sweep; none: those that were begun.
        begun: all trials that there are.
        ended: those of them that need no more.
    """
    names = {json.dumps(each.point): each.id for each in begun}
    done = {json.dumps(each.point) for each in ended}
    if not points:
        ids = {each.id for each in ended}
        return [NamedPoint(each.id, each.point) for each in begun if each.id not in ids]
    waiting = []
    for point in points:
        key = json.dumps(point)
        if key not in done:
            waiting.append(NamedPoint(names.get(key) or name_trial(len(names), point), point))
            names.setdefault(key, waiting[-1].name)
    return waiting


def name_trial(number: int, point: Point) -> str:
    """Return the name of a new trial's directory.

    Args:
        number: of the trials before it.
        point: its point.
    """
    return f"{number:05d}_{hashlib.sha256(json.dumps(point).encode()).hexdigest()[:8]}"


class PointSearcher(Searcher):
    """Gives Ray Tune one point after another.

    Args:
        waiting: points that come first.
        study: suggests the others and is told what each scored; None: there are no others.
        space: what the study suggests from.
        num_begun: trials that there are already.
        objectives: what the study searches for.
    """

    def __init__(
        self,
        waiting: Sequence[NamedPoint],
        study: optuna.Study | None,
        space: Space,
        num_begun: int,
        objectives: Sequence[str],
    ) -> None:
        super().__init__()
        self._waiting, self._study, self._space = list(waiting), study, space
        self._num_begun, self._objectives = num_begun, tuple(objectives)
        self._asked: dict[str, optuna.Trial] = {}
        if study is not None:
            for each in waiting:
                study.enqueue_trial(each.point)

    def suggest(self, trial_id: str) -> dict[str, Any] | None:
        """Return the next trial's configuration; it is never asked for more than there are."""
        named = self._waiting.pop(0) if self._waiting else None
        if self._study is not None:
            self._asked[trial_id] = asked = self._study.ask()
            point = self._space.walk(lambda dimension: dimension.suggest(asked))
            if named is None:
                named = NamedPoint(name_trial(self._num_begun, point), point)
                self._num_begun += 1
        return {"name": named.name, "point": named.point} if named else None

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """Tell the study what a trial scored."""
        asked = self._asked.pop(trial_id, None)
        if asked is None or self._study is None:
            return
        values = [float((result or {}).get(name, math.nan)) for name in self._objectives]
        if error or any(map(math.isnan, values)):
            self._study.tell(asked, state=optuna.trial.TrialState.FAIL)
        else:
            self._study.tell(asked, values)

    def save(self, checkpoint_path: str) -> None:
        """Keep nothing: the trials' directories have all."""

    def restore(self, checkpoint_path: str) -> None:
        """Take nothing: see `save`."""


def make_study(search: SearchConfig, space: Space, ended: Sequence[TrialResult]) -> optuna.Study:
    """Return Optuna's study of a space, TPE or, for several objectives, NSGA-II, that knows the trials that ended.

    Args:
        search: how the space is searched.
        space: the space.
        ended: earlier trials.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    names = search.objectives
    seed = search.seed + len(ended)  # a sampler that goes on must not draw its first points again
    make_sampler: Any = optuna.samplers.TPESampler if len(names) == 1 else optuna.samplers.NSGAIISampler
    directions: Any = ["maximize" if OBJECTIVES[name] == "max" else "minimize" for name in names]
    study = optuna.create_study(directions=directions, sampler=make_sampler(seed=seed))
    for each in ended:
        values = [each.get(name) for name in names]
        is_scored = not any(map(math.isnan, values))
        fixed = optuna.trial.FixedTrial(each.point)
        space(fixed)
        study.add_trial(
            optuna.trial.create_trial(
                state=optuna.trial.TrialState.COMPLETE if is_scored else optuna.trial.TrialState.FAIL,
                values=values if is_scored else None,
                params=fixed.params,
                distributions=fixed.distributions,
            )
        )
    return study
