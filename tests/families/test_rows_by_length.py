"""Rows of tokens: batches of similar lengths within their bounds, and results in the rows' own order."""

from __future__ import annotations

import numpy as np
import pytest

from domext_ray.families.rows import Row, batch_by_length, run_by_length


def make_rows(num_rows: int, seed: int = 0, num_segments: int = 0) -> list[Row]:
    lengths = np.random.default_rng(seed).integers(4, 120, num_rows)
    shape = (num_segments,) if num_segments else ()
    return [Row(i, np.zeros((*shape, int(length)), dtype=np.int64)) for i, length in enumerate(lengths)]


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
