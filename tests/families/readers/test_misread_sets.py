"""Sets that look right and are read wrongly, or whose refusal named no cure: each in a layout that is published so."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from labelled_fixtures import dump_lines, dump_parquet, load, refuse, write

from domext_ray.errors import CorpusError
from domext_ray.families.described_sets import find_description
from domext_ray.families.readers.examples import Choice, LabelledText, Question
from domext_ray.families.sets import load_set

LONG, OTHER = "Unlike most others it began in rats", "When did this one begin again"
ENDINGS = {f"ending{i}": text for i, text in enumerate("abcd")}


@pytest.mark.parametrize(
    ("task", "row", "column", "role"),
    [
        ("classification", {"question": OTHER, "sentence": LONG, "label": "x"}, "question", "pair"),
        ("classification", {"text": LONG, "text_pair": OTHER, "label": "x"}, "text_pair", "pair"),
        (
            "regression",
            {
                "text": "这是一个很长的中文句子没有任何空格在里面",
                "other": "这是另一个很长的中文句子没有任何空格在里面",
                "label": 1,
            },
            "other",
            "pair",
        ),
        ("multilabel", {"text": LONG, "title": OTHER, "labels": ["x"]}, "title", "pair"),
        ("multiple_choice", {"context": LONG, "question": OTHER, **ENDINGS, "label": 1}, "question", "stem"),
    ],
)
def test_a_text_that_nothing_reads_is_told_once_with_the_line_that_reads_it(
    tmp_path: Path, task: str, row: dict[str, Any], column: str, role: str
) -> None:
    rows = dump_lines([row, {**row, "label": 2, "labels": ["y"]}] * 2)
    contents: dict[str, str | bytes] = {"train.jsonl": rows, "dev.jsonl": rows}
    made = load(tmp_path / "own", task, contents)
    (note,) = [note for note in made.notes if "is not read" in note]
    assert note.startswith(f"The column '{column}' of ") and f"write columns: {{{role}: {column}}} in " in note
    made = load(tmp_path / "told", task, contents, columns={role: column})
    assert not any("is not read" in note for note in made.notes)
    read = made.train[0]
    assert (read.stem if isinstance(read, Choice) else read.pair) == row[column]  # type: ignore[attr-defined]


def test_names_numbers_and_dates_are_no_texts(tmp_path: Path) -> None:
    row = {
        "text": LONG,
        "source": "The New York",
        "date": "Mon 30 Nov 2026 10:00",
        "url": "https://a/" * 9,
        "label": "x",
    }
    made = load(tmp_path, "classification", {"train.jsonl": dump_lines([row, {**row, "label": "y"}])})
    assert not any("is not read" in note for note in made.notes)


WORDS = {"tokens": ["Old", "gout"], "entities": [{"type": "D", "start": 1, "end": 2}]}
GERMEVAL = "1\tThe\tO\tO\n2\tFC\tB-ORG\tO\n3\tBonn\tI-ORG\tB-LOC\n\n1\tin\tO\tO\n2\tBonn\tB-LOC\tO\n"
REFUSED: dict[str, tuple[str, str, str | bytes, dict[str, Any], str]] = {
    "words with places of words": (
        *("nested_ner", "train.jsonl", dump_lines([WORDS]), {"columns": {"text": "tokens"}, "ends": "exclusive"}),
        r"train.jsonl:1 has its text as a list, \['Old', 'gout'\], .* give these tags \(--task ner\)\.",
    ),
    "two layers of tags": (
        *("ner", "train.tsv", GERMEVAL, {"columns": {"tokens": 1}}),
        "train.tsv has tags of entities in the columns 2 and 3, counted from 0; set columns.tags, such as tags: 2, in",
    ),
    "JSON Lines as .txt": (
        *("ner", "train.txt", dump_lines([{"text": "a", "entities": []}]), {}),
        "train.txt is JSON Lines, and such a file's name must end in .jsonl; rename it.",
    ),
    "JSON Lines as .tsv": (
        *("classification", "train.tsv", dump_lines([{"text": "a", "label": "x"}]), {}),
        "train.tsv is JSON Lines, and such a file's name must end in .jsonl; rename it.",
    ),
    "own names of Parquet": (
        *("ner", "train.parquet", dump_parquet([{"toks": ["a"], "iob": ["O"]}]), {}),
        "train.parquet:1 has no column .*; write columns: {tokens: NAME, tags: NAME} in",
    ),
    "own names of a CSV": (
        *("qa", "train.csv", "ctx,question,answer\na,b,a\n", {}),
        r"train.csv:1 has no column 'context' .*; write columns: {context: NAME} in \S+ \(a new file, .*\)\.",
    ),
    "own names of JSON Lines": (
        *("qa", "train.jsonl", dump_lines([{"ctx": "a", "question": "b", "answers": []}]), {}),
        "train.jsonl:1 has no column 'context'",
    ),
    "names of pairs": (
        *("classification", "train.jsonl", dump_lines([{"premise": "a", "hypothesis": "b", "label": "x"}]), {}),
        "write columns: {text: NAME} in .*, and pair: NAME if it has a second text",
    ),
    "no header": (
        *("classification", "train.csv", '3,"Short sellers"\n4,"Oil"\n', {}),
        "write columns: {text: NAME, label: NAME} in .*, with places from 0 as names if the first line is a row",
    ),
    "a header above tags": ("ner", "train.tsv", "text_a\tlabel\ngout\tB-D\n", {}, "train.tsv:1 is a header"),
    "more of another separator": (
        *("multilabel", "train.csv", 'text,labels\na,"Test, rapid;Care"\nb,Drug;Care\n', {}),
        "train.csv:2 has .* and only 2 of the set's cells have the separator ','; write separator: \";\" in",
    ),
    "lines in a cell": (
        *("multilabel", "train.csv", 'text,labels\na,"x\ny"\nb,y\n', {}),
        r"train.csv:2 has 'x\\ny' as its labels, and no cell .*; write separator: \"\\n\" in",
    ),
    "other marks": (
        *("relation", "train.csv", "text,label\n<e1>a</e1> b <e2>c</e2>,x\n", {}),
        r"No text of .* has << >> and \[\[ \]\] for its two arguments; write marks: \[\[\"<e1>\"",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_would_be_read_wrongly_is_refused_with_its_cure(tmp_path: Path, kind: str) -> None:
    task, name, content, description, says = REFUSED[kind]
    message = refuse(tmp_path, task, {name: content}, **description)
    assert re.search(says, message), message


def test_a_test_without_labels_is_told_how_it_is_left_out(tmp_path: Path) -> None:
    contents: dict[str, str | bytes] = dict.fromkeys(("train.csv", "dev.csv"), "text,label\na,x\nb,y\n")
    message = refuse(tmp_path, "classification", {**contents, "test.csv": "text\nc\nd\n"})
    assert "single column" in message
    message = refuse(tmp_path, "classification", {**contents, "test.csv": "id,text\n1,c\n"})
    assert message.endswith("or files: {test: []} if it has no labels.")
    made = load(tmp_path, "classification", {}, files={"test": []})
    assert (len(made.train), len(made.test)) == (2, 0)


def test_a_separator_of_several_signs_parts_cells_that_have_others(tmp_path: Path) -> None:
    content = 'text,labels\na,"x;y##z"\nb,"x;y"\nc,z\n'
    made = load(tmp_path, "multilabel", {"train.csv": content}, separator="##")
    assert made.labels == ("x;y", "z")


def test_an_object_that_is_no_list_of_options_is_refused(tmp_path: Path) -> None:
    row = {"question": OTHER, "choices": {"text": "abc", "label": "A"}, "answerKey": "A"}
    columns = {"context": "question", "options": "choices", "answer": "answerKey"}
    assert "as 'options'; give 2 texts or more" in refuse(
        tmp_path, "multiple_choice", {"train.jsonl": dump_lines([row] * 3)}, columns=columns
    )


def test_folders_that_are_classes_are_told_from_a_split_that_is_not_there(tmp_path: Path) -> None:
    write(tmp_path / "train" / "pos" / "0_9.txt", "fine")
    assert refuse(tmp_path, "classification", {}).endswith(
        "make train.jsonl of the folders in train, an object a row with a text and its class."
    )


def test_the_description_that_ships_is_copied_and_not_edited(tmp_path: Path) -> None:
    for split in ("train", "dev", "test"):
        write(tmp_path / f"{split}.jsonl", dump_lines([{"sentence_text": "a", "label": "x"}]))
    with pytest.raises(CorpusError, match=r" in a copy of \S+chemprot\.yaml, named as --task\.$"):
        load_set(find_description("chemprot", str(tmp_path)))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("train.csv", "id,context,question,answer,answer_start\n1,Old gout,What?,gout,4\n"),
        ("train.jsonl", dump_lines([{"context": "Old gout", "question": "What?", "answer": "gout"}])),
        (
            "train.csv",
            "context,question,answers\nOld gout,What?,"
            "\"{'text': array(['gout'], dtype=object), 'answer_start': array([4], dtype=int32)}\"\n",
        ),
    ],
)
def test_an_answer_may_be_in_columns_and_arrays_as_numpy_writes_them(tmp_path: Path, name: str, content: str) -> None:
    made = load(tmp_path, "qa", {name: content})
    assert [
        [(answer.start, answer.end) for answer in each.answers] for each in made.train if isinstance(each, Question)
    ] == [[(4, 8)]]


NAMED = [
    {"text": ["one", "two", "three"], "label": ["1", "2", "3"]},
    {"A": "one", "2": "two", "C": "three"},
    {"1": "one", "2": "two", "3": "three"},
    [{"key": key, "value": text} for key, text in (("A", "one"), ("2", "two"), ("C", "three"))],
    [{"text": text, "label": key} for key, text in (("A", "one"), ("2", "two"), ("C", "three"))],
]


@pytest.mark.parametrize("options", NAMED)
@pytest.mark.parametrize("answer", ["2", 2])
def test_options_with_names_are_answered_by_these(tmp_path: Path, options: Any, answer: str | int) -> None:
    row = {"question": OTHER, "choices": options, "answerKey": answer}
    columns = {"context": "question", "options": "choices", "answer": "answerKey"}
    made = load(tmp_path, "multiple_choice", {"train.jsonl": dump_lines([row] * 3)}, columns=columns)
    read = [(each.options, each.answer) for each in made.train if isinstance(each, Choice)]
    assert read == [(("one", "two", "three"), 1)] * 3


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ({"text": "Old gout", "label": {"D": {"gout": [4, 7]}}}, "entities by type are an object of texts with"),
        ({"sentences": ["Old gout"], "ner": [[[1, 1, "D"]]]}, "sentences and ner must be lists of lists, one a s"),
    ],
)
def test_entities_by_type_and_by_sentence_of_another_layout_are_named(tmp_path: Path, row: Any, fault: str) -> None:
    assert fault in refuse(tmp_path, "ner", {"train.jsonl": dump_lines([row])})


@pytest.mark.parametrize("name", ["data/train-0000{}-of-00002-a09b74b3ef9c3b56.parquet", "train/000{}.parquet"])
def test_older_and_converted_files_of_the_hub_are_its_splits(tmp_path: Path, name: str) -> None:
    for place in range(2):
        for split in ("train", "validation"):
            rows = [{"text": f"{split} {place} {i}", "label": "ab"[i]} for i in range(2)]
            write(tmp_path / name.format(place).replace("train", split), dump_parquet(rows))
    made = load(tmp_path, "classification", {})
    assert [each.text for each in made.train if isinstance(each, LabelledText)][::2] == ["train 0 0", "train 1 0"]
    assert len(made.dev) == 4


def test_a_list_of_types_in_json_stays_what_it_is(tmp_path: Path) -> None:
    content = json.dumps([{"text": "dtype=object of array([1])", "label": label} for label in "ab"])
    made = load(tmp_path, "classification", {"train.json": content})
    assert all("dtype=object" in each.text for each in made.train if isinstance(each, LabelledText))
