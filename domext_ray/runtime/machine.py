"""What a machine says of itself before torch or Ray is loaded: which cluster it uses, and whether it has GPUs."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path


def find_address() -> str:
    """The address of the cluster that is to be used; empty: a Ray of the job's own."""
    address = os.environ.get("RAY_ADDRESS", "")
    return "" if address == "local" else address


def is_cluster() -> bool:
    """Whether RAY_ADDRESS or the job server names a cluster; else a job's Ray is its own, on this machine."""
    return bool(find_address())


def has_gpu_devices() -> bool:
    """Whether the system has a GPU's device file: NVIDIA's, AMD's, or that of Windows' subsystem."""
    return any(path for pattern in ("nvidia[0-9]*", "kfd", "dxg") for path in Path("/dev").glob(pattern))


def count_cpus() -> int:
    """Return the CPUs that this process may use: those of its container and its affinity, not the machine's."""
    import joblib  # type: ignore[import-untyped]  # here, because reading tasks import this file and do not count

    return int(joblib.cpu_count())


def find_free_memory() -> int:
    """Return the bytes of memory that this process may still take: those of the machine, or fewer of its container."""
    import psutil  # as above

    free = [int(psutil.virtual_memory().available)]
    with contextlib.suppress(OSError, ValueError):  # no such container, or one without a limit ("max")
        group = Path("/sys/fs/cgroup")
        free.append(int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    return max(min(free), 0)


def find_free_disk(folder: str) -> int:
    """Return the free bytes of the disk that has a folder, or that will have it."""
    place = Path(folder).expanduser().absolute()
    return shutil.disk_usage(next(path for path in (place, *place.parents) if path.exists())).free
