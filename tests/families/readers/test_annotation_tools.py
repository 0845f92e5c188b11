"""What annotation tools export: Label Studio's three files, spaCy's training data, NER Annotator, Dataturks, GLiNER."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest
from labelled_fixtures import dump_lines, load, refuse

from domext_ray.families.readers.examples import AnnotatedText, LabelledSet, LabelledText, MultiLabelText, RawSentence

TEXT = "Old gout again."
GOUT = {"start": 4, "end": 8, "text": "gout", "labels": ["Disease"]}
TAGS = ("O", "B-Disease", "O", "O")
NO_TAGS = ("O",) * 4


def list_tags(made: LabelledSet) -> list[tuple[str, ...]]:
    return [each.tags for each in made.train if isinstance(each, RawSentence)]


def read_json(folder: Path, task: str, content: Any, **description: Any) -> LabelledSet:
    return load(folder, task, {"train.json": json.dumps(content, indent=1)}, **description)


def min_row(number: int, **more: Any) -> dict[str, Any]:
    """A row of JSON-MIN."""
    times = {"created_at": "2026-01-01", "updated_at": "2026-01-01", "lead_time": 1.5}
    return {"text": TEXT, "id": number, "annotator": 1, "annotation_id": number, **times, **more}


def test_a_row_of_json_min_without_an_entity_is_a_text_without_one(tmp_path: Path) -> None:
    rows = [min_row(1), min_row(2, label=[GOUT]), min_row(3), min_row(4, label=[GOUT])]
    for i, order in enumerate([(0, 1, 2, 3), (1, 0, 3, 2)]):
        for task in ("ner", "nested_ner"):
            made = read_json(tmp_path / f"{i}{task}", task, [rows[place] for place in order])
            assert len(made.train) == 4 and not [each for each in made.notes if "left out" in each]
            if task == "ner":
                assert list_tags(made) == [(NO_TAGS, TAGS, NO_TAGS, TAGS)[place] for place in order]
    prodigy = [
        {"text": TEXT, "_task_hash": 1, "answer": "accept", **more} for more in ({}, {"spans": [[4, 8, "Disease"]]})
    ]
    assert list_tags(read_json(tmp_path / "prodigy", "ner", prodigy)) == [NO_TAGS, TAGS]
    labels = [min_row(1), min_row(2, labels="mild, old"), min_row(3, labels={"choices": ["mild", "old"]})]
    made = read_json(tmp_path / "labels", "multilabel", labels)
    assert [each.labels for each in made.train if isinstance(each, MultiLabelText)] == [
        (),
        ("mild, old",),
        ("mild", "old"),
    ]
    made = read_json(tmp_path / "classes", "classification", [min_row(1), min_row(2, label="mild")])
    assert len(made.train) == 1 and any("row left out: it has no label (" in each for each in made.notes)


def test_a_missing_column_of_other_files_is_one(tmp_path: Path) -> None:
    """Files that are not plainly of Label Studio, and one in which no row says how the column is called."""
    other = {"text": TEXT, "id": 1, "created_at": "2026-01-01", "updated_at": "2026-01-01"}
    message = refuse(tmp_path / "first", "ner", {"train.jsonl": dump_lines([other, {**other, "label": [GOUT]}])})
    assert message.startswith(
        "train.jsonl is JSON, whose rows have neither words with tags ('tokens' or 'words', and 'ner_t"
    )
    assert "nor a text with entities ('text', and 'entities' or 'spans' or 'label' or 'labels'); set colu" in message
    made = load(tmp_path / "later", "ner", {"train.jsonl": dump_lines([{**other, "label": [GOUT]}, other])})
    assert len(made.train) == 1 and "row left out: it has no column for 'entities'" in made.notes[0]
    message = refuse(tmp_path / "none", "ner", {"train.jsonl": dump_lines([min_row(1), min_row(2)])})
    assert message.startswith("train.jsonl is JSON, whose rows have neither words with tags (")
    message = refuse(tmp_path / "named", "ner", {"train.jsonl": dump_lines([min_row(1), min_row(2)])}, reader="spans")
    assert message.startswith("train.jsonl:1 has no column 'entities'")


def task_row(number: int, *annotations: list[dict[str, Any]] | None, **data: str) -> dict[str, Any]:
    """A task of Label Studio with its annotations; None: one that was cancelled."""
    given = [
        {"id": i, "completed_by": i, "was_cancelled": each is None, "result": [mark(GOUT)] if each is None else each}
        for i, each in enumerate(annotations)
    ]
    return {"id": number, "data": data or {"text": TEXT}, "annotations": given, "predictions": []}


def mark(value: dict[str, Any], kind: str = "labels", name: str = "label", text: str = "text") -> dict[str, Any]:
    return {"id": "a", "from_name": name, "to_name": text, "type": kind, "value": value}


RELATION = {"from_id": "a", "to_id": "b", "type": "relation", "direction": "right"}


@pytest.mark.parametrize("key", ["annotations", "completions"])
def test_tasks_with_their_annotations_are_read_as_json_min(tmp_path: Path, key: str) -> None:
    tasks = [
        task_row(7, [mark(GOUT), RELATION, mark({"choices": ["mild"]}, "choices", "how")]),
        task_row(8, [], [mark(GOUT)]),
    ]
    unnamed = {name: each for name, each in GOUT.items() if name != "labels"}
    tasks += [task_row(9, None), task_row(10), task_row(11, [mark(unnamed)])]
    tasks = [{key if name == "annotations" else name: each for name, each in task.items()} for task in tasks]
    made = read_json(tmp_path, "ner", tasks)
    assert list_tags(made) == [TAGS, NO_TAGS, TAGS, NO_TAGS]
    assert [each.id for each in made.train] == ["7", "8", "8#2", "11"]
    notes = " ".join(made.notes)
    assert (
        "2 x entity left out: it has no label (" in notes
        and "2 x annotation left out: it was cancelled (" in notes
        and "2 x row left out: it has no annotation (" in notes
    )
    made = load(tmp_path / "nested", "nested_ner", {"train.jsonl": dump_lines(tasks)})
    assert [len(each.entities) for each in made.train if isinstance(each, AnnotatedText)] == [1, 0, 1, 0]


def test_columns_may_name_the_parts_of_a_task(tmp_path: Path) -> None:
    parts = {"start": "value.start", "end": "value.end", "type": "value.labels", "mention": "value.text"}
    columns = {role: (name,) for role, name in {"text": "data.text", "entities": "annotations", **parts}.items()}
    made = read_json(tmp_path / "parts", "ner", [task_row(1, [mark(GOUT)]), task_row(2, [])], columns=columns)
    assert list_tags(made) == [TAGS, NO_TAGS]
    named = [
        task_row(1, [mark(GOUT, name="what", text="body")], body=TEXT, title="x"),
        task_row(2, [mark(GOUT, name="what")], text=TEXT),
    ]
    assert list_tags(read_json(tmp_path / "named", "ner", named)) == [TAGS, TAGS]
    two = [task_row(1, [mark(GOUT, name="what"), mark(GOUT, name="where")])]
    message = refuse(tmp_path / "two", "ner", {"train.json": json.dumps(two)})
    assert message.startswith(
        "train.json:[0] has annotations by several names (what, where); set columns.entities to one"
    )
    made = read_json(tmp_path / "two", "ner", two, columns={"entities": ("what",)})
    assert list_tags(made) == [TAGS]


def test_choices_are_a_class_or_labels(tmp_path: Path) -> None:
    one, both, none = ([mark({"choices": given}, "choices", "how")] for given in (["mild"], ["mild", "old"], []))
    tasks = [task_row(1, one), task_row(2, both), task_row(3, none), task_row(4, [])]
    made = read_json(tmp_path / "class", "classification", tasks)
    assert [each.label for each in made.train if isinstance(each, LabelledText)] == ["mild"]
    notes = " ".join(made.notes)
    assert "2 x row left out: it has several choices, of which a class is one (--task multilabel takes them" in notes
    assert "4 x row left out: it has no label (" in notes
    made = read_json(tmp_path / "labels", "multilabel", tasks)
    assert [each.labels for each in made.train if isinstance(each, MultiLabelText)] == [
        ("mild",),
        ("mild", "old"),
        (),
        (),
    ]
    rows = datasets.Dataset.from_list([{"text": TEXT, "label": {"choices": [given]}} for given in ("mild", "old")])
    datasets.DatasetDict({"train": rows, "validation": rows}).save_to_disk(tmp_path / "saved")
    assert load(tmp_path / "saved", "classification", {}).labels == ("mild", "old")


def test_tasks_that_cannot_be_read_are_refused_with_what_to_do(tmp_path: Path) -> None:
    html = [task_row(1, [mark({"start": "/p[1]/text()[1]", "hypertextlabels": ["Disease"]}, "hypertextlabels")])]
    several = [task_row(1, [mark(GOUT), mark(GOUT, text="title")], text=TEXT, title=TEXT)]
    broken = [{**task_row(1), "annotations": [{"id": 1}]}]
    for i, (task, tasks, description, message) in enumerate(
        [
            ("ner", html, {}, "is annotated with 'hypertextlabels', whose places are no characters of a text;"),
            ("ner", several, {}, "has entities of several texts (text, title); make a task of each."),
            (
                "ner",
                broken,
                {},
                "has another layout: an annotation has a list of objects as 'result', but {'id': 1}",
            ),
            ("ner", [task_row(1, [mark(GOUT)]), {"id": 2}], {}, "has another layout: a task of Label Studio has an"),
            (
                "ner",
                [task_row(1)],
                {"reader": "records"},
                "is a task of Label Studio with its annotations, which reader:",
            ),
            (
                "regression",
                [task_row(1)],
                {},
                "is a task of Label Studio with its annotations, which reader: records of r",
            ),
        ]
    ):
        found = refuse(tmp_path / str(i), task, {"train.json": json.dumps(tasks)}, **description)
        assert found.startswith("train.json:[") and found.partition(" ")[2].startswith(message), found


PAIR = [TEXT, {"entities": [[4, 8, "Disease"]]}]
FORMS: dict[str, Any] = {
    "spacy 2": [PAIR, [TEXT, {"entities": []}]],
    "ner annotator": {"classes": ["DISEASE"], "annotations": [PAIR, None, [TEXT, {"entities": []}]]},
    "dataturks": [
        {"content": TEXT, "annotation": [{"label": ["Disease"], "points": [{"start": 4, "end": 7, "text": "gout"}]}]},
        {"content": TEXT, "annotation": None, "extras": None},
    ],
    "gliner": [
        {"tokenized_text": ["Old", "gout", "again", "."], "ner": [[1, 1, "Disease"]]},
        {"tokenized_text": ["Old", "gout", "again", "."], "ner": []},
    ],
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_other_tools(tmp_path: Path, form: str) -> None:
    content = FORMS[form]
    files = {"indented": json.dumps(content, indent=1), "one line": json.dumps(content)}
    for name, text in files.items():
        made = load(tmp_path / name, "ner", {"train.json": text})
        assert list_tags(made) == [TAGS, NO_TAGS] and made.labels == ("Disease",), name
    if isinstance(content, list):
        made = load(tmp_path / "lines", "ner", {"train.jsonl": dump_lines(content)})
        assert list_tags(made) == [TAGS, NO_TAGS]
    if form in ("dataturks", "gliner"):
        made = load(tmp_path / "nested", "nested_ner", {"train.json": files["one line"]})
        assert [len(each.entities) for each in made.train if isinstance(each, AnnotatedText)] == [1, 0]


def test_cats_of_spacy_are_a_class_or_labels(tmp_path: Path) -> None:
    rows = [{"text": TEXT, "cats": cats} for cats in ({"A": 1.0, "B": 0.0}, {"A": False, "B": True}, {"A": 0, "B": 1})]
    lines = {"train.jsonl": dump_lines(rows)}
    made = load(tmp_path / "class", "classification", lines)
    assert [each.label for each in made.train if isinstance(each, LabelledText)] == ["A", "B", "B"]
    assert not [note for note in made.notes if "left out" in note]
    made = load(tmp_path / "spacy2", "classification", {"train.json": json.dumps([[TEXT, rows[0]], [TEXT, rows[1]]])})
    assert [each.label for each in made.train if isinstance(each, LabelledText)] == ["A", "B"]
    odd = [{"text": TEXT, "cats": cats} for cats in ({"A": 1, "B": 1}, {"A": 0.0, "B": 0.0})]
    made = load(tmp_path / "labels", "multilabel", {"train.jsonl": dump_lines([*rows, *odd])})
    assert [each.labels for each in made.train if isinstance(each, MultiLabelText)] == [
        *(("A",), ("B",), ("B",), ("A", "B"), ()),
    ]
    broken = [{"text": TEXT, "cats": cats} for cats in ({"A": 0.7, "B": 0.3}, ["A"], {"A": None})]
    made = load(tmp_path / "odd", "classification", {"train.jsonl": dump_lines([*rows, *odd, *broken])})
    assert len(made.train) == 3
    for said in (
        "2 x row left out: it has several of its 'cats' at 1, of which a class is one (--task multilabel takes all)",
        "2 x row left out: it has none of its 'cats' at 1, of which a class is one (--task multilabel takes all)",
        "6 x row left out: it has no object with 0 or 1 for each label as 'cats'",
    ):
        assert any(note.startswith(said) for note in made.notes), made.notes
    message = refuse(tmp_path / "none", "classification", {"train.jsonl": dump_lines(odd)})
    assert "has no example" in message and "--task multilabel takes all" in message
    for task, name in (("classification", "label"), ("multilabel", "labels")):
        renamed = [{"text": row["text"], name: row["cats"]} for row in rows]
        made = load(tmp_path / name, task, {"train.jsonl": dump_lines(renamed)})
        assert [each.list_labels() for each in made.train] == [("A",), ("B",), ("B",)]
    own = [{"text": TEXT, "label": name, "cats": {"A": 1.0, "B": 0.0}} for name in "AB"]
    made = load(tmp_path / "own", "classification", {"train.jsonl": dump_lines(own)})
    assert [each.label for each in made.train if isinstance(each, LabelledText)] == ["A", "B"], "a label decides"


def test_other_tools_rows_that_are_broken_are_refused(tmp_path: Path) -> None:
    for i, (row, message) in enumerate(
        [
            (
                {"content": TEXT, "annotation": [{"label": ["Disease"]}]},
                "an annotation of Dataturks has a 'label', and",
            ),
            ({"content": TEXT, "annotation": 3}, "an annotation of Dataturks has a 'label', and"),
            ({"tokenized_text": TEXT, "ner": []}, "tokenized_text must be a list of texts"),
            ({"tokenized_text": ["gout"], "ner": [[0, 1, "Disease"]]}, "ner must be a list of [first word, last word,"),
        ]
    ):
        found = refuse(tmp_path / str(i), "ner", {"train.jsonl": dump_lines([row])})
        assert found.startswith(f"train.jsonl:1 has another layout: {message}")
    for form, fault in (("dataturks", "has no text as 'text'"), ("gliner", "tokenized_text must be a list of texts")):
        rows = {"train.jsonl": dump_lines([*FORMS[form], {"id": 3}])}
        assert fault in refuse(tmp_path / form, "ner", rows, strict=True)
