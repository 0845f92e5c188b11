"""What a forward pass of pre-training reads, as tensors; `corpus.batching` makes their arrays where rows are read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch

from domext_ray.text.corpus.batching import Arrays, MaskedRows, pad_masked

LOSS, NEXT_SENTENCE_LOSS, KEEP_LOSS, PART_LOSSES = "loss", "next_sentence_loss", "keep_loss", "part_losses"
"""Names of what a forward pass in training returns: the loss of what is predicted, then those that some runs have."""
NO_LABEL = -100
"""Next-sentence label of a row that does not count; cross entropy leaves it out."""


@dataclass(frozen=True)
class KeptRows:
    """What the keep loss reads of a batch: K ≥ 1 of its B rows, and P' ≥ 1 predicted positions in them."""

    rows: torch.Tensor  # int64 [K], their indices in the batch
    prediction_indices: torch.Tensor  # int64 [P'], among the batch's P predicted positions
    positions: torch.Tensor  # int64 [P'], the same positions in the flattened [K·N]
    weights: torch.Tensor  # float32 [P'], 1 for a predicted token, 0 for filler
    token_indices: torch.Tensor | None = None  # this and the next two: of the K rows; see `MaskedBatch`
    cu_seq_lens: torch.Tensor | None = None
    max_length: int = 0


@dataclass(frozen=True)
class MaskedBatch:
    """One forward pass of masked-language modelling, B rows padded to N tokens, P predicted positions."""

    input_ids: torch.Tensor  # int64 [B, N]
    attention_mask: torch.Tensor | None  # int64 [B, N]; None: nothing is padded
    token_type_ids: torch.Tensor | None  # int64 [B, N]; None: all zeros
    masked_positions: torch.Tensor  # int64 [P], P ≥ 1, in the flattened [B·N]
    labels: torch.Tensor  # int64 [P], the tokens to predict: the original ones, or the next ones
    weights: torch.Tensor  # float32 [P], 1 for a predicted token, 0 for filler
    next_sentence_labels: torch.Tensor | None = None
    """int64 [B], 0: the second text follows the first, 1: it is from another document, NO_LABEL: the row does not
    count; None: rows are no pairs."""
    kept_rows: KeptRows | None = None
    """The rows of general text, whose predicted tokens have weight 0 above; None: there is no keep loss."""
    kinds: torch.Tensor | None = None
    """uint8 [V], the kind of every entry; a label competes with entries of its kind only. None: with all."""
    parts: torch.Tensor | None = None
    """int64 [P], the part of a mixture that each predicted token is of, -1 for filler; None: there are none."""
    document_ids: torch.Tensor | None = None
    """int64 [B, N], which of its row's documents each token is of; None: a row is one document."""
    token_indices: torch.Tensor | None = None
    """int64 [T], ascending, the tokens' in the flattened [B·N], and as many of padding as make T a multiple of 64, so
    that few shapes occur; None: most of the batch is tokens."""
    cu_seq_lens: torch.Tensor | None = None  # see `corpus.batching.find_sequences`; None: attention has masks
    max_length: int = 0  # see `corpus.batching.Sizes`; 0: attention has masks

    @property
    def num_masked(self) -> int:
        """Predicted tokens, filler left out."""
        return int(self.weights.sum().item())

    @property
    def num_pairs(self) -> int:
        """Pairs whose next-sentence label counts."""
        return 0 if self.next_sentence_labels is None else int((self.next_sentence_labels != NO_LABEL).sum().item())

    @property
    def num_kept(self) -> int:
        """Predicted tokens of the keep loss."""
        return 0 if self.kept_rows is None else int(self.kept_rows.weights.sum().item())

    @property
    def counts(self) -> dict[str, int]:
        """What each loss is a mean of, by its name."""
        return {LOSS: self.num_masked, NEXT_SENTENCE_LOSS: self.num_pairs, KEEP_LOSS: self.num_kept}

    def without_weight(self) -> MaskedBatch:
        """Return the same forward pass, of which nothing counts."""
        pairs, kept, parts = self.next_sentence_labels, self.kept_rows, self.parts
        return replace(
            self,
            weights=torch.zeros_like(self.weights),
            next_sentence_labels=None if pairs is None else torch.full_like(pairs, NO_LABEL),
            kept_rows=None if kept is None else replace(kept, weights=torch.zeros_like(kept.weights)),
            parts=None if parts is None else torch.full_like(parts, -1),
        )

    def count_predicted(self, num_parts: int) -> list[int]:
        """Return the predicted tokens of each part of a mixture, kept ones too."""
        assert self.parts is not None
        return torch.bincount(self.parts[self.parts >= 0], minlength=num_parts).tolist()


@dataclass(frozen=True)
class ViewBatch:
    """One forward pass over two views of B rows, of which vectors are made."""

    input_ids: torch.Tensor  # int64 [2B, N], the first views and the second behind them
    attention_mask: torch.Tensor | None  # int64 [2B, N]; None: nothing is padded
    weights: torch.Tensor  # float32 [B], 1 for a row that counts and 0 for filler
    cu_seq_lens: torch.Tensor | None = None  # this and the next one: of the 2B views; see `MaskedBatch`
    max_length: int = 0

    @property
    def counts(self) -> dict[str, int]:
        """What each loss is a mean of, by its name: rows."""
        return {LOSS: int(self.weights.sum().item())}

    def without_weight(self) -> ViewBatch:
        """Return the same forward pass, of which nothing counts."""
        return replace(self, weights=torch.zeros_like(self.weights))


def to_batch(arrays: Arrays) -> Any:
    """Make a `MaskedBatch` or a `ViewBatch` of a forward pass; its tensors share the memory of the arrays."""
    tensors = to_tensors(arrays)
    if "masked_positions" not in arrays:
        return ViewBatch(**tensors)
    kept = arrays["kept_rows"]
    if kept is not None:
        tensors["kept_rows"] = KeptRows(**to_tensors(kept))
    return MaskedBatch(**tensors)


def to_tensors(arrays: Arrays) -> dict[str, Any]:
    """Make tensors of arrays, whose memory they share; what is no array stays."""
    return {name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value for name, value in arrays.items()}


def pad_batch(
    inputs: Sequence[np.ndarray],
    labels: Sequence[np.ndarray],
    selected: Sequence[np.ndarray],
    pad_id: int,
    pad_to: int = 0,
    *,
    is_kept: np.ndarray | None = None,
    with_filler: bool = False,
) -> MaskedBatch:
    """Pad B rows, each of `MaskedRows`' fields, into one forward pass; see `pad_masked`."""
    rows = MaskedRows.join([*zip(inputs, labels, selected, strict=True)], is_kept)
    return cast(MaskedBatch, to_batch(pad_masked(rows, pad_id, pad_to=pad_to, with_filler=with_filler)))
