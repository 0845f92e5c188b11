"""What a prepared corpus is: its manifest, the files that this names, and rows read from them.

Enters: the folder that `shards.prepare_corpus` made. Leaves: records, checked files, tables of rows.
"""

from __future__ import annotations

import functools
import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from domext_ray.errors import CorpusError

FORMAT_VERSION = 2

Split = Literal["train", "held_out"]
SPLITS: tuple[Split, ...] = ("train", "held_out")


@dataclass(frozen=True)
class ShardRecord:
    """One Arrow IPC file.

    Args:
        path: relative to the manifest's folder.
        num_rows: rows.
        num_tokens: tokens, special ones included.
        sha256: of the file.
    """

    path: str
    num_rows: int
    num_tokens: int
    sha256: str


@dataclass(frozen=True)
class TextRecord:
    """One file of held-out documents as they are, a JSON object with the field `text` a line.

    Args:
        path: relative to the manifest's folder.
        num_documents: lines.
        num_bytes: size of the file.
        sha256: of the file.
    """

    path: str
    num_documents: int
    num_bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a prepared corpus is.

    Args:
        folder: where the shards are.
        fingerprint: hash of content, settings and tokenizer.
        seq_length: longest row, tokens.
        tokenizer_fingerprint: see `vocab.fingerprint_tokenizer`.
        settings: the `prepare` options that decide the rows.
        train, held_out: shards, in canonical order.
        num_documents: documents that stayed.
        dropped: documents that did not, by reason.
        pairs: rows are chunks of one document, from which pairs are drawn (see `pairs`).
        cls_id, sep_id: the special tokens that a pair is put together with.
        texts: files with a part of the held-out documents as text; which part depends on the documents alone.
    """

    folder: Path
    fingerprint: str
    seq_length: int
    tokenizer_fingerprint: str
    settings: dict[str, Any]
    train: tuple[ShardRecord, ...]
    held_out: tuple[ShardRecord, ...]
    num_documents: int
    dropped: dict[str, int]
    pairs: bool = False
    cls_id: int = 0
    sep_id: int = 0
    texts: tuple[TextRecord, ...] = ()

    def records(self, split: Split) -> tuple[ShardRecord, ...]:
        """Return the shards of a split."""
        return self.train if split == "train" else self.held_out

    def paths(self, split: Split) -> tuple[str, ...]:
        """Return the files of a split's shards."""
        return tuple(str(Path(self.folder, each.path)) for each in self.records(split))

    def num_rows(self, split: Split) -> int:
        """Return the rows of a split."""
        return sum(each.num_rows for each in self.records(split))

    def num_tokens(self, split: Split) -> int:
        """Return the tokens of a split."""
        return sum(each.num_tokens for each in self.records(split))


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a prepared corpus.

    Raises:
        CorpusError: it is missing, damaged, or of another format.
    """
    path = Path(folder) / "manifest.json"
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if record["format"] != FORMAT_VERSION:
            raise CorpusError(
                f"{path} has format {record['format']}, this version reads {FORMAT_VERSION}; prepare again."
            )
        shards = {split: tuple(ShardRecord(**each) for each in record[split]) for split in SPLITS}
        return Manifest(
            Path(folder),
            record["fingerprint"],
            record["seq_length"],
            record["tokenizer_fingerprint"],
            record["settings"],
            shards["train"],
            shards["held_out"],
            record["num_documents"],
            record["dropped"],
            record["pairs"],
            record["cls_id"],
            record["sep_id"],
            tuple(TextRecord(**each) for each in record["texts"]),
        )
    except FileNotFoundError as error:
        raise CorpusError(f"{folder} has no manifest.json; prepare the corpus with jobs/prepare_corpus.py.") from error
    except (KeyError, TypeError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CorpusError(f"{path} is damaged ({error}); delete its folder and prepare the corpus again.") from error


def verify_shards(manifest: Manifest) -> None:
    """Compare every file of a prepared corpus with its record.

    Raises:
        CorpusError: a file is missing or differs; names it.
    """
    records: list[ShardRecord | TextRecord] = [*manifest.train, *manifest.held_out, *manifest.texts]
    for record in records:
        path = manifest.folder / record.path
        if not path.exists() or hash_file(path) != record.sha256:
            raise CorpusError(
                f"the {'text' if isinstance(record, TextRecord) else 'shard'} {path} is "
                f"{'not what its manifest says' if path.exists() else 'missing'}; "
                f"delete {manifest.folder} and prepare the corpus again."
            )


def hash_file(path: Path) -> str:
    """Return the sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() if sys.version_info >= (3, 11) else _hash_stream(file)


def _hash_stream(file: Any) -> str:
    digest = hashlib.sha256()
    while chunk := file.read(2**20):
        digest.update(chunk)
    return digest.hexdigest()


@functools.lru_cache(maxsize=512)
def _open_shard(path: str) -> tuple[list[pa.RecordBatch], np.ndarray]:
    """Return the batches of a memory-mapped shard, and the number of rows up to the end of each."""
    batches = pa.ipc.open_file(pa.memory_map(path)).read_all().to_batches()
    return batches, np.cumsum([each.num_rows for each in batches])


def take_rows(paths: Sequence[str], shards: np.ndarray, rows: np.ndarray) -> pa.Table:
    """Read rows of several shards, in the order asked for.

    Args:
        paths: files of the shards.
        shards: int64 [R], index into `paths`.
        rows: int64 [R], row within the shard.

    Returns:
        Table with R rows and the shards' columns.
    """
    pieces, places = [], []
    for shard in np.unique(shards):
        batches, ends = _open_shard(paths[shard])
        asked = np.flatnonzero(shards == shard)
        within = np.searchsorted(ends, rows[asked], side="right")
        # By batch: taken from the whole shard, two rows would cost a copy of all of it.
        for number in np.unique(within):
            chosen = asked[within == number]
            first = ends[number] - batches[number].num_rows
            pieces.append(batches[number].take(pa.array(rows[chosen] - first)))
            places.append(chosen)
    inverse = np.argsort(np.concatenate(places), kind="stable")
    return pa.Table.from_batches(pieces).combine_chunks().take(pa.array(inverse))


def take_numbered(paths: Sequence[str], shard_rows: Sequence[int], numbers: np.ndarray) -> pa.Table:
    """Read rows by their number in a split.

    Args:
        paths: files of the split's shards.
        shard_rows: rows of every shard.
        numbers: int64 [R], counted over all shards in manifest order.

    Returns:
        Table with R rows, the shards' columns and `row_id` (int64), the numbers.
    """
    ends = np.cumsum(shard_rows)
    shards = np.searchsorted(ends, numbers, side="right")
    firsts = np.concatenate([[0], ends])[shards]
    return take_rows(paths, shards, numbers - firsts).append_column("row_id", pa.array(numbers, type=pa.int64()))


def flatten_lists(rows: pa.Table, column: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the values of a list column, all rows joined, and the lengths of the rows, int64 [R]."""
    lists = rows.column(column).combine_chunks()
    if isinstance(lists, pa.ChunkedArray):
        lists = lists.chunk(0) if lists.num_chunks else pa.array([], type=lists.type)
    lengths = np.diff(lists.offsets.to_numpy())
    return lists.flatten().to_numpy(zero_copy_only=False), lengths.astype(np.int64)
