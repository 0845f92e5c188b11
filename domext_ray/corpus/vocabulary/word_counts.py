"""Read tasks -> how often every word occurs, on Ray Data, in memory that does not grow with the text.

A word is what the base's tokenizer leaves whole before its model cuts it. Texts repeat themselves, so a task counts raw
chunks between spaces, and normalises each distinct chunk once.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from domext_ray.config.pretrain import PrepareConfig
from domext_ray.corpus.texts.documents import read_documents
from domext_ray.corpus.texts.dropped import Dropped, check_dropped
from domext_ray.corpus.texts.ray_tasks import run_tasks
from domext_ray.corpus.texts.sources import ReadTask, Sources
from domext_ray.corpus.texts.work_folder import KeptParts, hold_work_folder
from domext_ray.corpus.vocabulary.families import tokenizer_family
from domext_ray.corpus.vocabulary.family import TokenizerFamily, WordCounts
from domext_ray.errors import CorpusError
from domext_ray.options.build import identity_of

MAX_CHUNKS = 250_000
"""Distinct raw chunks that a task holds before it turns them into words."""
MAX_TASK_WORDS = 1_000_000
"""Distinct words that a task holds; with the chunks, about 200 MB."""
MAX_WORDS = 2_000_000
"""Distinct words that the driver holds: about 300 MB."""


@contextlib.contextmanager
def keep_counts(sources: Sources, prepare: PrepareConfig, tokenizer_json: str, cache_dir: Path) -> Iterator[WordCounts]:
    """Count the words of a corpus, and keep the finished counts for a second start until what they are for is done.

    Ray is initialised.

    Args:
        sources: what to read.
        prepare: what a document is.
        tokenizer_json: the base's fast tokenizer, serialised.
        cache_dir: where the counts of finished tasks are kept.

    Raises:
        CorpusError: the corpus has no word, or too many rows without text.
        RunError: counts cannot be written.
    """
    splitter_json = tokenizer_family(tokenizer_json).rules_json
    identity = [sources.fingerprint, identity_of(prepare), splitter_json]
    key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    with hold_work_folder(cache_dir, f"words-{key[:16]}", f"counting the words of --corpus {sources.spec!r}") as work:
        yield _count_words(sources, prepare, splitter_json, KeptParts(work, "words", key))


def _count_words(sources: Sources, prepare: PrepareConfig, splitter_json: str, kept: KeptParts) -> WordCounts:
    totals: Counter[str] = Counter()
    sums: Counter[str] = Counter()
    dropped = Dropped()
    seconds = 0.0
    function = functools.partial(_count_task, prepare, splitter_json)
    for result in run_tasks(function, sources, "counting words", kept):
        words = result["words"].decode().split(" ") if result["words"] else []
        counts = np.frombuffer(result["counts"], dtype=np.int64).tolist()
        totals.update(dict(zip(words, counts, strict=True)))
        sums.update(result["sums"])
        dropped.merge(Dropped.from_record(result["dropped"]))
        sums["forgotten"] += forget_rarest(totals, MAX_WORDS)
        seconds += result["seconds"]
    places = dropped.describe_places()
    check_dropped(sources.spec, dropped.counts, places, sums["documents"], prepare, is_new=False)
    if not totals:
        raise CorpusError(f"--corpus {sources.spec!r} has no usable word; give text.")
    megabytes = sums["text_bytes"] / 1e6
    print(f"words: {megabytes:,.0f} MB of text, {megabytes / max(seconds, 1e-9):.1f} MB/s a core", file=sys.stderr)
    if sums["forgotten"]:
        print(
            f"words: {sums['forgotten']:,} occurrences of rare words were forgotten to bound memory ({len(totals):,} "
            "distinct words are kept)",
            file=sys.stderr,
        )
    ordered = sorted(totals, key=lambda word: (-totals[word], word))
    return WordCounts(
        tuple(ordered),
        np.array([totals[each] for each in ordered], dtype=np.int64),
        sums["documents"],
        sums["text_bytes"],
        sums["too_long"],
        sums["forgotten"],
    )


def _count_task(prepare: PrepareConfig, splitter_json: str, number: int, task: ReadTask, plan: bytes) -> dict[str, Any]:
    started = time.process_time()
    family = tokenizer_family(splitter_json)
    totals: Counter[str] = Counter()
    chunks: Counter[str] = Counter()
    sums: Counter[str] = Counter()
    dropped = Dropped()
    for document in read_documents(task, prepare, dropped):
        sums["documents"] += 1
        sums["text_bytes"] += len(document) if document.isascii() else len(document.encode())
        chunks.update(family.chunks(document))
        if len(chunks) > MAX_CHUNKS:
            _add_chunks(chunks, family, totals, sums)
    _add_chunks(chunks, family, totals, sums)
    words = sorted(totals)
    counts = np.array([totals[each] for each in words], dtype=np.int64)
    return {
        "words": " ".join(words).encode(),  # no word has white space
        "counts": counts.tobytes(),
        "sums": sums,
        "dropped": dropped.to_record(),
        "seconds": time.process_time() - started,
    }


def _add_chunks(chunks: Counter[str], family: TokenizerFamily, totals: Counter[str], sums: Counter[str]) -> None:
    """Move the counts of raw chunks to their words."""
    for chunk, count in chunks.items():
        for word in family.words(chunk):
            if len(word) > family.max_chars:
                sums["too_long"] += count
            else:
                totals[word] += count
    chunks.clear()
    sums["forgotten"] += forget_rarest(totals, MAX_TASK_WORDS)


def forget_rarest(totals: Counter[str], limit: int) -> int:
    """Drop the rarest words when there are more than `limit`, at least half of them; return their occurrences.

    All words of one count go or stay together, so that the result does not depend on their order.
    """
    if len(totals) <= limit:
        return 0
    counts = np.fromiter(totals.values(), dtype=np.int64, count=len(totals))
    threshold = int(np.sort(counts)[len(counts) // 2])
    kept = {word: count for word, count in totals.items() if count > threshold}
    dropped = int(counts.sum()) - sum(kept.values())
    totals.clear()
    totals.update(kept)
    return dropped
