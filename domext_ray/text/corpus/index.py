"""All documents of a corpus by their hashes, in files of this machine: memory does not grow with their number.

Enters: hashes of documents and of their groups, in canonical order. Leaves: which documents stay, the first of equal
ones, which of these are held out, and their hashes, sorted. Columns are mapped into memory, from which the system may
drop them at any time; a chunk of them, or the documents of near hashes, are worked through at a time.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from domext_ray.storage import Place
from domext_ray.text.corpus.overlap import write_hashes
from domext_ray.text.data.split import (
    HeldOut,
    choose_share,
    hold_out_blocks,
    hold_out_files,
    hold_out_hashes,
    list_chunks,
)

BUCKET, MOST_BUCKETS = 2**20, 256
"""Documents of near hashes, about, up to a number of files that may be open at once; beyond, there are more in each."""
MOST_GROUPS = 2**26
"""Groups that are counted at a time."""
TRAIN, HELD_OUT = 1, 2
"""What a document is used for; 0: it is dropped."""


class DocumentIndex:
    """The documents of a corpus, numbered in canonical order; its files are in a local folder, which goes with it.

    `held_out_by` is what is held out (`split.resolve_held_out_by`), of which there is a share of `held_out_frac`.
    """

    def __init__(self, folder: Path, held_out_by: HeldOut, held_out_frac: float) -> None:
        self.folder, self.held_out_by, self.held_out_frac = folder, held_out_by, held_out_frac
        self._files = [(folder / name).open("wb") for name in ("hashes", "groups")]
        self.hashes = self.groups = self.keep = self.uses = np.zeros(0, dtype=np.uint8)
        self.share = 0.0  # of the range of hashes that is held out, where hashes decide (see `choose_share`)

    def add(self, hashes: bytes, groups: bytes) -> None:
        """Add documents, given 8 bytes each, and 8 of the group of each where rows have groups."""
        for file, own in zip(self._files, (hashes, groups), strict=True):
            file.write(own)

    def choose(self, files: Sequence[Sequence[tuple[str, int]]]) -> None:
        """Settle `uses`, uint8 [D], given path and number of documents of every file of a task."""
        for file in self._files:
            file.close()
        self.hashes, self.groups = (_map(self.folder / name, ">u8") for name in ("hashes", "groups"))
        self.keep, is_held_out, self.uses = (self._make(name) for name in ("keep", "held_out", "uses"))
        for words, places in self._list_buckets():
            order = np.argsort(words, kind="stable")  # equal hashes stay in canonical order
            is_repeated = np.diff(words[order]) == 0
            self.keep[places[order[~np.concatenate([[False], is_repeated])[: len(order)]]]] = True
        if self.held_out_by == "file":
            parts = [*itertools.chain.from_iterable(files)]
            hold_out_files(self.keep, self.hashes, parts, self.held_out_frac, is_held_out)
        elif self.held_out_by == "block":
            hold_out_blocks(self.keep, self.held_out_frac, is_held_out)
        else:
            deciding = self.groups if self.held_out_by == "group" else self.hashes
            staying = (deciding[own][self.keep[own]] for own in list_chunks(len(deciding)))
            self.share = share = choose_share(staying, self.held_out_frac)
            for own in list_chunks(len(deciding)):
                is_held_out[own] = hold_out_hashes(deciding[own].astype(np.uint64), share)
        for own in list_chunks(len(self.keep)):
            self.uses[own] = self.keep[own].astype(np.uint8) + (self.keep[own] & is_held_out[own])

    def count(self) -> list[int]:
        """Return how many documents are dropped, train and are held out."""
        chunks = (np.bincount(self.uses[own], minlength=3) for own in list_chunks(len(self.uses)))
        return [int(number) for number in sum(chunks, np.zeros(3, dtype=np.int64))]

    def count_groups(self) -> list[int]:
        """Return how many groups train and are held out (see `MOST_GROUPS`)."""
        found, parts = [0, 0], 1 + len(self.groups) // MOST_GROUPS
        for part, (place, use) in itertools.product(range(parts), enumerate((TRAIN, HELD_OUT))):
            different = np.zeros(0, dtype=np.uint64)
            for own in list_chunks(len(self.groups)):
                used = self.groups[own][self.uses[own] == use].astype(np.uint64)
                different = np.union1d(different, used[used % parts == part])
            found[place] += len(different)
        return found

    def write_hashes(self, folder: Place) -> None:
        """Write the hashes of the documents that are used beside their shards."""
        for split, use, number in zip(("train", "held_out"), (TRAIN, HELD_OUT), self.count()[1:], strict=True):
            buckets = (np.sort(words[self.uses[places] == use]) for words, places in self._list_buckets())
            write_hashes(folder, split, number, buckets)

    def _make(self, name: str) -> np.ndarray:
        with (self.folder / name).open("wb") as file:
            file.truncate(len(self.hashes))
        return _map(self.folder / name, np.uint8 if name == "uses" else bool, "r+")

    def _list_buckets(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield hashes, uint64, and the numbers of their documents, all of near hashes together, in their order."""
        bits = min(len(self.hashes) // BUCKET, MOST_BUCKETS - 1).bit_length()
        if not bits:
            yield self.hashes.astype(np.uint64), np.arange(len(self.hashes))
            return
        paths = [self.folder / f"near-{number}" for number in range(2**bits)]
        if not paths[0].exists():
            self._divide(paths, bits)
        for path in paths:
            found = np.fromfile(path, dtype=np.uint64).reshape(-1, 2)
            yield found[:, 0], found[:, 1].astype(np.int64)

    def _divide(self, paths: Sequence[Path], bits: int) -> None:
        files = [path.open("wb") for path in paths]
        for own in list_chunks(len(self.hashes)):
            words = self.hashes[own].astype(np.uint64)
            buckets = (words >> np.uint64(64 - bits)).astype(np.int64)
            order = np.argsort(buckets, kind="stable")
            pairs = np.stack([words[order], (own.start + order).astype(np.uint64)], axis=1)
            ends = np.searchsorted(buckets[order], np.arange(1, len(files)))
            for file, part in zip(files, np.split(pairs, ends), strict=True):
                part.tofile(file)
        for file in files:
            file.close()


def _map(path: Path, dtype: Any, mode: Any = "r") -> np.ndarray:
    return np.memmap(path, dtype, mode) if path.stat().st_size else np.zeros(0, dtype)
