"""Stored outputs of a frozen encoder's layers: rows -> segments -> where their features lie -> features in a batch.

Enters: a folder that `features.prepare_features` wrote: parts, float16 arrays [tokens, K, d] of the segments' tokens
one after another, and index.json, which is written last. Leaves: batches with `features`. Features are found by what
the encoder has read, the ids and types of a segment, so none can be taken for another row's. BERT section 5.3.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor

from domext_ray.downstream.tasks.task import Row, TaskBatch

INDEX = "index.json"
KEY_BYTES = 16


@dataclass(frozen=True)
class Segment:
    """What the encoder reads at once: a row, or one option of a choice, without padding.

    Args:
        input_ids: int64 [N].
        token_type_ids: int64 [N].
    """

    input_ids: np.ndarray
    token_type_ids: np.ndarray

    @property
    def key(self) -> str:
        """Hash (hex) of ids and types."""
        content = np.stack([self.input_ids, self.token_type_ids]).astype("<i8").tobytes()
        return hashlib.blake2b(content, digest_size=KEY_BYTES).hexdigest()


def split_row(row: Row, pad_id: int) -> list[Segment]:
    """Return the segments of a row.

    Args:
        row: of one segment [N], or of several [C, N] that are padded among themselves.
        pad_id: id of [PAD].
    """
    types = np.zeros_like(row.input_ids) if row.token_type_ids is None else row.token_type_ids
    if row.input_ids.ndim == 1:
        return [Segment(row.input_ids, types)]
    lengths = [int(np.flatnonzero(each != pad_id)[-1]) + 1 for each in row.input_ids]
    return [Segment(row.input_ids[i, :length], types[i, :length]) for i, length in enumerate(lengths)]


@dataclass(frozen=True)
class FeatureIndex:
    """Content of index.json.

    Args:
        key: hash (hex) of everything that decides the features.
        shape: K layers and d, their width.
        parts: names of the arrays' files.
        places: for each segment, by its key: number of its part, first token in it, number of tokens.
    """

    key: str
    shape: tuple[int, int]
    parts: tuple[str, ...]
    places: dict[str, tuple[int, int, int]]


def read_index(folder: Path) -> FeatureIndex | None:
    """Return the index of a folder; None if it is not complete."""
    path = folder / INDEX
    if not path.exists():
        return None
    values = json.loads(path.read_text(encoding="utf-8"))
    index = FeatureIndex(
        values["key"],
        cast("tuple[int, int]", tuple(values["shape"])),
        tuple(values["parts"]),
        {key: cast("tuple[int, int, int]", tuple(place)) for key, place in values["places"].items()},
    )
    return index if all((folder / name).is_file() for name in index.parts) else None


class FeatureStore:
    """The features of a set's rows, read by memory mapping; of one process, as it holds the mapped files.

    Args:
        folder: what `features.prepare_features` returned.
    """

    def __init__(self, folder: Path) -> None:
        index = read_index(folder)
        assert index is not None, f"{folder} has no complete features"
        self._index = index
        self._parts = [np.load(folder / name, mmap_mode="r") for name in index.parts]

    def read(self, segment: Segment) -> np.ndarray:
        """Return the features of a segment, float16 [N, K, d]."""
        part, first, length = self._index.places[segment.key]
        return self._parts[part][first : first + length]

    def add(self, batch: TaskBatch, rows: Sequence[Row], pad_id: int) -> TaskBatch:
        """Give a batch its features.

        Args:
            batch: what `Task.collate` made of `rows`.
            rows: one or more.
            pad_id: id of [PAD].

        Returns:
            The batch with `features` among its inputs, float32 [B, N, K, d] or [B, C, N, K, d], 0 in padding.
        """
        shape = cast(Tensor, batch.inputs["input_ids"]).shape
        features = np.zeros((*shape, *self._index.shape), dtype=np.float32)
        flat = features.reshape(-1, shape[-1], *self._index.shape)  # a row per segment
        segments = [segment for row in rows for segment in split_row(row, pad_id)]
        for target, segment in zip(flat, segments, strict=True):
            target[: len(segment.input_ids)] = self.read(segment)
        return replace(batch, inputs={**batch.inputs, "features": torch.from_numpy(features)})
