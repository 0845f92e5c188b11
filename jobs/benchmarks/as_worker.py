"""A benchmark whose sides compute as a job's worker does: its allocator and its kernels, --as_worker of a verb."""

from __future__ import annotations

import argparse
import os
import sys

import torch

from domext_ray.errors import ConfigError
from domext_ray.runtime.cpu_kernels import TRAINING, configure_kernels


def configure_allocator() -> None:
    """Start this process again with the allocator that a job's workers have, unless it has it; its children have it.

    Raises:
        ConfigError: this Ray ships none.
    """
    from domext_ray.runtime.ray_cluster import LOCAL_WORKER_SETTINGS
    from domext_ray.runtime.ray_private import find_allocator

    allocator = find_allocator()
    if allocator is None:
        raise ConfigError("--as_worker is set; this Ray ships no jemalloc, as it does for Linux, so leave it out.")
    if os.environ.get("LD_PRELOAD") != allocator:
        settings = {"LD_PRELOAD": allocator, "MALLOC_CONF": LOCAL_WORKER_SETTINGS["MALLOC_CONF"]}
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **settings})


def strip_allocator() -> dict[str, str]:
    """Return this process's environment for a child that has the allocator which it would have by itself."""
    from domext_ray.runtime.ray_private import find_allocator

    allocator = find_allocator()
    return {name: value for name, value in os.environ.items() if value != allocator}


def configure_process(options: argparse.Namespace) -> None:
    """Let this process compute with the threads and the kernels that a verb's options ask for."""
    if options.threads:
        torch.set_num_threads(options.threads)
    if options.as_worker:
        configure_kernels(TRAINING, uses_fp32=options.precision == "fp32")
