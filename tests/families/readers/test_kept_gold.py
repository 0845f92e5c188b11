"""Gold that cannot be encoded stays in dev and test, where it is a miss, and is left out of training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from labelled_fixtures import dump_lines, write
from transformers import PreTrainedTokenizerBase

from domext_ray.families.described_sets import make_description
from domext_ray.families.family import describe_entity
from domext_ray.families.nested import SpanTask
from domext_ray.families.questions import QuestionTask
from domext_ray.families.readers.examples import Entity, LabelledSet
from domext_ray.families.sets import load_set, read_split
from domext_ray.families.task import TaskOptions
from domext_ray.families.triples import ExtractionTask


def load_splits(folder: Path, task: str, splits: dict[str, list[dict[str, Any]]], **description: Any) -> LabelledSet:
    for split, rows in splits.items():
        write(folder / f"{split}.jsonl", dump_lines(rows))
    return load_set(make_description(task, "made", data=str(folder), **description))


def ask(number: int, answer: str) -> dict[str, Any]:
    context = f"It was in {1900 + number}."
    return {"question": "When?", "context": context, "answers": [{"text": answer, "answer_start": 10}]}


def test_twenty_questions_of_which_ten_have_no_answer_in_their_context(
    tmp_path: Path, bert: PreTrainedTokenizerBase
) -> None:
    """Whoever finds every answer that there is reaches one half."""
    rows = [ask(i, str(1900 + i) if i % 2 else f"{1800 + i}") for i in range(20)]
    made = load_splits(tmp_path, "qa", {"train": rows, "dev": rows[:4], "test": rows}, reader="records")
    assert [len(each) for each in (made.train, made.dev, made.test)] == [10, 4, 20]
    task = QuestionTask(made, bert, TaskOptions(max_length=32))
    assert not task.has_null, "an answer that is elsewhere is no missing one"
    found = [{"answer": each.context[10:14]} for each in made.test]  # type: ignore[union-attr]
    assert task.score(made.test, found).get("exact") == 0.5
    assert task.score(made.test, [{"answer": None}] * 20).get("exact") == 0.0
    sentence = "it has none of its answers in the context"
    assert f"10 x question left out: {sentence}" in " ".join(made.notes)
    assert f"12 x question kept to be scored: {sentence}" in " ".join(made.notes)
    examples, notes = read_split(make_description("qa", "made", reader="records", data=str(tmp_path)), "test")
    assert len(examples) == 20 and any("kept to be scored" in each for each in notes)


def entity(start: int, end: int, text: str) -> dict[str, Any]:
    return {"start_idx": start, "end_idx": end, "type": "dis", "entity": text}


def test_a_misplaced_entity_is_a_miss(tmp_path: Path, bert: PreTrainedTokenizerBase) -> None:
    """It keeps its own offsets, so that only a prediction with exactly its characters finds it."""
    row = {"text": "the heart disease", "entities": [entity(4, 9, "heart"), entity(9, 16, "disease")]}
    made = load_splits(tmp_path, "nested_ner", dict.fromkeys(("train", "dev", "test"), [row]), ends="exclusive")
    (text,) = made.test
    assert text.entities == (Entity(4, 9, "dis"),) and text.misplaced == (Entity(9, 16, "dis"),)  # type: ignore[union-attr]
    task = SpanTask(made, bert, TaskOptions(max_length=32))
    for spans, recall in ((text.entities, 0.5), (text.gold, 1.0)):  # type: ignore[union-attr]
        found = {"entities": [describe_entity(text.text, each) for each in spans]}  # type: ignore[union-attr]
        assert task.score(made.test, [found]).get("recall.micro") == recall
    (encoded,) = task.encode(made.train, is_training=True)
    assert np.array_equal(encoded.targets["spans"][:, 0], [0]) and len(encoded.targets["spans"]) == 1
    assert sum("1 x entity" in each for each in made.notes) == 1 and any(
        "2 x entity kept" in each for each in made.notes
    )


def test_a_triple_that_text_or_schema_lacks_is_a_miss(tmp_path: Path, bert: PreTrainedTokenizerBase) -> None:
    for i, lacks in enumerate(["text", "schema"]):
        folder = tmp_path / str(i)

        def triple(target: str, kind: str = "drug") -> dict[str, str]:
            return {
                "subject": "heart",
                "subject_type": "organ",
                "predicate": "takes",
                "object": target,
                "object_type": kind,
            }

        bad = triple("doctor") if lacks == "text" else triple("disease", "other")
        row = {"text": "the heart drug disease", "triples": [triple("drug"), bad]}
        schema = {"subject_type": "organ", "predicate": "takes", "object_type": "drug"}
        write(folder / "schema.json", json.dumps([schema]))
        splits = dict.fromkeys(("train", "dev", "test"), [row])
        made = load_splits(folder, "relation_extraction", splits, schema=("schema.json",))
        task = ExtractionTask(made, bert, TaskOptions(max_length=32))
        found = [
            {"head": {"text": "heart"}, "label": "takes", "tail": {"text": each}} for each in ("drug", bad["object"])
        ]
        assert task.score(made.test, [{"relations": found[:1]}]).get("recall.micro") == 0.5
        assert task.score(made.test, [{"relations": found}]).get("recall.micro") == 1.0
        assert any("1 x triple left out" in each for each in made.notes)
        assert any("2 x triple kept to be scored" in each for each in made.notes)
