"""Predictions as a user reads them: parts of the records that `Task.to_records` makes, in plain JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.special import softmax

from domext_ray.labelled.examples import Entity

_DIGITS = 6


def round_score(score: float) -> float:
    """Round a score to six digits."""
    return round(float(score), _DIGITS)


def describe_entity(text: str, entity: Entity, score: float | None = None) -> dict[str, Any]:
    """Return an entity's start, end, label and text, and its score if it has one."""
    values = {"start": entity.start, "end": entity.end, "label": entity.label, "text": text[entity.start : entity.end]}
    return values if score is None else {**values, "score": round_score(score)}


def rank_classes(logits: np.ndarray, labels: Sequence[str]) -> dict[str, Any]:
    """Return the best label, and the probabilities of all, the highest first.

    Args:
        logits: float [classes].
        labels: as many; of equally probable ones the first is the best.
    """
    probabilities = softmax(logits.astype(np.float64))
    order = np.argsort(-probabilities, kind="stable")
    return {
        "label": labels[int(logits.argmax())],
        "probabilities": {labels[i]: round_score(probabilities[i]) for i in order},
    }
