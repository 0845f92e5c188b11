"""A fine-tuned model becomes a Hugging Face folder that needs torch and transformers only, with its card.

A model of a base without extensions is transformers' own again where transformers has the head with the same tensors,
as it has for BERT; every other one brings its code, as in export.py. The configuration names the labels (id2label) and
what the task tuned on dev (`task_thresholds`); task.json describes the task, so that the folder alone is enough to use
the model (families/task_file.py). A task of several models has a folder for each in its export.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub import EvalResult

from domext_ray.export.card import render_card
from domext_ray.export.folder import FINE_TUNED, ExportRecord, new_export
from domext_ray.export.model_folder import HEAD_AUTO_CLASSES, is_plain, save_model, save_tokenizer, save_with_code
from domext_ray.families.label_counts import count_shared
from domext_ray.families.metrics.scores import flatten
from domext_ray.families.readers.examples import LabelledSet
from domext_ray.families.task import StagedTask
from domext_ray.families.task_description import describe_task
from domext_ray.families.task_file import HERE, TaskFile, write_task_file
from domext_ray.finetuning.comparison import list_cautions
from domext_ray.finetuning.training import Fitted
from domext_ray.model.domext.modeling_domext import DomextForMaskedLM
from domext_ray.models.exported import RECALL_ENCODER
from domext_ray.models.start import StartModel
from domext_ray.report.tables import format_bounds, format_markdown
from domext_ray.storage import Place

MAX_LABELS = 40


@dataclass(frozen=True)
class CardFigures:
    """What a card says of how good a model is."""

    data: LabelledSet
    metric: str  # a path into the figures of a split
    scores: Mapping[str, dict[str, Any]] = field(default_factory=dict)  # `Score.describe` of all stages, by split
    baselines: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # by split and name


def export_stages(
    start: StartModel,
    task: StagedTask,
    fitted: Mapping[str, Fitted],
    folder: Place,
    scores: Mapping[str, Any] | None = None,
    baselines: Mapping[str, Any] | None = None,
) -> None:
    """Write a fine-tuned model, or of a task of several models each into a folder of its own.

    `scores`, by split, and `baselines`, by split and name, are for the cards.
    """
    places = {name: HERE if len(task.stages) == 1 else name for name in task.stages}
    content = TaskFile(describe_task(task), places)
    figures = CardFigures(task.data, task.metric, scores or {}, baselines or {})
    with new_export(folder, ExportRecord(FINE_TUNED), Path(start.id).expanduser()) as temporary:
        for name, model in fitted.items():
            save_fitted(start, model, temporary / places[name], figures)
        write_task_file(temporary, content)
        if content.description.state.get("embedding_recall"):
            _save_recall_encoder(start, temporary / RECALL_ENCODER)


def save_fitted(start: StartModel, fitted: Fitted, folder: Path, figures: CardFigures) -> None:
    """Write the model of one stage, with its tokenizer and its card."""
    fitted.model.config.task_thresholds = fitted.thresholds
    save_tokenizer(start.tokenizer, folder, start.config.vocab_size)
    save_model(fitted.model, folder)
    card = build_card(start, fitted, figures, is_plain=is_plain(fitted.model))
    (folder / "README.md").write_text(card, encoding="utf-8")


def _save_recall_encoder(start: StartModel, folder: Path) -> None:
    """Write the encoder by which normalisation recalled terms; it is the start model's and not the trained one."""
    with torch.random.fork_rng(devices=[]):  # its masked-LM head is not used; the caller's draws stay as they were
        model = cast(Any, DomextForMaskedLM(copy.deepcopy(start.config)))
    model.load_state_dict(start.tensors, strict=False)
    save_tokenizer(start.tokenizer, folder, start.config.vocab_size)
    save_with_code(model, folder)


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
