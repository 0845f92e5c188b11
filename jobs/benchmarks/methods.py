"""A training step of every method of this library in turn, for `jobs/benchmark.py methods`."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial

import torch
from benchmarks.as_worker import configure_process
from benchmarks.output import Measured, Record, write_records
from benchmarks.steps import (
    SECONDS,
    UPPER_AF,
    VOCAB_SIZE,
    compute_loss,
    describe_case,
    make_model,
    store_as_run,
)
from benchmarks.timing import Batch, Clock, Seconds, make_batch, make_step

from domext_ray.model.domext.modeling_domext import DomextForMaskedLM

FROZEN = "frozen"


def name_methods(num_layers: int) -> dict[str, str]:
    """Return what is timed, by the name that `make_model` knows it by."""
    return {
        "full": "continued pre-training",
        "af": "AF Adapter",
        **({UPPER_AF: f"AF Adapter, layers {num_layers // 2}–{num_layers - 1}"} if num_layers > 1 else {}),
        "exbert": "exBERT",
        "bottleneck": "bottleneck adapters",
        "lora": "LoRA",
        FROZEN: "frozen base, forward only",
    }


def run_methods(options: argparse.Namespace) -> None:
    """Time a step of every method in turn; print and write the medians as shares of continued pre-training."""
    configure_process(options)
    device, bf16 = torch.device(options.device), options.precision == "bf16"
    records = []
    names = name_methods(options.layers)
    models = {name: store_as_run(make_model(options, name), options.precision) for name in names}
    print(f"{'length':>6} {'what':<28}{'s a step':>9} {'share':>6}")
    for length in options.lengths:
        batch = make_batch(max(1, options.tokens // length), length, VOCAB_SIZE, device)
        steps = {
            name: make_forward(model, batch, bf16=bf16)
            if name == FROZEN
            else make_step(model, partial(compute_loss, model), batch, bf16=bf16)
            for name, model in models.items()
        }
        for _ in range(options.warmup):
            for step in steps.values():
                step()
        times = [{name: step().wall for name, step in steps.items()} for _ in range(options.repeats)]
        medians = {name: statistics.median(each[name] for each in times) for name in steps}
        for name, seconds in medians.items():
            print(f"{length:>6} {names[name]:<28}{seconds:>9.4f} {seconds / medians['full']:>6.2f}")
        results = [Measured(names[name], SECONDS, [each[name] for each in times]) for name in steps]
        shares = {name: seconds / medians["full"] for name, seconds in medians.items()}
        case = describe_case(options, length, batch.input_ids.shape[0])
        records.append(Record("methods", case, results, {"shares": shares}))
    write_records(options, records, device)


def make_forward(model: DomextForMaskedLM, batch: Batch, *, bf16: bool) -> Callable[[], Seconds]:
    """Return a function that times the forward pass alone."""
    device = batch.input_ids.device

    @torch.no_grad()
    def forward() -> Seconds:
        clock = Clock(device)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=bf16):
            compute_loss(model, batch)
        return clock.read()

    return forward
