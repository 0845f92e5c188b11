"""Attention from left to right: transformers' own decoder, every attention implementation, pooling; and the BiLSTM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BertLMHeadModel

from domext_ray.config.method import MethodConfig
from domext_ray.config.pretrain import ShapeConfig
from domext_ray.model.base import load_base
from domext_ray.model.build import build_model
from domext_ray.model.domext.configuration_domext import DomextConfig
from domext_ray.model.domext.heads_domext import StateBiLSTM
from domext_ray.model.domext.modeling_domext import DomextForMaskedLM, DomextModel

VOCAB, LENGTH = 90, 12
EVERYTHING: dict[str, Any] = {
    "adapters": {"law": {"heads": 1, "ffn_units": 6, "bottleneck_size": 4}, "art": {"heads": 2}},
    "module_hidden_size": 8,
    "module_ffn_size": 10,
    "adapter_init": "paper",
    "gate_bias": 0.0,
}
implementations = pytest.mark.parametrize("implementation", ["sdpa", "eager"])
paddings = pytest.mark.parametrize("padded", [False, True])


def make_encoder(implementation: str = "sdpa", **values: Any) -> DomextModel:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    config = DomextConfig(vocab_size=VOCAB, max_position_embeddings=24, initializer_range=0.2, **sizes, **values)
    config._attn_implementation = implementation
    return DomextModel(config).eval()


def make_rows(padded: bool = True) -> tuple[Tensor, Tensor | None]:
    ids = torch.randint(1, VOCAB, (3, LENGTH), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, 8:] = mask[2, 5:] = 0
    return ids, mask if padded else None


@paddings
@implementations
@torch.no_grad()
def test_a_token_sees_none_that_comes_after_it(implementation: str, padded: bool) -> None:
    model, (ids, mask) = make_encoder(implementation, causal=True, **EVERYTHING), make_rows(padded)
    changed = ids.clone()
    changed[:, 4] = (changed[:, 4] + 1) % VOCAB
    before, after = (model(each, attention_mask=mask).last_hidden_state for each in (ids, changed))
    assert torch.equal(before[:, :4], after[:, :4])
    assert ((before[:, 4:] - after[:, 4:]).abs().amax(dim=(0, 2)) > 1e-3).all()
    model.config.causal = False
    both = model(ids, attention_mask=mask).last_hidden_state
    assert ((both[:, :4] - before[:, :4]).abs().amax(dim=(0, 2)) > 1e-3).all()


@paddings
@torch.no_grad()
def test_the_implementations_agree(padded: bool) -> None:
    ids, mask = make_rows(padded)
    fused, eager = (
        make_encoder(each, causal=True, **EVERYTHING)(ids, attention_mask=mask).last_hidden_state
        for each in ("sdpa", "eager")
    )
    kept = slice(None) if mask is None else mask.bool()
    torch.testing.assert_close(fused[kept], eager[kept], atol=1e-5, rtol=0)


@implementations
@torch.no_grad()
def test_rows_may_name_adapters(implementation: str) -> None:
    model, (ids, _) = make_encoder(implementation, causal=True, **EVERYTHING), make_rows()
    names = ["law", "__base__", "art"]
    together = model(ids, adapter_names=names).last_hidden_state
    for i, name in enumerate(names):
        model.set_active_adapters([name] if name != "__base__" else [])
        torch.testing.assert_close(model(ids[i : i + 1]).last_hidden_state[0], together[i], atol=1e-5, rtol=0)


@implementations
@torch.no_grad()
def test_it_is_transformers_own_decoder(tiny_base_folder: Path, implementation: str) -> None:
    base, (ids, mask) = load_base(str(tiny_base_folder)), make_rows()
    decoder = BertLMHeadModel.from_pretrained(tiny_base_folder, is_decoder=True).eval()
    method = MethodConfig(trains="all", heads=0, ffn_units=0)
    size = base.config.vocab_size
    model = build_model(base, ShapeConfig(), method, vocab_size=size, causal=True, dropout=0.0, seed=0).eval()
    model.set_attn_implementation(implementation)
    assert mask is not None
    expected = decoder(ids, attention_mask=mask, use_cache=False).logits[mask.bool()]
    torch.testing.assert_close(model(ids, attention_mask=mask).logits[mask.bool()], expected, atol=1e-5, rtol=0)


@torch.no_grad()
def test_saving_keeps_the_direction(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, (ids, _) = DomextForMaskedLM(make_encoder(causal=True).config).eval(), make_rows()
    model.save_pretrained(tmp_path)
    again = DomextForMaskedLM.from_pretrained(tmp_path).eval()
    assert again.config.causal and again.config.has_extension
    assert torch.equal(again(ids).logits, model(ids).logits)


@torch.no_grad()
def test_the_pooler_reads_the_token_that_has_seen_the_row() -> None:
    ids, mask = make_rows()
    model = make_encoder(causal=True, has_pooler=True)
    assert model.pooler is not None
    encoded = model(ids, attention_mask=mask)
    last = encoded.last_hidden_state[[0, 1, 2], [LENGTH - 1, 7, 4]]
    torch.testing.assert_close(encoded.pooler_output, torch.tanh(model.pooler.dense(last)))
    torch.testing.assert_close(model(ids[2:, :5]).pooler_output, encoded.pooler_output[2:], atol=1e-5, rtol=0)
    both = make_encoder(has_pooler=True)
    encoded = both(ids, attention_mask=mask)
    expected = torch.tanh(both.pooler.dense(encoded.last_hidden_state[:, 0]))  # type: ignore[union-attr]
    torch.testing.assert_close(encoded.pooler_output, expected)


def make_bilstm(width: int = 5) -> tuple[StateBiLSTM, Tensor, Tensor]:
    torch.manual_seed(0)
    _, mask = make_rows()
    assert mask is not None
    bilstm = StateBiLSTM(DomextConfig(hidden_size=8, num_attention_heads=2, head_bilstm=width), 0.0)
    return bilstm, torch.randn(3, LENGTH, 8), mask


def read_backwards(lstm: nn.LSTM, states: Tensor) -> Tensor:
    """The backward direction of one row [N, d], written out."""
    hidden, cell, outputs = torch.zeros(lstm.hidden_size), torch.zeros(lstm.hidden_size), []
    for state in states.flip(0):
        gates = lstm.weight_ih_l0_reverse @ state + lstm.bias_ih_l0_reverse
        gates = gates + lstm.weight_hh_l0_reverse @ hidden + lstm.bias_hh_l0_reverse
        enter, forget, new, out = gates.chunk(4)
        cell = forget.sigmoid() * cell + enter.sigmoid() * new.tanh()
        hidden = out.sigmoid() * cell.tanh()
        outputs.append(hidden)
    return torch.stack(outputs[::-1])


@torch.no_grad()
def test_the_bilstm_starts_backwards_at_the_last_token() -> None:
    bilstm, states, mask = make_bilstm()
    together = bilstm([states], mask)
    assert together.shape == states.shape
    for row, length in enumerate(mask.sum(dim=1).tolist()):
        alone = states[row, :length]
        torch.testing.assert_close(bilstm([alone[None]])[0], together[row, :length])
        joined = torch.cat([bilstm.lstm(alone)[0][:, :5], read_backwards(bilstm.lstm, alone)], dim=-1)
        torch.testing.assert_close(bilstm.dense(joined), together[row, :length])
    changed = torch.where(mask[..., None].bool(), states, torch.randn(states.shape))
    assert torch.equal(bilstm([changed], mask), together)
    torch.testing.assert_close(bilstm([states], torch.ones_like(mask)), bilstm([states]))


def test_the_bilstm_trains_under_autocast() -> None:
    bilstm, states, mask = make_bilstm()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = bilstm([states.requires_grad_()], mask)
    outputs.float().square().sum().backward()
    assert all(each.grad is not None and each.grad.isfinite().all() for each in bilstm.parameters())
    assert states.grad is not None and not states.grad[1, 8:].any() and states.grad[1, :8].any()
    torch.testing.assert_close(outputs.float(), bilstm([states], mask), atol=0.05, rtol=0.05)
