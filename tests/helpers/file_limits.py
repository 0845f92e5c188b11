"""Files of this process that cannot grow: the same failure as on a full disk, met by the same calls."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def limit_files(num_bytes: int) -> Iterator[None]:
    """Let no file of this process grow beyond some bytes; for single calls only, since pytest writes files too."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
