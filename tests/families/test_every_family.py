"""What holds for every family, on drawn examples: reading, encoding, decoding and scoring."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from brief_training import answer_by_targets, make_head, predict
from family_sets import CATALOGUE, STAGED, make_family_task
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from domext_ray.families.described_sets import make_description
from domext_ray.families.metrics.scores import flatten
from domext_ray.families.readers.examples import Example
from domext_ray.families.readers.issues import DataIssues, Record, SetRow
from domext_ray.families.registry import FAMILIES
from domext_ray.families.task import TaskOptions
from domext_ray.inference.examples import make_example

DRAWN = settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
WORDS = st.sampled_from(["cat", "dog", "heart", "the", "runs", "gene", "of", "drug"])
SIZES = st.sampled_from([2, 3, 12, 40, 60])
NAMES = ("x", "y")


@st.composite
def draw_row(draw: st.DrawFn, family: str) -> dict[str, Any]:
    """A row of a labelled file, by role."""
    size = draw(SIZES)
    words = draw(st.lists(WORDS, min_size=size, max_size=size))
    text, label = " ".join(words), draw(st.sampled_from(NAMES))
    first = draw(st.integers(0, len(words) - 1))
    last = draw(st.integers(first, min(first + 4, len(words) - 1)))
    start = sum(len(word) + 1 for word in words[:first])
    end = start + len(" ".join(words[first : last + 1]))
    entity = {"start": start, "end": end, "type": label, "mention": text[start:end]}
    pair = draw(st.sampled_from([{}, {"pair": "a dog"}]))
    answers = [{"text": text[start:end], "answer_start": start}][: draw(st.integers(0, 1))]
    tags = [("B-" if i == first else "I-") + label if first <= i <= last else "O" for i in range(len(words))]
    start, end = entity["start"], entity["end"]
    marked = f"{text[:start]}<< {text[start:end]} >>{text[end:]} [[ cat ]]"
    triple = {"predicate": label, "subject": text[start:end], "subject_type": "s", "object": "cat", "object_type": "o"}
    rows: dict[str, dict[str, Any]] = {
        "ner": {"tokens": words, "tags": tags},
        "nested_ner": {"text": text, "entities": [entity]},
        "relation": {"text": marked, "label": label},
        "relation_extraction": {"text": f"{text} cat", "triples": [triple]},
        "classification": {"text": text, "label": label, **pair},
        "multilabel": {"text": text, "labels": draw(st.lists(st.sampled_from(NAMES), min_size=1, unique=True)), **pair},
        "regression": {"text": text, "value": draw(st.integers(-3, 3)) / 2, **pair},
        "qa": {"question": "what is it", "context": text, "answers": answers},
        "multiple_choice": {"context": text, "options": ["cat", "dog", "a gene"], "answer": first % 3},
        "normalization": {"text": text, "terms": [CATALOGUE[first % len(CATALOGUE)]]},
    }
    return rows[family]


def read_labelled(family: str, rows: Sequence[dict[str, Any]]) -> list[Any]:
    description, issues = make_description(family, "made", ends="exclusive"), DataIssues(is_strict=True)
    own = [SetRow(Record(values, "t", i), description, issues) for i, values in enumerate(rows)]
    found, read = FAMILIES[family].begin_split(own, None)
    return [read(row) for row in found]


def strip(example: Example) -> dict[str, Any]:
    """What is not its label, name or place."""
    return {name: getattr(example, name) for name in example.inputs}


@pytest.mark.parametrize("family", FAMILIES)
@given(data=st.data())
@DRAWN
def test_a_row_without_its_label_is_the_same_example(family: str, data: st.DataObject) -> None:
    row = data.draw(draw_row(family))
    (labelled,) = read_labelled(family, [row])
    raw = make_example(family, row, "row 1")
    assert type(raw) is type(labelled) and strip(raw) == strip(labelled)
    assert raw.id == raw.source == "row 1" and not raw.list_labels() and not raw.gold
    assert (raw.cluster == labelled.cluster) == (raw.cluster[0] != "example")


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in STAGED])
@given(data=st.data())
@DRAWN
def test_what_was_encoded_is_decoded_and_right(
    family: str, data: st.DataObject, bert: PreTrainedTokenizerBase, roberta: PreTrainedTokenizerBase
) -> None:
    """In rows of any length, with all examples at once and in another order."""
    rows = data.draw(st.lists(draw_row(family), min_size=2, max_size=5))
    examples = tuple(read_labelled(family, rows))
    tokenizer = data.draw(st.sampled_from([bert, roberta]))
    options = TaskOptions(max_length=data.draw(st.sampled_from([32, 48, 64])), stride=2)
    labels = NAMES if any(example.list_labels() for example in examples) else ()
    task: Any = make_family_task(family, tokenizer, options, examples=examples, labels=labels)
    assert max(row.length for row in task.encode(examples, is_training=True)) <= options.max_length
    found = answer_by_targets(task, examples)
    order = data.draw(st.permutations(range(len(examples))))
    assert answer_by_targets(task, [examples[i] for i in order]) == [found[i] for i in order]
    score, again = (
        task.score([examples[i] for i in own], [found[i] for i in own]) for own in (range(len(rows)), order)
    )
    assert flatten(score.values) == pytest.approx(flatten(again.values))
    if family == "regression":
        assert [own["value"] for own in found] == [example.value for example in examples]
    else:
        assert score.get(task.metric) == 1.0
        assert not any(task.compare(*pair, task.state).mistakes for pair in zip(examples, found, strict=True))


def assert_alike(one: Any, other: Any) -> None:
    """Whether two records are equal, numbers within rounding."""
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        one, other = list(one.values()), [other[name] for name in one]
    if isinstance(one, list):
        assert len(one) == len(other)
        for pair in zip(one, other, strict=True):
            assert_alike(*pair)
    elif isinstance(one, float):
        assert np.isclose(one, other, atol=1e-4)
    else:
        assert one == other


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in STAGED])
@given(data=st.data())
@settings(DRAWN, max_examples=4)
def test_other_rows_of_a_batch_change_no_prediction(
    family: str, data: st.DataObject, bert: PreTrainedTokenizerBase
) -> None:
    examples = tuple(read_labelled(family, data.draw(st.lists(draw_row(family), min_size=2, max_size=4))))
    task: Any = make_family_task(family, bert, examples=examples, labels=NAMES)
    model = make_head(task, bert).eval()
    rows = task.encode(examples, is_training=False)
    padded = [output.detach().numpy() for output in task.read_outputs(model(**task.collate(rows).inputs))]
    sizes = [row.length if task.has_token_outputs else None for row in rows]
    together = task.decode(examples, rows, [tuple(part[i][:n] for part in padded) for i, n in enumerate(sizes)])
    for one, other in zip(predict(task, model, examples), together, strict=True):
        assert_alike(task.show(one), task.show(other))
