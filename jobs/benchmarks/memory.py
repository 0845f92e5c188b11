"""Peak memory of training, each case in processes of its own, for `jobs/benchmark.py memory` and `plan`.

What is measured is the peak of a rank's resident memory during training steps, less what the process had before the
model was made: after all imports, and after steps of a small model. The C library's allocator is told to give back what
is freed; left alone it keeps a fifth to a third more (--keep_freed). On a GPU it is torch's peak of allocated memory.
Steps are the engine's own (DeepSpeed, AdamW in fp32), on full rows of random tokens; ranks are processes of one gloo
group (nccl on GPUs), without Ray.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from benchmarks.output import Measured, Record, write_records
from benchmarks.steps import VOCAB_SIZE, describe_case, describe_sizes, make_model, store_as_run

from domext_ray.config.pretrain import PretrainConfig
from domext_ray.training.cost import Sharding, make_full_batch, plan_memory
from domext_ray.training.losses import MaskedLoss

WORKER = "benchmarks.memory_worker"
STAGES = (0, 2, 3)
PLANNED = ("full", "af", "exbert", "bottleneck")
MIB = 2**20
RETURNING = {"MALLOC_MMAP_THRESHOLD_": "131072"}
"""glibc's allocator then gives large blocks back as soon as they are freed; else it raises that limit up to 32 MiB."""


@dataclass(frozen=True)
class Case:
    """One training whose memory is measured.

    Args:
        method: as `make_model` knows it.
        length: tokens of a row.
        rows: of a rank's micro batch.
        stage: of ZeRO.
        ranks: processes.
        accumulation_steps: micro batches of a step.
    """

    method: str
    length: int
    rows: int
    stage: int = 0
    ranks: int = 1
    accumulation_steps: int = 1


def add_memory_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `jobs/benchmark.py memory`."""
    _add_allocator(parser)
    parser.add_argument("--method", choices=("af", "exbert", "bottleneck", "lora"), default="af")


def _add_allocator(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--keep_freed", action="store_true", help="leave glibc's allocator as it is: it keeps freed blocks"
    )


def add_plan_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `jobs/benchmark.py plan`."""
    _add_allocator(parser)
    parser.add_argument("--methods", nargs="+", choices=PLANNED, default=list(PLANNED))
    parser.add_argument("--stages", type=int, nargs="+", choices=(0, 1, 2, 3), default=list(STAGES), help="of ZeRO")
    parser.add_argument("--ranks", type=int, default=2, help="processes of one group")
    parser.add_argument("--accumulation_steps", type=int, default=1, help="micro batches of a step")


def measure_peaks(options: argparse.Namespace, case: Case, repeats: int = 1) -> list[int]:
    """Train in new processes; return the peak of the largest rank in bytes, of each repetition."""
    return [max(_run_ranks(options, case)) for _ in range(repeats)]


def _run_ranks(options: argparse.Namespace, case: Case) -> list[int]:
    kept = {name: each for name, each in vars(options).items() if name not in ("run", "output", "publish")}
    spec = json.dumps({"options": kept, "case": vars(case)})
    jobs = Path(__file__).parents[1]
    paths = [str(jobs), str(jobs.parent), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(each for each in paths if each)}
    environment |= {} if options.keep_freed else RETURNING
    with tempfile.TemporaryDirectory(prefix="domext-memory-") as folder:
        commands = [
            [sys.executable, "-W", "ignore", "-m", WORKER, spec, str(rank), f"{folder}/store", f"{folder}/{rank}"]
            for rank in range(case.ranks)
        ]
        processes = [subprocess.Popen(each, env=environment, stdout=subprocess.DEVNULL) for each in commands]
        try:
            codes = [each.wait() for each in processes]
        finally:
            for each in processes:
                each.kill()
        assert not any(codes), f"a rank failed: exit codes {codes}"
        return [int(Path(folder, str(rank)).read_text(encoding="utf-8")) for rank in range(case.ranks)]


def plan_case(options: argparse.Namespace, case: Case) -> dict[str, int]:
    """Return what the planner says of a case, in bytes by part: what a dry run prints."""
    device = torch.device(options.device)
    model = store_as_run(make_model(options, case.method), options.precision)
    objective = MaskedLoss(model, device, bf16=options.precision == "bf16").train()
    sharding = Sharding(case.stage, case.ranks, case.accumulation_steps > 1, on_gpu=device.type == "cuda")
    batch = make_full_batch(PretrainConfig(), VOCAB_SIZE, case.length, case.rows)
    return plan_memory(objective, batch, sharding)


def run_memory(options: argparse.Namespace) -> None:
    """Measure a method and full training at the same batch; print and write the ratio."""
    _set_threads(options)
    records = []
    print(f"{'length':>6} {'rows':>5} {'method MiB':>11} {'full MiB':>9} {'ratio':>6}")
    for length in options.lengths:
        rows = max(1, options.tokens // length)
        sides = [Case(method, length, rows) for method in (options.method, "full")]
        own, full = (Measured(case.method, "bytes", measure_peaks(options, case, options.repeats)) for case in sides)
        ratio = own.median / full.median
        print(f"{length:>6} {rows:>5} {own.median / MIB:>11,.0f} {full.median / MIB:>9,.0f} {ratio:>6.2f}")
        named = {**describe_case(options, length, rows), "method": options.method}
        named |= {"sizes": describe_sizes(options, options.method), "freed": _name_allocator(options)}
        records.append(Record("memory", named, [own, full], {"ratio": ratio}))
    write_records(options, records, torch.device(options.device))


def run_plan(options: argparse.Namespace) -> None:
    """Compare the planner with what training takes; print and write predicted, measured and difference."""
    _set_threads(options)
    records = []
    print(f"{'length':>6} {'rows':>5} {'method':<12}{'ZeRO':>4} {'planned MiB':>12} {'measured':>9} {'off by':>7}")
    for length in options.lengths:
        rows = max(1, options.tokens // length)
        results, figures = [], []
        for method in options.methods:
            for stage in options.stages:
                case = Case(method, length, rows, stage, options.ranks, options.accumulation_steps)
                parts = plan_case(options, case)
                name, planned = f"{method}, ZeRO-{stage}", sum(parts.values())
                measured = Measured(name, "bytes", measure_peaks(options, case, options.repeats))
                off = planned / measured.median - 1
                print(
                    f"{length:>6} {rows:>5} {method:<12}{stage:>4} {planned / MIB:>12,.0f} "
                    f"{measured.median / MIB:>9,.0f} {off:>+7.1%}",
                    flush=True,
                )
                results.append(measured)
                figures.append({"method": method, "stage": stage, "planned": planned, "parts": parts, "off_frac": off})
        named = {**describe_case(options, length, rows), "ranks": options.ranks}
        named |= {"accumulation_steps": options.accumulation_steps, "freed": _name_allocator(options)}
        worst = max(abs(each["off_frac"]) for each in figures)
        records.append(Record("plan", named, results, {"worst_frac": worst, "cases": figures}))
        print(f"{length:>6} the largest difference is {worst:.1%}")
    write_records(options, records, torch.device(options.device))


def _name_allocator(options: argparse.Namespace) -> str:
    return "kept" if options.keep_freed else "returned"


def _set_threads(options: argparse.Namespace) -> None:
    if options.threads:
        torch.set_num_threads(options.threads)
