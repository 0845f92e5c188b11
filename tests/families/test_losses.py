"""Weights of classes and smoothed labels: against scikit-learn's formula and the loss written out."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from family_sets import EXAMPLES, make_family_task
from sklearn.utils.class_weight import compute_class_weight
from transformers import PreTrainedTokenizerBase

from domext_ray.errors import ConfigError
from domext_ray.families.losses import NO_TARGET, ClassTask, LossOptions, balance, set_loss

LABELS = ("often", "never", "rarely")
TARGETS = ("often",) * 6 + ("rarely",) * 2


def make_class_task(family: str, tokenizer: PreTrainedTokenizerBase, options: LossOptions) -> ClassTask:
    """Six examples of one class and two of another, or two words of one tag and one of another."""
    example = EXAMPLES[family][0]
    if family == "ner":
        examples, labels = (replace(example, tags=("O", "B-Disease", "O")),), ()
    else:
        field, wrap = ("labels", lambda label: (label,)) if family == "multilabel" else ("label", str)
        examples, labels = tuple(replace(example, **{field: wrap(each)}) for each in TARGETS), LABELS
    task = make_family_task(family, tokenizer, examples=examples, labels=labels)
    set_loss(task, options)
    stage = task.stages["model"]
    assert isinstance(stage, ClassTask)
    return stage


def test_weights_are_scikit_learns() -> None:
    expected = compute_class_weight("balanced", classes=np.array(["often", "rarely"]), y=np.array(TARGETS))
    assert balance(TARGETS, LABELS).tolist() == [expected[0], 1.0, expected[1]] == [8 / 12, 1.0, 2.0]
    assert balance((), LABELS).tolist() == [1.0] * 3


def test_a_family_weighs_what_its_head_predicts(bert: PreTrainedTokenizerBase) -> None:
    options = LossOptions("balanced")
    for family in ("classification", "relation"):
        assert make_class_task(family, bert, options).balance_classes().tolist() == [8 / 12, 1.0, 2.0]
    both = make_class_task("multilabel", bert, options).balance_classes()
    assert both.tolist() == [[8 / 4, 1.0, 8 / 12], [8 / 12, 1.0, 8 / 4]], "absence, then presence of each label"
    assert make_class_task("ner", bert, options).balance_classes().tolist() == [3 / 4, 3 / 2, 1.0]


def test_the_loss_is_as_written_out(bert: PreTrainedTokenizerBase) -> None:
    """Sums of -w_y (1 - e) log p_y - (e / C) sum over c of w_c log p_c, in fp32; what has no class is no part of it."""
    for family, weights, smoothing in itertools.product(
        ("classification", "relation", "ner"), ("none", "balanced"), (0.0, 0.2)
    ):
        task = make_class_task(family, bert, LossOptions(weights, smoothing))  # type: ignore[arg-type]
        shape = (2, 3, 3) if family == "ner" else (6, 3)
        logits = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
        labels = torch.tensor([0, 2, NO_TARGET, 2, 0, NO_TARGET]).reshape(shape[:-1])
        found = task.compute_loss_sum(SimpleNamespace(logits=logits), {"labels": labels})
        own = task.balance_classes() if weights == "balanced" else np.ones(3)
        expected = 0.0
        for each, label in zip(
            logits.double().log_softmax(-1).reshape(-1, 3).numpy(), labels.flatten().tolist(), strict=True
        ):
            if label != NO_TARGET:
                expected -= (1 - smoothing) * own[label] * each[label] + smoothing / 3 * float((own * each).sum())
        assert found.dtype == torch.float32 and found.item() == pytest.approx(expected, rel=1e-5)
        plain = torch.nn.functional.cross_entropy(logits.float().reshape(-1, 3), labels.flatten(), reduction="sum")
        assert (found.item() == plain.item()) == (weights == "none" and not smoothing)


def test_several_labels_can_be_weighed_and_not_smoothed(bert: PreTrainedTokenizerBase) -> None:
    """The loss of a label that an example has, or has not, weighs what scikit-learn's one-versus-rest gives it."""
    logits = torch.tensor([[0.5, -1.0, 2.0], [0.0, 3.0, -2.0]])
    labels = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    losses = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="none")
    for kind, weights in (("none", np.ones((2, 3))), ("balanced", np.array([[2 / 3, 1, 2 / 3], [2, 1, 2]]))):
        task = make_class_task("multilabel", bert, LossOptions(kind))  # type: ignore[arg-type]
        found = task.compute_loss_sum(SimpleNamespace(logits=logits), {"labels": labels})
        assert found.item() == pytest.approx(float((losses.numpy() * weights).sum()), rel=1e-6)
        assert task.count_targets({"labels": labels}, 2) == 6
    with pytest.raises(ConfigError, match=r"label_smoothing is 0\.1; it must be 0 .* family multilabel"):
        make_class_task("multilabel", bert, LossOptions("none", 0.1))


def test_a_loss_without_classes_is_refused(bert: PreTrainedTokenizerBase) -> None:
    for family in ("nested_ner", "regression", "qa", "normalization"):
        task = make_family_task(family, bert)
        for options, message in (
            (LossOptions("balanced"), "--labelled.class_weights is 'balanced'; it must be none with a task of the"),
            (LossOptions("none", 0.1), "--optim.label_smoothing is 0.1; it must be 0 with a task of the"),
        ):
            with pytest.raises(ConfigError, match=f"{message} family {family}"):
                set_loss(task, options)
        set_loss(task, LossOptions())
