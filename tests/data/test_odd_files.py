"""Files that are not what their names say, or hold little text: one sentence each, or a count, and never a wait."""

from __future__ import annotations

import bz2
import glob
import gzip
import io
import json
import lzma
import os
import re
import tarfile
import threading
import zipfile
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pytest
from labelled_fixtures import dump_parquet
from row_files import read_texts, write_arrow

from domext_ray import files as option_files
from domext_ray.config.pretrain import PrepareConfig
from domext_ray.errors import CorpusError
from domext_ray.files import split_paths
from domext_ray.text.data import files
from domext_ray.text.data.dropped import Dropped
from domext_ray.text.data.files import SourceFile, find_files, read_list
from domext_ray.text.data.sample import check_corpus
from domext_ray.text.data.sources import resolve_sources

SENTENCE = "A sentence that is long enough."


def read_spec(spec: str | Path, **options: Any) -> tuple[list[str], Dropped]:
    return read_texts(spec, PrepareConfig(**{"min_document_chars": 1, **options}))


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n"
ARRAY = [{"text": SENTENCE}, {"text": SENTENCE}]
REFUSED: dict[str, tuple[bytes, str]] = {
    "utf16.txt": (SENTENCE.encode("utf-16"), "is UTF-16, not UTF-8; run iconv -f UTF-16 -t UTF-8 FILE > NEW"),
    "utf16le.txt": (SENTENCE.encode("utf-16-le"), "is UTF-16LE, not UTF-8; run iconv -f UTF-16LE"),
    "utf16be.csv": (f"text\n{SENTENCE}\n".encode("utf-16-be"), "is UTF-16BE, not UTF-8"),
    "utf16.jsonl": ('{"text": "a"}\n'.encode("utf-16"), "is UTF-16, not UTF-8"),
    "utf32.txt": (SENTENCE.encode("utf-32"), "is UTF-32, not UTF-8"),
    "utf16.txt.gz": (gzip.compress(SENTENCE.encode("utf-16")), "is UTF-16, not UTF-8"),
    "plain.txt.gz": (SENTENCE.encode(), "ends in .gz and is no gzip file"),
    "plain.JSONL.GZ": (b'{"text": "a"}', "ends in .gz and is no gzip file"),
    "cut.txt.gz": (gzip.compress(b"some text that is here\n" * 999)[:-20], "cut.txt.gz cannot be read to its end"),
    "packed.txt": (gzip.compress(SENTENCE.encode()), "not UTF-8 text but gzip, whose name must end in .gz"),
    "packed-2.txt": (b"PK\x03\x04 rest", "no plain text but an archive; unpack it, and give the files that are in it"),
    "paper.txt": (b"%PDF-1.7 rest", "no plain text but a PDF; run pdftotext FILE NEW.txt and give that"),
    "table.txt": (dump_parquet(ARRAY), "not UTF-8 text but Parquet, whose name must end in .parquet"),
    "bytes.txt": (bytes(range(256)) * 20, "not UTF-8 text .it has NUL bytes"),
    "paper.PDF": (b"%PDF", "which is no plain text but a PDF; run pdftotext FILE NEW.txt and give that"),
    "old.txt": (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "a document of an office program; save it as plain text in UTF-8"),
    "page.txt": (b"\xef\xbb\xbf\n<!DOCTYPE HTML>\n<p>a</p>", "no plain text but HTML; run pandoc -f html -t plain"),
    "error.jsonl": (b"<html>\n<body>404", "no plain text but HTML; run pandoc -f html"),
    "letter.rtf.txt": (b"{\\rtf1\\ansi a}", "no plain text but RTF; run pandoc -f rtf -t plain --wrap none FILE > N"),
    "mac.txt": (b"one\rtwo\rthree\r", r"ends its lines with CR alone, .*; run tr '\\r' '\\n' < FILE > NEW"),
    "mac.jsonl.gz": (gzip.compress(b'{"text": "a"}\r{"text": "b"}'), "ends its lines with CR alone"),
    "latin1.txt": ("Größe\nb\nÜber\n".encode("latin-1") * 9, "18 of 27 rows of .*latin1.txt are not UTF-8"),
    "latin1.csv": ("text\nGröße\nÜber\n".encode("latin-1"), "2 of 2 rows of .*latin1.csv are not UTF-8"),
    "array.jsonl": (json.dumps(ARRAY).encode(), r"is not JSON Lines, .* but an array; run jq -c '.\[\]'"),
    "pretty.json": (json.dumps(ARRAY, indent=1).encode(), "is not JSON Lines, an object a line, but an array"),
    "object.json": (json.dumps(ARRAY[0], indent=1).encode(), "but an object over several lines; run jq -c . FILE"),
    "long.json": (json.dumps(ARRAY * 90_000).encode(), "is not JSON Lines, an object a line, but an array"),
    "cut.parquet": (dump_parquet([{"text": SENTENCE}] * 99)[:-30], "cut.parquet cannot be read to its end"),
    "empty.parquet": (b"", "empty.parquet cannot be read to its end"),
    "number.parquet": (dump_parquet([{"text": 1}]), "the column 'text' of .*number.parquet holds int64, not text"),
    "lists.parquet": (dump_parquet([{"text": ["a"]}]), "holds list.*, not text"),
    "other.parquet": (dump_parquet([{"body": "a"}]), r"has no column 'text' \(it has body\); set --prepare.field"),
    "other.parquet.gz": (gzip.compress(dump_parquet(ARRAY)), "Parquet or Arrow within gzip; run gunzip -k FILE"),
    "text.arrow": (b"no arrow at all", "text.arrow cannot be read to its end"),
    "other.csv": (b"id,body\n1,a\n", r"has no column 'text' \(it has id, body\); set --prepare.field, or name it .txt"),
    "page.html": (b"<!-- saved by me -->\n<!-- and you -->\n<html><p>a", "no plain text but HTML; run pandoc -f html"),
    "paper.xml": (b'<?xml version="1.0"?>\n<PubmedArticleSet>', "is no plain text but XML; take its texts out"),
    "paper.nxml": (b'<!DOCTYPE article PUBLIC "-//NLM">\n<article>', "no plain text but XML; .* pandoc -f jats"),
    "wiki.txt": (b'<mediawiki xmlns="http://www">\n', "is no plain text but XML"),
    "mail.txt": ("患者の腎臓".encode("iso2022_jp"), "is ISO-2022-JP, not UTF-8; run iconv -f ISO-2022-JP -t UTF-8"),
    **{f"pointer.{end}": (POINTER, "is a pointer of Git LFS, not") for end in ("txt", "txt.gz", "jsonl", "csv.gz")},
    **{f"pointer.{end}": (POINTER, "is a pointer of Git LFS, not") for end in ("parquet", "arrow")},
    "rows": (
        b'{"id": 1, "text": "a"}\n' * 9,
        "rows is JSON Lines, and such a file's name must end in .jsonl; rename it",
    ),
    "rows.txt.gz": (gzip.compress(b'{"text": "a"}\n'), "is JSON Lines, and such a file's name must end in .jsonl"),
    "array.txt": (json.dumps(ARRAY, indent=1).encode(), r"but an array; run jq -c '.\[\]' FILE > NEW.jsonl"),
    "notebook.ipynb": (json.dumps({"cells": ARRAY}, indent=1).encode(), "an array in cells; run jq -c '.cells.*' FILE"),
    "table.csv.txt": (b"id,text\n1,a\n2,b\n", "begins with the names of columns, 'text' among them; name it .csv"),
    "table.dat": (b"id\tText\n1\ta\n2\tb\n", "begins with the names of columns, 'Text' among them; name it .tsv"),
    "quoted.txt": (b'"id";"text"\n1;"a; b\nc"\n2;"b"\n', "begins with the names of columns, .* name it .csv"),
    "wrapped.json": (json.dumps({"v": 1.5, "my data": ARRAY}).encode(), r"""jq -c '."my data"\[\]' FILE"""),
    "wrapped-2.json": (json.dumps({"name": "a", "rows": ARRAY * 9999}, indent=1).encode(), r"run jq -c '.rows\[\]'"),
    "joined.json": (b'{"text": "a"}{"text": "b"}', "objects without line breaks between them; run jq -c . FILE"),
    "ids.json": (json.dumps(dict.fromkeys(map(str, range(20)), "a")).encode(), "but an object of texts; run jq -c '.*"),
    "abstracts.txt": (b"227|t|Gout\n227|a|Old.\n", r"is PubTator, .*; run sed -n 's/.*//p' FILE > NEW.txt and give"),
    "abstracts.txt.gz": (gzip.compress(b"227|t|Gout\n227|a|Old.\n"), "is PubTator, .*; run gunzip -c FILE | sed -n"),
    "twice.csv": (b"text,text\na,b\n", "has 2 columns 'text'"),
    "empty.csv": (b"", "empty.csv cannot be read to its end"),
}


def test_a_file_that_cannot_be_meant_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "good.txt").write_text(SENTENCE)
    for name, (content, message) in REFUSED.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(CorpusError, match=message) as caught:
            read_spec(tmp_path)
        assert "\n" not in str(caught.value) and name in str(caught.value)
        (tmp_path / name).unlink()


def zip_files(*names: str) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        for name in names:
            archive.writestr(name, "a")
    return made.getvalue()


def make_tar() -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("a.txt"))
    return made.getvalue()


FOREIGN = {
    "xlsx": (zip_files("[Content_Types].xml", "xl/workbook.xml"), "a spreadsheet; save its table as CSV in UTF-8"),
    "docx": (zip_files("[Content_Types].xml", "word/document.xml"), "an office program; run pandoc FILE -t plain"),
    "pptx": (
        zip_files("[Content_Types].xml", "ppt/presentation.xml"),
        "an office program; save it as plain text in UT",
    ),
    "zip": (zip_files("crossword/a.txt"), "an archive; unpack it, and give the files that are in it"),
    "tar": (make_tar(), "an archive; unpack it, and give the files that are in it"),
    "bz2": (bz2.compress(b"text\n"), "compressed with bzip2; run bunzip2 -k FILE and give what that leaves"),
    "xz": (lzma.compress(b"text\n"), "compressed with xz; run unxz -k FILE and give what that leaves"),
    "pdf": (b"%PDF-1.7", "a PDF; run pdftotext FILE NEW.txt and give that"),
    "xml": (b"<?xml version='1.0'?><corpus>", "XML; take its texts out, and its labels if it has some, and give these"),
}


def test_what_nothing_reads_has_the_same_cure_by_its_name_and_by_its_content_at_every_door(tmp_path: Path) -> None:
    for ending, (content, cure) in FOREIGN.items():
        for name in (f"a.{ending}", "a.txt"):
            path = tmp_path / name
            path.write_bytes(content)
            for read in (read_spec, lambda path: read_list(path, f"--vocab.words '{path}'")):
                with pytest.raises(CorpusError, match=f"is no plain text but .*{re.escape(cure)}") as caught:
                    read(path)
                assert name in str(caught.value)
    for name in ("a.ods", "A.XLS"):  # by their names alone
        (tmp_path / name).write_bytes(b"PK")
        with pytest.raises(CorpusError, match="a spreadsheet; save its table as CSV"):
            find_files(str(tmp_path / name))


PAIR, WHOSE = {"pair": ("title", "body")}, {"group_field": "who"}
LACKING = (
    r"3 of 3 rows .* hold no text \(3 rows without the field 'title' or 'body'; the first is .*a.jsonl:1 "
    r"\(it has title, text\)\); set --prepare.pair to the two fields that hold the texts\."
)


@pytest.mark.parametrize(
    ("name", "content", "options", "message"),
    [
        ("a.txt", b"title 1\nbody 1\n", PAIR, "a.txt is plain text, without fields for --prepare.pair 'title,body'"),
        ("package-docs", b"", PAIR, "is plain text, without fields for --prepare.pair"),
        ("a.jsonl", b'{"title": "title 1", "text": "a"}\n' * 3, PAIR, LACKING),
        (
            "a.parquet",
            dump_parquet([{"title": "a", "body": 1}]),
            PAIR,
            "'body' of .* holds int64, not text; set --prepare.p",
        ),
        ("a.csv", b"title,text\na,b\n", PAIR, r"no column 'body' \(it has title, text\); set --prepare.pair"),
        ("a.txt", b"a line\nanother line\n", WHOSE, "is plain text, without fields for --prepare.group_field 'who'"),
        ("a.csv", b"id,text\na,a note\n", WHOSE, "has no column 'who' .*; set --prepare.group_field"),
    ],
)
def test_a_file_without_the_fields_that_are_asked_for_is_one_sentence(
    name: str, content: bytes, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CorpusError, match=message):
        check_corpus(name if not content else str(tmp_path / name), PrepareConfig(**options))


def test_a_field_that_holds_a_list_or_is_within_an_object_is_named_with_what_takes_it_out(tmp_path: Path) -> None:
    path, prepare = tmp_path / "a.jsonl", PrepareConfig()
    for num_rows, row, message in (
        (9, '{"text": ["a", "b"]}', r"9 rows with a list as 'text'; .*; run jq -c '.\[\"text\"\] \|= join\(\" \"\)'"),
        (1, '{"text": ["a", "b"], "id": [1, 2]}', "1 row with a list as 'text'; .*; if its lists are columns, run jq"),
        (
            9,
            '{"id": 1, "doc": {"text": "a"}}',
            r"9 rows with 'text' within another object; .*\(it is in doc\)\); run jq",
        ),
        (9, '{"doc": {"body": {"text": "a"}}}', r"'text' within another object; .*\(it is in doc.body\)\); run jq"),
        (1, '{"text": "a"},', r"1 row that is no JSON; the first is .*:1 \(column 14: Extra data\)\); mend these rows"),
    ):
        path.write_text(f"{row}\n" * num_rows)
        with pytest.raises(CorpusError, match=message):
            read_spec(path)[1].require_text(str(path), 0, prepare)


def test_what_was_understood_of_tables_is_told_in_a_line_for_all_tasks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for i in range(3):
        (tmp_path / f"{i}.csv").write_text(f'text\n"a \\"b\\" {i}"\n{"a row of a table that fills a task" * 40}\n')
    documents, dropped = read_spec(tmp_path, shard_bytes=1024)
    assert documents[::2] == ['a "b" 0', 'a "b" 1', 'a "b" 2']
    dropped.require_text(str(tmp_path), 6, PrepareConfig())
    assert re.fullmatch(r"note: in 3 tables a backslash .*; the first is .*0.csv, line 2.\n", capsys.readouterr().err)


def test_a_share_of_lines_that_are_not_utf8_is_another_encoding_and_a_stray_one_is_not(tmp_path: Path) -> None:
    good, bad = b"a line that is long enough\n\n", b"gro\xdf und lang genug, Zeile\n"
    (tmp_path / "a.txt").write_bytes(good * 95 + bad * 5)
    assert read_spec(tmp_path / "a.txt")[1].counts["bad_utf8"] == 5
    (tmp_path / "a.txt").write_bytes(good * 94 + bad * 6)
    for spec in (tmp_path / "a.txt", tmp_path):
        with pytest.raises(CorpusError, match=r"6 of 100 rows of .*a.txt are not UTF-8 .* FILE > NEW to take damaged"):
            read_spec(spec)
        (tmp_path / "b.txt").write_bytes(good * 900)  # the others do not make it better
    (tmp_path / "a.txt").unlink()
    for i in range(40):  # of a file each
        (tmp_path / f"c{i}.txt").write_bytes(bad if i < 3 else good)
    dropped = read_spec(tmp_path, document="file", shard_bytes=4096)[1]
    with pytest.raises(CorpusError, match=r"3 of 40 rows of --corpus 'c' are not UTF-8 \(the first is .*c0.txt\); the"):
        dropped.require_text("c", 37, PrepareConfig())


def test_csv_is_read_by_columns(tmp_path: Path) -> None:
    """Quoted line breaks, a cell of 300,000 characters, a byte that is not UTF-8, an empty cell, a row too wide."""
    long = "x" * 300_000
    content = f'id,text\n1,"two\nlines, ""quoted"""\n2,{long}\n3,b\xff\n4,\n5,\xfc,more\n6,last\n'.encode("latin-1")
    (tmp_path / "a.csv").write_bytes(b"\xef\xbb\xbf" + content)
    (tmp_path / "b.csv.gz").write_bytes(gzip.compress(content))
    for name in ("a.csv", "b.csv.gz"):
        documents, dropped = read_spec(tmp_path / name)
        assert documents == ['two lines, "quoted"', long, "last"], name
        assert dropped.counts == {"bad_utf8": 1, "empty": 1, "bad_csv": 1}
        assert dropped.places == {
            "bad_utf8": f"{tmp_path / name}, row 3",
            "empty": f"{tmp_path / name}, row 4",
            "bad_csv": f"{tmp_path / name}, row 5 (3 of 2 columns)",
        }
    assert read_spec(tmp_path / "a.csv", field="id")[0] == ["1", "2", "3", "4", "6"]


def test_a_column_may_have_a_name_and_text_of_any_script(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("番号,本文\n1,漢字 äöü\n", encoding="utf-8")
    assert read_spec(tmp_path / "a.csv", field="本文")[0] == ["漢字 äöü"]


def test_other_columns_of_text(tmp_path: Path) -> None:
    texts = pa.array(["first", None, "third"])
    for column in (texts.dictionary_encode(), texts.cast(pa.string_view())):
        table = pa.table({"text": column})
        write_arrow(tmp_path / "a.arrow", table)
        documents, dropped = read_spec(tmp_path / "a.arrow")
        assert documents == ["first", "third"] and dropped.counts == {"null": 1}


def test_bytes_of_utf8_are_a_text_where_that_column_is_asked_for(tmp_path: Path) -> None:
    column = pa.array([b"first", None, b"b\xff", b"last"])
    for number, kind in enumerate((pa.binary(), pa.large_binary())):
        write_arrow(tmp_path / f"{number}.arrow", pa.table({"text": column.cast(kind), "image": column.cast(kind)}))
        documents, dropped = read_spec(tmp_path / f"{number}.arrow")
        assert documents == ["first", "last"] and dropped.counts == {"null": 1, "bad_utf8": 1}


def test_lines_that_seem_to_be_rows_are_read_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files.say.cache_clear()
    log, table = '{"level": "info", "said": "a text of some length"}\n', "a name\ta text of some length\n"
    for i in range(2):
        (tmp_path / f"{i}.log").write_text(log * 9)
        (tmp_path / f"{i}.out").write_text(f"# a comment\n{table * 9}")
    (tmp_path / "reviews.txt").write_text('id,review\n1,"a text, of some length"\n2,"another\none"\n3,more\n')
    documents, dropped = read_spec(tmp_path)
    assert documents.count(log.strip()) == 18 and documents.count(table.strip().replace("\t", " ")) == 18
    dropped.require_text(str(tmp_path), len(documents), PrepareConfig())
    told = "in {} files each line {}, and is read whole, as the file's name says; to read one of {}; the first is {}."
    assert capsys.readouterr().err.splitlines() == [
        f"note: {line}"
        for line in (
            told.format(2, "is an object of JSON", "its fields name it .jsonl", tmp_path / "0.log"),
            told.format(3, "has columns", "them name it .tsv or .csv", tmp_path / "0.out"),
        )
    ]


def test_text_that_only_begins_like_rows_is_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files.say.cache_clear()
    for text in (
        '{"a" is a set, and this a text.\n',
        "[[File:x.png]] and a text\n",
        "[1] A reference, with words\n",
        '"Quoted," she said, "and more."\n',
        "Hello, world\nand then, more\nof it, still\n",
        "text\nand more of it\nand more\n",
        "a\tb\nand no tab\nhere\n",
    ):
        (tmp_path / "a.txt").write_text(text)
        documents, dropped = read_spec(tmp_path)
        dropped.require_text(str(tmp_path), len(documents), PrepareConfig())
        assert documents == [" ".join(line.split()) for line in text.splitlines()]
    assert not capsys.readouterr().err


def test_a_header_says_what_parts_its_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, content, separator in (
        ("a.csv", '"id";"text"\n1;"one; ""two""\nthree"\n', ";"),
        ("b.csv", 'id\ttext\n1\tone; "two" three\n', "\t"),
        ("c.csv.gz", 'id|text\n1|one; "two" three\n', "|"),
        ("d.tsv", 'id,text\n1,"one; ""two"" three"\n', ","),
    ):
        files.say.cache_clear()
        data = content.encode()
        (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
        documents, dropped = read_spec(tmp_path / name)
        assert documents == ['one; "two" three'], name
        dropped.require_text(name, 1, PrepareConfig())
        told = f"note: in 1 table columns are parted by {separator!r}, as the first line shows; the first is "
        assert capsys.readouterr().err == f"{told}{tmp_path / name}, line 1.\n"
    for content in ("text\none; two\n", "a text; another\n1;2\n" * 9):  # one column, and a text for a header
        (tmp_path / "e.csv").write_text(content)
        if content.startswith("text"):
            assert read_spec(tmp_path / "e.csv")[0] == ["one; two"]


def test_a_json_row_above_the_bound_is_one_loss(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    for long in ("y" * 1000, 10**1000, "x" + " " * 1000, "\xe9" * 500):
        rows = [json.dumps({"text": text}, ensure_ascii=False) for text in ("first", long, "last")]
        path.write_text("\n".join(rows), encoding="utf-8")
        documents, dropped = read_spec(path, max_document_chars=50)
        assert documents == ["first", "last"] and dropped.counts == {"too_long": 1}
        assert dropped.places == {"too_long": f"{path}:2"}


@pytest.mark.parametrize("document", ["line", "blank_line"])
def test_places_lead_to_the_line_in_every_range(tmp_path: Path, document: str) -> None:
    """The first bad line is told by its number, beyond the first range from that range's first byte on."""
    path = tmp_path / "text.txt"
    lines = [b"a line of some length, number %d\n\n" % i for i in range(400)]
    lines[350:] = [b"bad \xff line\n\n"] * 50
    path.write_bytes(b"".join(lines))
    resolved = resolve_sources(str(path), PrepareConfig(document=document, shard_bytes=1024))
    assert len(resolved.tasks) > 5
    dropped = read_texts(resolved, PrepareConfig(document=document, min_document_chars=1))[1]
    place = dropped.places["bad_utf8"]
    found = re.fullmatch(re.escape(str(path)) + r", line (\d+) from byte ([\d,]+) on", place)
    assert found is not None
    number, start = int(found[1]), int(found[2].replace(",", ""))
    whole = path.read_bytes()
    first = start if whole[start - 1 : start] == b"\n" else whole.index(b"\n", start) + 1  # lines that begin there
    assert whole[first:].split(b"\n")[number - 1] == b"bad \xff line" and whole.count(b"bad", 0, first) == 0


def test_a_saved_dataset_stays_in_its_folder(tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_text("A secret of the machine.\n" * 9)
    (tmp_path / "state.json").write_text('{"_data_files": [{"filename": "secret.txt"}]}')
    folder = tmp_path / "saved"
    datasets.Dataset.from_dict({"text": [SENTENCE] * 3}).save_to_disk(folder)
    assert len(read_spec(folder)[0]) == 3
    (folder / "linked.txt").symlink_to("../secret.txt")
    (folder / "train").symlink_to(tmp_path)

    def name_file(name: object) -> str:
        return json.dumps({"_data_files": [{"filename": name}]})

    for file, content, message in (
        ("state.json", name_file("../secret.txt"), "names '../secret.txt', which is outside of"),
        ("state.json", name_file("/etc/hostname"), "names '/etc/hostname', which is outside of"),
        ("state.json", name_file("a/../../secret.txt"), "which is outside of"),
        ("state.json", name_file(""), "which is outside of"),
        ("state.json", name_file("linked.txt"), "names 'linked.txt', which is outside of"),
        ("state.json", name_file(7), "state.json is damaged"),
        ("state.json", name_file("missing.arrow"), "includes .*missing.arrow, which does not exist"),
        ("state.json", '{"_data', "state.json is no JSON"),
        ("state.json", '{"_data_files": []}', "names no file"),
        ("dataset_dict.json", '{"splits": ["train"]}', "names 'secret.txt', which is outside of"),
        ("dataset_dict.json", "[]", "dataset_dict.json is damaged"),
    ):
        (folder / file).write_text(content)
        with pytest.raises(CorpusError, match=message):
            read_spec(folder)


def test_what_is_no_regular_file_is_refused_and_never_waited_for(tmp_path: Path) -> None:
    (tmp_path / "good.txt").write_text(SENTENCE)
    for name, make, message in (
        ("pipe", os.mkfifo, "is no regular file"),
        ("broken", lambda path: path.symlink_to("nowhere"), "is a link to nothing"),
        ("device", lambda path: path.symlink_to("/dev/zero"), "is no regular file"),
        ("loop", lambda path: path.symlink_to(path), "is a link to nothing|cannot be reached"),
    ):
        path = tmp_path / name
        make(path)
        for spec in (path, tmp_path, f"{tmp_path}/*"):
            with pytest.raises(CorpusError, match=message):
                find_files(str(spec))
        path.unlink()
    assert len(find_files(str(tmp_path))[0]) == 1


def test_a_name_that_is_not_utf8_is_told(tmp_path: Path) -> None:
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.txt")).write_text(SENTENCE)
    for spec in (tmp_path, f"{tmp_path}/*.txt"):
        with pytest.raises(CorpusError, match=r"includes /\S+/caf\\xe9\.txt, whose name is not UTF-8; rename it\.$"):
            find_files(str(spec))


def test_a_missing_folder_is_no_dataset_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CorpusError, match=r"'a/b' names no file; .*; a dataset of the hub is hf://a/b"):
        find_files("a/b")
    for spec, message in (
        ("hf://a/b", "could not be fetched as a dataset with a train split"),
        ("hf://a/b@main", "could not be fetched as a dataset with a train split"),
        ("hf://a/b/c", "names no dataset"),
    ):
        with pytest.raises(CorpusError, match=message) as caught:
            find_files(spec)
        assert "\n" not in str(caught.value) and spec in str(caught.value)
    (tmp_path / "a" / "b").mkdir(parents=True)
    with pytest.raises(CorpusError, match="is also a folder here"):
        find_files("hf://a/b")


def test_commas_of_paths_that_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a.txt", "b.txt", "a, b.txt", "x,y/c.txt", "x,y/d.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"{SENTENCE} {name}")
    monkeypatch.chdir(tmp_path)
    for text, paths in {
        "a.txt,b.txt": ["a.txt", "b.txt"],
        "a, b.txt": ["a, b.txt"],
        " a.txt , a, b.txt ,b.txt,": ["a.txt", "a, b.txt", "b.txt"],
        "x,y/*.txt": ["x,y/*.txt"],
        "b.txt,x,y": ["b.txt", "x,y"],
        "no,such": ["no", "such"],
        f"{tmp_path}/x,y/c.txt,s3://bucket/a,b": [f"{tmp_path}/x,y/c.txt", "s3://bucket/a", "b"],
        "": [],
    }.items():
        assert split_paths(text) == paths, text
    assert [Path(file.path).name for file in find_files("b.txt,x,y/*.txt")[0]] == ["b.txt", "c.txt", "d.txt"]


def test_a_list_of_globs_is_looked_for_once_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not once for every join of them: each may walk through all folders."""
    for name in ("a0.txt", "a1,2.txt"):
        (tmp_path / name).write_text(SENTENCE)
    found = list[object]()
    for module, name in ((glob, "iglob"), (option_files, "walk")):
        original = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, call=original: found.append(args) or call(*args))
    entries = [f"{tmp_path}/**/b{i}*.txt" for i in range(30)]
    assert split_paths(",".join(entries)) == entries
    assert len(found) == 29
    mixed = [f"{tmp_path}/**/a1,*.txt", f"{tmp_path}/a[0,1].txt", entries[0], f"{tmp_path}/a1,2.txt"]
    assert split_paths(",".join(mixed)) == mixed
    found.clear()
    names = [f"{tmp_path}/{'x,' * 40}y.txt", f"{tmp_path}/a[0],1.txt", f"{tmp_path}/a[0,b.txt"]
    for path in names:
        Path(path).write_text(SENTENCE)
    assert split_paths(",".join([*names, *entries])) == [*names, *entries]
    assert len(found) <= 2 * 75  # a glob or two for each comma, however many of them are of one name


def test_entries_are_looked_for_side_by_side_and_told_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"{tmp_path}/{i:02}.txt" for i in reversed(range(40))]
    for name in names:
        Path(name).write_text(SENTENCE)
    together, original = threading.Barrier(4), files._find_files

    def find(entry: str, *, by_names: bool) -> list[SourceFile]:
        together.wait(120)
        return original(entry, by_names=by_names)

    with monkeypatch.context() as patch:
        patch.setattr(files, "_find_files", find)
        assert [file.path for file in find_files(",".join(names))[0]] == names
    for name in (names[7], names[30]):
        Path(name).unlink()
    with pytest.raises(CorpusError, match=f"{names[7]}' names no file"):
        find_files(",".join(names))


def test_a_file_that_is_named_twice_is_read_once(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(f"{SENTENCE} {name}\n")
    (tmp_path / "same.txt").symlink_to("a.txt")
    files, repeated = find_files(f"{tmp_path}/a.txt,{tmp_path}/*.txt")
    assert [Path(file.path).name for file in files] == ["a.txt", "b.txt"]
    assert repeated == [str(tmp_path / "a.txt"), str(tmp_path / "same.txt")]
