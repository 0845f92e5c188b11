"""(seed, batch) -> which rows a global batch has, and which of them a rank reads; pure arithmetic.

One text is a mixture of one. Each text of a mixture has an order of its own, an epoch after the other. The order of an
epoch: shards are permuted, then rows within fixed blocks of a shard, both by hashes of (seed, epoch). That sequence is
cut into lanes of equal length, and rows are taken from the lanes in turn; fewer rows than lanes are left out at the end
of an epoch, other ones each time.

How many rows a global batch takes of a text is a function of the batch's number alone, and no draw: of the rows that
the texts after the first have left, a text takes floor(f · rows), f being its share of what is left, and the first one
has the rest. So where a text stands before a batch follows from the batch's number, whatever the number of workers and
wherever a run was stopped. Shares may change at some batches; from each of them on, rows are counted anew.

Within a global batch a text's rows stand in the order of their lanes, and the rows of several texts alternate as evenly
as they can. So any contiguous share of a batch has its part of each text, and the rank that always reads the same share
reads each text near a few places, about 1/world of it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from domext_ray.errors import CorpusError
from domext_ray.text.data.draws import Purpose, hash_counters

MAX_LANES = 64
"""Places of a text that are read at the same time, at most: more of them would touch more of the files at once."""
BLOCK_ROWS = 4096
"""Rows that are shuffled among each other; a task touches a shard only near its lanes' places."""


@dataclass(frozen=True)
class Part:
    """One text of a mixture."""

    name: str  # what it is called in sentences
    shard_rows: tuple[int, ...]  # of its shards, in manifest order
    seed: int  # of its order and masks


@dataclass(frozen=True)
class Stage:
    """Global batches that have the same shares of a mixture's texts, up to where the next stage begins."""

    first_batch: int  # from 0
    shares: tuple[Fraction, ...]  # of every text; they sum to 1


def count_rows(stages: Sequence[Stage], batch: int, global_batch_size: int) -> list[int]:
    """Return the rows of every text that the global batches before one have, given all stages in order.

    No count is smaller for a later batch, and in each stage a text's rows differ from its share of all by fewer than
    there are texts.
    """
    totals = [0] * len(stages[0].shares)
    ends = [*(later.first_batch for later in stages[1:]), batch]
    for stage, end in zip(stages, ends, strict=True):
        num_rows = max(0, min(end, batch) - stage.first_batch) * global_batch_size
        left = Fraction(1)
        for part, share in enumerate(stage.shares[1:], start=1):
            taken = int(share / left * num_rows) if share else 0
            totals[part] += taken
            num_rows, left = num_rows - taken, left - share
        totals[0] += num_rows
    return totals


def share_rows(num_rows: int, rank: int, world_size: int, group: int = 1) -> slice:
    """Return a rank's share of a global batch: contiguous, balanced to one group of rows, which stays whole.

    The rows are a multiple of `group`, and there are at least as many groups as ranks. The last rank has a largest
    share.
    """
    first, end = (group * (number * (num_rows // group) // world_size) for number in (rank, rank + 1))
    return slice(first, end)


@dataclass(frozen=True)
class Sampler:
    """The canonical order of one text or several under one global batch size; the first stage begins at batch 0."""

    parts: tuple[Part, ...]
    global_batch_size: int
    stages: tuple[Stage, ...] = (Stage(0, (Fraction(1),)),)

    def __post_init__(self) -> None:
        for part in self.parts:
            num_rows = sum(part.shard_rows)
            if num_rows < self.num_lanes or (len(self.parts) == 1 and num_rows < self.global_batch_size):
                raise CorpusError(
                    f"{part.name} makes {num_rows} rows, too few for batches of {self.global_batch_size}, which take "
                    f"them from {self.num_lanes} places of it; give more text or lower --train.global_batch_size."
                )

    @property
    def num_lanes(self) -> int:
        """Lanes of every text, a function of the global batch size alone."""
        return min(self.global_batch_size, MAX_LANES)

    def rows_per_epoch(self, part: int) -> int:
        """Rows of one epoch of a text; fewer than lanes are left out, other ones each epoch."""
        return sum(self.parts[part].shard_rows) // self.num_lanes * self.num_lanes

    def rows_before(self, batch: int) -> list[int]:
        return count_rows(self.stages, batch, self.global_batch_size)

    def count_epochs(self, batch: int) -> list[float]:
        """Return the epochs of every text that the global batches before one read."""
        return [rows / self.rows_per_epoch(part) for part, rows in enumerate(self.rows_before(batch))]

    def draw(self, batch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return, for every row of a global batch, its text and its number among all rows of that text, both int64."""
        before, after = self.rows_before(batch), self.rows_before(batch + 1)
        numbers = [np.arange(first, last) for first, last in zip(before, after, strict=True)]
        numbers = [rows[np.argsort(rows % self.num_lanes, kind="stable")] for rows in numbers]
        parts = np.repeat(np.arange(len(numbers)), [len(rows) for rows in numbers])
        places = np.concatenate([(np.arange(len(rows)) + 0.5) / max(len(rows), 1) for rows in numbers])
        order = np.argsort(places, kind="stable")
        return parts[order], np.concatenate(numbers)[order]

    def locate(self, part: int, numbers: np.ndarray) -> Iterator[tuple[np.ndarray, int, np.ndarray, np.ndarray]]:
        """Map numbers of rows among all of a text, from 0 at the first batch, to rows of its shards.

        Each epoch gives where in `numbers` its rows are, the epoch, shards in manifest order, and rows within them.
        """
        text = self.parts[part]
        length = sum(text.shard_rows) // self.num_lanes
        epochs, within = np.divmod(numbers, self.rows_per_epoch(part))
        for epoch in np.unique(epochs):
            chosen = np.flatnonzero(epochs == epoch)
            positions = within[chosen] % self.num_lanes * length + within[chosen] // self.num_lanes
            yield chosen, int(epoch), *locate_rows(text.shard_rows, text.seed, int(epoch), positions)


def locate_rows(
    shard_rows: Sequence[int], seed: int, epoch: int, positions: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Map places in an epoch's sequence, [R], to shards in manifest order and rows within them, all int64 [R]."""
    rows = np.asarray(shard_rows, dtype=np.int64)
    order = np.argsort(hash_counters(seed, Purpose.SHARDS, epoch, np.arange(len(rows))), kind="stable")
    ends = np.cumsum(rows[order])
    slot = np.searchsorted(ends, positions, side="right")
    shards = order[slot]
    offsets = positions - (ends[slot] - rows[shards])
    blocks = offsets // BLOCK_ROWS
    located = np.empty_like(offsets)
    for shard, block in np.unique(np.stack([shards, blocks], axis=1), axis=0):
        chosen = (shards == shard) & (blocks == block)
        first = int(block) * BLOCK_ROWS
        size = min(BLOCK_ROWS, int(rows[shard]) - first)
        permutation = _permute_block(seed, epoch, int(shard), int(block), size)
        located[chosen] = first + permutation[offsets[chosen] - first]
    return shards, located


@functools.lru_cache(maxsize=256)
def _permute_block(seed: int, epoch: int, shard: int, block: int, size: int) -> np.ndarray:
    return np.argsort(hash_counters(seed, Purpose.ROWS, epoch, shard, block, np.arange(size)), kind="stable")
