"""Predictions of a labelled split -> figures with intervals."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from domext_ray.inference.finetuned import load_finetuned
from domext_ray.inference.labelled_input import LabelledInput
from domext_ray.inference.task_predictor import read_prediction


def score_split(model: str, source: LabelledInput, plain: Iterable[Any]) -> dict[str, Any]:
    """Score predictions against the labels of their split.

    Args:
        model: the fine-tuned model that made them.
        source: the split.
        plain: the predictions as plain values, in the split's order.

    Returns:
        "metric" (path of the task's own figure), "value", "interval" (bootstrap 95 % over examples, [low, high]), and
        "figures", all that the family has.
    """
    found = load_finetuned(model, torch.device("cpu"))
    examples, predictions = source.read(), [read_prediction(found.family, each) for each in plain]
    score = found.task.score(examples, predictions)
    figures = score.describe()
    metric = found.description.metric
    return {
        "metric": metric,
        "value": score.get(metric),
        "interval": figures["intervals"][metric],
        "figures": figures,
    }


def format_score(scores: Mapping[str, Any]) -> str:
    """Return the line of the last table."""
    low, high = scores["interval"]
    return f"{scores['metric']}: {scores['value']:.4f} (95 % interval {low:.4f} to {high:.4f})"
