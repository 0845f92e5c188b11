"""Figures with what it takes to resample them: bootstrap intervals, and paired differences between two models.

Enters: one row of statistics an example. Leaves: nested figures, percentile bootstrap 95 % intervals over examples
(Efron and Tibshirani, 1993, chapter 13), and the paired bootstrap difference of two models on the same examples.
A resample is how often each example was drawn. Most figures (F1, accuracy, Matthews, SQuAD) follow from sums over
examples, so that all resamples together are one matrix product.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

INTERVAL = (0.025, 0.975)
"""Quantiles of a 95 % interval."""
RESAMPLING_SEED = 0
"""Of the bootstrap, for all runs: paired comparisons rest on the same draws."""

_CHUNK = 1_000_000  # drawn examples at a time: some 8 MB an array


@dataclass(frozen=True, eq=False)
class Score:
    """What predictions of a split are worth. Use `make_score` to build one.

    Args:
        values: figures, nested by name; 0 where one is undefined (a type that never occurs, say).
        statistics: float64 [examples, k], one row an example.
        compute: R resamples -> figures of the layout of `values`, each an array [R], nan where one is undefined. It
            gets the statistics' sums over the drawn examples, float64 [R, k], or, unless `is_additive`, how often each
            example was drawn, float64 [R, examples]. Picklable.
        primary: path of the figure to choose by, such as "f1.micro".
        is_additive: the figures follow from the statistics' sums.
    """

    values: dict[str, Any]
    statistics: np.ndarray
    compute: Callable[[np.ndarray], dict[str, Any]]
    primary: str
    is_additive: bool = True

    @property
    def num_examples(self) -> int:
        """Examples that were scored."""
        return len(self.statistics)

    def get(self, path: str) -> float:
        """Return one figure.

        Args:
            path: names from the outside inwards, joined by dots: "f1.per_label.Disease".

        Raises:
            KeyError: there is none of that path.
        """
        return float(flatten(self.values)[path])

    def describe(self, *, num_resamples: int = 1000, seed: int = 0) -> dict[str, Any]:
        """Return the figures, "intervals" (bootstrap 95 % [low, high] by path) and "examples" (how many).

        Args:
            num_resamples: resamples of the examples.
            seed: of the draws.
        """
        drawn = self.resample(num_resamples, seed)
        bounds = find_bounds(np.stack(list(drawn.values())))
        intervals = {path: [float(low), float(high)] for path, (low, high) in zip(drawn, bounds, strict=True)}
        return {**self.values, "intervals": intervals, "examples": self.num_examples}

    def resample(self, num_resamples: int, seed: int) -> dict[str, np.ndarray]:
        """Return every figure of every resample.

        Args:
            num_resamples: resamples of the examples, with replacement.
            seed: of the draws.

        Returns:
            float64 [num_resamples] by path; nan where a figure is undefined.
        """
        parts = [flatten(self.compute_drawn(each)) for each in _draw(self.num_examples, num_resamples, seed)]
        return {path: np.concatenate([part[path] for part in parts]) for path in parts[0]}

    def compute_drawn(self, counts: np.ndarray) -> dict[str, Any]:
        """Return the figures of resamples, given by how often each example is in them, float64 [R, examples]."""
        return self.compute(counts @ self.statistics if self.is_additive else counts)


def make_score(
    statistics: np.ndarray, compute: Callable[[np.ndarray], dict[str, Any]], primary: str, *, is_additive: bool = True
) -> Score:
    """Make the score of some examples from their statistics.

    Args:
        statistics: [examples, k].
        compute: see `Score`.
        primary: path of the figure to choose by.
        is_additive: see `Score`.

    Raises:
        ValueError: there is no example.
    """
    statistics = np.asarray(statistics, dtype=np.float64)
    if not len(statistics):
        raise ValueError("there is no example to score.")
    once = np.ones((1, len(statistics)))
    values = _take_first(compute(once @ statistics if is_additive else once))
    return Score(values, statistics, compute, primary, is_additive)


def _take_first(values: dict[str, Any]) -> dict[str, Any]:
    return {
        name: _take_first(each) if isinstance(each, dict) else float(np.nan_to_num(each[0], nan=0.0))
        for name, each in values.items()
    }


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested figures by path."""
    flat: dict[str, Any] = {}
    for name, each in values.items():
        flat |= flatten(each, f"{prefix}{name}.") if isinstance(each, dict) else {f"{prefix}{name}": each}
    return flat


def _draw(num_examples: int, num_resamples: int, seed: int) -> Iterator[np.ndarray]:
    """Yield how often each example was drawn, float64 [R, num_examples], some resamples at a time."""
    generator = np.random.default_rng(seed)
    chunk = max(1, _CHUNK // num_examples)
    for first in range(0, num_resamples, chunk):
        size = min(chunk, num_resamples - first)
        drawn = generator.integers(num_examples, size=(size, num_examples))
        drawn += num_examples * np.arange(size)[:, None]
        counts = np.bincount(drawn.ravel(), minlength=drawn.size)
        yield counts.reshape(size, num_examples).astype(np.float64)


def find_bounds(drawn: np.ndarray) -> np.ndarray:
    """Return the 95 % bounds [paths, 2] of resampled figures [paths, R]; resamples without the figure do not count."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a figure that no resample has
        return np.nan_to_num(np.nanquantile(drawn, INTERVAL, axis=1).T, nan=0.0)


@dataclass(frozen=True)
class PairedDifference:
    """How much a second model differs from a first on the same examples.

    Args:
        difference: second minus first.
        low: lower end of its 95 % interval.
        high: upper end.
        p_value: two-sided, above 0: the level at which the interval would just reach 0.
    """

    difference: float
    low: float
    high: float
    p_value: float


def compare_paired(a: Score, b: Score, path: str, *, num_resamples: int = 10_000, seed: int = 0) -> PairedDifference:
    """Compare two models on the same examples by the paired bootstrap: both see the same resamples.

    Args:
        a: the first model's score.
        b: the second's, of the same examples in the same order.
        path: the figure.
        num_resamples: resamples of the examples.
        seed: of the draws.

    Returns:
        The difference b - a with its percentile interval; the p-value is twice the smaller share of resamples on one
        side of 0, (count + 1) / (num_resamples + 1).

    Raises:
        ValueError: the scores are of different numbers of examples.
        KeyError: one of them has no such figure.

    Source:
        Efron and Tibshirani, An Introduction to the Bootstrap (1993), chapters 13 and 15.
    """
    return compare_paired_figures(a, b, (path,), num_resamples=num_resamples, seed=seed)[path]


def compare_paired_figures(
    a: Score, b: Score, paths: Sequence[str], *, num_resamples: int = 10_000, seed: int = 0
) -> dict[str, PairedDifference]:
    """Compare several figures of two models on the same resamples; otherwise as `compare_paired`."""
    if a.num_examples != b.num_examples:
        raise ValueError(f"one score has {a.num_examples} examples, the other {b.num_examples}; they must be the same.")
    parts = []
    for counts in _draw(a.num_examples, num_resamples, seed):
        first, second = flatten(a.compute_drawn(counts)), flatten(b.compute_drawn(counts))
        parts.append(np.stack([second[path] - first[path] for path in paths]))
    drawn = np.concatenate(parts, axis=1)
    return {path: summarize_difference(b.get(path) - a.get(path), drawn[i]) for i, path in enumerate(paths)}


def summarize_difference(difference: float, drawn: np.ndarray) -> PairedDifference:
    """Return a difference with the interval and p-value that resampled differences [R] give it."""
    low, high = find_bounds(drawn[None])[0]
    defined = drawn[~np.isnan(drawn)]
    smaller_side = min(np.count_nonzero(defined <= 0), np.count_nonzero(defined >= 0))
    p_value = min(1.0, 2 * (int(smaller_side) + 1) / (len(defined) + 1))
    return PairedDifference(difference, float(low), float(high), p_value)
