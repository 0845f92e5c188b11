"""Kernels for sums and their LayerNorms, gated units, and losses of words: values and gradients in 64 bits.

Each operation is held to its definition as the CPU's formula computes it, and as the card's kernel does, which Triton's
interpreter runs here.
"""

from __future__ import annotations

import copy
import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import make_rows
from torch import Tensor, nn
from trained_methods import LAYOUTS, make_trainable

from domext_ray.model import fused
from domext_ray.model.domext.layers_domext import COPY
from domext_ray.model.joined import join_products

KERNELS = "domext_ray.model.kernels"
FP32, BF16 = torch.float32, torch.bfloat16
OPERATIONS = {
    "rotate": fused._rotate_on_card,
    "normalize_sum": fused._normalize_sum_on_card,
    "normalize_sum_backward": fused._differentiate_norm_on_card,
    "gate_gelu": fused._gate_gelu_on_card,
    "gate_gelu_backward": fused._differentiate_gates_on_card,
    "compute_losses": fused._compute_losses_on_card,
    "compute_losses_backward": fused._differentiate_losses_on_card,
}


@pytest.fixture(params=["formula", "kernel"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """How operations are computed: as on a CPU, or as on a card, which the interpreter stands in for."""
    if request.param == "formula":
        yield request.param
        return
    triton = pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    language = triton.language
    for name, combine in (("sum", language.standard._sum_combine), ("max", language.standard._elementwise_max)):
        # The two are kernels themselves, and compiled ones where Triton was imported before.
        monkeypatch.setattr(language, name, functools.partial(reduce_rows, language, combine))
    monkeypatch.setattr(importlib.import_module(KERNELS), "SUM_PROGRAMS", 2)  # each has several blocks of rows
    library = torch.library.Library("domext_ray", "IMPL")
    for name, function in OPERATIONS.items():
        library.impl(name, function, "CPU")
    yield request.param
    del library, sys.modules[KERNELS]


def reduce_rows(language: Any, combine: Any, values: Any, axis: int) -> Any:
    return language.reduce(values, axis, combine)


def check_close(found: Tensor | None, exact: Tensor | None, digit: float = 2e-6) -> None:
    """Of bf16 the interpreter cuts off what a card rounds, so the last digit may differ; None: neither is there."""
    assert (found is None) == (exact is None)
    if found is not None and exact is not None:
        digit = max(digit, 2**-7) if found.dtype is BF16 else digit
        torch.testing.assert_close(found.double(), exact.detach().double(), atol=2 * digit, rtol=2 * digit)


def make_exact(leaves: list[Tensor]) -> list[Tensor]:
    return [leaf.detach().double().requires_grad_(leaf.requires_grad) for leaf in leaves]


# --- a sum and its LayerNorm ---

SUMS: list[tuple[tuple[int, ...], tuple[torch.dtype, ...], str]] = [  # shape, dtypes of summands, which of both train
    ((3, 5, 32), (BF16, FP32), "weight and bias"),
    ((7, 33), (BF16, BF16, FP32), "weight"),
    ((2, 3, 768), (BF16, FP32), "no bias"),
    ((5, 48), (FP32,), "weight, no bias"),
    ((19, 5), (FP32, FP32, FP32), "bias"),
    ((4, 20), (BF16, BF16, BF16, FP32), "weight and bias"),
    ((0, 32), (BF16, FP32), "weight and bias"),
    ((1, 1), (FP32, FP32), ""),
]


@pytest.mark.parametrize(("shape", "dtypes", "trained"), SUMS)
def test_sums_and_their_norms(shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...], trained: str, way: str) -> None:
    torch.manual_seed(0)
    summands = [torch.randn(shape).to(dtype).requires_grad_() for dtype in dtypes]
    weight, bias = (torch.randn(shape[-1]).requires_grad_(name in trained) for name in ("weight", "bias"))
    has_bias = "no bias" not in trained
    leaves = [*summands, weight, *[bias] * has_bias]
    exact = make_exact(leaves)
    total = torch.stack(exact[: len(summands)]).sum(0)
    centered = total - total.mean(-1, keepdim=True)
    expected = centered / (centered.square().mean(-1, keepdim=True) + 1e-5).sqrt() * exact[len(summands)]
    expected = expected + exact[-1] if has_bias else expected
    with torch.autocast("cpu", BF16):
        states = fused.normalize_sum(summands, weight, bias if has_bias else None, 1e-5)
    narrow = getattr(states, COPY)
    assert states.dtype is FP32 and narrow.dtype is BF16 and states.is_contiguous()
    gradients = torch.randn(shape), torch.randn(shape).to(BF16)
    torch.autograd.backward([states, narrow], [*gradients])
    expected.backward(gradients[0].double() + gradients[1].double())
    # As written, and of more than three, a sum of two in bf16 is rounded before the next one is added.
    digit = 2**-7 if dtypes.count(BF16) > 1 else 2e-6
    check_close(states, expected, digit)
    check_close(narrow, expected, digit)
    for leaf, wanted in zip(leaves, exact, strict=True):
        check_close(leaf.grad, wanted.grad, digit)


@pytest.mark.parametrize("is_read", ["as a state", "by products", "both"])
def test_what_is_asked_of_a_norm(is_read: str, way: str) -> None:
    """Its dtypes, with and without autocast; a result that has one reader, and none that trains."""
    torch.manual_seed(0)
    summands, weight = [torch.randn(4, 6).requires_grad_() for _ in range(2)], torch.randn(6)
    asked = {"is_stream": is_read != "by products", "is_multiplied": is_read != "as a state"}
    for bf16 in (False, True):
        with torch.autocast("cpu", BF16, enabled=bf16):
            states = fused.normalize_sum(summands, weight, None, 1e-5, **asked)
        assert states.dtype is (BF16 if bf16 and is_read == "by products" else FP32)
        assert hasattr(states, COPY) == (bf16 and is_read == "both")
        states.float().square().sum().backward()
        assert summands[0].grad is not None and summands[1].grad is not None
        assert torch.equal(summands[0].grad, summands[1].grad)
    with torch.no_grad():
        assert torch.allclose(fused.normalize_sum(summands, weight, None, 1e-5, **asked), states.float(), atol=0.02)


# --- gated units, losses of words ---


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("shape", [(2, 3, 32), (9, 14), (1, 600), (0, 8), (3, 1, 2)])
def test_gated_units(shape: tuple[int, ...], dtype: torch.dtype, way: str) -> None:
    torch.manual_seed(0)
    outputs = (3 * torch.randn(shape)).to(dtype).requires_grad_()
    (exact,) = make_exact([outputs])
    units, gates = exact.chunk(2, dim=-1)
    expected = units * 0.5 * (1 + torch.special.erf(units / 2**0.5)) * gates
    gated = fused.gate_gelu(outputs, nn.GELU())
    gradient = torch.randn(expected.shape).to(dtype)
    gated.backward(gradient)
    expected.backward(gradient.double())
    digit = 2**-6 if dtype is BF16 else 4e-6  # as written, GELU is rounded before it is multiplied
    for found, wanted in ((gated, expected), (outputs.grad, exact.grad)):
        assert found is not None and found.dtype is dtype
        check_close(found, wanted, digit)


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize(("num_positions", "num_words"), [(5, 90), (3, 5001), (0, 7), (1, 1), (2, 2048)])
def test_losses_of_words(num_positions: int, num_words: int, dtype: torch.dtype, way: str) -> None:
    """Some scores are -inf, and rows stand apart, as where zeros behind the words are cut off."""
    torch.manual_seed(0)
    scores = (4 * torch.randn(num_positions, num_words + 3)).to(dtype)[:, :num_words]
    labels = torch.randint(max(1, num_words - 4), (num_positions,))
    scores[:, num_words - 3 :] = -torch.inf if num_words > 3 else 0.0
    scores.requires_grad_()
    (exact,) = make_exact([scores])
    expected = exact.exp().sum(-1).log() - exact.gather(-1, labels[:, None])[:, 0]
    losses = fused.compute_losses_at_once(scores, labels)
    gradient = torch.tensor([0.0, 1.0, -2.0, 0.5, 1.0])[:num_positions]
    losses.backward(gradient)
    expected.backward(gradient.double())
    assert losses.dtype is FP32 and scores.grad is not None and scores.grad.dtype is dtype
    check_close(losses, expected)
    check_close(scores.grad, exact.grad)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["kernel"], indirect=True)
@pytest.mark.parametrize(("layout", "method"), [("bert", "bottlenecks"), ("bert", "exbert"), ("modernbert", "af")])
def test_a_model_computes_by_them(layout: str, method: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With joined products: logits, and all gradients, are those as written."""
    monkeypatch.setattr(fused, "find_fault", lambda device: "")
    model = make_trainable(method, **LAYOUTS[layout])
    own = copy.deepcopy(model)
    fused.fuse(own, torch.device("cpu"), is_asked=True)
    join_products(own, FP32)
    ids, mask = make_rows()
    for network in (model, own):
        logits = network(input_ids=ids, attention_mask=mask).logits.flatten(0, 1)
        network.cls.predictions.compute_losses(logits, ids.flatten()).sum().backward()
    params = zip(model.parameters(), own.parameters(), strict=True)
    norms = [((a.grad - b.grad).norm(), a.grad.norm()) for a, b in params if a.requires_grad]
    assert sum(first for first, _ in norms) < 1e-5 * sum(second for _, second in norms)


# --- what torch and a card ask of them ---

SAMPLES: dict[str, Callable[[], tuple[Any, ...]]] = {
    "normalize_sum": lambda: ([grown(2, 6).bfloat16(), grown(2, 6)], grown(6), grown(6), 1e-5, BF16, True, True),
    "normalize_sum_backward": lambda: (
        None,
        torch.randn(2, 6),
        torch.randn(2, 6),
        torch.randn(6),
        1e-5,
        BF16,
        True,
        True,
    ),
    "gate_gelu": lambda: (grown(2, 6),),
    "gate_gelu_backward": lambda: (torch.randn(2, 3), torch.randn(2, 6)),
    "compute_losses": lambda: (grown(2, 6), torch.tensor([1, 5])),
    "compute_losses_backward": lambda: (torch.randn(2), torch.randn(2, 6), torch.tensor([1, 5]), torch.randn(2)),
}


def grown(*shape: int) -> Tensor:
    return torch.randn(shape).requires_grad_()


@pytest.mark.parametrize(
    "checks",
    [
        ("test_schema", "test_autograd_registration", "test_faketensor"),
        pytest.param(("test_aot_dispatch_dynamic",), marks=pytest.mark.slow),
    ],
)
def test_operations_are_torchs(checks: tuple[str, ...]) -> None:
    for name, make in SAMPLES.items():
        torch.library.opcheck(getattr(torch.ops.domext_ray, name).default, make(), test_utils=checks)


POINTERS = {  # that are not fp32
    **dict.fromkeys(("first", "copy", "copy_grad", "narrow", "outputs", "gated", "made", "scores"), "*bf16"),
    "labels": "*i64",
}
NORM = {"WIDTH": 768, "ROWS": 2, "COLUMNS": 1024}
GATES = {"WIDTH": 1152, "ROWS": 8, "COLUMNS": 256}
COMPILED: dict[str, tuple[dict[str, Any], tuple[str, ...], tuple[int, int]]] = {
    # constants, numbers (others are pointers), and how often a program reads and writes 16 bytes
    "_normalize": (
        {"NUM_SUMMANDS": 2, "HAS_BIAS": True, "IS_WIDE": True, "IS_COPIED": True, "KEEPS_TOTAL": True, **NORM},
        ("eps", "num_rows"),
        (2 + 4 + 2 + 2, 4 + 2 + 4),
    ),
    "_differentiate_norm": (
        {"HAS_GRAD": True, "HAS_COPY_GRAD": True, "IS_WIDE": True, "IS_NARROW": True, "TRAINS": False, **NORM},
        ("eps", "num_rows"),
        (4 + 2 + 4 + 2, 4 + 2),
    ),
    "_gate": (GATES, ("num_rows",), (2 * 2, 2)),
    "_differentiate_gates": (GATES, ("num_rows",), (2 * 2 + 4, 2 * 2)),
    "_compute_losses": ({"COLUMNS": 2048}, ("row_stride", "num_words"), (2, 0)),
    "_differentiate_losses": ({"COLUMNS": 2048}, ("row_stride", "num_words"), (2, 2)),
}


@pytest.mark.parametrize(
    ("kernel", "capability"),
    [
        *(pytest.param(name, 80, marks=pytest.mark.slow) for name in COMPILED),
        *(pytest.param(name, 90, marks=[] if name == "_gate" else pytest.mark.slow) for name in COMPILED),
    ],
)
def test_a_card_moves_16_bytes_at_a_time(
    kernel: str, capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled without a card: the interpreter takes Python that the compiler refuses."""
    pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    constants, numbers, moves = COMPILED[kernel]
    function = getattr(importlib.import_module(KERNELS), kernel)
    del sys.modules[KERNELS]
    names = function.arg_names
    pointers = [name for name in names if name not in (*constants, *numbers)]
    types = {name: POINTERS.get(name, "*fp32") for name in pointers} | dict.fromkeys(numbers, "i32")
    types |= dict.fromkeys(constants, "constexpr") | ({"eps": "fp32"} if "eps" in numbers else {})
    aligned = [*pointers, *(name for name in numbers if name in ("row_stride", "num_words"))]
    source = ASTSource(
        function,
        {name: types[name] for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    made = compile(source, target=GPUTarget("cuda", capability, 32))
    assert made.asm["cubin"]
    assert tuple(made.asm["ptx"].count(f"{way}.global.v4.b32") for way in ("ld", "st")) == moves
