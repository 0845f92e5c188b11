"""Answers to questions: none is lost in windows, "none" and its threshold, and baselines."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from brief_training import make_head
from conftest import WORDS
from transformers import PreTrainedTokenizerBase

from domext_ray.families.family import Prediction
from domext_ray.families.questions import (
    QuestionTask,
    choose_tau,
    find_best,
)
from domext_ray.families.readers.examples import Entity, LabelledSet, Question
from domext_ray.families.rows import Row
from domext_ray.families.task import TaskOptions


def make_question(question: str, context: str, *answers: str, number: int = 0) -> Question:
    """Answers are given by their first occurrence."""
    found = tuple(Entity(context.index(each), context.index(each) + len(each), "") for each in answers)
    return Question(str(number), f"made.json:{number + 1}", question, context, found)


def draw_question(draw: random.Random, number: int, *, has_answer: bool = True) -> Question:
    """A context of distinct words, some in several pieces, and an answer of up to three of them."""
    words = draw.sample([*WORDS, "zebra", "quartz7", "naïve"], draw.randint(1, 80))
    first = draw.randrange(len(words))
    context = " ".join(words)
    start = len(" ".join([*words[:first], ""]))
    text = " ".join(words[first : first + draw.randint(1, 3)])
    answers = (Entity(start, start + len(text), ""),) if has_answer else ()
    question = " ".join(draw.choices(WORDS, k=draw.randint(0, 90)))
    return Question(str(number), f"made.json:{number + 1}", question, context, answers)


def make_set(*questions: Question) -> LabelledSet:
    return LabelledSet("made", questions, questions, questions)


def make_oracle(rows: list[Row]) -> list[tuple[np.ndarray, ...]]:
    """Scores that are highest at the rows' own targets."""
    outputs = []
    for row in rows:
        scores = np.zeros((row.length, 2), dtype=np.float32)
        scores[row.targets["starts"], 0] = scores[row.targets["ends"], 1] = 5.0
        outputs.append((scores,))
    return outputs


@pytest.mark.parametrize("name", ["bert", "roberta"])
def test_no_answer_is_lost_in_windows(name: str, request: pytest.FixtureRequest) -> None:
    for max_length, has_null in itertools.product((48, 64, 128), (False, True)):
        draw = random.Random(max_length)
        questions = [draw_question(draw, i, has_answer=not has_null or i % 3 > 0) for i in range(40)]
        task = QuestionTask(make_set(*questions), request.getfixturevalue(name), TaskOptions(max_length, stride=4))
        assert task.has_null == has_null
        rows = task.encode(questions, is_training=True)
        assert max(row.length for row in rows) <= max_length and len(rows) > len(questions)
        predictions = task.decode(questions, rows, make_oracle(rows))
        for question, prediction in zip(questions, predictions, strict=True):
            assert prediction["answer"] == (question.answer_texts[0] if question.answers else None)
        assert task.score(questions, predictions).get("exact") == 1.0


def test_windows_without_the_whole_answer_point_at_cls(bert: PreTrainedTokenizerBase) -> None:
    context = " ".join(WORDS[:60])
    question = make_question("what is it", context, f"{WORDS[30]} {WORDS[31]}")
    task = QuestionTask(make_set(question), bert, TaskOptions(max_length=32, stride=8))
    rows = task.encode([question], is_training=True)
    targets = [(int(row.targets["starts"]), int(row.targets["ends"])) for row in rows]
    assert (0, 0) in targets
    whole = [(row, *each) for row, each in zip(rows, targets, strict=True) if each != (0, 0)]
    for row, start, end in whole:
        assert bert.convert_ids_to_tokens(row.input_ids[start : end + 1]) == WORDS[30:32]
        types = row.token_type_ids
        assert types is not None and types[start] == 1 and types[1] == 0
    assert len(whole) in (1, 2)
    blank = task.encode([replace(question, answers=())], is_training=False)
    assert {row.input_ids.tobytes() for row in blank} <= {row.input_ids.tobytes() for row in rows}


def test_rows_are_what_the_tokenizer_writes(bert: PreTrainedTokenizerBase, roberta: PreTrainedTokenizerBase) -> None:
    question = make_question("who [SEP] is </s> it", "the dog <s> and a zebra", "dog")
    for tokenizer in (bert, roberta):
        row = QuestionTask(make_set(question), tokenizer, TaskOptions()).encode([question], is_training=True)[0]
        expected = tokenizer(question.question, question.context, split_special_tokens=True)
        assert row.input_ids.tolist() == expected["input_ids"]
        types = expected.get("token_type_ids")
        assert (None if row.token_type_ids is None else row.token_type_ids.tolist()) == types


def test_what_cannot_be_is_counted(bert: PreTrainedTokenizerBase) -> None:
    long = make_question(" ".join(WORDS[:70]), "the dog and a cat", "dog", number=0)
    wide = make_question("what", " ".join(WORDS[:50]), " ".join(WORDS[3:40]), number=1)
    bare = make_question("what", "the dog \u200b\u200b and", "\u200b", number=2)
    task = QuestionTask(make_set(long, wide, bare), bert, TaskOptions(max_length=128))
    rows = task.encode([long, wide, bare], is_training=True)
    assert {row.example for row in rows} == {0, 1}
    assert (rows[0].token_type_ids == 0).sum() == 64 + 2
    assert len(task.notes) == 3
    assert task.notes[0] == "1 of 3 questions are cut to 64 tokens; the first is at made.json:1."
    assert "more than 30 tokens" in task.notes[1] and task.notes[1].endswith("made.json:2.")
    assert "left out of training" in task.notes[2] and task.notes[2].endswith("made.json:3.")
    assert {row.example for row in task.encode([long, wide, bare], is_training=False)} == {0, 1, 2}


def test_the_best_stretch_is_the_best_of_all() -> None:
    for seed in range(100):
        generator = np.random.default_rng(seed)
        size, longest = int(generator.integers(1, 40)), int(generator.integers(1, 12))
        scores, is_allowed = generator.normal(size=(size, 2)), generator.random(size) < 0.8
        allowed = [
            (scores[i, 0] + scores[j, 1], i, j)
            for i in range(size)
            for j in range(i, min(size, i + longest))
            if is_allowed[i] and is_allowed[j]
        ]
        first, last, score = find_best(scores, is_allowed, longest)
        if allowed:
            assert (first, last) == max(allowed)[1:] and score == pytest.approx(max(allowed)[0]), seed
        else:
            assert score < -1e38, seed


def test_none_is_answered_when_it_scores_more(bert: PreTrainedTokenizerBase) -> None:
    """The score of "none" is the lowest of the windows, that of the answer the highest."""
    questions = [
        make_question("what", " ".join(WORDS[:60]), WORDS[5], number=0),
        make_question("who", "a dog", number=1),
    ]
    task = QuestionTask(make_set(*questions), bert, TaskOptions(max_length=40, stride=4))
    rows = task.encode(questions, is_training=False)
    assert [row.example for row in rows] == [0, 0, 1]

    def run(*nulls: float) -> list[Prediction]:
        outputs = []
        for row, null in zip(rows, nulls, strict=True):
            scores = np.zeros((row.length, 2), dtype=np.float32)
            scores[0] = null / 2
            scores[4] = 1.0
            outputs.append((scores,))
        return task.decode(questions, rows, outputs)

    first, second = run(6.0, 1.5, 3.0)
    assert (first["score"], first["null_score"], second["null_score"]) == (0.5, 1.5, 3.0)
    assert first["answer"] == questions[0].context[first["start"] : first["end"]] != "" and second["answer"] is None
    assert questions[1].context[slice(*second["best"])] == "dog", "what would be answered is known all the same"
    task.set_thresholds({"tau": 1.0})
    assert [each["answer"] for each in run(6.0, 1.5, 3.0)] == [None, None]
    assert task.decide_all(questions, [first, second]) == run(6.0, 1.5, 3.0)
    task.set_thresholds({"tau": -1.5})
    assert [bool(each["answer"]) for each in run(6.0, 1.5, 3.0)] == [True, True]


def test_there_is_no_none_where_every_question_has_an_answer(bert: PreTrainedTokenizerBase) -> None:
    question = make_question("what", "a dog", "dog")
    task = QuestionTask(make_set(question), bert, TaskOptions())
    rows = task.encode([question], is_training=False)
    scores = np.zeros((rows[0].length, 2), dtype=np.float32)
    scores[0] = 50.0
    scores[-2] = 1.0
    predictions = task.decode([question], rows, [(scores,)])
    assert predictions[0]["answer"] == "dog" and predictions[0]["null_score"] == 0.0
    assert task.fit_thresholds([question], predictions) == {}


def test_tau_is_the_best_of_dev(bert: PreTrainedTokenizerBase) -> None:
    context = "the dog and a cat"
    questions = [
        make_question("what", context, *answers, number=i) for i, answers in enumerate([["dog"], ["cat"], [], []])
    ]
    task = QuestionTask(make_set(*questions), bert, TaskOptions())

    def tune(*differences: float) -> float:
        spans = [(4, 7), (14, 17), (4, 7), (4, 7)]
        predictions = [{"best": span, "score": each} for span, each in zip(spans, differences, strict=True)]
        assert task.fit_thresholds(questions, predictions) == task.thresholds
        return task.thresholds["tau"]

    assert 1.0 < tune(3.0, 2.0, 1.0, 0.5) < 2.0
    assert -3.0 < tune(5.0, -2.0, -3.0, -4.0) < -2.0
    assert tune(1.0, 1.0, 1.0, 1.0) in (0.0, 2.0)
    gains = [(5.0, -1.0), (4.0, -1.0)]
    assert choose_tau(gains) > 5.0, "nothing is answered"
    assert choose_tau([(5.0, 1.0), (4.0, 1.0)]) < 4.0
    assert choose_tau([(5.0, 0.0), (-5.0, 0.0)]) == 0.0


def test_answers_are_compared_by_the_rule_of_the_set(bert: PreTrainedTokenizerBase) -> None:
    chinese = make_question("什么", "病人有发热和头痛。", "发热")
    for rule, f1, longest in (("cmrc", 0.8, 60), ("squad_v1", 0.0, 30), ("squad_v2", 0.0, 30), (None, 0.0, 30)):
        task = QuestionTask(replace(make_set(chinese), rule=rule), bert, TaskOptions())
        score = task.score([chinese], [{"answer": "有发热"}])
        assert score.get("f1") == pytest.approx(f1) and task.max_answer_length == longest
        again = QuestionTask(LabelledSet("made", (), (), ()), bert, TaskOptions(), state=task.state_dict())
        assert again.rule == task.rule == (rule or "squad_v2")


def test_the_baseline_is_the_best_constant_stretch(bert: PreTrainedTokenizerBase) -> None:
    questions = [
        make_question("what", f"{first} dog {rest}", f"{first} dog", number=i)
        for i, (first, rest) in enumerate([("old", "is here"), ("new", "may run"), ("small", "and a cat")])
    ]
    task = QuestionTask(make_set(*questions), bert, TaskOptions())
    predictions = task.predict_baseline(questions)
    assert [each["answer"] for each in predictions] == ["old dog", "new dog", "small dog"]
    assert all(q.context[p["start"] : p["end"]] == p["answer"] for q, p in zip(questions, predictions, strict=True))
    none = [*questions, *(replace(each, answers=()) for each in questions * 2)]
    found = QuestionTask(make_set(*none), bert, TaskOptions()).predict_baseline(none)
    assert {each["answer"] for each in found} == {None}
    chinese = [make_question("什么", text, text[:2]) for text in ("发热和头痛", "头痛三天了")]
    found = QuestionTask(replace(make_set(*chinese), rule="cmrc"), bert, TaskOptions()).predict_baseline(chinese)
    assert [each["answer"] for each in found] == ["发热", "头痛"]


def test_the_loss_is_transformers_own(bert: PreTrainedTokenizerBase) -> None:
    draw = random.Random(8)
    questions = [draw_question(draw, i) for i in range(6)]
    task = QuestionTask(make_set(*questions), bert, TaskOptions())
    model = make_head(task, bert).eval()
    batch = task.collate(task.encode(questions, is_training=True))
    places = {"start_positions": batch.targets["starts"], "end_positions": batch.targets["ends"]}
    outputs = model(**batch.inputs, **places)
    mean = task.compute_loss_sum(outputs, batch.targets) / batch.num_targets
    torch.testing.assert_close(mean, outputs.loss)
    assert task.read_outputs(SimpleNamespace(**outputs))[0].shape[-1] == 2
