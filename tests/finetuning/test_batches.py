"""Batches of fine-tuning: every row once per epoch, an order that the seed decides, and passes of similar lengths."""

from __future__ import annotations

import numpy as np
import pytest

from domext_ray.families.rows import Row, batch_by_length
from domext_ray.finetuning.training import plan_epoch


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
    lengths = np.random.default_rng(0).integers(4, 120, 4_000)
    rows = [Row(i, np.zeros(length, dtype=np.int64)) for i, length in enumerate(lengths)]
    batches = plan_epoch(len(rows), 32, 0, 0)
    means = np.array([lengths[batch].mean() for batch in batches])
    assert means.std() < 1.2 * lengths.std() / 32**0.5, "a batch's mean length is that of rows drawn at random"
    passes = [
        batch[places] for batch in batches for places in batch_by_length([rows[i] for i in batch], max_tokens=512)
    ]
    assert sorted(np.concatenate(passes).tolist()) == list(range(len(rows)))
    padded = sum(len(each) * lengths[each].max() for each in passes)
    assert padded < 1.25 * lengths.sum(), "whole batches would have 1.9 times as many"
