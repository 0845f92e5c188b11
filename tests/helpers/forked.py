"""Processes that begin with torch, DeepSpeed and the engine imported: one server imports them, and forks.

An import of all that takes eight seconds. The server is a process of its own: unlike in the tests' process, nothing was
computed there, and no process group was made.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

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


def launch(
    measure: Callable[..., Any], arguments: tuple[Any, ...], size: int, folder: Path, *, alone: bool = False
) -> list[Any]:
    """What a function says of a rank and the arguments, on each rank of a new group, or each in a group of its own.

    The folder, which no other launch has, keeps what each rank printed and what DeepSpeed compiled for it.
    """
    run_group(_measure, (measure, arguments, size, folder, alone), size)
    return [torch.load(folder / f"results-{rank}.pt", weights_only=False) for rank in range(size)]


def _measure(
    rank: int, measure: Callable[..., Any], arguments: tuple[Any, ...], size: int, folder: Path, alone: bool
) -> None:
    os.environ |= {"LOCAL_RANK": str(rank), "TORCH_EXTENSIONS_DIR": str(folder / f"extensions-{rank}")}
    os.dup2(os.open(folder / f"output-{rank}", os.O_CREAT | os.O_WRONLY), 1)
    place = {"rank": 0, "world_size": 1} if alone else {"rank": rank, "world_size": size}
    store = f"file://{folder / 'store'}-{rank if alone else 'of-all'}"
    dist.init_process_group("gloo", init_method=store, **place, timeout=timedelta(seconds=300))  # one may fail alone
    torch.save(measure(rank, *arguments), folder / f"results-{rank}.pt")
    dist.destroy_process_group()


def _begin(rank: int, work: Callable[..., None], *arguments: Any) -> None:
    torch.set_num_threads(1)
    # DeepSpeed looks for garbage whenever it shards a model: 0.4 s each time, unless what stays is left out. It is what
    # was imported, and what an earlier search has left.
    gc.freeze()
    gc.callbacks.append(lambda phase, info: gc.freeze() if phase == "stop" and info["generation"] == 2 else None)
    work(rank, *arguments)
