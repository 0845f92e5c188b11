"""A task made from its description, without any example, encodes, decodes and describes as the one that learned."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from finetuned_models import make_raw
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from domext_ray.downstream.tasks.description import (
    TaskDescription,
    describe_task,
    find_family,
    make_described_task,
)
from domext_ray.downstream.tasks.families import SINGLE, STAGED, make_task
from domext_ray.downstream.tasks.stages import StagedTask
from domext_ray.downstream.tasks.task import Task, TaskOptions
from domext_ray.errors import RunError
from domext_ray.labelled.examples import (
    AnnotatedText,
    Choice,
    Entity,
    LabelledSet,
    LabelledText,
    MarkedText,
    Mention,
    MultiLabelText,
    Question,
    Relation,
    TaggedSentence,
)

OPTIONS = TaskOptions(max_length=24, stride=6)
DRUG, HEART = Entity(4, 8, "drug"), Entity(17, 22, "organ")
TEXT = "the drug and the heart disease"
EXAMPLES: dict[str, tuple[Any, ...]] = {
    "ner": (TaggedSentence("0", "t:1", ("the", "heart", "disease"), ("O", "B-Disease", "I-Disease")),),
    "nested_ner": (AnnotatedText("0", "t:1", TEXT, (DRUG, HEART)),),
    "relation": (
        MarkedText("0", "t:1", TEXT, Entity(4, 8, ""), Entity(17, 22, ""), "treats"),
        MarkedText("1", "t:2", TEXT, Entity(4, 8, ""), Entity(9, 12, ""), "none"),
    ),
    "classification": (LabelledText("0", "t:1", "a cat", None, "a"), LabelledText("1", "t:2", "a tree", "b", "b")),
    "multilabel": (
        MultiLabelText("0", "t:1", "a cat", None, ("a", "c")),
        MultiLabelText("1", "t:2", "a tree", "b", ()),
    ),
    "regression": (LabelledText("0", "t:1", "a cat", "a dog", "", 1.5), LabelledText("1", "t:2", "a", "b", "", 0.0)),
    "qa": (
        Question("0", "t:1", "where is the cat", "the cat is in the garden", (Entity(11, 24, ""),)),
        Question("1", "t:2", "where is the sun", "the cat is in the garden", ()),
    ),
    "multiple_choice": (Choice("0", "t:1", "the cat", "can", ("run", "read a book", "write"), 0),),
    "relation_extraction": (AnnotatedText("0", "t:1", TEXT, (DRUG, HEART), (Relation(DRUG, HEART, "treats"),)),),
    "normalization": (Mention("0", "t:1", "heart pain", ("disease of the heart",)),),
}
LABELS = {
    "ner": ("Disease",),
    "nested_ner": ("drug", "organ"),
    "relation": ("treats", "none"),
    "classification": ("a", "b"),
    "multilabel": ("a", "b", "c"),
    "relation_extraction": ("treats",),
}
CATALOGUE = ("disease of the heart", "pain", "heart", "cat")
RAW: dict[str, list[dict[str, Any]]] = {
    "relation": [{"text": "the << drug >> and the [[ heart ]] disease"}],
    "qa": [{"question": "where is the dog", "context": "the dog is at home " * 6}],
    "multiple_choice": [{"context": "the dog", "stem": "can", "options": ["run", "write"]}],
    **dict.fromkeys(("classification", "multilabel"), [{"text": "the cat"}, {"text": "the dog", "pair": "the house"}]),
}
USUAL_RAW = [{"text": "the drug and the doctor and the heart disease of the drug " * 3}, {"text": "heart. pain"}]


@pytest.fixture(scope="module")
def tokenizer(tiny_base_folder: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(tiny_base_folder)


def make_learned(family: str, tokenizer: PreTrainedTokenizerBase) -> StagedTask:
    """A task of made examples, whose thresholds are moved from where they start."""
    examples = EXAMPLES[family]
    data = LabelledSet(
        "made",
        examples,
        examples,
        examples,
        LABELS.get(family, ()),
        "none" if family == "relation" else None,
        CATALOGUE if family == "normalization" else (),
        marks=(("<<", ">>"), ("[[", "]]")) if family == "relation" else (),
    )
    task = make_task(family, data, tokenizer, OPTIONS)
    for each in (task, *task.stages.values()):
        each.apply({name: value - 0.25 for name, value in each.thresholds.items()})
    return task


def make_outputs(task: Task, rows: Sequence[Any]) -> list[tuple[Any, ...]]:
    """What a head could have said of rows, by chance."""
    generator = np.random.default_rng(0)
    found: list[tuple[Any, ...]] = []
    for row in rows:
        shape = {"DomextForTokenClassification": (row.length, len(task.head_labels))}.get(task.head)
        shape = shape or {"DomextForQuestionAnswering": (row.length, 2)}.get(task.head)
        shape = shape or {"DomextForMultipleChoice": (1, len(row.input_ids))}.get(task.head, (len(task.head_labels),))
        values = 2 * generator.standard_normal(shape).astype(np.float32)
        if task.head == "DomextForSpanClassification":
            places = np.sort(generator.integers(1, row.length - 1, (40, 2)), axis=1)
            kinds = generator.integers(0, len(task.head_labels), 40)
            values = np.column_stack([kinds, places, generator.standard_normal(40)]).astype(np.float32)
        found.append((values,))
    return found


class ByChance:
    """Predicts with random outputs, and keeps the records."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.records: list[dict[str, Any]] = []

    def __call__(self, examples: Sequence[Any]) -> list[Any]:
        rows = self.task.encode(examples, is_training=False)
        outputs = make_outputs(self.task, rows)
        self.records = self.task.to_records(examples, rows, outputs)
        return self.task.decode(examples, rows, outputs)


def predict(task: StagedTask, examples: Sequence[Any]) -> tuple[list[Any], list[dict[str, Any]]]:
    predictors = {name: ByChance(each) for name, each in task.stages.items()}
    steps = task.run_steps(predictors, examples)
    records = task.to_records(examples, steps, {name: each.records for name, each in predictors.items()})
    return task.decode(examples, steps), records


@pytest.mark.parametrize("family", [*SINGLE, *STAGED])
def test_a_described_task_is_the_one_that_learned(family: str, tokenizer: PreTrainedTokenizerBase) -> None:
    task = make_learned(family, tokenizer)
    assert find_family(task) == family
    description = describe_task(task)
    text = json.dumps(description.to_json(), allow_nan=False)
    read = TaskDescription.from_json(json.loads(text))
    assert read == description
    again = make_described_task(read, tokenizer)
    assert describe_task(again) == description and not again.data.train
    raw = make_raw(family, RAW.get(family, USUAL_RAW), read.marks)
    for examples in (EXAMPLES[family], raw):
        expected, found = predict(task, examples), predict(again, examples)
        assert found == expected
        json.dumps(found[1], allow_nan=False)
        if examples is not raw and family != "regression":  # whose two made values have no rank to correlate
            assert again.score(examples, found[0]).values == task.score(examples, expected[0]).values
    for name, stage in task.stages.items():
        assert again.stages[name].head_labels == stage.head_labels
        assert again.stages[name].head_config == stage.head_config


def test_places_of_entities_are_those_of_the_raw_text(tokenizer: PreTrainedTokenizerBase) -> None:
    """Over several windows, with emoji, combining characters and ideographs."""
    text = "\U0001f469\u200d\u2695\ufe0f心脏病 e\u0301tude  (heart\U0001f600disease)\n" * 6
    task = make_learned("ner", tokenizer).stages["model"]
    (sentence,) = make_raw("ner", [{"text": text}])
    rows = task.encode([sentence], is_training=False)
    assert len(rows) > 2
    # Every other word begins an entity and the next one goes on with it.
    outputs = []
    for row in rows:
        logits = np.zeros((row.length, 3), np.float32)
        for word, place in zip(row.place.words, row.place.positions, strict=True):
            logits[place, 1 + word % 2] = 3.0
        outputs.append((logits,))
    ((record,), (tags,)) = task.to_records([sentence], rows, outputs), task.decode([sentence], rows, outputs)
    words = sentence.words  # type: ignore[union-attr]
    dropped = {word for word, tag in zip(words, tags, strict=True) if tag == "O"}
    assert dropped <= {"\ufe0f"}
    entities = record["entities"]
    assert [each["text"] for each in entities[:3]] == ["\U0001f469\u200d\u2695\ufe0f心", "脏病", "e\u0301tude  ("]
    assert all(text[each["start"] : each["end"]] == each["text"] and each["label"] == "Disease" for each in entities)
    assert "".join(each["text"] for each in entities).split() and len(entities) == len(words) // 2
    assert all(0.86 < each["score"] < 0.92 for each in entities)  # e^3 / (e^3 + 2) is 0.909


def test_records_of_words_have_places_in_the_words_joined_by_spaces(tokenizer: PreTrainedTokenizerBase) -> None:
    task = make_learned("ner", tokenizer).stages["model"]
    examples = EXAMPLES["ner"]
    rows = task.encode(examples, is_training=False)
    logits = np.zeros((rows[0].length, 3), np.float32)
    logits[rows[0].place.positions[1:], [1, 2]] = 9.0
    (record,) = task.to_records(examples, rows, [(logits,)])
    assert record == {
        "entities": [{"start": 4, "end": 17, "label": "Disease", "text": "heart disease", "score": 0.999753}]
    }


def test_classes_have_probabilities_the_highest_first(tokenizer: PreTrainedTokenizerBase) -> None:
    task = make_learned("classification", tokenizer).stages["model"]
    rows = task.encode(EXAMPLES["classification"], is_training=False)
    logits = np.array([0.0, np.log(3.0)], np.float32)
    records = task.to_records(EXAMPLES["classification"], rows, [(logits,), (logits[::-1],)])
    assert records == [
        {"label": "b", "probabilities": {"b": 0.75, "a": 0.25}},
        {"label": "a", "probabilities": {"a": 0.75, "b": 0.25}},
    ]
    assert list(records[0]["probabilities"]) == ["b", "a"]


def change(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """Set a value of a description; `name` may be a path."""

    def apply(values: dict[str, Any]) -> None:
        *outer, last = name.split(".")
        for each in outer:
            values = values[each]
        if value is None:
            del values[last]
        else:
            values[last] = value

    return apply


@pytest.mark.parametrize(
    ("family", "name", "value", "reason"),
    [
        ("classification", "family", "poetry", "family is 'poetry'; it must be one of ner,"),
        ("classification", "labels", ["a", 1], r"labels is \['a', 1\]; it must be a list of different texts"),
        ("classification", "labels", ["a", "a"], "it must be a list of different texts"),
        ("classification", "metric", "bleu", "metric is 'bleu'; it must be one of accuracy,"),
        ("classification", "negative_label", "c", "'c' is none of its labels"),
        ("classification", "options.max_length", 0, "max_length is 0; it must be a whole number, 1 or more"),
        ("classification", "options.wide", True, "it has context, max_length, stride, wide; it must have context,"),
        ("classification", "learned", [], "learned is .* it must be a JSON object"),
        ("classification", "learned", {"x": 1}, "it has x; it must have nothing"),
        ("classification", "labels", None, "it has no labels"),
        ("classification", "thresholds", {"model": {"tau": 0.0}}, "thresholds is .* it must have none"),
        ("regression", "learned.std", "1", "std is '1'; it must be a finite number, 0 or more"),
        ("regression", "learned.mean", float("nan"), "mean is nan; it must be a finite number"),
        ("qa", "learned.rule", "bleu", "rule is .bleu.; it must be one of squad_v1, squad_v2, cmrc"),
        ("qa", "thresholds.model.tau", True, "tau is True; it must be a finite number"),
        ("relation", "learned.marks", [["<<", ">>"]], "it must name two marks or none"),
        ("relation_extraction", "learned.related_types", [["a"]], "it must be a list of lists of 2 texts"),
        ("normalization", "learned.ngrams", [3, 1], r"ngrams is \[3, 1\]; it must be two whole numbers"),
        ("normalization", "learned.embedding_recall", True, "there is no encoder that makes them"),
    ],
)
def test_a_damaged_description_is_refused(
    family: str, name: str, value: Any, reason: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    values = json.loads(json.dumps(describe_task(make_learned(family, tokenizer)).to_json()))
    change(name, value)(values)
    with pytest.raises((ValueError, RunError), match=reason):
        make_described_task(TaskDescription.from_json(values), tokenizer)
