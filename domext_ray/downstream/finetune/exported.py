"""An exported fine-tuned model -> the models of all stages and their task, without run, start model or labelled set.

Enters: the folder that `export_stages` wrote. Leaves: what predicts exactly as the run that wrote it did. Code that the
folder brings along is never run.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from domext_ray.config.method import MethodConfig
from domext_ray.downstream.finetune.export import RECALL_ENCODER
from domext_ray.downstream.finetune.training import Fitted, TaskLoss
from domext_ray.downstream.start.head import find_head
from domext_ray.downstream.start.model import TRAININGS, StartModel, build_task_model, load_start_model
from domext_ray.downstream.start.text_embedding import TextEmbedding
from domext_ray.downstream.tasks.description import TaskDescription, make_described_task
from domext_ray.downstream.tasks.stages import StagedTask
from domext_ray.downstream.tasks.task import Task
from domext_ray.downstream.tasks.task_file import TASK_FILE, read_task_file
from domext_ray.errors import RunError
from domext_ray.model.build import choose_attention
from domext_ray.storage import hash_file, hash_values

_NO_METHOD = MethodConfig(name="full", trains="all", heads=0, ffn_units=0)
_HEAD_VALUES = ("head_bilstm", "head_bilstm_layers", "head_layers", "head_mix")


@dataclass(frozen=True)
class ExportedModel:
    """What an exported folder holds.

    Args:
        folder: the folder.
        description: its task, as task.json says.
        task: the task, without examples.
        fitted: the model of every stage.
        starts: the encoder, head and tokenizer of every stage, as they were read.
    """

    folder: Path
    description: TaskDescription
    task: StagedTask
    fitted: dict[str, Fitted]
    starts: dict[str, StartModel]


def is_finetuned_model(folder: str | Path) -> bool:
    """Whether a folder is a fine-tuning run's, or the export of one."""
    folder = Path(folder).expanduser()
    return (folder / TRAININGS).is_dir() or (folder / TASK_FILE).is_file() or find_head(folder) is not None


def hash_export(folder: Path) -> str:
    """Return the sha256 of the files of an export, or of a bank's adapter, that decide what it predicts."""
    paths = sorted(each for suffix in ("json", "safetensors") for each in folder.rglob(f"*.{suffix}"))
    return hash_values({str(each.relative_to(folder)): hash_file(each) for each in paths})


def find_export(folder: str | Path) -> Path:
    """Return the folder of a fine-tuned model: an export, or that of a fine-tuning run.

    Raises:
        RunError: it holds no fine-tuned model.
    """
    folder = Path(folder).expanduser()
    if (folder / TRAININGS).is_dir():
        folder /= "export"
        if not folder.is_dir():
            raise RunError(f"{folder} is missing: the run has not ended, or was made with --export false; export it.")
    if not (folder / TASK_FILE).is_file() and find_head(folder) is None:
        raise RunError(f"{folder} holds no fine-tuned model; give the export of a fine-tuning run.")
    return folder


def load_exported(folder: str | Path, device: torch.device, *, bf16: bool = False) -> ExportedModel:
    """Load the models and the task of an exported folder, or of the export of a fine-tuning run.

    Args:
        folder: the export, or a fine-tuning run with one.
        device: where to predict.
        bf16: predict in bfloat16, as a run with --engine.precision bf16 does.

    Raises:
        RunError: there is no fine-tuned model, it lacks a description that its task needs, or a file is damaged.
        BaseModelError: a model's files are not what its configuration says.
    """
    folder = find_export(folder)
    content = read_task_file(folder)
    starts = {name: _read_stage(folder / place) for name, place in content.stages.items()}
    tokenizer = next(iter(starts.values())).tokenizer if starts else None
    embed = _read_embedding(folder) if content.description.learned.get("embedding_recall") is True else None
    task = make_described_task(content.description, tokenizer, embed) if tokenizer is not None else None
    if task is None or task.stages.keys() != starts.keys():
        raise RunError(f"{folder / TASK_FILE} has the models {', '.join(starts) or 'none'}; export the model again.")
    fitted = {name: _place_stage(starts[name], stage, device, bf16=bf16) for name, stage in task.stages.items()}
    return ExportedModel(folder, content.description, task, fitted, starts)


def _read_stage(folder: Path) -> StartModel:
    if find_head(folder) is None:
        raise RunError(f"{folder} holds no fine-tuned model, and {TASK_FILE} says that it does; export it again.")
    return load_start_model(str(folder), keep_head=True)


def _read_embedding(folder: Path) -> TextEmbedding:
    return TextEmbedding(load_start_model(str(folder / RECALL_ENCODER)))


def _place_stage(start: StartModel, task: Task, device: torch.device, *, bf16: bool) -> Fitted:
    """Make a stage's model on a device."""
    values = {name: getattr(start.config, name) for name in _HEAD_VALUES}
    model = build_task_model(start, task, _NO_METHOD, dropout=0.0, seed=0, **values)
    choose_attention(model, device, bf16=bf16)
    model = model.to(device).eval().requires_grad_(False)
    return Fitted(task, model, TaskLoss(model, device, bf16=bf16, task=task), device, thresholds=task.thresholds)
