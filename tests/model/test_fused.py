"""Kernels of our own: what they compute, by Triton's interpreter on the CPU, and who has them."""

from __future__ import annotations

import copy
import importlib
import pickle
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tiny_models import MODERN, make_model, make_rows
from torch import Tensor

from domext_ray.model import fused
from domext_ray.model.build import checkpoint_activations
from domext_ray.model.domext.layers_domext import HeadGroup, apply_rotary_pos_emb, compute_cos_sin

CPU, CARD = torch.device("cpu"), torch.device("cuda", 0)
KERNELS = "domext_ray.model.kernels"
ON = "on (asked; rotary positions, LayerNorms of sums, gated units, losses of words)"
FP32, BF16 = torch.float32, torch.bfloat16

# --- what they compute ---


@pytest.fixture(params=["1"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The kernels, as Triton's interpreter runs them; with a parameter of 0 as its compiler takes them."""
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", request.param)
    yield importlib.import_module(KERNELS)
    del sys.modules[KERNELS]


def of_projections(shape: tuple[int, ...]) -> Tensor:
    """[B, heads, N, size] as the model has it, in memory [B, N, heads, size]."""
    return torch.randn(shape).transpose(1, 2).contiguous().transpose(1, 2)


def of_joined_projections(shape: tuple[int, ...]) -> Tensor:
    rows, heads, tokens, size = shape
    return torch.randn(rows, tokens, 3, heads, size)[:, :, 1].transpose(1, 2)


def of_one_number(shape: tuple[int, ...]) -> Tensor:
    """What the gradient of a sum is: every stride is 0."""
    return torch.randn(1, 1, 1, 1).expand(shape)


def of_turned_heads(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(*shape[:2], shape[3], shape[2]).transpose(2, 3)


CASES = [
    ((2, 5, 20, 64), 1, of_projections, FP32),
    ((2, 4, 20, 64), 2, of_projections, BF16),  # each row has positions of its own
    ((1, 3, 67, 64), 1, of_projections, BF16),  # several rows end to end, in three blocks of tokens
    ((2, 3, 33, 64), 2, of_joined_projections, FP32),
    ((2, 4, 50, 21), 1, of_projections, FP32),  # an odd size
    ((3, 1, 9, 21), 3, of_projections, BF16),
    ((2, 3, 17, 80), 2, torch.randn, FP32),
    ((2, 6, 11, 8), 1, of_turned_heads, FP32),
    ((2, 2, 5, 16), 1, of_one_number, BF16),
    ((1, 1, 1, 1), 1, torch.randn, FP32),
    ((0, 2, 4, 8), 1, torch.randn, FP32),
]


def rotate_by_definition(states: Tensor, cos_sin: Tensor) -> Tensor:
    """Turn pairs half a head apart, as complex numbers of 64 bits each."""
    half = states.shape[-1] // 2
    turned = torch.complex(states[..., :half], states[..., half : 2 * half])
    turned = turned * torch.complex(*(part.double() for part in cos_sin.chunk(2, dim=1)))
    return torch.cat([turned.real, turned.imag, states[..., 2 * half :]], dim=-1)


def rotate_by_kernel(
    kernels: ModuleType, pair: tuple[Tensor, ...], cos_sin: Tensor, is_inverse: bool
) -> tuple[Tensor, ...]:
    rotated = fused._make_rotated(*pair)
    kernels.rotate_into(*pair, cos_sin, rotated, is_inverse=is_inverse)
    return rotated


@pytest.mark.parametrize(("shape", "num_own", "make", "dtype"), CASES)
def test_rotations_and_their_gradients(
    shape: tuple[int, ...],
    num_own: int,
    make: Callable[[tuple[int, ...]], Tensor],
    dtype: torch.dtype,
    kernels: ModuleType,
) -> None:
    torch.manual_seed(0)
    # Strides of the two need not be the same.
    pair, gradients = (tuple(draw(shape).to(dtype) for draw in (make, of_projections)) for _ in range(2))
    cos_sin = compute_cos_sin(torch.randint(0, 500, (num_own, shape[2])), shape[3], 10_000.0)
    exact = [states.double().requires_grad_() for states in pair]
    expected = [rotate_by_definition(leaf, cos_sin) for leaf in exact]
    torch.autograd.backward(expected, [gradient.double() for gradient in gradients])
    leaves = [states.clone().requires_grad_() for states in pair]
    rotated = fused.rotate(leaves[0], leaves[1], cos_sin)
    torch.autograd.backward(rotated, gradients)
    found = {
        "formula": (*rotated, *(leaf.grad for leaf in leaves)),
        "kernel": (
            *rotate_by_kernel(kernels, pair, cos_sin, False),
            *rotate_by_kernel(kernels, gradients, cos_sin, True),
        ),
    }
    # The interpreter cuts bf16 off where a card rounds, so it may be a last digit apart.
    tolerance = {"atol": 1e-6, "rtol": 1e-6} if dtype is FP32 else {"atol": 1e-6, "rtol": 2**-7}
    for how, values in found.items():
        for value, wanted in zip(values, (*expected, *(leaf.grad for leaf in exact)), strict=True):
            assert value is not None and wanted is not None and value.dtype is dtype, how
            torch.testing.assert_close(value.double(), wanted, **tolerance)
    as_written = apply_rotary_pos_emb(*pair, cos_sin)
    assert all(torch.equal(*both) for both in zip(rotated, as_written, strict=True))
    assert dtype is not FP32 or all(torch.equal(*both) for both in zip(found["kernel"][:2], as_written, strict=True))


@pytest.mark.parametrize(
    "checks",
    [
        ("test_schema", "test_autograd_registration", "test_faketensor"),
        pytest.param(("test_aot_dispatch_dynamic",), marks=pytest.mark.slow),
    ],
)
def test_the_operation_is_one_of_torchs(checks: tuple[str, ...]) -> None:
    """Its gradient, its shapes without values, and how it is traced are what torch asks of an operation."""
    pair = [of_projections((2, 3, 5, 8)).requires_grad_() for _ in range(2)]
    cos_sin = compute_cos_sin(torch.arange(5)[None], 8, 10_000.0)
    torch.library.opcheck(torch.ops.domext_ray.rotate.default, (*pair, cos_sin, False), test_utils=checks)
    for device in ("cpu", "meta"):
        found = fused.rotate(*(tensor.bfloat16().to(device) for tensor in (*pair, cos_sin)))
        assert [(rotated.device.type, rotated.dtype, rotated.shape) for rotated in found] == 2 * [
            (device, BF16, (2, 3, 5, 8))
        ]
        assert all(rotated.transpose(1, 2).is_contiguous() for rotated in found)


@pytest.mark.parametrize("kernels", ["0"], indirect=True)
@pytest.mark.parametrize(
    ("size", "capability"),
    [(64, 90), *(pytest.param(size, 80, marks=pytest.mark.slow) for size in (21, 64, 80))],
)
def test_a_card_moves_each_number_once(
    size: int, capability: int, kernels: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled without a card: the interpreter takes Python that the compiler refuses."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    names, strides = kernels._rotate.arg_names, ("row", "head", "token")
    sizes = kernels.choose_tile(size)
    constants = {**sizes, "HAS_ROWS": size == 21, "query_column": 1, "key_column": 1}
    pointers = {**dict.fromkeys(("query", "key", "new_query", "new_key"), "*bf16"), "cos_sin": "*fp32"}
    types = {**dict.fromkeys(names, "i32"), **pointers, "direction": "fp32", **dict.fromkeys(constants, "constexpr")}
    aligned = {*pointers, *(name for name in names if name.endswith(strides) and size % 16 == 0)}
    source = ASTSource(
        kernels._rotate,
        types,
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    made = compile(source, target=GPUTarget("cuda", capability, 32))
    assert made.asm["cubin"]
    if size == 64:  # 16 bytes a time: two halves of queries and keys of each head, and cosines and sines before them
        moves = 2 * 2 * sizes["HEADS"]
        assert [made.asm["ptx"].count(f"{way}.global.v4.b32") for way in ("ld", "st")] == [moves + 4, moves]


# --- who has them ---


def train(model: Any, precision: torch.dtype) -> list[Any]:
    """Losses and tensors of five steps with dropout."""
    torch.manual_seed(1)
    (ids, mask), optimizer, losses = make_rows(), torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for _ in range(5):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision is BF16):
            scores = model(input_ids=ids, attention_mask=mask).logits
        loss = torch.nn.functional.cross_entropy(scores.float().flatten(0, 1), ids.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return [losses, *(param.detach() for param in model.parameters())]


@pytest.mark.parametrize(("precision", "attention", "is_recomputed"), [(FP32, "sdpa", False), (BF16, "eager", True)])
def test_steps_are_those_as_written(
    precision: torch.dtype, attention: str, is_recomputed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU to the last digit: base, adapters and modules of an odd size; copied and pickled on the way."""
    sizes = {"module_hidden_size": 12, "module_ffn_size": 8, "hidden_dropout_prob": 0.1}
    model = make_model(moved=0.1, **MODERN, **sizes).train()
    model.set_attn_implementation(attention)
    own = copy.deepcopy(model)
    monkeypatch.setattr(fused, "find_fault", lambda device: "")
    assert fused.fuse(own, CPU, is_asked=True) == ON
    own = pickle.loads(pickle.dumps(copy.deepcopy(own)))
    assert list_rotations(own) == 8 * [fused.rotate] and list_rotations(model) == 8 * [apply_rotary_pos_emb]
    if is_recomputed:
        for network in (model, own):
            checkpoint_activations(network)
    (losses, *expected), (own_losses, *found) = train(model, precision), train(own, precision)
    assert losses == own_losses and losses[-1] < losses[0]
    assert all(torch.equal(*pair) for pair in zip(expected, found, strict=True))
    assert KERNELS not in sys.modules


def list_rotations(model: torch.nn.Module) -> list[Any]:
    return [module.rotate for module in model.modules() if isinstance(module, HeadGroup)]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine on which they run: a card, Triton, a compiler and Python's headers, none of which is used."""
    for name in ("bin/gcc", "include/Python.h"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": str(tmp_path / "include")})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(fused, "find_spec", lambda name: name)
    return tmp_path


def change_nothing(machine: Path, patch: pytest.MonkeyPatch) -> None:
    pass


CHOICES: list[tuple[Callable[[Path, pytest.MonkeyPatch], object], str]] = [
    (change_nothing, ON),
    (lambda machine, patch: patch.setenv("CC", "gcc"), ON),
    (
        lambda machine, patch: (machine / "bin" / "gcc").rename(machine / "bin" / "clang"),
        ON,
    ),
    (
        lambda machine, patch: patch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5)),
        "off (asked; they need compute capability 8.0; this GPU has 7.5)",
    ),
    (
        lambda machine, patch: patch.setattr(fused, "find_spec", lambda name: None),
        "off (asked; they need Triton, which torch brings on Linux; this torch has none)",
    ),
    (
        lambda machine, patch: (machine / "bin" / "gcc").unlink(),
        "off (asked; they need a C compiler; install gcc or clang)",
    ),
    (
        lambda machine, patch: patch.setenv("CC", "gcc-99"),
        "off (asked; they need a C compiler; the variable CC is 'gcc-99', which is no program)",
    ),
    (
        lambda machine, patch: (machine / "include" / "Python.h").unlink(),
        "off (asked; they need Python's headers, and {}/include/Python.h is missing; install python3-dev)",
    ),
]


@pytest.mark.parametrize(("change", "says"), CHOICES)
def test_a_card_decides_and_says_why(
    change: Callable[[Path, pytest.MonkeyPatch], object], says: str, machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change(machine, monkeypatch)
    model = make_model(**MODERN)
    assert fused.fuse(model, CARD, is_asked=True) == says.format(machine)
    used = fused.rotate if says.startswith("on") else apply_rotary_pos_emb
    assert {*list_rotations(model)} == {used}


def test_what_is_not_asked_for_or_not_there_stays_as_written(machine: Path) -> None:
    for values, device, is_asked, says in (
        (MODERN, CARD, False, "off (not asked)"),
        (MODERN, CPU, True, "off (asked; they run on GPUs)"),
        ({}, CARD, True, "on (asked; LayerNorms of sums, losses of words)"),
    ):
        model = make_model(**values)
        assert fused.fuse(model, device, is_asked=is_asked) == says
        assert {*list_rotations(model)} == {apply_rotary_pos_emb}
