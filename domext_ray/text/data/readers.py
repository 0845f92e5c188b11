r"""A file, or the lines or row groups that begin in a range of its bytes -> its rows, in order.

Enters: a `SourceFile`, and which fields are wanted. Leaves: a `Row` for each line, object or row of a table: its number
and fields, or what is wrong with it. Rows are read one by one, since the CSV and JSON readers of Arrow and `datasets`
give a whole file up for one bad row. Texts stay as they are: only \n ends a line, and a byte-order mark where the file
begins is none of its text.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import IO, Any, NamedTuple, TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq

from domext_ray.text.data.files import (
    ARROW,
    CSV,
    JSONL,
    PACKAGE_DOCS,
    PARQUET,
    TEXT,
    SourceFile,
    name_unreadable,
    open_file,
    open_stream,
    part_words,
    require_lines,
    require_utf8_text,
)
from domext_ray.text.data.line_forms import part_json_words, require_json_lines, require_plain_text
from domext_ray.text.data.tables import Forms, read_cells

TEXT_FIELD = "text"
"""The field of a line or a paragraph."""

_SKIPPED_BYTES = 2**20
_BATCH_ROWS = 1024
_MAX_DIGITS = 1000
_DECODER, _TEXT_DECODER = json.JSONDecoder(), json.JSONDecoder(parse_int=lambda digits: int(digits[:_MAX_DIGITS]))


class Row(NamedTuple):
    """A row as it was read."""

    number: int  # from 1 at the first line, object or row that begins in the range; a header does not count
    value: Any  # its fields by name; of a blank line None; of a row that cannot be used what is there
    reason: str = ""  # why it cannot: bad_utf8, bad_json, no_object, bad_csv, bad_quote or too_long; empty: it can
    fault: str = ""  # the same as it follows "the row" in a sentence


CheckColumns: TypeAlias = Callable[[Sequence[str], pa.Schema | None], None]
"""Is told a table's columns, with their types where it has any, before its rows are read; raises what it refuses."""
WantsColumn: TypeAlias = Callable[[str, pa.DataType | None], bool]
"""Says whether a column is read, by its name, and its type where it has one."""


def read_rows(
    file: SourceFile,
    fields: Sequence[str],
    check: CheckColumns,
    *,
    start: int = 0,
    end: int = -1,
    max_bytes: int,
    only_texts: bool = False,
    forms: Forms | None = None,
    also: WantsColumn = lambda name, kind: False,
) -> Iterator[Row]:
    """Yield the rows of a file.

    Of a file of lines or row groups, those are read that begin at the byte `start` or later, and before `end` (-1: to
    the end). Of a table, the columns `fields` are read, as far as it has them (the first is a text's), and those that
    `also` wants; a bad value of the latter is no fault of a row. A line has at most `max_bytes` bytes, and a cell of a
    CSV as many characters, so that memory stays bounded. With `only_texts`, numbers of JSON may have thousands of
    digits, of which the first are read, and half a surrogate pair may be encoded as UTF-8 encodes it. `forms` is told
    what `tables.tell_forms` tells.
    """
    with name_unreadable(file):
        if file.kind in (PARQUET, ARROW):
            yield from read_columns(file, fields, check, start, end, also)
        else:
            with open_stream(file) as stream:
                head, told = b"" if start else require_utf8_text(file, stream), {} if forms is None else forms
                if file.kind == TEXT and head:
                    require_plain_text(file.path, head, fields[:1], told)
                if file.kind != CSV:
                    require_lines(file.path, head)
                if file.kind == JSONL and head:
                    require_json_lines(file.path, head, fields, field=next(iter(fields), TEXT_FIELD))
                if file.kind == CSV:
                    yield from _read_table(file, stream, fields, check, max_bytes, told, also)
                elif file.kind in (JSONL, PACKAGE_DOCS):
                    yield from read_objects(stream, start, end, max_bytes, only_texts)
                else:
                    yield from _read_line_rows(stream, start, end, max_bytes, _decode_text)


def read_lines(
    stream: IO[bytes], start: int, end: int, max_bytes: int, *, goes_on: bool = False
) -> Iterator[tuple[int, int, bytes]]:
    """Yield (number, first byte, line without its end) of the lines that begin in a range.

    The range ends before the byte `end`, or with the file (-1). A line longer than `max_bytes` comes in pieces of one
    number, of whole characters, so that memory stays bounded. With `goes_on`, if a line begins in the range, those
    after the range come, too.
    """
    position = _find_line(stream, start, end)
    number, rest, is_begun = 0, b"", False
    if 0 <= end <= position:
        return
    while goes_on or is_begun or end < 0 or position < end:
        line = rest + stream.readline(max_bytes - len(rest))
        if not line:
            return
        number, rest = number + (not is_begun), b""
        is_begun = not line.endswith(b"\n")
        if is_begun and len(line) == max_bytes:
            line, rest = _cut_at_character(line)
        yield number, position, line.removeprefix(b"" if position else codecs.BOM_UTF8).rstrip(b"\r\n")
        position += len(line)


def _find_line(stream: IO[bytes], start: int, end: int) -> int:
    """Go to the first line that begins at a byte or later; not past the range: a line may be as long as its file."""
    if not start:
        return 0
    stream.seek(start - 1)
    position, piece = start - 1, b" "
    while piece and not piece.endswith(b"\n") and not 0 <= end <= position:
        piece = stream.readline(_SKIPPED_BYTES if end < 0 else min(_SKIPPED_BYTES, end - position))
        position += len(piece)
    return position


def _cut_at_character(piece: bytes) -> tuple[bytes, bytes]:
    """Cut a piece of UTF-8 before a character that it does not hold whole."""
    for back in range(1, 4):
        if piece[-back] >= 0xC0:
            return piece[:-back], piece[-back:]
        if piece[-back] < 0x80:
            break
    return piece, b""


def _read_line_rows(
    stream: IO[bytes], start: int, end: int, max_bytes: int, decode: Callable[[bytes], tuple[Any, ...]]
) -> Iterator[Row]:
    last = 0
    for number, _, line in read_lines(stream, start, end, max_bytes + 4):  # a cut takes up to three bytes off
        if number != last:
            if len(line) > max_bytes:
                yield Row(number, line, "too_long", f"has more than {max_bytes:,} bytes")
            else:
                yield Row(number, *decode(line))
        last = number


def _decode_text(line: bytes) -> tuple[Any, ...]:
    try:
        return ({TEXT_FIELD: part_words(line.decode("utf-8"))},)
    except UnicodeDecodeError as error:
        return (line, *_name_byte(error))


def read_objects(stream: IO[bytes], start: int, end: int, max_bytes: int, only_texts: bool = False) -> Iterator[Row]:
    """Yield the objects of JSON Lines; arguments as of `read_rows`."""
    return _read_line_rows(stream, start, end, max_bytes, partial(_decode_object, only_texts))


def _decode_object(only_texts: bool, line: bytes) -> tuple[Any, ...]:
    if not line.strip():
        return (None,)
    try:
        text = line.removeprefix(codecs.BOM_UTF8).decode("utf-8", "surrogatepass" if only_texts else "strict")
        value = (_TEXT_DECODER if only_texts else _DECODER).decode(part_json_words(text))
    except UnicodeDecodeError as error:
        return (line, *_name_byte(error))
    except json.JSONDecodeError as error:
        return line, "bad_json", f"is no JSON (column {error.colno}: {error.msg})"
    except RecursionError:
        return line, "bad_json", "is nested too deeply"
    except ValueError:
        return line, "bad_json", "has a number of too many digits"
    is_object = isinstance(value, dict)
    return (value,) if is_object else (value, "no_object", f"is no JSON object but {type(value).__name__}")


def _name_byte(error: UnicodeDecodeError) -> tuple[str, str]:
    return "bad_utf8", f"is not UTF-8 (byte 0x{error.object[error.start]:02x})"


def _read_table(
    file: SourceFile,
    stream: IO[bytes],
    fields: Sequence[str],
    check: CheckColumns,
    max_cell: int,
    forms: Forms,
    also: WantsColumn,
) -> Iterator[Row]:
    """Yield the rows below a header, whose names are without the spaces around them where that tells them apart."""
    rows = read_cells(stream, file.path, is_tsv=file.suffix == ".tsv", max_cell=max_cell, forms=forms)
    names = next((cells for _, cells, _ in rows if cells), [])
    stripped = [name.strip() for name in names]
    names = stripped if len({*stripped}) == len({*names}) else names
    check([name.encode("utf-8", "surrogateescape").decode("utf-8", "replace") for name in names], None)
    places = {name: i for i, name in enumerate(names) if name in fields or also(name, None)}
    for number, (_, cells, fault) in enumerate(rows, 1):
        if fault:
            yield Row(number, None, "bad_quote", fault)
        elif not cells:
            yield Row(number, None)
        elif len(cells) == len(names):
            yield Row(number, {name: part_words(cells[i]) for name, i in places.items()})
        else:
            found = (len(cells), len(names))
            yield Row(number, found, "bad_csv", "has {} columns, the header {}".format(*found))


def read_columns(
    file: SourceFile,
    fields: Sequence[str] | None,
    check: CheckColumns,
    start: int = 0,
    end: int = -1,
    also: WantsColumn = lambda name, kind: False,
) -> Iterator[Row]:
    """Yield the rows of a Parquet or Arrow file; arguments as of `read_rows`, without fields all columns are read."""
    with open_file(file) as source:
        if file.kind == PARQUET:
            parquet = pq.ParquetFile(source)
            schema = parquet.schema_arrow
        else:
            batches, schema = _open_arrow(source)
        check(schema.names, schema)
        own = [name for name in schema.names if fields is None or name in fields]
        wanted = [
            name for name, kind in zip(schema.names, schema.types, strict=True) if name in own or also(name, kind)
        ]
        if file.kind == PARQUET:
            groups = [i for i, first in enumerate(_list_groups(parquet)) if start <= first and not 0 <= end <= first]
            batches = parquet.iter_batches(batch_size=_BATCH_ROWS, row_groups=groups, columns=wanted)
        number = 0
        for batch in batches:
            columns = {
                name: _to_values(batch.column(i), is_asked=fields is not None and name in fields)
                for i, name in enumerate(batch.schema.names)
                if name in wanted
            }
            for i in range(batch.num_rows):
                number += 1
                values = {name: column[i] for name, column in columns.items()}
                bad = [values[name] for name in own if type(values[name]) is UnicodeDecodeError]
                yield Row(number, values, *_name_byte(bad[0])) if bad else Row(number, values)


def _list_groups(parquet: pq.ParquetFile) -> Iterator[int]:
    """Yield the first byte of every row group."""
    for number in range(parquet.num_row_groups):
        first = parquet.metadata.row_group(number).column(0)
        yield min(offset for offset in (first.dictionary_page_offset, first.data_page_offset) if offset is not None)


def _open_arrow(source: Any) -> tuple[Iterator[pa.RecordBatch], pa.Schema]:
    """Open the streaming format, which `datasets` writes, or the file format, which others write."""
    try:
        stream = pa.ipc.open_stream(source)
    except pa.ArrowInvalid:
        source.seek(0)
        reader = pa.ipc.open_file(source)
        return (reader.get_batch(i) for i in range(reader.num_record_batches)), reader.schema
    return iter(stream), stream.schema


def _to_values(column: pa.Array, *, is_asked: bool = False) -> list[Any]:
    """The values of a column, of a text that is not UTF-8 the error; a damaged column is an ArrowInvalid.

    Bytes are a text where that column `is_asked` for.
    """
    if pa.types.is_dictionary(column.type):
        column.validate(full=True)
        column = column.dictionary_decode()
    if is_text(column.type):  # as bytes, so that one that is not UTF-8 costs itself and no more
        column = column.cast(pa.large_string()) if pa.types.is_string_view(column.type) else column
        column = column.cast(pa.large_binary() if pa.types.is_large_string(column.type) else pa.binary())
        is_asked = True
    column.validate(full=True)
    if is_asked and is_bytes(column.type):
        return [cell if cell is None else _decode(cell) for cell in column.to_pylist()]
    return [part_values(cell) for cell in column.to_pylist()] if pa.types.is_nested(column.type) else column.to_pylist()


def part_values(value: Any) -> Any:
    """Make a space of every U+200B in the texts of a value."""
    match value:
        case str():
            return part_words(value)
        case list():
            return [part_values(item) for item in value]
        case dict():
            return {name: part_values(item) for name, item in value.items()}
    return value


def _decode(text: bytes) -> str | UnicodeDecodeError:
    try:
        return part_words(text.decode("utf-8"))
    except UnicodeDecodeError as error:
        return error


def is_text(kind: pa.DataType) -> bool:
    """Whether a column of a type holds texts."""
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def is_bytes(kind: pa.DataType) -> bool:
    """Whether a column of a type holds bytes: texts, too, as Impala and old versions of Spark and Hive write them."""
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def has_half_pair(text: str) -> bool:
    """Whether a text has half a surrogate pair, which no tokenizer takes and no file of UTF-8 holds."""
    return not text.isascii() and any("\ud800" <= char <= "\udfff" for char in text)
