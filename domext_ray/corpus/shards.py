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
import os
import shutil
import time
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from domext_ray.config import PrepareConfig, identity_of
from domext_ray.corpus.manifest import (
    FORMAT_VERSION,
    SPLITS,
    Manifest,
    ShardRecord,
    Split,
    TextRecord,
    hash_file,
    read_manifest,
)
from domext_ray.corpus.pairs import CHUNK_SCHEMA, NO_NEXT_SENTENCE, NUM_SPECIAL_TOKENS, build_chunks
from domext_ray.corpus.rows import RowSettings, build_rows, count_han, load_jieba
from domext_ray.corpus.sources import ReadTask, Sources, read_documents, resolve_sources
from domext_ray.corpus.tasks import run_tasks
from domext_ray.corpus.vocab import fingerprint_tokenizer, load_tokenizer
from domext_ray.errors import CorpusError

HASH_BYTES = 16
CHINESE_FRAC = 0.01
"""Share of Han characters from which on a corpus is Chinese enough to need jieba."""

TEXT_BYTES = 64 * 2**10
"""Held-out documents that a task keeps as text, at most: what bits per character are measured on."""

ROWS_PER_BATCH = 1024
SCHEMA = pa.schema([("input_ids", pa.list_(pa.int32())), ("word_starts", pa.list_(pa.bool_()))])


def prepare_corpus(
    spec: str, prepare: PrepareConfig, tokenizer_folder: Path, seq_length: int, cache_dir: Path, pairs: bool = False
) -> Manifest:
    """Prepare a corpus, or find it prepared; Ray is initialised.

    Args:
        spec: the `--corpus` option.
        prepare: what a document is, how documents are split and cut.
        tokenizer_folder: the tokenizer's folder.
        seq_length: tokens of a full row.
        cache_dir: folder of prepared corpora, one folder a fingerprint.
        pairs: make chunks for next-sentence prediction; `prepare.cross_documents` has no say in these.

    Raises:
        CorpusError: nothing to read, nothing usable in it, or an empty split; with `pairs` also a split without two
            documents of several sentences.
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
        pairs,
    )
    identity = {
        "format": FORMAT_VERSION,
        "content": sources.fingerprint,
        "prepare": identity_of(prepare),
        "tokenizer": fingerprint_tokenizer(tokenizer),
        "seq_length": seq_length,
        "pairs": pairs,
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
            "pairs": pairs,
            "cls_id": settings.cls_id,
            "sep_id": settings.sep_id,
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
    written: dict[str, list[dict[str, Any]]] = {name: [] for name in (*SPLITS, "texts")}
    num_used: Counter[Split] = Counter()
    write = functools.partial(_write_task, prepare, settings, str(folder))
    for result in run_tasks(write, sources, "tokenising", plans):
        for name, records in written.items():
            if result[name]:
                records.append(asdict(result[name]))
        for split in SPLITS:
            num_used[split] += result["counts"][split]["used"]
            dropped[NO_NEXT_SENTENCE] += result["counts"][split][NO_NEXT_SENTENCE]
    if settings.pairs:
        _require_partners(sources, prepare, num_used)
        num_documents -= dropped[NO_NEXT_SENTENCE]
    _require_both_splits(sources, num_documents, [bool(written[split]) for split in SPLITS])
    return {
        **written,
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


def _require_partners(sources: Sources, prepare: PrepareConfig, num_used: Counter[Split]) -> None:
    for split in SPLITS:
        if num_used[split] < 2:
            raise CorpusError(
                f"--corpus {sources.spec!r} has {num_used[split]} documents of two or more sentences in the "
                f"{'training' if split == 'train' else 'held-out'} split, and next-sentence prediction needs two or "
                f"more; set --prepare.document blank_line or file (it is {prepare.document}), or give more text."
            )


def _hash_pass(sources: Sources, prepare: PrepareConfig) -> tuple[bytearray, list[int], Counter[str], float]:
    """Hashes of all documents, their number by task, what was dropped, and the share of Han characters."""
    hashes, counts, dropped = bytearray(), [], Counter[str]()
    num_chars = num_han = 0
    for result in run_tasks(functools.partial(_hash_task, prepare), sources, "reading"):
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
    """Write the files of one task; a split without a row of this task gets no shard."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # Ray runs one such task a core
    held_out: list[str] = []
    counts: dict[Split, Counter[str]] = {split: Counter() for split in SPLITS}
    result: dict[str, Any] = {"counts": counts}
    sources: tuple[tuple[Split, Iterable[str]], ...] = (
        ("train", _divide(task, prepare, plan, held_out)),
        ("held_out", held_out),
    )
    for i, (split, documents) in enumerate(sources):
        path = Path(folder, f"{split}-{number:06d}.arrow")
        if settings.pairs:
            first_document = (number << 32) + (i << 31)
            chunks = build_chunks(documents, settings, first_document, counts[split])
            result[split] = _write_shard(path, chunks, CHUNK_SCHEMA, NUM_SPECIAL_TOKENS)
        else:
            result[split] = _write_shard(path, build_rows(documents, settings), SCHEMA)
    result["texts"] = _write_texts(Path(folder, f"text-{number:06d}.jsonl"), held_out)
    return result


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


def _write_texts(path: Path, documents: Sequence[str]) -> TextRecord | None:
    """Write the first documents as they are, while they fit; of a first one that does not, the beginning."""
    lines: list[bytes] = []
    size = 0
    for document in documents:
        line = _to_line(document)
        if len(line) > TEXT_BYTES and not lines:
            line = _to_line(document[: TEXT_BYTES // 8])  # a character takes four bytes at most
        if size + len(line) > TEXT_BYTES:
            break
        lines.append(line)
        size += len(line)
    if not lines:
        return None
    path.write_bytes(b"".join(lines))
    return TextRecord(path.name, len(lines), size, hash_file(path))


def _to_line(document: str) -> bytes:
    return json.dumps({"text": document}, ensure_ascii=False).encode() + b"\n"


def _write_shard(
    path: Path, rows: Iterator[tuple[Any, ...]], schema: pa.Schema, num_added_tokens: int = 0
) -> ShardRecord | None:
    """Write rows whose first column is their tokens; `num_added_tokens` come to every row when it is read."""
    num_rows = num_tokens = 0
    pending: list[tuple[Any, ...]] = []
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        for row in rows:
            pending.append(row)
            num_rows, num_tokens = num_rows + 1, num_tokens + len(row[0]) + num_added_tokens
            if len(pending) == ROWS_PER_BATCH:
                writer.write_batch(_to_batch(pending, schema))
                pending = []
        if pending:
            writer.write_batch(_to_batch(pending, schema))
    if not num_rows:
        path.unlink()
        return None
    return ShardRecord(path.name, num_rows, num_tokens, hash_file(path))


def _to_batch(rows: list[tuple[Any, ...]], schema: pa.Schema) -> pa.RecordBatch:
    offsets = pa.array(np.cumsum([0, *(len(row[0]) for row in rows)]).astype(np.int32))
    columns = []
    for column, values in zip(schema, zip(*rows, strict=True), strict=True):
        if pa.types.is_list(column.type):
            columns.append(pa.ListArray.from_arrays(offsets, pa.array(np.concatenate(values))))
        else:
            columns.append(pa.array(values, type=column.type))
    return pa.RecordBatch.from_arrays(columns, schema=schema)
