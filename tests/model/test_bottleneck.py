"""Bottleneck adapters: Houlsby's equations, counts, starts, layer ranges, and adapters at run time."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import make_config
from torch import Tensor, nn
from torch.nn import functional

from domext_ray.config.method import MethodConfig
from domext_ray.model.base import Base, load_base
from domext_ray.model.domext.configuration_domext import DomextConfig
from domext_ray.model.domext.heads_domext import DomextForTokenClassification
from domext_ray.model.domext.layers_domext import Layer
from domext_ray.model.domext.modeling_domext import DomextForMaskedLM, DomextModel
from domext_ray.model.spec import ModelSpec

HEADS = ("cls.predictions.", "bert.pooler.")


def make_encoder(**adapters: dict[str, Any]) -> DomextModel:
    torch.manual_seed(0)
    config = make_config(vocab_size=60, num_hidden_layers=3, adapters=adapters, adapter_init="paper")
    model = DomextModel(config).eval()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn(param.shape) * 0.1)
    return model


def build(base: Base, **method: object) -> DomextForMaskedLM:
    values = {"heads": 0, "ffn_units": 0, "bottleneck_size": 6, **method}
    return ModelSpec(base, MethodConfig(**values)).build().eval()


@pytest.fixture(scope="module")
def base(tiny_base_folder: Path) -> Base:
    return load_base(str(tiny_base_folder))


ACTIVATIONS = {"gelu": functional.gelu, "relu": torch.relu, "tanh": torch.tanh}


def normalize(inputs: Tensor) -> Tensor:
    return functional.layer_norm(inputs, inputs.shape[-1:], eps=1e-12)


def finish(output: nn.Module, projected: Tensor, residual: Tensor, **variant: Any) -> Tensor:
    """`LN(A(projected) + residual)` with the LayerNorm that the adapter trained."""
    total, weight, bias = projected + residual, output.LayerNorm.weight, output.LayerNorm.bias
    if "law" in output.adapters:
        adapter = output.adapters["law"]
        read = residual if variant.get("bottleneck_parallel") else projected
        if variant.get("bottleneck_layer_norm"):
            read = normalize(read) * adapter.input_norm.weight + adapter.input_norm.bias
        down = read @ adapter.down.weight.T + adapter.down.bias
        inner = ACTIVATIONS[variant.get("bottleneck_activation", "gelu")](down)
        total = total + inner @ adapter.up.weight.T + adapter.up.bias
        weight, bias = weight + adapter.norm.weight, bias + adapter.norm.bias
    return normalize(total) * weight + bias


PLACES = {"both": ["attention", "output"], "attention": ["attention"], "output": ["output"]}


VARIANTS = [
    {
        "bottleneck_activation": activation,
        "bottleneck_layer_norm": layer_norm,
        "bottleneck_place": place,
        "bottleneck_parallel": parallel,
    }
    for activation, layer_norm, place, parallel in product(ACTIVATIONS, (False, True), PLACES, (False, True))
]


def test_every_variant_follows_its_equations() -> None:
    for variant in VARIANTS:
        layer: Layer = make_encoder(law={"bottleneck_size": 5, **variant}).encoder.layer[1]
        sublayers = {"attention": layer.attention.output, "output": layer.output}
        placed = [name for name, sublayer in sublayers.items() if "law" in sublayer.adapters]
        assert placed == PLACES[variant["bottleneck_place"]]
        hidden_states = torch.randn(2, 7, 32)
        context, _ = layer.attention.self(hidden_states, None)
        attended = finish(layer.attention.output, layer.attention.output.dense(context), hidden_states, **variant)
        expected = finish(layer.output, layer.output.dense(layer.intermediate(attended)), attended, **variant)
        torch.testing.assert_close(
            layer(hidden_states, None)[0],
            expected,
            atol=1e-5,
            rtol=1e-5,
            msg=lambda text, own=variant: f"{own}: {text}",
        )


def test_every_variant_is_counted_starts_at_the_base_and_trains_alone(base: Base) -> None:
    ids = torch.randint(5, 200, (2, 9))
    with torch.no_grad():
        expected = build(base, bottleneck_size=0, trains="all")(ids).logits
    for variant in VARIANTS:
        model = build(base, **variant)
        with torch.no_grad():
            assert torch.equal(model(ids).logits, expected), variant
        method = MethodConfig(heads=0, ffn_units=0, bottleneck_size=6, **variant)
        counts = ModelSpec(base, method).counts
        places, layers, m, d = len(PLACES[variant["bottleneck_place"]]), 2, 6, 32
        one = 2 * m * d + d + m + 2 * d + (2 * d if variant["bottleneck_layer_norm"] else 0)
        assert counts.trainable == layers * places * one, variant
        assert counts.trainable == sum(param.numel() for param in model.parameters() if param.requires_grad)
        assert counts.total == sum(param.numel() for param in model.parameters())
        model(ids, labels=ids).loss.backward()
        with_gradient = {name for name, param in model.named_parameters() if param.grad is not None}
        assert with_gradient == {name for name, _ in model.named_parameters() if ".adapters." in name}, variant


def test_bert_base_with_64_in_12_layers() -> None:
    base = Base("bert", DomextConfig(), HEADS, "")
    for layer_norms, expected in ((True, 2_379_264 + 36_864), (False, 2_379_264)):
        method = MethodConfig(heads=0, ffn_units=0, bottleneck_size=64, bottleneck_norms=layer_norms)
        assert ModelSpec(base, method).counts.trainable == expected


def test_zero_start_is_the_base_exactly_and_the_papers_start_is_near(base: Base) -> None:
    ids = torch.randint(5, 200, (2, 9))
    plain = build(base, bottleneck_size=0, trains="all")
    with torch.no_grad():
        expected = plain(ids).logits
        assert torch.equal(build(base)(ids).logits, expected)
        near = [
            (build(base, init="paper", bottleneck_std=std)(ids).logits - expected).abs().max() for std in (0.01, 0.1)
        ]
    assert 0 < near[0] < 0.05 < near[1]


def test_the_papers_start_is_a_truncated_normal() -> None:
    adapters = {"law": {"bottleneck_size": 400}}
    torch.manual_seed(0)
    model = DomextModel(make_config(adapters=adapters, adapter_init="paper", bottleneck_std=0.03))
    adapter = model.encoder.layer[0].output.adapters["law"]
    for projection in (adapter.down, adapter.up):
        assert projection.weight.abs().max() <= 2 * 0.03 + 1e-6
        assert projection.weight.std().item() == pytest.approx(0.03 * 0.8796, rel=0.03)  # a normal cut at 2 sigma
        assert not projection.bias.any()


def test_rows_name_their_adapters() -> None:
    side = {"bottleneck_parallel": True, "bottleneck_layer_norm": True, "bottleneck_activation": "relu"}
    model = make_encoder(
        art={"bottleneck_size": 4, "heads": 1, "ffn_units": 2, "first_layer": 1},
        law={"bottleneck_size": 3, "layer_norms": False},
        zoo={"heads": 2},
        side={"bottleneck_size": 3, **side},
        top={"bottleneck_size": 4, "bottleneck_place": "output", "bottleneck_activation": "tanh"},
    )
    ids = torch.randint(1, 60, (9, 8))
    mask = torch.ones_like(ids)
    mask[::2, 5:] = 0
    names = ["art", "law", "__base__", "art", "zoo", "law", "side", "top", "side"]

    def run(row: int, active: set[str]) -> Tensor:
        model.set_active_adapters([] if "__base__" in active else sorted(active))
        return model(ids[[row]], attention_mask=mask[[row]]).last_hidden_state

    with torch.no_grad():
        expected = torch.cat([run(i, {name}) for i, name in enumerate(names)])
        both = torch.cat([run(i, {"zoo", name}) for i, name in enumerate(names)])
        model.set_active_adapters(None)
        found = model(ids, attention_mask=mask, adapter_names=names).last_hidden_state
        model.set_active_adapters(["zoo"])
        found_both = model(ids, attention_mask=mask, adapter_names=names).last_hidden_state
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(found_both, both, atol=1e-5, rtol=0)
    assert (found[0] - found_both[0]).abs().max() > 0.01


def test_adapters_come_and_go_at_run_time() -> None:
    model, ids = make_encoder(art={"bottleneck_size": 4}), torch.randint(1, 60, (2, 8))
    model.config.adapter_init = "zero"
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        expected = model(ids).last_hidden_state
        model.attach_adapter("law", bottleneck_size=3, heads=1, last_layer=1)
        assert torch.equal(model(ids).last_hidden_state, expected)
        model.encoder.layer[0].output.adapters["law"].up.bias.fill_(0.5)
        assert not torch.equal(model(ids).last_hidden_state, expected)
        model.set_active_adapters(["art"])
        assert torch.equal(model(ids).last_hidden_state, expected)
    model.detach_adapter("law")
    assert model.state_dict().keys() == tensors.keys() and list(model.config.adapters) == ["art"]
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in model.state_dict().items())
    head = DomextForTokenClassification(model.config)
    head.attach_adapter("law", heads=1)
    assert "bert.encoder.layer.0.attention.adapters.law.query.weight" in head.state_dict()
    head.detach_adapter("law")
    assert not any(".law." in name for name in head.state_dict())


def test_bad_names_and_sizes_are_one_sentence() -> None:
    ids = torch.ones(2, 3, dtype=torch.long)
    calls: list[tuple[Callable[[Any], object], str]] = [
        (lambda model: model.attach_adapter("art", heads=1), "has an adapter 'art' already"),
        (lambda model: model.attach_adapter("law"), "one must be above"),
        (lambda model: model.attach_adapter("law", bottleneck_size=2, last_layer=3), "the model has 0 to 2"),
        (lambda model: model.detach_adapter("law"), "names 'law'; the model has \\['art'\\]"),
        (lambda model: model.set_active_adapters(["law"]), "names 'law'"),
        (lambda model: model(ids, adapter_names=["art"]), "1 names; the batch has 2"),
        (lambda model: model(ids[:1], adapter_names=["law"]), "names 'law'"),
    ]
    for call, message in calls:
        with pytest.raises(ValueError, match=message):
            call(make_encoder(art={"bottleneck_size": 4}))
    with pytest.raises(ValueError, match="no adapters to choose from"):
        make_encoder().set_active_adapters([])
