"""What all task families share: the options they take, labels that training does not know, and that each one learns."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from brief_training import make_head, predict, train_briefly
from family_sets import EXAMPLES, make_family_task
from transformers import PreTrainedTokenizerBase

from domext_ray.errors import ConfigError
from domext_ray.families.losses import NO_TARGET
from domext_ray.families.readers.examples import AnnotatedText, Choice, Entity, LabelledText, MarkedText, TaggedSentence
from domext_ray.families.readers.examples import Question as Asked
from domext_ray.families.task import TaskOptions

# A metric that a family has not with what it has, and a length that is too short with what a row needs.
BOUNDS = {
    "ner": ("f1", "f1.macro", 2, "3 at least"),
    "nested_ner": ("f1", "f1.macro", 2, "has 2 special tokens"),
    "relation": ("f2", "accuracy, ", 5, "6 at least"),
    "classification": ("f2", "accuracy, ", 3, "has 3 special tokens"),
    "multilabel": ("f2", "accuracy, ", 3, "has 3 special tokens"),
    "regression": ("accuracy", "pearson, spearman", 4, "has 3 special tokens"),
    "qa": ("accuracy", "exact, f1", 4, "has 3 special tokens"),
    "multiple_choice": ("f2", "accuracy", 4, "has 3 special tokens"),
    "relation_extraction": ("accuracy", "f1.macro", 5, "6 at least"),
    "normalization": ("rouge", "accuracy, ", 4, "has 3 special tokens"),
}


def test_wrong_options_are_refused(bert: PreTrainedTokenizerBase) -> None:
    for family, (metric, figures, length, needs) in BOUNDS.items():
        with pytest.raises(ConfigError, match=f"the metric of made is '{metric}'; its figures are {figures}"):
            make_family_task(family, bert, metric=metric)
        with pytest.raises(ConfigError, match=f"max_length is {length}; .*{needs}"):
            task = make_family_task(family, bert, TaskOptions(max_length=length))
            for stage in task.stages.values():
                stage.encode(stage.data.train, is_training=True)
    assert BOUNDS.keys() == EXAMPLES.keys()


# What is changed in an example, the target that it has in dev, and a figure of predictions.
STRANGE: dict[str, tuple[dict[str, Any], Any, Any, str, float]] = {
    "ner": (
        {"tags": ("O", "B-Animal", "O")},
        [NO_TARGET, 0, NO_TARGET, 0, NO_TARGET],
        {"tags": ("O",) * 3},
        "recall.micro",
        0.0,
    ),
    "nested_ner": (
        {"entities": (Entity(4, 8, "animal"),)},
        [],
        {"entities": [{"start": 4, "end": 8, "label": "drug", "text": "drug"}]},
        "recall.micro",
        0.0,
    ),
    "relation": (
        {"label": "likes"},
        NO_TARGET,
        {"label": "treats"},
        "f1.micro",
        0.0,
    ),
    "classification": (
        {"label": "maybe"},
        NO_TARGET,
        {"label": "a"},
        "accuracy",
        0.0,
    ),
    "multilabel": (
        {"labels": ("a", "poem")},
        [1.0, 0.0, 0.0],
        {"labels": ("a",)},
        "f1.micro",
        2 / 3,
    ),
}


@pytest.mark.parametrize("family", STRANGE)
def test_a_label_that_the_set_does_not_name_is_missed(family: str, bert: PreTrainedTokenizerBase) -> None:
    changes, target, prediction, figure, expected = STRANGE[family]
    task, strange = make_family_task(family, bert).stages["model"], replace(EXAMPLES[family][0], **changes)
    (row,) = task.encode([strange], is_training=False)
    assert row.targets.get("labels", row.targets.get("spans")).tolist() == target
    assert task.score([strange], [prediction]).get(figure) == pytest.approx(expected)


def tag_words() -> list[Any]:
    """The same words with other tags in another place: the word alone does not tell."""
    names = ["dog", "cat", "teacher", "doctor"]
    tags = ("O", "B-Person", "O", "O", "B-Place", "I-Place")
    return [
        TaggedSentence("", "", ("the", a, "see", b, "old", c), tags) for a, b, c in itertools.permutations(names, 3)
    ]


def nest_entities() -> list[Any]:
    """An entity is what "of" joins, and its first part: the same words are none elsewhere."""
    draw, texts = random.Random(0), []
    for _ in range(24):
        a, b, c = draw.sample(["dog", "cat", "house", "river", "door", "city"], 3)
        text = f"the {c} and {a} of {b} by the {c}"
        start, end = text.index(f"{a} of"), text.index(" by")
        texts.append(AnnotatedText("", "", text, (Entity(start, start + len(a), "thing"), Entity(start, end, "place"))))
    return texts


def mark_pairs() -> list[Any]:
    """The same texts with the arguments exchanged: only the marks tell the label."""
    texts = []
    for a, b in itertools.permutations(["dog", "cat", "man"], 2):
        text = f"the {a} run to the {b}"
        first, last = Entity(4, 4 + len(a), ""), Entity(len(text) - len(b), len(text), "")
        texts += [MarkedText("", "", text, first, last, "likes"), MarkedText("", "", text, last, first, "fears")]
    return texts


def pair_words() -> list[Any]:
    """Whether two texts say the same: neither text alone tells."""
    pairs = list(itertools.product(["dog", "cat", "rain", "book"], repeat=2))
    pairs += [(a, b) for a, b in pairs if a == b] * 2
    return [LabelledText("", "", a, b, "yes" if a == b else "no") for a, b in pairs]


def rate_pairs() -> list[Any]:
    words = ["dog", "cat", "rain", "book"]
    pairs = [(a, b) for a, b in itertools.product(words, words) if a <= b]
    return [LabelledText("", "", a, b, "", words.index(a) + (0.5 if a == b else 0.0)) for a, b in pairs]


def offer_choices() -> list[Any]:
    """The right continuation is the one with the dog, at every place equally often."""
    orders = itertools.permutations(["dog", "cat", "bird", "horse"])
    return [
        Choice("", "", "night and rain", "the", tuple(f"{each} will run" for each in order), order.index("dog"))
        for order in orders
    ]


def ask_what() -> list[Any]:
    """What stands after "of" is the answer to "what"; there is none without it."""
    draw, questions = random.Random(1), []
    for i in range(32):
        a, b, c, d = draw.sample(["dog", "cat", "house", "river", "door", "city", "book", "tree"], 4)
        word = "of" if i % 4 else "and"
        text = draw.choice([f"{a} {b} {word} {c} {d}", f"{a} {word} {c} {b} {d}", f"{a} {d} {b} {word} {c}"])
        place = text.index(c)
        questions.append(Asked("", "", "what", text, (Entity(place, place + len(c), ""),) if i % 4 else ()))
    return questions


# Examples, labels, steps, what the loss comes below, and figures that are reached and that a baseline stays below.
LEARNED: dict[str, tuple[Callable[[], list[Any]], tuple[str, ...], int, float, float, float]] = {
    "ner": (tag_words, ("Person", "Place"), 60, 0.1, 0.95, 0.75),
    "nested_ner": (nest_entities, ("place", "thing"), 80, 0.3, 0.95, 0.8),
    "relation": (mark_pairs, ("likes", "fears"), 60, 0.1, 0.95, 0.6),
    "classification": (pair_words, ("no", "yes"), 80, 0.1, 0.95, 0.6),
    "regression": (rate_pairs, (), 80, 0.1, 0.9, 0.1),
    "multiple_choice": (offer_choices, (), 40, 0.1, 0.95, 0.3),
    "qa": (ask_what, (), 80, 0.3, 0.9, 0.6),
}


@pytest.mark.parametrize("family", LEARNED)
@pytest.mark.parametrize("name", ["bert", pytest.param("roberta", marks=pytest.mark.slow)])
def test_a_head_learns(family: str, name: str, request: pytest.FixtureRequest) -> None:
    make, labels, steps, loss, reached, below = LEARNED[family]
    examples = tuple(replace(each, id=str(i), source=f"t:{i}") for i, each in enumerate(make()))
    tokenizer = request.getfixturevalue(name)
    task: Any = make_family_task(family, tokenizer, TaskOptions(40, 4), examples=examples, labels=labels)
    model = make_head(task, tokenizer)
    losses = train_briefly(task, model, steps=steps)
    assert losses[-1] < loss < losses[0]
    predictions: Sequence[Any] = predict(task, model.eval(), examples)
    if task.fit_thresholds(examples, predictions):
        predictions = predict(task, model, examples)
    score, baseline = task.score(examples, predictions), task.score(examples, task.predict_baseline(examples))
    assert score.get(task.metric) > reached > below > baseline.get(task.metric)
    if family == "qa":
        assert score.get("no_answer.f1") > 0.9
    if family == "regression":
        assert (
            np.mean([abs(found["value"] - each.value) for found, each in zip(predictions, examples, strict=True)]) < 0.5
        )
