"""Read tasks -> documents, once each -> token rows -> Arrow shards and a manifest, on Ray.

Two passes over the text, both in tasks of bounded size. The first hashes every document and its group (8 bytes each,
which the driver keeps in files, see `index`): the first of equal documents in canonical order stays, and `split` says
which are held out, so that a duplicate cannot cross the split. The second tokenises the documents that stay and
writes one shard a task and split.
The folder, on a disk or in a bucket, is named after the fingerprint of everything that decides its rows: of the text
these are its bytes, hashed before and looked at again at the end. sources.json says which files it had. The manifest
comes last: until then it is work, whose finished parts a second start takes over (see `runtime.tasks`). On a disk only
its owner may read it, for it holds held-out documents as text.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from domext_ray.config.pretrain import PrepareConfig, identify_documents
from domext_ray.errors import AccessError, CorpusError
from domext_ray.runs.attempts import lock_work
from domext_ray.runtime.records import Records
from domext_ray.storage import Place, hash_file, hash_values, new_file, parse_json, write_json
from domext_ray.text.corpus.index import DocumentIndex
from domext_ray.text.corpus.manifest import (
    FORMAT_VERSION,
    MANIFEST,
    SPLITS,
    TOKEN_COUNTS,
    FileRecord,
    Manifest,
    Split,
    find_file_fault,
    find_shard_fault,
    read_manifest,
    remember_shards,
    write_manifest,
)
from domext_ray.text.corpus.overlap import read_hashes
from domext_ray.text.corpus.pairs import NO_NEXT_SENTENCE, NO_OTHER_TEXT, choose_rows
from domext_ray.text.corpus.rows import NO_TOKEN, RowSettings, TokenCounts, count_han, load_jieba
from domext_ray.text.corpus.unknown import require_known, warn_of_unknown
from domext_ray.text.data.documents import read_documents, read_grouped
from domext_ray.text.data.dropped import Dropped
from domext_ray.text.data.groups import PEOPLE, tell_groups
from domext_ray.text.data.sources import SOURCES, ReadTask, Sources, resolve_sources, run_read_tasks, write_files
from domext_ray.text.data.split import describe_split, resolve_held_out_by
from domext_ray.text.vocabulary.tokenizer import fingerprint_tokenizer, load_tokenizer

if TYPE_CHECKING:  # transformers loads torch, which reading tasks need not
    from transformers import PreTrainedTokenizerBase

HASH_BYTES = 8
"""Of a billion different documents, two have the same hash in one of forty corpora; the second is dropped then."""
CHINESE_FRAC = 0.01
"""Share of Han characters from which on a corpus is Chinese enough to need jieba."""

TEXT_BYTES = 64 * 2**10
"""Held-out documents that a task keeps as text, at most: what bits per character are measured on."""

ROWS_PER_BATCH = 1024
_PARTS = (*SPLITS, "texts")


def prepare_corpus(
    spec: str, prepare: PrepareConfig, tokenizer_folder: Path, seq_length: int, cache_dir: Place, pairs: bool = False
) -> Manifest:
    """Prepare a corpus, or find it prepared; Ray is initialised.

    With `pairs`, rows are pairs for next-sentence prediction, and `prepare.cross_documents` has no say in them.
    """
    sources = resolve_sources(spec, prepare, cache_dir)
    tokenizer = load_tokenizer(tokenizer_folder)

    settings = make_settings(tokenizer, prepare, seq_length, pairs)
    identity = identify_corpus(sources, prepare, tokenizer, seq_length, pairs)
    held_out_by = identity["held_out_by"]
    fingerprint = hash_values(identity)
    folder = cache_dir / fingerprint[:16]
    manifest = _find_prepared(folder, fingerprint) or _find_former(sources, identity, cache_dir)
    is_new = False
    if manifest is None:
        with lock_work(folder, f"preparing --corpus {spec!r}") as work:
            manifest = _find_prepared(folder, fingerprint)  # by the job that this one may have waited for
            if is_new := manifest is None:
                (work / MANIFEST).delete()
                with work.scratch() as scratch:
                    index = DocumentIndex(scratch, held_out_by, prepare.held_out_frac)
                    record = _build(sources, prepare, settings, work, fingerprint, index)
                sources.require_unchanged()  # else what was made of it goes: it may be put back as it was
                record |= {
                    "format": FORMAT_VERSION,
                    "fingerprint": fingerprint,
                    "seq_length": seq_length,
                    "tokenizer_fingerprint": identity["tokenizer"],
                    "settings": {**identity["prepare"], "held_out_by": held_out_by},
                    "corpus": spec,
                    "pairs": pairs,
                    "cls_id": settings.cls_id,
                    "sep_id": settings.sep_id,
                }
                for name in work.list_names():
                    if name.startswith("."):  # of a task that was killed
                        (work / name).delete()
                write_files(work, sources.record())
                write_manifest(work, record)
                manifest = read_manifest(folder)
    if not (manifest.folder / SOURCES).is_file():  # of 0.1.0
        with contextlib.suppress(AccessError):  # it is another user's
            write_files(manifest.folder, sources.record())
    if is_new:
        remember_shards(manifest)
        if split := describe_split(sources.files, prepare, held_out_by):
            print(split, file=sys.stderr)
    dropped = Dropped(Counter(manifest.dropped), manifest.dropped_places)
    dropped.tell(spec, manifest.num_documents, prepare, is_new=is_new)
    if manifest.unknown:
        require_known(spec, manifest.unknown, settings, prepare)
        warn_of_unknown(spec, manifest.unknown, settings, prepare)
    return manifest


def make_settings(
    tokenizer: PreTrainedTokenizerBase, prepare: PrepareConfig, seq_length: int, pairs: bool = False
) -> RowSettings:
    """Return what decides how text becomes rows."""
    return RowSettings(
        tokenizer.backend_tokenizer.to_str(),
        tokenizer.cls_token_id,
        tokenizer.sep_token_id,
        seq_length,
        prepare.cross_documents,
        prepare.chinese_words,
        pairs,
        prepare.packed,
        bool(prepare.pair),
        tokenizer.unk_token_id,
    )


def identify_corpus(
    sources: Sources, prepare: PrepareConfig, tokenizer: PreTrainedTokenizerBase, seq_length: int, pairs: bool
) -> dict[str, Any]:
    """Return everything that decides the rows of a prepared corpus; its hash is the corpus's fingerprint."""
    return {
        "format": FORMAT_VERSION,
        "content": sources.fingerprint,
        "prepare": identify_documents(prepare),
        "held_out_by": resolve_held_out_by(sources.files, prepare),
        "tokenizer": fingerprint_tokenizer(tokenizer),
        "seq_length": seq_length,
        "pairs": pairs,
    }


def _find_former(sources: Sources, identity: Mapping[str, Any], cache_dir: Place) -> Manifest | None:
    """Return the corpus that 0.1.0 prepared of the same text in a bucket; it stays that when the text is put anew.

    Once it was found by what that version knew of the text, a file beside it says which of today's names is its.
    """
    if sources.former_fingerprint == sources.fingerprint:
        return None
    name = cache_dir / f".former-{hash_values(identity)[:16]}.json"
    known = parse_json(name.read_bytes())["fingerprint"] if name.is_file() else ""
    fingerprint = known or hash_values({**identity, "content": sources.former_fingerprint})
    manifest = _find_prepared(cache_dir / fingerprint[:16], fingerprint)
    if manifest is not None and not known:
        write_json(name, {"fingerprint": fingerprint})
    return manifest


def _find_prepared(folder: Place, fingerprint: str) -> Manifest | None:
    """Return a prepared corpus whose files are all as they were written; None where there is none, or a damaged one."""
    try:
        if not (folder / MANIFEST).is_file():
            return None
    except AccessError:
        return read_manifest(folder)  # which says what to do
    except OSError:  # there can be no such folder: making it tells why
        return None
    try:
        manifest = read_manifest(folder)
        fault = find_shard_fault(manifest)
        if not fault and manifest.fingerprint != fingerprint:
            fault = f"{folder / MANIFEST} is that of another corpus"
        read_hashes(folder)
    except CorpusError as error:
        fault = str(error).split(";")[0]
    if not fault:
        return manifest
    print(f"{fault}; the corpus is prepared anew, as far as it is not whole", file=sys.stderr, flush=True)
    return None


def _build(
    sources: Sources,
    prepare: PrepareConfig,
    settings: RowSettings,
    folder: Place,
    fingerprint: str,
    index: DocumentIndex,
) -> dict[str, Any]:
    """Run both passes; return the manifest's record of what was found."""
    read = Records(folder / "parts" / "hashes", fingerprint)
    files, lost, han_frac = _hash_pass(sources, prepare, read, index)
    index.choose(files)
    counts = [sum(number for _, number in task) for task in files]
    num_dropped, *num_of_splits = index.count()
    num_documents = sum(num_of_splits)
    dropped = lost.counts
    dropped["duplicate"] = num_dropped
    lost.require_text(sources.spec, num_documents, prepare)
    tell_groups(lost.values, sources.spec, prepare)
    reasons = ", ".join(f"{number} {reason}" for reason, number in dropped.items() if number)
    if not num_documents:
        raise CorpusError(f"--corpus {sources.spec!r} has no usable document (dropped: {reasons or 'nothing read'}).")
    require_divided(sources.spec, index, prepare)
    if prepare.grouped_by:
        _tell_held_out_groups(index, prepare)
    index.write_hashes(folder)
    is_chinese = prepare.chinese_words and han_frac >= CHINESE_FRAC
    if is_chinese:
        load_jieba()  # a missing package is reported before the work, not within it
    settings = replace(settings, chinese_words=is_chinese)
    ends = np.cumsum(counts)
    written: dict[str, list[dict[str, Any]]] = {name: [] for name in _PARTS}
    num_used: Counter[Split] = Counter()
    write = functools.partial(_write_task, prepare, settings, folder)
    made = f"{fingerprint} with tokens"  # which 0.1.0 did not count: what it left half made is made again
    kept = Records(folder / "parts" / "rows", made, functools.partial(_find_part_fault, folder))

    token_counts, tokens = np.zeros(0, dtype=np.int64), TokenCounts()

    def find_plan(number: int) -> bytes:
        return index.uses[ends[number] - counts[number] : ends[number]].tobytes()

    for result in run_read_tasks(write, sources, "tokenising", kept, find_plan):
        for name, records in written.items():
            records += result[name]
        token_counts = _add_counts(token_counts, np.frombuffer(result["token_counts"], dtype=np.int64))
        tokens.merge(result["tokens"])
        for split in SPLITS:
            num_used[split] += result["counts"][split].get("used", 0)
            for reason in (NO_NEXT_SENTENCE, NO_OTHER_TEXT, NO_TOKEN):
                dropped[reason] += result["counts"][split].get(reason, 0)
    require_known(sources.spec, tokens.pack(), settings, prepare)
    read.place.delete()
    if settings.pairs:
        _require_partners(sources, prepare, num_used)
    num_documents -= dropped[NO_NEXT_SENTENCE] + dropped[NO_OTHER_TEXT] + dropped[NO_TOKEN]
    _require_both_splits(sources.spec, num_documents, [bool(written[split]) for split in SPLITS])
    with new_file(folder / TOKEN_COUNTS, is_flushed=False) as temporary:
        np.save(temporary, token_counts)
    return {
        **written,
        "token_counts_sha256": hash_file((folder / TOKEN_COUNTS).local()),
        "num_documents": num_documents,
        "dropped": {name: n for name, n in dropped.items() if n},
        "dropped_places": lost.places,
        "han_frac": han_frac,
        "chinese_words": is_chinese,
        "unknown": tokens.pack(),
    }


def require_divided(spec: str, index: DocumentIndex, prepare: PrepareConfig) -> None:
    """Refuse a text of which all documents train, or none."""
    _, *num_of_splits = index.count()
    if prepare.grouped_by and sum(num_of_splits) and not all(num_of_splits):
        raise CorpusError(
            f"--corpus {spec!r} has rows of {sum(index.count_groups())} different {prepare.grouped_by!r}, and the rows "
            "of each are used for training or for evaluation, never for both, so one of the two has none; give rows of "
            "more, or another --prepare.group_field or --prepare.held_out_frac."
        )
    _require_both_splits(spec, sum(num_of_splits), num_of_splits)


def _tell_held_out_groups(index: DocumentIndex, prepare: PrepareConfig) -> None:
    train, held_out = index.count_groups()
    more = f" (none falls into the share {prepare.held_out_frac:g} of --prepare.held_out_frac)"
    print(
        f"held out: all rows of {held_out:,} of {train + held_out:,} different {prepare.grouped_by!r}, each chosen by "
        f"a hash of it alone{more if index.share > prepare.held_out_frac else ''}",
        file=sys.stderr,
    )


def _require_both_splits(spec: str, num_documents: int, has_any: Sequence[float]) -> None:
    for split, is_there in zip(("training", "held-out"), has_any, strict=True):
        if not is_there:
            raise CorpusError(
                f"--corpus {spec!r} has {num_documents} usable document{'s' * (num_documents != 1)}, so the {split} "
                "split is empty; give more text, a finer --prepare.document, or another --prepare.held_out_frac."
            )


def _require_partners(sources: Sources, prepare: PrepareConfig, num_used: Counter[Split]) -> None:
    for split in SPLITS:
        if num_used[split] < 2:
            raise CorpusError(
                f"--corpus {sources.spec!r} has {num_used[split]} documents of two or more sentences in the "
                f"{'training' if split == 'train' else 'held-out'} split, and next-sentence prediction needs two or "
                f"more; set --prepare.document blank_line or file (it is {prepare.document}), or give more text."
            )


def _hash_pass(
    sources: Sources, prepare: PrepareConfig, kept: Records, index: DocumentIndex
) -> tuple[list[list[tuple[str, int]]], Dropped, float]:
    """Fill the index; return numbers of documents by task and file, what was dropped, and the share of Han."""
    files, dropped, num_chars, num_han = [], Dropped(), 0, 0
    results = run_read_tasks(functools.partial(_hash_task, prepare), sources, "reading", kept)
    for task, result in zip(sources.tasks, results, strict=True):
        index.add(result["hashes"], result["groups"])
        files.append([(file.path, number) for file, number in zip(task.files, result["counts"], strict=True)])
        dropped.merge(result["dropped"])
        num_chars, num_han = num_chars + result["num_chars"], num_han + result["num_han"]
    return files, dropped, num_han / max(num_chars, 1)


def _hash_task(prepare: PrepareConfig, number: int, task: ReadTask, plan: bytes) -> dict[str, Any]:
    dropped = Dropped(watched=() if prepare.group_field else PEOPLE)
    hashes, groups = bytearray(), bytearray()
    counts = []
    num_chars = num_han = 0
    for file in task.files:
        before = len(hashes)
        for document, group in read_grouped(replace(task, files=(file,)), prepare, dropped):
            hashes += hash_document(document)
            groups += group
            num_chars, num_han = num_chars + len(document), num_han + count_han(document)
        counts.append((len(hashes) - before) // HASH_BYTES)
    return {
        "hashes": bytes(hashes),
        "groups": bytes(groups),
        "counts": counts,
        "dropped": vars(dropped),
        "num_chars": num_chars,
        "num_han": num_han,
    }


def hash_document(document: str) -> bytes:
    """Return the hash by which documents are told apart, which `read_hashes` returns, too."""
    return hashlib.blake2b(document.encode(), digest_size=16).digest()[:HASH_BYTES]


def _find_part_fault(folder: Place, result: dict[str, Any]) -> str:
    """Say what is wrong with the files that a task wrote; empty: nothing."""
    faults = (find_file_fault(folder / file["path"], file["sha256"]) for name in _PARTS for file in result[name])
    return next(filter(None, faults), "")


def _write_task(
    prepare: PrepareConfig, settings: RowSettings, folder: Place, number: int, task: ReadTask, plan: bytes
) -> dict[str, Any]:
    """Write the files of one task; a split without a row of this task gets no shard."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # Ray runs one such task a core
    held_out: list[str] = []
    counts: dict[Split, Counter[str]] = {split: Counter() for split in SPLITS}
    tokens, result = TokenCounts(), dict[str, Any](counts=counts)
    sources: tuple[tuple[Split, Iterable[str]], ...] = (
        ("train", _divide(task, prepare, plan, held_out)),
        ("held_out", held_out),
    )
    for i, (split, documents) in enumerate(sources):
        path = folder / f"{split}-{number:06d}.arrow"
        rows = choose_rows(documents, settings, (number, i), counts[split], tokens)
        record, token_counts = _write_shard(path, *rows)
        result[split] = [asdict(record)] if record else []
        if split == "train":
            result["token_counts"] = token_counts.tobytes()
    text = _write_texts(folder / f"text-{number:06d}.jsonl", held_out)
    result["texts"] = [asdict(text)] if text else []
    return {**result, "tokens": tokens.pack()}


def _divide(task: ReadTask, prepare: PrepareConfig, plan: bytes, held_out: list[str]) -> Iterator[str]:
    """Yield the documents for training; append those held out."""
    num_read = 0
    for document in read_documents(task, prepare, Dropped()):
        use = plan[num_read] if num_read < len(plan) else 0
        num_read += 1
        if use == 1:
            yield document
        elif use == 2:
            held_out.append(document)
    if num_read != len(plan):
        raise CorpusError(f"{task.files[0].path} changed while it was read; start again when nothing writes to it.")


def _write_texts(path: Place, documents: Sequence[str]) -> FileRecord | None:
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
    with new_file(path, is_flushed=False) as temporary:
        temporary.touch(mode=0o600)
        temporary.write_bytes(b"".join(lines))
        return FileRecord(path.name, hash_file(temporary), len(lines))


def _to_line(document: str) -> bytes:
    return json.dumps({"text": document}, ensure_ascii=False).encode() + b"\n"


def _write_shard(
    path: Place, rows: Iterator[tuple[Any, ...]], schema: pa.Schema
) -> tuple[FileRecord | None, np.ndarray]:
    """Write rows whose first column is their tokens; count these by id, too."""
    num_rows, token_counts = 0, np.zeros(0, dtype=np.int64)
    with new_file(path, is_flushed=False) as temporary:
        with pa.OSFile(str(temporary), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
            while pending := list(itertools.islice(rows, ROWS_PER_BATCH)):
                writer.write_batch(_to_batch(pending, schema))
                num_rows += len(pending)
                token_counts = _add_counts(token_counts, np.bincount(np.concatenate([row[0] for row in pending])))
        if not num_rows:
            temporary.unlink()
            return None, token_counts
        return FileRecord(path.name, hash_file(temporary), num_rows, int(token_counts.sum())), token_counts


def _add_counts(counts: np.ndarray, more: np.ndarray) -> np.ndarray:
    """Add counts by id, of which one may know higher ids than the other."""
    size = max(len(counts), len(more))
    return np.pad(counts, (0, size - len(counts))) + np.pad(more, (0, size - len(more)))


def _to_batch(rows: list[tuple[Any, ...]], schema: pa.Schema) -> pa.RecordBatch:
    offsets = pa.array(np.cumsum([0, *(len(row[0]) for row in rows)]).astype(np.int32))
    columns = []
    for column, values in zip(schema, zip(*rows, strict=True), strict=True):
        if pa.types.is_list(column.type):
            columns.append(pa.ListArray.from_arrays(offsets, pa.array(np.concatenate(values))))
        else:
            columns.append(pa.array(values, type=column.type))
    return pa.RecordBatch.from_arrays(columns, schema=schema)
