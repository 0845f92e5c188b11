"""Predicted label sets against those of the examples -> a score; and the threshold that is best on dev.

Enters: for every example the labels that it has, and those that were predicted, any number of each. Leaves: a `Score`
with precision, recall and F1 (micro, macro, per label; see `metrics.py`), and the share of examples whose labels are
all right and no others ("accuracy", as scikit-learn's `accuracy_score` has it for several labels).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from domext_ray.families.metrics.metrics import CountFigures, divide
from domext_ray.families.metrics.scores import Score, flatten, make_score

THRESHOLDS = np.linspace(0.05, 0.95, 91).round(2)
"""Probabilities from which a label may count."""
USUAL_THRESHOLD = 0.5


@dataclass(frozen=True)
class LabelSetFigures:
    """Sums [R, 2 + 3·L] of examples, exact ones, and matches, predictions and gold labels by label -> figures."""

    labels: tuple[str, ...]

    def __call__(self, sums: np.ndarray) -> dict[str, Any]:
        averages = CountFigures(self.labels)(sums[:, 2:])
        return {"accuracy": divide(sums[:, 1], sums[:, 0]), **averages}


def mark_labels(label_sets: Sequence[Collection[str]], labels: Sequence[str]) -> np.ndarray:
    """Return which example has which label, bool [examples, L]; labels that are not named are left out."""
    places = {label: i for i, label in enumerate(labels)}
    marked = np.zeros((len(label_sets), len(labels)), dtype=bool)
    for row, own in zip(marked, label_sets, strict=True):
        row[[places[label] for label in own if label in places]] = True
    return marked


def count_matches(gold: np.ndarray, predicted: np.ndarray) -> np.ndarray:
    """Return what `LabelSetFigures` sums up, float64 [examples, 2 + 3·L], of bool [examples, L] on either side."""
    is_exact = (gold == predicted).all(axis=1)
    columns = [np.ones((len(gold), 1)), is_exact[:, None], gold & predicted, predicted, gold]
    return np.concatenate(columns, axis=1, dtype=np.float64)


def score_label_sets(
    gold: Sequence[Collection[str]], predicted: Sequence[Collection[str]], labels: Sequence[str]
) -> Score:
    """Score any number of labels per example; those that occur beside `labels` follow them in the figures."""
    others = {label for side in (gold, predicted) for label_set in side for label in label_set} - {*labels}
    all_labels = (*labels, *sorted(others))
    statistics = count_matches(mark_labels(gold, all_labels), mark_labels(predicted, all_labels))
    return make_score(statistics, LabelSetFigures(all_labels))


def choose_threshold(gold: np.ndarray, probabilities: np.ndarray, path: str) -> float:
    """Return the threshold of `THRESHOLDS` with the best figure, of equal ones that nearest to 0.5.

    `gold` (bool) and `probabilities` are [examples, L]; a label counts above the threshold.
    """
    sums = np.stack([count_matches(gold, probabilities > threshold).sum(axis=0) for threshold in THRESHOLDS])
    names = tuple(str(i) for i in range(gold.shape[1]))
    figures = np.nan_to_num(flatten(LabelSetFigures(names)(sums))[path])
    return float(max(zip(figures, -abs(THRESHOLDS - USUAL_THRESHOLD), THRESHOLDS, strict=True))[2])
