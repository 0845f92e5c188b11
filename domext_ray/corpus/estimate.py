"""How many rows a corpus will make, from a sample of it: what a dry run says before anything is prepared.

A few read tasks, spread evenly over the corpus, are read and the first of their text becomes rows; the rest is scaled
by bytes. Repeated documents are not looked for, so a corpus with many of them makes fewer rows than estimated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from domext_ray.config.pretrain import PrepareConfig
from domext_ray.corpus.pairs import build_pairs
from domext_ray.corpus.rows import RowSettings, build_rows, count_han
from domext_ray.corpus.shards import CHINESE_FRAC
from domext_ray.corpus.two_texts import build_two_text_rows
from domext_ray.data.documents import read_documents
from domext_ray.data.dropped import Dropped
from domext_ray.data.sources import ReadTask, Sources

SAMPLED_TASKS = 8
READ_BYTES = 2**20
"""Of a sampled range of a file so much is read; whole files are read whole, for they may differ."""
WHOLE_BYTES = 64 * 2**20
"""A single file that cannot be cut (compressed text, Parquet) and is larger than this is not read for an estimate."""
TOKENIZED_CHARS = 128 * 2**10
"""Characters of a sampled task that become rows."""


@dataclass(frozen=True)
class RowEstimate:
    """What a corpus is expected to make.

    Args:
        num_rows: training rows.
        num_tokens: tokens in them.
        num_bytes: bytes of the prepared corpus on disk.
        sampled_frac: share of the corpus's bytes that was read for this, 0 to 1.
    """

    num_rows: int
    num_tokens: int
    num_bytes: int
    sampled_frac: float


def estimate_rows(sources: Sources, prepare: PrepareConfig, settings: RowSettings) -> RowEstimate | None:
    """Estimate a corpus's training rows from a sample; reads on this machine, without Ray.

    None: nothing in the sample makes a row, or all files are too large to be read for it and cannot be cut.

    Args:
        sources: the corpus.
        prepare: what a document is, and the share that is held out.
        settings: tokenizer and row length.

    Raises:
        CorpusError: the sample is damaged, or lacks the column.
    """
    read_bytes = num_chars = used_chars = num_rows = num_tokens = 0
    for task in sample_tasks(sources):
        read_bytes += task.num_bytes
        documents = list(read_documents(task, prepare, Dropped()))
        num_chars += sum(map(len, documents))
        sample = list(_take(documents, TOKENIZED_CHARS))
        used_chars += sum(map(len, sample))
        is_chinese = sum(map(count_han, sample)) >= CHINESE_FRAC * sum(map(len, sample))
        own = replace(settings, chinese_words=settings.chinese_words and is_chinese)
        for length in _measure_rows(sample, own):
            num_rows, num_tokens = num_rows + 1, num_tokens + length
    if not num_rows:
        return None
    scale = (1.0 - prepare.held_out_frac) * sources.num_bytes / max(read_bytes, 1) * num_chars / used_chars
    return RowEstimate(
        max(1, round(num_rows * scale)),
        round(num_tokens * scale),
        round(num_tokens * scale * (np.dtype(np.int32).itemsize + 1 / 8)),
        read_bytes / max(sources.num_bytes, 1),
    )


def sample_tasks(sources: Sources) -> list[ReadTask]:
    """Return what is read of a corpus for an estimate: the beginnings of some tasks, at equal distances."""
    tasks = [each for each in map(_shorten, sources.tasks) if each.num_bytes <= WHOLE_BYTES]
    places = np.unique(np.linspace(0, max(len(tasks) - 1, 0), SAMPLED_TASKS).round().astype(int))[: len(tasks)]
    return [tasks[place] for place in places]


def _shorten(task: ReadTask) -> ReadTask:
    """The beginning of a task that is a range of a file; a task of whole files stays."""
    return task if task.end < 0 else replace(task, end=min(task.end, task.start + READ_BYTES))


def _take(documents: list[str], num_chars: int) -> Iterator[str]:
    """Yield the beginning of documents, a long one in two: a pair takes two texts."""
    size = num_chars // 2
    for document in documents:
        for first in range(0, len(document), size):
            if num_chars <= 0:
                return
            yield document[first : first + min(size, num_chars)]
            num_chars -= size


def _measure_rows(documents: list[str], settings: RowSettings) -> Iterator[int]:
    """Tokens of every row that the documents make."""
    if settings.pairs:
        return (len(row.ids) for row in build_pairs(documents, settings, (0,), Counter()))
    if settings.has_two_texts:
        return (len(row.ids) for row in build_two_text_rows(documents, settings, Counter()))
    return (len(ids) for ids, _ in build_rows(documents, settings))
