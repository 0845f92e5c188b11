"""Small labelled files, written for the tests, and how tests load them."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest

from domext_ray.errors import DomextError
from domext_ray.labelled.examples import LabelledSet
from domext_ray.labelled.set_description import make_description
from domext_ray.labelled.sets import load_set

DATA = Path(os.environ.get("DOMEXT_DATA") or Path(__file__).resolve().parents[2] / "shared" / "data")


def write(path: Path, content: str | bytes) -> Path:
    """Write a file, compressed if its name ends in .gz."""
    path.parent.mkdir(parents=True, exist_ok=True)
    encoded = content.encode() if isinstance(content, str) else content
    path.write_bytes(gzip.compress(encoded) if path.suffix == ".gz" else encoded)
    return path


def dump_lines(rows: list[dict[str, Any]]) -> str:
    """Make JSON Lines."""
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def load(
    folder: Path, task: str, contents: dict[str, str | bytes], *, strict: bool = False, **description: Any
) -> LabelledSet:
    """Write files into a folder and load them; a lone train file also serves as dev."""
    for name, content in contents.items():
        write(folder / name, content)
    names = [each for each in contents if each.startswith("train")]
    if len(contents) == 1 and names:
        description.setdefault("files", {"dev": tuple(names)})
    return load_set(make_description(task, "made", **description), str(folder), strict=strict)


def refuse(
    folder: Path, task: str, contents: dict[str, str | bytes], *, strict: bool = False, **description: Any
) -> str:
    """Return the message with which a set is refused, without the folder; it is one sentence on one line."""
    with pytest.raises(DomextError) as caught:
        load(folder, task, contents, strict=strict, **description)
    message = str(caught.value)
    assert "\n" not in message and message.endswith((".", ")."))
    return message.replace(f"{folder}/", "")
