"""A task made from its description, without any example, encodes, decodes and describes as the one that learned."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from family_sets import EXAMPLES, make_family_task
from finetuned_models import make_raw
from transformers import PreTrainedTokenizerBase

from domext_ray.errors import ConfigError, RunError
from domext_ray.families.family import Prediction
from domext_ray.families.registry import FAMILIES
from domext_ray.families.task import Predict, StagedTask, Task, TaskOptions
from domext_ray.families.task_description import TaskDescription, describe_task, make_described_task

OPTIONS = TaskOptions(max_length=24, stride=6)
RAW: dict[str, list[dict[str, Any]]] = {
    "relation": [{"text": "the << drug >> and the [[ heart ]] disease"}],
    "qa": [{"question": "where is the dog", "context": "the dog is at home " * 6}],
    "multiple_choice": [{"context": "the dog", "stem": "can", "options": ["run", "write"]}],
    "regression": [{"text": "the dog", "pair": "the house"}],
    **dict.fromkeys(("classification", "multilabel"), [{"text": "the cat"}, {"text": "the dog", "pair": "the house"}]),
}
USUAL_RAW = [{"text": "the drug and the doctor and the heart disease of the drug " * 3}, {"text": "heart. pain"}]


def make_learned(family: str, tokenizer: PreTrainedTokenizerBase) -> StagedTask:
    """A task of made examples, whose thresholds are moved from where they start."""
    task = make_family_task(family, tokenizer, OPTIONS)
    for each in {task, *task.stages.values()}:
        each.set_thresholds({name: value - 0.25 for name, value in each.thresholds.items()})
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


def predict(task: StagedTask, examples: Sequence[Any]) -> list[Prediction]:
    """Predict with random outputs."""

    def make_predictor(stage: Task) -> Predict:
        def predict_by_chance(asked: Sequence[Any]) -> list[Prediction]:
            rows = stage.encode(asked, is_training=False)
            return stage.decode(asked, rows, make_outputs(stage, rows))

        return predict_by_chance

    return task.run({name: make_predictor(each) for name, each in task.stages.items()}, examples)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_described_task_is_the_one_that_learned(family: str, bert: PreTrainedTokenizerBase) -> None:
    task = make_learned(family, bert)
    assert task.family == family
    description = describe_task(task)
    text = json.dumps(description.to_json(), allow_nan=False)
    read = TaskDescription.from_json(json.loads(text))
    assert read == description
    again = make_described_task(read, bert)
    assert describe_task(again) == description and not again.data.train
    raw = make_raw(family, RAW.get(family, USUAL_RAW), read.state)
    for examples in (EXAMPLES[family], raw):
        expected, found = predict(task, examples), predict(again, examples)
        assert found == expected == json.loads(json.dumps(found, allow_nan=False))
        if examples is not raw and family != "regression":  # whose two made values have no rank to correlate
            assert again.score(examples, found).values == task.score(examples, expected).values
    for name, stage in task.stages.items():
        assert again.stages[name].head_labels == stage.head_labels
        assert again.stages[name].head_config == stage.head_config


def test_places_of_entities_are_those_of_the_raw_text(bert: PreTrainedTokenizerBase) -> None:
    """Over several windows, with emoji, combining characters and ideographs."""
    text = "\U0001f469\u200d\u2695\ufe0f心脏病 e\u0301tude  (heart\U0001f600disease)\n" * 6
    task = make_learned("ner", bert).stages["model"]
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
    (prediction,) = task.decode([sentence], rows, outputs)
    words = sentence.words  # type: ignore[union-attr]
    dropped = {word for word, tag in zip(words, prediction["tags"], strict=True) if tag == "O"}
    assert dropped <= {"\ufe0f"}
    entities = prediction["entities"]
    assert [each["text"] for each in entities[:3]] == ["\U0001f469\u200d\u2695\ufe0f心", "脏病", "e\u0301tude  ("]
    assert all(text[each["start"] : each["end"]] == each["text"] and each["label"] == "Disease" for each in entities)
    assert "".join(each["text"] for each in entities).split() and len(entities) == len(words) // 2
    assert all(0.86 < each["score"] < 0.92 for each in entities)  # e^3 / (e^3 + 2) is 0.909


def test_records_of_words_have_places_in_the_words_joined_by_spaces(bert: PreTrainedTokenizerBase) -> None:
    task = make_learned("ner", bert).stages["model"]
    examples = EXAMPLES["ner"]
    rows = task.encode(examples, is_training=False)
    logits = np.zeros((rows[0].length, 3), np.float32)
    logits[rows[0].place.positions[1:], [1, 2]] = 9.0
    (prediction,) = task.decode(examples, rows, [(logits,)])
    assert task.show(prediction) == {
        "entities": [{"start": 4, "end": 17, "label": "Disease", "text": "heart disease", "score": 0.999753}]
    }


def test_classes_have_probabilities_the_highest_first(bert: PreTrainedTokenizerBase) -> None:
    task = make_learned("classification", bert).stages["model"]
    rows = task.encode(EXAMPLES["classification"], is_training=False)
    logits = np.array([0.0, np.log(3.0)], np.float32)
    predictions = task.decode(EXAMPLES["classification"], rows, [(logits,), (logits[::-1],)])
    records = [task.show(each) for each in predictions]
    assert records == [
        {"label": "b", "probabilities": {"b": 0.75, "a": 0.25}},
        {"label": "a", "probabilities": {"a": 0.75, "b": 0.25}},
    ]
    assert list(records[0]["probabilities"]) == ["b", "a"]


# Family, path of a value, what it becomes (None: it is left out), and the reason of the refusal.
DAMAGED: list[tuple[str, str, Any, str]] = [
    ("classification", "family", "poetry", "family is 'poetry'; it must be one of ner,"),
    ("classification", "labels", ["a", 1], r"labels is \['a', 1\]; it must be a list of different texts"),
    ("classification", "labels", ["a", "a"], "it must be a list of different texts"),
    ("classification", "metric", "bleu", "metric is 'bleu'; it must be one of accuracy,"),
    ("classification", "negative_label", "c", "'c' is none of its labels"),
    ("classification", "options.max_length", 0, "max_length is 0; it must be a whole number, 1 or more"),
    ("classification", "options.wide", True, "it has wide; it must have context, long_texts, max_length, stride"),
    ("classification", "state", [], "state is .* it must be a JSON object"),
    ("classification", "state", {"x": 1}, "it has x; it must have has_pairs"),
    ("classification", "labels", None, "it has no labels"),
    ("classification", "thresholds", {"model": {"tau": 0.0}}, "thresholds is .* it must have none"),
    ("regression", "state.std", "1", "std is '1'; it must be a finite number above 0"),
    ("regression", "state.mean", float("nan"), "mean is nan; it must be a finite number"),
    ("qa", "state.rule", "squad", "rule is 'squad'; it must be one of squad_v1, squad_v2, cmrc"),
    ("qa", "thresholds.model.tau", True, "tau is True; it must be a finite number"),
    ("relation", "state.marks", [["<<", ">>"]], "it must be two marks, each of 1 or 2 texts, or none"),
    ("relation_extraction", "state.related_types", [["a"]], "it must be a list of lists of 2 texts"),
    ("normalization", "state.ngrams", [3, 1], r"ngrams is \[3, 1\]; it must be two whole numbers"),
    ("normalization", "state.embedding_recall", True, "there is no encoder that makes them"),
]


def test_a_damaged_description_is_refused(bert: PreTrainedTokenizerBase) -> None:
    for family, path, value, reason in DAMAGED:
        values = json.loads(json.dumps(describe_task(make_learned(family, bert)).to_json()))
        *outer, last = path.split(".")
        place = values
        for each in outer:
            place = place[each]
        if value is None:
            del place[last]
        else:
            place[last] = value
        with pytest.raises((ValueError, RunError), match=reason):
            make_described_task(TaskDescription.from_json(values), bert)


def test_only_windows_are_told_of_long_texts(bert: PreTrainedTokenizerBase) -> None:
    """A description without windows is one that 0.1.0 reads; what reads long texts otherwise is known by its family."""
    description = describe_task(make_learned("classification", bert))
    assert "long_texts" not in description.to_json()["options"]
    other = description.read_long_texts("windows")
    assert TaskDescription.from_json(other.to_json()) == other != description
    assert other.to_json()["options"]["long_texts"] == "windows"
    assert other.read_long_texts("auto") == other and other.read_long_texts("cut") == description
    damaged = {**other.to_json(), "options": {**other.to_json()["options"], "long_texts": "sliding"}}
    with pytest.raises(ValueError, match="long_texts is 'sliding'; it must be cut or windows"):
        TaskDescription.from_json(damaged)
    for family in FAMILIES:
        own = describe_task(make_learned(family, bert))
        if not FAMILIES[family].cuts_texts:
            with pytest.raises(ConfigError, match=f"long_texts is 'windows'; it must be left out .* {family}, which"):
                own.read_long_texts("windows")
