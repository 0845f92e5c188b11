"""How many parameters an augmented model has and a method trains: counted on a model without values."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import nn
from transformers import PreTrainedModel, initialization

from domext_ray.config.method import MethodConfig
from domext_ray.extensions.table import EXTENSIONS
from domext_ray.model.build import trainable_names
from domext_ray.model.domext.configuration_domext import DomextConfig
from domext_ray.model.domext.modeling_domext import DomextForMaskedLM, DomextForPreTraining


@dataclass(frozen=True)
class ParameterCounts:
    """Parameters of an augmented model."""

    total: int  # the MLM head included, tied ones once
    trainable: int  # those that the method trains
    encoder: int  # base and extensions, pooler in, MLM head out: the denominator of the papers' shares
    kinds: Mapping[str, int] = field(default_factory=dict)  # of those that train, by the class of `extensions.table`
    decoder: int = 0  # what trains beside the model and no export has, see `training.decoder.count_decoder`

    @property
    def trainable_frac(self) -> float:
        """Trainable share of base + extension; of everything, where more than these trains."""
        return self.trainable / (self.encoder if self.trainable <= self.encoder else self.total)


def count_parameters(
    config: DomextConfig,
    method: MethodConfig,
    heads: Collection[str],
    *,
    next_sentence: bool = False,
    reads_words: bool = True,
) -> ParameterCounts:
    """Count a model's parameters.

    Args:
        config: the augmented model.
        method: the rule that says what trains, and what `config` does not describe.
        heads: those of `HEADS` that the base brings; fresh ones train.
        next_sentence: the model predicts the order of two texts.
        reads_words: the objective reads the MLM head; else nothing of it trains.
    """
    with torch.device("meta"), initialization.no_init_weights():
        model = (DomextForPreTraining if next_sentence else DomextForMaskedLM)(config)
        cast(PreTrainedModel, model).tie_weights()  # the initialisation would have
        for extension in EXTENSIONS:
            extension.attach(cast(nn.Module, model), method)
    trained = trainable_names(model, method, heads, reads_words=reads_words)
    sizes = {name: each.numel() for name, each in model.named_parameters()}
    kinds = {
        type(each).__name__: sum(sizes[name] for name in trained if each.parameters.search(name)) for each in EXTENSIONS
    }
    encoder = sum(size for name, size in sizes.items() if name.startswith("bert."))
    return ParameterCounts(sum(sizes.values()), sum(sizes[name] for name in trained), encoder, kinds)
