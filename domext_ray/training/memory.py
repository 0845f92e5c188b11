"""How much memory a training step takes on one rank, counted before the run: what a dry run prints.

Enters: an objective, a micro batch, and how the run is sharded. Leaves: bytes by part, at the moment of the step that
needs most. Forward and backward run on tensors that have shapes, dtypes and a device but no values (torch's
FakeTensorMode), so everything that autograd keeps is counted for any method and layout, and the gradients as they come.
What DeepSpeed holds beside (masters, buckets, flat copies) follows from its code and the run's options; the comments
say where from.

Not counted: Python and its libraries; what a kernel needs while it runs (packed weights of oneDNN, cuBLAS workspaces);
what the allocator keeps between blocks; a checkpoint, for which rank 0 copies the training state into its CPU memory.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from domext_ray.training.engine import MAX_BUCKET_ELEMENTS, Objective, checkpoint_activations, move_batch

GATHERED_ELEMENTS = 50_000_000
"""Of parameters that ZeRO-3 gathers ahead of their use (DeepSpeed's `stage3_prefetch_bucket_size`)."""


@dataclass(frozen=True)
class StepMemory:
    """What forward and backward of a micro batch hold at their peaks, in bytes; the parameters are not counted.

    Args:
        before: the most until the first gradient is whole.
        after: the most from then on, whole gradients not counted.
        gradients: whole gradients at that second peak, if they stay.
        reducing: the most when a bucket of gradients is full, if they do not stay.
    """

    before: int
    after: int
    gradients: int
    reducing: int


@dataclass(frozen=True)
class Sharding:
    """How a run spreads its state.

    Args:
        stage: of ZeRO.
        world_size: ranks.
        accumulates: a step has several micro batches.
        offload: masters and moments of the optimizer are in the CPU's memory, the model is on a GPU.
        on_gpu: ranks speak through NCCL instead of gloo.
    """

    stage: int
    world_size: int
    accumulates: bool
    offload: bool = False
    on_gpu: bool = False


def plan_memory(objective: Objective, batch: Any, sharding: Sharding, *, recomputes: bool = False) -> dict[str, int]:
    """Return the bytes of one rank at the moment of a step that needs most.

    Args:
        objective: model and loss, in training mode, stored as in training; it stays as it is.
        batch: a micro batch.
        sharding: ZeRO stage and ranks.
        recomputes: activations are computed again in the backward pass.

    Returns:
        Bytes by part: weights, what the optimizer holds, gradients, buffers of DeepSpeed, activations.
    """
    fake, mode = make_fake(objective)
    if recomputes:
        checkpoint_activations(fake.model)
    trained, frozen = _count_bytes(fake, trains=True), _count_bytes(fake, trains=False)
    with mode:
        step = measure_step(fake, batch, keeps_gradients=sharding.stage < 2)
    held = hold_state(trained, frozen, sharding)
    return held | max(list_moments(trained, frozen, step, sharding), key=lambda each: sum(each.values()))


def _count_bytes(module: nn.Module, *, trains: bool) -> int:
    return sum(each.numel() * each.element_size() for each in module.parameters() if each.requires_grad == trains)


def hold_state(trained: int, frozen: int, sharding: Sharding) -> dict[str, int]:
    """Return what a rank holds throughout a step, from the bytes of parameters that train and that do not."""
    share = trained // (sharding.world_size if sharding.stage else 1)
    kept = {"frozen_weights": frozen, "trainable_weights": trained}
    if sharding.stage == 3:
        # Gathered parameters are let go where a billion others are used before they are again
        # (`stage3_max_reuse_distance`): a BERT stays whole, beside the shards that it is made of.
        kept["shards_of_weights"] = (trained + frozen) // sharding.world_size
    if not sharding.offload:
        kept["optimizer_masters"] = share if sharding.stage else 0  # a copy of its share, which the optimizer steps
        kept["optimizer_moments"] = 2 * share
    return {name: size for name, size in kept.items() if size}


def list_moments(trained: int, frozen: int, step: StepMemory, sharding: Sharding) -> Iterator[dict[str, int]]:
    """Return what a rank holds beside that in the moments of a step that may need most.

    Args:
        trained: bytes of the parameters that train.
        frozen: bytes of the others.
        step: what forward and backward hold.
        sharding: ZeRO stage and ranks.
    """
    bucket = min(trained, 4 * MAX_BUCKET_ELEMENTS)
    share = trained // sharding.world_size
    earlier = {0: trained, 1: trained, 2: share, 3: share}[sharding.stage] if sharding.accumulates else 0
    if sharding.stage == 0:
        yield _moment(activations=step.before, gradients=earlier)
        yield _moment(activations=step.after, gradients=earlier or step.gradients)
        # All gradients are copied into one tensor, which is reduced (engine.py, `allreduce_bucket`).
        yield _moment(gradients=trained, buffers=trained if sharding.world_size > 1 else 0)
    elif sharding.stage == 1:
        yield _moment(activations=step.before, gradients=earlier)
        yield _moment(activations=step.after, gradients=earlier or step.gradients, buffers=bucket)
        # A bucket is reduced as a flat copy of itself; then a rank's share is copied for the optimizer.
        yield _moment(gradients=trained, buffers=2 * bucket)
        yield _moment(gradients=trained + share)
    elif sharding.stage == 2:
        yield _moment(activations=step.before, gradients=earlier)
        yield _moment(activations=step.after, gradients=earlier, buffers=bucket)
        yield _moment(activations=step.reducing, gradients=earlier + share, buffers=2 * bucket)
        yield _moment(gradients=2 * share)
    else:
        # Buffers of gradients are there from the start. Parameters are gathered into one tensor and copied from it;
        # gloo gathers into a tensor of its own before that (ProcessGroupGloo.cpp, `allgather`).
        gathered = min(trained + frozen, 4 * GATHERED_ELEMENTS)
        yield _moment(gradients=share, buffers=bucket + gathered * (1 if sharding.on_gpu else 2))
        yield _moment(activations=step.before, gradients=share, buffers=bucket + gathered)  # ahead of the backward pass
        yield _moment(activations=step.after, gradients=share, buffers=bucket)
        yield _moment(activations=step.reducing, gradients=share, buffers=2 * bucket)


def _moment(activations: int = 0, gradients: int = 0, buffers: int = 0) -> dict[str, int]:
    return {"gradients": gradients, "buffers": buffers, "activations": activations}


def make_fake(objective: Objective) -> tuple[Objective, FakeTensorMode]:
    """Copy an objective without its values: its tensors have shapes, dtypes and a device, and take no memory."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)  # a batch's tensors are real
    with FakeCopyMode(mode):
        return copy.deepcopy(objective), mode


def measure_step(objective: Objective, batch: Any, *, keeps_gradients: bool) -> StepMemory:
    """Run forward and backward of a micro batch, and watch what is held.

    Args:
        objective: model and loss.
        batch: a micro batch.
        keeps_gradients: they stay until the update; else each makes way once it is whole, as DeepSpeed copies it away.
    """
    watch = LiveBytes([*objective.parameters(), *objective.buffers()])
    hook = watch.take_gradient(keeps=keeps_gradients)
    handles = [each.register_post_accumulate_grad_hook(hook) for each in objective.parameters() if each.requires_grad]
    with watch:
        inputs = move_batch(batch, next(objective.parameters()).device)
        objective(**inputs)[0].backward()
    for each in handles:
        each.remove()
    objective.zero_grad()
    return StepMemory(watch.before, watch.peak, watch.gradients_at_peak, watch.reducing)


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that are alive, and the most there ever were.

    Args:
        known: tensors that are not counted.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self.live = self.peak = self.before = self.gradients = self.gradients_at_peak = 0
        self.reducing = self._filled = 0
        self._storages = weakref.WeakSet[Any]()
        self._storages.update(each.untyped_storage() for each in known)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation, and count the tensors that it makes."""
        output = func(*args, **(kwargs or {}))
        for each in tree_leaves(output):
            if isinstance(each, Tensor) and each.untyped_storage() not in self._storages:
                self._add(each.untyped_storage())
        return output

    def take_gradient(self, *, keeps: bool) -> Callable[[Tensor], None]:
        """Return a hook for parameters whose gradient is whole; it stays, counted by itself, or makes way."""

        def hook(param: Tensor) -> None:
            if not self.before:
                self.before, self.peak = self.peak, 0
            assert param.grad is not None
            size = param.grad.untyped_storage().nbytes()
            if keeps:
                self.gradients, self.live = self.gradients + size, self.live - size
                return
            if self._filled + size > 4 * MAX_BUCKET_ELEMENTS:
                self.reducing, self._filled = max(self.reducing, self.live), 0
            self._filled += size
            param.grad = None

        return hook

    def _add(self, storage: torch.UntypedStorage) -> None:
        size = storage.nbytes()
        self._storages.add(storage)
        weakref.finalize(storage, self._free, size)
        self.live += size
        if self.live + self.gradients > self.peak + self.gradients_at_peak:
            self.peak, self.gradients_at_peak = self.live, self.gradients

    def _free(self, size: int) -> None:
        self.live -= size
