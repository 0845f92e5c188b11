"""What every task family is made of: examples -> rows of tokens -> logits -> predictions -> scores.

A task turns a set's examples into rows that fit the encoder, says which head reads them, computes the loss from the
head's logits, and turns logits back into predictions in the examples' own terms. Fine-tuning and ablations know tasks
through this interface only. A row has one or more segments of tokens (a choice has one segment per option); a long
example may make several rows (windows), none of its labelled parts is ever lost.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from domext_ray.corpus.batching import find_sequences
from domext_ray.downstream.tasks.learned import Learned, check_learned
from domext_ray.errors import ConfigError
from domext_ray.labelled.examples import AnyExample, LabelledSet
from domext_ray.labelled.metrics.scores import Score, flatten


@dataclass(frozen=True)
class TaskOptions:
    """How examples become rows.

    Args:
        max_length: tokens of a row at most, special tokens included.
        stride: tokens that neighbouring windows of a long example share.
        context: surrounding sentences of the document fill a row (token classification only).
    """

    max_length: int = 128
    stride: int = 32
    context: bool = False


@dataclass(frozen=True)
class Row:
    """One row of a model's input.

    Args:
        example: place of its example in the sequence that was encoded.
        input_ids: int64 [N], special tokens included; [C, N] for the C options of a choice, padded among themselves.
        token_type_ids: int64, as `input_ids`; None: all 0.
        targets: what the loss and the head need, by name, int64 or float32; a name that starts with "input_" is an
            argument of the model's forward without that prefix (say input_entity_positions [2]).
        place: what decoding needs, in the task's own terms.
    """

    example: int
    input_ids: np.ndarray
    token_type_ids: np.ndarray | None = None
    targets: dict[str, np.ndarray] = field(default_factory=dict)
    place: Any = None

    @property
    def length(self) -> int:
        """Tokens of the row."""
        return int(self.input_ids.shape[-1])


@dataclass(frozen=True)
class TaskBatch:
    """Rows side by side, ready for the model.

    Args:
        inputs: arguments of the model's forward: input_ids int64 [B, N] (or [B, C, N]), attention_mask of that shape
            or None when nothing is padded, token_type_ids or None, cu_seq_lens and max_length (see
            `corpus.batching.find_sequences`), and what `Row.targets` names input_*.
        targets: the other targets, stacked and padded.
        num_targets: what the mean loss divides by (labelled tokens, rows, ...), 0 or more.
    """

    inputs: dict[str, Any]
    targets: dict[str, Tensor]
    num_targets: int


class Task(ABC):
    """A task family over one labelled set and one tokenizer.

    Args:
        data: the set.
        tokenizer: the model's tokenizer (fast).
        options: how examples become rows.
        metric: path of the figure that dev chooses by; empty: the family's.
        learned: what a task of the same set found out from it, as `learned` gives it, instead of examples: `data` may
            have none then; None: it is found out from `data`.

    Raises:
        ConfigError: there is no figure `metric`, or a rule of the family's is broken.
        ValueError: `learned` is not what such a task finds out.
    """

    head: str
    """Name of the head's class in model/heads_domext.py."""
    metric: str
    """Path of the figure that dev chooses by, such as "f1.micro"; higher is better."""
    has_token_outputs = False
    """Whether the first dimension of what `read_outputs` gives, B apart, is the row's tokens."""
    target_pads: dict[str, float] = {}
    """Filler of each target whose first dimension is the row's length; other targets are stacked as they are."""

    def __init__(
        self,
        data: LabelledSet,
        tokenizer: PreTrainedTokenizerBase,
        options: TaskOptions,
        *,
        metric: str = "",
        learned: Learned | None = None,
    ) -> None:
        self.data, self.tokenizer, self.options = data, tokenizer, options
        self.metric = metric or self.metric
        self.notes: list[str] = []
        self.cases: Counter[str] = Counter()
        self.prepare()
        if learned is not None:
            self.recall(learned)
            return
        self.learn()
        examples = (data.dev or data.train)[:1]
        figures = flatten(self.score(examples, self.predict_majority(examples)).values)
        if self.metric not in figures:
            raise ConfigError(
                f"the metric of {data.name} is {self.metric!r}; its figures are {', '.join(sorted(figures))}."
            )

    def prepare(self) -> None:  # noqa: B027
        """Make what the family needs beside the constructor's arguments, without examples. Default: nothing."""

    def learn(self) -> None:  # noqa: B027
        """Find out from `data` what predictions depend on beside labels and options. Default: nothing."""

    @property
    def learned(self) -> dict[str, Any]:
        """What `learn` found out, as JSON has it. Default: nothing."""
        return {}

    def recall(self, learned: Learned) -> None:
        """Take over what another task's `learned` was.

        Raises:
            ValueError: it is not what such a task finds out.
        """
        check_learned(learned)

    @property
    def thresholds(self) -> dict[str, float]:
        """What `tune` has chosen, and `apply` takes over, by name. Default: none."""
        return {}

    @property
    @abstractmethod
    def head_labels(self) -> tuple[str, ...]:
        """Labels of the head's outputs in order (config.id2label)."""

    @property
    def head_config(self) -> dict[str, Any]:
        """Further values of the model's configuration that the head needs, such as problem_type."""
        return {}

    @abstractmethod
    def encode(self, examples: Sequence[AnyExample], *, is_training: bool) -> list[Row]:
        """Make the rows of examples, in their order.

        Args:
            examples: of one split.
            is_training: rows are for training: they may differ (negative windows left out, say) but have all targets.
        """

    @abstractmethod
    def compute_loss_sum(self, outputs: Any, targets: dict[str, Tensor]) -> Tensor:
        """Return the summed loss (fp32 scalar, nats) of a batch; the caller divides by the sum of `num_targets`.

        Args:
            outputs: what the head's forward returned.
            targets: `TaskBatch.targets` on the device.
        """

    @abstractmethod
    def read_outputs(self, outputs: Any) -> tuple[Tensor, ...]:
        """Return the tensors of the head's outputs that `decode` needs, first dimension B (fp32)."""

    @abstractmethod
    def decode(
        self, examples: Sequence[AnyExample], rows: Sequence[Row], outputs: Sequence[tuple[np.ndarray, ...]]
    ) -> list[Any]:
        """Return one prediction an example.

        Args:
            examples: as they were encoded.
            rows: what `encode` made of them.
            outputs: for each row what `read_outputs` gave, without the batch dimension, and with `has_token_outputs`
                without padding.
        """

    @abstractmethod
    def to_records(
        self, examples: Sequence[AnyExample], rows: Sequence[Row], outputs: Sequence[tuple[np.ndarray, ...]]
    ) -> list[dict[str, Any]]:
        """Return for each example the prediction as a user reads it, JSON-able; arguments as of `decode`.

        Places are characters of the example's text, ends exclusive; scores are rounded to six digits.
        """

    @abstractmethod
    def score(self, examples: Sequence[AnyExample], predictions: Sequence[Any]) -> Score:
        """Score predictions against the examples' labels."""

    def tune(self, examples: Sequence[AnyExample], predictions: Sequence[Any]) -> dict[str, float]:
        """Choose thresholds on dev (SQuAD v2.0's tau, say) and keep them; return them by name. Default: none."""
        return {}

    def apply(self, thresholds: dict[str, float]) -> None:
        """Take over thresholds that `tune` returned earlier; a task without any takes none."""
        assert not thresholds, thresholds

    @abstractmethod
    def predict_majority(self, examples: Sequence[AnyExample]) -> list[Any]:
        """Return the predictions of the trivial baseline (most frequent label of `data.train`, best constant, ...)."""

    def note_cases(self, sources: Sequence[str], total: int, what: str) -> None:
        """Keep in `notes` how many of all cases are odd, and the first; add their number to `cases`.

        Args:
            sources: FILE:LINE of the odd ones.
            total: all cases.
            what: "texts have ...", as it follows the numbers in a sentence.
        """
        if sources:
            self.cases[what] += len(sources)
            keep_note(self.notes, f"{len(sources):,} of {total:,} {what}; the first is at {sources[0]}.")

    def count_targets(self, targets: dict[str, Tensor], num_rows: int) -> int:
        """Return what the mean loss of a batch divides by; default: its rows."""
        return num_rows

    def collate(self, rows: Sequence[Row]) -> TaskBatch:
        """Put rows side by side, padded to the longest."""
        longest = max(row.length for row in rows)
        pad_id = self.tokenizer.pad_token_id or 0
        ids = _stack([row.input_ids for row in rows], longest, pad_id, axis=-1)
        # Only the options of a choice are padded within a row; "[PAD]" in a text is text.
        is_token = [row.input_ids != pad_id if row.input_ids.ndim > 1 else np.ones(row.length, bool) for row in rows]
        mask = _stack(is_token, longest, False, axis=-1)
        inputs: dict[str, Any] = {
            "input_ids": ids,
            "attention_mask": None if bool(mask.all()) else mask.to(torch.int64),
            "token_type_ids": None,
        }
        sequences = find_sequences(mask.reshape(-1, longest).numpy())
        inputs |= {"cu_seq_lens": torch.from_numpy(sequences["cu_seq_lens"]), "max_length": sequences["max_length"]}
        if any(row.token_type_ids is not None for row in rows):
            types = [np.zeros_like(r.input_ids) if r.token_type_ids is None else r.token_type_ids for r in rows]
            inputs["token_type_ids"] = _stack(types, longest, 0, axis=-1)
        targets: dict[str, Tensor] = {}
        for name in rows[0].targets:
            values = [row.targets[name] for row in rows]
            pad = self.target_pads.get(name)
            stacked = torch.from_numpy(np.stack(values)) if pad is None else _stack(values, longest, pad, axis=0)
            if name.startswith("input_"):
                inputs[name.removeprefix("input_")] = stacked
            else:
                targets[name] = stacked
        return TaskBatch(inputs, targets, self.count_targets(targets, len(rows)))


def keep_note(notes: list[str], note: str) -> None:
    """Add a sentence to a task's notes unless it is there: a split may be encoded more than once."""
    if note not in notes:
        notes.append(note)


def _stack(values: Sequence[np.ndarray], length: int, pad: float, *, axis: int) -> Tensor:
    """Pad arrays along an axis to one length and stack them."""
    padded = []
    for value in values:
        widths = [(0, 0)] * value.ndim
        widths[axis] = (0, length - value.shape[axis])
        padded.append(np.pad(value, widths, constant_values=pad))
    return torch.from_numpy(np.stack(padded))
