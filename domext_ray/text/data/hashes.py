"""Which files have the bytes that they had before: each is read for its sha256 once, and then where a hint differs.

Enters: files of a disk or a bucket, as they are listed, and what is remembered of them. Leaves: the sha256 of each.
Size, time, inode and tag are hints: equal ones may prove that the bytes are the same, and a difference says nothing.
"""

from __future__ import annotations

import contextlib
import functools
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, CancelledError, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from domext_ray.errors import AccessError, CorpusError, StorageError
from domext_ray.progress import PLAIN_SECONDS, StatusLine, format_seconds
from domext_ray.storage import SCHEMES, Place, hash_file, hash_stream, look_at, parse_json
from domext_ray.text.data.files import HUB, LOCAL, SourceFile, name_unreadable, open_file

HASH_THREADS, REQUEST_BYTES = 8, 2**23
"""How many files are read at once, and how many bytes a bucket is asked for."""
SETTLED_SECONDS, SKEW_SECONDS = 2.0, 60.0
"""How old a change is that the next one, by a file system's clock, cannot be taken for; and how far the clock of a
bucket may be from this machine's."""


def hash_sources(files: Sequence[SourceFile], memory: Memory | None = None) -> list[str]:
    """Return the sha256 of each file's content; of the hub its path, which has a commit."""
    local = [file.path for file in files if file.scheme in LOCAL]
    remote = [_list_remote(file) for file in files if file.scheme not in (*LOCAL, HUB)]
    try:
        what = f"{len(files):,} file{'s' if len(files) > 1 else ''} of text"
        hashes = hash_listed([*list_on_disk(local), *remote], memory, HashLine(what))
    except FileNotFoundError as error:
        raise CorpusError(f"--corpus names {error.filename}, which cannot be read ({error.strerror}).") from error
    return [hashes.get(file.address) or name_former(file) for file in files]


def name_former(file: SourceFile) -> str:
    """Return what stood for the content of a file in a bucket, in 0.1.0, and stands for that of one on the hub."""
    return f"{file.path} {file.modified}"


def _list_remote(file: SourceFile) -> Listed:
    """A file in a bucket, whose tag tells that it was put there again as it was."""
    hints = keep_settled([file.size, file.modified], file.modified / 1e9 + SKEW_SECONDS)

    def read(count: Callable[[int], None]) -> str:
        with name_unreadable(file), open_file(file) as stream:
            return hash_stream(stream, count, REQUEST_BYTES)

    def find_tag() -> str:
        info = Place(file.address).info() if file.scheme in SCHEMES else None
        return info.tag if info else ""

    return Listed(file.address, file.size, hints, read, find_tag)


@dataclass(frozen=True)
class Listed:
    """A file as a listing has it, which may tell that its bytes are those that were hashed before."""

    name: str  # by which it is remembered
    size: int  # bytes
    hints: list[Any] | None  # None: a clock may not tell when it changes again
    hash: Callable[[Callable[[int], None]], str]  # reads it; called with what counts the bytes
    find_tag: Callable[[], str] = lambda: ""  # its storage's own word for the bytes; empty: there is none


def list_on_disk(paths: Iterable[str]) -> list[Listed]:
    """Return files of a disk, by their paths.

    Hints are size, time, inode, and the time of the last change, which is what `rsync -t`, `tar -x` and `cp -p` cannot
    set: text of equal length may have taken the place of other text under the old time.
    """

    def look(path: str) -> Listed:
        read = functools.partial(hash_file, Path(path))
        found = look_at(path)
        if found is None:
            return Listed(path, 0, None, read)  # which says that there is none
        hints = [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]
        return Listed(path, found.st_size, keep_settled(hints, max(found.st_mtime, found.st_ctime)), read)

    with ThreadPoolExecutor(HASH_THREADS) as pool:  # a shared file system takes a request for each
        return [*pool.map(look, paths)]


Memory: TypeAlias = Place | dict[str, dict[str, Any]]
"""Hashes, tags and hints of files by name: in a file, or of this process alone."""


def keep_settled(hints: list[Any], changed: float) -> list[Any] | None:
    """Return the hints of a file that changed then, unless a clock may not tell when it changes again."""
    return hints if changed < time.time() - SETTLED_SECONDS else None


def hash_listed(
    files: Sequence[Listed], memory: Memory | None = None, watch: Callable[[int, int], None] | None = None
) -> dict[str, str]:
    """Return the sha256 of files, by name; of those that are remembered without reading them.

    Each file is given once; one that is not there is a FileNotFoundError. `memory` is written anew where something has
    changed. `watch` is told, every half second or so, how many bytes were read, and how many are to be.
    """
    known = _read_memory(memory)
    with ThreadPoolExecutor(HASH_THREADS) as pool:
        found = dict(
            zip((file.name for file in files), pool.map(lambda file: _recall(file, known), files), strict=True)
        )
    fresh = [file for file in files if not found[file.name]["sha256"]]
    for name, sha256 in _hash_all(fresh, watch).items():
        found[name]["sha256"] = sha256
    if isinstance(memory, dict):
        memory.update(found)
    elif memory and found != known and any(entry["hints"] or entry["tag"] for entry in found.values()):
        with contextlib.suppress(OSError, StorageError):  # of another user's folder: files are read again then
            memory.put(json.dumps(found).encode(), flush=False)
    return {name: entry["sha256"] for name, entry in found.items()}


def _read_memory(memory: Memory | None) -> dict[str, dict[str, Any]]:
    """What is remembered; nothing of a file that there is not yet, or of which a power cut has left a part."""
    if isinstance(memory, dict):
        return memory
    try:
        content = memory.read_bytes() if memory else b"{}"
    except (FileNotFoundError, AccessError):  # there is none yet, or it is another user's
        return {}
    try:
        values = dict(parse_json(content))
    except (TypeError, ValueError):
        return {}
    fields = {"hints", "tag", "sha256"}
    return {name: entry for name, entry in values.items() if isinstance(entry, dict) and entry.keys() == fields}


def _recall(file: Listed, known: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """What is remembered of a file whose hints or tag say that its bytes are the same; else without a hash."""
    before = known.get(file.name, {})
    if file.hints and before.get("hints") == file.hints:
        return before
    tag = file.find_tag()
    is_same = tag and tag == before.get("tag")
    return {"hints": file.hints, "tag": tag, "sha256": before["sha256"] if is_same else ""}


def _hash_all(files: Sequence[Listed], watch: Callable[[int, int], None] | None) -> dict[str, str]:
    """Read files in threads, which end soon after the job is asked to end or one of them fails."""
    total, done, has_ended = sum(file.size for file in files), deque[int](), threading.Event()

    def count(num_bytes: int) -> None:
        if has_ended.is_set():
            raise CancelledError
        done.append(num_bytes)

    num_bytes, pool = 0, ThreadPoolExecutor(HASH_THREADS)
    try:
        running = {pool.submit(file.hash, count): file.name for file in files}
        waiting = {*running}
        while waiting:
            pause = max(0.5, len(waiting) / 10_000)  # to wait for a hundred thousand takes a second itself
            ended, waiting = wait(waiting, pause, FIRST_EXCEPTION)
            for task in ended:
                task.result()
            while done:
                num_bytes += done.popleft()
            if watch:
                watch(num_bytes, total)
        return {name: future.result() for future, name in running.items()}
    finally:
        has_ended.set()
        pool.shutdown(cancel_futures=True)


class HashLine:
    """Says how far files, which `what` names, are hashed, and where that took long how fast it went."""

    def __init__(self, what: str) -> None:
        self._what, self._line = what, StatusLine(is_due=False)

    def __call__(self, num_bytes: int, total: int) -> None:
        """Note how many bytes were read, of how many."""
        line, rate = self._line, num_bytes / self._line.seconds
        done, speed = (
            f"hashing {self._what}: {num_bytes / 1e6:,.0f} of {total / 1e6:,.0f} MB",
            f"{rate / 1e6:,.0f} MB/s",
        )
        left = f", {format_seconds((total - num_bytes) / rate)} left" if 0 < num_bytes < total else ""
        line.show(f"{done}, {speed}{left}", num_bytes / (total or 1))
        if num_bytes >= total and line.seconds >= PLAIN_SECONDS:
            line.keep(f"{done} in {format_seconds(line.seconds)}, {speed}")
