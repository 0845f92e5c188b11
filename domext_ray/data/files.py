"""What the user names -> files, found, told apart by their content, and opened.

Enters: a comma-separated list of files, globs, folders, s3:// addresses of these, datasets of the hub (hf://NAME@REVISION)
or `package-docs`. Leaves: `SourceFile`s in one canonical order; a stream of the bytes of one, through gzip if its name
says so. What is no UTF-8 text is named for what it is.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import json
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.fs as pafs

from domext_ray.data import package_docs
from domext_ray.errors import CorpusError
from domext_ray.files import split_paths
from domext_ray.storage import Place, hash_files

PACKAGE_DOCS = "package-docs"
READABLE = "text, JSONL, CSV (all may be gzipped), Parquet or a saved dataset"
TEXT, JSONL, CSV, PARQUET, ARROW = "text", "jsonl", "csv", "parquet", "arrow"
_KINDS = {".jsonl": JSONL, ".ndjson": JSONL, ".json": JSONL, ".parquet": PARQUET, ".arrow": ARROW}
_KINDS |= {".csv": CSV, ".tsv": CSV}
_ARCHIVES = (".bz2", ".xz", ".zst", ".lz4", ".zip", ".7z", ".rar", ".tar", ".tgz", ".tar.gz")
_OFFICE = (".pdf", ".doc", ".docx", ".odt", ".rtf", ".xls", ".xlsx", ".ods", ".ppt", ".pptx", ".epub", ".djvu")
_UNREADABLE = (*_ARCHIVES, *_OFFICE)
LOCAL = ("", "file")
_HUB, _HUB_NAME = "hf", r"[\w-][\w.-]*/[\w-][\w.-]*"
_GZIP = ".gz"
_GZIP_MAGIC = b"\x1f\x8b"
_HEAD_BYTES = 2**16
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


@dataclass(frozen=True)
class SourceFile:
    """One file of a corpus.

    Args:
        path: path within its file system; for `package-docs`, the name of a distribution.
        kind: text, jsonl, csv, parquet, arrow or package-docs.
        size: bytes.
        scheme: "" for local files, else for example "s3".
        modified: nanoseconds, as the listing has it.
    """

    path: str
    kind: str
    size: int
    scheme: str = ""
    modified: int = 0

    @property
    def is_gzip(self) -> bool:
        """Whether it is read through gzip."""
        return self.kind in (TEXT, JSONL, CSV) and self.path.lower().endswith(_GZIP)

    @property
    def suffix(self) -> str:
        """What its name ends in, in small letters and without .gz, such as ".jsonl"; "" where there is no dot."""
        return find_suffix(self.path)


def find_files(spec: str) -> tuple[list[SourceFile], list[str]]:
    """Find the files of a corpus without reading them.

    Args:
        spec: the `--corpus` option.

    Returns:
        The files, each once, and the paths that were named more than once.

    Raises:
        CorpusError: an entry that names nothing, a file of an unknown kind, or files that are all empty.
    """
    found = [file for entry in split_paths(spec) for file in _find_files(entry)]
    files: dict[tuple[str, str], SourceFile] = {}
    repeated: dict[str, None] = {}
    for each in found:
        is_local = each.kind != PACKAGE_DOCS and each.scheme in LOCAL
        key = ("", os.path.realpath(each.path)) if is_local else (each.scheme + each.kind, each.path)
        if key in files and each.kind != PACKAGE_DOCS:
            repeated[each.path] = None
        files.setdefault(key, each)
    if not sum(each.size for each in files.values()):
        raise CorpusError(f"--corpus {spec!r} is empty; give {READABLE} that has content.")
    return list(files.values()), list(repeated)


def _find_files(entry: str) -> list[SourceFile]:
    if entry == PACKAGE_DOCS:
        sizes = package_docs.find_distributions()
        return [SourceFile(name, PACKAGE_DOCS, size) for name, size in sizes]
    scheme, _, path = entry.rpartition("://")
    if scheme == _HUB:
        scheme, infos = "", _download_dataset(path)
    else:
        filesystem = _open_filesystem(scheme, path)
        try:
            infos = _list_files(filesystem, path if scheme else str(Path(path).expanduser().absolute()))
        except OSError as error:
            raise CorpusError(f"--corpus {entry!r} cannot be reached ({_to_line(error)}).") from error
    if not infos:
        hint = f"; a dataset of the hub is {_HUB}://{entry}" if re.fullmatch(_HUB_NAME, entry) else ""
        raise CorpusError(f"--corpus {entry!r} names no file; give a file, a glob, a folder or {PACKAGE_DOCS}{hint}.")
    for each in infos:
        _require_readable_kind(entry, each)
    infos = sorted(infos, key=lambda each: each.path)
    kinds = [_KINDS.get(find_suffix(each.path), TEXT) for each in infos]
    return [
        SourceFile(each.path, kind, each.size, scheme, each.mtime_ns or 0)
        for each, kind in zip(infos, kinds, strict=True)
    ]


def _to_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def _require_readable_kind(entry: str, info: pafs.FileInfo) -> None:
    if not info.is_file:
        what = "does not exist" if info.type == pafs.FileType.NotFound else "is no regular file"
        if info.type == pafs.FileType.NotFound and os.path.islink(info.path):
            what = "is a link to nothing"
        raise CorpusError(f"--corpus {entry!r} includes {info.path}, which {what}; mend it or leave it out.")
    if info.path.lower().endswith(_UNREADABLE):
        raise CorpusError(f"--corpus {entry!r} includes {info.path}, whose format cannot be read; give {READABLE}.")


def _list_files(filesystem: pafs.FileSystem, path: str) -> list[pafs.FileInfo]:
    """What a path names: a file, a folder's files, or those that match a glob; in place of a file, what is there."""
    info = filesystem.get_file_info(path)
    if info.type == pafs.FileType.Directory:
        saved = _list_saved_dataset(filesystem, path)
        return _list_visible(filesystem, path) if saved is None else saved
    if info.type != pafs.FileType.NotFound or os.path.islink(path):
        return [info]
    return _glob(filesystem, path) if any(each in path for each in "*?[") else []


def _open_filesystem(scheme: str, path: str) -> pafs.FileSystem:
    if scheme in LOCAL:
        return pafs.LocalFileSystem()
    try:
        return pafs.FileSystem.from_uri(f"{scheme}://{path.split('/', 1)[0]}")[0]
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
    return [each for each in _list_all(filesystem, fixed) if matching.fullmatch(each.path)]


def _escape_outside_sets(text: str) -> str:
    parts = re.split(r"(\[[^\]]+\])", text)
    return "".join(part.replace("[!", "[^", 1) if i % 2 else re.escape(part) for i, part in enumerate(parts))


def _list_all(filesystem: pafs.FileSystem, folder: str) -> list[pafs.FileInfo]:
    """All files below a folder, links to nothing included, which the file system itself leaves out."""
    infos = filesystem.get_file_info(pafs.FileSelector(folder, recursive=True))
    infos = [each for each in infos if each.type != pafs.FileType.Directory]
    if isinstance(filesystem, pafs.LocalFileSystem):
        paths = (f"{parent.rstrip('/')}/{name}" for parent, _, names in os.walk(folder) for name in names)
        infos += filesystem.get_file_info([each for each in paths if os.path.islink(each) and not os.path.exists(each)])
    return infos


def _list_visible(filesystem: pafs.FileSystem, folder: str) -> list[pafs.FileInfo]:
    """All files below a folder but hidden ones."""
    return [each for each in _list_all(filesystem, folder) if "/." not in each.path[len(folder) :]]


def _list_saved_dataset(filesystem: pafs.FileSystem, folder: str) -> list[pafs.FileInfo] | None:
    """The data files of the training split of a folder that `datasets` saved; None: it is another folder.

    Raises:
        CorpusError: its lists are damaged, it has no training split, or it names a file outside of itself.
    """
    split, splits = folder, _read_json(filesystem, f"{folder}/dataset_dict.json")
    if splits is not None:
        names = splits.get("splits")
        if not isinstance(names, list) or not all(isinstance(each, str) for each in names):
            raise CorpusError(f"{folder}/dataset_dict.json is damaged (it lists no splits); save the dataset again.")
        if "train" not in names:
            raise CorpusError(f"{folder} has no split 'train'; name one of {', '.join(names)} below it.")
        split = f"{folder}/train"
    state = _read_json(filesystem, f"{split}/state.json")
    if state is None or "_data_files" not in state:
        return None if splits is None else _list_visible(filesystem, split)
    records = state["_data_files"]
    files = (
        [each.get("filename") if isinstance(each, dict) else None for each in records]
        if isinstance(records, list)
        else [None]
    )
    if not all(isinstance(each, str) for each in files):
        raise CorpusError(f"{split}/state.json is damaged (it lists no data files); save the dataset again.")
    own = os.path.realpath(folder).rstrip("/") + "/"
    is_local = isinstance(filesystem, pafs.LocalFileSystem)
    for name in files:
        is_inside = name and not name.startswith("/") and ".." not in name.split("/")
        if not is_inside or (is_local and not os.path.realpath(f"{split}/{name}").startswith(own)):
            raise CorpusError(
                f"{split}/state.json names {name!r}, which is outside of {folder}; a saved dataset has its data files "
                "in its own folder."
            )
    return filesystem.get_file_info([f"{split}/{name}" for name in files])


def _read_json(filesystem: pafs.FileSystem, path: str) -> dict[str, Any] | None:
    """Return the object in a file; None: there is no such file."""
    if filesystem.get_file_info(path).type != pafs.FileType.File:
        return None
    with filesystem.open_input_file(path) as file:
        content = file.read()
    try:
        record = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise CorpusError(f"{path} is no JSON ({_to_line(error)}); mend it, or save the dataset again.") from error
    return record if isinstance(record, dict) else {}


def _download_dataset(name: str) -> list[pafs.FileInfo]:
    """Fetch the training split of a dataset of the hub, NAME or NAME@REVISION, into the cache of `datasets`."""
    import datasets

    repository, _, revision = name.partition("@")
    if not re.fullmatch(_HUB_NAME, repository) and not re.fullmatch(r"[\w-][\w.-]*", repository):
        raise CorpusError(f"--corpus '{_HUB}://{name}' names no dataset; write {_HUB}://OWNER/NAME or …@REVISION.")
    if os.path.exists(repository):
        raise CorpusError(
            f"--corpus '{_HUB}://{name}' is also a folder here, which would be read in its stead; start the job from "
            f"another folder, or give {repository} for the local one."
        )
    try:
        train = datasets.load_dataset(repository, split="train", revision=revision or None)
    except Exception as error:  # the hub's client raises a dozen kinds: offline, unknown, gated, no such split …
        raise CorpusError(
            f"--corpus '{_HUB}://{name}' could not be fetched as a dataset with a train split ({type(error).__name__}: "
            f"{_to_line(error)})."
        ) from error
    return pafs.LocalFileSystem().get_file_info([each["filename"] for each in train.cache_files])


def find_suffix(path: str) -> str:
    """Return what a path's last name ends in, in small letters and without .gz."""
    name = path.rsplit("/", 1)[-1].lower().removesuffix(_GZIP)
    return name[name.rfind(".") :] if "." in name else ""


def fingerprint_files(files: Sequence[SourceFile], memory: Place | None = None) -> list[str]:
    """Return a hash of each file's content; of one that is not on a local file system, its path and time.

    Args:
        files: as they were found.
        memory: see `storage.hash_files`.

    Raises:
        CorpusError: one cannot be read.
    """
    local = [each.path for each in files if each.scheme in LOCAL and each.kind != PACKAGE_DOCS]
    try:
        hashes = hash_files(local, memory)
    except OSError as error:
        raise CorpusError(f"--corpus names {error.filename}, which cannot be read ({error.strerror}).") from error
    return [
        package_docs.describe_distribution(each.path)
        if each.kind == PACKAGE_DOCS
        else hashes.get(each.path) or f"{each.path} {each.modified}"
        for each in files
    ]


def open_filesystem(file: SourceFile) -> pafs.FileSystem:
    """Return the file system that a file is on."""
    return _open_filesystem(file.scheme, file.path)


@contextlib.contextmanager
def name_unreadable(file: SourceFile) -> Iterator[None]:
    """Name a file that cannot be read to its end.

    Raises:
        CorpusError: it is damaged, or has vanished.
    """
    try:
        yield
    except (OSError, EOFError, zlib.error, pa.ArrowException, csv.Error, UnicodeDecodeError) as error:
        raise CorpusError(
            f"{file.path} cannot be read to its end ({_to_line(error)}); mend it or leave it out."
        ) from error


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
