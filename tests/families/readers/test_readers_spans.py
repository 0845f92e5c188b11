"""Nested entities and triples: offsets of both kinds, parts of objects, schemas, and what is not in the text."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

from labelled_fixtures import dump_lines, load, refuse

from domext_ray.families.readers.examples import AnnotatedText, Entity, Relation

TEXT = "慢性胃炎伴胃痛"
ENTITIES = (Entity(0, 4, "dis"), Entity(2, 3, "bod"), Entity(5, 7, "sym"))


def entity(start: int, end: int, kind: str, text: str | None) -> dict[str, Any]:
    return {"start_idx": start, "end_idx": end, "type": kind, "entity": text}


def test_ends_of_both_kinds(tmp_path: Path) -> None:
    """Nested entities, in any order, one of them twice; pretty-printed, with a byte-order mark and compressed."""
    for i, (ends, shift) in enumerate(itertools.product(["auto", ""], [1, 0])):
        folder = tmp_path / str(i)
        ends = ends or ("inclusive" if shift else "exclusive")
        rows = [entity(e.start, e.end - shift, e.label, TEXT[e.start : e.end]) for e in reversed(ENTITIES)]
        content = json.dumps([{"text": TEXT, "entities": [*rows, rows[0]]}], ensure_ascii=False, indent=1)
        made = load(folder, "nested_ner", {"train.json.gz": "\ufeff" + content}, ends=ends)
        assert made.train == (AnnotatedText("1", f"{folder}/train.json.gz:[0]", TEXT, ENTITIES),)
        assert made.labels == ("bod", "dis", "sym")


def test_entities_that_are_not_where_they_should_be(tmp_path: Path) -> None:
    rows = [
        {"text": "no entity at all", "entities": []},
        {
            "text": TEXT,
            "entities": [entity(0, 3, "dis", TEXT[:4]), entity(1, 3, "dis", "胃炎"), entity(5, 70, "sym", "胃痛")],
        },
    ]
    made = load(tmp_path, "nested_ner", {"train.jsonl": dump_lines(rows)})
    assert [each.entities for each in made.train] == [(), (ENTITIES[0],)]
    assert any(note.startswith("4 x entity left out: it is not where its offsets say") for note in made.notes)
    assert "train.jsonl:2" in made.notes[0]
    message = refuse(tmp_path, "nested_ner", {"train.jsonl": dump_lines(rows)}, strict=True)
    assert message.startswith("train.jsonl:2: the entity is not where its offsets say ((1, 3, '胃炎'))")


def test_columns_of_entities_may_have_other_names(tmp_path: Path) -> None:
    row = {"sentence": "cold hands", "spans": {"from": [5], "to": [10], "kind": ["Sign"]}}
    columns = {"text": ("sentence",), "entities": ("spans",), "start": ("from",), "end": ("to",), "type": ("kind",)}
    made = load(tmp_path, "nested_ner", {"train.json": dump_lines([row])}, columns=columns, ends="exclusive")
    assert made.train[0].entities == (Entity(5, 10, "Sign"),)


def triple(subject: str, predicate: str, target: object, subject_type: str = "病", object_type: object = "药") -> dict:
    return {
        "Combined": False,
        "predicate": predicate,
        "subject": subject,
        "subject_type": subject_type,
        "object": target,
        "object_type": object_type,
    }


TRIPLE_TEXT = "感冒可用甲药，感冒忌乙药，早晚各一片"
COLD, FIRST, SECOND, WHEN = (
    Entity(0, 2, "病"),
    Entity(4, 6, "药"),
    Entity(10, 12, "药"),
    Entity(13, 15, "时间"),
)


def test_triples_with_parts(tmp_path: Path) -> None:
    """A subject that occurs twice is its first occurrence; equal triples are one; an object may have several parts."""
    parts = {"@value": "甲药", "when": "早晚"}
    spo = [
        triple("感冒", "忌", {"@value": "乙药"}, object_type={"@value": "药"}),
        triple("感冒", "用", parts, object_type={"@value": "药", "when": "时间"}),
        triple("感冒", "忌", "乙药"),
        triple("感冒", "用", {"@value": "丙药"}),
    ]
    made = load(tmp_path, "relation_extraction", {"train.jsonl": dump_lines([{"text": TRIPLE_TEXT, "spo_list": spo}])})
    (text,) = made.train
    assert text.entities == (COLD, FIRST, SECOND, WHEN)
    assert text.relations == (
        Relation(COLD, FIRST, "用"),
        Relation(COLD, SECOND, "忌"),
        Relation(COLD, WHEN, "用.when"),
    )
    assert made.labels == ("忌", "用", "用.when")
    assert made.notes[0].startswith("2 x triple left out: it is not in the text (")
    message = refuse(
        tmp_path,
        "relation_extraction",
        {"train.jsonl": dump_lines([{"text": TRIPLE_TEXT, "spo_list": spo}])},
        strict=True,
    )
    assert message.startswith("train.jsonl:1: the triple is not in the text (('感冒', '用', '丙药'))")


def test_triples_may_be_lists(tmp_path: Path) -> None:
    """As CasRel has them: subject, predicate, object, without types."""
    rows = [{"text": "old gout needs rest", "triple_list": [["gout", "needs", "rest"]]}]
    (text,) = load(tmp_path, "relation_extraction", {"train.json": json.dumps(rows)}).train
    ((head, tail, label),) = [(own.head, own.tail, own.label) for own in text.relations]
    assert (head.start, tail.start, label) == (4, 15, "needs")
    rows = [{"text": "old gout needs rest", "triple_list": [["gout", "rest"]]}]
    said = refuse(tmp_path, "relation_extraction", {"train.json": json.dumps(rows)})
    assert said == "train.json:[0] has a triple without texts as predicate, subject and object."


def test_most_entities_inside_of_words_are_told(tmp_path: Path) -> None:
    """Ends that are inclusive, or places from 1; words of other scripts have no spaces between them."""
    for i, (text, place, is_told) in enumerate(
        [("old aspirin helps", [4, 10], True), ("old aspirin helps", [4, 11], False), ("慢性胃炎伴胃痛", [2, 4], False)]
    ):
        rows = [{"text": f"{text} {j}", "entities": [[*place, "x"]]} for j in range(3)]
        contents: dict[str, str | bytes] = {"train.jsonl": dump_lines(rows), "dev.jsonl": dump_lines(rows[:2])}
        made = load(tmp_path / str(i), "nested_ner", contents, ends="exclusive")
        said = [each.partition(" (")[0] for each in made.warnings]
        assert said == ["3 of 3 entities of train begin or end inside a word"] * is_told


def test_schema_gives_labels_and_allowed_types(tmp_path: Path) -> None:
    schema = [
        {"subject_type": "病", "predicate": "用", "object_type": {"@value": "药", "when": "时间"}},
        {"subject_type": "病", "predicate": "查", "object_type": "检"},
        {"subject_type": "病", "predicate": "忌", "object_type": "药"},
    ]
    spo = [triple("感冒", "忌", "乙药"), triple("感冒", "用", "甲药", object_type="食")]
    files = {
        "train.json": json.dumps([{"text": TRIPLE_TEXT, "spo_list": spo}]),
        "dev.json": json.dumps([{"text": TRIPLE_TEXT, "spo_list": spo[:1]}]),
        "my_schema.json": dump_lines(schema),
    }
    made = load(tmp_path, "relation_extraction", files, schema=("*schema.json",))
    assert made.labels == ("用", "用.when", "查", "忌")
    assert made.train[0].relations == (Relation(COLD, SECOND, "忌"),)
    assert "1 x triple left out: it is not allowed by the schema" in made.notes[0]
    message = refuse(tmp_path, "relation_extraction", {}, schema=("missing.*",))
    assert "has no schema (looked for missing.*)" in message
    (tmp_path / "my_schema.json").write_text('{"predicate": "用"}')
    message = refuse(tmp_path, "relation_extraction", {}, schema=("*schema.json",))
    assert message.startswith("my_schema.json:1 must have texts as predicate")
