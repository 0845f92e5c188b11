"""Every method on a card: tokens per second, MFU, peak memory and host gaps, for `jobs/benchmark.py gpu`.

Steps are the engine's own (DeepSpeed, ZeRO-0, AdamW in fp32), without Ray, on full rows of random tokens that the host
hands over in each step. Beside them stands transformers' own model of that shape, all weights or with peft's LoRA, in a
loop that does no more than Trainer's step must: autocast, backward, fused AdamW, on a batch that is on the card.
Attainable is what a large matrix product of that precision reaches on the same card, and MFU a step's share of it. A
host gap is time in which no kernel runs, by torch's profiler; on a CPU, in which no operation of torch runs.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
from benchmarks.as_worker import configure_process
from benchmarks.memory_worker import read_memory, read_peak
from benchmarks.output import Measured, Record, write_records
from benchmarks.steps import SECONDS, describe_method, describe_sizes, make_model, store_as_run
from benchmarks.timing import Batch, Clock, make_batch, make_step, one_process_group, synchronize
from peft import get_peft_model
from torch import nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForMaskedLM

from domext_ray.config.pretrain import EngineConfig, OptimConfig
from domext_ray.extensions.lora import build_lora_config
from domext_ray.model.layouts import find_layout
from domext_ray.training.cost import count_flops
from domext_ray.training.engine import Engine
from domext_ray.training.losses import MaskedLoss
from domext_ray.training.objective import MaskedBatch

BASES: dict[str, dict[str, Any]] = {
    "bert-base": {"layout": "bert", "layers": 12, "hidden_size": 768},
    "bert-large": {"layout": "bert", "layers": 24, "hidden_size": 1024},
    "modernbert-base": {"layout": "modernbert", "layers": 22, "hidden_size": 768},
    "tiny-bert": {"layout": "bert", "layers": 2, "hidden_size": 64},
    "tiny-modernbert": {"layout": "modernbert", "layers": 2, "hidden_size": 64},
}
"""Shapes, with random weights; the tiny ones show on any machine that the command runs."""
METHODS = ("full", "af", "exbert", "bottleneck", "lora")
RIVALS = {"full": "transformers, all weights", "lora": "transformers with peft's LoRA"}
"""By the method of ours that they are beside."""
PRODUCT_SIZE = {"cuda": 8192, "cpu": 1024}
LARGEST_VOCAB = 30_522  # ids that every base has


@dataclass(frozen=True)
class Side:
    """Something that trains.

    Args:
        step: makes one training step.
        flops: of a step's matrix products.
    """

    step: Callable[[], Any]
    flops: float


def add_gpu_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `jobs/benchmark.py gpu`."""
    parser.add_argument("--bases", nargs="+", choices=BASES, default=[each for each in BASES if "tiny" not in each])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--steps", type=int, default=10, help="steps of a repetition, between which nothing waits")
    parser.add_argument("--compile", action="store_true", help="torch.compile our layers")
    parser.set_defaults(device="cuda", precision="bf16", tokens=32_768, as_worker=False)


def run_gpu(options: argparse.Namespace) -> None:
    """Measure every method on every base and length, beside transformers' own model; print and write."""
    configure_process(options)
    device = torch.device(options.device)
    attainable = measure_attainable(device, torch.bfloat16 if options.precision == "bf16" else torch.float32)
    print(f"a product of {PRODUCT_SIZE[device.type]:,} rows and columns: {attainable / 1e12:,.2f} TFLOP/s")
    print(f"{'base':<16}{'length':>6} {'what':<30}{'tokens/s':>12} {'MFU':>6} {'peak GiB':>9} {'gaps':>6}")
    with one_process_group(device):
        for base in options.bases:
            sizes = argparse.Namespace(**{**vars(options), **BASES[base]})
            for length in options.lengths:
                batch = make_batch(max(1, options.tokens // length), length, LARGEST_VOCAB, device)
                results, figures = [], {"attainable_flops_per_second": attainable, "sides": []}
                for name, make in list_sides(sizes, batch):
                    seconds, found = measure(make, batch, options, attainable)
                    print(
                        f"{base:<16}{length:>6} {name:<30}{found['tokens_per_second']:>12,.0f} {found['mfu']:>6.1%} "
                        f"{found['peak_bytes'] / 2**30:>9.2f} {found['gap_frac']:>6.1%}",
                        flush=True,
                    )
                    results.append(Measured(name, SECONDS, seconds))
                    cast(list[Any], figures["sides"]).append({"name": name, **found})
                case = {"base": base, "precision": options.precision, "length": length, "rows": len(batch.input_ids)}
                case |= {"compiled": "ours"} if options.compile else {}
                write_records(options, [Record("gpu", case, results, figures)], device)


def list_sides(options: argparse.Namespace, batch: Batch) -> Iterable[tuple[str, Callable[[], Side]]]:
    """Return what makes each side, by its name: the methods that are asked for, each before its rival."""
    for method in options.methods:
        sizes = describe_sizes(options, method)
        yield f"{method} ({sizes})" if sizes else method, functools.partial(make_own, options, method, batch)
        if method in RIVALS:
            yield RIVALS[method], functools.partial(make_rival, options, method, batch)


def make_own(options: argparse.Namespace, method: str, batch: Batch) -> Side:
    """Put the engine around a model of ours, as a run's worker does."""
    device, bf16 = torch.device(options.device), options.precision == "bf16"
    model = cast(nn.Module, store_as_run(make_model(options, method), options.precision))
    labels = batch.labels.cpu()
    rows = MaskedBatch(batch.input_ids.cpu(), None, None, batch.masked_positions.cpu(), labels, torch.ones(len(labels)))
    flops = count_flops(MaskedLoss(model, device, bf16=bf16), rows).flops_per_token * batch.input_ids.numel()
    engine = Engine(
        model,
        engine=EngineConfig(precision=options.precision, compile=options.compile),
        optim=OptimConfig(decay_steps=10_000),
        warmup_steps=1,
        micro_batch_size=len(batch.input_ids),
        accumulation_steps=1,
        seed=0,
        device=device,
    )
    return Side(lambda: engine.launch_step([rows], rows.num_masked, 0), flops)  # as on a card, read later or never


def make_rival(options: argparse.Namespace, method: str, batch: Batch) -> Side:
    """Make transformers' own model of the shape, of which all weights train, or peft's LoRA."""
    config: Any = make_model(argparse.Namespace(**{**vars(options), "device": "cpu"}), "frozen").config
    model: Any = AutoModelForMaskedLM.from_config(find_layout(config).restore(config, "ForMaskedLM"))
    if method == "lora":
        gated = config.gated_ffn
        targets = ["Wqkv"] if gated else options.lora_targets.split(",")  # that class stores the three as one matrix
        lora = build_lora_config(describe_method(options, method), gated=gated)
        lora.target_modules = targets
        model = get_peft_model(model, lora)
    model = model.to(options.device).train()

    def compute(batch: Batch) -> torch.Tensor:
        loss: torch.Tensor = model(input_ids=batch.input_ids, labels=batch.all_labels.view_as(batch.input_ids)).loss
        return loss

    step = make_step(model, compute, batch, bf16=options.precision == "bf16")
    with FlopCounterMode(display=False) as counter:
        step()
    return Side(step, counter.get_total_flops())


def measure(
    make: Callable[[], Side], batch: Batch, options: argparse.Namespace, attainable: float
) -> tuple[list[float], dict[str, float]]:
    """Make a side, time it, profile it and let it go; return its seconds per step, and its figures."""
    device = torch.device(options.device)
    before = read_memory(device, reset=True)
    side = make()
    for _ in range(options.warmup + 1):
        side.step()
    seconds, clock = list[float](), Clock(device)
    for _ in range(options.repeats):
        clock.restart()
        for _ in range(options.steps):
            side.step()
        seconds.append(clock.read(options.steps).wall)
    peak = read_peak(device) - before
    median = statistics.median(seconds)
    return seconds, {
        "tokens_per_second": batch.input_ids.numel() / median,
        "mfu": side.flops / median / attainable,
        "peak_bytes": peak,
        "gap_frac": measure_gap(side.step, options.steps, device),
    }


def measure_gap(step: Callable[[], Any], num_steps: int, device: torch.device) -> float:
    """Return the share of the time, from the first kernel of some steps to the last, in which none runs."""
    kind = DeviceType.CUDA if device.type == "cuda" else DeviceType.CPU
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with profile(activities=activities) as seen:
        for _ in range(num_steps):
            step()
        synchronize(device)
    spans = sorted(
        (each.time_range.start, each.time_range.end)
        for each in seen.events()
        if each.device_type == kind and not getattr(each, "is_user_annotation", False)
    )
    assert spans, f"torch's profiler saw no work of {device}"
    busy, end = 0.0, spans[0][0]
    for start, stop in spans:
        busy, end = busy + max(0.0, stop - max(start, end)), max(end, stop)
    return 1 - busy / (end - spans[0][0])


def measure_attainable(device: torch.device, dtype: torch.dtype) -> float:
    """Return the operations per second of a large matrix product: the fastest of ten."""
    size = PRODUCT_SIZE[device.type]
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    seconds = []
    for _ in range(13):  # the first ones warm up
        synchronize(device)
        start = time.perf_counter()
        left @ right
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    return 2 * size**3 / min(seconds[3:])
