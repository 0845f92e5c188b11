"""Batches of fine-tuning: every row once an epoch, similar lengths together, an order that the seed decides."""

from __future__ import annotations

import numpy as np
import pytest

from domext_ray.downstream.finetune.batches import plan_epoch, plan_prediction
from domext_ray.downstream.tasks.task import Row


def make_rows(num_rows: int, seed: int = 0, num_segments: int = 0) -> list[Row]:
    lengths = np.random.default_rng(seed).integers(4, 120, num_rows)
    shape = (num_segments,) if num_segments else ()
    return [Row(i, np.zeros((*shape, int(length)), dtype=np.int64)) for i, length in enumerate(lengths)]


@pytest.mark.parametrize(("num_rows", "batch_size"), [(1, 8), (7, 8), (64, 8), (4_133, 16)])
def test_every_row_stands_in_one_batch_of_an_epoch(num_rows: int, batch_size: int) -> None:
    batches = plan_epoch(make_rows(num_rows), batch_size, seed=3, epoch=0)
    assert sorted(np.concatenate(batches).tolist()) == list(range(num_rows))
    assert len(batches) == -(-num_rows // batch_size)
    assert sum(len(batch) != batch_size for batch in batches) <= 1


def test_seed_and_epoch_decide_the_order() -> None:
    rows = make_rows(500)
    orders = [
        np.concatenate(plan_epoch(rows, 8, seed, epoch)).tolist() for seed, epoch in ((0, 0), (0, 0), (0, 1), (1, 0))
    ]
    assert orders[0] == orders[1]
    assert orders[0] != orders[2] != orders[3] != orders[0]


def test_batches_have_similar_lengths_and_neighbours_change() -> None:
    rows = make_rows(4_000)
    first, second = (plan_epoch(rows, 16, 0, epoch) for epoch in (0, 1))
    tokens = sum(rows[i].length for i in range(len(rows)))
    padded = sum(len(batch) * max(rows[i].length for i in batch) for batch in first)
    assert padded < 1.05 * tokens, "rows in the order of the file would have some 1.8 times as many"
    together = [{frozenset(batch.tolist()) for batch in epoch} for epoch in (first, second)]
    assert len(together[0] & together[1]) < 0.05 * len(first)


@pytest.mark.parametrize("num_segments", [0, 4])
def test_prediction_batches_are_bounded_by_their_tokens(num_segments: int) -> None:
    rows = make_rows(300, num_segments=num_segments)
    batches = plan_prediction(rows, 1_000)
    assert sorted(np.concatenate(batches).tolist()) == list(range(300))
    for batch in batches:
        size = len(batch) * max(num_segments, 1) * max(rows[i].length for i in batch)
        assert size <= 1_000 or len(batch) == 1
