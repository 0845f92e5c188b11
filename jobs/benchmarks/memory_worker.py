"""One rank of a training whose peak memory is measured: a process of its own, started by benchmarks/memory.py."""

from __future__ import annotations

import argparse
import gc
import json
import re
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from benchmarks.memory import Case
from benchmarks.steps import VOCAB_SIZE, make_model, store_as_run
from torch import nn

from domext_ray.config.pretrain import EngineConfig, OptimConfig, PretrainConfig
from domext_ray.training.cost import make_full_batch
from domext_ray.training.engine import Engine

NUM_STEPS = 2
"""Steps that are watched: ZeRO-3 gathers ahead in the second one."""


def main() -> None:
    """Train a small model, then the one that is measured; write the peak of its steps, in bytes, into a file."""
    spec, (rank, store, output) = json.loads(sys.argv[1]), sys.argv[2:]
    options, case = argparse.Namespace(**spec["options"]), Case(**spec["case"])
    if options.threads:
        torch.set_num_threads(options.threads)
    if options.device == "cuda":
        torch.cuda.set_device(int(rank))
    device = torch.device("cuda", int(rank)) if options.device == "cuda" else torch.device("cpu")
    backend = "nccl" if options.device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=int(rank), world_size=case.ranks)
    small = argparse.Namespace(**{**vars(options), "layers": 1, "ffn_units": 8, "heads": 1, "new_words": 8})
    train(small, Case(case.method, 16, 1, case.stage, case.ranks), device)
    before = read_memory(device, reset=True)
    train(options, case, device)
    Path(output).write_text(str(read_peak(device) - before), encoding="utf-8")
    dist.barrier()


def train(options: argparse.Namespace, case: Case, device: torch.device) -> None:
    """Make a model and an engine, and some steps, whose peak is what is read afterwards."""
    options.device = str(device)
    model: nn.Module = store_as_run(make_model(options, case.method), options.precision)
    engine = Engine(
        model,
        engine=EngineConfig(zero_stage=case.stage, precision=options.precision),
        optim=OptimConfig(decay_steps=100, warmup_steps=1),
        warmup_steps=1,
        micro_batch_size=case.rows,
        accumulation_steps=case.accumulation_steps,
        seed=0,
        device=device,
    )
    batches = [make_full_batch(PretrainConfig(), VOCAB_SIZE, case.length, case.rows)] * case.accumulation_steps
    num_targets = sum(each.num_masked for each in batches) * case.ranks
    read_memory(device, reset=True)
    for step in range(NUM_STEPS):
        engine.train_step(batches, num_targets, step)


def read_memory(device: torch.device, *, reset: bool = False) -> int:
    """Return the bytes that this process has now; with `reset` the peak begins here."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    if reset:
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # proc(5): resets the peak resident set size
    return _read_status("VmRSS")


def read_peak(device: torch.device) -> int:
    """Return the most bytes that this process had since the peak was reset."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else _read_status("VmHWM")


def _read_status(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB$", Path("/proc/self/status").read_text(encoding="utf-8"), re.M)
    assert found is not None
    return 1024 * int(found[1])


if __name__ == "__main__":
    main()
