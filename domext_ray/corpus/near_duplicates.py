"""How many held-out documents have a near-duplicate in the training text, counted on a sample: for a dry run.

Preparation drops exact repetitions, but a note that was copied forward and mended, or a licence with another name in
it, may stand on both sides of the split and make held-out figures look better than they are. The sample is that of
`estimate`, divided as preparation would divide it. Resemblance is exact, not sketched: an index of the shingles of the
held-out documents, of which there are a bounded number, is asked for every training document as it passes.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from domext_ray.config.pretrain import PrepareConfig
from domext_ray.corpus.estimate import READ_BYTES, sample_tasks
from domext_ray.corpus.shards import hash_document, split_documents
from domext_ray.data.documents import read_grouped
from domext_ray.data.dropped import Dropped
from domext_ray.data.sources import Sources
from domext_ray.data.split import resolve_held_out_by

SHINGLE_WORDS = 5
RESEMBLANCE = 0.8
"""Jaccard similarity of two documents' sets of shingles from which on they are near-duplicates."""
MAX_HELD_OUT = 1000
"""Held-out documents that are compared, at most."""
TASK_CHARS = 2 * READ_BYTES
"""Characters that are taken of a sampled task, and one document of each further file in it."""

_WORDS = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|\w+")  # Chinese and Japanese by character


@dataclass(frozen=True)
class NearDuplicates:
    """What a comparison of the two splits of a sample found.

    Args:
        num_similar: held-out documents with a near-duplicate among the training documents.
        num_held_out, num_train: documents of the sample that were compared.
    """

    num_similar: int
    num_held_out: int
    num_train: int


def count_near_duplicates(sources: Sources, prepare: PrepareConfig) -> NearDuplicates | None:
    """Compare the held-out documents of a sample of a corpus with its training documents; without Ray.

    Args:
        sources: the corpus.
        prepare: what a document is, and how documents are divided.

    Returns:
        What was found; None: nothing of the sample is held out, or there is none.

    Raises:
        CorpusError: the sample is damaged, lacks the field, or has one file where files are held out.
    """
    documents: list[str] = []
    groups = bytearray()
    files: list[list[tuple[str, int]]] = []
    for task in sample_tasks(sources):
        files.append([])
        num_chars = 0
        for file in task.files:
            before = len(documents)
            for document, group in read_grouped(replace(task, files=(file,)), prepare, Dropped()):
                documents.append(document)
                groups += group
                num_chars += len(document)
                if num_chars >= TASK_CHARS:
                    break
            files[-1].append((file.path, len(documents) - before))
    if not documents:
        return None
    hashes = bytearray(b"".join(map(hash_document, documents)))
    own = replace(prepare, held_out_by=resolve_held_out_by(sources, prepare))
    keep, is_held_out = split_documents(hashes, groups, files, own)
    held_out = [each for each, use in zip(documents, keep & is_held_out, strict=True) if use][:MAX_HELD_OUT]
    train = [each for each, use in zip(documents, keep & ~is_held_out, strict=True) if use]
    return NearDuplicates(len(find_similar(held_out, train)), len(held_out), len(train)) if held_out else None


def find_similar(documents: Sequence[str], others: Iterable[str]) -> set[int]:
    """Return the places of the documents that are near-duplicates of one of the others.

    Args:
        documents: they are held in memory with their shingles.
        others: they are read once.
    """
    sizes = []
    places: defaultdict[int, list[int]] = defaultdict(list)
    for place, document in enumerate(documents):
        shingles = _make_shingles(document)
        sizes.append(len(shingles))
        for each in shingles:
            places[each].append(place)
    found: set[int] = set()
    for other in others:
        shingles = _make_shingles(other)
        shared = Counter(place for each in shingles & places.keys() for place in places[each])
        found.update(
            place for place, number in shared.items() if number >= RESEMBLANCE * (len(shingles) + sizes[place] - number)
        )
    return found


def _make_shingles(document: str) -> set[int]:
    """Hashes of all `SHINGLE_WORDS` neighbouring words; of a shorter document, of all its words together."""
    words = _WORDS.findall(document.lower())
    return {hash(tuple(words[i : i + SHINGLE_WORDS])) for i in range(max(1, len(words) - SHINGLE_WORDS + 1))}
