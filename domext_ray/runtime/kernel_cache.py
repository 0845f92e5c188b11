"""The memory that oneDNN keeps for shapes it has met, bounded where every batch has another shape."""

from __future__ import annotations

import os

PREDICTION, TRAINING = 64, 256
"""Kernels worth keeping: a training step has some 40 that come again, and 30 that its number of words makes."""


def bound_kernel_cache(num_kernels: int) -> None:
    """Let oneDNN keep the kernels of a few shapes; before a process's first product.

    By default it keeps 1,024, nearly a megabyte each. Batches of texts of all lengths have some ten new shapes each, so
    that a process grows for hours, and no kernel is ever used again.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", str(num_kernels))
