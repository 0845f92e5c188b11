"""What stands in one cell -> a whole number, a truth value, or a list, in all the ways that writers of tables have."""

from __future__ import annotations

import ast
import json
import math
import re
from typing import Any

_EXACT = 2**53  # above it, neighbouring whole numbers are one float
_WHOLE_FLOAT = re.compile(r"-?[0-9]{1,15}\.0+")
_MARKS = {
    **dict.fromkeys(("1", "true", "yes", "t", "y"), True),
    **dict.fromkeys(("0", "false", "no", "f", "n"), False),
}
_EMPTY = ("", "none", "nan", "null")
_ITEM = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[-+.\w]+"""
_ITEMS = re.compile(_ITEM)
_ARRAY = re.compile(rf"\[\s*(?:{_ITEM})(?:\s+(?:{_ITEM}))*\s*\]")
"""A list as NumPy writes it, without commas, which Python would read as one text."""
_SET = re.compile(r"(?:frozen)?set\((.*)\)", re.DOTALL)
"""A set as Python writes it where {…} is none."""
_TYPED = re.compile(rf"array\((\[(?:\s*(?:{_ITEM})\s*,?)*\s*\]),\s*dtype=\w+\)")
"""An array as NumPy writes it within an object."""
_LIST_OF_TEXTS = re.compile(r"""\[\s*['"]""")


def is_missing(value: Any) -> bool:
    """Whether a value is none: None, or NaN, as pandas has it."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def as_whole(value: Any) -> Any:
    """Return a whole number that was written as a float ("1.0", or 1.0 in JSON) as an int; else the value itself.

    A column of whole numbers with a gap in it is a column of floats to pandas, and so in the files that it writes.
    """
    if isinstance(value, float) and value.is_integer() and abs(value) < _EXACT:
        return int(value)
    if isinstance(value, str) and _WHOLE_FLOAT.fullmatch(value.strip()):
        return int(value.strip().split(".")[0])
    return value


def as_offset(value: Any) -> int | None:
    """Return a whole number that was written as such, as a float or as a text ("6"); None: it is none."""
    value = as_whole(value)
    if isinstance(value, str) and value.strip().isascii() and value.strip().isdecimal():
        return int(value)
    return value if type(value) is int else None


def read_mark(value: Any) -> bool | None:
    """Return whether a cell says yes or no (None: it is empty); one that says neither is a ValueError."""
    if is_missing(value):
        return None
    whole = as_whole(value)
    text = str(int(whole) if isinstance(whole, bool) else whole).strip().lower()
    if text in _EMPTY:
        return None
    if text not in _MARKS:
        raise ValueError(value)
    return _MARKS[text]


def read_nested(value: Any) -> Any:
    """Return the list or object that a cell spells in JSON, in Python or as NumPy does; else the value itself.

    That is what becomes of a list in a CSV of pandas. Brackets around anything else, such as "[urgent]", are a text; a
    cell that begins as a list of texts and is none is a ValueError.
    """
    text = value.strip() if isinstance(value, str) else ""
    text = value.strip() if isinstance(value, str) else ""
    if "dtype=" in text:
        text = _TYPED.sub(r"\1", text)
    if found_set := _SET.fullmatch(text):
        text = found_set[1] or "[]"
    if text[:1] + text[-1:] not in ("[]", "{}", "()"):
        return value
    for parse in (json.loads, _read_array, ast.literal_eval):
        try:
            found = parse(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        if isinstance(found, set | tuple):  # of numbers they are rather a text
            is_of_texts = all(isinstance(item, str) for item in found)
            return (sorted(found) if isinstance(found, set) else list(found)) if is_of_texts else value
        return found if isinstance(found, list | dict) else value
    if _LIST_OF_TEXTS.match(text):
        raise ValueError(value)
    return value


def _read_array(text: str) -> list[Any]:
    if not _ARRAY.fullmatch(text):
        raise ValueError(text)
    return [ast.literal_eval(item) for item in _ITEMS.findall(text)]


def split_cell(value: str, separator: str) -> list[str]:
    """Return the parts of a cell that are not blank."""
    return [part.strip() for part in value.split(separator) if part.strip()]


def shorten(value: object, length: int = 80) -> str:
    """Show a value in a message, at most `length` characters of it."""
    shown = repr(value)
    return shown if len(shown) <= length else f"{shown[: length - 1]}…"
