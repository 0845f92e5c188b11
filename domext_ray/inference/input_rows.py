"""Files of any kind -> rows with their fields, one by one, in order.

Enters: a `SourceFile` and the row to begin with. Leaves: for each row an id, where it stands, and its fields; of a row
that cannot be read, why. Texts stay as they are in the file, since predictions speak of their characters.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from domext_ray.corpus.texts import package_docs
from domext_ray.corpus.texts.documents import open_stream, require_utf8_text
from domext_ray.corpus.texts.sources import (
    ARROW,
    CSV,
    JSONL,
    PACKAGE_DOCS,
    PARQUET,
    SourceFile,
    open_filesystem,
)
from domext_ray.errors import CorpusError

TEXT_FIELD, ID_FIELD = "text", "id"
MAX_ROW_BYTES = 16 * 2**20
"""A longer line is no text to predict on but a file of another kind, and memory stays bounded."""

_BOM = b"\xef\xbb\xbf"
_BATCH_ROWS = 1024


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


Values = Mapping[str, Any] | RowError | None
"""What a row has, why it cannot be read, or None for a line that is no row (a blank one between objects)."""


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


class RowReader:
    """Reads stretches of rows, in any order; going forward in a file that has to be read from its start is cheap.

    Args:
        files: all files of the input.
        names: what to call each of them in ids.
        fields: which fields to read.
    """

    def __init__(self, files: Sequence[SourceFile], names: Sequence[str], fields: FieldNames) -> None:
        self.files, self.names, self.fields = files, names, fields
        self._open: tuple[int, Iterator[Values]] | None = None
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
        path, name = self.files[file].path, self.names[file]
        number = -1
        for number, values in enumerate(self._take(file, first, count, byte), first):
            if isinstance(values, RowError):
                yield InputRow(f"{name}:{number + 1}", path, number + 1, fault=str(values))
            elif values is not None:
                found = self.fields.rename(values)
                yield InputRow(_name_row(found.pop(ID_FIELD, None), name, number), path, number + 1, found)
        if count and number != first + count - 1:
            raise CorpusError(f"{path} has changed while it was read; start the job again.")

    def _take(self, file: int, first: int, count: int, byte: int) -> Iterator[Values]:
        source = self.files[file]
        if byte >= 0:
            yield from islice(_read_whole(source, self.fields, byte), count)
            return
        if self._open is None or self._open[0] != file or self._next > first:
            self._open, self._next = (file, _read_whole(source, self.fields, 0)), 0
        rows = self._open[1]
        for _ in islice(rows, first - self._next):
            pass
        self._next = first
        for values in islice(rows, count):
            self._next += 1
            yield values


def _name_row(given: object, name: str, number: int) -> str:
    is_id = isinstance(given, str | int) and not isinstance(given, bool) and given != ""
    return str(given) if is_id else f"{name}:{number + 1}"


def count_rows(file: SourceFile, fields: FieldNames) -> int:
    """Return how many rows a file has that must be read from its start; a Parquet file says so itself.

    Raises:
        CorpusError: it cannot be read, or is a table without a column of that name.
    """
    if file.kind == PARQUET:
        with name_unreadable(file), open_filesystem(file).open_input_file(file.path) as source:
            parquet = pq.ParquetFile(source)
            _require_column(file, parquet.schema_arrow.names, fields)
            return int(parquet.metadata.num_rows)
    return sum(1 for _ in _read_whole(file, fields, 0))


def _read_whole(file: SourceFile, fields: FieldNames, byte: int) -> Iterator[Values]:
    with name_unreadable(file):
        yield from _read(file, fields, byte)


@contextlib.contextmanager
def name_unreadable(file: SourceFile) -> Iterator[None]:
    """Name a file that cannot be read to its end.

    Raises:
        CorpusError: it is damaged, or has vanished.
    """
    try:
        yield
    except (OSError, EOFError, zlib.error, pa.ArrowException, csv.Error) as error:
        reason = " ".join(str(error).split())[:200]
        raise CorpusError(f"{file.path} cannot be read to its end ({reason}); mend it or leave it out.") from error


def _read(file: SourceFile, fields: FieldNames, byte: int) -> Iterator[Values]:
    if file.kind == PACKAGE_DOCS:
        yield from ({fields.text: each} for each in package_docs.read_paragraphs(file.path))
    elif file.kind in (PARQUET, ARROW):
        yield from _read_columns(file, fields)
    else:
        with open_stream(file) as stream:
            if byte:
                stream.seek(byte)
            else:
                require_utf8_text(file, stream)
                stream.seek(len(_BOM) if stream.read(len(_BOM)) == _BOM else 0)
            if file.kind == CSV:
                yield from _read_table(file, stream, fields)
            elif file.kind == JSONL:
                yield from map(_read_object, _read_lines(stream))
            else:
                yield from (_read_text(each, fields) for each in _read_lines(stream))


def _read_lines(stream: IO[bytes]) -> Iterator[bytes | None]:
    r"""Yield lines; only \n ends one. None stands for one that is too long."""
    while line := stream.readline(MAX_ROW_BYTES + 1):
        if len(line) > MAX_ROW_BYTES and not line.endswith(b"\n"):
            while (rest := stream.readline(MAX_ROW_BYTES)) and not rest.endswith(b"\n"):
                pass
            yield None
        else:
            yield line.rstrip(b"\r\n")


def _decode(line: bytes | None) -> str:
    if line is None:
        raise RowError(f"has more than {MAX_ROW_BYTES:,} bytes")
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RowError(f"is not UTF-8 (byte 0x{line[error.start]:02x})") from error


def _read_text(line: bytes | None, fields: FieldNames) -> Values:
    try:
        return {fields.text: _decode(line)}
    except RowError as error:
        return error


def _read_object(line: bytes | None) -> Values:
    if line is not None and not line.strip():
        return None
    try:
        record = json.loads(_decode(line))
    except RowError as error:
        return error
    except RecursionError:
        return RowError("is nested too deeply")
    except ValueError as error:  # also of numbers with thousands of digits
        place = f" (column {error.colno}: {error.msg})" if isinstance(error, json.JSONDecodeError) else ""
        return RowError(f"is no JSON{place}")
    return record if isinstance(record, dict) else RowError(f"is no JSON object but {type(record).__name__}")


def _read_table(file: SourceFile, stream: IO[bytes], fields: FieldNames) -> Iterator[Values]:
    """Yield the rows of a .csv, which has commas and quotes, or of a .tsv, which has tabs and whose quotes are text."""
    csv.field_size_limit(MAX_ROW_BYTES)
    text = io.TextIOWrapper(stream, encoding="utf-8", errors="surrogateescape", newline="")
    is_tsv = file.suffix == ".tsv"
    quoting: Any = csv.QUOTE_NONE if is_tsv else csv.QUOTE_MINIMAL
    rows = csv.reader(text, delimiter="\t" if is_tsv else ",", quoting=quoting)
    names = next(rows, [])
    _require_column(file, names, fields)
    for row in rows:
        if len(row) != len(names):
            yield RowError(f"has {len(row)} columns, the header {len(names)}") if row else None
        else:
            yield dict(zip(names, row, strict=True))


def _require_column(file: SourceFile, names: Sequence[str], fields: FieldNames) -> None:
    if names.count(fields.text) > 1 or (fields.needs_text and fields.text not in names):
        fault = "several columns" if fields.text in names else "no column"
        shown = ", ".join(" ".join(each.split())[:40] for each in names[:12])
        raise CorpusError(f"{file.path} has {fault} {fields.text!r} (it has {shown or 'none'}); set --field.")


def _read_columns(file: SourceFile, fields: FieldNames) -> Iterator[Values]:
    with open_filesystem(file).open_input_file(file.path) as source:
        batches: Any
        if file.kind == PARQUET:
            parquet = pq.ParquetFile(source)
            names = parquet.schema_arrow.names
            wanted = [each for each in fields.columns if each in names]
            batches = parquet.iter_batches(batch_size=_BATCH_ROWS, columns=wanted)
        else:
            batches, names = _open_arrow(source)
        _require_column(file, names, fields)
        for batch in batches:
            yield from batch.select([each for each in fields.columns if each in names]).to_pylist()


def _open_arrow(source: Any) -> tuple[Any, list[str]]:
    """Open the streaming format, which `datasets` writes, or the file format, which others write."""
    try:
        stream = pa.ipc.open_stream(source)
    except pa.ArrowInvalid:
        source.seek(0)
        reader = pa.ipc.open_file(source)
        return (reader.get_batch(i) for i in range(reader.num_record_batches)), reader.schema.names
    return stream, stream.schema.names


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
