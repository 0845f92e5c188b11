"""Work in parts that a second start goes on with: a folder of finished parts, held against a second job.

The folder `PARENT/.NAME` is named after a hash of everything that decides the work, so the same command finds it again
after a job was interrupted or killed: parts that are finished and whole are taken over, the others are made. It goes
when the work is done. What nobody has come back for within a week is removed by the next job beside it.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from domext_ray.errors import CorpusError, RunError
from domext_ray.progress import StatusLine
from domext_ray.storage import new_file, new_folder

LEFTOVER_SECONDS = 7 * 24 * 3600
"""How long a folder that nobody works in is kept."""

POLL_SECONDS = 0.5
PART_FORMAT = 1
_FOLDER = re.compile(r"\.((?:words-)?[0-9a-f]{16}(?:-[0-9a-f]{8})?)(?:\.lock)?")
"""Work folders and their locks; -xxxxxxxx: of versions that could not go on with them."""

_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)

_OF_VOCABULARIES = re.compile(
    r"tokenizer\.json|tokenizer_config\.json|special_tokens_map\.json|added_tokens\.json|vocab\.(txt|json)|merges\.txt|"
    r"[\w.-]+\.model|learned_from\.json|extension\.json|statistics\.(json|txt)|attempts"
)
"""Files of a tokenizer's folder, learned or extended."""


@contextlib.contextmanager
def hold_work_folder(parent: Path, name: str, purpose: str) -> Iterator[Path]:
    """Hold a work folder, made where it is missing; only its owner may read it.

    Another job with the same work is waited for. The folder is removed in the end, and after a mistake in the corpus,
    whose next version has another name; after anything else it stays for a second start.

    Args:
        parent: where the folder is.
        name: hash of what decides the work, hexadecimal; may begin with `words-`.
        purpose: what the work is, for messages.

    Raises:
        RunError: there can be no folder at that place.
    """
    made = [each for each in (parent, *parent.parents) if not os.path.exists(each)]
    try:
        parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"{parent} cannot be made ({error.strerror}); give another --prepare.cache_dir.") from error
    try:
        remove_leftovers(parent, _FOLDER)
        with _hold_lock(parent / f".{name}.lock", purpose):
            folder = parent / f".{name}"
            folder.mkdir(mode=0o700, exist_ok=True)
            try:
                yield folder
            except CorpusError:
                _remove(folder)
                raise
            _remove(folder)
    finally:
        for each in made:
            with contextlib.suppress(OSError):  # it holds something, as it should
                each.rmdir()


def remove_leftovers(parent: Path, pattern: re.Pattern[str]) -> None:
    """Remove folders that jobs left which nobody came back for: unlocked, and unchanged for a week.

    Args:
        parent: where they are.
        pattern: matches the names of folders and locks; its first group is that of the folder without the first dot.
    """
    for name in sorted({found[1] for each in parent.iterdir() if (found := pattern.fullmatch(each.name))}):
        folder, lock = parent / f".{name}", parent / f".{name}.lock"
        with contextlib.suppress(OSError):  # it is another user's, or has just been removed
            if time.time() - _find_last_change(folder, lock) < LEFTOVER_SECONDS:
                continue
            with _open_lock(lock) as file:
                if _try_lock(file):
                    shutil.rmtree(folder, ignore_errors=True)
                    lock.unlink(missing_ok=True)
                    print(f"removed {folder}, which a job left a week ago or more", file=sys.stderr)


@contextlib.contextmanager
def make_folder_anew(folder: Path) -> Iterator[Path]:
    """Give a temporary folder beside a vocabulary's, and that one's place to what is written there.

    Failing leaves nothing.

    Raises:
        CorpusError: the folder holds something that is no part of a vocabulary, and would be lost.
    """
    names = sorted(each.name for each in folder.iterdir()) if folder.is_dir() else []
    foreign = [name for name in names if not _OF_VOCABULARIES.fullmatch(name)]
    if foreign:
        raise CorpusError(
            f"{folder / foreign[0]} is no part of the vocabulary that would be replaced; move it away, or give another "
            "--run.name."
        )
    with new_folder(folder, replaces=True) as temporary:
        yield temporary


def _find_last_change(folder: Path, lock: Path) -> float:
    paths = [folder, *folder.rglob("*"), lock]
    return max(each.lstat().st_mtime for each in paths if os.path.lexists(each))


@contextlib.contextmanager
def _hold_lock(path: Path, purpose: str) -> Iterator[None]:
    """Hold a lock file, which goes with its last holder, waiting for a job that has it."""
    line = StatusLine()
    while True:
        with _open_lock(path) as file:
            if not _try_lock(file):
                holder = path.read_text(encoding="utf-8") if path.exists() else ""
                line.show(
                    f"waiting for {holder or 'another job'}, which is {purpose}; {path.parent} will have it, "
                    f"{line.seconds:.0f} s"
                )
                time.sleep(POLL_SECONDS)
                continue
            if not (path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat())):
                continue  # the holder that we waited for has removed it
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}")
            file.flush()
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
            return


def _open_lock(path: Path) -> IO[str]:
    return path.open("a", encoding="utf-8")


def _try_lock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        print(f"warning: {file.name} cannot be locked ({error.strerror}); start no second job there.", file=sys.stderr)
    return True


def _remove(folder: Path) -> None:
    """Remove a folder in which tasks that have not heard of a failure yet may still be writing."""
    for _ in range(100):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(0.1)


@dataclass(frozen=True)
class KeptParts:
    """Results of tasks, a file each, that a second start takes over.

    Args:
        folder: the work folder.
        name: what the results are of; the files are `FOLDER/parts/NAME-000012.json`.
        key: what decides the results beside a task's number and plan.
        find_fault: says what is wrong with the files that a result names; empty: nothing.
        max_tries: how often a task is started: Ray starts a killed one again without end.
    """

    folder: Path
    name: str
    key: str
    find_fault: Callable[[dict[str, Any]], str] = lambda result: ""
    max_tries: int = 4

    def read(self, number: int, plan: bytes) -> tuple[dict[str, Any] | None, str]:
        """Return the result of a task, None where it is to be made, and what is wrong with a damaged one."""
        path = self._place(number)
        try:
            digest, body = path.read_bytes().split(b"\n", 1)
        except FileNotFoundError:
            return None, ""
        except ValueError:
            return None, f"{path} is damaged"
        if hashlib.sha256(body).hexdigest().encode() != digest:
            return None, f"{path} is damaged"
        record = json.loads(body, object_hook=_decode)
        if record["key"] != self._key(number, plan):
            return None, ""
        fault = self.find_fault(record["result"])
        return (None if fault else record["result"]), fault

    def write(self, number: int, plan: bytes, result: dict[str, Any]) -> None:
        """Keep the result of a task: JSON, but for bytes."""
        path = self._place(number)
        path.parent.mkdir(exist_ok=True)
        record = {"key": self._key(number, plan), "result": result}
        body = json.dumps(record, default=_encode).encode()
        with new_file(path, is_flushed=False) as temporary:
            temporary.write_bytes(hashlib.sha256(body).hexdigest().encode() + b"\n" + body)
        self._place(number, "tries").unlink(missing_ok=True)

    def count_try(self, number: int, path: str) -> None:
        """Note that a task starts.

        Args:
            number: of the task.
            path: a file that it reads, for messages.

        Raises:
            RunError: it was killed each time.
        """
        tries = self._place(number, "tries")
        tries.parent.mkdir(exist_ok=True)
        with tries.open("ab") as file:
            file.write(b".")
            num_tries = file.tell()
        if num_tries > self.max_tries:
            raise RunError(
                f"the task that reads {path} was killed {self.max_tries} times, as happens where memory is short; free "
                "memory, or lower --prepare.shard_bytes or --prepare.max_document_chars."
            )

    def forget_tries(self) -> None:
        """Let every task start afresh: a job that was stopped had its tasks killed, too."""
        for each in self.folder.glob(f"parts/{self.name}-*.tries"):
            each.unlink()

    def drop(self) -> None:
        """Remove what is kept."""
        for each in self.folder.glob(f"parts/{self.name}-*"):
            each.unlink()

    def _place(self, number: int, ending: str = "json") -> Path:
        return self.folder / "parts" / f"{self.name}-{number:06d}.{ending}"

    def _key(self, number: int, plan: bytes) -> str:
        return hashlib.sha256(f"{PART_FORMAT} {self.key} {self.name} {number} ".encode() + plan).hexdigest()


def _encode(value: Any) -> dict[str, str]:
    if not isinstance(value, bytes):
        raise TypeError(f"a part's result holds {type(value).__name__}")
    return {"base64": base64.b64encode(value).decode()}


def _decode(record: dict[str, Any]) -> Any:
    return base64.b64decode(record["base64"]) if record.keys() == {"base64"} else record
