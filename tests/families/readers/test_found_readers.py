"""Which reader a set has that names none: the first of its family's whose values the first row of its files has."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path
from typing import Any

import datasets
import pytest
from labelled_fixtures import dump_lines, dump_parquet, load, refuse

from domext_ray.errors import CorpusError
from domext_ray.families.described_sets import find_description, make_description
from domext_ray.families.readers.examples import (
    LabelledSet,
    LabelledText,
    MultiLabelText,
    Question,
    RawSentence,
    TaggedSentence,
)
from domext_ray.families.sets import load_set

TEXT, WORDS, TAGS = "Old gout again .", ["Old", "gout", "again", "."], ["O", "B-Disease", "O", "O"]
TAGGED = [{"id": str(i), "tokens": WORDS, "ner_tags": TAGS} for i in range(3)]
SPANS = [{"text": TEXT, "label": [[4, 8, "Disease"]]}] * 3
WORD_ROWS = "Old,-,O\n,gout,-,B-Disease\n,again,-,O\n,.,-,O"
CLUENER: tuple[dict[str, Any], ...] = ({"Disease": {"gout": [[4, 7]]}}, {})
PUBTATOR = "7|t|Old gout\n7|a|again .\n7\t4\t8\tgout\tDisease\tD006073\n7\tCID\tD1\tD2\n\n"
BIGBIO: dict[str, Any] = {
    "id": "7",
    "passages": [
        {"type": "title", "text": ["Old gout"], "offsets": [[0, 8]]},
        {"type": "abstract", "text": ["again ."], "offsets": [[9, 16]]},
    ],
    "entities": [{"type": "Disease", "text": ["gout"], "offsets": [[4, 8]], "normalized": []}],
    "relations": [],
}


def dump_csv(rows: list[dict[str, Any]]) -> str:
    file = io.StringIO()
    writer = csv.DictWriter(file, [*rows[0]])
    writer.writeheader()
    writer.writerows([{key: str(value) for key, value in row.items()} for row in rows])
    return file.getvalue()


BIOC: dict[str, Any] = {
    "id": "7",
    "infons": {},
    "passages": [
        {
            **{"offset": 0, "text": "Old gout"},
            "annotations": [
                {"infons": {"type": "Disease"}, "text": "gout", "locations": [{"offset": 4, "length": 4}]},
            ],
        },
        {"offset": 9, "text": "again ."},
    ],
}
FILES: dict[str, tuple[str, str | bytes]] = {
    "columns": ("train.txt", "\n".join(map(" ".join, zip(WORDS, TAGS, strict=True))) + "\n"),
    "lines": ("train.jsonl", dump_lines(TAGGED)),
    "zipped lines": ("train.jsonl.gz", dump_lines(TAGGED)),
    "lines of .json": ("train.json", dump_lines(TAGGED)),
    "an array": ("train.json", json.dumps(TAGGED, indent=1)),
    "Parquet": ("train.parquet", dump_parquet(TAGGED)),
    "CSV, as pandas writes lists": ("train.csv", dump_csv(TAGGED)),
    "a word a row": ("train.csv", f"Sentence #,Word,POS,Tag\nSentence: 1,{WORD_ROWS}\nSentence: 2,a,-,O\n"),
    "a word a row of TSV": ("train.tsv", f"sentence_id\ttokens\tpos\tlabels\n1\t{WORD_ROWS}".replace(",", "\t")),
    "doccano": ("train.jsonl", dump_lines(SPANS)),
    "tags as labels": ("train.json", json.dumps([{"document": 7, "tokens": WORDS, "labels": TAGS}] * 3)),
    "PubTator": ("train.txt", PUBTATOR * 3),
    "PubTator of another ending": ("train.PubTator", PUBTATOR * 3),
    "BigBIO": ("train.jsonl", dump_lines([BIGBIO] * 3)),
    "CLUENER": ("train.json", dump_lines([{"text": TEXT, "label": own} for own in CLUENER])),
    "SciERC": ("train.jsonl", dump_lines([{"sentences": [WORDS[:2], WORDS[2:]], "ner": [[[1, 1, "Disease"]], []]}])),
    "BioC": ("train.jsonl", dump_lines([BIOC] * 3)),
    "BigBIO's Parquet": ("train.parquet", dump_parquet([BIGBIO] * 3)),
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


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ("sentence,word,tag\n1,Old,O\n1,,B-Disease\n", ":3 has another layout: a word and its tag are expected"),
        ("sentence,word,tag\n1,Old,O\n1,gout\n", ":3 has another layout: a word and its tag are expected"),
        ("word,tag\nOld,O\ngout,B-Disease\n", ":1 has commas between its cells, as a CSV; .* sentence_id,word,tag"),
        ("tokens,tags\nOld,O\ngout,B-Disease\n", ":1 has commas between its cells, as a CSV; .* sentence_id,word,tag"),
    ],
)
def test_a_table_with_a_word_a_row_says_what_it_lacks(tmp_path: Path, content: str, fault: str) -> None:
    assert re.search(fault, refuse(tmp_path, "ner", {"train.csv": content}))


def test_columns_of_a_table_with_a_word_a_row_may_be_named(tmp_path: Path) -> None:
    content = "sent_id;Wort;Marke\n1;Old;O\n1;gout;B-Disease\n2;Old;O\n".replace(";", ",")
    made = load(tmp_path, "ner", {"train.csv": content}, columns={"tokens": "Wort", "tags": "Marke"})
    assert list_tags(made) == [["O", "B-Disease"], ["O"]]


def test_an_entity_of_several_stretches_is_gold_that_nothing_is_learned_from(tmp_path: Path) -> None:
    hips = {"type": "Place", "text": ["Old", "again"], "offsets": [[0, 3], [9, 14]]}
    row = {**BIGBIO, "entities": [*BIGBIO["entities"], hips]}
    for task in ("ner", "nested_ner"):
        made = load(tmp_path / task, task, {"train.jsonl": dump_lines([row])})
        assert [[each.label for each in example.misplaced] for example in made.train] == [["Place"]]  # type: ignore[attr-defined]
        assert any("has several stretches" in note for note in made.notes)


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (PUBTATOR + "8\t4\t8\tgout\tDisease\n", ":6 has another layout: a line of '8' must follow its title"),
        (PUBTATOR + "7\t4\t8\n", ":6 has another layout: an entity is its document, start, end, text and type"),
        (PUBTATOR + "Gout.\n", ":6 has another layout: an entity is its document"),
    ],
)
def test_a_line_that_is_none_of_pubtator_is_named(tmp_path: Path, content: str, fault: str) -> None:
    assert fault in refuse(tmp_path, "nested_ner", {"train.txt": content})


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"passages": [{"offset": 0, "text": "Gout", "annotations": [{"text": "Gout"}]}]}, "and a 'type' in 'infons'"),
        ({"passages": [{"text": "Gout"}]}, "passages of BioC have 'text' and 'offset'"),
        ({"passages": ["Gout"]}, "passages of BioC have 'text' and 'offset'"),
    ],
)
def test_bioc_of_another_layout_is_named(tmp_path: Path, change: Any, fault: str) -> None:
    assert fault in refuse(tmp_path, "ner", {"train.jsonl": dump_lines([{**BIOC, **change}])})


def test_a_collection_of_bioc_is_refused_with_the_program_that_makes_rows(tmp_path: Path) -> None:
    collection = {"source": "PMC", "infons": {}, "documents": [BIOC] * 2}
    assert "run jq -c '.documents[]' FILE" in refuse(tmp_path, "ner", {"train.json": json.dumps(collection)})


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"passages": [{"text": ["Gout"], "offsets": [[0, 4]]}, {"text": ["a"], "offsets": [[3, 4]]}]}, "not overlap"),
        ({"entities": [{"type": "Disease", "text": ["gout"], "offsets": [4, 8]}]}, "of BigBIO have lists as 'text' an"),
    ],
)
def test_passages_and_entities_that_have_no_place_are_named(tmp_path: Path, change: Any, fault: str) -> None:
    assert fault in refuse(tmp_path, "ner", {"train.jsonl": dump_lines([{**BIGBIO, **change}])})


@pytest.mark.parametrize("rows", [TAGGED, SPANS])
def test_rows_that_say_whose_they_are_need_no_reader(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    owned = [{**rows[0], "patient": i % 40} for i in range(90)]
    shares = {"train": 0.6, "dev": 0.2, "test": 0.2}
    made = load(tmp_path, "ner", {"train.jsonl": dump_lines(owned)}, files={}, group_field="patient", fractions=shares)
    sides = [{example.group for example in split} for split in (made.train, made.dev, made.test)]
    assert sum(map(len, sides)) == 40 == len(set.union(*sides))


def save_shards(folder: Path, rows: list[dict[str, Any]], features: datasets.Features) -> None:
    """As the hub keeps a dataset: here two files of train, one of validation."""
    folder.mkdir(parents=True)
    whole = datasets.Dataset.from_list(rows, features=features)
    for place in range(2):
        whole.shard(2, place, contiguous=True).to_parquet(folder / f"train-{place:05}-of-00002.parquet")
    whole.to_parquet(folder / "validation-00000-of-00001.parquet")


@pytest.mark.parametrize("inner", ["data", "."])
def test_files_of_the_hub_are_its_splits_with_the_names_of_their_classes(tmp_path: Path, inner: str) -> None:
    text, classes = datasets.Value("string"), datasets.ClassLabel(names=["O", "B-Disease"])
    tagged = [{"tokens": WORDS, "ner_tags": [0, 1, 0, 0]}] * 4
    features = datasets.Features({"tokens": datasets.Sequence(text), "ner_tags": datasets.Sequence(classes)})
    save_shards(tmp_path / "ner" / inner, tagged, features)
    made = load(tmp_path / "ner", "ner", {})
    assert list_tags(made) == [TAGS] * 4 and len(made.dev) == 4 and made.labels == ("Disease",)
    labelled = [{"text": f"Text {i}", "label": i % 2} for i in range(4)]
    features = datasets.Features({"text": text, "label": datasets.ClassLabel(names=["bad", "good"])})
    save_shards(tmp_path / "classes" / inner, labelled, features)
    made = load(tmp_path / "classes", "classification", {})
    assert [each.label for each in made.train if isinstance(each, LabelledText)] == ["bad", "good"] * 2
    row = dump_lines([{"text": "Own", "label": "good"}, {"text": "Other", "label": "bad"}])
    made = load(tmp_path / "classes", "classification", {"train.jsonl": row, "dev.jsonl": row})
    assert len(made.train) == 2, "files with the names of splits are nearer"
    assert refuse(tmp_path, "ner", {}).endswith("; give one of the sets in it, such as classes.")
    (tmp_path / "ner" / inner / "train-00000-of-00002.parquet").unlink()
    message = refuse(tmp_path / "ner", "ner", {})
    assert message.endswith("lacks 1 of the 2 files of train (the first is number 00000); fetch the others, too.")


def follow(message: str, task: str) -> LabelledSet:
    """Write the description that a message tells, and load the set."""
    told = re.search(r"write (.*), a line each, into (\S+/set\.yaml)", message)
    assert told is not None, message
    Path(told[2]).write_text(re.sub(r", (files|fractions)", r"\n\1", told[1]))
    return load_set(find_description(task, str(Path(told[2]).parent)))


@pytest.mark.parametrize("is_given", [True, False])
def test_a_set_of_one_file_has_its_description_told(tmp_path: Path, is_given: bool) -> None:
    file = tmp_path / "notes.jsonl"
    file.write_text(dump_lines([{"text": f"Text {i}", "label": "ab"[i % 2]} for i in range(60)]))
    with pytest.raises(CorpusError) as error:
        load_set(make_description("classification", "made", data=str(file if is_given else tmp_path)))
    assert "whole set" in str(error.value)
    made = follow(str(error.value), "classification")
    assert [len(split) > 0 for split in (made.train, made.dev, made.test)] == [True] * 3


def test_files_whose_names_say_which_split_they_are_have_their_description_told(tmp_path: Path) -> None:
    """CoNLL-2003's, and those with the name of the set before it; where it is not certain nothing is guessed."""
    columns = "\n".join(map(" ".join, zip(WORDS, TAGS, strict=True))) + "\n"
    for folder, names in (("2003", ("eng.train", "eng.testa", "eng.testb")), ("de", ("de_train.tsv", "de-val.tsv"))):
        (tmp_path / folder).mkdir()
        for number, name in enumerate(names):
            (tmp_path / folder / name).write_text(f"{number} O\n{columns}")
        (tmp_path / folder / "README.md").touch()
        with pytest.raises(CorpusError, match="has no train") as error:
            load_set(make_description("ner", "made", data=str(tmp_path / folder)))
        made = follow(str(error.value), "ner")
        assert [len(split) for split in (made.train, made.dev, made.test)] == [1, 1, len(names) - 2]
    (tmp_path / "de" / "set.yaml").unlink()
    (tmp_path / "de" / "old_train.tsv").write_text(columns)
    with pytest.raises(CorpusError, match=r"has no train \(looked for train\.\*\); name its file as files.train, or"):
        load_set(make_description("ner", "made", data=str(tmp_path / "de")))


def test_a_reader_that_is_named_stays(tmp_path: Path) -> None:
    both = [{**tagged, **span} for tagged, span in zip(TAGGED, SPANS, strict=True)]
    for reader, kind in (("records", TaggedSentence), ("spans", RawSentence)):
        made = load(tmp_path / reader, "ner", {"train.jsonl": dump_lines(both)}, reader=reader)
        assert {type(each) for each in made.train} == {kind}
