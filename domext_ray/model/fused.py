"""Kernels of our own for what a model computes element by element, and the choice whether a run has them.

Enters: a model as it is written, and the device that it trains on. Leaves: the same model, some of whose modules call
an operation of torch's library instead of the formulas in `model/domext`. On a card each is one Triton kernel
(`kernels.py`); elsewhere it is the formula, so that tensors without values, counts of operations and torch.compile see
one operation of known shapes.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from domext_ray.model.domext.configuration_domext import DomextConfig
from domext_ray.model.domext.layers_domext import HeadGroup, apply_rotary_pos_emb

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
    for each, values in zip(rotated, apply_rotary_pos_emb(query, key, cos_sin), strict=True):
        each.copy_(values)
    return rotated


@_rotate.register_fake
def _make_rotated(query: Tensor, key: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    new_query, new_key = (each.new_empty(each.transpose(1, 2).shape).transpose(1, 2) for each in (query, key))
    return new_query, new_key


@_rotate.register_kernel("cuda")
def _rotate_on_card(query: Tensor, key: Tensor, cos_sin: Tensor, is_inverse: bool) -> tuple[Tensor, Tensor]:
    from domext_ray.model.kernels import rotate_into

    rotated = _make_rotated(query, key)
    with torch.cuda.device(query.device):
        rotate_into(query, key, cos_sin, rotated, is_inverse=is_inverse)
    return rotated


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, _, cos_sin, ctx.is_inverse = inputs
    ctx.save_for_backward(cos_sin)


def _rotate_back(ctx: Any, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor, None, None]:
    """A rotation's transpose is its inverse, so gradients are rotated back; positions have none."""
    return *_rotate(query, key, *ctx.saved_tensors, not ctx.is_inverse), None, None


_rotate.register_autograd(_rotate_back, setup_context=_keep_for_backward)


def fuse(model: nn.Module, device: torch.device, *, is_asked: bool) -> str:
    """Have a model's modules compute with these kernels, where they are asked for and the device can.

    Args:
        model: on `device`, not yet handed to DeepSpeed.
        device: where it trains.
        is_asked: `--engine.fused`.

    Returns:
        What was done and why, for the run's user.
    """
    if not is_asked:
        return "off (not asked)"
    if fault := find_fault(device):
        return f"off (asked; {fault})"
    if cast(DomextConfig, model.config).position_rule != "rotary":
        return "off (asked; this model has no rotary positions, for which there is a kernel)"
    for module in model.modules():
        if isinstance(module, HeadGroup):
            module.rotate = rotate
    return "on (asked; rotary positions)"


def find_fault(device: torch.device) -> str:
    """Return why the kernels cannot run on a device; empty: they can.

    Triton compiles in C what calls a kernel from this Python.
    """
    if device.type != "cuda":
        return "they run on GPUs"
    capability = torch.cuda.get_device_capability(device)
    if capability < OLDEST_CAPABILITY:
        least, own = (".".join(map(str, each)) for each in (OLDEST_CAPABILITY, capability))
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
