"""Several models scored on the same examples: figures with intervals, and differences to the first model.

Enters: scores, and what `compare_scores` found. Leaves: lines of a table, and plain values for results.json.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from domext_ray.families.metrics.scores import Score
from domext_ray.intervals import Estimate
from domext_ray.report.compare import Line


@dataclass(frozen=True)
class ScoredModel:
    """What one of several models scored on the same examples, and how far that is from the first one's."""

    name: str  # what the user called it
    model: str  # what it was loaded from
    sha256: str  # of its tensors
    score: Score
    intervals: dict[str, list[float]]  # bootstrap 95 % [low, high], by the score's paths
    differences: dict[str, Estimate]  # by path; empty for the first

    def make_line(self, path: str) -> Line:
        """Return a figure and its difference as a line of a table, in per cent."""
        figure, difference = Estimate(self.score.get(path), *self.intervals[path]), self.differences.get(path)
        return Line(self.name, figure.scale(100), difference and difference.scale(100))

    def describe(self, change: str) -> dict[str, Any]:
        """Return all figures as plain values, fractions; `change` is what the differences are called."""
        found = {path: {"difference": own.value, "interval": own.interval} for path, own in self.differences.items()}
        return {**self.score.values, "intervals": self.intervals, change: found}
