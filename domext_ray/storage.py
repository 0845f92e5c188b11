"""The one door to what outlives a process: files and folders on a disk, or objects of a bucket (s3://, gs://).

A file is there whole or not at all. A folder counts when its manifest is there, which comes last. A file can be made on
the condition that there is none, which is all that a lock needs (runs/attempts.py). What is not there is nothing, or a
FileNotFoundError; storage that cannot say what is there is a StorageError. Both backends promise the same.

A bucket is asked with patience: what does not answer is asked again, what refuses is told. Credentials, endpoint and
region are those of the environment (AWS_*) or the node's role. gs:// takes the same path through the same library; it
has been run against a stand-in of Google's server alone.

The places stand first, then what is made of them, then the disk and the bucket behind them.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import glob
import hashlib
import json
import mmap
import os
import re
import shutil
import socket
import stat
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import IO, Any, Protocol, TypeVar

from domext_ray.errors import (
    ConfigError,
    DomextError,
    RunError,
    StorageError,
    find_storage_error,
    name_file,
)

SCHEMES = ("s3", "gs")
_ADDRESS = re.compile(r"(s3[an]?|gs|gcs):/(/?)([^/]*)/?(.*)", re.IGNORECASE | re.DOTALL)
_BUCKET_NAME = re.compile(r"[a-z0-9]([a-z0-9._-]*[a-z0-9])?")
MOST_KEY_BYTES, ROOM_BYTES = 1024, 224
"""Of an object's key, as S3 has it; and of these what a job adds to a folder's."""
HASH_BYTES = 2**20
"""Of a file that is hashed, read at once."""
PATIENCE_SECONDS, REQUEST_SECONDS = 120.0, 60.0
"""How long a bucket is asked again that does not answer, and how long one request may take."""
KEPT_SECONDS, TIDY_SECONDS = 7 * 86_400.0, 3600.0
"""How long a copy of an object stays in this machine's cache after its last use, and how often that is looked at."""
NEW = "new"
"""The condition that nothing is there yet."""
_NO_FILE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP)
"""What a disk answers where a name has no file: nothing at all, a folder, or a link to itself."""
T = TypeVar("T")
_POINTER = b"version https://git-lfs.github.com/spec/"
POINTER_FAULT = "is a pointer of Git LFS, not the file itself; fetch that (git lfs pull, or hf download)"
"""What is wrong with a file that `is_pointer`, as it follows the file in a sentence."""


def is_address(text: str) -> bool:
    """Whether a text is meant as the address of a bucket's objects, well written or not."""
    return _ADDRESS.match(text) is not None


def find_fault(address: str, most_bytes: int = MOST_KEY_BYTES) -> str:
    """Return what the address of a bucket, a folder or a file in it must be, as it ends a sentence; empty: it is that.

    A slash at its end is none of the key's. Nothing else is guessed: obstore and Arrow each read `a//b` in their way.
    """
    found = _ADDRESS.fullmatch(address)
    if not found or not found[2] or found[1] not in SCHEMES:
        return "an address that begins with s3://BUCKET/ or gs://BUCKET/, in small letters"
    if not _BUCKET_NAME.fullmatch(found[3]):
        return "an address with the name of a bucket: small letters, digits, dots, dashes and underscores"
    parts = found[4].removesuffix("/").split("/") if found[4] else []
    if "" in parts:
        return "an address with one slash between two names"
    if {".", ".."} & {*parts}:
        return "an address that has no . or .. between two slashes"
    if any(ord(char) < 32 or ord(char) == 127 for char in found[4]):
        return "an address without control characters"
    is_short = len(found[4].encode("utf-8", "surrogateescape")) <= most_bytes
    return "" if is_short else f"an address of at most {most_bytes} bytes behind the bucket"


class Fence(Protocol):
    """What a place asks before anything is put there or deleted: it raises if somebody else has the place now.

    It returns whether whoever has it is asked to end. Its number goes up with each holder.
    """

    @property
    def number(self) -> int: ...

    def check(self) -> bool: ...


class Stream(Protocol):
    """What is read to its end."""

    def read(self, size: int, /) -> bytes: ...


@dataclass(frozen=True)
class Info:
    """What is known of a file without reading it: bytes, a tag that changes with it, and its storage's time of it."""

    size: int
    tag: str
    modified: float


class Place:
    """A file or folder: local, or s3://BUCKET/KEY, or gs://BUCKET/KEY.

    A fence is asked before anything is put or deleted through the place, and through those made from it.
    """

    def __init__(self, where: Where, fence: Fence | None = None) -> None:
        self.root: str
        self.key: str
        self.fence = fence
        if isinstance(where, Place):
            self.root, self.key, self.fence = where.root, where.key, fence or where.fence
            return
        if not is_address(str(where)):
            self.root, self.key = "", os.path.abspath(os.path.expanduser(where))
            return
        if fault := find_fault(str(where)):
            raise ConfigError(f"{str(where)!r} is no place in a bucket; it must be {fault}.")
        scheme, _, rest = str(where).partition("://")
        bucket, _, key = rest.partition("/")
        self.root, self.key = f"{scheme}://{bucket}", key.removesuffix("/")

    def __truediv__(self, name: object) -> Place:
        return self._at(f"{self.key}/{name}".lstrip("/" if self.root else ""))

    def _at(self, key: str) -> Place:
        made = Place(self)
        made.key = key if self.root else os.path.normpath(key)
        return made

    def __str__(self) -> str:
        return f"{self.root}/{self.key}" if self.root else self.key

    __repr__ = __str__

    def __fspath__(self) -> str:
        if self.root:
            raise TypeError(f"{self} is no path of this machine")
        return self.key

    def __eq__(self, other: object) -> bool:
        return isinstance(other, (Place, Path)) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(Path(self) if self.is_local else str(self))

    def __lt__(self, other: Place) -> bool:
        return str(self) < str(other)

    @property
    def name(self) -> str:
        return self.key.rpartition("/")[2]

    @property
    def parent(self) -> Place:
        return self._at(self.key.rpartition("/")[0] or ("" if self.root else "/"))

    @property
    def is_local(self) -> bool:
        return not self.root

    def resolve(self) -> Place:
        """Return the place that links of the disk lead to; in a bucket there are none."""
        return self._at(os.path.realpath(self.key)) if self.is_local else self

    @property
    def _backend(self) -> _Disk | Bucket:
        return _open_backend(self.root)

    def info(self) -> Info | None:
        """What is known of the file; None where there is none."""
        return self._backend.info(self.key)

    def is_file(self) -> bool:
        return self.info() is not None

    def is_dir(self) -> bool:
        return self._backend.is_dir(self.key)

    def exists(self) -> bool:
        return self.is_file() or self.is_dir()

    def list_names(self) -> list[str]:
        """Names of what is directly in the folder, sorted; empty where there is none."""
        return self._backend.names(self.key)

    def list_files(self) -> list[str]:
        """Every file in the folder and the folders in it, as paths inside it, sorted."""
        return sorted(self._backend.files(self.key))

    def read_bytes(self, start: int = 0) -> bytes:
        """Return the content from a byte on.

        A missing file is a FileNotFoundError.
        """
        return self._backend.read(self.key, start)

    def read_end(self, num_bytes: int) -> tuple[bytes, int]:
        """Return the last bytes and where they begin; of a bucket in one request.

        A missing file is a FileNotFoundError.
        """
        return self._backend.read_end(self.key, num_bytes)

    def read_text(self, encoding: str = "utf-8") -> str:
        return self.read_bytes().decode(encoding)

    def put(self, source: bytes | Path, condition: str = "", *, flush: bool = True) -> str:
        """Put a file there whole, from memory or from a local file, which a disk takes away; return its tag.

        The condition is `NEW`, or the tag of the file that may be replaced, which a disk does not look at; where it
        does not hold there is a FileExistsError. `flush` may be False where a hash tells what a power cut has left.
        """
        self.check()
        return self._backend.put(self.key, source, condition, flush=flush)

    def delete(self) -> None:
        """Delete the file, or the folder with all that is in it; nothing, where there is nothing."""
        self.check()
        self._backend.delete(self.key)

    def local(self) -> Path:
        """Return a path of this machine to read it at: itself, or a copy in the cache.

        In a bucket, a missing file is a FileNotFoundError.
        """
        return self._backend.local(self.key, self.name)

    def check(self) -> bool:
        """Raise if somebody else has the place now; return whether its holder is asked to end."""
        return self.fence is not None and self.fence.check()

    @contextlib.contextmanager
    def new_files(self, last: str, meanwhile: Callable[[list[str]], bytes] | None = None) -> Iterator[Path]:
        """A local folder whose files replace all of this one's when the block ends without an error.

        `last` is the manifest, which goes first and comes last: without it the folder counts for nothing. `meanwhile`
        makes what stands in its place until then, given the names that will be there.
        """
        with self.scratch() as folder:
            yield folder
            made = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir())
            assert last in made
            old, manifest, half = self.list_files(), self / last, meanwhile and meanwhile(made)

            def withdraw() -> str:
                if half is not None:
                    return manifest.put(half)
                manifest.delete()
                return NEW

            condition = withdraw()
            for name in {*made} - {last}:
                (self / name).put(folder / name)
            for name in {*old} - {*made}:
                (self / name).delete()
            for empty in sorted(Path(self).rglob("*/"), reverse=True) if self.is_local else ():
                with contextlib.suppress(OSError):  # it is not empty
                    os.rmdir(empty)
            while True:
                try:
                    manifest.put((folder / last).read_bytes(), condition)
                    return
                except FileExistsError:  # a job that has lost the run did not know it; one that has, ends here
                    condition = withdraw()

    @contextlib.contextmanager
    def scratch(self) -> Iterator[Path]:
        """A temporary local folder: beside a place of the disk, so that its files can be moved there."""
        path = Path(self) if self.is_local else Path(tempfile.gettempdir(), self.name)
        _remove_left_behind(path.parent)
        folder = _name_beside(path)
        folder.mkdir(0o777 if self.is_local else 0o700, parents=True)  # others have the same folder for such files
        try:
            with _name_place(folder, self):
                yield folder
        except Exception as error:
            if folder.is_dir():
                raise
            raise _describe_loss(folder, self) from error
        finally:
            shutil.rmtree(folder, ignore_errors=True)


Where = str | Path | Place
"""What a user gives, on the command line or from Python: it is made a place there, and is one from then on."""


@contextlib.contextmanager
def _name_place(temporary: Path, place: Place) -> Iterator[None]:
    """Where writing to a temporary file or folder fails, name the place that it is for; most errors name nothing."""
    try:
        yield
    except DomextError:
        raise
    except Exception as error:  # libraries have their own, and quote the operating system's
        named = getattr(error, "filename2", None) or getattr(error, "filename", None)
        written = temporary if named is None else Path(os.fsdecode(named))
        if not written.is_relative_to(temporary):
            raise  # it is about another file
        is_whole = written == temporary
        found = find_storage_error(error, place if is_whole else place / written.relative_to(temporary))
        if found is None:
            raise
        raise found from error


@contextlib.contextmanager
def new_file(place: Place, *, is_flushed: bool = True) -> Iterator[Path]:
    """A temporary local path whose content is put at a place when the block ends without an error.

    The path has the place's ending. `is_flushed` may be False where a hash tells what a power cut has left.
    """
    with contextlib.nullcontext() if place.is_local else place.scratch() as folder:
        temporary = _name_beside(folder / place.name if folder else Path(place))
        try:
            with _name_place(temporary, place):
                yield temporary
                if temporary.exists():  # a block may find that there is nothing to write
                    place.put(temporary, flush=is_flushed)
                elif folder and not folder.is_dir():
                    raise _describe_loss(folder, place)
        finally:
            temporary.unlink(missing_ok=True)


def write_text(place: Place, text: str) -> None:
    """Write a small file so that it is either the old one or the new one, never a part."""
    place.put(text.encode())


def write_json(place: Place, values: Mapping[str, Any], *, sort_keys: bool = False) -> None:
    """Write a JSON object, as `write_text` does."""
    write_text(place, json.dumps(values, indent=2, ensure_ascii=False, sort_keys=sort_keys) + "\n")


def open_to_others(path: Path) -> None:
    """Let others read a file as far as the umask does; safetensors makes files that only their owner can read."""
    beside = _name_beside(path)
    beside.touch()
    shutil.copymode(beside, path)
    beside.unlink()


def hash_file(path: Path, count: Callable[[int], None] = lambda num_bytes: None) -> str:
    """Return the sha256 of a file of a disk, hexadecimal; `count` is told of bytes as they are read."""
    with open_file(path) as file:
        return hash_stream(file, count)


def hash_stream(stream: Stream, count: Callable[[int], None], block_bytes: int = HASH_BYTES) -> str:
    """Return the sha256 of what is left of an open file, as `hash_file` does."""
    digest = hashlib.sha256()
    while block := stream.read(block_bytes):
        digest.update(block)
        count(len(block))
    return digest.hexdigest()


def map_file(place: Place) -> memoryview:
    """Return the content of a file, mapped into memory: of a bucket's that of a copy, which stays while it is used."""
    with open_file(place.local()) as file:
        is_empty = not os.fstat(file.fileno()).st_size  # which cannot be mapped
        return memoryview(b"" if is_empty else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def parse_json(content: str | bytes) -> Any:
    """Return what JSON says that anybody may have written.

    What is nested too deeply, or has a number of too many digits, is a JSONDecodeError, too.
    """
    try:
        return json.loads(content)
    except json.JSONDecodeError:
        raise
    except (ValueError, RecursionError) as error:
        fault = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise json.JSONDecodeError(fault, "", 0) from error


def hash_text(text: str) -> str:
    """Return the sha256 of a text, hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()


def hash_values(values: Mapping[str, Any]) -> str:
    """Return the sha256 of plain values, hexadecimal; the order of names does not count."""
    return hash_text(json.dumps(values, sort_keys=True))


class Log:
    """Lines that are added to one file, whose readers see it grow: on a disk at once, in a bucket every few seconds.

    A bucket's file is put again whole, on the condition that it is as this log, or another one, has left it. With a
    `start` the file begins anew with that and is this log's alone; without one others add to it, too.
    """

    REST, SHORTEST = 20.0, 2.0  # times the seconds that a put took until the next one; and no sooner than that

    def __init__(self, place: Place, start: str | None = None) -> None:
        self.place, self.is_own = place, start is not None
        self._known, self._waiting, self._due, self._file = (b"", NEW), b"", 0.0, None
        if start is not None:
            self._known = (start.encode(), place.put(start.encode()))
            # A file that another attempt puts there is another one, and this one's late lines are not in it.
            self._file = open(place, "ab", buffering=0) if place.is_local else None  # noqa: SIM115

    def add(self, text: str) -> None:
        """Add lines."""
        self._waiting += text.encode()
        if self.place.is_local or not self.is_own or time.monotonic() >= self._due:
            self.flush()

    def flush(self) -> None:
        """Let readers see all lines; a RunError if the log is this one's own and another attempt writes it."""
        data, self._waiting = self._waiting, b""
        if not data:
            return
        with name_file(self.place):
            if self._file is not None:
                self._file.write(data)
            elif self.place.is_local:
                Path(self.place.parent).mkdir(parents=True, exist_ok=True)
                with open(self.place, "ab", buffering=0) as file:
                    file.write(data)
            else:
                started = time.monotonic()
                self._put(data)
                self._due = time.monotonic() + max(self.SHORTEST, self.REST * (time.monotonic() - started))

    def _put(self, data: bytes) -> None:
        while True:
            content, tag = self._known
            try:
                self._known = content + data, self.place.put(content + data, tag)
                return
            except FileExistsError:
                if self.is_own:
                    raise RunError(f"another job writes {self.place}; this one stops without writing.") from None
                found = self.place.info()  # the tag first: what is added after it is found out when this is put
                self._known = (self.place.read_bytes(), found.tag) if found else (b"", NEW)

    def close(self) -> None:
        """Flush, and let go of the file."""
        self.flush()
        if self._file is not None:
            self._file.close()


def _describe_loss(folder: Path, place: Place) -> StorageError:
    return StorageError(
        f"{place} cannot be written: its files were made in {folder}, which somebody has deleted; keep what cleans "
        f"{folder.parent} from it, or give another folder in TMPDIR, and the same command goes on."
    )


def _name_beside(path: Path) -> Path:
    """A temporary path beside another, whose name says which process of which machine it is of."""
    mark = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    return path.with_name(f".{path.stem[:100]}.{mark}{path.suffix}")


def _remove_left_behind(folder: Path) -> None:
    """Remove what killed processes of this machine have left in a folder under temporary names."""
    for path in folder.glob(f".*.{glob.escape(socket.gethostname())}-*"):
        number = re.search(r"-(\d+)-[0-9a-f]{8}(\.\w+)?$", path.name)
        if number is not None and not _is_alive(int(number[1])):
            _Disk().delete(str(path))


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # somebody else's
        pass
    return True


def look_at(path: str | Path) -> os.stat_result | None:
    """Return what a disk says of a file or folder; None where there is none."""
    with _pass_over_nothing(str(path)):  # not os.path.isdir, which says of a disk that fails that there is nothing
        return os.stat(path)
    return None


@contextlib.contextmanager
def open_file(path: str | Path) -> Iterator[IO[bytes]]:
    """Open a file of a disk to read it; a FileNotFoundError where there is nothing, or a folder."""
    with name_file(path):
        try:
            file = open(path, "rb")  # noqa: SIM115
        except OSError as error:
            if error.errno not in _NO_FILE:
                raise
            raise FileNotFoundError(errno.ENOENT, error.strerror, str(path)) from error
        with file:
            yield file


def is_pointer(start: bytes) -> bool:
    """Whether a file that begins so stands for one that Git LFS keeps elsewhere, as in a clone without it."""
    return start.startswith(_POINTER)


def find_unfetched(path: Path) -> str:
    """Say what a clone or a download left in place of a file, as it follows the file in a sentence; empty: nothing."""
    if path.is_symlink() and not path.exists():
        return "is a link to nothing; fetch it again"
    if path.is_file():
        with path.open("rb") as file:
            return POINTER_FAULT if is_pointer(file.read(len(_POINTER))) else ""
    return ""


def require_readable(folder: Path) -> None:
    """Raise a StorageError if the disk refuses files of a folder, of which a library says that they are not there."""
    for name in Place(folder).list_files():
        with contextlib.suppress(FileNotFoundError), open_file(folder / name) as file:
            file.read(1)


def flush_files(*paths: Path) -> None:
    """Bring files, and the entries of folders, to the disk."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def find_cache() -> Path:
    """Return the folder of this machine that holds nothing but what can be fetched or made again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "domext_ray"


class _Disk:
    """A file system; keys are absolute paths."""

    def info(self, key: str) -> Info | None:
        found = look_at(key)
        if found is None or stat.S_ISDIR(found.st_mode):
            return None
        return Info(found.st_size, f"{found.st_ino}-{found.st_mtime_ns}", found.st_mtime)

    def is_dir(self, key: str) -> bool:
        found = look_at(key)
        return found is not None and stat.S_ISDIR(found.st_mode)

    def read(self, key: str, start: int = 0) -> bytes:
        with open_file(key) as file:
            file.seek(start)
            return file.read()

    def read_end(self, key: str, num_bytes: int) -> tuple[bytes, int]:
        with open_file(key) as file:
            start = max(0, file.seek(0, os.SEEK_END) - num_bytes)
            file.seek(start)
            return file.read(), start

    def put(self, key: str, source: bytes | Path, condition: str = "", *, flush: bool = True) -> str:
        path = Path(key)
        beside = _name_beside(path)
        try:
            with name_file(path):
                _make_folder(path.parent)
                if isinstance(source, bytes):
                    beside.write_bytes(source)
                else:
                    shutil.move(source, beside)  # a rename, where it is on the same disk
                if flush:
                    flush_files(beside)
                if condition == NEW:
                    _link(beside, path)
                else:
                    os.replace(beside, path)
                if flush:
                    flush_files(path.parent)
        finally:
            with contextlib.suppress(OSError):  # what was wrong is told already
                beside.unlink()
        return ""

    def names(self, key: str) -> list[str]:
        with _pass_over_nothing(key):
            return sorted(os.listdir(key))
        return []

    def files(self, key: str) -> dict[str, Info]:
        paths = [os.path.join(folder, name) for folder, names in _walk(key) for name in names]
        return {os.path.relpath(path, key): info for path in paths if (info := self.info(path))}

    def delete(self, key: str) -> None:
        with _pass_over_nothing(key):
            if self.is_dir(key) and not os.path.islink(key):
                shutil.rmtree(key, onerror=_tell_refusal)
            else:
                os.unlink(key)

    def local(self, key: str, name: str) -> Path:
        return Path(key)


@contextlib.contextmanager
def _pass_over_nothing(key: str) -> Iterator[None]:
    """Leave the block where its name has nothing; a disk that cannot say so is a StorageError."""
    try:
        with name_file(key):
            yield
    except OSError as error:
        if error.errno not in _NO_FILE:
            raise


def _walk(key: str) -> Iterator[tuple[str, list[str]]]:
    """Yield every folder in a folder, and that one, with the names of its files."""

    def tell(error: OSError) -> None:
        with _pass_over_nothing(error.filename):
            raise error

    for folder, _, names in os.walk(key, onerror=tell):
        yield folder, names


def _make_folder(path: Path) -> None:
    """Make a folder; a FileExistsError, which would be that of a condition, becomes what it is."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path)) from error


def _tell_refusal(_: object, path: str, failure: tuple[Any, Any, Any]) -> None:
    """Raise what keeps a file from being deleted, but for other processes that write or delete there, too."""
    if found := find_storage_error(failure[1], path):
        raise found from failure[1]


def _link(source: Path, target: Path) -> None:
    """Give a file a name that none has; where a file system knows no links, make it anew under that name."""
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK):
            raise
        with target.open("xb") as file:
            file.write(source.read_bytes())


class Bucket:
    """A bucket of objects; keys are those within it."""

    def __init__(self, url: str) -> None:
        from obstore.store import from_url  # 0.1 s, for those who have a bucket

        self.url, self.is_silent, self.tidy_due = url, False, 0.0
        seconds = f"{REQUEST_SECONDS:g}s"
        endpoints = (os.environ.get(name, "") for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT"))
        is_plain = any(endpoint.startswith("http://") for endpoint in endpoints)
        self.store = from_url(
            url,
            client_options={"timeout": seconds, "connect_timeout": "5s", "allow_http": is_plain},
            retry_config={"max_retries": 1, "retry_timeout": timedelta(seconds=5)},
        )

    def _ask(self, key: str, call: Callable[[], T], verb: str = "read") -> T:
        """Ask again while the bucket does not answer, with growing pauses and an end; a refusal is told at once."""
        from obstore import exceptions

        place, started, pause = f"{self.url}/{key}", time.monotonic(), 0.5
        while True:
            try:
                answer = call()
                if self.is_silent:
                    print(f"note: {self.url} answers again.", file=sys.stderr, flush=True)
                self.is_silent = False
                return answer
            except (exceptions.AlreadyExistsError, exceptions.PreconditionError):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), place) from None
            except (exceptions.BaseError, FileNotFoundError) as error:
                is_missing, text, waited = isinstance(error, FileNotFoundError), str(error), time.monotonic() - started
                is_no_path = isinstance(error, exceptions.InvalidPathError)
            if is_no_path:
                named = re.search(r'[Pp]ath "(.*?)"', text)
                raise StorageError(
                    f"{place} cannot be {verb}: it has the object {named[1] if named else ''!r}, whose key is no path "
                    "(//, . or .., or a control character); rename or delete that, or give another place."
                )
            status = re.search(r"status code: (\d+)|status: (\d+)", text)
            number = int(status[1] or status[2]) if status else 0
            code = re.search(r"<Code>(\w+)</Code>", text)
            reason = code[1] if code else f"status {number}" if number else "no answer"
            if reason == "NoSuchBucket":
                raise StorageError(
                    f"{place} cannot be {verb}: there is no bucket {self.url}; make it, or give another."
                )
            if number == 404 or is_missing:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), place) from None
            if "169.254.169.254" in text or "CredentialProvider" in text:
                raise StorageError(
                    f"{place} cannot be {verb}: there are no credentials; set AWS_ACCESS_KEY_ID and "
                    "AWS_SECRET_ACCESS_KEY, or give the node a role."
                )
            if 300 <= number < 500 and number not in (408, 429):
                advice = "see to the rights of the key in AWS_ACCESS_KEY_ID or of the node's role"
                advice = {"RequestTimeTooSkewed": "set this machine's clock"}.get(reason, advice)
                raise StorageError(f"{place} cannot be {verb} ({reason}): {advice}, or give another place.")
            if waited + pause > PATIENCE_SECONDS:
                raise StorageError(
                    f"{place} cannot be {verb}: {self.url} has not answered for {waited:.0f} s ({reason}); look after "
                    "that storage, and the same command goes on."
                )
            if not self.is_silent:
                self.is_silent = True
                print(
                    f"note: {self.url} does not answer ({reason}); this job asks again for {PATIENCE_SECONDS:g} s.",
                    file=sys.stderr,
                    flush=True,
                )
            time.sleep(pause)
            pause = min(2 * pause, 10.0)

    def info(self, key: str) -> Info | None:
        try:
            return self._describe(self._ask(key, lambda: self.store.head(key)))
        except FileNotFoundError:
            return None

    def _describe(self, found: Any) -> Info:
        return Info(found["size"], self._find_tag(found), found["last_modified"].timestamp())

    def _find_tag(self, found: Any) -> str:
        """What a condition names: of gs:// the object's generation, which its lists do not have."""
        return (self.url.startswith("gs://") and found["version"]) or found["e_tag"] or ""

    def read(self, key: str, start: int = 0) -> bytes:
        if start:
            size = (self.info(key) or Info(0, "", 0)).size
            return (
                bytes(self._ask(key, lambda: self.store.get_range(key, start=start, end=size))) if size > start else b""
            )
        return bytes(self._ask(key, lambda: self.store.get(key).bytes()))

    def read_end(self, key: str, num_bytes: int) -> tuple[bytes, int]:
        """Return the last bytes of an object and where they begin: in one request, where there are any."""
        found = self._ask(key, lambda: self._find_end(key, num_bytes))
        content = bytes(found.bytes())[-num_bytes:]
        return content, found.meta["size"] - len(content)

    def _find_end(self, key: str, num_bytes: int) -> Any:
        from obstore import exceptions

        try:
            return self.store.get(key, options={"range": {"suffix": num_bytes}})
        except exceptions.BaseError as error:
            # An empty object has no last bytes: S3 refuses to give them, others give it whole.
            if re.search(r"status(?: code)?: 416|non-partial", str(error)):
                return self.store.get(key)
            raise

    def put(self, key: str, source: bytes | Path, condition: str = "", *, flush: bool = True) -> str:
        known = {"version" if self.url.startswith("gs://") else "e_tag": condition}
        mode: Any = {"": "overwrite", NEW: "create"}.get(condition, known)
        settings: Any = {"use_multipart": False} if condition else {}
        try:
            found = self._ask(key, lambda: self.store.put(key, source, mode=mode, **settings), "written")
        except FileExistsError:  # or this very request came through before, and its answer was lost
            if not isinstance(source, bytes) or self.read(key) != source:
                raise
            return (self.info(key) or Info(0, "", 0)).tag
        return self._find_tag(found)

    def names(self, key: str) -> list[str]:
        found = self._ask(key, lambda: self.store.list_with_delimiter(key or None))
        # An object of the folder's own name is the empty one, KEY/, by which consoles make a folder.
        paths = [*found["common_prefixes"], *(entry["path"] for entry in found["objects"] if entry["path"] != key)]
        return sorted(path.rstrip("/").rpartition("/")[2] for path in paths)

    def is_dir(self, key: str) -> bool:
        return bool(self.names(key))

    def files(self, key: str) -> dict[str, Info]:
        """The objects below a key, but the empty ones, FOLDER/, by which consoles make folders."""
        found = self._ask(key, lambda: [entry for part in self.store.list(key) for entry in part])
        files = [entry for entry in found if entry["path"] != key and (entry["size"] or self.info(entry["path"]))]
        return {entry["path"].removeprefix(f"{key}/"): self._describe(entry) for entry in files}

    def delete(self, key: str) -> None:
        paths = [key, *(f"{key}/{name}" for name in self.files(key))]
        try:
            self._ask(key, lambda: self.store.delete(paths), "deleted")
        except FileNotFoundError:  # gs:// says so of what is not there, and may leave the others
            for path in paths:
                with contextlib.suppress(FileNotFoundError):
                    self._ask(path, functools.partial(self.store.delete, path), "deleted")

    def local(self, key: str, name: str) -> Path:
        """Download a file, or a folder with all in it, unless that state of it is here already."""
        own = self.info(key)
        found = {"": own} if own else self.files(key)
        if not found:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), f"{self.url}/{key}")
        tags = {path: info.tag or [info.size, info.modified] for path, info in sorted(found.items())}
        state = hashlib.sha256(json.dumps([self.url, key, tags]).encode()).hexdigest()
        folder = find_cache() / "objects" / state[:32]
        if not folder.exists():
            folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # pages quote private text
            temporary = folder.with_name(f"{folder.name}.{uuid.uuid4().hex[:8]}")
            for path, info in found.items():
                target = temporary / name / path if path else temporary / name
                target.parent.mkdir(parents=True, exist_ok=True)
                self._ask(key, functools.partial(self._download, f"{key}/{path}" if path else key, target))
                if target.stat().st_size != info.size:
                    raise StorageError(f"{self.url}/{key} was replaced while it was read; run the same command again.")
            with contextlib.suppress(OSError):  # another process had it first
                os.rename(temporary, folder)
            shutil.rmtree(temporary, ignore_errors=True)
            if time.monotonic() > self.tidy_due:  # a corpus has thousands of files, and each is a copy
                self.tidy_due = time.monotonic() + TIDY_SECONDS
                _remove_unused(folder.parent)
        os.utime(folder)
        return folder / name

    def _download(self, key: str, target: Path) -> None:
        with name_file(target), target.open("wb") as file:
            for chunk in self.store.get(key).stream(min_chunk_size=2**23):
                file.write(chunk)


def _remove_unused(folder: Path) -> None:
    for path in folder.iterdir():
        with contextlib.suppress(OSError):  # another process removes it, too
            if time.time() - path.stat().st_mtime > KEPT_SECONDS:
                shutil.rmtree(path, ignore_errors=True)


@functools.cache
def _open_backend(root: str) -> _Disk | Bucket:
    return Bucket(root) if root else _Disk()
