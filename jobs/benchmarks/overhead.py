"""A job (Ray Train, Ray Data, DeepSpeed) against a bare loop over the same batches, for `jobs/benchmark.py`."""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
import torch.nn.functional as F
from benchmarks.output import Measured, Record, write_records
from benchmarks.steps import SECONDS
from torch import nn

from domext_ray.corpus.manifest import read_manifest, take_rows
from domext_ray.corpus.vocabulary.vocab import load_tokenizer
from domext_ray.model.base import load_base
from domext_ray.model.graft import choose_attention
from domext_ray.runs.run_directory import read_identity
from domext_ray.training.metrics import read_metrics
from domext_ray.training.objective import Masker
from domext_ray.training.optimizer import compute_learning_rate
from domext_ray.training.phases import make_plan
from domext_ray.training.start import build_run_model, read_run_config

OVERHEAD_TOLERANCE = 0.02  # bf16 losses over tens of steps


def run_job(run_dir: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run jobs/pretrain_af.py at its defaults for some steps; return its training records."""
    command = [sys.executable, str(Path(__file__).parents[1] / "pretrain_af.py"), "--run.dir", str(run_dir.parent)]
    command += ["--run.name", run_dir.name, "--train.max_steps", str(options.steps), "--train.eval_rows", "32"]
    command += ["--train.eval_every", str(options.steps), "--train.checkpoint_every", str(options.steps)]
    command += ["--optim.decay_steps", "1000", "--prepare.cache_dir", options.cache_dir, *options.job_options]
    subprocess.run(command, check=True)
    return [each for each in read_metrics(run_dir / "metrics.jsonl") if "train/mlm_loss" in each]


def time_bare_loop(run_dir: Path, options: argparse.Namespace) -> tuple[list[float], list[float]]:
    """Train the run's model on the run's batches without Ray or DeepSpeed; return seconds and losses of the steps."""
    config = read_run_config(run_dir)
    identity = read_identity(run_dir, {"corpus_fingerprint": str})
    assert identity is not None, "a run that was trained"
    fingerprint = identity["corpus_fingerprint"]
    manifest = read_manifest(Path(options.cache_dir, fingerprint[:16]))
    tokenizer = load_tokenizer(run_dir / "tokenizer")
    masker = Masker(tokenizer, config.objective, config.seed)
    plan, paths = make_plan(config, manifest), [str(manifest.folder / each.path) for each in manifest.train]
    starts = np.concatenate([[0], np.cumsum(plan.shard_rows)])
    model = build_run_model(config, load_base(config.base), run_dir / "tokenizer", config.train.dropout).train()
    choose_attention(model, torch.device("cpu"), bf16=config.engine.precision == "bf16")
    params = [each for each in model.parameters() if each.requires_grad]
    groups = [
        {"params": [each for each in params if each.ndim >= 2], "weight_decay": config.optim.weight_decay},
        {"params": [each for each in params if each.ndim < 2], "weight_decay": 0.0},
    ]
    betas = (config.optim.beta1, config.optim.beta2)
    optimizer = torch.optim.AdamW(groups, betas=betas, eps=config.optim.eps, fused=True)
    seconds, losses = [], []
    for step in range(options.steps):
        started = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = compute_learning_rate(step, config.optim, config.optim.warmup_steps)
        shards, rows = plan.locate(0, plan.positions(np.array([step]), 0, 1).reshape(-1))
        table = take_rows(paths, shards, rows).append_column("row_id", pa.array(starts[shards] + rows))
        (batch,) = masker.collate(masker.mask(table, 0), config.train.global_batch_size)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=config.engine.precision == "bf16"):
            logits = model(
                batch.input_ids, attention_mask=batch.attention_mask, masked_positions=batch.masked_positions
            ).logits
        loss = F.cross_entropy(logits.float(), batch.labels)
        loss.backward()
        nn.utils.clip_grad_norm_(params, config.optim.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - started)
    return seconds, losses


def run_overhead(options: argparse.Namespace) -> None:
    """Time a job and the bare loop in turn, compare losses, print and write."""
    folder = Path(tempfile.mkdtemp(prefix="domext-benchmark-"))
    options.cache_dir = options.cache_dir or str(folder / "corpora")
    job_medians, bare_medians, waits = [], [], []
    try:
        for i in range(options.repeats):
            records = run_job(folder / f"run-{i}", options)
            seconds, losses = time_bare_loop(folder / f"run-{i}", options)
            worst = max(abs(a["train/mlm_loss"] - b) for a, b in zip(records, losses, strict=True))
            assert worst < OVERHEAD_TOLERANCE, f"the job's losses differ from the bare loop's by {worst}"
            timed = records[options.steps // 4 :]  # the first steps warm up
            job_medians.append(statistics.median(each["time/step_seconds"] for each in timed))
            bare_medians.append(statistics.median(seconds[options.steps // 4 :]))
            waits.append(
                sum(each["data/wait_seconds"] for each in records) / sum(each["time/step_seconds"] for each in records)
            )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    ratios = [a / b for a, b in zip(job_medians, bare_medians, strict=True)]
    print(f"{'job s':>9} {'bare s':>9} {'ratio':>6} {'waiting':>8}")
    for row in zip(job_medians, bare_medians, ratios, waits, strict=True):
        print(f"{row[0]:>9.4f} {row[1]:>9.4f} {row[2]:>6.3f} {row[3]:>8.2%}")
    print(f"median ratio {statistics.median(ratios):.3f}; largest loss difference of the last run {worst:.1e}")
    results = [
        Measured("job", SECONDS, job_medians),
        Measured("bare loop", SECONDS, bare_medians),
        Measured("share of the time waiting for data", "", waits),
    ]
    figures = {"ratio": statistics.median(ratios), "ratios": ratios}
    case = {"job": " ".join(options.job_options) or "its defaults", "steps": options.steps}
    write_records(options, [Record("overhead", case, results, figures)], torch.device("cpu"))
