"""What a run's loss keeps to on general text, and who says it: the base in the model, or a frozen copy of the base.

A frozen base in the model costs nothing beside one more forward pass of the general rows. A method that changes the
base, or wraps its matrices (LoRA), needs a copy.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import cast

import torch
from torch import nn

from domext_ray.config.pretrain import PretrainConfig
from domext_ray.model.base import Base
from domext_ray.model.build import build_base
from domext_ray.model.domext.modeling_domext import DomextForMaskedLM
from domext_ray.training.losses import MaskedLoss, Objective
from domext_ray.training.parts import name_parts
from domext_ray.training.vectors import make_vector_loss


def make_loss(
    config: PretrainConfig, base: Base | None, model: nn.Module, fixed: Collection[str], device: torch.device
) -> Callable[..., Objective]:
    """Return the loss of a run, for the engine to put around its model.

    Args:
        config: the run.
        base: its base; None for random weights.
        model: the run's model, on `device`.
        fixed: names of an earlier run's tensors that do not train now.
        device: where to train.
    """
    if config.objective.makes_vectors:
        return make_vector_loss(config.objective)
    loss = functools.partial(MaskedLoss, distill_weight=config.objective.keep_weight, num_parts=len(name_parts(config)))
    if base is None or not needs_teacher(config):
        return loss
    trained = {name for name, each in model.named_parameters() if each.requires_grad}
    teacher = cast(DomextForMaskedLM, model)
    if not config.method.keeps_base or base.tensors.keys() & {*trained, *fixed}:
        engine, causal = config.engine, config.objective.is_causal
        teacher = build_base(base, device, causal=causal, bf16=engine.uses_bf16, is_narrow=engine.has_narrow_base)
    return functools.partial(loss, teacher=cast(nn.Module, teacher), num_words=base.config.vocab_size)


def needs_teacher(config: PretrainConfig) -> bool:
    """Whether the base is asked what it predicts."""
    return config.has_general_text and config.objective.keep == "kl"
