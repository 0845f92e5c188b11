"""Optimiser steps of one process that shares its work with no other: the engine's step, without DeepSpeed.

Enters: a model of which some parameters train, an objective, and micro batches. Leaves: the figures of each step. Loss,
clipping, rate and seeds are those of `training/engine.py` at ZeRO 0 with one worker.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from domext_ray.config.pretrain import OptimConfig
from domext_ray.training.engine import Objective, StepFigures, move_batch, seed_step
from domext_ray.training.optimizer import build_optimizer, clip_gradients, compute_learning_rate, set_learning_rate


class SingleProcessTrainer:
    """Trains one model in this process; fp32 parameters with `requires_grad` train.

    Args:
        objective: model and loss, on `device`; the first of its losses is trained on.
        optim: AdamW; `decay_steps` is resolved.
        warmup_steps: length of the warm-up, steps.
        seed: of dropout.
        device: where the model is.
        rate_scales: factors of the learning rate by parameter name, for those that differ from 1.
    """

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
        self._objective, self._optim, self._warmup_steps = objective, optim, warmup_steps
        self._seed, self._device = seed, device
        self._trainables = {name: each for name, each in objective.model.named_parameters() if each.requires_grad}
        assert self._trainables, "no parameter trains"
        assert all(each.dtype == torch.float32 for each in self._trainables.values()), "trainables are fp32"
        self._optimizer = build_optimizer(self._trainables, optim, rate_scales)

    def train_step(self, micro_batches: Sequence[Any], num_targets: int, step: int) -> StepFigures:
        """Make one optimiser step on the objective's mean loss over all micro batches.

        Args:
            micro_batches: the batch.
            num_targets: targets of the batch, by which the sum of losses is divided.
            step: 0-based; sets the learning rate and the dropout.

        Returns:
            The step's figures. If they are not finite, nothing was changed.
        """
        rate = compute_learning_rate(step, self._optim, self._warmup_steps)
        set_learning_rate(self._optimizer, rate)
        seed_step(self._seed, step, 0)
        self._objective.train()
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for batch in micro_batches:
            loss_sum = self._objective(**move_batch(batch, self._device))[0]
            total += loss_sum.detach()
            (loss_sum * (1 / max(1, num_targets))).backward()
        norm = clip_gradients(self._trainables.values(), self._optim.max_grad_norm)
        loss = total.item() / max(1, num_targets)
        if not total.isfinite():  # a loss that is not finite can have a finite gradient (infinite logits)
            norm = torch.full_like(norm, torch.nan)
        finite = bool(norm.isfinite())
        if finite:
            self._optimizer.step()
        self._optimizer.zero_grad()
        return StepFigures(loss, 0.0, 0.0, norm.item(), rate, finite)

    def copy_parameters(self) -> dict[str, Tensor]:
        """Return copies of the trained parameters, fp32 on the CPU."""
        return {name: each.detach().to("cpu", torch.float32, copy=True) for name, each in self._trainables.items()}
