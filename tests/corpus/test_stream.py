"""The canonical order: a function of (seed, epoch, batch), whatever the number of ranks and the place of a restart."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from domext_ray.corpus.draws import hash_counters, to_uniform
from domext_ray.corpus.manifest import Manifest, ShardRecord
from domext_ray.corpus.stream import BLOCK_ROWS, BatchPlan, Prefetch, stream_batches
from domext_ray.errors import CorpusError

SHARD_ROWS = (137, 5, 9001, 64)


def read_epoch(plan: BatchPlan, epoch: int, world_size: int) -> np.ndarray:
    """Row ids of every global batch, ranks side by side: int64 [batches, global batch]."""
    batches = np.arange(plan.batches_per_epoch)
    starts = np.concatenate([[0], np.cumsum(plan.shard_rows)])
    shares = []
    for rank in range(world_size):
        positions = plan.positions(batches, rank, world_size)
        shards, rows = plan.locate(epoch, positions.reshape(-1))
        shares.append((starts[shards] + rows).reshape(positions.shape))
    return np.concatenate(shares, axis=1)


@pytest.mark.parametrize("world_size", [2, 4, 8, 16])
def test_order_does_not_depend_on_world_size(world_size: int) -> None:
    plan = BatchPlan(SHARD_ROWS, seed=3, global_batch_size=48)
    np.testing.assert_array_equal(read_epoch(plan, 1, 1), read_epoch(plan, 1, world_size))


def test_an_epoch_reads_every_row_once_but_for_the_reported_tail() -> None:
    plan = BatchPlan(SHARD_ROWS, seed=0, global_batch_size=48)
    rows = read_epoch(plan, 0, 1).reshape(-1)
    assert len(np.unique(rows)) == len(rows) == sum(SHARD_ROWS) - plan.num_dropped_rows
    assert rows.min() >= 0 and rows.max() < sum(SHARD_ROWS)
    assert plan.num_dropped_rows < 2 * 48


def test_seed_and_epoch_change_the_order() -> None:
    plan, other = BatchPlan(SHARD_ROWS, 0, 48), BatchPlan(SHARD_ROWS, 1, 48)
    first = read_epoch(plan, 0, 1)
    assert (first != read_epoch(plan, 1, 1)).mean() > 0.9
    assert (first != read_epoch(other, 0, 1)).mean() > 0.9


def test_rows_mix_within_blocks_only() -> None:
    plan = BatchPlan((3 * BLOCK_ROWS,), seed=0, global_batch_size=1)
    _, rows = plan.locate(0, np.arange(3 * BLOCK_ROWS))
    np.testing.assert_array_equal(rows // BLOCK_ROWS, np.repeat([0, 1, 2], BLOCK_ROWS))
    assert (rows[:BLOCK_ROWS] != np.arange(BLOCK_ROWS)).mean() > 0.9


def test_golden_order() -> None:
    """The order is part of every checkpoint's meaning: these numbers must never change."""
    plan = BatchPlan((7, 11), seed=42, global_batch_size=6)
    assert hash_counters(1, 2, 3).tolist() == [7702586659592502839]
    assert read_epoch(plan, 0, 1).tolist() == [[6, 2, 4, 13, 12, 10], [0, 3, 15, 9, 8, 14], [1, 5, 17, 7, 16, 11]]


def test_too_few_rows_is_an_error() -> None:
    with pytest.raises(CorpusError, match="7 rows, which fill no batch of 8"):
        BatchPlan((3, 4), seed=0, global_batch_size=8)


def test_hash_is_uniform() -> None:
    draws = to_uniform(hash_counters(7, 1, 0, np.arange(200_000)))
    counts, _ = np.histogram(draws, bins=20, range=(0, 1))
    assert np.abs(counts / 10_000 - 1).max() < 0.05


def write_corpus(folder: Path, shard_rows: tuple[int, ...]) -> Manifest:
    """Shards whose rows hold their own number."""
    records, number = [], 0
    for i, size in enumerate(shard_rows):
        ids = [[2, number + j, 3] for j in range(size)]
        table = pa.table(
            {
                "input_ids": pa.array(ids, type=pa.list_(pa.int32())),
                "word_starts": pa.array([[True] * 3] * size, type=pa.list_(pa.bool_())),
            }
        )
        with pa.OSFile(str(folder / f"train-{i}.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=100)
        records.append(ShardRecord(f"train-{i}.arrow", size, 3 * size, ""))
        number += size
    return Manifest(folder, "f", 8, "t", {}, tuple(records), (), number, {})


def test_ray_data_reads_the_plan_in_order_and_resumes_anywhere(tmp_path: Path, local_ray: None) -> None:
    manifest = write_corpus(tmp_path, (300, 50, 700))
    plan = BatchPlan((300, 50, 700), seed=5, global_batch_size=24)
    expected = np.concatenate([read_epoch(plan, 0, 1), read_epoch(plan, 1, 1)])
    for world_size in (1, 2):
        shares = []
        for rank in range(world_size):
            stream = stream_batches(manifest, plan, rank=rank, world_size=world_size)
            read = list(itertools.islice(stream, plan.batches_per_epoch + 3))
            assert [each.epoch for each in read[-4:]] == [0, 1, 1, 1]
            rows = [each.rows for each in read]
            for table in rows:
                ids = [row[1] for row in table.column("input_ids").to_pylist()]
                assert ids == table.column("row_id").to_pylist()
            shares.append(np.array([table.column("row_id").to_pylist() for table in rows]))
        np.testing.assert_array_equal(np.concatenate(shares, axis=1), expected[: plan.batches_per_epoch + 3])
    resumed = next(stream_batches(manifest, plan, rank=0, world_size=1, epoch=1, batch=2))
    assert resumed.rows.column("row_id").to_pylist() == expected[plan.batches_per_epoch + 2].tolist()


def test_a_shard_that_has_gone_is_named(tmp_path: Path, local_ray: None) -> None:
    manifest = write_corpus(tmp_path, (300,))
    (tmp_path / "train-0.arrow").unlink()
    with pytest.raises(CorpusError, match=r"train-0\.arrow has gone; the same command prepares it again"):
        next(stream_batches(manifest, BatchPlan((300,), seed=5, global_batch_size=24), rank=0, world_size=1))


def test_prefetch_starts_at_once_and_hands_over_items_and_errors() -> None:
    started = threading.Event()

    def broken() -> Iterator[int]:
        started.set()
        yield from range(10)
        raise CorpusError("the shard ended")

    items = Prefetch(broken(), depth=2)
    assert started.wait(timeout=120)
    assert [next(items) for _ in range(10)] == list(range(10))
    for _ in range(2):
        with pytest.raises(CorpusError, match="the shard ended"):
            next(items)
