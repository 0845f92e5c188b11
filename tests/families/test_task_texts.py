"""Classes, values and choices: rows as transformers makes them, and what their predictions score."""

from __future__ import annotations

import copy
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import WORDS
from family_sets import make_family_task
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerBase

from domext_ray.errors import ConfigError
from domext_ray.families.choices import ChoiceTask, join_stem
from domext_ray.families.classification import ClassificationTask
from domext_ray.families.readers.examples import Choice, LabelledSet, LabelledText
from domext_ray.families.regression import RegressionTask
from domext_ray.families.task import TaskOptions


def make_set(*texts: tuple[str, str, str | None], labels: tuple[str, ...] = ("no", "yes")) -> LabelledSet:
    examples = tuple(
        LabelledText(str(i), f"t:{i + 1}", text, pair, label) for i, (text, label, pair) in enumerate(texts)
    )
    return LabelledSet("made", *[examples] * 3, labels)


TWO = make_set(("the good book", "yes", None), ("bad rain", "no", None), ("a zebra", "no", None))


@pytest.mark.parametrize("name", ["bert", "roberta"])
def test_rows_are_what_transformers_makes(name: str, request: pytest.FixtureRequest) -> None:
    tokenizer = request.getfixturevalue(name)
    for max_length in (7, 12, 40):
        draw = random.Random(max_length)
        texts = [" ".join(draw.choices(WORDS, k=draw.randint(1, 20))) for _ in range(40)]
        pairs = [None if draw.random() < 0.4 else draw.choice(texts) for _ in texts]
        data = make_set(*((text, "yes", pair) for text, pair in zip(texts, pairs, strict=True)))
        task = ClassificationTask(data, tokenizer, TaskOptions(max_length=max_length))
        rows, num_cut = task.encode(data.train, is_training=True), 0
        for i, (row, text, pair) in enumerate(zip(rows, texts, pairs, strict=True)):
            expected = tokenizer(text, pair, truncation="longest_first", max_length=max_length)
            assert row.example == i and row.input_ids.tolist() == expected["input_ids"]
            types = None if pair is None else expected.get("token_type_ids")
            assert (None if row.token_type_ids is None else row.token_type_ids.tolist()) == types
            num_cut += len(tokenizer(text, pair)["input_ids"]) > max_length
        assert [f"{num_cut} of 40 texts " in note for note in task.notes] == [True] * bool(num_cut)
        assert all(f"more than {max_length} tokens" in note for note in task.notes)
        batch = task.collate(rows)
        assert (batch.inputs["token_type_ids"] is None) == (name == "roberta")
        assert batch.num_targets == 40 and batch.targets["labels"].tolist() == [1] * 40


def test_a_task_knows_whether_it_reads_pairs(bert: PreTrainedTokenizerBase) -> None:
    """All of train are pairs; files of single texts are as in 0.1.0."""
    for pairs, state in ((("x", "y"), {"has_pairs": True}), (("x", None), {}), ((None, None), {})):
        data = make_set(*((f"text {i}", "yes", pair) for i, pair in enumerate(pairs)))
        task = ClassificationTask(data, bert, TaskOptions(max_length=16))
        assert task.state_dict() == state
        again = ClassificationTask(replace(data, train=()), bert, TaskOptions(max_length=16), state=state)
        assert again.state_dict() == state and again.state == {"has_pairs": bool(state)}


@pytest.mark.parametrize("name", ["bert", "roberta"])
def test_windows_have_the_whole_of_a_text(name: str, request: pytest.FixtureRequest) -> None:
    tokenizer = request.getfixturevalue(name)
    for max_length, stride in ((7, 0), (12, 3), (12, 90)):
        draw = random.Random(max_length)
        texts = [" ".join(draw.choices(WORDS, k=draw.randint(0, 50))) for _ in range(40)]
        data = make_set(*((text, "yes", None) for text in texts), ("the dog", "yes", texts[0]))
        options = TaskOptions(max_length, stride, long_texts="windows")
        task, cutting = (ClassificationTask(data, tokenizer, each) for each in (options, TaskOptions(max_length)))
        rows, cut_rows = (each.encode(data.train, is_training=True) for each in (task, cutting))
        for i, text in enumerate(texts):
            ids, own = tokenizer(text)["input_ids"], [row for row in rows if row.example == i]
            assert own[0].input_ids.tolist() == cut_rows[i].input_ids.tolist(), "the first window is what is kept"
            assert {row.length for row in own} == {min(len(ids), max_length)}
            assert all(row.targets["labels"] == 1 and row.token_type_ids is None for row in own)
            inner = [row.input_ids.tolist()[1:-1] for row in own]
            assert all([row.input_ids[0], row.input_ids[-1]] == [ids[0], ids[-1]] for row in own)
            assert inner[-1] == ids[len(ids) - 1 - len(inner[-1]) : -1], "the last window ends with the text"
            step = max_length - 2 - min(stride, (max_length - 2) // 2)
            assert all(inner[k] == ids[1 + k * step :][: max_length - 2] for k in range(len(inner) - 1))
            assert len(inner) == max(1, 1 + -(-(len(ids) - max_length) // step))
        assert len(rows) > 2 * len(texts)
        assert [row.example for row in rows].count(len(texts)) == 1, "a pair is cut"
        is_cut = len(tokenizer("the dog", texts[0])["input_ids"]) > max_length
        assert [note.split(" ")[0] for note in task.notes] == ["1"] * is_cut


def test_windows_decide_together(bert: PreTrainedTokenizerBase) -> None:
    data = make_set(("the dog", "yes", None), ("good " * 40, "yes", None), ("the " * 80, "no", None))
    task = ClassificationTask(data, bert, TaskOptions(16, 0, long_texts="windows"))
    rows = task.encode(data.test, is_training=False)
    draw = np.random.default_rng(0)
    logits = [draw.normal(size=2).astype(np.float32) for _ in rows]
    found = task.decode(data.test, rows, [(each,) for each in logits])
    for i, prediction in enumerate(found):
        mean = np.mean([each for row, each in zip(rows, logits, strict=True) if row.example == i], axis=0)
        assert prediction == task.decode_row(data.test[i], mean)
    assert [row.example for row in rows] == [0, *[1] * 3, *[2] * 6]
    values = tuple(LabelledText(str(i), "", text.text, None, "", 1.0) for i, text in enumerate(data.train))
    numbers = RegressionTask(LabelledSet("made", *[values] * 3), bert, TaskOptions(16, 0, long_texts="windows"))
    rows = numbers.encode(values, is_training=True)
    outputs = [(np.array([float(i)], np.float32),) for i in range(len(rows))]
    assert numbers.decode(values, rows, outputs) == [{"value": 0.0}, {"value": 2.0}, {"value": 6.5}]


@pytest.mark.parametrize("name", ["bert", "roberta"])
def test_segments_of_a_choice_are_what_transformers_makes(name: str, request: pytest.FixtureRequest) -> None:
    tokenizer = request.getfixturevalue(name)
    for max_length in (12, 20, 128):
        draw = random.Random(max_length)
        says = [[" ".join(draw.choices(WORDS, k=draw.randint(1, 14))) for _ in range(4)] for _ in range(30)]
        choices = tuple(Choice("", "", each[0], "they", tuple(each[1:]), draw.randrange(3)) for each in says)
        task = make_family_task("multiple_choice", tokenizer, TaskOptions(max_length), examples=choices).stages["model"]
        rows, num_cut = task.encode(choices, is_training=True), 0
        for i, (row, choice) in enumerate(zip(rows, choices, strict=True)):
            pairs = [choice.context] * 3, [f"they {option}" for option in choice.options]
            expected = tokenizer(*pairs, truncation="longest_first", max_length=max_length, padding=True)
            assert row.example == i and row.input_ids.tolist() == expected["input_ids"]
            types = expected.get("token_type_ids")
            assert (None if row.token_type_ids is None else row.token_type_ids.tolist()) == types
            num_cut += any(len(ids) > max_length for ids in tokenizer(*pairs)["input_ids"])
        assert [note.startswith(f"{num_cut} of 30 examples ") for note in task.notes] == [True] * bool(num_cut)
        batch = task.collate(rows)
        assert batch.inputs["input_ids"].shape[:2] == (30, 3)
        mask, is_token = batch.inputs["attention_mask"], batch.inputs["input_ids"] != tokenizer.pad_token_id
        assert is_token.all() if mask is None else (mask == is_token).all()
        assert batch.targets["labels"].tolist() == [each.answer for each in choices] and batch.num_targets == 30


def test_special_tokens_in_a_text_are_text(bert: PreTrainedTokenizerBase, roberta: PreTrainedTokenizerBase) -> None:
    data = make_set(("the [SEP] </s> word", "yes", "[CLS] <s>"), ("", "no", None), ("dog", "no", ""))
    for tokenizer, num_special in ((bert, 3), (roberta, 4)):
        pair, empty, half = ClassificationTask(data, tokenizer, TaskOptions()).encode(data.train, is_training=True)
        special = [tokenizer.cls_token_id, tokenizer.sep_token_id]
        assert [np.isin(each.input_ids, special).sum() for each in (pair, half)] == [num_special] * 2
        assert empty.input_ids.tolist() == special
    choice = Choice("", "", "the [PAD] dog", "", ("[SEP] runs", "[PAD]"), 1)
    task = make_family_task("multiple_choice", bert, examples=(choice,)).stages["model"]
    (row,) = task.encode([choice], is_training=True)
    assert (row.input_ids == bert.sep_token_id).sum() == 4
    assert (row.input_ids[0] != bert.pad_token_id).all(), "only the shorter segment is padded, and at its end"


def test_padding_is_known_by_lengths(bert: PreTrainedTokenizerBase) -> None:
    """A tokenizer that splits at spaces alone knows "[PAD]" in a text as the entry that it is."""
    splitting = copy.deepcopy(bert)
    splitting.backend_tokenizer.normalizer = None
    splitting.backend_tokenizer.pre_tokenizer = WhitespaceSplit()
    choice = Choice("", "", "the [PAD] dog", "", ("dog", "[PAD] [PAD] dog"), 1)
    classes = make_set(("the [PAD] dog", "yes", None), ("dog", "no", None))
    for task, example, lengths in (
        (make_family_task("multiple_choice", splitting, examples=(choice,)).stages["model"], [choice], [[7, 9]]),
        (ClassificationTask(classes, splitting, TaskOptions()), classes.train, [5, 3]),
    ):
        batch = task.collate(task.encode(example, is_training=True))
        assert batch.inputs["attention_mask"].sum(-1).tolist() == lengths
        assert (batch.inputs["input_ids"] == bert.pad_token_id).sum() > batch.inputs["attention_mask"].eq(0).sum()


def test_the_baseline_and_the_positive_label(bert: PreTrainedTokenizerBase) -> None:
    task = ClassificationTask(TWO, bert, TaskOptions())
    assert task.head_labels == ("no", "yes") and task.head_config == {}
    majority = task.score(TWO.test, task.predict_baseline(TWO.test))
    assert majority.get("accuracy") == pytest.approx(2 / 3)
    assert majority.get("f1.positive") == 0.0, "the second of two labels is the positive one"
    other = ClassificationTask(replace(TWO, positive_label="no"), bert, TaskOptions(), metric="f1.positive")
    found = other.score(TWO.test, other.predict_baseline(TWO.test))
    assert found.get("f1.positive") == pytest.approx(0.8)
    three = replace(TWO, labels=("a", "no", "yes"))
    assert ClassificationTask(three, bert, TaskOptions()).positive is None
    with pytest.raises(ConfigError, match=r"'f1.positive'"):
        ClassificationTask(three, bert, TaskOptions(), metric="f1.positive")


def make_values(scale: float = 1.0) -> tuple[LabelledText, ...]:
    return tuple(LabelledText(str(i), "", "a cat", "a dog", "", scale * (i // 3 + i % 3 / 2)) for i in range(12))


def test_values_are_predicted_in_their_own_unit(bert: PreTrainedTokenizerBase) -> None:
    examples = make_values()
    task = make_family_task("regression", bert, examples=examples).stages["model"]
    assert task.head_labels == ("value",) and task.head_config == {"problem_type": "regression"} and task.notes == []
    rows, values = task.encode(examples, is_training=True), [each.value for each in examples]
    assert [row.targets["values"].tolist() for row in rows] == values
    assert rows[0].targets["values"].dtype == np.float32
    predictions = task.decode(examples, rows, [(np.array([each], np.float32),) for each in values])
    assert predictions == [{"value": each} for each in values]
    score = task.score(examples, predictions)
    assert score.get("spearman") == pytest.approx(1.0)
    assert task.predict_baseline(examples) == [{"value": pytest.approx(np.mean(values))}] * len(values)
    assert task.score(examples, task.predict_baseline(examples)).get("spearman") == 0.0
    assert make_family_task("regression", bert, metric="pearson").metric == "pearson"


def test_the_best_constant_has_a_loss_of_one(bert: PreTrainedTokenizerBase) -> None:
    for scale in (0.02, 1.0, 300.0):
        examples = make_values(scale)
        task = RegressionTask(LabelledSet("made", *[examples] * 3), bert, TaskOptions())
        batch = task.collate(task.encode(examples, is_training=True))
        constant = torch.full((len(examples), 1), task.state["mean"])
        loss = task.compute_loss_sum(type("Outputs", (), {"logits": constant})(), batch.targets) / batch.num_targets
        assert loss.item() == pytest.approx(1.0, rel=1e-4)
        assert len(task.notes) == (scale != 1.0)
    assert f"mean {task.state['mean']:.0f} " in task.notes[0] and "divided" in task.notes[0]


def test_stems_and_options_join_as_their_script_does() -> None:
    for stem, option, expected in (
        ("", "runs", "runs"),
        ("she", "runs", "she runs"),
        ("she ", "runs", "she runs"),
        ("why?", "", "why?"),
        ("他说", "好", "他说好"),
        ("为什么？", "好", "为什么？好"),
    ):
        assert join_stem(stem, option) == expected


def test_the_baseline_chooses_the_usual_place(bert: PreTrainedTokenizerBase) -> None:
    choices = tuple(
        Choice(str(i), "t:1", "the dog", "", ("a", "b", "c"), each) for i, each in enumerate([2, 0, 2, 1, 2])
    )
    task = ChoiceTask(LabelledSet("made", *[choices] * 3), bert, TaskOptions())
    assert task.predict_baseline(choices) == [{"answer": 2}] * 5
    assert task.score(choices, task.predict_baseline(choices)).get("accuracy") == pytest.approx(0.6)
