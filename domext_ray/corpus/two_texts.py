"""Rows of two texts, such as title and body, for an objective that brings the two together (`--prepare.pair`).

Enters: documents that are two texts (see `texts.documents`). Leaves: rows [CLS] first [SEP] [CLS] second [SEP] of at
most `seq_length` tokens a text, special ones included, and the place where the second begins. A document is one row,
whatever its length: what a text has beyond is not read, as when a model makes vectors of texts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from domext_ray.corpus.rows import RowSettings, find_cut, tokenize_documents
from domext_ray.data.documents import PAIR_SEPARATOR

NO_TOKEN = "no_token"
"""Why a document makes no row: one of its texts is of characters that the tokenizer leaves out."""

SECOND_START = "second_start"
TWO_TEXT_SCHEMA = pa.schema(
    [("input_ids", pa.list_(pa.int32())), ("word_starts", pa.list_(pa.bool_())), (SECOND_START, pa.int32())]
)

Tokens = tuple[np.ndarray, np.ndarray]
"""Ids, int32 [N], and whether a word starts at each, bool [N]."""


class TwoTextRow(NamedTuple):
    """Two texts in a row of N tokens.

    Args:
        ids: int32 [N], special tokens included.
        word_starts: bool [N], whether a word starts here; special tokens start one.
        second_start: place of the second text's [CLS].
    """

    ids: np.ndarray
    word_starts: np.ndarray
    second_start: int


def build_two_text_rows(documents: Iterable[str], settings: RowSettings, counts: Counter[str]) -> Iterator[TwoTextRow]:
    """Turn documents of two texts into rows, one each.

    Args:
        documents: two clean texts each, `PAIR_SEPARATOR` between them.
        settings: tokenizer and the length of a text.
        counts: counts documents: "used", and those without a token in one of their texts.
    """
    texts = (text for document in documents for text in document.partition(PAIR_SEPARATOR)[::2])
    tokenized = tokenize_documents(texts, settings)
    for first, second in zip(tokenized, tokenized, strict=True):
        parts = [_join_text(each, settings) for each in (first, second)]
        is_used = all(len(ids) > 2 for ids, _ in parts)
        counts["used" if is_used else NO_TOKEN] += 1
        if is_used:
            (ids, starts), (more_ids, more_starts) = parts
            yield TwoTextRow(np.concatenate([ids, more_ids]), np.concatenate([starts, more_starts]), len(ids))


def _join_text(sentences: Sequence[Tokens], settings: RowSettings) -> Tokens:
    """Return a text's tokens, special ones around them; a long text ends before a word."""
    capacity = settings.seq_length - 2
    ids = np.concatenate([np.zeros(0, dtype=np.int32), *(each for each, _ in sentences)])
    starts = np.concatenate([np.zeros(0, dtype=bool), *(each for _, each in sentences)])
    if len(ids) > capacity:
        cut = find_cut(starts, capacity)
        ids, starts = ids[:cut], starts[:cut]
    special = np.ones(1, dtype=bool)
    cls, sep = (np.array([each], dtype=np.int32) for each in (settings.cls_id, settings.sep_id))
    return np.concatenate([cls, ids, sep]), np.concatenate([special, starts, special])
