"""Relations whose two arguments have places beside the text: by words, by characters, or by their own text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from labelled_fixtures import dump_lines, load, refuse

WORDS = ["ALT", "was", "raised", "by", "Old", "aspirin", "."]
TEXT = " ".join(WORDS)
LAYOUTS: dict[str, dict[str, Any]] = {
    "TACRED": {"token": WORDS, "subj_start": 4, "subj_end": 5, "obj_start": 0, "obj_end": 0, "relation": "raises"},
    "FewRel": {
        "tokens": WORDS,
        "h": ["old aspirin", "Q1", [[4, 5], [6]]],
        "t": ["alt", "Q2", [[0]]],
        "relation": "raises",
    },
    "OpenNRE": {
        "text": TEXT,
        "h": {"name": "Old aspirin", "pos": [18, 29]},
        "t": {"name": "ALT", "pos": [0, 3]},
        "relation": "raises",
    },
    "wiki80": {
        "token": WORDS,
        "h": {"name": "old aspirin", "id": "Q1", "pos": [4, 6]},
        "t": {"name": "alt", "id": "Q2", "pos": [0, 1]},
        "relation": "raises",
    },
    "characters": {"text": TEXT, "head": {"start": 18, "end": 29}, "tail": {"start": 0, "end": 3}, "label": "raises"},
    "texts": {"sentence": TEXT, "subject": "Old aspirin", "object": "ALT", "relation": "raises"},
}


OTHER = {"text": "<< A >> and [[ B ]]", "label": "other", "relation": "other"}


def dump(*rows: dict[str, Any]) -> dict[str, str | bytes]:
    return {"train.jsonl": dump_lines([*rows])}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_layout_is_the_same_example(tmp_path: Path, layout: str) -> None:
    first: Any = load(tmp_path, "relation", dump(LAYOUTS[layout], OTHER)).train[0]
    assert (first.text, first.label) == (TEXT, "raises")
    assert [first.text[place.start : place.end] for place in (first.head, first.tail)] == ["Old aspirin", "ALT"]


def test_marks_in_a_text_come_before_its_columns(tmp_path: Path) -> None:
    marked = {"text": "<< A >> cures [[ B ]] and A", "head": "and", "tail": "cures", "label": "x"}
    first: Any = load(tmp_path, "relation", dump(marked, OTHER)).train[0]
    assert first.text == "A cures B and A" and (first.head.start, first.tail.start) == (0, 8)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"head": "aspirin", "tail": "ALT and"}, "has a tail that is not in its text"),
        ({"head": "a", "tail": "ALT"}, "has a head that is more than once in its text"),
        ({"head": {"start": 0, "end": 99}, "tail": "ALT"}, "places among the 29 characters of its text"),
        (
            {"h": {"name": "aspirin", "pos": [0, 3]}, "t": {"pos": [0, 3]}},
            "places are those of other text than its name",
        ),
    ],
)
def test_an_argument_that_is_not_there_is_counted(tmp_path: Path, change: dict[str, Any], fault: str) -> None:
    row = {"text": "ALT was raised by Old aspirin", "label": "y", **change}
    notes = load(tmp_path, "relation", dump(row, LAYOUTS["characters"], OTHER)).notes
    assert any(fault in note for note in notes), notes


@pytest.mark.parametrize("change", [{"subj_end": 99}, {"subj_start": -1}, {"subj_end": "5"}, {"token": [1]}])
def test_places_of_words_that_are_none_are_another_layout(tmp_path: Path, change: dict[str, Any]) -> None:
    said = refuse(tmp_path, "relation", dump({**LAYOUTS["TACRED"], **change}, OTHER))
    assert "train.jsonl:1 has another layout: arguments are subj_start" in said


def test_a_label_that_says_that_there_is_no_relation_is_told(tmp_path: Path) -> None:
    rows = [{**LAYOUTS["TACRED"], "relation": label} for label in ("no_relation", "NA", "nap", "not_a_part")]
    warned = load(tmp_path, "relation", dump(*rows, OTHER)).warnings
    told = [warning for warning in warned if "counts as a relation in F1" in warning]
    assert [warning.split("'")[1] for warning in told] == ["NA", "no_relation", "other"]
    assert 'write negative_label: "no_relation" in ' in told[1]
    quiet = load(tmp_path, "relation", dump(*rows, OTHER), negative_label="no_relation").warnings
    assert not [warning for warning in quiet if "counts as a relation" in warning]
