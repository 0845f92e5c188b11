r"""The beginning of a file of lines -> the sentence that refuses what its name does not say, or what is told of it.

JSON is read if it is an object a line. An array, tables as pandas writes them, lists and texts in place of objects:
each has a program for jq. U+200B may be written as an escape, which is a space here as it is in text.

Many a name says less than the content: lines of JSON in `part-00000` or `notes.txt` are texts with braces around them,
and so are rows of a table. What has the field that is asked for is refused. Anything else is read as it is, and told.
"""

from __future__ import annotations

import csv
import json
import re
import shlex
from collections.abc import Collection, Sequence
from typing import Any

from domext_ray.errors import CorpusError
from domext_ray.text.data.files import find_suffix, part_words
from domext_ray.text.data.tables import COLUMNS_AS_TEXT, JSON_AS_TEXT, SEPARATORS, Forms

ITEMS = ".[]"
"""What takes an array, or an object of objects by id, apart."""
LINES = "."
"""What puts an object on a line."""
_KEY = r'"(?:[^"\\]|\\.)*"\s*:'
COLUMNS = "(.[keys_unsorted[0]] | keys_unsorted[]) as $i | map_values(.[$i])"
"""What makes rows of an object of columns."""
_SPLIT_PROGRAMS = tuple(f".{split}[]" for split in ("train", "dev", "validation", "valid", "test"))
"""What takes the rows of one split out of an object of all."""
_PASSAGES = '{id, FIELD: ([.passages[].text] | join("\\n"))}'
"""What joins the passages of a document of BioC."""
_FORMS = {
    r'\{[^[]*"documents"\s*:\s*\[[^[]*"passages"\s*:\s*\[': ("a collection of BioC", f".documents[] | {_PASSAGES}"),
    r'\[\s*\{[^[]*"documents"\s*:\s*\[[^[]*"passages"\s*:\s*\[': ("an array of BioC", f".[].documents[] | {_PASSAGES}"),
    r'\{(\s*"_?id"\s*:[^,[]*,)*\s*"infons"\s*:[^[]*"passages"\s*:\s*\[': ("documents of BioC", _PASSAGES),
    r"\[\s*\{": ("an array", ITEMS),
    r"\[\s*\[": ("an array of arrays", ".[] | {FIELD: .[PLACE]}"),
    r'\[\s*"': ("an array of texts", ".[] | {FIELD: .}"),
    r'"': ("a text a line", "{FIELD: .}"),
    r'\{\s*"\d+"\s*:\s*\{': ("an object of objects by number", ITEMS),
    rf'\{{\s*{_KEY}\s*\{{\s*"\d+"\s*:': ("an object of columns, as pandas writes them", COLUMNS),
    r'\{\s*"columns"\s*:\s*\[': (
        "an object of columns and data, as pandas splits them",
        ".columns as $c | .data[] | . as $row | [range($c | length) | {key: $c[.], value: $row[.]}] | from_entries",
    ),
    r'\{\s*"schema"\s*:\s*\{': ("an object of a schema and data, as pandas writes them", ".data[]"),
}
_TEXT = r'"(?:[^"\\]|\\.)*"'
_TEXTS = rf"(?:{_TEXT}\s*,\s*){{19}}{_TEXT}"
"""So many texts of a list that is longer than what is looked at: they are a column, and not the sentences of a row."""
_LONGEST_WORD = 40
"""Characters; a text without spaces, such as one of Chinese, is longer."""
_KEY_HERE, _ROWS_HERE, _NEXT = re.compile(rf"\s*({_KEY})\s*"), re.compile(r"\[\s*\{"), re.compile(r"\s*,")
_PLAIN_KEY = re.compile(r"[A-Za-z_]\w*", re.ASCII)
"""A key that jq takes without quotes."""
_MOST = 3 / 4
"""Of an object that has its rows in an array."""
_FEWEST_IDS = 20
"""Of an object of texts: a row has fewer fields."""
_ESCAPE = re.compile(r"(?<!\\)((?:\\\\)*)\\u200[bB]")

_OBJECT = re.compile(rf"[\[\s]*\{{\s*{_KEY}")
_COLUMN = re.compile(r"[\w.-]{0,30}")
"""A column's name, in a header that is known by its names alone."""
PUBTATOR_TITLE = re.compile(r"\s*[^|\s]+\|t\|")
"""How a document of PubTator begins."""
_PUBTATOR_TEXT = "sed -n 's/^[^|]*|[ta]|//p'"
_FEWEST_ROWS, _SEEN_LINES = 3, 50


def part_json_words(text: str) -> str:
    """Make a space of every U+200B in JSON, escaped or not."""
    text = part_words(text)
    return _ESCAPE.sub(r"\1 ", text) if "\\u200" in text else text


def require_json_lines(
    path: str, head: bytes, fields: Sequence[str], *, field: str = "", taken: Collection[str] = ()
) -> None:
    """Refuse JSON that is not JSON Lines, by its beginning.

    A first row that has one of `fields`, which hold texts, is an object as it should be. `field` is what a text without
    a field becomes; if it is empty, such a row is not refused here. Nor is JSON whose program for jq is in `taken`; one
    object that has its rows in an array always is.
    """
    text = head.decode("utf-8", "replace").lstrip("\ufeff \t\r\n")
    what, program = _find_form(text, fields)
    if program in ("", LINES, *taken) or ("FIELD" in program and not field):
        wrapped = _find_wrapped(text, fields, is_document=find_suffix(path) == ".json")
        columns = ("an object of columns", COLUMNS) if _has_columns(text, fields) else ("", "")
        what, program = next((own for own in (wrapped, columns) if own[1]), (what, program))
    if program and program not in taken and (field or "FIELD" not in program):
        program = program.replace("FIELD", json.dumps(field, ensure_ascii=False)).replace("PLACE", _find_place(text))
        call, is_split = _give_lines(path, f"jq -c {shlex.quote(program)}"), program in _SPLIT_PROGRAMS
        given = f"{program[1:-2]}.jsonl, so for each other split, and give their folder" if is_split else ""
        raise CorpusError(
            f"{path} is not JSON Lines, an object a line, but {what}; run {call} > "
            f"{given or 'NEW.jsonl and give that'}."
        )


def _give_lines(path: str, program: str) -> str:
    """Return the command that gives a file, packed or not, to a program."""
    return f"gunzip -c FILE | {program}" if path.lower().endswith(".gz") else f"{program} FILE"


def _find_form(text: str, fields: Sequence[str]) -> tuple[str, str]:
    """What a file that begins so is, and the program; both are empty if it has objects a line, or nobody can tell."""
    line, end, rest = text.partition("\n")
    form = next((form for start, form in _FORMS.items() if re.match(start, text)), ("", ""))
    try:
        value: Any = json.loads(line)
    except RecursionError:
        return "", ""
    except ValueError as error:
        if form[1]:  # of a row that is longer than this beginning only a text in it tells that it is one
            has_field = any(re.search(rf"{re.escape(json.dumps(field))}\s*:\s*\"", text) for field in fields)
            return ("", "") if form[1] == COLUMNS and has_field and not end else form
        place = error.pos if isinstance(error, json.JSONDecodeError) and error.msg == "Extra data" else 0
        # Behind a CR alone nothing is said of objects: such line ends have a sentence of their own.
        if place and line[place] in "{[" and not line[:place].rstrip(" \t").endswith("\r"):
            return "objects without line breaks between them", LINES
        is_begun = isinstance(error, json.JSONDecodeError) and error.pos >= len(line.rstrip()) and bool(end)
        return ("an object over several lines", LINES) if is_begun and line[0] in "{[" else ("", "")
    is_alone, is_like = not rest.strip(), rest.lstrip()[:1] == line[0]
    if not is_alone and not is_like:  # it is a row unlike the others
        return "", ""
    are_texts = [isinstance(item, str) for item in value] if isinstance(value, list) else []
    if any(are_texts) and not (is_alone and all(are_texts)):
        return "an array a line", "{FIELD: .[PLACE]}"
    if isinstance(value, dict) and value:
        if _has_text(value, fields):
            return "", ""
        if is_alone and all(_has_text(item, fields) for item in value.values()):
            return "an object of objects", ITEMS
        if is_alone and len(value) >= _FEWEST_IDS and all(isinstance(item, str) for item in value.values()):
            return "an object of texts", ".[] | {FIELD: .}"
    return form


def _find_wrapped(text: str, fields: Sequence[str], *, is_document: bool) -> tuple[str, str]:
    """What one object is that has its rows in an array, and the program; see `_find_form`.

    `is_document` says that the file's name is one of a whole document, whose rows need no line breaks.
    """
    key, start = _find_rows(text)
    if not key:
        return "", ""
    try:
        value, end = json.JSONDecoder().raw_decode(text)
        rows = [own for own in value.values() if isinstance(own, list) and own and isinstance(own[0], dict)]
        is_most = len(json.dumps(rows)) > _MOST * len(json.dumps(value))  # else these are of a text beside them
        is_row = bool(text[end:].strip()) or _has_text(value, fields) or not is_most
    except (ValueError, RecursionError):  # it is longer than this beginning: a row would have no line breaks
        keys = [rf"{re.escape(json.dumps(field))}\s*:" for field in fields]
        has_fields = [any(re.search(key, part) for key in keys) for part in (text[:start], text[start:])]
        is_row = has_fields[0] or ("\n" not in text[:start] and not (is_document and has_fields[1]))
    if is_row:
        return "", ""
    return (
        f"an object with an array in {key}",
        f".{key if _PLAIN_KEY.fullmatch(key) else json.dumps(key, ensure_ascii=False)}[]",
    )


def _find_rows(text: str) -> tuple[str, int]:
    """The key of an object that has the longest array of objects, and where that begins; an empty key: there is none.

    One that is longer than this beginning is the longest.
    """
    place, decoder, found = 1, json.JSONDecoder(), [("", 0, 0)]
    while text.startswith("{") and (key := _KEY_HERE.match(text, place)):
        try:
            end = decoder.raw_decode(text, key.end())[1]
        except (ValueError, RecursionError):
            end = len(text)
        if _ROWS_HERE.match(text, key.end()):
            found.append((json.loads(key[1].rstrip(": \t\r\n")), key.end(), end))
        comma = _NEXT.match(text, end)
        if comma is None:
            break
        place = comma.end()
    name, start, _ = max(found, key=lambda own: own[2] - own[1])
    return name, start


def _has_columns(text: str, fields: Sequence[str]) -> bool:
    """Whether one object has a list of texts, not of words, in one of `fields`, and lists as long in all others."""
    try:
        value, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):  # it is longer than this beginning, or no JSON
        own = [re.search(rf"{re.escape(json.dumps(field))}\s*:\s*\[\s*({_TEXTS})", text) for field in fields]
        return re.match(rf"\{{\s*{_KEY}\s*\[", text) is not None and any(
            _is_text(item) for found in own if found for item in _parse(f"[{found[1]}]") or ()
        )
    if text[end:].strip() or not isinstance(value, dict) or not all(isinstance(own, list) for own in value.values()):
        return False
    has_texts = any(_is_text(item) for field in fields for item in value.get(field, ()))
    return has_texts and len(value) > 1 and {len(own) for own in value.values()} == {max(map(len, value.values()))}


def _is_text(item: object) -> bool:
    """Whether an item of a list is more than a word."""
    return isinstance(item, str) and (" " in item or len(item) > _LONGEST_WORD)


def _find_place(text: str) -> str:
    """The place of the longest text in the innermost of the arrays that a file begins with."""
    arrays = re.match(r"[\[\s]*", text)
    try:
        values = json.JSONDecoder().raw_decode(text, text.rindex("[", 0, arrays.end() if arrays else 0))[0]
    except ValueError:
        return "0"
    return str(max(range(len(values)), key=lambda i: len(values[i]) if isinstance(values[i], str) else -1, default=0))


def _has_text(value: Any, fields: Sequence[str]) -> bool:
    """Whether a value is an object that has a text in one of some fields."""
    return isinstance(value, dict) and any(isinstance(value.get(field), str) for field in fields)


def require_plain_text(path: str, head: bytes, fields: Sequence[str], forms: Forms) -> None:
    """Refuse a file whose lines are rows with one of `fields`; `forms` is told of other rows (`tables.tell_forms`)."""
    text = head.decode("utf-8", "replace").lstrip("\ufeff \t\r\n")
    found = ""
    if _OBJECT.match(text):
        require_json_lines(path, head, fields)
        if _has_text(_parse(text.partition("\n")[0]), fields):
            raise CorpusError(f"{path} is JSON Lines, and such a file's name must end in .jsonl; rename it.")
        found = JSON_AS_TEXT
    elif PUBTATOR_TITLE.match(text):
        raise CorpusError(
            f"{path} is PubTator, whose lines of text begin with the number of their document; run "
            f"{_give_lines(path, _PUBTATOR_TEXT)} > NEW.txt and give that."
        )
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


def _parse(line: str) -> Any:
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
