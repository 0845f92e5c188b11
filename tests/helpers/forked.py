"""Processes that begin with torch, DeepSpeed and the engine imported: one server imports them, and forks.

An import of all that takes eight seconds. The server is a process of its own: unlike in the tests' process, nothing was
computed there, and no process group was made.
"""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Callable
from functools import cache
from multiprocessing import forkserver
from typing import Any

import pytest
import torch

CONTEXT = multiprocessing.get_context("forkserver")
"""Starts processes with the server's environment: what they need of this process's is an argument of theirs."""


@cache
def start_server() -> None:
    """Start the server, once per session."""
    CONTEXT.set_forkserver_preload(["deepspeed", "domext_ray.training.engine"])
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("DS_ACCELERATOR", "cpu")  # DeepSpeed chooses at import
        forkserver.ensure_running()


def run_group(work: Callable[..., None], arguments: tuple[Any, ...], size: int) -> None:
    """Call `work` with a rank and the arguments in as many processes; the first that fails ends the others."""
    start_server()
    torch.multiprocessing.start_processes(_begin, (work, *arguments), nprocs=size, start_method="forkserver")


def _begin(rank: int, work: Callable[..., None], *arguments: Any) -> None:
    torch.set_num_threads(1)
    # DeepSpeed looks for garbage whenever it shards a model: 0.4 s each time, unless what stays is left out. It is what
    # was imported, and what an earlier search has left.
    gc.freeze()
    gc.callbacks.append(lambda phase, info: gc.freeze() if phase == "stop" and info["generation"] == 2 else None)
    work(rank, *arguments)
