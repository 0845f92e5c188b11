"""What a training step computes, and how fast this machine computes as much: the ceiling that a step is held against.

Enters: an objective and a batch. Leaves: floating-point operations of forward and backward, two per multiply-add, of
all matrix products; what is computed per element is left out, as it is in published peaks, and so are a second forward
pass for checkpointed activations, a teacher and the optimiser. Counting computes nothing: the model's tensors stand on
the device `meta`, which has shapes and no values. Frozen weights have no gradient there either, so every method and
layout counts as it trains. Attention counts as its two products, whatever kernel computes it.

The products themselves, each timed alone on this machine, say what the step would take if it were nothing else.
"""

from __future__ import annotations

import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from domext_ray.training.engine import Objective, move_batch

META = torch.device("meta")
NUM_TIMED = 3
"""Times that a product is timed; the fastest counts, for the machine can do that."""
TIMED_SECONDS = 0.2
"""After so long a product is not timed again."""
PEAKS = {
    "B200": 2250e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "GH200": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "A10G": 70e12,
    "A10": 125e12,
}
"""Dense bf16 operations per second that the makers' data sheets publish, by words of the card's name; first fit."""


@dataclass(frozen=True)
class Product:
    """One matrix product, or a batch of them.

    Args:
        call: torch's operation.
        inputs: its tensors' sizes and strides.
    """

    call: Callable[..., Tensor]
    inputs: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]


@dataclass(frozen=True)
class StepWork:
    """What the forward and backward pass of a batch compute.

    Args:
        forward: operations of the loss.
        backward: of its gradient.
        num_tokens: tokens of the batch.
        products: how often each product is computed.
    """

    forward: int
    backward: int
    num_tokens: int
    products: Mapping[Product, int]

    @property
    def per_token(self) -> float:
        """Operations per token, forward and backward."""
        return (self.forward + self.backward) / self.num_tokens


class _Recorder(TorchDispatchMode):
    """Counts the products that run while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.num_operations = 0
        self.products: Counter[Product] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        count = flop_registry.get(func.overloadpacket)
        if count is not None:
            self.num_operations += count(*args, **(kwargs or {}), out_val=result)
            tensors = [each for each in args if isinstance(each, Tensor)]
            assert len(tensors) == len(args) and not kwargs, f"{func} has arguments that are no tensors"
            shapes = tuple((tuple(each.shape), each.stride()) for each in tensors)
            self.products[Product(func, shapes)] += 1
        return result


def count_work(objective: Objective, batch: Any, num_tokens: int) -> StepWork:
    """Count what a batch computes.

    Args:
        objective: model and loss; its parameters are whole (not sharded by ZeRO-3).
        batch: what the objective takes.
        num_tokens: tokens in it, padding left out.
    """
    tensors = {**dict(objective.named_parameters()), **dict(objective.named_buffers())}
    # All of one precision, for no autocast is at work there: a frozen base may be stored in another one.
    shapes = {
        name: torch.empty_like(each, device=META, dtype=torch.float32 if each.is_floating_point() else each.dtype)
        for name, each in tensors.items()
    }
    for name, each in objective.named_parameters():
        shapes[name].requires_grad_(each.requires_grad)
    with _Recorder() as recorder:
        loss: Tensor = functional_call(objective, shapes, kwargs=move_batch(batch, META))[0]
        forward = recorder.num_operations
        loss.backward()
    return StepWork(forward, recorder.num_operations - forward, num_tokens, recorder.products)


@torch.no_grad()
def time_products(work: StepWork, device: torch.device, *, bf16: bool) -> float:
    """Return the seconds that this machine takes for a batch's products, each timed alone.

    Args:
        work: the products.
        device: where; small products of a GPU are mostly their launch.
        bf16: in bf16, which is what autocast makes of all of them.
    """
    dtype = torch.bfloat16 if bf16 else torch.float32
    return sum(count * _time_product(each, device, dtype) for each, count in work.products.items())


def _time_product(product: Product, device: torch.device, dtype: torch.dtype) -> float:
    tensors = [
        torch.empty_strided(size, stride, dtype=dtype, device=device).fill_(0.01) for size, stride in product.inputs
    ]
    seconds = list[float]()
    while len(seconds) < 1 + NUM_TIMED and sum(seconds) < TIMED_SECONDS:  # the first one warms up
        _wait(device)
        start = time.perf_counter()
        product.call(*tensors)
        _wait(device)
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:] or seconds)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(frozen=True)
class Ceiling:
    """What a rank's steps are held against.

    Args:
        work: what a batch of full rows computes.
        peak: operations per second that the card's maker publishes for bf16; 0.0: not known, or another precision.
        product_seconds: per token, what this rank takes for the products alone; 0.0: not timed yet, or on a GPU.
    """

    work: StepWork
    peak: float
    product_seconds: float = 0.0

    def describe(self, num_tokens: int, seconds: float, world_size: int) -> dict[str, float]:
        """Return a step's figures for metrics.jsonl: the rate of all ranks, and its shares of what could be.

        Args:
            num_tokens: tokens of the global batch, padding left out.
            seconds: of the step.
            world_size: ranks, which share the batch evenly.
        """
        rate = self.work.per_token * num_tokens / seconds
        alone = self.product_seconds * num_tokens / world_size
        shares = {"throughput/product_share": alone / seconds} if alone else {}
        shares |= {"throughput/mfu": rate / world_size / self.peak} if self.peak else {}
        return {"throughput/gigaflops_per_second": rate / 1e9, **shares}


def find_ceiling(objective: Objective, batch: Any, num_tokens: int) -> Ceiling:
    """Count the operations of a batch of full rows, and find a GPU's peak."""
    work, is_on_gpu = count_work(objective, batch, num_tokens), objective.device_type == "cuda"
    return Ceiling(work, find_peak(torch.cuda.get_device_name()) if is_on_gpu and objective.bf16 else 0.0)


def time_ceiling(ceiling: Ceiling, *, bf16: bool) -> Ceiling:
    """Time the products on this CPU, which should do nothing else meanwhile."""
    seconds = time_products(ceiling.work, torch.device("cpu"), bf16=bf16)
    return replace(ceiling, product_seconds=seconds / ceiling.work.num_tokens)


def measure_peak_memory(device: torch.device) -> float:
    """Return the most memory that this process has had: a card's allocations, or else what was resident; MB."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e6


def find_peak(name: str) -> float:
    """Return the bf16 operations per second that are published for a card; 0.0 for one that `PEAKS` has not.

    Args:
        name: as torch has it, such as "NVIDIA H100 80GB HBM3".
    """
    words = name.replace("-", " ").split()
    return next((peak for part, peak in PEAKS.items() if set(part.split()) <= set(words)), 0.0)
