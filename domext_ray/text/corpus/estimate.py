"""What a sample of a corpus tells before anything is prepared: how many rows there will be, and near-duplicates.

The first of a place's text becomes rows; the rest is scaled by bytes. Repeated documents are not looked for, so a
corpus with many of them makes fewer rows than estimated.

Preparation drops exact repetitions, but a note that was copied forward and mended, or a licence with another name in
it, may stand on both sides of the split and make held-out figures look better than they are. So the sample is divided
as preparation would divide it. Resemblance is exact, not sketched: an index of the shingles of the held-out documents,
of which there are a bounded number, is asked for every training document as it passes.
"""

from __future__ import annotations

import contextlib
import re
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from domext_ray.text.corpus.index import HELD_OUT, TRAIN, DocumentIndex
from domext_ray.text.corpus.pairs import choose_rows
from domext_ray.text.corpus.rows import RowSettings, TokenCounts, count_han
from domext_ray.text.corpus.shards import CHINESE_FRAC, hash_document, require_divided
from domext_ray.text.data.sample import Sample, choose_evenly
from domext_ray.text.data.split import resolve_held_out_by

TOKENIZED_PLACES = 8
TOKENIZED_CHARS = 128 * 2**10
"""Characters of each of these places that become rows."""
SHINGLE_WORDS = 5
RESEMBLANCE = 0.8
"""Jaccard similarity of two documents' sets of shingles from which on they are near-duplicates."""
MAX_HELD_OUT = 1000
"""Held-out documents that are compared, at most."""

_WORDS = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|\w+")  # Chinese and Japanese by character


@dataclass(frozen=True)
class RowEstimate:
    """What a corpus is expected to make: training rows, and tokens in them."""

    num_rows: int
    num_tokens: int
    num_bytes: int  # of the prepared corpus on disk
    sampled_frac: float  # share of the corpus's bytes that was read for this, 0 to 1
    unknown: Mapping[str, Any] = field(default_factory=dict)  # `TokenCounts.pack`; empty: it was not counted


@dataclass(frozen=True)
class NearDuplicates:
    """What a comparison of the two splits of a sample found."""

    num_similar: int  # held-out documents with a near-duplicate among the training documents
    num_held_out: int
    num_train: int


def estimate_rows(sample: Sample, settings: RowSettings) -> RowEstimate | None:
    """Estimate a corpus's training rows from a sample that was read to the end of files.

    None: nothing in the sample makes a row, or all files are too large to be read for it and cannot be cut.
    """
    used_chars = num_rows = num_tokens = 0
    tokens = TokenCounts()
    for place in choose_evenly(sample.places, TOKENIZED_PLACES):
        documents = list(_take(place.documents, TOKENIZED_CHARS))
        num_chars = sum(map(len, documents))
        used_chars += num_chars
        is_chinese = sum(map(count_han, documents)) >= CHINESE_FRAC * num_chars
        own = replace(settings, chinese_words=settings.chinese_words and is_chinese)
        for row in choose_rows(documents, own, (0,), Counter(), tokens)[0]:
            num_rows, num_tokens = num_rows + 1, num_tokens + len(row[0])
    num_chars = sum(sampled.num_chars for sampled in sample.places)
    if not (num_rows and num_chars):
        return None
    scale = (1.0 - sample.prepare.held_out_frac) / sample.frac * num_chars / used_chars
    return RowEstimate(
        max(1, round(num_rows * scale)),
        round(num_tokens * scale),
        round(num_tokens * scale * (np.dtype(np.int32).itemsize + 1 / 8)),
        sample.frac,
        tokens.pack(),
    )


def _take(documents: Sequence[str], num_chars: int) -> Iterator[str]:
    """Yield the beginning of documents, a long one in two: a pair takes two texts."""
    size = num_chars // 2
    for document in documents:
        for first in range(0, len(document), size):
            if num_chars <= 0:
                return
            part = document[first : first + min(size, num_chars)]
            yield part
            num_chars -= len(part)


def count_near_duplicates(sample: Sample) -> NearDuplicates | None:
    """Compare the held-out documents of a sample of a corpus with its training documents.

    None: nothing of the sample is held out, or there is none.
    """
    documents = sample.documents
    if not documents:
        return None
    with _divide(sample) as index:
        train, held_out = ([documents[i] for i in np.flatnonzero(index.uses == use)] for use in (TRAIN, HELD_OUT))
    held_out = held_out[:MAX_HELD_OUT]
    return NearDuplicates(len(find_similar(held_out, train)), len(held_out), len(train)) if held_out else None


def require_both_splits(sample: Sample) -> None:
    """Refuse a text that has documents for one split alone, where the sample is all of it."""
    if sample.is_whole:
        with _divide(sample) as index:
            require_divided(sample.spec, index, sample.prepare)


@contextlib.contextmanager
def _divide(sample: Sample) -> Iterator[DocumentIndex]:
    """Divide the documents of a sample as preparation divides those of a corpus."""
    with tempfile.TemporaryDirectory() as folder:
        held_out_by = resolve_held_out_by(sample.files, sample.prepare)
        index = DocumentIndex(Path(folder), held_out_by, sample.prepare.held_out_frac)
        index.add(b"".join(map(hash_document, sample.documents)), b"".join(place.groups for place in sample.places))
        index.choose([place.files for place in sample.places])
        yield index


def find_similar(documents: Sequence[str], others: Iterable[str]) -> set[int]:
    """Return the places of the documents that are near-duplicates of one of the others.

    The documents are held in memory with their shingles; the others are read once.
    """
    shingles = [_make_shingles(document) for document in documents]
    sizes = np.array([len(hashes) for hashes in shingles], dtype=np.int64)
    places: defaultdict[int, list[int]] = defaultdict(list)
    for place, own in enumerate(shingles):
        for shingle in own:
            places[shingle].append(place)
    index = {key: np.array(own) for key, own in places.items()}  # a template's shingles are in nearly all documents
    is_similar = np.zeros(len(sizes), dtype=bool)
    for other in others:
        own = _make_shingles(other)
        if hits := [index[key] for key in own & index.keys()]:
            shared = np.bincount(np.concatenate(hits), minlength=len(sizes))
            is_similar |= shared >= RESEMBLANCE * (len(own) + sizes - shared)
    return set(np.flatnonzero(is_similar).tolist())


def _make_shingles(document: str) -> set[int]:
    """Hashes of all `SHINGLE_WORDS` neighbouring words; of a shorter document, of all its words together.

    A document without a word, such as "***", is one.
    """
    words = _WORDS.findall(document.lower()) or [document]
    return {hash(tuple(words[i : i + SHINGLE_WORDS])) for i in range(max(1, len(words) - SHINGLE_WORDS + 1))}
