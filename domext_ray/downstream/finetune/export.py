"""A fine-tuned model becomes a Hugging Face folder that needs torch and transformers only.

A model of a base without extensions is transformers' own again where transformers has the head with the same tensors,
as it has for BERT; every other one brings its code, as in export.py. The configuration names the labels (id2label) and
what the task tuned on dev (`task_thresholds`); task.json describes the task, so that the folder alone is enough to use
the model (families/task_file.py). A task of several models has a folder for each in its export.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch

from domext_ray.downstream.finetune.card import CardFigures, build_card
from domext_ray.downstream.finetune.training import Fitted
from domext_ray.export.folder import FINE_TUNED, ExportRecord, new_export
from domext_ray.export.model_folder import is_plain, save_model, save_tokenizer, save_with_code
from domext_ray.families.task import StagedTask
from domext_ray.families.task_description import describe_task
from domext_ray.families.task_file import HERE, TaskFile, write_task_file
from domext_ray.model.domext.modeling_domext import DomextForMaskedLM
from domext_ray.models.exported import RECALL_ENCODER
from domext_ray.models.start import StartModel
from domext_ray.storage import Place


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
