"""Masked, padded rows a second and core of the tasks that read for training, against transformers' usual collator.

Both sides read rows of random tokens from memory-mapped files, shuffled, and make batches of 32 rows in one process:
this library's reading tasks, which mask whole words, and `datasets` with `DataCollatorForLanguageModeling`, which masks
tokens. Beside it, through Ray Data: what a consumer that only counts gets, and one that takes rows at the rate of a
card: the share of its time that it waits, the cores that all processes together keep busy, and the most memory of them.
"""

from __future__ import annotations

import argparse
import itertools
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import torch
from benchmarks.output import Measured, Record, write_records
from datasets import Dataset, load_from_disk
from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerBase

from domext_ray.config.pretrain import ObjectiveConfig
from domext_ray.corpus.batching import Masker
from domext_ray.corpus.sampler import Part, Sampler
from domext_ray.corpus.stream import BatchReader, stream_batches
from domext_ray.model.base_folder import ASSETS, SHIPPED_BASE
from domext_ray.vocabulary.tokenizer import load_tokenizer

BATCH, BATCHES_PER_TASK = 32, 32
RATE = "rows per CPU second"


def run_reading(options: argparse.Namespace) -> None:
    """Time both sides in turn at every length; print and write medians and their ratio."""
    from domext_ray.runtime.ray_cluster import start_ray

    torch.set_num_threads(1)
    start_ray()
    records = []
    print(
        f"{'length':>6} {'ours rows/s':>12} {'rival rows/s':>13} {'ratio':>6} {'streamed rows/s':>16}"
        f" {'at rows/s':>10} {'waits':>6} {'cores':>6} {'MB':>6}"
    )
    for length in options.lengths:
        folder = Path(tempfile.mkdtemp(prefix="domext-benchmark-"))
        try:
            reader, read_rival = _make_sides(folder, options.rows, length)
            sides: dict[str, Callable[[int], Any]] = {"this library": _make_reading(reader), "collator": read_rival}
            rates: dict[str, list[float]] = {name: [] for name in sides}
            for repeat in range(options.repeats + 1):
                for name, read in sides.items():
                    started = time.process_time()
                    read(repeat)
                    rates[name].append(BATCH * BATCHES_PER_TASK / (time.process_time() - started))
            streamed = _count_streamed(reader, options.rows)
            fed = _feed(reader, options.card_rows, options.card_seconds)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        results = [Measured(name, RATE, each[1:]) for name, each in rates.items()]  # the first opens files
        ratio = statistics.median(a / b for a, b in zip(*(each.values for each in results), strict=True))
        medians = f"{results[0].median:>12,.0f} {results[1].median:>13,.0f} {ratio:>6.2f} {streamed:>16,.0f}"
        at_rate = "{rows_per_second:>10,.0f} {wait_share:>6.1%} {cores:>6.2f} {memory_mb:>6,.0f}".format(**fed)
        print(f"{length:>6} {medians} {at_rate}")
        case: dict[str, str | int] = {"length": length, "rows": options.rows}
        records.append(Record("read", case, results, {"ratio": ratio, "streamed_rows_per_second": streamed, **fed}))
    write_records(options, records, torch.device("cpu"))


def _make_sides(folder: Path, num_rows: int, length: int) -> tuple[BatchReader, Callable[[int], Any]]:
    """Write rows of random tokens in both forms; return what reads each."""
    tokenizer = load_tokenizer(ASSETS / SHIPPED_BASE)
    special = {*tokenizer.all_special_ids}
    ordinary = np.array([i for i in tokenizer.get_vocab().values() if i not in special])
    draw = np.random.default_rng(0)
    ids = draw.choice(ordinary, (num_rows, length)).astype(np.int32)
    ids[:, 0], ids[:, -1] = tokenizer.cls_token_id, tokenizer.sep_token_id
    lengths = draw.integers(length * 3 // 4, length + 1, num_rows)
    is_shown = np.arange(length) < lengths[:, None]
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
    starts = draw.random((num_rows, length)) < 0.7
    flat = {"input_ids": ids[is_shown], "word_starts": starts[is_shown]}
    table = pa.table({name: pa.ListArray.from_arrays(offsets, pa.array(each)) for name, each in flat.items()})
    with pa.OSFile(str(folder / "train.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=1024)
    sampler = Sampler((Part("--corpus", (num_rows,), seed=0),), BATCH)
    masker = Masker(tokenizer, ObjectiveConfig(), seed=0)
    reader = BatchReader(((str(folder / "train.arrow"),),), sampler, (masker,), (), slice(0, BATCH), BATCH)
    Dataset.from_dict({"input_ids": table.column("input_ids").to_pylist()}).save_to_disk(str(folder / "rival"))
    return reader, _make_rival(load_from_disk(str(folder / "rival")), tokenizer)


def _make_reading(reader: BatchReader) -> Callable[[int], Any]:
    return lambda task: reader(np.arange(task * BATCHES_PER_TASK, (task + 1) * BATCHES_PER_TASK))


def _make_rival(rows: Any, tokenizer: PreTrainedTokenizerBase) -> Callable[[int], Any]:
    order = np.random.default_rng(1).permutation(len(rows))
    collator = DataCollatorForLanguageModeling(tokenizer, pad_to_multiple_of=8)

    def read(task: int) -> list[Any]:
        firsts = range(task * BATCHES_PER_TASK * BATCH, (task + 1) * BATCHES_PER_TASK * BATCH, BATCH)
        places = [order[np.arange(first, first + BATCH) % len(rows)].tolist() for first in firsts]
        return [collator(rows.__getitems__(own)) for own in places]  # as a DataLoader reads

    return read


def _count_streamed(reader: BatchReader, num_rows: int) -> float:
    """Rows per second that a consumer gets which does nothing, once the first ones are there."""
    batches = stream_batches(reader)
    next(batches)
    started = time.perf_counter()
    for _ in itertools.islice(batches, num_rows // BATCH):
        pass
    batches.close()  # type: ignore[attr-defined]
    return num_rows / (time.perf_counter() - started)


def _feed(reader: BatchReader, rate: float, seconds: float) -> dict[str, float]:
    """Take rows at a card's rate, as a step that computes on it does: this process sleeps meanwhile."""
    batches = stream_batches(reader)
    next(batches)
    is_done, memory = threading.Event(), [0.0]

    def watch() -> None:
        while not is_done.wait(1.0):
            memory.append(sum(_ask(each, lambda one: one.memory_full_info().pss) for each in _list_processes()))

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    busy, started, waited, num_batches = _count_cpu_seconds(), time.perf_counter(), 0.0, 0
    while time.perf_counter() - started < seconds:
        asked = time.perf_counter()
        next(batches)
        waited += time.perf_counter() - asked
        num_batches += 1
        time.sleep(max(0.0, started + waited + num_batches * BATCH / rate - time.perf_counter()))
    took, busy = time.perf_counter() - started, _count_cpu_seconds() - busy
    is_done.set()
    watcher.join()
    batches.close()  # type: ignore[attr-defined]
    figures = {"rows_per_second": num_batches * BATCH / took, "wait_share": waited / took}
    return figures | {"cores": busy / took, "memory_mb": max(memory) / 2**20}


def _count_cpu_seconds() -> float:
    """Of this process and all that Ray started for it, which stay as long as it does."""
    return sum(_ask(each, lambda one: sum(one.cpu_times()[:2])) for each in _list_processes())


def _list_processes() -> list[psutil.Process]:
    own = psutil.Process()
    return [own, *own.children(recursive=True)]


def _ask(process: psutil.Process, question: Callable[[psutil.Process], float]) -> float:
    try:
        return question(process)
    except psutil.Error:  # it has ended
        return 0.0
