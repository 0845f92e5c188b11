"""What a process computes on, made ready before its first product: a GPU, or some CPUs."""

from __future__ import annotations

import os

import torch

from domext_ray.runtime.cpu_kernels import configure_kernels

BF16_CAPABILITY = (8, 0)
"""The compute capability from which a card has units for bf16; older ones emulate it."""


def prepare_device(uses_gpu: bool, cpus: float, num_kept: int, *, uses_fp32: bool = True) -> torch.device:
    """Make this process ready to compute.

    The GPU is the first that the process sees; `cpus` are those that it has without one. See `configure_kernels`.
    """
    if uses_gpu:
        # Batches differ in length: in segments of a fixed size they would leave holes that nothing fits into.
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
        torch.set_float32_matmul_precision("high")  # products of fp32 in TF32
        return torch.device("cuda", 0)
    torch.set_num_threads(max(1, int(cpus)))
    configure_kernels(num_kept, uses_fp32=uses_fp32)
    return torch.device("cpu")


def has_bf16(device: torch.device) -> bool:
    """Whether predictions are computed in bf16 on a device: on cards that have units for it. Training has an option."""
    is_card = device.type == "cuda" and torch.cuda.is_available()
    return is_card and torch.cuda.get_device_capability(device) >= BF16_CAPABILITY


def autocast(device: torch.device) -> torch.autocast:
    """Compute what follows in bf16 where the card has it; see `has_bf16`."""
    return torch.autocast(device.type, torch.bfloat16, enabled=has_bf16(device))
