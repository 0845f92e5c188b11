"""What the time of a training step of ours goes to, by torch's profiler, for `jobs/benchmark.py profile`."""

from __future__ import annotations

import argparse
from collections import Counter
from functools import partial

import torch
from benchmarks.as_worker import configure_process
from benchmarks.output import Measured, Record, write_records
from benchmarks.steps import (
    SECONDS,
    VOCAB_SIZE,
    compute_loss,
    describe_case,
    describe_sizes,
    make_model,
    store_as_run,
)
from benchmarks.timing import make_batch, make_step
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

KINDS = {
    "matrix products": ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::addbmm", "linear"),
    "fused attention": ("_attention",),
    "softmax and loss": ("softmax", "nll_loss"),
    "GELU": ("gelu",),
    "LayerNorm": ("layer_norm",),
    "dropout": ("dropout", "bernoulli"),
    "copies and casts": ("copy", "clone", "aten::cat", "index_select", "aten::index", "gather"),
    "filling zeros": ("fill_", "zero_", "zeros"),
    "AdamW": ("adam",),
    "sums and scaling": ("aten::add", "aten::mul", "aten::sum", "aten::div", "aten::sub"),
}
"""Operations by what their names have in them; the first that fits counts."""
OTHER = "all else"


def name_kind(operation: str) -> str:
    """Return what kind of work an operation of torch is."""
    return next((kind for kind, names in KINDS.items() if any(each in operation.lower() for each in names)), OTHER)


def run_profile(options: argparse.Namespace) -> None:
    """Profile steps at every length; print and write the share of each kind of operation."""
    configure_process(options)
    device, bf16 = torch.device(options.device), options.precision == "bf16"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    model = store_as_run(make_model(options, options.method), options.precision)
    records = []
    for length in options.lengths:
        batch = make_batch(max(1, options.tokens // length), length, VOCAB_SIZE, device)
        step = make_step(model, partial(compute_loss, model), batch, bf16=bf16)
        for _ in range(options.warmup):
            step()
        with profile(activities=activities) as profiler:
            seconds = [step().wall for _ in range(options.repeats)]
        times = Counter[str]()
        for each in profiler.key_averages():
            if each.device_type == DeviceType.CPU:  # a GPU's kernels are counted in the operations that launch them
                spent = each.self_cpu_time_total if device.type == "cpu" else each.self_device_time_total
                times[name_kind(each.key)] += spent
        shares = {kind: time / times.total() for kind, time in times.most_common()}
        print(f"{length} tokens per row, {times.total() / 1e6 / options.repeats:.3f} s per step")
        for kind, share in shares.items():
            print(f"  {kind:<18}{share:>7.1%}")
        case = {**describe_case(options, length, batch.input_ids.shape[0]), "method": options.method}
        case |= {"sizes": describe_sizes(options, options.method)}
        records.append(Record("profile", case, [Measured("step", SECONDS, seconds)], {"shares": shares}))
    write_records(options, records, device)
