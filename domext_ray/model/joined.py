"""A frozen base's matrices and those of what trains beside it, joined: fewer and wider products in a layer.

As written (`model/domext/layers_domext.py`), a layer of AF Adapter makes six products for queries, keys and values,
and calls attention twice. Joined, it makes one product with the rows of all six, and one call. Autograd would compute
the gradient of the base's rows, only to throw it away; a joined product computes that of the rows that train. These
stay what and where they are, fp32 parameters under their names: the joined matrix has copies of them in the dtype in
which a step computes, and `refresh` renews these behind every update. A frozen matrix whose rows are joined becomes a
view of them.

Enters: a model that is to train, on its device. Leaves: the same model, whose layers compute so in training mode where
all rows use all active adapters at scale 1. Elsewhere, and in evaluation, they compute as they are written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from domext_ray.model.domext.layers_domext import (
    AdapterHeads,
    AdapterUnits,
    ExtensionModule,
    Layer,
    Linear,
    select_adapters,
    take_tokens,
    to_autocast_dtype,
)

PROJECTIONS = ("query", "key", "value")


@dataclass(frozen=True)
class JoinedPart:
    """A layer's matrix in a joined one, where it has `size` rows (or columns) from `start` on."""

    linear: nn.Linear
    start: int
    size: int

    def find(self, table: Tensor, dim: int = 0) -> Tensor:
        """Return its own in a table that is as the joined matrix is along `dim`; zeros that widen it are left out."""
        own = table.narrow(dim, self.start, self.size)
        if (filling := getattr(self.linear, "filling", None)) is None:
            return own
        return own.unflatten(0, (-1, filling.size + filling.missing))[:, : filling.size]


class JoinedLinear(nn.Module):
    """Several linear layers of one input as one, whose outputs stand side by side; [..., in] -> [..., out].

    It has no parameters of its own. Where `by_columns`, each layer has an input of its own, these stand side by side,
    and the outputs are summed. `num_copied_bytes` is what it takes beside the layers' own parameters.
    """

    weight: Tensor
    bias: Any  # or None

    def __init__(self, linears: Sequence[nn.Linear], dtype: torch.dtype, *, by_columns: bool = False) -> None:
        super().__init__()
        self.dim = int(by_columns)
        self.parts, shape = list[JoinedPart](), [*linears[0].weight.shape]
        shape[self.dim] = 0
        for linear in linears:
            size, filling = linear.weight.shape[self.dim], getattr(linear, "filling", None)
            if filling is not None:
                size += size // filling.size * filling.missing
            self.parts.append(JoinedPart(linear, shape[self.dim], size))
            shape[self.dim] += size
        has_bias = any(linear.bias is not None for linear in linears)
        options: dict[str, Any] = {"dtype": dtype, "device": linears[0].weight.device}
        self.register_buffer("weight", torch.zeros(shape, **options), persistent=False)
        self.register_buffer("bias", torch.zeros(shape[0], **options) if has_bias else None, persistent=False)
        copy_all(self.list_copies(of_frozen=True))
        shared = 0 if by_columns else sum(map(self._share_memory, self.parts))
        self.num_copied_bytes = sum(buffer.nbytes for buffer in self.buffers()) - shared

    def _share_memory(self, part: JoinedPart) -> int:
        """Let what is frozen of a part, and stored as the joined matrix is, be a view of it; return its bytes."""
        shared = 0
        for param, joined in ((part.linear.weight, self.weight), (part.linear.bias, self.bias)):
            if param is not None and not param.requires_grad and param.dtype == joined.dtype:
                own = part.find(joined)
                if own.shape == param.shape:
                    param.data, shared = own, shared + own.nbytes
        return shared

    def list_copies(self, *, of_frozen: bool = False) -> list[tuple[Tensor, Tensor]]:
        """Return where in the joined matrix something stands that trains, or all, each with what belongs there."""
        copies = []
        for part in self.parts:
            weight, bias = part.linear.weight, part.linear.bias
            if weight.requires_grad or of_frozen:
                copies.append((part.find(self.weight, self.dim), weight))
            if not self.dim and bias is not None and (bias.requires_grad or of_frozen):
                copies.append((part.find(self.bias), bias))
        biases = [part.linear.bias for part in self.parts if part.linear.bias is not None]
        if self.dim and biases and (of_frozen or any(param.requires_grad for param in biases)):
            copies.append((self.bias, torch.stack([param.float() for param in biases]).sum(0)))
        return [(place, source.detach().view_as(place)) for place, source in copies]

    def forward(self, inputs: Tensor) -> Tensor:
        """Compute the product."""
        inputs = inputs.to(self.weight.dtype)
        params = [*(part.linear.weight for part in self.trained), *(part.linear.bias for part in self.biased)]
        if not params:
            return nn.functional.linear(inputs, self.weight, self.bias)
        return cast(Tensor, _Product.apply(inputs, self.weight, self.bias, self, *params))

    @property
    def trained(self) -> list[JoinedPart]:
        """The parts whose weights train."""
        return [part for part in self.parts if part.linear.weight.requires_grad]

    @property
    def biased(self) -> list[JoinedPart]:
        """The parts whose biases train."""
        return [part for part in self.parts if part.linear.bias is not None and part.linear.bias.requires_grad]

    def compute_gradients(self, grad: Tensor, inputs: Tensor) -> list[Tensor]:
        """Return the gradients of the weights that train, then of the biases, given [T, out] and [T, in]."""
        found, trained, biased = list[Tensor](), self.trained, self.biased
        thin, packed = _pack(trained, inputs if self.dim else grad)
        if trained:
            table = grad.t().mm(thin) if self.dim else thin.t().mm(inputs)
            found += [part.find(table, self.dim) for part in packed]
        if biased and self.dim:
            found += [grad.sum(0)] * len(biased)
        elif biased:
            if biased != trained:
                thin, packed = _pack(biased, grad)
            sums = thin.sum(0)
            found += [part.find(sums) for part in packed]
        # Copies, for an optimiser may keep them: each a tensor of its own.
        params = [*(part.linear.weight for part in trained), *(part.linear.bias for part in biased)]
        copies = [grad.new_empty(param.shape, dtype=torch.float32) for param in params]
        copy_all([(copy.view_as(own), own) for copy, own in zip(copies, found, strict=True)])
        return copies


def _pack(parts: Sequence[JoinedPart], table: Tensor) -> tuple[Tensor, list[JoinedPart]]:
    """Return the columns of a table [T, width] that belong to parts, side by side, and where each stands then."""
    if not parts:
        return table, []
    packed, start = list[JoinedPart](), 0
    for part in parts:
        packed.append(JoinedPart(part.linear, start, part.size))
        start += part.size
    first, last = parts[0], parts[-1]
    if last.start + last.size - first.start == start:
        return table.narrow(1, first.start, start), packed
    return torch.cat([table.narrow(1, part.start, part.size) for part in parts], dim=1), packed


class _Product(torch.autograd.Function):
    """`x W^T + b`; the parameters that follow get the gradients."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None, joined: JoinedLinear, *_: Any) -> Tensor:
        ctx.joined = joined
        ctx.save_for_backward(inputs, weight)
        return nn.functional.linear(inputs, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), (inputs, weight) = grads, ctx.saved_tensors
        grad_inputs = grad.matmul(weight) if ctx.needs_input_grad[0] else None
        found = ctx.joined.compute_gradients(grad.flatten(0, -2), inputs.flatten(0, -2))
        return grad_inputs, None, None, None, *found


class JoinedLayer(Layer):
    """A layer some of whose products are joined; `join` makes it of a layer."""

    # Of the adapters that were active at the join; where others are, the layer computes as it is written.
    heads: list[AdapterHeads]
    units: list[AdapterUnits]
    trains: bool  # something of the layer does
    # Queries of the base and of each adapter, their keys, their values; then what LoRA makes of the inputs of these;
    # then queries, keys and values of the extension module, if it reads what they read.
    projections: JoinedLinear
    context_output: JoinedLinear | None  # of all heads; None: there are the base's alone
    # Units of the base and of each adapter, then their gates; None: there are the base's alone, ungated.
    units_input: JoinedLinear | None
    units_output: JoinedLinear | None  # of all units; None: there are the base's alone

    def join(self, dtype: torch.dtype) -> None:
        """Make the joined matrices, which compute in a dtype."""
        attention, ffn = self.attention, self.intermediate
        self.heads, self.units = self._list_active()
        self.trains = any(param.requires_grad for param in self.parameters())
        bases = [getattr(attention.self, name) for name in PROJECTIONS]
        linears: list[nn.Linear] = []
        for base, name in zip(bases, PROJECTIONS, strict=True):
            linears += [base.base_layer if has_lora(base) else base, *(getattr(part, name) for part in self.heads)]
        linears += [base.lora_A["default"] for base in bases if has_lora(base)]
        if self._has_joined_module:
            linears += [getattr(cast(ExtensionModule, self.extension).heads, name) for name in PROJECTIONS]
        self.projections = JoinedLinear(linears, dtype)
        self.context_output = self.units_input = self.units_output = None
        if self.heads:
            outputs = [attention.output.dense, *(part.output for part in self.heads)]
            self.context_output = JoinedLinear(outputs, dtype, by_columns=True)
        if self.units or (ffn.gate is not None and not has_lora(ffn.dense)):
            gates = [] if ffn.gate is None else [ffn.gate, *(cast(Linear, part.gate) for part in self.units)]
            self.units_input = JoinedLinear([ffn.dense, *(part.input for part in self.units), *gates], dtype)
        if self.units:
            outputs = [self.output.dense, *(part.output for part in self.units)]
            self.units_output = JoinedLinear(outputs, dtype, by_columns=True)

    @property
    def _has_joined_module(self) -> bool:
        """Whether the extension module projects what the base's heads do."""
        return self.extension is not None and not self.config.has_pre_norm

    def _list_active(self) -> tuple[list[AdapterHeads], list[AdapterUnits]]:
        """The heads and units of the active adapters whose scale is 1."""
        places = (self.attention.adapters, self.adapters)
        heads, units = (
            [part for part, _, scale in select_adapters(self.config, place, None) if scale == 1] for place in places
        )
        return heads, units

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
        """Compute what a layer does, with joined products where all rows use what is joined.

        The first layer in which something trains is computed as it is written, if nothing below it does: what its
        frozen part computes has no gradient there, which joined products would compute.
        """
        positions = cos_sin, module_cos_sin, output_indices
        is_first = self.trains and not hidden_states.requires_grad
        is_meant = self.training and adapter_rows is None and not is_first
        if not (is_meant and self._list_active() == (self.heads, self.units)):
            return super().forward(hidden_states, attention_mask, adapter_rows, *positions, **kwargs)
        if self.is_local:
            kwargs["sliding_window"] = self.config.local_window + 1
        attention = self.attention
        normalized = attention.output.normalize_input(hidden_states)
        outputs = self.projections(to_autocast_dtype(normalized))
        context, weights, rest = self._attend(outputs, attention_mask, cos_sin, **kwargs)
        context, residual, read = (take_tokens(state, output_indices) for state in (context, hidden_states, normalized))
        attended = attention.output.finish((self.context_output or attention.output.dense)(context), residual, read)
        normalized = self.output.normalize_input(attended)
        units = self._compute_units(to_autocast_dtype(normalized))
        output = self.output.finish((self.units_output or self.output.dense)(units), attended, normalized)
        if self.extension is not None:
            if self._has_joined_module:
                kwargs["projected"] = rest
            output = self.extension(hidden_states, attention_mask, output, module_cos_sin, output_indices, **kwargs)
        return output, weights

    def _attend(
        self, outputs: Tensor, attention_mask: Tensor | None, cos_sin: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None, list[Tensor]]:
        """Attend with all heads; return their contexts side by side, the base's weights, and the module's projections.

        `outputs` are those of `projections`. Where attention has dropout, the base's heads and each adapter's are
        attended in turn, as they draw it where nothing is joined.
        """
        base, groups = self.attention.self, [self.attention.self, *self.heads]
        sizes = [part.size for part in self.projections.parts]
        own, behind = sizes[: 3 * len(groups)], sizes[3 * len(groups) :]
        is_apart = len(groups) > 1 and self.config.attention_probs_dropout_prob > 0
        if not is_apart:
            own = [sum(own) // 3] * 3
        states = list(outputs.split([*own, *behind], dim=-1))
        projected, rest = states[: len(own)], states[len(own) :]
        for i, update in enumerate(getattr(base, name) for name in PROJECTIONS):
            if has_lora(update):  # and then there are no other groups
                projected[i] = projected[i] + update.lora_B["default"](rest.pop(0)) * update.scaling["default"]
        if not is_apart:
            num_heads = sum(group.num_heads for group in groups)
            context, weights = base.attend(projected, num_heads, attention_mask, cos_sin, **kwargs)
            return context, None if weights is None else weights[:, : base.num_heads], rest
        triples = (projected[i :: len(groups)] for i in range(len(groups)))
        attended = [
            group.attend(states, group.num_heads, attention_mask, cos_sin, **kwargs)
            for group, states in zip(groups, triples, strict=True)
        ]
        return torch.cat([context for context, _ in attended], dim=-1), attended[0][1], rest

    def _compute_units(self, inputs: Tensor) -> Tensor:
        """Return the activations of all units, [B, N, units]."""
        ffn = self.intermediate
        if self.units_input is None:
            return cast(Tensor, ffn(inputs))
        outputs = self.units_input(inputs)
        if ffn.gate is None:
            return cast(Tensor, ffn.activation(outputs))
        return ffn.apply_gates(outputs, ffn.activation)


def has_lora(linear: nn.Module) -> bool:
    """Whether peft has wrapped a matrix."""
    return hasattr(linear, "base_layer")


def join_products(model: nn.Module, dtype: torch.dtype) -> None:
    """Have a model's layers compute joined products, in a dtype, where they train.

    The model is on its device; what trains is known, and frozen parameters are stored as they will be. A layer where
    LoRA updates a matrix that would be joined with an adapter's stays as it is.
    """
    for layer in [module for module in model.modules() if isinstance(module, Layer)]:
        wrapped = any(has_lora(module) for module in layer.modules())
        if not (wrapped and (layer.attention.adapters or layer.adapters)):
            layer.__class__ = JoinedLayer
            cast(JoinedLayer, layer).join(dtype)


def list_joined(model: nn.Module) -> list[JoinedLinear]:
    """Return the joined matrices in which something trains."""
    found = (module for module in model.modules() if isinstance(module, JoinedLinear))
    return [linear for linear in found if linear.trained or linear.biased]


def refresh(joined: Sequence[JoinedLinear]) -> None:
    """Copy what trains into joined matrices again, for it has changed."""
    copy_all([copy for linear in joined for copy in linear.list_copies()])


def copy_all(copies: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy tensors into others, in their dtypes."""
    if copies:
        places, sources = zip(*copies, strict=True)
        torch._foreach_copy_(list(places), list(sources))
