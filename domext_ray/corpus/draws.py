"""Counter-based random draws: integers in, uniform 64-bit integers out.

Every random choice about data (order, masks, pairs) is a hash of what it is about and of a purpose, so it depends
neither on the worker that makes it nor on what was drawn before. Purposes in use: 1 and 2 in `sampler`, 11 to 13 in
`batching`, 14 to 16 in `views`, 31 in `training.passages`, 41 and 42 in
`downstream.batches`, 51 in `downstream.mask_set`, 61 and 67 in `training.phases`, 71 to 73 in
`training.writing`.
"""

from __future__ import annotations

import numpy as np


def hash_counters(*counters: int | np.ndarray, start: np.ndarray | None = None) -> np.ndarray:
    """Hash integer counters to uniform 64-bit integers (SplitMix64's finaliser, chained over the counters).

    Args:
        counters: integers or integer arrays that broadcast against each other.
        start: hashes of counters before these, uint64, to go on from; None: there are none.

    Returns:
        uint64 array of the broadcast shape (at least one-dimensional).
    """
    state = np.zeros(1, dtype=np.uint64) if start is None else start
    for counter in counters:
        mixed = state + np.atleast_1d(np.asarray(counter)).astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state = mixed ^ (mixed >> np.uint64(31))
    return state


def to_uniform(draws: np.ndarray) -> np.ndarray:
    """Map hashes, uint64, to float64 from 0 to below 1."""
    return (draws >> np.uint64(11)).astype(np.float64) * 2.0**-53
