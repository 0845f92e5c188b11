"""Rows of many requests -> passes of similar lengths, bounded in rows and tokens, whatever adapters they name.

Enters: rows, as requests bring them. Leaves: each row's result, in its request's order. Ray's `@serve.batch` (2.60)
takes rows in the order in which they come, so that a long one pads the others of its batch; it closes batches also
while all replicas are busy, so that they stay small under load; and it refuses a row above its batches' size. Here rows
wait until a replica is free, and are sorted by length then.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from domext_ray.families.rows import TokenRow, batch_by_length

RowT = TypeVar("RowT", bound=TokenRow)


class QueueFullError(Exception):
    """There is no room for a request's rows."""


@dataclass(frozen=True)
class _Waiting(Generic[RowT]):
    row: RowT
    result: asyncio.Future[Any]


class Batcher(Generic[RowT]):
    """Collects rows for a few milliseconds, or as long as passes run, and runs them together.

    `run` computes a pass: a result for each row, or the exception that is its answer. What it raises is the answer to
    all rows of the pass. `max_tokens` of a pass count padding. A row waits `wait_seconds` for others when no pass runs;
    `num_passes` run at the same time, and `max_queued` rows wait or run.
    """

    def __init__(
        self,
        run: Callable[[list[RowT]], Awaitable[Sequence[Any]]],
        *,
        max_rows: int,
        max_tokens: int,
        wait_seconds: float,
        max_queued: int,
        num_passes: int = 1,
    ) -> None:
        self._run, self._max_rows, self._max_tokens = run, max_rows, max_tokens
        self._wait_seconds, self._max_queued = wait_seconds, max_queued
        self._free = asyncio.Semaphore(num_passes)
        self._waiting: deque[_Waiting[RowT]] = deque()
        self._arrived, self._filled = asyncio.Event(), asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._collector: asyncio.Task[None] | None = None
        self.num_queued = 0

    async def submit(self, rows: Sequence[RowT]) -> list[Any]:
        """Return the rows' results, or raise that of the first that failed; without room for all, a QueueFullError."""
        if self.num_queued + len(rows) > self._max_queued:
            raise QueueFullError
        if self._collector is None:
            self._collector = asyncio.create_task(self._collect())
        loop = asyncio.get_running_loop()
        own = [_Waiting(row, loop.create_future()) for row in rows]
        self._waiting.extend(own)
        self.num_queued += len(own)
        self._arrived.set()
        if len(self._waiting) >= self._max_rows:
            self._filled.set()
        try:
            return list(await asyncio.gather(*(waiting.result for waiting in own)))
        finally:
            self.num_queued -= len(own)
            for waiting in own:
                waiting.result.cancel()  # of a client that is gone; those that are done stay as they are

    async def _collect(self) -> None:
        while True:
            await self._arrived.wait()
            if len(self._waiting) < self._max_rows and not self._tasks:
                self._filled.clear()
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._filled.wait(), self._wait_seconds)
            async with self._free:  # while all replicas are busy further rows arrive
                taken = [self._waiting.popleft() for _ in range(min(self._max_rows, len(self._waiting)))]
            if not self._waiting:
                self._arrived.clear()
            taken = [waiting for waiting in taken if not waiting.result.done()]
            for places in batch_by_length([waiting.row for waiting in taken], max_tokens=self._max_tokens):
                await self._free.acquire()
                task = asyncio.create_task(self._compute([taken[place] for place in places]))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _compute(self, own: list[_Waiting[RowT]]) -> None:
        try:
            results = await self._run([waiting.row for waiting in own])
        except Exception as error:
            results = [error] * len(own)
        finally:
            self._free.release()
        for waiting, result in zip(own, results, strict=True):
            if waiting.result.done():
                continue
            if isinstance(result, BaseException):
                waiting.result.set_exception(result)
            else:
                waiting.result.set_result(result)
