"""What the user calls a corpus -> read tasks -> documents.

Enters: `--corpus`, a comma-separated list of files, globs, folders, hub names of datasets, s3:// addresses of these, or
`package-docs`. Leaves: read tasks of bounded size whose documents come in one canonical order, and a fingerprint of
the content. A large plain file is cut into byte ranges whose places depend on its size alone, so neither the number of
CPUs nor their speed changes a row.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import re
import unicodedata
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from domext_ray.config import PrepareConfig
from domext_ray.corpus import package_docs
from domext_ray.errors import CorpusError

PACKAGE_DOCS = "package-docs"
TEXT, JSONL, PARQUET, ARROW = "text", "jsonl", "parquet", "arrow"
_KINDS = {".jsonl": JSONL, ".ndjson": JSONL, ".json": JSONL, ".parquet": PARQUET, ".arrow": ARROW}
_UNREADABLE = (".bz2", ".xz", ".zst", ".zip", ".7z", ".tar", ".tgz", ".tar.gz", ".pdf", ".docx")
_HASH_CHUNK_BYTES = 4 * 2**20
_SPACES = re.compile(r"\s+")


@dataclass(frozen=True)
class SourceFile:
    """One file of a corpus.

    Args:
        path: path within its file system; for `package-docs`, the name of a distribution.
        kind: text, jsonl, parquet, arrow or package-docs.
        size: bytes.
        scheme: "" for local files, else for example "s3".
    """

    path: str
    kind: str
    size: int
    scheme: str = ""


@dataclass(frozen=True)
class ReadTask:
    """A part of a corpus that one task reads.

    Args:
        files: files read whole, in order; one file when it is a byte range.
        start: first byte of a range (0 for whole files).
        end: byte after the range; -1 for whole files.
    """

    files: tuple[SourceFile, ...]
    start: int = 0
    end: int = -1

    @property
    def num_bytes(self) -> int:
        """Bytes that the task reads."""
        return sum(each.size for each in self.files) if self.end < 0 else self.end - self.start


@dataclass(frozen=True)
class Sources:
    """A resolved corpus.

    Args:
        spec: what the user wrote.
        tasks: what to read, in canonical order.
        fingerprint: hash of the content.
    """

    spec: str
    tasks: tuple[ReadTask, ...]
    fingerprint: str

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return sum(each.num_bytes for each in self.tasks)


def resolve_sources(spec: str, prepare: PrepareConfig) -> Sources:
    """Find the files of a corpus, cut them into read tasks and fingerprint their content.

    Args:
        spec: the `--corpus` option.
        prepare: says what a document is and how large a task may be.

    Raises:
        CorpusError: an entry that names nothing, a file of an unknown kind, or files that are all empty.
    """
    files: list[SourceFile] = []
    digest = hashlib.sha256()
    for entry in (each.strip() for each in spec.split(",") if each.strip()):
        found = _find_files(entry)
        for each in found:
            digest.update(json.dumps([each.kind, each.size]).encode())
            digest.update(_fingerprint_file(each).encode())
        files += found
    if not files or not sum(each.size for each in files):
        raise CorpusError(f"--corpus {spec!r} is empty; give text, JSONL, Parquet or a saved dataset that has content.")
    return Sources(spec, tuple(_cut_tasks(files, prepare)), digest.hexdigest())


def _find_files(entry: str) -> list[SourceFile]:
    if entry == PACKAGE_DOCS:
        sizes = package_docs.find_distributions()
        return [SourceFile(name, PACKAGE_DOCS, size) for name, size in sizes]
    scheme, _, rest = entry.rpartition("://")
    filesystem, path = _open_filesystem(scheme, rest) if scheme else (pafs.LocalFileSystem(), _expand_local(entry))
    try:
        infos = _list_files(filesystem, path)
    except OSError as error:
        raise CorpusError(f"--corpus {entry!r} cannot be reached ({error}).") from error
    if not infos and not scheme and _may_be_hub_name(entry):
        infos = _download_dataset(entry)
    if not infos:
        raise CorpusError(f"--corpus {entry!r} names no file; give a file, a glob, a folder or {PACKAGE_DOCS}.")
    for each in infos:
        if each.path.lower().endswith(_UNREADABLE):
            raise CorpusError(
                f"--corpus {entry!r} includes {each.path}, whose format cannot be read; give text, JSONL (both may be "
                "gzipped), Parquet or a saved dataset."
            )
    infos = sorted(infos, key=lambda each: each.path)
    return [SourceFile(each.path, _kind_of(each.path), each.size, scheme) for each in infos]


def _list_files(filesystem: pafs.FileSystem, path: str) -> list[pafs.FileInfo]:
    """The files that a path names: itself, a folder's, or those that match a glob."""
    info = filesystem.get_file_info(path)
    if info.is_file:
        return [info]
    if info.type == pafs.FileType.Directory:
        return _list_folder(filesystem, path)
    return _glob(filesystem, path) if any(each in path for each in "*?[") else []


def _expand_local(entry: str) -> str:
    from pathlib import Path

    return str(Path(entry).expanduser().absolute())


def _open_filesystem(scheme: str, path: str) -> tuple[pafs.FileSystem, str]:
    try:
        if scheme == "file":
            return pafs.LocalFileSystem(), path
        filesystem, _ = pafs.FileSystem.from_uri(f"{scheme}://{path.split('/', 1)[0]}")
        return filesystem, path
    except (pa.ArrowInvalid, OSError) as error:
        raise CorpusError(f"--corpus {scheme}://{path} cannot be reached ({error}).") from error


def _glob(filesystem: pafs.FileSystem, pattern: str) -> list[pafs.FileInfo]:
    """Match `*` and `?` within a folder name and `**` across folders."""
    fixed = re.split(r"[*?\[]", pattern, maxsplit=1)[0].rsplit("/", 1)[0] or "/"
    if filesystem.get_file_info(fixed).type != pafs.FileType.Directory:
        return []
    parts = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    expression = re.sub(r"\*\*/|\*\*|\*|\?|[^*?]+", lambda m: parts.get(m[0]) or _escape_outside_sets(m[0]), pattern)
    matching = re.compile(expression)
    selected = filesystem.get_file_info(pafs.FileSelector(fixed, recursive=True))
    return [each for each in selected if each.is_file and matching.fullmatch(each.path)]


def _escape_outside_sets(text: str) -> str:
    parts = re.split(r"(\[[^\]]+\])", text)
    return "".join(part.replace("[!", "[^", 1) if i % 2 else re.escape(part) for i, part in enumerate(parts))


def _list_folder(filesystem: pafs.FileSystem, folder: str) -> list[pafs.FileInfo]:
    """All visible files below a folder; of a folder that `datasets` saved, the training split's data files."""
    splits = _read_json(filesystem, f"{folder}/dataset_dict.json")
    if splits is not None:
        if "train" not in splits["splits"]:
            raise CorpusError(f"{folder} has no split 'train'; name one of {', '.join(splits['splits'])} below it.")
        folder = f"{folder}/train"
    state = _read_json(filesystem, f"{folder}/state.json")
    if state is not None and "_data_files" in state:
        return filesystem.get_file_info([f"{folder}/{each['filename']}" for each in state["_data_files"]])
    infos = filesystem.get_file_info(pafs.FileSelector(folder, recursive=True))
    visible = [each for each in infos if "/." not in each.path[len(folder) :]]
    return [each for each in visible if each.is_file]


def _read_json(filesystem: pafs.FileSystem, path: str) -> dict | None:
    if filesystem.get_file_info(path).type != pafs.FileType.File:
        return None
    with filesystem.open_input_file(path) as file:
        return json.loads(file.read())


def _may_be_hub_name(entry: str) -> bool:
    return re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", entry) is not None and not entry.endswith(tuple(_KINDS))


def _download_dataset(name: str) -> list[pafs.FileInfo]:
    import datasets

    try:
        train = datasets.load_dataset(name, split="train")
    except Exception as error:  # the hub's client raises a dozen kinds: offline, unknown, gated, no such split …
        raise CorpusError(
            f"--corpus {name!r} is no file here and could not be fetched as a dataset with a train split "
            f"({type(error).__name__})."
        ) from error
    return pafs.LocalFileSystem().get_file_info([each["filename"] for each in train.cache_files])


def _kind_of(path: str) -> str:
    plain = path.removesuffix(".gz")
    dot = plain.rfind(".", plain.rfind("/") + 1)
    return _KINDS.get(plain[dot:].lower() if dot >= 0 else "", TEXT)


def _fingerprint_file(file: SourceFile) -> str:
    if file.kind == PACKAGE_DOCS:
        return package_docs.describe_distribution(file.path)
    filesystem = open_filesystem(file)
    if file.scheme not in ("", "file"):  # reading a bucket only to hash it would double the traffic
        return f"{file.path} {filesystem.get_file_info(file.path).mtime_ns}"
    digest = hashlib.sha256()
    try:
        with open(file.path, "rb") as stream:
            chunk = stream.read(_HASH_CHUNK_BYTES)
            if b"\0" in chunk and file.kind in (TEXT, JSONL) and not file.path.endswith(".gz"):
                raise CorpusError(
                    f"{file.path} is not UTF-8 text; give text (also .gz), JSONL, Parquet or a saved dataset."
                )
            while chunk:
                digest.update(chunk)
                chunk = stream.read(_HASH_CHUNK_BYTES)
    except OSError as error:
        raise CorpusError(f"--corpus names {file.path}, which cannot be read ({error.strerror}).") from error
    return digest.hexdigest()


def open_filesystem(file: SourceFile) -> pafs.FileSystem:
    """Return the file system that a file is on."""
    return _open_filesystem(file.scheme, file.path)[0] if file.scheme else pafs.LocalFileSystem()


def _cut_tasks(files: list[SourceFile], prepare: PrepareConfig) -> Iterator[ReadTask]:
    """Cut large plain files into ranges and join small files, in order."""
    group: list[SourceFile] = []
    group_bytes = 0
    for file in files:
        is_cut = file.kind in (TEXT, JSONL) and not file.path.endswith(".gz")
        is_cut = is_cut and file.size > prepare.shard_bytes and (file.kind == JSONL or prepare.document != "file")
        if group and (is_cut or group_bytes + file.size > prepare.shard_bytes):
            yield ReadTask(tuple(group))
            group, group_bytes = [], 0
        if is_cut:
            for start in range(0, file.size, prepare.shard_bytes):
                yield ReadTask((file,), start, min(start + prepare.shard_bytes, file.size))
        else:
            group.append(file)
            group_bytes += file.size
    if group:
        yield ReadTask(tuple(group))


def read_documents(task: ReadTask, prepare: PrepareConfig, dropped: Counter[str]) -> Iterator[str]:
    """Yield the clean documents of a task, in order.

    Args:
        task: what to read.
        prepare: what a document is, and its bounds.
        dropped: counts what is left out, by reason.

    Raises:
        CorpusError: a file that is damaged, has vanished, or lacks the column.
    """
    for file in task.files:
        for raw in _read_whole(file, task, prepare, dropped):
            if isinstance(raw, bytes):
                try:
                    raw = raw.decode("utf-8")
                except UnicodeDecodeError:
                    dropped["bad_utf8"] += 1
                    continue
            text = clean_text(raw)
            for first in range(0, max(len(text), 1), prepare.max_document_chars):
                document = text[first : first + prepare.max_document_chars]
                if len(document) < prepare.min_document_chars:
                    dropped["too_short" if document else "blank"] += 1
                else:
                    yield document


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


def _read_whole(
    file: SourceFile, task: ReadTask, prepare: PrepareConfig, dropped: Counter[str]
) -> Iterator[str | bytes]:
    try:
        yield from _read_raw(file, task, prepare, dropped)
    except (OSError, EOFError, zlib.error, pa.ArrowException) as error:
        reason = " ".join(str(error).split())[:200]
        raise CorpusError(f"{file.path} cannot be read to its end ({reason}); mend it or leave it out.") from error


def _read_raw(file: SourceFile, task: ReadTask, prepare: PrepareConfig, dropped: Counter[str]) -> Iterator[str | bytes]:
    if file.kind == PACKAGE_DOCS:
        yield from package_docs.read_paragraphs(file.path)
    elif file.kind in (PARQUET, ARROW):
        yield from _read_column(file, prepare.field)
    else:
        with _open_stream(file) as stream:
            if file.kind == JSONL:
                yield from _read_json_lines(stream, task, prepare, dropped)
            elif prepare.document == "file":
                yield stream.read()
            elif prepare.document == "line":
                yield from (line for _, line in _read_lines(stream, task.start, task.end, prepare))
            else:
                yield from _read_paragraphs(stream, task, prepare)


def _open_stream(file: SourceFile) -> IO[bytes]:
    source = open(file.path, "rb") if not file.scheme else open_filesystem(file).open_input_file(file.path)  # noqa: SIM115
    if file.path.endswith(".gz"):
        return io.BufferedReader(gzip.GzipFile(fileobj=source))
    return source if not file.scheme else io.BufferedReader(source)


def _read_lines(stream: IO[bytes], start: int, end: int, prepare: PrepareConfig) -> Iterator[tuple[int, bytes]]:
    r"""Yield (first byte, line) of the lines that begin in [start, end); only \n ends a line.

    A line longer than any document may be comes in pieces, so that memory stays bounded.
    """
    limit = 4 * prepare.max_document_chars
    position = start
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
        yield position, line.rstrip(b"\r\n")
        position += len(line)
        if end >= 0 and not line.endswith(b"\n") and position >= end:
            # The line began in this range: its later pieces belong here, however far it reaches.
            end = max(end, position + 1)


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


def _read_paragraphs(stream: IO[bytes], task: ReadTask, prepare: PrepareConfig) -> Iterator[bytes]:
    """Yield documents between blank lines; a document belongs to the range that its preceding blank line begins in.

    A document longer than any may be comes in pieces, so that memory stays bounded.
    """
    owned, size = task.start == 0, 0
    lines: list[bytes] = []
    for position, line in _read_lines(stream, task.start, -1, prepare):
        is_blank, is_past = not line.strip(), 0 <= task.end <= position
        if lines and (is_blank or size + len(line) > 4 * prepare.max_document_chars):
            yield b"\n".join(lines)
            lines, size = [], 0
        if is_past and (is_blank or not owned):
            return
        if is_blank:
            owned = True
        elif owned:
            lines.append(line)
            size += len(line)
    if lines:
        yield b"\n".join(lines)


def _read_json_lines(stream: IO[bytes], task: ReadTask, prepare: PrepareConfig, dropped: Counter[str]) -> Iterator[str]:
    for _, line in _read_lines(stream, task.start, task.end, prepare):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except UnicodeDecodeError:
            dropped["bad_utf8"] += 1
            continue
        except (json.JSONDecodeError, RecursionError):
            dropped["bad_json"] += 1
            continue
        text = record.get(prepare.field) if isinstance(record, dict) else None
        if isinstance(text, str):
            yield text
        else:
            dropped["no_field"] += 1


def _read_column(file: SourceFile, column: str) -> Iterator[str]:
    with open_filesystem(file).open_input_file(file.path) as source:
        if file.kind == PARQUET:
            parquet = pq.ParquetFile(source)
            _require_text_column(file, column, parquet.schema_arrow)
            batches: Any = parquet.iter_batches(batch_size=1024, columns=[column])
        else:  # `datasets` writes the streaming format, others the file format
            try:
                batches = pa.ipc.open_stream(source)
            except pa.ArrowInvalid:
                source.seek(0)
                reader = pa.ipc.open_file(source)
                batches = (reader.get_batch(i) for i in range(reader.num_record_batches))
                _require_text_column(file, column, reader.schema)
            else:
                _require_text_column(file, column, batches.schema)
        for batch in batches:
            for value in batch.column(batch.schema.get_field_index(column)):
                yield value.as_py() or ""


def _require_text_column(file: SourceFile, column: str, schema: pa.Schema) -> None:
    if column not in schema.names:
        raise CorpusError(
            f"{file.path} has no column {column!r} (it has {', '.join(schema.names)}); set --prepare.field."
        )
    kind = schema.field(column).type
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)):
        raise CorpusError(f"the column {column!r} of {file.path} holds {kind}, not text; set --prepare.field.")
