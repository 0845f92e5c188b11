"""One optimiser step, the same for a run on many workers and for a training in one process.

Enters: an objective, and the micro batches of a step. Leaves: the figures of the step, and a changed model. Rate, seed,
loss, scale, clipping and what happens to a step that is not finite are said here; `engine.py` adds DeepSpeed, which
spreads a step over ranks.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from domext_ray.config.pretrain import OptimConfig
from domext_ray.model.joined import list_joined, refresh
from domext_ray.training.losses import Loss
from domext_ray.training.objective import LOSS, PART_LOSSES
from domext_ray.training.optimizer import build_optimizer, clip_gradients, compute_learning_rate, set_learning_rate

BatchT = TypeVar("BatchT")
ALIGNMENT = 64  # bytes, of a tensor in a batch that is sent as one


@dataclass(frozen=True)
class StepFigures:
    """Figures of one optimiser step, the same on every rank."""

    losses: Mapping[str, float]  # the mean of each over the global batch, before its weight, nats; 0 for one it lacks
    part_losses: Sequence[float]  # sums of the predicted tokens' losses by part of a mixture, nats; empty: no parts
    grad_norm: float  # L2 norm of the whole gradient before clipping; inf or nan when it is not finite
    learning_rate: float
    finite: bool  # loss and gradient were; else the step was skipped on all ranks

    @property
    def loss(self) -> float:
        """The loss of what is predicted."""
        return self.losses[LOSS]

    @property
    def skipped(self) -> bool:
        """The step changed neither parameters nor moments."""
        return not self.finite


def seed_step(seed: int, step: int, rank: int) -> None:
    """Seed torch's generators (CPU and GPU) from a hash of the run's seed, the step and the rank.

    Dropout of a step then depends on nothing that happened before it, so a resumed run draws what an undisturbed one
    would have drawn.
    """
    digest = hashlib.sha256(f"{seed}/{step}/{rank}".encode()).digest()
    number = int.from_bytes(digest[:8], "little") >> 1
    torch.random.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():  # torch.manual_seed formats a stack trace where there is no GPU
        torch.cuda.manual_seed_all(number)


def move_batch(batch: BatchT, device: torch.device) -> BatchT:
    """Return a batch (or a dictionary) whose tensors are on a device."""
    return batch if device.type == "cpu" else _send(batch, device)


def _send(batch: BatchT, device: torch.device) -> BatchT:
    """Bring tensors of the CPU to a device in one copy, of which they are views there.

    A GPU's host does not wait: torch hands out pinned memory again only when the copies from it are done.
    """
    tensors = list[Tensor]()
    map_tensors(batch, tensors.append)
    sizes = [-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors]
    buffer = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=device.type == "cuda")
    for part, tensor in zip(buffer.split(sizes), tensors, strict=True):
        _view_as(part, tensor).copy_(tensor)
    parts = iter(buffer.to(device, non_blocking=True).split(sizes))
    sent: BatchT = map_tensors(batch, lambda tensor: _view_as(next(parts), tensor))
    return sent


def map_tensors(value: Any, function: Callable[[Tensor], Any]) -> Any:
    """Return a batch with what a function makes of its tensors, those in its dictionaries and dataclasses too."""
    if is_dataclass(value) and not isinstance(value, type):
        return type(value)(**map_tensors(vars(value), function))
    if isinstance(value, dict):
        return {name: map_tensors(field, function) for name, field in value.items()}
    return function(value) if isinstance(value, Tensor) else value


def _view_as(part: Tensor, tensor: Tensor) -> Tensor:
    """Return the first bytes of a buffer's part with a tensor's dtype and shape."""
    return part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)


class Trainer(ABC):
    """Makes optimiser steps; fp32 parameters with `requires_grad` train.

    `optim` has its `decay_steps`; `rate_scales` are factors of the rate by parameter name, where they differ
    from 1.
    """

    rank, world_size = 0, 1

    def __init__(
        self,
        objective: Loss,
        *,
        optim: OptimConfig,
        warmup_steps: int,
        seed: int,
        device: torch.device,
        rate_scales: Mapping[str, float] | None = None,
    ) -> None:
        self.device = torch.device(device)
        self._optim, self._warmup_steps, self._seed = optim, warmup_steps, seed
        self.loss_weights, self._num_parts = objective.loss_weights, objective.num_parts
        self._trainables, self._joined = list_trainables(objective.model), list_joined(objective.model)
        self._optimizer = build_optimizer(self._trainables, optim, rate_scales)
        self.num_updates = 0  # AdamW's, of the steps whose figures were read
        self._compute_pass = self._make_pass

    def train_step(self, *arguments: Any, **named: Any) -> StepFigures:
        """Make one optimiser step and wait for its figures; see `launch_step`."""
        return self.launch_step(*arguments, **named)()

    def launch_step(
        self,
        micro_batches: Sequence[Any],
        counts: Mapping[str, int],
        step: int,
        progress: float = 0.0,
    ) -> Callable[[], StepFigures]:
        """Make one optimiser step on the weighted sum of the objective's mean losses.

        `micro_batches` are this rank's share of the global batch, equally many on all ranks; `counts` are what the
        global batch has of each loss, masked tokens say; `step` is 0-based. What is returned reads the step's figures,
        and waits for a GPU that is still at it. If they are not finite, nothing was changed on any rank.
        """
        rate = compute_learning_rate(step, self._optim, self._warmup_steps, progress)
        set_learning_rate(self._optimizer, rate)
        seed_step(self._seed, step, self.rank)
        divisors = [max(counts.get(name, 0), 1) for name in self.loss_weights]
        sums = self._accumulate_gradients(micro_batches, divisors)
        self.sum_over_ranks(sums)
        # A copy that is asked for later would come behind the steps that are launched before it.
        applied = self._apply_gradients()
        refresh(self._joined)
        figures = torch.cat([applied, sums]).to("cpu", non_blocking=True)
        return functools.partial(self._read_figures, figures, self._mark(), divisors, rate)

    def _mark(self) -> Callable[[], None]:
        """Return what waits, on any thread, until a GPU has done what it was asked for up to now."""
        if self.device.type != "cuda":
            return lambda: None
        event = torch.cuda.Event()
        event.record()
        return event.synchronize

    def _read_figures(self, figures: Tensor, wait: Callable[[], None], divisors: list[int], rate: float) -> StepFigures:
        """Read what a step left, when its copy is there."""
        wait()
        grad_norm, applied, *sums = figures.tolist()
        self.num_updates += int(applied)
        own = zip(self.loss_weights, sums, divisors, strict=False)  # behind them stand the sums by part
        losses = {name: total / divisor for name, total, divisor in own}
        return StepFigures(losses, sums[len(losses) :], grad_norm, rate, bool(applied))

    def sum_over_ranks(self, tensor: Tensor) -> None:
        """Replace a tensor by its sum over all ranks; Gloo would hand a lone one's to another thread and back."""
        if self.world_size > 1:
            dist.all_reduce(tensor)

    def _accumulate_gradients(self, micro_batches: Sequence[Any], divisors: Sequence[int]) -> Tensor:
        """Run forward and backward over this rank's share; return the sums of its losses, and of those by part.

        `divisors` are what the global batch has of each loss, by which the sums will be divided.
        """
        totals = torch.zeros(len(divisors) + self._num_parts, dtype=torch.float64, device=self.device)
        # Gradients are averaged over ranks, so a local sum times world size / global count becomes the global mean.
        weights = torch.tensor([*self.loss_weights.values()])
        factors = (self.world_size / torch.tensor(divisors, dtype=torch.float64)).float() * weights
        factors = factors.to(self.device, non_blocking=True)
        for i, batch in enumerate(micro_batches):
            with self._micro_batch(is_last=i == len(micro_batches) - 1):
                totals += self._compute_pass(move_batch(batch, self.device), factors)
        return totals

    def _make_pass(self, batch: Any, factors: Tensor) -> Tensor:
        """Run forward and backward of a micro batch; return the sums of its losses and those by part, on the device."""
        outputs: dict[str, Tensor] = self._forward(batch)
        nothing = torch.zeros((), device=self.device)
        loss_sums = torch.stack([outputs.get(name, nothing) for name in self.loss_weights])
        # A loss that is not finite can have a finite gradient (infinite logits): it is made to show in the
        # gradient's norm, the one figure on which all ranks agree whether to make the step.
        poisoned = torch.where(loss_sums.detach().isfinite(), factors, torch.nan)
        self._backward((loss_sums * poisoned).sum())
        return torch.cat([loss_sums.detach(), outputs.get(PART_LOSSES, nothing).expand(self._num_parts)])

    @abstractmethod
    def _micro_batch(self, is_last: bool) -> contextlib.AbstractContextManager[None]:
        """Enter forward and backward of a micro batch; `is_last`: of its step."""

    @abstractmethod
    def _forward(self, batch: Any) -> Any:
        """Return what the objective does of a micro batch, which is on the device: in training its sums by name."""

    @abstractmethod
    def _backward(self, loss: Tensor) -> None:
        """Add a loss's gradient to those that were found before."""

    @abstractmethod
    def _apply_gradients(self) -> Tensor:
        """Clip the gradients and update; return their norm before clipping, and 1 if the update was made, else 0.

        Both are float64 on the device, which decides.
        """


class SingleProcessTrainer(Trainer):
    """Trains one model in this process, which shares its work with no other: the engine's step without DeepSpeed."""

    def __init__(self, objective: Loss, **settings: Any) -> None:
        super().__init__(objective, **settings)
        self._objective = objective

    def _micro_batch(self, is_last: bool) -> contextlib.AbstractContextManager[None]:
        self._objective.train()
        return contextlib.nullcontext()

    def _forward(self, batch: Any) -> Any:
        return self._objective(batch)

    def _backward(self, loss: Tensor) -> None:
        loss.backward()

    def _apply_gradients(self) -> Tensor:
        figures = clip_gradients(self._optimizer, self._trainables.values(), self._optim.max_grad_norm)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return figures

    def copy_parameters(self) -> dict[str, Tensor]:
        """Return copies of the trained parameters, fp32 on the CPU."""
        return {name: param.detach().to("cpu", torch.float32, copy=True) for name, param in self._trainables.items()}


def list_trainables(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that train, by name."""
    trainables = {name: param for name, param in model.named_parameters() if param.requires_grad}
    assert trainables, "no parameter trains"
    assert all(param.dtype == torch.float32 for param in trainables.values()), "trainables are fp32"
    return trainables
