"""The trainings of a grid: which there are, what each reached or why it failed, and which point is chosen.

Enters: what the trainings left. Leaves: the chosen point with its restarts. A training is known by its own rate, batch
size, epochs and seed, so a grid that grows or shrinks keeps what has ended. BERT section A.3.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import numpy as np

from domext_ray.config.finetune import FinetuneConfig
from domext_ray.downstream.finetune.training import Point
from domext_ray.runtime.trials import Outcome

Record: TypeAlias = dict[str, Any]
"""What a training left: its "point", and "dev" with all else that it reached, or the "reason" of its failure."""


@dataclass(frozen=True)
class GridResults:
    """What the trainings of a grid left, in the grid's order."""

    ended: list[Record]  # those that have a figure on dev
    failed: list[Record]  # those that could not be trained


def list_points(config: FinetuneConfig) -> list[Point]:
    """Return every training of a run: points of the grid with their restarts."""
    return [
        Point(lr, batch_size, epochs, config.seed + restart)
        for lr, batch_size, epochs in config.grid.points
        for restart in range(config.grid.restarts)
    ]


def gather_results(outcomes: Iterable[Outcome]) -> GridResults:
    """Return what trainings left."""
    results = GridResults([], [])
    for outcome in outcomes:
        if outcome.status == "complete":
            results.ended.append({"point": outcome.trial.config, **outcome.steps[0]})
        elif outcome.status:
            failure = {"reason": outcome.failure, "may_try_again": outcome.may_try_again}
            results.failed.append({"point": outcome.trial.config, **failure})
    return results


def choose_point(results: GridResults) -> tuple[Record, list[Record]]:
    """Return the best restart of the chosen point, and all restarts of it that have ended; one has.

    The point with the highest mean on dev over its restarts is chosen, of equal ones the earliest. One of whose
    restarts failed is chosen only where there is no other.
    """
    failed = {_name_point(record) for record in results.failed}
    by_point: dict[tuple[Any, ...], list[Record]] = {}
    for record in results.ended:
        by_point.setdefault(_name_point(record), []).append(record)
    whole = {name: own for name, own in by_point.items() if name not in failed} or by_point
    chosen = max(whole.values(), key=lambda own: np.mean([record["dev"] for record in own]))
    return max(chosen, key=lambda record: record["dev"]), chosen


def list_overtaken(results: GridResults, waiting: Sequence[Point]) -> list[Point]:
    """Return the trainings that cannot be chosen any more: another point, all of whose restarts ended, is better."""
    open_points = {_name_point({"point": asdict(point)}) for point in waiting}
    ended, failed = (
        [record for record in own if _name_point(record) not in open_points] for own in (results.ended, results.failed)
    )
    if not ended:
        return []
    best, _ = choose_point(GridResults(ended, failed))
    return [Point(**record["point"]) for record in ended if _name_point(record) != _name_point(best)]


def _name_point(record: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what a training shares with its restarts."""
    return tuple(value for name, value in record["point"].items() if name != "seed")
