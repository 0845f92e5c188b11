"""A job (Ray Train, Ray Data, DeepSpeed) against a bare loop over the same batches, for `jobs/benchmark.py`."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import torch
import torch.nn.functional as F
from benchmarks.as_worker import strip_allocator
from benchmarks.output import Measured, Record, write_records
from benchmarks.steps import SECONDS
from torch import nn
from transformers import BertConfig, BertForMaskedLM

from domext_ray.corpus.batching import Masker
from domext_ray.corpus.manifest import read_manifest
from domext_ray.corpus.stream import BatchReader
from domext_ray.errors import ConfigError, RunError
from domext_ray.model.base import load_base
from domext_ray.model.base_folder import ASSETS, SHIPPED_BASE
from domext_ray.model.build import choose_attention, store_base
from domext_ray.runs.run_directory import read_identity
from domext_ray.runtime.cpu_kernels import TRAINING, configure_kernels
from domext_ray.training.metrics import find_last_step, read_metrics
from domext_ray.training.objective import to_batch
from domext_ray.training.optimizer import compute_learning_rate
from domext_ray.training.phases import make_sampler
from domext_ray.training.start import build_run_model, read_run_config
from domext_ray.vocabulary.tokenizer import load_tokenizer

OVERHEAD_TOLERANCE = 0.02  # bf16 losses over tens of steps


def start_job(run_dir: Path, options: argparse.Namespace) -> psutil.Popen:
    """Start jobs/pretrain_af.py for some steps; the preset reads one text."""
    command = [sys.executable, str(Path(__file__).parents[1] / "pretrain_af.py"), "--preset", "af"]
    command += ["--run.dir", str(run_dir.parent), "--run.name", run_dir.name, "--train.max_steps", str(options.steps)]
    command += ["--train.evaluate_every", str(options.steps), "--train.save_every", str(options.steps)]
    command += ["--train.eval_rows", "32", "--optim.decay_steps", "1000", "--prepare.cache_dir", options.cache_dir]
    if options.base_layers:
        command += ["--base", str(write_wide_base(run_dir.with_name("base"), options.base_layers))]
    return psutil.Popen([*command, *options.job_options], env=strip_allocator())


def write_wide_base(folder: Path, layers: int) -> Path:
    """Write random weights of BERT-base's width, with the vocabulary of the base that ships, into a new folder."""
    shutil.copytree(ASSETS / SHIPPED_BASE, folder, ignore=shutil.ignore_patterns("model.safetensors", "README.md"))
    torch.manual_seed(0)
    vocab_size = len(load_tokenizer(folder))
    BertForMaskedLM(BertConfig(vocab_size=vocab_size, num_hidden_layers=layers)).save_pretrained(folder)
    return folder


def wait_for_step(job: psutil.Popen, metrics: Path, step: int) -> None:
    """Wait until a job has trained a step.

    Raises:
        RunError: it has ended before.
    """
    has_ended = False
    while not metrics.exists() or find_last_step(metrics) < step:
        if has_ended:
            raise RunError(
                f"the job ended before step {step:,}, with exit code {job.returncode}; what it said stands above."
            )
        has_ended = job.poll() is not None  # it may have trained the step since
        time.sleep(0.05)


@contextlib.contextmanager
def paused(job: psutil.Popen) -> Iterator[None]:
    """Pause a job with all that Ray has started for it, so that it takes no time of what runs meanwhile."""
    stopped = dict[int, psutil.Process]()
    try:
        while found := [each for each in _list_processes(job) if each.pid not in stopped]:
            stopped |= {each.pid: each for each in found}
            for each in found:
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.suspend()
        yield
    finally:
        for each in stopped.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                each.resume()


def _list_processes(job: psutil.Popen) -> list[psutil.Process]:
    return [job, *job.children(recursive=True)] if job.poll() is None else []


def run_bare_loop(run_dir: Path, options: argparse.Namespace) -> Iterator[tuple[float, float]]:
    """Train the run's model on the run's batches without Ray or DeepSpeed; yield seconds and loss of each step."""
    config = read_run_config(run_dir)
    if options.as_worker:
        configure_kernels(TRAINING, uses_fp32=not config.engine.uses_bf16)
    identity = read_identity(run_dir, {"corpus_fingerprint": str})
    assert identity is not None, "a run that was trained"
    fingerprint = identity["corpus_fingerprint"]
    manifest = read_manifest(Path(options.cache_dir, fingerprint[:16]))
    tokenizer = load_tokenizer(run_dir / "tokenizer")
    masker, num_rows = Masker(tokenizer, config.objective, config.seed), config.train.global_batch_size
    corpora, sampler = (manifest.paths("train"),), make_sampler(config, [manifest])
    reader = BatchReader(corpora, sampler, (masker,), (), slice(0, num_rows), num_rows)
    model = build_run_model(config, load_base(config.base), run_dir / "tokenizer", config.train.dropout).train()
    if config.engine.has_narrow_base:
        store_base(model, torch.bfloat16)
    choose_attention(model, torch.device("cpu"), bf16=config.engine.uses_bf16)
    params = [each for each in model.parameters() if each.requires_grad]
    groups = [
        {"params": [each for each in params if each.ndim >= 2], "weight_decay": config.optim.weight_decay},
        {"params": [each for each in params if each.ndim < 2], "weight_decay": 0.0},
    ]
    betas = (config.optim.beta1, config.optim.beta2)
    optimizer = torch.optim.AdamW(groups, betas=betas, eps=config.optim.eps, fused=True)
    for step in range(options.steps):
        started = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = compute_learning_rate(step, config.optim, config.optim.warmup_steps)
        (([arrays], _),) = reader(np.array([step]))
        batch = to_batch(arrays)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=config.engine.uses_bf16):
            logits = model(
                batch.input_ids, attention_mask=batch.attention_mask, masked_positions=batch.masked_positions
            ).logits
        losses = F.cross_entropy(logits.float(), batch.labels, reduction="none")
        loss = (losses * batch.weights).sum() / batch.num_masked
        loss.backward()
        nn.utils.clip_grad_norm_(params, config.optim.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        value = loss.item()
        yield time.perf_counter() - started, value


def run_overhead(options: argparse.Namespace) -> None:
    """Time a job and the bare loop in turn, some steps of each, compare losses, print and write.

    A shared machine is a fifth faster in one minute than in the next: only neighbours in time may be compared.
    """
    if options.base_layers < 0:
        raise ConfigError(f"--base_layers is {options.base_layers}; it must be 0 (the job's own base) or more.")
    if not 1 <= options.window <= options.steps // 2:
        raise ConfigError(f"--window is {options.window}; it must be from 1 to half of --steps ({options.steps}).")
    folder = Path(tempfile.mkdtemp(prefix="domext-benchmark-"))
    options.cache_dir = options.cache_dir or str(folder / "corpora")
    run_dir, bare = folder / "run", list[tuple[float, float]]()
    job, loop = start_job(run_dir, options), run_bare_loop(run_dir, options)
    windows = [slice(first, first + options.window) for first in range(0, options.steps, options.window)]
    try:
        for each in windows:
            wait_for_step(job, run_dir / "metrics.jsonl", min(each.stop, options.steps))
            with paused(job):
                bare += itertools.islice(loop, options.window)
        job.wait()
        records = [each for each in read_metrics(run_dir / "metrics.jsonl") if "train/mlm_loss" in each]
    finally:
        if job.poll() is None:
            job.terminate()
            job.wait()
        shutil.rmtree(folder, ignore_errors=True)
    worst = max(abs(a["train/mlm_loss"] - loss) for a, (_, loss) in zip(records, bare, strict=True))
    assert worst < OVERHEAD_TOLERANCE, f"the job's losses differ from the bare loop's by {worst}"
    # The first steps warm up; a median leaves out the step of the job that a pause interrupts.
    job_medians = [statistics.median(step["time/step_seconds"] for step in records[each]) for each in windows[1:]]
    bare_medians = [statistics.median(seconds for seconds, _ in bare[each]) for each in windows[1:]]
    ratios = [a / b for a, b in zip(job_medians, bare_medians, strict=True)]
    waited = sum(each["data/wait_seconds"] for each in records) / sum(each["time/step_seconds"] for each in records)
    print(f"{'steps':>6} {'job s':>9} {'bare s':>9} {'ratio':>6}")
    for window, *row in zip(windows[1:], job_medians, bare_medians, ratios, strict=True):
        print(f"{window.start + 1:>6,} {row[0]:>9.4f} {row[1]:>9.4f} {row[2]:>6.3f}")
    print(f"median ratio {statistics.median(ratios):.3f}; largest difference of a loss {worst:.1e}; ", end="")
    print(f"the job waited for data for {waited:.2%} of its time")
    results = [Measured("job", SECONDS, job_medians), Measured("bare loop", SECONDS, bare_medians)]
    figures = {"ratio": statistics.median(ratios), "ratios": ratios, "waiting": waited}
    base = [f"base of {options.base_layers} layers"] if options.base_layers else []
    case = {"job": " ".join([*base, *options.job_options]) or "its defaults", "steps": options.steps}
    case |= {"loop": "worker"} if options.as_worker else {}
    write_records(options, [Record("overhead", case, results, figures)], torch.device("cpu"))
