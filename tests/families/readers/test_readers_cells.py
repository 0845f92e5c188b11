"""One cell: truth values and lists, in all the ways that writers of tables have for them; rows that were rejected."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from labelled_fixtures import dump_lines, load, refuse

from domext_ray.families.readers.cells import read_mark, read_nested
from domext_ray.families.readers.examples import Mention, MultiLabelText, Question, TaggedSentence

TRUE = [True, 1, 1.0, "1", "1.0", "True", " true", "TRUE", "yes", "Y", "t"]
FALSE = [False, 0, 0.0, "0", "0.0", "False", "false ", "No", "n", "F"]
EMPTY = [None, math.nan, "", " ", "nan", "None", "NULL"]
NEITHER = [2, -1, 0.5, "2", "maybe", "truth", [True], {}]


def test_a_mark_is_what_it_says_and_nothing_else_is_one() -> None:
    assert [read_mark(each) for each in TRUE] == [True] * len(TRUE)
    assert [read_mark(each) for each in FALSE] == [False] * len(FALSE)
    assert [read_mark(each) for each in EMPTY] == [None] * len(EMPTY)
    for each in NEITHER:
        with pytest.raises(ValueError):
            read_mark(each)


ANSWERS = [{"text": "1901", "answer_start": 3}]


def ask(mark: Any, answers: Any = ANSWERS) -> dict[str, Any]:
    return {"question": "When?", "context": "In 1901.", "answers": answers, "is_impossible": mark}


def dump_squad(rows: list[dict[str, Any]]) -> str:
    qas = [{key: each[key] for key in ("question", "answers", "is_impossible")} for each in rows]
    return json.dumps({"data": [{"paragraphs": [{"context": "In 1901.", "qas": qas}]}]})


@pytest.mark.parametrize("reader", ["squad", "records"])
def test_only_a_mark_that_is_true_takes_answers_away(reader: str, tmp_path: Path) -> None:
    rows = [ask(each) for each in (*FALSE, *EMPTY, *TRUE)]
    rows += [ask(True, []), ask(True, None), ask("maybe"), ask("False", [])]
    text = dump_squad(rows) if reader == "squad" else dump_lines(rows)
    made = load(tmp_path, "qa", {f"train.{'json' if reader == 'squad' else 'jsonl'}": text}, reader=reader)
    texts = [each.answer_texts for each in made.train if isinstance(each, Question)]
    assert texts == [("1901",)] * len(FALSE + EMPTY) + [()] * (len(TRUE) + 3)
    assert [note.split(" (")[0] for note in made.notes[:3]] == [
        f"{2 * len(TRUE)} x question kept without its answers: it has answers, and is_impossible is true",
        "2 x question left out: it has neither true nor false as 'is_impossible'",
        "2 x question kept without an answer: it has none, and is_impossible is false",
    ]


def test_columns_of_labels_take_the_same_marks(tmp_path: Path) -> None:
    rows = [{"text": "a", "toxic": each} for each in (*TRUE, *FALSE, *NEITHER, *EMPTY)]
    made = load(tmp_path, "multilabel", {"train.jsonl": dump_lines(rows)}, reader="label_columns", labels=("toxic",))
    labels = [each.labels for each in made.train if isinstance(each, MultiLabelText)]
    assert labels == [("toxic",)] * len(TRUE) + [()] * len(FALSE)
    assert made.notes[0].startswith(f"{2 * len(NEITHER + EMPTY)} x row left out: it has neither 0 nor 1 for 'toxic'")


SPELLED: dict[str, Any] = {
    '["a", "b"]': ["a", "b"],
    "['a', 'b']": ["a", "b"],
    "[\"it's\", 'b']": ["it's", "b"],
    "['a' 'b']": ["a", "b"],
    "['a'\n \"b c\"]": ["a", "b c"],
    "[' ', 'a']": [" ", "a"],
    "('a', 'b')": ["a", "b"],
    "{'b', 'a'}": ["a", "b"],
    "frozenset({'b', 'a'})": ["a", "b"],
    "set()": [],
    "[0 1 0]": [0, 1, 0],
    "[0. 1.]": [0.0, 1.0],
    "[]": [],
    "{'text': ['a'], 'answer_start': [0]}": {"text": ["a"], "answer_start": [0]},
}
TEXTS = ["[urgent]", "(a)", "(1, 2)", "a, b", "['a'", "{x}", "[18F]FDG", "[a] and [b]", "set(a)"]


def test_a_cell_that_spells_a_list_is_one() -> None:
    for text, value in SPELLED.items():
        assert read_nested(f" {text}\n") == value, text
    assert [read_nested(each) for each in (*TEXTS, 3, None, ["a"])] == [*TEXTS, 3, None, ["a"]]
    with pytest.raises(ValueError):
        read_nested("['a', nan]")


def test_every_list_of_a_set_may_be_spelled_in_a_cell(tmp_path: Path) -> None:
    labels = "text,labels\na,\"['x', 'y']\"\nb,[]\nc,['x' 'z']\nd,\"['x', nan]\"\n"
    made = load(tmp_path / "labels", "multilabel", {"train.csv": labels})
    found = [each.labels for each in made.train if isinstance(each, MultiLabelText)]
    assert found == [("x", "y"), (), ("x", "z")] and made.labels == ("x", "y", "z")
    assert made.notes[0].startswith("2 x row left out: it has a list as 'labels' that cannot be read (")
    words = "tokens,ner_tags\n\"['Old', 'gout']\",['O' 'B-D']\n"
    (sentence,) = load(tmp_path / "words", "ner", {"train.csv": words}, reader="records").train
    assert isinstance(sentence, TaggedSentence)
    assert (sentence.words, sentence.tags) == (("Old", "gout"), ("O", "B-D"))
    answers = "question,context,answers\nWhen?,In 1901.,\"{'text': ['1901'], 'answer_start': [3]}\"\n"
    (question,) = load(tmp_path / "answers", "qa", {"train.csv": answers}, reader="records").train
    assert isinstance(question, Question) and question.answer_texts == ("1901",)
    choices = "context,options,answer\nRain.,\"['wet', 'dry']\",1\nSun.,\"['wet', 'dry']\",0\n"
    made = load(tmp_path / "choices", "multiple_choice", {"train.csv": choices}, columns={"options": ("options",)})
    assert [each.options for each in made.train] == [("wet", "dry")] * 2  # type: ignore[union-attr]
    contents: dict[str, str | bytes] = {"train.csv": "text,terms\na,\"['p', 'q']\"\n", "catalogue.txt": "p\nq\n"}
    (mention,) = load(tmp_path / "terms", "normalization", contents, files={"dev": ("train.*",)}).train
    assert isinstance(mention, Mention) and mention.terms == ("p", "q")


def test_a_list_of_one_label_is_that_label(tmp_path: Path) -> None:
    """What Prodigy has of an annotator's choice, and pandas of a list."""
    rows = [{"text": f"row {i}", "accept": each} for i, each in enumerate((["x"], "['y']", ["x", "y"], []))]
    made = load(tmp_path, "classification", {"train.jsonl": dump_lines(rows)})
    assert [each.label for each in made.train] == ["x", "y"]  # type: ignore[union-attr]
    assert [note.split(" (")[0] for note in made.notes[:2]] == [
        "2 x row left out: it has several labels, and its task takes one",
        "2 x row left out: it has no label",
    ]


def test_nan_is_nothing(tmp_path: Path) -> None:
    """What pandas and Python write of a value that is missing."""
    rows = [{"text": f"row {i}", "label": "a", "id": math.nan, "pair": math.nan} for i in range(2)]
    made = load(tmp_path, "classification", {"train.jsonl": dump_lines(rows)})
    assert [(each.id, each.pair) for each in made.train] == [("1", None), ("2", None)]  # type: ignore[union-attr]


STATUSES = ["accept", "reject", "ignore", None]


def test_rows_that_an_annotator_of_prodigy_did_not_accept_are_counted(tmp_path: Path) -> None:
    rows = [{"text": f"row {i}", "label": f"x{i}", "answer": each} for i, each in enumerate(STATUSES)]
    made = load(tmp_path / "own", "classification", {"train.jsonl": dump_lines(rows), "dev.jsonl": dump_lines(rows)})
    assert made.labels == ("x0", "x3") and len(made.dev) == 2
    assert [note.split(" (")[0] for note in made.notes[:2]] == [
        "2 x row left out: it has the answer 'reject' of Prodigy",
        "2 x row left out: it has the answer 'ignore' of Prodigy",
    ]
    assert "the row has the answer 'reject' of Prodigy" in refuse(tmp_path / "own", "classification", {}, strict=True)
    others: dict[str, str | bytes] = {"train.jsonl": dump_lines([*rows, {**rows[0], "answer": "no"}])}
    assert len(load(tmp_path / "other", "classification", others).train) == 5, "the set's own column"
    columns = {"label": ("answer",)}
    made = load(tmp_path / "label", "classification", {"train.jsonl": dump_lines(rows)}, columns=columns)
    assert made.labels == ("accept", "ignore", "reject")
