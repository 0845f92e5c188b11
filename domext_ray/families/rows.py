"""Rows of tokens: put side by side with little padding, and computed from short rows to long ones.

Passes of a training, predictions, fill-mask, vectors of texts, the test of forgetting and the server batch their rows
here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from domext_ray.text.corpus.batching import find_sequences

if TYPE_CHECKING:
    from torch import Tensor


class TokenRow(Protocol):
    """What batching reads of a row."""

    @property
    def input_ids(self) -> np.ndarray: ...
    @property
    def token_type_ids(self) -> np.ndarray | None: ...
    @property
    def segment_lengths(self) -> tuple[int, ...] | None: ...
    @property
    def length(self) -> int: ...


@dataclass(frozen=True)
class Row:
    """One row of a model's input."""

    example: int  # place of its example in the sequence that was encoded
    input_ids: np.ndarray
    """int64 [N], special tokens included; [C, N] for the C options of a choice, padded among themselves."""
    token_type_ids: np.ndarray | None = None  # int64, as `input_ids`; None: all 0
    targets: dict[str, np.ndarray] = field(default_factory=dict)
    """What loss and head need, by name, int64 or float32; "input_x" is the argument x of the model's forward."""
    place: Any = None  # what decoding needs, in the task's own terms
    segment_lengths: tuple[int, ...] | None = None  # tokens of each option of a choice; None: the row is one segment

    @property
    def length(self) -> int:
        """Tokens of the row."""
        return int(self.input_ids.shape[-1])


RowT = TypeVar("RowT", bound=TokenRow)
ResultT = TypeVar("ResultT")


def pad_rows(rows: Sequence[TokenRow], pad_id: int) -> dict[str, Any]:
    """Put the tokens of rows side by side, padded to the longest.

    Return the arguments of a model's forward: input_ids int64 [B, N] (or [B, C, N]), attention_mask (None: nothing is
    padded), token_type_ids (None: all 0) and those of `find_sequences`.
    """
    import torch

    ids, types = _stack([row.input_ids for row in rows], pad_id), None
    if any(row.token_type_ids is not None for row in rows):
        own = [np.zeros_like(r.input_ids) if r.token_type_ids is None else r.token_type_ids for r in rows]
        types = _stack(own, 0)
    # By lengths, for "[PAD]" in a text is text.
    lengths = torch.tensor([row.segment_lengths or row.length for row in rows])
    mask = torch.arange(ids.shape[-1]) < lengths[..., None]
    sequences = find_sequences(mask.reshape(-1, ids.shape[-1]).numpy())
    return {
        "input_ids": ids,
        "attention_mask": None if bool(mask.all()) else mask.to(torch.int64),
        "token_type_ids": types,
        "cu_seq_lens": torch.from_numpy(sequences["cu_seq_lens"]),
        "max_length": sequences["max_length"],
    }


def _stack(values: Sequence[np.ndarray], pad: int) -> Tensor:
    """Pad arrays along their last dimension to one length and stack them."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    stacked = pad_sequence([torch.from_numpy(array).movedim(-1, 0) for array in values], True, pad)
    return stacked.movedim(1, -1).contiguous()


def batch_by_length(rows: Sequence[TokenRow], *, max_tokens: int = 0, max_rows: int = 0) -> list[list[int]]:
    """Return the places of rows from short to long, cut into batches with little padding.

    A batch has `max_tokens` at most, padding counted, and `max_rows`; 0: any number. A row that is longer is a batch of
    its own, and rows of a batch have equally many segments.
    """
    most = max_tokens or sys.maxsize
    segments = [row.input_ids.size // max(row.length, 1) for row in rows]
    batches: list[list[int]] = []
    for place in sorted(range(len(rows)), key=lambda i: (segments[i], rows[i].length)):
        size = len(batches[-1]) if batches else 0
        is_full = size == max_rows or (size + 1) * segments[place] * rows[place].length > most
        if not size or is_full or segments[batches[-1][0]] != segments[place]:
            batches.append([])
        batches[-1].append(place)
    return batches


def run_by_length(
    rows: Sequence[RowT],
    compute: Callable[[list[RowT]], Iterable[ResultT]],
    *,
    max_tokens: int = 0,
    max_rows: int = 0,
) -> list[ResultT]:
    """Return each row's result; `compute` gives those of a batch, in its order.

    The longest batch comes first: memory is short at once, or never.
    """
    results: dict[int, ResultT] = {}
    for places in reversed(batch_by_length(rows, max_tokens=max_tokens, max_rows=max_rows)):
        results.update(zip(places, compute([rows[i] for i in places]), strict=True))
    return [results[place] for place in range(len(rows))]
