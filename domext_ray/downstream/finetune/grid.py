"""The trainings of a grid: which there are, what each reached or why it failed, and which point is chosen.

Enters: a run's folder of trainings. Leaves: the chosen point with its restarts. A training is known by its own rate,
batch size, epochs and seed, so a grid that grows or shrinks keeps what has ended. BERT section A.3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from domext_ray.config.finetune import FinetuneConfig
from domext_ray.downstream.finetune.finetuned import read_result, result_path
from domext_ray.downstream.finetune.training import Point
from domext_ray.files import Kind, read_json
from domext_ray.storage import write_json

Record: TypeAlias = dict[str, Any]
"""What a training left: its "point", and "dev" with all else that it reached, or the "reason" of its failure."""

_FAILURE: dict[str, Kind] = {"point": dict, "reason": str, "may_try_again": bool}
_REMEDY = "delete it: the same command trains this point of the grid again"


@dataclass(frozen=True)
class GridResults:
    """What the trainings of a grid left, in the grid's order.

    Args:
        ended: records of those that have a figure on dev.
        failed: records of those that could not be trained.
    """

    ended: list[Record]
    failed: list[Record]


def list_points(config: FinetuneConfig) -> list[Point]:
    """Return every training of a run: points of the grid with their restarts."""
    return [
        Point(lr, batch_size, epochs, config.seed + restart)
        for lr, batch_size, epochs in config.grid.points
        for restart in range(config.grid.restarts)
    ]


def record_failure(trainings: Path, point: Point, reason: str, *, may_try_again: bool) -> None:
    """Keep why a training failed.

    Args:
        trainings: the run's folder of trainings.
        point: the training.
        reason: a sentence.
        may_try_again: what failed was the machine, so that the next start tries it again.
    """
    record = {"point": asdict(point), "reason": reason, "may_try_again": may_try_again}
    write_json(_failure_path(trainings, point), record)


def forget_failures(trainings: Path, points: Sequence[Point]) -> None:
    """Drop the failures that the next start tries again."""
    for record in read_results(trainings, points).failed:
        if record["may_try_again"]:
            _failure_path(trainings, Point(**record["point"])).unlink()


def has_ended(trainings: Path, point: Point) -> bool:
    """Whether a training has left its figures, or the reason why it has none."""
    return result_path(trainings, point).exists() or _failure_path(trainings, point).exists()


def read_results(trainings: Path, points: Sequence[Point]) -> GridResults:
    """Read the trainings of a grid that have left something.

    Raises:
        RunError: a record is damaged.
    """
    results = GridResults([], [])
    for point in points:
        if result_path(trainings, point).exists():
            results.ended.append(read_result(trainings, point))
        elif _failure_path(trainings, point).exists():
            results.failed.append(read_json(_failure_path(trainings, point), _REMEDY, _FAILURE))
    return results


def choose_point(results: GridResults) -> tuple[Record, list[Record]]:
    """Return the best restart of the chosen point, and all restarts of it that have ended; one has.

    The point with the highest mean on dev over its restarts is chosen, of equal ones the earliest. One of whose
    restarts failed is chosen only where there is no other.
    """
    failed = {_name_point(each) for each in results.failed}
    by_point: dict[tuple[Any, ...], list[Record]] = {}
    for each in results.ended:
        by_point.setdefault(_name_point(each), []).append(each)
    whole = {name: own for name, own in by_point.items() if name not in failed} or by_point
    chosen = max(whole.values(), key=lambda own: np.mean([each["dev"] for each in own]))
    return max(chosen, key=lambda each: each["dev"]), chosen


def list_overtaken(trainings: Path, points: Sequence[Point]) -> list[Point]:
    """Return the trainings that cannot be chosen any more: another point, all of whose restarts ended, is better."""
    waiting = {_name_point({"point": asdict(each)}) for each in points if not has_ended(trainings, each)}
    results = read_results(trainings, points)
    whole = GridResults(*([each for each in own if _name_point(each) not in waiting] for own in _parts(results)))
    if not whole.ended:
        return []
    best, _ = choose_point(whole)
    return [Point(**each["point"]) for each in whole.ended if _name_point(each) != _name_point(best)]


def _parts(results: GridResults) -> tuple[list[Record], list[Record]]:
    return results.ended, results.failed


def _name_point(record: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what a training shares with its restarts."""
    return tuple(value for name, value in record["point"].items() if name != "seed")


def _failure_path(trainings: Path, point: Point) -> Path:
    return trainings / f"{point.key}.failed.json"
