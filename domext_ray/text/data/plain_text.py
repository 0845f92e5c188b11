"""The beginning of a file of lines -> the sentence that refuses JSON or a table, or what is told of it.

A file's name says how it is read, and many a name says less than its content: lines of JSON in `part-00000` or
`notes.txt` are texts with braces around them. What has the field that is asked for is refused. Anything else is read as
it is, and told.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Sequence

from domext_ray.errors import CorpusError
from domext_ray.text.data.json_forms import has_text, require_json_lines
from domext_ray.text.data.tables import COLUMNS_AS_TEXT, JSON_AS_TEXT, SEPARATORS, Forms

_OBJECT = re.compile(r'[\[\s]*\{\s*"(?:[^"\\]|\\.)*"\s*:')
_COLUMN = re.compile(r"[\w.-]{0,30}")
"""A column's name, in a header that is known by its names alone."""
_FEWEST_ROWS, _SEEN_LINES = 3, 50


def require_plain_text(path: str, head: bytes, fields: Sequence[str], forms: Forms) -> None:
    """Refuse a file whose lines are rows with one of `fields`; `forms` is told of other rows (`tables.tell_forms`)."""
    text = head.decode("utf-8", "replace").lstrip("\ufeff \t\r\n")
    found = ""
    if _OBJECT.match(text):
        require_json_lines(path, head, fields)
        if has_text(_parse(text.partition("\n")[0]), fields):
            raise CorpusError(f"{path} is JSON Lines, and such a file's name must end in .jsonl; rename it.")
        found = JSON_AS_TEXT
    elif table := _find_table(text):
        separator, names = table
        if taken := [name for name in names if name.lower() in fields]:
            raise CorpusError(
                f"{path} begins with the names of columns, {taken[0]!r} among them; name it "
                f"{'.tsv' if separator == chr(9) else '.csv'} to read that column, or take its first line out if each "
                "line is a text."
            )
        found = COLUMNS_AS_TEXT
    if found:
        forms.setdefault(found, [0, path])[0] += 1


def _parse(line: str) -> object:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _find_table(text: str) -> tuple[str, list[str]] | None:
    """Return the separator and the first row of a table: rows of one width, below names or with tabs."""
    lines = [line for line in text.split("\n")[:-1] if line.strip() and not line.startswith("#")][:_SEEN_LINES]
    for separator in SEPARATORS:
        try:
            rows = list(csv.reader(lines, delimiter=separator, strict=True))
        except csv.Error:
            continue
        names = rows[0] if rows else []
        is_header = separator == "\t" or (any(names) and all(map(_COLUMN.fullmatch, names)))
        if len(rows) >= _FEWEST_ROWS and len(names) > 1 and is_header and {len(row) for row in rows} == {len(names)}:
            return separator, names
    return None
