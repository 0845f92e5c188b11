"""Peak memory of a method's training against full training's, and what a dry run says of it: `memory`.

Each case trains in processes of its own, one per rank, in one gloo group (nccl on GPUs), without Ray. What is measured
is the peak of the largest rank's resident memory during training steps, less what the process had before the model was
made: after all imports, and after steps of a small model. The C library's allocator is told to give back what is freed;
left alone it keeps a fifth to a third more (--keep_freed). On a GPU it is torch's peak of allocated memory.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from benchmarks.output import Record, show_ratio, show_tables, write
from benchmarks.steps import (
    METHODS,
    VOCAB_SIZE,
    describe_case,
    describe_sizes,
    make_engine,
    make_model,
    resolve,
    store_as_run,
)
from benchmarks.timing import compare

from domext_ray.config.pretrain import EngineConfig, PretrainConfig
from domext_ray.training.cost import Sharding, make_full_batch, plan_memory
from domext_ray.training.losses import MaskedLoss
from domext_ray.training.objective import LOSS

NUM_STEPS = 2
"""Steps that are watched: ZeRO-3 gathers ahead in the second one."""
RETURNING = {"MALLOC_MMAP_THRESHOLD_": "131072"}
"""glibc's allocator then gives large blocks back as soon as they are freed; else it raises that limit up to 32 MiB."""
GIB = 2**30


def run_memory(options: argparse.Namespace) -> None:
    """Measure every method and full training at the same batch and ZeRO stage; write each as it comes."""
    sizes, records = resolve(options, options.bases[0]), list[Record]()
    if sizes.threads:
        torch.set_num_threads(sizes.threads)

    @functools.cache
    def measure(method: str, stage: int, length: int) -> list[int]:
        return [max(_run_ranks(sizes, method, stage, length)) for _ in range(options.repeats)]

    for length in sizes.lengths:
        for method in options.methods:
            for stage in options.stages:
                own, full = measure(method, stage, length), measure("full", stage, length)
                parts = plan(sizes, method, stage, length)
                planned, ratio = sum(parts.values()), compare(own, full)
                off = planned / statistics.median(own) - 1
                case = describe_case(sizes, length, max(1, sizes.tokens // length)) | {"method": method}
                case |= {"sizes": describe_sizes(sizes, method), "zero": stage, "ranks": sizes.ranks}
                case |= {"accumulation_steps": sizes.accumulation_steps}
                case |= {"freed": "kept" if sizes.keep_freed else "returned"}
                named = f" ({case['sizes']})" if case["sizes"] else ""
                row = {
                    "": f"{METHODS[method]}{named}, {sizes.layers} layers",
                    "precision": sizes.precision,
                    "tokens per row": f"{length:,}",
                    "rows": f"{case['rows']:,}",
                    "ranks": str(sizes.ranks),
                    "ZeRO": str(stage),
                    "planned, GiB": f"{planned / GIB:.2f}",
                    "peak, GiB": f"{statistics.median(own) / GIB:.2f}",
                    "off by": f"{off:+.1%}",
                    "full training, GiB": f"{statistics.median(full) / GIB:.2f}",
                    "ratio": show_ratio(ratio),
                }
                figures = {**ratio, "planned": planned, "parts": parts, "off_frac": off}
                records.append(Record("memory", case, [row], "bytes", {method: own, "full training": full}, figures))
                write(options, records[-1:], torch.device(options.device))
    show_tables(records)


def plan(options: argparse.Namespace, method: str, stage: int, length: int) -> dict[str, int]:
    """Return what a dry run says, in bytes by part."""
    device = torch.device(options.device)
    model = store_as_run(make_model(options, method), options)
    objective = MaskedLoss(model, device, bf16=options.precision == "bf16").train()
    sharding = Sharding(stage, options.ranks, options.accumulation_steps > 1, on_gpu=device.type == "cuda")
    batch = make_full_batch(PretrainConfig(), VOCAB_SIZE, length, max(1, options.tokens // length))
    return plan_memory(objective, batch, sharding)


def _run_ranks(options: argparse.Namespace, method: str, stage: int, length: int) -> list[int]:
    """Train in new processes; return the peak of each rank in bytes."""
    spec = json.dumps({"options": vars(options), "method": method, "stage": stage, "length": length})
    jobs = Path(__file__).parents[1]
    paths = [str(jobs), str(jobs.parent), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    environment |= {} if options.keep_freed else RETURNING
    with tempfile.TemporaryDirectory(prefix="domext-memory-") as folder:
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.memory", spec, folder]
        ranks = [
            subprocess.Popen([*command, str(rank)], env=environment, stdout=subprocess.DEVNULL)
            for rank in range(options.ranks)
        ]
        try:
            codes = [process.wait() for process in ranks]
        finally:
            for process in ranks:
                process.kill()
        assert not any(codes), f"a rank failed: exit codes {codes}"
        return [int(Path(folder, str(rank)).read_text(encoding="utf-8")) for rank in range(options.ranks)]


# --- one rank, in a process of its own ---


def run_rank(spec: str, folder: str, rank: str) -> None:
    """Train a small model, then the one that is measured; write the peak of its steps, in bytes, into a file."""
    case = json.loads(spec)
    options = argparse.Namespace(**case["options"])
    if options.threads:
        torch.set_num_threads(options.threads)
    if options.device == "cuda":
        torch.cuda.set_device(int(rank))
    device = torch.device("cuda", int(rank)) if options.device == "cuda" else torch.device("cpu")
    backend = "nccl" if options.device == "cuda" else "gloo"
    group = {"init_method": f"file://{folder}/store", "rank": int(rank), "world_size": options.ranks}
    dist.init_process_group(backend, **group, device_id=device if options.device == "cuda" else None)
    options.device, rows = str(device), max(1, options.tokens // case["length"])
    small = {**vars(options), "layers": 1, "ffn_units": 8, "heads": 1, "new_words": 8, "accumulation_steps": 1}
    _train(argparse.Namespace(**small), case["method"], case["stage"], 16, 1)
    before = _read_memory(device)
    _train(options, case["method"], case["stage"], case["length"], rows)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else _read_status("VmHWM")
    Path(folder, rank).write_text(str(peak - before), encoding="utf-8")
    dist.barrier()


def _train(options: argparse.Namespace, method: str, stage: int, length: int, rows: int) -> None:
    """Make a model and an engine, and some steps, whose peak is what is read afterwards."""
    device, passes = torch.device(options.device), options.accumulation_steps
    model = store_as_run(make_model(options, method), options)
    config = EngineConfig(zero_stage=stage, precision=options.precision)
    engine = make_engine(model, rows, device, config, accumulation_steps=passes)
    batches = [make_full_batch(PretrainConfig(), VOCAB_SIZE, length, rows)] * passes
    counts = {LOSS: sum(batch.counts[LOSS] for batch in batches) * options.ranks}
    _read_memory(device)
    for step in range(NUM_STEPS):
        engine.train_step(batches, counts, step)


def _read_memory(device: torch.device) -> int:
    """Return the bytes that this process has now; the peak begins here."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # proc(5): resets the peak resident set size
    return _read_status("VmRSS")


def _read_status(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB$", Path("/proc/self/status").read_text(encoding="utf-8"), re.M)
    assert found is not None
    return 1024 * int(found[1])


if __name__ == "__main__":
    run_rank(*sys.argv[1:])
