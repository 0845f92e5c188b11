"""Rows -> masked, padded micro batches; pure, every draw a hash of (seed, epoch, row, position).

Enters: rows of a prepared corpus. Leaves: `Arrays`, one forward pass each, of which training makes tensors. All of
it is numpy, so that the tasks that read rows make batches of them, and a training process has nothing left to do.

Rows that are pairs (see `corpus.pairs`) keep their segments and their next-sentence labels.

BERT section 3.1: 15 % of the tokens are predicted; of these 80 % are replaced by [MASK], 10 % by a random ordinary
token, 10 % stay. With whole-word masking (AF Adapter's setting) one draw decides for all tokens of a word, or of each
span of a word that is longer than `SPAN_TOKENS` (`find_spans`). Because a draw depends on the row and on nothing around
it, masks move with the row, whatever worker reads it.

Section 5.1, left to right: nothing is masked, and every token of a row but the last predicts the one after it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from domext_ray.config.pretrain import ObjectiveConfig
from domext_ray.text.corpus.manifest import flatten_lists
from domext_ray.text.data.draws import Purpose, hash_counters, to_uniform

if TYPE_CHECKING:  # reading tasks, which unpickle maskers, need neither transformers nor torch
    from transformers import PreTrainedTokenizerBase

Arrays = dict[str, Any]
"""A forward pass as numpy arrays, by the fields of `training.objective`'s batches; what is missing is None there."""
EPOCH = "epoch"
"""Column of rows that are read for training: int32, how often their text was read before."""

PADDING_MULTIPLE = 8
TOKENS_MULTIPLE = 64
USUAL_SPAN, USUAL_DOCUMENT, NUM_DEVIATIONS = 4, 64, 4
"""Of batches of one shape: tokens that one draw decides for, taken large, those of a packed document, taken small, and
for how many standard deviations above the mean there is room."""
MAX_TOKEN_FRAC = 0.95
"""Share of tokens in a batch up to which its padding is left out; above it, moving the tokens costs what it saves."""
SPAN_TOKENS = 16
"""Tokens that one draw decides for, at most. A longer word is a sequence (DNA, a protein, base64) or a row of dots,
and may fill a row, all of which would be masked or nothing."""
_FLAT = ("inputs", "labels", "selected")  # fields of `MaskedRows` that have a value for every token


@dataclass(frozen=True)
class MaskedRows:
    """Rows after masking, flat: S tokens of R rows; int64 where nothing else is said."""

    inputs: np.ndarray  # [S], tokens that the model sees
    labels: np.ndarray  # [S], tokens as they were; from left to right the next ones, 0 at the end of a row
    selected: np.ndarray  # bool [S], places where something is predicted
    lengths: np.ndarray  # [R]
    second_starts: np.ndarray | None = None  # [R], place of the second text's first token; None: rows are no pairs
    next_sentence: np.ndarray | None = None  # [R], labels; None likewise
    is_kept: np.ndarray | None = None  # bool [R], rows that the keep loss reads; None: there is none
    parts: np.ndarray | None = None  # [R], the part of a mixture that each row is of; None: there are none

    @classmethod
    def join(cls, rows: Sequence[Sequence[np.ndarray]], is_kept: np.ndarray | None = None) -> MaskedRows:
        """Make R rows of inputs, labels and what is selected, each [n]."""
        inputs, labels, selected = (np.concatenate(values) for values in zip(*rows, strict=True))
        return cls(inputs, labels, selected, np.array([len(first) for first, *_ in rows]), is_kept=is_kept)

    def __len__(self) -> int:
        return len(self.lengths)

    def count_tokens(self, num_parts: int) -> list[int]:
        """Return the tokens of each part of a mixture; of other rows all of them."""
        parts = np.zeros(len(self.lengths), dtype=np.int64) if self.parts is None else self.parts
        return [int(number) for number in np.bincount(parts, self.lengths, minlength=num_parts)]

    def cut(self, rows: slice) -> MaskedRows:
        """Return some rows that follow each other."""
        first = int(self.lengths[: rows.start].sum())
        return self._pick(rows, slice(first, first + int(self.lengths[rows].sum())))

    def take(self, rows: np.ndarray) -> MaskedRows:
        """Return rows by their indices, int64, in this order."""
        lengths, firsts = self.lengths[rows], np.cumsum(self.lengths) - self.lengths
        shifts = firsts[rows] - (np.cumsum(lengths) - lengths)
        return self._pick(rows, np.repeat(shifts, lengths) + np.arange(lengths.sum()))

    def _pick(self, rows: slice | np.ndarray, tokens: slice | np.ndarray) -> MaskedRows:
        values = {name: value for name, value in vars(self).items() if value is not None}
        return MaskedRows(**{name: value[tokens if name in _FLAT else rows] for name, value in values.items()})


def join_rows(
    groups: Sequence[MaskedRows],
    places: Sequence[np.ndarray],
    numbers: Sequence[int],
    is_kept: Sequence[bool] | None,
) -> MaskedRows:
    """Join groups of a mixture's rows, each masked on its own, all of them pairs or none.

    Of each group there is where in the batch its rows are, int64, the number of its part, and whether the keep loss
    reads it; `is_kept` None: there is none.
    """
    values: dict[str, list[Any]] = {name: [getattr(group, name) for group in groups] for name in vars(groups[0])}
    sizes = [len(indices) for indices in places]
    values["parts"] = [*map(np.full, sizes, numbers)]
    values["is_kept"] = [None] if is_kept is None else [*map(np.full, sizes, is_kept)]
    there = {name: own for name, own in values.items() if not any(value is None for value in own)}
    return MaskedRows(**{name: np.concatenate(own) for name, own in there.items()}).take(
        np.argsort(np.concatenate(places), kind="stable")
    )


@dataclass(frozen=True)
class RowLengths:
    """Tokens of packed rows: of a full one, and on average."""

    full: int
    mean: float


@dataclass(frozen=True)
class Sizes:
    """Sizes of a micro batch of packed rows that others have, too, so that a step may be compiled for one shape.

    What a batch has more of, it has in a size of its own.
    """

    length: int  # N
    num_tokens: int  # T; B·N: padding is computed, too
    num_positions: int  # P
    num_sequences: int  # S

    @classmethod
    def of_rows(cls, num_rows: int, lengths: RowLengths, mask_prob: float) -> Sizes:
        """Return the sizes in which nearly all batches of so many rows have room."""
        grid, mean = num_rows * lengths.full, num_rows * lengths.mean
        # How far rows differ is not known: as if what they lack of a full one were exponentially distributed.
        tokens = mean + NUM_DEVIATIONS * math.sqrt(num_rows) * (lengths.full - lengths.mean)
        if mean > MAX_TOKEN_FRAC * grid:
            tokens = grid
        deviation = math.sqrt(mask_prob * (1 - mask_prob) * USUAL_SPAN * mean)
        positions = mask_prob * mean + NUM_DEVIATIONS * deviation
        return cls(
            lengths.full,
            min(grid, _round_up(tokens, TOKENS_MULTIPLE)),
            min(grid, _round_up(positions, PADDING_MULTIPLE)),
            2 * num_rows + grid // USUAL_DOCUMENT,  # a row's beginning and its padding begin sequences, too
        )


def _round_up(number: float, multiple: int) -> int:
    return math.ceil(number / multiple) * multiple


def pad_length(lengths: np.ndarray) -> int:
    """Return the length to which rows are padded: that of the longest, rounded up to a multiple of 8."""
    return _round_up(int(lengths.max()), PADDING_MULTIPLE)


class Masker:
    """Masks rows for one tokenizer, objective and seed.

    Special tokens are never predicted and never drawn as replacements. Rows that are `packed` have several documents,
    each of which begins with [CLS]; given `lengths`, all batches of them have one shape.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        objective: ObjectiveConfig,
        seed: int,
        *,
        packed: bool = False,
        lengths: RowLengths | None = None,
    ) -> None:
        self.objective = objective
        self.lengths = lengths
        self.first_id = tokenizer.cls_token_id if packed else None
        self.seed = seed
        self.mask_id = tokenizer.mask_token_id
        self.pad_id = tokenizer.pad_token_id
        entries = tokenizer.get_vocab()
        self.is_special = np.zeros(max(entries.values()) + 1, dtype=bool)
        self.is_special[list(tokenizer.all_special_ids)] = True
        # Of the entries, not of all numbers below the last one: ids may have gaps.
        used = sorted({i for token, i in entries.items() if not token.startswith("[unused")})
        self.ordinary_ids = np.array([i for i in used if not self.is_special[i]], dtype=np.int64)

    def mask(self, rows: pa.Table, epoch: int | np.ndarray) -> MaskedRows:
        """Mask a table of rows; masks differ from epoch to epoch, and `epoch` is that of all rows, or int64 [R].

        The columns are input_ids, word_starts (lists of equal lengths) and row_id; pairs have second_start and
        next_sentence, too.
        """
        tokens, lengths = flatten_lists(rows, "input_ids")
        starts, _ = flatten_lists(rows, "word_starts")
        tokens = tokens.astype(np.int64)
        if self.objective.is_causal:
            return _shift(tokens, lengths)
        row_ids, row_of = rows.column("row_id").to_numpy(), np.repeat(np.arange(len(lengths)), lengths)
        positions = np.arange(len(tokens)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        drawn_at = positions
        if self.objective.whole_word:
            drawn_at = positions[find_spans(starts | (positions == 0))]

        def draw(purpose: int, places: np.ndarray, at: np.ndarray) -> np.ndarray:
            of_rows = hash_counters(self.seed, purpose, epoch, row_ids)
            return hash_counters(at[places], start=of_rows[row_of[places]])

        selected = to_uniform(draw(Purpose.MASKS, np.arange(len(tokens)), drawn_at)) < self.objective.mask_prob
        selected &= ~self.is_special[tokens]
        inputs = tokens.copy()
        chosen = np.flatnonzero(selected)
        action = to_uniform(draw(Purpose.ACTIONS, chosen, positions))
        masked = action < self.objective.mask_token_frac
        replaced = ~masked & (action < self.objective.mask_token_frac + self.objective.random_token_frac)
        inputs[chosen[masked]] = self.mask_id
        random = chosen[replaced]
        draws = draw(Purpose.REPLACEMENTS, random, positions)
        inputs[random] = self.ordinary_ids[(draws % np.uint64(len(self.ordinary_ids))).astype(np.int64)]
        pair_columns = [
            rows.column(name).to_numpy().astype(np.int64) if name in rows.column_names else None
            for name in ("second_start", "next_sentence")
        ]
        return MaskedRows(inputs, tokens, selected, lengths, *pair_columns)

    def collate(self, rows: MaskedRows, micro_batch_size: int) -> list[Arrays]:
        """Cut masked rows into micro batches, each as long as its longest row, rounded up to a multiple of 8.

        The last one may have fewer rows than the others.
        """
        firsts = range(0, len(rows.lengths), micro_batch_size)
        each_cut = (rows.cut(slice(first, first + micro_batch_size)) for first in firsts)
        return [
            pad_masked(cut, self.pad_id, first_id=self.first_id, with_filler=True, sizes=self._find_sizes(len(cut)))
            for cut in each_cut
        ]

    def _find_sizes(self, num_rows: int) -> Sizes | None:
        return None if self.lengths is None else Sizes.of_rows(num_rows, self.lengths, self.objective.mask_prob)


def find_spans(starts: np.ndarray) -> np.ndarray:
    """Find the span that each token is drawn with: its word, or a part of one that has more than `SPAN_TOKENS` tokens.

    Return the index of the span's first token, int64 [S]. In `starts`, bool [S], each row's first token starts a word.
    The parts of a word are as few as there can be, and their sizes differ by one token at most.
    """
    firsts = np.flatnonzero(starts)
    sizes = np.diff(firsts, append=len(starts))
    if sizes.max(initial=0) > SPAN_TOKENS:
        num_spans = -(-sizes // SPAN_TOKENS)
        words = np.repeat(np.arange(len(firsts)), num_spans)
        numbers = np.arange(len(words)) - (np.cumsum(num_spans) - num_spans)[words]
        firsts = firsts[words] + numbers * sizes[words] // num_spans[words]
        sizes = np.diff(firsts, append=len(starts))
    return np.repeat(firsts, sizes)


def _shift(tokens: np.ndarray, lengths: np.ndarray) -> MaskedRows:
    """Let every token of a row but the last predict the next one; rows are flat, as in `MaskedRows`."""
    is_last = np.zeros(len(tokens), dtype=bool)
    is_last[np.cumsum(lengths) - 1] = True
    return MaskedRows(tokens, np.where(is_last, 0, np.roll(tokens, -1)), ~is_last, lengths)


def pad_masked(
    rows: MaskedRows,
    pad_id: int,
    *,
    pad_to: int = 0,
    first_id: int | None = None,
    with_filler: bool = False,
    sizes: Sizes | None = None,
) -> Arrays:
    """Pad rows into one forward pass, the fields of `training.objective.MaskedBatch`.

    The length N is `pad_to`; 0: that of the longest row, rounded up to a multiple of 8. `first_id` is the token that
    each document of a row begins with; None: a row is one document. Without any predicted token, one filler position
    has weight 0; `with_filler` adds more of them, until P is `round_up` of the predicted tokens. Given the `sizes` of
    a batch of packed rows, padding is a document of its own.
    """
    lengths = rows.lengths
    length = sizes.length if sizes else pad_to or pad_length(lengths)
    places = np.arange(length)
    shown = places < lengths[:, None]
    input_ids = np.full(shown.shape, pad_id, dtype=np.int64)
    original, chosen = np.zeros_like(input_ids), np.zeros_like(shown)
    input_ids[shown], original[shown], chosen[shown] = rows.inputs, rows.labels, rows.selected
    predicted = np.flatnonzero(chosen)
    num_positions = max(1, round_up(len(predicted)) if with_filler else len(predicted))
    if sizes is not None and len(predicted) <= sizes.num_positions:
        num_positions = sizes.num_positions
    weights = (np.arange(num_positions) < len(predicted)).astype(np.float32)
    masked_positions = np.concatenate([predicted, np.zeros(num_positions - len(predicted), dtype=np.int64)])
    parts = None if rows.parts is None else np.where(weights > 0, rows.parts[masked_positions // length], -1)
    document_ids = None if first_id is None else (input_ids == first_id).cumsum(1)
    if sizes is not None and document_ids is not None:
        document_ids += ~shown
    kept_rows = None
    if rows.is_kept is not None:
        kept_rows = _find_kept_rows(rows.is_kept, masked_positions, weights, shown, document_ids)
    segments = None if rows.second_starts is None else (shown & (places >= rows.second_starts[:, None]))
    return {
        "input_ids": input_ids,
        "attention_mask": None if sizes is not None or shown.all() else shown.astype(np.int64),
        "token_type_ids": None if segments is None else segments.astype(np.int64),
        "masked_positions": masked_positions,
        "labels": original.reshape(-1)[masked_positions],
        "weights": weights,
        "next_sentence_labels": rows.next_sentence,
        "kept_rows": kept_rows,
        "parts": parts,
        "document_ids": document_ids,
        **_find_bounds(shown, document_ids, sizes),
    }


def _find_bounds(shown: np.ndarray, document_ids: np.ndarray | None, sizes: Sizes | None = None) -> Arrays:
    """Return which tokens of padded rows are computed, and where their sequences are; see `MaskedBatch`."""
    if sizes is None:
        num_indices = _round_up(int(shown.sum()), TOKENS_MULTIPLE)
        token_indices = None if num_indices > MAX_TOKEN_FRAC * shown.size else _take_tokens(shown, num_indices)
        return {"token_indices": token_indices, **find_sequences(shown, document_ids, token_indices)}
    token_indices = None
    if int(shown.sum()) <= sizes.num_tokens < shown.size:
        token_indices = _take_tokens(shown, sizes.num_tokens)
    bounds = find_sequences(shown, document_ids, token_indices)["cu_seq_lens"]
    missing = -(len(bounds) - 1) % sizes.num_sequences  # empty sequences, behind the last one
    bounds = np.pad(bounds, (0, missing), mode="edge")
    return {"token_indices": token_indices, "cu_seq_lens": bounds, "max_length": sizes.length}


def find_sequences(
    shown: np.ndarray, document_ids: np.ndarray | None = None, token_indices: np.ndarray | None = None
) -> Arrays:
    """Return what attention without padding asks of padded rows, of which bool [B, N] says what are tokens.

    `cu_seq_lens` int32 [S + 1] and `max_length` are as in `DomextModel`, like the other arguments: here they cost
    nothing, and a GPU would make its host wait for them.
    """
    begins = np.ones(shown.shape, dtype=bool)
    begins[:, 1:] = shown[:, 1:] != shown[:, :-1]
    if document_ids is not None:
        begins[:, 1:] |= document_ids[:, 1:] != document_ids[:, :-1]
    numbers = begins.reshape(-1).cumsum()
    lengths = np.bincount(numbers if token_indices is None else numbers[token_indices])
    lengths = lengths[lengths > 0]
    return {"cu_seq_lens": np.append(0, lengths.cumsum()).astype(np.int32), "max_length": int(lengths.max())}


def round_up(num_predicted: int) -> int:
    """Return how many positions a micro batch with some predicted tokens has: at most a sixteenth more of them.

    They are a multiple of a power of two, so that few numbers occur: a CPU makes new kernels for every new one, which
    took 4 % of a step of a small base.
    """
    multiple = 1 << max(0, (num_predicted // 16).bit_length() - 1)
    return num_predicted + -num_predicted % multiple


def _take_tokens(is_token: np.ndarray, num_indices: int) -> np.ndarray:
    """Return the places of the tokens, and of as much padding, in ascending order."""
    shown = is_token.reshape(-1).copy()
    shown[np.flatnonzero(~shown)[: num_indices - int(shown.sum())]] = True
    return np.flatnonzero(shown)


def _find_kept_rows(
    is_kept: np.ndarray,
    masked_positions: np.ndarray,
    weights: np.ndarray,
    shown: np.ndarray,
    document_ids: np.ndarray | None,
) -> Arrays:
    """Give the keep loss its rows and predicted positions, whose weights become 0; a filler if there are none.

    Every batch has a row of it: ranks that made another number of forward passes would wait for each other at ZeRO-3.
    """
    rows, length = np.flatnonzero(is_kept), shown.shape[1]
    in_rows = is_kept[masked_positions // length] & (weights > 0)
    weights[in_rows] = 0.0
    indices = np.flatnonzero(in_rows)
    if len(indices):
        found = masked_positions[indices]
        positions = np.searchsorted(rows, found // length) * length + found % length
        own_weights = np.ones(len(indices), dtype=np.float32)
    else:
        rows, indices = rows if len(rows) else np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64)
        positions, own_weights = indices.copy(), np.zeros(1, dtype=np.float32)
    own_documents = None if document_ids is None else document_ids[rows]
    return {
        "rows": rows,
        "prediction_indices": indices,
        "positions": positions,
        "weights": own_weights,
        **_find_bounds(shown[rows], own_documents),
    }
