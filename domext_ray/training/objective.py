"""Rows -> masked batches for masked-language modelling; pure, every draw a hash of (seed, epoch, row, position).

Rows that are pairs (see `corpus.pairs`) keep their segments and their next-sentence labels.

BERT section 3.1: 15 % of the tokens are predicted; of these 80 % are replaced by [MASK], 10 % by a random ordinary
token, 10 % stay. With whole-word masking (AF Adapter's setting) one draw decides for all tokens of a word. Because
a draw depends on the row and on nothing around it, masks move with the row, whatever worker reads it.

Section 5.1, left to right: nothing is masked, and every token of a row but the last predicts the one after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import torch
from transformers import PreTrainedTokenizerBase

from domext_ray.config.pretrain import ObjectiveConfig
from domext_ray.corpus.draws import hash_counters, to_uniform
from domext_ray.corpus.manifest import flatten_lists

_SELECT, _ACTION, _REPLACEMENT = 11, 12, 13  # purposes of a hash: no two draws share their counters
PADDING_MULTIPLE = 8
PLACES_MULTIPLE = 64
MOST_PLACES = 0.95
"""Share of a batch's places up to which its padding is left out; above it, moving the tokens costs what it saves."""
_FLAT = ("inputs", "labels", "selected")  # fields of `MaskedRows` that have a value for every token
NO_LABEL = -100
"""Next-sentence label of a row that does not count; cross entropy leaves it out."""


@dataclass(frozen=True)
class KeptRows:
    """What the keeping term reads of a batch: K ≥ 1 of its B rows, and P' ≥ 1 predicted positions in them.

    Args:
        rows: int64 [K], places in the batch.
        places: int64 [P'], places among the batch's P predicted positions.
        positions: int64 [P'], the same positions as places in the flattened [K·N].
        weights: float32 [P'], 1 for a predicted token, 0 for filler.
    """

    rows: torch.Tensor
    places: torch.Tensor
    positions: torch.Tensor
    weights: torch.Tensor


@dataclass(frozen=True)
class MaskedBatch:
    """One forward pass of masked-language modelling, B rows padded to N tokens, P predicted positions.

    Args:
        input_ids: int64 [B, N].
        attention_mask: int64 [B, N], or None when nothing is padded.
        token_type_ids: int64 [B, N], or None for all zeros.
        masked_positions: int64 [P], P ≥ 1, places in the flattened [B·N].
        labels: int64 [P], the tokens to predict: the original ones, or the next ones.
        weights: float32 [P], 1 for a predicted token, 0 for filler.
        next_sentence_labels: int64 [B], 0: the second text follows the first, 1: it is from another document,
            NO_LABEL: the row does not count; None for rows that are no pairs.
        kept: the rows of general text, whose predicted tokens have weight 0 above; None: there is no keeping term.
        kinds: uint8 [V], the kind of every entry; a label competes with entries of its kind only. None: with all.
        parts: int64 [P], the part of a mixture that each predicted token is of, -1 for filler; None: there are none.
        document_ids: int64 [B, N], which of its row's documents each token is of; None: a row is one document.
        places: int64 [T], ascending, the tokens' places in the flattened [B·N], and as many of padding as make T a
            multiple of 64, so that few shapes occur; None: most of the batch is tokens.
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor | None
    token_type_ids: torch.Tensor | None
    masked_positions: torch.Tensor
    labels: torch.Tensor
    weights: torch.Tensor
    next_sentence_labels: torch.Tensor | None = None
    kept: KeptRows | None = None
    kinds: torch.Tensor | None = None
    parts: torch.Tensor | None = None
    document_ids: torch.Tensor | None = None
    places: torch.Tensor | None = None

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
        """Predicted tokens of the keeping term."""
        return 0 if self.kept is None else int(self.kept.weights.sum().item())

    def without_weight(self) -> MaskedBatch:
        """Return the same forward pass, of which nothing counts."""
        pairs = self.next_sentence_labels
        silent = None if pairs is None else torch.full_like(pairs, NO_LABEL)
        return replace(self, weights=torch.zeros_like(self.weights), next_sentence_labels=silent)

    def count_predicted(self, num_parts: int) -> list[int]:
        """Return the predicted tokens of each part of a mixture, kept ones too."""
        assert self.parts is not None
        return torch.bincount(self.parts[self.parts >= 0], minlength=num_parts).tolist()


@dataclass(frozen=True)
class MaskedRows:
    """Rows after masking, flat: S tokens of R rows.

    Args:
        inputs: int64 [S], tokens that the model sees.
        labels: int64 [S], tokens as they were; from left to right the next ones, 0 at the end of a row.
        selected: bool [S], places where something is predicted.
        lengths: int64 [R], tokens a row.
        second_starts: int64 [R], place of the second text's first token; None for rows that are no pairs.
        next_sentence: int64 [R], next-sentence labels; None likewise.
        is_kept: bool [R], rows of general text that the keeping term reads; None: there is no such term.
        parts: int64 [R], the part of a mixture that each row is of; None: there are none.
    """

    inputs: np.ndarray
    labels: np.ndarray
    selected: np.ndarray
    lengths: np.ndarray
    second_starts: np.ndarray | None = None
    next_sentence: np.ndarray | None = None
    is_kept: np.ndarray | None = None
    parts: np.ndarray | None = None

    def count_tokens(self, num_parts: int) -> list[int]:
        """Return the tokens of each part; of rows that are no mixture's all of them."""
        parts = np.zeros(len(self.lengths), dtype=np.int64) if self.parts is None else self.parts
        tokens = np.zeros(num_parts, dtype=np.int64)
        np.add.at(tokens, parts, self.lengths)
        return [int(each) for each in tokens]


def join_rows(
    groups: Sequence[MaskedRows],
    places: Sequence[np.ndarray],
    numbers: Sequence[int],
    is_kept: Sequence[bool] | None,
) -> MaskedRows:
    """Join groups of a mixture's rows, each masked on its own.

    Args:
        groups: the rows, all of them pairs or none.
        places: for each group, where in the batch its rows are; int64.
        numbers: for each group, the part that it is of.
        is_kept: for each group, whether the keeping term reads it; None: there is no such term.
    """
    order = np.argsort(np.concatenate(places), kind="stable")
    lengths = np.concatenate([each.lengths for each in groups])
    firsts = np.cumsum(lengths) - lengths
    tokens = np.concatenate([np.arange(firsts[row], firsts[row] + lengths[row]) for row in order])

    def join(name: str) -> np.ndarray | None:
        values = [getattr(each, name) for each in groups]
        return None if any(each is None for each in values) else np.concatenate(values)[order]

    flat = {name: np.concatenate([getattr(each, name) for each in groups])[tokens] for name in _FLAT}

    def spread(values: Sequence[int]) -> np.ndarray:
        return np.concatenate([np.full(len(each), value) for each, value in zip(places, values, strict=True)])[order]

    return MaskedRows(
        **flat,
        lengths=lengths[order],
        second_starts=join("second_starts"),
        next_sentence=join("next_sentence"),
        is_kept=None if is_kept is None else spread(is_kept),
        parts=spread(numbers),
    )


class Masker:
    """Masks rows for one tokenizer, objective and seed.

    Args:
        tokenizer: gives the special tokens, which are never predicted and never drawn as replacements.
        objective: rates, and whether words are masked as wholes.
        seed: the run's seed.
        packed: rows have several documents, each of which begins with [CLS].
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, objective: ObjectiveConfig, seed: int, *, packed: bool = False
    ) -> None:
        self.objective = objective
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

    def mask(self, rows: pa.Table, epoch: int) -> MaskedRows:
        """Mask a table of rows.

        Args:
            rows: columns input_ids, word_starts (lists of equal lengths) and row_id; pairs have second_start and
                next_sentence, too.
            epoch: masks differ from epoch to epoch.
        """
        tokens, lengths = flatten_lists(rows, "input_ids")
        starts, _ = flatten_lists(rows, "word_starts")
        tokens = tokens.astype(np.int64)
        if self.objective.is_left_to_right:
            return _shift(tokens, lengths)
        row_ids = np.repeat(rows.column("row_id").to_numpy(), lengths)
        positions = np.arange(len(tokens)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        drawn_at = positions
        if self.objective.whole_word:
            # The first token of a row always starts a word, so the running maximum never leaves its row.
            flat = np.where(starts | (positions == 0), np.arange(len(tokens)), 0)
            drawn_at = positions[np.maximum.accumulate(flat)] if len(tokens) else positions
        selected = self._uniform(_SELECT, epoch, row_ids, drawn_at) < self.objective.mask_prob
        selected &= ~self.is_special[tokens]
        inputs = tokens.copy()
        chosen = np.flatnonzero(selected)
        action = self._uniform(_ACTION, epoch, row_ids[chosen], positions[chosen])
        masked = action < self.objective.mask_token_frac
        replaced = ~masked & (action < self.objective.mask_token_frac + self.objective.random_token_frac)
        inputs[chosen[masked]] = self.mask_id
        random = chosen[replaced]
        draws = hash_counters(self.seed, _REPLACEMENT, epoch, row_ids[random], positions[random])
        inputs[random] = self.ordinary_ids[(draws % np.uint64(len(self.ordinary_ids))).astype(np.int64)]
        pair_columns = [
            rows.column(name).to_numpy().astype(np.int64) if name in rows.column_names else None
            for name in ("second_start", "next_sentence")
        ]
        return MaskedRows(inputs, tokens, selected, lengths, *pair_columns)

    def _uniform(self, purpose: int, epoch: int, row_ids: np.ndarray, positions: np.ndarray) -> np.ndarray:
        return to_uniform(hash_counters(self.seed, purpose, epoch, row_ids, positions))

    def collate(self, rows: MaskedRows, micro_batch_size: int) -> list[MaskedBatch]:
        """Cut masked rows into micro batches, each as long as its longest row, rounded up to a multiple of 8.

        Args:
            rows: the rows of this rank's share of a global batch.
            micro_batch_size: rows of a forward pass; the last micro batch may be smaller.
        """
        ends = np.cumsum(rows.lengths)
        batches = []
        for first in range(0, len(rows.lengths), micro_batch_size):
            lengths = rows.lengths[first : first + micro_batch_size]
            begin = int(ends[first] - lengths[0])
            span, own = slice(begin, begin + int(lengths.sum())), slice(first, first + len(lengths))
            batches.append(
                pad_batch(
                    np.split(rows.inputs[span], np.cumsum(lengths)[:-1]),
                    np.split(rows.labels[span], np.cumsum(lengths)[:-1]),
                    np.split(rows.selected[span], np.cumsum(lengths)[:-1]),
                    self.pad_id,
                    second_starts=None if rows.second_starts is None else rows.second_starts[own],
                    next_sentence=None if rows.next_sentence is None else rows.next_sentence[own],
                    is_kept=None if rows.is_kept is None else rows.is_kept[own],
                    parts=None if rows.parts is None else rows.parts[own],
                    first_id=self.first_id,
                    with_filler=True,
                )
            )
        return batches


def _shift(tokens: np.ndarray, lengths: np.ndarray) -> MaskedRows:
    """Let every token of a row but the last predict the next one; rows are flat, as in `MaskedRows`."""
    is_last = np.zeros(len(tokens), dtype=bool)
    is_last[np.cumsum(lengths) - 1] = True
    return MaskedRows(tokens, np.where(is_last, 0, np.roll(tokens, -1)), ~is_last, lengths)


def pad_batch(
    inputs: Sequence[np.ndarray],
    labels: Sequence[np.ndarray],
    selected: Sequence[np.ndarray],
    pad_id: int,
    pad_to: int = 0,
    *,
    second_starts: np.ndarray | None = None,
    next_sentence: np.ndarray | None = None,
    is_kept: np.ndarray | None = None,
    parts: np.ndarray | None = None,
    first_id: int | None = None,
    with_filler: bool = False,
) -> MaskedBatch:
    """Pad rows into one `MaskedBatch`; without any predicted token, one filler position has weight 0.

    Args:
        inputs: B arrays of token ids that the model sees.
        labels: B arrays of token ids to predict.
        selected: B boolean arrays, what to predict.
        pad_id: id of [PAD].
        pad_to: padded length N; 0: the longest row, rounded up to a multiple of 8.
        second_starts: int64 [B], where the second text of a pair starts; None: no pairs.
        next_sentence: int64 [B], next-sentence labels; None: there are none.
        is_kept: bool [B], rows that the keeping term reads; None: there is no such term.
        parts: int64 [B], parts of a mixture; None: there are none.
        first_id: id of the token that each document of a row begins with; None: a row is one document.
        with_filler: more filler brings P to `round_up` of the predicted tokens.
    """
    lengths = np.array([len(each) for each in inputs])
    length = pad_to or -(-int(lengths.max()) // PADDING_MULTIPLE) * PADDING_MULTIPLE
    input_ids = np.full((len(inputs), length), pad_id, dtype=np.int64)
    original = np.zeros((len(inputs), length), dtype=np.int64)
    chosen = np.zeros((len(inputs), length), dtype=bool)
    for i, size in enumerate(lengths):
        input_ids[i, :size], original[i, :size], chosen[i, :size] = inputs[i], labels[i], selected[i]
    predicted = np.flatnonzero(chosen)
    num_positions = max(1, round_up(len(predicted)) if with_filler else len(predicted))
    weights = (np.arange(num_positions) < len(predicted)).astype(np.float32)
    masked_positions = np.concatenate([predicted, np.zeros(num_positions - len(predicted), dtype=np.int64)])
    own = None if parts is None else np.where(weights > 0, parts[masked_positions // length], -1)
    kept = None if is_kept is None else _find_kept(is_kept, masked_positions, weights, length)
    places, mask, segments = np.arange(length), None, None
    if (lengths < length).any():
        mask = torch.from_numpy((places < lengths[:, None]).astype(np.int64))
    if second_starts is not None:
        is_second = (places >= second_starts[:, None]) & (places < lengths[:, None])
        segments = torch.from_numpy(is_second.astype(np.int64))
    return MaskedBatch(
        input_ids=torch.from_numpy(input_ids),
        attention_mask=mask,
        token_type_ids=segments,
        masked_positions=torch.from_numpy(masked_positions),
        labels=torch.from_numpy(original.reshape(-1)[masked_positions]),
        weights=torch.from_numpy(weights),
        next_sentence_labels=None if next_sentence is None else torch.from_numpy(next_sentence),
        kept=kept,
        parts=None if own is None else torch.from_numpy(own),
        document_ids=None if first_id is None else torch.from_numpy((input_ids == first_id).cumsum(1)),
        places=_find_places(lengths, length),
    )


def round_up(num_predicted: int) -> int:
    """Return how many positions a micro batch with some predicted tokens has: at most a sixteenth more of them.

    They are a multiple of a power of two, so that few numbers occur: a CPU makes new kernels for every new one, which
    took 4 % of a step of a small base.
    """
    multiple = 1 << max(0, (num_predicted // 16).bit_length() - 1)
    return num_predicted + -num_predicted % multiple


def _find_places(lengths: np.ndarray, length: int) -> torch.Tensor | None:
    """Return `MaskedBatch.places` of rows padded to a length; None where leaving padding out saves too little."""
    shown = (np.arange(length) < lengths[:, None]).reshape(-1)
    num_places = -(-int(shown.sum()) // PLACES_MULTIPLE) * PLACES_MULTIPLE
    if num_places > MOST_PLACES * len(shown):
        return None
    shown[np.flatnonzero(~shown)[: num_places - int(shown.sum())]] = True
    return torch.from_numpy(np.flatnonzero(shown))


def _find_kept(is_kept: np.ndarray, masked_positions: np.ndarray, weights: np.ndarray, length: int) -> KeptRows:
    """Give the keeping term its rows and predicted positions, whose weights become 0; a filler where there are none.

    Every batch has a row of it: ranks that made another number of forward passes would wait for each other at ZeRO-3.
    """
    rows = np.flatnonzero(is_kept)
    in_rows = is_kept[masked_positions // length] & (weights > 0)
    weights[in_rows] = 0.0
    places = np.flatnonzero(in_rows)
    if not len(places):
        rows, filler = rows if len(rows) else np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64)
        return KeptRows(*map(torch.from_numpy, (rows, filler, filler.copy(), np.zeros(1, dtype=np.float32))))
    kept = masked_positions[places]
    positions = np.searchsorted(rows, kept // length) * length + kept % length
    return KeptRows(*map(torch.from_numpy, (rows, places, positions, np.ones(len(places), dtype=np.float32))))
