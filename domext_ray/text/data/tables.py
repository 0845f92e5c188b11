r"""A CSV or TSV -> its rows of cells, in the form that its writer gave it.

Quotes of a .csv are doubled (RFC 4180), and those of a .tsv are text, until a row shows that it may be otherwise. Then
the rows from there on, a bounded number of them, are read in each form: the one that fits where the other does not is
the form of the whole file, and where that is uncertain the row is named. The rows before are the same in each.

    plain     quotes are text, and a line is a row (GLUE)
    quoted    a cell in quotes may have separators, line breaks and doubled quotes (RFC 4180; pandas' .tsv)
    escaped   the same, and a quote in it is \" (Spark, R, MySQL)
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import IO, Any, TypeAlias

from domext_ray.errors import CorpusError
from domext_ray.text.data.files import HEAD_BYTES
from domext_ray.text.data.folders import say

Forms: TypeAlias = dict[str, list[Any]]
"""What was understood of the forms of tables: how many of each, and where the first shows it."""

_PLAIN, _QUOTED, _ESCAPED, _SPACED, _SEPARATOR = "plain", "quoted", "escaped", "spaced", "separator"
JSON_AS_TEXT, COLUMNS_AS_TEXT = "json", "columns"
"""Files of text that seem to be something else: see `line_forms`."""
SEPARATORS = "\t,;|"
_NAMED = "and is read whole, as the file's name says; to read one of"
_TOLD = {
    JSON_AS_TEXT: f"each line is an object of JSON, {_NAMED} its fields name it .jsonl",
    COLUMNS_AS_TEXT: f"each line has columns, {_NAMED} them name it .tsv or .csv",
    **{char: f"columns are parted by {char!r}, as the first line shows" for char in SEPARATORS},
    _PLAIN: "quotes are text, since some cells that begin with one do not end with it",
    _QUOTED: "cells in quotes are read without them, as those of a CSV",
    _ESCAPED: 'a backslash escapes a quote, as in Spark\'s tables, so \\" is read as "',
    _SPACED: "spaces after separators are left out",
    _SEPARATOR: "the first line names the separator, and is no row",
}
TableRow: TypeAlias = tuple[int, list[str], str]
"""First line, from 1; cells, none of a blank line; what is wrong, as it follows "the row" in a sentence, or empty."""

_STRAY, _MIXED = "stray", "mixed"
_OPEN, _LONG, _BREAK = "end of data", "field limit", "new-line character"
"""What the csv module says of them."""
STRAY_QUOTE = "has a quote that is neither doubled nor the end of its cell"
_UNCERTAIN_QUOTE = (
    "begins with a quote, which is of its text or around a cell of several lines; name the file .txt if each line is a "
    "text, or .csv if cells are in quotes"
)
_UNCERTAIN_ESCAPE = (
    "has a backslash before a quote, which may escape it or be of its text; write the table with doubled quotes "
    """(in Spark: option("escape", '"'))"""
)
_FIRST_CHARS, _MOST_CHARS, _OPEN_CHARS = 2**20, 2**23, 2**22
"""Of the rows by which a form is chosen: more, up to a bound, while these leave it open; and of a cell that would be
closed by then if its quote were one."""
_SEPARATOR_LINE = re.compile(r'"?sep=([^\w\s"\\]|\t)"?\s*')
_COLUMN_NAME = re.compile(r"[\w .()/-]{0,40}")
_UNESCAPED = {'\\"': '""', "\\\\": "\\"}
_IN_QUOTES = re.compile(r'\\["\\]|""?')


def read_cells(stream: IO[bytes], path: str, *, is_tsv: bool, max_cell: int, forms: Forms) -> Iterator[TableRow]:
    """Yield the rows of a table, its header, too; bytes that are no UTF-8 are halves of surrogate pairs (PEP 383).

    A cell has at most `max_cell` characters. `forms` is told what `tell_forms` tells.
    """
    csv.field_size_limit(max_cell)
    newline = "\n" if is_tsv and b"\n" in stream.read(HEAD_BYTES) else ""  # "": \r ends a line, too
    stream.seek(0)
    text = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape", newline=newline)
    table = _Table(iter(text), "\t" if is_tsv else ",", _PLAIN if is_tsv else _QUOTED, path=path, forms=forms)
    table.find_separator()
    for line, cells, fault in table.read():
        if fault == _OPEN:
            raise CorpusError(
                f"{path} ends inside a quote that opens in {table.place}; close it, double a quote that is text, or "
                "fetch the file again if it is cut short."
            )
        if fault == _LONG:
            raise CorpusError(
                f"{path}: {table.place} has a cell of more than {max_cell:,} characters; close the quote that opens "
                "there, or leave the row out."
            )
        said = fault and (STRAY_QUOTE if fault != _BREAK else "has a CR outside of quotes")
        if fault and (fault != _STRAY or line < table.num_lines or not table.width):
            raise CorpusError(
                f"{path}: {table.place} {said}, so that it is uncertain where the row ends; mend that row."
            )
        yield line, cells, said


def tell_forms(forms: Forms) -> None:
    """Say on standard error, once a process, what was understood of the forms of tables and of files of text."""
    for form, (number, place) in forms.items():
        noun = "file" if form in (JSON_AS_TEXT, COLUMNS_AS_TEXT) else "table"
        say(f"in {number:,} {noun}{'s' * (number != 1)} {_TOLD[form]}; the first is {place}")


class _Undecided(Exception):  # noqa: N818 (it is no error)
    """The row may be of another form."""


@dataclass
class _Table:
    """The lines of a table, and how they are read."""

    lines: Iterator[str]
    separator: str
    form: str
    is_spaced: bool = False  # a space follows each separator
    path: str = ""
    forms: Forms = field(default_factory=dict)
    is_chosen: bool = False  # the form is, by a row that showed it
    is_unusual: bool = False  # and it is not that of the file's name
    width: int = 0  # cells of the first row
    num_lines: int = 0  # of the rows so far
    num_rows: int = 0  # below the first
    place: str = ""  # of the row that was read last, in words
    open_until: int = 0  # a line up to which rows are the same in each form
    row: list[str] = field(default_factory=list)  # lines of the row that is being read
    waiting: deque[str] = field(default_factory=deque)  # lines that were looked at

    def find_separator(self) -> None:
        """Take the separator from Excel's line, or from a header that has another one than the file's name says."""
        first = next(self.lines, "")
        if found := _SEPARATOR_LINE.fullmatch(first):
            self.separator, self.num_lines = found[1], 1
            self.form = _PLAIN if found[1] == "\t" else _QUOTED
            self._note(_SEPARATOR, 1)
            return
        self.waiting.append(first)
        if self.separator not in first and (other := _find_other_separator(first)):
            self.separator, self.form = other, _PLAIN if other == "\t" else _QUOTED
            self._note(other, 1)

    def read(self) -> Iterator[TableRow]:
        """Yield the rows; the fault of one that cannot be read is one of `_STRAY` to `_BREAK`."""
        row, is_over = self.row, False
        while not is_over:
            try:
                for cells in self._parse():
                    if not self.width and self._shows_spaces(cells):
                        self._put_back()
                        self.is_spaced = True
                        self._note(_SPACED, self.num_lines + 1)
                        break
                    first = self.num_lines + 1
                    self._end_row(len(cells))
                    yield first, cells, ""
                else:
                    is_over = True
            except _Undecided:
                self._put_back()
                self._choose()
            except csv.Error as error:
                fault = _MIXED if self.is_unusual or (self.is_chosen and '\\"' in "".join(row)) else _STRAY
                fault = next((message for message in (_OPEN, _LONG, _BREAK) if message in str(error)), fault)
                first = self.num_lines + 1
                self._end_row(0)
                self.place = self._name_row(self.num_rows, first, 0 if fault == _OPEN else self.num_lines)
                yield first, [], fault

    def _parse(self) -> Iterator[list[str]]:
        lines = self._feed()
        if self.form == _PLAIN:
            return _split(lines, self.separator)
        if self.form == _ESCAPED:
            lines = _double_quotes(lines, self.separator, is_spaced=self.is_spaced)
        return csv.reader(lines, delimiter=self.separator, strict=True, skipinitialspace=self.is_spaced)

    def _feed(self) -> Iterator[str]:
        waiting, lines, row, is_chosen = self.waiting, self.lines, self.row, self.is_chosen
        is_plain = self.form == _PLAIN
        mark = f'{self.separator}"' if is_plain else '\\"'
        while line := waiting.popleft() if waiting else next(lines, ""):
            row.append(line)
            shows = not is_chosen and (mark in line or (is_plain and line[0] == '"'))
            if shows and self.num_lines + len(row) > self.open_until:
                raise _Undecided
            yield line

    def _shows_spaces(self, cells: list[str]) -> bool:
        is_new = not self.is_spaced and self.form != _PLAIN and len(cells) > 1
        return is_new and all(cell[:1] == " " for cell in cells[1:])

    def _put_back(self) -> None:
        self.waiting.extendleft(reversed(self.row))
        self.row.clear()

    def _end_row(self, num_cells: int) -> None:
        if self.width:
            self.num_rows += 1
        else:
            self.width = num_cells
        self.num_lines += len(self.row)
        self.row.clear()

    def _name_row(self, number: int, first: int, last: int = 0) -> str:
        lines = f"line {first}" if last <= first else f"lines {first} to {last}"
        return f"{f'row {number}' if number else 'the first row'} ({lines})"

    def _note(self, form: str, line: int) -> None:
        self.forms.setdefault(form, [0, f"{self.path}, line {line}"])[0] += 1

    def _choose(self) -> None:
        """Choose the form by the rows that follow, unless they are the same in each; refuse what is uncertain."""
        num_chars, is_all, chosen, is_told, is_plain = _FIRST_CHARS, False, "", True, self.form == _PLAIN
        while not chosen and not is_all and num_chars <= _MOST_CHARS:
            lines, is_all = self._look(num_chars)
            tried = {form: self._try(form, lines, is_all) for form in (self.form, _QUOTED, _ESCAPED)}
            if is_plain:
                is_last = is_all or num_chars == _MOST_CHARS
                chosen, is_told = _choose_quotes(*tried.values(), is_header=not self.width, is_last=is_last)
            elif tried[_QUOTED].texts == tried[_ESCAPED].texts:
                self.open_until = self.num_lines + len(lines)
                return
            else:
                chosen = _choose_escape(*tried.values())
            num_chars *= 8
        other = tried[chosen if chosen and chosen != self.form else _QUOTED if is_plain else _ESCAPED]
        pairs = zip(tried[self.form].rows, other.rows, strict=False)
        place, line = next(((i, usual[0]) for i, (usual, found) in enumerate(pairs) if usual != found), (0, 0))
        if not chosen:
            row = self._name_row(self.num_rows + (self.width > 0) + place, line)
            raise CorpusError(f"{self.path}: {row} {_UNCERTAIN_QUOTE if is_plain else _UNCERTAIN_ESCAPE}.")
        self.is_chosen, self.is_unusual = True, chosen != self.form
        if self.is_unusual or (is_plain and is_told):
            self._note(chosen, line)
        self.form = chosen

    def _try(self, form: str, lines: list[str], is_all: bool) -> _Trial:
        table = _Table(iter(lines), self.separator, form, self.is_spaced, width=self.width, num_lines=self.num_lines)
        table.is_chosen = True
        rows = list(table.read())
        faults = {line for line, cells, fault in rows if fault or len(cells) not in (0, table.width)}
        if rows and rows[-1][2] == _OPEN and not is_all:  # it may close further on, unless that is far
            first = rows[-1][0]
            if sum(map(len, lines[first - 1 - self.num_lines :])) < _OPEN_CHARS:
                faults.remove(first)
        return _Trial(rows, faults)

    def _look(self, num_chars: int) -> tuple[list[str], bool]:
        """Return the lines that follow, as many characters as are wanted, and whether these are all."""
        left = num_chars - sum(map(len, self.waiting))
        for line in self.lines:
            self.waiting.append(line)
            left -= len(line)
            if left <= 0:
                return [*self.waiting], False
        return [*self.waiting], True


@dataclass(frozen=True)
class _Trial:
    """Rows as a form has them, and the first lines of those that cannot be meant."""

    rows: list[TableRow]
    faults: set[int]

    @property
    def texts(self) -> list[tuple[str, ...]]:
        """The rows, but for backslashes that escape backslashes."""
        return [(fault, *(cell.replace("\\\\", "\\") for cell in cells)) for _, cells, fault in self.rows]


def _find_other_separator(line: str) -> str:
    """Return what parts the names of columns in a line; empty: it is no such line."""
    for separator in SEPARATORS:
        names = [name.strip().strip('"') for name in line.split(separator)]
        if len(names) > 1 and any(names) and all(map(_COLUMN_NAME.fullmatch, names)):
            return separator
    return ""


def _choose_escape(quoted: _Trial, escaped: _Trial) -> str:
    """The one of two forms that fits where the other does not; empty: neither does, or both do."""
    only_quoted, only_escaped = quoted.faults - escaped.faults, escaped.faults - quoted.faults
    if bool(only_quoted) == bool(only_escaped):
        return ""
    return _ESCAPED if only_quoted else _QUOTED


def _choose_quotes(
    plain: _Trial, quoted: _Trial, escaped: _Trial, *, is_header: bool, is_last: bool
) -> tuple[str, bool]:
    """Whether quotes around cells are theirs, and whether that is to be told: see `_choose_escape`.

    They are where lines would be no rows without them, where cells hold doubled quotes, or where the header has them.
    Else they are text: no writer puts them around a cell that needs none. A last cell that stays open tells nothing,
    and more is looked at until that `is_last`.
    """
    found = {_QUOTED: quoted, _ESCAPED: escaped}[form := _choose_escape(quoted, escaped) or _QUOTED]
    last = next((line for line, _, fault in found.rows[-1:] if fault == _OPEN), math.inf)
    raw = {line: cells for line, cells, _ in plain.rows}
    has_doubled = any('"' in cell and cell not in raw[line] for line, cells, _ in found.rows for cell in cells)
    if any(line < last for line in found.faults - plain.faults):
        return _PLAIN, has_doubled
    is_around = is_header and all(len(cell) > 1 and cell[0] == cell[-1] == '"' for cell in plain.rows[0][1])
    if has_doubled or is_around or any(line < last for line in plain.faults - found.faults):
        return form, True
    if not is_last and last < math.inf:
        return "", False
    is_open = any(len(cells) == 1 and "\n" in cells[0] for _, cells, _ in found.rows)
    return "" if is_open else _PLAIN, False


def _split(lines: Iterator[str], separator: str) -> Iterator[list[str]]:
    most = csv.field_size_limit()
    for line in lines:
        text = line.rstrip("\r\n")
        if len(text) > most:
            raise csv.Error(_LONG)
        yield text.split(separator) if text else []


def _double_quotes(lines: Iterator[str], separator: str, *, is_spaced: bool) -> Iterator[str]:
    """Write quotes that are escaped as doubled ones; outside of quotes a backslash is one."""
    opening, is_open = re.compile(rf'(?:^|{re.escape(separator)}){" *" if is_spaced else ""}"'), False
    for line in lines:
        pieces, place = list[str](), 0
        while found := (_IN_QUOTES if is_open else opening).search(line, place):
            mark = found[0]
            pieces += [line[place : found.start()], _UNESCAPED.get(mark, mark) if is_open else mark]
            is_open ^= not is_open or mark == '"'
            place = found.end()
        yield "".join(pieces) + line[place:]
