"""The model card of a fine-tuned model: what it predicts, how well, and for what it is meant."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from huggingface_hub import EvalResult

from domext_ray.downstream.finetune.cautions import list_cautions
from domext_ray.downstream.finetune.training import Fitted
from domext_ray.export.card import render_card
from domext_ray.export.model_folder import HEAD_AUTO_CLASSES
from domext_ray.families.label_counts import count_shared
from domext_ray.families.metrics.scores import flatten
from domext_ray.families.readers.examples import LabelledSet
from domext_ray.models.start import StartModel
from domext_ray.report.tables import format_bounds, format_markdown

MAX_LABELS = 40


@dataclass(frozen=True)
class CardFigures:
    """What a card says of how good a model is."""

    data: LabelledSet
    metric: str  # a path into the figures of a split
    scores: Mapping[str, dict[str, Any]] = field(default_factory=dict)  # `Score.describe` of all stages, by split
    baselines: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # by split and name


def build_card(start: StartModel, fitted: Fitted, figures: CardFigures, *, is_plain: bool) -> str:
    """Return the model card."""
    set_name, metric, scores = figures.data.name, figures.metric, figures.scores
    task, auto_class = fitted.task, HEAD_AUTO_CLASSES[fitted.task.head]
    hub_task = task.hub_task
    labels = ", ".join(task.head_labels[:MAX_LABELS]) + ("…" if len(task.head_labels) > MAX_LABELS else "")
    results = [
        EvalResult(
            task_type=hub_task,
            task_name=hub_task.replace("-", " ").capitalize(),
            dataset_type=set_name,
            dataset_name=set_name,
            dataset_split=split,
            metric_type=metric,
            metric_name=metric,
            metric_value=flatten(own)[metric],
        )
        for split, own in scores.items()
    ]
    return render_card(
        f"{start.name} fine-tuned on {set_name}",
        start.id,
        start.terms,
        {
            "library_name": "transformers",
            "pipeline_tag": None if hub_task == "multiple-choice" else hub_task,
            "tags": ["domext", "domain-adaptation", task.head.removeprefix("DomextFor")],
        },
        results,
        sections=[
            f"{len(task.head_labels):,} outputs: {labels}. Rows of at most {task.options.max_length} tokens.",
            _describe_scores(figures),
            " ".join(task.limits),
        ],
        auto_class=auto_class,
        trusts=not is_plain,
        use="Meant for: the task above, on text like that of its labelled set. Whoever uses it checks it on examples "
        "of their own\nfirst; other text, other labels or another way of labelling may give other figures.\n\n"
        "Not meant for: decisions about people that nobody checks.",
        **task.make_card_values(fitted.thresholds),
    )


def _describe_scores(figures: CardFigures) -> str:
    data, metric = figures.data, figures.metric
    if not figures.scores:
        return ""
    rows = [
        (split, f"{flatten(own)[metric]:.3f}", format_bounds(*own["intervals"][metric]), f"{own['examples']:,}")
        for split, own in figures.scores.items()
    ]
    table = format_markdown(("", metric, "95 % interval", "examples"), rows)
    said = ["The model was chosen by dev, so dev's figure is rather too high"]
    scored = {"shared": count_shared(data), "examples": {split: len(own) for split, own in data.splits.items()}}
    for split, own in figures.scores.items():
        values = {"this model": flatten(own)[metric]}
        said += [
            f"On {split}: {caution}"
            for caution in list_cautions(scored, split, metric, figures.baselines.get(split, {}), values)
        ]
    return f"## Figures\n\n{table}\n\n{'. '.join(said)}."
