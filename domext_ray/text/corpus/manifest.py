"""What a prepared corpus is: its manifest, the files that this names, and rows read from them.

Enters: the folder that `shards.prepare_corpus` made, on a disk or in a bucket. Leaves: records, checked files, tables
of rows. A bucket's shards are read from this machine's copies, each compared with its record when it is first opened.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from domext_ray.errors import AccessError, CorpusError
from domext_ray.files import describe_format, newest_format
from domext_ray.storage import Place, hash_file, hash_values, look_at, map_file, parse_json, write_json
from domext_ray.text.data.hashes import HashLine, hash_listed, list_on_disk

FORMAT_VERSION = newest_format("corpus")

Split = Literal["train", "held_out"]
SPLITS: tuple[Split, ...] = ("train", "held_out")
MANIFEST, TOKEN_COUNTS = "manifest.json", "token_counts.npy"

HASHES = ".hashes.json"
"""Beside a manifest on a disk: what `find_shard_fault` need not read again."""


@dataclass(frozen=True)
class FileRecord:
    """An Arrow IPC file of rows; or a file of held-out documents as they are, a JSON object with `text` a line."""

    path: str  # relative to the manifest's folder; of `Manifest.shards` the whole one
    sha256: str
    num_rows: int  # or lines
    num_tokens: int = 0  # special ones included; of text 0


@dataclass(frozen=True)
class Manifest:
    """What a prepared corpus is; its shards are in canonical order."""

    folder: Place
    fingerprint: str  # of content, settings and tokenizer
    seq_length: int
    tokenizer_fingerprint: str
    settings: dict[str, Any]  # the `prepare` options that decide the rows
    train: tuple[FileRecord, ...]
    held_out: tuple[FileRecord, ...]
    num_documents: int  # that stayed
    dropped: dict[str, int]  # documents that did not, by reason
    pairs: bool = False  # rows are pairs, with the columns second_start and next_sentence (see `pairs`)
    cls_id: int = 0
    sep_id: int = 0
    texts: tuple[FileRecord, ...] = ()  # files with a part of the held-out documents; which part depends on these alone
    dropped_places: dict[str, str] = field(default_factory=dict)  # the first of each reason, in words
    token_counts_sha256: str = ""
    unknown: dict[str, Any] = field(default_factory=dict)  # `TokenCounts.pack`; empty: not counted, as in 0.1.0

    def token_counts(self, num_words: int) -> np.ndarray:
        """Return how often each token occurs in the training rows, int64 [num_words]; higher ids do not count."""
        path = self.folder / TOKEN_COUNTS
        try:
            counts = np.load(io.BytesIO(path.read_bytes()))[:num_words].astype(np.int64)
        except (OSError, ValueError, EOFError) as error:
            raise CorpusError(
                f"{path} is missing or damaged; delete its folder and prepare the corpus again."
            ) from error
        return np.pad(counts, (0, num_words - len(counts)))

    def records(self, split: Split) -> tuple[FileRecord, ...]:
        """Return the shards of a split."""
        return self.train if split == "train" else self.held_out

    def shards(self, split: Split) -> tuple[FileRecord, ...]:
        """Return the shards of a split with their whole paths, as `take_rows` takes them."""
        return tuple(replace(record, path=str(self.folder / record.path)) for record in self.records(split))

    def num_rows(self, split: Split) -> int:
        """Return the rows of a split."""
        return sum(record.num_rows for record in self.records(split))

    def num_tokens(self, split: Split) -> int:
        """Return the tokens of a split."""
        return sum(record.num_tokens for record in self.records(split))


def write_manifest(folder: Place, record: Mapping[str, Any]) -> None:
    """Write the manifest of a prepared corpus, with its own hash."""
    write_json(folder / MANIFEST, {**record, "sha256": hash_values(record)})


def read_manifest(folder: Place) -> Manifest:
    """Read the manifest of a prepared corpus.

    One that is missing, damaged or of another format is a `CorpusError`; another user's is an `AccessError`.
    """
    path, fault = folder / MANIFEST, ""
    try:
        record = parse_json(path.read_bytes())
        if record["format"] != FORMAT_VERSION:
            fault = describe_format("corpus", record["format"])
        elif record.pop("sha256") != hash_values(record):
            fault = "is damaged (it is not what was written: its sha256 is another)"
    except FileNotFoundError as error:
        raise CorpusError(f"{folder} has no manifest.json; prepare the corpus with domext prepare corpus.") from error
    except AccessError as error:
        raise AccessError(
            f"{path} may be read by its owner only, for held-out text is beside it; give another --prepare.cache_dir."
        ) from error
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        fault = f"is damaged ({error})"
    if fault:
        raise CorpusError(f"{path} {fault}; delete its folder and prepare the corpus again.")
    record.setdefault("unknown", {})
    values = {attribute.name: record[attribute.name] for attribute in fields(Manifest) if attribute.name != "folder"}
    files = {name: tuple(FileRecord(**file) for file in record[name]) for name in (*SPLITS, "texts")}
    return Manifest(path.parent, **{**values, **files})


def find_shard_fault(manifest: Manifest) -> str:
    """Say which file of a prepared corpus is missing, or on a disk is not what its record says; empty: none.

    What a bucket holds is whole, and is compared when it is opened.
    """
    there, hashes = {*manifest.folder.list_names()}, list_hashes(manifest)
    for place in hashes:
        if place.name not in there:
            return describe_fault(place)
    try:
        memory, line = manifest.folder / HASHES, HashLine("a prepared corpus")
        found = hash_listed(list_on_disk(map(str, hashes)), memory, line) if memory.is_local else {}
    except FileNotFoundError as error:  # its name is a folder's, or a link's to nothing
        return describe_fault(Place(error.filename))
    changed = (place for place, sha256 in hashes.items() if found.get(str(place), sha256) != sha256)
    return next(map(describe_fault, changed), "")


def remember_shards(manifest: Manifest) -> None:
    """Spare the next start the reading of a prepared corpus whose files were written just now."""
    hashes = list_hashes(manifest)
    if manifest.folder.is_local:
        known = {str(place): sha256 for place, sha256 in hashes.items()}

        def tell(name: str, count: Callable[[int], None]) -> str:
            return known[name]

        listed = [replace(file, hash=functools.partial(tell, file.name)) for file in list_on_disk(known)]
        hash_listed(listed, manifest.folder / HASHES)


def list_hashes(manifest: Manifest) -> dict[Place, str]:
    """Return the sha256 of every file of a prepared corpus, by its place."""
    records = [*manifest.train, *manifest.held_out, *manifest.texts]
    hashes = {record.path: record.sha256 for record in records} | {TOKEN_COUNTS: manifest.token_counts_sha256}
    return {manifest.folder / name: sha256 for name, sha256 in hashes.items()}


def find_file_fault(path: Place, sha256: str) -> str:
    """Say what is wrong with a file of a prepared corpus, or that it is missing in a bucket; empty: nothing."""
    is_whole = path.is_file() and (not path.is_local or hash_file(path.local()) == sha256)
    return "" if is_whole else describe_fault(path)


def describe_fault(path: Place) -> str:
    """Say of a file that is missing, or has another hash, which of the two it is."""
    what = {"jsonl": "text", "npy": "table"}.get(path.name.rpartition(".")[2], "shard")
    return f"the {what} {path} is {'not what its manifest says' if path.is_file() else 'missing'}"


def _open_shard(shard: FileRecord) -> tuple[list[pa.RecordBatch], np.ndarray]:
    """Return the batches of a memory-mapped shard, and the number of rows up to the end of each."""
    place = Place(shard.path)
    found = look_at(shard.path) if place.is_local else None
    return _map_shard(place, shard.sha256, found and (found.st_ino, found.st_size, found.st_mtime_ns))


@functools.lru_cache(maxsize=512)
def _map_shard(place: Place, sha256: str, on_disk: tuple[int, ...] | None) -> tuple[list[pa.RecordBatch], np.ndarray]:
    """Map a shard: one that was written anew at its place is another, by its hash or what a disk says of it."""
    if not place.is_local and hash_file(place.local()) != sha256:
        place.local().unlink(missing_ok=True)  # the copy: it may be that which is damaged
        raise CorpusError(f"{describe_fault(place)}; run the same command again, and if it stays so, delete it.")
    batches = pa.ipc.open_file(pa.py_buffer(map_file(place))).read_all().to_batches()
    return batches, np.cumsum([batch.num_rows for batch in batches])


def take_rows(files: Sequence[FileRecord], shards: np.ndarray, rows: np.ndarray) -> pa.Table:
    """Read rows in the order asked for: index into `files` and row within that file, int64 [R] each."""
    pieces, places = [], []
    for shard in np.unique(shards):
        batches, ends = _open_shard(files[shard])
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


def take_numbered(files: Sequence[FileRecord], numbers: np.ndarray) -> pa.Table:
    """Read rows by their number, counted over all files of a split, int64 [R], which is their column `row_id`, too."""
    ends = np.cumsum([file.num_rows for file in files])
    shards = np.searchsorted(ends, numbers, side="right")
    firsts = np.concatenate([[0], ends])[shards]
    return take_rows(files, shards, numbers - firsts).append_column("row_id", pa.array(numbers, type=pa.int64()))


def flatten_lists(rows: pa.Table, column: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the values of a list column, all rows joined, and the lengths of the rows, int64 [R]."""
    lists = rows.column(column).combine_chunks()
    if isinstance(lists, pa.ChunkedArray):
        lists = lists.chunk(0) if lists.num_chunks else pa.array([], type=lists.type)
    lengths = np.diff(lists.offsets.to_numpy())
    return lists.flatten().to_numpy(zero_copy_only=False), lengths.astype(np.int64)


def find_frequent_words(manifest: Manifest, num_words: int, number: int) -> np.ndarray:
    """Return the words that occur most often in a corpus's training rows; of equally frequent ones the lowest ids.

    They are ids below `num_words` in ascending order, int64 [number].
    """
    return np.sort(np.argsort(-manifest.token_counts(num_words), kind="stable")[:number])
