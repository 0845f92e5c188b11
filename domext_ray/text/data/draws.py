"""Counter-based random draws: integers in, uniform 64-bit integers out.

Every random choice about data (order, masks, pairs) is a hash of what it is about and of a purpose, so it depends
neither on the worker that makes it nor on what was drawn before.
"""

from __future__ import annotations

import enum

import numpy as np


@enum.unique
class Purpose(enum.IntEnum):
    """What a draw is for: a counter that no two draws share. One that changes its number changes what runs read."""

    SHARDS = 1  # the order of a text's shards
    ROWS = 2  # the order of rows in a block of a shard
    MASKS = 11  # which tokens are masked
    ACTIONS = 12  # what becomes of a masked token
    REPLACEMENTS = 13  # the token in its place
    LENGTHS = 15  # tokens of a view
    PLACES = 16  # where it begins
    WORDS = 31  # words of a passage that are asked for
    TRAINING_ROWS = 41  # the order of a fine-tuning's rows
    DROPPED_WORDS = 44  # what it reads in smaller pieces
    READINGS = 45  # by which of the vocabularies that are left an epoch reads an example
    PROBED_PLACES = 51  # what a forgetting's probe masks
    REPLAY = 61  # the seed of the general text
    PARTS = 67  # the seeds of a mixture's parts
    FIRST_WORDS = 71  # of text that a base writes: what it begins with
    REFILLS = 72  # places that are written again
    REFILLED_WORDS = 73  # what they are written with
    ROUTER_ROWS = 81  # rows of a text that a router is fitted on, and measured on


def hash_counters(*counters: int | np.ndarray, start: np.ndarray | None = None) -> np.ndarray:
    """Hash integer counters to uniform 64-bit integers (SplitMix64's finaliser, chained over the counters).

    The result, uint64, has the shape that they broadcast to, at least one-dimensional. `start` is what counters before
    these were hashed to, uint64.
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
