"""Kernels of our own for what a model computes element by element, and the choice whether a run has them.

Enters: a model as it is written, and the device that it trains on. Leaves: the same model, some of whose modules call
an operation of torch's library instead of the formulas in `model/domext`. On a card each is one Triton kernel
(`kernels.py`); elsewhere it is the formula, so that tensors without values, counts of operations and torch.compile see
one operation of known shapes.
"""

from __future__ import annotations

import functools
import os
import shutil
import sysconfig
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from domext_ray.model.domext.configuration_domext import DomextConfig
from domext_ray.model.domext.layers_domext import (
    COPY,
    HeadGroup,
    Intermediate,
    Layer,
    SublayerOutput,
    apply_gates,
    apply_rotary_pos_emb,
    find_autocast_dtype,
)
from domext_ray.model.domext.words_domext import PredictionHead, compute_losses

OLDEST_CAPABILITY = (8, 0)
"""The compute capability from which on a card runs the kernels."""


def rotate(query: Tensor, key: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `apply_rotary_pos_emb` in one operation; a function, for modules that have it are copied and pickled."""
    return _rotate(query, key, cos_sin, False)


@torch.library.custom_op("domext_ray::rotate", mutates_args=())
def _rotate(query: Tensor, key: Tensor, cos_sin: Tensor, is_inverse: bool) -> tuple[Tensor, Tensor]:
    """Rotate, or rotate back; results are in memory [B, N, heads, size], as projections write and read it."""
    if is_inverse:
        cos, sin = cos_sin.chunk(2, dim=1)
        cos_sin = torch.cat([cos, -sin], dim=1)
    rotated = _make_rotated(query, key)
    for target, values in zip(rotated, apply_rotary_pos_emb(query, key, cos_sin), strict=True):
        target.copy_(values)
    return rotated


@_rotate.register_fake
def _make_rotated(query: Tensor, key: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    new_query, new_key = (states.new_empty(states.transpose(1, 2).shape).transpose(1, 2) for states in (query, key))
    return new_query, new_key


@_rotate.register_kernel("cuda")
def _rotate_on_card(query: Tensor, key: Tensor, cos_sin: Tensor, is_inverse: bool) -> tuple[Tensor, Tensor]:
    from domext_ray.model.kernels import rotate_into

    rotated = _make_rotated(query, key)
    with torch.cuda.device_of(query):
        rotate_into(query, key, cos_sin, rotated, is_inverse=is_inverse)
    return rotated


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, _, cos_sin, ctx.is_inverse = inputs
    ctx.save_for_backward(cos_sin)


def _rotate_back(ctx: Any, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor, None, None]:
    """A rotation's transpose is its inverse, so gradients are rotated back; positions have none."""
    return *_rotate(query, key, *ctx.saved_tensors, not ctx.is_inverse), None, None


_rotate.register_autograd(_rotate_back, setup_context=_keep_for_backward)


# --- a sum and its LayerNorm ---


def normalize_sum(
    summands: Sequence[Tensor],
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    *,
    is_stream: bool = True,
    is_multiplied: bool = True,
) -> Tensor:
    """Compute `layers_domext.normalize_sum` in one operation, and its gradients in another.

    Summands are [..., d], of one shape. Where `is_stream`, the result is a state of the residual stream in the weight's
    dtype, and its attribute `COPY` is what products read; else it is only that. Where products read the result
    (`is_multiplied`), they get it from here in autocast's dtype, and nobody casts it.
    """
    dtype = find_autocast_dtype(weight)
    copy_dtype = dtype if is_multiplied and dtype != weight.dtype else None
    is_wide = is_stream or copy_dtype is None
    trains = torch.is_grad_enabled() and any(
        tensor is not None and tensor.requires_grad for tensor in (*summands, weight, bias)
    )
    keeps_total = trains and len(summands) > 1
    states, copy, _ = _normalize_sum([*summands], weight, bias, eps, copy_dtype, is_wide, keeps_total)
    if not is_wide:
        return copy
    if copy_dtype is not None:
        setattr(states, COPY, copy)
    return states


@torch.library.custom_op("domext_ray::normalize_sum", mutates_args=())
def _normalize_sum(
    summands: Sequence[Tensor],
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    copy_dtype: torch.dtype | None,
    is_wide: bool,
    keeps_total: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the result in the weight's dtype, in another one, and the sum; what is not asked for is empty."""
    made = _make_normalized(summands, weight, bias, eps, copy_dtype, is_wide, keeps_total)
    total = sum(summands[1:], summands[0]).to(weight.dtype)
    values = nn.functional.layer_norm(total, weight.shape, weight, bias, eps)
    for target, value in zip(made, (values, values, total), strict=True):
        if target.shape == value.shape:
            target.copy_(value)
    return made


@_normalize_sum.register_fake
def _make_normalized(
    summands: Sequence[Tensor],
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    copy_dtype: torch.dtype | None,
    is_wide: bool,
    keeps_total: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    asked = ((is_wide, weight.dtype), (copy_dtype is not None, copy_dtype), (keeps_total, weight.dtype))
    return _make_asked(summands[0], *asked)


def _make_asked(states: Tensor, *asked: tuple[bool, torch.dtype | None]) -> Any:
    """Make tensors of a shape, each in a dtype; what is not asked for is empty."""
    return tuple(states.new_empty(states.shape if is_asked else (0,), dtype=dtype) for is_asked, dtype in asked)


@_normalize_sum.register_kernel("cuda")
def _normalize_sum_on_card(
    summands: Sequence[Tensor], weight: Tensor, bias: Tensor | None, eps: float, *asked: Any
) -> tuple[Tensor, Tensor, Tensor]:
    from domext_ray.model.kernels import normalize_into

    made = _make_normalized(summands, weight, bias, eps, *asked)
    with torch.cuda.device_of(weight):
        normalize_into(summands, weight, bias, eps, made)
    return made


@torch.library.custom_op("domext_ray::normalize_sum_backward", mutates_args=())
def _differentiate_norm(
    grad: Tensor | None,
    copy_grad: Tensor | None,
    total: Tensor,
    weight: Tensor,
    eps: float,
    narrow_dtype: torch.dtype | None,
    is_wide: bool,
    trains: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the sum's gradient in the weight's dtype and in another one, and those of weight and bias."""
    made = _make_gradients(grad, copy_grad, total, weight, eps, narrow_dtype, is_wide, trains)
    first, *second = [tensor.to(weight.dtype) for tensor in (grad, copy_grad) if tensor is not None]
    given = sum(second, first)
    total = total.to(weight.dtype)
    _, *statistics = torch.native_layer_norm(total, weight.shape, weight, None, eps)
    mask = [True, trains, trains]
    values = torch.ops.aten.native_layer_norm_backward(
        given, total, weight.shape, *statistics, weight, torch.zeros_like(weight), mask
    )
    for target, value in zip(made, (values[0], *values), strict=True):
        if value is not None and target.shape == value.shape:
            target.copy_(value)
    return made


@_differentiate_norm.register_fake
def _make_gradients(
    grad: Tensor | None,
    copy_grad: Tensor | None,
    total: Tensor,
    weight: Tensor,
    eps: float,
    narrow_dtype: torch.dtype | None,
    is_wide: bool,
    trains: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    sums = _make_asked(weight, (trains, weight.dtype), (trains, weight.dtype))
    return *_make_asked(total, (is_wide, weight.dtype), (narrow_dtype is not None, narrow_dtype)), *sums


@_differentiate_norm.register_kernel("cuda")
def _differentiate_norm_on_card(
    grad: Tensor | None, copy_grad: Tensor | None, total: Tensor, weight: Tensor, eps: float, *asked: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from domext_ray.model.kernels import differentiate_norm_into

    made = _make_gradients(grad, copy_grad, total, weight, eps, *asked)
    with torch.cuda.device_of(weight):
        differentiate_norm_into(grad, copy_grad, total, weight, eps, made)
    return made


def _keep_total(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    summands, weight, _, ctx.eps, _, _, keeps_total = inputs
    ctx.dtypes = [summand.dtype for summand in summands]
    ctx.save_for_backward(output[2] if keeps_total else summands[0], weight)
    ctx.mark_non_differentiable(output[2])
    ctx.set_materialize_grads(False)


def _return_gradients(ctx: Any, grad: Tensor | None, copy_grad: Tensor | None, _: None) -> tuple[Any, ...]:
    """All summands have one gradient, in the dtype of each."""
    (total, weight), (asked, *needs, _, _, _, _) = ctx.saved_tensors, ctx.needs_input_grad
    dtypes = {dtype for dtype, is_asked in zip(ctx.dtypes, asked, strict=True) if is_asked}
    narrow = next((dtype for dtype in dtypes if dtype != weight.dtype), None)
    wide_grad, narrow_grad, *sums = _differentiate_norm(
        grad, copy_grad, total, weight, ctx.eps, narrow, weight.dtype in dtypes, any(needs)
    )
    by_dtype = {weight.dtype: wide_grad, narrow: narrow_grad}
    found = [by_dtype[dtype] if is_asked else None for dtype, is_asked in zip(ctx.dtypes, asked, strict=True)]
    return found, *(value if is_asked else None for value, is_asked in zip(sums, needs, strict=True)), *[None] * 4


_normalize_sum.register_autograd(_return_gradients, setup_context=_keep_total)


# --- gated units ---


def gate_gelu(outputs: Tensor, activation: nn.Module) -> Tensor:
    """Compute `layers_domext.apply_gates` for GELU in one operation, and its gradient, whole, in another."""
    return _gate_gelu(outputs)


@torch.library.custom_op("domext_ray::gate_gelu", mutates_args=())
def _gate_gelu(outputs: Tensor) -> Tensor:
    return apply_gates(outputs, nn.GELU())


@_gate_gelu.register_fake
def _make_gated(outputs: Tensor) -> Tensor:
    return outputs.new_empty(*outputs.shape[:-1], outputs.shape[-1] // 2)


@_gate_gelu.register_kernel("cuda")
def _gate_gelu_on_card(outputs: Tensor) -> Tensor:
    from domext_ray.model.kernels import gate_into

    gated = _make_gated(outputs)
    with torch.cuda.device_of(outputs):
        gate_into(outputs, gated)
    return gated


@torch.library.custom_op("domext_ray::gate_gelu_backward", mutates_args=())
def _differentiate_gates(grad: Tensor, outputs: Tensor) -> Tensor:
    units, gates = outputs.chunk(2, dim=-1)
    own = torch.ops.aten.gelu_backward(grad * gates, units)
    return torch.cat([own, grad * nn.functional.gelu(units)], dim=-1)


@_differentiate_gates.register_fake
def _make_gates_gradient(grad: Tensor, outputs: Tensor) -> Tensor:
    return outputs.new_empty(outputs.shape)


@_differentiate_gates.register_kernel("cuda")
def _differentiate_gates_on_card(grad: Tensor, outputs: Tensor) -> Tensor:
    from domext_ray.model.kernels import differentiate_gates_into

    made = _make_gates_gradient(grad, outputs)
    with torch.cuda.device_of(outputs):
        differentiate_gates_into(grad, outputs, made)
    return made


def _keep_outputs(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


_gate_gelu.register_autograd(
    lambda ctx, grad: _differentiate_gates(grad, *ctx.saved_tensors), setup_context=_keep_outputs
)


# --- losses over a vocabulary ---


def compute_losses_at_once(scores: Tensor, labels: Tensor) -> Tensor:
    """Compute `words_domext.compute_losses` in one operation, which reads the scores once and makes no fp32 copy."""
    return _compute_losses(scores, labels)[0]


@torch.library.custom_op("domext_ray::compute_losses", mutates_args=())
def _compute_losses(scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the losses and the logarithms of the sums that scores are divided by, fp32 [P] each."""
    return compute_losses(scores, labels), scores.float().logsumexp(-1)


@_compute_losses.register_fake
def _make_losses(scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return scores.new_empty(len(scores), dtype=torch.float32), scores.new_empty(len(scores), dtype=torch.float32)


@_compute_losses.register_kernel("cuda")
def _compute_losses_on_card(scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    from domext_ray.model.kernels import compute_losses_into

    made = _make_losses(scores, labels)
    with torch.cuda.device_of(scores):
        compute_losses_into(scores, labels, made)
    return made


@torch.library.custom_op("domext_ray::compute_losses_backward", mutates_args=())
def _differentiate_losses(grad: Tensor, scores: Tensor, labels: Tensor, log_sums: Tensor) -> Tensor:
    shares = (scores.float() - log_sums[:, None]).exp()
    return ((shares - nn.functional.one_hot(labels, scores.shape[-1])) * grad[:, None]).to(scores.dtype)


@_differentiate_losses.register_fake
def _make_scores_gradient(grad: Tensor, scores: Tensor, labels: Tensor, log_sums: Tensor) -> Tensor:
    return scores.new_empty(scores.shape)


@_differentiate_losses.register_kernel("cuda")
def _differentiate_losses_on_card(grad: Tensor, scores: Tensor, labels: Tensor, log_sums: Tensor) -> Tensor:
    from domext_ray.model.kernels import differentiate_losses_into

    made = _make_scores_gradient(grad, scores, labels, log_sums)
    with torch.cuda.device_of(scores):
        differentiate_losses_into(grad, scores, labels, log_sums, made)
    return made


def _keep_scores(ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, output[1])
    ctx.mark_non_differentiable(output[1])


_compute_losses.register_autograd(
    lambda ctx, grad, _: (_differentiate_losses(grad, *ctx.saved_tensors), None), setup_context=_keep_scores
)


# --- who has them ---


def fuse(model: nn.Module, device: torch.device, *, is_asked: bool) -> str:
    """Have a model's modules compute with these kernels, where they are asked for and the device can.

    The model is on `device`, and not yet handed to DeepSpeed. Return what was done and why, for the run's user.
    """
    if not is_asked:
        return "off (not asked)"
    if fault := find_fault(device):
        return f"off (asked; {fault})"
    config = cast(DomextConfig, model.config)
    is_rotary, is_gated = config.position_rule == "rotary", config.gated_ffn and config.hidden_act == "gelu"
    for module in model.modules():
        if isinstance(module, HeadGroup) and is_rotary:
            module.rotate = rotate
        elif isinstance(module, SublayerOutput) and module.LayerNorm is not None:
            module.LayerNorm.normalize = functools.partial(normalize_sum, is_stream=not config.has_pre_norm)
        elif isinstance(module, Intermediate) and is_gated:
            module.apply_gates = gate_gelu
        elif isinstance(module, PredictionHead):
            module.compute_losses = compute_losses_at_once
    for layer in model.modules():
        if isinstance(layer, Layer) and layer.extension is not None and not config.has_pre_norm:
            for place in (layer.output, layer.extension.output):  # a gate mixes the two, and no product reads them
                cast(Any, place.LayerNorm).normalize = functools.partial(normalize_sum, is_multiplied=False)
    parts = [*["rotary positions"] * is_rotary, "LayerNorms of sums", *["gated units"] * is_gated, "losses of words"]
    return f"on (asked; {', '.join(parts)})"


def find_fault(device: torch.device) -> str:
    """Return why the kernels cannot run on a device; empty: they can.

    Triton compiles in C what calls a kernel from this Python.
    """
    if device.type != "cuda":
        return "they run on GPUs"
    capability = torch.cuda.get_device_capability(device)
    if capability < OLDEST_CAPABILITY:
        least, own = (".".join(map(str, version)) for version in (OLDEST_CAPABILITY, capability))
        return f"they need compute capability {least}; this GPU has {own}"
    if find_spec("triton") is None:
        return "they need Triton, which torch brings on Linux; this torch has none"
    asked = os.environ.get("CC")
    if asked is not None and shutil.which(asked) is None:
        return f"they need a C compiler; the variable CC is {asked!r}, which is no program"
    if asked is None and not any(map(shutil.which, ("gcc", "clang"))):
        return "they need a C compiler; install gcc or clang"
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    return "" if header.is_file() else f"they need Python's headers, and {header} is missing; install python3-dev"
