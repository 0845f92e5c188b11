"""Nested entities: no label is lost on the way to rows and back."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import WORDS
from transformers import PreTrainedTokenizerBase

from domext_ray.families.entity_dictionary import DictionaryMatcher, build_matcher
from domext_ray.families.family import Prediction, read_entity
from domext_ray.families.nested import SpanTask
from domext_ray.families.readers.examples import AnnotatedText, Entity, LabelledSet
from domext_ray.families.rows import Row
from domext_ray.families.task import TaskOptions
from domext_ray.model.domext.heads_domext import compute_zlpr

TYPES = ("place", "thing", "person")


def make_text(text: str, *entities: tuple[str, str], number: int = 0) -> AnnotatedText:
    """Entities are given by their first occurrence."""
    found = [Entity(text.index(part), text.index(part) + len(part), label) for part, label in entities]
    ordered = tuple(sorted(found, key=lambda each: (each.start, each.end, each.label)))
    return AnnotatedText(str(number), f"made.json:{number + 1}", text, ordered)


def draw_text(draw: random.Random, num_words: int, number: int = 0, longest: int = 8) -> AnnotatedText:
    """A text of words, some of them in several pieces, with nested and overlapping entities of whole words."""
    words = [draw.choice([*WORDS, "zebra", "quartz7", "(dog)", "naïve"]) for _ in range(num_words)]
    bounds, place = [], 0
    for word in words:
        bounds.append((place, place + len(word)))
        place += len(word) + 1
    entities = set()
    for _ in range(draw.randint(0, 6)):
        first = draw.randrange(num_words)
        last = min(num_words - 1, first + draw.randrange(longest))
        entities.add(Entity(bounds[first][0], bounds[last][1], draw.choice(TYPES)))
    ordered = tuple(sorted(entities, key=lambda each: (each.start, each.end, each.label)))
    return AnnotatedText(str(number), f"made.json:{number + 1}", " ".join(words), ordered)


def read_entities(prediction: Prediction) -> tuple[Entity, ...]:
    return tuple(map(read_entity, prediction["entities"]))


def make_set(*texts: AnnotatedText, test: tuple[AnnotatedText, ...] = ()) -> LabelledSet:
    return LabelledSet("made", texts, texts, test or texts, TYPES)


def make_oracle(task: SpanTask, rows: list[Row]) -> list[tuple[np.ndarray, ...]]:
    """What a perfect head's outputs are read as: 4 for the labelled spans, -9 for others."""
    outputs = []
    for row in rows:
        logits = torch.full((1, len(TYPES), row.length, row.length), -9.0)
        for kind, first, last in row.targets["spans"]:
            logits[0, kind, first, last] = 4.0
        logits = logits.masked_fill(~torch.ones(row.length, row.length, dtype=torch.bool).triu(), -3e38)
        outputs.append(tuple(each[0].numpy() for each in task.read_outputs(SimpleNamespace(logits=logits))))
    return outputs


@pytest.mark.parametrize("name", ["bert", "roberta"])
def test_no_entity_is_lost_in_training_rows(name: str, request: pytest.FixtureRequest) -> None:
    """Decoding the training rows' own targets gives every entity that fits into a row, and no other."""
    for max_length in (16, 40, 128):
        draw = random.Random(max_length)
        texts = tuple(draw_text(draw, draw.randint(1, 60), i, longest=2) for i in range(40))
        task = SpanTask(make_set(*texts), request.getfixturevalue(name), TaskOptions(max_length=max_length, stride=3))
        rows = task.encode(texts, is_training=True)
        assert max(row.length for row in rows) <= max_length
        predictions = task.decode(texts, rows, make_oracle(task, rows))
        found = [{*read_entities(each)} for each in predictions]
        assert all(own <= {*text.entities} for own, text in zip(found, texts, strict=True))
        too_long = sum(len(each.entities) for each in texts) - sum(map(len, found))
        if too_long:
            assert f"{too_long} of " in task.notes[0] and "whole in no window" in task.notes[0] and name == "roberta"
        else:
            assert [read_entities(each) for each in predictions] == [each.entities for each in texts] and not task.notes
            assert task.score(texts, predictions).get("f1.micro") == 1.0


def test_prediction_rows_do_not_depend_on_the_labels(bert: PreTrainedTokenizerBase) -> None:
    draw = random.Random(3)
    texts = tuple(draw_text(draw, 60, i, longest=18) for i in range(10))
    task = SpanTask(make_set(*texts), bert, TaskOptions(max_length=24, stride=4))
    rows = task.encode(texts, is_training=False)
    blank = task.encode([replace(each, entities=()) for each in texts], is_training=False)
    assert [row.input_ids.tolist() for row in rows] == [row.input_ids.tolist() for row in blank]
    assert "larger stride or max_length" in task.notes[0]
    assert len(task.encode(texts, is_training=True)) > len(rows)


def test_entities_inside_tokens_are_counted_and_cost_recall(bert: PreTrainedTokenizerBase) -> None:
    text = make_text("the dog and a cat", ("dog", "thing"), ("og", "place"), ("cat", "thing"))
    task = SpanTask(make_set(text), bert, TaskOptions())
    rows = task.encode([text], is_training=True)
    assert rows[0].targets["spans"].tolist() == [[1, 2, 2], [1, 5, 5]]
    assert task.notes == [
        "1 of 3 entities begin or end inside a token and cannot be found; the first is at made.json:1."
    ]
    score = task.score([text], task.decode([text], rows, make_oracle(task, rows)))
    assert score.get("recall.micro") == pytest.approx(2 / 3)
    assert score.get("precision.micro") == 1.0


def test_of_two_windows_the_higher_score_counts(bert: PreTrainedTokenizerBase) -> None:
    text = make_text("the dog and a cat", ("dog", "thing"))
    task = SpanTask(make_set(text), bert, TaskOptions())
    (row,) = task.encode([text], is_training=True)
    for scores in ((2.0, 0.5), (0.5, 2.0)):
        outputs = [(np.array([[*row.targets["spans"][0], score]], dtype=np.float32),) for score in scores]
        (prediction,) = task.decode([text], [row, row], outputs)
        assert prediction["candidates"] == [[4, 7, "thing", 2.0]]


def test_characters_of_several_pieces_are_whole(roberta: PreTrainedTokenizerBase) -> None:
    text = make_text("病人发热 and pain", ("病人", "person"), ("发热", "thing"), ("热", "place"))
    task = SpanTask(make_set(text), roberta, TaskOptions())
    rows = task.encode([text], is_training=True)
    assert not task.notes
    assert read_entities(task.decode([text], rows, make_oracle(task, rows))[0]) == text.entities


def test_the_loss_is_over_rows_and_types(bert: PreTrainedTokenizerBase) -> None:
    draw = random.Random(5)
    texts = tuple(draw_text(draw, draw.randint(1, 12), i) for i in range(6))
    task = SpanTask(make_set(*texts), bert, TaskOptions())
    rows = task.encode(texts, is_training=True)
    batch = task.collate(rows)
    assert batch.num_targets == len(rows) * 3
    length = batch.inputs["input_ids"].shape[1]
    logits = torch.randn(len(rows), 3, length, length)
    labels = torch.zeros_like(logits, dtype=torch.bool)
    for i, row in enumerate(rows):
        for kind, first, last in row.targets["spans"]:
            labels[i, kind, first, last] = True
    found = task.compute_loss_sum(SimpleNamespace(logits=logits), batch.targets)
    torch.testing.assert_close(found, compute_zlpr(logits, labels).sum())
    empty = task.collate(task.encode([replace(texts[0], entities=())], is_training=True))
    assert empty.targets["spans"].shape == (1, 0, 3)
    assert task.compute_loss_sum(SimpleNamespace(logits=torch.full((1, 3, 4, 4), -50.0)), empty.targets) < 1e-6


def test_the_threshold_is_the_best_of_dev(bert: PreTrainedTokenizerBase) -> None:
    text = make_text("the dog and a cat", ("dog", "thing"), ("cat", "thing"))
    task = SpanTask(make_set(text), bert, TaskOptions())
    wrong = Entity(0, 3, "place")

    def rank(*scores: float) -> Prediction:
        spans = zip((*text.entities, wrong), scores, strict=True)
        return {"candidates": [[each.start, each.end, each.label, score] for each, score in spans]}

    def tune(*scores: float) -> float:
        found = task.fit_thresholds([text], [rank(*scores)])
        assert found == task.thresholds
        return found["threshold"]

    assert tune(2.0, 1.0, -1.0) == 0.0
    assert -1.5 <= tune(2.0, -1.45, -1.6) < -1.45
    assert 1.0 <= tune(2.0, 1.8, 1.0) < 1.8
    assert tune(-9.0, -9.0, -9.0) == 0.0
    task.set_thresholds({"threshold": 0.7})
    kept = task.decide(text, rank(0.8, -2.0, 0.6))
    assert read_entities(kept) == text.entities[:1] and len(kept["candidates"]) == 3


def test_the_baseline_is_a_dictionary() -> None:
    texts = [
        make_text("the new river and the river", ("new river", "place"), number=0),
        make_text("a dog at the new river .", ("dog", "thing"), ("new river", "place"), number=1),
        make_text("a dog is a dog at night", number=2),
    ]
    matcher = build_matcher(texts)
    assert matcher.entries == {"new river": "place"}, "a dog is no entity in two of three places"
    assert [*matcher.match("in the new river, not the new rivers or anew river")] == [Entity(7, 16, "place")]
    nested = DictionaryMatcher({"a": "thing", "a b": "place", "热": "thing", "发热": "person"})
    assert [*nested.match("a b a 高发热热")] == [
        Entity(0, 3, "place"),
        Entity(4, 5, "thing"),
        Entity(7, 9, "person"),
        Entity(9, 10, "thing"),
    ]
