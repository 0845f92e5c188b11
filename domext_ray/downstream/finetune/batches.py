"""Rows of tokens -> batches: of a training in an order that is a function of seed and epoch alone, and by length."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from domext_ray.families.task import Row
from domext_ray.text.data.draws import Purpose, hash_counters


def plan_epoch(num_rows: int, batch_size: int, seed: int, epoch: int) -> list[np.ndarray]:
    """Return the rows of each batch of an epoch, int64 places; every row stands in one batch.

    Rows of any lengths stand together. Batches of similar lengths would save padding, but the mean over a batch's
    targets would let a word of a short sentence weigh more than one of a long sentence, and it costs F1. The last batch
    may be smaller.
    """
    order = np.argsort(hash_counters(seed, Purpose.TRAINING_ROWS, epoch, np.arange(num_rows)), kind="stable")
    return [order[first : first + batch_size] for first in range(0, num_rows, batch_size)]


def batch_by_length(rows: Sequence[Row], max_tokens: int, max_rows: int = 0) -> list[np.ndarray]:
    """Return the places of rows from short to long, cut into batches with little padding.

    A batch has `max_tokens` at most, padding counted, and a longer row is a batch of its own; `max_rows` 0: any number.
    Rows of a batch have equally many segments.
    """
    segments = [row.input_ids.size // max(row.length, 1) for row in rows]
    batches: list[list[int]] = [[]]
    for place in sorted(range(len(rows)), key=lambda i: (segments[i], rows[i].length)):
        size = len(batches[-1])
        is_full = size == max_rows or (size + 1) * segments[place] * rows[place].length > max_tokens
        if size and (is_full or segments[batches[-1][0]] != segments[place]):
            batches.append([])
        batches[-1].append(place)
    return [np.array(batch) for batch in batches if batch]
