"""Multiple choice: how a stem and its options join, and what a batch of segments is."""

from __future__ import annotations

import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase

from domext_ray.downstream.tasks.choices import ChoiceTask, join_stem
from domext_ray.downstream.tasks.task import TaskOptions
from domext_ray.labelled.examples import Choice, LabelledSet


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


def test_gold_answers_score_one_and_the_majority_less(bert: PreTrainedTokenizerBase) -> None:
    choices = tuple(
        Choice(str(i), "t:1", "the dog", "", ("a", "b", "c"), each) for i, each in enumerate([2, 0, 2, 1, 2])
    )
    task = ChoiceTask(LabelledSet("made", *[choices] * 3), bert, TaskOptions())
    rows = task.encode(choices, is_training=False)
    outputs = [(np.eye(3, dtype=np.float32)[row.targets["labels"]][None],) for row in rows]
    assert task.score(choices, task.decode(choices, rows, outputs)).get("accuracy") == 1.0
    assert task.predict_baseline(choices) == [{"answer": 2}] * 5
    assert task.score(choices, task.predict_baseline(choices)).get("accuracy") == pytest.approx(0.6)
