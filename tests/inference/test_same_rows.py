"""A file says the same to a corpus, a labelled set and what predicts or embeds: the same texts, the same sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from labelled_fixtures import dump_lines, load

from domext_ray.config.pretrain import PrepareConfig
from domext_ray.errors import CorpusError
from domext_ray.families.readers.examples import LabelledText, TaggedSentence
from domext_ray.inference.input_plan import plan_input
from domext_ray.inference.input_rows import FieldNames
from domext_ray.text.data.documents import read_documents
from domext_ray.text.data.dropped import Dropped
from domext_ray.text.data.sources import resolve_sources

ROWS = [{"text": f'row {i} says "it, hurts" twice', "label": "ab"[i % 2]} for i in range(6)]
ZERO = [{"text": "a\u200bb", "label": "a"}, {"text": "c\u2060d", "label": "b"}]
SPACED = ["a b", "c\u2060d"]
TEXTS = [each["text"] for each in ROWS]
TABLE = "".join(f'"{each["text"]}",{each["label"]}\n' for each in ROWS)
SAME: dict[str, tuple[str, list[str]]] = {
    "spark.csv": ("text,label\n" + TABLE.replace(' "it, hurts" ', ' \\"it, hurts\\" '), TEXTS),
    "spaced.csv": ("text, label\n" + TABLE.replace('"it, hurts"', '""it, hurts""').replace('",', '", '), TEXTS),
    "excel.csv": ("sep=;\ntext;label\n" + TABLE.replace('"it, hurts"', '""it, hurts""').replace('",', '";'), TEXTS),
    "pandas.tsv": ("text\tlabel\n" + TABLE.replace('"it, hurts"', '""it, hurts""').replace('",', '"\t'), TEXTS),
    "zero.csv": ("text,label\n" + "".join(f"{each['text']},{each['label']}\n" for each in ZERO), SPACED),
    "zero.tsv": ("text\tlabel\n" + "".join(f"{each['text']}\t{each['label']}\n" for each in ZERO), SPACED),
    "zero.jsonl": (dump_lines(ZERO), SPACED),
    "escaped.jsonl": ("".join(json.dumps(each) + "\n" for each in ZERO), SPACED),
}
REFUSED: dict[str, str] = {
    "open.csv": 'text,label\nx,a\n"y,b\nz,a\n',
    "swallowed.csv": 'text,label\n"x,a\n"y",b\nz,a\n',
    "mixed.csv": 'text,label\n"C:\\a\\",a\n"a \\"b\\" c",b\n',
    "columns.json": json.dumps({"text": {"0": "x", "1": "y"}, "label": {"0": "a", "1": "b"}}),
    "split.json": json.dumps({"columns": ["text", "label"], "data": [["x", "a"], ["y", "b"]]}),
    "mac.jsonl": "\r".join(map(json.dumps, ROWS)),
    "page.csv": "<!doctype html><p>text,label</p>\n",
    "letter.csv": "{\\rtf1 text,label}\n",
    "utf16.csv": "text,label\nx,a\n",
}


def read_corpus(path: Path) -> list[str]:
    prepare, dropped = PrepareConfig(min_document_chars=1), Dropped()
    tasks = resolve_sources(str(path), prepare).tasks
    return [document for task in tasks for document in read_documents(task, prepare, dropped)]


def read_input(path: Path) -> list[str]:
    plan = plan_input(str(path), FieldNames(), 2)
    return [row.values["text"] for block in plan.blocks for row in plan.make_reader()(block)]


def read_labelled(path: Path) -> list[str]:
    name = f"train{path.suffix}"
    found = load(path.parent / f"set of {path.name}", "classification", {name: path.read_bytes()}).train
    return [each.text for each in found if isinstance(each, LabelledText)]


READERS: tuple[Callable[[Path], list[str]], ...] = (read_corpus, read_input, read_labelled)


def test_a_file_has_the_same_texts_for_all(tmp_path: Path) -> None:
    for name, (content, texts) in SAME.items():
        (tmp_path / name).write_text(content, encoding="utf-8")
        for read in READERS:
            found = read(tmp_path / name)
            assert [each.replace("cd", "c\u2060d") for each in found] == texts, (name, read)


def test_a_file_is_refused_with_the_same_sentence_by_all(tmp_path: Path) -> None:
    for name, content in REFUSED.items():
        path = tmp_path / name
        path.write_text(content, encoding="utf-16" if name == "utf16.csv" else "utf-8", newline="")
        said = set()
        for read in READERS:
            with pytest.raises(CorpusError) as caught:
                read(path)
            said.add(str(caught.value).replace(str(tmp_path / f"set of {name}" / f"train{path.suffix}"), str(path)))
        assert len(said) == 1 and str(path) in said.pop(), (name, said)


def test_words_and_places_stay_where_a_zero_width_space_is(tmp_path: Path) -> None:
    """A word of a CoNLL file stays one, and entities by characters stay where they are."""
    conll = "a\u200bb\tB-x\n\u200b\tO\nc\tO\n\nd\tB-x\n"
    (tagged, _) = load(tmp_path / "words", "ner", {"train.tsv": conll}).train
    assert isinstance(tagged, TaggedSentence) and tagged.words == ("a b", " ", "c")
    row = {"text": "an\u200bold gout", "spans": [{"start": 3, "end": 11, "label": "x"}]}
    (raw,) = load(tmp_path / "places", "ner", {"train.jsonl": json.dumps(row)}, reader="spans").train
    assert isinstance(raw, TaggedSentence) and raw.words == ("an", "old", "gout") and raw.tags == ("O", "B-x", "I-x")
