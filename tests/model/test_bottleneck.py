"""Bottleneck adapters: Houlsby's equations, closed-form counts, starts, layer ranges, and domains at run time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from domext_ray.config import MethodConfig, ShapeConfig
from domext_ray.model.base import Base, load_base
from domext_ray.model.configuration_domext import DomextConfig
from domext_ray.model.counts import count_bottleneck_parameters, count_parameters
from domext_ray.model.graft import build_model
from domext_ray.model.layers_domext import Bottleneck, Layer
from domext_ray.model.modeling_domext import DomextForMaskedLM, DomextModel

SIZES = {"vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48}
HEADS = ("cls.predictions.", "bert.pooler.")


def make_encoder(**domains: dict[str, int]) -> DomextModel:
    torch.manual_seed(0)
    config = DomextConfig(**SIZES, max_position_embeddings=16, domains=domains, domain_init="paper")
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


def finish(output: nn.Module, projected: Tensor, residual: Tensor) -> Tensor:
    """`LN(A(projected) + residual)` with the LayerNorm that the domain trained."""
    adapter = output.domains["law"]
    down = projected @ adapter.down.weight.T + adapter.down.bias
    inner = down * 0.5 * (1 + torch.erf(down / 2**0.5))
    total = projected + inner @ adapter.up.weight.T + adapter.up.bias + residual
    centered = total - total.mean(-1, keepdim=True)
    normalized = centered / (centered.square().mean(-1, keepdim=True) + 1e-12).sqrt()
    weight, bias = output.LayerNorm.weight + adapter.norm.weight, output.LayerNorm.bias + adapter.norm.bias
    return normalized * weight + bias


def test_a_layer_follows_the_equations() -> None:
    layer: Layer = make_encoder(law={"bottleneck_size": 5}).encoder.layer[1]
    hidden_states = torch.randn(2, 7, 32)
    context, _ = layer.attention.self(hidden_states, None)
    attended = finish(layer.attention.output, layer.attention.output.dense(context), hidden_states)
    expected = finish(layer.output, layer.output.dense(layer.intermediate(attended)), attended)
    torch.testing.assert_close(layer(hidden_states, None)[0], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("width", "size"), [(768, 64), (384, 1), (32, 512)])
def test_one_bottleneck_has_2md_d_and_m_parameters(width: int, size: int) -> None:
    bottleneck = Bottleneck(DomextConfig(hidden_size=width, num_attention_heads=4), size, layer_norm=False)
    assert sum(each.numel() for each in bottleneck.parameters()) == 2 * size * width + width + size
    assert count_bottleneck_parameters(width, size) == 2 * size * width + width + size


def test_bert_base_with_64_in_12_layers() -> None:
    method = MethodConfig(heads=0, ffn_units=0, bottleneck_size=64)
    domains = {"domain": {"bottleneck_size": 64}}
    assert count_parameters(DomextConfig(domains=domains), method, HEADS).trainable == 2_379_264 + 36_864
    domains["domain"]["layer_norms"] = False
    assert count_parameters(DomextConfig(domains=domains), method, HEADS).trainable == 2_379_264


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
    config = DomextConfig(**SIZES, domains={"law": {"bottleneck_size": 400}}, domain_init="paper", bottleneck_std=0.03)
    torch.manual_seed(0)
    adapter = DomextModel(config).encoder.layer[0].output.domains["law"]
    for projection in (adapter.down, adapter.up):
        assert projection.weight.abs().max() <= 2 * 0.03 + 1e-6
        assert projection.weight.std().item() == pytest.approx(0.03 * 0.8796, rel=0.03)  # a normal cut at 2 sigma
        assert not projection.bias.any()


def test_layers_of_its_own(base: Base) -> None:
    model = build(base, layers="1", heads=1, ffn_units=3)
    placed = {name.split(".")[3] for name, _ in model.named_parameters() if ".domains." in name}
    assert placed == {"1"}
    method = MethodConfig(heads=1, ffn_units=3, bottleneck_size=6, layers="1")
    counts = count_parameters(model.config, method, base.heads)
    assert counts.trainable == sum(each.numel() for each in model.parameters() if each.requires_grad)
    assert counts.total == sum(each.numel() for each in model.parameters())


def test_rows_name_their_domains() -> None:
    model = make_encoder(
        art={"bottleneck_size": 4, "heads": 1, "ffn_units": 2, "first_layer": 1},
        law={"bottleneck_size": 3, "layer_norms": False},
        zoo={"heads": 2},
    )
    ids = torch.randint(1, 60, (6, 8))
    mask = torch.ones_like(ids)
    mask[::2, 5:] = 0
    names = ["art", "law", "__base__", "art", "zoo", "law"]

    def run(rows: list[int], active: list[str]) -> Tensor:
        model.set_active_domains(active)
        return model(ids[rows], attention_mask=mask[rows]).last_hidden_state

    with torch.no_grad():
        expected = torch.cat([run([i], [] if name == "__base__" else [name]) for i, name in enumerate(names)])
        both = torch.cat([run([i], sorted({"zoo", name} - {"__base__"})) for i, name in enumerate(names)])
        model.set_active_domains(None)
        found = model(ids, attention_mask=mask, adapter_names=names).last_hidden_state
        model.set_active_domains(["zoo"])
        found_both = model(ids, attention_mask=mask, adapter_names=names).last_hidden_state
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(found_both, both, atol=1e-5, rtol=0)
    assert (found[0] - found_both[0]).abs().max() > 0.01


def test_domains_come_and_go_at_run_time() -> None:
    model, ids = make_encoder(art={"bottleneck_size": 4}), torch.randint(1, 60, (2, 8))
    model.config.domain_init = "zero"
    tensors = {name: each.clone() for name, each in model.state_dict().items()}
    with torch.no_grad():
        expected = model(ids).last_hidden_state
        model.add_domain("law", bottleneck_size=3, heads=1, last_layer=1)
        assert torch.equal(model(ids).last_hidden_state, expected)
        model.encoder.layer[0].output.domains["law"].up.bias.fill_(0.5)
        assert not torch.equal(model(ids).last_hidden_state, expected)
        model.set_active_domains(["art"])
        assert torch.equal(model(ids).last_hidden_state, expected)
    model.drop_domain("law")
    assert model.state_dict().keys() == tensors.keys() and list(model.config.domains) == ["art"]
    assert all(torch.equal(each, tensors[name]) for name, each in model.state_dict().items())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda model: model.add_domain("art", heads=1), "has a domain 'art' already"),
        (lambda model: model.add_domain("law"), "one must be above"),
        (lambda model: model.add_domain("law", bottleneck_size=2, last_layer=3), "the model has 0 to 2"),
        (lambda model: model.drop_domain("law"), "names 'law'; the model has \\['art'\\]"),
        (lambda model: model.set_active_domains(["law"]), "names 'law'"),
        (lambda model: model(torch.ones(2, 3, dtype=torch.long), adapter_names=["art"]), "1 names; the batch has 2"),
        (lambda model: model(torch.ones(1, 3, dtype=torch.long), adapter_names=["law"]), "names 'law'"),
    ],
)
def test_bad_names_and_sizes_are_one_sentence(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(make_encoder(art={"bottleneck_size": 4}))
