"""Predictions of a labelled split -> figures with intervals, a report by label, and a page of what went wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from domext_ray.families.errors_page import ERRORS, write_mistakes
from domext_ray.families.family import Prediction
from domext_ray.families.metrics.scores import over_clusters
from domext_ray.inference.labelled_input import LabelledInput
from domext_ray.inference.predictors import open_task
from domext_ray.models.source import Source
from domext_ray.storage import Place, write_json

SCORES = "scores.json"
MOST_LABELS = 20
"""Labels that the table shows; the files have all of them."""


def score_split(
    model: Source, split: LabelledInput, predictions: Sequence[Prediction], folder: Place
) -> dict[str, Any]:
    """Score a model's predictions against the labels of their split, and write scores.json and errors.html.

    Return what scores.json holds: "metric" (path of the task's own figure), "value", "interval" (95 % over documents,
    [low, high]), "figures" (all that the family has), "report" (see `describe_classes`) and "unknown_labels" (how often
    the split has each label that the model has not, which can never be right).
    """
    found = open_task(model)
    assert found is not None, "its predictions are of a task"
    examples, metric = split.read(), found.description.metric
    score = over_clusters(found.task.score(examples, predictions), examples)
    figures = score.describe()
    scores = {"metric": metric, "value": score.get(metric), "interval": figures["intervals"][metric]}
    title = f"{found.description.set_name}: {split.split} of {split.task}"
    report = write_mistakes(
        folder / ERRORS, found.task, examples, predictions, title=title, score=(metric, _format_value(scores))
    )
    counts = {name: row["support"] for name, row in report["labels"].items() if row["support"]}
    unknown = {name: count for name, count in counts.items() if name not in found.description.labels}
    scores |= {"figures": figures, "report": report, "unknown_labels": unknown}
    write_json(folder / SCORES, scores)
    return scores


def _format_value(scores: Mapping[str, Any]) -> str:
    low, high = scores["interval"]
    return f"{scores['value']:.4f} (95 % interval {low:.4f} to {high:.4f})"


def format_scores(scores: Mapping[str, Any]) -> str:
    """Return what a job prints: precision, recall and F1 by label, and the task's own figure."""
    lines = []
    labels = list(scores["report"]["labels"].items())
    if labels:
        lines.append(f"{'':<24}{'precision':>10}{'recall':>8}{'f1':>8}{'support':>9}")
    for name, row in labels[:MOST_LABELS]:
        lines.append(
            f"{name[:23]:<24}{row['precision']:>10.3f}{row['recall']:>8.3f}{row['f1']:>8.3f}{row['support']:>9,}"
        )
    if len(labels) > MOST_LABELS:
        lines.append(f"and {len(labels) - MOST_LABELS:,} more labels in {SCORES}")
    if unknown := scores["unknown_labels"]:
        total = sum(row["support"] for _, row in labels)
        lines.append(
            f"{sum(unknown.values()):,} of {total:,} labels can never be right: the model does not know "
            f"{', '.join(unknown)}."
        )
    wrong, number = scores["report"]["wrong"], scores["report"]["examples"]
    if wrong:
        lines.append(f"{wrong:,} of {number:,} examples have a mistake; {ERRORS} shows them.")
    return "\n".join([*lines, f"{scores['metric']}: {_format_value(scores)}"])
