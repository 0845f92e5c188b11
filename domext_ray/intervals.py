"""Figures with 95 % intervals, over the documents that were scored, over restarts, or over both; and differences.

Enters: a figure of each restart, on a split as it is and on resamples of its documents. Leaves: the mean over restarts
with its interval, differences of two models on the same documents, and p values where restarts show what chance does.

Two things vary: which documents were scored, and how a training went. Sentences of one document and questions on one
context resemble each other, so whole documents are resampled (`draw_clusters`), the same ones for every model. The
variance over restarts is added to that over documents; what a restart owes to single documents is in both, and counts
once. With few documents or few restarts a bootstrap is too narrow, so each part has Student's width for its own number,
and the squares of the widths add up.

Sources: percentile and paired bootstrap, Efron and Tibshirani (1993), chapters 13 and 15; resampling in two
directions, Owen (2007), "The pigeonhole bootstrap"; stretching to Student's width, Hesterberg (2015), "What teachers
should know about the bootstrap"; adding squared widths, Banerjee (1960), "Approximate confidence interval for linear
functions of means of k populations"; several comparisons, Holm (1979).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from scipy.special import stdtrit

TAILS = (0.025, 0.975)
"""Quantiles of a 95 % interval."""
RESAMPLING_SEED = 0
"""Of the bootstrap, for all runs: paired comparisons rest on the same draws."""
LEVEL = 0.05
"""p values below it say that chance is unlikely."""

_Variance: TypeAlias = tuple[np.ndarray, Any]
"""A variance of figures [F], and its degrees of freedom."""
_HALVINGS = 40
_NORMAL = 1.959964  # a normal distribution's 97.5 % quantile
_CHUNK = 1_000_000  # drawn clusters at a time: some 8 MB an array


@dataclass(frozen=True)
class Estimate:
    """A figure or a difference with its 95 % interval."""

    value: float  # of several restarts their mean
    low: float = math.nan  # nan where nothing says how far chance goes
    high: float = math.nan
    p_value: float | None = None  # two-sided, of a difference that restarts tell from chance

    @property
    def interval(self) -> list[float] | None:
        """Both ends; None where nothing says how far chance goes."""
        return [self.low, self.high] if math.isfinite(self.low) else None

    @property
    def is_apart(self) -> bool:
        """Whether the interval is there and leaves out 0."""
        return self.low > 0 or self.high < 0

    def scale(self, factor: float) -> Estimate:
        """Return it in another unit, such as per cent."""
        return replace(self, value=factor * self.value, low=factor * self.low, high=factor * self.high)


@dataclass(frozen=True, eq=False)
class Resampled:
    """One figure of a model, as it came out in every restart and every resample.

    Resamples are of the same clusters for all restarts and all models that are compared.
    """

    values: np.ndarray  # float64 [restarts]
    drawn: np.ndarray  # float64 [restarts, resamples], nan where a resample has no figure; or [restarts, 0]
    num_clusters: int = 0  # documents, contexts or other independent parts that were resampled

    @property
    def mean(self) -> float:
        """The figure's mean over restarts."""
        return float(self.values.mean())

    @property
    def sd(self) -> float | None:
        """Standard deviation over restarts (of a sample); None for a single one."""
        return float(self.values.std(ddof=1)) if len(self.values) > 1 else None

    def estimate(self) -> Estimate:
        """Return the mean with its interval: of one restart over documents, of several over both."""
        low, high = find_bounds(self.values[None], self.drawn[None], self.num_clusters)[0]
        return Estimate(self.mean, float(low), float(high))


def over_seeds(values: Sequence[float]) -> Resampled:
    """Return a figure of which only restarts are known."""
    return Resampled(np.array(values, dtype=np.float64), np.empty((len(values), 0)))


def average(samples: Sequence[Resampled]) -> Estimate:
    """Return the mean over independent sets, whose intervals' arms add up in squares (Zou and Donner, 2008)."""
    estimates = [sample.estimate() for sample in samples]
    value = sum(one.value for one in estimates) / len(estimates)
    low, high = (
        math.sqrt(sum((one.value - end) ** 2 for one, end in zip(estimates, ends, strict=True))) / len(estimates)
        for ends in ([one.low for one in estimates], [one.high for one in estimates])
    )
    return Estimate(value, value - low, value + high)


def subtract(first: Estimate, second: Estimate) -> Estimate:
    """Return the first figure minus the second, as if they were independent (Newcombe; Zou and Donner, 2008).

    Of two models on the same documents the interval is on the wide side; `compare` pairs them.
    """
    value = first.value - second.value
    low = value - math.hypot(first.value - first.low, second.high - second.value)
    return Estimate(value, low, value + math.hypot(first.high - first.value, second.value - second.low))


def draw_clusters(num_clusters: int, num_resamples: int, seed: int) -> Iterator[np.ndarray]:
    """Yield how often each cluster was drawn, float64 [R, num_clusters], some resamples at a time."""
    generator = np.random.default_rng(seed)
    chunk = max(1, _CHUNK // num_clusters)
    for first in range(0, num_resamples, chunk):
        size = min(chunk, num_resamples - first)
        drawn = generator.integers(num_clusters, size=(size, num_clusters))
        drawn += num_clusters * np.arange(size)[:, None]
        counts = np.bincount(drawn.ravel(), minlength=drawn.size)
        yield counts.reshape(size, num_clusters).astype(np.float64)


def find_bounds(values: np.ndarray, drawn: np.ndarray, num_clusters: int) -> np.ndarray:
    """Return the 95 % bounds [F, 2] of the means over restarts of F figures; arguments as of `Resampled`, F first.

    They are percentiles, stretched about the value to Student's width, and do not leave the range of a figure: none is
    above 1, or below 0 if no resample is.
    """
    mean = values.mean(axis=1)
    half = _find_half(_list_variances(values, drawn, num_clusters), LEVEL)
    if not drawn.shape[2]:
        return np.stack([mean - half, mean + half], axis=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a figure that no resample has
        center = np.nanmean(drawn, axis=1)
        sd = np.nanstd(center, axis=1)
        sides = np.abs(np.nanquantile(center, TAILS, axis=1) - mean) / (_NORMAL * sd)
        lowest = np.nan_to_num(np.nanmin(center, axis=1))
    low, high = (half * np.where(sd > 1e-12, side, 1.0) for side in sides)
    bounds = np.nan_to_num(np.stack([mean - low, mean + high], axis=1), nan=0.0, posinf=1.0, neginf=-1.0)
    return np.clip(bounds, np.where(lowest < 0, -1.0, 0.0)[:, None], 1.0)


def compare(first: Resampled, second: Resampled) -> Estimate:
    """Return how much the second model's mean differs from the first's on the same documents.

    Restarts of two models have nothing in common, even where their seeds are equal numbers. A p value is given where
    both have restarts: without them nothing says what another training would have come to.
    """
    if (first.num_clusters, first.drawn.shape[1]) != (second.num_clusters, second.drawn.shape[1]):
        raise ValueError("the two were resampled differently.")
    parts = _pair_variances(first.values[None], first.drawn[None], second)
    limit = 2.0 if min(np.nanmin(sample.drawn, initial=0.0) for sample in (first, second)) < 0 else 1.0
    has_restarts = len(first.values) > 1 and len(second.values) > 1
    found = _test(second.mean - first.mean, parts, has_restarts)
    return replace(found, low=max(found.low, -limit), high=min(found.high, limit))


def bound_differences(values: np.ndarray, drawn: np.ndarray, second: Resampled) -> np.ndarray:
    """Return the 95 % bounds [F, 2] of how much a model's mean differs from F figures of another one; see `compare`.

    `values`, float64 [F, restarts], and `drawn`, float64 [F, restarts, resamples], are the other model's, `second` is
    the model's; they were resampled by the same clusters.
    """
    difference = second.mean - values.mean(axis=1)
    half = _find_half(_pair_variances(values, drawn, second), LEVEL)
    return np.stack([difference - half, difference + half], axis=1)


def compare_seeds(difference: Sequence[float]) -> Estimate:
    """Return the mean of differences that are paired by seed, of models of which only seeds vary."""
    values = np.array(difference, dtype=np.float64)[None]
    parts = _list_variances(values, np.empty((1, len(difference), 0)), 0)
    return _test(float(values.mean()), parts, len(difference) > 1)


def _test(difference: float, parts: list[_Variance], has_restarts: bool) -> Estimate:
    """A difference with its interval, and the p value that agrees with it: the level at which that would reach 0."""
    half = float(_find_half(parts, LEVEL)[0])
    p_value = None
    if has_restarts:
        lower, p_value = 0.0, 1.0
        for _ in range(_HALVINGS if difference else 0):
            middle = (lower + p_value) / 2
            lower, p_value = (lower, middle) if _find_half(parts, middle)[0] <= abs(difference) else (middle, p_value)
    return Estimate(difference, difference - half, difference + half, p_value)


def _list_variances(values: np.ndarray, drawn: np.ndarray, num_clusters: int) -> list[_Variance]:
    """The variances [F] of means over restarts, each with its degrees of freedom: by clusters, then by restarts."""
    parts: list[_Variance] = []
    num_restarts = values.shape[1]
    shared = np.zeros(len(values))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a figure that no resample has
        if drawn.shape[2]:
            correction = num_clusters / max(num_clusters - 1, 1)
            center = np.nanmean(drawn, axis=1, keepdims=True)
            variance = correction * np.nan_to_num(np.nanvar(center[:, 0], axis=1))
            if num_clusters < 2:  # a single document says nothing about others
                variance += math.inf
            parts.append((variance, max(num_clusters - 1, 1)))
            if num_restarts > 1:
                apart = np.nanvar(drawn - center, axis=2).sum(axis=1) / (num_restarts - 1)
                shared = correction * np.nan_to_num(apart)
    if num_restarts > 1:
        own = values.var(axis=1, ddof=1)
        parts.append((np.maximum(own - shared, 0.0) / num_restarts, num_restarts - 1))
    return parts


def _pair_variances(values: np.ndarray, drawn: np.ndarray, second: Resampled) -> list[_Variance]:
    """The variances [F] of a model's differences to F figures of another: by the clusters of both, then by restarts."""
    difference = second.mean - values.mean(axis=1, keepdims=True)
    pair = second.drawn.mean(axis=0) - drawn.mean(axis=1)
    parts = _list_variances(difference, pair[:, None], second.num_clusters)[:1]
    restarts = ((values, drawn), (second.values[None], second.drawn[None]))
    own = [part for model in restarts for part in _list_variances(*model, second.num_clusters)[len(parts) :]]
    return [*parts, *([_add_up(*own)] if len(own) == 2 else own)]


def _find_half(parts: list[_Variance], level: float) -> np.ndarray:
    """Half the width [F] of an interval: every part has its own Student width, and their squares add up (Banerjee)."""
    if not parts:
        return np.array([math.nan])
    return np.sqrt(sum(stdtrit(freedom, level / 2) ** 2 * variance for variance, freedom in parts))


def _add_up(first: _Variance, second: _Variance) -> _Variance:
    """The sum of two variances of one kind, with its degrees of freedom (Welch)."""
    weight = sum(variance**2 / freedom for variance, freedom in (first, second))
    total = first[0] + second[0]
    with np.errstate(divide="ignore", invalid="ignore"):
        return total, np.where(weight > 0, total**2 / weight, first[1])


def correct_holm(p_values: Sequence[float]) -> list[float]:
    """Return p values of several comparisons with one, corrected so that one false alarm among them is as rare."""
    order, corrected, highest = np.argsort(p_values, kind="stable"), [1.0] * len(p_values), 0.0
    for rank, place in enumerate(order):
        highest = min(1.0, max(highest, (len(p_values) - rank) * p_values[place]))
        corrected[place] = highest
    return corrected
