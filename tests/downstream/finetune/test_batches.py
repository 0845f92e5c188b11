"""Batches of fine-tuning: every row once per epoch, an order that the seed decides, and passes of similar lengths."""

from __future__ import annotations

import numpy as np
import pytest

from domext_ray.downstream.finetune.training import plan_epoch
from domext_ray.families.rows import Row, batch_by_length, run_by_length


def make_rows(num_rows: int, seed: int = 0, num_segments: int = 0) -> list[Row]:
    lengths = np.random.default_rng(seed).integers(4, 120, num_rows)
    shape = (num_segments,) if num_segments else ()
    return [Row(i, np.zeros((*shape, int(length)), dtype=np.int64)) for i, length in enumerate(lengths)]


@pytest.mark.parametrize(("num_rows", "batch_size"), [(1, 8), (7, 8), (64, 8), (4_133, 16)])
def test_every_row_stands_in_one_batch_of_an_epoch(num_rows: int, batch_size: int) -> None:
    batches = plan_epoch(num_rows, batch_size, seed=3, epoch=0)
    assert sorted(np.concatenate(batches).tolist()) == list(range(num_rows))
    assert len(batches) == -(-num_rows // batch_size)
    assert sum(len(batch) != batch_size for batch in batches) <= 1


def test_seed_and_epoch_decide_the_order() -> None:
    orders = [
        np.concatenate(plan_epoch(500, 8, seed, epoch)).tolist() for seed, epoch in ((0, 0), (0, 0), (0, 1), (1, 0))
    ]
    assert orders[0] == orders[1]
    assert orders[0] != orders[2] != orders[3] != orders[0]


def test_batches_are_of_any_lengths_and_their_passes_of_similar_ones() -> None:
    rows = make_rows(4_000)
    lengths = np.array([row.length for row in rows])
    batches = plan_epoch(len(rows), 32, 0, 0)
    means = np.array([lengths[batch].mean() for batch in batches])
    assert means.std() < 1.2 * lengths.std() / 32**0.5, "a batch's mean length is that of rows drawn at random"
    passes = [
        batch[places] for batch in batches for places in batch_by_length([rows[i] for i in batch], max_tokens=512)
    ]
    assert sorted(np.concatenate(passes).tolist()) == list(range(len(rows)))
    padded = sum(len(each) * lengths[each].max() for each in passes)
    assert padded < 1.25 * lengths.sum(), "whole batches would have 1.9 times as many"


def test_rows_of_other_numbers_of_segments_are_batches_of_their_own() -> None:
    rows = [
        row for pair in zip(make_rows(9, num_segments=3), make_rows(9, num_segments=2), strict=True) for row in pair
    ]
    batches = batch_by_length(rows)
    assert [sorted({len(rows[i].input_ids) for i in batch}) for batch in batches] == [[2], [3]]
    assert sorted(np.concatenate(batches).tolist()) == list(range(18))


@pytest.mark.parametrize("num_segments", [0, 4])
def test_prediction_batches_are_bounded_by_their_tokens(num_segments: int) -> None:
    rows = make_rows(300, num_segments=num_segments)
    batches = batch_by_length(rows, max_tokens=1_000)
    assert sorted(np.concatenate(batches).tolist()) == list(range(300))
    assert max(len(batch) for batch in batch_by_length(rows, max_rows=7)) == 7
    for batch in batches:
        size = len(batch) * max(num_segments, 1) * max(rows[i].length for i in batch)
        assert size <= 1_000 or len(batch) == 1


def test_results_stand_in_the_order_of_the_rows_and_long_batches_come_first() -> None:
    rows, longest = make_rows(300), list[int]()

    def compute(batch: list[Row]) -> list[tuple[int, int]]:
        longest.append(max(row.length for row in batch))
        return [(row.example, row.length) for row in batch]

    for limits in ({"max_tokens": 1_000}, {"max_rows": 7}, {}):
        longest.clear()
        assert run_by_length(rows, compute, **limits) == [(row.example, row.length) for row in rows]
        assert longest == sorted(longest, reverse=True)
    assert run_by_length([], compute) == []
