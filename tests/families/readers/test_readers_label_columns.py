"""A column of 0 and 1 per label, from every layout of rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
from labelled_fixtures import dump_lines, dump_parquet, load, write

from domext_ray.families.described_sets import find_description, make_description
from domext_ray.families.readers.examples import MultiLabelText
from domext_ray.families.sets import load_set

ROWS: list[dict[str, Any]] = [
    {"id": "x", "text": "one", "toxic": 1, "insult": 0},
    {"id": "y", "text": "two", "toxic": 0, "insult": 0},
    {"id": "z", "text": "three", "toxic": 1, "insult": 1},
]
EXPECTED = [("x", "one", ("toxic",)), ("y", "two", ()), ("z", "three", ("toxic", "insult"))]
READER = {"reader": "label_columns", "labels": ("toxic", "insult")}
LAYOUTS: dict[str, str | bytes] = {
    "train.csv": "id,text,toxic,insult\nx,one,1,0\ny,two,0,0\nz,three,1,1\n",
    "train.tsv": "id\ttext\ttoxic\tinsult\nx\tone\tTrue\tFalse\ny\ttwo\tfalse\t0.0\nz\tthree\t1.0\t true\n",
    "train.jsonl": dump_lines([{**each, "toxic": bool(each["toxic"])} for each in ROWS]),
    "train.json.gz": "[" + ",".join(dump_lines([each]) for each in ROWS) + "]",
    "train.parquet": dump_parquet([{**each, "insult": float(each["insult"])} for each in ROWS]),
}


def shown(made: Any) -> list[tuple[str, str, tuple[str, ...]]]:
    assert all(isinstance(each, MultiLabelText) for each in made.train)
    return [(each.id, each.text, each.labels) for each in made.train]


def test_the_same_labels_from_every_layout(tmp_path: Path) -> None:
    for i, name in enumerate(LAYOUTS):
        folder = tmp_path / str(i)
        made = load(folder, "multilabel", {name: LAYOUTS[name]}, **READER)
        assert shown(made) == EXPECTED and made.labels == ("toxic", "insult")


def test_a_saved_dataset_has_them_too(tmp_path: Path) -> None:
    features = datasets.Features(
        {"id": datasets.Value("string"), "text": datasets.Value("string"), "toxic": datasets.Value("bool")}
        | {"insult": datasets.ClassLabel(names=["0", "1"])}
    )
    own = datasets.Dataset.from_list(ROWS, features=features)
    datasets.DatasetDict({"train": own, "validation": own}).save_to_disk(str(tmp_path / "saved"))
    assert shown(load_set(make_description("multilabel", "made", data=str(tmp_path / "saved"), **READER))) == EXPECTED


def test_a_description_names_the_columns(tmp_path: Path) -> None:
    """The other columns are left alone, and labels keep the description's order."""
    described = (
        "task: multilabel\nreader: label_columns\ncolumns: {text: comment, pair: reply}\nlabels: [toxic, label]\n"
    )
    table = "rater,comment,reply,label,toxic\nann,one,so,1,1\nbob,two,so,0,1\n"
    for name, content in (("set.yaml", described), ("train.csv", table), ("dev.csv", table)):
        write(tmp_path / name, content)
    made = load_set(find_description("multilabel", str(tmp_path)))
    assert made.labels == ("toxic", "label") and shown(made) == [
        ("1", "one", ("toxic", "label")),
        ("2", "two", ("toxic",)),
    ]
    assert made.train[0].pair == "so"  # type: ignore[union-attr]


def test_a_row_with_something_else_is_left_out_and_counted(tmp_path: Path) -> None:
    rows = [*ROWS, {"text": "four", "toxic": 2, "insult": 0}, {"text": "five", "toxic": 0}]
    made = load(tmp_path, "multilabel", {"train.jsonl": dump_lines(rows), "dev.csv": LAYOUTS["train.csv"]}, **READER)
    assert shown(made) == EXPECTED
    assert [each.partition(" (")[0] for each in made.notes if "left out" in each] == [
        "1 x row left out: it has neither 0 nor 1 for 'toxic'",
        "1 x row left out: it has neither 0 nor 1 for 'insult'",
    ]
