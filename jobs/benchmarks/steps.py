"""A training step of a method in turn with a named rival's, on the same weights, batch and precision: `step`.

Ours is the engine's own step (DeepSpeed, ZeRO-0, AdamW in fp32), without Ray, on full rows of random tokens. The rival,
`--against`, is one of `rivals.py`, or this library's full training. "Of attainable" is the share of our step that its
matrix products alone take, each timed by itself in the same process.
"""

from __future__ import annotations

import argparse
import copy
import gc
import multiprocessing
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from benchmarks.output import Record, show, show_ratio, show_spread, show_tables, write
from benchmarks.rivals import (
    AdapterHub,
    AfEquations,
    ExbertEquations,
    compute_whole_loss,
    make_transformers,
    split_rows,
    stack_rows,
    time_trainer,
)
from benchmarks.timing import (
    Batch,
    Figures,
    Seconds,
    Watch,
    check_figures,
    compare,
    compute_figures,
    configure_process,
    make_batch,
    make_step,
    take_turns,
    time_steps,
)
from torch import Tensor, nn
from transformers import ModernBertConfig

from domext_ray.config.extensions.table import is_extension
from domext_ray.config.method import MethodConfig
from domext_ray.config.pretrain import EngineConfig, OptimConfig, PretrainConfig, ShapeConfig
from domext_ray.errors import ConfigError
from domext_ray.model.base import MLM_HEAD, Base, BaseFiles
from domext_ray.model.build import detach, prepare_for_device, store_base
from domext_ray.model.domext.modeling_domext import DomextForMaskedLM
from domext_ray.model.layouts import LAYOUTS
from domext_ray.model.spec import UNKNOWN_WORD, ModelSpec
from domext_ray.text.corpus.batching import MaskedRows, pad_masked
from domext_ray.training.cost import count_flops, make_full_batch, time_matmuls
from domext_ray.training.engine import Engine, join_alone, leave_alone
from domext_ray.training.losses import MaskedLoss
from domext_ray.training.objective import MaskedBatch, to_batch
from domext_ray.training.step import move_batch

BASES: dict[str, dict[str, Any]] = {
    "bert-base": {"layout": "bert", "layers": 12, "hidden_size": 768},
    "bert-large": {"layout": "bert", "layers": 24, "hidden_size": 1024},
    "modernbert-base": {"layout": "modernbert", "layers": 22, "hidden_size": 768},
    "tiny-bert": {"layout": "bert", "layers": 2, "hidden_size": 64},
    "tiny-modernbert": {"layout": "modernbert", "layers": 2, "hidden_size": 64},
}
"""Shapes, with random weights; the tiny ones show on any machine that the command runs."""
METHODS = {
    "full": "full training",
    "af": "AF Adapter",
    "af_upper": "AF Adapter, upper half of the layers",
    "af_kept": "AF Adapter, a quarter of the rows keep to the base",
    "exbert": "exBERT",
    "bottleneck": "bottlenecks",
    "lora": "LoRA",
    "frozen": "frozen base, forward only",
}
OWN_RIVALS = {"full": "transformers", "af": "equations", "af_kept": "af", "exbert": "equations"}
OWN_RIVALS |= {"bottleneck": "adapters", "lora": "trainer", "af_upper": "full", "frozen": "full"}
RIVALS = {
    "own": "each method's own of these",
    "equations": "the paper's equations",
    "adapters": "AdapterHub's library",
    "trainer": "transformers' Trainer with peft",
    "transformers": "transformers' own model",
    "full": "full training of this library",
    "af": "AF Adapter of this library",
    "joined": "the same with joined products",
}
VOCAB_SIZE = 30_522
DEFAULTS = {
    "cpu": {"tokens": 1024, "steps": 1, "precision": "fp32"},
    "cuda": {"tokens": 32_768, "steps": 10, "precision": "bf16"},
}
UNIT = "seconds per step"


Side = tuple[Callable[[], Seconds], Figures | None]
"""What makes steps and returns their mean time, and what it must agree in; None: it is another model."""


@dataclass(frozen=True)
class Pair:
    """What was measured of a method and a rival; of several processes, `seconds` has the median of each."""

    seconds: dict[str, list[Seconds]]  # by side
    figures: dict[str, Any]
    others_frac: float

    def list_wall(self, side: str) -> list[float]:
        return [turn.wall for turn in self.seconds[side]]


# --- what is trained ---


def describe_method(options: argparse.Namespace, method: str) -> MethodConfig:
    """Return the extensions of a method.

    The start is the papers' own: with a zero start the extensions would not show in the loss that is compared.
    """
    af, exbert = method.startswith("af"), method == "exbert"
    return MethodConfig(
        heads=options.heads if af else 0,
        ffn_units=options.ffn_units if af else 0,
        module_hidden_size=options.module_hidden_size if exbert else 0,
        module_ffn_size=options.module_ffn_size if exbert else 0,
        bottleneck_size=options.bottleneck_size if method == "bottleneck" else 0,
        lora_rank=options.lora_rank if method == "lora" else 0,
        lora_targets=tuple(options.lora_targets.split(",")),
        layers=f"{options.layers // 2}-{options.layers - 1}" if method == "af_upper" else "",
        init="paper",
        trains="all" if method in ("full", "frozen") else "extensions",
    )


def describe_sizes(options: argparse.Namespace, method: str) -> str:
    """Return the sizes of a method's extension in words; empty where it has none."""
    units = "gated units" if options.layout == "modernbert" else "units"
    return {
        "af": f"{options.heads} head{'s' if options.heads > 1 else ''} + {options.ffn_units:,} {units}",
        "exbert": f"{options.module_hidden_size}/{options.module_ffn_size:,}, {options.new_words:,} new words",
        "bottleneck": f"m = {options.bottleneck_size}",
        "lora": f"rank {options.lora_rank} on {options.lora_targets.replace(',', ' and ')}",
    }.get(method.split("_")[0], "")


def make_model(options: argparse.Namespace, method: str) -> DomextForMaskedLM:
    """Make a model of the options' sizes on the device; "full": everything trains, "frozen": nothing."""
    heads, longest, base = options.hidden_size // 64, max(512, *options.lengths), None
    shape = ShapeConfig(options.layers, options.hidden_size, heads, 4 * options.hidden_size, longest)
    if options.layout == "modernbert":
        found = ModernBertConfig(
            num_hidden_layers=options.layers,
            hidden_size=options.hidden_size,
            num_attention_heads=heads,
            intermediate_size=options.hidden_size * 3 // 2,
            max_position_embeddings=max(8192, longest),
        )
        config = LAYOUTS[options.layout].describe(found)
        files = BaseFiles(Path(), cast(Any, None), detach(DomextForMaskedLM(config)), {})  # it reads no text
        base = Base("random", config, (MLM_HEAD,), "", read=files)
    model = ModelSpec(
        base,
        describe_method(options, method),
        shape,
        vocab_size=VOCAB_SIZE if base is None else 0,
        new_words=[UNKNOWN_WORD] * options.new_words if method == "exbert" else [],
        dropout=options.dropout,
    ).build()
    prepare_for_device(model, torch.device(options.device), bf16=options.precision == "bf16")
    # Without a base its heads would train too; a real base brings them.
    for name, param in model.named_parameters():
        param.requires_grad_(method == "full" or (method != "frozen" and is_extension(name)))
    return model.to(options.device).train()


def store_as_run(model: DomextForMaskedLM, options: argparse.Namespace) -> nn.Module:
    """Store a model's frozen base as a run of that precision does."""
    if EngineConfig(precision=options.precision).has_narrow_base:
        store_base(model, torch.bfloat16)
    return cast(nn.Module, model)


def compute_loss(model: DomextForMaskedLM, batch: Batch) -> Tensor:
    """Return the mean loss of the predicted positions, as training computes it."""
    logits = model(batch.input_ids, masked_positions=batch.masked_positions).logits
    return F.cross_entropy(logits.float(), batch.labels)


def make_engine(model: nn.Module, rows: int, device: torch.device, config: EngineConfig, **named: Any) -> Engine:
    """Put the engine around a model, as a run's worker does."""
    settings: dict[str, Any] = {"optim": OptimConfig(decay_steps=10_000), "warmup_steps": 1, "accumulation_steps": 1}
    settings |= {"engine": config, "micro_batch_size": rows, "seed": 0, "device": device}
    return Engine(model, **{**settings, **named})


def make_own(
    options: argparse.Namespace, method: str, batch: Batch, model: DomextForMaskedLM, **engine: Any
) -> Callable[[], Any]:
    """Return what makes one step of ours; the model is taken over, and the engine's options may be others."""
    device, network = torch.device(options.device), store_as_run(model, options)
    rows, loss = _to_rows(batch, keeps=method == "af_kept"), partial(MaskedLoss, num_words=VOCAB_SIZE)
    if method == "frozen":
        objective = loss(network, device, bf16=options.precision == "bf16")
        return torch.no_grad()(lambda: objective(move_batch(rows, device)))
    config = EngineConfig(precision=options.precision, **engine)
    kept = partial(loss, teacher=network) if method == "af_kept" else loss
    trainer = make_engine(network, len(batch.input_ids), device, config, objective=kept)
    # As on a card, figures are read later or never.
    return lambda: trainer.launch_step([rows], rows.counts, 0)


def _to_rows(batch: Batch, *, keeps: bool = False) -> MaskedBatch:
    """The batch as a run's reader makes it, with bounds and filler; with `keeps` a quarter of the rows ask the base."""
    ids, found = (tensor.flatten().cpu().numpy() for tensor in (batch.input_ids, batch.all_labels))
    num_rows, length = batch.input_ids.shape
    selected = found >= 0
    general = np.arange(num_rows) < max(1, num_rows // 4) if keeps else None
    lengths = np.full(num_rows, length)
    rows = MaskedRows(ids, np.where(selected, found, ids), selected, lengths, is_kept=general)
    return cast(MaskedBatch, to_batch(pad_masked(rows, pad_id=0, with_filler=True)))


def make_rival(
    options: argparse.Namespace, method: str, against: str, model: DomextForMaskedLM, batch: Batch, stack: ExitStack
) -> Side:
    """Make the side that a method is held against, on the weights that its model has now."""
    device, bf16, steps = torch.device(options.device), options.precision == "bf16", options.steps
    if against == "joined":
        own = make_own(options, method, batch, copy.deepcopy(model), joined=True)
        return time_steps(own, steps, device), None
    if against in METHODS:
        return time_steps(make_own(options, against, batch, make_model(options, against)), steps, device), None
    if against == "adapters":
        other = stack.enter_context(AdapterHub(options, model, batch))
        return other.time_steps, other.figures
    if against == "equations":
        kinds = {"af": AfEquations, "exbert": ExbertEquations}
        rival: nn.Module = kinds[method](copy.deepcopy(model)).train().to(device)
        figures: Figures | None = compute_figures(rival, lambda: rival(batch))
        return time_steps(make_step(rival, rival, batch, bf16=bf16), steps, device), figures
    rival = make_transformers(model, describe_method(options, "lora") if method == "lora" else None)
    compute = partial(compute_whole_loss, rival)
    # ModernBERT's class joins what are several tensors of ours.
    is_same = options.layout == "bert" and method in ("full", "lora")
    figures = compute_figures(rival, lambda: compute(batch)) if is_same else None
    if against == "transformers":
        return time_steps(make_step(rival, compute, batch, bf16=bf16), steps, device), figures
    optim, rows = OptimConfig(), split_rows(batch) * (options.warmup + steps)
    given: dict[str, Any] = {"learning_rate": optim.lr, "weight_decay": optim.weight_decay, "adam_beta2": optim.beta2}
    given |= {"max_grad_norm": optim.max_grad_norm, "train_sampling_strategy": "sequential"}
    given |= {"per_device_train_batch_size": len(batch.input_ids), "bf16": bf16}
    return lambda: time_trainer(rival, rows, stack_rows, options.warmup, device, **given), figures


# --- measuring ---


def measure_pair(options: argparse.Namespace, method: str, against: str, length: int) -> Pair:
    """Time a method and its rival in turn at one length; compare first what they compute."""
    join_alone()
    gc.collect()  # else the last pair's models count as memory that is there, until they go in the middle of a step
    device = torch.device(options.device)
    batch = make_batch(count_rows(options, method, length), length, VOCAB_SIZE, device)
    figures: dict[str, Any] = {}
    with ExitStack() as stack:
        model = make_model(options, method)
        run_rival, rival_figures = make_rival(options, method, against, model, batch, stack)
        if rival_figures is not None:
            own_figures = compute_figures(model, lambda: compute_loss(model, batch))
            figures["loss_difference"] = check_figures(own_figures, rival_figures)
        loss = MaskedLoss(model, device, bf16=options.precision == "bf16")
        counted = make_full_batch(PretrainConfig(), VOCAB_SIZE, length, len(batch.input_ids))
        products = None if method == "frozen" else count_flops(loss, counted)
        own = time_steps(make_own(options, method, batch, model), options.steps, device)
        sides = {"domext_ray": own, "rival": run_rival}
        with Watch() as watch:
            took = [time_matmuls(products, device, bf16=loss.bf16)] if products else []
            seconds = take_turns(sides, options.repeats, options.warmup)
            took += [time_matmuls(products, device, bf16=loss.bf16)] if products else []
    median = statistics.median(turn.wall for turn in seconds["domext_ray"])
    figures["tokens_per_second"] = batch.input_ids.numel() / median
    for first in took[:1]:
        figures |= first.describe(batch.input_ids.numel(), median, 1)
        figures["attained_frac"] = min(one.matmul_seconds for one in took) * batch.input_ids.numel() / median
    return Pair(seconds, figures, watch.others_frac)


def count_rows(options: argparse.Namespace, method: str, length: int) -> int:
    """Return the rows of a step; of a step that keeps to the base four at least, of which one asks it."""
    return max(4 if method == "af_kept" else 1, options.tokens // length)


def measure_in_processes(options: argparse.Namespace, *case: Any) -> Pair:
    """Measure a pair in several new processes, one after the other, of which medians count.

    Where a process happens to get its memory makes both sides faster or slower for as long as it lives; repetitions in
    one process cannot show that.
    """
    if options.processes == 1:
        return measure_pair(options, *case)
    pairs = []
    for _ in range(options.processes):
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, spawn, initializer=configure_process, initargs=(options,)) as process:
            pairs.append(process.submit(measure_pair, options, *case).result())
    seconds = {side: [_find_median(pair.seconds[side]) for pair in pairs] for side in pairs[0].seconds}
    return replace(pairs[0], seconds=seconds, others_frac=max(pair.others_frac for pair in pairs))


def _find_median(seconds: Sequence[Seconds]) -> Seconds:
    return Seconds(statistics.median(turn.wall for turn in seconds), statistics.median(turn.cpu for turn in seconds))


# --- the verb ---


def resolve(options: argparse.Namespace, base: str) -> argparse.Namespace:
    """Return the options with a base's shape, and with the device's defaults where nothing is said."""
    given = {name: value for name, value in vars(options).items() if value is not None}
    return argparse.Namespace(**{**DEFAULTS[options.device], **BASES[base], **given})


def list_pairs(options: argparse.Namespace) -> list[tuple[str, str]]:
    """Return methods with their rivals; a rival that is none of a method's is a ConfigError."""
    methods = [method for method in METHODS if method in options.methods or "all" in options.methods]
    if "af_upper" in methods and options.layers < 2:
        methods.remove("af_upper")
    pairs = []
    for method in methods:
        against = OWN_RIVALS[method] if options.against == "own" else options.against
        if against == method:
            continue
        fits = {"equations": ("af", "exbert"), "adapters": ("bottleneck",), "trainer": ("lora",)}.get(against)
        if fits and method not in fits:
            raise ConfigError(f"--against is {against!r}, which is for {' and '.join(fits)}; --methods has {method}.")
        if options.layout == "modernbert" and (method == "exbert" or against in ("equations", "adapters", "trainer")):
            raise ConfigError(
                f"--methods has {method}; a ModernBERT has no {RIVALS[against]} for it; give --against full, "
                "af or transformers, or leave it out."
            )
        pairs.append((method, against))
    return pairs


def run_step(options: argparse.Namespace) -> None:
    """Measure every pair on every base and length; write each as it comes, and print tables of all."""
    records, resolved = list[Record](), [resolve(options, base) for base in options.bases]
    configure_process(resolved[0])
    for chosen in resolved:
        for method, against in list_pairs(chosen):
            for length in chosen.lengths:
                pair = measure_in_processes(chosen, method, against, length)
                records.append(make_record(chosen, method, against, length, pair))
                write(options, records[-1:], torch.device(options.device))
    show_tables(records)
    leave_alone()


def make_record(options: argparse.Namespace, method: str, against: str, length: int, pair: Pair) -> Record:
    """Return what the file of a pair holds."""
    case = describe_case(options, length, count_rows(options, method, length)) | {"method": method}
    case |= {} if options.against == "own" else {"against": against}
    case["sizes"] = describe_sizes(options, method)
    own, rival = pair.list_wall("domext_ray"), pair.list_wall("rival")
    figures = {**compare(rival, own), "share": statistics.median(own) / statistics.median(rival), **pair.figures}
    cpu = {f"{name}, processor": [turn.cpu for turn in seconds] for name, seconds in pair.seconds.items()}
    figures["cpu_ratio"] = compare(*reversed(list(cpu.values())))["ratio"] if all(cpu["rival, processor"]) else None
    row = {
        "": name_case(case),
        "precision": options.precision,
        "tokens per row": f"{length:,}",
        "rows": f"{case['rows']:,}",
        "ours, s": show_spread(own),
        "other, s": show_spread(rival),
        "ratio": show_ratio(figures),
        "tokens/s": show(figures["tokens_per_second"]),
        **({"of attainable": f"{figures['attained_frac']:.0%}"} if "attained_frac" in figures else {}),
        **({"MFU": f"{figures['throughput/mfu']:.1%}"} if "throughput/mfu" in figures else {}),
        "other": RIVALS[against] + (" and peft" if method == "lora" and against == "transformers" else ""),
    }
    results = {"domext_ray": own, "rival": rival, **cpu}
    return Record("step", case, [row], UNIT, results, figures, pair.others_frac)


def describe_case(options: argparse.Namespace, length: int, rows: int) -> dict[str, str | int]:
    """Return what distinguishes a training step from others, but for its method."""
    width = {} if options.hidden_size == 768 else {"hidden_size": options.hidden_size}
    process = {"process": "worker"} if getattr(options, "as_worker", False) else {}
    shape = {"layout": options.layout, "layers": options.layers, **width, "precision": options.precision}
    dropout = {"dropout": f"{options.dropout:g}"} if options.dropout else {}
    return {**shape, "length": length, "rows": rows, **dropout, **process}


def name_case(case: dict[str, str | int]) -> str:
    """Return a method with its sizes, and with its shape and process where these are not BERT-base's and torch's."""
    layout = "" if case["layout"] == "bert" else f", {case['layout']}"
    width = f" of {case['hidden_size']}" if "hidden_size" in case else ""
    layers = f", {case['layers']} layers{width}" if layout or width or case["layers"] != 12 else ""
    name = METHODS[str(case["method"])] + (f" ({case['sizes']})" if case["sizes"] else "") + layout + layers
    dropout = f", dropout {case['dropout']}" if "dropout" in case else ""
    return name + dropout + (", as a worker" if case.get("process") == "worker" else "")
