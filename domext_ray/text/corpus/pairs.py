"""Pairs of text for next-sentence prediction (BERT section 3.1, task 2), drawn once, when a corpus is prepared.

Sentences of a document fill a row, which is cut between two of them into the texts A and B. In half of the rows B stays
(label 0), in the other half it gives way to sentences of another document of the same reading task (label 1), and the
next row begins with the sentences that gave way. The row is [CLS] A [SEP] B [SEP], whole in its shard.

BERT's own code draws the other text from a random sentence on to the row's end; here it is a run of whole sentences
about as long as the B it replaces, so that neither the length of a row nor a sentence that breaks off gives its label
away.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from domext_ray.text.corpus.rows import (
    SCHEMA,
    TWO_TEXT_SCHEMA,
    RowSettings,
    TokenCounts,
    Tokens,
    build_rows,
    build_two_text_rows,
    cut_tokens,
    join_tokens,
    tokenize_documents,
)

NUM_SPECIAL_TOKENS = 3  # [CLS] A [SEP] B [SEP]
MAX_ATTEMPTS = 16
"""Places that are drawn until one has a run of sentences of about the right length."""
LENGTH_TOLERANCE = 0.2
"""What is about the right length: the difference as a share of the length wanted."""
NO_NEXT_SENTENCE, NO_OTHER_TEXT = "no next sentence", "no other text"
"""Why a document makes no pair: it has one sentence, or there is no other document in its reading task and split."""
HELD_TOKENS = 4 * 2**20
"""Of a task, about so many are held at a time, to draw second texts from: 8 MB of text have half of them."""
PAIR_SCHEMA = TWO_TEXT_SCHEMA.append(pa.field("next_sentence", pa.int8()))

Text = list[Tokens]
"""The sentences of a document, and the parts of those that were too long."""


class PairRow(NamedTuple):
    """A pair of N tokens, the place of B's first one, and 0 if B follows A, 1 if it is from another document."""

    ids: np.ndarray
    word_starts: np.ndarray
    second_start: int
    next_sentence: int


def choose_rows(
    documents: Iterable[str],
    settings: RowSettings,
    seed: Sequence[int],
    counts: Counter[str],
    tokens: TokenCounts | None = None,
) -> tuple[Iterator[tuple[Any, ...]], pa.Schema]:
    """Return the rows that settings make of documents, and their columns; arguments as of `build_pairs`."""
    if settings.pairs:
        return build_pairs(documents, settings, seed, counts, tokens), PAIR_SCHEMA
    if settings.has_two_texts:
        return build_two_text_rows(documents, settings, counts, tokens), TWO_TEXT_SCHEMA
    return build_rows(documents, settings, tokens), SCHEMA


def build_pairs(
    documents: Iterable[str],
    settings: RowSettings,
    seed: Sequence[int],
    counts: Counter[str],
    tokens: TokenCounts | None = None,
) -> Iterator[PairRow]:
    """Turn clean documents into pairs; `seed` has numbers that no other documents of the corpus have.

    `counts` counts documents: "used", and by the reason those that make no pair.
    """
    draw = np.random.default_rng(seed)
    size = (settings.seq_length - NUM_SPECIAL_TOKENS) // 2  # no sentence is longer, so any two fit
    texts, spare, num_tokens = list[Text](), list[Text](), 0
    for sentences in tokenize_documents(documents, settings, tokens):
        text = [part for sentence in sentences for part in cut_tokens(sentence, size)]
        if len(text) < 2:
            counts[NO_NEXT_SENTENCE] += 1
            continue
        texts.append(text)
        num_tokens += sum(len(ids) for ids, _ in text)
        if num_tokens > HELD_TOKENS and len(texts) > 1:
            yield from _pair_up(texts, texts, settings, draw)
            counts["used"] += len(texts)
            texts, spare, num_tokens = [], texts[-1:], 0
    others = texts if len(texts) > 1 else [*texts, *spare]
    if len(others) > 1:
        yield from _pair_up(texts, others, settings, draw)
    if texts:
        counts["used" if len(others) > 1 else NO_OTHER_TEXT] += len(texts)


def _pair_up(
    texts: Sequence[Text], others: Sequence[Text], settings: RowSettings, draw: np.random.Generator
) -> Iterator[PairRow]:
    """Make the pairs of texts; `others`, which begin with these, give the second texts that do not follow."""
    capacity = settings.seq_length - NUM_SPECIAL_TOKENS
    for number, sentences in enumerate(texts):
        ends = np.cumsum([0, *(len(ids) for ids, _ in sentences)])
        start = 0
        while start + 1 < len(sentences):  # a last sentence that is alone is left out
            end = int(np.searchsorted(ends, ends[start] + capacity, side="right")) - 1
            middle = int(draw.integers(start + 1, end))
            is_other = bool(draw.random() < 0.5)
            second: Sequence[Tokens] = sentences[middle:end]
            if is_other:
                room, length = capacity - int(ends[middle] - ends[start]), int(ends[end] - ends[middle])
                second = _draw_other(others, number, length, room, draw)
            first = join_tokens(settings.cls_id, *sentences[start:middle], settings.sep_id)
            yield PairRow(*join_tokens(first, *second, settings.sep_id), len(first[0]), int(is_other))
            start = middle if is_other else end


def _draw_other(
    texts: Sequence[Text], number: int, length: int, room: int, draw: np.random.Generator
) -> Sequence[Tokens]:
    """Draw a run of another document's sentences, about `length` tokens long, at most `room`: one is cut to that."""
    best: tuple[float, Sequence[Tokens]] = (np.inf, ())
    for _ in range(MAX_ATTEMPTS):
        other = texts[(number + int(draw.integers(1, len(texts)))) % len(texts)]
        start = int(draw.integers(len(other)))
        sizes = np.cumsum([len(ids) for ids, _ in other[start : start + room]])  # none is empty
        gaps = np.where(sizes <= room, np.abs(sizes - length), np.inf)
        place = int(np.argmin(gaps))
        best = min(best, (float(gaps[place]), other[start : start + place + 1]), key=lambda each: each[0])
        if best[0] <= LENGTH_TOLERANCE * length:
            break
    return [next(cut_tokens(other[start], room))] if np.isinf(best[0]) else best[1]
