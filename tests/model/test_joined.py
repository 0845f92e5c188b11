"""Joined products compute what layers compute as they are written: losses, gradients, dropout, and where they do not.

A model is run as written, and again when its products are joined.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tiny_models import make_rows
from torch import Tensor
from trained_methods import DROPOUT, LAYOUTS, METHODS, make_trainable, measure_difference

from domext_ray.model.domext.modeling_domext import BASE_NAME
from domext_ray.model.joined import JoinedLayer, JoinedLinear, join_products, list_joined, refresh


def run(model: Any, dtype: torch.dtype = torch.float32, **inputs: Any) -> tuple[float, dict[str, Tensor]]:
    """A loss and its gradients, of the same draws every time."""
    ids, mask = make_rows()
    torch.manual_seed(1)
    with torch.autocast("cpu", dtype, enabled=dtype is torch.bfloat16):
        logits = model(input_ids=ids, attention_mask=mask, **inputs).logits
    loss = logits.float().log_softmax(-1).square().mean()
    loss.backward()
    found = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    model.zero_grad()
    return loss.item(), found


def compare(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    """As `measure_difference` of gradients of which each is fp32 and a tensor of its own."""
    storages = [tensor.untyped_storage().data_ptr() for tensor in second.values()]
    assert len({*storages}) == len(storages) and {tensor.dtype for tensor in second.values()} == {torch.float32}
    return measure_difference(first, second)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_and_gradients_are_those_of_the_layers_as_written(layout: str, method: str) -> None:
    """With dropout, whose masks are drawn in the same order; within rounding, which columns that are joined change."""
    for attention, dropout in (("eager", {}), ("sdpa", {}), ("eager", DROPOUT)):
        model = make_trainable(method, **LAYOUTS[layout], **dropout)
        model.set_attn_implementation(attention)
        loss, grads = run(model)
        join_products(model, torch.float32)
        assert any(isinstance(module, JoinedLayer) for module in model.modules())
        joined_loss, joined_grads = run(model)
        assert joined_loss == pytest.approx(loss, rel=1e-6)
        assert compare(grads, joined_grads) < 1e-5


@pytest.mark.parametrize("method", METHODS)
def test_bf16_differs_by_its_rounding(method: str) -> None:
    """Of a base that is stored in bf16, and of one that is not; both are near fp32."""
    model = make_trainable(method)
    exact = run(model)
    as_written, joined = run(model, torch.bfloat16), None
    join_products(model, torch.bfloat16)
    joined = run(model, torch.bfloat16)
    for loss, grads in (as_written, joined):
        assert loss == pytest.approx(exact[0], rel=2e-3)
        assert compare(exact[1], grads) < 0.05
    assert compare(as_written[1], joined[1]) < 0.02


def count_products(model: Any) -> dict[str, int]:
    """Products of a matrix, and calls of attention, forward, in one layer."""
    from torch.profiler import profile

    ids, mask = make_rows()
    with profile() as profiler:
        model.bert.encoder.layer[0](torch.randn(*ids.shape, model.config.hidden_size, requires_grad=True), None)
    names = [event.name for event in profiler.events()]
    return {name: names.count(f"aten::{name}") for name in ("linear", "scaled_dot_product_attention")}


def test_there_are_fewer_products() -> None:
    """Queries, keys, values, output and units of each group: joined they are four, and attention is one call."""
    for method, before, after in (
        ("full", (6, 1), (4, 1)),
        ("af", (6 + 4 + 2 + 4, 3), (4, 1)),
        ("exbert", (6 + 7, 2), (4 + 4, 2)),
        ("bottlenecks", (6 + 4, 1), (4 + 4, 1)),
    ):
        model = make_trainable(method)
        model.set_attn_implementation("sdpa")
        assert tuple(count_products(model).values()) == before, method
        join_products(model, torch.float32)
        assert tuple(count_products(model).values()) == after, method


@pytest.fixture
def pair() -> Iterator[tuple[Any, Any]]:
    """A model as it is written, and the same one with its products joined."""
    model = make_trainable("af")
    joined = copy.deepcopy(model)
    join_products(joined, torch.float32)
    yield model, joined


def test_elsewhere_layers_compute_as_written(pair: tuple[Any, Any]) -> None:
    """To the last bit: in evaluation, without an adapter, at another scale, where rows have adapters of their own."""
    rows = {"adapter_names": ["law", "art", BASE_NAME]}
    for change, inputs in (
        (lambda model: model.eval(), {}),
        (lambda model: model.set_active_adapters(["law"]), {}),
        (lambda model: model.set_active_adapters([]), {}),
        (lambda model: model.set_adapter_scale("art", 0.5), {}),
        (lambda model: None, rows),
    ):
        ids, mask = make_rows()
        logits = []
        for model in map(copy.deepcopy, pair):
            change(model)
            with torch.no_grad():
                logits.append(model(input_ids=ids, attention_mask=mask, **inputs).logits)
        assert torch.equal(*logits)


def test_a_model_keeps_its_parameters(pair: tuple[Any, Any]) -> None:
    """Their names, values, and what of them trains; what is joined is in no file."""
    model, joined = pair
    assert [*model.state_dict()] == [*joined.state_dict()]
    assert all(torch.equal(tensor, joined.state_dict()[name]) for name, tensor in model.state_dict().items())
    trains = [(name, param.requires_grad) for name, param in model.named_parameters()]
    assert trains == [(name, param.requires_grad) for name, param in joined.named_parameters()]


def test_what_trains_is_copied_and_what_is_frozen_is_shared(pair: tuple[Any, Any]) -> None:
    _, model = pair
    before = run(model)[0]
    with torch.no_grad():
        for param in model.parameters():
            if param.requires_grad:
                param.add_(torch.randn_like(param), alpha=0.1)
    stale = run(model)[0]
    refresh(list_joined(model))
    renewed, expected = run(model)[0], run(make_copy(model))[0]
    assert before != renewed and stale != renewed and renewed == pytest.approx(expected, rel=1e-6)
    layer = model.bert.encoder.layer[0]
    key, joined = layer.attention.self.key.weight, layer.projections.weight
    assert key.untyped_storage().data_ptr() == joined.untyped_storage().data_ptr(), "the base's rows are stored once"
    kept = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in model.parameters()}
    whole = kept | {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in model.buffers()
    }
    own = {id(tensor): tensor.nbytes for tensor in (*model.parameters(), *model.buffers())}
    more = sum(module.num_copied_bytes for module in model.modules() if isinstance(module, JoinedLinear))
    joined_bytes = sum(b.nbytes for e in model.modules() if isinstance(e, JoinedLinear) for b in e.buffers())
    assert sum(whole.values()) == sum(own.values()) - joined_bytes + more


def make_copy(model: Any) -> Any:
    """The same model as it is written."""
    plain = make_trainable("af")
    plain.load_state_dict(model.state_dict())
    return plain


def test_each_gradient_comes_once(pair: tuple[Any, Any]) -> None:
    """As hooks on parameters count them, which reduce a gradient that is whole."""
    for model in pair:
        seen = list[str]()
        for name, param in model.named_parameters():
            if param.requires_grad:
                param.register_post_accumulate_grad_hook(lambda _, name=name, seen=seen: seen.append(name))
        run(model)
        assert sorted(seen) == sorted(name for name, tensor in model.named_parameters() if tensor.requires_grad)
