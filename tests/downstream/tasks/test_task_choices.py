"""Multiple choice: rows are the tokenizer's own pairs, and a tiny model learns to choose."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from brief_training import make_head, predict, train_briefly
from conftest import WORDS
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from domext_ray.downstream.tasks.choices import ChoiceTask, join_stem
from domext_ray.downstream.tasks.task import TaskOptions
from domext_ray.errors import ConfigError
from domext_ray.labelled.examples import Choice, LabelledSet


@pytest.fixture(scope="module")
def bert(tiny_base_folder: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(tiny_base_folder)


@pytest.fixture(scope="module")
def roberta(tiny_roberta_folder: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(tiny_roberta_folder)


def make_choice(context: str, options: tuple[str, ...], answer: int, stem: str = "", number: int = 0) -> Choice:
    return Choice(str(number), f"made.csv:{number + 2}", context, stem, options, answer)


def make_set(*examples: Choice) -> LabelledSet:
    return LabelledSet("made", examples, examples, examples)


def draw_choices(seed: int, count: int) -> list[Choice]:
    draw = random.Random(seed)

    def say() -> str:
        return " ".join(draw.choices(WORDS, k=draw.randint(1, 14)))

    return [make_choice(say(), (say(), say(), say()), draw.randrange(3), "they", i) for i in range(count)]


@pytest.mark.parametrize("name", ["bert", "roberta"])
@pytest.mark.parametrize("max_length", [12, 20, 128])
def test_segments_are_what_transformers_makes(name: str, max_length: int, request: pytest.FixtureRequest) -> None:
    tokenizer = request.getfixturevalue(name)
    choices = draw_choices(max_length, 30)
    task = ChoiceTask(make_set(*choices), tokenizer, TaskOptions(max_length=max_length))
    rows = task.encode(choices, is_training=True)
    num_cut = 0
    for i, (row, choice) in enumerate(zip(rows, choices, strict=True)):
        pairs = [choice.context] * 3, [f"they {option}" for option in choice.options]
        expected = tokenizer(*pairs, truncation="longest_first", max_length=max_length, padding=True)
        assert row.example == i and row.input_ids.tolist() == expected["input_ids"]
        types = expected.get("token_type_ids")
        assert (None if row.token_type_ids is None else row.token_type_ids.tolist()) == types
        num_cut += any(len(ids) > max_length for ids in tokenizer(*pairs)["input_ids"])
    assert bool(num_cut) == bool(task.notes)
    if num_cut:
        assert task.notes[0].startswith(f"{num_cut} of 30 examples ")
    batch = task.collate(rows)
    assert batch.inputs["input_ids"].shape[:2] == (30, 3)
    expected_mask = batch.inputs["input_ids"] != tokenizer.pad_token_id
    assert (batch.inputs["attention_mask"] == expected_mask).all()
    assert batch.targets["labels"].tolist() == [each.answer for each in choices] and batch.num_targets == 30


@pytest.mark.parametrize(
    ("stem", "option", "expected"),
    [
        ("", "runs", "runs"),
        ("she", "runs", "she runs"),
        ("she ", "runs", "she runs"),
        ("why?", "", "why?"),
        ("他说", "好", "他说好"),
        ("为什么？", "好", "为什么？好"),
    ],
)
def test_stems_and_options_join_as_their_script_does(stem: str, option: str, expected: str) -> None:
    assert join_stem(stem, option) == expected


def test_special_tokens_in_a_text_are_text(bert: PreTrainedTokenizerBase) -> None:
    choice = make_choice("the [PAD] dog", ("[SEP] runs", "[PAD]"), 1)
    row = ChoiceTask(make_set(choice), bert, TaskOptions()).encode([choice], is_training=True)[0]
    assert (row.input_ids == bert.sep_token_id).sum() == 4
    assert (row.input_ids[0] != bert.pad_token_id).all(), "only the shorter segment is padded, and at its end"


def test_gold_labels_score_one_and_the_majority_less(bert: PreTrainedTokenizerBase) -> None:
    answers = [2, 0, 2, 1, 2]
    choices = [make_choice("the dog", ("a", "b", "c"), answer, number=i) for i, answer in enumerate(answers)]
    task = ChoiceTask(make_set(*choices), bert, TaskOptions())
    assert task.score(choices, decode_oracle_choices(task, choices)).get("accuracy") == 1.0
    assert task.predict_baseline(choices) == [{"answer": 2}] * 5
    assert task.score(choices, task.predict_baseline(choices)).get("accuracy") == pytest.approx(0.6)


def decode_oracle_choices(task: ChoiceTask, choices: list[Choice]) -> list[Any]:
    rows = task.encode(choices, is_training=False)
    outputs = [(np.eye(3, dtype=np.float32)[row.targets["labels"]][None],) for row in rows]
    return task.decode(choices, rows, outputs)


def test_wrong_options(bert: PreTrainedTokenizerBase) -> None:
    choice = make_choice("the dog", ("a", "b"), 1)
    with pytest.raises(ConfigError, match="the metric of made is 'f2'"):
        ChoiceTask(make_set(choice), bert, TaskOptions(), metric="f2")
    with pytest.raises(ConfigError, match="max_length is 4; a row of this task has 3 special tokens"):
        ChoiceTask(make_set(choice), bert, TaskOptions(max_length=4)).encode([choice], is_training=False)


@pytest.mark.parametrize("name", ["bert", "roberta"])
def test_a_head_learns_to_choose(name: str, request: pytest.FixtureRequest) -> None:
    """The right continuation is the one with the dog, at every place equally often."""
    tokenizer = request.getfixturevalue(name)
    orders = itertools.permutations(["dog", "cat", "bird", "horse"])
    choices = [
        make_choice("night and rain", tuple(f"{each} will run" for each in order), order.index("dog"), "the", i)
        for i, order in enumerate(orders)
    ]
    data = make_set(*choices)
    task = ChoiceTask(data, tokenizer, TaskOptions(max_length=40))
    model = make_head(task, tokenizer)
    losses = train_briefly(task, model, steps=40)
    assert losses[-1] < 0.1 < losses[0]
    score = task.score(data.train, predict(task, model.eval(), data.train))
    baseline = task.score(data.train, task.predict_baseline(data.train))
    assert score.get("accuracy") > 0.95 > 0.3 > baseline.get("accuracy")
