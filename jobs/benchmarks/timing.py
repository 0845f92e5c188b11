"""Models and batches -> seconds of training steps, and the figures in which two sides must agree.

Both sides use it, so that the same is measured; it needs torch alone, so that a rival's environment can import it.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

MASK_PROB = 0.15
MASK_ID = 103
LOSS_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Batch:
    """Rows without padding.

    Args:
        input_ids: int64 [B, N].
        masked_positions: int64 [P], places in the flattened [B·N].
        labels: int64 [P].
        all_labels: int64 [B·N], -100 where nothing is predicted.
    """

    input_ids: Tensor
    masked_positions: Tensor
    labels: Tensor
    all_labels: Tensor


@dataclass(frozen=True)
class Figures:
    """What two sides must agree in before they are timed.

    Args:
        loss: mean over the predicted positions, in fp32 without dropout.
        gradient_norm: L2 norm of its gradient.
        num_tensors: tensors that have one.
    """

    loss: float
    gradient_norm: float
    num_tensors: int


@dataclass(frozen=True)
class Seconds:
    """Duration of a training step.

    Args:
        wall: seconds.
        cpu: processor seconds over all threads; other programs disturb it less.
    """

    wall: float
    cpu: float


class Clock:
    """Reads wall and processor time once the device's queue is empty."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.restart()

    def restart(self) -> None:
        """Begin anew."""
        synchronize(self._device)
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def read(self, num_steps: int = 1) -> Seconds:
        """Return the time since the start, divided by a number of steps."""
        synchronize(self._device)
        wall, cpu = time.perf_counter() - self._wall, time.process_time() - self._cpu
        return Seconds(wall / num_steps, cpu / num_steps)


def synchronize(device: torch.device) -> None:
    """Wait for the device's queue."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def one_process_group(device: torch.device) -> Iterator[None]:
    """Provide the process group of one worker, which the engine needs."""
    with tempfile.TemporaryDirectory(prefix="domext-group-") as folder:
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=f"file://{Path(folder, 'store')}", rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


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
    return Batch(*(each.to(device) for each in (ids, positions, labels, all_labels)))


def compute_figures(module: nn.Module, compute: Callable[[], Tensor]) -> Figures:
    """Return loss and gradient of one pass without dropout; nothing is updated."""
    module.eval()
    loss = compute()
    loss.backward()
    grads = [each.grad for each in module.parameters() if each.grad is not None]
    norm = torch.stack([each.norm() for each in grads]).norm()
    module.zero_grad()
    module.train()
    return Figures(loss.item(), norm.item(), len(grads))


def check_figures(model: Figures, rival: Figures) -> float:
    """Return how far the losses are apart; losses, gradients and the number of trained tensors must agree."""
    difference = abs(model.loss - rival.loss)
    assert difference < LOSS_TOLERANCE, f"losses {model.loss} and {rival.loss}"
    norms = model.gradient_norm, rival.gradient_norm
    assert abs(norms[0] - norms[1]) < LOSS_TOLERANCE * norms[1], f"gradient norms {norms[0]} and {norms[1]}"
    assert model.num_tensors == rival.num_tensors, f"{model.num_tensors} and {rival.num_tensors} tensors train"
    return difference


def make_step(module: nn.Module, compute: Callable[[Any], Tensor], batch: Any, *, bf16: bool) -> Callable[[], Seconds]:
    """Return a function that makes one training step (forward, backward, AdamW) and returns how long it took."""
    params = [each for each in module.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=1e-4, weight_decay=0.01, fused=True)
    device = batch.input_ids.device

    def step() -> Seconds:
        clock = Clock(device)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=bf16):
            loss = compute(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return clock.read()

    return step
