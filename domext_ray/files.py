"""JSON that is read with care, and options that name several paths, by globs, too.

Whatever reads a file of a run's directory goes through here: the disk may have lost a part of it, somebody may have
edited it, and a job that takes what is left is worse than one that stops.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import glob
import heapq
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from domext_ray.errors import RunError
from domext_ray.storage import Place, parse_json

Kind = type | tuple[type, ...]
Globs = frozenset[tuple[str, ...]]
"""What is left of a glob below a folder, name by name, in each way in which the folder fits it; () at its end."""
EVERYTHING: Globs = frozenset({("**",)})
NUMBER: Kind = (int, float)
ASSETS = Path(__file__).parent / "assets"
"""What comes with the package beside its code."""
FORMATS: dict[str, dict[int, str]] = {
    "adapter bank": {4: "0.1"},
    "checkpoint": {3: "0.1"},
    "corpus": {3: "0.1"},
    "export": {3: "0.1"},
    "run": {4: "0.1"},
    "task": {1: "0.1"},
    "vocabulary": {2: "0.1"},
}
"""What has a format -> its numbers, and the first minor version that reads each.

Later ones read a number until the next one comes: 0.1 and 0.2 have the same numbers. This version reads the last one
alone. A change of a format adds its number and the version that will be released with it. No entry ever leaves.
"""


def newest_format(kind: str) -> int:
    """Return the number of the format that this version writes and reads; `kind` is one of `FORMATS`."""
    return max(FORMATS[kind])


def describe_format(kind: str, found: object, writer: object = None) -> str:
    """Say which version reads what is of another format, as what follows the name of a file.

    `found` is its number in the file; `writer` is the version that wrote it, where the file says so.
    """
    own = newest_format(kind)
    if isinstance(writer, str):
        whose = f"domext_ray {writer[:20]} wrote"
    elif isinstance(found, int) and found in FORMATS[kind]:
        whose = f"domext_ray {FORMATS[kind][found]} reads"
    elif isinstance(found, int) and found > own:
        whose = "a later version of domext_ray reads"
    else:
        whose = "no released version of domext_ray reads"
    return f"has format {str(found)[:20]}, which {whose}; this version reads format {own}"


def read_json(path: Place, remedy: str, expected: Mapping[str, Kind] | None = None, kind: str = "") -> dict[str, Any]:
    """Read a file that holds one JSON object; what is missing, damaged or of another format is a RunError.

    `remedy` ends the error's sentence. `expected` has types of the values that must be there, by name; `train.steps` is
    "steps" in the object "train". With a `kind`, one of `FORMATS`, its "format" must be the newest one.
    """
    text = read_text(path, remedy)
    try:
        values = parse_json(text)
    except json.JSONDecodeError as error:
        at = f"line {error.lineno}, column {error.colno}"
        raise RunError(f"{path} is not valid JSON ({at}); {remedy}.") from error
    check_values(path, values, "JSON object", remedy, {"format": int} if kind else {})
    if kind and values["format"] != newest_format(kind):  # before what another format need not have
        raise RunError(f"{path} {describe_format(kind, values['format'])}; {remedy}.")
    check_values(path, values, "JSON object", remedy, expected or {})
    return cast(dict[str, Any], values)


def read_text(path: Place, remedy: str) -> str:
    """Read a file of text; one that is missing, or no UTF-8, is a `RunError`."""
    try:
        return path.read_text()
    except OSError as error:
        fault = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read ({error.strerror})"
        raise RunError(f"{path} {fault}; {remedy}.") from error
    except UnicodeDecodeError as error:
        raise RunError(f"{path} is damaged (byte {error.start} is no UTF-8); {remedy}.") from error


def check_values(path: Place, values: Any, what: str, remedy: str, expected: Mapping[str, Kind]) -> None:
    """Refuse the content of a file that is no mapping, or lacks a value; see `read_json`."""
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

    Of several that exist the longest is taken.
    """
    paths, parts = list[str](), text.split(",")
    while parts:
        joined, end = parts[0], 1
        for number, part in enumerate(parts[1:], 2):
            if not _goes_on(joined):
                break
            joined = f"{joined},{part}"
            if _exists(joined.strip()):
                end = number
        if path := ",".join(parts[:end]).strip():
            paths.append(path)
        parts = parts[end:]
    return paths


def _goes_on(text: str) -> bool:
    """Whether a name that is there begins with a text and a comma, or the comma may be of a set, [a,b]."""
    text = text.lstrip()
    is_open = text.rfind("[") > text.rfind("]")
    return is_open or _exists(f"{text},*") or ("[" in text and _exists(f"{glob.escape(text)},*"))


def _exists(path: str) -> bool:
    expanded = os.path.expanduser(path)
    if os.path.lexists(expanded):
        return True
    if "**" not in expanded:
        return any(glob.iglob(expanded))
    folder, globs = split_glob(os.path.abspath(expanded))
    with contextlib.suppress(OSError):  # told where the files are listed
        return os.path.isdir(folder) and any(is_match for _, _, is_match in walk(folder, globs))
    return False


def split_glob(pattern: str) -> tuple[str, Globs]:
    """Return the folder that a glob begins in, and what is left of it there.

    A glob has `*`, `?` and `[…]` within a name, and `**` for any number of names.
    """
    folder = re.split(r"[*?\[]", pattern, maxsplit=1)[0].rpartition("/")[0]
    return folder or "/", parse_glob(pattern[len(folder) :].removeprefix("/"))


def parse_glob(pattern: str) -> Globs:
    """Return a glob of paths in a folder as `follow_globs` takes it."""
    return frozenset(_spell_out(tuple(pattern.replace("[^", "[!").split("/"))))


def _spell_out(parts: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Yield globs whose `**` are names of their own: a**b is a*b, or a*/**/*b."""
    for i, part in enumerate(parts):
        head, mark, tail = part.partition("**")
        if mark and part != mark:
            tail = tail.lstrip("*")
            ways = ((f"{head}*{tail}",), (f"{head}*", "**", f"*{tail}")) if head else (("**", f"*{tail}"),)
            for way in ways:
                yield from _spell_out((*parts[:i], *way, *parts[i + 1 :]))
            return
    yield parts


def follow_globs(globs: Globs, name: str) -> Globs:
    """Return what is left of globs behind the name of a file or folder; with () among it, the name ends a match."""
    found, waiting = set[tuple[str, ...]](), [*globs]
    while waiting:
        first, *others = waiting.pop() or ("",)
        if first == "**":  # it takes the name, and may take more; or it ends before the name
            found |= {("**", *others)} if others else {("**",), ()}
            waiting += [tuple(others)]
        elif fnmatch.fnmatchcase(name, first):
            found.add(tuple(others))
    return frozenset(found)


def matches(globs: Globs, path: str) -> bool:
    """Whether a path in a folder is of those that globs name."""
    return () in functools.reduce(follow_globs, path.split("/"), globs)


def _identify(folder: str | Path) -> tuple[int, int]:
    found = os.stat(folder)
    return found.st_dev, found.st_ino


def walk(folder: str, globs: Globs = EVERYTHING) -> Iterator[tuple[str, bool, bool]]:
    """Yield what is below a folder of a disk: its path, whether it is a folder, and whether it matches.

    Links are followed, but those to a folder above, which `**` would not mean. A folder to which several paths lead is
    entered once, by the first of them in order, and by one without a hidden name before others; again only where
    another part of the globs is left for it.
    """
    above = {_identify(parent) for parent in Path(os.path.realpath(folder)).parents}
    seen = set()
    waiting = [(False, f"{folder.rstrip('/')}/", globs)]
    while waiting:
        is_hidden, path, left = heapq.heappop(waiting)
        own, left = _identify(path), left - {()}
        if (own, left) in seen or (own in above and all(first == "**" for first, *_ in left)):
            continue
        seen.add((own, left))
        with os.scandir(path) as entries:
            for entry in entries:
                rest = follow_globs(left, entry.name)
                is_folder = entry.is_dir(follow_symlinks=False) or (entry.is_symlink() and os.path.isdir(entry.path))
                if is_folder:
                    heapq.heappush(waiting, (is_hidden or entry.name.startswith("."), f"{entry.path}/", rest))
                yield entry.path, is_folder, () in rest
