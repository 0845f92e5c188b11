"""What a process computes on, made ready before its first product: a GPU, or some CPUs.

torch computes products of fp32 with MKL, which uses half of the vector units of a processor that is not Intel's.
oneDNN, which torch brings for bf16, uses all of them: on an AMD EPYC with AVX-512 it takes half the time.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from domext_ray.errors import ConfigError

PREDICTION, TRAINING = 64, 256
"""Kernels worth keeping: a training step has some 40 that come again, and 30 that its number of words makes."""
SWITCH, CHOICES = "DOMEXT_FP32_KERNELS", ("", "torch", "onednn")
"""A variable of the environment, and whose kernels it may ask for; without it, the faster ones."""
CPU_FACTS = Path("/proc/cpuinfo")
BF16_UNITS = ("avx512_bf16", "amx_bf16", "bf16")
"""What a processor that computes in bf16 says of itself: AMD's and Intel's, Intel's, ARM's."""
BF16_CAPABILITY = (8, 0)
"""The compute capability from which a card has units for bf16; older ones emulate it."""

_OVERLOADS = ("mm", "mm.out", "addmm", "addmm.out")
"""Of torch's products of two matrices; compiled code calls those that write into a tensor."""
_products: torch.library.Library | None = None


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


def configure_kernels(num_kept: int, *, uses_fp32: bool = True) -> None:
    """Choose how this process computes its products; before its first one.

    By default oneDNN keeps 1,024 kernels for shapes it has met, nearly a megabyte each. Batches of texts of all lengths
    have some ten new shapes each, so a process would grow for hours with kernels that are never used again.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", str(num_kept))
    if uses_fp32 and prefers_onednn():
        _use_onednn()


@contextlib.contextmanager
def as_worker(num_kept: int, *, uses_fp32: bool = True) -> Iterator[None]:
    """Compute as a worker does, and afterwards as before: in a process that may be its user's own."""
    global _products
    before = _products
    configure_kernels(num_kept, uses_fp32=uses_fp32)
    try:
        yield
    finally:
        _products = before  # without its library, torch has its own kernels back


def check_choice() -> str:
    """Return what `SWITCH` asks for; empty: nothing."""
    wanted = os.environ.get(SWITCH, "")
    if wanted not in CHOICES:
        raise ConfigError(f"the variable {SWITCH} is {wanted!r}; it must be torch or onednn, or unset.")
    if wanted == "onednn" and not _can_use_onednn():
        raise ConfigError(
            f"the variable {SWITCH} is 'onednn', which torch {torch.__version__} cannot do here; unset it, or install "
            "the version of cluster/constraints.txt."
        )
    return wanted


def prefers_onednn() -> bool:
    """Return whether oneDNN's products of fp32 are those to use here: the same answer in every process of a machine.

    They are where the processor has AVX-512 and MKL does not use it, unless `SWITCH` says otherwise.
    """
    if wanted := check_choice():
        return wanted == "onednn"
    facts = _read_facts()
    is_faster = "avx512f" in facts and "GenuineIntel" not in facts
    return is_faster and _can_use_onednn() and torch.backends.mkl.is_available()


def _can_use_onednn() -> bool:
    return hasattr(torch.library, "get_kernel") and torch.backends.mkldnn.is_available()


def has_bf16_units() -> bool:
    """Whether this machine's processor says that it computes in bf16; others are slower so than in fp32."""
    return not _read_facts().isdisjoint(BF16_UNITS)


def _read_facts() -> set[str]:
    return set(CPU_FACTS.read_text(encoding="utf-8").split()) if CPU_FACTS.exists() else set()


def _use_onednn() -> None:
    """Have oneDNN compute this process's products of fp32 matrices from now on, in forward and in backward passes.

    Attention's products of many small matrices stay with torch, as do all products of other dtypes.
    """
    global _products
    if _products is not None:
        return
    _products = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)  # it is meant
        for name in _OVERLOADS:
            kernel = _make_kernel(torch.library.get_kernel(f"aten::{name}", "CPU"))
            _products.impl(name, kernel, "CPU", with_keyset=True)


def _make_kernel(torch_kernel: Any) -> Callable[..., Tensor]:
    """The kernel of a product, to which a bias may be added; torch's own has what oneDNN does not take."""

    def multiply(keys: Any, *tensors: Tensor, **options: Any) -> Tensor:
        *bias, left, right = tensors
        out = options.get("out")
        if _fits(left, right) and options.get("beta", 1) == options.get("alpha", 1) == 1:
            rows = (out, (left.shape[0], right.shape[1])), *((tensor, right.shape[1:]) for tensor in bias)
            if all(
                tensor is None or (tensor.shape == shape and tensor.dtype is torch.float32) for tensor, shape in rows
            ):
                given = bias[0] if bias else None
                made = torch.ops.mkldnn._linear_pointwise.default(left, right.t(), given, "none", [], "")
                return made if out is None else out.copy_(made)
        return torch_kernel.call_boxed(keys, *tensors, **options)

    return multiply


def _fits(left: Tensor, right: Tensor) -> bool:
    """Whether oneDNN takes a product: fp32, no matrix empty; else torch's kernel also says what is wrong with it."""
    return (
        left.dtype is right.dtype is torch.float32
        and left.dim() == right.dim() == 2
        and left.shape[1] == right.shape[0]
        and left.numel() > 0
        and right.numel() > 0
    )
