"""What `jobs/benchmark.py step --layout modernbert` times AF Adapter against: transformers' own ModernBERT, widened."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from benchmarks.timing import Batch
from torch import Tensor, nn
from transformers import ModernBertForMaskedLM

from domext_ray.model.build import detach, name_plain
from domext_ray.model.domext.configuration_domext import DomextConfig
from domext_ray.model.domext.modeling_domext import DomextForMaskedLM
from domext_ray.model.layouts import find_layout


class Widened(nn.Module):
    """A projection with more outputs, or more inputs, in the place of one of transformers' class.

    Args:
        weight: the base's, whose rows are as many equal parts as there are extras.
        extras: of an adapter: one behind each part's rows, or a single one behind the columns.
        rows: more rows (outputs) instead of columns (inputs).
    """

    def __init__(self, weight: Tensor, extras: list[nn.Linear], *, rows: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.extras = nn.ModuleList(extras)
        self.rows = rows

    def forward(self, inputs: Tensor) -> Tensor:
        """`x [W : W'] + [0 : b']`, or `x [W over W'] + b'`."""
        extras = cast(list[nn.Linear], list(self.extras))
        if not self.rows:
            (extra,) = extras
            return F.linear(inputs, torch.cat([self.weight, extra.weight], dim=1), extra.bias)
        parts = self.weight.chunk(len(extras))
        none = self.weight.new_zeros(len(parts[0]))
        weight = torch.cat([each for part, extra in zip(parts, extras, strict=True) for each in (part, extra.weight)])
        return F.linear(inputs, weight, torch.cat([each for extra in extras for each in (none, extra.bias)]))


class ModernBertRival(nn.Module):
    """AF Adapter as its equations stand in transformers' class: all heads in one attention, logits everywhere.

    Args:
        model: a ModernBERT with one adapter of heads and FFN units, whose weights and extensions it takes.
    """

    def __init__(self, model: DomextForMaskedLM) -> None:
        super().__init__()
        plain = {name: each for name, each in name_plain(model).items() if ".adapters." not in name}
        layers: list[Any] = list(model.bert.encoder.layer)
        shape = cast(DomextConfig, model.config)
        (adapter,) = shape.adapters
        self.model = ModernBertForMaskedLM(cast(Any, find_layout(shape).restore(shape, "ForMaskedLM")))
        self.model.load_state_dict(detach(model, plain), strict=False)
        self.model.requires_grad_(False)
        for own, layer in zip(layers, cast(Any, self.model.model.layers), strict=True):
            heads, units = own.attention.adapters[adapter], own.adapters[adapter]
            projections = [heads.query, heads.key, heads.value]
            layer.attn.Wqkv = Widened(layer.attn.Wqkv.weight.data, projections, rows=True)
            layer.attn.Wo = Widened(layer.attn.Wo.weight.data, [heads.output], rows=False)
            layer.mlp.Wi = Widened(layer.mlp.Wi.weight.data, [units.input, units.gate], rows=True)
            layer.mlp.Wo = Widened(layer.mlp.Wo.weight.data, [units.output], rows=False)

    def forward(self, batch: Batch) -> Tensor:
        """Return the mean loss of the predicted positions."""
        logits = self.model(batch.input_ids).logits
        return F.cross_entropy(logits.float().flatten(0, 1), batch.all_labels)
