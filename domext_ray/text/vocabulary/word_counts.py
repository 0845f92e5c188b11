"""Read tasks -> how often every word occurs, on Ray, in memory that does not grow with the text.

A word is what the base's tokenizer leaves whole before its model cuts it. Texts repeat themselves, so a task counts raw
chunks between spaces, and normalises each distinct chunk once.

A word that a person's rows alone have, such as a name, must become no entry of a vocabulary, which is passed on with a
model. So where rows have groups (`--prepare.group_field`), a word keeps the hashes of its own until there are
`--vocab.min_groups` of them: fewer are an exact count, and what memory makes us forget is counted too low, never too
high.
"""

from __future__ import annotations

import contextlib
import functools
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from domext_ray.config.pretrain import PrepareConfig, identify_documents
from domext_ray.errors import CorpusError
from domext_ray.runs.attempts import lock_work
from domext_ray.runtime.records import Records
from domext_ray.storage import Place, hash_text
from domext_ray.text.data.documents import read_grouped
from domext_ray.text.data.dropped import Dropped
from domext_ray.text.data.groups import PEOPLE, tell_groups
from domext_ray.text.data.sources import ReadTask, Sources, run_read_tasks
from domext_ray.text.vocabulary.family import Groups, add_groups, tokenizer_family

MAX_CHUNKS = 250_000
"""Distinct raw chunks that a task holds before it turns them into words."""
MAX_TASK_WORDS = 1_000_000
"""Distinct words that a task holds; with the chunks, about 200 MB."""
MAX_WORDS = 2_000_000
"""Distinct words that the driver holds: about 300 MB."""


@contextlib.contextmanager
def keep_counts(
    sources: Sources,
    prepare: PrepareConfig,
    tokenizer_json: str,
    cache_dir: Place,
    min_groups: int = 0,
    *,
    learned: str = "",
) -> Iterator[dict[str, int]]:
    """Count the words of a corpus, and keep the finished counts for a second start until what they are for is done.

    Words are the entries that they would be: the most frequent first, ties by text.
    Ray is initialised. Words of fewer than `min_groups` groups are left out; 0: groups are not counted. `learned` is
    the option by which new words are chosen among them; empty: none are.
    """
    splitter_json = tokenizer_family(tokenizer_json).rules_json
    identity = [sources.fingerprint, identify_documents(prepare), splitter_json, min_groups]
    key = hash_text(json.dumps(identity, sort_keys=True))
    folder = cache_dir / f"words-{key[:16]}"
    with lock_work(folder, f"counting the words of --corpus {sources.spec!r}") as work:
        counts = _count_words(sources, prepare, splitter_json, Records(work / "parts", key), min_groups, learned)
        sources.require_unchanged()  # else the counts go: the text may be put back as it was
        yield counts
        work.delete()


def _count_words(
    sources: Sources, prepare: PrepareConfig, splitter_json: str, kept: Records, min_groups: int, learned: str
) -> dict[str, int]:
    totals: Counter[str] = Counter()
    groups: Groups = {}
    sums: Counter[str] = Counter()
    dropped = Dropped()
    function = functools.partial(_count_task, prepare, splitter_json, min_groups)
    for result in run_read_tasks(function, sources, "counting words", kept):
        words = result["words"].decode().split(" ") if result["words"] else []
        counts = np.frombuffer(result["counts"], dtype=np.int64).tolist()
        totals.update(dict(zip(words, counts, strict=True)))
        if min_groups:
            add_packed(groups, words, result["groups"], min_groups)
        sums.update(result["sums"])
        dropped.merge(result["dropped"])
        sums["forgotten"] += forget_rarest(totals, MAX_WORDS)
        forget_missing(groups, totals)
    dropped.tell(sources.spec, sums["documents"], prepare, is_new=False)
    tell_groups(dropped.values, sources.spec, prepare, learned=learned)
    if not totals:
        raise CorpusError(f"--corpus {sources.spec!r} has no usable word; give text.")
    if sums["forgotten"]:
        print(
            f"words: {sums['forgotten']:,} occurrences of rare words were forgotten to bound memory ({len(totals):,} "
            "distinct words are kept)",
            file=sys.stderr,
        )
    if min_groups:
        _leave_rare_out(totals, groups, sources, prepare, min_groups)
    return dict(sorted(totals.items(), key=lambda item: (-item[1], item[0])))


def _leave_rare_out(
    totals: Counter[str], groups: Groups, sources: Sources, prepare: PrepareConfig, min_groups: int
) -> None:
    """Leave out the words of too few groups, and say so."""
    rule = f"that fewer than {min_groups} different {prepare.grouped_by!r} have"
    rare = [word for word in totals if len(groups[word]) < min_groups]
    dropped = sum(totals.pop(word) for word in rare)
    if not totals:
        raise CorpusError(
            f"--corpus {sources.spec!r} has only words {rule}, which are not learned; give text of more of them, or a "
            "lower --vocab.min_groups."
        )
    print(
        f"words: {len(rare):,} of {len(rare) + len(totals):,} distinct words, {dropped:,} occurrences, are left out: "
        f"words {rule} (--vocab.min_groups)",
        file=sys.stderr,
    )


def _count_task(
    prepare: PrepareConfig, splitter_json: str, min_groups: int, number: int, task: ReadTask, plan: bytes
) -> dict[str, Any]:
    family = tokenizer_family(splitter_json)
    totals: Counter[str] = Counter()
    chunks: Counter[str] = Counter()
    chunk_groups: Groups = {}
    groups: Groups = {}
    sums: Counter[str] = Counter()
    dropped = Dropped(watched=() if prepare.group_field else PEOPLE)

    def add_chunks() -> None:
        """Move what is counted of raw chunks to their words."""
        for chunk, count in chunks.items():
            for word in family.words(chunk):
                if len(word) <= family.max_chars:
                    totals[word] += count
                    if min_groups:
                        add_groups(groups, word, chunk_groups[chunk], min_groups)
        chunks.clear()
        chunk_groups.clear()
        sums["forgotten"] += forget_rarest(totals, MAX_TASK_WORDS)
        forget_missing(groups, totals)

    for document, group in read_grouped(task, prepare, dropped):
        sums["documents"] += 1
        found = list(family.chunks(document))
        chunks.update(found)
        if min_groups:
            for chunk in set(found):
                add_groups(chunk_groups, chunk, (int.from_bytes(group, "big"),), min_groups)
        if len(chunks) > MAX_CHUNKS:
            add_chunks()
    add_chunks()
    words = sorted(totals)
    counts = np.array([totals[word] for word in words], dtype=np.int64)
    return {
        "words": " ".join(words).encode(),  # no word has white space
        "counts": counts.tobytes(),
        "groups": pack_groups(groups, words) if min_groups else {},
        "sums": sums,
        "dropped": vars(dropped),
    }


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


def forget_missing(groups: Groups, totals: Mapping[str, int]) -> None:
    """Forget the groups of words that are not counted any more."""
    for word in groups.keys() - totals.keys():
        del groups[word]


def pack_groups(groups: Groups, words: Iterable[str]) -> dict[str, bytes]:
    """Return the groups of words as bytes."""
    found = [groups[word] for word in words]
    sizes = np.fromiter(map(len, found), dtype=np.uint16, count=len(found))
    hashes = np.fromiter((group for own in found for group in own), dtype=np.uint64, count=int(sizes.sum()))
    return {"sizes": sizes.tobytes(), "hashes": hashes.tobytes()}


def add_packed(groups: Groups, words: Iterable[str], packed: Mapping[str, bytes], enough: int) -> None:
    """Note the groups of words that `pack_groups` made bytes of."""
    ends = np.cumsum(np.frombuffer(packed["sizes"], dtype=np.uint16), dtype=np.int64).tolist()
    hashes, first = np.frombuffer(packed["hashes"], dtype=np.uint64).tolist(), 0
    for word, end in zip(words, ends, strict=True):
        add_groups(groups, word, hashes[first:end], enough)
        first = end
