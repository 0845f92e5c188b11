"""The models: zero start, masked positions, padding, packing, checkpointing, compiling and resizing."""

from __future__ import annotations

import warnings
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import LENGTH, MODERN, VOCAB, attend_in_turn, make_model, make_rows
from torch import Tensor
from torch.nn.attention import varlen

from domext_ray.model.domext import modeling_domext
from domext_ray.model.domext.heads_domext import DomextForTokenClassification
from domext_ray.model.domext.modeling_domext import DomextForMaskedLM, DomextModel
from domext_ray.text.corpus.batching import find_sequences

IDS, MASK = make_rows()
PLACES = torch.tensor([1, 7, 13, 15, 24, 32])
LAYOUTS = {"absolute positions": {}, "roberta's": {"position_rule": "roberta"}, "rotary, local layers": MODERN}
each_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
EVERYTHING: dict[str, Any] = {
    "adapters": {"law": {"heads": 1, "ffn_units": 6, "bottleneck_size": 4, "word_rows": VOCAB - 10}},
    **{"module_hidden_size": 8, "module_ffn_size": 6, "extension_vocab_size": 5, "adapter_init": "paper"},
}


def freeze_base(model: torch.nn.Module) -> None:
    for name, param in model.named_parameters():
        param.requires_grad_(".adapters." in name)


def to_tensors(sequences: dict[str, Any]) -> dict[str, Any]:
    return {**sequences, "cu_seq_lens": torch.from_numpy(sequences["cu_seq_lens"])}


def test_zero_start_is_the_base_bit_for_bit_and_the_papers_is_not() -> None:
    for implementation, mask in product(("sdpa", "eager"), (None, MASK)):
        augmented = make_model(attn_implementation=implementation)
        plain = make_model(adapters={}, attn_implementation=implementation)
        plain.load_state_dict(
            {name: tensor for name, tensor in augmented.state_dict().items() if "adapters" not in name}
        )
        assert torch.equal(augmented(IDS, mask).logits, plain(IDS, mask).logits), (implementation, mask)
    queries = [param.flatten() for name, param in augmented.named_parameters() if name.endswith("query.weight")]
    assert 0.15 < torch.cat(queries).std() < 0.25, "the output projections alone are zero"
    paper = make_model(adapter_init="paper")
    with_all = paper(IDS).logits
    paper.config.active_adapters = []
    assert not torch.equal(paper(IDS).logits, with_all)


def test_masked_positions_give_these_logits_only() -> None:
    model = make_model(adapter_init="paper")
    positions = torch.tensor([0, 5, LENGTH + 1, 3 * LENGTH - 1])
    every = model(IDS).logits
    some = model(IDS, masked_positions=positions, labels=IDS.flatten()[positions])
    assert some.logits.shape == (4, VOCAB)
    torch.testing.assert_close(some.logits, every.flatten(0, 1)[positions])
    labels = torch.full_like(IDS, -100)
    labels.view(-1)[positions] = IDS.view(-1)[positions]
    torch.testing.assert_close(some.loss, model(IDS, labels=labels).loss)


def test_padding_does_not_change_the_tokens() -> None:
    padded = IDS * MASK
    for layout, causal, implementation in product(LAYOUTS.values(), (False, True), ("sdpa", "eager")):
        model = make_model(**layout, **EVERYTHING, causal=causal, attn_implementation=implementation)
        together, alone = model(padded, attention_mask=MASK).logits, model(padded[2:, :5]).logits
        assert together.isfinite().all(), "padding far from every token of a local layer, too"
        torch.testing.assert_close(together[2:, :5], alone, atol=2e-5, rtol=1e-5)


def test_ids_or_embeddings_are_given_and_not_both() -> None:
    model = make_model()
    for given in ({}, {"input_ids": IDS, "inputs_embeds": model.get_input_embeddings()(IDS)}):
        with pytest.raises(ValueError, match="exactly one of"):
            model(**given)


def test_hidden_states_and_weights_on_request() -> None:
    model = make_model(attn_implementation="eager")
    assert model(IDS).hidden_states is None
    found = model(IDS, output_hidden_states=True, output_attentions=True)
    assert [states.shape for states in found.hidden_states] == [(3, LENGTH, 32)] * 3
    assert [weights.shape for weights in found.attentions] == [(3, 4, LENGTH, LENGTH)] * 2
    with pytest.raises(ValueError, match="output_attentions needs"):
        make_model()(IDS, output_attentions=True)


def compute_gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    model.zero_grad()
    torch.manual_seed(3)
    model(IDS, labels=IDS).loss.backward()
    return {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}


def test_checkpointing_keeps_the_gradients() -> None:
    """It draws the same dropout again."""
    dropout = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.3)
    for layout, is_frozen, use_reentrant in product(({}, MODERN), (False, True), (False, True)):
        model = make_model(**layout, adapter_init="paper", **dropout).train()
        if is_frozen:
            freeze_base(model)
        expected = compute_gradients(model)
        assert set(expected) == {name for name, param in model.named_parameters() if param.requires_grad}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # newer transformers call it activation checkpointing
            model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        found = compute_gradients(model)
        assert set(found) == set(expected)
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient)


@pytest.mark.slow
def test_compiles_into_one_graph() -> None:
    """`aot_eager` traces forward and backward like the real backend, without needing a C++ compiler."""
    positions = torch.tensor([0, 5, 20])
    for layout in ({}, MODERN):
        model = make_model(**layout, adapter_init="paper").train()
        freeze_base(model)
        expected = model(IDS, masked_positions=positions).logits
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        found = compiled(IDS, masked_positions=positions).logits
        torch.testing.assert_close(found, expected)
        found.square().sum().backward()
        assert all(param.grad is not None for param in model.parameters() if param.requires_grad)


@pytest.mark.parametrize("model_class", [DomextModel, DomextForMaskedLM, DomextForTokenClassification])
def test_a_model_with_new_words_keeps_them_when_it_is_resized(model_class: Any) -> None:
    model = make_model(model_class, extension_vocab_size=10)
    before, tensors = model(IDS)[0], {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for size, multiple in ((VOCAB + 3, None), (VOCAB - 10, None), (None, 64)):
        with pytest.raises(ValueError, match="of which the last 10 are an extension's.* would lose them"):
            model.resize_token_embeddings(size, multiple)
    with pytest.raises(ValueError, match="must have the base's 80"):
        model.set_input_embeddings(torch.nn.Embedding(VOCAB, 32))
    if model_class is DomextForMaskedLM:
        with pytest.raises(ValueError, match="must have the base's 80"):
            model.set_output_embeddings(torch.nn.Linear(32, VOCAB))
    assert model.resize_token_embeddings(VOCAB) is model.get_input_embeddings(), "scripts do that whatever the size is"
    model.tie_weights()
    assert torch.equal(model(IDS)[0], before)
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in model.state_dict().items())


def test_a_model_without_new_words_is_resized(tmp_path: Path) -> None:
    model = make_model()
    before = model(IDS).logits
    model.resize_token_embeddings(VOCAB + 7)
    assert model.config.vocab_size == VOCAB + 7
    assert torch.equal(model(IDS).logits[..., :VOCAB], before)
    model.save_pretrained(tmp_path)
    again = DomextForMaskedLM.from_pretrained(tmp_path).eval()
    assert torch.equal(again(IDS + 7).logits, model(IDS + 7).logits)
    assert again.cls.predictions.decoder.weight is again.bert.embeddings.word_embeddings.weight


@each_layout
def test_a_packed_row_is_its_documents_alone(layout: dict[str, Any]) -> None:
    """With every extension; the second row is padded."""
    draw = torch.Generator().manual_seed(3)
    documents = [torch.randint(1, VOCAB, (1, size), generator=draw) for size in (7, 3, 6, 4)]
    rows = torch.zeros(2, 12, dtype=torch.long)
    rows[0, :10], rows[1, :10] = torch.cat(documents[:2], dim=1), torch.cat(documents[2:], dim=1)
    mask = (rows != 0).long()
    document_ids = torch.tensor([[1] * 7 + [2] * 5, [1] * 6 + [2] * 6])
    for causal, attention in product((False, True), ("sdpa", "eager")):
        model = make_model(**layout, causal=causal, **EVERYTHING)
        model.set_attn_implementation(attention)
        with torch.no_grad():
            packed = model(rows, attention_mask=mask, document_ids=document_ids).logits
            alone = [model(document).logits[0] for document in documents]
            mixed = model(rows, attention_mask=mask).logits
        assert packed.isfinite().all()
        for row, own in enumerate((alone[:2], alone[2:])):
            torch.testing.assert_close(packed[row, :10], torch.cat(own), rtol=0, atol=2e-5)
        assert (mixed[0, 7:10] - alone[1]).abs().max() > 1e-2, "a row that is one text reads all of it"


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_tokens_that_nobody_asks_for_are_left_out(attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With every extension: the same logits and gradients, whatever is left out."""
    mask = (torch.arange(12) < torch.tensor([[12], [5], [9]])).long()
    rows = torch.randint(1, VOCAB, mask.shape, generator=torch.Generator().manual_seed(3)) * mask
    token_indices = torch.tensor([*range(12), *range(12, 18), *range(24, 33)])  # one of them is padding
    num_scored = []

    def compute(model: Any, max_output_frac: float, token_indices: Tensor | None) -> list[Tensor]:
        monkeypatch.setattr(modeling_domext, "MAX_OUTPUT_FRAC", max_output_frac)
        own = {"masked_positions": PLACES, "labels": torch.arange(6), "token_indices": token_indices}
        output = model(rows, attention_mask=mask, **own)
        model.zero_grad()
        output.loss.backward()
        return [output.logits.detach(), *(param.grad.clone() for param in model.parameters() if param.grad is not None)]

    for layout in ({}, {"position_rule": "roberta"}, {"causal": True}, MODERN):
        model = make_model(**layout, **EVERYTHING)
        model.set_attn_implementation(attention)
        dense = model.bert.encoder.layer[-1].output.dense
        dense.register_forward_hook(lambda module, inputs, output: num_scored.append(output.shape[-2]))
        expected = compute(model, 0.0, None)
        for max_output_frac, own in ((0.0, token_indices), (0.5, None), (0.5, token_indices)):
            found = compute(model, max_output_frac, own)
            assert len(found) == len(expected) and num_scored.pop() == (6 if max_output_frac else 27), layout
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-4, atol=2e-6)
        states = model.bert(rows, attention_mask=mask, token_indices=token_indices, pool=False).last_hidden_state
        whole = model.bert(rows, attention_mask=mask, pool=False).last_hidden_state
        torch.testing.assert_close(states[mask.bool()], whole[mask.bool()], rtol=1e-4, atol=2e-6)
        assert not states[1, 6:].any()


@pytest.mark.parametrize("causal", [False, True])
@each_layout
def test_sequences_end_to_end_are_masked_rows(
    causal: bool, layout: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With every extension: loss, gradients and states of "varlen" are those of "sdpa"; a module has heads of 2."""
    calls = []

    def attend(*arguments: Any, **options: Any) -> Tensor:
        calls.append(options["window_size"])
        return attend_in_turn(*arguments, **options)

    monkeypatch.setattr(varlen, "varlen_attn", attend)

    def compute(model: Any, implementation: str, ids: Tensor, mask: Tensor, given: dict[str, Any]) -> list[Tensor]:
        model.set_attn_implementation(implementation)
        output = model(ids, masked_positions=PLACES, labels=torch.arange(6), **given)
        model.zero_grad()
        output.loss.backward()
        encoded = model.bert(ids, output_hidden_states=given["token_indices"] is None, **given)
        states = [
            layer_states[mask.bool()].detach()
            for layer_states in (encoded.last_hidden_state, *(encoded.hidden_states or ()))
        ]
        gradients = [param.grad.clone() for param in model.parameters() if param.grad is not None]
        return [output.loss.detach(), output.logits.detach(), *states, *gradients]

    for rows in ("full", "padded", "padded, left out", "packed", "packed, left out"):
        model = make_model(**layout, causal=causal, **EVERYTHING).train()
        model.gradient_checkpointing_enable()
        mask = torch.arange(12) < torch.tensor([[12], [12 if rows == "full" else 5], [12 if rows == "full" else 9]])
        mask = mask.long()
        ids = torch.randint(1, VOCAB, mask.shape, generator=torch.Generator().manual_seed(3)) * mask
        document_ids = torch.tensor([[1] * 7 + [2] * 5, [1] * 12, [1] * 2 + [2] * 10]) if "packed" in rows else None
        token_indices = torch.tensor([*range(12), *range(12, 18), *range(24, 33)]) if "left out" in rows else None
        given = {"document_ids": document_ids, "token_indices": token_indices}
        numbers = (None if tensor is None else tensor.numpy() for tensor in given.values())
        sequences = to_tensors(find_sequences(mask.bool().numpy(), *numbers))
        given["attention_mask"] = None if rows == "full" else mask
        expected = compute(model, "sdpa", ids, mask, given)
        assert not calls, rows
        given |= sequences
        same = compute(model, "sdpa", ids, mask, given)
        assert all(torch.equal(*pair) for pair in zip(expected, same, strict=True)) and not calls, rows
        found = compute(model, "varlen", ids, mask, given)
        assert {(-1, 0 if causal else -1)} <= {*calls} and (len({*calls}) == 2) == (layout is MODERN), rows
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5, msg=lambda text, own=rows: f"{own}: {text}")
        calls.clear()


def test_masks_stay_where_sequences_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without sequences, with rows of several adapters, and in training with dropout of attention weights."""
    monkeypatch.setattr(varlen, "varlen_attn", lambda *_, **__: pytest.fail("there is a mask"))
    model = make_model(adapter_init="paper", attention_probs_dropout_prob=0.3)
    sequences = to_tensors(find_sequences(MASK.bool().numpy()))
    found = []
    for implementation in ("sdpa", "varlen"):
        model.set_attn_implementation(implementation)
        named = model.eval()(IDS, MASK, adapter_names=["law", "__base__", "art"], **sequences).logits
        plain = model(IDS, MASK).logits
        torch.manual_seed(0)
        found.append([named, plain, model.train()(IDS, MASK, **sequences).logits])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def test_tokens_are_left_out_of_plain_rows_only() -> None:
    model = make_model()
    output_indices = torch.tensor([1])
    for others in ({"output_hidden_states": True}, {"adapter_names": ["__base__"] * len(IDS)}):
        for chosen in ({"output_indices": output_indices}, {"token_indices": output_indices}):
            with pytest.raises(ValueError, match="output_indices and token_indices go without"):
                model.bert(IDS, pool=False, **others, **chosen)
    with pytest.raises(ValueError, match="output_indices and token_indices go without"):
        model.bert(IDS, output_indices=output_indices)
    positions = {"masked_positions": torch.tensor([1])}
    every = model(IDS, output_hidden_states=True, **positions)
    assert every.hidden_states[-1].shape[:2] == IDS.shape
    torch.testing.assert_close(every.logits, model(IDS, **positions).logits)


@each_layout
def test_layers_go_on_from_what_an_earlier_pass_returned(layout: dict[str, Any]) -> None:
    model = make_model(DomextModel, **layout)
    whole = model(IDS, MASK).last_hidden_state
    states = model(IDS, MASK, end_layer=1).last_hidden_state
    rest = model(inputs_embeds=states, attention_mask=MASK, first_layer=1).last_hidden_state
    torch.testing.assert_close(rest[MASK.bool()], whole[MASK.bool()])
    with pytest.raises(ValueError, match="first_layer is 1; give what that layer reads as inputs_embeds"):
        model(IDS, MASK, first_layer=1)


def test_packed_rows_need_an_attention_that_knows_documents() -> None:
    model = make_model(DomextModel)
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match='document_ids need attn_implementation "sdpa"'):
        model(IDS, document_ids=torch.ones_like(IDS))
