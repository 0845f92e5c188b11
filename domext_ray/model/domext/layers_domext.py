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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .configuration_domext import AdapterConfig, DomextConfig

VARLEN = "varlen"
"""The attention implementation of `attend_sequences`, beside those of transformers: bf16 or fp16 on a GPU."""
HEAD_MULTIPLE = 8
"""What a card's fused attention wants the size of a head to be a multiple of."""
COPY = "copy_for_products"
"""Attribute of states: the same in autocast's dtype, where the kernel that made them has written both."""


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


def attend_sequences(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    cu_seq_lens: Tensor | None = None,
    max_length: int = 0,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend without a mask within sequences that stand end to end, [1, heads, T, d_k]; without them, as "sdpa" does.

    It knows no dropout. A window is counted as flash attention counts it.
    """
    if cu_seq_lens is None:
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    from torch.nn.attention import varlen  # older versions of torch have none

    reach = -1 if sliding_window is None else sliding_window - 1
    query, key, value = (states[0].transpose(0, 1) for states in (query, key, value))
    context = varlen.varlen_attn(
        query,
        key,
        value,
        cu_seq_lens,
        cu_seq_lens,
        max_length,
        max_length,
        scale=scaling,
        window_size=(reach, 0 if module.is_causal else reach),
    )
    return cast(Tensor, context)[None], None


ALL_ATTENTION_FUNCTIONS.register(VARLEN, attend_sequences)
ALL_MASK_ATTENTION_FUNCTIONS.register(VARLEN, sdpa_mask)


@dataclass(frozen=True)
class Filling:
    """Zeros that a product's weight gets for its time, [out, in]: kernels of a card are slow at odd widths.

    Args:
        dim: 0: rows, which widen the output; 1: columns, for inputs that were widened so.
        size: of a group, such as a head, behind each of which the zeros stand.
        missing: how many.
        bias: what the output has there.
    """

    dim: int
    size: int
    missing: int
    bias: float = 0.0

    def fill(self, table: Tensor, value: float = 0.0) -> Tensor:
        """Fill the groups of a weight, or of a bias [out]."""
        behind = [0] * 2 * (table.dim() - 1 - self.dim)
        groups = table.unflatten(self.dim, (-1, self.size))
        return nn.functional.pad(groups, (*behind, 0, self.missing), value=value).flatten(self.dim, self.dim + 1)


class Linear(nn.Linear):
    """Linear layer that may be stored in another dtype than it computes in (a frozen base kept in bf16)."""

    filling: Filling | None = None

    def forward(self, inputs: Tensor, weight_shifts: Sequence[tuple[nn.Module, float]] = ()) -> Tensor:
        """[..., in_features] -> [..., out_features], in the inputs' or autocast's dtype; shifts have their scales."""
        weight: Tensor = self.weight
        bias: Tensor | None = self.bias
        for shift, scale in weight_shifts:
            weight = shift(table=weight, scale=scale)
        is_stored_otherwise = any(param is not None and param.dtype != inputs.dtype for param in (weight, bias))
        if is_stored_otherwise and not torch.is_autocast_enabled(inputs.device.type):
            weight, bias = weight.to(inputs.dtype), None if bias is None else bias.to(inputs.dtype)
        if (filling := self.filling) is not None:
            weight = filling.fill(to_autocast_dtype(weight))
            bias = filling.fill(bias, filling.bias) if bias is not None and filling.dim == 0 else bias
        return nn.functional.linear(inputs, weight, bias)


@dataclass(frozen=True)
class Delta:
    """What one adapter adds to the rows [R] of a batch (None: all B): [R, N, d], or [d] where a parameter is meant."""

    rows: Tensor | None
    value: Tensor


def apply_scale(value: Tensor, scale: float) -> Tensor:
    """Multiply what an adapter adds by its scale; at 1 nothing is computed."""
    return value if scale == 1 else value * scale


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
    """Where rows without their padding, [1, T, ...] end to end, stand in [B, N].

    Args:
        token_indices: int64 [T], ascending, in the flattened [B·N]; None: all of them, padding too.
        num_rows: B.
        length: N.
    """

    token_indices: Tensor | None
    num_rows: int
    length: int

    def pad_input(self, states: Tensor) -> Tensor:
        """[1, T, width] -> [B, N, width], 0 elsewhere."""
        if self.token_indices is None:
            return states.view(self.num_rows, self.length, -1)
        flat = states.new_zeros(self.num_rows * self.length, states.shape[-1])
        return flat.index_copy(0, self.token_indices, states[0]).view(self.num_rows, self.length, -1)

    def unpad_input(self, states: Tensor) -> Tensor:
        """[B, N, ...] -> [1, T, ...]."""
        flat = states.flatten(0, 1)
        return (flat if self.token_indices is None else flat.index_select(0, self.token_indices))[None]


def select_adapters(
    config: DomextConfig, parts: Mapping[str, Any] | nn.ModuleDict, adapter_rows: dict[str, Tensor] | None
) -> list[tuple[Any, Tensor | None, float]]:
    """Return the parts of one place that take part, in the configuration's order, each with its rows and its scale.

    Rows are None where all use it, and parts whose scale is 0 take no part. `adapter_rows` are the rows of the batch by
    the adapter that they use; None: all rows use the active adapters.
    """
    rows: dict[str, Any] | None = adapter_rows
    if rows is None:
        active = config.active_adapters
        rows = dict.fromkeys(config.adapters if active is None else active)
    return [
        (parts[name], rows[name], adapter.scale)
        for name, adapter in config.adapters.items()
        if name in parts and name in rows and adapter.scale
    ]


class AdapterPlace(nn.Module):
    """A place of the model where adapters may have parts, `adapters.<name>`; each subclass makes those of its kind.

    `index` is the layer's that it is in; None: it is in none.
    """

    def __init__(self, config: DomextConfig, index: int | None = None) -> None:
        super().__init__()
        self.config = config
        self.index = index

    def make_part(self, adapter: AdapterConfig) -> nn.Module | None:
        """Make what an adapter has here; None: nothing."""
        raise NotImplementedError

    def attach_adapters(self) -> None:
        """Make the parts of all adapters, once what `make_part` reads is there."""
        self.adapters = nn.ModuleDict()
        for name in self.config.adapters:
            self.attach_adapter(name)

    def attach_adapter(self, name: str) -> nn.Module | None:
        """Make the part of an adapter that the configuration describes, and return it; None: it has none here."""
        adapter = self.config.adapters[name]
        if self.index is not None and not adapter.first_layer <= self.index <= adapter.last_layer:
            return None
        part = self.make_part(adapter)
        if part is not None:
            self.adapters[name] = part
        return part

    def detach_adapter(self, name: str) -> None:
        """Take the part of an adapter away, if there is one."""
        if name in self.adapters:
            del self.adapters[name]

    def compute_deltas(self, adapter_rows: dict[str, Tensor] | None, *inputs: Any, **kwargs: Any) -> list[Delta]:
        """Return what the parts make of their adapters' rows of the inputs."""
        return [
            Delta(rows, apply_scale(part(*(take_rows(value, rows) for value in inputs), **kwargs), scale))
            for part, rows, scale in select_adapters(self.config, self.adapters, adapter_rows)
        ]


def to_autocast_dtype(states: Tensor) -> Tensor:
    """Cast what several products read to autocast's dtype, once: each would cast it anew, and its gradient back."""
    dtype = find_autocast_dtype(states)
    copy = getattr(states, COPY, states)
    return cast(Tensor, copy if copy.dtype == dtype else states.to(dtype))


def find_autocast_dtype(states: Tensor) -> torch.dtype:
    """Return the dtype in which products that read states compute: autocast's, if it is on, or their own."""
    device = states.device.type
    is_exact = states.dtype is torch.float64  # which autocast leaves
    if is_exact or not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return states.dtype
    return torch.get_autocast_dtype(device)


class NormShift(nn.Module):
    """What an adapter adds to a LayerNorm's weight and bias, so that the base's own stay as they are."""

    def __init__(self, config: DomextConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(config.hidden_size))
        self.bias = nn.Parameter(torch.zeros(config.hidden_size))

    def forward(self, weight: Tensor, bias: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        """Shift weight and bias, [..., d] each; here, for ZeRO-3 takes the shifts away behind this pass."""
        return weight + apply_scale(self.weight, scale), bias + apply_scale(self.bias, scale)


def normalize_sum(summands: Sequence[Tensor], weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Add states [..., d] in their order, and normalise the sum in the dtype of weight and bias [d]."""
    total = sum(summands[1:], summands[0]).to(weight.dtype)
    return nn.functional.layer_norm(total, weight.shape, weight, bias, eps)


class LayerNorm(nn.LayerNorm):
    """LayerNorm that computes in its own dtype, so that the residual stream stays fp32 under autocast."""

    normalize: Callable[[Sequence[Tensor], Tensor, Tensor | None, float], Tensor] = staticmethod(normalize_sum)
    """A run on a card may put a kernel in its place, which computes the same."""

    def forward(self, *summands: Tensor, shifts: Sequence[tuple[NormShift, Tensor | None, float]] = ()) -> Tensor:
        """Normalise [B, ..., d], or a sum, in the dtype of the parameters; `shifts`: see `select_adapters`."""
        weight: Tensor = self.weight
        bias: Tensor | None = self.bias
        if not shifts:
            return self.normalize(summands, weight, bias, self.eps)
        bias = torch.zeros_like(weight) if bias is None else bias
        if all(rows is None for _, rows, _ in shifts):
            for shift, _, scale in shifts:
                weight, bias = shift(weight, bias, scale)
            return self.normalize(summands, weight, bias, self.eps)
        inputs = sum(summands[1:], summands[0]).to(weight.dtype)
        normalized = nn.functional.layer_norm(inputs, self.normalized_shape, eps=self.eps)
        shape = (len(inputs), *[1] * (inputs.dim() - 2), inputs.shape[-1])
        weights = [Delta(rows, apply_scale(shift.weight, scale)) for shift, rows, scale in shifts]
        biases = [Delta(rows, apply_scale(shift.bias, scale)) for shift, rows, scale in shifts]
        return normalized * add_deltas(weight.expand(shape), weights) + add_deltas(bias.expand(shape), biases)


def make_norm(config: DomextConfig) -> LayerNorm:
    """Make one of the base's LayerNorms."""
    return LayerNorm(config.hidden_size, eps=config.layer_norm_eps, bias=config.norm_bias)


def compute_cos_sin(position_ids: Tensor, size: int, theta: float) -> Tensor:
    """Return cosines, then sines, fp32 [1 or B, 2, N, size // 2], of positions int64 [1 or B, N], for heads of a size.

    The last dimension of an odd size is not rotated.

    Source: Su et al., "RoFormer", arXiv:2104.09864 (2021), with pairs half a head apart, as transformers has them.
    """
    rates = 1.0 / theta ** (torch.arange(0, size - size % 2, 2, device=position_ids.device, dtype=torch.float32) / size)
    angles = position_ids[:, None, :, None].float() * rates
    return torch.cat([angles.cos(), angles.sin()], dim=1)


def apply_rotary_pos_emb(query: Tensor, key: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys [B, heads, N, size] by their positions, in fp32; `cos_sin` as from `compute_cos_sin`."""
    return _rotate(query, cos_sin), _rotate(key, cos_sin)


def _rotate(states: Tensor, cos_sin: Tensor) -> Tensor:
    cos, sin = cos_sin.chunk(2, dim=1)
    half = cos.shape[-1]
    first, second, rest = states.float().split([half, half, states.shape[-1] - 2 * half], dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1).to(states.dtype)


class HeadGroup(nn.Module):
    """Some attention heads, up to the output projection: the base's (`attention.self`), an adapter's, or a module's."""

    def __init__(self, config: DomextConfig, num_heads: int, head_size: int = 0, *, bias: bool = True) -> None:
        super().__init__()
        self.config = config
        self.num_heads = num_heads
        self.head_size = head_size or config.head_size
        self.query = Linear(config.hidden_size, num_heads * self.head_size, bias=bias)
        self.key = Linear(config.hidden_size, num_heads * self.head_size, bias=bias)
        self.value = Linear(config.hidden_size, num_heads * self.head_size, bias=bias)
        # A run on a card may put a kernel in its place, which computes the same.
        self.rotate: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] = apply_rotary_pos_emb

    @property
    def is_causal(self) -> bool:
        """What a fused attention implementation asks when it gets no mask."""
        return self.config.causal

    def forward(
        self, hidden_states: Tensor, *inputs: Any, projected: Sequence[Tensor] | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Project hidden states [B, N, d], unless that is done, and attend; see `attend`."""
        if projected is None:
            projected = [project(hidden_states) for project in (self.query, self.key, self.value)]
        return self.attend(projected, self.num_heads, *inputs, **kwargs)

    def attend(
        self,
        projected: Sequence[Tensor],
        num_heads: int,
        attention_mask: Tensor | None,
        cos_sin: Tensor | None = None,
        padding: Padding | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the context [B, N, heads · d_k], and attention weights where the implementation has them.

        Args:
            projected: queries, keys and values [B, N, heads · d_k].
            num_heads: how many there are of this group, or of several whose heads have one size.
            attention_mask: what the implementation takes.
            cos_sin: of heads of this size.
            padding: with it projections and context are [1, T, ...].
            **kwargs: for the implementation.

        The context of heads whose weights have a `Filling` is as wide as these make it.
        """
        padded = (states if padding is None else padding.pad_input(states) for states in projected)
        query, key, value = (states.unflatten(-1, (num_heads, -1)).transpose(1, 2) for states in padded)
        width = query.shape[-1]
        if cos_sin is not None:
            query, key = self.rotate(query, key, cos_sin)
        # Where heads are no multiple of 16 bytes, fused kernels refuse them, or their masks; zeros change no score.
        if missing := -width % HEAD_MULTIPLE if query.is_cuda or "cu_seq_lens" in kwargs else 0:
            query, key, value = (nn.functional.pad(states, (0, missing)) for states in (query, key, value))
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
        context = context[..., :width].flatten(2)
        return context if padding is None else padding.unpad_input(context), weights


class DeltaProjection(Linear):
    """Output projection of an adapter's delta: a class of its own, for it alone decides whether step 0 is the base."""


class AdapterHeads(HeadGroup):
    """Extra heads of one adapter, with rows W'_O and a bias b'_O of their own; their delta is [B, N, d], or [P, d]."""

    def __init__(self, config: DomextConfig, num_heads: int) -> None:
        super().__init__(config, num_heads)
        self.output = DeltaProjection(num_heads * self.head_size, config.hidden_size)

    def forward(  # type: ignore[override]
        self, *inputs: Any, output_indices: Tensor | None = None, **kwargs: Any
    ) -> Tensor:
        """Return this adapter's delta of the attention output; arguments are as in `HeadGroup`."""
        return self.output(take_tokens(super().forward(*inputs, **kwargs)[0], output_indices))


def apply_gates(outputs: Tensor, activation: nn.Module) -> Tensor:
    """Return the activations of gated units [..., f], of what they and then their gates are before them, [..., 2f]."""
    units, gates = outputs.chunk(2, dim=-1)
    return cast(Tensor, activation(units) * gates)


def compute_units(inputs: Tensor, dense: nn.Module, gate: nn.Module | None, activation: nn.Module) -> Tensor:
    """Return the activations of FFN units, gated where the layout has gates."""
    units = activation(dense(inputs))
    return units if gate is None else units * gate(inputs)


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
        return self.output(compute_units(hidden_states, self.input, self.gate, self.activation))


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


class SublayerOutput(AdapterPlace):
    """Output projection of a sublayer and its LayerNorm: `LayerNorm(A(dropout(projection + deltas)) + residual)`.

    Where norms stand before the sublayers, `normalize_input` makes what the sublayer reads, and the sum is the output;
    the first layer's attention then has none. `place` is the sublayer's, "attention" or "output", in the layer `index`;
    adapters may have bottlenecks there, but for modules, which have no place.
    """

    def __init__(
        self,
        config: DomextConfig,
        num_inputs: int,
        *,
        bias: bool,
        norm: LayerNorm | None,
        index: int = 0,
        place: str = "",
    ) -> None:
        super().__init__(config, index)
        self.place = place
        self.dense = Linear(num_inputs, config.hidden_size, bias=bias)
        self.LayerNorm = norm
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.attach_adapters()

    def make_part(self, adapter: AdapterConfig) -> nn.Module | None:
        """Make an adapter's bottleneck."""
        if not adapter.bottleneck_size or not self.place or adapter.bottleneck_place not in ("both", self.place):
            return None
        return Bottleneck(self.config, adapter, has_norm=self.LayerNorm is not None)

    def forward(
        self,
        hidden_states: Tensor,
        residual: Tensor,
        sublayer_input: Tensor,
        deltas: Sequence[Delta] = (),
        adapter_rows: dict[str, Tensor] | None = None,
    ) -> Tensor:
        """Add to the projection of [B, N, num_inputs] the deltas of heads or units, bottlenecks, and the residual."""
        return self.finish(add_deltas(self.dense(hidden_states), deltas), residual, sublayer_input, adapter_rows)

    def finish(
        self,
        projected: Tensor,
        residual: Tensor,
        sublayer_input: Tensor,
        adapter_rows: dict[str, Tensor] | None = None,
    ) -> Tensor:
        """Do what follows the projection [B, N, d] and the deltas of heads or units."""
        output = self.dropout(projected)
        deltas = self.compute_deltas(adapter_rows, sublayer_input, output)
        if self.config.has_pre_norm:
            return add_deltas(output, deltas) + residual
        if any(delta.rows is not None for delta in deltas):
            return self._normalize(adapter_rows, add_deltas(output, deltas), residual)
        return self._normalize(adapter_rows, output, *(delta.value for delta in deltas), residual)

    def normalize_input(self, hidden_states: Tensor, adapter_rows: dict[str, Tensor] | None = None) -> Tensor:
        """Return what the sublayer reads of the residual stream, [B, N, d]."""
        return self._normalize(adapter_rows, hidden_states) if self.config.has_pre_norm else hidden_states

    def _normalize(self, adapter_rows: dict[str, Tensor] | None, *summands: Tensor) -> Tensor:
        if self.LayerNorm is None:  # and then there is one summand, the residual stream
            return summands[0]
        bottlenecks = select_adapters(self.config, self.adapters, adapter_rows)
        shifts = [(part.norm, rows, scale) for part, rows, scale in bottlenecks if part.norm is not None]
        return self.LayerNorm(*summands, shifts=shifts)


class Attention(AdapterPlace):
    """Attention sublayer of the layer `index`: the base's heads and those of the adapters."""

    def __init__(self, config: DomextConfig, index: int = 0) -> None:
        super().__init__(config, index)
        self.self = HeadGroup(config, config.num_attention_heads, bias=config.attention_bias)
        norm = None if config.has_pre_norm and index == 0 else make_norm(config)
        self.output = SublayerOutput(
            config, config.hidden_size, bias=config.attention_bias, norm=norm, index=index, place="attention"
        )
        self.attach_adapters()

    def make_part(self, adapter: AdapterConfig) -> nn.Module | None:
        """Make an adapter's heads."""
        return AdapterHeads(self.config, adapter.heads) if adapter.heads else None

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        adapter_rows: dict[str, Tensor] | None = None,
        cos_sin: Tensor | None = None,
        output_indices: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the sublayer's output [B, N, d], or [P, d], and the base heads' attention weights, if any."""
        normalized = self.output.normalize_input(hidden_states, adapter_rows)
        inputs = to_autocast_dtype(normalized), attention_mask, cos_sin
        context, weights = self.self(*inputs, **kwargs)
        deltas = self.compute_deltas(adapter_rows, *inputs, output_indices=output_indices, **kwargs)
        context, residual, read = (take_tokens(state, output_indices) for state in (context, hidden_states, normalized))
        return self.output(context, residual, read, deltas, adapter_rows), weights


class Intermediate(nn.Module):
    """First FFN projection of the base, with its activation and its gate, if any."""

    def __init__(self, config: DomextConfig) -> None:
        super().__init__()
        width, units = config.hidden_size, config.intermediate_size
        self.dense = Linear(width, units, bias=config.ffn_bias)
        self.gate = Linear(width, units, bias=config.ffn_bias) if config.gated_ffn else None
        self.activation = ACT2FN[config.hidden_act]
        # A run on a card may put a kernel in its place, which computes the same.
        self.apply_gates: Callable[[Tensor, nn.Module], Tensor] = apply_gates

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[B, N, d] -> [B, N, intermediate_size]."""
        return compute_units(hidden_states, self.dense, self.gate, self.activation)


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

    def fill_products(self) -> None:
        """Widen the heads in the products around attention, where a card wants that: zeros change no score."""
        size = self.heads.head_size
        if missing := -size % HEAD_MULTIPLE:
            for linear in (self.heads.query, self.heads.key, self.heads.value):
                linear.filling = Filling(0, size, missing)
            self.attention_output.dense.filling = Filling(1, size, missing)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        base_output: Tensor,
        cos_sin: Tensor | None = None,
        output_indices: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Mix what the base's layer made of `hidden_states` and this branch, [B, N, d] or [P, d] each.

        Keyword arguments are those of the heads.
        """
        read = to_autocast_dtype(self.attention_output.normalize_input(hidden_states))
        context, _ = self.heads(read, attention_mask, cos_sin, **kwargs)
        context, residual, read = (take_tokens(state, output_indices) for state in (context, hidden_states, read))
        attended = self.attention_output(context, residual, read)
        inputs = to_autocast_dtype(self.output.normalize_input(attended))
        units = compute_units(inputs, self.intermediate, self.intermediate_gate, self.activation)
        own_output = self.output(units, attended, inputs)
        return torch.lerp(own_output, base_output, self.gate(read).to(own_output.dtype))


class Layer(AdapterPlace, GradientCheckpointingLayer):
    """One encoder layer: attention, then FFN, each with the adapters' parts; then the extension module, if any.

    `index` counts from 0: an adapter may have some layers only.
    """

    def __init__(self, config: DomextConfig, index: int = 0) -> None:
        super().__init__(config, index)
        self.is_local = index in config.local_layers
        self.attention = Attention(config, index)
        self.intermediate = Intermediate(config)
        self.output = SublayerOutput(
            config, config.intermediate_size, bias=config.ffn_bias, norm=make_norm(config), index=index, place="output"
        )
        self.attach_adapters()
        self.extension = ExtensionModule(config) if config.module_hidden_size else None

    def make_part(self, adapter: AdapterConfig) -> nn.Module | None:
        """Make an adapter's FFN units."""
        return AdapterUnits(self.config, adapter.ffn_units) if adapter.ffn_units else None

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        adapter_rows: dict[str, Tensor] | None = None,
        cos_sin: Tensor | None = None,
        module_cos_sin: Tensor | None = None,
        output_indices: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Return hidden states [B, N, d] and the base heads' attention weights, if any.

        `cos_sin` is of the heads of base and adapters, `module_cos_sin` of the module's, which have another size; None:
        positions are in the embeddings. With `output_indices` all that follows attention is computed for these tokens
        alone, [P, d].
        """
        if self.is_local:  # flash attention takes no mask, and does not count a window's last place
            kwargs["sliding_window"] = self.config.local_window + 1
        attended, weights = self.attention(
            hidden_states, attention_mask, adapter_rows, cos_sin, output_indices, **kwargs
        )
        normalized = self.output.normalize_input(attended, adapter_rows)
        read = to_autocast_dtype(normalized)
        deltas = self.compute_deltas(adapter_rows, read)
        output = self.output(self.intermediate(read), attended, normalized, deltas, adapter_rows)
        if self.extension is not None:
            output = self.extension(hidden_states, attention_mask, output, module_cos_sin, output_indices, **kwargs)
        return output, weights


class Encoder(nn.Module):
    """The stack of layers, and the LayerNorm behind it where norms stand before the sublayers."""

    def __init__(self, config: DomextConfig) -> None:
        super().__init__()
        self.layer = nn.ModuleList([Layer(config, index) for index in range(config.num_hidden_layers)])
        self.LayerNorm = make_norm(config) if config.has_pre_norm else None

    def forward(
        self,
        hidden_states: Tensor,
        global_inputs: dict[str, Any],
        local_inputs: dict[str, Any],
        *,
        num_layers: int | None = None,
        first_layer: int = 0,
        end_layer: int | None = None,
        output_hidden_states: bool = False,
        output_attentions: bool = False,
        output_indices: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, tuple[Tensor, ...] | None, tuple[Tensor, ...] | None]:
        """Run the layers, or the first `num_layers`; mask and positions are those of layers with such attention.

        The layers are those from `first_layer`, which reads `hidden_states`, to the one before `end_layer`.

        Returns:
            The last hidden states [B, N, d], or [P, d], for the last layer leaves the other tokens out; with
            `end_layer` what that layer reads. With `output_hidden_states` all L + 1, and with `output_attentions` the
            base heads' L weights.
        """
        states, weights = [hidden_states], []
        layers = self.layer[first_layer:end_layer][:num_layers]
        for number, layer in enumerate(layers, 1):
            inputs = local_inputs if cast(Layer, layer).is_local else global_inputs
            own = output_indices if number == len(layers) else None
            hidden_states, attended = layer(hidden_states, output_indices=own, **inputs, **kwargs)
            if output_hidden_states:
                states.append(hidden_states)
            if output_attentions:
                weights.append(attended)
        if self.LayerNorm is not None and end_layer is None:
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
