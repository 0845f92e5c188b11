"""A fine-tuned model becomes a Hugging Face folder that needs torch and transformers only.

A model of a base without extensions is transformers' own BERT again where transformers has the head; every other one
brings its code, as in export.py. The configuration names the labels (id2label) and what the task tuned on dev
(`task_thresholds`).
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
import yaml
from safetensors.torch import save_file
from torch import nn

from domext_ray.downstream.finetune.training import Fitted
from domext_ray.downstream.start.model import StartModel
from domext_ray.downstream.tasks.stages import StagedTask
from domext_ray.export.card import describe_base_model
from domext_ray.export.folder import FINE_TUNED, ExportRecord, check_target, new_export
from domext_ray.export.model_folder import HEAD_AUTO_CLASSES, check_tokenizer, map_head, save_with_code
from domext_ray.model.domext.configuration_domext import DomextConfig
from domext_ray.model.domext.heads_domext import PooledHeadModel
from domext_ray.model.graft import describe_plain

PLAIN_HEADS = {
    "DomextForTokenClassification": "BertForTokenClassification",
    "DomextForSequenceClassification": "BertForSequenceClassification",
    "DomextForQuestionAnswering": "BertForQuestionAnswering",
    "DomextForMultipleChoice": "BertForMultipleChoice",
}
"""Heads that transformers' BERT has with the same tensors."""


def export_stages(start: StartModel, task: StagedTask, fitted: Mapping[str, Fitted], folder: Path) -> None:
    """Write a fine-tuned model, or of a task of several models each into a folder of its own.

    Args:
        start: the encoder that it started from, with its tokenizer.
        task: the task.
        fitted: the trained model of each stage.
        folder: where to.

    Raises:
        RunError: `folder` holds something that is no export, or the disk refuses.
    """
    for name, each in fitted.items():
        export_fitted(start, task.data.name, each, _find_place(task, folder, name))


def check_places(task: StagedTask, folder: Path) -> None:
    """Refuse, before anything trains, to export over what is no export of a fine-tuned model.

    Raises:
        RunError: see `export_folder.check_target`.
    """
    for name in task.stages:
        check_target(_find_place(task, folder, name), FINE_TUNED)


def _find_place(task: StagedTask, folder: Path, stage: str) -> Path:
    return folder if len(task.stages) == 1 else folder / stage


def export_fitted(start: StartModel, set_name: str, fitted: Fitted, folder: Path) -> None:
    """Write one fine-tuned model as a Hugging Face folder; an earlier export there is replaced.

    Args:
        start: the encoder that it started from, with its tokenizer.
        set_name: what it was fine-tuned on.
        fitted: the model.
        folder: where to.

    Raises:
        RunError: `folder` holds something that is no export, or the disk refuses.
    """
    model = copy.deepcopy(fitted.model).cpu()
    cast(Any, model.config).task_thresholds = fitted.thresholds
    head = type(model).__name__
    is_plain = is_plain_task_model(model)
    with new_export(folder, ExportRecord(FINE_TUNED), Path(start.id).expanduser()) as temporary:
        start.tokenizer.save_pretrained(temporary)
        check_tokenizer(start.tokenizer, temporary, start.config.vocab_size)
        if is_plain:
            _save_plain(model, temporary)
        else:
            save_with_code(model, temporary, map_head(head))
        for path in temporary.glob("*.safetensors"):  # safetensors makes files that only their owner can read
            shutil.copymode(temporary / "config.json", path)
        (temporary / "README.md").write_text(_build_card(start, set_name, fitted, is_plain), encoding="utf-8")


def is_plain_task_model(model: Any) -> bool:
    """Whether transformers' own BERT has this model, so that its folder needs no code of ours."""
    config = cast(DomextConfig, model.config)
    is_bert = config.position_rule == "absolute" and not config.has_extension and not config.causal
    return is_bert and not config.head_bilstm and type(model).__name__ in PLAIN_HEADS


def _save_plain(model: nn.Module, folder: Path) -> None:
    own = cast(DomextConfig, model.config)
    config = describe_plain(own)
    config.architectures = [PLAIN_HEADS[type(model).__name__]]
    for name in ("id2label", "label2id", "problem_type", "task_thresholds", "classifier_dropout"):
        setattr(config, name, getattr(own, name))
    config.dtype = torch.float32
    config.save_pretrained(folder)
    pools = isinstance(model, PooledHeadModel)
    tensors = {
        f"bert.{name}" if name.startswith("pooler.") else name: each.detach().contiguous()
        for name, each in model.named_parameters()
        if pools or not name.startswith("bert.pooler.")
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _build_card(start: StartModel, set_name: str, fitted: Fitted, is_plain: bool) -> str:
    """Return the model card: a YAML header, then what the model is and how it loads."""
    task = fitted.task
    auto_class = HEAD_AUTO_CLASSES[task.head]
    header = {
        "library_name": "transformers",
        **start.terms.header,
        **describe_base_model(start.id),
        "tags": ["domext", "domain-adaptation", task.head.removeprefix("DomextFor")],
    }
    trust = "" if is_plain else ", trust_remote_code=True"
    lines = [
        f"---\n{yaml.safe_dump(header, sort_keys=False, allow_unicode=True)}---\n",
        f"# {start.name} fine-tuned on {set_name}\n",
        f"{len(task.head_labels):,} outputs: {', '.join(task.head_labels[:40])}. Rows of at most "
        f"{task.options.max_length} tokens.\n",
        "```python",
        f"from transformers import {auto_class}, AutoTokenizer\n",
        'tokenizer = AutoTokenizer.from_pretrained("FOLDER")',
        f'model = {auto_class}.from_pretrained("FOLDER"{trust})',
        "```\n",
        f"## Terms\n\n{start.terms.describe()}",
    ]
    return "\n".join(lines) + "\n"
