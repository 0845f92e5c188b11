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
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from domext_ray.config.pretrain import OptimConfig
from domext_ray.model.joined import list_joined, refresh
from domext_ray.training.losses import Objective
from domext_ray.training.objective import DistillRows
from domext_ray.training.optimizer import build_optimizer, clip_gradients, compute_learning_rate, set_learning_rate

ALIGNMENT = 64  # bytes, of a tensor in a batch that is sent as one


@dataclass(frozen=True)
class StepFigures:
    """Figures of one optimiser step, the same on every rank.

    Args:
        loss: mean loss over the targets of the global batch (negative log-likelihood of masked tokens), nats.
        next_sentence_loss: the same over the pairs of the global batch, nats; 0 without pairs.
        distill_loss: mean of the distillation term over its predicted tokens, before its weight, nats; 0 without it.
        part_losses: sums of the predicted tokens' losses by part of a mixture, nats; empty: there are no parts.
        grad_norm: L2 norm of the whole gradient before clipping; inf or nan when it is not finite.
        learning_rate: rate of this step.
        finite: loss and gradient were finite; else the step was skipped on all ranks.
    """

    loss: float
    next_sentence_loss: float
    distill_loss: float
    grad_norm: float
    learning_rate: float
    finite: bool
    part_losses: tuple[float, ...] = ()

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


def move_batch(batch: Any, device: torch.device) -> dict[str, Any]:
    """Return the fields of a batch (or of a dictionary) by name, their tensors on a device: what a forward takes."""
    fields = batch if isinstance(batch, dict) else vars(batch)
    return fields if device.type == "cpu" else _send(fields, device)


def _send(fields: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Bring tensors of the CPU to a device in one copy, of which they are views there.

    A GPU's host does not wait: torch hands out pinned memory again only when the copies from it are done.
    """
    tensors = list[Tensor]()
    map_tensors(fields, tensors.append)
    sizes = [-(-each.nbytes // ALIGNMENT) * ALIGNMENT for each in tensors]
    buffer = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=device.type == "cuda")
    for part, each in zip(buffer.split(sizes), tensors, strict=True):
        _view_as(part, each).copy_(each)
    parts = iter(buffer.to(device, non_blocking=True).split(sizes))
    sent: dict[str, Any] = map_tensors(fields, lambda each: _view_as(next(parts), each))
    return sent


def map_tensors(value: Any, function: Callable[[Tensor], Any]) -> Any:
    """Return a batch's field with what a function makes of its tensors, those in dictionaries and parts too."""
    if isinstance(value, DistillRows):
        return DistillRows(**map_tensors(vars(value), function))
    if isinstance(value, dict):
        return {name: map_tensors(each, function) for name, each in value.items()}
    return function(value) if isinstance(value, Tensor) else value


def _view_as(part: Tensor, tensor: Tensor) -> Tensor:
    """Return the first bytes of a buffer's part with a tensor's dtype and shape."""
    return part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)


class Trainer(ABC):
    """Makes optimiser steps; fp32 parameters with `requires_grad` train.

    Args:
        objective: model and losses, on `device`.
        optim: AdamW; `decay_steps` is resolved.
        warmup_steps: length of the warm-up, steps.
        seed: of dropout.
        device: where the model is.
        rate_scales: factors of the learning rate by parameter name, for those that differ from 1.
    """

    rank, world_size = 0, 1

    def __init__(
        self,
        objective: Objective,
        *,
        optim: OptimConfig,
        warmup_steps: int,
        seed: int,
        device: torch.device,
        rate_scales: Mapping[str, float] | None = None,
    ) -> None:
        self.device = torch.device(device)
        self._optim, self._warmup_steps, self._seed = optim, warmup_steps, seed
        self._loss_weights, self._num_watched = objective.loss_weights, objective.num_watched
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
        num_targets: int,
        step: int,
        num_pairs: int = 0,
        num_distilled: int = 0,
        progress: float = 0.0,
    ) -> Callable[[], StepFigures]:
        """Make one optimiser step on the objective's mean loss, or the weighted sum of its mean losses.

        Args:
            micro_batches: this rank's share of the global batch, equally many on all ranks.
            num_targets: targets of the global batch (masked tokens, say), over all ranks.
            step: 0-based; sets the learning rate and the dropout.
            num_pairs: pairs of the global batch, over all ranks.
            num_distilled: predicted tokens of the distillation term, likewise.
            progress: see `compute_learning_rate`.

        Returns:
            What reads the step's figures, and waits for a GPU that is still at it. If they are not finite, nothing was
            changed on any rank.
        """
        rate = compute_learning_rate(step, self._optim, self._warmup_steps, progress)
        set_learning_rate(self._optimizer, rate)
        seed_step(self._seed, step, self.rank)
        counts = torch.tensor([num_targets, num_pairs, num_distilled], dtype=torch.float64)
        counts = counts.clamp_min(1)[: len(self._loss_weights)]
        sums = self._accumulate_gradients(micro_batches, counts)
        self.sum_over_ranks(sums)
        # A copy that is asked for later would come behind the steps that are launched before it.
        applied = self._apply_gradients()
        refresh(self._joined)
        figures = torch.cat([applied, sums]).to("cpu", non_blocking=True)
        return functools.partial(self._read_figures, figures, self._mark(), counts.tolist(), rate)

    def _mark(self) -> Callable[[], None]:
        """Return what waits, on any thread, until a GPU has done what it was asked for up to now."""
        if self.device.type != "cuda":
            return lambda: None
        event = torch.cuda.Event()
        event.record()
        return event.synchronize

    def _read_figures(self, figures: Tensor, wait: Callable[[], None], counts: list[float], rate: float) -> StepFigures:
        """Read what a step left, when its copy is there."""
        wait()
        grad_norm, applied, *sums = figures.tolist()
        self.num_updates += int(applied)
        watched = sums[len(counts) :]
        means = [each / count for each, count in zip(sums, counts, strict=False)]
        loss, next_sentence_loss, distill_loss = means + [0.0] * (3 - len(means))
        return StepFigures(loss, next_sentence_loss, distill_loss, grad_norm, rate, bool(applied), tuple(watched))

    def sum_over_ranks(self, tensor: Tensor) -> None:
        """Replace a tensor by its sum over all ranks; Gloo would hand a lone one's to another thread and back."""
        if self.world_size > 1:
            dist.all_reduce(tensor)

    def _accumulate_gradients(self, micro_batches: Sequence[Any], counts: Tensor) -> Tensor:
        """Run forward and backward over this rank's share; return the sums of its losses, and of what is watched.

        `counts`, float64 [losses] on the CPU, are what the global batch has of each, by which the sums will be divided.
        """
        totals = torch.zeros(len(counts) + self._num_watched, dtype=torch.float64, device=self.device)
        # Gradients are averaged over ranks, so a local sum times world size / global count becomes the global mean.
        factors = (self.world_size / counts).float() * torch.tensor(self._loss_weights)
        factors = factors.to(self.device, non_blocking=True)
        for i, batch in enumerate(micro_batches):
            with self._micro_batch(is_last=i == len(micro_batches) - 1):
                totals += self._compute_pass(move_batch(batch, self.device), factors)
        return totals

    def _make_pass(self, fields: dict[str, Any], factors: Tensor) -> Tensor:
        """Run forward and backward of a micro batch; return its losses' sums and what is watched, on the device."""
        outputs = self._forward(fields)
        loss_sums = torch.stack(outputs[: len(factors)])
        # A loss that is not finite can have a finite gradient (infinite logits): it is made to show in the
        # gradient's norm, the one figure on which all ranks agree whether to make the step.
        poisoned = torch.where(loss_sums.detach().isfinite(), factors, torch.nan)
        self._backward((loss_sums * poisoned).sum())
        # Without parts, as in a dry run, one zero is watched for all of them.
        watched = [outputs[-1].expand(self._num_watched)] if self._num_watched else []
        return torch.cat([loss_sums.detach(), *watched])

    @abstractmethod
    def _micro_batch(self, is_last: bool) -> contextlib.AbstractContextManager[None]:
        """Enter forward and backward of a micro batch; `is_last`: of its step."""

    @abstractmethod
    def _forward(self, fields: dict[str, Any]) -> tuple[Tensor, ...]:
        """Return the objective's outputs for a micro batch, whose fields are on the device."""

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

    def __init__(self, objective: Objective, **settings: Any) -> None:
        super().__init__(objective, **settings)
        self._objective = objective

    def _micro_batch(self, is_last: bool) -> contextlib.AbstractContextManager[None]:
        self._objective.train()
        return contextlib.nullcontext()

    def _forward(self, fields: dict[str, Any]) -> tuple[Tensor, ...]:
        outputs: tuple[Tensor, ...] = self._objective(**fields)
        return outputs

    def _backward(self, loss: Tensor) -> None:
        loss.backward()

    def _apply_gradients(self) -> Tensor:
        figures = clip_gradients(self._optimizer, self._trainables.values(), self._optim.max_grad_norm)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return figures

    def copy_parameters(self) -> dict[str, Tensor]:
        """Return copies of the trained parameters, fp32 on the CPU."""
        return {name: each.detach().to("cpu", torch.float32, copy=True) for name, each in self._trainables.items()}


def list_trainables(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that train, by name."""
    trainables = {name: each for name, each in model.named_parameters() if each.requires_grad}
    assert trainables, "no parameter trains"
    assert all(each.dtype == torch.float32 for each in trainables.values()), "trainables are fp32"
    return trainables
