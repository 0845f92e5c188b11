"""Prepared corpora + an order -> one rank's micro batches, masked and padded, from any global batch on.

What a global batch holds is the sampler's (`corpus.sampler`), what becomes of its rows the maskers' (`corpus.batching`,
`corpus.views`): both are functions of numbers, so nothing is replayed to start at another batch or on other ranks.

Ray Data does the reading, in one execution after the other: each has some tasks, which read from memory-mapped Arrow
shards and make arrays ready for a model, while the model trains on those of the execution before. In memory are at most
two executions, 2 · `TASKS` · `ROWS_PER_TASK` = 8,192 rows of a rank (or eight batches, where its share of one is more),
at some 30 bytes a token; rows are freed as they are used. Longer executions were tried and do not pay: one has a fixed
cost of some hundredths of a second, the next is read ahead, and a consumer of 4,000 rows a second waited 0.8 % of its
time with 4 tasks as with 32, whose first rows come later.
"""

from __future__ import annotations

import logging
import pickle
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import numpy as np
import pyarrow as pa

from domext_ray.errors import CorpusError
from domext_ray.runtime.waiting import WAIT_SECONDS, RoomTimer
from domext_ray.storage import Place
from domext_ray.text.corpus.batching import EPOCH, Arrays, join_rows
from domext_ray.text.corpus.manifest import FileRecord, take_rows
from domext_ray.text.corpus.sampler import Sampler

ROWS_PER_TASK = 1024
TASKS = 4
"""Reading tasks of one Ray Data execution, whose rows are all made before the first is used."""
PREFETCHED_BATCHES = 4
LOOK_SECONDS = 10.0
"""Between two looks at whether reading tasks that have made nothing have room."""
READ_CPUS = 0.25  # of a reading task: it leaves a small machine to the model

RankBatch = tuple[list[Arrays], list[int]]
"""One rank's micro batches of a global batch, and the tokens in them, by text of a mixture."""


@dataclass(frozen=True)
class BatchReader:
    """Makes one rank's micro batches of any global batches, where Ray runs it."""

    corpora: tuple[tuple[FileRecord, ...], ...]  # the shards of each prepared text
    sampler: Sampler
    maskers: tuple[Any, ...]  # what makes batches of each text's rows; see `views.make_masker`
    is_kept: tuple[bool, ...]  # which texts the keep loss reads; empty: there is no such loss
    rows: slice  # the rank's share of a global batch
    micro_batch_size: int

    @property
    def num_rows(self) -> int:
        return int(self.rows.stop - self.rows.start)

    def __call__(self, batches: np.ndarray) -> list[RankBatch]:
        """Read, mask and pad the rank's rows of some global batches, int64 [K]."""
        drawn = [self.sampler.draw(int(batch)) for batch in batches]
        parts, numbers = (np.concatenate([draw[i][self.rows] for draw in drawn]) for i in range(2))
        places = [np.flatnonzero(parts == part) for part in range(len(self.corpora))]
        present = [part for part, own in enumerate(places) if len(own)]
        read = (self.read(part, numbers[places[part]]) for part in present)
        masked = [
            self.maskers[part].mask(own, own.column(EPOCH).to_numpy()) for part, own in zip(present, read, strict=True)
        ]
        rows = masked[0]
        if len(self.corpora) > 1:
            is_kept = [self.is_kept[part] for part in present] if self.is_kept else None
            rows = join_rows(masked, [places[part] for part in present], present, is_kept)
        found = []
        for first in range(0, len(parts), self.num_rows):
            own = rows.cut(slice(first, first + self.num_rows))
            micro_batches = self.maskers[0].collate(own, self.micro_batch_size)
            found.append((micro_batches, own.count_tokens(len(self.corpora))))
        return found

    def read(self, part: int, numbers: np.ndarray) -> pa.Table:
        """Return rows of a text by their number among all that are read of it; `row_id` is that in its manifest."""
        starts = np.concatenate([[0], np.cumsum(self.sampler.parts[part].shard_rows)])
        tables, places = [], []
        for chosen, epoch, shards, rows in self.sampler.locate(part, numbers):
            table = take_rows(self.corpora[part], shards, rows)
            table = table.append_column("row_id", pa.array(starts[shards] + rows, type=pa.int64()))
            tables.append(table.append_column(EPOCH, pa.array(np.full(len(rows), epoch), type=pa.int32())))
            places.append(chosen)
        order = np.argsort(np.concatenate(places), kind="stable")
        return tables[0] if len(tables) == 1 else pa.concat_tables(tables).combine_chunks().take(pa.array(order))


@dataclass(frozen=True)
class BatchRange:
    """Global batches that one Ray Data execution makes, a few in each of its tasks; the last one is not included."""

    read: BatchReader
    first: int
    last: int
    per_task: int

    def __call__(self, numbers: pa.Table) -> pa.Table:
        """Make what some tasks, given by their numbers, have to make."""
        made = list[RankBatch]()
        for number in numbers.column(0).to_pylist():
            first = self.first + number * self.per_task
            made += self.read(np.arange(first, min(first + self.per_task, self.last)))
        return pa.table({"batch": pa.array([pickle.dumps(batch, protocol=5) for batch in made], pa.large_binary())})


def stream_batches(
    reader: BatchReader, batch: int = 0, end: int = sys.maxsize, wait_seconds: float = WAIT_SECONDS
) -> Iterator[RankBatch]:
    """Yield a rank's micro batches of the global batches from one on; nothing is read from `end` on.

    Reading tasks that have waited for room for `wait_seconds` end it with a `RunError`.
    """
    per_task = max(1, ROWS_PER_TASK // reader.num_rows)
    running = list[Prefetch[RankBatch]]()
    try:
        while True:
            while len(running) < 2 and batch < end:  # the next one begins while a model trains on this one
                last = min(batch + TASKS * per_task, end)
                rows = _run(BatchRange(reader, batch, last, per_task))
                running.append(Prefetch(rows, look=_RoomToRead(wait_seconds).look))
                batch = last
            if not running:
                return
            yield from running[0]
            running.pop(0)
    finally:
        for prefetch in running:
            prefetch.close()


class _RoomToRead:
    """Ends reading that has had no room for too long: Ray Data itself would wait for ever."""

    def __init__(self, seconds: float) -> None:
        from domext_ray.runtime.ray_cluster import ask_waiting

        self._room, self._due = RoomTimer(ask_waiting, seconds), 0.0

    def look(self, waited: float) -> None:
        """Nothing has come for so many seconds; see whether tasks could run, which then are slow."""
        from domext_ray.runtime.ray_cluster import list_nodes

        if waited < LOOK_SECONDS:
            self._room.note_work()
        elif time.monotonic() >= self._due:
            self._due = time.monotonic() + LOOK_SECONDS
            if any(node.cpus >= READ_CPUS for node in list_nodes(free=True)):
                self._room.note_work()
            else:
                self._room.check("reading rows")


def _configure_ray_data() -> None:
    """Make Ray Data keep the order of its blocks, and leave progress and logs to us."""
    import ray.data

    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    context.execution_options.preserve_order = True
    logging.getLogger("ray.data").setLevel(logging.ERROR)


def _run(batches: BatchRange) -> Iterator[RankBatch]:
    import ray.data

    _configure_ray_data()
    num_tasks = -(-(batches.last - batches.first) // batches.per_task)
    # Not `ray.data.range`: it would read its numbers in tasks of a whole CPU, which workers may have left none of.
    numbers = ray.data.from_items([{"number": i} for i in range(num_tasks)], override_num_blocks=num_tasks)
    dataset = numbers.map_batches(
        batches, batch_size=1, batch_format="pyarrow", num_cpus=READ_CPUS, zero_copy_batch=True
    )
    # Not `iter_batches`: its scheduler polls without pause until the last batch is taken, at the cost of a core.
    try:
        references = dataset.to_arrow_refs()
        del dataset
        while references:  # each is let go as soon as it is used
            for batch in ray.get(references.pop(0)).column("batch"):
                yield pickle.loads(batch.as_buffer())
    except Exception as error:  # whatever the task met, Ray Data hands on in a wrapping of its own
        gone = [file.path for files in batches.read.corpora for file in files if not Place(file.path).is_file()]
        if not gone:
            raise
        raise CorpusError(f"the shard {gone[0]} has gone; the same command prepares it again and goes on.") from error


ItemT = TypeVar("ItemT")


class Prefetch(Iterator[ItemT]):
    """An iterator that runs in a thread of its own, from now on and up to `depth` items ahead.

    Exceptions of the items, and of `look`, come out of `next`; `look` is called now and then while nothing is ready,
    with the seconds.
    """

    def __init__(
        self,
        items: Iterator[ItemT],
        depth: int = PREFETCHED_BATCHES,
        look: Callable[[float], None] = lambda waited: None,
    ) -> None:
        self._items, self._look = items, look
        self._ready: queue.Queue[tuple[ItemT | None, BaseException | None]] = queue.Queue(maxsize=depth)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._fill, name="prefetch", daemon=True)
        self._thread.start()

    def __next__(self) -> ItemT:
        item, error = self._get()
        if error is not None:
            self._put(None, error)  # a second call ends in the same way
            raise error
        return cast(ItemT, item)

    def _get(self) -> tuple[ItemT | None, BaseException | None]:
        started = time.monotonic()
        while True:
            try:
                return self._ready.get(timeout=1.0)
            except queue.Empty:
                self._look(time.monotonic() - started)

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
