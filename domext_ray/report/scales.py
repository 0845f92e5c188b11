"""What a run gained and lost with less of what its method added: figures over the scale, from 0, the base, to 1.

Enters: the evaluations of a run's start and end (`--train.eval_scales`). Leaves: a `ScaleCurve`, and the largest scale
at which general accuracy has hardly suffered, on straight lines between the scales that were measured.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from domext_ray.runs.losses import SCALE

MAX_LOST = 0.003
"""Share of general words that may be lost at the scale that is marked."""
BITS, GENERAL = "bits_per_character", "mlm_accuracy"
_KEY = re.compile(rf"eval/{SCALE}([0-9.]+)_domain_{BITS}")


@dataclass(frozen=True)
class ScaleCurve:
    """Figures over the scale of what a method adds.

    Args:
        scales: rising, from 0 to 1.
        gained: bits per character of held-out domain text below those at 0.
        lost: accuracy on general words below that at 0, a share.
    """

    scales: tuple[float, ...]
    gained: tuple[float, ...]
    lost: tuple[float, ...]

    @property
    def marked(self) -> float:
        """The largest scale that loses no more than `MAX_LOST`, on straight lines between the scales; in hundredths."""
        points = [*zip(self.scales, self.lost, strict=True)]
        if points[-1][1] <= MAX_LOST:
            return points[-1][0]
        last = max(i for i, (_, lost) in enumerate(points) if lost <= MAX_LOST)  # at 0 nothing is lost
        (low, before), (high, after) = points[last : last + 2]
        reached = low + (high - low) * (MAX_LOST - before) / (after - before)
        return math.floor(100 * reached + 1e-9) / 100

    def find(self, scale: float) -> tuple[float, float]:
        """Return what is gained and lost at a scale between the ends, on the same lines."""
        gained, lost = (float(np.interp(scale, self.scales, each)) for each in (self.gained, self.lost))
        return gained, lost

    def describe(self) -> str:
        """Say in one sentence where the mark is, and what a model has there."""
        scale, whole = self.marked, self.gained[-1]
        gained, lost = self.find(scale)
        kept = f" ({gained / whole:.0%} of the gain)" if whole > 0 else ""
        start = f"At scale {scale:.2f}, {100 * lost:.1f} points of general accuracy are lost"
        return f"{start} and {gained:.3f} bits per character gained{kept}"


def measure_scales(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[dict[str, float]]:
    """Return the figures at each scale, of a run's first and last evaluation; nothing where no scale was measured."""
    measured = {float(found[1]): f"eval/{SCALE}{found[1]}_" for each in after if (found := _KEY.fullmatch(each))}
    if not measured:
        return []
    sources = {0.0: (before, "eval/"), 1.0: (after, "eval/"), **{each: (after, key) for each, key in measured.items()}}
    names = {BITS: f"domain_{BITS}", GENERAL: f"general_{GENERAL}"}
    points: list[dict[str, Any]] = [
        {"scale": scale, **{name: record.get(start + key) for name, key in names.items()}}
        for scale, (record, start) in sorted(sources.items())
    ]
    return [each for each in points if None not in each.values()]


def read_scales(summary: Mapping[str, Any]) -> ScaleCurve | None:
    """Return the curve that a summary has the figures of; None: it has none."""
    points: Sequence[Mapping[str, float]] = summary.get("scales", ())
    if len(points) < 3 or points[0]["scale"] or points[-1]["scale"] != 1:
        return None
    first = points[0]
    return ScaleCurve(
        tuple(each["scale"] for each in points),
        tuple(first[BITS] - each[BITS] for each in points),
        tuple(first[GENERAL] - each[GENERAL] for each in points),
    )
