"""Inputs: what is a row in every kind of file, and blocks that together are the input, whatever their size."""

from __future__ import annotations

import csv
import gzip
import json
from itertools import product
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from domext_ray.errors import CorpusError
from domext_ray.inference import input_rows
from domext_ray.inference.input_plan import plan_input
from domext_ray.inference.input_rows import FieldNames, InputRow, RowError, check_text
from domext_ray.inference.predictors import PlannedModel
from domext_ray.models.source import open_model
from domext_ray.text.data.folders import say

TEXTS = ["One, two.", "", " spaces ", 'a "quoted" word', "naïve\u2028and \u00a0so", "six", "seven\teight", "last"]
ONE_LINE = [each for each in TEXTS if "\t" not in each]


def write_file(folder: Path, name: str) -> Path:
    """Write TEXTS as a file of a kind; a table of tabs leaves out the text that has one."""
    path = folder / name
    match name:
        case "a.txt":
            path.write_bytes("\r\n".join(TEXTS).encode())
        case "marked.txt":
            path.write_bytes(b"\xef\xbb\xbf" + "\n".join([*TEXTS, ""]).encode())
        case "a.txt.gz":
            path.write_bytes(gzip.compress("\n".join(TEXTS).encode()))
        case "a.jsonl":
            lines = [json.dumps({"text": each, "n": 1}, ensure_ascii=i % 2 == 0) for i, each in enumerate(TEXTS)]
            path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        case "a.csv":
            with path.open("w", newline="", encoding="utf-8") as file:
                csv.writer(file).writerows([["n", "text"], *([i, each] for i, each in enumerate(TEXTS))])
        case "a.tsv":
            path.write_text("".join(["n\ttext\n", *(f"1\t{each}\n" for each in ONE_LINE)]), encoding="utf-8")
        case "a.parquet":
            pq.write_table(pa.table({"n": range(len(TEXTS)), "text": TEXTS}), path, row_group_size=3)
        case "a.arrow":
            table = pa.table({"text": TEXTS})
            with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
                writer.write_table(table, max_chunksize=3)
    return path


def read_all(spec: str, block_rows: int, order: int = 1, **fields: Any) -> list[InputRow]:
    plan = plan_input(spec, FieldNames(**fields), block_rows)
    assert [each.number for each in plan.blocks] == list(range(len(plan.blocks)))
    assert all(each.num_rows == block_rows for each in plan.blocks[:-1])
    reader = plan.make_reader()
    read = {block.number: reader(block) for block in plan.blocks[::order]}
    return [row for number in sorted(read) for row in read[number]]


def test_blocks_are_the_input(tmp_path: Path) -> None:
    for name in "a.txt marked.txt a.txt.gz a.jsonl a.csv a.tsv a.parquet a.arrow".split():
        path = write_file(tmp_path, name)
        texts = ONE_LINE if name == "a.tsv" else TEXTS
        for block_rows, order in product((1, 2, 3, 7, 8, 100), (1, -1)):
            rows = read_all(str(path), block_rows, order)
            assert [each.values["text"] for each in rows] == texts, (name, block_rows, order)
            assert [each.id for each in rows] == [f"{name}:{i}" for i in range(1, len(texts) + 1)]
            assert not any(each.fault for each in rows)


def test_blocks_reach_over_files(tmp_path: Path) -> None:
    for name in ("a.txt", "a.jsonl", "a.parquet"):
        write_file(tmp_path, name)
    for block_rows in (1, 3, 5, 16, 23, 24, 50):
        rows = read_all(str(tmp_path), block_rows, -1)
        assert [each.values["text"] for each in rows] == TEXTS * 3, block_rows  # .jsonl, .parquet, .txt
        assert [rows[0].id, rows[8].id, rows[23].id] == ["a.jsonl:1", "a.parquet:1", "a.txt:8"]


def test_files_of_one_name_are_told_apart(tmp_path: Path) -> None:
    for name in "xy":
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text("one\n")
    assert [each.id for each in read_all(str(tmp_path), 8)] == [f"{tmp_path}/{name}/a.txt:1" for name in "xy"]


def test_a_row_has_its_own_id_and_field(tmp_path: Path) -> None:
    given: tuple[Any, ...] = ("n1", 7, None, True, 8.0, 0.5)
    rows = [{"id": each, "body": body} for each, body in zip(given, "abcdef", strict=True)]
    (tmp_path / "a.jsonl").write_text("\n\n".join(map(json.dumps, rows)))
    found = read_all(str(tmp_path / "a.jsonl"), 2, text="body")
    assert [each.id for each in found] == ["n1", "7", "a.jsonl:5", "a.jsonl:7", "8", "a.jsonl:11"]
    assert [each.values for each in found] == [{"text": each} for each in "abcdef"]


def test_a_field_that_no_row_has_is_told_before_the_rows_are_counted(tmp_path: Path) -> None:
    def refuse(fields: FieldNames, most: int = 2, name: str = "a.jsonl") -> str:
        with pytest.raises(CorpusError) as error:
            plan_input(str(tmp_path / name), fields, most)
        return str(error.value).removeprefix(f"no row of --input {str(tmp_path / name)!r} ")

    rows = [{"id": 1, "body": "a"}, {}, {"id": 2, "body": "b", "naïve": 1}]
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps(each) + "\n" for each in rows))
    assert refuse(FieldNames("bodi")) == "has a field 'bodi' (they have id, body); did you mean body?"
    assert refuse(FieldNames("text"), 3) == "has a field 'text' (they have id, body, naïve); set --field."
    for name in ("naïve", "body"):  # the first one stands below the rows that are looked at, and is escaped
        assert plan_input(str(file), FieldNames(name), 2).num_rows == 3
    qa = PlannedModel(open_model("m"), "qa", "").name_fields("text")
    assert refuse(qa) == "has a field 'question' (they have id, body); give the field that name."
    assert refuse(PlannedModel(open_model("m"), "ner", "").name_fields("bodi")).startswith(
        "has a field 'bodi' (they have id, body)"
    )
    assert refuse(PlannedModel(open_model("m"), "ner", "").name_fields("text")).startswith(
        "has a field 'text' or 'tokens'"
    )
    file.write_text('{"question": "what", "context": "that"}\n{"tokens": ["a"]}\n')
    for family in ("qa", "ner"):
        assert plan_input(str(file), PlannedModel(open_model("m"), family, "").name_fields("text"), 2).num_rows == 2
    (tmp_path / "a.csv").write_text("id,body\n1,a\n")
    csv_says = f"{tmp_path}/a.csv has no column 'bodi' (it has id, body); did you mean body?"
    assert refuse(FieldNames("bodi"), name="a.csv") == csv_says
    assert refuse(qa, name="a.csv").startswith("has a field 'question' (they have id, body); give")
    (tmp_path / "b.jsonl").write_text('{"question": "what", "context": "that"}\n')
    assert plan_input(f"{tmp_path / 'a.csv'},{tmp_path / 'b.jsonl'}", qa, 2).num_rows == 2
    (tmp_path / "bad.jsonl").write_text('{bad\n"bodi"\n')
    assert plan_input(str(tmp_path / "bad.jsonl"), FieldNames("bodi"), 2).num_rows == 2, "rows say what is wrong"


FAULTS = [
    (b"{bad", "is no JSON (column 2: Expecting property name enclosed in double quotes)"),
    (b"[1]", "is no JSON object but list"),
    (b'{"text": "\xff"}', "is not UTF-8 (byte 0xff)"),
    (b"[" * 100_000, "is nested too deeply"),
    (b'{"text": "%s"}' % (b"x" * 2000), "has more than 1,000 bytes"),
    (b'{"text": "a", "id": "\\ud83d"}', "has half a surrogate pair, or bytes that are not UTF-8, in 'id'"),
    (b'{"text": ' + b"9" * 900 + b"e}", "is no JSON (column 910: Expecting ',' delimiter)"),
]


def test_a_malformed_line_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for line, fault in FAULTS:
        monkeypatch.setattr(input_rows, "MAX_ROW_BYTES", 1_000 if "more" in fault else 2**20)
        (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\n' + line + b'\n{"text": "b"}\n')
        rows = read_all(str(tmp_path / "a.jsonl"), 2)
        assert [each.fault for each in rows] == ["", fault, ""]
        assert (rows[1].path, rows[1].line) == (str(tmp_path / "a.jsonl"), 2)


def test_a_table_names_rows_of_another_width(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b'text,n\n"two\nlines",1\nalone\n\n\xff,2\n')
    rows = read_all(str(tmp_path / "a.csv"), 2)
    assert [each.fault for each in rows] == ["", "has 1 columns, the header 2", ""]
    assert rows[0].values["text"] == "two\nlines"
    with pytest.raises(RowError, match="not UTF-8"):
        check_text(rows[2].values)


def test_a_text_of_a_parquet_file_that_is_not_utf8_is_a_fault(tmp_path: Path) -> None:
    raw = pa.array([b"one", b"tw\xff", b"three"])
    table = pa.table({"text": pa.Array.from_buffers(pa.string(), 3, raw.buffers())})
    pq.write_table(table, tmp_path / "a.parquet")
    rows = read_all(str(tmp_path / "a.parquet"), 2)
    assert [each.fault for each in rows] == ["", "is not UTF-8 (byte 0xff)", ""]
    assert [each.values.get("text") for each in rows] == ["one", None, "three"]


def test_what_is_no_text_is_refused() -> None:
    for values, fault in (
        ({}, "has no field 'body'"),
        ({"text": None}, "has null as 'body', which must be text"),
        ({"text": 3}, "has int as 'body', which must be text"),
        ({"text": "\ud83d"}, "has half a surrogate pair, or bytes that are not UTF-8, in 'body'"),
    ):
        with pytest.raises(RowError) as error:
            check_text(values, shown="body")
        assert str(error.value) == fault


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    for name, content, said in (
        ("a.csv", b"body,n\na,1\n", "no column 'text' (it has body, n); set --field."),
        ("a.tsv", b"", "is empty"),
        ("a.gz", b"no gzip", "ends in .gz and is no gzip file"),
        ("a.txt.gz", gzip.compress(b"one\ntwo\n" * 1000, mtime=0)[:-20], "cannot be read to its end"),
        ("a.pdf", b"%PDF-", "which is no plain text but a PDF; run pdftotext"),
        ("a.txt", b"%PDF-", "is no plain text but a PDF"),
        ("a.parquet", b"PAR1 no", "cannot be read to its end"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(CorpusError) as error:
            read_all(str(tmp_path / name), 4)
        assert said in str(error.value) and name in str(error.value)
        assert "--corpus" not in str(error.value)


def test_a_text_file_whose_lines_are_rows_is_refused_or_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    say.cache_clear()
    for content, message in (
        (b'{"id": 1, "text": "a"}\n', "is JSON Lines, and such a file's name must end in .jsonl"),
        (b"id\ttext\n1\ta\n2\tb\n", "begins with the names of columns, 'text' among them; name it .tsv"),
        (b'<?xml version="1.0"?>\n<a/>', "is no plain text but XML"),
    ):
        (tmp_path / "a.txt").write_bytes(content)
        with pytest.raises(CorpusError, match=message):
            plan_input(str(tmp_path / "a.txt"), FieldNames(), 9)
    (tmp_path / "a.txt").write_text("id\tlabel\n1\ta\n2\tb\n")
    assert len(read_all(str(tmp_path / "a.txt"), 2)) == 3
    assert capsys.readouterr().err.startswith("note: in 1 file each line has columns, and is read whole, as the file's")


def test_a_file_that_has_changed_is_refused_and_the_hash_is_of_names_and_content(tmp_path: Path) -> None:
    first = plan_input(str(write_file(tmp_path, "a.txt")), FieldNames(), 3)
    assert first.sha256 == plan_input(str(tmp_path / "*.txt"), FieldNames(), 5).sha256
    (tmp_path / "a.txt").write_text("\n".join(reversed(TEXTS)))
    assert plan_input(str(tmp_path / "a.txt"), FieldNames(), 3).sha256 != first.sha256
    (tmp_path / "a.txt").write_text("one\n")
    with pytest.raises(CorpusError, match="has changed while it was read"):
        first.make_reader()(first.blocks[0])


def test_names_alone_leave_nothing_out(tmp_path: Path) -> None:
    """What a model is tried on is often called test; a README is still no text."""
    for name in ("train.txt", "test.txt", "dev.txt", "README.md"):
        (tmp_path / name).write_text("some words\n")
    plan = plan_input(str(tmp_path), FieldNames(), 10)
    assert plan.names == ("dev.txt", "test.txt", "train.txt")
    (tmp_path / "test.txt").write_text("other words\n")
    with pytest.raises(CorpusError, match="test.txt has changed"):
        plan.require_unchanged()
