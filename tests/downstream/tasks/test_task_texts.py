"""Classes and values of texts and pairs: rows as transformers makes them, scores, and heads that learn."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from brief_training import decode_oracle, make_head, predict, train_briefly
from conftest import WORDS
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from domext_ray.downstream.tasks.losses import NO_TARGET
from domext_ray.downstream.tasks.task import TaskOptions
from domext_ray.downstream.tasks.texts import ClassificationTask, RegressionTask
from domext_ray.errors import ConfigError, CorpusError
from domext_ray.labelled.examples import LabelledSet, LabelledText


@pytest.fixture(scope="module")
def bert(tiny_base_folder: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(tiny_base_folder)


@pytest.fixture(scope="module")
def roberta(tiny_roberta_folder: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(tiny_roberta_folder)


def make_text(text: str, label: str, number: int = 0, *, pair: str | None = None, value: float = 0.0) -> LabelledText:
    return LabelledText(str(number), f"made.tsv:{number + 1}", text, pair, label, value)


def make_set(*examples: LabelledText, labels: tuple[str, ...] = ("no", "yes")) -> LabelledSet:
    numbered = tuple(replace(each, id=str(i), source=f"made.tsv:{i + 1}") for i, each in enumerate(examples))
    return LabelledSet("made", numbered, numbered, numbered, labels)


TWO = make_set(make_text("the good book", "yes"), make_text("bad rain", "no"), make_text("a zebra", "no"))


@pytest.mark.parametrize("name", ["bert", "roberta"])
@pytest.mark.parametrize("max_length", [7, 12, 40])
def test_rows_are_what_transformers_makes(name: str, max_length: int, request: pytest.FixtureRequest) -> None:
    tokenizer = request.getfixturevalue(name)
    draw = random.Random(max_length)
    texts = [" ".join(draw.choices(WORDS, k=draw.randint(1, 20))) for _ in range(40)]
    pairs = [None if draw.random() < 0.4 else draw.choice(texts) for _ in texts]
    data = make_set(*(make_text(text, "yes", pair=pair) for text, pair in zip(texts, pairs, strict=True)))
    task = ClassificationTask(data, tokenizer, TaskOptions(max_length=max_length))
    rows = task.encode(data.train, is_training=True)
    num_cut = 0
    for i, (row, text, pair) in enumerate(zip(rows, texts, pairs, strict=True)):
        expected = tokenizer(text, pair, truncation="longest_first", max_length=max_length)
        assert row.example == i
        assert row.input_ids.tolist() == expected["input_ids"]
        types = expected.get("token_type_ids")
        assert (row.token_type_ids is None) == (pair is None or types is None)
        if row.token_type_ids is not None:
            assert row.token_type_ids.tolist() == types
        num_cut += len(tokenizer(text, pair)["input_ids"]) > max_length
    assert bool(num_cut) == bool(task.notes)
    if num_cut:
        assert f"more than {max_length} tokens" in task.notes[0] and task.notes[0].startswith(f"{num_cut} of 40 texts ")
    batch = task.collate(rows)
    assert (batch.inputs["token_type_ids"] is None) == (name == "roberta")
    assert batch.num_targets == 40 and batch.targets["labels"].tolist() == [1] * 40


def test_special_tokens_in_a_text_are_text(bert: PreTrainedTokenizerBase, roberta: PreTrainedTokenizerBase) -> None:
    data = make_set(
        make_text("the [SEP] </s> word", "yes", pair="[CLS] <s>"), make_text("", "no"), make_text("dog", "no", pair="")
    )
    for tokenizer, num_special in ((bert, 3), (roberta, 4)):
        pair, empty, half = ClassificationTask(data, tokenizer, TaskOptions()).encode(data.train, is_training=True)
        special = {tokenizer.cls_token_id, tokenizer.sep_token_id}
        assert sum(each in special for each in pair.input_ids.tolist()) == num_special
        assert empty.input_ids.tolist() == [tokenizer.cls_token_id, tokenizer.sep_token_id]
        assert np.isin(half.input_ids, list(special)).sum() == num_special


def test_gold_labels_score_one_and_the_majority_less(bert: PreTrainedTokenizerBase) -> None:
    task = ClassificationTask(TWO, bert, TaskOptions())
    assert task.head_labels == ("no", "yes") and task.head_config == {}
    predictions = decode_oracle(task, TWO.test)
    assert [each["label"] for each in predictions] == ["yes", "no", "no"]
    assert task.score(TWO.test, predictions).get("accuracy") == 1.0
    majority = task.score(TWO.test, task.predict_baseline(TWO.test))
    assert majority.primary == "accuracy" and majority.get("accuracy") == pytest.approx(2 / 3)
    # The second of two labels is the positive one.
    assert majority.get("f1.positive") == 0.0
    other = ClassificationTask(replace(TWO, positive_label="no"), bert, TaskOptions(), metric="f1.positive")
    found = other.score(TWO.test, other.predict_baseline(TWO.test))
    assert found.primary == "f1.positive" and found.get("f1.positive") == pytest.approx(0.8)


def test_labels_that_training_does_not_know(bert: PreTrainedTokenizerBase) -> None:
    task = ClassificationTask(TWO, bert, TaskOptions())
    strange = (make_text("the good book", "maybe", 4), TWO.test[0])
    with pytest.raises(CorpusError, match=r"^made.tsv:5: the label 'maybe' is none of no, yes; name it"):
        task.encode(strange, is_training=True)
    rows = task.encode(strange, is_training=False)
    batch = task.collate(rows)
    assert batch.targets["labels"].tolist() == [NO_TARGET, 1] and batch.num_targets == 1
    model = make_head(task, bert)
    loss = task.compute_loss_sum(model(**batch.inputs), batch.targets)
    alone = task.collate(rows[1:])
    torch.testing.assert_close(loss, task.compute_loss_sum(model(**alone.inputs), alone.targets))
    score = task.score(strange, [{"label": "yes"}] * 2)
    assert score.get("accuracy") == 0.5 and score.get("f1.micro") == pytest.approx(0.5)


def test_wrong_options(bert: PreTrainedTokenizerBase) -> None:
    with pytest.raises(ConfigError, match="the positive class is 'ja'; made has no, yes"):
        ClassificationTask(replace(TWO, positive_label="ja"), bert, TaskOptions())
    with pytest.raises(ConfigError, match="the metric of made is 'f2'; its figures are accuracy, "):
        ClassificationTask(TWO, bert, TaskOptions(), metric="f2")
    three = replace(TWO, labels=("a", "no", "yes"))
    assert ClassificationTask(three, bert, TaskOptions()).positive is None
    with pytest.raises(ConfigError, match=r"'f1.positive'"):
        ClassificationTask(three, bert, TaskOptions(), metric="f1.positive")
    short = ClassificationTask(TWO, bert, TaskOptions(max_length=4))
    with pytest.raises(ConfigError, match="max_length is 4"):
        short.encode(TWO.train, is_training=True)


@pytest.mark.parametrize("name", ["bert", "roberta"])
def test_a_head_learns_pairs(name: str, request: pytest.FixtureRequest) -> None:
    """Whether two texts say the same: neither text alone tells."""
    tokenizer = request.getfixturevalue(name)
    words = ["dog", "cat", "rain", "book"]
    examples = [make_text(a, "yes" if a == b else "no", pair=b) for a, b in itertools.product(words, words)]
    examples += [each for each in examples if each.label == "yes"] * 2
    data = make_set(*examples)
    task = ClassificationTask(data, tokenizer, TaskOptions(max_length=16))
    model = make_head(task, tokenizer)
    losses = train_briefly(task, model, steps=80)
    assert losses[-1] < 0.1 < losses[0]
    score = task.score(data.train, predict(task, model.eval(), data.train))
    baseline = task.score(data.train, task.predict_baseline(data.train))
    assert score.get("accuracy") > 0.95 > 0.6 > baseline.get("accuracy")


def make_values(scale: float = 1.0) -> LabelledSet:
    words = ["dog", "cat", "rain", "book"]
    pairs = [(a, b) for a, b in itertools.product(words, words) if a <= b]
    values = [scale * (words.index(a) + (0.5 if a == b else 0.0)) for a, b in pairs]
    return make_set(*(make_text(a, "", pair=b, value=v) for (a, b), v in zip(pairs, values, strict=True)), labels=())


def test_values_are_predicted_in_their_own_unit(bert: PreTrainedTokenizerBase) -> None:
    data = make_values()
    task = RegressionTask(data, bert, TaskOptions())
    assert task.head_labels == ("value",) and task.head_config == {"problem_type": "regression"}
    assert task.notes == []
    rows = task.encode(data.train, is_training=True)
    values = [each.value for each in data.train]
    assert [row.targets["values"].tolist() for row in rows] == values
    assert rows[0].targets["values"].dtype == np.float32
    predictions = task.decode(data.train, rows, [(np.array([each], np.float32),) for each in values])
    assert predictions == [{"value": each} for each in values]
    score = task.score(data.train, predictions)
    assert score.primary == "spearman" and score.get("spearman") == pytest.approx(1.0)
    assert task.predict_baseline(data.train) == [{"value": pytest.approx(np.mean(values))}] * len(values)
    assert task.score(data.train, task.predict_baseline(data.train)).get("spearman") == 0.0
    assert (
        RegressionTask(data, bert, TaskOptions(), metric="pearson").score(data.train, predictions).primary == "pearson"
    )
    with pytest.raises(ConfigError, match="its figures are pearson, spearman"):
        RegressionTask(data, bert, TaskOptions(), metric="accuracy")


def test_the_best_constant_has_a_loss_of_one(bert: PreTrainedTokenizerBase) -> None:
    for scale in (0.02, 1.0, 300.0):
        data = make_values(scale)
        task = RegressionTask(data, bert, TaskOptions())
        batch = task.collate(task.encode(data.train, is_training=True))
        constant = torch.full((len(data.train), 1), task.state["mean"])
        loss = task.compute_loss_sum(type("Outputs", (), {"logits": constant})(), batch.targets) / batch.num_targets
        assert loss.item() == pytest.approx(1.0, rel=1e-4)
        assert len(task.notes) == (scale != 1.0)
    assert "mean 570 " in task.notes[0] and "divided" in task.notes[0]


@pytest.mark.parametrize("name", ["bert", "roberta"])
def test_a_head_learns_values(name: str, request: pytest.FixtureRequest) -> None:
    tokenizer = request.getfixturevalue(name)
    data = make_values()
    task = RegressionTask(data, tokenizer, TaskOptions(max_length=16))
    model = make_head(task, tokenizer)
    losses = train_briefly(task, model, steps=80)
    assert losses[-1] < 0.1 < losses[0]
    predictions = predict(task, model.eval(), data.train)
    assert task.score(data.train, predictions).get("spearman") > 0.9
    assert np.abs(np.array([each["value"] for each in predictions]) - [each.value for each in data.train]).mean() < 0.5
