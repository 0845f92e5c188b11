"""Files of labelled data -> text and records that know their lines, and the count of what is wrong with them.

Enters: a file, plain or .gz, UTF-8 with or without byte-order mark. Leaves: its text, and what all readers share: a
`Record` a row, `Dirt` for rows that break a rule, unique ids, and checked texts and labels.
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from domext_ray.errors import CorpusError

_NAMED_PLACES = 3
_EXACT = 2**53  # above it, neighbouring whole numbers are one float
_WHOLE_FLOAT = re.compile(r"-?[0-9]{1,15}\.0+")


@dataclass(frozen=True)
class Record:
    """One row as it was read.

    Args:
        values: what it has by column, or by role after `select_columns`.
        path: its file, or the dataset's split.
        line: its line there, from 1 (of a dataset: its row).
    """

    values: Mapping[Any, Any]
    path: str
    line: int

    @property
    def source(self) -> str:
        """FILE:LINE."""
        return f"{self.path}:{self.line}"


class Dirt:
    """Counts rows, and parts of rows, that break a rule and are left out.

    Args:
        is_strict: refuse the first instead.
        mends: what a reader can put right is put right and counted, instead of refused.
    """

    def __init__(self, is_strict: bool, *, mends: bool = False) -> None:
        self.is_strict, self.mends = is_strict, mends
        self._places: dict[tuple[str, str], list[str]] = {}

    def add(self, source: str, what: str, fault: str, detail: object = "", *, outcome: str = "left out") -> None:
        """Count one.

        Args:
            source: FILE:LINE.
            what: "row", "entity", "triple", "answer", ...
            fault: what is wrong, as it follows "the row" in a sentence; the same for all of a kind.
            detail: the value.
            outcome: what happens to it.

        Raises:
            CorpusError: the counter is strict.
        """
        if self.is_strict:
            shown = f" ({shorten(detail)})" if detail != "" else ""
            raise CorpusError(f"{source}: the {what} {fault}{shown}; mend it, or leave out --labelled.strict.")
        self._places.setdefault((f"{what} {outcome}", fault), []).append(source)

    @property
    def notes(self) -> list[str]:
        """One sentence a kind of fault, with the first places."""
        return [
            f"{len(each)} x {what}: it {fault} ({list_places(each)})." for (what, fault), each in self._places.items()
        ]


def list_places(places: list[str]) -> str:
    """Name the first places, and how many more there are."""
    named = ", ".join(places[:_NAMED_PLACES])
    return named if len(places) <= _NAMED_PLACES else f"{named} and {len(places) - _NAMED_PLACES} more"


def shorten(value: object, length: int = 80) -> str:
    """Show a value in a message, at most `length` characters of it."""
    shown = repr(value)
    return shown if len(shown) <= length else f"{shown[: length - 1]}…"


def read_text(path: Path) -> str:
    """Return a file's text without byte-order mark, decompressed when its name ends in .gz; it must be UTF-8."""
    try:
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise CorpusError(f"{path} cannot be read ({' '.join(str(error).split())}); replace it.") from None
    content = content.removeprefix(b"\xef\xbb\xbf")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        byte = content[error.start]
        raise CorpusError(f"{path}:{line} is not UTF-8 (byte 0x{byte:02x}); save the file as UTF-8.") from None


def split_lines(text: str) -> list[str]:
    r"""Cut a text at \n (and \r\n) only: U+2028 and the like are part of a text."""
    lines = [each.removesuffix("\r") for each in text.split("\n")]
    return lines if lines[-1] else lines[:-1]


class Ids:
    """Gives each example of a split an id of its own: the file's, with #2 and so on where it repeats, or its number."""

    def __init__(self) -> None:
        self._taken: set[str] = set()

    def make(self, given: object) -> str:
        """Return an id.

        Args:
            given: the file's own; None or "" if it has none.
        """
        base = str(given).strip() if given is not None else ""
        base = base or str(len(self._taken) + 1)
        made, number = base, 1
        while made in self._taken:
            number += 1
            made = f"{base}#{number}"
        self._taken.add(made)
        return made


def check_text(record: Record, role: str, dirt: Dirt, *, is_stripped: bool = True) -> str | None:
    """Return the text that plays a role in a record; None, and one more in `dirt`, if it is none.

    A list of texts is joined by spaces. What is no text, blank, or holds half a surrogate pair, which no tokenizer
    takes, is counted. White space at both ends is not stripped off texts that offsets point into.
    """
    value = record.values[role]
    if isinstance(value, (list, tuple)) and value and all(isinstance(each, str) for each in value):
        value = " ".join(value)
    if not isinstance(value, str):
        dirt.add(record.source, "row", f"has no text as {role!r}", value)
    elif not value.strip():
        dirt.add(record.source, "row", f"has an empty {role!r}")
    elif not value.isascii() and any("\ud800" <= each <= "\udfff" for each in value):
        dirt.add(record.source, "row", f"has half a surrogate pair in {role!r}", value)
    else:
        return value.strip() if is_stripped else value
    return None


def check_label(record: Record, dirt: Dirt, declared: Collection[str] = ()) -> str | None:
    """Return a record's label as text; None, and one more in `dirt`, if it has none.

    Whole numbers and truth values count as labels; those of the description (`declared`) are taken as they are spelled.
    """
    value = record.values["label"]
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str) and value.strip() in declared:
        return value.strip()
    value = as_whole(value)
    if isinstance(value, int) or (isinstance(value, str) and value.strip()):
        return str(value).strip()
    dirt.add(record.source, "row", "has no label", "" if value in (None, "") else value)
    return None


def as_whole(value: Any) -> Any:
    """Return a whole number that was written as a float ("1.0", or 1.0 in JSON) as an int; else the value itself.

    A column of whole numbers with a gap in it is a column of floats to pandas, and so in the files that it writes.
    """
    if isinstance(value, float) and value.is_integer() and abs(value) < _EXACT:
        return int(value)
    if isinstance(value, str) and _WHOLE_FLOAT.fullmatch(value.strip()):
        return int(value.strip().split(".")[0])
    return value
