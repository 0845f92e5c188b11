"""Sides that take turns -> seconds of their steps; what else the machine did meanwhile; in what two sides must agree.

A rival's environment imports it, too, so at import it needs torch alone.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

MASK_PROB, MASK_ID = 0.15, 103
LOSS_TOLERANCE = 1e-3
DISTURBED_FRAC = 0.05
"""Of the machine's processors, taken by programs that are not measured, from which on a timing counts as disturbed."""


@dataclass(frozen=True)
class Batch:
    """Rows without padding, of which P tokens are predicted; `all_labels` has -100 for the others."""

    input_ids: Tensor  # int64 [B, N]
    masked_positions: Tensor  # int64 [P], in the flattened [B·N]
    labels: Tensor  # int64 [P]
    all_labels: Tensor  # int64 [B·N]


@dataclass(frozen=True)
class Figures:
    """What two sides must agree in before they are timed, in fp32 without dropout."""

    loss: float  # mean over the predicted positions
    gradient_norm: float
    num_tensors: int  # that have a gradient


@dataclass(frozen=True)
class Seconds:
    """Duration of a step: by the clock, and of the processor over all threads, which other programs disturb less."""

    wall: float
    cpu: float


class Clock:
    """Reads both once the device's queue is empty."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.restart()

    def restart(self) -> None:
        synchronize(self._device)
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def read(self, num_steps: int = 1) -> Seconds:
        synchronize(self._device)
        wall, cpu = time.perf_counter() - self._wall, time.process_time() - self._cpu
        return Seconds(wall / num_steps, cpu / num_steps)


def synchronize(device: torch.device) -> None:
    """Wait for the device's queue."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def make_batch(rows: int, length: int, vocab_size: int, device: torch.device) -> Batch:
    """Make random rows in which 15 % of the positions are predicted."""
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(1000, vocab_size, (rows, length), generator=generator)
    num_masked = max(1, round(MASK_PROB * ids.numel()))
    positions = torch.randperm(ids.numel(), generator=generator)[:num_masked].sort().values
    labels = ids.flatten()[positions].clone()
    all_labels = torch.full((ids.numel(),), -100)
    all_labels[positions] = labels
    ids.view(-1)[positions] = MASK_ID
    return Batch(*(tensor.to(device) for tensor in (ids, positions, labels, all_labels)))


def compute_figures(module: nn.Module, compute: Callable[[], Tensor]) -> Figures:
    """Return loss and gradient of one pass without dropout; nothing is updated."""
    module.eval()
    loss = compute()
    loss.backward()
    grads = [param.grad for param in module.parameters() if param.grad is not None]
    norm = torch.stack([grad.norm() for grad in grads]).norm()
    module.zero_grad()
    module.train()
    return Figures(loss.item(), norm.item(), len(grads))


def check_figures(own: Figures, rival: Figures) -> float:
    """Return how far the losses are apart; losses, gradients and the number of trained tensors must agree."""
    difference = abs(own.loss - rival.loss)
    assert difference < LOSS_TOLERANCE, f"losses {own.loss} and {rival.loss}"
    norms = own.gradient_norm, rival.gradient_norm
    assert abs(norms[0] - norms[1]) < LOSS_TOLERANCE * norms[1], f"gradient norms {norms[0]} and {norms[1]}"
    assert own.num_tensors == rival.num_tensors, f"{own.num_tensors} and {rival.num_tensors} tensors train"
    return difference


def make_step(module: nn.Module, compute: Callable[[Any], Tensor], batch: Any, *, bf16: bool) -> Callable[[], None]:
    """Return the step of a loop that does no more than it must: autocast, forward, backward, fused AdamW."""
    params = [param for param in module.parameters() if param.requires_grad]
    optimizer, kind = torch.optim.AdamW(params, lr=1e-4, weight_decay=0.01, fused=True), batch.input_ids.device.type

    def step() -> None:
        with torch.autocast(kind, dtype=torch.bfloat16, enabled=bf16):
            loss = compute(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def time_steps(step: Callable[[], Any], num_steps: int, device: torch.device) -> Callable[[], Seconds]:
    """Return what makes so many steps, between which nothing waits, and returns the mean of their times."""

    def run() -> Seconds:
        clock = Clock(device)
        for _ in range(num_steps):
            step()
        return clock.read(num_steps)

    return run


def take_turns(sides: Mapping[str, Callable[[], Any]], repeats: int, warmup: int = 0) -> dict[str, list[Any]]:
    """Call every side in turn, for a shared machine drifts: only neighbours in time are compared."""
    for _ in range(warmup):
        for side in sides.values():
            side()
    turns = [{name: side() for name, side in sides.items()} for _ in range(repeats)]
    return {name: [turn[name] for turn in turns] for name in sides}


def compare(dividends: Sequence[float], divisors: Sequence[float]) -> dict[str, float]:
    """Return the median of the turns' ratios, the least and the most."""
    ratios = [a / b for a, b in zip(dividends, divisors, strict=True)]
    return {"ratio": statistics.median(ratios), "ratio_least": min(ratios), "ratio_most": max(ratios)}


class Watch:
    """Looks at the processes of this program, its children's too, and at what others take of the machine meanwhile.

    `every` is the seconds between looks, for memory and for children that end before it does; 0: at start and end
    alone. With `weighs` looks measure memory, which takes longer than all else.
    """

    def __init__(self, every: float = 0.0, *, weighs: bool = True) -> None:
        self.every, self.memory_mb, self._cpu = every, list[float](), dict[int, list[float]]()
        self._weighs = weighs and every > 0
        self.cores = self.others_frac = self.child_seconds = 0.0

    def __enter__(self) -> Watch:
        self._ended, self._started, self._machine = threading.Event(), time.perf_counter(), _count_machine_seconds()
        self._look()
        self._thread = threading.Thread(target=self._look_often, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()
        self._look()
        used = {pid: last - first for pid, (first, last) in self._cpu.items()}
        seconds, own = time.perf_counter() - self._started, sum(used.values())
        self.cores, self.child_seconds = own / seconds, own - used.get(os.getpid(), 0.0)
        taken = (_count_machine_seconds() - self._machine - own) / seconds
        self.others_frac = max(0.0, taken / (os.cpu_count() or 1))

    def find_quarters(self) -> list[float]:
        """Return the most memory of all processes together in each quarter of the time, MB."""
        size = max(1, -(-len(self.memory_mb) // 4))
        return [max(self.memory_mb[start : start + size]) for start in range(0, len(self.memory_mb), size)]

    def _look_often(self) -> None:
        while self.every and not self._ended.wait(self.every):
            self._look()

    def _list(self) -> list[Any]:
        import psutil

        own = psutil.Process()
        return [own, *own.children(recursive=True)]

    def _look(self) -> None:
        import psutil

        memory, is_first = 0.0, not self.memory_mb
        for process in self._list():
            try:
                used = sum(process.cpu_times()[:2])
                memory += process.memory_full_info().pss if self._weighs else 0.0
            except psutil.Error:  # it has ended
                continue
            first = used if is_first else 0.0  # what is started later has used nothing yet
            self._cpu.setdefault(process.pid, [first, 0.0])[1] = used
        self.memory_mb.append(memory / 2**20)


def _count_machine_seconds() -> float:
    """Processor seconds that the machine was busy, whatever with."""
    import psutil

    times = psutil.cpu_times()
    return float(sum(getattr(times, name, 0.0) for name in ("user", "nice", "system", "irq", "softirq", "steal")))


# --- as a job's worker computes: --as_worker ---


def configure_allocator() -> None:
    """Start this process again with the allocator that a job's workers have, unless it has it; its children have it."""
    from domext_ray.errors import ConfigError
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
    if getattr(options, "as_worker", False):
        from domext_ray.runtime.device import TRAINING, configure_kernels

        configure_kernels(TRAINING, uses_fp32=options.precision == "fp32")
