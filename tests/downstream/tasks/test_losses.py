"""Weights of classes and smoothed labels: against scikit-learn's formula and the loss written out."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.utils.class_weight import compute_class_weight
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from domext_ray.downstream.tasks.families import make_task
from domext_ray.downstream.tasks.losses import NO_TARGET, ClassTask, LossOptions, balance, set_loss
from domext_ray.downstream.tasks.task import TaskOptions
from domext_ray.errors import ConfigError
from domext_ray.labelled.examples import (
    AnnotatedText,
    Entity,
    LabelledSet,
    LabelledText,
    MarkedText,
    Mention,
    MultiLabelText,
    Question,
    TaggedSentence,
)

LABELS = ("often", "never", "rarely")
TARGETS = ("often",) * 6 + ("rarely",) * 2


@pytest.fixture(scope="module")
def tokenizer(tiny_base_folder: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(tiny_base_folder)


def make_set(family: str) -> LabelledSet:
    examples: dict[str, tuple[Any, ...]] = {
        "classification": tuple(LabelledText(str(i), "f:1", "the cat", None, each) for i, each in enumerate(TARGETS)),
        "multilabel": tuple(MultiLabelText(str(i), "f:1", "a", None, (each,)) for i, each in enumerate(TARGETS)),
        "relation": tuple(
            MarkedText(str(i), "f:1", "the cat sees a dog", Entity(4, 7, ""), Entity(15, 18, ""), each)
            for i, each in enumerate(TARGETS)
        ),
        "ner": (TaggedSentence("0", "f:1", ("the", "cat", "a", "dog"), ("O", "B-Animal", "O", "O")),),
        "nested_ner": (AnnotatedText("0", "f:1", "the cat", (Entity(4, 7, "Animal"),)),),
        "regression": (
            LabelledText("0", "f:1", "the cat", None, "", 1.0),
            LabelledText("1", "f:1", "a", None, "", 2.0),
        ),
        "qa": (Question("0", "f:1", "who", "the cat", (Entity(4, 7, ""),)),),
        "normalization": (Mention("0", "f:1", "cat", ("the cat",)),),
    }
    labels = {
        "ner": ("Animal",),
        "nested_ner": ("Animal",),
        **dict.fromkeys(("classification", "relation", "multilabel"), LABELS),
    }
    data = examples[family]
    return LabelledSet("made", data, data, data, labels.get(family, ()), catalogue=("the cat", "a dog"))


def make_class_task(family: str, tokenizer: PreTrainedTokenizerBase, options: LossOptions) -> ClassTask:
    task = make_task(family, make_set(family), tokenizer, TaskOptions(max_length=32, stride=8))
    set_loss(task, options)
    stage = task.stages["model"]
    assert isinstance(stage, ClassTask)
    return stage


def test_weights_are_scikit_learns() -> None:
    expected = compute_class_weight("balanced", classes=np.array(["often", "rarely"]), y=np.array(TARGETS))
    assert balance(TARGETS, LABELS).tolist() == [expected[0], 1.0, expected[1]] == [8 / 12, 1.0, 2.0]
    assert balance((), LABELS).tolist() == [1.0] * 3


def test_a_family_weighs_what_its_head_predicts(tokenizer: PreTrainedTokenizerBase) -> None:
    options = LossOptions("balanced")
    for family in ("classification", "relation"):
        assert make_class_task(family, tokenizer, options).balance_classes().tolist() == [8 / 12, 1.0, 2.0]
    both = make_class_task("multilabel", tokenizer, options).balance_classes()
    assert both.tolist() == [[8 / 4, 1.0, 8 / 12], [8 / 12, 1.0, 8 / 4]], "absence, then presence of each label"
    assert make_class_task("ner", tokenizer, options).balance_classes().tolist() == [4 / 6, 2.0, 1.0]


@pytest.mark.parametrize("family", ["classification", "relation", "ner"])
@pytest.mark.parametrize(("weights", "smoothing"), [("none", 0.0), ("balanced", 0.0), ("none", 0.2), ("balanced", 0.2)])
def test_the_loss_is_as_written_out(
    family: str, weights: Any, smoothing: float, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Sums of -w_y (1 - e) log p_y - (e / C) sum over c of w_c log p_c; what has no class is no part of it."""
    task = make_class_task(family, tokenizer, LossOptions(weights, smoothing))
    shape = (2, 3, 3) if family == "ner" else (6, 3)
    logits = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).float()
    labels = torch.tensor([0, 2, NO_TARGET, 2, 0, NO_TARGET]).reshape(shape[:-1])
    found = task.compute_loss_sum(SimpleNamespace(logits=logits), {"labels": labels})
    own = task.balance_classes() if weights == "balanced" else np.ones(3)
    logs = logits.double().log_softmax(-1).reshape(-1, 3).numpy()
    expected = 0.0
    for each, label in zip(logs, labels.flatten().tolist(), strict=True):
        if label != NO_TARGET:
            expected -= (1 - smoothing) * own[label] * each[label] + smoothing / 3 * float((own * each).sum())
    assert found.item() == pytest.approx(expected, rel=1e-5)
    plain = torch.nn.functional.cross_entropy(logits.reshape(-1, 3), labels.flatten(), reduction="sum")
    assert (found.item() == plain.item()) == (weights == "none" and not smoothing)


def test_several_labels_can_be_weighed_and_not_smoothed(tokenizer: PreTrainedTokenizerBase) -> None:
    """The loss of a label that an example has, or has not, weighs what scikit-learn's one-versus-rest gives it."""
    logits = torch.tensor([[0.5, -1.0, 2.0], [0.0, 3.0, -2.0]])
    labels = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    losses = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="none")
    for kind, weights in (("none", np.ones((2, 3))), ("balanced", np.array([[2 / 3, 1, 2 / 3], [2, 1, 2]]))):
        task = make_class_task("multilabel", tokenizer, LossOptions(kind))  # type: ignore[arg-type]
        found = task.compute_loss_sum(SimpleNamespace(logits=logits), {"labels": labels})
        assert found.item() == pytest.approx(float((losses.numpy() * weights).sum()), rel=1e-6)
        assert task.count_targets({"labels": labels}, 2) == 6
    with pytest.raises(ConfigError, match=r"label_smoothing is 0\.1; it must be 0 .* family multilabel"):
        make_class_task("multilabel", tokenizer, LossOptions("none", 0.1))


@pytest.mark.parametrize("family", ["nested_ner", "regression", "qa", "normalization"])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (LossOptions("balanced"), "--labelled.class_weights is 'balanced'; it must be none with a task of the family"),
        (LossOptions("none", 0.1), "--optim.label_smoothing is 0.1; it must be 0 with a task of the family"),
    ],
    ids=["weights", "smoothing"],
)
def test_a_loss_without_classes_is_refused(
    family: str, options: LossOptions, message: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    task = make_task(family, make_set(family), tokenizer, TaskOptions(max_length=32, stride=8))
    with pytest.raises(ConfigError) as caught:
        set_loss(task, options)
    assert f"{message} {family}" in str(caught.value)
    set_loss(task, LossOptions())
