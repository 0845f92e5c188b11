"""Layers with kernels of our own compute what they compute as written, and in how few operations.

The table counts what is dispatched in a middle layer, forward and backward, under autocast, over a base in bf16,
without dropout: views and memory that is not filled do not count. `test_kernels.py` has the kernels themselves.
"""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from tiny_models import VOCAB, make_rows
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from trained_methods import DROPOUT, LAYOUTS, METHODS, make_trainable, measure_difference

from domext_ray.model import fused
from domext_ray.model.build import store_base
from domext_ray.model.domext.layers_domext import COPY, compute_cos_sin
from domext_ray.model.joined import join_products
from domext_ray.training.losses import MaskedLoss
from domext_ray.training.objective import LOSS, MaskedBatch

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def fusible(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that runs the kernels, of which a CPU computes the formulas."""
    monkeypatch.setattr(fused, "find_fault", lambda device: "")


def run(model: Any, *, bf16: bool, num_chunks: int = 1) -> tuple[float, dict[str, Tensor]]:
    """The loss of masked words and its gradients, of the same draws every time."""
    ids, mask = make_rows()
    positions = mask.flatten().nonzero().flatten()[::3]
    labels = ids.flatten()[positions] % (VOCAB // 2)
    torch.manual_seed(1)
    objective = MaskedLoss(model, CPU, bf16=bf16, num_words=VOCAB, num_chunks=num_chunks).train()
    loss = objective(MaskedBatch(ids, mask, None, positions, labels, torch.ones(len(positions))))[LOSS]
    loss.backward()
    found = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    model.zero_grad()
    return loss.item(), found


QUICK = [("bert", "af", True), ("bert", "bottlenecks", True), ("bert", "exbert", False), ("modernbert", "full", True)]
ALL = [*itertools.product(("bert", "modernbert"), METHODS, (True, False))]


@pytest.mark.parametrize(
    ("layout", "method", "joined"),
    [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in ALL if case not in QUICK)],
)
def test_losses_and_gradients_are_those_of_layers_as_written(layout: str, method: str, joined: bool) -> None:
    """With dropout, of which both draw the same; in bf16 each number is rounded where it is as written."""
    for bf16, tolerance in ((False, 1e-6), (True, 1e-3)):
        model = make_trainable(method, **LAYOUTS[layout], **DROPOUT)
        own = copy.deepcopy(model)
        assert fused.fuse(own, CPU, is_asked=True).startswith("on")
        if joined:
            for network in (model, own):
                join_products(network, torch.bfloat16 if bf16 else torch.float32)
        (loss, grads), (own_loss, own_grads) = run(model, bf16=bf16), run(own, bf16=bf16, num_chunks=2)
        assert own_loss == pytest.approx(loss, rel=tolerance)
        assert measure_difference(grads, own_grads) < 10 * tolerance


# --- operations ---

AF = {"adapters": {"law": {"heads": 1, "ffn_units": 6}}}
COUNTS = {  # forward and backward, as written; with joined products; with these and kernels
    ("bert", "full"): ((26, 42), (18, 30), (14, 24)),
    ("bert", "af"): ((36, 54), (12, 28), (8, 22)),
    ("bert", "lora"): ((32, 42), (26, 33), (22, 27)),
    ("bert", "bottlenecks"): ((34, 42), (32, 39), (26, 33)),
    ("bert", "exbert"): ((46, 76), (35, 58), (27, 47)),
    ("modernbert", "full"): ((49, 72), (36, 54), (15, 28)),
    ("modernbert", "af"): ((79, 108), (32, 54), (11, 28)),
    ("modernbert", "lora"): ((53, 68), (46, 58), (25, 32)),
    ("modernbert", "bottlenecks"): ((57, 68), (54, 64), (33, 38)),
    ("modernbert", "exbert"): ((90, 132), (87, 128), (46, 79)),
}
"""As torch 2.13 dispatches them; AF Adapter has one head and some units, LoRA updates three matrices."""


class Operations(TorchDispatchMode):
    """Counts operations that compute something."""

    def __init__(self) -> None:
        super().__init__()
        self.names = list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        read, made = (
            {leaf.untyped_storage().data_ptr() for leaf in tree_leaves(of) if isinstance(leaf, Tensor)}
            for of in ((args, kwargs), outputs)
        )
        is_view = made and made <= read and not func._schema.is_mutable
        if not is_view and "empty" not in str(func):
            self.names.append(str(func))
        return outputs


PRODUCTS = {  # of matrices, of both passes, as written, and joined
    ("bert", "full"): (18, 12),
    ("bert", "af"): (30, 12),
    ("bert", "lora"): (30, 21),
    ("bert", "bottlenecks"): (24, 20),
    ("bert", "exbert"): (33, 21),
    ("modernbert", "full"): (21, 12),
    ("modernbert", "af"): (35, 12),
    ("modernbert", "lora"): (32, 21),
    ("modernbert", "bottlenecks"): (26, 20),
    ("modernbert", "exbert"): (38, 32),
}


def list_operations(layout: str, method: str, *, joined: bool, is_fused: bool) -> tuple[list[str], list[str]]:
    """Those of the layer between two others, forward and backward, on states such as the one before it leaves them."""
    model = make_trainable(method, **LAYOUTS[layout], **(AF if method == "af" else {}), num_hidden_layers=3)
    model.set_attn_implementation("sdpa")
    store_base(model, torch.bfloat16)
    fused.fuse(model, CPU, is_asked=is_fused)
    if joined:
        join_products(model, torch.bfloat16)
    config, places = model.config, torch.arange(12)[None]
    states = torch.randn(2, 12, config.hidden_size, requires_grad=True)
    if is_fused and not config.has_pre_norm:
        setattr(states, COPY, states.detach().bfloat16().requires_grad_())
    sizes = config.head_size, config.module_hidden_size // config.num_attention_heads
    is_rotary = config.position_rule == "rotary"
    angles = [compute_cos_sin(places, size, 1e4) if is_rotary and size else None for size in sizes]
    with torch.autocast("cpu", torch.bfloat16), Operations() as forward:
        output, _ = model.bert.encoder.layer[1](states, None, None, *angles)
    outputs = [output, *([getattr(output, COPY)] if hasattr(output, COPY) else [])]
    gradients = [torch.ones_like(tensor) for tensor in outputs]
    with Operations() as backward:
        torch.autograd.backward(outputs, gradients)
    return forward.names, backward.names


WAYS = ((False, False), (True, False), (True, True))


@pytest.mark.parametrize(("layout", "method"), COUNTS)
def test_a_layer_is_few_operations(layout: str, method: str) -> None:
    for (joined, is_fused), most in zip(WAYS, COUNTS[layout, method], strict=True):
        found = list_operations(layout, method, joined=joined, is_fused=is_fused)
        assert len(found[0]) <= most[0] and len(found[1]) <= most[1], (joined, is_fused)
        products = [
            operation for own in found for operation in own if operation.startswith(("aten.mm.", "aten.addmm."))
        ]
        assert len(products) == PRODUCTS[layout, method][joined], (joined, is_fused)
    assert (layout, method) != ("bert", "af") or sum(map(len, found)) <= 30
