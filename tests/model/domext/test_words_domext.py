"""Words in: what a model gives out as its embeddings is what it reads."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from tiny_models import MODERN, VOCAB, WIDTH, make_model, make_rows
from torch import Tensor, nn
from transformers import AutoModelForMaskedLM, AutoModelForSequenceClassification

from domext_ray.export.model_folder import save_with_code
from domext_ray.model.domext import heads_domext
from domext_ray.model.domext.modeling_domext import DomextForMaskedLM, DomextForPreTraining, DomextModel

_, MASK = make_rows()
IDS = make_rows()[0] * MASK  # 0 is padding
ALL, SOME = {"law": {"word_rows": VOCAB}}, {"law": {"word_rows": 40, "word_head": True, "heads": 1}}
KINDS: dict[str, dict[str, Any]] = {
    "no word": {"adapters": {"law": {"heads": 1}}},
    "all words": {"adapters": ALL},
    "some words": {"adapters": SOME},
    "new words": {"extension_vocab_size": 10, "adapters": {}},
    "exBERT": {"extension_vocab_size": 10, "adapters": {}, "module_hidden_size": 8, "module_ffn_size": 6},
    "all": {"extension_vocab_size": 10, "adapters": {**SOME, "art": {"word_rows": 80, "scale": 0.5}}},
}
"""What is beside the base's table."""
LAYOUTS: dict[str, dict[str, Any]] = {
    "BERT": {"has_pooler": True},
    "RoBERTa": {"position_rule": "roberta"},
    "ModernBERT": MODERN,
    "DistilBERT": {"type_vocab_size": 0},
}
HEADS = [
    *("SequenceClassification", "TokenClassification", "SpanClassification", "QuestionAnswering"),
    *("MultipleChoice", "RelationClassification"),
]
CLASSES = [DomextModel, DomextForPreTraining, *(getattr(heads_domext, f"DomextFor{head}") for head in HEADS)]
each_kind = pytest.mark.parametrize("kind", KINDS)


def make(kind: str, model_class: Any = DomextForMaskedLM, **values: Any) -> Any:
    """A model all of whose tensors are off their start."""
    return make_model(model_class, moved=0.1, **{**KINDS[kind], **values})


def list_given(model: Any) -> tuple[dict[str, Tensor], Tensor]:
    """What a model reads beside words, and rows for it; those of choices are three of one example."""
    if isinstance(model, heads_domext.DomextForMultipleChoice):
        return {"attention_mask": MASK[None]}, IDS[None]
    more = {"entity_positions": torch.tensor([[1, 3]] * 3)} if "Relation" in type(model).__name__ else {}
    return {"attention_mask": MASK, **more}, IDS


@each_kind
@torch.no_grad()
def test_the_embeddings_of_ids_stand_for_the_ids(kind: str) -> None:
    """Bit for bit, for the encoder and every head, on every layout; padding differs in RoBERTa's positions alone."""
    cases = [(layout, DomextForMaskedLM) for layout in LAYOUTS]
    cases += [("BERT", head_class) for head_class in CLASSES if kind.startswith("all")]
    for layout, model_class in cases:
        model = make(kind, model_class, **LAYOUTS[layout])
        words, (given, ids) = model.get_input_embeddings(), list_given(model)
        assert words.weight.shape == (VOCAB, WIDTH) == (words.num_embeddings, words.embedding_dim)
        assert torch.equal(words(ids), words.weight[ids])
        found, expected = model(inputs_embeds=words(ids), **given)[0], model(ids, **given)[0]
        if expected.shape[:2] == MASK.shape:
            found, expected = found[MASK.bool()], expected[MASK.bool()]
        assert torch.equal(found, expected), (layout, model_class)


@torch.no_grad()
def test_the_embeddings_follow_the_adapters() -> None:
    model = make("all")
    words, before = model.get_input_embeddings(), make("all").get_input_embeddings().weight
    for choose in (
        lambda: model.set_active_adapters(["art"]),
        lambda: model.set_active_adapters([]),
        lambda: model.set_active_adapters(None),
        lambda: model.attach_adapter("new", word_rows=7),
        lambda: model.bert.embeddings.adapters["new"].weight.add_(1.0),
        lambda: model.detach_adapter("law"),
    ):
        choose()
        assert torch.equal(model(inputs_embeds=words(IDS)).logits, model(IDS).logits)
    assert not torch.equal(words.weight[:7], before[:7])


@torch.no_grad()
def test_rows_of_several_adapters_have_no_embeddings() -> None:
    names = ["law", "art", "__base__"]
    for model_class in (DomextModel, DomextForMaskedLM):
        model = make("all", model_class, adapters={"law": {"word_rows": 40}, "art": {"heads": 1}})
        with pytest.raises(ValueError, match=r"adapter_names says .* inputs_embeds are words already; give input_ids"):
            model(inputs_embeds=model.get_input_embeddings()(IDS), adapter_names=names)
    model = make("no word", adapters={"law": {"heads": 1}, "art": {"heads": 2}})
    found = model(inputs_embeds=model.get_input_embeddings()(IDS), adapter_names=names).logits
    assert torch.equal(found, model(IDS, adapter_names=names).logits), "no adapter shifts a word"


@each_kind
def test_gradients_and_hooks_reach_the_words(kind: str) -> None:
    model = make(kind)
    words = model.get_input_embeddings()
    given = words(IDS).detach().requires_grad_()
    model(inputs_embeds=given).logits.square().sum().backward()
    seen: list[Tensor] = []
    handle = words.register_forward_hook(lambda module, inputs, output: seen.append(output))
    model(IDS)
    handle.remove()
    assert len(seen) == 1 and torch.equal(seen[0], given)
    handle = words.register_forward_hook(lambda module, inputs, output: given)
    assert torch.equal(model(torch.ones_like(IDS)).logits, model(IDS).logits)
    handle.remove()
    assert given.grad is not None and (given.grad.abs().sum(-1) > 0).all()
    model.zero_grad()
    words.weight.sum().backward()
    moved = {name for name, param in model.named_parameters() if param.grad is not None}
    tables = [model.bert.embeddings.word_embeddings, model.bert.embeddings.extension]
    tables += [adapter for adapter in model.bert.embeddings.adapters.values()]
    assert moved == {name for name, param in model.named_parameters() if any(param is t.weight for t in tables if t)}


@pytest.mark.parametrize("kind", ["all words", "all"])
@torch.no_grad()
def test_the_embeddings_are_the_models_own(kind: str, tmp_path: Path) -> None:
    """Copies, pickles and other dtypes of a model read their own words; names and tied tensors are what they were."""
    model = make(kind)
    names = {name for name in model.state_dict() if name.startswith("bert.embeddings.") and "position" not in name}
    assert not any("words" in name.split(".") for name in names) and len(model.state_dict()) == len(
        {*model.state_dict()}
    )
    assert model.cls.predictions.decoder.weight is model.bert.embeddings.word_embeddings.weight
    expected = model.get_input_embeddings().weight.clone()
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    model.save_pretrained(tmp_path)
    others = [copy.deepcopy(model), torch.load(buffer, weights_only=False), DomextForMaskedLM.from_pretrained(tmp_path)]
    for param in model.parameters():
        param.zero_()
    for other in others:
        assert torch.equal(other.get_input_embeddings().weight, expected)
        assert other.cls.predictions.decoder.weight is other.bert.embeddings.word_embeddings.weight
    assert others[0].to(torch.bfloat16).get_input_embeddings().weight.dtype == torch.bfloat16
    before = others[1].get_input_embeddings()
    others[1].set_input_embeddings(before)
    assert others[1].get_input_embeddings() is before
    assert others[1].resize_token_embeddings(VOCAB) is before and torch.equal(before.weight, expected)


@torch.no_grad()
def test_a_table_of_shifted_words_grows_and_keeps_its_shifts(tmp_path: Path) -> None:
    for kind, least in (("all words", VOCAB), ("some words", 40)):
        for model_class in (DomextForMaskedLM, heads_domext.DomextForSequenceClassification):
            model = make(kind, model_class)
            model.bert.embeddings.word_embeddings.weight.requires_grad_(False)
            before, other_ids = model(IDS)[0], IDS + 6
            with pytest.raises(ValueError, match=f"the adapter 'law' shifts words up to the id {least - 1}; resizing"):
                model.resize_token_embeddings(least - 1)
            assert model.resize_token_embeddings(VOCAB + 3, 2).weight.shape == (VOCAB + 4, WIDTH)
            assert model.config.vocab_size == VOCAB + 4
            assert not model.bert.embeddings.word_embeddings.weight.requires_grad, "it was frozen"
            torch.testing.assert_close(model(IDS)[0][..., : before.shape[-1]], before)
            model.save_pretrained(tmp_path)
            again = model_class.from_pretrained(tmp_path).eval()
            assert torch.equal(again(other_ids % (VOCAB + 4))[0], model(other_ids % (VOCAB + 4))[0])
    with pytest.raises(ValueError, match="must have the base's 94"):
        model.set_input_embeddings(nn.Embedding(VOCAB, WIDTH))
    with pytest.raises(ValueError, match="has no rows"):
        model.set_input_embeddings(nn.Sequential(model.get_input_embeddings()))


@torch.no_grad()
def test_peft_learns_a_prompt_before_the_words_that_the_model_reads() -> None:
    for kind, head in (("all words", "Sequence"), ("new words", "Token"), ("all", "Sequence"), ("no word", "Token")):
        model = make(kind, getattr(heads_domext, f"DomextFor{head}Classification"))
        config = peft.PromptTuningConfig(
            task_type="SEQ_CLS" if head == "Sequence" else "TOKEN_CLS", num_virtual_tokens=2
        )
        prompted = peft.get_peft_model(copy.deepcopy(model), config)
        words = torch.cat([prompted.get_prompt(batch_size=3), model.get_input_embeddings()(IDS)], dim=1)
        mask = torch.cat([torch.ones_like(MASK[:, :2]), MASK], dim=1)
        expected = model(inputs_embeds=words, attention_mask=mask).logits
        assert torch.equal(prompted(IDS, attention_mask=MASK).logits, expected), kind


@pytest.mark.usefixtures("own_modules")
@torch.no_grad()
def test_the_embeddings_of_an_export_stand_for_the_ids(tmp_path: Path) -> None:
    save_with_code(make("all"), tmp_path)
    for loader in (AutoModelForMaskedLM, AutoModelForSequenceClassification):
        model = loader.from_pretrained(tmp_path, trust_remote_code=True).eval()
        assert type(model).__module__.startswith("transformers_modules.")
        words = model.get_input_embeddings()
        assert words.weight.shape == (VOCAB, WIDTH) and model.resize_token_embeddings(VOCAB) is words
        assert torch.equal(model(inputs_embeds=words(IDS)).logits, model(IDS).logits)
