"""The memory that oneDNN keeps for shapes it has met, bounded where every batch has another shape."""

from __future__ import annotations

import os

CACHED_KERNELS = 64


def bound_kernel_cache() -> None:
    """Let oneDNN keep the kernels of a few shapes; for processes that predict, before their first product.

    By default it keeps 1,024, nearly a megabyte each. Batches of texts of all lengths have some ten new shapes each, so
    that a process grows for hours, and no kernel is ever used again.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", str(CACHED_KERNELS))
