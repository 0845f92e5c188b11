"""Tables and JSON -> records whose values go by their roles.

Enters: .csv (quoted), .tsv and .txt (tabs, quotes are literal; GLUE), .json (a list of objects, or an object of objects
by id; CBLUE, PubMedQA), .jsonl, .parquet. Leaves: one `Record` a row. A file of another layout is refused.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from domext_ray.data.files import PARQUET, SourceFile
from domext_ray.data.readers import read_cells, read_columns, read_objects
from domext_ray.errors import CorpusError
from domext_ray.labelled.readers.files import Dirt, Record, read_text, shorten, split_lines
from domext_ray.labelled.readers.json_places import parse_json
from domext_ray.labelled.set_description import SetDescription
from domext_ray.labelled.set_families import Column

_NAMED_COLUMNS = 12
_LINES = (".jsonl", ".ndjson")
GROUP = "group"
"""Beside the roles of columns: what says whose a row is."""
LONGEST = 2**30
"""Bytes of a line, characters of a cell: labelled files are read whole, however long their rows are."""


def read_records(path: Path, description: SetDescription, dirt: Dirt) -> Iterator[Record]:
    """Yield the rows of a table or of a JSON file, by its ending.

    The description says which columns there are, hence whether a table has a header; rows of another width are counted.
    """
    kind = _name_kind(path)
    if kind in (".json", *_LINES):
        yield from read_json_records(path)
    elif kind in (".tsv", ".txt", ".tab"):
        yield from _read_table(path, _read_tsv(path), description, dirt)
    elif kind == ".csv":
        yield from _read_table(path, _read_csv(path), description, dirt)
    elif kind == ".parquet":
        yield from _read_parquet(path)
    else:
        raise CorpusError(
            f"{path} is of no known kind; name it .csv, .tsv, .json or .jsonl (.gz may follow), or .parquet."
        )


def _name_kind(path: Path) -> str:
    return Path(path.name.removesuffix(".gz")).suffix.lower()


def read_json_records(path: Path) -> Iterator[Record]:
    """Yield the objects of a JSON list, of JSON Lines, or of an object by id (which becomes the value "id")."""
    text = read_text(path)
    rest = text.lstrip(" \t\r\n")
    if _name_kind(path) in _LINES or (rest.startswith("{") and _is_json_lines(rest)):
        yield from _read_json_lines(path, text)
    elif rest.startswith(("[", "{")):
        for key, part in parse_json(path, text, 1, rest[0], "the file"):
            value = _require_object(part.value, path, part.line)
            yield Record({"id": key, **value} if rest[0] == "{" else value, str(path), part.line)
    elif rest:
        line = text.count("\n", 0, len(text) - len(rest)) + 1
        raise CorpusError(
            f"{path}:{line} has another layout: the file must be a list of objects or one object a line, but "
            f"{rest[0]!r} is there."
        )


def _is_json_lines(text: str) -> bool:
    """Return whether the first line alone is a whole row, rather than an object of objects."""
    first = text.split("\n", 1)[0]
    try:
        value = json.loads(first)
    except (ValueError, RecursionError):
        return False
    return not (value and all(isinstance(each, dict) for each in value.values()))


def _read_json_lines(path: Path, text: str) -> Iterator[Record]:
    for row in read_objects(io.BytesIO(text.encode()), 0, -1, LONGEST):
        if row.reason and row.reason != "no_object":
            raise CorpusError(f"{path}:{row.number} {row.fault}; mend the line.")
        if row.value is not None or row.reason:
            yield Record(_require_object(row.value, path, row.number), str(path), row.number)


def _require_object(value: object, path: Path, line: int) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise CorpusError(
            f"{path}:{line} has another layout: a row must be an object with named values, but {shorten(value, 40)} is "
            "there."
        )
    return value


def _read_tsv(path: Path) -> Iterator[tuple[int, list[str]]]:
    for number, line in enumerate(split_lines(read_text(path)), 1):
        if line.strip():
            yield number, line.split("\t")


def _read_csv(path: Path) -> Iterator[tuple[int, list[str]]]:
    before = 0
    try:
        for last, row in read_cells(io.BytesIO(read_text(path).encode()), False, LONGEST, strict=True):
            if any(cell.strip() for cell in row):
                yield before + 1, row
            before = last
    except csv.Error as error:
        raise CorpusError(f"{path}:{before + 1} is no CSV ({error}); mend the row.") from None


def _read_parquet(path: Path) -> Iterator[Record]:
    try:
        for row in read_columns(SourceFile(str(path), PARQUET, 0), None, lambda *_: None):
            if row.reason:
                raise ValueError(f"row {row.number} {row.fault}")
            yield Record(row.value, str(path), row.number)
    except (OSError, pa.ArrowException, ValueError, OverflowError) as error:
        reason = " ".join(str(error).split())[:150]
        raise CorpusError(f"{path} cannot be read as Parquet ({reason}); replace it.") from None


def _read_table(
    path: Path, rows: Iterator[tuple[int, list[str]]], description: SetDescription, dirt: Dirt
) -> Iterator[Record]:
    """Name the cells by the header if the first line has the columns' names, else by their places."""
    header: list[str] | None = None
    width = 0
    for number, cells in rows:
        if not width:
            width = len(cells)
            names = [each.strip() for each in cells]
            if find_missing(names, description) is None:
                header = names
                continue
            if find_missing([*range(width), *range(-width, 0)], description) is not None:
                raise lacks_column(f"{path}:{number}", names, description)
        if len(cells) != width:
            dirt.add(f"{path}:{number}", "row", f"has not {width} fields as the first line", len(cells))
        elif header is not None:
            yield Record(dict(zip(header, cells, strict=True)), str(path), number)
        else:
            yield Record({place: cell for i, cell in enumerate(cells) for place in (i, i - width)}, str(path), number)


def find_missing(columns: Collection[Column], description: SetDescription) -> str | None:
    """Return the first required role that none of a file's columns plays, or None."""
    return find_missing_role(dict.fromkeys(columns, ""), description)


def find_missing_role(values: Mapping[Any, Any], description: SetDescription) -> str | None:
    """Return the first required role that none of a row's values plays, or None."""
    return next(
        (role for role in description.required if not _is_present(values, description.columns[role], role)), None
    )


def lacks_column(source: str, columns: Iterable[Column], description: SetDescription) -> CorpusError:
    """Return the error for a file without a required column."""
    listed = list(columns)
    role = find_missing(listed, description)
    assert role is not None
    wanted = (" and " if role == "options" else " or ").join(repr(each) for each in description.columns[role])
    shown = ", ".join(shorten(each, 40) for each in listed[:_NAMED_COLUMNS]) or "none"
    other = ", or reader: label_columns for a column of 0 and 1 per label," if role == "labels" else ""
    return CorpusError(
        f"{source} has no column {wanted} for {role!r}, only {shown}; set columns.{role}{other} in {description.yaml}."
    )


def _is_present(values: Mapping[Any, Any], names: tuple[Column, ...], role: str) -> bool:
    test = all if role == "options" else any
    return test(_look_up(values, name) is not _ABSENT for name in names)


_ABSENT = object()


def _look_up(values: Mapping[Any, Any], name: Column) -> Any:
    """Return a column's value; "a.b" is also the part b of column a."""
    if name in values:
        return values[name]
    outer, _, inner = str(name).partition(".")
    part = values.get(outer)
    return _look_up(part, inner) if inner and isinstance(part, Mapping) else _ABSENT


def get_value(values: Mapping[Any, Any], names: tuple[Column, ...]) -> Any:
    """Return the value of the first of several columns that is there, or None."""
    found = (_look_up(values, name) for name in names)
    return next((each for each in found if each is not _ABSENT), None)


def select_columns(records: Iterable[Record], description: SetDescription, dirt: Dirt) -> Iterator[Record]:
    """Yield records whose values go by role; optional ones may be None.

    If the first row lacks a required column, the file has another layout: a CorpusError. Later ones are counted.
    """
    is_first = True
    for record in records:
        missing = find_missing_role(record.values, description)
        if missing is not None and is_first:
            raise lacks_column(record.source, record.values, description)
        is_first = False
        if missing is not None:
            dirt.add(record.source, "row", f"has no column for {missing!r}")
            continue
        values: dict[str, Any] = {}
        for role, names in description.columns.items():
            if role == "options" and len(names) > 1:
                values[role] = [record.values[name] for name in names]
            else:
                values[role] = get_value(record.values, names)
        if description.group_field:
            values[GROUP] = get_value(record.values, (description.group_field,))
        yield Record(values, record.path, record.line)


def as_objects(value: object) -> list[dict[str, Any]] | None:
    """Return a list of objects, also from the object of lists that some datasets have; None for anything else."""
    if isinstance(value, Mapping) and value and all(isinstance(each, (list, tuple)) for each in value.values()):
        columns = list(value.values())
        if any(len(each) != len(columns[0]) for each in columns):
            return None
        return [dict(zip(value, row, strict=True)) for row in zip(*columns, strict=True)]
    if isinstance(value, (list, tuple)) and all(isinstance(each, dict) for each in value):
        return list(value)
    return None
