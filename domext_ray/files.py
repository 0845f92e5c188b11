"""JSON and YAML that are read with care, and options that name several paths.

Whatever reads a file of a run's directory goes through here: the disk may have lost a part of it, somebody may have
edited it, and a job that takes what is left is worse than one that stops.
"""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Mapping
from typing import Any

import yaml

from domext_ray.errors import RunError
from domext_ray.storage import Place, Where

Kind = type | tuple[type, ...]
NUMBER: Kind = (int, float)


def read_json(path: Where, remedy: str, expected: Mapping[str, Kind] | None = None) -> dict[str, Any]:
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
    check_values(path, values, "JSON object", remedy, expected or {})
    return values


def read_yaml(path: Where, remedy: str, text: str | None = None) -> dict[str, Any]:
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
    check_values(path, values, "YAML mapping", remedy, {})
    return values


def read_text(path: Where, remedy: str) -> str:
    """Read a file of text.

    Raises:
        RunError: it is missing, or no UTF-8.
    """
    try:
        return Place(path).read_text()
    except FileNotFoundError as error:
        raise RunError(f"{path} is missing; {remedy}.") from error
    except OSError as error:
        raise RunError(f"{path} cannot be read ({error.strerror}); {remedy}.") from error
    except UnicodeDecodeError as error:
        raise RunError(f"{path} is damaged (byte {error.start} is no UTF-8); {remedy}.") from error


def check_values(path: Where, values: Any, what: str, remedy: str, expected: Mapping[str, Kind]) -> None:
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
