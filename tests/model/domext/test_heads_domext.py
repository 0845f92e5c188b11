"""The task heads: BERT's own where transformers has them, spans and marked pairs by their formulas, and exports."""

from __future__ import annotations

import inspect
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import LENGTH, MODERN, VOCAB, WIDTH, make_rows
from tiny_models import make_model as make_tiny_model
from torch import Tensor
from transformers import (
    BertConfig,
    BertForMultipleChoice,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    PreTrainedModel,
)

from domext_ray.export.model_folder import HEAD_AUTO_CLASSES, map_head
from domext_ray.model.domext import heads_domext
from domext_ray.model.domext.heads_domext import (
    SPAN_SIZE,
    DomextForMultipleChoice,
    DomextForQuestionAnswering,
    DomextForRelationClassification,
    DomextForSequenceClassification,
    DomextForSpanClassification,
    DomextForTokenClassification,
    compute_zlpr,
    rotate,
)
from domext_ray.model.domext.modeling_domext import DomextForMaskedLM, DomextForPreTraining, DomextModel
from domext_ray.model.domext.routers_domext import ROUTER_PAIRS

POSITIONS = torch.tensor([[1, 4], [2, 7], [0, 3]])


def make_model(model_class: Any, **values: Any) -> Any:
    return make_tiny_model(model_class, moved=0.05, adapter_init="paper", **values)


@pytest.fixture
def ids() -> Tensor:
    return make_rows()[0]


@pytest.fixture
def mask() -> Tensor:
    return make_rows()[1]


def run_head(model: Any, ids: Tensor, **inputs: Any) -> Tensor:
    """Logits of any head; choices are three texts of one example."""
    if isinstance(model, DomextForMultipleChoice):
        return model(ids[None], **{name: tensor[None] for name, tensor in inputs.items()}).logits
    if isinstance(model, DomextForRelationClassification):
        inputs["entity_positions"] = POSITIONS
    found = model(ids, **inputs)
    if isinstance(model, DomextForQuestionAnswering):
        return torch.stack([found.start_logits, found.end_logits])
    return found.logits


SHAPES = {
    DomextForTokenClassification: (3, LENGTH, 5),
    DomextForSequenceClassification: (3, 5),
    DomextForRelationClassification: (3, 5),
    DomextForSpanClassification: (3, 5, LENGTH, LENGTH),
    DomextForQuestionAnswering: (2, 3, LENGTH),
    DomextForMultipleChoice: (1, 3),
}


NUM_PARAMETERS = {
    DomextForTokenClassification: (WIDTH + 1) * 5,
    DomextForSequenceClassification: (WIDTH + 1) * WIDTH + (WIDTH + 1) * 5,
    DomextForRelationClassification: (3 * WIDTH + 1) * WIDTH + (WIDTH + 1) * 5,
    DomextForSpanClassification: (WIDTH + 1) * 2 * SPAN_SIZE + (2 * SPAN_SIZE + 1) * 2 * 5,
    DomextForQuestionAnswering: (WIDTH + 1) * 2,
    DomextForMultipleChoice: (WIDTH + 1) * WIDTH + (WIDTH + 1),
}


def test_every_head_is_listed_for_exports() -> None:
    heads = {
        name
        for name, member in vars(heads_domext).items()
        if isinstance(member, type) and issubclass(member, PreTrainedModel) and name.startswith("DomextFor")
    }
    assert heads == set(HEAD_AUTO_CLASSES) == {head_class.__name__ for head_class in SHAPES}
    for head in heads:
        assert map_head(head)[HEAD_AUTO_CLASSES[head]] == f"heads_domext.{head}"


def test_a_trainer_keeps_what_a_tokenizer_makes() -> None:
    """It leaves out columns that a forward pass does not name."""
    for model in (*SHAPES, DomextForMaskedLM, DomextForPreTraining):
        assert {"input_ids", "attention_mask", "token_type_ids"} <= inspect.signature(model.forward).parameters.keys()


@pytest.mark.parametrize("head", SHAPES)
def test_shapes_parameters_and_padding(head: Any, ids: Tensor, mask: Tensor) -> None:
    padded = ids * mask
    wide, wide_mask = (torch.nn.functional.pad(tensor, (0, 4)) for tensor in (padded, mask))
    for values in ({}, {"position_rule": "roberta"}, MODERN, {"head_bilstm": 6}, {"causal": True, "head_bilstm": 6}):
        model = make_model(head, num_labels=5, **values)
        own = sum(param.numel() for name, param in model.named_parameters() if not name.startswith("bert."))
        width = values.get("head_bilstm", 0)
        bilstm = 2 * 4 * width * (WIDTH + width + 2) + (2 * width + 1) * WIDTH if width else 0
        assert own == NUM_PARAMETERS[head] + bilstm, values
        together, wider = run_head(model, padded, attention_mask=mask), run_head(model, wide, attention_mask=wide_mask)
        assert together.shape == SHAPES[head], values
        if head is DomextForTokenClassification:
            together, wider = together[mask.bool()], wider[:, :LENGTH][mask.bool()]
        elif head is DomextForQuestionAnswering:
            together, wider = together[:, mask.bool()], wider[..., :LENGTH][:, mask.bool()]
        elif head is DomextForSpanClassification:
            wider = wider[..., :LENGTH, :LENGTH]
        torch.testing.assert_close(wider, together, atol=2e-5, rtol=1e-5, msg=lambda text, own=values: f"{own}: {text}")


def test_every_head_trains_in_bf16(ids: Tensor, mask: Tensor) -> None:
    for head in SHAPES:
        model = make_model(head, num_labels=5).to(torch.bfloat16).train()
        logits = run_head(model, ids, attention_mask=mask)
        assert logits.dtype == torch.bfloat16, head
        logits[logits > -1e30].float().square().sum().backward()
        assert all(param.grad is not None and param.grad.isfinite().all() for param in model.parameters()), head


@pytest.mark.parametrize("has_pooler", [False, True])
def test_reloading_a_masked_lm_as_another_head_keeps_the_encoder(has_pooler: bool, tmp_path: Path, ids: Tensor) -> None:
    model = make_model(DomextForPreTraining if has_pooler else DomextForMaskedLM, has_pooler=has_pooler)
    model.save_pretrained(tmp_path)
    expected = model.bert(ids).last_hidden_state
    for head in SHAPES:
        other, info = head.from_pretrained(tmp_path, num_labels=5, output_loading_info=True)
        assert not info["unexpected_keys"], head
        assert not [key for key in info["missing_keys"] if key.startswith("bert.")], head
        assert torch.equal(other.eval().bert(ids).last_hidden_state, expected), head
    assert torch.equal(DomextModel.from_pretrained(tmp_path).eval()(ids).last_hidden_state, expected)


def assert_same(found: Any, expected: Any, *names: str) -> None:
    for name in ("loss", *names):
        torch.testing.assert_close(found[name], expected[name], atol=1e-5, rtol=1e-5)


def test_token_classification_names_labels_and_ignores_some(ids: Tensor) -> None:
    model = make_model(DomextForTokenClassification, id2label={0: "O", 1: "B", 2: "I"})
    assert model.config.id2label[1] == "B"
    labels = torch.randint(0, 3, ids.shape)
    labels[:, 6:] = -100
    found = model(ids, labels=labels)
    expected = torch.nn.functional.cross_entropy(found.logits[:, :6].reshape(-1, 3), labels[:, :6].reshape(-1))
    torch.testing.assert_close(found.loss, expected)


def copy_to_bert(bert_class: Any, model: Any, **values: Any) -> Any:
    """transformers' own model with a plain model's weights; a head's new pooler becomes the encoder's."""
    config = {name: value for name, value in model.config.to_dict().items() if hasattr(BertConfig(), name)}
    config |= {"layer_norm_eps": 1e-12, **values}
    for name in ("model_type", "architectures", "id2label", "label2id"):
        config.pop(name, None)
    theirs = bert_class(BertConfig(**config)).eval()
    state = {
        f"bert.{name}" if name.startswith("pooler.") else name: tensor
        for name, tensor in model.state_dict().items()
        if bert_class is not BertForQuestionAnswering or "pooler" not in name
    }
    theirs.load_state_dict(state)
    return theirs


@pytest.mark.parametrize("has_pooler", [False, True])
def test_sequence_classification_is_berts(ids: Tensor, has_pooler: bool) -> None:
    classes, several = torch.tensor([0, 2, 1]), torch.tensor([[0.0, 1, 1], [1, 0, 0], [0, 0, 0]])
    for problem, num_labels, labels in (
        (None, 1, torch.tensor([0.5, 1.5, -2.0])),
        (None, 3, classes),
        (None, 3, several),
        ("regression", 2, torch.tensor([[0.5, 1.0], [1.5, 0.0], [-2.0, 3.0]])),
        ("single_label_classification", 3, classes),
        ("multi_label_classification", 3, several),
    ):
        shape = {"num_labels": num_labels, "problem_type": problem}
        model = make_model(DomextForSequenceClassification, adapters={}, has_pooler=has_pooler, **shape)
        theirs = copy_to_bert(BertForSequenceClassification, model, **shape)
        assert_same(model(ids, labels=labels), theirs(ids, labels=labels), "logits")


@pytest.mark.parametrize("has_pooler", [False, True])
def test_questions_and_choices_are_berts(ids: Tensor, mask: Tensor, has_pooler: bool) -> None:
    model = make_model(DomextForQuestionAnswering, adapters={}, has_pooler=has_pooler)
    theirs = copy_to_bert(BertForQuestionAnswering, model, num_labels=2)
    types = (torch.arange(LENGTH) > 4).long().expand(3, -1)
    places = {"start_positions": torch.tensor([0, 3, 2]), "end_positions": torch.tensor([0, 7, LENGTH + 5])}
    expected, found = (network(ids, mask, token_type_ids=types, **places) for network in (theirs, model))
    for name in ("start_logits", "end_logits"):
        torch.testing.assert_close(found[name][mask.bool()], expected[name][mask.bool()], atol=1e-5, rtol=1e-5)
    assert_same(found, expected)
    model = make_model(DomextForMultipleChoice, adapters={}, has_pooler=has_pooler)
    theirs = copy_to_bert(BertForMultipleChoice, model)
    ids = torch.randint(1, VOCAB, (2, 3, LENGTH), generator=torch.Generator().manual_seed(2))
    inputs = {"attention_mask": mask.expand(2, 3, -1).contiguous(), "token_type_ids": (ids > 40).long()}
    found, expected = (network(ids, labels=torch.tensor([2, 0]), **inputs) for network in (model, theirs))
    assert found.logits.shape == (2, 3)
    assert_same(found, expected, "logits")
    with pytest.raises(ValueError, match="exactly one of"):
        model()


def test_choices_take_the_adapter_of_their_example() -> None:
    model = make_model(DomextForMultipleChoice, active_adapters=[])
    ids = torch.randint(1, VOCAB, (2, 3, LENGTH), generator=torch.Generator().manual_seed(2))
    mixed = model(ids, adapter_names=["law", "art"]).logits
    model.set_active_adapters(["art"])
    torch.testing.assert_close(mixed[1], model(ids).logits[1], atol=1e-5, rtol=1e-5)
    assert not torch.allclose(mixed[0], model(ids).logits[0], atol=1e-4)
    model.set_active_adapters([])
    model.bert.set_router("art", torch.ones(VOCAB + ROUTER_PAIRS, dtype=torch.int32), threshold=0.0)
    torch.testing.assert_close(model(ids, adapter_names="auto").logits, model(ids, adapter_names=["art"] * 2).logits)


def test_a_relation_reads_the_row_and_both_marks(ids: Tensor) -> None:
    model = make_model(DomextForRelationClassification, num_labels=4)
    states = model.bert(ids).last_hidden_state
    read = torch.stack([torch.cat([states[i, 0], states[i, a], states[i, b]]) for i, (a, b) in enumerate(POSITIONS)])
    expected = model.classifier(torch.tanh(model.dense(read)))
    labels = torch.tensor([1, 3, 0])
    found = model(ids, entity_positions=POSITIONS, labels=labels)
    torch.testing.assert_close(found.logits, expected)
    torch.testing.assert_close(found.loss, torch.nn.functional.cross_entropy(expected, labels))
    swapped = model(ids, entity_positions=POSITIONS.flip(1)).logits
    assert not torch.allclose(swapped, found.logits, atol=1e-3), "direction matters"
    with pytest.raises(ValueError, match="give entity_positions"):
        model(ids)


def test_a_span_scores_by_its_first_and_last_token(ids: Tensor, mask: Tensor) -> None:
    model = make_model(DomextForSpanClassification, num_labels=3)
    logits = model(ids, attention_mask=mask).logits
    states = model.span_dense(model.bert(ids, attention_mask=mask).last_hidden_state)
    types = model.type_dense(states) / 2
    query, key = rotate(states[..., :SPAN_SIZE]), rotate(states[..., SPAN_SIZE:])
    for row, kind, i, j in [(0, 0, 2, 9), (1, 2, 0, 7), (2, 1, 4, 4)]:
        expected = query[row, i] @ key[row, j] / 8 + types[row, i, kind] + types[row, j, 3 + kind]
        torch.testing.assert_close(logits[row, kind, i, j], expected, atol=1e-5, rtol=1e-5)
    lowest = torch.finfo(torch.float32).min
    for row, kind, i, j in [(0, 0, 5, 4), (1, 2, 0, 8), (2, 1, 6, 7)]:
        assert logits[row, kind, i, j] == lowest


def test_rotation_leaves_lengths_and_shows_distances_only() -> None:
    states = torch.randn(1, 1, SPAN_SIZE, generator=torch.Generator().manual_seed(0)).expand(1, 20, -1)
    turned = rotate(states)[0]
    torch.testing.assert_close(turned.norm(dim=-1), states[0].norm(dim=-1))
    products = turned @ turned.T
    torch.testing.assert_close(products[3, 8], products[11, 16], atol=1e-4, rtol=1e-5)
    assert (products[3, 8] - products[3, 9]).abs() > 1e-2


def test_the_span_loss_is_its_formula_and_learns() -> None:
    logits = torch.tensor([[[[2.0, -1.0], [0.5, 3.0]]]])
    labels = torch.tensor([[[[True, False], [False, False]]]])
    expected = math.log(1 + math.exp(-1) + math.exp(0.5) + math.exp(3)) + math.log(1 + math.exp(-2))
    assert compute_zlpr(logits, labels).shape == (1, 1)
    assert compute_zlpr(logits, labels).item() == pytest.approx(expected)
    outside = torch.full_like(logits, torch.finfo(torch.float32).min)
    assert compute_zlpr(outside, torch.zeros_like(labels)).item() == 0.0
    right = torch.where(labels, 30.0, -30.0)
    assert compute_zlpr(right, labels).item() == pytest.approx(0.0, abs=1e-5)
