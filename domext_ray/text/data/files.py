"""What the user names -> files, found, told apart by their content, and opened.

Enters: a comma-separated list of files, globs, folders, s3:// addresses of these, datasets of the hub
(hf://NAME:CONFIG@REVISION) or `package-docs`. Leaves: `SourceFile`s in one canonical order, the same on every node; a
stream of the bytes of one, through gzip if its name says so. What is no UTF-8 text is named for what it is.
"""

from __future__ import annotations

import contextlib
import csv
import functools
import gzip
import io
import itertools
import json
import os
import re
import zlib
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import IO

import pyarrow as pa
import pyarrow.fs as pafs

from domext_ray.config.pretrain import REPAIR_NOTES
from domext_ray.errors import CorpusError, StorageError, name_file, to_line
from domext_ray.files import ASSETS, EVERYTHING, Globs, matches, split_glob, split_paths, walk
from domext_ray.storage import POINTER_FAULT, Place, find_cache, find_fault, hash_text, is_address, is_pointer
from domext_ray.text.data.folders import CARD, choose_text, name_few, say, say_train
from domext_ray.text.data.names import describe_near, find_near

PACKAGE_DOCS = "package-docs"
SHIPPED = {REPAIR_NOTES: str(ASSETS / "sets" / "repair_notes" / "text.txt.gz")}
"""Text that comes with the package, by its name."""
READABLE = "text, JSONL, CSV (all may be gzipped), Parquet or a saved dataset"
TEXT, JSONL, CSV, PARQUET, ARROW = "text", "jsonl", "csv", "parquet", "arrow"
LINES = (TEXT, JSONL, PACKAGE_DOCS)
"""Kinds whose rows are lines, so that a large file is read in ranges."""

_KINDS = {".jsonl": JSONL, ".ndjson": JSONL, ".json": JSONL, ".parquet": PARQUET, ".arrow": ARROW}
_KINDS |= {".csv": CSV, ".tsv": CSV}
_DECOMPRESS = "run {} FILE and give what that leaves"
_XML = (
    "XML",
    "take its texts out, and its labels if it has some, and give these (for an article of PubMed Central, run pandoc "
    "-f jats -t plain --wrap none FILE > NEW.txt)",
)
_FOREIGN: tuple[tuple[str, str, str, bytes], ...] = (
    ("a PDF", "run pdftotext FILE NEW.txt and give that", ".pdf", rb"%PDF-"),
    ("DjVu", "run djvutxt FILE NEW.txt and give that", ".djvu", rb"AT&TFORM"),
    (
        "a spreadsheet",
        "save its table as CSV in UTF-8, and give that",
        ".xlsx .xls .ods",
        rb"(?s)PK\x03\x04.*?(?:xl/(?:work|style|theme|shared|_rel)|opendocument\.spreadsheet)",
    ),
    (
        "a document of an office program",
        "run pandoc FILE -t plain --wrap none -o NEW.txt and give that, or save a table of it as CSV in UTF-8",
        ".docx .odt .epub .rtf",
        rb"(?s)PK\x03\x04.*?(?:word/(?:doc|style|theme|setting|font|_rel)|opendocument\.text|application/epub)",
    ),
    (
        "a document of an office program",
        "save it as plain text in UTF-8, or a table of it as CSV, and give that",
        ".doc .ppt .pptx",
        rb"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1|(?s:PK\x03\x04.*?ppt/(?:pres|slide|theme|_rel))",
    ),
    ("a file that is compressed with bzip2", _DECOMPRESS.format("bunzip2 -k"), ".bz2", rb"BZh\d1AY&SY"),
    ("a file that is compressed with xz", _DECOMPRESS.format("unxz -k"), ".xz", rb"\xfd7zXZ\0"),
    ("a file that is compressed with zstd", _DECOMPRESS.format("unzstd"), ".zst", rb"\x28\xb5\x2f\xfd"),
    ("a file that is compressed with lz4", _DECOMPRESS.format("unlz4"), ".lz4", rb"\x04\x22\x4d\x18"),
    ("Parquet or Arrow within gzip", _DECOMPRESS.format("gunzip -k"), ".parquet.gz .arrow.gz", b""),
    (
        "a DocBin of spaCy",
        "write its documents as JSON Lines, each an object with text and spans, or text and cats, and give that",
        ".spacy",
        b"",
    ),
    (
        "data of another program",
        "write its rows as Parquet, CSV or JSON Lines, and give that",
        ".pkl .pickle .npy .npz .h5 .hdf5 .orc .avro .rds .rdata .sav .dta .sas7bdat .db .sqlite .sqlite3 .mdb",
        rb"SQLite format 3|\x93NUMPY|\x89HDF|Obj\x01|\x80[\x02-\x05][\x95}\]cX(]",
    ),
    (
        "an archive",
        "unpack it, and give the files that are in it",
        ".zip .7z .rar .tar .tgz .tar.gz .tbz2 .txz",
        rb"PK\x03\x04|7z\xbc\xaf|Rar!|(?s:.{257})ustar",
    ),
    (*_XML, ".xml .nxml", rb"(?i)(\xef\xbb\xbf)?\s*<(\?xml|!doctype|mediawiki)\b"),
)
"""What nothing here reads: what it is, what to do about it, how its names end, and as a pattern how it begins."""
_UNREADABLE = tuple(end for _, _, ends, _ in _FOREIGN for end in ends.split())
_NO_PROSE = (".xml", ".nxml", ".html", ".htm", ".xhtml", ".ipynb", ".conll", ".conllu", ".iob", ".iob2", ".bio")
"""Files of text that are no texts to read beside others: each is a kind of its own in a folder."""
LOCAL = ("", "file")
SYSTEMS = ("s3", "gs", "hdfs", "viewfs", "abfs", "abfss")
"""What Arrow reads beside this machine's disks."""
HUB, _HUB_NAME = "hf", r"[\w-][\w.-]*/[\w-][\w.-]*"
_HUB_ENTRY = re.compile(rf"({_HUB_NAME}|[\w-][\w.-]*)(?::([^@:/]+))?(?:@(.+))?")
_COMMIT = "[0-9a-f]{40}"
"""A revision that cannot move. Behind a branch or tag and another @, it is what that was when work began."""
_DOCS_ENTRY = rf"{PACKAGE_DOCS}(:(all|[1-9]\d*))?"
LISTING_THREADS = 16
_CARD_BYTES, _MOST_POINTER_BYTES = 2**20, 1024
_GZIP, _GZIP_MAGIC = ".gz", b"\x1f\x8b"
HEAD_BYTES = 2**16
"""By which a file's kind and encoding are seen."""
_NOTHING = pafs.FileType.NotFound
_OWN_FILE = re.compile(
    r"(.*/\.corpora)/.*|(.*)/(?:attempts/\d{6}\.(?:json|end)|adapters/\w+/adapter\.json|domext_export\.json)"
)
"""What is in folders of prepared text, of runs and other work, of banks and of exports, and in no folder of text."""
_RUNS_PAGE = "index.html"
"""Of all runs, in the folder that has them."""
_MIN_NUL_DISTANCE = 1000
"""Text may have a stray NUL, which is dropped; from one in so many bytes on a file is no text."""

RECODE = (
    "run iconv -f WINDOWS-1252 -t UTF-8 FILE > NEW if it is of Windows or Latin-1 (in its place GB18030 for Chinese, "
    "SHIFT_JIS for Japanese text), or iconv -f UTF-8 -t UTF-8 -c FILE > NEW to take damaged characters out"
)
"""What makes text UTF-8 whose encoding its first bytes do not tell."""
_NOT_UTF8 = "is {0}, not UTF-8; run iconv -f {0} -t UTF-8 FILE > NEW"
_NOT_TEXT = f"is not UTF-8 text but {{}}; give {READABLE}"
_NO_TEXT = "is no plain text but {}; {}"
_MARKUP = "is no plain text but {}; run pandoc -f {} -t plain --wrap none FILE > NEW.txt and give that"
_SIGNATURES = (
    (rb"\xff\xfe\0\0|\0\0\xfe\xff", _NOT_UTF8.format("UTF-32")),
    (rb"\xff\xfe|\xfe\xff", _NOT_UTF8.format("UTF-16")),
    (rb"\x1b\$[@B]", _NOT_UTF8.format("ISO-2022-JP")),
    (_GZIP_MAGIC, _NOT_TEXT.format("gzip, whose name must end in .gz")),
    (rb"PAR1", _NOT_TEXT.format("Parquet, whose name must end in .parquet")),
    (rb"ARROW1", _NOT_TEXT.format("Arrow, whose name must end in .arrow")),
    (rb"(?is)(\xef\xbb\xbf)?\s*(<!--.*?-->\s*)*<(!doctype\s+html|html)\b", _MARKUP.format("HTML", "html")),
    (rb"(?i)(\xef\xbb\xbf)?\s*\{\\rtf", _MARKUP.format("RTF", "rtf")),
    *((start, _NO_TEXT.format(what, cure)) for what, cure, _, start in _FOREIGN if start),
)
"""How files begin that are no UTF-8 text, as patterns; what each is, and what to do about it."""


@dataclass(frozen=True)
class SourceFile:
    """One file of a corpus."""

    path: str  # within its file system; on the hub OWNER/NAME@COMMIT/PATH
    kind: str  # text, jsonl, csv, parquet, arrow or package-docs
    size: int  # bytes; 1 of `package-docs` that is not written yet (`package_docs`)
    scheme: str = ""  # empty for local files, else for example "s3"
    modified: int = 0  # nanoseconds, as the listing has it: a hint, see `hashes`

    @property
    def address(self) -> str:
        """Its path on a disk, or with its scheme."""
        return self.path if self.scheme in LOCAL else f"{self.scheme}://{self.path}"

    @property
    def is_gzip(self) -> bool:
        """Whether it is read through gzip."""
        return self.kind in (TEXT, JSONL, CSV) and self.path.lower().endswith(_GZIP)

    @property
    def suffix(self) -> str:
        """What its name ends in, in small letters and without .gz, such as ".jsonl"; "" where there is no dot."""
        return find_suffix(self.path)


def find_files(spec: str, *, by_names: bool = True) -> tuple[list[SourceFile], list[str]]:
    """Find the files of a corpus without reading them: each once, and the paths that were named more than once.

    With `by_names` files of a folder whose names alone say that they are of another split than train are left out.
    """
    files: dict[tuple[str, str], SourceFile] = {}
    repeated: dict[str, None] = {}
    entries, find = split_paths(spec), functools.partial(_find_files, by_names=by_names)
    # What is elsewhere takes a request for each entry. A stop is obeyed at once: nobody waits for this pool's threads.
    with ThreadPool(max(1, min(len(entries), LISTING_THREADS))) as pool:
        found = list(itertools.chain.from_iterable(pool.imap(find, entries)))
    for file in found:
        key = ("", os.path.realpath(file.path)) if file.scheme in LOCAL else (file.scheme, file.path)
        if key in files:
            repeated[file.path] = None
        files.setdefault(key, file)
    if not any(file.size for file in files.values()):
        raise CorpusError(f"--corpus {spec!r} is empty; give {READABLE} that has content.")
    return list(files.values()), list(repeated)


def _find_files(entry: str, *, by_names: bool = True) -> list[SourceFile]:
    if re.fullmatch(_DOCS_ENTRY, entry):
        return [SourceFile(entry, PACKAGE_DOCS, 1)]
    entry = SHIPPED.get(entry, entry)
    _check_entry(entry)
    scheme, _, path = entry.rpartition("://")
    files = _find_dataset(entry, path) if scheme == HUB else _find_paths(entry, scheme, path, by_names)
    for file in files:
        if fault := find_foreign(file.path):
            raise CorpusError(f"--corpus {entry!r} includes {file.path}, which {fault}.")
    return sorted(files, key=lambda file: file.path)


def check_addresses(spec: str) -> None:
    """Refuse addresses that are none, without asking anybody."""
    for entry in split_paths(spec):
        _check_entry(entry)


def _check_entry(entry: str) -> None:
    fault = find_fault(entry) if is_address(entry) else ""
    scheme, mark, path = entry.partition(":/")
    if not fault and re.fullmatch("[A-Za-z][A-Za-z0-9+.-]+", scheme) and mark and scheme not in (*SYSTEMS, HUB):
        fault = "a path, s3://BUCKET/FOLDER, gs://BUCKET/FOLDER or hf://OWNER/NAME"
        if scheme.lower() == "file":
            fault = "" if path.startswith("//") and scheme == "file" else f"a plain path, such as /{path.lstrip('/')}"
    if fault:
        raise CorpusError(f"--corpus {entry!r} cannot be read; it must be {fault}.")


def _find_paths(entry: str, scheme: str, path: str, by_names: bool) -> list[SourceFile]:
    filesystem = _open_filesystem(scheme, path)
    try:
        infos = _list_files(filesystem, path if scheme else str(Path(path).expanduser().absolute()), by_names)
        is_there = bool(infos) or scheme in LOCAL or filesystem.get_file_info(path.split("/")[0]).type != _NOTHING
    except OSError as error:
        raise CorpusError(f"--corpus {entry!r} cannot be reached ({to_line(error)}).") from error
    except UnicodeEncodeError as error:  # Python reads such bytes of a name as surrogates, which Arrow does not take
        shown = os.fsencode(error.object).decode(errors="backslashreplace")
        raise CorpusError(f"--corpus {entry!r} includes {shown}, whose name is not UTF-8; rename it.") from error
    if not is_there:
        raise CorpusError(
            f"--corpus {entry!r}: there is no bucket {scheme}://{path.split('/')[0]}; make it, or give another."
        )
    if not infos:
        hint = f"; a dataset of the hub is {HUB}://{entry}" if re.fullmatch(_HUB_NAME, entry) else ""
        near = describe_near(find_near(entry)) if scheme in LOCAL else ""
        give = near or f"give a file, a glob, a folder or {PACKAGE_DOCS}{hint}."
        raise CorpusError(f"--corpus {entry!r} names no file; {give}")
    for info in infos:
        if not info.is_file:
            is_missing = info.type == _NOTHING
            what = "does not exist" if is_missing else "is no regular file"
            what = "is a link to nothing" if is_missing and os.path.islink(info.path) else what
            raise CorpusError(f"--corpus {entry!r} includes {info.path}, which {what}; mend it or leave it out.")
        if scheme not in LOCAL and (fault := find_fault(address := f"{scheme}://{info.path}")) and is_address(address):
            raise CorpusError(f"--corpus {entry!r} includes {address!r}, which cannot be read; it must be {fault}.")
    return [SourceFile(file.path, _find_kind(file.path), file.size, scheme, file.mtime_ns or 0) for file in infos]


def _list_files(filesystem: pafs.FileSystem, path: str, by_names: bool) -> list[pafs.FileInfo]:
    """What a path names: a file, a folder's files, or those that match a glob; in place of a file, what is there."""
    has_slash, path = path.endswith("/"), path.rstrip("/") or "/"
    info = filesystem.get_file_info(path)
    is_folder = info.type == pafs.FileType.Directory
    if info.is_file and not isinstance(filesystem, pafs.LocalFileSystem):
        is_folder = bool(filesystem.get_file_info(pafs.FileSelector(path, allow_not_found=True)))
        if is_folder and not has_slash:
            named = _name(filesystem, path)
            raise CorpusError(
                f"--corpus names {named}, which is both a file and a folder; give the folder as {named}/, or the file "
                f"as {named[:-1]}[{named[-1]}]."
            )
    if is_folder:
        saved = _list_saved_dataset(filesystem, path)
        return _list_text(filesystem, path, by_names) if saved is None else saved
    if info.type != _NOTHING or os.path.islink(path):
        return [info]
    if any(char in path for char in "*?["):  # * and ? match within a folder's name, ** across folders
        folder, globs = split_glob(path)
        if filesystem.get_file_info(folder).type == pafs.FileType.Directory:
            found = _list_all(filesystem, folder, globs)[0]
            if not path.endswith("/**") and "/." not in path[len(folder) :]:  # else they are meant
                _say_hidden(filesystem, folder, [info.path for info in found])
            return found
    return []


def _say_hidden(filesystem: pafs.FileSystem, folder: str, paths: Sequence[str]) -> None:
    """Name the hidden files that a glob matches, which a shell's would not."""
    hidden = [_name(filesystem, path) for path in paths if "/." in path[len(folder.rstrip("/")) :]]
    if 0 < len(hidden) < len(paths):
        say(f"a glob names hidden files, which are read: {name_few(hidden)}; a folder leaves them out")


def _open_filesystem(scheme: str, path: str) -> pafs.FileSystem:
    if scheme in LOCAL:
        return pafs.LocalFileSystem()
    try:
        return pafs.FileSystem.from_uri(f"{scheme}://{path.split('/', 1)[0]}")[0]
    except (pa.ArrowInvalid, OSError) as error:
        raise CorpusError(f"--corpus {scheme}://{path} cannot be reached ({error}).") from error


def _list_all(
    filesystem: pafs.FileSystem, folder: str, globs: Globs = EVERYTHING
) -> tuple[list[pafs.FileInfo], set[str]]:
    """The files below a folder that match, links to nothing included, and the folders there that jobs have made."""
    if isinstance(filesystem, pafs.LocalFileSystem):  # whose own listing follows links for ever
        found = [(path, is_match) for path, is_folder, is_match in walk(folder, globs) if not is_folder]
        paths, matching = [path for path, _ in found], [path for path, is_match in found if is_match]
    else:
        infos = filesystem.get_file_info(pafs.FileSelector(folder, recursive=True))
        listed = {info.path: info for info in infos if info.type != pafs.FileType.Directory}
        paths = [*listed]
        matching = [path for path in paths if matches(globs, path[len(folder) :].removeprefix("/"))]
    made = _find_own(paths)
    if own := made - {folder}:
        pages = {f"{path.rpartition('/')[0]}/{_RUNS_PAGE}" for path in own}
        matching = [path for path in matching if path not in pages and not _is_below(path, own)]
        outer = sorted(path for path in own if not _is_below(path.rpartition("/")[0], own))
        say(
            "what jobs of this package have made is no text, and is left out: "
            f"{name_few([_name(filesystem, path) for path in outer])}"
        )
    if isinstance(filesystem, pafs.LocalFileSystem):
        return filesystem.get_file_info(matching), made
    return [listed[path] for path in matching], made


def _find_own(paths: Sequence[str]) -> set[str]:
    """The folders of a listing that jobs of this package have made: at the first start of a run it was not there."""
    configs = {path.removesuffix("/config.yaml") for path in paths if path.endswith("/config.yaml")}
    runs = {path.removesuffix("/run.json") for path in paths if path.endswith("/run.json")}
    return (runs & configs) | {found[1] or found[2] for path in paths if (found := _OWN_FILE.fullmatch(path))}


def _name(filesystem: pafs.FileSystem, path: str) -> str:
    """A path as a user would write it."""
    kind = filesystem.type_name
    return path if kind == "local" else f"{'gs' if kind == 'gcs' else kind}://{path}"


def _is_below(path: str, folders: Container[str]) -> bool:
    return any(path[: found.start()] in folders for found in re.finditer("/|$", path))


def _list_text(filesystem: pafs.FileSystem, folder: str, by_names: bool) -> list[pafs.FileInfo]:
    """The files of a folder that are its text, none of them hidden."""
    infos, made = _list_all(filesystem, folder)
    named, start = _name(filesystem, folder), len(folder.rstrip("/")) + 1
    if folder in made:
        raise CorpusError(f"--corpus names {named}, which a job of this package has made; give a folder of text.")
    listed = {info.path[start:]: info for info in infos if "/." not in info.path[start - 1 :]}

    def read_card() -> bytes:
        if not listed[CARD].is_file:  # a pipe would be waited for
            return b""
        with filesystem.open_input_file(listed[CARD].path) as file:
            return file.read(_CARD_BYTES)

    sizes = {name: info.size or 0 for name, info in listed.items()}
    return [listed[name] for name in choose_text(named, sizes, _find_form, read_card, by_names=by_names)]


def _list_saved_dataset(filesystem: pafs.FileSystem, folder: str) -> list[pafs.FileInfo] | None:
    """The data files of the training split of a folder that `datasets` saved; None: it is another folder."""
    split, splits = folder, _read_names(filesystem, f"{folder}/dataset_dict.json", "splits")
    if splits is not None:
        if "train" not in splits:
            raise CorpusError(f"{folder} has no split 'train'; name one of {', '.join(splits)} below it.")
        split = f"{folder}/train"
        if others := [other for other in splits if other != "train"]:
            named = _name(filesystem, folder)
            say_train(named, splits, f"to read another, name its folder, such as {named}/{others[0]}")
    files = _read_names(filesystem, f"{split}/state.json", "_data_files")
    if files is None:
        return None if splits is None else _list_text(filesystem, split, by_names=False)
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


def _read_names(filesystem: pafs.FileSystem, path: str, field: str) -> list[str] | None:
    """Return the names, or objects' file names, that a JSON file lists; None: there is no such file or list."""
    if filesystem.get_file_info(path).type != pafs.FileType.File:
        return None
    with filesystem.open_input_file(path) as file:
        content = file.read()
    try:
        record = json.loads(content)
        names = record["splits"] if field == "splits" else record.get(field)
        names = names and [entry["filename"] if field == "_data_files" else entry for entry in names]
        "".join(names or [])  # all are text
    except (AttributeError, KeyError, TypeError) as error:
        raise CorpusError(f"{path} is damaged ({to_line(error)}); save the dataset again.") from error
    except (ValueError, RecursionError) as error:
        raise CorpusError(f"{path} is no JSON ({to_line(error)}); mend it, or save the dataset again.") from error
    return names


def _find_dataset(entry: str, path: str) -> list[SourceFile]:
    """The files of the training split of a dataset of the hub, at a commit, whose list is kept: it stays as it is."""
    match = _HUB_ENTRY.fullmatch(path)
    if match is None:
        raise CorpusError(f"--corpus {entry!r} names no dataset; write {HUB}://OWNER/NAME, …:CONFIG or …@REVISION.")
    name, config, revision = match.groups()
    revision = revision and revision.rpartition("@")[2]
    if os.path.exists(name):
        raise CorpusError(
            f"--corpus {entry!r} is also a folder here, which would be read in its stead; start the job from another "
            f"folder, or give {name} for the local one."
        )
    kept, named = Place(find_cache()) / "hub", path.partition("@")[0]
    with contextlib.suppress(FileNotFoundError):
        pinned = hash_text(f"{named}@{revision}")
        files = [SourceFile(**record) for record in json.loads((kept / pinned).read_bytes())]
        with contextlib.suppress(FileNotFoundError):  # a former version kept the files alone
            _say_split(entry, json.loads((kept / f"{pinned}.splits").read_bytes()))
        return files
    import datasets
    from huggingface_hub import HfApi

    try:
        info = HfApi().dataset_info(name, revision=revision, files_metadata=True)
        splits = datasets.load_dataset_builder(name, config, revision=info.sha).config.data_files
        sizes = {sibling.rfilename: sibling.size or 0 for sibling in info.siblings or []}
        paths = [str(address).partition(f"@{info.sha}/")[2] for address in splits["train"]]
        files = [SourceFile(f"{name}@{info.sha}/{file}", _find_kind(file), sizes[file], HUB) for file in paths]
    except Exception as error:  # the hub's client raises a dozen kinds: offline, unknown, gated, no such split …
        raise CorpusError(
            f"--corpus {entry!r} could not be fetched as a dataset with a train split ({type(error).__name__}: "
            f"{to_line(error)})."
        ) from error
    pinned = hash_text(f"{named}@{info.sha}")
    (kept / f"{pinned}.splits").put(json.dumps([*splits]).encode())
    (kept / pinned).put(json.dumps([vars(file) for file in files]).encode())
    _say_split(entry, [*splits])
    return files


def _say_split(entry: str, splits: Sequence[str]) -> None:
    if len(splits) > 1:
        say_train(entry, splits, "to read another, download its files and name them")


def has_own_text(spec: str) -> bool:
    """Whether a corpus has text of the user's, which is neither on the hub, nor with packages, nor ships."""
    others = re.compile(rf"{_DOCS_ENTRY}|{'|'.join(map(re.escape, SHIPPED))}|{HUB}://.*", re.DOTALL)
    return not all(map(others.fullmatch, split_paths(spec)))


def pin_entries(spec: str, known: str, megabytes: int | None) -> str:
    """Return a corpus with all named that may change: the commit of a dataset, and how much of `package-docs` is read.

    `known` is what this returned when the work began, empty where it begins now; what had no such name then keeps its
    own. `megabytes` of `package-docs` are wanted; None: all.
    """
    entries, before = split_paths(spec), split_paths(known)
    pinned = [_pin_entry(entry, before, megabytes) for entry in entries]
    return spec if pinned == entries else ",".join(pinned)


def _pin_entry(entry: str, before: list[str], megabytes: int | None) -> str:
    if entry == PACKAGE_DOCS:
        return next((name for name in before if name.split(":")[0] == entry), f"{entry}:{megabytes or 'all'}")
    if entry.startswith(f"{HUB}://") and not re.search(f"@{_COMMIT}$", entry):
        named = re.compile(re.escape(entry) + f"(@{_COMMIT})?")
        if known := next(filter(named.fullmatch, before), ""):
            return known
        return f"{entry}@{_find_files(entry)[0].path.split('@')[1].split('/')[0]}"
    return entry


def _find_kind(path: str) -> str:
    return _KINDS.get(find_suffix(path), TEXT)


def _find_form(path: str) -> str:
    """Return a file's kind, or of one that cannot be read, or whose text is none by itself, what its name ends in."""
    name = path.lower().removesuffix(_GZIP)
    return find_suffix(path) if path.lower().endswith(_UNREADABLE) or name.endswith(_NO_PROSE) else _find_kind(path)


def find_foreign(path: str) -> str:
    """Say what a file is, by its name, that nothing here reads, and what to do about it; empty: its name says less."""
    for what, cure, ends, _ in _FOREIGN:
        if path.lower().endswith(tuple(ends.split())):
            return _NO_TEXT.format(what, cure)
    return ""


def find_suffix(path: str) -> str:
    """Return what a path's last name ends in, in small letters and without .gz."""
    name = path.rsplit("/", 1)[-1].lower().removesuffix(_GZIP)
    return name[name.rfind(".") :] if "." in name else ""


def open_file(file: SourceFile) -> pa.NativeFile:
    """Open a file wherever it is; of the hub, a copy of that commit's in this machine's cache."""
    if file.scheme == HUB:
        return pafs.LocalFileSystem().open_input_file(_download(file))
    source = _open_filesystem(file.scheme, file.path).open_input_file(file.path)
    _require_fetched(file, source)
    return source


def _require_fetched(file: SourceFile, source: IO[bytes] | pa.NativeFile) -> None:
    """Refuse what Git LFS left in place of a file; one that is larger is not looked at."""
    if file.size < _MOST_POINTER_BYTES:
        if is_pointer(source.read(_MOST_POINTER_BYTES)):
            source.close()
            raise CorpusError(f"{file.path} {POINTER_FAULT}.")
        source.seek(0)


def _download(file: SourceFile) -> str:
    from huggingface_hub import hf_hub_download

    repository, _, rest = file.path.partition("@")
    commit, _, name = rest.partition("/")
    return hf_hub_download(repository, name, repo_type="dataset", revision=commit)


@contextlib.contextmanager
def name_unreadable(file: SourceFile) -> Iterator[None]:
    """Name a file that cannot be read to its end.

    One that is damaged or has vanished is a CorpusError; a disk or bucket that fails is a StorageError.
    """
    try:
        with name_file(file.path):
            yield
    except (OSError, EOFError, zlib.error, pa.ArrowException, csv.Error, UnicodeDecodeError) as error:
        is_storage = isinstance(error, OSError) and not isinstance(error, (FileNotFoundError, gzip.BadGzipFile))
        if is_storage and file.scheme not in LOCAL:  # a bucket's errors have no number
            raise StorageError(
                f"{file.scheme}://{file.path} cannot be read ({to_line(error)}): look after that storage, and the "
                "same command goes on."
            ) from error
        raise CorpusError(
            f"{file.path} cannot be read to its end ({to_line(error)}); mend it or leave it out."
        ) from error


def open_stream(file: SourceFile) -> IO[bytes]:
    """Open a file of text, through gzip if its name says so."""
    path = _download(file) if file.scheme == HUB else file.path
    source = open_file(file) if file.scheme not in (*LOCAL, HUB) else open(path, "rb")  # noqa: SIM115
    _require_fetched(file, source)
    if not file.is_gzip:
        return source if isinstance(source, io.BufferedReader) else io.BufferedReader(source)
    if source.read(2) != _GZIP_MAGIC:
        source.close()
        raise CorpusError(f"{file.path} ends in .gz and is no gzip file; rename it, or compress it with gzip.")
    source.seek(0)
    return io.BufferedReader(gzip.GzipFile(fileobj=source))


def part_words(text: str) -> str:
    """Make a space of every U+200B, without which tokenizers join words; all places stay as they are."""
    return text.replace("\u200b", " ")


def require_utf8_text(file: SourceFile, stream: IO[bytes]) -> bytes:
    """Refuse what is no text, or text of another encoding; return the first bytes, by which that was seen."""
    head = stream.read(HEAD_BYTES)
    stream.seek(0)
    require_text(file.path, head)
    return head


def require_text(path: str, head: bytes) -> None:
    """Refuse a file by its first bytes; see `require_utf8_text`."""
    fault = next((sentence for start, sentence in _SIGNATURES if re.match(start, head)), "")
    fault = POINTER_FAULT if is_pointer(head) else fault
    num_even, num_odd = head[::2].count(0), head[1::2].count(0)
    if not fault and num_even + num_odd > len(head) / _MIN_NUL_DISTANCE:
        fault = f"is not UTF-8 text (it has NUL bytes); give {READABLE}"
        for few, many, name in ((num_even, num_odd, "UTF-16LE"), (num_odd, num_even, "UTF-16BE")):
            if many > 0.3 * len(head) / 2 and few < 0.01 * len(head) / 2:  # every other byte of Latin letters
                fault = _NOT_UTF8.format(name)
    if fault:
        raise CorpusError(f"{path} {fault}.")


def read_list(path: Path, named: str) -> str:
    """Return the text of a small file that an option names, through gzip if its name says so.

    It must be UTF-8, with or without a byte-order mark. `named` is what a CorpusError calls the file.
    """
    if fault := find_foreign(str(path)):
        raise CorpusError(f"{named} {fault}.")
    try:
        with open_stream(SourceFile(str(path), TEXT, path.stat().st_size)) as stream:
            content = stream.read()
        require_text(named, content[:HEAD_BYTES])
        return content.decode("utf-8-sig")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise CorpusError(f"{named} cannot be read as UTF-8 text ({to_line(error)}).") from error


def require_lines(path: str, head: bytes) -> None:
    r"""Refuse a file whose lines end with \r alone, by its first bytes: all of it would be one line."""
    if b"\n" not in head and b"\r" in head.strip():
        raise CorpusError(
            rf"{path} ends its lines with CR alone, as old Macs did; run tr '\r' '\n' < FILE > NEW and give that."
        )
