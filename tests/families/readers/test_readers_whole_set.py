"""What only all rows of a set together show: answers of choices, labels that are none, separators."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from labelled_fixtures import dump_lines, load, refuse

from domext_ray.families.readers.examples import Choice, MultiLabelText

WORDS = ["wet", "dry", "cold"]


def dump_choices(answers: list[Any], options: list[str]) -> str:
    return dump_lines([{"context": f"Row {i}.", "options": options, "answer": a} for i, a in enumerate(answers)])


# Answers of train and of dev, the options, which are meant, and what is said of it.
ANSWERS: dict[str, tuple[list[Any], list[Any], list[str], list[int], str]] = {
    "from 0": ([0, 1, 2], [1], WORDS, [0, 1, 2, 1], ""),
    "from 1, which dev alone shows": (
        [1, 2],
        ["3"],
        WORDS,
        [0, 1, 2],
        "Answers are counted from 1: none is 0, and so",
    ),
    "whole floats": ([1.0, "2.0", 3], [1], WORDS, [0, 1, 2, 0], "Answers are counted from 1: none is 0"),
    "uncertain": ([1, 2], [1], WORDS, [1, 2, 1], "Answers are counted from 0, though none is 0; write letters"),
    "letters": (
        ["A", "(b)", "C."],
        ["a"],
        WORDS,
        [0, 1, 2, 0],
        "4 x answer read as a letter, and A is the",
    ),
    "texts": (["dry", " wet"], ["cold"], WORDS, [1, 0, 2], "3 x answer read as the text of its option."),
    "texts that are numbers": (
        ["7", 9],
        ["8"],
        ["7", "8", "9"],
        [0, 2, 1],
        "3 x answer read as the text of its option.",
    ),
    "texts that are their places": ([0, 1, 2], [1], ["0", "1", "2"], [0, 1, 2, 1], ""),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_is_what_all_splits_show(name: str, tmp_path: Path) -> None:
    train, dev, options, expected, says = ANSWERS[name]
    contents: dict[str, str | bytes] = {
        "train.jsonl": dump_choices(train, options),
        "dev.jsonl": dump_choices(dev, options),
    }
    made = load(tmp_path, "multiple_choice", contents, columns={"options": ("options",)})
    assert [each.answer for each in (*made.train, *made.dev) if isinstance(each, Choice)] == expected
    said = [note for note in made.notes if "nswer" in note.split(str(tmp_path))[0]]
    assert [note.startswith(says) for note in said] == [True] * bool(says), said


def test_an_answer_that_is_no_option_is_counted_and_one_of_two_meanings_refused(tmp_path: Path) -> None:
    columns = {"options": ("options",)}
    text = dump_choices([0, 2, 3, -1, None, "D"], WORDS)
    made = load(tmp_path / "none", "multiple_choice", {"train.jsonl": text}, columns=columns)
    assert [each.answer for each in made.train if isinstance(each, Choice)] == [0, 2]
    assert made.notes[0].startswith("8 x row left out: it names no option as its answer (")
    for i, (answers, options) in enumerate([([2, 1, 0], ["1", "2", "0"]), (["A"], ["B", "A"])]):
        contents: dict[str, str | bytes] = {"train.jsonl": dump_choices(answers, options)}
        message = refuse(tmp_path / str(i), "multiple_choice", contents, columns=columns)
        assert message.startswith(
            f"train.jsonl:1 has the answer {answers[0]!r}, which is a place and the text of anoth"
        )


def test_splits_that_count_answers_otherwise_are_refused(tmp_path: Path) -> None:
    contents: dict[str, str | bytes] = {"train.jsonl": dump_choices([1, 3, 2], WORDS)}
    contents["dev.jsonl"] = dump_choices([2, 0], WORDS)
    message = refuse(tmp_path, "multiple_choice", contents, columns={"options": ("options",)})
    assert message == (
        "train.jsonl:2 has the answer 3, so that train counts from 1, and dev has answers that are 0; count all from "
        "0, or write letters."
    )


VECTORS: list[Any] = [[0, 1, 0], [1, 0, 1], [0, 0, 0]]
FORMS = {
    "train.jsonl": dump_lines([{"text": f"row {i}", "labels": each} for i, each in enumerate(VECTORS)]),
    "train.json": dump_lines([{"text": f"row {i}", "labels": [bool(b) for b in v]} for i, v in enumerate(VECTORS)]),
    "train.ndjson": dump_lines([{"text": f"row {i}", "labels": [float(b) for b in v]} for i, v in enumerate(VECTORS)]),
    "train.csv": "text,labels\n" + "".join(f'row {i},"{each}"\n' for i, each in enumerate(VECTORS)),
    "train.tsv": "text\tlabels\nrow 0\t[0 1 0]\nrow 1\t[1 0 1]\nrow 2\t[0. 0. 0.]\n",
    "train.txt": "text\tlabels\nrow 0\t0,1,0\nrow 1\t1 0 1\nrow 2\t0.0|0.0|0.0\n",
}


def test_a_list_of_0_and_1_needs_names(tmp_path: Path) -> None:
    for name, content in FORMS.items():
        contents: dict[str, str | bytes] = {name: content}
        for given, ending in (((), "in the order of the list."), (("a", "b"), "of the list (it names 2).")):
            message = refuse(tmp_path / name, "multilabel", contents, labels=given)
            assert message.startswith(f"{name}:{1 + (content[:4] == 'text')} has ")
            assert "so has every row 3 times 0 or 1; write labels: [NAME, NAME, NAME] in set.yaml" in message
            assert message.endswith(ending)
        made = load(tmp_path / name, "multilabel", contents, labels=("x", "y", "z"))
        labels = [each.labels for each in made.train if isinstance(each, MultiLabelText)]
        assert (labels, made.labels) == ([("y",), ("x", "z"), ()], ("x", "y", "z")), name


def test_one_row_among_lists_of_0_and_1(tmp_path: Path) -> None:
    for i, odd in enumerate(([], [0, 1], [0, 2, 1], ["x"])):
        rows = [{"text": f"row {j}", "labels": each} for j, each in enumerate([*VECTORS, odd])]
        message = refuse(tmp_path / str(i), "multilabel", {"train.jsonl": dump_lines(rows)}, labels=("x", "y", "z"))
        assert message == f"train.jsonl:4 has {odd} as its labels, where most rows have 3 times 0 or 1; mend it."


def test_lists_of_numbers_of_labels_are_no_vectors(tmp_path: Path) -> None:
    for i, rows in enumerate(([[0], [1], [0]], [[0, 1], [1]], [[0, 1], [2, 0]], [[], [0, 1]])):
        text = dump_lines([{"text": f"row {i}", "labels": each} for i, each in enumerate(rows)])
        made = load(tmp_path / str(i), "multilabel", {"train.jsonl": text})
        expected = [tuple(map(str, each)) for each in rows]
        assert [each.labels for each in made.train if isinstance(each, MultiLabelText)] == expected


def test_a_separator_that_never_occurs(tmp_path: Path) -> None:
    for mark, is_in_dev in itertools.product("|;", (False, True)):
        folder = tmp_path / f"{ord(mark)}{is_in_dev}"
        cells = ["engine", f"engine{mark}noise", ""]
        lines = [f"row {i},{cell}\n" for i, cell in enumerate(cells)]
        contents: dict[str, str | bytes] = {
            "train.csv": "text,labels\n" + "".join(lines[:1] if is_in_dev else lines),
            "dev.csv": "text,labels\n" + "".join(lines),
        }
        message = refuse(folder, "multilabel", contents)
        assert f":3 has 'engine{mark}noise' as its labels" in message and f'write separator: "{mark}" in' in message
        made = load(folder, "multilabel", contents, separator=mark)
        assert made.labels == ("engine", "noise")
        names = ("engine", f"engine{mark}noise")
        assert load(folder, "multilabel", contents, labels=names).labels == names


SEVERAL = {
    "a,b; b|c; a; c": "'b|c', and 'b' and 'c'",
    "a/b; a; b": "'a/b', and 'a' and 'b'",
    "甲\u3001\u4e59; \u4e59\u3001\u4e19; \u4e19\u3001\u7532": "'\u7532\u3001\u4e59', and '\u7532' and '\u4e59'",
    "a##b; b##a": "'a##b', and 'a' and 'b'",
    "a b; b c; c a; a; b; c": "'a b', and 'a' and 'b'",
    "very bad; very good; so bad; so good": "",
    "heart pain; heart; pain": "",
    "in/out; in/err; out": "",
    "C; C#; C++": "",
}


def test_labels_that_are_several_are_refused(tmp_path: Path) -> None:
    """By what parts them in other rows; names of labels have spaces and slashes, too."""
    for i, (cells, said) in enumerate(SEVERAL.items()):
        lines = [f'row {j},"{cell}"\n' for j, cell in enumerate(cells.split("; "))]
        contents: dict[str, str | bytes] = {"train.csv": "text,labels\n" + "".join(lines)}
        if said:
            message = refuse(tmp_path / str(i), "multilabel", contents)
            assert f" has the label {said} are of other rows, too; part several labels by ','" in message
        else:
            assert len(load(tmp_path / str(i), "multilabel", contents).labels) > 1
        named = load(
            tmp_path / str(i), "multilabel", contents, labels=tuple(sorted({*cells.replace(",", "; ").split("; ")}))
        )
        assert len(named.train) == len(lines)


def test_brackets_that_a_separator_parts_are_refused(tmp_path: Path) -> None:
    for i, cell in enumerate(("[a, b]", "{a,b}", "acids (weak, strong)")):
        message = refuse(tmp_path / str(i), "multilabel", {"train.csv": f'text,labels\nt,"{cell}"\nu,a\n'})
        assert message.startswith(
            f"train.csv:2 has {cell!r} as its labels, whose brackets the separator ',' parts; write"
        )
    made = load(tmp_path / "marks", "multilabel", {"train.csv": 'text,labels\nt,":), :("\nu,a)\n'})
    assert made.labels == (":(", ":)", "a)")
