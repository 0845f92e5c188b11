"""Minutes to a number of bits per character: a job against transformers' Trainer, for `jobs/benchmark.py e2e`.

Both train on the documents of the same text, in rows of as many tokens and steps of as many rows, from the same base,
each as a process of its own. Ours is `jobs/pretrain_af.py`, whose options stand after `--`; the rival trains all
weights (rivals_mlm_worker.py). Each runs once per learning rate, and its best run counts. The clock begins with the
process, so that it has imports and tokenisation; evaluations, on held-out text that is the same for both, are not on
it, nor is what comes after the last step. Runs that `--runs` has already are not made again.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.output import Measured, Record, add_output_options, write_json, write_records

from domext_ray.config import presets
from domext_ray.config.pretrain import PretrainConfig, RunConfig
from domext_ray.corpus.manifest import Manifest
from domext_ray.corpus.overlap import read_hashes
from domext_ray.corpus.shards import hash_document
from domext_ray.data.documents import read_documents
from domext_ray.data.dropped import Dropped
from domext_ray.data.sources import resolve_sources
from domext_ray.errors import ConfigError
from domext_ray.files import read_json
from domext_ray.model.base import load_base
from domext_ray.options.build import to_dict
from domext_ray.options.read import read_flags
from domext_ray.runs.events import Event, EventReader
from domext_ray.runs.run_directory import resolve_schedule
from domext_ray.runtime.machine import count_cpus
from domext_ray.storage import hash_values
from domext_ray.training.metrics import read_metrics
from domext_ray.training.phases import resolve_max_steps

OURS, RIVAL = "domext_ray", "Trainer"
RECIPE = ("--preset", "af_routed", "--train.evaluate_every", "50")
"""Options of our runs that those after -- change: extra heads, units and shifts of the base's words."""
BITS = "eval/domain_bits_per_character"
START_TOLERANCE = 1e-3  # bits per character of the base, as both sides see it
JOBS = Path(__file__).parents[1]

Run = dict[str, Any]
Curve = list[dict[str, float]]
"""An evaluation each: `step`, `seconds` since the process was started, `bits_per_character`."""


@dataclass(frozen=True)
class Comparison:
    """What the runs of both sides have in common.

    Args:
        config: our runs, whose steps, schedule and device are settled.
        job_options: of our runs' command lines.
        held_out: the corpus whose held-out text is scored.
        text: the documents that train, one per line.
        folder: where runs are made.
        dropout: the rival's.
        threads: CPU threads of either side.
    """

    config: PretrainConfig
    job_options: tuple[str, ...]
    held_out: Manifest
    text: Path
    folder: Path
    dropout: float
    threads: int

    @property
    def case(self) -> dict[str, str | int]:
        """What tells it from other comparisons."""
        train = self.config.train
        sizes: dict[str, str | int] = {"steps": train.max_steps, "rows": train.global_batch_size}
        sizes |= {"length": train.seq_length, "precision": self.config.engine.precision}
        return {"base": Path(self.config.base).name, "method": self.config.method.name, **sizes}

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


def add_end_to_end_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `jobs/benchmark.py e2e`."""
    parser.add_argument("--text", default="package-docs", help="the text, as --corpus of a job names it")
    parser.add_argument("--rates", type=float, nargs="*", default=[1e-3, 2e-3], help="peak learning rates of our runs")
    parser.add_argument("--rival_rates", type=float, nargs="*", default=[1e-4, 3e-4, 1e-3], help="and of the rival's")
    parser.add_argument("--rival_dropout", type=float, help="the rival's dropout; default: that of our runs")
    parser.add_argument("--target", type=float, help="bits per character; default: the rival's best at its end")
    parser.add_argument("--runs", default="runs/benchmark/e2e-runs.json", help="file of the runs that were made")
    add_output_options(parser)
    parser.add_argument("job_options", nargs="*", help="options of our runs, after --, such as -- --base BASE")


def run_end_to_end(options: argparse.Namespace) -> None:
    """Make the runs that are missing, print both sides and write them."""
    path = Path(options.runs)
    folder = Path(tempfile.mkdtemp(prefix="domext-benchmark-"))
    try:
        comparison = prepare(options, folder)
        settings = comparison.describe()
        runs = read_runs(path, settings)
        for side, rate in choose_runs(options, runs):
            make = run_ours if side == OURS else run_rival
            runs.append({"side": side, "rate": rate, **make(comparison, rate)})
            check_starts(runs, comparison)
            write_json(path, {"settings": settings, "runs": runs})
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    figures = summarize(runs, options.target)
    print_figures(figures)
    results = [Measured(side, "s", [seconds]) for side, seconds in figures["seconds"].items() if seconds is not None]
    torch.set_num_threads(comparison.threads)  # what the record says
    if results:
        write_records(options, [Record("e2e", comparison.case, results, figures)], torch.device("cpu"))


def prepare(options: argparse.Namespace, folder: Path) -> Comparison:
    """Read our options, prepare the text once for both sides' evaluations, and write what the rival reads."""
    import ray

    from domext_ray.inputs import run_preparation
    from domext_ray.plan import resolve_workers

    job_options = (*RECIPE, "--corpus", options.text, *options.job_options)
    config = presets.configure(PretrainConfig, "af_words", read_flags(PretrainConfig, job_options))
    train = config.train
    if config.objective.kind != "masked" or train.long_seq_length or train.max_tokens or train.max_seconds:
        raise ConfigError("the options after -- must be of a run of masked words, with steps or epochs as its limit.")
    own = replace(config, prepare=replace(config.prepare, cache_dir=str(folder / "corpora")))
    manifest = run_preparation(replace(own, run=replace(config.run, dir=str(folder / "prepared"))))
    ray.shutdown()
    assert manifest is not None, "this is no dry run"
    config = resolve_schedule(resolve_max_steps(resolve_workers(config), [manifest]), folder)
    dropout = train.dropout if options.rival_dropout is None else options.rival_dropout
    return Comparison(
        config, job_options, manifest, write_text(config, manifest, folder), folder, dropout, count_cpus()
    )


def write_text(config: PretrainConfig, manifest: Manifest, folder: Path) -> Path:
    """Write the documents that train, each once, one per line."""
    hashes, path = read_hashes(manifest.folder), folder / "train.txt"
    assert hashes is not None, "the corpus was just prepared"
    chosen = {int(each) for each in hashes.train}
    with path.open("w", encoding="utf-8") as file:
        for task in resolve_sources(config.corpus, config.prepare).tasks:
            for document in read_documents(task, config.prepare, Dropped()):
                key = int(np.frombuffer(hash_document(document), dtype=">u8")[0])
                if key in chosen:
                    chosen.remove(key)
                    file.write(document + "\n")
    assert not chosen, "the text changed while it was read"
    return path


def read_runs(path: Path, settings: dict[str, Any]) -> list[Run]:
    """Return the runs that were made before.

    Raises:
        ConfigError: they are of other settings.
    """
    if not path.exists():
        return []
    found = read_json(path, "remove it, or give another --runs", {"settings": dict, "runs": list})
    for name, value in settings.items():
        if found["settings"].get(name) != value:
            raise ConfigError(f"--runs {str(path)!r} has runs of another {name}; give another file.")
    return list(found["runs"])


def choose_runs(options: argparse.Namespace, runs: Sequence[Run]) -> Iterator[tuple[str, float]]:
    """Yield side and learning rate of the runs that are not there yet."""
    done = {(each["side"], each["rate"]) for each in runs}
    wanted = [*((RIVAL, rate) for rate in options.rival_rates), *((OURS, rate) for rate in options.rates)]
    return (each for each in dict.fromkeys(wanted) if each not in done)


def run_ours(comparison: Comparison, rate: float) -> Run:
    """Make a run of ours, which prepares the text anew; return its curve and what it took."""
    root = Path(tempfile.mkdtemp(dir=comparison.folder))
    run_dir = root / "run"
    command = [sys.executable, str(JOBS / "pretrain_af.py"), *comparison.job_options, "--optim.lr", str(rate)]
    command += ["--run.dir", str(root), "--run.name", run_dir.name, "--prepare.cache_dir", str(root / "corpora")]
    events, started = EventReader(run_dir), time.time()
    subprocess.run(command, check=True)
    records = read_metrics(run_dir / "metrics.jsonl")
    seconds = time_evaluations(events.read(), started)
    bits = [(each["step"], each[BITS]) for each in records if BITS in each]
    curve = [
        {"step": step, "seconds": each, "bits_per_character": value}
        for (step, value), each in zip(bits, seconds, strict=True)
    ]
    last = records[-1]
    rows = last["step"] * comparison.config.train.global_batch_size
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


def run_rival(comparison: Comparison, rate: float) -> Run:
    """Make a run of the rival; return its curve and what it took."""
    config, root = comparison.config, Path(tempfile.mkdtemp(dir=comparison.folder))
    settings = {
        "base": str(load_base(config.base).folder),
        "text": str(comparison.text),
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
        "threads": comparison.threads,
        "use_cpu": not config.scale.uses_gpu,
    }
    search = {**os.environ, "PYTHONPATH": os.pathsep.join([str(JOBS), str(JOBS.parent)])}
    command = [sys.executable, "-m", "benchmarks.rivals_mlm_worker"]
    subprocess.run([*command, json.dumps({**settings, "started": time.time()})], check=True, env=search)
    run = json.loads((root / "run.json").read_text(encoding="utf-8"))
    shutil.rmtree(root)
    return dict(run)


def check_starts(runs: Sequence[Run], comparison: Comparison) -> None:
    """Refuse to compare unless both sides see the base alike; new words make it another one."""
    if comparison.config.vocab.extends_base:
        return
    bits = [each["curve"][0]["bits_per_character"] for each in runs]
    assert max(bits) - min(bits) < START_TOLERANCE, f"the sides see another base: {bits} bits per character"


def find_seconds(curve: Curve, target: float) -> float | None:
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
    """Return the runs with what follows from their curves; None stands for what was not reached.

    Args:
        runs: of both sides, or of one.
        target: bits per character; None: what the rival's best run has at its end.
    """
    ends = [each["curve"][-1]["bits_per_character"] for each in runs if each["side"] == RIVAL]
    aim = target if target is not None else min(ends, default=None)
    described = [describe_run(each, aim) for each in sorted(runs, key=lambda each: (each["side"], each["rate"]))]
    best = {
        side: min(
            (seconds for each in described if each["side"] == side and (seconds := each["seconds_to_target"])),
            default=None,
        )
        for side in (OURS, RIVAL)
    }
    ours, rival = best[OURS], best[RIVAL]
    return {"target": aim, "ratio": rival / ours if ours and rival else None, "seconds": best, "runs": described}


def describe_run(run: Run, target: float | None) -> Run:
    """Return a run with what follows from its curve."""
    training = run["curve"][-1]["seconds"] - run["start_seconds"]
    reached = None if target is None else find_seconds(run["curve"], target)
    return {**run, "tokens_per_second": run["tokens"] / training, "seconds_to_target": reached}


def print_figures(figures: dict[str, Any]) -> None:
    """Print a line per run, and the ratio."""
    print(f"{'':<12}{'rate':>8}{'start s':>9}{'tokens/s':>10}{'epochs':>8}{'bits at end':>13}{'minutes to target':>19}")
    for run in figures["runs"]:
        seconds = run["seconds_to_target"]
        reached = "not reached" if seconds is None else f"{seconds / 60:.2f}"
        print(
            f"{run['side']:<12}{run['rate']:>8.0e}{run['start_seconds']:>9.1f}{run['tokens_per_second']:>10,.0f}"
            f"{run['epochs']:>8.2f}{run['curve'][-1]['bits_per_character']:>13.3f}{reached:>19}"
        )
    if figures["target"] is not None:
        print(f"target: {figures['target']:.3f} bits per character")
    if figures["ratio"] is not None:
        print(f"best of {RIVAL} / best of {OURS}: {figures['ratio']:.2f}")
