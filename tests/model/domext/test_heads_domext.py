"""The task heads: BERT's own where transformers has them, spans and marked pairs by their formulas, and exports."""

from __future__ import annotations

import inspect
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lone_process import WITHOUT_PROJECT
from torch import Tensor
from transformers import (
    BertConfig,
    BertForMultipleChoice,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    PreTrainedModel,
)

from domext_ray.export.model_folder import CODE_FILES, HEAD_AUTO_CLASSES, map_head
from domext_ray.model import domext as code_room
from domext_ray.model.domext import heads_domext
from domext_ray.model.domext.configuration_domext import DomextConfig
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

VOCAB, LENGTH, WIDTH = 90, 12, 32
ADAPTERS = {"law": {"heads": 1, "ffn_units": 6}, "art": {"heads": 2, "ffn_units": 0}}
MODERN = {
    "norm_place": "pre",
    "position_rule": "rotary",
    "gated_ffn": True,
    "norm_bias": False,
    "type_vocab_size": 0,
    "local_layers": [1],
    "local_window": 2,
}
POSITIONS = torch.tensor([[1, 4], [2, 7], [0, 3]])


def make_config(**values: Any) -> DomextConfig:
    return DomextConfig(
        **{
            "vocab_size": VOCAB,
            "hidden_size": WIDTH,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 48,
            "max_position_embeddings": 24,
            "initializer_range": 0.2,
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
            "adapter_init": "paper",
            "adapters": ADAPTERS,
            **values,
        }
    )


def make_model(model_class: Any, **values: Any) -> Any:
    torch.manual_seed(0)
    model = model_class(make_config(**values)).eval()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.05 * torch.randn_like(param))
    return model


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(1, VOCAB, (3, LENGTH), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def mask() -> Tensor:
    mask = torch.ones(3, LENGTH, dtype=torch.long)
    mask[1, 8:] = 0
    mask[2, 5:] = 0
    return mask


def run_head(model: Any, ids: Tensor, **inputs: Any) -> Tensor:
    """Logits of any head; choices are three texts of one example."""
    if isinstance(model, DomextForMultipleChoice):
        return model(ids[None], **{name: each[None] for name, each in inputs.items()}).logits
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
        for name, each in vars(heads_domext).items()
        if isinstance(each, type) and issubclass(each, PreTrainedModel) and name.startswith("DomextFor")
    }
    assert heads == set(HEAD_AUTO_CLASSES) == {each.__name__ for each in SHAPES}
    for head in heads:
        assert map_head(head)[HEAD_AUTO_CLASSES[head]] == f"heads_domext.{head}"


def test_a_trainer_keeps_what_a_tokenizer_makes() -> None:
    """It leaves out columns that a forward pass does not name."""
    for model in (*SHAPES, DomextForMaskedLM, DomextForPreTraining):
        assert {"input_ids", "attention_mask", "token_type_ids"} <= inspect.signature(model.forward).parameters.keys()


@pytest.mark.parametrize("head", SHAPES)
@pytest.mark.parametrize(
    "values",
    [
        {},
        {"position_rule": "roberta"},
        MODERN,
        {"causal": True},
        {"head_bilstm": 6},
        {"causal": True, "head_bilstm": 6},
    ],
)
def test_shapes_parameters_and_padding(head: Any, values: dict[str, Any], ids: Tensor, mask: Tensor) -> None:
    model = make_model(head, num_labels=5, **values)
    own = sum(each.numel() for name, each in model.named_parameters() if not name.startswith("bert."))
    width = values.get("head_bilstm", 0)
    bilstm = 2 * 4 * width * (WIDTH + width + 2) + (2 * width + 1) * WIDTH if width else 0
    assert own == NUM_PARAMETERS[head] + bilstm
    padded = ids * mask
    together = run_head(model, padded, attention_mask=mask)
    assert together.shape == SHAPES[head]
    longer = torch.nn.functional.pad(padded, (0, 4))
    wider = run_head(model, longer, attention_mask=torch.nn.functional.pad(mask, (0, 4)))
    if head in (DomextForTokenClassification, DomextForQuestionAnswering):
        keep = mask.bool()
        wider = wider[..., :LENGTH, :] if head is DomextForTokenClassification else wider[..., :LENGTH]
        together, wider = (
            (each[keep] if head is DomextForTokenClassification else each[:, keep]) for each in (together, wider)
        )
    elif head is DomextForSpanClassification:
        wider = wider[..., :LENGTH, :LENGTH]
    torch.testing.assert_close(wider, together, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("head", SHAPES)
def test_every_head_trains_in_bf16(head: Any, ids: Tensor, mask: Tensor) -> None:
    model = make_model(head, num_labels=5).to(torch.bfloat16).train()
    logits = run_head(model, ids, attention_mask=mask)
    assert logits.dtype == torch.bfloat16
    logits[logits > -1e30].float().square().sum().backward()
    assert all(each.grad is not None and each.grad.isfinite().all() for each in model.parameters())


@pytest.mark.parametrize("has_pooler", [False, True])
@pytest.mark.parametrize("head", SHAPES)
def test_reloading_a_masked_lm_as_another_head_keeps_the_encoder(
    head: Any, has_pooler: bool, tmp_path: Path, ids: Tensor
) -> None:
    model = make_model(DomextForPreTraining if has_pooler else DomextForMaskedLM, has_pooler=has_pooler)
    model.save_pretrained(tmp_path)
    expected = model.bert(ids)
    other, info = head.from_pretrained(tmp_path, num_labels=5, output_loading_info=True)
    assert not info["unexpected_keys"]
    assert not [each for each in info["missing_keys"] if each.startswith("bert.")]
    assert torch.equal(other.eval().bert(ids).last_hidden_state, expected.last_hidden_state)
    assert run_head(other, ids).shape == SHAPES[head]
    encoder = DomextModel.from_pretrained(tmp_path).eval()
    assert torch.equal(encoder(ids).last_hidden_state, expected.last_hidden_state)


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
        f"bert.{name}" if name.startswith("pooler.") else name: each
        for name, each in model.state_dict().items()
        if bert_class is not BertForQuestionAnswering or "pooler" not in name
    }
    theirs.load_state_dict(state)
    return theirs


@pytest.mark.parametrize(
    ("problem", "num_labels", "labels"),
    [
        (None, 1, torch.tensor([0.5, 1.5, -2.0])),
        (None, 3, torch.tensor([0, 2, 1])),
        (None, 3, torch.tensor([[0.0, 1, 1], [1, 0, 0], [0, 0, 0]])),
        ("regression", 2, torch.tensor([[0.5, 1.0], [1.5, 0.0], [-2.0, 3.0]])),
        ("single_label_classification", 3, torch.tensor([0, 2, 1])),
        ("multi_label_classification", 3, torch.tensor([[0.0, 1, 1], [1, 0, 0], [0, 0, 0]])),
    ],
)
@pytest.mark.parametrize("has_pooler", [False, True])
def test_sequence_classification_is_berts(
    ids: Tensor, problem: str | None, num_labels: int, labels: Tensor, has_pooler: bool
) -> None:
    shape = {"num_labels": num_labels, "problem_type": problem}
    model = make_model(DomextForSequenceClassification, adapters={}, has_pooler=has_pooler, **shape)
    theirs = copy_to_bert(BertForSequenceClassification, model, **shape)
    expected, found = theirs(ids, labels=labels), model(ids, labels=labels)
    torch.testing.assert_close(found.logits, expected.logits, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.loss, expected.loss, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("has_pooler", [False, True])
def test_question_answering_is_berts(ids: Tensor, mask: Tensor, has_pooler: bool) -> None:
    model = make_model(DomextForQuestionAnswering, adapters={}, has_pooler=has_pooler)
    theirs = copy_to_bert(BertForQuestionAnswering, model, num_labels=2)
    types = (torch.arange(LENGTH) > 4).long().expand(3, -1)
    places = {"start_positions": torch.tensor([0, 3, 2]), "end_positions": torch.tensor([0, 7, LENGTH + 5])}
    inputs = {"attention_mask": mask, "token_type_ids": types, **places}
    expected, found = theirs(ids, **inputs), model(ids, **inputs)
    for name in ("start_logits", "end_logits"):
        torch.testing.assert_close(found[name][mask.bool()], expected[name][mask.bool()], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.loss, expected.loss, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("has_pooler", [False, True])
def test_multiple_choice_is_berts(mask: Tensor, has_pooler: bool) -> None:
    model = make_model(DomextForMultipleChoice, adapters={}, has_pooler=has_pooler)
    theirs = copy_to_bert(BertForMultipleChoice, model)
    ids = torch.randint(1, VOCAB, (2, 3, LENGTH), generator=torch.Generator().manual_seed(2))
    inputs = {"attention_mask": mask.expand(2, 3, -1).contiguous(), "token_type_ids": (ids > 40).long()}
    labels = torch.tensor([2, 0])
    expected, found = theirs(ids, labels=labels, **inputs), model(ids, labels=labels, **inputs)
    assert found.logits.shape == (2, 3)
    torch.testing.assert_close(found.logits, expected.logits, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.loss, expected.loss, atol=1e-5, rtol=1e-5)
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


LOAD_ALONE = (
    WITHOUT_PROJECT
    + """
import json
import sys
import torch
import transformers as tf

torch.set_num_threads(1)
found = {}
for head, automatic in json.loads(sys.argv[2]).items():
    model = getattr(tf, automatic).from_pretrained(f"{sys.argv[1]}/{head}", trust_remote_code=True).eval()
    assert type(model).__name__ == head
    ids = torch.tensor(json.loads(sys.argv[3]))
    inputs = {"input_ids": ids[None] if "Choice" in head else ids}
    if "Relation" in head:
        inputs["entity_positions"] = torch.tensor(json.loads(sys.argv[4]))
    with torch.no_grad():
        logits = model(**inputs)[0]
    found[head] = {"logits": logits.flatten().tolist(), "labels": model.config.id2label}
assert "domext_ray" not in sys.modules
print(json.dumps(found))
"""
)


def test_every_head_loads_without_this_package(tmp_path: Path, ids: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "huggingface"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    expected = {}
    for head in SHAPES:
        model = make_model(head, id2label={0: "yes", 1: "no", 2: "perhaps"})
        model.config.auto_map = map_head(head.__name__)
        folder = tmp_path / head.__name__
        model.save_pretrained(folder)
        for name in CODE_FILES:
            (folder / name).write_bytes(Path(code_room.__path__[0], name).read_bytes())
        logits = run_head(model, ids)
        expected[head.__name__] = logits[0] if head is DomextForQuestionAnswering else logits
    arguments = [str(tmp_path), json.dumps(HEAD_AUTO_CLASSES), json.dumps(ids.tolist()), json.dumps(POSITIONS.tolist())]
    command = [sys.executable, "-I", "-c", LOAD_ALONE, *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert found.keys() == expected.keys()
    for head_name, logits in expected.items():
        alone = torch.tensor(found[head_name]["logits"]).view(logits.shape)
        torch.testing.assert_close(alone, logits, atol=1e-5, rtol=1e-5)
        assert found[head_name]["labels"] == {"0": "yes", "1": "no", "2": "perhaps"}
