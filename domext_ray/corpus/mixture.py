"""Several prepared corpora + (seed, batch) -> this rank's rows of a mixed global batch, whatever restarts and resizes.

Every part has an order of its own: that of `stream`, an epoch after the other, its rows taken from the lanes in turn.
How many rows a global batch takes of a part is a function of the batch's number alone, and no draw: of the rows that
the parts after the first have left, a part takes floor(f · rows), f being its share of what is left, and the first part
has the rest. So where a part stands before a batch follows from the batch's number, whatever the number of workers and
wherever a run was stopped. Shares may change at some batches; from each of them on, rows are counted anew.

Within a global batch the parts' rows alternate as evenly as they can, so that each worker and each micro batch has
its part of the work.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import pyarrow as pa

from domext_ray.config.pretrain import count_lanes
from domext_ray.corpus.manifest import Manifest
from domext_ray.corpus.stream import (
    TASKS_PER_DATASET,
    CorpusReader,
    RankBatch,
    Stretch,
    count_batches_per_task,
    locate_rows,
    stream_stretches,
)
from domext_ray.errors import CorpusError

PART, EPOCH = "part", "epoch"
"""Columns of a mixed batch beside those of `RankBatch`: int8, the row's part, and int32, that part's epoch."""


@dataclass(frozen=True)
class MixturePart:
    """One corpus of a mixture.

    Args:
        name: what it is called in sentences.
        shard_rows: rows of its shards, in manifest order.
        seed: of its order, pairs and masks.
        share: of the rows of all batches together, until the shares change.
    """

    name: str
    shard_rows: tuple[int, ...]
    seed: int
    share: Fraction


@dataclass(frozen=True)
class Stage:
    """Global batches that have the same shares of a mixture's parts.

    Args:
        first_batch: from 0; the stage ends where the next one begins.
        shares: of every part; they sum to 1.
    """

    first_batch: int
    shares: tuple[Fraction, ...]


def count_rows(stages: Sequence[Stage], batch: int, global_batch_size: int) -> list[int]:
    """Return the rows of every part that the global batches before one have.

    No count is smaller for a later batch, and in each stage a part's rows differ from its share of all by fewer than
    there are parts.

    Args:
        stages: in order, the first one from batch 0 on.
        batch: from 0.
        global_batch_size: rows of one global batch.
    """
    totals = [0] * len(stages[0].shares)
    ends = [*(each.first_batch for each in stages[1:]), batch]
    for stage, end in zip(stages, ends, strict=True):
        num_rows = max(0, min(end, batch) - stage.first_batch) * global_batch_size
        left = Fraction(1)
        for part, share in enumerate(stage.shares[1:], start=1):
            taken = int(share / left * num_rows) if share else 0
            totals[part] += taken
            num_rows, left = num_rows - taken, left - share
        totals[0] += num_rows
    return totals


@dataclass(frozen=True)
class MixturePlan:
    """The canonical order of a mixture under one global batch size.

    Args:
        parts: two or more, of shares that sum to 1.
        global_batch_size: rows of one global batch.
        changes: later stages, in which the parts have other shares.

    Raises:
        CorpusError: a part has fewer rows than lanes.
    """

    parts: tuple[MixturePart, ...]
    global_batch_size: int
    changes: tuple[Stage, ...] = ()

    def __post_init__(self) -> None:
        assert all(sum(stage.shares) == 1 for stage in self.stages)
        for part in self.parts:
            if sum(part.shard_rows) < self.num_lanes:
                raise CorpusError(
                    f"{part.name} makes {sum(part.shard_rows)} rows, and a batch takes them from {self.num_lanes} "
                    "places of it; give more text or lower --train.global_batch_size."
                )

    @property
    def stages(self) -> tuple[Stage, ...]:
        """All stages."""
        return (Stage(0, tuple(part.share for part in self.parts)), *self.changes)

    @property
    def num_lanes(self) -> int:
        """Lanes of every part, a function of the global batch size alone."""
        return count_lanes(self.global_batch_size)

    def rows_per_epoch(self, part: int) -> int:
        """Rows of one epoch of a part; fewer than lanes are left out, other ones each epoch."""
        return sum(self.parts[part].shard_rows) // self.num_lanes * self.num_lanes

    def rows_before(self, batch: int) -> list[int]:
        """Return the rows of every part that the global batches before one have."""
        return count_rows(self.stages, batch, self.global_batch_size)

    def count_epochs(self, batch: int) -> list[float]:
        """Return the epochs of every part that the global batches before one read."""
        return [rows / self.rows_per_epoch(part) for part, rows in enumerate(self.rows_before(batch))]

    def assign(self, batch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return, for every row of a global batch, its part and its number among all rows of that part.

        Args:
            batch: the global batch, from 0.

        Returns:
            Both int64 [global_batch_size].
        """
        before, after = self.rows_before(batch), self.rows_before(batch + 1)
        counts = [last - first for first, last in zip(before, after, strict=True)]
        places = np.concatenate([(np.arange(count) + 0.5) / max(count, 1) for count in counts])
        parts, numbers = (
            np.concatenate([np.full(count, part) for part, count in enumerate(counts)]),
            np.concatenate([first + np.arange(count) for first, count in zip(before, counts, strict=True)]),
        )
        order = np.argsort(places, kind="stable")
        return parts[order], numbers[order]

    def locate(self, part: int, numbers: np.ndarray) -> Iterator[tuple[np.ndarray, int, np.ndarray, np.ndarray]]:
        """Map numbers of rows among all of a part to rows of its shards.

        Args:
            part: the part.
            numbers: int64 [R], from 0 at the mixture's first batch.

        Yields:
            For each epoch: where in `numbers` its rows are, the epoch, shards, and rows within them.
        """
        corpus = self.parts[part]
        length = sum(corpus.shard_rows) // self.num_lanes
        epochs, within = np.divmod(numbers, self.rows_per_epoch(part))
        for epoch in np.unique(epochs):
            chosen = np.flatnonzero(epochs == epoch)
            positions = within[chosen] % self.num_lanes * length + within[chosen] // self.num_lanes
            yield chosen, int(epoch), *locate_rows(corpus.shard_rows, corpus.seed, int(epoch), positions)


def stream_mixture(
    manifests: Sequence[Manifest], plan: MixturePlan, *, rank: int, world_size: int, batch: int = 0
) -> Iterator[RankBatch]:
    """Yield this rank's share of the global batches from one on, without end; `PART` and `EPOCH` say whose rows are.

    Args:
        manifests: the prepared corpora, one per part.
        plan: the order of the mixture.
        rank: from 0 to `world_size` - 1.
        world_size: number of ranks; must divide the global batch size.
        batch: global batch to start at.
    """
    return stream_stretches(_plan_stretches(manifests, plan, rank, world_size, batch))


def _plan_stretches(
    manifests: Sequence[Manifest], plan: MixturePlan, rank: int, world_size: int, batch: int
) -> Iterator[Stretch]:
    corpora = tuple(CorpusReader.open(manifest) for manifest in manifests)
    share = plan.global_batch_size // world_size
    read = functools.partial(_read_share, corpora, plan, rank * share, share)
    paths = tuple(path for corpus in corpora for path in corpus.paths)
    per_task = count_batches_per_task(share)
    while True:
        last = batch + per_task * TASKS_PER_DATASET
        yield Stretch(read, paths, share, batch, last, per_task)
        batch = last


def _read_share(
    corpora: Sequence[CorpusReader], plan: MixturePlan, first: int, share: int, batches: np.ndarray
) -> pa.Table:
    """Rows `first` to `first` + `share` of some global batches."""
    assigned = [plan.assign(int(batch)) for batch in batches]
    parts = np.concatenate([each[0][first : first + share] for each in assigned])
    numbers = np.concatenate([each[1][first : first + share] for each in assigned])
    tables, places = [], []
    for part, corpus in enumerate(corpora):
        own = np.flatnonzero(parts == part)
        for chosen, epoch, shards, rows in plan.locate(part, numbers[own]):
            table = corpus.read(shards, rows)
            table = table.append_column(PART, pa.array(np.full(len(rows), part), type=pa.int8()))
            tables.append(table.append_column(EPOCH, pa.array(np.full(len(rows), epoch), type=pa.int32())))
            places.append(own[chosen])
    inverse = np.argsort(np.concatenate(places), kind="stable")
    return pa.concat_tables(tables).combine_chunks().take(pa.array(inverse))
