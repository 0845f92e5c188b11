"""What the user calls the input -> numbered blocks of rows, a function of the input alone.

Enters: `--input`, files as a corpus has them. Leaves: an `InputPlan`: the files, how many rows there are, a hash, and
where each block begins. Files of lines are cut at bytes, so that a block is read without what comes before it. Rows are
read where they are predicted; here they are only counted.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from domext_ray.errors import CorpusError
from domext_ray.families.readers.cells import as_whole
from domext_ray.inference.input_rows import ID_FIELD, FieldNames, InputRow, find_fault
from domext_ray.text.data.files import (
    JSONL,
    LINES,
    PACKAGE_DOCS,
    PARQUET,
    TEXT,
    SourceFile,
    find_files,
    name_unreadable,
    open_file,
    open_stream,
)
from domext_ray.text.data.names import describe_near, pick_near
from domext_ray.text.data.package_docs import write_docs
from domext_ray.text.data.readers import Row
from domext_ray.text.data.sources import FileRecord, ReadTask, Sources
from domext_ray.text.data.tables import Forms, tell_forms

_CHUNK_BYTES = 4 * 2**20
_NEWLINE = ord("\n")
RowT = TypeVar("RowT")


@dataclass(frozen=True)
class Piece:
    """Rows of one file that follow each other."""

    file: int  # its place among the plan's
    first: int  # the first row there, from 0
    count: int
    byte: int = -1  # where the first row begins; -1: the file has to be read from its start


@dataclass(frozen=True)
class Block:
    """Rows that are predicted together."""

    number: int  # from 0, in the input's order
    pieces: tuple[Piece, ...]  # where they are

    @property
    def num_rows(self) -> int:
        """Lines or rows of the files; blank lines between objects count."""
        return sum(piece.count for piece in self.pieces)


@dataclass(frozen=True)
class BlockInput:
    """An input, counted and cut."""

    blocks: tuple[Block, ...]  # all rows, in order
    sha256: str  # of all that predictions depend on

    @property
    def num_rows(self) -> int:
        """Rows of all blocks."""
        return sum(block.num_rows for block in self.blocks)

    @property
    def former_sha256(self) -> str:
        """What `sha256` was in 0.1.0, which knew files in a bucket by path and time."""
        return self.sha256

    def list_files(self) -> list[FileRecord]:
        """Return what the input was, as `data.sources.require_files` compares it; empty: nothing reads it again."""
        return []

    def require_unchanged(self) -> None:
        """Refuse what was read while it changed."""


@dataclass(frozen=True)
class InputPlan(BlockInput):
    """Files."""

    files: tuple[SourceFile, ...]  # in the order of their rows
    names: tuple[str, ...]  # what ids call them
    fields: FieldNames  # which are read
    sources: Sources  # they, with their hashes

    @property
    def former_sha256(self) -> str:
        return _join_hashes(self.files, self.names, self.sources.former_hashes)

    def list_files(self) -> list[FileRecord]:
        return self.sources.record()

    def require_unchanged(self) -> None:
        with name_input():
            self.sources.require_unchanged()

    def make_reader(self) -> Callable[[Block], list[InputRow]]:
        """Return what reads the rows of blocks."""
        return _BlockReader(self)

    def describe(self) -> str:
        """Return what a dry run says of it."""
        return f"{self.num_rows:,} rows in {len(self.files):,} file{'s' if len(self.files) > 1 else ''}"


class _BlockReader:
    """Reads blocks in any order; going forward in a file that has to be read from its start is cheap."""

    def __init__(self, plan: InputPlan) -> None:
        self.plan = plan
        self.file, self.next = -1, 0  # the file that is open, and its next row
        self.rows: Iterator[Row] = iter(())

    def __call__(self, block: Block) -> list[InputRow]:
        return [row for piece in block.pieces for row in self._read(piece)]

    def _read(self, piece: Piece) -> Iterator[InputRow]:
        fields, file, name = self.plan.fields, self.plan.files[piece.file], self.plan.names[piece.file]
        line = piece.first
        for line, row in enumerate(self._take(piece, file), piece.first + 1):
            if row.reason:
                yield InputRow(f"{name}:{line}", file.path, line, fault=row.fault)
            elif row.value is not None:
                values = fields.pick(file, row.value)
                given = values.pop(ID_FIELD, None)
                given = as_whole(given) if isinstance(given, float) else given  # numbers with a gap, as pandas has them
                is_id = isinstance(given, str | int) and not isinstance(given, bool) and given != ""
                own = str(given) if is_id else f"{name}:{line}"
                yield InputRow(own, file.path, line, values, find_fault(own, ID_FIELD), has_id=is_id)
        if line != piece.first + piece.count:
            raise CorpusError(f"{file.path} has changed while it was read; start the job again.")

    def _take(self, piece: Piece, file: SourceFile) -> Iterator[Row]:
        if piece.byte >= 0:
            return islice(self.plan.fields.read(file, piece.byte), piece.count)
        if self.file != piece.file or self.next > piece.first:
            self.file, self.next, self.rows = piece.file, 0, self.plan.fields.read(file)
        skipped, self.next = piece.first - self.next, piece.first + piece.count
        return islice(self.rows, skipped, skipped + piece.count)


def plan_input(spec: str, fields: FieldNames, block_rows: int) -> InputPlan:
    """Find the files of an input, count their rows and cut them into blocks."""
    with name_input():
        return _plan_input(spec, fields, block_rows)


@contextlib.contextmanager
def name_input() -> Iterator[None]:
    """Let messages about a corpus speak of --input."""
    try:
        yield
    except CorpusError as error:
        raise CorpusError(str(error).replace("--corpus", "--input")) from error


def _plan_input(spec: str, fields: FieldNames, block_rows: int) -> InputPlan:
    files = [*map(write_docs, find_files(spec, by_names=False)[0])]  # what a model is tried on is often called test
    require_fields(files, fields, spec, block_rows)
    names = _name_files(files)
    sources = Sources(spec, (ReadTask(tuple(files)),), by_names=False)
    sha256 = _join_hashes(files, names, sources.hashes)
    blocks = tuple(_cut_blocks(files, fields, block_rows))
    if not blocks:
        raise CorpusError(f"--input {spec!r} has no row; give files that have content.")
    return InputPlan(blocks, sha256, tuple(files), names, fields, sources)


def require_fields(files: Sequence[SourceFile], fields: FieldNames, spec: str, most: int) -> None:
    """Refuse an input of which no row has a field that is needed.

    The first row with it settles that. Where the first rows, `most` of each file, have none, JSON Lines are searched
    for its name.
    """
    lacking, found = list(fields.needed or ((fields.text,),)), dict[str, None]()
    for file in files:
        if file.kind in (TEXT, PACKAGE_DOCS):
            return
        for names in _list_fields(file, fields, most):
            found |= dict.fromkeys(names)
            lacking = [group for group in lacking if not found.keys() & {*group}]
            if not lacking:
                return
    wanted = lacking[0]
    if not any(_has_name(file, wanted) for file in files if file.kind == JSONL):
        shown = ", ".join(" ".join(name.split())[:40] for name in [*found][:12])
        near = describe_near(pick_near(wanted[0], found)) if wanted == (fields.text,) else ""
        cure = near or ("set --field." if wanted[0] == fields.text else "give the field that name.")
        raise CorpusError(
            f"no row of --input {spec!r} has a field {' or '.join(map(repr, wanted))} (they have {shown or 'none'}); "
            f"{cure}"
        )


def _list_fields(file: SourceFile, fields: FieldNames, most: int) -> Iterator[Sequence[str]]:
    """Yield the names of the columns of a table, or those of the fields of each of the first rows."""
    columns = list[str]()

    def note(names: Sequence[str], schema: pa.Schema | None) -> None:
        fields.require_column(file, names, schema)
        columns.extend(names)

    for row in islice(fields.read(file, check=note), most):
        if columns:
            break
        yield [*row.value] if not row.reason and row.value else []
    yield columns


def _has_name(file: SourceFile, names: Sequence[str]) -> bool:
    """Whether a file of JSON has one of these names, or a text that is one."""
    keys = {json.dumps(name, ensure_ascii=is_ascii).encode() for name in names for is_ascii in (True, False)}
    rest, most = b"", max(map(len, keys))
    with name_unreadable(file), open_stream(file) as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            rest += chunk
            if any(key in rest for key in keys):
                return True
            rest = rest[-most:]
    return False


def _join_hashes(files: Sequence[SourceFile], names: Sequence[str], hashes: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for file, name, own in zip(files, names, hashes, strict=True):
        digest.update(json.dumps([name, file.kind, file.size, own]).encode())
    return digest.hexdigest()


def cut_rows(rows: Sequence[RowT], block_rows: int) -> tuple[Block, ...]:
    """Return the blocks of rows that are in memory; `take_rows` takes a block's."""
    return tuple(
        Block(number, (Piece(0, first, min(block_rows, len(rows) - first)),))
        for number, first in enumerate(range(0, len(rows), block_rows))
    )


def take_rows(rows: Sequence[RowT], block: Block) -> Sequence[RowT]:
    """Return the rows of a block of `cut_rows`."""
    (piece,) = block.pieces
    return rows[piece.first : piece.first + piece.count]


def _name_files(files: Sequence[SourceFile]) -> tuple[str, ...]:
    """Return each file's own name where that tells files apart, else its path."""
    taken = Counter(Path(file.path).name for file in files)
    return tuple(Path(file.path).name if taken[Path(file.path).name] == 1 else file.path for file in files)


def _cut_blocks(files: Sequence[SourceFile], fields: FieldNames, block_rows: int) -> Iterator[Block]:
    number, pieces, room, forms = 0, list[Piece](), block_rows, Forms()
    for place, file in enumerate(files):
        for first, count, byte in _cut_file(file, fields, room, block_rows, forms):
            pieces.append(Piece(place, first, count, byte))
            room -= count
            if not room:
                yield Block(number, tuple(pieces))
                number, pieces, room = number + 1, [], block_rows
    if pieces:
        yield Block(number, tuple(pieces))
    tell_forms(forms)


def _cut_file(
    file: SourceFile, fields: FieldNames, room: int, block_rows: int, forms: Forms
) -> Iterator[tuple[int, int, int]]:
    """Yield first row, rows and first byte of the stretches of a file; the first is at most `room` long."""
    if file.kind in LINES:
        next(fields.read(file, forms=forms), None)  # what is of another form or encoding is refused
        with name_unreadable(file), open_stream(file) as stream:
            num_rows, starts = _find_starts(stream, room, block_rows)
        if file.is_gzip:
            starts = [-1] * len(starts)
    else:
        num_rows = _count_rows(file, fields, forms)
        starts = [-1] * (1 + max(0, -(-(num_rows - room) // block_rows)))
    first = 0
    for byte in starts:
        count = min(num_rows - first, room if first == 0 else block_rows)
        if count > 0:
            yield first, count, byte
        first += count


def _count_rows(file: SourceFile, fields: FieldNames, forms: Forms) -> int:
    """Rows of a file that has to be read from its start; a Parquet file says so itself."""
    if file.kind == PARQUET:
        with name_unreadable(file), open_file(file) as source:
            parquet = pq.ParquetFile(source)
            fields.require_column(file, parquet.schema_arrow.names)
            return int(parquet.metadata.num_rows)
    return sum(1 for _ in fields.read(file, forms=forms))


def _find_starts(stream: IO[bytes], room: int, block_rows: int) -> tuple[int, list[int]]:
    """Return how many lines there are, and the bytes at which the stretches begin."""
    starts, num_lines, position, last = [0], 0, 0, b"\n"
    while chunk := stream.read(_CHUNK_BYTES):
        ends = np.flatnonzero(np.frombuffer(chunk, dtype=np.uint8) == _NEWLINE)
        # Line number room, room + block_rows, ... begins a stretch: after the newline of the line before it.
        wanted = np.arange((room - 1 - num_lines) % block_rows, len(ends), block_rows)
        wanted = wanted[wanted + num_lines >= room - 1]
        starts += (position + ends[wanted] + 1).tolist()
        num_lines += len(ends)
        position += len(chunk)
        last = chunk[-1:]
    num_lines += last != b"\n"
    return num_lines, starts
