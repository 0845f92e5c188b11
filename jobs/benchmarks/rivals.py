"""What `jobs/benchmark.py step` times AF Adapter and exBERT against: their equations, written down literally."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.nn.functional as F
from benchmarks.timing import Batch
from torch import Tensor, nn

from domext_ray.model.domext.modeling_domext import DomextForMaskedLM


class Rival(nn.Module, ABC):
    """The same model as its paper's equations stand: eager attention, and logits at every position.

    Args:
        model: whose weights are used.
    """

    def __init__(self, model: DomextForMaskedLM) -> None:
        super().__init__()
        self.model = model
        self.num_heads = model.config.num_attention_heads
        self.dropout = model.config.hidden_dropout_prob

    def forward(self, batch: Batch) -> Tensor:
        """Return the mean loss of the predicted positions."""
        hidden_states = self.model.bert.embeddings(batch.input_ids, None, None, None)
        for layer in self.model.bert.encoder.layer:
            hidden_states = self.run_layer(layer, hidden_states)
        logits = self.model.cls.predictions(hidden_states)
        return F.cross_entropy(logits.float().flatten(0, 1), batch.all_labels)

    def compile_layers(self) -> None:
        """Have torch.compile fuse what each layer computes."""
        self.run_layer = torch.compile(self.run_layer)  # type: ignore[method-assign]

    @abstractmethod
    def run_layer(self, layer: Any, hidden_states: Tensor) -> Tensor:
        """One layer, [B, N, d] -> [B, N, d]."""

    def mix(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Eager attention over heads, [B, heads, N, d_k] -> [B, N, heads · d_k]."""
        scores = query @ key.transpose(2, 3) * query.shape[-1] ** -0.5
        weights = F.dropout(torch.softmax(scores, dim=-1), self.dropout, self.training)
        return (weights @ value).transpose(1, 2).flatten(2)

    def finish(self, output: Any, projected: Tensor, residual: Tensor) -> Tensor:
        """`LayerNorm(dropout(projected) + residual)`."""
        return output.LayerNorm(F.dropout(projected, self.dropout, self.training) + residual)


class AfRival(Rival):
    """AF Adapter: `x [W : W']`, all heads in one attention; extensions of one adapter with heads and FFN units."""

    def __init__(self, model: DomextForMaskedLM) -> None:
        super().__init__(model)
        (self.adapter,) = model.config.adapters
        self.head_size = model.config.hidden_size // self.num_heads

    def run_layer(self, layer: Any, hidden_states: Tensor) -> Tensor:
        """Attention, then FFN."""
        return self.feed_forward(layer, self.attend(layer.attention, hidden_states))

    def attend(self, attention: Any, hidden_states: Tensor) -> Tensor:
        """Attention sublayer, [B, N, d] -> [B, N, d]."""
        base, extra = attention.self, attention.adapters[self.adapter]
        query, key, value = (
            widen(getattr(base, name), getattr(extra, name), hidden_states)
            .unflatten(-1, (-1, self.head_size))
            .transpose(1, 2)
            for name in ("query", "key", "value")
        )
        return self.project(attention.output, extra.output, self.mix(query, key, value), hidden_states)

    def feed_forward(self, layer: Any, hidden_states: Tensor) -> Tensor:
        """FFN sublayer, [B, N, d] -> [B, N, d]."""
        extra = layer.adapters[self.adapter]
        inner = F.gelu(widen(layer.intermediate.dense, extra.input, hidden_states))
        return self.project(layer.output, extra.output, inner, hidden_states)

    def project(self, output: Any, extra: nn.Linear, inputs: Tensor, residual: Tensor) -> Tensor:
        """`LayerNorm(dropout(x [W over W'] + b + b') + residual)`."""
        weight = torch.cat([output.dense.weight, extra.weight], dim=1)
        return self.finish(output, F.linear(inputs, weight, output.dense.bias + extra.bias), residual)


class ExbertRival(Rival):
    """exBERT: the base's layer and the extension module one after the other, then the gated sum."""

    def run_layer(self, layer: Any, hidden_states: Tensor) -> Tensor:
        """Both branches and the gate."""
        base, extra = layer.attention, layer.extension
        base_context = self.attend(base.self, hidden_states)
        attended = self.finish(base.output, base.output.dense(base_context), hidden_states)
        base_output = self.finish(
            layer.output, layer.output.dense(F.gelu(layer.intermediate.dense(attended))), attended
        )
        context = self.attend(extra.heads, hidden_states)
        attended = self.finish(extra.attention_output, extra.attention_output.dense(context), hidden_states)
        own_output = self.finish(extra.output, extra.output.dense(F.gelu(extra.intermediate(attended))), attended)
        gate = torch.sigmoid(F.linear(hidden_states, extra.gate.weight, extra.gate.bias))
        return base_output * gate + own_output * (1 - gate)

    def attend(self, heads: Any, hidden_states: Tensor) -> Tensor:
        """One group of heads, [B, N, d] -> [B, N, heads · d_k]."""
        projected = (getattr(heads, name)(hidden_states) for name in ("query", "key", "value"))
        return self.mix(*(each.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for each in projected))


def widen(base: nn.Linear, extra: nn.Linear, inputs: Tensor) -> Tensor:
    """`x [W : W'] + [b : b']`."""
    return F.linear(inputs, torch.cat([base.weight, extra.weight]), torch.cat([base.bias, extra.bias]))
