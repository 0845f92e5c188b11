"""One reader of rows: what a row is in every kind of file and of writer, and what becomes of one that is none."""

from __future__ import annotations

import csv
import gzip
import io
import json
import random
import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from row_files import write_arrow

from domext_ray.config.pretrain import PrepareConfig
from domext_ray.errors import CorpusError
from domext_ray.families.readers.records import read_json_records
from domext_ray.text.data.files import SourceFile, find_files
from domext_ray.text.data.readers import Row, read_lines, read_rows
from domext_ray.text.data.sources import cut_tasks
from domext_ray.text.data.tables import Forms, tell_forms


def accept(names: Sequence[str], schema: pa.Schema | None) -> None:
    """Any table will do."""


def read(path: Path, fields: Sequence[str] = ("text", "id"), max_bytes: int = 1000) -> list[Row]:
    ((file,), _) = find_files(str(path))
    return list(read_rows(file, fields, accept, max_bytes=max_bytes))


def shorten(row: Row) -> tuple[object, ...]:
    return row.number, row.value if row.value is None or not row.reason else row.reason, row.fault


TABLE = b'\xef\xbb\xbf\r\nid,text\r\n1,"two\r\nlines, ""quoted"""\r\n\r\n2\r\n3,\xff\r\n'
TABLE_ROWS = [
    (1, {"id": "1", "text": 'two\r\nlines, "quoted"'}, ""),
    (2, None, ""),
    (3, "bad_csv", "has 1 columns, the header 2"),
    (4, {"id": "3", "text": "\udcff"}, ""),
]
LINES = b'\xef\xbb\xbf{"text": "a", "n": [1, {"m": null}]}\r\n\n[1]\n{"text": \xff}\n{"n": 1\n"%s"\n%s'
LINES %= (b"x" * 2000, b"[" * 99)
LINES_ROWS = [
    (1, {"text": "a", "n": [1, {"m": None}]}, ""),
    (2, None, ""),
    (3, "no_object", "is no JSON object but list"),
    (4, "bad_utf8", "is not UTF-8 (byte 0xff)"),
    (5, "bad_json", "is no JSON (column 8: Expecting ',' delimiter)"),
    (6, "too_long", "has more than 1,000 bytes"),
    (7, "bad_json", "is no JSON (column 100: Expecting value)"),
]
TEXT = "\ufeffa\u2028b\r\n\n c \x00\n".encode() + b"\xc3\n" + b"y" * 1001
TEXT_ROWS = [
    (1, {"text": "a\u2028b"}, ""),
    (2, {"text": ""}, ""),
    (3, {"text": " c \x00"}, ""),
    (4, "bad_utf8", "is not UTF-8 (byte 0xc3)"),
    (5, "too_long", "has more than 1,000 bytes"),
]


def test_a_bad_row_is_one_bad_row(tmp_path: Path) -> None:
    of_tabs = [(1, {"id": "1", "text": 'two\r\nlines\t "quoted"'}, ""), *TABLE_ROWS[1:]]
    for name, content, rows in (
        ("a.csv", TABLE, TABLE_ROWS),
        ("a.tsv", TABLE.replace(b",", b"\t"), of_tabs),
        ("a.jsonl", LINES, LINES_ROWS),
        ("a.txt", TEXT, TEXT_ROWS),
        ("a", TEXT, TEXT_ROWS),
    ):
        (tmp_path / name).write_bytes(content)
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(content))
        for path in (tmp_path / name, tmp_path / f"{name}.gz"):
            assert [shorten(row) for row in read(path)] == rows, path.name


def test_a_text_of_a_column_that_is_not_utf8_costs_its_row(tmp_path: Path) -> None:
    for kind, binary in ((pa.string(), pa.binary()), (pa.large_string(), pa.large_binary())):
        raw = pa.array([b"first", None, b"s\xffcond", b"third"], binary)
        table = pa.table({"text": pa.Array.from_buffers(kind, 4, raw.buffers()), "n": range(4)})
        pq.write_table(table, tmp_path / "a.parquet", row_group_size=3)
        write_arrow(tmp_path / "a.arrow", table)
        for name in ("a.parquet", "a.arrow"):
            rows = read(tmp_path / name)
            assert [row.value["text"] for row in rows if not row.reason] == ["first", None, "third"]
            assert [(row.number, row.fault) for row in rows if row.reason] == [(3, "is not UTF-8 (byte 0xff)")]


def test_of_columns_only_those_that_are_wanted_are_read(tmp_path: Path) -> None:
    pq.write_table(pa.table({"n": [1, 2], "text": ["a", "b"]}), tmp_path / "a.parquet")
    assert [row.value for row in read(tmp_path / "a.parquet", ("text", "no"))] == [{"text": "a"}, {"text": "b"}]
    assert [row.value for row in read(tmp_path / "a.parquet", ("no",))] == [{}, {}]


def test_a_cell_without_end_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('text\n"' + "open\n" * 1000)
    with pytest.raises(CorpusError, match=r"a\.csv: row 1 \(lines 2 to 202\) has a cell of more than 1,000"):
        read(tmp_path / "a.csv")


class CountedBytes(io.BytesIO):
    """Counts what is read of it."""

    num_read = 0

    def readline(self, size: int | None = -1, /) -> bytes:
        line = super().readline(size)
        self.num_read += len(line)
        return line


@pytest.mark.parametrize("goes_on", [False, True])
def test_ranges_in_one_huge_line_do_not_read_it_again_and_again(goes_on: bool) -> None:
    """The range that it begins in reads it, and each other range no more than itself."""
    content, step = b"first\n" + b"w" * 1_000_000 + b"\nlast\n", 10_000
    stream, found = CountedBytes(content), dict[int, bytes]()
    for start in range(0, len(content), step):
        for _, position, line in read_lines(stream, start, min(start + step, len(content)), 4096, goes_on=goes_on):
            found.setdefault(position, line)
    assert b"".join(found.values()) == content.replace(b"\n", b"")
    assert stream.num_read < (4 if goes_on else 2.1) * len(content)


def test_a_range_begins_at_the_first_line_in_it(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"one\r\ntwo\n\nfour")
    file = SourceFile(str(path), "text", path.stat().st_size)
    for start, texts in ((0, ["one", "two", "", "four"]), (1, ["two", "", "four"]), (5, ["two", "", "four"]), (11, [])):
        rows = list(read_rows(file, (), accept, start=start, max_bytes=99))
        assert [(row.number, row.value["text"]) for row in rows] == list(enumerate(texts, 1))


@pytest.mark.parametrize("dictionary", [True, False])
def test_ranges_of_a_table_read_each_row_group_once(dictionary: bool, tmp_path: Path) -> None:
    """A range reads the groups that begin in it, and finds them without reading others."""
    path, texts = tmp_path / "a.parquet", [f"row {number}" for number in range(1000)]
    pq.write_table(pa.table({"n": range(1000), "text": texts}), path, row_group_size=37, use_dictionary=dictionary)
    file = SourceFile(str(path), "parquet", path.stat().st_size)
    for step in (97, 1000, 8192, file.size):
        ranges = [(start, min(start + step, file.size)) for start in range(0, file.size, step)]
        found = [[*read_rows(file, ("text",), accept, start=start, end=end, max_bytes=99)] for start, end in ranges]
        assert [row.value["text"] for own in found for row in own] == texts
        assert all([row.number for row in own] == [*range(1, len(own) + 1)] for own in found)
    assert sum(map(bool, found)) == 1
    tasks = [*cut_tasks([file], PrepareConfig(shard_bytes=4096), ("parquet",))]
    assert len(tasks) == -(-file.size // 4096) and [task.end for task in tasks][-1] == file.size
    assert [task.end for task in cut_tasks([file], PrepareConfig(shard_bytes=4096))] == [-1], "not of a sample"


STRAY = "has a quote that is neither doubled nor the end of its cell"
OPEN = "ends inside a quote that opens in"
FILLER = "".join(f"{i},{'a row that is of the same cells in each form ' * 100}\n" for i in range(300))
SLASHES = "".join(f'{i},an inch \\" outside of quotes {"and more " * 500}\n' for i in range(300))
# Name, content, the texts of rows, and what is told.
READ: list[tuple[str, str, list[str], str]] = [
    ("doubled.csv", 'id,text\n1,"a ""b"", c"\n2,5" pipe\n', ['a "b", c', '5" pipe'], ""),
    ("spark.csv", 'id,text\n1,"a \\"b, c\\" d"\n2,e\n', ['a "b, c" d', "e"], "escaped"),
    ("spark_ends.csv", 'id,text\n1,"\\"a\\""\n2,"5\\", b"\n3,""\n', ['"a"', '5", b', ""], "escaped"),
    ("spark_lines.csv", 'id,text\n1,"a \\"b\nc, \\"d\\""\n2,e\n', ['a "b\nc, "d"', "e"], "escaped"),
    (
        "spark_slash.csv",
        'id,text\n1,"C:\\\\a \\"b\\\\"\n2,\\\\s\\t\n3,"\\n,"\n',
        ['C:\\a "b\\', "\\\\s\\t", "\\n,"],
        "escaped",
    ),
    ("spark_one.csv", 'text\n"a \\"b\\" c"\nd\n"e, \\"f\\""\n', ['a "b" c', "d", 'e, "f"'], "escaped"),
    ("spark_inch.csv", 'text\n"5\\", long"\nb\n', ['5", long', "b"], "escaped"),
    ("folders.csv", 'id,text\n1,"C:\\a, b\\"\n2,"c, d"\n3,e\n', ["C:\\a, b\\", "c, d", "e"], ""),
    ("folder_one.csv", 'text\n"C:\\a\\"\nb\n', ["C:\\a\\", "b"], ""),
    ("latex.csv", 'id,text\n1,"Schr\\""odinger, x"\n2,b\n', ['Schr\\"odinger, x', "b"], ""),
    ("bare.csv", 'id,text\n1,say \\"a\\" now\n2,b\n', ['say \\"a\\" now', "b"], ""),
    ("semicolons.csv", 'sep=;\r\nid;text\r\n1;"a;b"\r\n', ["a;b"], "separator"),
    ("excel.csv", '"sep=,"\nid,text\n1,a\n', ["a"], "separator"),
    ("spaced.csv", 'id, text\n1, "a, b"\n2, c\n', ["a, b", "c"], "spaced"),
    ("names.csv", " id ,text \n1,a \n", ["a "], ""),
    ("mac.csv", 'id,text\r1,a\r2,"b\rc"\r', ["a", "b\rc"], ""),
    ("zero.csv", "id,text\n1,a\u200bb\u2060c\n", ["a b\u2060c"], ""),
    ("pandas.tsv", 'id\ttext\n1\t"a ""b"""\n2\t"two\nlines"\n3\tc\n', ['a "b"', "two\nlines", "c"], "quoted"),
    ("lines.tsv", 'id\ttext\n1\tc\n2\t"two\nlines"\n', ["c", "two\nlines"], "quoted"),
    ("tabs.tsv", 'id\ttext\n1\t"a\tb"\n2\tc\n', ["a\tb", "c"], "quoted"),
    ("all.tsv", '"id"\t"text"\n"1"\t"a"\n', ["a"], "quoted"),
    ("one.tsv", 'text\n"a ""b"""\nc\n', ['a "b"', "c"], "quoted"),
    ("r.tsv", '"id"\t"text"\n"1"\t"a \\"b\\" c"\n', ['a "b" c'], "escaped"),
    (
        "glue.tsv",
        'id\ttext\n1\t"Yes," he said\n2\t"all of it"\n3\tx ""y""\r\n',
        ['"Yes," he said', '"all of it"', 'x ""y""'],
        "",
    ),
    ("within.tsv", 'id\ttext\n1\t"all of it"\n2\ta\rb\n', ['"all of it"', "a\rb"], ""),
    ("marks.tsv", 'text\tid\n"\t1\na\t2\n"\t3\n', ['"', "a", '"'], ""),
    ("both.tsv", 'id\ttext\n1\t"a ""b"""\n2\t"c" d\n', ['"a ""b"""', '"c" d'], "plain"),
]
# Name, content, and what the sentence says.
UNCERTAIN: list[tuple[str, str, str]] = [
    ("open.csv", 'id,text\n1,a\n\n2,"b\n3,c\n4,d\n', f"{OPEN} row 3 (line 4); "),
    ("header.csv", '"id,text\n1,a\n', f"{OPEN} the first row (line 1); "),
    ("open_spark.csv", 'id,text\n1,"a \\"b\\" c"\n2,"d \\"e\n3,f\n', f"{OPEN} row 2 (line 3); "),
    ("open.tsv", 'id\ttext\n1\t"a ""b"""\n2\t"c\n3\td\n', f"{OPEN} row 2 (line 3); "),
    ("swallowed.csv", 'id,text\n1,"a\n2,b\n3,"c"\n4,d\n', f": row 1 (lines 2 to 4) {STRAY}"),
    ("stray_header.csv", '"id"x,text\n1,a\n', f": the first row (line 1) {STRAY}"),
    (
        "mixed.csv",
        'id,text\n1,"C:\\a\\"\n2,"a \\"b\\" c"\n3,x\n',
        ": row 1 (line 2) has a backslash before a quote, which ",
    ),
    ("late.csv", f'id,text\n1,"a \\"b\\" c"\n{FILLER}2,"a "b" c"\n', f": row 302 (line 303) {STRAY}"),
    ("late.tsv", f'id,text\n1,"a ""b"""\n{FILLER}2,"a" b\n'.replace(",", "\t"), f": row 302 (line 303) {STRAY}"),
    ("folders_late.csv", f'text\n"C:\\a\\"\n{FILLER.replace(",", "")}"a \\"b\\""\n', f": row 302 (line 303) {STRAY}"),
    (
        "break.tsv",
        'id\ttext\n1\t"a ""b"""\n2\tc\n' + FILLER.replace(",", "\t") + "3\td\re\n",
        ": row 303 (line 304) has a CR outside of quotes",
    ),
    (
        "one_lines.tsv",
        'text\nb\n"two\nlines"\n',
        ": row 2 (line 3) begins with a quote, which is of its text or around ",
    ),
]


def read_forms(path: Path, longest: int = 2**20) -> tuple[list[Any], Forms]:
    """Texts, or what is wrong with their rows, and what is told of their forms."""
    ((file,), _), forms = find_files(str(path)), Forms()
    rows = read_rows(file, ("text",), lambda *_: None, max_bytes=longest, forms=forms)
    return [row.fault or (row.value and row.value["text"]) for row in rows], forms


def test_a_table_is_read_as_its_writer_meant_it(tmp_path: Path) -> None:
    for name, content, texts, form in READ:
        for path, written in (
            (tmp_path / name, content.encode()),
            (tmp_path / f"{name}.gz", gzip.compress(content.encode())),
        ):
            path.write_bytes(written)
            found, forms = read_forms(path)
            assert found == texts and [*forms] == [form] * bool(form), (path.name, found, forms)


def test_what_is_uncertain_is_named_with_its_row(tmp_path: Path) -> None:
    for name, content, says in UNCERTAIN:
        path = tmp_path / name
        path.write_text(content)
        with pytest.raises(CorpusError) as caught:
            read_forms(path)
        assert str(path) + " " * (says[0] != ":") + says in str(caught.value), name


def test_a_form_may_show_itself_late(tmp_path: Path) -> None:
    """Also where rows before it have a backslash and a quote that are the same in each form."""
    (tmp_path / "a.csv").write_text(f'id,text\n{FILLER}{SLASHES}1,"a \\"b, c\\" d"\n{FILLER}2,"\\"e\\""\n')
    texts, forms = read_forms(tmp_path / "a.csv")
    assert len(texts) == 902 and texts[600] == 'a "b, c" d' and texts[-1] == '"e"'
    assert forms == {"escaped": [1, f"{tmp_path}/a.csv, line 602"]}


@pytest.mark.parametrize("number", [9, pytest.param(9000, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("cell", "text", "form"),
    [('"C:\\dir\\"', "C:\\dir\\", None), ('"\\","', '",', "escaped")],
    ids=["folder", "escaped"],
)
def test_one_cell_shows_the_form_of_a_table_of_any_length(
    number: int, cell: str, text: str, form: str | None, tmp_path: Path
) -> None:
    """In the other form it would stay open to the end, which is past what is looked at."""
    filler = [f"{i},{'a row of plain cells ' * 60}" for i in range(number)]
    (tmp_path / "a.csv").write_text("\n".join(["id,text", f"0,{cell}", *filler, ""]))
    texts, forms = read_forms(tmp_path / "a.csv", 2**26)
    assert texts[0] == text and len(texts) == number + 1
    assert forms == ({form: [1, f"{tmp_path}/a.csv, line 2"]} if form else {})


@pytest.mark.parametrize("number", [9, pytest.param(9000, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("cell", "form"),
    [('"Hello', None), ('"two' + "\nlines" * 200_000 + '"', "quoted")],
    ids=["text", "around a long cell"],
)
def test_a_quote_of_a_tsv_is_text_unless_it_is_closed(number: int, cell: str, form: str | None, tmp_path: Path) -> None:
    """Though a line further on would be no row."""
    lines = [f"{i}\t{'a row of plain cells ' * 60}" for i in range(number)]
    (tmp_path / "a.tsv").write_text("\n".join(["id\ttext", f"0\t{cell}", "a line without a tab", *lines, "9\tend", ""]))
    texts, forms = read_forms(tmp_path / "a.tsv", 2**26)
    assert texts[0] == cell.strip('"' if form else "") and len(texts) == number + 3
    assert texts[1] == "has 1 columns, the header 2" and texts[-1] == "end"
    assert [*forms] == [form] * bool(form)


def test_a_stray_quote_costs_its_row_where_that_ends_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('id,text\n1,"a "b" c"\n2,d\n')
    assert read_forms(tmp_path / "a.csv")[0] == [STRAY, "d"]


def test_what_writers_write_comes_back(tmp_path: Path) -> None:
    """Texts of quotes, backslashes, separators and line breaks, as Spark, R and pandas write them."""
    draw = random.Random(7)
    parts = ['"', "\\", ",", "\n", "\t", " said ", "5", "Größe", "x"]
    texts = ["".join(draw.choices(parts, k=draw.randrange(1, 9))) + "." for _ in range(300)] + ['a "b" c', '\\"', "end"]

    def write(name: str, separator: str, **form: Any) -> Path:
        path = tmp_path / name
        with path.open("w", newline="") as file:
            csv.writer(file, delimiter=separator, lineterminator="\n", **form).writerows(
                [["id", "text"], *enumerate(texts)]
            )
        return path

    pandas = write("pandas.tsv", "\t")
    spark = write("spark.csv", ",", doublequote=False, escapechar="\\", quoting=csv.QUOTE_NONNUMERIC)
    for path in (pandas, spark):
        assert read_forms(path)[0] == texts, path.name


def test_a_form_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    forms: Forms = {"escaped": [2, "made.csv, line 7"]}
    tell_forms(forms)
    tell_forms(forms)
    told = 'note: in 2 tables a backslash escapes a quote, as in Spark\'s tables, so \\" is read as "; the first is '
    assert capsys.readouterr().err == told + "made.csv, line 7.\n"


JSON_ROWS = [{"id": i, "text": f"Größe {i}"} for i in range(12)]
TEXTS = [row["text"] for row in JSON_ROWS]
BIOC = [
    {"id": i, "infons": {}, "passages": [{"offset": 0, "infons": {}, "text": text, "annotations": []}]}
    for i, text in enumerate(TEXTS)
]
JOIN = '{id, "text": ([.passages[].text] | join("\\n"))}'
OF_PANDAS = pd.DataFrame(JSON_ROWS)
COLUMNS = "jq -c '(.[keys_unsorted[0]] | keys_unsorted[]) as $i | map_values(.[$i])'"
SPLIT = ".columns as $c | .data[] | . as $row | [range($c | length) | {key: $c[.], value: $row[.]}] | from_entries"
FORMS: dict[str, tuple[str, str, str]] = {
    "columns": (OF_PANDAS.to_json(), "an object of columns, as pandas writes them", COLUMNS),
    "indented": (OF_PANDAS.to_json(indent=1), "an object of columns, as pandas writes them", COLUMNS),
    "lists": (json.dumps(OF_PANDAS.to_dict(orient="list")), "an object of columns", COLUMNS),
    "indented lists": (json.dumps({"n": [1, 2], "text": ["a b", "c"]}, indent=1), "an object of columns", COLUMNS),
    "long lists": (json.dumps({"id": [*range(90)], "text": ["größe " * 99] * 90}), "an object of columns", COLUMNS),
    "Chinese": (json.dumps({"text": ["热" * 41] * 2, "id": [1, 2]}), "an object of columns", COLUMNS),
    "collection": (
        json.dumps({"source": "x", "documents": BIOC}),
        "a collection of BioC",
        f"jq -c '.documents[] | {JOIN}'",
    ),
    "collections": (
        json.dumps([{"source": "x", "documents": [each]} for each in BIOC], indent=1),
        "an array of BioC",
        f"jq -c '.[].documents[] | {JOIN}'",
    ),
    "documents": ("\n".join(map(json.dumps, BIOC)), "documents of BioC", f"jq -c '{JOIN}'"),
    "split": (
        OF_PANDAS.to_json(orient="split"),
        "an object of columns and data, as pandas splits them",
        f"jq -c '{SPLIT}'",
    ),
    "table": (
        OF_PANDAS.to_json(orient="table"),
        "an object of a schema and data, as pandas writes them",
        "jq -c '.data[]'",
    ),
    "index": (OF_PANDAS.to_json(orient="index"), "an object of objects", "jq -c '.[]'"),
    "long": (OF_PANDAS.to_json(orient="index", indent=1), "an object of objects by number", "jq -c '.[]'"),
    "ids": (json.dumps({f"n{row['id']}": row for row in JSON_ROWS}), "an object of objects", "jq -c '.[]'"),
    "records": (OF_PANDAS.to_json(orient="records"), "an array", "jq -c '.[]'"),
    "values": (OF_PANDAS.to_json(orient="values"), "an array of arrays", "jq -c '.[] | {\"text\": .[1]}'"),
    "texts": (json.dumps(TEXTS, indent=1), "an array of texts", "jq -c '.[] | {\"text\": .}'"),
    "line": (f"\ufeff \n{json.dumps(TEXTS)}", "an array of texts", "jq -c '.[] | {\"text\": .}'"),
    "text_lines": ("\n".join(map(json.dumps, TEXTS)), "a text a line", "jq -c '{\"text\": .}'"),
    "rows": (
        "\n".join(json.dumps([*row.values()]) for row in JSON_ROWS),
        "an array a line",
        "jq -c '{\"text\": .[1]}'",
    ),
    "labels": ("\n".join(json.dumps([text, "x"]) for text in TEXTS), "an array a line", "jq -c '{\"text\": .[0]}'"),
    "objects": ("\n".join(json.dumps(row, indent=1) for row in JSON_ROWS), "an object over several lines", "jq -c ."),
}
WRAPPED: dict[str, dict[str, Any]] = {
    "data": {"data": JSON_ROWS},
    "version": {"version": 1.5, "info": {"by": ["me"], "on": None}, "data": JSON_ROWS},
    "rows": {"rows": JSON_ROWS, "next": ""},
    "Größen": {"Größen": JSON_ROWS},
    "my rows": {"my rows": JSON_ROWS * 200},
    "train": {"train": JSON_ROWS, "dev": JSON_ROWS[:9]},
    "longest": {"features": [{"name": "text"}], "longest": JSON_ROWS},
}
LONG = "z" * 70_000
TAKEN = {  # first rows that look like another form
    "meta": '{"meta": {"0": {"a": 1}}, "text": "a"}\n{"text": "b"}\n',
    "long_meta": json.dumps({"meta": {"0": 1}, "text": "a", "rest": LONG}) + "\n",
    "passages": json.dumps({"text": "a", "infons": {}, "passages": [{"text": LONG}]}) + "\n",
    "list_first": '["a"]\n{"text": "b"}\n{"text": "c"}\n',
    "texts_first": '"a"\n{"text": "b"}\n',
    "lists": '{"text": ["a", "b"]}\n{"text": ["c"]}\n',
    "sentences": '{"text": ["a b", "c d"], "label": ["x"]}',
    "sentences alone": '{"text": ["a b", "c d"]}',
    "long sentences": json.dumps({"meta": {"a": 1}, "text": ["a b " * 999] * 90}),
    "tokens": '{"tokens": ["a", "b"], "tags": ["O", "O"]}',
    "one": '{"text": "a", "id": [1]}',
    "other": '{"body": "a", "spans": [1, 2]}\n{"body": "b", "spans": []}\n',
    "numbers": f'{{"text": "a", "n": {"9" * 9000}}}\n',
    "nothing": "[]\n",
}


def read_json(path: Path) -> list[object]:
    ((file,), _) = find_files(str(path))
    return [row.value for row in read_rows(file, ("text", "id"), lambda *_: None, max_bytes=2**20, only_texts=True)]


def test_each_form_is_named_with_what_makes_rows_of_it(tmp_path: Path) -> None:
    for name, (content, what, command) in FORMS.items():
        path = tmp_path / f"{name}.json"
        path.write_text(content, encoding="utf-8")
        with pytest.raises(CorpusError) as caught:
            read_json(path)
        says = f"{path} is not JSON Lines, an object a line, but {what}; run {command} FILE > NEW.jsonl and give that."
        assert str(caught.value) == says, name


@pytest.mark.skipif(shutil.which("jq") is None, reason="jq is not installed")
def test_jq_makes_the_rows_of_it(tmp_path: Path) -> None:
    for name in ("columns", "split", "values", "rows", "collection", "collections", "documents"):
        content, _, command = FORMS[name]
        made = subprocess.run(shlex.split(command), input=content, text=True, capture_output=True, check=True)
        (tmp_path / "rows.jsonl").write_text(made.stdout, encoding="utf-8")
        assert [row["text"] for row in read_json(tmp_path / "rows.jsonl") if isinstance(row, dict)] == TEXTS, command


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("name", WRAPPED)
def test_rows_below_a_key_are_refused_with_the_program_that_takes_them_out(
    name: str, indent: int | None, tmp_path: Path
) -> None:
    """At every door alike; where there is no jq, its program, `.KEY[]`, is carried out here."""
    document, key = tmp_path / "a.json", "data" if name == "version" else name
    rows: Any = WRAPPED[name][key]
    document.write_text(json.dumps(WRAPPED[name], indent=indent, ensure_ascii=False), encoding="utf-8")
    says = set[str]()
    for read in (read_json, lambda path: list(read_json_records(path, ["text", "label"]))):
        with pytest.raises(CorpusError) as caught:
            read(document)
        says.add(str(caught.value))
    (said,) = says
    whole = "train.jsonl, so for each other split, and give their folder"
    given = whole if key == "train" else "NEW.jsonl and give that"
    found = re.fullmatch(rf".* but an object with an array in (.*); run (jq .*) FILE > {given}\.", said)
    assert found is not None and found[1] == key
    program = shlex.split(found[2])[2]
    assert program == f'."{key}"[]' if key in ("Größen", "my rows") else f".{key}[]"
    lines = [json.dumps(row) for row in rows]
    if shutil.which("jq"):
        call = ["jq", "-c", program, str(document)]
        lines = subprocess.run(call, text=True, capture_output=True, check=True).stdout.splitlines()
    (tmp_path / "rows.jsonl").write_text("\n".join(lines), encoding="utf-8")
    assert read_json(tmp_path / "rows.jsonl") == rows


def test_the_program_for_a_gzipped_file_reads_it_through_gzip(tmp_path: Path) -> None:
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(json.dumps({"data": JSON_ROWS}).encode()))
    with pytest.raises(CorpusError, match=r"run gunzip -c FILE \| jq -c '\.data\[\]' > NEW\.jsonl and give that\."):
        read_json(tmp_path / "a.json.gz")


def test_rows_that_only_look_like_another_form_are_read(tmp_path: Path) -> None:
    for name, content in TAKEN.items():
        (tmp_path / f"{name}.jsonl").write_text(content)
        assert len(read_json(tmp_path / f"{name}.jsonl")) == content.count("\n") + (not content.endswith("\n")), name


def test_a_field_of_another_name_is_in_the_program(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('["a", "b"]')
    ((file,), _) = find_files(str(tmp_path / "a.json"))
    with pytest.raises(CorpusError, match=re.escape("jq -c '.[] | {\"본문\": .}'")):
        list(read_rows(file, ("본문",), lambda *_: None, max_bytes=99))


def test_zero_width_spaces_of_json_are_spaces(tmp_path: Path) -> None:
    r"""Raw or escaped, in nested values; a backslash before "u200b" in a text is a backslash."""
    (tmp_path / "a.jsonl").write_text(
        '{"text": "a\u200bb\\u200bc\\u200B\\u200bd", "id": "\\\\u200b \\\\\\u200b"}\n', encoding="utf-8"
    )
    assert read_json(tmp_path / "a.jsonl") == [{"text": "a b c  d", "id": "\\u200b \\ "}]
