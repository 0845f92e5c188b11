"""Training jobs and parts of them against the usual way: `finetune`, `parity`, `overhead`, `read`, `e2e`."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import psutil
import pyarrow as pa
import torch
import torch.nn.functional as F
from benchmarks.output import Record, report, show, show_ratio, show_spread
from benchmarks.rivals import time_trainer
from benchmarks.timing import Clock, Seconds, Watch, compare, configure_process, strip_allocator, take_turns
from datasets import Dataset, load_from_disk
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForTokenClassification,
    DataCollatorForLanguageModeling,
    DataCollatorForTokenClassification,
)

from domext_ray.config import presets
from domext_ray.config.finetune import FinetuneConfig
from domext_ray.config.method import MethodConfig
from domext_ray.config.options.build import read_flags, to_dict
from domext_ray.config.pretrain import EngineConfig, ObjectiveConfig, PretrainConfig, RunConfig, SettledConfig
from domext_ray.errors import ConfigError, RunError
from domext_ray.families.registry import FAMILIES
from domext_ray.families.rows import Row
from domext_ray.families.sets import load_labelled
from domext_ray.families.task import ONLY_STAGE, Task, TaskOptions
from domext_ray.files import ASSETS, read_json
from domext_ray.finetuning.training import Fitted, Point, collate_passes, fit_task, plan_epoch, prepare_task
from domext_ray.intervals import over_seeds, subtract
from domext_ray.model.base import load_base
from domext_ray.model.build import prepare_for_device, store_base
from domext_ray.model.layouts import find_layout
from domext_ray.model.spec import ModelSpec
from domext_ray.models.source import open_model
from domext_ray.models.start import StartModel, build_task_model
from domext_ray.runs.events import Event, EventReader
from domext_ray.runs.run_directory import read_config, read_identity, resolve_schedule
from domext_ray.runtime.device import TRAINING, configure_kernels
from domext_ray.runtime.machine import count_cpus
from domext_ray.storage import Place, hash_values, write_json
from domext_ray.text.corpus.batching import Masker
from domext_ray.text.corpus.manifest import FileRecord, Manifest, read_manifest
from domext_ray.text.corpus.overlap import read_hashes
from domext_ray.text.corpus.sampler import Part, Sampler
from domext_ray.text.corpus.shards import hash_document
from domext_ray.text.corpus.stream import BatchReader, stream_batches
from domext_ray.text.data.documents import read_documents
from domext_ray.text.data.dropped import Dropped
from domext_ray.text.data.names import SHIPPED_BASE
from domext_ray.text.data.sources import resolve_sources
from domext_ray.text.vocabulary.tokenizer import load_tokenizer
from domext_ray.training.metrics import find_last_step, read_metrics
from domext_ray.training.objective import LOSS, to_batch
from domext_ray.training.optimizer import compute_learning_rate
from domext_ray.training.phases import make_sampler, resolve_max_steps
from domext_ray.training.step import move_batch

OURS, RIVAL = "domext_ray", "Trainer"
JOB = Path(__file__).parents[1] / "pretrain_af.py"
CPU = torch.device("cpu")


# --- finetune and parity: the same model, rows and precision; padding and order are each side's own way ---

FULL = MethodConfig(name="full", trains="all", heads=0, ffn_units=0)
UNTIMED_STEPS = 4


def run_finetune(options: argparse.Namespace) -> None:
    """Fine-tune in turn with Trainer, with its default sampler and with its sampler by length; print and write.

    The rival is a plain BertForTokenClassification with DataCollatorForTokenClassification; both give a batch one loss.
    """
    configure_process(options)
    device, size = torch.device(options.device), options.batch_size
    config, start, task = _read_entities(options, TaskOptions())
    found = task.encode(task.data.train, is_training=True)
    rows = [found[i % len(found)] for i in range(size * (options.steps + UNTIMED_STEPS))]
    plain, seeds = _describe_rows(rows), itertools.count()
    collator = DataCollatorForTokenClassification(start.tokenizer)
    _check_losses(start, task, task.collate(rows[:size]), collator(plain[:size]), device)

    def train() -> Seconds:
        seed = next(seeds)
        epoch = plan_epoch(len(rows), size, seed, 0)
        point = Point(lr=5e-5, batch_size=size, epochs=1.0, seed=seed)
        trainer = prepare_task(start, task, replace(config, seed=seed), point, device, len(epoch)).trainer
        assert trainer is not None
        clock = Clock(device)
        for step, places in enumerate(epoch):
            if step == UNTIMED_STEPS:
                clock.restart()
            batches = collate_passes(task, [rows[i] for i in places], device)
            trainer.train_step(batches, {LOSS: sum(batch.num_targets for batch in batches)}, step)
        return clock.read(len(epoch) - UNTIMED_STEPS)

    def let_train(sampler: str) -> Seconds:
        given = {"per_device_train_batch_size": size, "warmup_steps": 0.1, "weight_decay": 0.01, "seed": next(seeds)}
        given |= {"train_sampling_strategy": sampler, "bf16": options.precision == "bf16"}
        return time_trainer(_make_rival(start, task, 0.1), plain, collator, UNTIMED_STEPS, device, **given)

    sides: dict[str, Callable[[], Seconds]] = {OURS: train}
    sides |= {f"Trainer, {name}": lambda name=name: let_train(name) for name in ("random", "group_by_length")}  # type: ignore[misc]
    with Watch() as watch:
        turns = take_turns(sides, options.repeats)
    results = {name: [turn.wall for turn in seconds] for name, seconds in turns.items()}
    ratios = {name: compare(seconds, results[OURS]) for name, seconds in results.items() if name != OURS}
    table = [
        {
            "": f"{name}, {options.task}, {options.precision}",
            "s per step": show_spread(seconds),
            "rows/s": show(size / statistics.median(seconds)),
            "of ours": show_ratio(ratios[name]) if name in ratios else "",
        }
        for name, seconds in results.items()
    ]
    figures = {"ratios": ratios, "tokens_per_row": sum(row.length for row in rows) / len(rows)}
    case = {name: getattr(options, name) for name in ("task", "model", "precision", "batch_size", "steps")}
    record = Record("finetune", case, table, "seconds per step", results, figures, watch.others_frac)
    report(options, [record], device)


def run_parity(options: argparse.Namespace) -> None:
    """Train to the end here and in Trainer, with its default sampler, and compare F1 on test; print and write."""
    configure_process(options)
    device, size, epochs = torch.device(options.device), options.batch_size, options.epochs
    config, start, task = _read_entities(options, TaskOptions(max_length=options.max_length, stride=16))
    config = replace(config, grid=replace(config.grid, score_every_epoch=False))
    plain = _describe_rows(task.encode(task.data.train, is_training=True))
    collator, test = DataCollatorForTokenClassification(start.tokenizer), task.data.test
    given = {"per_device_train_batch_size": size, "num_train_epochs": epochs, "learning_rate": options.lr}
    given |= {"warmup_steps": 0.1, "weight_decay": 0.01, "bf16": options.precision == "bf16"}

    def train(seed: int) -> Fitted:
        return fit_task(start, task, config, Point(options.lr, size, epochs, seed), device, lambda _: None)

    def let_train(seed: int) -> Fitted:
        torch.manual_seed(seed)
        rival = _make_rival(start, task, 0.1, seed)
        time_trainer(rival, plain, collator, 0, device, seed=seed, **given)
        model = build_task_model(start, task, FULL, dropout=0.0, seed=seed)
        missing, unexpected = model.load_state_dict(rival.state_dict(), strict=False)
        assert not unexpected and all(".pooler." in name for name in missing), (missing, unexpected)
        return Fitted.place(task, model, device, bf16=config.engine.uses_bf16)

    results: dict[str, list[float]] = {OURS: [], RIVAL: []}
    for seed in range(options.seeds):
        for name, side in ((OURS, train), (RIVAL, let_train)):
            results[name].append(task.score(test, side(seed).predict(test)).get(task.metric))
            print(f"seed {seed}, {name}: {task.metric} {results[name][-1]:.4f}", flush=True)
    difference = subtract(*(over_seeds(results[name]).estimate() for name in (OURS, RIVAL)))
    apart = f"{difference.value:+.4f}" + (
        f" [{difference.low:+.4f}, {difference.high:+.4f}]" if options.seeds > 1 else ""
    )
    table = [
        {
            "": f"{name}, {options.task}",
            "F1": f"{statistics.mean(scores):.4f}",
            "seeds": " ".join(f"{one:.4f}" for one in scores),
            "minus Trainer's": apart if name == OURS else "",
        }
        for name, scores in results.items()
    ]
    case = {name: getattr(options, name) for name in ("task", "model", "precision", "batch_size", "seeds")}
    figures = {"difference": difference.value, "interval": difference.interval}
    report(options, [Record("parity", case, table, task.metric, results, figures)], device)


def _read_entities(options: argparse.Namespace, limits: TaskOptions) -> tuple[FinetuneConfig, StartModel, Task]:
    """Return how ours trains, what both start from, and a task of words."""
    engine = EngineConfig(precision=options.precision)
    config = FinetuneConfig(task=options.task, data=options.data, model=options.model, method=FULL, engine=engine)
    data, start = load_labelled(config), open_model(options.model).load()
    if data.family != "ner":
        raise ConfigError(f"--task {options.task!r} is of the family {data.family}; this benchmark takes ner.")
    if start.config.has_extension or not find_layout(start.config).has_plain_heads:
        raise ConfigError(f"--model {options.model!r} is no plain BERT; the rival is, so give a base.")
    return config, start, FAMILIES[data.family](data, start.tokenizer, limits).stages[ONLY_STAGE]


def _describe_rows(rows: Sequence[Row]) -> list[dict[str, Any]]:
    return [{"input_ids": row.input_ids.tolist(), "labels": row.targets["labels"].tolist()} for row in rows]


def _check_losses(start: StartModel, task: Task, batch: Any, tensors: Any, device: torch.device) -> None:
    model = build_task_model(start, task, FULL, dropout=0.0, seed=0).to(device).eval()
    rival, given = _make_rival(start, task, 0.0).to(device).eval(), move_batch(batch, device)
    with torch.no_grad():
        loss = task.compute_loss_sum(model(**given.inputs), given.targets).item() / batch.num_targets
        difference = abs(loss - rival(**tensors.to(device)).loss.item())
    assert difference < 1e-4, f"the losses of one batch differ by {difference}"


def _make_rival(start: StartModel, task: Task, dropout: float, seed: int = 0) -> nn.Module:
    """Transformers' own model with the weights of ours."""
    model = build_task_model(start, task, FULL, dropout=dropout, seed=seed)
    config = cast(BertConfig, find_layout(model.config).restore(model.config, "ForMaskedLM"))
    config.num_labels = len(task.head_labels)
    rival = BertForTokenClassification(config)
    rival.load_state_dict({name: tensor for name, tensor in model.state_dict().items() if "bert.pooler." not in name})
    return rival


# --- overhead: a job (Ray Train, Ray Data, DeepSpeed) and a bare loop over its batches, some steps of each in turn ---

OVERHEAD_TOLERANCE = 0.02  # bf16 losses over tens of steps


def run_overhead(options: argparse.Namespace) -> None:
    """Time both, compare losses, print and write; the job is paused while the loop runs.

    A shared machine is a fifth faster in one minute than in the next: only neighbours in time may be compared.
    """
    if options.base_layers < 0:
        raise ConfigError(f"--base_layers is {options.base_layers}; it must be 0 (the job's own base) or more.")
    if not 1 <= options.window <= options.steps // 2:
        raise ConfigError(f"--window is {options.window}; it must be from 1 to half of --steps ({options.steps}).")
    folder = Path(tempfile.mkdtemp(prefix="domext-benchmark-"))
    cache, run_dir = options.cache_dir or str(folder / "corpora"), folder / "run"
    windows = [slice(first, first + options.window) for first in range(0, options.steps, options.window)]
    watch = Watch()
    job, loop, bare = _start_job(run_dir, cache, options), run_bare_loop(run_dir, cache, options), list[Any]()
    try:
        for window in windows:
            _wait_for_step(job, run_dir / "metrics.jsonl", min(window.stop, options.steps))
            if window == windows[1]:  # once the first steps are over
                watch.__enter__()
            with _paused(job):
                bare += itertools.islice(loop, options.window)
        watch.__exit__()
        job.wait()
        records = [step for step in read_metrics(Place(run_dir / "metrics.jsonl")) if "train/mlm_loss" in step]
    finally:
        if job.poll() is None:
            job.terminate()
            job.wait()
        shutil.rmtree(folder, ignore_errors=True)
    worst = max(abs(step["train/mlm_loss"] - loss) for step, (_, loss) in zip(records, bare, strict=True))
    assert worst < OVERHEAD_TOLERANCE, f"the job's losses differ from the bare loop's by {worst}"
    # The first steps warm up; a median leaves out the step of the job that a pause interrupts.
    results = {
        "job": [statistics.median(step["time/step_seconds"] for step in records[window]) for window in windows[1:]],
        "bare loop": [statistics.median(seconds for seconds, _ in bare[window]) for window in windows[1:]],
    }
    waited = sum(step["data/wait_seconds"] for step in records) / sum(step["time/step_seconds"] for step in records)
    figures = {**compare(results["job"], results["bare loop"]), "waiting": waited, "largest_loss_difference": worst}
    base = [f"base of {options.base_layers} layers"] if options.base_layers else []
    case = {"job": " ".join([*base, *options.job_options]) or "its defaults", "steps": options.steps}
    case |= {"loop": "worker"} if options.as_worker else {}
    row = {
        "job": f"`{case['job']}`" if case["job"].startswith("-") else case["job"],
        "job, s per step": show_spread(results["job"]),
        "the loop computes": "as a worker" if options.as_worker else "as torch comes",
        "bare loop, s per step": show_spread(results["bare loop"]),
        "ratio": f"{figures['ratio']:.3f}",
        "waits for rows": f"{waited:.2%}",
    }
    record = Record("overhead", case, [row], "seconds per step", results, figures, watch.others_frac)
    report(options, [record], CPU)


def _start_job(run_dir: Path, cache: str, options: argparse.Namespace) -> psutil.Popen:
    """Start jobs/pretrain_af.py for some steps; the preset reads one text."""
    steps = str(options.steps)
    command = [sys.executable, str(JOB), "--preset", "af", "--run.dir", str(run_dir.parent), "--run.name", run_dir.name]
    command += ["--train.max_steps", steps, "--train.evaluate_every", steps, "--train.save_every", steps]
    command += ["--train.eval_rows", "32", "--optim.decay_steps", "1000", "--prepare.cache_dir", cache]
    if options.base_layers:  # random weights of BERT-base's width, with the vocabulary of the base that ships
        base = run_dir.with_name("base")
        shutil.copytree(ASSETS / SHIPPED_BASE, base, ignore=shutil.ignore_patterns("model.safetensors", "README.md"))
        torch.manual_seed(0)
        shape = BertConfig(vocab_size=len(load_tokenizer(base)), num_hidden_layers=options.base_layers)
        BertForMaskedLM(shape).save_pretrained(base)
        command += ["--base", str(base)]
    return psutil.Popen([*command, *options.job_options], env=strip_allocator())


def _wait_for_step(job: psutil.Popen, metrics: Path, step: int) -> None:
    """Wait until a job has trained a step; one that ended before is a `RunError`."""
    has_ended = False
    while not metrics.exists() or find_last_step(Place(metrics)) < step:
        if has_ended:
            raise RunError(
                f"the job ended before step {step:,}, with exit code {job.returncode}; what it said stands above."
            )
        has_ended = job.poll() is not None  # it may have trained the step since
        time.sleep(0.05)


@contextlib.contextmanager
def _paused(job: psutil.Popen) -> Iterator[None]:
    """Pause a job with all that Ray has started for it, so that it takes no time of what runs meanwhile."""
    stopped = dict[int, psutil.Process]()

    def find() -> list[psutil.Process]:
        found = [job, *job.children(recursive=True)] if job.poll() is None else []
        return [process for process in found if process.pid not in stopped]

    try:
        while found := find():
            stopped |= {process.pid: process for process in found}
            for process in found:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.suspend()
        yield
    finally:
        for process in stopped.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()


def run_bare_loop(run_dir: Path, cache: str, options: argparse.Namespace) -> Iterator[tuple[float, float]]:
    """Train the run's model on the run's batches without Ray or DeepSpeed; yield seconds and loss of each step."""
    place = Place(run_dir)
    config = read_config(place, SettledConfig)
    if options.as_worker:
        configure_kernels(TRAINING, uses_fp32=not config.engine.uses_bf16)
    identity = read_identity(place, {"corpus_fingerprint": str})
    assert identity is not None, "a run that was trained"
    manifest = read_manifest(Place(cache) / identity["corpus_fingerprint"][:16])
    masker = Masker(load_tokenizer(run_dir / "tokenizer"), config.objective, config.seed)
    corpora, sampler, num_rows = (
        (manifest.shards("train"),),
        make_sampler(config, [manifest]),
        config.train.global_batch_size,
    )
    reader = BatchReader(corpora, sampler, (masker,), (), slice(0, num_rows), num_rows)
    model = ModelSpec.of(config, load_base(config.base)).with_tokenizer(run_dir / "tokenizer").build().train()
    if config.engine.has_narrow_base:
        store_base(model, torch.bfloat16)
    prepare_for_device(model, CPU, bf16=config.engine.uses_bf16)
    params, optim = [param for param in model.parameters() if param.requires_grad], config.optim
    groups = [
        {"params": [param for param in params if param.ndim >= 2], "weight_decay": optim.weight_decay},
        {"params": [param for param in params if param.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(optim.beta1, optim.beta2), eps=optim.eps, fused=True)
    for step in range(options.steps):
        started = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = compute_learning_rate(step, optim, optim.warmup_steps)
        (([arrays], _),) = reader(np.array([step]))
        batch = to_batch(arrays)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=config.engine.uses_bf16):
            logits = model(
                batch.input_ids, attention_mask=batch.attention_mask, masked_positions=batch.masked_positions
            ).logits
        losses = F.cross_entropy(logits.float(), batch.labels, reduction="none")
        loss = (losses * batch.weights).sum() / batch.num_masked
        loss.backward()
        nn.utils.clip_grad_norm_(params, optim.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        value = loss.item()
        yield time.perf_counter() - started, value


# --- read: masked, padded rows per second and core of the tasks that read for training ---

ROWS, BATCHES_PER_TASK = 32, 32
"""Rows of a batch, and batches of a task."""


def run_reading(options: argparse.Namespace) -> None:
    """Read in turn with `datasets` and transformers' collator, in one process; then stream through Ray Data.

    Both shuffle rows of random tokens of memory-mapped files; ours masks whole words, the collator tokens. Of streams,
    one consumer only counts, and one takes rows at the rate of a card: the share of its time that it waits, the cores
    that all processes together keep busy, and the most memory of them.
    """
    from domext_ray.runtime.ray_cluster import start_ray

    torch.set_num_threads(1)
    start_ray()
    records = []
    for length in options.lengths:
        folder = Path(tempfile.mkdtemp(prefix="domext-benchmark-"))
        try:
            reader, read_rival = _make_readers(folder, options.rows, length)
            sides = {"domext_ray": _rate(_read_task(reader)), "collator": _rate(read_rival)}
            with Watch() as watch:
                results = take_turns(sides, options.repeats, warmup=1)  # the first opens files
            streamed = _count_streamed(reader, options.rows)
            fed = _feed(reader, options.card_rows, options.card_seconds)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        figures = {**compare(results["domext_ray"], results["collator"]), "streamed_rows_per_second": streamed, **fed}
        row = {
            "tokens per row": f"{length:,}",
            "ours, rows per CPU second": show_spread(results["domext_ray"]),
            "collator, rows per CPU second": show_spread(results["collator"]),
            "ratio": show_ratio(figures),
            "streamed, rows/s": show(streamed),
            "at rows/s": show(fed["rows_per_second"]),
            "waits": f"{fed['wait_share']:.1%}",
            "cores": show(fed["cores"]),
            "MB": show(fed["memory_mb"]),
        }
        case: dict[str, str | int] = {"length": length, "rows": options.rows}
        records.append(Record("read", case, [row], "rows per CPU second", results, figures, watch.others_frac))
    report(options, records, CPU)


def _read_task(reader: BatchReader) -> Callable[[int], Any]:
    return lambda task: reader(np.arange(task * BATCHES_PER_TASK, (task + 1) * BATCHES_PER_TASK))


def _rate(read: Callable[[int], Any]) -> Callable[[], float]:
    """What reads one task after the other, and returns its rows per CPU second."""
    tasks = itertools.count()

    def run() -> float:
        started = time.process_time()
        read(next(tasks))
        return ROWS * BATCHES_PER_TASK / (time.process_time() - started)

    return run


def _make_readers(folder: Path, num_rows: int, length: int) -> tuple[BatchReader, Callable[[int], Any]]:
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
    flat = {"input_ids": ids[is_shown], "word_starts": (draw.random((num_rows, length)) < 0.7)[is_shown]}
    table = pa.table({name: pa.ListArray.from_arrays(offsets, pa.array(values)) for name, values in flat.items()})
    with pa.OSFile(str(folder / "train.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=1024)
    sampler, masker = (
        Sampler((Part("--corpus", (num_rows,), seed=0),), ROWS),
        Masker(tokenizer, ObjectiveConfig(), seed=0),
    )
    shard = FileRecord(str(folder / "train.arrow"), "", num_rows)  # on a disk its hash is not asked for
    reader = BatchReader(((shard,),), sampler, (masker,), (), slice(0, ROWS), ROWS)
    Dataset.from_dict({"input_ids": table.column("input_ids").to_pylist()}).save_to_disk(str(folder / "rival"))
    rows: Any = load_from_disk(str(folder / "rival"))
    order, collator = draw.permutation(num_rows), DataCollatorForLanguageModeling(tokenizer, pad_to_multiple_of=8)

    def read_rival(task: int) -> list[Any]:
        firsts = range(task * BATCHES_PER_TASK * ROWS, (task + 1) * BATCHES_PER_TASK * ROWS, ROWS)
        places = [order[np.arange(first, first + ROWS) % num_rows].tolist() for first in firsts]
        return [collator(rows.__getitems__(own)) for own in places]  # as a DataLoader reads

    return reader, read_rival


def _count_streamed(reader: BatchReader, num_rows: int) -> float:
    """Rows per second that a consumer gets which does nothing, once the first ones are there."""
    batches = stream_batches(reader)
    next(batches)
    started = time.perf_counter()
    for _ in itertools.islice(batches, num_rows // ROWS):
        pass
    batches.close()  # type: ignore[attr-defined]
    return num_rows / (time.perf_counter() - started)


def _feed(reader: BatchReader, rate: float, seconds: float) -> dict[str, float]:
    """Take rows at a card's rate, as a step that computes on it does: this process sleeps meanwhile."""
    batches, waited, num_batches = stream_batches(reader), 0.0, 0
    next(batches)
    with Watch(every=1.0) as watch:
        started = time.perf_counter()
        while time.perf_counter() - started < seconds:
            asked = time.perf_counter()
            next(batches)
            waited += time.perf_counter() - asked
            num_batches += 1
            time.sleep(max(0.0, started + waited + num_batches * ROWS / rate - time.perf_counter()))
        took = time.perf_counter() - started
    batches.close()  # type: ignore[attr-defined]
    figures = {"rows_per_second": num_batches * ROWS / took, "wait_share": waited / took}
    return figures | {"cores": watch.cores, "memory_mb": max(watch.memory_mb)}


# --- e2e: minutes until held-out text costs a number of bits per character ---

RECIPE = ("--preset", "af_routed", "--train.evaluate_every", "50")
"""Options of our runs that those after -- change: extra heads, units and shifts of the base's words."""
BITS = "eval/domain_bits_per_character"
START_TOLERANCE = 1e-3  # bits per character of the base, as both sides see it
Run = dict[str, Any]
"""A run's `side`, `rate`, `start_seconds`, `tokens`, `epochs`, and as its `curve` of every evaluation `step`, `seconds`
since the process was started and `bits_per_character`."""


@dataclass(frozen=True)
class Comparison:
    """What the runs of both sides have in common."""

    config: SettledConfig  # our runs
    job_options: tuple[str, ...]  # of our runs' command lines
    held_out: Manifest  # the corpus whose held-out text is scored
    folder: Path  # where runs are made, with the documents that train, one per line, in train.txt
    dropout: float  # the rival's

    def describe(self) -> dict[str, Any]:
        """Return everything that a run's figures depend on, beside its rate and the machine."""
        options = to_dict(replace(self.config, run=RunConfig())) | {"base": None, "corpus": None}  # hashed below
        options["prepare"]["cache_dir"] = options["optim"]["lr"] = None
        return {
            "corpus": self.held_out.fingerprint,
            "base": load_base(self.config.base).sha256,
            "options": hash_values(options),
            "rival_dropout": self.dropout,
        }


def run_end_to_end(options: argparse.Namespace) -> None:
    """Make the runs that `--runs` lacks, print both sides and write them.

    Both train on the documents of the same text, in rows of as many tokens and steps of as many rows, from the same
    base, each as a process of its own. Ours is `jobs/pretrain_af.py`, whose options stand after `--`; the rival trains
    all weights (rival_worker.py). Each runs once per learning rate, and its best run counts. The clock begins with the
    process, so that it has imports and tokenisation; evaluations, on held-out text that is the same for both, are not
    on it, nor is what comes after the last step.
    """
    path, folder = Path(options.runs), Path(tempfile.mkdtemp(prefix="domext-benchmark-"))
    wanted = [*((RIVAL, rate) for rate in options.rival_rates), *((OURS, rate) for rate in options.rates)]
    try:
        comparison = _prepare(options, folder)
        settings = comparison.describe()
        runs = _read_runs(path, settings)
        done = {(run["side"], run["rate"]) for run in runs}
        for side, rate in dict.fromkeys(pair for pair in wanted if pair not in done):
            with Watch(every=2.0) as watch:
                made = (_run_ours if side == OURS else _run_rival)(comparison, rate)
            runs.append({"side": side, "rate": rate, **made, "others_frac": watch.others_frac})
            starts = [run["curve"][0]["bits_per_character"] for run in runs]
            is_same = max(starts) - min(starts) < START_TOLERANCE or comparison.config.vocab.extends_base
            assert is_same, f"the sides see another base: {starts} bits per character"  # new words make it another one
            write_json(Place(path), {"settings": settings, "runs": runs})
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    figures, config = summarize(runs, options.target), comparison.config
    case: dict[str, str | int] = {"base": Path(config.base).name, "method": config.method.name}
    case |= {"steps": config.train.max_steps}
    case |= {"rows": config.train.global_batch_size, "length": config.train.seq_length}
    case |= {"precision": config.engine.precision}
    results = {side: [seconds] for side, seconds in figures["seconds"].items() if seconds is not None}
    torch.set_num_threads(count_cpus())  # what the record says
    others = max((run.get("others_frac", 0.0) for run in runs), default=0.0)
    report(options, [Record("e2e", case, make_rows(figures), "s", results, figures, others)], CPU)
    if figures["ratio"] is not None:
        print(f"best of {RIVAL} / best of {OURS}: {figures['ratio']:.2f}")


def _prepare(options: argparse.Namespace, folder: Path) -> Comparison:
    """Read our options, prepare the text once for both sides' evaluations, and write what the rival reads."""
    import ray

    from domext_ray.pretraining.inputs import run_preparation
    from domext_ray.pretraining.plan import resolve_workers

    job_options = (*RECIPE, "--corpus", options.text, *options.job_options)
    asked = presets.configure(PretrainConfig, "af_words", read_flags(PretrainConfig, job_options))
    train = asked.train
    if asked.objective.kind != "masked" or train.long_seq_length or train.max_tokens or train.max_seconds:
        raise ConfigError("the options after -- must be of a run of masked words, with steps or epochs as its limit.")
    own = replace(asked, prepare=replace(asked.prepare, cache_dir=str(folder / "corpora")))
    manifest = run_preparation(replace(own, run=replace(asked.run, dir=str(folder / "prepared"))))
    ray.shutdown()
    assert manifest is not None, "this is no dry run"
    config = resolve_workers(SettledConfig.of(asked))
    config = resolve_schedule(resolve_max_steps(config, [manifest]), Place(folder))
    hashes = read_hashes(manifest.folder)
    assert hashes is not None, "the corpus was just prepared"
    chosen = {int(number) for number in hashes.train}
    with (folder / "train.txt").open("w", encoding="utf-8") as file:  # every document that trains, once
        for task in resolve_sources(config.corpus, config.prepare).tasks:
            for document in read_documents(task, config.prepare, Dropped()):
                key = int(np.frombuffer(hash_document(document), dtype=">u8")[0])
                if key in chosen:
                    chosen.remove(key)
                    file.write(document + "\n")
    assert not chosen, "the text changed while it was read"
    dropout = train.dropout if options.rival_dropout is None else options.rival_dropout
    return Comparison(config, job_options, manifest, folder, dropout)


def _read_runs(path: Path, settings: dict[str, Any]) -> list[Run]:
    """Return the runs that were made before; those of other settings are a `ConfigError`."""
    if not path.exists():
        return []
    found = read_json(Place(path), "remove it, or give another --runs", {"settings": dict, "runs": list})
    for name, value in settings.items():
        if found["settings"].get(name) != value:
            raise ConfigError(f"--runs {str(path)!r} has runs of another {name}; give another file.")
    return list(found["runs"])


def _run_ours(comparison: Comparison, rate: float) -> Run:
    """Make a run of ours, which prepares the text anew; return its curve and what it took."""
    root = Path(tempfile.mkdtemp(dir=comparison.folder))
    run_dir = root / "run"
    command = [sys.executable, str(JOB), *comparison.job_options, "--optim.lr", str(rate)]
    command += ["--run.dir", str(root), "--run.name", run_dir.name, "--prepare.cache_dir", str(root / "corpora")]
    events, started = EventReader(Place(run_dir)), time.time()
    subprocess.run(command, check=True)
    records = read_metrics(Place(run_dir / "metrics.jsonl"))
    seconds = time_evaluations(events.read(), started)
    bits = [(record["step"], record[BITS]) for record in records if BITS in record]
    curve = [
        {"step": step, "seconds": began, "bits_per_character": value}
        for (step, value), began in zip(bits, seconds, strict=True)
    ]
    last, rows = records[-1], records[-1]["step"] * comparison.config.train.global_batch_size
    epochs = last.get("train/domain_epochs", rows / comparison.held_out.num_rows("train"))
    return {"curve": curve, "start_seconds": seconds[0], "tokens": last["train/tokens"], "epochs": epochs}


def time_evaluations(events: Sequence[Event], started: float) -> list[float]:
    """Return when each evaluation began, in seconds since the start without the evaluations before it."""
    began: float | None = None
    paused, found = 0.0, []
    for event in events:
        if not event.is_phase:
            continue
        is_evaluation = event.text.startswith("evaluating")
        if is_evaluation and began is None:
            began = event.seconds
            found.append(began - started - paused)
        elif not is_evaluation and began is not None:
            paused, began = paused + event.seconds - began, None
    return found


def _run_rival(comparison: Comparison, rate: float) -> Run:
    """Make a run of the rival; return its curve and what it took."""
    config, root = comparison.config, Path(tempfile.mkdtemp(dir=comparison.folder))
    settings = {
        "base": str(load_base(config.base).folder),
        "text": str(comparison.folder / "train.txt"),
        "held_out": str(comparison.held_out.folder),
        "folder": str(root),
        "output": str(root / "run.json"),
        "rate": rate,
        "steps": config.train.max_steps,
        "warmup_steps": config.optim.warmup_steps,
        "weight_decay": config.optim.weight_decay,
        "evaluate_every": config.train.evaluate_every,
        "eval_rows": config.train.eval_rows,
        "rows": config.train.global_batch_size,
        "length": config.train.seq_length,
        "dropout": comparison.dropout,
        "bf16": config.engine.uses_bf16,
        "threads": count_cpus(),
        "use_cpu": not config.scale.uses_gpu,
    }
    search = {**os.environ, "PYTHONPATH": os.pathsep.join([str(JOB.parent), str(JOB.parents[1])])}
    command = [sys.executable, "-m", "benchmarks.rival_worker", "mlm", json.dumps({**settings, "started": time.time()})]
    subprocess.run(command, check=True, env=search)
    run = json.loads((root / "run.json").read_text(encoding="utf-8"))
    shutil.rmtree(root)
    return dict(run)


def find_seconds(curve: Sequence[dict[str, float]], target: float) -> float | None:
    """Return when a curve first reaches a target, between two evaluations along a line; None: never."""
    before = curve[0]
    if before["bits_per_character"] <= target:
        return before["seconds"]
    for after in curve[1:]:
        if after["bits_per_character"] <= target:
            fall = before["bits_per_character"] - after["bits_per_character"]
            share = (before["bits_per_character"] - target) / fall
            return before["seconds"] + share * (after["seconds"] - before["seconds"])
        before = after
    return None


def summarize(runs: Sequence[Run], target: float | None) -> dict[str, Any]:
    """Return the runs, of both sides or one, with what follows from their curves; None stands for what was not reached.

    The target is in bits per character; None: what the rival's best run has at its end.
    """
    ends = [run["curve"][-1]["bits_per_character"] for run in runs if run["side"] == RIVAL]
    aim = target if target is not None else min(ends, default=None)
    described, best = list[Run](), dict[str, float | None]({OURS: None, RIVAL: None})
    for run in sorted(runs, key=lambda each: (each["side"], each["rate"])):
        rate = run["tokens"] / (run["curve"][-1]["seconds"] - run["start_seconds"])
        seconds, side = None if aim is None else find_seconds(run["curve"], aim), run["side"]
        described.append({**run, "tokens_per_second": rate, "seconds_to_target": seconds})
        best[side] = min((one for one in (best[side], seconds) if one is not None), default=None)
    ours, rival = best[OURS], best[RIVAL]
    return {"target": aim, "ratio": rival / ours if ours and rival else None, "seconds": best, "runs": described}


def make_rows(figures: dict[str, Any]) -> list[dict[str, str]]:
    """Return a row of the table per run."""
    heading = "minutes to the target" if figures["target"] is None else f"minutes to {figures['target']:.3f}"
    return [
        {
            "": f"{run['side']}, rate {run['rate']:g}",
            "start, s": show(run["start_seconds"]),
            "tokens/s": show(run["tokens_per_second"]),
            "epochs": f"{run['epochs']:.2f}",
            "bits per character": f"{run['curve'][-1]['bits_per_character']:.3f}",
            heading: "–" if run["seconds_to_target"] is None else show(run["seconds_to_target"] / 60),
        }
        for run in figures["runs"]
    ]
