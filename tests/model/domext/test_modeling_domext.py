"""The models: zero start, masked positions, padding, checkpointing, compiling and export."""

from __future__ import annotations

import itertools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import varlen
from transformers import AutoModelForMaskedLM

from domext_ray.corpus.batching import find_sequences
from domext_ray.model.domext import modeling_domext
from domext_ray.model.domext.configuration_domext import DomextConfig
from domext_ray.model.domext.heads_domext import DomextForTokenClassification
from domext_ray.model.domext.modeling_domext import DomextForMaskedLM, DomextModel

VOCAB, LENGTH = 90, 12
ADAPTERS = {"law": {"heads": 1, "ffn_units": 6}, "art": {"heads": 2, "ffn_units": 0}}


def make_config(**values: Any) -> DomextConfig:
    return DomextConfig(
        **{
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 48,
            "max_position_embeddings": 24,
            "initializer_range": 0.2,
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
            "adapters": ADAPTERS,
            **values,
        }
    )


def make_model(model_class: Any = DomextForMaskedLM, **values: Any) -> Any:
    torch.manual_seed(0)
    return model_class(make_config(**values)).eval()


def freeze_base(model: torch.nn.Module) -> None:
    for name, param in model.named_parameters():
        param.requires_grad_(".adapters." in name)


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(1, VOCAB, (3, LENGTH), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def mask() -> Tensor:
    mask = torch.ones(3, LENGTH, dtype=torch.long)
    mask[1, 8:] = 0
    mask[2, 5:] = 0
    return mask


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("padded", [False, True])
def test_zero_start_is_the_base_bit_for_bit(ids: Tensor, mask: Tensor, implementation: str, padded: bool) -> None:
    augmented = make_model(attn_implementation=implementation)
    plain = make_model(adapters={}, attn_implementation=implementation)
    plain.load_state_dict({name: each for name, each in augmented.state_dict().items() if "adapters" not in name})
    attention_mask = mask if padded else None
    assert torch.equal(augmented(ids, attention_mask).logits, plain(ids, attention_mask).logits)


def test_zero_start_zeroes_the_output_projections_only() -> None:
    params = {name: each for name, each in make_model().named_parameters() if ".adapters." in name}
    for name, param in params.items():
        is_zero = not param.count_nonzero()
        assert is_zero == (".output." in name or name.endswith("bias")), name
    queries = [each for name, each in params.items() if name.endswith("query.weight")]
    assert 0.15 < torch.cat([each.flatten() for each in queries]).std() < 0.25


def test_paper_start_changes_the_output(ids: Tensor) -> None:
    model = make_model(adapter_init="paper")
    assert all(each.count_nonzero() for name, each in model.named_parameters() if name.endswith("output.weight"))
    with_all = model(ids).logits
    model.config.active_adapters = []
    assert not torch.equal(model(ids).logits, with_all)


def test_masked_positions_give_these_logits_only(ids: Tensor) -> None:
    model = make_model(adapter_init="paper")
    positions = torch.tensor([0, 5, LENGTH + 1, 3 * LENGTH - 1])
    every = model(ids).logits
    some = model(ids, masked_positions=positions, labels=ids.flatten()[positions])
    assert some.logits.shape == (4, VOCAB)
    torch.testing.assert_close(some.logits, every.flatten(0, 1)[positions])
    labels = torch.full_like(ids, -100)
    labels.view(-1)[positions] = ids.view(-1)[positions]
    torch.testing.assert_close(some.loss, model(ids, labels=labels).loss)


@pytest.mark.parametrize("rule", ["absolute", "roberta"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_padding_does_not_change_the_tokens(ids: Tensor, mask: Tensor, rule: str, implementation: str) -> None:
    model = make_model(adapter_init="paper", position_rule=rule, attn_implementation=implementation)
    padded = ids * mask
    together = model(padded, attention_mask=mask).logits
    alone = model(padded[2:, :5]).logits
    torch.testing.assert_close(together[2:, :5], alone, atol=2e-5, rtol=1e-5)


def test_fused_and_eager_attention_agree(ids: Tensor, mask: Tensor) -> None:
    model = make_model(adapter_init="paper")
    fused = model(ids, mask).logits
    model.set_attn_implementation("eager")
    torch.testing.assert_close(model(ids, mask).logits[mask.bool()], fused[mask.bool()], atol=2e-5, rtol=1e-5)


def test_embeddings_in_the_place_of_ids(ids: Tensor) -> None:
    model = make_model(adapter_init="paper")
    embedded = model.get_input_embeddings()(ids)
    torch.testing.assert_close(model(inputs_embeds=embedded).logits, model(ids).logits)
    with pytest.raises(ValueError, match="exactly one of"):
        model(ids, inputs_embeds=embedded)


def test_hidden_states_and_weights_on_request(ids: Tensor) -> None:
    model = make_model(attn_implementation="eager")
    assert model(ids).hidden_states is None
    found = model(ids, output_hidden_states=True, output_attentions=True)
    assert [each.shape for each in found.hidden_states] == [(3, LENGTH, 32)] * 3
    assert [each.shape for each in found.attentions] == [(3, 4, LENGTH, LENGTH)] * 2
    with pytest.raises(ValueError, match="output_attentions needs"):
        make_model()(ids, output_attentions=True)


def compute_gradients(model: torch.nn.Module, ids: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    model(ids, labels=ids).loss.backward()
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_checkpointing_keeps_the_gradients(ids: Tensor, use_reentrant: bool, frozen: bool) -> None:
    model = make_model(adapter_init="paper").train()
    if frozen:
        freeze_base(model)
    expected = compute_gradients(model, ids)
    assert set(expected) == {name for name, each in model.named_parameters() if each.requires_grad}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # newer transformers call it activation checkpointing
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    found = compute_gradients(model, ids)
    assert set(found) == set(expected)
    for name, each in expected.items():
        torch.testing.assert_close(found[name], each)


def test_checkpointing_draws_the_same_dropout_again(ids: Tensor) -> None:
    model = make_model(adapter_init="paper", hidden_dropout_prob=0.3, attention_probs_dropout_prob=0.3).train()
    freeze_base(model)
    torch.manual_seed(3)
    expected = compute_gradients(model, ids)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model.gradient_checkpointing_enable()
    torch.manual_seed(3)
    found = compute_gradients(model, ids)
    for name, each in expected.items():
        torch.testing.assert_close(found[name], each)


def test_compiles_into_one_graph(ids: Tensor) -> None:
    """`aot_eager` traces forward and backward like the real backend, without needing a C++ compiler."""
    model = make_model(adapter_init="paper").train()
    freeze_base(model)
    positions = torch.tensor([0, 5, 20])
    expected = model(ids, masked_positions=positions).logits
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    found = compiled(ids, masked_positions=positions).logits
    torch.testing.assert_close(found, expected)
    found.square().sum().backward()
    assert all(each.grad is not None for each in model.parameters() if each.requires_grad)


def test_vocabulary_projection_is_tied(tmp_path: Path, ids: Tensor) -> None:
    model = make_model(adapter_init="paper")
    predictions, words = model.cls.predictions, model.bert.embeddings.word_embeddings
    assert predictions.decoder.weight is words.weight
    assert predictions.decoder.bias is predictions.bias
    model.save_pretrained(tmp_path)
    again = DomextForMaskedLM.from_pretrained(tmp_path).eval()
    assert again.cls.predictions.decoder.weight is again.bert.embeddings.word_embeddings.weight
    assert torch.equal(again(ids).logits, model(ids).logits)


@pytest.mark.usefixtures("own_modules")
@pytest.mark.parametrize("rule", ["absolute", "roberta"])
def test_the_code_files_travel_with_the_weights(tmp_path: Path, ids: Tensor, rule: str) -> None:
    model = make_model(adapter_init="paper", position_rule=rule)
    DomextConfig.register_for_auto_class()
    DomextForMaskedLM.register_for_auto_class("AutoModelForMaskedLM")
    try:
        model.save_pretrained(tmp_path / "export")
    finally:
        DomextConfig._auto_class = DomextForMaskedLM._auto_class = None
    files = {each.name for each in (tmp_path / "export").glob("*.py")}
    assert files == {
        "configuration_domext.py",
        "layers_domext.py",
        "modeling_domext.py",
        "routers_domext.py",
        "words_domext.py",
    }
    loaded = AutoModelForMaskedLM.from_pretrained(tmp_path / "export", trust_remote_code=True).eval()
    assert type(loaded).__module__.startswith("transformers_modules.")
    assert torch.equal(loaded(ids).logits, model(ids).logits)


def test_every_tensor_moves_to_bf16_and_back(ids: Tensor) -> None:
    model = make_model(adapter_init="paper", has_pooler=True)
    assert model.to(torch.bfloat16)(ids).logits.dtype == torch.bfloat16


@pytest.mark.parametrize("model_class", [DomextModel, DomextForMaskedLM, DomextForTokenClassification])
def test_a_model_with_new_words_keeps_them_when_it_is_resized(ids: Tensor, model_class: Any) -> None:
    model = make_model(model_class, extension_vocab_size=10)
    before, tensors = model(ids)[0], {name: each.clone() for name, each in model.state_dict().items()}
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
    assert torch.equal(model(ids)[0], before)
    assert all(torch.equal(each, tensors[name]) for name, each in model.state_dict().items())


def test_a_model_without_new_words_is_resized(ids: Tensor, tmp_path: Path) -> None:
    model = make_model()
    before = model(ids).logits
    model.resize_token_embeddings(VOCAB + 7)
    assert model.config.vocab_size == VOCAB + 7
    assert torch.equal(model(ids).logits[..., :VOCAB], before)
    model.save_pretrained(tmp_path)
    again = DomextForMaskedLM.from_pretrained(tmp_path).eval()
    assert torch.equal(again(ids + 7).logits, model(ids + 7).logits)
    assert again.cls.predictions.decoder.weight is again.bert.embeddings.word_embeddings.weight


MODERN = {
    **{"position_rule": "rotary", "norm_place": "pre", "gated_ffn": True, "type_vocab_size": 0},
    **{"local_window": 2, "local_layers": [1]},
}
EVERYTHING = {"law": {"heads": 1, "ffn_units": 6, "bottleneck_size": 4, "word_rows": VOCAB - 10}}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "layout",
    [{}, {"position_rule": "roberta"}, MODERN],
    ids=["absolute positions", "roberta's", "rotary, local layers"],
)
def test_a_packed_row_is_its_documents_alone(attention: str, causal: bool, layout: dict[str, Any]) -> None:
    """With every extension; the second row is padded."""
    extended = {"adapters": EVERYTHING, "module_hidden_size": 8, "module_ffn_size": 6, "extension_vocab_size": 5}
    model = make_model(**layout, causal=causal, adapter_init="paper", **extended)
    model.set_attn_implementation(attention)
    draw = torch.Generator().manual_seed(3)
    documents = [torch.randint(1, VOCAB, (1, size), generator=draw) for size in (7, 3, 6, 4)]
    rows = torch.zeros(2, 12, dtype=torch.long)
    rows[0, :10], rows[1, :10] = torch.cat(documents[:2], dim=1), torch.cat(documents[2:], dim=1)
    mask = (rows != 0).long()
    document_ids = torch.tensor([[1] * 7 + [2] * 5, [1] * 6 + [2] * 6])
    with torch.no_grad():
        packed = model(rows, attention_mask=mask, document_ids=document_ids).logits
        alone = [model(each).logits[0] for each in documents]
        mixed = model(rows, attention_mask=mask).logits
    assert packed.isfinite().all()
    for row, own in enumerate((alone[:2], alone[2:])):
        torch.testing.assert_close(packed[row, :10], torch.cat(own), rtol=0, atol=2e-5)
    assert (mixed[0, 7:10] - alone[1]).abs().max() > 1e-2, "a row that is one text reads all of it"


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(
    "layout",
    [{}, {"position_rule": "roberta"}, {"causal": True}, MODERN],
    ids=["absolute positions", "roberta's", "left to right", "rotary, local layers"],
)
def test_tokens_that_nobody_asks_for_are_left_out(
    attention: str, layout: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With every extension: the same logits and gradients, whatever is left out."""
    extended = {"adapters": EVERYTHING, "module_hidden_size": 8, "module_ffn_size": 6, "extension_vocab_size": 5}
    model = make_model(**layout, adapter_init="paper", **extended)
    model.set_attn_implementation(attention)
    lengths = torch.tensor([12, 5, 9])
    mask = (torch.arange(12) < lengths[:, None]).long()
    rows = torch.randint(1, VOCAB, mask.shape, generator=torch.Generator().manual_seed(3)) * mask
    positions, labels = torch.tensor([1, 7, 13, 15, 24, 32]), torch.arange(6)
    token_indices = torch.tensor([*range(12), *range(12, 18), *range(24, 33)])  # one of them is padding
    num_scored = []
    dense = model.bert.encoder.layer[-1].output.dense
    dense.register_forward_hook(lambda module, inputs, output: num_scored.append(output.shape[-2]))

    def compute(max_output_frac: float, token_indices: Tensor | None) -> list[Tensor]:
        monkeypatch.setattr(modeling_domext, "MAX_OUTPUT_FRAC", max_output_frac)
        output = model(
            rows, attention_mask=mask, masked_positions=positions, labels=labels, token_indices=token_indices
        )
        model.zero_grad()
        output.loss.backward()
        return [output.logits.detach(), *(each.grad.clone() for each in model.parameters() if each.grad is not None)]

    expected = compute(0.0, None)
    for max_output_frac, own in ((0.0, token_indices), (0.5, None), (0.5, token_indices)):
        found = compute(max_output_frac, own)
        assert len(found) == len(expected) and num_scored.pop() == (6 if max_output_frac else 27)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=2e-6)
    states = model.bert(rows, attention_mask=mask, token_indices=token_indices, pool=False).last_hidden_state
    whole = model.bert(rows, attention_mask=mask, pool=False).last_hidden_state
    torch.testing.assert_close(states[mask.bool()], whole[mask.bool()], rtol=1e-4, atol=2e-6)
    assert not states[1, 6:].any()


def attend_in_turn(query: Tensor, key: Tensor, value: Tensor, *places: Any, scale: float, window_size: Any) -> Tensor:
    """What torch's kernel for GPUs computes, on a CPU: sequences in turn."""
    ends, ends_of_keys, longest, longest_key = places
    assert ends is ends_of_keys and ends.dtype == torch.int32 and longest == longest_key == int(ends.diff().max())
    assert ends[-1] == len(query) and query.shape[-1] % 8 == 0
    contexts = []
    for first, end in itertools.pairwise(ends.tolist()):
        queries, keys, values = (each[first:end].transpose(0, 1) for each in (query, key, value))
        distance = torch.arange(end - first) - torch.arange(end - first)[:, None]
        before, behind = ((distance.abs().max() if each < 0 else each) for each in window_size)
        seen = (distance >= -before) & (distance <= behind)
        attended = torch.nn.functional.scaled_dot_product_attention(queries, keys, values, seen, scale=scale)
        contexts.append(attended.transpose(0, 1))
    return torch.cat(contexts)


@pytest.mark.parametrize("rows", ["full", "padded", "padded, left out", "packed", "packed, left out"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "layout",
    [{}, {"position_rule": "roberta"}, MODERN],
    ids=["absolute positions", "roberta's", "rotary, local layers"],
)
def test_sequences_end_to_end_are_masked_rows(
    rows: str, causal: bool, layout: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With every extension: loss, gradients and states of "varlen" are those of "sdpa"; a module has heads of 2."""
    extended = {"adapters": EVERYTHING, "module_hidden_size": 8, "module_ffn_size": 6, "extension_vocab_size": 5}
    model = make_model(**layout, causal=causal, adapter_init="paper", **extended).train()
    model.gradient_checkpointing_enable()
    calls = []

    def attend(*arguments: Any, **options: Any) -> Tensor:
        calls.append(options["window_size"])
        return attend_in_turn(*arguments, **options)

    monkeypatch.setattr(varlen, "varlen_attn", attend)
    lengths = torch.tensor([12, 12, 12] if rows == "full" else [12, 5, 9])
    mask = (torch.arange(12) < lengths[:, None]).long()
    ids = torch.randint(1, VOCAB, mask.shape, generator=torch.Generator().manual_seed(3)) * mask
    document_ids = None if "packed" not in rows else torch.tensor([[1] * 7 + [2] * 5, [1] * 12, [1] * 2 + [2] * 10])
    token_indices = torch.tensor([*range(12), *range(12, 18), *range(24, 33)]) if "left out" in rows else None
    given = {
        "attention_mask": None if rows == "full" else mask,
        "document_ids": document_ids,
        "token_indices": token_indices,
    }
    numbers = (None if each is None else each.numpy() for each in (document_ids, token_indices))
    sequences = find_sequences(mask.bool().numpy(), *numbers)
    sequences["cu_seq_lens"] = torch.from_numpy(sequences["cu_seq_lens"])
    positions, labels = torch.tensor([1, 7, 13, 15, 24, 32]), torch.arange(6)

    def compute(implementation: str) -> list[Tensor]:
        model.set_attn_implementation(implementation)
        output = model(ids, masked_positions=positions, labels=labels, **given)
        model.zero_grad()
        output.loss.backward()
        keeps = token_indices is None
        encoded = model.bert(ids, output_hidden_states=keeps, **given)
        states = [each[mask.bool()].detach() for each in (encoded.last_hidden_state, *(encoded.hidden_states or ()))]
        gradients = [each.grad.clone() for each in model.parameters() if each.grad is not None]
        return [output.loss.detach(), output.logits.detach(), *states, *gradients]

    expected = compute("sdpa")
    assert not calls
    given |= sequences
    assert all(torch.equal(*each) for each in zip(expected, compute("sdpa"), strict=True)) and not calls
    found = compute("varlen")
    right = 0 if causal else -1
    assert {(-1, right)} <= {*calls} and (len({*calls}) == 2) == (layout is MODERN)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_masks_stay_where_sequences_cannot_be(ids: Tensor, mask: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without sequences, with rows of several adapters, and in training with dropout of attention weights."""
    monkeypatch.setattr(varlen, "varlen_attn", lambda *_, **__: pytest.fail("there is a mask"))
    model = make_model(adapter_init="paper", attention_probs_dropout_prob=0.3)
    sequences = find_sequences(mask.bool().numpy())
    sequences["cu_seq_lens"] = torch.from_numpy(sequences["cu_seq_lens"])
    found = []
    for implementation in ("sdpa", "varlen"):
        model.set_attn_implementation(implementation)
        named = model.eval()(ids, mask, adapter_names=["law", "__base__", "art"], **sequences).logits
        plain = model(ids, mask).logits
        torch.manual_seed(0)
        found.append([named, plain, model.train()(ids, mask, **sequences).logits])
    assert all(torch.equal(*each) for each in zip(*found, strict=True))


def test_tokens_are_left_out_of_plain_rows_only(ids: Tensor) -> None:
    model = make_model()
    output_indices = torch.tensor([1])
    for others in ({"output_hidden_states": True}, {"adapter_names": ["__base__"] * len(ids)}):
        for chosen in ({"output_indices": output_indices}, {"token_indices": output_indices}):
            with pytest.raises(ValueError, match="output_indices and token_indices go without"):
                model.bert(ids, pool=False, **others, **chosen)
    with pytest.raises(ValueError, match="output_indices and token_indices go without"):
        model.bert(ids, output_indices=output_indices)
    positions = {"masked_positions": torch.tensor([1])}
    every = model(ids, output_hidden_states=True, **positions)
    assert every.hidden_states[-1].shape[:2] == ids.shape
    torch.testing.assert_close(every.logits, model(ids, **positions).logits)


def test_packed_rows_need_an_attention_that_knows_documents(ids: Tensor) -> None:
    model = make_model(DomextModel)
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match='document_ids need attn_implementation "sdpa"'):
        model(ids, document_ids=torch.ones_like(ids))
