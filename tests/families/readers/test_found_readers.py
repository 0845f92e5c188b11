"""Which reader a set has that names none: the first of its family's whose values the first row of its files has."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
from labelled_fixtures import dump_lines, dump_parquet, load, refuse

from domext_ray.families.readers.examples import LabelledSet, MultiLabelText, Question, RawSentence, TaggedSentence

TEXT, WORDS, TAGS = "Old gout again .", ["Old", "gout", "again", "."], ["O", "B-Disease", "O", "O"]
TAGGED = [{"id": str(i), "tokens": WORDS, "ner_tags": TAGS} for i in range(3)]
SPANS = [{"text": TEXT, "label": [[4, 8, "Disease"]]}] * 3


def dump_csv(rows: list[dict[str, Any]]) -> str:
    file = io.StringIO()
    writer = csv.DictWriter(file, [*rows[0]])
    writer.writeheader()
    writer.writerows([{key: str(value) for key, value in row.items()} for row in rows])
    return file.getvalue()


FILES: dict[str, tuple[str, str | bytes]] = {
    "columns": ("train.txt", "\n".join(map(" ".join, zip(WORDS, TAGS, strict=True))) + "\n"),
    "lines": ("train.jsonl", dump_lines(TAGGED)),
    "zipped lines": ("train.jsonl.gz", dump_lines(TAGGED)),
    "lines of .json": ("train.json", dump_lines(TAGGED)),
    "an array": ("train.json", json.dumps(TAGGED, indent=1)),
    "Parquet": ("train.parquet", dump_parquet(TAGGED)),
    "CSV, as pandas writes lists": ("train.csv", dump_csv(TAGGED)),
    "doccano": ("train.jsonl", dump_lines(SPANS)),
    "spaCy": ("train.json", json.dumps([[TEXT, {"entities": [[4, 8, "Disease"]]}]] * 3)),
}


def list_tags(made: LabelledSet) -> list[list[str]]:
    return [[*each.tags] for each in made.train if isinstance(each, TaggedSentence | RawSentence)]


@pytest.mark.parametrize("kind", FILES)
def test_entities_of_every_layout_need_no_description(tmp_path: Path, kind: str) -> None:
    name, content = FILES[kind]
    made = load(tmp_path, "ner", {name: content})
    assert made.labels == ("Disease",) and TAGS in list_tags(made)


@pytest.mark.parametrize("task", ["ner", "nested_ner"])
def test_folders_of_brat_are_found_where_there_are_no_files(tmp_path: Path, task: str) -> None:
    for split in ("train", "dev", "test"):
        folder = tmp_path / "notes" / split
        folder.mkdir(parents=True)
        (folder / "a.txt").write_text(TEXT)
        (folder / "a.ann").write_text("T1\tDisease 4 8\tgout\n")
    assert load(tmp_path / "notes", task, {}).labels == ("Disease",)
    row = (
        {"tokens": ["Two"], "ner_tags": ["B-Number"]} if task == "ner" else {"text": "Two", "label": [[0, 3, "Number"]]}
    )
    made = load(
        tmp_path / "notes", task, dict.fromkeys(("train.jsonl", "dev.jsonl"), dump_lines([row])), ends="exclusive"
    )
    assert made.labels == ("Number",), "a file is nearer than a folder"


def test_questions_may_be_rows_and_labels_columns(tmp_path: Path) -> None:
    question = {"question": "When?", "context": "In 1901.", "answers": {"text": ["1901"], "answer_start": [3]}}
    made = load(tmp_path / "qa", "qa", {"train.jsonl": dump_lines([question])})
    assert [type(each) for each in made.train] == [Question]
    content = "text,toxic,rude\na,1,0\nb,1,1\n"
    made = load(tmp_path / "labels", "multilabel", {"train.csv": content}, labels=["toxic", "rude"])
    assert [each.labels for each in made.train if isinstance(each, MultiLabelText)] == [("toxic",), ("toxic", "rude")]
    assert "has no column 'labels'" in refuse(tmp_path / "unnamed", "multilabel", {"train.csv": content})


def test_a_reader_that_is_named_stays(tmp_path: Path) -> None:
    both = [{**tagged, **span} for tagged, span in zip(TAGGED, SPANS, strict=True)]
    for reader, kind in (("records", TaggedSentence), ("spans", RawSentence)):
        made = load(tmp_path / reader, "ner", {"train.jsonl": dump_lines(both)}, reader=reader)
        assert {type(each) for each in made.train} == {kind}
