"""What was read as labels is told, and what nothing can be learned from is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from labelled_fixtures import dump_lines, load, refuse, write

from domext_ray.config.finetune import FinetuneConfig
from domext_ray.errors import CorpusError
from domext_ray.families.described_sets import make_description
from domext_ray.families.label_counts import MAX_SHOWN, count_labels, describe_set, list_label_rows
from domext_ray.families.readers.examples import LabelledSet
from domext_ray.families.sets import load_labelled, read_split

SQUAD = {"context": "Iron rusts.", "question": "What rusts?"}
CHOICE = {"context": "It rains.", "ending0": "a", "ending1": "b", "ending2": "c", "ending3": "d"}
COUNTED: dict[str, tuple[str, list[dict[str, Any]], dict[str, Any], dict[str, float]]] = {
    "classes": ("classification", [{"text": "a", "label": "x"}, {"text": "b", "label": 1}], {}, {"1": 1, "x": 1}),
    "a class that no row has": (
        "classification",
        [{"text": "a", "label": "x"}],
        {"labels": ("z", "x")},
        {"z": 0, "x": 1},
    ),
    "several labels": (
        "multilabel",
        [{"text": "a", "labels": ["x", "y"]}, {"text": "b", "labels": []}],
        {},
        {"x": 1, "y": 1, "(without a label)": 1},
    ),
    "values": (
        "regression",
        [{"text": "a", "score": 1}, {"text": "b", "score": 2.5}],
        {},
        {"least": 1.0, "mean": 1.75, "highest": 2.5},
    ),
    "entities, one of which is misplaced": (
        "ner",
        [{"text": "iron rusts", "entities": [[0, 4, "M"], [5, 8, "N"]]}, {"text": "so what", "entities": []}],
        {"reader": "spans"},
        {"M": 1, "N": 1, "(without an entity)": 1},
    ),
    "questions": (
        "qa",
        [{**SQUAD, "answers": [{"text": "Iron", "answer_start": 0}]}, {**SQUAD, "answers": []}],
        {"reader": "records"},
        {"(with an answer)": 1, "(without an answer)": 1},
    ),
    "choices": (
        "multiple_choice",
        [{**CHOICE, "answer": 0}, {**CHOICE, "answer": 3}],
        {},
        {"(option 1)": 1, "(option 4)": 1},
    ),
}


def _load_rows(folder: Path, task: str, rows: list[dict[str, Any]], **values: Any) -> LabelledSet:
    return load(folder, task, {"train.jsonl": dump_lines(rows)}, **values)


def test_labels_are_counted_by_split(tmp_path: Path) -> None:
    for i, (name, (task, rows, values, expected)) in enumerate(COUNTED.items()):
        made = _load_rows(tmp_path / str(i), task, rows, **values)
        found = count_labels(made.splits, made.labels)
        assert {label: each["train"] for label, each in found.items()} == expected, name
        assert all(each.keys() == {"train", "dev"} for each in found.values()), name  # there is no test
        said = read_split(make_description(task, "made", data=str(tmp_path / str(i)), **values), "train")[1][0]
        shown = ", ".join(f"{label} {count:g}" for label, count in sorted(expected.items()) if count)
        assert said == f"Labels of train: {shown}." or task == "regression", name


def test_a_table_of_many_labels_ends_in_a_sum(tmp_path: Path) -> None:
    """The seldom labels are one row; a single one would be a row of its own."""
    rows = [{"text": f"{i} {j}", "label": f"c{i:02}"} for i in range(MAX_SHOWN + 3) for j in range(1 + (i > 2))]
    shown = list_label_rows(count_labels(_load_rows(tmp_path, "classification", rows).splits))
    assert shown[0] == ("label", "train", "dev", "test")
    assert [shown[1], shown[-1]] == [("c03", "2", "2", "–"), ("(3 more labels)", "3", "3", "–")]
    assert len(shown) == MAX_SHOWN + 2
    assert len(list_label_rows(count_labels(_load_rows(tmp_path, "classification", rows[2:]).splits))) == MAX_SHOWN + 2


def test_a_plan_tells_labels(tmp_path: Path) -> None:
    row = '{"text": "%d", "label": "%s"}\n'
    write(tmp_path / "train.jsonl", "".join(row % (i, "yes" if i % 3 else "no") for i in range(12)))
    write(tmp_path / "dev.jsonl", row % (20, "yes"))
    said = describe_set(load_labelled(FinetuneConfig(task="classification", data=str(tmp_path))))
    assert said.splitlines() == [
        f"set: {tmp_path.name}, 12 / 1 / 0 examples (train / dev / test)",
        "label  train  dev  test",
        "no         4    0     –",
        "yes        8    1     –",
        "note: The dev has no example of 1 of 2 labels ('no').",
    ]


ODD: list[tuple[str, list[dict[str, Any]], list[dict[str, Any]], dict[str, Any], str]] = [
    (
        "ner",
        [{"text": "iron", "entities": [[0, 4, "M"]]}],
        [{"text": "so", "entities": []}],
        {"reader": "spans"},
        "None of the 1 sentences of dev has an entity, so its figures say nothing.",
    ),
    (
        "qa",
        [{**SQUAD, "answers": [{"text": "Iron", "answer_start": 0}]}],
        [{**SQUAD, "answers": [], "question": "Who?"}],
        {"reader": "records"},
        "None of the 1 questions of dev has an answer, so its figures say nothing.",
    ),
    (
        "multilabel",
        [{"text": "a", "labels": ["x"]}],
        [{"text": "b", "labels": []}],
        {},
        "None of the 1 texts of dev has a label, so its figures say nothing.",
    ),
    (
        "regression",
        [{"text": "a", "score": 1}],
        [{"text": "b", "score": -1}, {"text": "c", "score": -1}],
        {},
        "All 2 examples of dev have the value -1, so its figures say nothing.",
    ),
    (
        "classification",
        [{"text": "a", "label": "x"}, {"text": "b", "label": "y"}],
        [{"text": "c", "label": "x"}, {"text": "d", "label": "x"}],
        {},
        "All 2 examples of dev have the label 'x', so its figures say nothing.",
    ),
    (
        "classification",
        [{"text": "a", "label": 0}, {"text": "b", "label": 1}],
        [{"text": "c", "label": "no"}, {"text": "d", "label": "yes"}],
        {},
        "No label of dev ('no', 'yes') is one of train ('0', '1'), so its figures say nothing.",
    ),
    (
        "classification",
        [{"text": f"a {i}", "label": f"{i / 8}"} for i in range(20)],
        [{"text": "c", "label": "0.125"}, {"text": "d", "label": "0.25"}],
        {},
        "20 of 20 labels of train have one example each; is it the right column? (Numbers are for --task regression.)",
    ),
]
ALIKE = [
    (("Caf\u00e9", "Cafe\u0301"), "'Cafe\\u0301' and 'Café' look alike"),
    (("very bad", "very  bad"), "'very  bad' and 'very bad' look alike"),
    (("bad", "bad\u200d"), "'bad' and 'bad\\u200d' look alike"),
    (("Bad", "bad"), "'Bad' and 'bad' differ in case alone"),
    (("bad", "b\u0430d"), "'bad' and 'b\\u0430d' look alike"),
    (("true", "1"), "'1' and 'true' may mean the same"),
]


def test_what_is_odd_is_heard_before_training(tmp_path: Path) -> None:
    for i, (task, train, dev, values, sentence) in enumerate(ODD):
        files: dict[str, str | bytes] = {"train.jsonl": dump_lines(train), "dev.jsonl": dump_lines(dev)}
        assert load(tmp_path / str(i), task, files, **values).warnings == (sentence,)


def test_labels_that_look_alike_are_told(tmp_path: Path) -> None:
    for i, (labels, said) in enumerate(ALIKE):
        made = _load_rows(tmp_path / str(i), "classification", [{"text": x, "label": x} for x in labels])
        assert made.warnings == (f"The labels {said}; they are 2 labels here.",)
        assert len(made.labels) == 2


def test_a_label_that_says_there_is_none_is_told(tmp_path: Path) -> None:
    table: dict[str, str | bytes] = {"train.csv": "text,label\na,nan\nb,none\nc,x\n"}
    assert load(tmp_path, "classification", table).warnings == (
        f"{tmp_path}/train.csv:2 has the label 'nan', as programs write where there is none; empty such cells, or name "
        f"the labels in {tmp_path}/set.yaml (a new file, with task: classification) if it is one.",
    )
    assert not load(tmp_path, "classification", table, labels=("nan", "none", "x")).warnings


def test_a_split_that_is_another_is_told(tmp_path: Path) -> None:
    """A few examples in two splits are a note."""
    rows = [{"text": f"a {i}", "label": "xy"[i % 2]} for i in range(20)]
    dev: dict[str, str | bytes] = {"train.jsonl": dump_lines(rows), "dev.jsonl": dump_lines(rows[:10])}
    (said,) = load(tmp_path, "classification", dev).warnings
    assert said.startswith("10 dev examples are in train too, which makes the score on dev too high: ")
    others = [{"text": f"b {i}", "label": "xy"[i % 2]} for i in range(20)]
    dev["dev.jsonl"] = dump_lines([*rows[:5], *others])
    made = load(tmp_path, "classification", dev)
    assert not made.warnings and made.notes[0].startswith(
        "5 dev examples are in train too, which may make the score on dev too high: "
    )


def test_what_is_left_of_another_form_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In either text of a pair, as in a corpus; a few texts are no sign."""
    rows = [{"text": f"a {i}", "pair": ("caf\u00c3\u00a9", "nan")[i % 2], "label": "xy"[i % 2]} for i in range(6)]
    _load_rows(tmp_path / "left", "classification", rows)
    said = capsys.readouterr().err
    assert f"6 of 24 texts of '{tmp_path}/left' that were looked at have UTF-8 that was read as Latin-1" in said
    assert f"6 of 24 texts of '{tmp_path}/left' that were looked at have a value as Python or JSON spells it" in said
    _load_rows(tmp_path / "few", "classification", [{**each, "pair": "b"} for each in rows[:5]] + rows[5:])
    assert not capsys.readouterr().err


def test_rows_of_one_text_that_contradict_are_told(tmp_path: Path) -> None:
    """Two annotators; those that agree are no news."""
    rows = [{"text": "iron", "entities": [[0, 4, kind]]} for kind in "MMN"]
    made = _load_rows(tmp_path, "ner", rows, reader="spans")
    told = f"1 x train example that contradicts an earlier one of the same text: {tmp_path}/train.jsonl:3."
    assert told in made.notes
    files: dict[str, str | bytes] = {"train.tsv": "-DOCSTART- O\n\nb\tO\n\n-DOCSTART- O\n\nb\tO\n\na\tB-X\n"}
    assert not [each for each in load(tmp_path / "tags", "ner", files).notes if "contradicts" in each]


UNTAUGHT: list[tuple[str, dict[str, str], str]] = [
    (
        "ner",
        {"train.tsv": "a\tO\n"},
        "no training example of . has an entity (./train.tsv:1 is the first); label some sentences.",
    ),
    (
        "ner",  # names do not help
        {"train.tsv": "a\tO\n", "set.yaml": "task: ner\nlabels: [X]\n"},
        "no training example of . has an entity (./train.tsv:1 is the first); label some sentences.",
    ),
    (
        "ner",  # a text that has one, which nothing is learned from
        {
            "train.jsonl": dump_lines([{"text": "iron", "spans": [[0, 2, "M"]]}]),
            "set.yaml": "task: ner\nreader: spans\n",
        },
        "no training example of . has an entity (./train.jsonl:1 is the first); 1 x entity left out: it begins or ends "
        "inside a word (./train.jsonl:1).",
    ),
    (
        "qa",
        {"train.jsonl": dump_lines([{**SQUAD, "answers": []}]), "set.yaml": "task: qa\nreader: records\n"},
        "no training example of . has an answer (./train.jsonl:1 is the first); label some questions.",
    ),
    (
        "classification",
        {"train.jsonl": dump_lines([{"text": "a", "label": "x"}, {"text": "b", "label": "x"}])},
        "all 2 training examples of . have the label 'x' (./train.jsonl:1 is the first): nothing can be learned from "
        "them; is it the right column?",
    ),
    (
        "classification",  # a question of yes and no that Prodigy's annotator answered: its other class is left out
        {
            "train.jsonl": dump_lines(
                [
                    {"text": "a", "label": "x", "answer": "accept"},
                    {"text": "b", "label": "x", "answer": "reject"},
                    {"text": "c", "label": "x", "answer": "accept"},
                ]
            )
        },
        "all 2 training examples of . have the label 'x' (./train.jsonl:1 is the first): nothing can be learned from "
        "them; is it the right column? 2 x row left out: it has the answer 'reject' of Prodigy (./train.jsonl:2, "
        "./dev.jsonl:2).",
    ),
    (
        "multilabel",
        {"train.jsonl": dump_lines([{"text": "a", "labels": ["y", "x"]}, {"text": "b", "labels": ["x", "y"]}])},
        "all 2 training examples of . have the label 'x', 'y' (./train.jsonl:1 is the first): nothing can be learned "
        "from them; is it the right column?",
    ),
    (
        "regression",
        {"train.jsonl": dump_lines([{"text": "a", "score": 2}, {"text": "b", "score": 2}])},
        "all 2 training examples of . have the value 2 (./train.jsonl:1 is the first): nothing can be learned from "
        "them; is it the right column?",
    ),
]


def test_what_teaches_nothing_is_refused(tmp_path: Path) -> None:
    for i, (task, files, sentence) in enumerate(UNTAUGHT):
        folder = tmp_path / str(i)
        for name, content in files.items():
            write(folder / name, content)
            write(folder / name.replace("train", "dev"), content)
        with pytest.raises(CorpusError) as caught:
            load_labelled(FinetuneConfig(task=task, data=str(folder)))
        assert str(caught.value).replace(str(folder), ".") == sentence


def _make_pairs(labels: str, name: str = "label") -> str:
    return dump_lines([{"text": f"a {i}", "pair": "b", name: each} for i, each in enumerate(labels.split())])


def test_pairs_that_have_no_label_are_left_out(tmp_path: Path) -> None:
    """SNLI and MNLI: "-" where annotators did not agree, -1 in copies with numbers, and all of a secret test."""
    for mark, others in (("-1", "0 1 2"), ("-", "entailment neutral")):
        folder = tmp_path / mark
        train = f"{others} {others} {mark}"
        files: dict[str, str | bytes] = {
            "train.jsonl": _make_pairs(train),
            "dev.jsonl": _make_pairs(train),
            "test.jsonl": _make_pairs(f"{mark} {mark}"),
        }
        made = load(folder, "classification", files)
        assert made.labels == tuple(sorted(others.split())) and not made.test
        assert len(made.train) == len(made.dev) == len(train.split()) - 1
        assert [each for each in made.notes if f"has the label '{mark}', which says that it has none" in each]
        named = load(folder, "classification", {}, labels=(*others.split(), mark))
        assert len(named.test) == 2 and mark in named.labels
        description = make_description("classification", "made", data=str(folder))
        with pytest.raises(CorpusError, match=f"no example in test .*2 x row left out: it has the label '{mark}'"):
            (folder / "train.jsonl").unlink(), (folder / "dev.jsonl").unlink()
            read_split(description, "test")


def test_a_mark_that_may_be_a_class_is_asked_for(tmp_path: Path) -> None:
    """Opinions are -1, 0 and 1, and beside + a - is one."""
    rows = dump_lines([{"text": f"a {i}", "label": i % 3 - 1} for i in range(9)])
    message = refuse(tmp_path, "classification", {"train.jsonl": rows})
    assert message == (
        "33% of the examples of made have the label '-1', which often says that there is none; name the classes as "
        "labels in set.yaml (a new file, with task: classification): [0, 1], or with '-1' where it is one."
    )
    assert load(tmp_path, "classification", {"train.jsonl": rows}, labels=("-1", "0", "1")).labels == ("-1", "0", "1")
    assert len(load(tmp_path, "classification", {"train.jsonl": rows}, labels=("0", "1")).train) == 6
    signs = dump_lines([{"text": f"a {i}", "label": "+-"[i % 2]} for i in range(9)])
    assert load(tmp_path, "classification", {"train.jsonl": signs}).labels == ("+", "-")
