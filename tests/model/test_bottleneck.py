"""Bottleneck adapters: Houlsby's equations, counts, starts, layer ranges, and adapters at run time."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from domext_ray.config.method import MethodConfig
from domext_ray.config.pretrain import ShapeConfig
from domext_ray.model.base import Base, load_base
from domext_ray.model.build import Extensions, build_model, describe_shape
from domext_ray.model.counts import count_parameters
from domext_ray.model.domext.configuration_domext import DomextConfig, complete_adapter
from domext_ray.model.domext.heads_domext import DomextForTokenClassification
from domext_ray.model.domext.layers_domext import Bottleneck, Layer
from domext_ray.model.domext.modeling_domext import DomextForMaskedLM, DomextModel

SIZES = {"vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48}
HEADS = ("cls.predictions.", "bert.pooler.")


def make_encoder(**adapters: dict[str, Any]) -> DomextModel:
    torch.manual_seed(0)
    config = DomextConfig(**SIZES, max_position_embeddings=16, adapters=adapters, adapter_init="paper")
    model = DomextModel(config).eval()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn(param.shape) * 0.1)
    return model


def build(base: Base, **method: object) -> DomextForMaskedLM:
    values = {"heads": 0, "ffn_units": 0, "bottleneck_size": 6, **method}
    return build_model(
        base, ShapeConfig(), MethodConfig(**values), vocab_size=base.config.vocab_size, dropout=0.0, seed=0
    ).eval()


@pytest.fixture(scope="module")
def base(tiny_base_folder: Path) -> Base:
    return load_base(str(tiny_base_folder))


ACTIVATIONS = {
    "gelu": lambda x: x * 0.5 * (1 + torch.erf(x / 2**0.5)),
    "relu": lambda x: torch.where(x > 0, x, 0.0),
    "tanh": lambda x: (x.exp() - (-x).exp()) / (x.exp() + (-x).exp()),
}


def normalize(inputs: Tensor) -> Tensor:
    centered = inputs - inputs.mean(-1, keepdim=True)
    return centered / (centered.square().mean(-1, keepdim=True) + 1e-12).sqrt()


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


def test_a_layer_follows_the_equations() -> None:
    layer: Layer = make_encoder(law={"bottleneck_size": 5}).encoder.layer[1]
    hidden_states = torch.randn(2, 7, 32)
    context, _ = layer.attention.self(hidden_states, None)
    attended = finish(layer.attention.output, layer.attention.output.dense(context), hidden_states)
    expected = finish(layer.output, layer.output.dense(layer.intermediate(attended)), attended)
    torch.testing.assert_close(layer(hidden_states, None)[0], expected, atol=1e-5, rtol=1e-5)


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
each_variant = pytest.mark.parametrize(
    "variant", VARIANTS, ids=["-".join(map(str, each.values())) for each in VARIANTS]
)


@each_variant
def test_a_variant_follows_its_equations(variant: dict[str, Any]) -> None:
    layer: Layer = make_encoder(law={"bottleneck_size": 5, **variant}).encoder.layer[1]
    sublayers = {"attention": layer.attention.output, "output": layer.output}
    assert [name for name, each in sublayers.items() if "law" in each.adapters] == PLACES[variant["bottleneck_place"]]
    hidden_states = torch.randn(2, 7, 32)
    context, _ = layer.attention.self(hidden_states, None)
    attended = finish(layer.attention.output, layer.attention.output.dense(context), hidden_states, **variant)
    expected = finish(layer.output, layer.output.dense(layer.intermediate(attended)), attended, **variant)
    torch.testing.assert_close(layer(hidden_states, None)[0], expected, atol=1e-5, rtol=1e-5)


@each_variant
def test_a_variant_is_counted_starts_at_the_base_and_trains_alone(variant: dict[str, Any], base: Base) -> None:
    ids = torch.randint(5, 200, (2, 9))
    plain, model = build(base, bottleneck_size=0, trains="all"), build(base, **variant)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, plain(ids).logits)
    counts = count_parameters(
        model.config, MethodConfig(heads=0, ffn_units=0, bottleneck_size=6, **variant), base.heads
    )
    places, layers, m, d = len(PLACES[variant["bottleneck_place"]]), 2, 6, 32
    one = 2 * m * d + d + m + 2 * d + (2 * d if variant["bottleneck_layer_norm"] else 0)
    assert counts.trainable == layers * places * one
    assert counts.trainable == sum(each.numel() for each in model.parameters() if each.requires_grad)
    assert counts.total == sum(each.numel() for each in model.parameters())
    model(ids, labels=ids).loss.backward()
    with_gradient = {name for name, each in model.named_parameters() if each.grad is not None}
    assert with_gradient == {name for name, _ in model.named_parameters() if ".adapters." in name}


def test_variants_survive_saving(tmp_path: Path) -> None:
    variant = {"bottleneck_activation": "tanh", "bottleneck_layer_norm": True, "bottleneck_parallel": True}
    model, ids = make_encoder(law={"bottleneck_size": 5, **variant}, art={"heads": 1}), torch.randint(1, 60, (2, 8))
    model.save_pretrained(tmp_path)
    again = DomextModel.from_pretrained(tmp_path).eval()
    assert again.config.adapters == model.config.adapters
    with torch.no_grad():
        assert torch.equal(again(ids).last_hidden_state, model(ids).last_hidden_state)


def test_what_an_earlier_version_wrote_of_its_adapters_is_completed(base: Base) -> None:
    """A checkpoint's record and a bank's entry from before the variants have none of their keys."""
    old = {"heads": 0, "ffn_units": 0, "bottleneck_size": 4, "layer_norms": True, "first_layer": 0, "last_layer": 1}
    method = MethodConfig(heads=0, ffn_units=0, bottleneck_size=4, adapter="law")
    size = base.config.vocab_size
    again = describe_shape(base, ShapeConfig(), method, vocab_size=size, earlier=Extensions({"law": old}))
    fresh = describe_shape(base, ShapeConfig(), method, vocab_size=size)
    assert again.adapters == fresh.adapters
    other = MethodConfig(heads=1, ffn_units=0, adapter="art")
    beside = describe_shape(base, ShapeConfig(), other, vocab_size=size, earlier=Extensions({"law": old}))
    DomextForMaskedLM(beside)
    assert beside.adapters["law"] == fresh.adapters["law"]


@pytest.mark.parametrize(("width", "size"), [(768, 64), (384, 1), (32, 512)])
def test_one_bottleneck_has_2md_d_and_m_parameters(width: int, size: int) -> None:
    adapter = complete_adapter("law", {"bottleneck_size": size, "layer_norms": False}, 1)
    bottleneck = Bottleneck(DomextConfig(hidden_size=width, num_attention_heads=4), adapter)
    assert sum(each.numel() for each in bottleneck.parameters()) == 2 * size * width + width + size


def test_bert_base_with_64_in_12_layers() -> None:
    method = MethodConfig(heads=0, ffn_units=0, bottleneck_size=64)
    adapters = {"domain": {"bottleneck_size": 64}}
    assert count_parameters(DomextConfig(adapters=adapters), method, HEADS).trainable == 2_379_264 + 36_864
    adapters["domain"]["layer_norms"] = False
    assert count_parameters(DomextConfig(adapters=adapters), method, HEADS).trainable == 2_379_264


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
    config = DomextConfig(
        **SIZES, adapters={"law": {"bottleneck_size": 400}}, adapter_init="paper", bottleneck_std=0.03
    )
    torch.manual_seed(0)
    adapter = DomextModel(config).encoder.layer[0].output.adapters["law"]
    for projection in (adapter.down, adapter.up):
        assert projection.weight.abs().max() <= 2 * 0.03 + 1e-6
        assert projection.weight.std().item() == pytest.approx(0.03 * 0.8796, rel=0.03)  # a normal cut at 2 sigma
        assert not projection.bias.any()


def test_layers_of_its_own(base: Base) -> None:
    model = build(base, layers="1", heads=1, ffn_units=3)
    placed = {name.split(".")[3] for name, _ in model.named_parameters() if ".adapters." in name}
    assert placed == {"1"}
    method = MethodConfig(heads=1, ffn_units=3, bottleneck_size=6, layers="1")
    counts = count_parameters(model.config, method, base.heads)
    assert counts.trainable == sum(each.numel() for each in model.parameters() if each.requires_grad)
    assert counts.total == sum(each.numel() for each in model.parameters())


def test_rows_name_their_adapters() -> None:
    model = make_encoder(
        art={"bottleneck_size": 4, "heads": 1, "ffn_units": 2, "first_layer": 1},
        law={"bottleneck_size": 3, "layer_norms": False},
        zoo={"heads": 2},
        side={
            "bottleneck_size": 3,
            "bottleneck_parallel": True,
            "bottleneck_layer_norm": True,
            "bottleneck_activation": "relu",
        },
        top={"bottleneck_size": 4, "bottleneck_place": "output", "bottleneck_activation": "tanh"},
    )
    ids = torch.randint(1, 60, (9, 8))
    mask = torch.ones_like(ids)
    mask[::2, 5:] = 0
    names = ["art", "law", "__base__", "art", "zoo", "law", "side", "top", "side"]

    def run(rows: list[int], active: list[str]) -> Tensor:
        model.set_active_adapters(active)
        return model(ids[rows], attention_mask=mask[rows]).last_hidden_state

    with torch.no_grad():
        expected = torch.cat([run([i], [] if name == "__base__" else [name]) for i, name in enumerate(names)])
        both = torch.cat(
            [run([i], [] if name == "__base__" else sorted({"zoo", name})) for i, name in enumerate(names)]
        )
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
    tensors = {name: each.clone() for name, each in model.state_dict().items()}
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
    assert all(torch.equal(each, tensors[name]) for name, each in model.state_dict().items())
    head = DomextForTokenClassification(model.config)
    head.attach_adapter("law", heads=1)
    assert "bert.encoder.layer.0.attention.adapters.law.query.weight" in head.state_dict()
    head.detach_adapter("law")
    assert not any(".law." in name for name in head.state_dict())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda model: model.attach_adapter("art", heads=1), "has an adapter 'art' already"),
        (lambda model: model.attach_adapter("law"), "one must be above"),
        (lambda model: model.attach_adapter("law", bottleneck_size=2, last_layer=3), "the model has 0 to 2"),
        (lambda model: model.detach_adapter("law"), "names 'law'; the model has \\['art'\\]"),
        (lambda model: model.set_active_adapters(["law"]), "names 'law'"),
        (lambda model: model(torch.ones(2, 3, dtype=torch.long), adapter_names=["art"]), "1 names; the batch has 2"),
        (lambda model: model(torch.ones(1, 3, dtype=torch.long), adapter_names=["law"]), "names 'law'"),
    ],
)
def test_bad_names_and_sizes_are_one_sentence(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(make_encoder(art={"bottleneck_size": 4}))
