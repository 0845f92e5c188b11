"""Tiny models in training mode of which one method's part trains, for what all methods and layouts share."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from lone_engine import make_lone_engine
from tiny_models import ADAPTERS, MODERN, VOCAB, make_model
from torch import Tensor, nn

from domext_ray.config.method import MethodConfig
from domext_ray.config.pretrain import EngineConfig, OptimConfig
from domext_ray.model.build import attach_extensions, store_base
from domext_ray.training.engine import Engine
from domext_ray.training.losses import MaskedLoss

CPU = torch.device("cpu")

DROPOUT = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.1)
LAYOUTS: dict[str, dict[str, Any]] = {
    "bert": {},
    "modernbert": MODERN,
    "distilbert": {"type_vocab_size": 0, "hidden_act": "relu"},
    "left to right": {"causal": True},
}
MODULE = {"adapters": {}, "module_hidden_size": 20, "module_ffn_size": 12}
METHODS: dict[str, tuple[dict[str, Any], str]] = {  # what a model has, and what in the names of its parameters trains
    "full": ({"adapters": {}}, "."),
    "af": ({}, ".adapters."),
    "af beside a frozen adapter": ({}, ".art."),
    "af in one layer": ({"adapters": {"law": {"heads": 1, "ffn_units": 6, "first_layer": 1}}}, ".adapters."),
    "ffn units": ({"adapters": {"law": {"ffn_units": 6}}}, ".adapters."),
    "exbert": (MODULE, ".extension."),
    "exbert and af": ({**MODULE, "adapters": ADAPTERS}, ".extension."),
    "bottlenecks": ({"adapters": {"law": {"bottleneck_size": 5, "layer_norms": True}}}, ".adapters."),
    "lora": ({"adapters": {}}, ".lora_"),
    "biases": ({"adapters": {}}, ".bias"),
}
SLOW_METHODS = ("af", "af in one layer", "biases", "exbert", "ffn units")  # others have what these have
FEW_METHODS = [pytest.param(name, marks=pytest.mark.slow) if name in SLOW_METHODS else name for name in METHODS]


def make_trainable(method: str, **values: Any) -> Any:
    """A model in training mode, of which the method's part trains."""
    own, trained = METHODS[method]
    model = make_model(moved=0.1, **{**own, **values}).train()
    if method == "lora":
        attach_extensions(model, MethodConfig(lora_rank=3, lora_targets=("query", "value", "output")))
    for name, param in model.named_parameters():
        param.requires_grad_(trained in name)
        if ".lora_B." in name:
            nn.init.normal_(param, std=0.1)
    return model


def make_method_engine(model: nn.Module, engine: EngineConfig, steps: int, device: torch.device = CPU) -> Engine:
    """Put an engine around such a model, for steps of two micro batches at a rate that moves it."""
    if engine.has_narrow_base:
        store_base(model, torch.bfloat16)
    return make_lone_engine(
        model,
        engine=engine,
        optim=OptimConfig(lr=5e-3, decay_steps=2 * steps, eps=1e-5),
        warmup_steps=2,
        micro_batch_size=3,
        accumulation_steps=2,
        device=device,
        objective=partial(MaskedLoss, num_words=VOCAB),
    )


def measure_difference(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    """The norm of the difference of gradients, in parts of their own."""
    assert first.keys() == second.keys() and first
    whole, other = (torch.cat([tensors[name].flatten() for name in first]) for tensors in (first, second))
    return float((whole - other).norm() / whole.norm())
