"""The keep loss against a loss worked out by hand, and who is asked what the base predicts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from tiny_models import MODERN, VOCAB, attend_in_turn, make_model
from tiny_models import make_config as make_tiny_config
from torch import Tensor, nn
from torch.nn.attention import varlen

from domext_ray.config.method import MethodConfig
from domext_ray.config.pretrain import EngineConfig, ObjectiveConfig, PretrainConfig, ReplayConfig, VocabConfig
from domext_ray.model.base import Base, load_base
from domext_ray.model.build import count_base_layers
from domext_ray.model.domext.modeling_domext import DomextForMaskedLM
from domext_ray.model.spec import ModelSpec
from domext_ray.text.corpus.batching import MaskedRows, join_rows, pad_masked
from domext_ray.training.losses import MaskedLoss, make_loss
from domext_ray.training.objective import KEEP_LOSS, LOSS, NEXT_SENTENCE_LOSS, MaskedBatch, pad_batch, to_batch

CPU = torch.device("cpu")
AF = {"heads": 1, "ffn_units": 6}
SHIFTS = {"heads": 0, "ffn_units": 0, "word_rows": 10**6, "word_head": True}
NEW_WORDS = [[7, 8], [9, 10, 11]]


@pytest.fixture(scope="module")
def base(tiny_base_folder: Path) -> Base:
    return load_base(str(tiny_base_folder))


def make_config(base: Base, *, keep: Any = "kl", **method: Any) -> PretrainConfig:
    return PretrainConfig(
        base=str(base.folder),
        replay=ReplayConfig(corpus="general.txt"),
        vocab=VocabConfig(size=2),
        method=MethodConfig(**method),
        objective=ObjectiveConfig(keep=keep, keep_weight=3.0),
        engine=EngineConfig(precision="fp32"),
    )


def build(base: Base, config: PretrainConfig, *, dropout: float = 0.0, start: str = "moved") -> DomextForMaskedLM:
    """A model whose trained parameters are not at their start."""
    model = ModelSpec(base, config.method, new_words=NEW_WORDS, dropout=dropout, seed=1).build()
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for param in cast(nn.Module, model).parameters():
            if param.requires_grad and start == "moved":
                param.add_(torch.randn(param.shape, generator=draw) * 0.05)
    return model


def make_loss_of(base: Base, config: PretrainConfig, model: DomextForMaskedLM) -> MaskedLoss:
    make: functools.partial[MaskedLoss] = make_loss(config, base, cast(nn.Module, model), (), CPU, [8])
    return make(cast(nn.Module, model), CPU, bf16=False)


def make_batch(kept: list[bool], seed: int = 0) -> MaskedBatch:
    draw = np.random.default_rng(seed)
    rows = [draw.integers(5, 60, size) for size in (9, 14, 11, 6)]
    chosen = [draw.random(len(row)) < 0.4 for row in rows]
    return pad_batch(rows, [row + 1 for row in rows], chosen, pad_id=0, is_kept=np.array(kept))


def run(loss: MaskedLoss, batch: MaskedBatch) -> dict[str, Tensor]:
    sums: dict[str, Tensor] = loss(batch)
    return sums


@torch.no_grad()
def score(model: Any, batch: MaskedBatch) -> Tensor:
    """Log-probabilities over the base's words at all positions, [B, N, V]."""
    logits = model.eval()(batch.input_ids, attention_mask=batch.attention_mask)[0]
    return logits[..., : model.config.base_vocab_size].log_softmax(-1)


def make_long_rows(kept: list[bool]) -> MaskedRows:
    """Rows with much padding, each of two documents, which begin with 2."""
    draw = np.random.default_rng(1)
    rows = [draw.integers(5, 60, size) for size in (64, 20, 61, 33)]
    for row in rows:
        row[[0, len(row) // 3]] = 2
    return MaskedRows.join([(row, row + 1, draw.random(len(row)) < 0.3) for row in rows], np.array(kept))


KEPT = [False, True, False, True]
BOUNDS = ("token_indices", "cu_seq_lens", "max_length")
METHODS: dict[str, dict[str, Any]] = {
    "af": AF,
    "shifts": SHIFTS,
    "modules": {"heads": 0, "ffn_units": 0, "module_hidden_size": 8, "module_ffn_size": 8},
    "lora": {"heads": 0, "ffn_units": 0, "lora_rank": 2},
    "full": {"heads": 0, "ffn_units": 0, "trains": "all"},
}


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_the_term_is_the_divergence_from_the_base_at_the_kept_positions(base: Base, method: dict[str, Any]) -> None:
    config = make_config(base, **method)
    model, batch = build(base, config), make_batch(KEPT)
    loss = make_loss_of(base, config, model)
    assert loss.loss_weights == {LOSS: 1.0, NEXT_SENTENCE_LOSS: 1.0, KEEP_LOSS: 3.0}
    sums = run(loss.train(), batch)
    words, kept = sums[LOSS], sums[KEEP_LOSS]
    plain = build(base, make_config(base, **SHIFTS), start="zero")
    theirs, own = score(plain, batch), score(model, batch)
    places = [(int(p) // batch.input_ids.shape[1], int(p) % batch.input_ids.shape[1]) for p in batch.masked_positions]
    divergences = (theirs.exp() * (theirs - own)).sum(-1)
    expected = sum(float(divergences[place]) for place in places if KEPT[place[0]])
    assert expected > 1e-3 and float(kept) == pytest.approx(expected, rel=1e-4)
    logits = model(batch.input_ids, attention_mask=batch.attention_mask)[0].log_softmax(-1)
    labels = batch.labels.tolist()
    domain = [float(logits[place][label]) for place, label in zip(places, labels, strict=True) if not KEPT[place[0]]]
    assert float(words) == pytest.approx(-sum(domain), rel=1e-4)
    assert batch.num_masked == len(domain) and batch.num_kept == len(places) - len(domain)


def test_general_text_may_be_learned_instead(base: Base) -> None:
    config = make_config(base, keep="replay", **AF)
    model, batch = build(base, config), make_batch(KEPT)
    loss = make_loss_of(base, config, model)
    assert loss.teacher is None and not loss.teaches_itself
    sums = run(loss.train(), batch)
    words, kept = sums[LOSS], sums[KEEP_LOSS]
    plain = run(loss, make_batch([False] * 4))
    everything, nothing = plain[LOSS], plain[KEEP_LOSS]
    assert float(kept) > 1 and float(nothing) == 0.0
    assert float(words + kept) == pytest.approx(float(everything), rel=1e-5)


def test_a_model_at_its_start_keeps_everything_whatever_dropout_does(base: Base) -> None:
    """The base is asked without dropout, and training goes on with it."""
    config = make_config(base, **AF)
    without = make_loss_of(base, config, build(base, config, start="zero")).train()
    assert abs(float(run(without, make_batch(KEPT))[KEEP_LOSS])) < 1e-6
    model = build(base, config, dropout=0.5, start="zero")
    loss = make_loss_of(base, config, model).train()
    batch = make_batch(KEPT)
    shown = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}
    asked = [loss._ask_base(shown, batch.kept_rows) for _ in range(2)]
    # Not to the last bit: how MKL sums may depend on where a tensor lies in memory.
    torch.testing.assert_close(cast(Tensor, asked[0]), cast(Tensor, asked[1]), rtol=0, atol=1e-5)
    assert cast(nn.Module, model).training and float(run(loss, make_batch(KEPT))[KEEP_LOSS]) > 0.01


@pytest.mark.parametrize("first_id", [None, 2], ids=["rows", "documents"])
@pytest.mark.parametrize("kept", [KEPT, [False] * 4], ids=["some", "filler"])
def test_kept_rows_have_the_bounds_of_a_batch_of_their_own(kept: list[bool], first_id: int | None) -> None:
    rows = make_long_rows(kept)
    found = pad_masked(rows, 0, first_id=first_id)["kept_rows"]
    alone = pad_masked(rows.take(found["rows"]), 0, pad_to=64, first_id=first_id)
    assert all(np.array_equal(found[name], alone[name]) for name in BOUNDS)
    assert len(found["rows"]) == max(1, sum(kept))


@pytest.mark.parametrize("first_id", [None, 2], ids=["rows", "documents"])
def test_the_base_is_asked_within_the_bounds_of_its_rows(
    base: Base, first_id: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Padding is left out, and "varlen" needs no mask. A base may ask for all hidden states."""
    lengths: list[int] = []

    def attend(*arguments: Any, **options: Any) -> Tensor:
        lengths.append(len(arguments[0]))
        return attend_in_turn(*arguments, **options)

    monkeypatch.setattr(varlen, "varlen_attn", attend)
    batch = to_batch(pad_masked(make_long_rows(KEPT), 0, first_id=first_id))
    model = build(base, config := make_config(base, **AF))
    model.config.output_hidden_states = True
    loss = make_loss_of(base, config, model).train()
    rows = {name: getattr(batch, name) for name in ("input_ids", "attention_mask", "document_ids")}
    without = replace(batch.kept_rows, token_indices=None, cu_seq_lens=None, max_length=0)
    expected = loss._ask_base(rows, without)
    for attention in ("sdpa", "varlen"):
        model.set_attn_implementation(attention)
        found = loss._ask_base(rows, batch.kept_rows)
        assert torch.allclose(cast(Tensor, found), cast(Tensor, expected), rtol=0, atol=1e-5), attention
    assert lengths == [len(batch.kept_rows.token_indices)] * model.config.num_hidden_layers == [64] * len(lengths)
    sums = run(loss, batch)
    words, kept = sums[LOSS], sums[KEEP_LOSS]
    model.set_attn_implementation("sdpa")
    masked = run(loss, replace(batch, kept_rows=without, token_indices=None))
    assert float(kept) == pytest.approx(float(masked[KEEP_LOSS]), rel=1e-4)
    assert float(words) == pytest.approx(float(masked[LOSS]))


def test_the_extensions_take_part_again_when_the_base_was_asked(base: Base) -> None:
    config = make_config(base, module_hidden_size=8, module_ffn_size=8, **AF)
    model, batch = build(base, config), make_batch(KEPT)
    before, active = score(model, batch), model.config.active_adapters
    loss = make_loss_of(base, config, model).train()
    assert loss.teaches_itself
    run(loss, batch)
    assert torch.equal(score(model, batch), before) and model.config.active_adapters == active
    broken = replace(cast(Any, batch.kept_rows), rows=torch.tensor([99]))
    with pytest.raises(IndexError):
        run(loss.train(), replace(batch, kept_rows=broken))
    assert torch.equal(score(model, batch), before)


def test_only_a_base_that_stays_is_asked_in_the_model(base: Base) -> None:
    configs = {name: make_config(base, **method) for name, method in METHODS.items()}
    asks_itself = {name: make_loss_of(base, own, build(base, own)).teaches_itself for name, own in configs.items()}
    assert asks_itself == {"af": True, "shifts": True, "modules": True, "lora": False, "full": False}
    config = make_config(base, **AF)
    model = cast(nn.Module, build(base, config))
    changed = ["bert.encoder.layer.0.output.dense.weight"]  # by the run that this one goes on from
    assert make_loss(config, base, model, changed, CPU, [8]).keywords["teacher"] is not model


@pytest.mark.parametrize("layout", [{}, {"position_rule": "roberta"}, MODERN], ids=["bert", "roberta", "modernbert"])
def test_layers_below_the_first_adapter_run_once_for_model_and_base(
    layout: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses and gradients are those beside a base that runs all layers, by any attention and with checkpointing."""
    monkeypatch.setattr(varlen, "varlen_attn", attend_in_turn)
    own = {"adapters": {"law": {"heads": 1, "ffn_units": 6, "first_layer": 1}}, "adapter_init": "paper"}
    model, calls = make_model(moved=0.1, max_position_embeddings=72, **own, **layout), list[int]()
    for name, param in model.named_parameters():
        param.requires_grad_(".adapters." in name)
    for number, layer in enumerate(model.bert.encoder.layer):
        layer.attention.register_forward_hook(lambda *_, own=number: calls.append(own))

    def compute(num_shared_layers: int, batch: MaskedBatch) -> list[Tensor]:
        calls.clear()
        model.zero_grad()
        loss = MaskedLoss(model, CPU, bf16=False, teacher=model, num_words=VOCAB).train()
        assert loss.num_shared_layers == 1
        loss.num_shared_layers = num_shared_layers
        sums = run(loss, batch)
        words, kept = sums[LOSS], sums[KEEP_LOSS]
        (words + kept).backward()
        assert float(kept) > 1e-3
        gradients = [tensor.grad for tensor in model.parameters() if tensor.grad is not None]
        return [words.detach(), kept.detach(), *gradients]

    for first_id, attention, is_checkpointed in ((None, "sdpa", False), (2, "varlen", False), (2, "sdpa", True)):
        batch = to_batch(pad_masked(make_long_rows(KEPT), 0, first_id=first_id))
        assert batch.token_indices is not None and batch.kept_rows.token_indices is not None
        model.set_attn_implementation(attention)
        if is_checkpointed:
            model.gradient_checkpointing_enable()
        expected = compute(0, batch)
        assert calls[:4] == [0, 1, 0, 1]
        found = compute(1, batch)
        assert calls == [0, 1, 1, *[1] * is_checkpointed], "computed again in the backward pass"
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_layers_are_shared_where_nothing_below_them_differs() -> None:
    first, second = ({"heads": 1, "first_layer": layer} for layer in (1, 0))
    alone: dict[str, Any] = {"adapters": {"law": first}}
    cases: dict[int, list[dict[str, Any]]] = {
        1: [alone, alone | MODERN, {"adapters": {"law": first, "art": first}}],
        0: [
            {"adapters": {"law": first, "art": second}},
            {"adapters": {"law": first | {"word_rows": 9}}},
            {"adapters": {}},
            alone | {"extension_vocab_size": 3},
            alone | {"module_hidden_size": 8, "module_ffn_size": 6},
            alone | {"hidden_dropout_prob": 0.1},
            alone | {"attention_probs_dropout_prob": 0.1},
        ],
    }
    for expected, configs in cases.items():
        for values in configs:
            assert count_base_layers(make_tiny_config(**values)) == expected, values
    model = make_model(**alone)
    assert MaskedLoss(model, CPU, bf16=False, teacher=make_model(**alone)).num_shared_layers == 0, "a copy of the base"
    assert MaskedLoss(model, CPU, bf16=False).num_shared_layers == 0, "nobody is asked"


def test_every_micro_batch_asks_the_base_as_often(base: Base) -> None:
    """At ZeRO-3 a rank that asks alone would wait for the others."""
    config = make_config(base, **AF)
    loss = make_loss_of(base, config, build(base, config)).train()
    calls = count_calls(loss, lambda: run(loss, make_batch([False] * 4)))
    assert calls == count_calls(loss, lambda: run(loss, make_batch(KEPT))) == 2
    assert float(run(loss, make_batch([False] * 4))[KEEP_LOSS]) == 0.0
    unmasked = pad_batch(
        [np.arange(5, 9)] * 2, [np.arange(5, 9)] * 2, [np.zeros(4, bool)] * 2, 0, is_kept=np.array([True, False])
    )
    assert count_calls(loss, lambda: run(loss, unmasked)) == 2 and unmasked.num_kept == unmasked.num_masked == 0


def count_calls(loss: MaskedLoss, forward: Callable[[], object]) -> int:
    calls: list[int] = []
    handle = cast(Any, loss.model).bert.register_forward_hook(lambda *_: calls.append(1))
    forward()
    handle.remove()
    return len(calls)


def test_rows_of_parts_are_joined_in_the_order_of_the_batch() -> None:
    def make(values: list[list[int]]) -> MaskedRows:
        flat = np.array([value for row in values for value in row])
        return MaskedRows(flat, flat + 100, flat % 2 == 0, np.array([len(row) for row in values]))

    joined = join_rows(
        [make([[1, 2], [3]]), make([[4, 5, 6], [7, 8]])], [np.array([0, 3]), np.array([1, 2])], [4, 2], [False, True]
    )
    assert joined.inputs.tolist() == [1, 2, 4, 5, 6, 7, 8, 3] and joined.lengths.tolist() == [2, 3, 2, 1]
    assert (joined.labels - 100).tolist() == joined.inputs.tolist()
    assert joined.selected.tolist() == [value % 2 == 0 for value in joined.inputs]
    assert cast(np.ndarray, joined.is_kept).tolist() == [False, True, True, False]
    assert cast(np.ndarray, joined.parts).tolist() == [4, 2, 2, 4] and joined.count_tokens(5) == [0, 0, 5, 0, 3]
    assert join_rows([make([[1]]), make([[2]])], [np.array([1]), np.array([0])], [0, 0], None).is_kept is None
