"""An exported fine-tuned model -> what predicts, without run, start model or labelled set.

Enters: the folder that `export_stages` wrote. Leaves: the models of all stages and their task, which predict exactly as
the run that wrote them did. Code that the folder brings along is never run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from domext_ray.config.finetune import FULL
from domext_ray.config.shared import LongTextsChoice
from domext_ray.errors import RunError
from domext_ray.export.folder import check_whole
from domext_ray.export.onnx_graph import INT8, OnnxModel, is_graph
from domext_ray.families.family import Prediction
from domext_ray.families.readers.examples import Example
from domext_ray.families.task import StagedTask, Task
from domext_ray.families.task_description import TaskDescription, make_described_task
from domext_ray.families.task_file import TASK_FILE, read_task_file
from domext_ray.models.head import find_head
from domext_ray.models.source import BaseModel, Export, FinetunedRun, Source, open_model
from domext_ray.models.start import NO_BILSTM, build_task_model
from domext_ray.models.task_model import PREDICTION_TOKENS, TaskModel
from domext_ray.models.text_embedding import TextEmbedding
from domext_ray.runtime.device import has_bf16
from domext_ray.storage import Place, hash_file, hash_values
from domext_ray.text.vocabulary.tokenizer import load_tokenizer

RECALL_ENCODER = "recall_encoder"
"""Folder, in an export, of the encoder that recalls terms."""
_DECIDING = (".json", ".safetensors", ".onnx", ".onnx.data")


@dataclass(frozen=True)
class Predicted:
    """What a model says of some examples."""

    predictions: list[Prediction]  # one an example (`StagedTask.score` takes them)
    records: list[Prediction]  # one an example, as users read them (`StagedTask.show`)


@dataclass(frozen=True)
class ExportedModel:
    """A fine-tuned model that predicts."""

    description: TaskDescription
    task: StagedTask  # it scores predictions, and has no examples of its own
    stages: dict[str, TaskModel]  # the model of every stage
    tokenizer: PreTrainedTokenizerBase
    batch_tokens: int = PREDICTION_TOKENS  # of a batch, padding counted

    def predict(self, examples: Sequence[Example]) -> Predicted:
        """Predict examples of the task's family, with or without labels."""
        if not examples:
            return Predicted([], [])
        asked = {name: partial(model.predict, max_tokens=self.batch_tokens) for name, model in self.stages.items()}
        predictions = self.task.run(asked, examples)
        return Predicted(predictions, [self.task.show(prediction) for prediction in predictions])

    def take_cases(self) -> dict[str, int]:
        """Return how many of the examples so far were odd (cut, above all), by what is said of them, and begin anew."""
        taken = Counter[str]()
        for cases in (self.task.cases, *(model.task.cases for model in self.stages.values())):
            taken.update(cases)
            cases.clear()
        return dict(taken)


@dataclass(frozen=True)
class OpenedTask:
    """A fine-tuned model that was looked at: all but the tensors of its models."""

    description: TaskDescription  # as it is asked for
    tokenizer: PreTrainedTokenizerBase
    task: StagedTask
    hash: Callable[[], str]  # of all that its predictions depend on
    load_stage: Callable[[str], Any]  # the model of a stage, by its name

    def load(self, device: torch.device, batch_tokens: int = PREDICTION_TOKENS) -> ExportedModel:
        """Load the models; graphs predict on the CPU."""
        stages = dict[str, TaskModel]()
        for name, own in self.task.stages.items():
            model = self.load_stage(name)
            where = model.device if isinstance(model, OnnxModel) else device
            stages[name] = TaskModel.place(own, model.requires_grad_(False), where, bf16=has_bf16(where))
        return ExportedModel(self.description, self.task, stages, self.tokenizer, batch_tokens)


def hash_export(folder: Path) -> str:
    """Return the sha256 of the files of an export that decide what it predicts."""
    found = [name for name in Place(folder).list_files() if name.endswith(_DECIDING)]
    return hash_values({name: hash_file(folder / name) for name in found if INT8 not in name.split("/")})


def find_export(source: Source) -> Path:
    """Return the folder of a fine-tuned model: an export, or that of a fine-tuning run."""
    folder = source.folder
    if isinstance(source, FinetunedRun):
        folder /= "export"
        if not folder.is_dir():
            cause = "the run has not ended, or was made with --export false"
            raise RunError(f"{folder} is missing: {cause}; give its own command again, with --export true.")
    if not source.does_task:
        raise RunError(f"{folder} holds no fine-tuned model; give the export of a fine-tuning run.")
    check_whole(Place(folder))
    return folder


def open_exported(source: Source, *, takes_graphs: bool = False, long_texts: LongTextsChoice = "auto") -> OpenedTask:
    """Look at an exported folder, or at the export of a fine-tuning run; see `load_exported`."""
    folder = find_export(source)
    if not takes_graphs:
        source.require(FinetunedRun, Export, BaseModel)
    content = read_task_file(folder)
    content = replace(content, description=content.description.read_long_texts(long_texts))
    places = {name: folder / at for name, at in content.stages.items()}
    fault = f"{folder / TASK_FILE} has the models {', '.join(places) or 'none'}; export the model again."
    if not places:
        raise RunError(fault)
    for place in places.values():
        if not is_graph(place) and find_head(place) is None:
            raise RunError(f"{place} holds no fine-tuned model, and {TASK_FILE} says that it does; export it again.")
    recalls = content.description.state.get("embedding_recall") is True
    embed = TextEmbedding(open_model(str(folder / RECALL_ENCODER)).load()) if recalls else None
    tokenizer = load_tokenizer(next(iter(places.values())))
    task = make_described_task(content.description, tokenizer, embed)
    if task.stages.keys() != places.keys():
        raise RunError(fault)

    def load_stage(name: str) -> Any:
        return OnnxModel(places[name]) if is_graph(places[name]) else _load_stage(places[name], task.stages[name])

    return OpenedTask(content.description, tokenizer, task, partial(hash_export, folder), load_stage)


def load_exported(
    folder: Path,
    device: torch.device,
    batch_tokens: int = PREDICTION_TOKENS,
    *,
    takes_graphs: bool = False,
    long_texts: LongTextsChoice = "auto",
) -> ExportedModel:
    """Load the models and the task of an exported folder, or of the export of a fine-tuning run.

    Args:
        folder: the export, or a fine-tuning run with one.
        device: where to predict.
        batch_tokens: tokens of a batch, padding counted.
        takes_graphs: take an ONNX folder, too; it predicts on the CPU.
        long_texts: see `TaskDescription.read_long_texts`.

    Raises:
        RunError: there is no fine-tuned model, it lacks a description that its task needs, or a file is damaged.
        BaseModelError: a model's files are not what its configuration says, or an ONNX folder is not taken.
    """
    opened = open_exported(open_model(str(folder)), takes_graphs=takes_graphs, long_texts=long_texts)
    return opened.load(device, batch_tokens)


def _load_stage(folder: Path, stage: Task) -> Any:
    start = open_model(str(folder)).load(keep_head=True)
    values = {name: getattr(start.config, name) for name in NO_BILSTM}
    return build_task_model(start, stage, FULL, dropout=0.0, seed=0, **values)
