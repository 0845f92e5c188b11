"""Pairs of text for next-sentence prediction (BERT section 3.1, task 2).

Preparation makes *chunks*: whole sentences of one document, without special tokens, up to the room of a pair, with a
sentence boundary that divides them into the texts A and B. Reading makes pairs of them, a pure function of
(seed, epoch, row): in half of the rows B stays (label 0), in the other half it gives way to sentences of a chunk of
another document (label 1). The row becomes [CLS] A [SEP] B [SEP].

BERT's own code draws the other text from a random sentence on to the row's end; here it is a run of whole sentences
about as long as the B it replaces, so that neither the length of a row nor a sentence that breaks off gives its label
away.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from domext_ray.corpus.draws import hash_counters
from domext_ray.corpus.manifest import Manifest, Split, flatten_lists, take_numbered
from domext_ray.corpus.rows import RowSettings, find_cut, tokenize_documents

NUM_SPECIAL_TOKENS = 3  # [CLS] A [SEP] B [SEP]
MAX_ATTEMPTS = 16
"""Rows that are drawn until one is of another document and has a run of sentences of about the right length."""

LENGTH_TOLERANCE = 0.2
"""What is about the right length: the difference as a share of the length wanted."""

NO_NEXT_SENTENCE = "no next sentence"
"""Why a document makes no pair."""

_FOLLOWS, _PARTNER = 21, 22  # purposes of a hash: no two draws share their counters

CHUNK_SCHEMA = pa.schema(
    [
        ("input_ids", pa.list_(pa.int32())),
        ("word_starts", pa.list_(pa.bool_())),
        ("sentence_starts", pa.list_(pa.bool_())),
        ("split", pa.int32()),
        ("document", pa.int64()),
    ]
)


class Chunk(NamedTuple):
    """Consecutive sentences of one document, N tokens.

    Args:
        ids: int32 [N], without special tokens.
        word_starts: bool [N], whether a word starts here.
        sentence_starts: bool [N], whether a sentence, or the rest of one that was too long, starts here.
        split: tokens of the first text A, the place where B starts.
        document: number of the document, unique in the corpus.
    """

    ids: np.ndarray
    word_starts: np.ndarray
    sentence_starts: np.ndarray
    split: int
    document: int


class Run(NamedTuple):
    """Sentences of a chunk, N tokens.

    Args:
        ids: int32 [N].
        word_starts: bool [N].
        gap: difference from the length wanted, tokens; infinite where the last sentence is cut.
    """

    ids: np.ndarray
    word_starts: np.ndarray
    gap: float


def build_chunks(
    documents: Iterable[str], settings: RowSettings, first_document: int, counts: Counter[str]
) -> Iterator[Chunk]:
    """Turn documents into chunks of at least two sentences.

    Args:
        documents: clean text.
        settings: tokenizer and row length.
        first_document: number of the first document; the others follow.
        counts: counts documents: "used", and those that have no two sentences.

    Yields:
        Chunks of at most `seq_length` - 3 tokens.
    """
    capacity = settings.seq_length - NUM_SPECIAL_TOKENS
    for document, sentences in enumerate(tokenize_documents(documents, settings), start=first_document):
        # No sentence is longer than half of a chunk, so any two fit into one.
        parts = [part for ids, starts in sentences for part in _cut_sentence(ids, starts, capacity // 2)]
        groups = _group_sentences([len(ids) for ids, _ in parts], capacity)
        counts["used" if groups else NO_NEXT_SENTENCE] += 1
        for first, end in groups:
            yield _join_chunk(parts[first:end], document)


def _cut_sentence(ids: np.ndarray, starts: np.ndarray, size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    while len(ids) > size:
        cut = find_cut(starts, size)
        yield ids[:cut], starts[:cut]
        ids, starts = ids[cut:], starts[cut:]
    if len(ids):
        yield ids, starts


def _group_sentences(lengths: Sequence[int], capacity: int) -> list[tuple[int, int]]:
    """First and end of every group of sentences that makes a chunk.

    A last sentence that is alone takes one from the group before it, if that can spare one; else it is left out.
    """
    firsts, size = [0], 0
    for i, length in enumerate(lengths):
        if size + length > capacity:
            firsts.append(i)
            size = 0
        size += length
    groups = list(zip(firsts, [*firsts[1:], len(lengths)], strict=True))
    if groups[-1][1] - groups[-1][0] < 2:
        _, end = groups.pop()
        if groups and groups[-1][1] - groups[-1][0] > 2:
            first, shared = groups.pop()
            groups += [(first, shared - 1), (shared - 1, end)]
    return groups


def _join_chunk(sentences: Sequence[tuple[np.ndarray, np.ndarray]], document: int) -> Chunk:
    """Join sentences; the boundary is a hash of the content, and any is as likely as the others."""
    ids = np.concatenate([ids for ids, _ in sentences])
    firsts = np.cumsum([0, *(len(ids) for ids, _ in sentences[:-1])])
    sentence_starts = np.zeros(len(ids), dtype=bool)
    sentence_starts[firsts] = True
    drawn = zlib.crc32(ids.tobytes()) % (len(firsts) - 1)
    starts = np.concatenate([starts for _, starts in sentences])
    return Chunk(ids, starts, sentence_starts, int(firsts[1 + drawn]), document)


@dataclass(frozen=True)
class PairDrawer:
    """Draws the second texts of a split's rows.

    Args:
        paths: files of the split's shards, in manifest order.
        shard_rows: rows of every shard.
        seed: seed of the draws.
        seq_length: tokens of a row, at most.
        cls_id, sep_id: ids of [CLS] and [SEP].
    """

    paths: tuple[str, ...]
    shard_rows: tuple[int, ...]
    seed: int
    seq_length: int
    cls_id: int
    sep_id: int

    def draw(self, rows: pa.Table, epoch: int) -> pa.Table:
        """Turn chunks into pairs.

        Args:
            rows: the columns of `CHUNK_SCHEMA`, and row_id (int64, the row's number in the split).
            epoch: other pairs are drawn in every epoch.

        Returns:
            Table of as many rows: input_ids, word_starts (special tokens start words), row_id, second_start (int32,
            place of B's first token) and next_sentence (int8; 0: B follows A, 1: B is from another document).
        """
        chunks = _unpack(rows)
        row_ids = rows.column("row_id").to_numpy()
        others = self._find_others(row_ids, chunks, epoch)
        table = self._join_pairs(chunks, others).append_column("row_id", pa.array(row_ids))
        table = table.append_column("second_start", pa.array([each.split + 2 for each in chunks], type=pa.int32()))
        labels = [int(i in others) for i in range(len(chunks))]
        return table.append_column("next_sentence", pa.array(labels, type=pa.int8()))

    def _find_others(self, row_ids: np.ndarray, chunks: Sequence[Chunk], epoch: int) -> dict[int, Run]:
        """Return the second text of every row that gets one from another document, by the row's place."""
        drawn = hash_counters(self.seed, _FOLLOWS, epoch, row_ids) >> np.uint64(63)
        pending = np.flatnonzero(drawn)
        best: dict[int, Run] = {}
        for attempt in range(MAX_ATTEMPTS):
            if not len(pending):
                break
            numbers = hash_counters(self.seed, _PARTNER, epoch, row_ids[pending], attempt)
            numbers = (numbers % np.uint64(sum(self.shard_rows))).astype(np.int64)
            unmatched = []
            partners = _unpack(take_numbered(self.paths, self.shard_rows, numbers))
            for i, partner in zip(pending.tolist(), partners, strict=True):
                length = len(chunks[i].ids) - chunks[i].split
                if partner.document != chunks[i].document:
                    room = self.seq_length - NUM_SPECIAL_TOKENS - chunks[i].split
                    found = choose_sentences(partner, length, room)
                    best[i] = min(best.get(i, found), found, key=lambda run: run.gap)
                if i not in best or best[i].gap > LENGTH_TOLERANCE * length:
                    unmatched.append(i)
            pending = np.array(unmatched, dtype=np.int64)
        return best

    def _join_pairs(self, chunks: Sequence[Chunk], others: dict[int, Run]) -> pa.Table:
        cls, sep = (np.array([i], dtype=np.int32) for i in (self.cls_id, self.sep_id))
        special = np.ones(1, dtype=bool)
        ids, starts, lengths = [np.zeros(0, dtype=np.int32)], [np.zeros(0, dtype=bool)], []
        for i, chunk in enumerate(chunks):
            second = others.get(i) or Run(chunk.ids[chunk.split :], chunk.word_starts[chunk.split :], 0)
            ids += [cls, chunk.ids[: chunk.split], sep, second.ids, sep]
            starts += [special, chunk.word_starts[: chunk.split], special, second.word_starts, special]
            lengths.append(chunk.split + len(second.ids) + NUM_SPECIAL_TOKENS)
        offsets = pa.array(np.cumsum([0, *lengths]).astype(np.int32))
        columns = {"input_ids": np.concatenate(ids), "word_starts": np.concatenate(starts)}
        return pa.table({name: pa.ListArray.from_arrays(offsets, pa.array(each)) for name, each in columns.items()})


def make_pair_drawer(manifest: Manifest, split: Split, seed: int) -> PairDrawer:
    """Return what draws the pairs of a split.

    Args:
        manifest: a corpus prepared for pairs.
        split: whose rows, and whose documents the other texts are from.
        seed: seed of the draws.
    """
    shard_rows = tuple(each.num_rows for each in manifest.records(split))
    return PairDrawer(manifest.paths(split), shard_rows, seed, manifest.seq_length, manifest.cls_id, manifest.sep_id)


def choose_sentences(chunk: Chunk, length: int, room: int) -> Run:
    """Return the run of sentences whose length is closest to `length`.

    Args:
        chunk: where from.
        length: tokens wanted.
        room: tokens at most; where no sentence fits, the shortest one is cut to this.
    """
    bounds = np.append(np.flatnonzero(chunk.sentence_starts), len(chunk.ids))
    sizes = bounds[None, :] - bounds[:, None]
    gaps = np.where((sizes > 0) & (sizes <= room), np.abs(sizes - length), np.inf)
    i, j = np.unravel_index(int(np.argmin(gaps)), gaps.shape)
    first, end = int(bounds[i]), int(bounds[j])
    if np.isinf(gaps[i, j]):
        first = int(bounds[np.argmin(np.diff(bounds))])
        end = first + find_cut(chunk.word_starts[first:], room)
    return Run(chunk.ids[first:end], chunk.word_starts[first:end], float(gaps[i, j]))


def _unpack(rows: pa.Table) -> list[Chunk]:
    ids, lengths = flatten_lists(rows, "input_ids")
    word_starts, sentence_starts = (flatten_lists(rows, name)[0] for name in ("word_starts", "sentence_starts"))
    splits, documents = rows.column("split").to_pylist(), rows.column("document").to_pylist()
    ends = np.cumsum(lengths)
    return [
        Chunk(ids[first:end], word_starts[first:end], sentence_starts[first:end], split, document)
        for first, end, split, document in zip(ends - lengths, ends, splits, documents, strict=True)
    ]
