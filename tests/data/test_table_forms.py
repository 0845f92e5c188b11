"""Tables in the forms that their writers give them: what is certain is read so, and the rest is named with its row."""

from __future__ import annotations

import csv
import gzip
import random
from pathlib import Path
from typing import Any

import pytest

from domext_ray.errors import CorpusError
from domext_ray.text.data.files import find_files
from domext_ray.text.data.readers import read_rows
from domext_ray.text.data.tables import Forms, tell_forms

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
REFUSED: list[tuple[str, str, str]] = [
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


def read(path: Path, longest: int = 2**20) -> tuple[list[Any], Forms]:
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
            found, forms = read(path)
            assert found == texts and [*forms] == [form] * bool(form), (path.name, found, forms)


def test_what_is_uncertain_is_named_with_its_row(tmp_path: Path) -> None:
    for name, content, says in REFUSED:
        path = tmp_path / name
        path.write_text(content)
        with pytest.raises(CorpusError) as caught:
            read(path)
        assert str(path) + " " * (says[0] != ":") + says in str(caught.value), name


def test_a_form_may_show_itself_late(tmp_path: Path) -> None:
    """Also where rows before it have a backslash and a quote that are the same in each form."""
    (tmp_path / "a.csv").write_text(f'id,text\n{FILLER}{SLASHES}1,"a \\"b, c\\" d"\n{FILLER}2,"\\"e\\""\n')
    texts, forms = read(tmp_path / "a.csv")
    assert len(texts) == 902 and texts[600] == 'a "b, c" d' and texts[-1] == '"e"'
    assert forms == {"escaped": [1, f"{tmp_path}/a.csv, line 602"]}


@pytest.mark.parametrize("number", [9, 9000])
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
    texts, forms = read(tmp_path / "a.csv", 2**26)
    assert texts[0] == text and len(texts) == number + 1
    assert forms == ({form: [1, f"{tmp_path}/a.csv, line 2"]} if form else {})


@pytest.mark.parametrize("number", [9, 9000])
@pytest.mark.parametrize(
    ("cell", "form"),
    [('"Hello', None), ('"two' + "\nlines" * 200_000 + '"', "quoted")],
    ids=["text", "around a long cell"],
)
def test_a_quote_of_a_tsv_is_text_unless_it_is_closed(number: int, cell: str, form: str | None, tmp_path: Path) -> None:
    """Though a line further on would be no row."""
    lines = [f"{i}\t{'a row of plain cells ' * 60}" for i in range(number)]
    (tmp_path / "a.tsv").write_text("\n".join(["id\ttext", f"0\t{cell}", "a line without a tab", *lines, "9\tend", ""]))
    texts, forms = read(tmp_path / "a.tsv", 2**26)
    assert texts[0] == cell.strip('"' if form else "") and len(texts) == number + 3
    assert texts[1] == "has 1 columns, the header 2" and texts[-1] == "end"
    assert [*forms] == [form] * bool(form)


def test_a_stray_quote_costs_its_row_where_that_ends_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('id,text\n1,"a "b" c"\n2,d\n')
    assert read(tmp_path / "a.csv")[0] == [STRAY, "d"]


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
        assert read(path)[0] == texts, path.name


def test_a_form_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    forms: Forms = {"escaped": [2, "made.csv, line 7"]}
    tell_forms(forms)
    tell_forms(forms)
    told = 'note: in 2 tables a backslash escapes a quote, as in Spark\'s tables, so \\" is read as "; the first is '
    assert capsys.readouterr().err == told + "made.csv, line 7.\n"
