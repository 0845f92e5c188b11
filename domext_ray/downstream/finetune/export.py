"""A fine-tuned model becomes a Hugging Face folder that needs torch and transformers only.

A model of a base without extensions is transformers' own again where transformers has the head with the same tensors,
as it has for BERT; every other one brings its code, as in export.py. The configuration names the labels (id2label) and
what the task tuned on dev (`task_thresholds`); task.json describes the task, so that the folder alone is enough to use
the model (tasks/task_file.py). A task of several models has a folder for each, and task.json beside them.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from domext_ray.downstream.finetune.card import SplitScore, build_card
from domext_ray.downstream.finetune.training import Fitted
from domext_ray.downstream.start.model import StartModel
from domext_ray.downstream.tasks.description import describe_task
from domext_ray.downstream.tasks.stages import StagedTask
from domext_ray.downstream.tasks.task_file import HERE, TASK_FILE, TaskFile, read_task_file, write_task_file
from domext_ray.export.folder import FINE_TUNED, ExportRecord, check_target, new_export
from domext_ray.export.model_folder import (
    PLAIN_HEADS,
    save_tensors,
    save_tokenizer,
    save_with_code,
)
from domext_ray.model.domext.configuration_domext import DomextConfig
from domext_ray.model.domext.heads_domext import PooledHeadModel
from domext_ray.model.domext.modeling_domext import DomextForMaskedLM
from domext_ray.model.layouts import find_layout

RECALL_ENCODER = "recall_encoder"
"""Folder, in an export, of the encoder that recalls terms."""


def export_stages(
    start: StartModel,
    task: StagedTask,
    fitted: Mapping[str, Fitted],
    folder: Path,
    scores: Mapping[str, SplitScore] | None = None,
) -> None:
    """Write a fine-tuned model, or of a task of several models each into a folder of its own.

    Raises:
        RunError: `folder` holds something that is no export, or the disk refuses.
    """
    content = TaskFile(describe_task(task), {name: _name_place(task, name) for name in task.stages})
    if len(task.stages) == 1:
        for each in fitted.values():
            export_fitted(start, task.data.name, each, folder, scores, task.metric, content)
        return
    (folder / TASK_FILE).unlink(missing_ok=True)  # it comes last: models of two exports are no task
    for name, each in fitted.items():
        export_fitted(start, task.data.name, each, folder / _name_place(task, name), scores, task.metric)
    write_task_file(folder, content)


def check_places(task: StagedTask, folder: Path) -> None:
    """Refuse, before anything trains, to export over what is no export of a fine-tuned model.

    Raises:
        RunError: see `check_target`, or a task.json beside several models is none of ours.
    """
    for name in task.stages:
        check_target(folder / _name_place(task, name), FINE_TUNED)
    if len(task.stages) > 1 and (folder / TASK_FILE).exists():
        read_task_file(folder)


def _name_place(task: StagedTask, stage: str) -> str:
    return HERE if len(task.stages) == 1 else stage


def export_fitted(
    start: StartModel,
    set_name: str,
    fitted: Fitted,
    folder: Path,
    scores: Mapping[str, SplitScore] | None = None,
    metric: str = "",
    content: TaskFile | None = None,
) -> None:
    """Write one model; `content` describes its task, None for one of several models."""
    model = copy.deepcopy(fitted.model).cpu()
    cast(Any, model.config).task_thresholds = fitted.thresholds
    is_plain = is_plain_task_model(model)
    with new_export(folder, ExportRecord(FINE_TUNED), Path(start.id).expanduser()) as temporary:
        save_tokenizer(start.tokenizer, temporary, start.config.vocab_size)
        if is_plain:
            _save_plain(model, temporary)
        else:
            save_with_code(model, temporary)
        card = build_card(start, set_name, fitted, scores or {}, metric, is_plain=is_plain)
        (temporary / "README.md").write_text(card, encoding="utf-8")
        if content is not None:
            write_task_file(temporary, content)
            if content.description.learned.get("embedding_recall"):
                _save_recall_encoder(start, temporary / RECALL_ENCODER)


def _save_recall_encoder(start: StartModel, folder: Path) -> None:
    """Write the encoder by which normalisation recalled terms; it is the start model's and not the trained one."""
    with torch.random.fork_rng(devices=[]):  # its masked-LM head is not used; the caller's draws stay as they were
        model = cast(Any, DomextForMaskedLM(copy.deepcopy(start.config)))
    model.load_state_dict(start.tensors, strict=False)
    save_tokenizer(start.tokenizer, folder, start.config.vocab_size)
    save_with_code(model, folder)


def is_plain_task_model(model: Any) -> bool:
    """Whether transformers has this model, so that its folder needs no code of ours."""
    config = cast(DomextConfig, model.config)
    is_plain = not config.has_extension and not config.head_bilstm and type(model).__name__ in PLAIN_HEADS
    return is_plain and find_layout(config).has_plain_heads


def _save_plain(model: nn.Module, folder: Path) -> None:
    own = cast(DomextConfig, model.config)
    config = find_layout(own).restore(own, type(model).__name__.removeprefix("Domext"))
    for name in ("id2label", "label2id", "problem_type", "task_thresholds", "classifier_dropout"):
        setattr(config, name, getattr(own, name))
    pools = isinstance(model, PooledHeadModel)
    tensors = {
        f"bert.{name}" if name.startswith("pooler.") else name: each.detach()
        for name, each in model.named_parameters()
        if pools or not name.startswith("bert.pooler.")
    }
    save_tensors(config, tensors, folder, torch.float32)
