"""A model with a task's head, on a device: examples -> rows -> outputs -> predictions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from domext_ray.families.family import Prediction
from domext_ray.families.readers.examples import Example
from domext_ray.families.rows import Row, run_by_length
from domext_ray.families.task import Task
from domext_ray.model.build import prepare_for_device
from domext_ray.training.step import move_batch

PREDICTION_TOKENS = 8192
"""Tokens of a batch of predictions, padding counted."""


@dataclass
class TaskModel:
    """A model of one task, which predicts without dropout and gradients."""

    task: Task  # its thresholds are as predictions need them
    model: Any
    device: torch.device
    bf16: bool  # whether it computes in bf16

    @classmethod
    def place(cls, task: Task, model: Any, device: torch.device, *, bf16: bool) -> Self:
        """Put a task's model on a device."""
        prepare_for_device(model, device, bf16=bf16)
        return cls(task, model.to(device), device, bf16)

    def predict(self, examples: Sequence[Example], max_tokens: int = PREDICTION_TOKENS) -> list[Prediction]:
        """Return a prediction an example, from batches of so many tokens at most, padding counted."""
        return self.predict_rows(examples, self.task.encode(examples, is_training=False), max_tokens)

    def predict_rows(
        self, examples: Sequence[Example], rows: Sequence[Row], max_tokens: int = PREDICTION_TOKENS
    ) -> list[Prediction]:
        """Return a prediction an example, from the rows that the task has made of them."""
        return self.task.decode(examples, rows, self.run_rows(rows, max_tokens))

    def run_rows(self, rows: Sequence[Row], max_tokens: int = PREDICTION_TOKENS) -> list[tuple[np.ndarray, ...]]:
        """Return for each row what the task's decoding needs (`Task.decode`)."""
        return run_by_length(rows, self._run_batch, max_tokens=max_tokens)

    def _run_batch(self, rows: list[Row]) -> Iterable[tuple[np.ndarray, ...]]:
        tensors = [tensor.float().cpu().numpy() for tensor in self.run(rows)]
        for i, row in enumerate(rows):
            size = row.length if self.task.has_token_outputs else None
            yield tuple(array[i][:size] if size else array[i] for array in tensors)

    @torch.no_grad()
    def run(self, rows: Sequence[Row]) -> tuple[Tensor, ...]:
        """Return what the task reads of the model's outputs for the rows of one batch (`Task.read_outputs`)."""
        batch = move_batch(self.task.collate(rows), self.device)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16):
            return self.task.read_outputs(self.model.eval()(**batch.inputs))
