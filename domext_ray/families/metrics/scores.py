"""Figures with what it takes to resample them: 95 % intervals over documents, and differences between two models.

Enters: one row of statistics an example. Leaves: nested figures with bootstrap intervals (see `intervals.py`). A
resample is how often each document was drawn. Most figures (F1, accuracy, Matthews, SQuAD) follow from sums over
examples, so that all resamples together are one matrix product.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from domext_ray.families.readers.examples import Example
from domext_ray.intervals import Estimate, Resampled, compare, draw_clusters, find_bounds


@dataclass(frozen=True, eq=False)
class Score:
    """What predictions of a split are worth. Use `make_score` to build one."""

    values: dict[str, Any]  # figures, nested by name; 0 where one is undefined (a type that never occurs, say)
    statistics: np.ndarray  # float64 [examples, k]
    compute: Callable[[np.ndarray], dict[str, Any]]
    """Figures of R resamples, in the layout of `values`: each an array [R], nan where one is undefined.

    It gets the statistics' sums over the drawn examples, float64 [R, k], or, unless `is_additive`, how often each
    example was drawn, float64 [R, examples]. It must be picklable."""
    is_additive: bool = True  # the figures follow from the statistics' sums
    clusters: np.ndarray | None = None  # int64 [examples], the cluster of each example, from 0; None: each its own

    @property
    def num_examples(self) -> int:
        """Examples that were scored."""
        return len(self.statistics)

    @property
    def num_clusters(self) -> int:
        """Independent parts of the split: see `over_clusters`."""
        return self.num_examples if self.clusters is None else int(self.clusters.max()) + 1

    def get(self, path: str) -> float:
        """Return the figure of a path, names from the outside inwards joined by dots: "f1.per_label.Disease"."""
        return float(flatten(self.values)[path])

    def describe(self, *, num_resamples: int = 1000, seed: int = 0) -> dict[str, Any]:
        """Return the figures, "intervals" (95 % [low, high] by path), "examples" and "clusters" (how many)."""
        drawn, flat = self.resample(num_resamples, seed), flatten(self.values)
        values = np.array([[flat[path]] for path in drawn])
        bounds = find_bounds(values, np.stack(list(drawn.values()))[:, None], self.num_clusters)
        intervals = dict(zip(drawn, bounds.tolist(), strict=True))
        return {**self.values, "intervals": intervals, "examples": self.num_examples, "clusters": self.num_clusters}

    def resample(self, num_resamples: int, seed: int) -> dict[str, np.ndarray]:
        """Return every figure of every resample of the clusters: float64 [num_resamples] by path, nan if undefined."""
        parts = []
        for counts in draw_clusters(self.num_clusters, num_resamples, seed):
            parts.append(flatten(self.compute_drawn(counts if self.clusters is None else counts[:, self.clusters])))
        return {path: np.concatenate([part[path] for part in parts]) for path in parts[0]}

    def sample(self, path: str, drawn: Mapping[str, np.ndarray]) -> Resampled:
        """Return a figure with its resamples, given all that `resample` drew."""
        return Resampled(np.array([self.get(path)]), drawn[path][None], self.num_clusters)

    def compute_drawn(self, counts: np.ndarray) -> dict[str, Any]:
        """Return the figures of resamples, given by how often each example is in them, float64 [R, examples]."""
        return self.compute(counts @ self.statistics if self.is_additive else counts)


def make_score(
    statistics: np.ndarray, compute: Callable[[np.ndarray], dict[str, Any]], *, is_additive: bool = True
) -> Score:
    """Make the score of one or more examples from their statistics, [examples, k]; see `Score`."""
    statistics = np.asarray(statistics, dtype=np.float64)
    if not len(statistics):
        raise ValueError("there is no example to score.")
    once = np.ones((1, len(statistics)))
    values = _take_first(compute(once @ statistics if is_additive else once))
    return Score(values, statistics, compute, is_additive)


def _take_first(values: dict[str, Any]) -> dict[str, Any]:
    return {
        name: _take_first(value) if isinstance(value, dict) else float(np.nan_to_num(value[0], nan=0.0))
        for name, value in values.items()
    }


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested figures by path."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat


def over_clusters(score: Score, examples: Sequence[Example]) -> Score:
    """Return the score with the examples' clusters: resamples draw these whole.

    A cluster is what a set's `group_field` names, else a document of sentences, a context of questions, or a text whose
    pairs are classified; an example that has none of them is its own.
    """
    keys: dict[Any, int] = {}
    return replace(score, clusters=np.array([keys.setdefault(example.cluster, len(keys)) for example in examples]))


def compare_scores(
    a: Score, b: Score, paths: Sequence[str], *, num_resamples: int = 10_000, seed: int = 0
) -> dict[str, Estimate]:
    """Compare figures of two models on the same examples by the paired bootstrap: both see the same resamples.

    The examples are in the same order on both sides; the differences, by path, are b - a.
    """
    if a.num_examples != b.num_examples:
        raise ValueError(f"one score has {a.num_examples} examples, the other {b.num_examples}; they must be the same.")
    first, second = (score.resample(num_resamples, seed) for score in (a, b))
    return {path: compare(*(score.sample(path, drawn) for score, drawn in ((a, first), (b, second)))) for path in paths}
