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

from domext_ray.config.method import MethodConfig
from domext_ray.config.pretrain import PretrainConfig
from domext_ray.model.base import Base
from domext_ray.model.domext.modeling_domext import DomextForMaskedLM
from domext_ray.model.graft import build_model, choose_attention, store_base
from domext_ray.training.engine import MaskedLoss, Objective
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
    loss = functools.partial(MaskedLoss, keep_weight=config.objective.keep_weight, num_parts=len(name_parts(config)))
    if base is None or not needs_teacher(config):
        return loss
    trained = {name for name, each in model.named_parameters() if each.requires_grad}
    teacher = cast(DomextForMaskedLM, model)
    if not config.method.keeps_base or base.tensors.keys() & {*trained, *fixed}:
        teacher = _copy_base(base, config, device)
        if config.engine.has_narrow_base:
            store_base(teacher, torch.bfloat16)
    return functools.partial(loss, teacher=cast(nn.Module, teacher), num_words=base.config.vocab_size)


def needs_teacher(config: PretrainConfig) -> bool:
    """Whether the base is asked what it predicts."""
    return config.has_general_text and config.objective.keep == "kl"


def _copy_base(base: Base, config: PretrainConfig, device: torch.device) -> DomextForMaskedLM:
    """Make a model of the base alone, frozen."""
    model = build_model(
        base,
        config.shape,
        MethodConfig(name="base", trains="layer_norms", heads=0, ffn_units=0),
        vocab_size=base.config.vocab_size,
        causal=config.objective.is_left_to_right,
        pad_token_id=base.config.pad_token_id,
        dropout=0.0,
        seed=config.seed,
    )
    cast(nn.Module, model).requires_grad_(False)
    choose_attention(model, device, bf16=config.engine.uses_bf16)
    cast(nn.Module, model).to(device)
    return model
