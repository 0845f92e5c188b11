"""Read tasks -> clean documents, in order, and the count of what holds no text.

Enters: a `ReadTask`. Leaves: documents as text, normalised and of bounded length. A range of a plain file reads the
lines (or paragraphs, or JSON rows) that begin in it, so that ranges together read what the whole file reads.
"""

from __future__ import annotations

import csv
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import IO, Any

import pyarrow as pa

from domext_ray.config.pretrain import PrepareConfig
from domext_ray.errors import CorpusError
from domext_ray.text.data.dropped import BLANK, Dropped, describe_place, require_encoding
from domext_ray.text.data.files import (
    CSV,
    PACKAGE_DOCS,
    TEXT,
    SourceFile,
    name_unreadable,
    open_stream,
    part_words,
    require_lines,
    require_utf8_text,
)
from domext_ray.text.data.groups import count_values, describe_option, find_within, hash_group, may_say_whose
from domext_ray.text.data.line_forms import require_plain_text
from domext_ray.text.data.readers import TEXT_FIELD, is_bytes, is_text, read_lines, read_rows
from domext_ray.text.data.sources import ReadTask

Numbered = tuple[int, tuple[str | bytes, ...], Any]
"""The number of a line, row or paragraph, from 1, and its text, or both texts of a pair; 0: the whole file. Last what
`--prepare.group_field` has."""

PAIR_SEPARATOR = "\n"
"""Between the two texts of a pair; clean text has none."""

_SPACES = re.compile(r"\s+")
_SENTENCE_END = re.compile(
    r"""[.!?…]["'”’)\]]?\s+"""  # a Latin sentence ends before a space
    r"|[。！？；][。！？；…]*[”’」』）]*\s*"  # a CJK sentence ends anywhere
    r"|…+[”’」』）]*(?=[\u3400-\u9fff])"
)
_GROUP_OPTION = "--prepare.group_field"
_MAX_CELL_CHARS = 64 * 2**20
_LISTED_NAMES = 12


def read_documents(task: ReadTask, prepare: PrepareConfig, dropped: Dropped) -> Iterator[str]:
    """Yield the clean documents of a task, in order; see `read_grouped`."""
    return (document for document, _ in read_grouped(task, prepare, dropped))


def read_grouped(task: ReadTask, prepare: PrepareConfig, dropped: Dropped) -> Iterator[tuple[str, bytes]]:
    """Yield the clean documents of a task, in order, each with a hash of its group.

    A document has no line break; with `prepare.pair` it is two texts, neither empty, with `PAIR_SEPARATOR` between
    them. The hash, 8 bytes, is of the group's name, whatever file it is in, and empty without `prepare.grouped_by`.
    `dropped` counts what is left out, and values of the fields that it watches.
    """
    for file in task.files:
        nothing = BLANK if file.kind in (TEXT, PACKAGE_DOCS) else "empty"
        before, num_bad, num_documents = dropped.count_rows(0), dropped.counts["bad_utf8"], 0
        for number, raw, name in _read_raw(file, task, prepare, dropped):
            try:
                texts = [clean_text(text if isinstance(text, str) else text.decode("utf-8")) for text in raw]
            except UnicodeDecodeError:
                dropped.add("bad_utf8", file, number, start=task.start)
                continue
            if not all(texts):
                dropped.add(nothing, file, number, start=task.start)
                continue
            group = b""
            if prepare.grouped_by:
                place = describe_place(file, number, task.start)
                group = hash_group(name, place, prepare.grouped_by, _GROUP_OPTION)
            for document in _cut(texts, prepare):
                if len(document) < prepare.min_document_chars:
                    dropped.add("too_short", file, number, start=task.start)
                else:
                    num_documents += 1
                    yield document, group
        if task.end < 0:  # a bad range of a file is no bad file
            num_rows = dropped.count_rows(num_documents) - before
            place = dropped.places.get("bad_utf8", "")
            own = place if place.startswith(file.path) else ""
            require_encoding(file.path, dropped.counts["bad_utf8"] - num_bad, num_rows, own)


def _cut(texts: Sequence[str], prepare: PrepareConfig) -> Iterator[str]:
    """Documents of a text; of a pair one, of texts that are too long the beginning, as of one with too many tokens."""
    size = prepare.max_document_chars
    if prepare.pair:
        return iter([PAIR_SEPARATOR.join(text[:size] for text in texts)])
    return (texts[0][first : first + size] for first in range(0, len(texts[0]), size))


def require_fields(file: SourceFile, prepare: PrepareConfig) -> None:
    """Refuse plain text where fields beside the text are asked for."""
    for option, fields in (("pair", ",".join(prepare.pair)), ("group_field", prepare.grouped_by)):
        if fields and file.kind in (TEXT, PACKAGE_DOCS):
            raise CorpusError(
                f"{file.path} is plain text, without fields for --prepare.{option} {fields!r}; give JSONL, CSV or "
                "Parquet files."
            )


def clean_text(text: str) -> str:
    """Normalise to NFC, drop control and unassigned characters, and make every run of white space one space.

    U+200B is white space here; what else has no width is dropped, as most tokenizers drop it.
    """
    text = text if text.isascii() else unicodedata.normalize("NFC", part_words(text))
    if not text.isprintable():  # isprintable is false for spaces other than " " and for the categories C*
        text = "".join(char if char.isprintable() or char.isspace() or char in "\u200c\u200d" else "" for char in text)
    return _SPACES.sub(" ", text).strip()


def split_sentences(document: str) -> list[str]:
    """Cut a clean document after sentence ends of Latin and CJK scripts."""
    sentences, first = [], 0
    for match in _SENTENCE_END.finditer(document):
        sentences.append(document[first : match.end()].rstrip())
        first = match.end()
    if first < len(document) and not document[first:].isspace():
        sentences.append(document[first:])
    return sentences


def _read_raw(file: SourceFile, task: ReadTask, prepare: PrepareConfig, dropped: Dropped) -> Iterator[Numbered]:
    """Yield texts as they are, or their bytes, with the number of the line or row; 0 where it is the whole file."""
    require_fields(file, prepare)
    if file.kind != TEXT:
        yield from _read_fields(file, task, prepare, dropped)
        return
    with name_unreadable(file), open_stream(file) as stream:
        head = b"" if task.start else require_utf8_text(file, stream)
        if head:
            require_plain_text(file.path, head, prepare.text_fields, dropped.forms)
        if prepare.document != "file":
            require_lines(file.path, head)
        if prepare.document == "file":
            yield 0, (stream.read(),), None
        elif prepare.document == "line":
            for number, _, line in read_lines(stream, task.start, task.end, _longest_line(prepare)):
                yield number, (line,), None
        else:
            yield from _read_paragraphs(stream, task, prepare)


def _longest_line(prepare: PrepareConfig) -> int:
    """Bytes that a document of the greatest length may have."""
    return 4 * prepare.max_document_chars


def _read_paragraphs(stream: IO[bytes], task: ReadTask, prepare: PrepareConfig) -> Iterator[Numbered]:
    """Yield documents between blank lines; a document belongs to the range that its preceding blank line begins in.

    A document longer than any may be comes in pieces, so that memory stays bounded.
    """
    owned, size, first = task.start == 0, 0, 0
    lines: list[bytes] = []
    for number, position, line in read_lines(stream, task.start, task.end, _longest_line(prepare), goes_on=True):
        is_blank, is_past = not line.strip(), 0 <= task.end <= position
        if lines and (is_blank or size + len(line) > _longest_line(prepare)):
            yield first, (b"\n".join(lines),), None
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
        yield first, (b"\n".join(lines),), None


def _read_fields(file: SourceFile, task: ReadTask, prepare: PrepareConfig, dropped: Dropped) -> Iterator[Numbered]:
    """Yield the texts of rows with fields; the others are counted."""
    names = (TEXT_FIELD,) if file.kind == PACKAGE_DOCS else prepare.text_fields
    add = partial(dropped.add, file=file, start=task.start)
    for row in read_rows(
        file,
        (*names, prepare.grouped_by),
        partial(_require_columns, file, prepare),
        start=task.start,
        end=task.end,
        max_bytes=_MAX_CELL_CHARS if file.kind == CSV else _longest_line(prepare),
        only_texts=True,
        forms=dropped.forms,
        also=partial(may_say_whose, kinds=dropped.watched),
    ):
        number = row.number
        if row.reason == "no_object":
            add("no_field", number=number, note=f"it is no object but {type(row.value).__name__}")
        elif row.reason:
            note = "{} of {} columns".format(*row.value) if row.reason == "bad_csv" else ""
            note = row.fault.removeprefix("is no JSON (").removesuffix(")") if row.reason == "bad_json" else note
            add(row.reason, number=number, note=note)
        elif row.value is not None:
            values = tuple(row.value[name] for name in names if name in row.value)
            group = row.value.get(prepare.grouped_by)
            if len(values) < len(names):
                within = [(name,) if name in row.value else find_within(row.value, name) for name in names]
                outer = ".".join(max(within, key=len)[:-1])
                note = f"it is in {outer}" if all(within) else _list_names(row.value)
                add("nested" if all(within) else "no_field", number=number, note=note)
            elif not all(isinstance(value, str) for value in values):
                is_list = all(isinstance(value, str | list) for value in values)
                add("null" if None in values else "list" if is_list else "not_text", number=number)
            else:
                if prepare.grouped_by and group is None and (found := find_within(row.value, prepare.grouped_by)):
                    place = describe_place(file, number, task.start)
                    raise CorpusError(f"{place} has {found[-1]!r} within an object; {describe_option(found)}.")
                if dropped.watched:
                    count_values(dropped.values, row.value, names, dropped.watched)
                if file.kind == CSV:  # whose bytes that are no UTF-8 came as halves of surrogate pairs
                    values = tuple(e if e.isascii() else e.encode("utf-8", "surrogateescape") for e in values)
                yield number, values, group


def _list_names(names: Iterable[str]) -> str:
    shown = [" ".join(name.split())[:40] for name in names]
    more = f" and {len(shown) - _LISTED_NAMES} more" if len(shown) > _LISTED_NAMES else ""
    return f"it has {', '.join(shown[:_LISTED_NAMES]) or 'none'}{more}"


def _require_columns(file: SourceFile, prepare: PrepareConfig, names: Sequence[str], schema: pa.Schema | None) -> None:
    """Refuse a table without the columns, with several of one, or with other values than texts in them."""
    if not names:
        raise csv.Error("Empty CSV file")
    columns = [(field, prepare.fields_option) for field in prepare.text_fields]
    for column, option in [*columns, *([(prepare.grouped_by, _GROUP_OPTION)] if prepare.grouped_by else [])]:
        if names.count(column) != 1:
            fault = f"{names.count(column)} columns" if column in names else "no column"
            hint = "" if schema is not None or prepare.pair else ", or name it .txt to take its lines as they are"
            raise CorpusError(f"{file.path} has {fault} {column!r} ({_list_names(names)}); set {option}{hint}.")
        kind = None if schema is None else schema.field(column).type
        if kind is not None and not is_text(kind) and not is_bytes(kind):
            kind = kind.value_type if pa.types.is_dictionary(kind) else kind
            is_group = option == _GROUP_OPTION
            if is_group and (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
                continue
            raise CorpusError(
                f"the column {column!r} of {file.path} holds {kind}, not text{' or numbers' * is_group}; set {option}."
            )
