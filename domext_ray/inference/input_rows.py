"""Files of any kind -> rows with their fields, one by one, in order.

Enters: a `SourceFile` and the row to begin with. Leaves: for each row an id, where it stands, and its fields; of a row
that cannot be read, why. Texts stay as they are in the file, since predictions speak of their characters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from domext_ray.data.files import PACKAGE_DOCS, PARQUET, TEXT, SourceFile, name_unreadable, open_filesystem
from domext_ray.data.readers import TEXT_FIELD, Row, read_rows
from domext_ray.errors import CorpusError

ID_FIELD = "id"
MAX_ROW_BYTES = 16 * 2**20
"""A longer line is no text to predict on but a file of another kind."""


class RowError(ValueError):
    """Why a row cannot be used, as it follows "the row" in a sentence."""


@dataclass(frozen=True)
class InputRow:
    """A row of the input.

    Args:
        id: its field `id`, else where it stands.
        path: its file.
        line: its line there, from 1; of a table or a Parquet file the row, without the header.
        values: its fields by name.
        fault: why it cannot be used, as it follows "the row" in a sentence; empty: it can.
        example: what was made of it already; None: nothing.
    """

    id: str
    path: str
    line: int
    values: Mapping[str, Any] = field(default_factory=dict)
    fault: str = ""
    example: Any = None


@dataclass(frozen=True)
class FieldNames:
    """Which fields of a row are read.

    Args:
        text: the field that plays the part of `text`.
        others: further ones, which a file may lack.
        needs_text: a table without the text's field is refused; else its rows are, one by one.
    """

    text: str = TEXT_FIELD
    others: tuple[str, ...] = ()
    needs_text: bool = True

    @property
    def columns(self) -> list[str]:
        """All fields, in the file's terms."""
        return list(dict.fromkeys([ID_FIELD, self.text, *self.others]))

    def rename(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return a row's fields, the text's as `text`."""
        kept = {name: values[name] for name in self.columns if name in values}
        if self.text != TEXT_FIELD and self.text in kept:
            kept[TEXT_FIELD] = kept.pop(self.text)
        return kept

    def read(self, file: SourceFile, byte: int = 0) -> Iterator[Row]:
        """Yield the rows of a file from the one that begins at a byte.

        Raises:
            CorpusError: it cannot be read, or is a table without a column for the text.
        """
        check = partial(self.require_column, file)
        return read_rows(file, self.columns, check, start=byte, max_bytes=MAX_ROW_BYTES)

    def require_column(self, file: SourceFile, names: Sequence[str], _: pa.Schema | None = None) -> None:
        """Refuse a table without a column for the text, or with several."""
        if names.count(self.text) > 1 or (self.needs_text and self.text not in names):
            fault = "several columns" if self.text in names else "no column"
            shown = ", ".join(" ".join(each.split())[:40] for each in names[:12])
            raise CorpusError(f"{file.path} has {fault} {self.text!r} (it has {shown or 'none'}); set --field.")


class RowReader:
    """Reads stretches of rows, in any order; going forward in a file that has to be read from its start is cheap.

    Args:
        files: all files of the input.
        names: what to call each of them in ids.
        fields: which fields to read.
    """

    def __init__(self, files: Sequence[SourceFile], names: Sequence[str], fields: FieldNames) -> None:
        self.files, self.names, self.fields = files, names, fields
        self._open: tuple[int, Iterator[Row]] | None = None
        self._next = 0

    def read(self, file: int, first: int, count: int, byte: int = -1) -> Iterator[InputRow]:
        """Yield rows of a file.

        Args:
            file: its place among the files.
            first: the first row, from 0.
            count: how many.
            byte: where that row begins; -1: the file has to be read up to it.

        Raises:
            CorpusError: the file cannot be read, or has fewer rows than it had.
        """
        source, name = self.files[file], self.names[file]
        line = first
        for line, row in enumerate(self._take(file, first, count, byte), first + 1):
            if row.reason:
                yield InputRow(f"{name}:{line}", source.path, line, fault=row.fault)
            elif row.value is not None:
                is_plain = source.kind in (TEXT, PACKAGE_DOCS)
                found = dict(row.value) if is_plain else self.fields.rename(row.value)
                given = found.pop(ID_FIELD, None)
                is_id = isinstance(given, str | int) and not isinstance(given, bool) and given != ""
                yield InputRow(str(given) if is_id else f"{name}:{line}", source.path, line, found)
        if line != first + count:
            raise CorpusError(f"{source.path} has changed while it was read; start the job again.")

    def _take(self, file: int, first: int, count: int, byte: int) -> Iterator[Row]:
        if byte >= 0:
            yield from islice(self.fields.read(self.files[file], byte), count)
            return
        if self._open is None or self._open[0] != file or self._next > first:
            self._open, self._next = (file, self.fields.read(self.files[file])), 0
        rows = self._open[1]
        for _ in islice(rows, first - self._next):
            pass
        self._next = first
        for row in islice(rows, count):
            self._next += 1
            yield row


def count_rows(file: SourceFile, fields: FieldNames) -> int:
    """Return how many rows a file has that must be read from its start; a Parquet file says so itself.

    Raises:
        CorpusError: it cannot be read, or is a table without a column of that name.
    """
    if file.kind == PARQUET:
        with name_unreadable(file), open_filesystem(file).open_input_file(file.path) as source:
            parquet = pq.ParquetFile(source)
            fields.require_column(file, parquet.schema_arrow.names)
            return int(parquet.metadata.num_rows)
    return sum(1 for _ in fields.read(file))


def check_text(values: Mapping[str, Any], name: str = TEXT_FIELD, shown: str = TEXT_FIELD) -> str:
    """Return a field that is a text.

    Args:
        values: of a row.
        name: the field.
        shown: what the file calls it.

    Raises:
        RowError: it is missing, no text, or holds half a surrogate pair or bytes that are no UTF-8.
    """
    if name not in values:
        raise RowError(f"has no field {shown!r}")
    text = values[name]
    if not isinstance(text, str):
        kind = "null" if text is None else type(text).__name__
        raise RowError(f"has {kind} as {shown!r}, which must be text")
    if not text.isascii() and any("\ud800" <= each <= "\udfff" for each in text):
        raise RowError(f"has half a surrogate pair, or bytes that are not UTF-8, in {shown!r}")
    return text
