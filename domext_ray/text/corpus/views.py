"""Rows -> two views of each, for the objective that makes a vector of a row; every draw a hash of (seed, epoch, row).

They are a row twice (under other dropout, SimCSE), or two stretches of it, each a tenth to a half of its words, that
may overlap ("independent cropping", Izacard et al. 2021, "Contriever", section 3.1), or the two texts of a row that has
two (rows.py). As masks do, views move with their row, whatever worker reads it; dropout, as everywhere, follows from
seed, step and rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from domext_ray.config.pretrain import ObjectiveConfig
from domext_ray.text.corpus.batching import Arrays, Masker, RowLengths, find_sequences, find_spans, pad_length
from domext_ray.text.corpus.manifest import flatten_lists
from domext_ray.text.corpus.rows import SECOND_START
from domext_ray.text.data.draws import Purpose, hash_counters, to_uniform

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CROP_SHARES = 0.1, 0.5
"""Least and greatest share of a row's words in a stretch of it."""


@dataclass(frozen=True)
class ViewedRows:
    """R rows, two views of each, int64 arrays of token ids; are_parts: both together are the row."""

    first: list[np.ndarray]
    second: list[np.ndarray]
    are_parts: bool = False

    def count_tokens(self, num_parts: int) -> list[int]:
        """Return the tokens of the second views, or of both parts, as those of one text: vectors have no mixture."""
        return [sum(map(len, [*self.first, *self.second] if self.are_parts else self.second))]

    def __len__(self) -> int:
        return len(self.first)

    def cut(self, rows: slice) -> ViewedRows:
        return ViewedRows(self.first[rows], self.second[rows], self.are_parts)

    def take(self, rows: np.ndarray) -> ViewedRows:
        return ViewedRows([self.first[i] for i in rows], [self.second[i] for i in rows], self.are_parts)


class Viewer:
    """Makes views of rows, for one tokenizer, objective and seed; it stands where a `Masker` stands."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, objective: ObjectiveConfig, seed: int) -> None:
        self.objective, self.seed = objective, seed
        self.pad_id = int(tokenizer.pad_token_id)

    def mask(self, rows: pa.Table, epoch: int | np.ndarray) -> ViewedRows:
        """Make the views of a table of rows, which has `SECOND_START` where rows are two texts; see `Masker.mask`."""
        ids, lengths = flatten_lists(rows, "input_ids")
        starts, _ = flatten_lists(rows, "word_starts")
        cuts = np.cumsum(lengths)[:-1]
        whole, word_starts = np.split(ids.astype(np.int64), cuts), np.split(starts, cuts)
        row_ids, epochs = rows.column("row_id").to_pylist(), np.broadcast_to(epoch, len(lengths)).tolist()
        if SECOND_START in rows.column_names:
            seconds = rows.column(SECOND_START).to_pylist()
            parts = [np.split(row, [second]) for row, second in zip(whole, seconds, strict=True)]
            return ViewedRows([first for first, _ in parts], [second for _, second in parts], are_parts=True)

        if self.objective.views == "dropout":
            return ViewedRows(whole, whole)
        drawn = [*zip(whole, word_starts, row_ids, epochs, strict=True)]
        return ViewedRows([self._crop(*row, 0) for row in drawn], [self._crop(*row, 1) for row in drawn])

    def _crop(self, ids: np.ndarray, word_starts: np.ndarray, row_id: int, epoch: int, view: int) -> np.ndarray:
        """Take a stretch of a row's words, between its first and its last token."""
        # A row may begin within a word, behind [CLS].
        firsts = np.unique(np.maximum(find_spans(word_starts)[1:-1], 1))
        if not len(firsts):  # a row of special tokens alone
            return ids
        shares = to_uniform(hash_counters(self.seed, np.array([Purpose.LENGTHS, Purpose.PLACES]), epoch, row_id, view))
        least, most = CROP_SHARES
        num_words = max(1, round((least + (most - least) * shares[0]) * len(firsts)))
        first = int(shares[1] * (len(firsts) - num_words + 1))
        end = firsts[first + num_words] if first + num_words < len(firsts) else len(ids) - 1
        return np.concatenate([ids[:1], ids[firsts[first] : end], ids[-1:]])

    def collate(self, rows: ViewedRows, micro_batch_size: int) -> list[Arrays]:
        """Cut viewed rows into micro batches; see `Masker.collate`."""
        spans = [slice(first, first + micro_batch_size) for first in range(0, len(rows.first), micro_batch_size)]
        return [pad_views(rows.first[span], rows.second[span], self.pad_id) for span in spans]


def make_masker(
    tokenizer: PreTrainedTokenizerBase,
    objective: ObjectiveConfig,
    seed: int,
    *,
    packed: bool = False,
    lengths: RowLengths | None = None,
) -> Masker | Viewer:
    """Return what makes an objective's batches of rows; of `packed` and `lengths` see `Masker`."""
    if objective.makes_vectors:
        return Viewer(tokenizer, objective, seed)
    return Masker(tokenizer, objective, seed, packed=packed, lengths=lengths)


def pad_views(first: Sequence[np.ndarray], second: Sequence[np.ndarray], pad_id: int) -> Arrays:
    """Pad B rows' views into one forward pass of 2B; see `training.objective.ViewBatch`."""
    return {**_pad([*first, *second], pad_id), "weights": np.ones(len(first), dtype=np.float32)}


def _pad(rows: Sequence[np.ndarray], pad_id: int) -> Arrays:
    """Token ids [R, N], their mask, and their sequences; no mask where nothing is padded."""
    lengths = np.array([len(row) for row in rows])
    is_token = np.arange(pad_length(lengths)) < lengths[:, None]
    padded = np.full(is_token.shape, pad_id, dtype=np.int64)
    padded[is_token] = np.concatenate(rows)
    mask = None if is_token.all() else is_token.astype(np.int64)
    return {"input_ids": padded, "attention_mask": mask, **find_sequences(is_token)}
