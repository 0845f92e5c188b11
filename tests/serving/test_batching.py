"""Rows of any request share passes, bounded in rows and tokens; each request gets its own results, whole."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import numpy as np
import pytest

from domext_ray.families.rows import Row
from domext_ray.serving.batching import Batcher, QueueFullError


def make_row(name: str, length: int) -> Row:
    return Row(0, np.zeros(length, dtype=np.int64), place=name)


class Recorder:
    """Answers each row with its name, and keeps what ran together."""

    def __init__(self, gate: asyncio.Event | None = None) -> None:
        self.passes: list[list[Row]] = []
        self.gate = gate

    async def __call__(self, rows: list[Row]) -> Sequence[Any]:
        self.passes.append(rows)
        if self.gate is not None:
            await self.gate.wait()
        return [ValueError(row.place) if row.place == "bad" else row.place for row in rows]


def make(run: Recorder, **changes: Any) -> Batcher[Row]:
    options = {"max_rows": 8, "max_tokens": 100, "wait_seconds": 0.2, "max_queued": 100, **changes}
    return Batcher(run, **options)


def in_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """A test that runs in a loop of its own."""

    @functools.wraps(test)
    def run() -> None:
        asyncio.run(test())

    return run


@in_loop
async def test_requests_share_a_pass_and_get_their_own_results() -> None:
    run = Recorder()
    batcher = make(run)
    first, second = await asyncio.gather(
        batcher.submit([make_row("a", 9), make_row("b", 3)]), batcher.submit([make_row("c", 5)])
    )
    assert (first, second) == (["a", "b"], ["c"])
    assert [[row.length for row in rows] for rows in run.passes] == [[3, 5, 9]]
    assert batcher.num_queued == 0


@in_loop
async def test_a_full_batch_does_not_wait() -> None:
    batcher = make(Recorder(), wait_seconds=1000.0, max_rows=2)
    rows = [make_row(str(i), 1) for i in range(4)]
    assert await asyncio.wait_for(batcher.submit(rows), 60) == ["0", "1", "2", "3"]


@in_loop
async def test_rows_that_arrive_while_a_pass_runs_are_one_pass_afterwards() -> None:
    gate = asyncio.Event()
    run = Recorder(gate)
    batcher = make(run, wait_seconds=0.0)
    tasks = [asyncio.create_task(batcher.submit([make_row("first", 2)]))]
    while not run.passes:
        await asyncio.sleep(0)
    for i in range(5):
        tasks.append(asyncio.create_task(batcher.submit([make_row(str(i), 2)])))
        await asyncio.sleep(0.001)
    gate.set()
    await asyncio.gather(*tasks)
    assert [len(rows) for rows in run.passes] == [1, 5]


@in_loop
async def test_a_row_that_fails_fails_its_own_request() -> None:
    batcher = make(Recorder())
    bad, good = await asyncio.gather(
        batcher.submit([make_row("x", 1), make_row("bad", 1)]),
        batcher.submit([make_row("y", 1)]),
        return_exceptions=True,
    )
    assert isinstance(bad, ValueError) and good == ["y"]


@in_loop
async def test_a_pass_that_fails_fails_its_requests_and_the_next_one_runs() -> None:
    calls = 0

    async def run(rows: list[Row]) -> Sequence[Any]:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise RuntimeError("gone")
        return [row.place for row in rows]

    batcher = Batcher(run, max_rows=8, max_tokens=100, wait_seconds=0.0, max_queued=10)
    with pytest.raises(RuntimeError, match="gone"):
        await batcher.submit([make_row("a", 1)])
    assert await batcher.submit([make_row("b", 1)]) == ["b"]


@in_loop
async def test_a_full_queue_refuses_whole_requests_and_takes_others_later() -> None:
    gate = asyncio.Event()
    batcher = make(Recorder(gate), max_queued=3, wait_seconds=0.0)
    first = asyncio.create_task(batcher.submit([make_row("a", 1), make_row("b", 1)]))
    await asyncio.sleep(0.01)
    with pytest.raises(QueueFullError):
        await batcher.submit([make_row("c", 1), make_row("d", 1)])
    gate.set()
    assert await first == ["a", "b"]
    assert await batcher.submit([make_row(name, 1) for name in "cde"]) == ["c", "d", "e"]


@in_loop
async def test_rows_of_a_client_that_is_gone_are_not_computed() -> None:
    gate = asyncio.Event()
    run = Recorder(gate)
    batcher = make(run, wait_seconds=0.0)
    first = asyncio.create_task(batcher.submit([make_row("a", 1)]))
    while not run.passes:
        await asyncio.sleep(0)
    gone = asyncio.create_task(batcher.submit([make_row("gone", 1)]))
    kept = asyncio.create_task(batcher.submit([make_row("kept", 1)]))
    await asyncio.sleep(0.01)
    gone.cancel()
    gate.set()
    assert (await first, await kept) == (["a"], ["kept"])
    assert [row.place for rows in run.passes for row in rows] == ["a", "kept"]
    assert batcher.num_queued == 0


@in_loop
async def test_as_many_passes_run_as_there_are_replicas() -> None:
    gate = asyncio.Event()
    run = Recorder(gate)
    batcher = make(run, max_rows=1, num_passes=2, wait_seconds=0.0)
    tasks = [asyncio.create_task(batcher.submit([make_row(str(i), 1)])) for i in range(3)]
    await asyncio.sleep(0.05)
    assert len(run.passes) == 2
    gate.set()
    await asyncio.gather(*tasks)
    assert len(run.passes) == 3
