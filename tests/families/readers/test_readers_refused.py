"""What no reader takes: one sentence, with the file and the line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from labelled_fixtures import dump_lines, refuse

LONG_NUMBER = '{"text": "a", "label": ' + "1" * 5000 + "}"
READER = {"reader": "label_columns", "labels": ("toxic", "insult")}
CLASSES, RECORDS = "classification", {"reader": "records"}


def nest(*entities: Any) -> str:
    """A text with entities, on the third line."""
    return "[\n\n" + json.dumps({"text": "慢性胃炎", "entities": entities}, ensure_ascii=False) + "\n]"


def relate(triples: Any) -> str:
    return "\n" + dump_lines([{"text": "a", "spo_list": triples}])


def answer(answers: Any) -> str:
    return dump_lines([{"question": "When?", "context": "In 1901.", "answers": answers}])


FIRST = {"start_idx": 0, "end_idx": 3, "type": "x"}
NO_LIST = "train.jsonl:1 has another layout: answers must be a list of objects"
CHOICE = {"type": "choices", "value": {"choices": "mild"}}
SQUAD = "has another layout: "
# Family, train's name, its content, what the description says, and how the sentence begins.
REFUSED: list[tuple[str, str, str | bytes, dict[str, Any], str]] = [
    (
        CLASSES,
        "tsv",
        "just words\nand more\n",
        {},
        "train.tsv:1 has a single column, 'just words', where classification needs one each for 'text' and 'label'",
    ),
    (CLASSES, "csv", 'text,label\nfine,a\n"x"y,b\n', {}, "train.csv:3 is no CSV"),
    (
        *(CLASSES, "csv", "review,Label\nfine,a\n", {"columns": {"text": (0,), "label": (-1,)}}),
        "train.csv:1 is a header, and would be read as a row, because the set's columns are places; give their names",
    ),
    (
        CLASSES,
        "jsonl",
        '{"text": "a", "label": "b"}\n["a"]\n',
        {},
        "train.jsonl:2 has another layout: a row must be an obj",
    ),
    (CLASSES, "ndjson", '{"text": "a", "label": "b"}\n{"text": \n', {}, "train.ndjson:2 is no JSON"),
    (CLASSES, "json", '"a text"', {}, "train.json has another layout: the file must be a list of objects"),
    (CLASSES, "json.gz", '{\n"data": [1]}', {}, "train.json.gz:['data'] has another layout: a row must be an object"),
    (CLASSES, "xlsx", "PK", {}, "train.xlsx is no plain text but a spreadsheet; save its table as CSV in UTF-8"),
    (CLASSES, "tsv.bz2", "BZh", {}, "train.tsv.bz2 is no plain text but a file that is compressed with bzip2; run bu"),
    (CLASSES, "parquet.gz", "", {}, "train.parquet.gz is no plain text but Parquet or Arrow within gzip; run gunzip"),
    (CLASSES, "xml", "<corpus>", {}, "train.xml is no plain text but XML; take its texts out, and its labels"),
    (CLASSES, "html", "<html><p>a", {}, "train.html is no plain text but HTML; run pandoc"),
    (CLASSES, "pkl", b"\x80\x04\x95\x00", {}, "train.pkl is no plain text but data of another program; write"),
    (
        "qa",
        "json",
        '{"data": [{"question": "q", "context": "c", "answers": []}]}',
        {},
        "train.json:data[0] has another lay",
    ),
    (CLASSES, "dat", "a,b", {}, "train.dat is of no known kind; name it .csv"),
    (CLASSES, "txt", b"text\tlabel\nfine\ta\n\xff\xfe\tb\n", {}, "train.txt:3 is not UTF-8 (byte 0xff)"),
    (CLASSES, "JSON", '[{"text": "a", "label": "b"},\n{"text" "c"}]', {}, "train.JSON:2 is no JSON"),
    (CLASSES, "tab", "", {}, "The train of "),
    (CLASSES, "json", '[{"text": "a", "label": "b"}', {}, "train.json:1 "),
    (CLASSES, "json", '[{"text": "a", "label": "b"}] 1', {}, "train.json:1 "),
    (CLASSES, "json", '{"a": {}', {}, "train.json:1 "),
    (CLASSES, "json", '{"a": {}} {"b": {}}', {}, "train.json:1 "),
    (CLASSES, "json", "[", {}, "train.json:1 "),
    (CLASSES, "jsonl", f"{LONG_NUMBER}\n", {}, "train.jsonl:1 has a number of too many digits"),
    (CLASSES, "json", f"[\n{LONG_NUMBER}]", {}, "train.json:2 has a number of too many digits"),
    (CLASSES, "json", "[" * 100_000, {}, "train.json is nested too deeply"),
    (CLASSES, "json", '{\n"a": {}, "a": {}}', {}, "train.json has the key 'a' twice; give each its own."),
    (
        *(CLASSES, "json", '{\n"classes": [], "annotations": [], "annotations": []}', {}),
        "train.json has the key 'annotations' twice",
    ),
    (
        *("nested_ner", "json", '{\n"classes": [], "annotations": {"a": ["b", {"entities": []}]}}', {}),
        "train.json:annotations has another layout: it must be a list, but {'a': ",
    ),
    ("qa", "json", '{"data": [],\n"data": []}', {}, "train.json has the key 'data' twice"),
    (
        *("qa", "json", '{"data": [{"paragraphs": [], "paragraphs": []}]}', {}),
        "train.json:data[0] has the key 'paragraphs' twice",
    ),
    (
        "qa",
        "jsonl",
        answer([]) * 2,
        {"reader": "squad"},
        f"train.jsonl {SQUAD}a SQuAD file must be an object with a key 'data'; write reader",
    ),
    ("qa", "json", "[1]", {}, f"train.json {SQUAD}a SQuAD file must be an object"),
    ("qa", "json", '{"version": 1}', {}, f"train.json {SQUAD}a SQuAD file must be an object with a key 'data'"),
    ("qa", "json", '{\n"data": {}}', {}, f"train.json:data {SQUAD}it must be a list"),
    (
        *("qa", "json", '{"data": [\n{"paragraphs": [\n{"qas": []}]}]}', {}),
        f"train.json:data[0].paragraphs[0] {SQUAD}a paragraph must have a text as 'context'",
    ),
    (
        *("qa", "json", '{"data": [{"paragraphs": [{"context": "c", "qas": [\n\n{"id": 1}]}]}]}', {}),
        f"train.json:data[0].paragraphs[0].qas[0] {SQUAD}it must have 'question'",
    ),
    (
        "regression",
        "csv",
        'text;score\na;"1,5"\n',
        {},
        "train.csv:2 has the value '1,5'; write numbers with a point befo",
    ),
    ("regression", "csv", 'text,score\nb,2\na,"1,234.5"\n', {}, "train.csv:3 has the value '1,234.5'; write numbers"),
    ("qa", "jsonl", answer(["text"]), RECORDS, NO_LIST),
    ("qa", "jsonl", answer([{"text": 3}]), RECORDS, NO_LIST),
    ("qa", "jsonl", answer({"text": ["a"], "answer_start": []}), RECORDS, NO_LIST),
    ("qa", "jsonl", answer(1901), RECORDS, NO_LIST),
    ("ner", "tsv", "word\tO\nlonely\n", {}, "train.tsv:2 has "),
    ("ner", "tsv", "\nword\tO\n\tO\n", {}, "train.tsv:3 has "),
    ("ner", "tsv", "a O\nb\t \n", {}, "train.tsv:2 has "),
    ("ner", "tsv", '{"text": 1}\n', {}, "train.tsv is JSON Lines, and such a file's name must end in .jsonl"),
    ("ner", "tsv", "a,O\n", {}, "train.tsv:1 has "),
    ("ner", "csv", "a,O\n", {}, "train.csv:1 has commas between its cells"),
    ("ner", "csv", "Word,Tag\na,O\n", {}, "train.csv:1 has commas between its cells"),
    (
        *("ner", "jsonl", '{"tokens": ["a"], "ner_tags": [3]}', RECORDS),
        "train.jsonl:1, tag 1, has the tag 3, a number; name the tags in the order of their numbers in set.yaml (a new",
    ),
    (
        *("ner", "jsonl", '{"tokens": ["a"], "ner_tags": [3]}', {**RECORDS, "tags": ("O", "B-x")}),
        "train.jsonl:1, tag 1, has the tag 3, which has no name there (0 to 1 have); name the tags",
    ),
    ("ner", "jsonl", '{"tokens": ["a"], "ner_tags": [3, "O"]}', RECORDS, "train.jsonl:1 has another layout: tags must"),
    (
        "ner",
        "jsonl",
        '{"tokens": ["a"]}',
        {},
        "train.jsonl is JSON, whose rows have neither words with tags ('tokens' o",
    ),
    (
        *("ner", "jsonl", '{"tokens": ["a"], "ner_tags": ["O"]}', {"reader": "conll"}),
        "train.jsonl is JSON, and reader: conll reads columns; leave that line out",
    ),
    ("ner", "txt", "Sentence #,Word,POS,Tag\nSentence: 1,a,NN,O\n", {}, "train.txt:1 has commas between its cells"),
    (
        "ner",
        "txt",
        "Token\tPOS\tTag\na\tNN\tO\n",
        {},
        "train.txt:1 is a header, of which CoNLL's columns have none; take",
    ),
    (
        "ner",
        "tsv",
        "#FORMAT=WebAnno TSV 3.3\n\n1-1\t0-1\ta\tx\n",
        {},
        "train.tsv is TSV of WebAnno or INCEpTION; export",
    ),
    ("ner", "txt", "a\tO\n\tO\n", {}, "train.txt:2 has another layout: a word and its tag are expected, but '\\tO' is"),
    ("ner", "txt", "a\tAlloy\n", {}, "train.txt:1 has the tag 'Alloy', a type without B- or I-; write B-Alloy for"),
    ("ner", "txt", "a\tplace-city\n", {}, "train.txt:1 has the tag 'place-city', a type without B- or I-; write B-pl"),
    ("ner", "txt", "a\tB-x\tnote\n", {}, "train.txt:1 has the tag 'note', a type without B- or I-; write B-note"),
    ("ner", "txt", "a\tB_x\nb\tI-x\n", {}, "train.txt:1 has the tag 'B_x': tags of the scheme iob1 are O"),
    ("ner", "txt", "a\tx-B\nb\tB-x\n", {}, "train.txt:1 has the tag 'x-B': tags of the scheme iob2 are O"),
    ("ner", "jsonl", '{"tokens": ["a"], "ner_tags": []}', RECORDS, "train.jsonl:1 has 1 words but 0 tags"),
    (
        *("ner", "jsonl", '{"tokens": ["a", "b"], "ner_tags": ["O", "I-D"]}', {**RECORDS, "scheme": "iob2"}),
        "train.jsonl:1, tag 2, has the tag 'I-D'",
    ),
    (
        "nested_ner",
        "json",
        nest({**FIRST, "entity": None}),
        {},
        "train.json:[0] has an entity without its own text",
    ),
    (
        *(
            "nested_ner",
            "json",
            nest(*({**FIRST, "type": each, "entity": "慢性胃炎"} for each in ("B-x", "O", "I-x"))),
            {},
        ),
        "train.json:[0] has an entity of the type 'I-x', a tag of a word; join the words of each entity, and give",
    ),
    (
        *("nested_ner", "json", nest({**FIRST, "type": "", "entity": "慢性胃炎"}), {}),
        "train.json:[0] has an entity without a type",
    ),
    (
        *("nested_ner", "json", nest({**FIRST, "start_idx": "0.5"}), {}),
        "train.json:[0] has an entity without whole numbers",
    ),
    (
        *("nested_ner", "json", nest("慢性"), {}),
        "train.json:[0] has another layout: its entities must be a list of objects, but ['慢性'] is there.",
    ),
    (
        *("nested_ner", "json", nest({**FIRST, "type": 3}), {}),
        "train.json:[0] has an entity with 3 as its type, which must be a text; mend it, or set columns.type.",
    ),
    (
        *("nested_ner", "json", '{"text": "a"}', {}),
        "train.json:1 has no column 'entities' or 'spans' or 'label' or 'labels' for 'entities', only 'text'; write c",
    ),
    (
        "relation_extraction",
        "jsonl",
        relate("b"),
        {},
        "train.jsonl:2 has another layout: its triples must be a list",
    ),
    (
        *("relation_extraction", "jsonl", relate([{"subject": "a"}]), {}),
        "train.jsonl:2 has a triple without texts as predicate, subject and object",
    ),
    (
        *("multilabel", "csv", ",text,toxic\n0,one,1\n", {**READER, "labels": ()}),
        "train.csv:2 has the columns , text, toxic; name those that have 0 and 1",
    ),
    ("multilabel", "csv", "text,toxic\na,1\n", READER, "train.csv:2 has no column for the label 'insult', only text, "),
    (
        *("multilabel", "csv", "one,1\n", {**READER, "columns": {"text": (0,)}}),
        "train.csv:1 is a table without a header; a column per label needs",
    ),
    (
        "multilabel",
        "csv",
        "comment,toxic\na,1\n",
        READER,
        "train.csv:1 has no column 'text' or 'sentence'",
    ),
    ("multilabel", "jsonl", '{"comment": "a"}\n', READER, "train.jsonl:1 has no column 'text' or "),
    (
        CLASSES,
        "csv",
        "text,label,label\na,b,c\n",
        {},
        "train.csv:1 has the column 'label' 2 times; give each its own name.",
    ),
    (
        *("relation_extraction", "jsonl", relate([{"subject": "a", "predicate": " ", "object": "a"}]), {}),
        "train.jsonl:2 has a triple without texts as predicate, subject and object",
    ),
    (
        *(CLASSES, "json", json.dumps([{"data": {"text": "a"}, "annotations": [{"result": [CHOICE]}]}]), {}),
        "train.json:[0] has another layout: a result has a list as 'choices', but 'mild' is there; export JSON-MIN.",
    ),
]


def test_other_layouts_are_refused_with_the_line(tmp_path: Path) -> None:
    for i, (task, ending, content, description, says) in enumerate(REFUSED):
        message = refuse(tmp_path / str(i), task, {f"train.{ending}": content}, **description)
        assert message.startswith(says), (task, content)


def test_other_mistakes_with_files_are_one_sentence(tmp_path: Path) -> None:
    message = refuse(tmp_path, "ner", {"train.tsv": "a\tO\n", "train.tsv.gz": "b\tO\n"})
    assert "2 files that match 'train.*' (train.tsv, train.tsv.gz); keep one, or name it as files.train" in message
    message = refuse(tmp_path / "columns", "multilabel", {"train.csv": "text,toxic\na,1\n"})
    assert (
        "or reader: label_columns for a column of 0 and 1 per label, in set.yaml (a new file, with task: multilabel)"
        in message
    )
    description: dict[str, Any] = {"columns": {"labels": ("toxic",)}, "labels": (), "reader": "label_columns"}
    message = refuse(tmp_path / "labels", "multilabel", {"train.csv": "text,labels\none,1\n"}, **description)
    assert "columns.labels is ('toxic',); it must be left " in message
    message = refuse(tmp_path / "parquet", "multilabel", {"train.parquet": b"PAR1"})
    assert "train.parquet cannot be read as Parquet (" in message
    (tmp_path / "gz").mkdir()
    (tmp_path / "gz" / "train.tsv.gz").write_bytes(b"\x1f\x8b\x08 not really")
    message = refuse(tmp_path / "gz", CLASSES, {}, files={"dev": ("train.*",)})
    assert message.startswith("train.tsv.gz cannot be read")
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n"
    for name in ("train.tsv", "train.tsv.gz", "train.jsonl"):
        (tmp_path / "gz" / "train.tsv.gz").unlink(missing_ok=True)
        (tmp_path / "gz" / name).write_bytes(pointer)
        message = refuse(tmp_path / "gz", CLASSES, {}, files={"dev": ("train.*",)})
        assert message.startswith(f"{name} is a pointer of Git LFS, not the file itself"), name
        (tmp_path / "gz" / name).unlink()
    message = refuse(tmp_path / "empty", CLASSES, {"train.tsv": "", "dev.tsv": "text\tlabel\na\tx\n"})
    assert message.startswith("The train of ") and "(train.tsv) has no" in message
