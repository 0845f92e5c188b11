"""One reader of rows: what a row is in every kind of file, and what becomes of one that cannot be read."""

from __future__ import annotations

import gzip
import io
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from row_files import write_arrow

from domext_ray.config.pretrain import PrepareConfig
from domext_ray.errors import CorpusError
from domext_ray.text.data.files import SourceFile, find_files
from domext_ray.text.data.readers import Row, read_lines, read_rows
from domext_ray.text.data.sources import cut_tasks


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
