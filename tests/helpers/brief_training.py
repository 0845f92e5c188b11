"""What tests of task families share: outputs that are right by construction, and a few dozen plain training steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from conftest import SHAPE
from transformers import PreTrainedTokenizerBase

from domext_ray.families.readers.examples import Example
from domext_ray.families.rows import Row
from domext_ray.families.task import Task
from domext_ray.model.domext import heads_domext
from domext_ray.model.domext.configuration_domext import DomextConfig


def make_one_hot(targets: np.ndarray, num_labels: int) -> np.ndarray:
    """Logits [..., L] that are highest at the target; of what has none, at the last label, which is never right."""
    return 5.0 * np.eye(num_labels, dtype=np.float32)[np.where(targets < 0, num_labels - 1, targets)]


def answer_by_targets(task: Task, examples: Sequence[Example]) -> list[Any]:
    """Predictions from outputs that are the rows' own targets."""
    rows = task.encode(examples, is_training=True)
    return task.decode(examples, rows, [(_answer(task, row),) for row in rows])


def _answer(task: Task, row: Row) -> np.ndarray:
    targets = row.targets
    if "values" in targets:
        return targets["values"][None]
    if "spans" in targets:
        return np.concatenate([targets["spans"], np.full((len(targets["spans"]), 1), 5)], axis=1).astype(np.float32)
    if "starts" in targets:
        return 5.0 * np.eye(row.length, dtype=np.float32)[[targets["starts"], targets["ends"]]].T
    if targets["labels"].dtype == np.float32:
        return 10.0 * targets["labels"] - 5.0
    return make_one_hot(targets["labels"], row.input_ids.shape[0] if row.input_ids.ndim > 1 else len(task.head_labels))


def make_head(task: Task, tokenizer: PreTrainedTokenizerBase, seed: int = 0) -> Any:
    """A random tiny model with the task's head, without dropout."""
    torch.manual_seed(seed)
    labels = dict(enumerate(task.head_labels))
    config = DomextConfig(
        vocab_size=len(tokenizer),
        max_position_embeddings=132,
        type_vocab_size=2,
        pad_token_id=tokenizer.pad_token_id,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        has_pooler=True,
        id2label=labels,
        label2id={label: i for i, label in labels.items()},
        **SHAPE,
        **task.head_config,
    )
    return getattr(heads_domext, task.head)(config)


def train_briefly(task: Task, model: Any, *, steps: int, lr: float = 3e-3) -> list[float]:
    """Train on all of the training split at once; return the mean losses."""
    batch = task.collate(task.encode(task.data.train, is_training=True))
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    losses = []
    for _ in range(steps):
        loss = task.compute_loss_sum(model(**batch.inputs), batch.targets) / batch.num_targets
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@torch.no_grad()
def predict(task: Task, model: Any, examples: Sequence[Example]) -> list[Any]:
    """Predict row by row, so that nothing is padded."""
    rows = task.encode(examples, is_training=False)
    outputs = [run_row(task, model, row) for row in rows]
    return task.decode(examples, rows, outputs)


def run_row(task: Task, model: Any, row: Row) -> tuple[np.ndarray, ...]:
    """The outputs that decoding needs of one row."""
    return tuple(output[0].numpy() for output in task.read_outputs(model(**task.collate([row]).inputs)))
