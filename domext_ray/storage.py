"""The one door to what outlives a process: files and folders on a disk, or objects of a bucket (s3://, gs://).

A file is there whole or not at all. A folder counts when its manifest is there, which comes last. A file can be made on
the condition that there is none, which is all that a lock needs (runs/attempts.py). What is not there is nothing, or a
FileNotFoundError; storage that cannot say what is there is a StorageError. Both backends promise the same.
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
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Protocol

from domext_ray.bucket import NEW, Bucket, Info, find_cache
from domext_ray.errors import (
    ConfigError,
    DomextError,
    RunError,
    StorageError,
    find_storage_error,
    name_file,
)

__all__ = ["NEW", "Info", "find_cache"]  # of a bucket, for those who know places alone

SCHEMES = ("s3", "gs")
_ADDRESS = re.compile(r"(s3[an]?|gs|gcs):/(/?)([^/]*)/?(.*)", re.IGNORECASE | re.DOTALL)
_BUCKET_NAME = re.compile(r"[a-z0-9]([a-z0-9._-]*[a-z0-9])?")
MOST_KEY_BYTES, ROOM_BYTES = 1024, 224
"""Of an object's key, as S3 has it; and of these what a job adds to a folder's."""
HASH_BYTES = 2**20
"""Of a file that is hashed, read at once."""
_NO_FILE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP)
"""What a disk answers where a name has no file: nothing at all, a folder, or a link to itself."""


def is_address(text: str) -> bool:
    """Whether a text is meant as the address of a bucket's objects, well written or not."""
    return _ADDRESS.match(text) is not None


def find_fault(address: str, most_bytes: int = MOST_KEY_BYTES) -> str:
    """Return what the address of a bucket, a folder or a file in it must be, as it ends a sentence; empty: it is that.

    A slash at its end is none of the key's. Nothing else is guessed: obstore and Arrow each read `a//b` in their way.

    Args:
        address: one of `is_address`.
        most_bytes: that the key may have.
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
    if any(ord(each) < 32 or ord(each) == 127 for each in found[4]):
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
        return {os.path.relpath(each, key): info for each in paths if (info := self.info(each))}

    def delete(self, key: str) -> None:
        with _pass_over_nothing(key):
            if self.is_dir(key) and not os.path.islink(key):
                shutil.rmtree(key, onerror=_tell_refusal)
            else:
                os.unlink(key)

    def local(self, key: str, name: str) -> Path:
        return Path(key)


@functools.cache
def _open_backend(root: str) -> _Disk | Bucket:
    return Bucket(root) if root else _Disk()


class Place:
    """A file or folder: local, or s3://BUCKET/KEY, or gs://BUCKET/KEY.

    Args:
        where: what the user gave; a place stays as it is.
        fence: asked before anything is put or deleted through this place, and those that are made from it.

    Raises:
        ConfigError: it is meant to be in a bucket, and is no address (`find_fault`).
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

        Raises:
            FileNotFoundError: there is none.
        """
        return self._backend.read(self.key, start)

    def read_end(self, num_bytes: int) -> tuple[bytes, int]:
        """Return the last bytes and where they begin; of a bucket in one request.

        Raises:
            FileNotFoundError: there is none.
        """
        return self._backend.read_end(self.key, num_bytes)

    def read_text(self, encoding: str = "utf-8") -> str:
        return self.read_bytes().decode(encoding)

    def put(self, source: bytes | Path, condition: str = "", *, flush: bool = True) -> str:
        """Put a file there whole, from memory or from a local file, which a disk takes away; return its tag.

        Args:
            source: the content.
            condition: `NEW`, or the tag of the file that may be replaced, which a disk does not look at.
            flush: bring it to the disk first; False where a hash tells what a power cut has left.

        Raises:
            FileExistsError: the condition does not hold.
            RunError: the fence refuses.
            StorageError: the storage is full, refuses or fails.
        """
        self.check()
        return self._backend.put(self.key, source, condition, flush=flush)

    def delete(self) -> None:
        """Delete the file, or the folder with all that is in it; nothing, where there is nothing."""
        self.check()
        self._backend.delete(self.key)

    def local(self) -> Path:
        """Return a path of this machine to read it at: itself, or a copy in the cache.

        Raises:
            FileNotFoundError: it is in a bucket, and is not there.
        """
        return self._backend.local(self.key, self.name)

    def check(self) -> bool:
        """Raise if somebody else has the place now; return whether its holder is asked to end."""
        return self.fence is not None and self.fence.check()

    @contextlib.contextmanager
    def new_files(self, last: str, meanwhile: Callable[[list[str]], bytes] | None = None) -> Iterator[Path]:
        """A local folder whose files replace all of this one's when the block ends without an error.

        Args:
            last: the manifest, which goes first and comes last: without it the folder counts for nothing.
            meanwhile: what to put in the manifest's place until then, given the names that will be there.
        """
        with self.scratch() as folder:
            yield folder
            made = sorted(each.relative_to(folder).as_posix() for each in folder.rglob("*") if not each.is_dir())
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
        """A temporary local folder: beside a place of the disk, so that its files can be moved there.

        Raises:
            StorageError: somebody deleted it meanwhile, as what cleans /tmp does.
        """
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

    Args:
        place: the file; one that is there is replaced. Its ending is the temporary path's, too.
        is_flushed: bring the content to the disk first; False where a hash tells what a power cut has left.

    Raises:
        StorageError: the disk is full, may not be written or fails.
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
    """Write a small file so that it is either the old one or the new one, never a part.

    Raises:
        StorageError: the disk is full, may not be written or fails.
    """
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
    """Return the content of a file, mapped into memory: of a bucket's that of a copy, which stays while it is used.

    Raises:
        FileNotFoundError: there is none.
    """
    with open_file(place.local()) as file:
        is_empty = not os.fstat(file.fileno()).st_size  # which cannot be mapped
        return memoryview(b"" if is_empty else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def parse_json(content: str | bytes) -> Any:
    """Return what JSON says that anybody may have written.

    Raises:
        JSONDecodeError: it is none, or not read: it is nested too deeply, or has a number of too many digits.
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

    A bucket's file is put again whole, on the condition that it is as this log, or another one, has left it.

    Args:
        place: the file.
        start: what it begins with, and that nobody else writes it from now on; None: others add to it, too.
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
        """Let readers see all lines.

        Raises:
            RunError: the log is this one's own, and another attempt writes it.
            StorageError: the storage is full, refuses or fails.
        """
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
    for each in folder.glob(f".*.{glob.escape(socket.gethostname())}-*"):
        number = re.search(r"-(\d+)-[0-9a-f]{8}(\.\w+)?$", each.name)
        if number is not None and not _is_alive(int(number[1])):
            _Disk().delete(str(each))


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # somebody else's
        pass
    return True


def look_at(path: str | Path) -> os.stat_result | None:
    """Return what a disk says of a file or folder; None where there is none.

    Raises:
        StorageError: the disk refuses or fails.
    """
    with _pass_over_nothing(str(path)):  # not os.path.isdir, which says of a disk that fails that there is nothing
        return os.stat(path)
    return None


@contextlib.contextmanager
def open_file(path: str | Path) -> Iterator[IO[bytes]]:
    """Open a file of a disk to read it.

    Raises:
        FileNotFoundError: what is there is no file, or nothing, as in a bucket.
        StorageError: the disk refuses or fails, now or while it is read.
    """
    with name_file(path):
        try:
            file = open(path, "rb")  # noqa: SIM115
        except OSError as error:
            if error.errno not in _NO_FILE:
                raise
            raise FileNotFoundError(errno.ENOENT, error.strerror, str(path)) from error
        with file:
            yield file


def require_readable(folder: Path) -> None:
    """Ask a folder of a disk for its files, of which a library says that they are not there, or of no use.

    Raises:
        StorageError: the disk refuses or fails.
    """
    for name in Place(folder).list_files():
        with contextlib.suppress(FileNotFoundError), open_file(folder / name) as file:
            file.read(1)


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


def flush_files(*paths: Path) -> None:
    """Bring files, and the entries of folders, to the disk."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
