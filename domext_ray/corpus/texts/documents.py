"""Read tasks -> clean documents, in order, and the count of what holds no text.

Enters: a `ReadTask`. Leaves: documents as text, normalised and of bounded length. A range of a plain file reads the
lines (or paragraphs, or JSON rows) that begin in it, so that ranges together read what the whole file reads.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import json
import re
import unicodedata
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import IO, Any

import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq

from domext_ray.config.pretrain import PrepareConfig
from domext_ray.corpus.texts import package_docs
from domext_ray.corpus.texts.dropped import BLANK, Dropped
from domext_ray.corpus.texts.sources import (
    ARROW,
    CSV,
    JSONL,
    PACKAGE_DOCS,
    PARQUET,
    READABLE,
    TEXT,
    ReadTask,
    SourceFile,
    open_filesystem,
)
from domext_ray.errors import CorpusError

Numbered = tuple[int, tuple[str | bytes, ...]]
"""The number of a line, row or paragraph, from 1, and its text, or both texts of a pair; 0: the whole file."""

PAIR_SEPARATOR = "\n"
"""Between the two texts of a pair; clean text has none."""

_SPACES = re.compile(r"\s+")
_GZIP_MAGIC = b"\x1f\x8b"
_HEAD_BYTES = 2**16
_CSV_BLOCK_BYTES = 64 * 2**20
"""A row of a CSV must be shorter."""

_LISTED_NAMES = 12
_MIN_NUL_DISTANCE = 1000
"""Text may have a stray NUL, which is dropped; from one in so many bytes on a file is no text."""

_BYTE_ORDER_MARKS = {
    b"\xff\xfe\0\0": "UTF-32",
    b"\0\0\xfe\xff": "UTF-32",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}
_MAGIC = {
    b"%PDF-": "a PDF",
    b"PK\x03\x04": "a zip archive or an office document",
    _GZIP_MAGIC: "gzip, whose name must end in .gz",
    b"\xfd7zXZ\0": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"PAR1": "Parquet, whose name must end in .parquet",
    b"ARROW1": "Arrow, whose name must end in .arrow",
}


def read_documents(task: ReadTask, prepare: PrepareConfig, dropped: Dropped) -> Iterator[str]:
    """Yield the clean documents of a task, in order.

    Args:
        task: what to read.
        prepare: what a document is, and its bounds.
        dropped: counts what is left out.

    Yields:
        Documents without a line break; with `prepare.pair` two texts, `PAIR_SEPARATOR` between them, neither empty.

    Raises:
        CorpusError: a file that is damaged, has vanished, lacks the column, or is not what its name says.
    """
    for file in task.files:
        nothing = BLANK if file.kind in (TEXT, PACKAGE_DOCS) else "empty"
        for number, raw in _read_whole(file, task, prepare, dropped):
            try:
                texts = [clean_text(each if isinstance(each, str) else each.decode("utf-8")) for each in raw]
            except UnicodeDecodeError:
                dropped.add("bad_utf8", file, number)
                continue
            if not all(texts):
                dropped.add(nothing, file, number)
                continue
            for document in _cut_pair(texts, prepare) if prepare.pair else _cut_text(texts[0], prepare):
                if len(document) < prepare.min_document_chars:
                    dropped.add("too_short", file, number)
                else:
                    yield document


def _cut_text(text: str, prepare: PrepareConfig) -> Iterator[str]:
    size = prepare.max_document_chars
    return (text[first : first + size] for first in range(0, len(text), size))


def _cut_pair(texts: Sequence[str], prepare: PrepareConfig) -> Iterator[str]:
    """One document of both; of a text that is too long the beginning, as of one with too many tokens."""
    yield PAIR_SEPARATOR.join(each[: prepare.max_document_chars] for each in texts)


def require_fields(file: SourceFile, prepare: PrepareConfig) -> None:
    """Refuse plain text where two fields are asked for.

    Raises:
        CorpusError: it is.
    """
    if prepare.pair and file.kind in (TEXT, PACKAGE_DOCS):
        pair = ",".join(prepare.pair)
        raise CorpusError(
            f"{file.path} is plain text, without fields for --prepare.pair {pair!r}; give JSONL, CSV or Parquet files."
        )


def clean_text(text: str) -> str:
    """Normalise to NFC, drop control and unassigned characters, and make every run of white space one space."""
    if text.isascii():
        if not text.isprintable():
            text = "".join(each if each.isprintable() or each.isspace() else "" for each in text)
        return _SPACES.sub(" ", text).strip()
    text = unicodedata.normalize("NFC", text)
    if not text.isprintable():  # isprintable is false for spaces other than " " and for the categories C*
        text = "".join(each if each.isprintable() or each.isspace() or each in "\u200c\u200d" else "" for each in text)
    return _SPACES.sub(" ", text).strip()


def _read_whole(file: SourceFile, task: ReadTask, prepare: PrepareConfig, dropped: Dropped) -> Iterator[Numbered]:
    try:
        yield from _read_raw(file, task, prepare, dropped)
    except (OSError, EOFError, zlib.error, pa.ArrowException) as error:
        reason = " ".join(str(error).split())[:200]
        raise CorpusError(f"{file.path} cannot be read to its end ({reason}); mend it or leave it out.") from error


def _read_raw(file: SourceFile, task: ReadTask, prepare: PrepareConfig, dropped: Dropped) -> Iterator[Numbered]:
    """Yield texts as they are, or their bytes, with the number of the line or row; 0 where it is the whole file."""
    require_fields(file, prepare)
    if file.kind == PACKAGE_DOCS:
        yield from ((number, (text,)) for number, text in enumerate(package_docs.read_paragraphs(file.path), 1))
    elif file.kind in (PARQUET, ARROW):
        yield from _read_columns(file, prepare, dropped)
    else:
        with open_stream(file) as stream:
            if not task.start:
                require_utf8_text(file, stream)
            if file.kind == CSV:
                yield from _read_csv(file, stream, prepare, dropped)
            elif file.kind == JSONL:
                yield from _read_json_lines(file, stream, task, prepare, dropped)
            elif prepare.document == "file":
                yield 0, (stream.read(),)
            elif prepare.document == "line":
                number = 0
                for number, _, line in _read_lines(stream, task.start, task.end, prepare):
                    yield number, (line,)
                _count_lines(dropped, file, task, number)
            else:
                yield from _read_paragraphs(file, stream, task, prepare, dropped)


def _count_lines(dropped: Dropped, file: SourceFile, task: ReadTask, number: int) -> None:
    """Note how many lines begin in a range: the lines of the next one are counted on from there."""
    if task.end >= 0:
        dropped.num_lines[file.path] += number


def open_stream(file: SourceFile) -> IO[bytes]:
    """Open a file of text, through gzip if its name says so.

    Raises:
        CorpusError: its name says so, and it is no gzip file.
    """
    source = open(file.path, "rb") if not file.scheme else open_filesystem(file).open_input_file(file.path)  # noqa: SIM115
    if not file.is_gzip:
        return source if not file.scheme else io.BufferedReader(source)
    if source.read(2) != _GZIP_MAGIC:
        source.close()
        raise CorpusError(f"{file.path} ends in .gz and is no gzip file; rename it, or compress it with gzip.")
    source.seek(0)
    return io.BufferedReader(gzip.GzipFile(fileobj=source))


def require_utf8_text(file: SourceFile, stream: IO[bytes]) -> None:
    """Refuse what is no text, or text of another encoding, by its first bytes.

    Raises:
        CorpusError: says which, and what to run.
    """
    head = stream.read(_HEAD_BYTES)
    stream.seek(0)
    for marks, name in _BYTE_ORDER_MARKS.items():
        if head.startswith(marks):
            raise _not_utf8(file, name)
    for magic, name in _MAGIC.items():
        if head.startswith(magic):
            raise CorpusError(f"{file.path} is not UTF-8 text but {name}; give {READABLE}.")
    num_even, num_odd = head[::2].count(0), head[1::2].count(0)
    if num_even + num_odd > len(head) / _MIN_NUL_DISTANCE:
        for few, many, name in ((num_even, num_odd, "UTF-16LE"), (num_odd, num_even, "UTF-16BE")):
            if many > 0.3 * len(head) / 2 and few < 0.01 * len(head) / 2:  # every other byte of Latin letters
                raise _not_utf8(file, name)
        raise CorpusError(f"{file.path} is not UTF-8 text (it has NUL bytes); give {READABLE}.")


def _not_utf8(file: SourceFile, encoding: str) -> CorpusError:
    return CorpusError(f"{file.path} is {encoding}, not UTF-8; run iconv -f {encoding} -t UTF-8 FILE > NEW.")


def _read_lines(stream: IO[bytes], start: int, end: int, prepare: PrepareConfig) -> Iterator[tuple[int, int, bytes]]:
    r"""Yield (number, first byte, line) of the lines that begin in [start, end); only \n ends a line.

    Numbers count from 1 at the first line that begins at `start` or later. A line longer than any document may be comes
    in pieces of one number, so that memory stays bounded.
    """
    limit = _longest_line(prepare)
    position, number, is_begun = start, 0, False
    if start > 0:
        stream.seek(start - 1)
        position = start - 1 + _skip_line(stream, limit)
    while end < 0 or position < end:
        line = stream.readline(limit)
        if not line:
            return
        if len(line) == limit and not line.endswith(b"\n"):
            line, rest = _cut_at_character(line)
            if rest:
                stream.seek(-len(rest), io.SEEK_CUR)
        number += not is_begun
        is_begun = not line.endswith(b"\n")
        yield number, position, line.rstrip(b"\r\n")
        position += len(line)
        if end >= 0 and is_begun and position >= end:
            # The line began in this range: its later pieces belong here, however far it reaches.
            end = max(end, position + 1)


def _longest_line(prepare: PrepareConfig) -> int:
    """Bytes that a document of the greatest length may have."""
    return 4 * prepare.max_document_chars


def _skip_line(stream: IO[bytes], limit: int) -> int:
    skipped = 0
    while piece := stream.readline(limit):
        skipped += len(piece)
        if piece.endswith(b"\n"):
            break
    return skipped


def _cut_at_character(piece: bytes) -> tuple[bytes, bytes]:
    """Cut a piece of UTF-8 before a character that it does not hold whole."""
    for back in range(1, 4):
        if piece[-back] >= 0xC0:
            return piece[:-back], piece[-back:]
        if piece[-back] < 0x80:
            break
    return piece, b""


def _read_paragraphs(
    file: SourceFile, stream: IO[bytes], task: ReadTask, prepare: PrepareConfig, dropped: Dropped
) -> Iterator[Numbered]:
    """Yield documents between blank lines; a document belongs to the range that its preceding blank line begins in.

    A document longer than any may be comes in pieces, so that memory stays bounded.
    """
    owned, size, first, num_begun = task.start == 0, 0, 0, 0
    lines: list[bytes] = []
    for number, position, line in _read_lines(stream, task.start, -1, prepare):
        is_blank, is_past = not line.strip(), 0 <= task.end <= position
        num_begun = num_begun if is_past else number
        if lines and (is_blank or size + len(line) > _longest_line(prepare)):
            yield first, (b"\n".join(lines),)
            lines, size = [], 0
        if is_past and (is_blank or not owned):
            break
        if is_blank:
            owned = True
        elif owned:
            first = first if lines else number
            lines.append(line)
            size += len(line)
    if lines:
        yield first, (b"\n".join(lines),)
    _count_lines(dropped, file, task, num_begun)


def _read_json_lines(
    file: SourceFile, stream: IO[bytes], task: ReadTask, prepare: PrepareConfig, dropped: Dropped
) -> Iterator[Numbered]:
    names = prepare.text_fields
    number = cut = 0  # the line, and the last one that came in pieces
    is_first = task.start == 0
    for number, _, line in _read_lines(stream, task.start, task.end, prepare):
        if number == cut or not line.strip():
            continue
        try:
            # Numbers are read by nobody; Python itself refuses those of thousands of digits.
            record = json.loads(line.decode("utf-8-sig", "surrogatepass"), parse_int=_ignore_number)
        except UnicodeDecodeError:
            dropped.add("bad_utf8", file, number)
            continue
        except (ValueError, RecursionError) as error:
            if is_first:
                _refuse_json_document(file, line, error)
            is_first = False
            is_cut = len(line) >= _longest_line(prepare) - 3  # whole characters, so up to three bytes fewer
            cut = number if is_cut else cut
            dropped.add("too_long" if is_cut else "bad_json", file, number)
            continue
        if is_first and isinstance(record, list) and record and isinstance(record[0], dict):
            raise _not_json_lines(file, "an array")
        is_first = False
        if not isinstance(record, dict):
            dropped.add("no_field", file, number, f"it is no object but {type(record).__name__}")
        elif not all(name in record for name in names):
            dropped.add("no_field", file, number, _list_names(record))
        else:
            values = tuple(record[name] for name in names)
            if all(isinstance(each, str) for each in values):
                yield number, values
            else:
                dropped.add("null" if None in values else "not_text", file, number)
    _count_lines(dropped, file, task, number)


def _ignore_number(digits: str) -> int:
    return 0


def _list_names(names: Iterable[str]) -> str:
    shown = [" ".join(each.split())[:40] for each in names]
    more = f" and {len(shown) - _LISTED_NAMES} more" if len(shown) > _LISTED_NAMES else ""
    return f"it has {', '.join(shown[:_LISTED_NAMES]) or 'none'}{more}"


def _refuse_json_document(file: SourceFile, line: bytes, error: Exception) -> None:
    """Refuse a file whose first line begins a value that goes on below it: JSON, and no JSON Lines."""
    goes_on = isinstance(error, json.JSONDecodeError) and error.pos >= len(error.doc.rstrip())
    if goes_on or re.match(rb"\s*\[\s*\{", line):
        raise _not_json_lines(file, "an array" if line.lstrip().startswith(b"[") else "an object over several lines")


def _not_json_lines(file: SourceFile, what: str) -> CorpusError:
    command = "jq -c '.[]'" if what == "an array" else "jq -c ."
    return CorpusError(
        f"{file.path} is not JSON Lines, an object a line, but {what}; run {command} FILE > NEW.jsonl and give that."
    )


def _read_csv(file: SourceFile, stream: IO[bytes], prepare: PrepareConfig, dropped: Dropped) -> Iterator[Numbered]:
    """Yield the cells of the columns. A .csv has commas and quotes; a .tsv has tabs, and its quotes are text."""
    is_tsv = file.suffix == ".tsv"
    separator = "\t" if is_tsv else ","

    def leave_out(row: Any) -> str:
        dropped.add("bad_csv", file, max(row.number - 1, 0), f"{row.actual_columns} of {row.expected_columns} columns")
        return "skip"

    parsing = pacsv.ParseOptions(
        delimiter=separator,
        quote_char=False if is_tsv else '"',
        newlines_in_values=not is_tsv,
        invalid_row_handler=leave_out,
    )
    # Read as Latin-1, of which every byte is a character, so that a cell that is not UTF-8 costs itself and no more.
    reading = pacsv.ReadOptions(use_threads=False, block_size=_CSV_BLOCK_BYTES, encoding="latin1")
    names = [each.encode().decode("latin1") for each in prepare.text_fields]
    converting = pacsv.ConvertOptions(include_columns=names, column_types=dict.fromkeys(names, pa.string()))
    _require_csv_columns(file, stream, prepare, separator)
    number = 0
    for batch in pacsv.open_csv(stream, reading, parsing, converting):
        for values in zip(*(batch.column(name) for name in names), strict=True):
            number += 1
            yield number, tuple(each.as_py().encode("latin1") for each in values)


def _require_csv_columns(file: SourceFile, stream: IO[bytes], prepare: PrepareConfig, separator: str) -> None:
    """Refuse a table without the columns; leave the stream behind a byte-order mark."""
    content = stream.read(_HEAD_BYTES)
    stream.seek(len(codecs.BOM_UTF8) if content.startswith(codecs.BOM_UTF8) else 0)
    head = io.StringIO(content.decode("utf-8-sig", "replace"), newline="")
    quoting: Any = csv.QUOTE_NONE if separator == "\t" else csv.QUOTE_MINIMAL
    names = next(csv.reader(head, delimiter=separator, quoting=quoting), [])
    column = next((each for each in prepare.text_fields if names.count(each) != 1), None)
    if column is None or not names:  # of an empty file the reader says so
        return
    hint = "" if prepare.pair else ", or name it .txt to take its lines as they are"
    if len(names) == 1 and (other := next((each for each in ",;\t|" if each in names[0]), "")):
        hint = f"; its columns are parted by {other!r}, and those of a {file.suffix} file must be by {separator!r}"
    raise _no_column(file, column, names, prepare, hint)


def _read_columns(file: SourceFile, prepare: PrepareConfig, dropped: Dropped) -> Iterator[Numbered]:
    names = prepare.text_fields
    with open_filesystem(file).open_input_file(file.path) as source:
        if file.kind == PARQUET:
            parquet = pq.ParquetFile(source)
            _require_text_columns(file, prepare, parquet.schema_arrow)
            batches: Any = parquet.iter_batches(batch_size=1024, columns=list(names))
        else:  # `datasets` writes the streaming format, others the file format
            try:
                batches = pa.ipc.open_stream(source)
            except pa.ArrowInvalid:
                source.seek(0)
                reader = pa.ipc.open_file(source)
                batches = (reader.get_batch(i) for i in range(reader.num_record_batches))
                _require_text_columns(file, prepare, reader.schema)
            else:
                _require_text_columns(file, prepare, batches.schema)
        number = 0
        for batch in batches:
            columns = [_to_bytes(batch.column(batch.schema.get_field_index(name))) for name in names]
            for values in zip(*columns, strict=True):
                number += 1
                if all(each.is_valid for each in values):
                    yield number, tuple(each.as_py() for each in values)
                else:
                    dropped.add("null", file, number)


def _to_bytes(values: pa.Array) -> pa.Array:
    """Texts as bytes, so that one that is not UTF-8 costs itself and no more; a damaged array is an ArrowInvalid."""
    if pa.types.is_dictionary(values.type):
        values.validate(full=True)
        values = values.dictionary_decode()
    if pa.types.is_string_view(values.type):
        values = values.cast(pa.large_string())
    values = values.cast(pa.large_binary() if pa.types.is_large_string(values.type) else pa.binary())
    values.validate(full=True)
    return values


def _require_text_columns(file: SourceFile, prepare: PrepareConfig, schema: pa.Schema) -> None:
    for column in prepare.text_fields:
        if schema.names.count(column) != 1:
            raise _no_column(file, column, schema.names, prepare)
        kind = schema.field(column).type
        kind = kind.value_type if pa.types.is_dictionary(kind) else kind
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)):
            raise CorpusError(
                f"the column {column!r} of {file.path} holds {kind}, not text; set {prepare.fields_option}."
            )


def _no_column(file: SourceFile, column: str, names: list[str], prepare: PrepareConfig, hint: str = "") -> CorpusError:
    fault = f"{names.count(column)} columns" if column in names else "no column"
    return CorpusError(f"{file.path} has {fault} {column!r} ({_list_names(names)}); set {prepare.fields_option}{hint}.")
