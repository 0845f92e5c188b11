"""Manifest + (seed, epoch, batch) -> this rank's rows, in an order that no restart or resize changes.

The order of an epoch is canonical: shards are permuted, then rows within fixed blocks of a shard, both by hashes of
(seed, epoch). That sequence is cut into lanes of equal length, and global batch b takes rows b·r … b·r + r - 1 of
every lane, r = batch size / number of lanes. A rank owns an equal share of the lanes, hence reads 1/world of the
data, and the rows of a global batch depend on (seed, epoch, b) alone. Rows that fill no whole batch at the end of an
epoch are dropped. Resuming means starting at another (epoch, batch): nothing is replayed.

Ray Data does the reading: every task fills a few batches from memory-mapped Arrow shards, in order, while the model
trains on earlier ones.
"""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, cast

import numpy as np
import pyarrow as pa
import ray
import ray.data

from domext_ray.config.pretrain import count_lanes
from domext_ray.corpus.draws import hash_counters
from domext_ray.corpus.manifest import Manifest, take_rows
from domext_ray.corpus.texts.ray_tasks import configure_ray_data
from domext_ray.errors import CorpusError

BLOCK_ROWS = 4096
"""Rows that are shuffled among each other; a task touches a shard only near its lanes' places."""

ROWS_PER_TASK = 1024
TASKS_PER_DATASET = 4
"""Reading tasks of one Ray Data execution, whose rows are all in memory before the first is used."""
PREFETCHED_BATCHES = 4
READ_CPUS = 0.25  # of a reading task: it leaves a small machine to the model

_SHARDS, _ROWS = 1, 2  # purposes of a hash: no two draws share their counters


@dataclass(frozen=True)
class BatchPlan:
    """The canonical order of a corpus under one seed and one global batch size.

    Args:
        shard_rows: rows of every shard, in manifest order.
        seed: the run's seed.
        global_batch_size: rows of one global batch.
    """

    shard_rows: tuple[int, ...]
    seed: int
    global_batch_size: int

    def __post_init__(self) -> None:
        if self.batches_per_epoch == 0:
            raise CorpusError(
                f"the corpus makes {sum(self.shard_rows)} rows, which fill no batch of {self.global_batch_size}; "
                "give more text or lower --train.global_batch_size."
            )

    @property
    def num_lanes(self) -> int:
        """Lanes of the epoch, a function of the global batch size alone."""
        return count_lanes(self.global_batch_size)

    @property
    def rows_per_lane(self) -> int:
        """Rows that a lane gives to one global batch."""
        return self.global_batch_size // self.num_lanes

    @property
    def batches_per_epoch(self) -> int:
        """Whole global batches of an epoch."""
        return sum(self.shard_rows) // self.num_lanes // self.rows_per_lane

    @property
    def num_dropped_rows(self) -> int:
        """Rows at the end of every epoch that fill no batch (other rows each epoch)."""
        return sum(self.shard_rows) - self.batches_per_epoch * self.global_batch_size

    def positions(self, batches: np.ndarray, rank: int, world_size: int) -> np.ndarray:
        """Return places in the epoch's sequence of this rank's share of some global batches.

        Args:
            batches: int64 [K], numbers of global batches within the epoch.
            rank: from 0 to `world_size` - 1.
            world_size: number of ranks; must divide the number of lanes.

        Returns:
            int64 [K, global_batch_size / world_size].
        """
        lanes_per_rank = self.num_lanes // world_size
        lanes = np.arange(rank * lanes_per_rank, (rank + 1) * lanes_per_rank)
        lane_length = sum(self.shard_rows) // self.num_lanes
        within = batches[:, None, None] * self.rows_per_lane + np.arange(self.rows_per_lane)
        return (lanes[None, :, None] * lane_length + within).reshape(len(batches), -1)

    def locate(self, epoch: int, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Map places in an epoch's sequence to rows of shards.

        Args:
            epoch: from 0.
            positions: int64 [R], places in the epoch's sequence.

        Returns:
            Shard numbers in manifest order and row numbers within the shard, both int64 [R].
        """
        return locate_rows(self.shard_rows, self.seed, epoch, positions)


def locate_rows(
    shard_rows: Sequence[int], seed: int, epoch: int, positions: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Map places in an epoch's sequence to rows of shards; see `BatchPlan.locate`."""
    rows = np.asarray(shard_rows, dtype=np.int64)
    order = np.argsort(hash_counters(seed, _SHARDS, epoch, np.arange(len(rows))), kind="stable")
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
    return np.argsort(hash_counters(seed, _ROWS, epoch, shard, block, np.arange(size)), kind="stable")


@dataclass(frozen=True)
class CorpusReader:
    """Reads rows of one corpus where Ray runs it.

    Args:
        paths: the shards.
        shard_rows: their rows.
    """

    paths: tuple[str, ...]
    shard_rows: tuple[int, ...]

    @classmethod
    def open(cls, manifest: Manifest) -> CorpusReader:
        """Return the reader of a prepared corpus's training rows."""
        return cls(manifest.paths("train"), tuple(each.num_rows for each in manifest.records("train")))

    def read(self, shards: np.ndarray, rows: np.ndarray) -> pa.Table:
        """Return rows, in the order asked for, with their `row_id` (see `RankBatch`)."""
        starts = np.concatenate([[0], np.cumsum(self.shard_rows)])
        table = take_rows(self.paths, shards, rows)
        return table.append_column("row_id", pa.array(starts[shards] + rows, type=pa.int64()))


@dataclass(frozen=True)
class Stretch:
    """Batches that one Ray Data execution reads, a few in each of its tasks.

    Args:
        read: numbers of global batches, int64 [K] -> the rank's rows of them, one batch behind the other.
        paths: all files that it reads.
        share: the rank's rows of one batch.
        first_batch, last_batch: the batches, the last one not included.
        batches_per_task: batches of one task.
        epoch: the epoch that their numbers count in.
    """

    read: Callable[[np.ndarray], pa.Table]
    paths: tuple[str, ...]
    share: int
    first_batch: int
    last_batch: int
    batches_per_task: int
    epoch: int = 0

    def __call__(self, numbers: pa.Table) -> pa.Table:
        """Read what some tasks, given by their numbers, have to read."""
        tables = []
        for number in numbers.column(0).to_pylist():
            first = self.first_batch + number * self.batches_per_task
            tables.append(self.read(np.arange(first, min(first + self.batches_per_task, self.last_batch))))
        return pa.concat_tables(tables)


@dataclass(frozen=True)
class RankBatch:
    """One rank's share of a global batch.

    Args:
        epoch: from 0.
        batch: number of the global batch within the epoch, from 0.
        rows: columns input_ids, word_starts and row_id (int64, the row's place in the manifest); of a corpus prepared
            for pairs also second_start and next_sentence (see `pairs.PairRow`).
    """

    epoch: int
    batch: int
    rows: pa.Table


def stream_batches(
    manifest: Manifest, plan: BatchPlan, *, rank: int, world_size: int, epoch: int = 0, batch: int = 0
) -> Iterator[RankBatch]:
    """Yield this rank's share of the global batches from (epoch, batch) on, without end.

    Args:
        manifest: the prepared corpus.
        plan: order over the manifest's training shards.
        rank: from 0 to `world_size` - 1.
        world_size: number of ranks; must divide the number of lanes.
        epoch: epoch to start in.
        batch: global batch of that epoch to start at.
    """
    return stream_stretches(_plan_stretches(manifest, plan, rank, world_size, epoch, batch))


def stream_stretches(stretches: Iterator[Stretch]) -> Iterator[RankBatch]:
    """Yield the batches of stretches, without end; each is read while the model trains on the rows of the one before.

    Raises:
        CorpusError: a shard has gone, or ended early.
    """
    stretch = next(stretches)
    reader = next_reader = Prefetch(_read(stretch))
    try:
        while True:
            following = next(stretches)
            next_reader = Prefetch(_read(following))
            batch = stretch.first_batch
            for rows in reader:
                yield RankBatch(stretch.epoch, batch, rows)
                batch += 1
            if batch != stretch.last_batch:
                raise CorpusError(f"the shards of {Path(stretch.paths[0]).parent} ended early; prepare them again.")
            stretch, reader = following, next_reader
    finally:
        reader.close()
        next_reader.close()


def _plan_stretches(
    manifest: Manifest, plan: BatchPlan, rank: int, world_size: int, epoch: int, batch: int
) -> Iterator[Stretch]:
    """Yield what to read from (epoch, batch) on, without end."""
    corpus, share = CorpusReader.open(manifest), plan.global_batch_size // world_size
    per_task = count_batches_per_task(share)
    while True:
        if batch >= plan.batches_per_epoch:
            epoch, batch = epoch + 1, 0
        last = min(plan.batches_per_epoch, batch + per_task * TASKS_PER_DATASET)
        read = functools.partial(_read_share, corpus, plan, epoch, rank, world_size)
        yield Stretch(read, corpus.paths, share, batch, last, per_task, epoch)
        batch = last


def count_batches_per_task(share: int) -> int:
    """Return the batches that a reading task fills, given a rank's rows of one."""
    return max(1, ROWS_PER_TASK // share)


def _read_share(
    corpus: CorpusReader, plan: BatchPlan, epoch: int, rank: int, world_size: int, batches: np.ndarray
) -> pa.Table:
    """A rank's rows of some global batches of one epoch."""
    positions = plan.positions(batches, rank, world_size).reshape(-1)
    return corpus.read(*plan.locate(epoch, positions))


def _read(stretch: Stretch) -> Iterator[pa.Table]:
    configure_ray_data()
    num_tasks = -(-(stretch.last_batch - stretch.first_batch) // stretch.batches_per_task)
    # Not `ray.data.range`: it would read its numbers in tasks of a whole CPU, which workers may have left none of.
    numbers = ray.data.from_items([{"number": i} for i in range(num_tasks)], override_num_blocks=num_tasks)
    dataset = numbers.map_batches(
        stretch, batch_size=1, batch_format="pyarrow", num_cpus=READ_CPUS, zero_copy_batch=True
    )
    # Not `iter_batches`: its scheduler polls without pause until the last batch is taken, at the cost of a core.
    try:
        for reference in dataset.to_arrow_refs():
            table = ray.get(reference)
            for first in range(0, table.num_rows, stretch.share):
                yield table.slice(first, stretch.share)
    except Exception as error:  # whatever the task met, Ray Data hands on in a wrapping of its own
        gone = [each for each in stretch.paths if not Path(each).exists()]
        if not gone:
            raise
        raise CorpusError(f"the shard {gone[0]} has gone; the same command prepares it again and goes on.") from error


ItemT = TypeVar("ItemT")


class Prefetch(Iterator[ItemT]):
    """An iterator that runs in a thread of its own, from now on and up to `depth` items ahead.

    Args:
        items: what to run; its exceptions come out of `next`.
        depth: items that are kept ready.
    """

    def __init__(self, items: Iterator[ItemT], depth: int = PREFETCHED_BATCHES) -> None:
        self._items = items
        self._ready: queue.Queue[tuple[ItemT | None, BaseException | None]] = queue.Queue(maxsize=depth)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._fill, name="prefetch", daemon=True)
        self._thread.start()

    def __next__(self) -> ItemT:
        item, error = self._ready.get()
        if error is not None:
            self._put(None, error)  # a second call ends in the same way
            raise error
        return cast(ItemT, item)

    def close(self) -> None:
        """Stop the thread; what is ready is dropped."""
        self._closed.set()
        self._thread.join(timeout=10)

    def _fill(self) -> None:
        try:
            for item in self._items:
                if not self._put(item, None):
                    return
            self._put(None, StopIteration())
        except BaseException as error:  # handed to the consumer, whatever it is
            self._put(None, error)

    def _put(self, item: ItemT | None, error: BaseException | None) -> bool:
        while not self._closed.is_set():
            try:
                self._ready.put((item, error), timeout=0.2)
                return True
            except queue.Full:
                continue
        return False
