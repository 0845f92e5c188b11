"""Rows of any request share passes, bounded in rows and tokens; each request gets its own results, whole."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from domext_ray.serving.batching import Batcher, QueueFullError, plan_passes


@dataclass(frozen=True)
class Words:
    name: str
    length: int


class Recorder:
    """Answers each row with its name, and keeps what ran together."""

    def __init__(self, gate: asyncio.Event | None = None) -> None:
        self.passes: list[list[Words]] = []
        self.gate = gate

    async def __call__(self, rows: list[Words]) -> Sequence[Any]:
        self.passes.append(rows)
        if self.gate is not None:
            await self.gate.wait()
        return [ValueError(row.name) if row.name == "bad" else row.name for row in rows]


def make(run: Recorder, **changes: Any) -> Batcher[Words]:
    options = {"max_rows": 8, "max_tokens": 100, "wait_seconds": 0.2, "max_queued": 100, **changes}
    return Batcher(run, **options)


def in_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """A test that runs in a loop of its own."""

    @functools.wraps(test)
    def run() -> None:
        asyncio.run(test())

    return run


def test_passes_are_sorted_and_bounded() -> None:
    for lengths, passes in (
        ([], []),
        ([4, 3, 4], [[1, 0, 2]]),
        ([5, 3, 4], [[1, 2], [0]]),
        ([10, 1, 10, 1], [[1, 3], [0], [2]]),
        ([50, 4, 4], [[1, 2], [0]]),
    ):
        assert plan_passes(lengths, 12) == passes


@in_loop
async def test_requests_share_a_pass_and_get_their_own_results() -> None:
    run = Recorder()
    batcher = make(run)
    first, second = await asyncio.gather(
        batcher.submit([Words("a", 9), Words("b", 3)]), batcher.submit([Words("c", 5)])
    )
    assert (first, second) == (["a", "b"], ["c"])
    assert [[row.length for row in rows] for rows in run.passes] == [[3, 5, 9]]
    assert batcher.num_queued == 0


@in_loop
async def test_a_full_batch_does_not_wait() -> None:
    batcher = make(Recorder(), wait_seconds=1000.0, max_rows=2)
    rows = [Words(str(i), 1) for i in range(4)]
    assert await asyncio.wait_for(batcher.submit(rows), 60) == ["0", "1", "2", "3"]


@in_loop
async def test_rows_that_arrive_while_a_pass_runs_are_one_pass_afterwards() -> None:
    gate = asyncio.Event()
    run = Recorder(gate)
    batcher = make(run, wait_seconds=0.0)
    tasks = [asyncio.create_task(batcher.submit([Words("first", 2)]))]
    while not run.passes:
        await asyncio.sleep(0)
    for i in range(5):
        tasks.append(asyncio.create_task(batcher.submit([Words(str(i), 2)])))
        await asyncio.sleep(0.001)
    gate.set()
    await asyncio.gather(*tasks)
    assert [len(rows) for rows in run.passes] == [1, 5]


@in_loop
async def test_a_row_that_fails_fails_its_own_request() -> None:
    batcher = make(Recorder())
    bad, good = await asyncio.gather(
        batcher.submit([Words("x", 1), Words("bad", 1)]), batcher.submit([Words("y", 1)]), return_exceptions=True
    )
    assert isinstance(bad, ValueError) and good == ["y"]


@in_loop
async def test_a_pass_that_fails_fails_its_requests_and_the_next_one_runs() -> None:
    calls = 0

    async def run(rows: list[Words]) -> Sequence[Any]:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise RuntimeError("gone")
        return [row.name for row in rows]

    batcher = Batcher(run, max_rows=8, max_tokens=100, wait_seconds=0.0, max_queued=10)
    with pytest.raises(RuntimeError, match="gone"):
        await batcher.submit([Words("a", 1)])
    assert await batcher.submit([Words("b", 1)]) == ["b"]


@in_loop
async def test_a_full_queue_refuses_whole_requests_and_takes_others_later() -> None:
    gate = asyncio.Event()
    batcher = make(Recorder(gate), max_queued=3, wait_seconds=0.0)
    first = asyncio.create_task(batcher.submit([Words("a", 1), Words("b", 1)]))
    await asyncio.sleep(0.01)
    with pytest.raises(QueueFullError):
        await batcher.submit([Words("c", 1), Words("d", 1)])
    gate.set()
    assert await first == ["a", "b"]
    assert await batcher.submit([Words(name, 1) for name in "cde"]) == ["c", "d", "e"]


@in_loop
async def test_rows_of_a_client_that_is_gone_are_not_computed() -> None:
    gate = asyncio.Event()
    run = Recorder(gate)
    batcher = make(run, wait_seconds=0.0)
    first = asyncio.create_task(batcher.submit([Words("a", 1)]))
    while not run.passes:
        await asyncio.sleep(0)
    gone = asyncio.create_task(batcher.submit([Words("gone", 1)]))
    kept = asyncio.create_task(batcher.submit([Words("kept", 1)]))
    await asyncio.sleep(0.01)
    gone.cancel()
    gate.set()
    assert (await first, await kept) == (["a"], ["kept"])
    assert [row.name for rows in run.passes for row in rows] == ["a", "kept"]
    assert batcher.num_queued == 0


@in_loop
async def test_as_many_passes_run_as_there_are_replicas() -> None:
    gate = asyncio.Event()
    run = Recorder(gate)
    batcher = make(run, max_rows=1, num_passes=2, wait_seconds=0.0)
    tasks = [asyncio.create_task(batcher.submit([Words(str(i), 1)])) for i in range(3)]
    await asyncio.sleep(0.05)
    assert len(run.passes) == 2
    gate.set()
    await asyncio.gather(*tasks)
    assert len(run.passes) == 3
