"""Layers of the augmented encoder: the base's modules under BERT's names, and the extensions beside them.

This file is exported as it is: it imports torch and transformers only. The base is frozen while extensions train, so
their matrices stay apart: joining them would compute the base's weight gradients only to throw them away.
Shapes: B rows, N tokens, d hidden size, h heads of size d_k = d / h, i extra heads, a extra FFN units, h' and
f' width and FFN units of an extension module, m width of a bottleneck, T tokens without padding, P tokens whose output
is asked for (`output_indices`, int64 [P], in the flattened [B·N]; None: all).

AF Adapter section 3.2: extra heads are attended on their own, and `concat(base, extra) [W_O ⊥ W'_O]` is the sum of
two projections; likewise `GELU(x [W_1 : W'_1]) [W_2 ⊥ W'_2]`. An adapter's heads and units return a summand, a delta.

Houlsby et al. section 2.1: `LN(A(sublayer(x)) + x)`, `A(u) = u + W_up φ(W_down u + b_down) + b_up`. Bottlenecks of
several adapters read the same u, which has the adapters' heads and units in it, and their deltas are summed. Section
3.6, parallel: `LN(sublayer(x) + x + W_up φ(W_down x + b_down) + b_up)`.

Where a layout has its norms before the sublayers, `x + A(sublayer(LN(x)))`: a sublayer's extensions read LN(x), too,
and bottlenecks shift that LN. Extra heads have the positions and the window of the layer's own heads, and extra FFN
units are gated where the base's are.

exBERT section 3: `H_out = T_ofs(H)·σ(w(H)) + T_ext(H)·(1 - σ(w(H)))`, T_ofs the layer above, T_ext a smaller
transformer layer of the same kind, w a d -> 1 layer.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .configuration_domext import AdapterConfig, DomextConfig


def attend_eagerly(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Attend without a fused kernel; the only implementation that returns attention weights.

    Queries, keys and values are [B, heads, N, d_k], the mask is additive; returns the context [B, N, heads, d_k] and
    the weights [B, heads, N, N].
    """
    scores = torch.matmul(query * scaling, key.transpose(2, 3))  # there are more scores than queries
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = nn.functional.dropout(nn.functional.softmax(scores, dim=-1), p=dropout, training=module.training)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights


class Linear(nn.Linear):
    """Linear layer whose weight may be stored in another dtype than it computes in (a frozen base kept in bf16)."""

    def forward(self, inputs: Tensor, weight_shifts: Sequence[Tensor] = ()) -> Tensor:
        """[..., in_features] -> [..., out_features], in the inputs' dtype or in autocast's."""
        weight = self.weight
        for shift in weight_shifts:
            weight = weight + shift
        if weight.dtype != inputs.dtype and not torch.is_autocast_enabled(inputs.device.type):
            weight = weight.to(inputs.dtype)
        return nn.functional.linear(inputs, weight, self.bias)


@dataclass(frozen=True)
class Delta:
    """What one adapter adds to the rows [R] of a batch (None: all B): [R, N, d], or [d] where a parameter is meant."""

    rows: Tensor | None
    value: Tensor


def add_deltas(total: Tensor, deltas: Sequence[Delta]) -> Tensor:
    """Add deltas to [B, ..., d], in their order; exact zeros change no value."""
    for is_whole, group in itertools.groupby(deltas, key=lambda delta: delta.rows is None):
        if not is_whole:
            total = _add_rows(total, list(group))
            continue
        for delta in group:
            total = total + delta.value
    return total


def _add_rows(total: Tensor, deltas: Sequence[Delta]) -> Tensor:
    """Add deltas of some rows each, at once: the sum is copied once, however many adapters a batch has."""
    rows = [cast(Tensor, delta.rows) for delta in deltas]
    values = [
        delta.value.to(total.dtype).expand(len(own), *total.shape[1:]) for delta, own in zip(deltas, rows, strict=True)
    ]
    if len(deltas) == 1:
        return total.index_add(0, rows[0], values[0])
    return total.index_add(0, torch.cat(rows), torch.cat(values))


def take_rows(batch: Tensor | None, rows: Tensor | None) -> Tensor | None:
    """Return some rows of hidden states or of an attention mask; None stays None, one row for all stays one."""
    if batch is None or rows is None or len(batch) == 1:
        return batch
    return batch.index_select(0, rows)


def take_tokens(states: Tensor, output_indices: Tensor | None) -> Tensor:
    """Return the states [P, ...] of some tokens of [B, N, ...]; None: all."""
    return states if output_indices is None else states.flatten(0, 1).index_select(0, output_indices)


@dataclass(frozen=True)
class Padding:
    """Where rows without their padding, [1, T, ...] end to end, stand in the [B, N] that attention needs.

    Args:
        token_indices: int64 [T], ascending, in the flattened [B·N].
        num_rows: B.
        length: N.
    """

    token_indices: Tensor
    num_rows: int
    length: int

    def pad_input(self, states: Tensor) -> Tensor:
        """[1, T, width] -> [B, N, width], 0 elsewhere."""
        flat = states.new_zeros(self.num_rows * self.length, states.shape[-1])
        return flat.index_copy(0, self.token_indices, states[0]).view(self.num_rows, self.length, -1)

    def unpad_input(self, states: Tensor) -> Tensor:
        """[B, N, width] -> [1, T, width]."""
        return states.flatten(0, 1).index_select(0, self.token_indices)[None]


def to_autocast_dtype(states: Tensor) -> Tensor:
    """Cast what several products read to autocast's dtype, once: each would cast it anew, and its gradient back."""
    device = states.device.type
    is_exact = states.dtype is torch.float64  # which autocast leaves
    if is_exact or not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return states
    return states.to(torch.get_autocast_dtype(device))


class LayerNorm(nn.LayerNorm):
    """LayerNorm that computes in its own dtype, so that the residual stream stays fp32 under autocast."""

    def forward(self, inputs: Tensor, weight_shifts: Sequence[Delta] = (), bias_shifts: Sequence[Delta] = ()) -> Tensor:
        """[B, ..., d] -> the same, in the dtype of this module's parameters; the shifts [d] are those of adapters."""
        inputs = inputs.to(self.weight.dtype)
        if not weight_shifts:
            return super().forward(inputs)
        own_bias = torch.zeros_like(self.weight) if self.bias is None else self.bias
        if all(each.rows is None for each in weight_shifts):
            weight, bias = add_deltas(self.weight, weight_shifts), add_deltas(own_bias, bias_shifts)
            return nn.functional.layer_norm(inputs, self.normalized_shape, weight, bias, self.eps)
        normalized = nn.functional.layer_norm(inputs, self.normalized_shape, eps=self.eps)
        shape = (len(inputs), *[1] * (inputs.dim() - 2), inputs.shape[-1])
        weight = add_deltas(self.weight.expand(shape), weight_shifts)
        return normalized * weight + add_deltas(own_bias.expand(shape), bias_shifts)


def make_norm(config: DomextConfig) -> LayerNorm:
    """Make one of the base's LayerNorms."""
    return LayerNorm(config.hidden_size, eps=config.layer_norm_eps, bias=config.norm_bias)


CosSin = tuple[Tensor, Tensor]
"""Cosines and sines of rotary positions for heads of one size, fp32 [1 or B, 1, N, size // 2]."""


def compute_cos_sin(position_ids: Tensor, size: int, theta: float) -> CosSin:
    """Return those of positions int64 [1 or B, N]; the last dimension of an odd size is not rotated.

    Source: Su et al., "RoFormer", arXiv:2104.09864 (2021), with pairs half a head apart, as transformers has them.
    """
    rates = 1.0 / theta ** (torch.arange(0, size - size % 2, 2, device=position_ids.device, dtype=torch.float32) / size)
    angles = position_ids[:, None, :, None].float() * rates
    return angles.cos(), angles.sin()


def apply_rotary_pos_emb(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate queries or keys [B, heads, N, size] by their positions, in fp32."""
    half = cos.shape[-1]
    first, second, rest = states.float().split([half, half, states.shape[-1] - 2 * half], dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1).to(states.dtype)


class HeadGroup(nn.Module):
    """Some attention heads, up to the output projection: the base's (`attention.self`), an adapter's, or a module's."""

    def __init__(self, config: DomextConfig, num_heads: int, head_size: int = 0, *, bias: bool = True) -> None:
        super().__init__()
        self.config = config
        self.head_size = head_size or config.head_size
        self.query = Linear(config.hidden_size, num_heads * self.head_size, bias=bias)
        self.key = Linear(config.hidden_size, num_heads * self.head_size, bias=bias)
        self.value = Linear(config.hidden_size, num_heads * self.head_size, bias=bias)

    @property
    def is_causal(self) -> bool:
        """What a fused attention implementation asks when it gets no mask."""
        return self.config.causal

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        cos_sin: CosSin | None = None,
        padding: Padding | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the context [B, N, heads · d_k], and attention weights where the implementation has them.

        With `padding` hidden states and context are [1, T, ...]. `cos_sin` is of heads of this size.
        """
        states = (project(hidden_states) for project in (self.query, self.key, self.value))
        padded = (each if padding is None else padding.pad_input(each) for each in states)
        query, key, value = (each.unflatten(-1, (-1, self.head_size)).transpose(1, 2) for each in padded)
        if cos_sin is not None:
            query, key = apply_rotary_pos_emb(query, *cos_sin), apply_rotary_pos_emb(key, *cos_sin)
        interface = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, attend_eagerly)
        context, weights = interface(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.config.attention_probs_dropout_prob if self.training else 0.0,
            scaling=self.head_size**-0.5,
            **kwargs,
        )
        context = context.flatten(2)
        return context if padding is None else padding.unpad_input(context), weights


class DeltaProjection(Linear):
    """Output projection of an adapter's delta: a class of its own, for it alone decides whether step 0 is the base."""


class AdapterHeads(HeadGroup):
    """Extra heads of one adapter, with rows W'_O and a bias b'_O of their own; their delta is [B, N, d], or [P, d]."""

    def __init__(self, config: DomextConfig, num_heads: int) -> None:
        super().__init__(config, num_heads)
        self.output = DeltaProjection(num_heads * self.head_size, config.hidden_size)

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, attention_mask: Tensor | None, output_indices: Tensor | None = None, **kwargs: Any
    ) -> Tensor:
        """Return this adapter's delta of the attention output."""
        return self.output(take_tokens(super().forward(hidden_states, attention_mask, **kwargs)[0], output_indices))


class AdapterUnits(nn.Module):
    """Extra FFN units of one adapter: `GELU(x W'_1 + b'_1) W'_2 + b'_2`; [B, N, d] -> [B, N, d].

    Where the base's units are gated, these are: `(GELU(x W'_1 + b'_1) * (x V' + c')) W'_2 + b'_2`.
    """

    def __init__(self, config: DomextConfig, num_units: int) -> None:
        super().__init__()
        self.input = Linear(config.hidden_size, num_units)
        self.gate = Linear(config.hidden_size, num_units) if config.gated_ffn else None
        self.output = DeltaProjection(num_units, config.hidden_size)
        self.activation = ACT2FN[config.hidden_act]

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return this adapter's delta of the FFN output."""
        units = self.activation(self.input(hidden_states))
        return self.output(units if self.gate is None else units * self.gate(hidden_states))


class NormShift(nn.Module):
    """What an adapter adds to a LayerNorm's weight and bias, so that the base's own stay as they are.

    It returns copies: ZeRO-3 takes a module's parameters away when its forward pass has ended.
    """

    def __init__(self, config: DomextConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(config.hidden_size))
        self.bias = nn.Parameter(torch.zeros(config.hidden_size))

    def forward(self) -> tuple[Tensor, Tensor]:
        """Return the shifts of weight and bias, [d] each."""
        return self.weight.clone(), self.bias.clone()


class BottleneckInput(Linear):
    """W_down: a class of its own, because it has a start of its own."""


class BottleneckOutput(DeltaProjection):
    """W_up, likewise."""


class Bottleneck(nn.Module):
    """Houlsby's adapter without its skip connection: `W_up φ(W_down u + b_down) + b_up`; [B, N, d] -> [B, N, d].

    It may shift its sublayer's LayerNorm, if there is one (`has_norm`).
    """

    def __init__(self, config: DomextConfig, adapter: AdapterConfig, *, has_norm: bool = True) -> None:
        super().__init__()
        width, size = config.hidden_size, adapter.bottleneck_size
        self.is_parallel = adapter.bottleneck_parallel
        self.input_norm = LayerNorm(width, eps=config.layer_norm_eps) if adapter.bottleneck_layer_norm else None
        self.down = BottleneckInput(width, size)
        self.activation = ACT2FN[adapter.bottleneck_activation]
        self.up = BottleneckOutput(size, width)
        self.norm = NormShift(config) if adapter.layer_norms and has_norm else None

    def forward(self, sublayer_input: Tensor, sublayer_output: Tensor) -> Tensor:
        """Return this adapter's delta of the sublayer's output, from whichever of the two it reads."""
        inputs = sublayer_input if self.is_parallel else sublayer_output
        if self.input_norm is not None:
            inputs = self.input_norm(inputs)
        return self.up(self.activation(self.down(inputs)))


def select_adapters(
    config: DomextConfig, extensions: nn.ModuleDict, adapter_rows: dict[str, Tensor] | None
) -> list[tuple[Any, Tensor | None]]:
    """Return the extensions of one place that take part, in the configuration's order, each with its rows (None: all).

    `adapter_rows` are the rows of the batch by the adapter that they use; None: all rows use the active adapters.
    """
    rows: dict[str, Any] | None = adapter_rows
    if rows is None:
        active = config.active_adapters
        rows = dict.fromkeys(config.adapters if active is None else active)
    return [(extensions[name], rows[name]) for name in config.adapters if name in extensions and name in rows]


class SublayerOutput(nn.Module):
    """Output projection of a sublayer and its LayerNorm: `LayerNorm(A(dropout(projection + deltas)) + residual)`.

    Where norms stand before the sublayers, `normalize` makes what the sublayer reads, and the sum is the output; the
    first layer's attention then has none.
    """

    def __init__(self, config: DomextConfig, num_inputs: int, *, bias: bool, norm: LayerNorm | None) -> None:
        super().__init__()
        self.config = config
        self.dense = Linear(num_inputs, config.hidden_size, bias=bias)
        self.LayerNorm = norm
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.adapters = nn.ModuleDict()

    def forward(
        self,
        hidden_states: Tensor,
        residual: Tensor,
        deltas: Sequence[Delta],
        adapter_rows: dict[str, Tensor] | None = None,
        read: Tensor | None = None,
    ) -> Tensor:
        """Add to the projection of [B, N, num_inputs] the deltas of heads or units, of bottlenecks, and the residual.

        `read` is what the sublayer has read; None: the residual.
        """
        output = self.dropout(add_deltas(self.dense(hidden_states), deltas))
        read = residual if read is None else read
        bottlenecks = select_adapters(self.config, self.adapters, adapter_rows)
        inner = [Delta(rows, each(take_rows(read, rows), take_rows(output, rows))) for each, rows in bottlenecks]
        total = add_deltas(output, inner) + residual
        return total if self.config.has_pre_norm else self._normalize(total, bottlenecks)

    def normalize_input(self, hidden_states: Tensor, adapter_rows: dict[str, Tensor] | None = None) -> Tensor:
        """Return what the sublayer reads of the residual stream, [B, N, d]."""
        if not self.config.has_pre_norm:
            return hidden_states
        return self._normalize(hidden_states, select_adapters(self.config, self.adapters, adapter_rows))

    def _normalize(self, hidden_states: Tensor, bottlenecks: Sequence[tuple[Any, Tensor | None]]) -> Tensor:
        """Apply the LayerNorm with the shifts of some bottlenecks."""
        if self.LayerNorm is None:
            return hidden_states
        shifts = [(rows, *each.norm()) for each, rows in bottlenecks if each.norm is not None]
        return self.LayerNorm(
            hidden_states,
            [Delta(rows, weight) for rows, weight, _ in shifts],
            [Delta(rows, bias) for rows, _, bias in shifts],
        )


class Attention(nn.Module):
    """Attention sublayer of the layer `index`: the base's heads and those of the adapters."""

    def __init__(self, config: DomextConfig, index: int = 0) -> None:
        super().__init__()
        self.config = config
        self.self = HeadGroup(config, config.num_attention_heads, bias=config.attention_bias)
        norm = None if config.has_pre_norm and index == 0 else make_norm(config)
        self.output = SublayerOutput(config, config.hidden_size, bias=config.attention_bias, norm=norm)
        self.adapters = nn.ModuleDict()

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        adapter_rows: dict[str, Tensor] | None = None,
        cos_sin: CosSin | None = None,
        output_indices: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the sublayer's output [B, N, d], or [P, d], and the base heads' attention weights, if any."""
        normalized = self.output.normalize_input(hidden_states, adapter_rows)
        read = to_autocast_dtype(normalized)
        context, weights = self.self(read, attention_mask, cos_sin=cos_sin, **kwargs)
        deltas = []
        for each, rows in select_adapters(self.config, self.adapters, adapter_rows):
            own = None if cos_sin is None else tuple(take_rows(part, rows) for part in cos_sin)
            inputs = take_rows(read, rows), take_rows(attention_mask, rows)
            deltas.append(Delta(rows, each(*inputs, output_indices, cos_sin=own, **kwargs)))
        context, residual, read = (take_tokens(each, output_indices) for each in (context, hidden_states, normalized))
        return self.output(context, residual, deltas, adapter_rows, read), weights


class Intermediate(nn.Module):
    """First FFN projection of the base, with its activation and its gate, if any."""

    def __init__(self, config: DomextConfig) -> None:
        super().__init__()
        width, units = config.hidden_size, config.intermediate_size
        self.dense = Linear(width, units, bias=config.ffn_bias)
        self.gate = Linear(width, units, bias=config.ffn_bias) if config.gated_ffn else None
        self.activation = ACT2FN[config.hidden_act]

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[B, N, d] -> [B, N, intermediate_size]."""
        units = self.activation(self.dense(hidden_states))
        return units if self.gate is None else units * self.gate(hidden_states)


class Gate(nn.Linear):
    """`σ(w(H))`, the base's share of a layer's output, one number a token; [..., d] -> [..., 1] in 0 to 1."""

    def __init__(self, config: DomextConfig) -> None:
        super().__init__(config.hidden_size, 1)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Weigh the base's branch."""
        return torch.sigmoid(super().forward(hidden_states))


class ExtensionModule(nn.Module):
    """A smaller transformer layer beside the base's, and the gate that mixes the two (exBERT).

    Attention projects d -> h' -> d with the base's number of heads, the FFN d -> f' -> d; both LayerNorms have size d.
    The heads' size differs from the base's, so the two branches share the mask but not a kernel call. Where norms stand
    before the sublayers, the gate reads what the module's attention reads, for the residual stream grows with depth.
    """

    def __init__(self, config: DomextConfig) -> None:
        super().__init__()
        width, num_heads = config.module_hidden_size, config.num_attention_heads
        self.heads = HeadGroup(config, num_heads, width // num_heads)
        norms = [LayerNorm(config.hidden_size, eps=config.layer_norm_eps) for _ in range(2)]
        self.attention_output = SublayerOutput(config, width, bias=True, norm=norms[0])
        self.intermediate = Linear(config.hidden_size, config.module_ffn_size)
        self.intermediate_gate = Linear(config.hidden_size, config.module_ffn_size) if config.gated_ffn else None
        self.activation = ACT2FN[config.hidden_act]
        self.output = SublayerOutput(config, config.module_ffn_size, bias=True, norm=norms[1])
        self.gate = Gate(config)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        base_output: Tensor,
        cos_sin: CosSin | None = None,
        output_indices: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Mix what the base's layer made of `hidden_states` and this branch, [B, N, d] or [P, d] each."""
        read = to_autocast_dtype(self.attention_output.normalize_input(hidden_states))
        context, _ = self.heads(read, attention_mask, cos_sin, **kwargs)
        context, residual, read = (take_tokens(each, output_indices) for each in (context, hidden_states, read))
        attended = self.attention_output(context, residual, [])
        inputs = to_autocast_dtype(self.output.normalize_input(attended))
        units = self.activation(self.intermediate(inputs))
        if self.intermediate_gate is not None:
            units = units * self.intermediate_gate(inputs)
        own_output = self.output(units, attended, [])
        return torch.lerp(own_output, base_output, self.gate(read).to(own_output.dtype))


class Layer(GradientCheckpointingLayer):
    """One encoder layer: attention, then FFN, each with the adapters' parts; then the extension module, if any.

    `index` counts from 0: an adapter may have some layers only.
    """

    def __init__(self, config: DomextConfig, index: int = 0) -> None:
        super().__init__()
        self.config = config
        self.index = index
        self.is_local = index in config.local_layers
        self.attention = Attention(config, index)
        self.intermediate = Intermediate(config)
        self.output = SublayerOutput(config, config.intermediate_size, bias=config.ffn_bias, norm=make_norm(config))
        self.adapters = nn.ModuleDict()
        self.extension = ExtensionModule(config) if config.module_hidden_size else None
        for name in config.adapters:
            self.attach_adapter(name)

    def attach_adapter(self, name: str) -> list[nn.Module]:
        """Make this layer's parts of an adapter that the configuration describes, and return them."""
        adapter = self.config.adapters[name]
        if not adapter.first_layer <= self.index <= adapter.last_layer:
            return []
        parts: list[tuple[nn.ModuleDict, nn.Module]] = []
        if adapter.heads:
            parts.append((self.attention.adapters, AdapterHeads(self.config, adapter.heads)))
        if adapter.ffn_units:
            parts.append((self.adapters, AdapterUnits(self.config, adapter.ffn_units)))
        if adapter.bottleneck_size:
            for place, sublayer in (("attention", self.attention.output), ("output", self.output)):
                if adapter.bottleneck_place in ("both", place):
                    bottleneck = Bottleneck(self.config, adapter, has_norm=sublayer.LayerNorm is not None)
                    parts.append((sublayer.adapters, bottleneck))
        for adapters, part in parts:
            adapters[name] = part
        return [part for _, part in parts]

    def detach_adapter(self, name: str) -> None:
        """Take this layer's parts of an adapter away."""
        for place in (self.attention.adapters, self.adapters, self.attention.output.adapters, self.output.adapters):
            if name in place:
                del place[name]

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        adapter_rows: dict[str, Tensor] | None = None,
        cos_sin: CosSin | None = None,
        module_cos_sin: CosSin | None = None,
        output_indices: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Return hidden states [B, N, d] and the base heads' attention weights, if any.

        With `output_indices` all that follows attention is computed for these tokens alone, [P, d].
        """
        if self.is_local:  # flash attention takes no mask, and does not count a window's last place
            kwargs["sliding_window"] = self.config.local_window + 1
        attended, weights = self.attention(
            hidden_states, attention_mask, adapter_rows, cos_sin, output_indices, **kwargs
        )
        normalized = self.output.normalize_input(attended, adapter_rows)
        read = to_autocast_dtype(normalized)
        deltas = [
            Delta(rows, each(take_rows(read, rows)))
            for each, rows in select_adapters(self.config, self.adapters, adapter_rows)
        ]
        output = self.output(self.intermediate(read), attended, deltas, adapter_rows, normalized)
        if self.extension is not None:
            output = self.extension(hidden_states, attention_mask, output, module_cos_sin, output_indices, **kwargs)
        return output, weights


@dataclass(frozen=True)
class AttentionInputs:
    """What the heads of one kind of layers, global or local, need beside hidden states; made once per forward pass.

    Args:
        mask: as the attention implementation wants it; None: nothing is hidden.
        cos_sin: of the base's heads and the adapters'; None: positions are in the embeddings.
        module_cos_sin: of the extension modules' heads, which have another size.
    """

    mask: Any
    cos_sin: CosSin | None = None
    module_cos_sin: CosSin | None = None


class Encoder(nn.Module):
    """The stack of layers, and the LayerNorm behind it where norms stand before the sublayers."""

    def __init__(self, config: DomextConfig) -> None:
        super().__init__()
        self.layer = nn.ModuleList([Layer(config, index) for index in range(config.num_hidden_layers)])
        self.LayerNorm = make_norm(config) if config.has_pre_norm else None

    def forward(
        self,
        hidden_states: Tensor,
        global_inputs: AttentionInputs,
        local_inputs: AttentionInputs,
        *,
        num_layers: int | None = None,
        output_hidden_states: bool = False,
        output_attentions: bool = False,
        output_indices: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, tuple[Tensor, ...] | None, tuple[Tensor, ...] | None]:
        """Run the layers, or the first `num_layers`; layers with local attention have inputs of their own.

        Returns:
            The last hidden states [B, N, d], or [P, d], for the last layer leaves the other tokens out; with
            `output_hidden_states` all L + 1, and with `output_attentions` the base heads' L weights.
        """
        states, weights = [hidden_states], []
        layers = self.layer[:num_layers]
        for number, layer in enumerate(layers, 1):
            inputs = local_inputs if cast(Layer, layer).is_local else global_inputs
            positions = {"cos_sin": inputs.cos_sin, "module_cos_sin": inputs.module_cos_sin}
            own = output_indices if number == len(layers) else None
            hidden_states, attended = layer(hidden_states, inputs.mask, output_indices=own, **positions, **kwargs)
            if output_hidden_states:
                states.append(hidden_states)
            if output_attentions:
                weights.append(attended)
        if self.LayerNorm is not None:
            hidden_states = states[-1] = self.LayerNorm(hidden_states)
        return (
            hidden_states,
            tuple(states) if output_hidden_states else None,
            tuple(weights) if output_attentions else None,
        )


class Pooler(nn.Module):
    """[CLS] -> dense -> tanh; [B, N, d] -> [B, d]. From left to right [CLS] sees itself alone: there the last token."""

    def __init__(self, config: DomextConfig) -> None:
        super().__init__()
        self.config = config
        self.dense = Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Pool the token that has seen the whole row; the mask [B, N] is read where that is the last."""
        if not self.config.causal:
            return torch.tanh(self.dense(hidden_states[:, 0]))
        if attention_mask is None:
            return torch.tanh(self.dense(hidden_states[:, -1]))
        last = (attention_mask.ne(0) * torch.arange(hidden_states.shape[1], device=hidden_states.device)).argmax(dim=1)
        return torch.tanh(self.dense(hidden_states[torch.arange(len(last), device=last.device), last]))
