"""Extensions against the paper's equations, written out with concatenated weights."""

from __future__ import annotations

import pytest
import torch
from tiny_models import make_config
from torch import Tensor, nn

from domext_ray.model.domext.configuration_domext import DomextConfig, complete_adapter
from domext_ray.model.domext.layers_domext import Attention, Layer, LayerNorm, Linear
from domext_ray.model.domext.words_domext import Embeddings

NUM_HEADS, NUM_EXTRA, NUM_UNITS, WIDTH = 4, 3, 10, 32


@pytest.fixture
def config() -> DomextConfig:
    adapters = {"law": {"heads": NUM_EXTRA, "ffn_units": NUM_UNITS}}
    config = make_config(vocab_size=60, max_position_embeddings=16, adapters=adapters, adapter_init="paper")
    config._attn_implementation = "sdpa"
    return config


@pytest.fixture
def layer(config: DomextConfig) -> Layer:
    torch.manual_seed(0)
    layer = Layer(config)
    for param in layer.parameters():
        nn.init.normal_(param, std=0.3)
    return layer


def join_rows(base: nn.Linear, extra: nn.Linear, inputs: Tensor) -> Tensor:
    """`x [W : W'] + [b : b']`."""
    return nn.functional.linear(inputs, torch.cat([base.weight, extra.weight]), torch.cat([base.bias, extra.bias]))


def join_columns(base: nn.Linear, extra: nn.Linear, inputs: Tensor) -> Tensor:
    """`x [W over W'] + b + b'`."""
    return nn.functional.linear(inputs, torch.cat([base.weight, extra.weight], dim=1), base.bias + extra.bias)


def attend_by_the_paper(attention: Attention, hidden_states: Tensor) -> Tensor:
    base, extra = attention.self, attention.adapters["law"]
    split = (*hidden_states.shape[:2], NUM_HEADS + NUM_EXTRA, WIDTH // NUM_HEADS)
    query, key, value = (
        join_rows(getattr(base, name), getattr(extra, name), hidden_states).view(split).transpose(1, 2)
        for name in ("query", "key", "value")
    )
    weights = torch.softmax(query @ key.transpose(2, 3) / (WIDTH // NUM_HEADS) ** 0.5, dim=-1)
    context = (weights @ value).transpose(1, 2).flatten(2)
    projected = join_columns(attention.output.dense, extra.output, context)
    return attention.output.LayerNorm(projected + hidden_states)


def test_a_layer_follows_the_equations(layer: Layer) -> None:
    hidden_states = torch.randn(2, 7, WIDTH)
    attended = attend_by_the_paper(layer.attention, hidden_states)
    inner = nn.functional.gelu(join_rows(layer.intermediate.dense, layer.adapters["law"].input, attended))
    expected = layer.output.LayerNorm(join_columns(layer.output.dense, layer.adapters["law"].output, inner) + attended)
    found, weights = layer(hidden_states, None)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert weights is None


def test_deltas_of_the_active_adapters_are_summed(config: DomextConfig) -> None:
    sizes = {"art": {"heads": 1, "ffn_units": 2}, "law": {"heads": 2, "ffn_units": 3}}
    config.adapters = {name: complete_adapter(name, size, 1) for name, size in sizes.items()}
    attention = Layer(config).attention
    for param in attention.parameters():
        nn.init.normal_(param, std=0.3)
    hidden_states = torch.randn(2, 5, WIDTH)
    context, _ = attention.self(hidden_states, None)
    for active in ([], ["law"], ["art"], ["art", "law"]):
        projected = attention.output.dense(context)
        for name in active:
            projected = projected + attention.adapters[name](hidden_states, None)
        config.active_adapters = active
        expected = attention.output.LayerNorm(projected + hidden_states)
        assert torch.equal(attention(hidden_states, None)[0], expected), active


def test_tables_stored_in_bf16_serve_fp32_inputs(config: DomextConfig) -> None:
    """Embeddings are summed in fp32."""
    for autocast in (False, True):
        linear, norm = Linear(8, 8).bfloat16(), LayerNorm(8)
        inputs = torch.randn(3, 8)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            projected = linear(inputs)
            assert projected.dtype == (torch.bfloat16 if autocast else torch.float32)
            assert norm(projected).dtype == torch.float32
        expected = nn.functional.linear(inputs, linear.weight.float(), linear.bias.float())
        torch.testing.assert_close(projected.float(), expected, atol=0.03 if autocast else 1e-6, rtol=0.02)
    embeddings = Embeddings(config).eval()
    for name in ("word_embeddings", "position_embeddings", "token_type_embeddings"):
        param = getattr(embeddings, name).weight
        param.data = param.data.bfloat16()
    ids = torch.randint(0, 60, (2, 6))
    tables = [embeddings.word_embeddings.weight[ids], embeddings.token_type_embeddings.weight[0]]
    total = tables[0].float() + tables[1].float() + embeddings.position_embeddings.weight[:6].float()
    assert torch.equal(embeddings(ids, None, None, None), embeddings.LayerNorm(total))


def test_sizes_of_zero_make_no_parameters(config: DomextConfig) -> None:
    config.adapters = {"law": complete_adapter("law", {"ffn_units": 4}, 1)}
    names = [name for name, _ in Layer(config).named_parameters()]
    assert [name for name in names if "adapters" in name] == [
        f"adapters.law.{name}" for name in ("input.weight", "input.bias", "output.weight", "output.bias")
    ]


def test_the_first_layer_keeps_no_graph_of_its_frozen_heads(layer: Layer) -> None:
    layer.requires_grad_(False)
    for extension in (layer.attention.adapters, layer.adapters):
        extension.requires_grad_(True)
    context, _ = layer.attention.self(torch.randn(2, 5, WIDTH), None)
    assert not context.requires_grad


def test_a_row_longer_than_the_position_table_is_refused(config: DomextConfig) -> None:
    with pytest.raises(ValueError, match="a row has 17 tokens; the model has positions for 16"):
        Embeddings(config)(torch.zeros(1, 17, dtype=torch.long), None, None, None)
