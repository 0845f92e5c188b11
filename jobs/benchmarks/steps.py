"""Training steps of this library's models, in turn with a rival's or with each other's, for `jobs/benchmark.py`."""

from __future__ import annotations

import argparse
import copy
import multiprocessing
import statistics
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from benchmarks.as_worker import configure_process
from benchmarks.output import Measured, Record, write_records
from benchmarks.rivals import AfRival, ExbertRival, Rival
from benchmarks.rivals_adapters import AdaptersRival
from benchmarks.rivals_modernbert import ModernBertRival
from benchmarks.timing import Batch, Seconds, check_figures, compute_figures, make_batch, make_step, one_process_group
from torch import Tensor
from transformers import ModernBertConfig

from domext_ray.config.method import MethodConfig
from domext_ray.config.pretrain import EngineConfig, ShapeConfig
from domext_ray.errors import ConfigError
from domext_ray.extensions.table import is_extension
from domext_ray.model.base import Base
from domext_ray.model.build import build_model, choose_attention, detach, store_base
from domext_ray.model.domext.modeling_domext import DomextForMaskedLM
from domext_ray.model.layouts import LAYOUTS
from domext_ray.training.cost import Roofline, count_flops, time_matmuls
from domext_ray.training.engine import compile_layers
from domext_ray.training.losses import MaskedLoss
from domext_ray.training.objective import MaskedBatch

VOCAB_SIZE = 30_522
RUN_TOLERANCE = {"fp32": 1e-3, "bf16": 2e-2}  # of the mean loss of a run
SECONDS = "seconds per step"
UPPER_AF = "af_upper"
"""AF Adapter in the upper half of the layers alone."""


@dataclass(frozen=True)
class Pair:
    """This library's side and the rival's, on one batch; each call makes a step, or a run of which it returns a step.

    Args:
        model: this library's.
        time_model: this library.
        time_rival: the other one.
        loss_difference: between the two before the first step, in fp32.
    """

    model: DomextForMaskedLM
    time_model: Callable[[], Seconds]
    time_rival: Callable[[], Seconds]
    loss_difference: float


@dataclass(frozen=True)
class StepTimes:
    """Seconds of training steps at one length.

    Args:
        length: tokens of a row.
        rows: rows of a step.
        model_seconds: every repetition of this library's model; of several processes, the median of each.
        rival_seconds: every repetition of the rival.
        model_cpu_seconds: processor time of the same, over all threads; other programs disturb it less.
        rival_cpu_seconds: likewise.
        loss_difference: between the two before the first step, in fp32.
        flops_per_token: floating-point operations of the model per token, forward and backward.
        product_seconds: what its matrix products alone take for the batch, each timed on its own in this process; the
            faster of two times, before the steps and after them.
    """

    length: int
    rows: int
    model_seconds: tuple[float, ...]
    rival_seconds: tuple[float, ...]
    model_cpu_seconds: tuple[float, ...]
    rival_cpu_seconds: tuple[float, ...]
    loss_difference: float
    flops_per_token: float
    product_seconds: float

    @property
    def ratio(self) -> float:
        """How many times faster the model is, by medians."""
        return statistics.median(self.rival_seconds) / statistics.median(self.model_seconds)

    @property
    def cpu_ratio(self) -> float:
        """How many times less processor time the model takes, by medians."""
        return statistics.median(self.rival_cpu_seconds) / statistics.median(self.model_cpu_seconds)

    @property
    def gigaflops_per_second(self) -> float:
        """What the model computes per second, by the median."""
        return self.flops_per_token * self.length * self.rows / statistics.median(self.model_seconds) / 1e9

    @property
    def attained_frac(self) -> float:
        """Share of the model's median step that its matrix products alone would take: achieved / attainable."""
        return self.product_seconds / statistics.median(self.model_seconds)


def compute_loss(model: DomextForMaskedLM, batch: Batch) -> Tensor:
    """Return the mean loss of the predicted positions, as training computes it."""
    logits = model(batch.input_ids, masked_positions=batch.masked_positions).logits
    return F.cross_entropy(logits.float(), batch.labels)


def describe_method(options: argparse.Namespace, method: str) -> MethodConfig:
    """Return the extensions of one of the methods that are timed, or of "frozen", which has none.

    The start is the papers' own: with a zero start the extensions would not show in the loss that is compared.
    """
    af, exbert = method in ("af", UPPER_AF), method == "exbert"
    return MethodConfig(
        heads=options.heads if af else 0,
        ffn_units=options.ffn_units if af else 0,
        module_hidden_size=options.module_hidden_size if exbert else 0,
        module_ffn_size=options.module_ffn_size if exbert else 0,
        bottleneck_size=options.bottleneck_size if method == "bottleneck" else 0,
        lora_rank=options.lora_rank if method == "lora" else 0,
        lora_targets=tuple(options.lora_targets.split(",")),
        layers=f"{options.layers // 2}-{options.layers - 1}" if method == UPPER_AF else "",
        init="paper",
        trains="all" if method in ("full", "frozen") else "extensions",
    )


def make_base(options: argparse.Namespace) -> Base | None:
    """Make random weights of a layout in the sizes of its own base model; None: BERT's, which need no base."""
    if options.layout == "bert":
        return None
    longest = max(ModernBertConfig().max_position_embeddings, *options.lengths)
    found = ModernBertConfig(
        num_hidden_layers=options.layers,
        hidden_size=options.hidden_size,
        num_attention_heads=options.hidden_size // 64,
        intermediate_size=options.hidden_size * 3 // 2,
        max_position_embeddings=longest,
    )
    config = LAYOUTS[options.layout].describe(found)
    return Base("random", Path(), config, detach(DomextForMaskedLM(config)), {}, "", Path())


def make_model(options: argparse.Namespace, method: str) -> DomextForMaskedLM:
    """Make a model on the device.

    Args:
        options: its sizes.
        method: whose extensions train ("full": everything); "frozen": nothing trains.
    """
    shape = ShapeConfig(
        num_hidden_layers=options.layers,
        hidden_size=options.hidden_size,
        num_attention_heads=options.hidden_size // 64,
        intermediate_size=4 * options.hidden_size,
        max_position_embeddings=max(512, *options.lengths),
    )
    new_words = [[0]] * options.new_words if method == "exbert" else []
    config, base = describe_method(options, method), make_base(options)
    vocab_size = VOCAB_SIZE if base is None else base.config.vocab_size
    model = build_model(
        base, shape, config, vocab_size=vocab_size, new_words=new_words, dropout=options.dropout, seed=0
    )
    choose_attention(model, torch.device(options.device), bf16=options.precision == "bf16")
    # Without a base its heads would train too; a real base brings them.
    for name, param in model.named_parameters():
        param.requires_grad_(method == "full" or (method != "frozen" and is_extension(name)))
    return model.to(options.device).train()


def store_as_run(model: DomextForMaskedLM, precision: Literal["fp32", "bf16"]) -> DomextForMaskedLM:
    """Store a model's frozen base as a run of that precision does."""
    if EngineConfig(precision=precision).has_narrow_base:
        store_base(model, torch.bfloat16)
    return model


def _copy_for_run(model: DomextForMaskedLM, options: argparse.Namespace) -> DomextForMaskedLM:
    """Return what this library trains: a copy, for the rival has the exact weights, and so has the model itself."""
    return store_as_run(copy.deepcopy(model), options.precision)


@contextmanager
def pair_with_equations(options: argparse.Namespace) -> Iterator[Callable[[Batch], Pair]]:
    """Pair a model with its paper's equations, on the same weights."""
    model = make_model(options, options.method)
    rival: Rival = (ExbertRival if options.method == "exbert" else AfRival)(copy.deepcopy(model)).train()
    bf16 = options.precision == "bf16"
    if options.compile == "both":
        rival.compile_layers()

    def prepare(batch: Batch) -> Pair:
        rival.model.load_state_dict(model.state_dict())  # another length has trained it
        difference = check_figures(
            compute_figures(model, lambda: compute_loss(model, batch)), compute_figures(rival, lambda: rival(batch))
        )
        ours = _copy_for_run(model, options)
        if options.compile != "none":
            compile_layers(ours, torch.device(options.device))
        time_model = make_step(ours, partial(compute_loss, ours), batch, bf16=bf16)
        return Pair(ours, time_model, make_step(rival, rival, batch, bf16=bf16), difference)

    yield prepare


@contextmanager
def pair_with_class(options: argparse.Namespace) -> Iterator[Callable[[Batch], Pair]]:
    """Pair a ModernBERT with transformers' own class, which has AF Adapter's equations in it, on the same weights."""
    model, bf16 = make_model(options, options.method), options.precision == "bf16"

    def prepare(batch: Batch) -> Pair:
        rival = ModernBertRival(copy.deepcopy(model)).to(options.device).train()
        difference = check_figures(
            compute_figures(model, lambda: compute_loss(model, batch)), compute_figures(rival, lambda: rival(batch))
        )
        ours = _copy_for_run(model, options)
        time_model = make_step(ours, partial(compute_loss, ours), batch, bf16=bf16)
        return Pair(ours, time_model, make_step(rival, rival, batch, bf16=bf16), difference)

    yield prepare


@contextmanager
def pair_with_adapters(options: argparse.Namespace) -> Iterator[Callable[[Batch], Pair]]:
    """Pair a model with AdapterHub's library in another process, on the same weights."""
    model, bf16 = make_model(options, options.method), options.precision == "bf16"
    device, as_worker = torch.device(options.device), options.as_worker
    with AdaptersRival(options.rival_python, model, device, bf16=bf16, as_worker=as_worker) as rival:

        def prepare(batch: Batch) -> Pair:
            theirs = rival.prepare(batch)
            difference = check_figures(compute_figures(model, lambda: compute_loss(model, batch)), theirs)
            ours = _copy_for_run(model, options)
            time_model = make_step(ours, partial(compute_loss, ours), batch, bf16=bf16)
            return Pair(ours, time_model, rival.time_step, difference)

        yield prepare


@contextmanager
def pair_with_trainer(options: argparse.Namespace) -> Iterator[Callable[[Batch], Pair]]:
    """Pair this library's engine with transformers' Trainer and peft, on the same weights; each makes whole runs."""
    # peft, Trainer and DeepSpeed load slowly, and only this rival needs them.
    from benchmarks.rivals_trainer import EngineRuns, RunLength, TrainerRuns, split_rows

    device, bf16 = torch.device(options.device), options.precision == "bf16"
    length = RunLength(options.warmup + options.steps, options.warmup)
    model = make_model(options, options.method)
    rival = TrainerRuns(model, describe_method(options, options.method), length, device, bf16=bf16)

    def prepare(batch: Batch) -> Pair:
        rival.load(model)
        difference = check_figures(
            compute_figures(model, lambda: compute_loss(model, batch)), compute_figures(rival, lambda: rival(batch))
        )
        rows = split_rows(batch)
        trained = _copy_for_run(model, options)
        ours = EngineRuns(trained, len(rows), length, device, bf16=bf16)
        losses = ours.run(rows).loss, rival.run(rows).loss
        if not options.dropout:
            apart = abs(losses[0] - losses[1])
            assert apart < RUN_TOLERANCE[options.precision], f"the runs' losses are {losses[0]} and {losses[1]}"
        return Pair(trained, lambda: ours.run(rows).seconds, lambda: rival.run(rows).seconds, difference)

    with one_process_group(device):
        yield prepare


PAIRINGS = {
    ("bert", "af"): pair_with_equations,
    ("bert", "exbert"): pair_with_equations,
    ("bert", "bottleneck"): pair_with_adapters,
    ("bert", "lora"): pair_with_trainer,
    ("modernbert", "af"): pair_with_class,
}
"""By layout and method."""


def measure_step(options: argparse.Namespace) -> list[StepTimes]:
    """Time both sides at every length, in turn."""
    configure_process(options)
    results = []
    pairing = PAIRINGS.get((options.layout, options.method))
    if pairing is None:
        raise ConfigError(f"--method is {options.method!r}; with --layout {options.layout} it must be af.")
    if options.compile != "none" and pairing is not pair_with_equations:
        raise ConfigError(f"--compile is {options.compile!r}; beside this rival it must be none.")
    with pairing(options) as prepare:
        for length in options.lengths:
            batch = make_batch(max(1, options.tokens // length), length, VOCAB_SIZE, torch.device(options.device))
            pair = prepare(batch)
            if options.method != "lora":  # whose runs warm up themselves
                for _ in range(options.warmup):
                    pair.time_model()
                    pair.time_rival()
            roofline = _measure_products(pair.model, batch, options)
            times = [(pair.time_model(), pair.time_rival()) for _ in range(options.repeats)]
            again = _measure_products(pair.model, batch, options)
            seconds = min(each.matmul_seconds for each in (roofline, again)) * batch.input_ids.numel()
            model, rival = zip(*times, strict=True)
            results.append(
                StepTimes(
                    length,
                    batch.input_ids.shape[0],
                    tuple(each.wall for each in model),
                    tuple(each.wall for each in rival),
                    tuple(each.cpu for each in model),
                    tuple(each.cpu for each in rival),
                    pair.loss_difference,
                    roofline.flops_per_token,
                    seconds,
                )
            )
    return results


def measure_in_processes(options: argparse.Namespace) -> list[StepTimes]:
    """Time both sides at every length in several new processes, one after the other.

    Where a process happens to get its memory makes both sides faster or slower for as long as it lives; repetitions in
    one process cannot show that.

    Returns:
        By length; of each process and side, the median.
    """
    measured = []
    for _ in range(options.processes):
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
            measured.append(process.submit(measure_step, options).result())
    return [_join_processes(each) for each in zip(*measured, strict=True)]


def _join_processes(times: Sequence[StepTimes]) -> StepTimes:
    return replace(
        times[0],
        model_seconds=tuple(statistics.median(each.model_seconds) for each in times),
        rival_seconds=tuple(statistics.median(each.rival_seconds) for each in times),
        model_cpu_seconds=tuple(statistics.median(each.model_cpu_seconds) for each in times),
        rival_cpu_seconds=tuple(statistics.median(each.rival_cpu_seconds) for each in times),
        loss_difference=max(each.loss_difference for each in times),
        product_seconds=statistics.median(each.product_seconds for each in times),
    )


def _measure_products(model: DomextForMaskedLM, batch: Batch, options: argparse.Namespace) -> Roofline:
    """Return what a step computes, its products timed."""
    device, bf16 = torch.device(options.device), options.precision == "bf16"
    rows = MaskedBatch(
        batch.input_ids, None, None, batch.masked_positions, batch.labels, torch.ones(len(batch.labels), device=device)
    )
    return time_matmuls(count_flops(MaskedLoss(model, device, bf16=bf16), rows), device, bf16=bf16)


def format_table(results: Sequence[StepTimes]) -> str:
    """Return the medians and their ratios as a table."""
    lines = [
        f"{'length':>6} {'rows':>5} {'model s':>9} {'rival s':>9} {'ratio':>6} {'CPU ratio':>10} {'model tokens/s':>15}"
        f"{'GFLOP/s':>9} {'of products':>12}"
    ]
    for each in results:
        model, rival = statistics.median(each.model_seconds), statistics.median(each.rival_seconds)
        tokens = each.length * each.rows / model
        lines.append(
            f"{each.length:>6} {each.rows:>5} {model:>9.4f} {rival:>9.4f} {each.ratio:>6.2f} {each.cpu_ratio:>10.2f} "
            f"{tokens:>15,.0f} {each.gigaflops_per_second:>8,.0f} {each.attained_frac:>12.2f}"
        )
    return "\n".join(lines)


def run_step(options: argparse.Namespace) -> None:
    """Measure, print and write."""
    results = measure_in_processes(options) if options.processes > 1 else measure_step(options)
    print(format_table(results))
    write_records(options, [_record_step(options, each) for each in results], torch.device(options.device))


def _record_step(options: argparse.Namespace, times: StepTimes) -> Record:
    """Return what the file of one length holds."""
    case = {**describe_case(options, times.length, times.rows), "method": options.method}
    case |= {} if options.compile == "none" else {"compiled": options.compile}
    results = [
        Measured("domext_ray", SECONDS, times.model_seconds),
        Measured("rival", SECONDS, times.rival_seconds),
        Measured("domext_ray, processor", SECONDS, times.model_cpu_seconds),
        Measured("rival, processor", SECONDS, times.rival_cpu_seconds),
    ]
    figures = {
        "ratio": times.ratio,
        "cpu_ratio": times.cpu_ratio,
        "tokens_per_second": times.length * times.rows / statistics.median(times.model_seconds),
        "loss_difference": times.loss_difference,
        "gigaflops_per_second": times.gigaflops_per_second,
        "attained_frac": times.attained_frac,
    }
    return Record("step", {**case, "sizes": describe_sizes(options, options.method)}, results, figures)


def describe_case(options: argparse.Namespace, length: int, rows: int) -> dict[str, str | int]:
    """Return what distinguishes a training step from others, but for its method."""
    return {
        "layout": options.layout,
        "layers": options.layers,
        "precision": options.precision,
        "length": length,
        "rows": rows,
        **({"process": "worker"} if options.as_worker else {}),
    }


def describe_sizes(options: argparse.Namespace, method: str) -> str:
    """Return the sizes of a method's extension in words; empty where it has none."""
    heads = f"{options.heads} head{'s' if options.heads > 1 else ''}"
    units = "gated units" if options.layout == "modernbert" else "units"
    return {
        "af": f"{heads} + {options.ffn_units:,} {units}",
        "exbert": f"{options.module_hidden_size}/{options.module_ffn_size:,}, {options.new_words:,} new words",
        "bottleneck": f"m = {options.bottleneck_size}",
        "lora": f"rank {options.lora_rank} on {options.lora_targets.replace(',', ' and ')}",
    }.get(method, "")
