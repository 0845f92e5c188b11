"""Products of fp32 matrices by oneDNN: torch's values, torch's errors, and only where they are faster."""

from __future__ import annotations

import copy
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from domext_ray.errors import ConfigError
from domext_ray.runtime import device
from domext_ray.runtime.device import (
    PREDICTION,
    SWITCH,
    TRAINING,
    as_worker,
    configure_kernels,
    has_bf16_units,
    prefers_onednn,
)

pytestmark = pytest.mark.skipif(not hasattr(torch.library, "get_kernel"), reason="this torch cannot replace kernels")
CACHE = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"
LAYOUTS: dict[str, Callable[[int, int], Tensor]] = {
    "rows": lambda m, n: torch.randn(m, n),
    "columns": lambda m, n: torch.randn(n, m).t(),
    "cut": lambda m, n: torch.randn(m, n + 5)[:, 2 : n + 2],
    "cut columns": lambda m, n: torch.randn(n, m + 5)[:, 2 : m + 2].t(),
    "every other": lambda m, n: torch.randn(m, 2 * n)[:, ::2],
    "one row": lambda m, n: torch.randn(1, n).expand(m, n),
    "one column": lambda m, n: torch.randn(m, 1).expand(m, n),
}
"""How a matrix may lie in memory."""
AMD = "vendor_id\t: AuthenticAMD\nflags\t\t: fma avx2 avx512f avx512_bf16\n"


@pytest.fixture
def onednn(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have oneDNN's products on every machine."""
    monkeypatch.setenv(SWITCH, "onednn")
    monkeypatch.setenv(CACHE, "1024")
    with as_worker(PREDICTION):
        assert uses_onednn()
        yield
    assert not uses_onednn()


def uses_onednn() -> bool:
    """Whether torch's product of two matrices is ours."""
    return "runtime/device.py" in torch._C._dispatch_dump("aten::mm")


def test_products_are_right_however_matrices_lie_in_memory(onednn: None) -> None:
    torch.manual_seed(0)
    sizes = ((1, 1, 1), (2, 7, 100), (100, 1, 64), (64, 100, 2))
    for (left, right), (rows, inner, columns) in itertools.product(itertools.product(LAYOUTS, LAYOUTS), sizes):
        first, second, bias = LAYOUTS[left](rows, inner), LAYOUTS[right](inner, columns), torch.randn(columns)
        expected = first.double() @ second.double()
        out = torch.empty(rows, columns)
        for found in (first @ second, torch.mm(first, second, out=out), out):
            torch.testing.assert_close(found.double(), expected, atol=1e-4, rtol=1e-5)
        for found in (torch.addmm(bias, first, second), torch.addmm(bias, first, second, out=out), out):
            torch.testing.assert_close(found.double(), expected + bias, atol=1e-4, rtol=1e-5)


def test_other_products_stay_torchs(onednn: None) -> None:
    ones = torch.ones(2, 3)
    assert (ones.double() @ ones.double().t()).dtype is torch.float64
    assert (ones.bfloat16() @ ones.bfloat16().t()).dtype is torch.bfloat16
    assert (torch.ones(0, 3) @ torch.ones(3, 5)).shape == (0, 5)
    assert torch.equal(torch.addmm(torch.ones(1), ones, ones.t()), torch.full((2, 2), 4.0))
    assert torch.equal(torch.addmm(torch.ones(2), ones, ones.t(), beta=2, alpha=3), torch.full((2, 2), 11.0))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (ones @ ones.t()).dtype is torch.bfloat16
    with pytest.raises(RuntimeError, match=r"cannot be multiplied \(2x3 and 2x3\)"):
        ones @ ones
    with pytest.raises(RuntimeError, match="same dtype"):
        ones @ ones.t().double()


def test_gradients_are_right(onednn: None) -> None:
    torch.manual_seed(0)
    layer, inputs = nn.Linear(48, 80), torch.randn(4, 9, 48)
    exact, exact_inputs = copy.deepcopy(layer).double(), inputs.double()  # by torch's own kernels
    for one, other in zip(_differentiate(layer, inputs), _differentiate(exact, exact_inputs), strict=True):
        torch.testing.assert_close(one.double(), other, atol=1e-4, rtol=1e-5)


def _differentiate(layer: nn.Module, inputs: Tensor) -> tuple[Tensor, ...]:
    inputs = inputs.requires_grad_()
    return torch.autograd.grad(torch.tanh(layer(inputs)).sum(), [inputs, *layer.parameters()])


def test_what_a_processor_has_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "CPU_FACTS", tmp_path / "cpuinfo")
    assert not has_bf16_units(), "where nothing is known"
    intel = AMD.replace("AuthenticAMD", "GenuineIntel")
    for facts, wanted, expected in (
        (AMD, "", True),
        (AMD, "torch", False),
        (AMD.replace("avx512f", ""), "", False),
        (intel, "", False),
        (intel, "onednn", True),
    ):
        (tmp_path / "cpuinfo").write_text(facts, encoding="utf-8")
        monkeypatch.setenv(SWITCH, wanted)
        assert prefers_onednn() is expected, (facts, wanted)
    monkeypatch.setenv(SWITCH, "mkl")
    with pytest.raises(ConfigError, match=f"{SWITCH} is 'mkl'; it must be torch or onednn, or unset"):
        prefers_onednn()
    for facts, expected in ((AMD, True), (AMD.replace("avx512_bf16", ""), False), ("Features : asimd bf16", True)):
        (tmp_path / "cpuinfo").write_text(facts, encoding="utf-8")
        assert has_bf16_units() is expected, facts


def test_a_torch_that_cannot_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.library, "get_kernel")
    assert not prefers_onednn()
    monkeypatch.setenv(SWITCH, "onednn")
    with pytest.raises(ConfigError, match=f"{SWITCH} is 'onednn', which torch .* cannot do here"):
        prefers_onednn()


@pytest.mark.parametrize("uses_fp32", [True, False])
def test_a_process_keeps_few_kernels_and_changes_those_of_fp32(
    uses_fp32: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SWITCH, "onednn")
    monkeypatch.setenv(CACHE, "")
    monkeypatch.delenv(CACHE)
    monkeypatch.setattr(device, "_products", None)
    configure_kernels(TRAINING, uses_fp32=uses_fp32)
    assert uses_onednn() is uses_fp32 and os.environ[CACHE] == str(TRAINING)
