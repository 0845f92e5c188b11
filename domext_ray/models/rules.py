"""Which parameters of a model with a task's head train, and at which rate.

Houlsby section 3 (bottlenecks and LayerNorms, top layers, LayerNorms alone), exBERT section 4 (rates of the top
layers and the head), BERT section A.3 (everything).
"""

from __future__ import annotations

import re
from typing import cast

from torch import nn

from domext_ray.config.extensions.table import is_extension
from domext_ray.config.finetune import FinetuneOptimConfig
from domext_ray.config.method import MethodConfig
from domext_ray.model.build import trains_base
from domext_ray.model.domext.configuration_domext import DomextConfig
from domext_ray.model.domext.heads_domext import PooledHeadModel
from domext_ray.model.domext.modeling_domext import DomextPreTrainedModel

_POOLER = "bert.pooler."
_LAYER = re.compile(r"bert\.encoder\.layer\.(\d+)\.")


def choose_trainables(model: DomextPreTrainedModel, method: MethodConfig) -> set[str]:
    """Return the names of the parameters that train.

    The task's head always does, and the pooler where the head reads it, as it is a part of the head. Of the encoder:
    "all": everything; "extensions": every extension, those that the start model brings too; "adapter": the method's own
    adapter only; "top_layers", "layer_norms", "biases": these parts of the base. Nothing of an encoder trains whose
    layers' outputs are features (`head_layers`).
    """
    reads_pooler = isinstance(model, PooledHeadModel)
    return {
        name
        for name, _ in cast(nn.Module, model).named_parameters()
        if (reads_pooler if name.startswith(_POOLER) else _trains(name, model, method))
    }


def _trains(name: str, model: DomextPreTrainedModel, method: MethodConfig) -> bool:
    if not name.startswith("bert."):
        return True
    if cast(DomextConfig, model.config).head_layers:  # these are of a frozen encoder
        return False
    if method.trains == "all":
        return True
    if is_extension(name):
        own = f".adapters.{method.adapter}." in name and method.has_adapter
        return method.trains == "extensions" or (method.trains == "adapter" and own)
    return trains_base(name, method, cast(DomextConfig, model.config).num_hidden_layers - method.top_layers)


def scale_rates(model: DomextPreTrainedModel, optim: FinetuneOptimConfig, lr: float) -> dict[str, float]:
    """Return each parameter's rate relative to the grid's peak rate `lr`, for those that have one of their own."""
    first_top = cast(DomextConfig, model.config).num_hidden_layers - optim.top_layers
    scales: dict[str, float] = {}
    for name, _ in cast(nn.Module, model).named_parameters():
        layer = _LAYER.match(name)
        if not name.startswith("bert.") or name.startswith(_POOLER):
            scales[name] = optim.head_lr / lr if optim.head_lr else 1.0
        elif layer is not None and int(layer[1]) >= first_top:
            scales[name] = optim.top_layers_lr / lr
    return {name: scale for name, scale in scales.items() if scale != 1.0}
