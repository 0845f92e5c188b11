"""Small labelled files, written for the tests, and how tests load them."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import REPOSITORY, WORDS

from domext_ray.errors import DomextError
from domext_ray.families.described_sets import make_description
from domext_ray.families.readers.examples import LabelledSet
from domext_ray.families.sets import load_set

DATA = Path(os.environ.get("DOMEXT_DATA") or REPOSITORY.parent / "shared" / "data")


def write(path: Path, content: str | bytes) -> Path:
    """Write a file, compressed if its name ends in .gz."""
    path.parent.mkdir(parents=True, exist_ok=True)
    encoded = content.encode() if isinstance(content, str) else content
    path.write_bytes(gzip.compress(encoded) if path.suffix == ".gz" else encoded)
    return path


def dump_lines(rows: list[dict[str, Any]]) -> str:
    """Make JSON Lines."""
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def dump_parquet(rows: list[dict[str, Any]]) -> bytes:
    """Make a Parquet file."""
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows), sink)
    return bytes(sink.getvalue())


def load(
    folder: Path,
    task: str,
    contents: dict[str, str | bytes],
    *,
    strict: bool = False,
    repair: bool = False,
    **description: Any,
) -> LabelledSet:
    """Write files into a folder and load them; a lone train file also serves as dev."""
    for name, content in contents.items():
        write(folder / name, content)
    names = [path for path in contents if path.startswith("train")]
    if len(contents) == 1 and names:
        description.setdefault("files", {"dev": tuple(names)})
    return load_set(make_description(task, "made", data=str(folder), **description), strict=strict, repair=repair)


def refuse(
    folder: Path, task: str, contents: dict[str, str | bytes], *, strict: bool = False, **description: Any
) -> str:
    """Return the message with which a set is refused, without the folder; it is one sentence on one line."""
    with pytest.raises(DomextError) as caught:
        load(folder, task, contents, strict=strict, **description)
    message = str(caught.value)
    assert "\n" not in message and message.endswith((".", ")."))
    return message.replace(f"{folder}/", "")


def write_ner(folder: Path, sizes: tuple[int, int, int] = (80, 30, 30), seed: int = 0) -> Path:
    """Write sentences in which four words are entities, one of them of two words."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(seed)
    for split, size in zip(("train", "devel", "test"), sizes, strict=True):
        lines = []
        for _ in range(size):
            words = [(str(word), "O") for word in generator.choice(WORDS[:50], int(generator.integers(4, 9)))]
            kind = int(generator.integers(3))
            entity = [[("heart", "B-Disease"), ("disease", "I-Disease")], [("drug", "B-Drug")], [("doctor", "O")]][kind]
            place = int(generator.integers(len(words)))
            words[place:place] = entity
            lines += [f"{word}\t{tag}" for word, tag in words] + [""]
        (folder / f"{split}.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder
