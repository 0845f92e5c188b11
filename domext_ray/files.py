"""Files and folders that appear whole or not at all, their hashes, and JSON and YAML that are read with care.

Whatever a job leaves for others is written here: under a temporary name beside its own, flushed, then renamed. Whatever
reads a file of a run's directory goes through here, too: the disk may have lost a part of it, somebody may have edited
it, and a job that takes what is left is worse than one that stops.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from domext_ray.errors import RunError, StorageError, name_file

Kind = type | tuple[type, ...]
NUMBER: Kind = (int, float)
_STATES = ("incomplete", "replaced")


@contextlib.contextmanager
def new_file(path: Path, *, is_flushed: bool = True) -> Iterator[Path]:
    """A temporary path beside another, whose name it takes when the block ends without an error.

    Args:
        path: the file; one that is there is replaced. Its ending is the temporary path's, too.
        is_flushed: bring the content to the disk first; False where a hash tells what a power cut has left.

    Raises:
        StorageError: the disk is full, may not be written or fails.
    """
    temporary = path.with_name(f".{path.stem}-{uuid.uuid4().hex[:8]}{path.suffix}")
    try:
        with name_file(path):
            yield temporary
            if temporary.exists():  # a block may find that there is nothing to write
                flush(*([temporary] if is_flushed else []))
                os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def new_folder(target: Path, *, replaces: bool, check: Callable[[], None] = lambda: None) -> Iterator[Path]:
    """A temporary folder beside another, whose name it takes, flushed, when the block ends without an error.

    What jobs that were killed have left beside `target` is removed, where the file system has locks to tell.

    Args:
        target: the folder.
        replaces: one that is there makes way; else it, or one that another process makes meanwhile, is an error.
        check: called before the folder gets its name: somebody may have put something there meanwhile.

    Raises:
        OSError: the disk refuses, or `target` is there and is not replaced.
    """
    mark = uuid.uuid4().hex[:8]
    temporary, replaced = (target.with_name(f".{target.name}.{state}-{mark}") for state in _STATES)
    try:
        temporary.mkdir(parents=True)
        with _hold(temporary):
            _remove_left_behind(target)
            try:
                yield temporary
            except StorageError as error:  # of a file in it: the caller knows what the folder is
                raise (error.__cause__ if isinstance(error.__cause__, OSError) else error) from None
            flush(*temporary.rglob("*"), temporary)
            check()
            if replaces and target.exists():
                os.rename(target, replaced)  # not removed file by file: a job killed meanwhile would leave a part
            try:
                os.rename(temporary, target)
            except OSError:
                if replaced.exists() and not target.exists():
                    os.rename(replaced, target)
                raise
            flush(target.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        if target.exists():
            for path in target.parent.glob(f".{glob.escape(target.name)}.replaced-*"):  # of a killed job, too
                shutil.rmtree(path, ignore_errors=True)


def remove_folder(folder: Path) -> None:
    """Remove a folder at once: one that is half deleted must not look like a damaged one.

    Raises:
        OSError: it cannot be renamed.
    """
    doomed = folder.with_name(f".{folder.name}.removed-{uuid.uuid4().hex[:8]}")
    os.rename(folder, doomed)
    flush(folder.parent)
    shutil.rmtree(doomed, ignore_errors=True)


def flush(*paths: Path) -> None:
    """Bring files, and the entries of folders, to the disk."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Write a small file so that it is either the old one or the new one, never a part.

    Raises:
        StorageError: the disk is full, may not be written or fails.
    """
    with new_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, values: Mapping[str, Any], *, sort_keys: bool = False) -> None:
    """Write a JSON object, as `write_text` does.

    Raises:
        StorageError: the disk is full, may not be written or fails.
    """
    write_text(path, json.dumps(values, indent=2, ensure_ascii=False, sort_keys=sort_keys) + "\n")


@contextlib.contextmanager
def _hold(folder: Path) -> Iterator[None]:
    """Hold a temporary folder, so that another process sees that it is being written."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _remove_left_behind(target: Path) -> None:
    """Delete what killed jobs have left of the same folder; nothing where locks do not work."""
    for path in target.parent.glob(f".{glob.escape(target.name)}.incomplete-*"):
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(descriptor)


def read_json(path: Path, remedy: str, expected: Mapping[str, Kind] | None = None) -> dict[str, Any]:
    """Read a file that holds one JSON object.

    Args:
        path: the file.
        remedy: what to do about a damaged one, the end of the error's sentence.
        expected: types of the values that must be there, by name; `train.steps` is "steps" in the object "train".

    Raises:
        RunError: it is missing or damaged, or lacks a value.
    """
    text = read_text(path, remedy)
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        place = f" (line {error.lineno}, column {error.colno})" if isinstance(error, json.JSONDecodeError) else ""
        raise RunError(f"{path} is not valid JSON{place}; {remedy}.") from error
    _check_values(path, values, "JSON object", remedy, expected or {})
    return values


def read_yaml(path: Path, remedy: str, text: str | None = None) -> dict[str, Any]:
    """Read a file that holds one YAML mapping of plain values; a tag that asks for an object is refused.

    Args:
        path: the file.
        remedy: what to do about a damaged one, the end of the error's sentence.
        text: its content, where that is known.

    Raises:
        RunError: it is missing or damaged.
    """
    text = read_text(path, remedy) if text is None else text
    try:
        values = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        place = f" (line {mark.line + 1}: {getattr(error, 'problem', '')})" if mark is not None else ""
        raise RunError(f"{path} is not valid YAML{place}; {remedy}.") from error
    _check_values(path, values, "YAML mapping", remedy, {})
    return values


def read_text(path: Path, remedy: str) -> str:
    """Read a file of text.

    Raises:
        RunError: it is missing, or no UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise RunError(f"{path} is missing; {remedy}.") from error
    except OSError as error:
        raise RunError(f"{path} cannot be read ({error.strerror}); {remedy}.") from error
    except UnicodeDecodeError as error:
        raise RunError(f"{path} is damaged (byte {error.start} is no UTF-8); {remedy}.") from error


def hash_file(path: Path) -> str:
    """Return the sha256 of a file, hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()


def hash_text(text: str) -> str:
    """Return the sha256 of a text, hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()


def hash_values(values: Mapping[str, Any]) -> str:
    """Return the sha256 of plain values, hexadecimal; the order of names does not count."""
    return hash_text(json.dumps(values, sort_keys=True))


def _check_values(path: Path, values: Any, what: str, remedy: str, expected: Mapping[str, Kind]) -> None:
    if not isinstance(values, dict):
        raise RunError(f"{path} holds no {what}; {remedy}.")
    for name, kind in expected.items():
        found: Any = values
        for part in name.split("."):
            if not isinstance(found, dict) or part not in found:
                raise RunError(f"{path} has no {name}; {remedy}.")
            found = found[part]
        if not isinstance(found, kind) or (isinstance(found, bool) and kind is not bool):
            raise RunError(f"{path} has {name} = {str(found)[:60]!r}, which is of the wrong type; {remedy}.")


def split_paths(text: str) -> list[str]:
    """Cut an option at its commas, but for those within a path (or a glob) that is there as it stands.

    Args:
        text: paths, globs or other names separated by commas; the longest that exists is taken.
    """
    parts = text.split(",")
    paths: list[str] = []
    while parts:
        ends = range(len(parts) if _goes_on(parts[0]) else 1, 1, -1)
        end = next((each for each in ends if _exists(",".join(parts[:each]).strip())), 1)
        if path := ",".join(parts[:end]).strip():
            paths.append(path)
        parts = parts[end:]
    return paths


def _goes_on(part: str) -> bool:
    """Whether a name that is there begins with a part and a comma; of a set, [a,b], that is unknown.

    Asked once for each part: whether longer and longer joins exist costs a walk through folders each, if they have **.
    """
    return "[" in part or _exists(f"{part.lstrip()},*")


def _exists(path: str) -> bool:
    expanded = os.path.expanduser(path)
    return os.path.lexists(expanded) or any(glob.iglob(expanded, recursive=True))
