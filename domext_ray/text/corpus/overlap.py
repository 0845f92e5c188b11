"""Documents that several texts of a run have in common, found by their hashes and told.

Enters: hashes of documents, which a prepared corpus keeps beside its shards, 8 bytes each, sorted. Leaves: sentences.
Nothing is left out because of them: a user may want the same document twice, but not in training and in held-out text.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from domext_ray.errors import CorpusError
from domext_ray.storage import Place, map_file, new_file
from domext_ray.text.corpus.manifest import SPLITS

_NAME = "documents-{}.npy"
CHUNK = 2**20
"""Hashes that are looked up at a time: the others stay on disk."""


@dataclass(frozen=True)
class DocumentHashes:
    """Of the documents of a prepared corpus, uint64 [documents], sorted; different documents rarely share one."""

    train: np.ndarray
    held_out: np.ndarray

    def __len__(self) -> int:
        return len(self.train) + len(self.held_out)


def write_hashes(folder: Place, split: str, number: int, parts: Iterable[np.ndarray]) -> None:
    """Write the hashes of the documents of a split, so many in all, uint64, sorted from each part to the next."""
    with new_file(folder / _NAME.format(split), is_flushed=False) as temporary, temporary.open("wb") as file:
        header = {"descr": "<u8", "fortran_order": False, "shape": (number,)}
        np.lib.format.write_array_header_1_0(file, header)
        for part in parts:
            part.astype("<u8").tofile(file)


def read_hashes(folder: Place) -> DocumentHashes:
    """Return the hashes of a prepared corpus, mapped into memory; missing or damaged ones are a `CorpusError`."""
    try:
        return DocumentHashes(*(_map_array(folder / _NAME.format(split)) for split in SPLITS))
    except (OSError, ValueError, EOFError) as error:
        raise CorpusError(f"{folder} has no sound hashes of its documents; delete it and run again.") from error


def _map_array(place: Place) -> np.ndarray:
    data = map_file(place)
    header = io.BytesIO(data[:1024])
    np.lib.format.read_magic(header)
    shape, _, dtype = np.lib.format.read_array_header_1_0(header)
    return np.frombuffer(data, dtype, shape[0], header.tell())


def count_common(first: np.ndarray, second: np.ndarray) -> int:
    """Return how many values two sorted arrays have in common, uint64 each."""
    small, large = sorted((first, second), key=len)
    total = 0
    for start in range(0, len(small), CHUNK):
        asked = np.asarray(small[start : start + CHUNK])
        places = np.minimum(np.searchsorted(large, asked), len(large) - 1)
        total += int(np.count_nonzero(large[places] == asked))
    return total


def find_overlaps(texts: Sequence[tuple[str, DocumentHashes]]) -> list[str]:
    """Return a sentence for every two texts, given with their names, that share documents, the worst ones first."""
    spoiled, shared = [], []
    for (name, own), (other_name, other) in itertools.permutations(texts, 2):
        if number := count_common(own.train, other.held_out):
            spoiled.append(
                f"warning: {number:,} of {len(other.held_out):,} held-out documents of {other_name} are training "
                f"documents of {name}, too: figures on its held-out text look better than they are"
            )
    for (name, own), (other_name, other) in itertools.combinations(texts, 2):
        number = sum(count_common(getattr(own, a), getattr(other, b)) for a in SPLITS for b in SPLITS)
        if number:
            shared.append(f"note: {number:,} of {len(other):,} documents of {other_name} are in {name}, too")
    return [*spoiled, *shared]
