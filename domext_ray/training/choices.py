"""What a run chooses for the device that it trains on, a line each, with the reason."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from domext_ray.config.pretrain import EngineConfig, SettledConfig
from domext_ray.model.build import pick_attention
from domext_ray.model.domext.layers_domext import VARLEN
from domext_ray.runtime.device import has_bf16, has_bf16_units


def describe_choices(config: SettledConfig, device: torch.device, fused: str, rows: Sequence[int]) -> list[str]:
    """Return the lines; `fused` says what `model.fused.fuse` has done, and `rows` are by length phase."""
    engine, on_gpu, bf16 = config.engine, device.type == "cuda", config.engine.uses_bf16
    where = "CUDA" if on_gpu else "CPU"
    attention, why = pick_attention(device, bf16=bf16), "fused"
    shapes = " of one shape" if engine.fixed_shapes else ""
    kind = f"packed rows{shapes}" if config.prepare.packed else "padded rows"
    if attention == "eager":
        why = "bf16, for which the fused kernel is slower"
    elif attention == VARLEN and config.train.attention_dropout_prob:
        attention, why = "sdpa", "fused; varlen, which has no dropout, with --train.attention_dropout 0"
    if on_gpu:
        version = ".".join(map(str, torch.cuda.get_device_capability(device)))
        has_units, reason = has_bf16(device), f"compute capability {version}"
    else:
        has_units = has_bf16_units()
        reason = "this CPU has bf16 units" if has_units else "this CPU has no bf16 units"
    reason = reason if bf16 == has_units else f"as asked; {reason}"
    precision = "bf16" if bf16 else "fp32, products in TF32" if on_gpu and has_units else "fp32"
    return [
        f"attention: {attention} ({kind}, {why}, {where})",
        f"precision: {precision} ({reason})",
        f"products: {_describe_products(engine, on_gpu=on_gpu)}",
        f"compile: {'on (asked)' if engine.compile else 'off (not asked)'}",
        f"fused kernels: {fused}",
        f"capture: {'on (asked)' if engine.capture else 'off (not asked)'}",
        f"micro batch: {', then '.join(map(str, rows))} rows ({'asked' if config.train.micro_batch_size else where})",
    ]


def _describe_products(engine: EngineConfig, *, on_gpu: bool) -> str:
    if engine.joins_products(on_gpu=on_gpu):
        return f"joined ({'CUDA' if engine.joined == 'auto' else 'asked'})"
    others = {"--engine.zero_stage 3": engine.zero_stage == 3, "--engine.compile true": engine.compile}
    why = next((option for option, is_so in others.items() if is_so), "CPU" if engine.joined == "auto" else "asked")
    return f"as written ({why})"
