"""Attention from left to right: transformers' own decoder, every attention implementation, pooling; and the BiLSTM."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import torch
from tiny_models import LENGTH, MODERN, VOCAB, make_rows
from tiny_models import make_model as make_tiny_model
from torch import Tensor, nn
from transformers import BertLMHeadModel

from domext_ray.config.method import MethodConfig
from domext_ray.model.base import load_base
from domext_ray.model.domext.configuration_domext import DomextConfig
from domext_ray.model.domext.heads_domext import StateBiLSTM
from domext_ray.model.domext.modeling_domext import DomextForMaskedLM, DomextModel
from domext_ray.model.spec import ModelSpec

EVERYTHING: dict[str, Any] = {
    "adapters": {"law": {"heads": 1, "ffn_units": 6, "bottleneck_size": 4}, "art": {"heads": 2}},
    **{"module_hidden_size": 8, "module_ffn_size": 10, "adapter_init": "paper", "gate_bias": 0.0},
}


IDS, MASK = make_rows()


def make_encoder(implementation: str = "sdpa", **values: Any) -> DomextModel:
    return make_tiny_model(DomextModel, attn_implementation=implementation, **values)


@torch.no_grad()
def test_a_token_sees_none_that_comes_after_it() -> None:
    for implementation, mask in product(("sdpa", "eager"), (MASK, None)):
        model = make_encoder(implementation, causal=True, **EVERYTHING)
        changed = IDS.clone()
        changed[:, 4] = (changed[:, 4] + 1) % VOCAB
        before, after = (model(ids, attention_mask=mask).last_hidden_state for ids in (IDS, changed))
        assert torch.equal(before[:, :4], after[:, :4])
        assert ((before[:, 4:] - after[:, 4:]).abs().amax(dim=(0, 2)) > 1e-3).all()
        model.config.causal = False
        both = model(IDS, attention_mask=mask).last_hidden_state
        assert ((both[:, :4] - before[:, :4]).abs().amax(dim=(0, 2)) > 1e-3).all()


@torch.no_grad()
def test_the_implementations_agree_in_both_directions() -> None:
    for causal, mask in product((True, False), (MASK, None)):
        fused, eager = (
            make_encoder(attention, causal=causal, **EVERYTHING)(IDS, attention_mask=mask).last_hidden_state
            for attention in ("sdpa", "eager")
        )
        kept = slice(None) if mask is None else mask.bool()
        torch.testing.assert_close(fused[kept], eager[kept], atol=1e-5, rtol=0)


@torch.no_grad()
def test_rows_may_name_adapters() -> None:
    names = ["law", "__base__", "art"]
    for implementation, layout in product(("sdpa", "eager"), ({"causal": True}, MODERN)):
        model = make_encoder(implementation, **layout, **EVERYTHING)
        together = model(IDS, adapter_names=names).last_hidden_state
        for i, name in enumerate(names):
            model.set_active_adapters([name] if name != "__base__" else [])
            torch.testing.assert_close(model(IDS[i : i + 1]).last_hidden_state[0], together[i], atol=1e-5, rtol=0)


@torch.no_grad()
def test_it_is_transformers_own_decoder(tiny_base_folder: Path) -> None:
    base = load_base(str(tiny_base_folder))
    decoder = BertLMHeadModel.from_pretrained(tiny_base_folder, is_decoder=True).eval()
    expected = decoder(IDS, attention_mask=MASK, use_cache=False).logits[MASK.bool()]
    method = MethodConfig(trains="all", heads=0, ffn_units=0)
    model = ModelSpec(base, method, causal=True).build().eval()
    for implementation in ("sdpa", "eager"):
        model.set_attn_implementation(implementation)
        torch.testing.assert_close(model(IDS, attention_mask=MASK).logits[MASK.bool()], expected, atol=1e-5, rtol=0)


@torch.no_grad()
def test_saving_keeps_the_direction(tmp_path: Path) -> None:
    model = make_tiny_model(DomextForMaskedLM, adapters={}, causal=True)
    model.save_pretrained(tmp_path)
    again = DomextForMaskedLM.from_pretrained(tmp_path).eval()
    assert again.config.causal and again.config.has_extension
    assert torch.equal(again(IDS).logits, model(IDS).logits)


@torch.no_grad()
def test_the_pooler_reads_the_token_that_has_seen_the_row() -> None:
    model = make_encoder(causal=True, has_pooler=True)
    assert model.pooler is not None
    encoded = model(IDS, attention_mask=MASK)
    last = encoded.last_hidden_state[[0, 1, 2], [LENGTH - 1, 7, 4]]
    torch.testing.assert_close(encoded.pooler_output, torch.tanh(model.pooler.dense(last)))
    torch.testing.assert_close(model(IDS[2:, :5]).pooler_output, encoded.pooler_output[2:], atol=1e-5, rtol=0)
    model.config.causal = False
    encoded = model(IDS, attention_mask=MASK)
    expected = torch.tanh(model.pooler.dense(encoded.last_hidden_state[:, 0]))
    torch.testing.assert_close(encoded.pooler_output, expected)


def make_bilstm() -> tuple[StateBiLSTM, Tensor, Tensor]:
    torch.manual_seed(0)
    bilstm = StateBiLSTM(DomextConfig(hidden_size=8, num_attention_heads=2, head_bilstm=5), 0.0)
    return bilstm, torch.randn(3, LENGTH, 8), MASK


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
    assert all(param.grad is not None and param.grad.isfinite().all() for param in bilstm.parameters())
    assert states.grad is not None and not states.grad[1, 8:].any() and states.grad[1, :8].any()
    torch.testing.assert_close(outputs.float(), bilstm([states], mask), atol=0.05, rtol=0.05)
