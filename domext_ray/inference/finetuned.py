"""A fine-tuned model at work: raw records, or examples of another labelled set -> predictions.

Enters: the exported folder of a fine-tuned model. Leaves: predictions in the task's own terms, by which they are
scored, and as records that a user reads. Everything comes from the folder alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from domext_ray.downstream.finetune.exported import ExportedModel, load_exported
from domext_ray.downstream.finetune.training import PREDICTION_TOKENS, Fitted, run_rows
from domext_ray.downstream.tasks.description import TaskDescription
from domext_ray.downstream.tasks.stages import Records, StagedTask
from domext_ray.inference.examples import RawRecord, make_examples
from domext_ray.labelled.examples import AnyExample


@dataclass(frozen=True)
class Predicted:
    """What a model says of some examples.

    Args:
        predictions: one an example, in the task's own terms (`StagedTask.score` takes them).
        records: one an example, JSON-able (`Task.to_records`).
    """

    predictions: list[Any]
    records: Records


@dataclass(frozen=True)
class FinetunedModel:
    """A fine-tuned model that predicts.

    Args:
        exported: the models of all stages, and their task.
        batch_tokens: tokens of a batch, padding counted.
    """

    exported: ExportedModel
    batch_tokens: int = PREDICTION_TOKENS

    @property
    def task(self) -> StagedTask:
        """The task; it scores predictions, and has no examples of its own."""
        return self.exported.task

    @property
    def description(self) -> TaskDescription:
        """What the task is."""
        return self.exported.description

    @property
    def family(self) -> str:
        """The task's family."""
        return self.description.family

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The models' tokenizer."""
        return next(iter(self.exported.starts.values())).tokenizer

    def make_examples(self, records: Sequence[RawRecord], sources: Sequence[str] = ()) -> list[AnyExample]:
        """Make examples of raw records; see `inference.examples.make_examples`."""
        return make_examples(self.family, records, sources=sources, marks=self.description.marks)

    def predict(self, examples: Sequence[AnyExample]) -> Predicted:
        """Predict.

        Args:
            examples: of the task's family, with or without labels; an empty sequence gives nothing.
        """
        if not examples:
            return Predicted([], [])
        asked = {name: _Stage(each, self.batch_tokens) for name, each in self.exported.fitted.items()}
        steps = self.task.run_steps(asked, examples)
        records = self.task.to_records(examples, steps, {name: each.records for name, each in asked.items()})
        return Predicted(self.task.decode(examples, steps), records)

    def take_cases(self) -> dict[str, int]:
        """Return how many of the examples so far were odd (cut, above all), by what is said of them, and begin anew."""
        taken = Counter[str]()
        for cases in (self.task.cases, *(each.task.cases for each in self.exported.fitted.values())):
            taken.update(cases)
            cases.clear()
        return dict(taken)


class _Stage:
    """Predicts with the model of a stage, and keeps the records of what it was asked about."""

    def __init__(self, fitted: Fitted, batch_tokens: int) -> None:
        self.fitted, self.batch_tokens = fitted, batch_tokens
        self.records: Records = []

    def __call__(self, examples: Sequence[Any]) -> list[Any]:
        task = self.fitted.task
        rows = task.encode(examples, is_training=False)
        outputs = run_rows(self.fitted, rows, self.batch_tokens)
        self.records = task.to_records(examples, rows, outputs)
        return task.decode(examples, rows, outputs)


def load_finetuned(
    folder: str | Path, device: torch.device, *, bf16: bool = False, batch_tokens: int = PREDICTION_TOKENS
) -> FinetunedModel:
    """Load a fine-tuned model to predict with it.

    Args:
        folder: its export, or the fine-tuning run that has one.
        device: where to predict.
        bf16: predict in bfloat16.
        batch_tokens: tokens of a batch, padding counted.

    Raises:
        RunError: there is no fine-tuned model, it lacks a description that its task needs, or a file is damaged.
        BaseModelError: a model's files are not what its configuration says.
    """
    return FinetunedModel(load_exported(folder, device, bf16=bf16), batch_tokens)
