"""Read tasks -> documents, once each -> token rows -> Arrow shards and a manifest, on Ray Data.

Two passes over the text, both in tasks of bounded size. The first hashes every document (16 bytes each, which with a
few flags is all that the driver keeps): the first of equal documents in canonical order stays, and its hash says
whether it is held out, so that a duplicate cannot cross the split. The second tokenises the documents that stay and
writes one shard a task and split.
The folder appears under its final name, the fingerprint of everything that decides its rows, when it is complete.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import pickle
import shutil
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import ray.data

from domext_ray.config import PrepareConfig, identity_of
from domext_ray.corpus.rows import RowSettings, build_rows, count_han, load_jieba
from domext_ray.corpus.sources import ReadTask, Sources, read_documents, resolve_sources
from domext_ray.corpus.vocab import fingerprint_tokenizer, load_tokenizer
from domext_ray.errors import CorpusError, DomextError

FORMAT_VERSION = 1
HASH_BYTES = 16
CHINESE_FRAC = 0.01
"""Share of Han characters from which on a corpus is Chinese enough to need jieba."""

ROWS_PER_BATCH = 1024
SCHEMA = pa.schema([("input_ids", pa.list_(pa.int32())), ("word_starts", pa.list_(pa.bool_()))])

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

    def records(self, split: Split) -> tuple[ShardRecord, ...]:
        """Return the shards of a split."""
        return self.train if split == "train" else self.held_out

    def num_rows(self, split: Split) -> int:
        """Return the rows of a split."""
        return sum(each.num_rows for each in self.records(split))

    def num_tokens(self, split: Split) -> int:
        """Return the tokens of a split."""
        return sum(each.num_tokens for each in self.records(split))


def prepare_corpus(
    spec: str, prepare: PrepareConfig, tokenizer_folder: Path, seq_length: int, cache_dir: Path
) -> Manifest:
    """Prepare a corpus, or find it prepared; Ray is initialised.

    Args:
        spec: the `--corpus` option.
        prepare: what a document is, how documents are split and cut.
        tokenizer_folder: the tokenizer's folder.
        seq_length: tokens of a full row.
        cache_dir: folder of prepared corpora, one folder a fingerprint.

    Raises:
        CorpusError: nothing to read, nothing usable in it, or an empty split.
    """
    sources = resolve_sources(spec, prepare)
    tokenizer = load_tokenizer(tokenizer_folder)
    settings = RowSettings(
        tokenizer.backend_tokenizer.to_str(),
        tokenizer.cls_token_id,
        tokenizer.sep_token_id,
        seq_length,
        prepare.cross_documents,
        prepare.chinese_words,
    )
    identity = {
        "format": FORMAT_VERSION,
        "content": sources.fingerprint,
        "prepare": identity_of(prepare),
        "tokenizer": fingerprint_tokenizer(tokenizer),
        "seq_length": seq_length,
    }
    fingerprint = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    folder = cache_dir / fingerprint[:16]
    if (folder / "manifest.json").exists():
        return read_manifest(folder)
    cache_dir.mkdir(parents=True, exist_ok=True)
    temporary = cache_dir / f".{folder.name}-{uuid.uuid4().hex[:8]}"  # not mkdtemp: others may read a corpus
    temporary.mkdir()
    try:
        record = _build(sources, prepare, settings, temporary)
        record |= {
            "format": FORMAT_VERSION,
            "fingerprint": fingerprint,
            "seq_length": seq_length,
            "tokenizer_fingerprint": identity["tokenizer"],
            "settings": identity["prepare"],
            "corpus": spec,
        }
        with (temporary / "manifest.json").open("w", encoding="utf-8") as file:
            json.dump(record, file, indent=2)
            file.flush()
            os.fsync(file.fileno())
        _publish(temporary, folder)
    finally:
        _remove(temporary)
    return read_manifest(folder)


def _publish(temporary: Path, folder: Path) -> None:
    """Give a complete folder its name, unless another job was first; a folder without a manifest gives way."""
    if folder.exists() and not (folder / "manifest.json").exists():
        shutil.rmtree(folder)
    try:
        temporary.rename(folder)
    except OSError:
        if not (folder / "manifest.json").exists():
            raise


def _remove(folder: Path) -> None:
    """Remove a folder in which tasks that have not heard of a failure yet may still be writing."""
    for _ in range(100):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(0.1)


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
        )
    except FileNotFoundError as error:
        raise CorpusError(f"{folder} has no manifest.json; prepare the corpus with jobs/prepare_corpus.py.") from error
    except (KeyError, TypeError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CorpusError(f"{path} is damaged ({error}); delete its folder and prepare the corpus again.") from error


def verify_shards(manifest: Manifest) -> None:
    """Compare every shard with its record.

    Raises:
        CorpusError: a shard is missing or differs; names it.
    """
    for split in SPLITS:
        for record in manifest.records(split):
            path = manifest.folder / record.path
            if not path.exists() or _hash_file(path) != record.sha256:
                raise CorpusError(
                    f"the shard {path} is {'not what its manifest says' if path.exists() else 'missing'}; "
                    f"delete {manifest.folder} and prepare the corpus again."
                )


def _hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() if sys.version_info >= (3, 11) else _hash_stream(file)


def _hash_stream(file: Any) -> str:
    digest = hashlib.sha256()
    while chunk := file.read(2**20):
        digest.update(chunk)
    return digest.hexdigest()


def _build(sources: Sources, prepare: PrepareConfig, settings: RowSettings, folder: Path) -> dict[str, Any]:
    """Run both passes; return the manifest's record of what was found."""
    hashes, counts, dropped, han_frac = _hash_pass(sources, prepare)
    keep, is_held_out = _choose_documents(hashes, prepare.held_out_frac)
    del hashes
    num_documents = int(keep.sum())
    dropped["duplicate"] = len(keep) - num_documents
    reasons = ", ".join(f"{number} {reason}" for reason, number in dropped.items() if number)
    if not num_documents:
        raise CorpusError(f"--corpus {sources.spec!r} has no usable document (dropped: {reasons or 'nothing read'}).")
    use = keep.astype(np.uint8) + (keep & is_held_out)  # 0: dropped, 1: train, 2: held out
    _require_both_splits(sources, num_documents, [(use == code).any() for code in (1, 2)])
    is_chinese = prepare.chinese_words and han_frac >= CHINESE_FRAC
    if is_chinese:
        load_jieba()  # a missing package is reported before the work, not within it
    settings = replace(settings, chinese_words=is_chinese)
    ends = np.cumsum(counts)
    plans = [use[end - count : end].tobytes() for count, end in zip(counts, ends, strict=True)]
    shards: dict[str, list[dict[str, Any]]] = {split: [] for split in SPLITS}
    write = functools.partial(_write_task, prepare, settings, str(folder))
    for result in _run(write, sources, "tokenising", plans):
        for split in SPLITS:
            if result[split]:
                shards[split].append(asdict(result[split]))
    _require_both_splits(sources, num_documents, [bool(shards[split]) for split in SPLITS])
    return {
        **shards,
        "num_documents": num_documents,
        "dropped": {name: n for name, n in dropped.items() if n},
        "han_frac": han_frac,
        "chinese_words": is_chinese,
    }


def _require_both_splits(sources: Sources, num_documents: int, has_any: Sequence[bool]) -> None:
    for split, is_there in zip(("training", "held-out"), has_any, strict=True):
        if not is_there:
            raise CorpusError(
                f"--corpus {sources.spec!r} has {num_documents} usable documents, so the {split} split is empty; give "
                "more text, a finer --prepare.document, or another --prepare.held_out_frac."
            )


def _hash_pass(sources: Sources, prepare: PrepareConfig) -> tuple[bytearray, list[int], Counter[str], float]:
    """Hashes of all documents, their number by task, what was dropped, and the share of Han characters."""
    hashes, counts, dropped = bytearray(), [], Counter[str]()
    num_chars = num_han = 0
    for result in _run(functools.partial(_hash_task, prepare), sources, "reading"):
        hashes += result["hashes"]
        counts.append(len(result["hashes"]) // HASH_BYTES)
        dropped.update(result["dropped"])
        num_chars, num_han = num_chars + result["num_chars"], num_han + result["num_han"]
    return hashes, counts, dropped, num_han / max(num_chars, 1)


def _hash_task(prepare: PrepareConfig, number: int, task: ReadTask, plan: bytes) -> dict[str, Any]:
    dropped: Counter[str] = Counter()
    hashes = bytearray()
    num_chars = num_han = 0
    for document in read_documents(task, prepare, dropped):
        hashes += hashlib.blake2b(document.encode(), digest_size=HASH_BYTES).digest()
        num_chars, num_han = num_chars + len(document), num_han + count_han(document)
    return {"hashes": bytes(hashes), "dropped": dropped, "num_chars": num_chars, "num_han": num_han}


def _choose_documents(hashes: bytes | bytearray, held_out_frac: float) -> tuple[np.ndarray, np.ndarray]:
    """Return which documents are the first of their kind, and which are held out by their hash; bool [D] each.

    Works through the hashes by their first byte, so that sorting takes no second copy of them.
    """
    words = np.frombuffer(hashes, dtype=">u8").reshape(-1, 2)
    first_bytes = np.frombuffer(hashes, dtype=np.uint8).reshape(-1, HASH_BYTES)[:, 0]
    keep = np.zeros(len(words), dtype=bool)
    is_held_out = np.zeros(len(words), dtype=bool)
    for byte in range(256):
        places = np.flatnonzero(first_bytes == byte)
        high, low = words[places].astype(np.uint64).T
        is_held_out[places] = (high >> np.uint64(11)).astype(np.float64) * 2.0**-53 < held_out_frac
        order = np.lexsort((low, high))  # stable: equal hashes stay in canonical order
        is_repeated = (np.diff(high[order]) == 0) & (np.diff(low[order]) == 0)
        keep[places[order[~np.concatenate([[False], is_repeated])[: len(order)]]]] = True
    return keep, is_held_out


def _write_task(
    prepare: PrepareConfig, settings: RowSettings, folder: str, number: int, task: ReadTask, plan: bytes
) -> dict[str, Any]:
    """Write the shards of one task; a split without a document of this task gets none."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # Ray runs one such task a core
    held_out: list[str] = []
    train = build_rows(_divide(task, prepare, plan, held_out), settings)
    records: dict[str, ShardRecord | None] = {}
    records["train"] = _write_shard(Path(folder, f"train-{number:06d}.arrow"), train)
    records["held_out"] = _write_shard(Path(folder, f"held_out-{number:06d}.arrow"), build_rows(held_out, settings))
    return records


def _divide(task: ReadTask, prepare: PrepareConfig, plan: bytes, held_out: list[str]) -> Iterator[str]:
    """Yield the documents for training; append those held out."""
    num_read = 0
    for document in read_documents(task, prepare, Counter()):
        use = plan[num_read] if num_read < len(plan) else 0
        num_read += 1
        if use == 1:
            yield document
        elif use == 2:
            held_out.append(document)
    if num_read != len(plan):
        raise CorpusError(f"{task.files[0].path} changed while it was read; start again when nothing writes to it.")


def _write_shard(path: Path, rows: Iterator[tuple[np.ndarray, np.ndarray]]) -> ShardRecord | None:
    num_rows = num_tokens = 0
    pending: list[tuple[np.ndarray, np.ndarray]] = []
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, SCHEMA) as writer:
        for row in rows:
            pending.append(row)
            num_rows, num_tokens = num_rows + 1, num_tokens + len(row[0])
            if len(pending) == ROWS_PER_BATCH:
                writer.write_batch(_to_batch(pending))
                pending = []
        if pending:
            writer.write_batch(_to_batch(pending))
    if not num_rows:
        path.unlink()
        return None
    return ShardRecord(path.name, num_rows, num_tokens, _hash_file(path))


def _to_batch(rows: list[tuple[np.ndarray, np.ndarray]]) -> pa.RecordBatch:
    offsets = pa.array(np.concatenate([[0], np.cumsum([len(ids) for ids, _ in rows])]).astype(np.int32))
    ids = pa.array(np.concatenate([ids for ids, _ in rows]))
    starts = pa.array(np.concatenate([starts for _, starts in rows]))
    return pa.RecordBatch.from_arrays(
        [pa.ListArray.from_arrays(offsets, ids), pa.ListArray.from_arrays(offsets, starts)], schema=SCHEMA
    )


def _run(
    function: Callable[[int, ReadTask, bytes], dict[str, Any]],
    sources: Sources,
    verb: str,
    plans: Sequence[bytes] | None = None,
) -> Iterator[dict[str, Any]]:
    """Run a function over (number, read task, plan) of all tasks on Ray Data, in order, showing progress."""
    configure_ray_data()

    def call(items: dict[str, np.ndarray]) -> dict[str, list[bytes]]:
        result: dict[str, Any] | DomextError
        try:
            result = function(int(items["number"][0]), pickle.loads(items["task"][0]), items["plan"][0])
        except DomextError as error:  # a value: Ray Data drops the cause of an exception on its way to the driver
            result = error
        return {"result": [pickle.dumps(result)]}

    items = [
        {"number": number, "task": pickle.dumps(task), "plan": plans[number] if plans else b""}
        for number, task in enumerate(sources.tasks)
    ]
    dataset = ray.data.from_items(items, override_num_blocks=len(items)).map_batches(call, batch_size=1, num_cpus=1)
    del items
    progress = _Progress(sources, verb)
    rows = iter(dataset.iter_rows())
    try:
        for number, row in enumerate(rows):
            result = pickle.loads(row["result"])
            if isinstance(result, DomextError):
                raise result
            progress.show(number + 1)
            yield result
    finally:
        del rows, dataset  # ends the tasks that are still running
    progress.finish()


def configure_ray_data() -> None:
    """Make Ray Data keep the order of its blocks, and leave progress and logs to us."""
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    context.execution_options.preserve_order = True
    logging.getLogger("ray.data").setLevel(logging.ERROR)


class _Progress:
    """One line on standard error: share, MB, MB/s, time left."""

    def __init__(self, sources: Sources, verb: str) -> None:
        self.sizes = np.cumsum([each.num_bytes for each in sources.tasks]) / 1e6
        self.verb, self.started, self.shown = verb, time.monotonic(), 0.0

    def show(self, num_done: int) -> None:
        now = time.monotonic()
        if now - self.shown < (0.5 if sys.stderr.isatty() else 10.0):
            return
        self.shown = now
        done, total = self.sizes[num_done - 1], self.sizes[-1]
        rate = max(done, 1e-6) / max(now - self.started, 1e-6)
        line = f"{self.verb}: {done:,.0f} of {total:,.0f} MB, {rate:.1f} MB/s, {(total - done) / rate:,.0f} s left"
        print(
            f"\r\033[K{line}" if sys.stderr.isatty() else line,
            end="" if sys.stderr.isatty() else "\n",
            file=sys.stderr,
            flush=True,
        )

    def finish(self) -> None:
        seconds = time.monotonic() - self.started
        line = f"{self.verb}: {self.sizes[-1]:,.0f} MB in {seconds:.1f} s"
        print(f"\r\033[K{line}" if sys.stderr.isatty() else line, file=sys.stderr, flush=True)
