"""Counts of real sets, which lie beside the repository: what the readers find is what plain text tools count.

The counts on the other side use no reader: regular expressions over the whole file, or the standard library's parser.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
from collections import Counter
from typing import Any

import pytest
from labelled_fixtures import DATA

from domext_ray.families.described_sets import find_description
from domext_ray.families.readers.examples import (
    AnnotatedText,
    LabelledSet,
    LabelledText,
    MarkedText,
    Question,
    TaggedSentence,
)
from domext_ray.families.sets import load_set

_LOADED: dict[tuple[str, str], LabelledSet] = {}


def load(name: str, folder: str) -> LabelledSet:
    if not (DATA / folder).is_dir():
        pytest.skip(f"needs third-party data: {DATA / folder}; set DOMEXT_DATA to the folder that has {folder}")
    if (name, folder) not in _LOADED:
        _LOADED[name, folder] = load_set(find_description(name, str(DATA / folder)))
    return _LOADED[name, folder]


def read(file: str) -> str:
    with gzip.open(DATA / file, "rt", encoding="utf-8-sig", newline="") as stream:
        return stream.read()


def every(made: LabelledSet) -> list[Any]:
    return [*made.train, *made.dev, *made.test]


@pytest.mark.parametrize(("name", "folder"), [("bc5cdr", "ner/BC5CDR"), ("ncbi_disease", "ner/NCBI-disease")])
def test_tagged_sentences(name: str, folder: str) -> None:
    made = load(name, folder)
    for split, file in (("train", "train"), ("dev", "devel"), ("test", "test")):
        text = read(f"{folder}/{file}.tsv.gz")
        sentences: list[TaggedSentence] = list(getattr(made, split))
        assert len(sentences) == len([each for each in re.split(r"\n\n+", text) if each.strip()])
        assert sum(len(each.words) for each in sentences) == len(re.findall(r"^.+\t.+$", text, re.MULTILINE))
        found = Counter(tag[2:] for each in sentences for tag in each.tags if tag[0] == "B")
        assert found == Counter(re.findall(r"\tB-(\w+)$", text, re.MULTILINE))
        assert sum(tag[0] == "I" for each in sentences for tag in each.tags) == len(re.findall(r"\tI-", text))
        assert not any("left out" in note for note in made.notes)


def test_nested_entities() -> None:
    made = load("cmeee", "zh")
    text = read("zh/CMeEE-V2_dev.json.gz")
    texts: list[AnnotatedText] = every(made)
    assert len(texts) == len(re.findall(r'^    "text": ', text, re.MULTILINE))
    assert len({each.source for each in texts}) == len(texts)
    found = Counter(entity.label for each in texts for entity in each.entities)
    assert found == Counter(re.findall(r'"type": "(\w+)"', text))
    mentions = Counter(each.text[entity.start : entity.end] for each in texts for entity in each.entities)
    assert mentions == Counter(json.loads(f'"{each}"') for each in re.findall(r'"entity": "(.*)"', text))
    rows = json.loads(text)
    for each in texts[::50]:
        assert each.text == rows[int(each.source.rsplit(":", 1)[1].strip("[]"))]["text"]


def test_triples() -> None:
    made = load("cmeie", "zh")
    rows = [json.loads(line) for line in read("zh/CMeIE_dev.jsonl.gz").splitlines()]
    schema = [json.loads(line) for line in read("zh/CMeIE_schema.json.gz").splitlines()]
    texts: list[AnnotatedText] = every(made)
    assert len(texts) == len(rows)
    assert made.labels == tuple(dict.fromkeys(each["predicate"] for each in schema))
    wanted = Counter(
        (row["text"], spo["subject"], spo["predicate"], spo["object"]["@value"])
        for row in rows
        for spo in {json.dumps(each, sort_keys=True): each for each in row["spo_list"]}.values()
    )
    found = Counter(
        (each.text, each.text[r.head.start : r.head.end], r.label, each.text[r.tail.start : r.tail.end])
        for each in texts
        for r in each.relations
    )
    assert set(found) == set(wanted)
    total = sum(len(row["spo_list"]) for row in rows)
    assert total - 50 < sum(found.values()) <= total
    for each in texts:
        assert {e for r in each.relations for e in (r.head, r.tail)} == set(each.entities)


def test_question_pairs() -> None:
    made = load("chip_sts", "zh")
    for split in ("train", "dev"):
        rows = list(csv.reader(io.StringIO(read(f"zh/CHIP-STS_{split}.csv.gz"), newline="")))[1:]
        pairs: list[LabelledText] = list(getattr(made, split))
        assert [(each.text, each.pair, each.label) for each in pairs] == [
            (row[0].strip(), row[1].strip(), row[2]) for row in rows
        ]


def test_placeholders() -> None:
    made = load("gad", "re/GAD-fold1")
    lines = read("re/GAD-fold1/train.tsv.gz").splitlines()
    kept: list[MarkedText] = [*made.train, *made.dev]  # type: ignore[list-item]
    assert len(kept) == len(lines) and 0.08 < len(made.dev) / len(lines) < 0.12
    assert Counter(each.label for each in kept) == Counter(each[-1] for each in lines)
    assert len(made.test) == len(read("re/GAD-fold1/test.tsv.gz").splitlines()) - 1
    for each in every(made):
        assert (each.head.start, each.tail.start) == (each.text.find("@GENE$"), each.text.find("@DISEASE$"))
        assert each.head.end - each.head.start == 6 and each.tail.end - each.tail.start == 9
    assert not {each.text for each in made.train} & {each.text for each in made.dev}


def test_brackets() -> None:
    made = load("chemprot", "re/ChemProt")
    for split in ("train", "dev", "test"):
        text = read(f"re/ChemProt/{split}.jsonl.gz")
        pairs: list[MarkedText] = list(getattr(made, split))
        assert len(pairs) == text.count('"text": ')
        assert Counter(each.label for each in pairs) == Counter(re.findall(r'"label": "([^"]+)", "metadata', text))
        for each, line in zip(pairs, text.splitlines(), strict=True):
            marked = json.loads(line)["text"]
            head, tail = each.text[each.head.start : each.head.end], each.text[each.tail.start : each.tail.end]
            assert f"<< {head} >>" in marked and f"[[ {tail} ]]" in marked
            assert marked.replace(f"<< {head} >>", head, 1).replace(f"[[ {tail} ]]", tail, 1) == each.text
    assert len(made.labels) == 13 and made.negative_label is None


@pytest.mark.parametrize(
    ("name", "folder", "columns"),
    [
        ("rte", "glue/RTE", (1, 2, 3)),
        ("mrpc", "glue/MRPC", (3, 4, 0)),
        ("cola", "glue/CoLA", (3, None, 1)),
        ("sts_b", "glue/STS-B", (7, 8, 9)),
    ],
)
def test_glue(name: str, folder: str, columns: tuple[int, int | None, int]) -> None:
    made = load(name, folder)
    for split in ("train", "dev"):
        lines = read(f"{folder}/{split}.tsv.gz").rstrip("\n").split("\n")[0 if name == "cola" else 1 :]
        rows = [line.split("\t") for line in lines]
        examples: list[LabelledText] = list(getattr(made, split))
        text, pair, label = columns
        assert [each.text for each in examples] == [row[text].strip() for row in rows]
        assert [each.pair for each in examples] == [None if pair is None else row[pair].strip() for row in rows]
        if name == "sts_b":
            assert [each.value for each in examples] == [float(row[label]) for row in rows]
        else:
            assert [each.label for each in examples] == [row[label] for row in rows]
        assert not any("left out" in note for note in made.notes)


def test_questions() -> None:
    made = load("cmrc", "qa")
    for splits, file in ((("train", "dev"), "cmrc2018_dev"), (("test",), "cmrc2018_trial")):
        rows = [
            (question["question"], paragraph["context"], [each["text"] for each in question["answers"]])
            for article in json.loads(read(f"qa/{file}.json.gz"))["data"]
            for paragraph in article["paragraphs"]
            for question in paragraph["qas"]
        ]
        questions: list[Question] = [each for split in splits for each in getattr(made, split)]
        assert len(questions) == len(rows), "an empty question is one, too"
        assert sum(len(each.answers) for each in questions) == sum(
            text in context for _, context, texts in rows for text in texts
        )
        assert Counter(text for each in questions for text in each.answer_texts) == Counter(
            text for _, _, texts in rows for text in texts
        )
    assert not {each.context for each in made.train} & {each.context for each in made.dev}  # type: ignore[union-attr]


def test_other_classes() -> None:
    made = load("scicite", "classify/sci-cite")
    for split in ("train", "dev", "test"):
        text = read(f"classify/sci-cite/{split}.jsonl.gz")
        assert Counter(each.label for each in getattr(made, split)) == Counter(re.findall(r'"label": "(\w+)"', text))
    answers = load("pubmedqa", "classify")
    text = read("classify/pubmedqa_ori_pqal.json.gz")
    assert Counter(each.label for each in every(answers)) == Counter(re.findall(r'"final_decision": "(\w+)"', text))
    assert {each.id for each in every(answers)} == set(re.findall(r'^    "(\d+)": \{', text, re.MULTILINE))
