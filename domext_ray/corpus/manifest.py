"""What a prepared corpus is: its manifest, the files that this names, and rows read from them.

Enters: the folder that `shards.prepare_corpus` made, on a disk or in a bucket. Leaves: records, checked files, tables
of rows. A bucket's shards are read from this machine's copies, each compared with its record when it is first opened.
"""

from __future__ import annotations

import functools
import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from domext_ray.errors import CorpusError
from domext_ray.storage import Place, Where, hash_file, hash_values, map_file, write_json

FORMAT_VERSION = 3

Split = Literal["train", "held_out"]
SPLITS: tuple[Split, ...] = ("train", "held_out")
MANIFEST, TOKEN_COUNTS = "manifest.json", "token_counts.npy"

_FILES = {
    "train": (r"train-\d{6,}\.arrow", ("num_rows", "num_tokens")),
    "held_out": (r"held_out-\d{6,}\.arrow", ("num_rows", "num_tokens")),
    "texts": (r"text-\d{6,}\.jsonl", ("num_documents", "num_bytes")),
}
"""Names of a corpus' files, which are all beside its manifest, and what its records count."""


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
        pairs: rows are pairs, with the columns second_start and next_sentence (see `pairs`).
        cls_id, sep_id: the special tokens around a text.
        texts: files with a part of the held-out documents as text; which part depends on the documents alone.
        dropped_places: the first place of what was dropped, by reason, in words.
        token_counts_sha256: of the file that `token_counts` reads.
    """

    folder: Place
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
    dropped_places: dict[str, str] = field(default_factory=dict)
    token_counts_sha256: str = ""

    def token_counts(self, num_words: int) -> np.ndarray:
        """Return how often each token occurs in the training rows, int64 [num_words]; ids from there on do not count.

        Raises:
            CorpusError: the file has gone, or is damaged.
        """
        path = Place(self.folder) / TOKEN_COUNTS
        try:
            counts = np.load(io.BytesIO(path.read_bytes()))[:num_words].astype(np.int64)
        except (OSError, ValueError, EOFError) as error:
            raise CorpusError(
                f"{path} is missing or damaged; delete its folder and prepare the corpus again."
            ) from error
        return np.pad(counts, (0, num_words - len(counts)))

    def records(self, split: Split) -> tuple[ShardRecord, ...]:
        """Return the shards of a split."""
        return self.train if split == "train" else self.held_out

    def paths(self, split: Split) -> tuple[str, ...]:
        """Return the files of a split's shards."""
        return tuple(str(self.folder / each.path) for each in self.records(split))

    def num_rows(self, split: Split) -> int:
        """Return the rows of a split."""
        return sum(each.num_rows for each in self.records(split))

    def num_tokens(self, split: Split) -> int:
        """Return the tokens of a split."""
        return sum(each.num_tokens for each in self.records(split))


def write_manifest(folder: Place, record: Mapping[str, Any]) -> None:
    """Write the manifest of a prepared corpus, with its own hash."""
    write_json(folder / MANIFEST, {**record, "sha256": _hash_record(record)})


def _hash_record(record: Mapping[str, Any]) -> str:
    return hash_values({name: value for name, value in record.items() if name != "sha256"})


def read_manifest(folder: Where) -> Manifest:
    """Read the manifest of a prepared corpus.

    Raises:
        CorpusError: it is missing, damaged, or of another format.
    """
    path = Place(folder) / MANIFEST
    try:
        record = json.loads(path.read_text())
        if record["format"] != FORMAT_VERSION:
            raise CorpusError(
                f"{path} has format {record['format']}, this version reads {FORMAT_VERSION}; prepare again."
            )
        fault = _find_fault(record)
        if fault:
            raise CorpusError(f"{path} is damaged ({fault}); delete its folder and prepare the corpus again.")
        shards = {split: tuple(ShardRecord(**each) for each in record[split]) for split in SPLITS}
        return Manifest(
            path.parent,
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
            record.get("dropped_places", {}),
            record["token_counts_sha256"],
        )
    except FileNotFoundError as error:
        raise CorpusError(f"{folder} has no manifest.json; prepare the corpus with domext prepare.") from error
    except PermissionError as error:
        raise CorpusError(
            f"{path} may be read by its owner only, for held-out text is beside it; give another --prepare.cache_dir."
        ) from error
    except (KeyError, TypeError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise CorpusError(f"{path} is damaged ({error}); delete its folder and prepare the corpus again.") from error


def _find_fault(record: dict[str, Any]) -> str:
    """Say what is wrong with the fields of a manifest; empty: nothing."""
    if record.get("sha256") != _hash_record(record):
        return "it is not what was written: its sha256 is another"
    for name in ("fingerprint", "tokenizer_fingerprint", "token_counts_sha256"):
        if not _is_hash(record[name]):
            return f"{name} is no sha256"
    for name, least in (("seq_length", 1), ("num_documents", 1), ("cls_id", 0), ("sep_id", 0)):
        if not _is_count(record[name], least):
            return f"{name} is {record[name]!r}"
    if not isinstance(record["pairs"], bool) or not isinstance(record["settings"], dict):
        return "pairs or settings is of the wrong type"
    if not isinstance(record["dropped"], dict) or not all(_is_count(each, 0) for each in record["dropped"].values()):
        return "dropped is no table of counts"
    places = record.get("dropped_places", {})
    if not isinstance(places, dict) or not all(isinstance(each, str) for each in places.values()):
        return "dropped_places is no table of places"
    for part, (pattern, fields) in _FILES.items():
        if not record[part] and part in SPLITS:
            return f"{part} names no file"
        paths = [each["path"] for each in record[part]]
        for each in record[part]:
            if not isinstance(each["path"], str) or not re.fullmatch(pattern, each["path"]):
                return f"{part} names {each['path']!r}"
            if each.keys() != {"path", "sha256", *fields} or not _is_hash(each["sha256"]):
                return f"the record of {each['path']} is incomplete"
            if not all(_is_count(each[name], 1) for name in fields):
                return f"the record of {each['path']} has an impossible count"
        if paths != sorted(set(paths), key=lambda each: (len(each), each)):
            return f"{part} names files twice or out of order"
    return ""


def _is_hash(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None


def _is_count(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def verify_shards(manifest: Manifest) -> None:
    """Compare every file of a prepared corpus with its record.

    Raises:
        CorpusError: a file is missing or differs; names it.
    """
    fault = find_shard_fault(manifest)
    if fault:
        raise CorpusError(f"{fault}; delete {manifest.folder} and prepare the corpus again.")


def find_shard_fault(manifest: Manifest) -> str:
    """Say which file of a prepared corpus is not what its record says; empty: none. Of a bucket's, what is missing."""
    shards: list[ShardRecord | TextRecord] = [*manifest.train, *manifest.held_out, *manifest.texts]
    if not manifest.folder.is_local:  # one request; what is there is whole, and is compared when it is opened
        there = {*manifest.folder.list_names()}
        names = [*(each.path for each in shards), TOKEN_COUNTS]
        return next((_describe_fault(manifest.folder / each) for each in names if each not in there), "")
    for record in shards:
        fault = find_file_fault(manifest.folder / record.path, record.sha256)
        if fault:
            return fault
    if fault := find_file_fault(manifest.folder / TOKEN_COUNTS, manifest.token_counts_sha256):
        return fault
    for shard in (*manifest.train, *manifest.held_out):
        path = manifest.folder / shard.path
        if pa.ipc.open_file(pa.py_buffer(map_file(path))).count_rows() != shard.num_rows:
            return f"the shard {path} has another number of rows than its manifest says"
    return ""


def find_file_fault(path: Place, sha256: str) -> str:
    """Say what is wrong with a file of a prepared corpus, or that it is missing in a bucket; empty: nothing."""
    is_whole = path.is_file() and (not path.is_local or hash_file(path) == sha256)
    return "" if is_whole else _describe_fault(path)


def _describe_fault(path: Place) -> str:
    what = {"jsonl": "text", "npy": "table"}.get(path.name.rpartition(".")[2], "shard")
    return f"the {what} {path} is {'not what its manifest says' if path.is_file() else 'missing'}"


@functools.lru_cache(maxsize=512)
def _open_shard(path: str) -> tuple[list[pa.RecordBatch], np.ndarray]:
    """Return the batches of a memory-mapped shard, and the number of rows up to the end of each."""
    place = Place(path)
    if not place.is_local and hash_file(place) != _read_hashes(str(place.parent))[place.name]:
        Place(place.local()).delete()  # the copy: it may be that which is damaged
        raise CorpusError(f"{_describe_fault(place)}; run the same command again, and if it stays so, delete it.")
    batches = pa.ipc.open_file(pa.py_buffer(map_file(place))).read_all().to_batches()
    return batches, np.cumsum([each.num_rows for each in batches])


@functools.lru_cache(maxsize=8)
def _read_hashes(folder: str) -> dict[str, str]:
    manifest = read_manifest(folder)
    return {each.path: each.sha256 for split in SPLITS for each in manifest.records(split)}


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


def read_train_batches(manifest: Manifest) -> Iterator[pa.RecordBatch]:
    """Yield the training rows of a corpus in the manifest's order, memory-mapped."""
    for path in manifest.paths("train"):
        yield from _open_shard(path)[0]


def find_frequent_words(manifest: Manifest, num_words: int, number: int) -> np.ndarray:
    """Return the words that occur most often in a corpus's training rows; of equally frequent ones the lowest ids.

    Args:
        manifest: the prepared corpus.
        num_words: ids from here on do not count.
        number: how many are wanted, at most `num_words`.

    Returns:
        int64 [number], ids in ascending order.
    """
    return np.sort(np.argsort(-manifest.token_counts(num_words), kind="stable")[:number])
