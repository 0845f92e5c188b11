"""F1 by the number of labels, and in a reader's currency: how many labels the base needs for what a method has.

Enters: what the base and the methods score with each number of labels of one set. Leaves: a `LabelCurve`, and numbers
of labels with 95 % intervals.

The base's curve runs through its means, over the logarithm of the labels, and does not extrapolate. Where a mean is
below that of fewer labels both have their mean (isotonic regression), and between means the curve is a monotone cubic
(PCHIP), for straight lines lie below a curve that flattens. A number of labels is in the interval unless the method
differs from the curve there by more than chance, documents and models resampled as in every comparison. So interval and
table agree: where the difference to the base with as many labels is apart from 0, the interval leaves that number out.

Sources: isotonic regression, Barlow et al. (1972); monotone cubics, Fritsch and Butland (1984); a set of values that a
test does not reject as an interval, Fieller (1954). `tests/studies/test_label_curves.py` simulates how often the
interval holds the truth.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from scipy.interpolate import PchipInterpolator
from scipy.optimize import isotonic_regression

from domext_ray.intervals import Estimate, Resampled, bound_differences

POINTS = 65
"""Of a base's curve, beside its own numbers, at which a method is compared with it; bounds are straight between them.
"""


@dataclass(frozen=True)
class LabelCurve:
    """What the base and all methods score on one labelled set, by the number of labels that they learn from."""

    name: str  # of the set
    metric: str  # what dev chose by, such as f1.micro
    split: str  # what was scored
    numbers: tuple[float, ...]  # of labels, ascending; means over the seeds, each of which has an order of its own
    samples: Mapping[str, tuple[Resampled, ...]]  # by method, the base first: one of each number

    @property
    def base(self) -> tuple[Resampled, ...]:
        """The base's samples."""
        return next(iter(self.samples.values()))

    @cached_property
    def needed(self) -> dict[str, list[Estimate]]:
        """How many labels the base needs for what each other method has with each of `numbers`."""
        return {
            name: count_needed(self.numbers, self.base, own)
            for name, own in self.samples.items()
            if own is not self.base
        }


def count_needed(numbers: Sequence[float], base: Sequence[Resampled], samples: Sequence[Resampled]) -> list[Estimate]:
    """Return how many labels the base needs for the figure of each of a method's samples, on the same documents.

    `numbers`, of the labels that `base` learned from, ascend; inf and 0 are more than their last, and fewer than their
    first.
    """
    num_restarts = min(len(sample.values) for sample in base)  # one that failed has no curve
    values, drawn = (
        np.stack([getattr(sample, name)[:num_restarts] for sample in base]) for name in ("values", "drawn")
    )
    blocks = isotonic_regression(values.mean(axis=1)).blocks
    for first, last in pairwise(blocks):
        values[first:last], drawn[first:last] = values[first:last].mean(axis=0), drawn[first:last].mean(axis=0)
    known = np.log(numbers)
    places = np.union1d(known, np.linspace(known[0], known[-1], POINTS))
    values, drawn = (PchipInterpolator(known, scores)(places) for scores in (values, drawn))
    found = []
    for sample in samples:
        lows, highs = bound_differences(values, drawn, sample).T
        ends = [_find_fall((lows + highs) / 2, places), _find_fall(lows, places)]
        ends.append(_find_fall(-highs[::-1], places[::-1]))
        found.append(Estimate(*np.exp(ends).tolist()))
    return found


def _find_fall(differences: np.ndarray, places: np.ndarray) -> float:
    """Return the first place at which differences have fallen to 0; an infinity where that is before or after all."""
    after = math.copysign(math.inf, places[-1] - places[0])
    if differences[0] <= 0:
        return float(places[0]) if differences[0] == 0 else -after
    if (differences > 0).all():
        return after
    end = int(np.argmax(differences <= 0))
    around = slice(end - 1, end + 1)
    return float(np.interp(0.0, -differences[around], places[around]))


def show_labels(found: Estimate, numbers: Sequence[float], given: float = 0.0) -> tuple[str, str]:
    """Return what `count_needed` found and its interval in words, less the labels that were given."""
    outside = {0.0: f"fewer than {numbers[0] - given:,.0f}", math.inf: f"more than {numbers[-1] - given:,.0f}"}
    ends = (found.value, found.low, found.high)
    value, low, high = (outside.get(end, f"{end - given:,.0f}") for end in ends)
    return value, low if low == high else f"{low} to {high}"
