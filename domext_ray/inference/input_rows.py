"""What a row of the input is: an id, where it stands, and its fields; of one that cannot be used, why.

Texts stay as they are in the file, since predictions speak of their characters; U+200B is a space.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pyarrow as pa

from domext_ray.errors import CorpusError
from domext_ray.text.data.files import PACKAGE_DOCS, TEXT, SourceFile
from domext_ray.text.data.names import describe_near, pick_near
from domext_ray.text.data.readers import TEXT_FIELD, CheckColumns, Row, has_half_pair, read_rows
from domext_ray.text.data.tables import Forms

ID_FIELD = "id"
MAX_ROW_BYTES = 16 * 2**20
"""A longer line is no text to predict on but a file of another kind."""


class RowError(ValueError):
    """Why a row cannot be used, as it follows "the row" in a sentence."""


@dataclass(frozen=True)
class InputRow:
    """A row of the input."""

    id: str  # its field `id`, else where it stands
    path: str  # its file
    line: int  # its line there, from 1; of a table or a Parquet file the row without the header; 0: it was read already
    values: Mapping[str, Any] = field(default_factory=dict)  # its fields by name
    fault: str = ""  # why it cannot be used, as it follows "the row" in a sentence; empty: it can
    example: Any = None  # what was made of it already; None: nothing
    has_id: bool = False  # its id is that of its field, which another row may have, too


@dataclass(frozen=True)
class FieldNames:
    """Which fields of a row are read."""

    text: str = TEXT_FIELD  # the field that plays the part of `text`
    others: tuple[str, ...] = ()  # further ones, which a file may lack
    needs_text: bool = True  # a table without the text's field is refused; else its rows are, one by one
    # what the input must have somewhere: of each of these one; none: the text's field
    needed: tuple[tuple[str, ...], ...] = ()

    @property
    def columns(self) -> list[str]:
        """All fields, in the file's terms."""
        return list(dict.fromkeys([self.text, *self.others, ID_FIELD]))

    def pick(self, file: SourceFile, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of a row, the text's as `text`."""
        if file.kind in (TEXT, PACKAGE_DOCS):
            return dict(values)
        kept = {name: values[name] for name in self.columns if name in values}
        if self.text != TEXT_FIELD and self.text in kept:
            kept[TEXT_FIELD] = kept.pop(self.text)
        return kept

    def read(
        self, file: SourceFile, byte: int = 0, forms: Forms | None = None, check: CheckColumns | None = None
    ) -> Iterator[Row]:
        """Yield the rows of a file from the one that begins at a byte; `forms` and `check` as of `read_rows`."""
        check = check or partial(self.require_column, file)
        return read_rows(file, self.columns, check, start=byte, max_bytes=MAX_ROW_BYTES, forms=forms)

    def require_column(self, file: SourceFile, names: Sequence[str], _: pa.Schema | None = None) -> None:
        """Refuse a table without a column for the text, or with several."""
        if names.count(self.text) > 1 or (self.needs_text and self.text not in names):
            fault = "several columns" if self.text in names else "no column"
            shown = ", ".join(" ".join(name.split())[:40] for name in names[:12])
            near = describe_near(pick_near(self.text, names)) if fault == "no column" else ""
            raise CorpusError(
                f"{file.path} has {fault} {self.text!r} (it has {shown or 'none'}); {near or 'set --field.'}"
            )


def check_text(values: Mapping[str, Any], shown: str = TEXT_FIELD) -> str:
    """Return a row's text, or raise a RowError; `shown` is what the file calls it."""
    if TEXT_FIELD not in values:
        raise RowError(f"has no field {shown!r}")
    text = values[TEXT_FIELD]
    if not isinstance(text, str):
        kind = "null" if text is None else type(text).__name__
        raise RowError(f"has {kind} as {shown!r}, which must be text")
    if fault := find_fault(text, shown):
        raise RowError(fault)
    return text


def find_fault(text: str, shown: str) -> str:
    """Say why a field's text cannot be read or written; empty: it can."""
    return f"has half a surrogate pair, or bytes that are not UTF-8, in {shown!r}" if has_half_pair(text) else ""
