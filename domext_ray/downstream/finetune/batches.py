"""Rows of tokens -> batches of similar lengths, in an order that is a function of the seed and the epoch alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from domext_ray.corpus.draws import hash_counters
from domext_ray.downstream.tasks.task import Row

BUCKET_BATCHES = 50
"""Batches whose rows are sorted by length together: little padding, and still other neighbours every epoch."""

_ROWS, _BATCHES = 41, 42  # purposes of a hash: no two draws share their counters


def plan_epoch(rows: Sequence[Row], batch_size: int, seed: int, epoch: int) -> list[np.ndarray]:
    """Return the rows of each batch of an epoch, int64 places; every row stands in one batch.

    Rows are permuted, sorted by length within buckets of `BUCKET_BATCHES` batches, and the batches permuted. The last
    batch of the last bucket may be smaller.

    Args:
        rows: the training split's.
        batch_size: rows of an optimiser step.
        seed: the training's.
        epoch: from 0.
    """
    lengths = np.array([row.length for row in rows])
    order = np.argsort(hash_counters(seed, _ROWS, epoch, np.arange(len(rows))), kind="stable")
    batches = []
    for first in range(0, len(order), batch_size * BUCKET_BATCHES):
        bucket = order[first : first + batch_size * BUCKET_BATCHES]
        bucket = bucket[np.argsort(lengths[bucket], kind="stable")]
        batches += [bucket[start : start + batch_size] for start in range(0, len(bucket), batch_size)]
    places = np.argsort(hash_counters(seed, _BATCHES, epoch, np.arange(len(batches))), kind="stable")
    return [batches[place] for place in places]


def plan_prediction(rows: Sequence[Row], max_tokens: int) -> list[np.ndarray]:
    """Return batches for prediction: rows from short to long, at most `max_tokens` tokens with padding in each."""
    order = sorted(range(len(rows)), key=lambda i: rows[i].length)
    batches: list[list[int]] = [[]]
    for place in order:
        num_segments = rows[place].input_ids.size // max(rows[place].length, 1)
        if batches[-1] and (len(batches[-1]) + 1) * num_segments * rows[place].length > max_tokens:
            batches.append([])
        batches[-1].append(place)
    return [np.array(batch) for batch in batches if batch]
