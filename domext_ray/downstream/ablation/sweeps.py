"""How much the start and the size of bottlenecks matter: fine-tuning runs that differ in one thing.

Enters: the options of fine-tuning, and what varies: the initial magnitude of the bottlenecks, or their size against
other ways to train few parameters. Leaves: one fine-tuning run a value (RUN.DIR/NAME-...), each with a choice of its
own by dev; runs that have ended are kept. Houlsby et al. section 3.6, figures 4 and 6.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from domext_ray.config.finetune import FULL, AblateConfig, FinetuneConfig
from domext_ray.config.method import MethodConfig
from domext_ray.downstream.finetune.comparison import ScoredRun, check_comparable, read_finetuned
from domext_ray.downstream.finetune.finetune import run_finetuning
from domext_ray.downstream.finetune.finetuned import make_set_task
from domext_ray.downstream.finetune.plan import count_parameters, list_trials
from domext_ray.errors import ConfigError
from domext_ray.families.loading import load_labelled
from domext_ray.models.start import StartModel, load_start_model
from domext_ray.runs.run_directory import resolve_root
from domext_ray.storage import Place

BOTTLENECKS, TOP_LAYERS, LAYER_NORMS, EVERYTHING = "bottlenecks", "top layers", "LayerNorms", "everything"
PAPER_SIGMA = 0.01
"""The magnitude that others are compared with: the paper's own."""


@dataclass(frozen=True)
class SweepEntry:
    """One run of a sweep."""

    family: str  # what trains
    value: float  # sigma, a bottleneck's size or the number of top layers; nan where nothing varies
    config: FinetuneConfig

    @property
    def name(self) -> str:
        """The run's name."""
        return self.config.run.name


@dataclass(frozen=True)
class SweepResult:
    """A run of a sweep that has ended."""

    entry: SweepEntry
    run: ScoredRun

    @property
    def num_trained(self) -> int:
        """Parameters that trained, the task's head among them."""
        return sum(counts["trainable"] for counts in self.run.summary["parameters"].values())

    @property
    def values(self) -> list[float]:
        """The metric of every restart."""
        return self.run.summary["restarts"][self.run.split]["values"]

    @property
    def sd(self) -> float:
        """Standard deviation over restarts; 0 for a single one."""
        return float(self.run.summary["restarts"][self.run.split]["std"])


@dataclass(frozen=True)
class Sweep:
    """All runs of a sweep."""

    study: str  # "sigma" or "size"
    results: tuple[SweepResult, ...]  # in the order of the plan
    reference: SweepResult  # that others are compared with


def plan_sweep(config: AblateConfig) -> list[SweepEntry]:
    """Return the runs of a sweep."""
    plain = config.make_finetune_config()
    num_layers = _load_start(plain).config.num_hidden_layers
    if config.study == "sigma":
        methods = [
            (BOTTLENECKS, sigma, replace(config.method, name=f"sigma{sigma:g}", init="paper", bottleneck_std=sigma))
            for sigma in sorted(config.sigmas)
        ]
        return [_make_entry(config, *method) for method in methods]
    named = {"all": tuple(range(1, num_layers + 1)), "none": ()}
    counts = named[config.top_layers] if isinstance(config.top_layers, str) else config.top_layers
    if max(counts, default=0) > num_layers:
        raise ConfigError(f"--top_layers has {max(counts)}; {plain.model!r} has {num_layers} layers.")
    bottlenecks = [
        (BOTTLENECKS, size, replace(config.method, name=f"size{size}", bottleneck_size=size))
        for size in sorted(config.sizes)
    ]
    tops = [
        (TOP_LAYERS, count, replace(FULL, name=f"top{count}", trains="top_layers", top_layers=count))
        for count in sorted(counts)
    ]
    norms = replace(FULL, name="layer_norms", trains="layer_norms")
    others = [(LAYER_NORMS, math.nan, norms), (EVERYTHING, math.nan, FULL)]
    return [_make_entry(config, *method) for method in (*bottlenecks, *tops, *others)]


def _load_start(config: FinetuneConfig) -> StartModel:
    return load_start_model(config.model, config.model_step, config.keep_head)


def name_sweep(config: AblateConfig) -> str:
    """Return what the names of a sweep's runs begin with."""
    return config.run.name or "ablate"


def find_sweep_folder(config: AblateConfig) -> Place:
    """Return the folder of a sweep's figures and tables."""
    if config.output:
        return Place(config.output)
    return resolve_root(config.run.dir) / f"{name_sweep(config)}-{config.study}"


def _make_entry(config: AblateConfig, family: str, value: float, method: MethodConfig) -> SweepEntry:
    plain = config.make_finetune_config()
    name = f"{name_sweep(config)}-{method.name}"
    run = replace(plain.run, name=name)
    return SweepEntry(family, value, replace(plain, method=method, run=run, export=False, dry_run=False))


def describe_sweep(config: AblateConfig, entries: Sequence[SweepEntry]) -> str:
    """Return what a sweep would train: its set, and a line a run with its parameters."""
    loaded, start = load_labelled(entries[0].config), _load_start(entries[0].config)
    task = make_set_task(entries[0].config, start, loaded)
    lines = [loaded.describe()]
    for entry in entries:
        trained = sum(number for number, _ in count_parameters(entry.config, start, task).values())
        lines.append(f"{entry.name}: {len(list_trials(entry.config))} trainings of {trained:,} parameters")
    lines.append(f"{len(entries)} runs into {resolve_root(config.run.dir)}, chosen by {task.metric} on dev")
    return "\n".join(lines)


def run_sweep(config: AblateConfig, entries: Sequence[SweepEntry]) -> Sweep:
    """Fine-tune the runs that `plan_sweep` returned, but for those that have ended."""
    results = []
    for i, entry in enumerate(entries):
        print(f"run {i + 1} of {len(entries)}: {entry.name}", flush=True)
        results.append(SweepResult(entry, read_finetuned(run_finetuning(entry.config))))
    check_comparable([result.run for result in results])
    if config.study == "sigma":
        reference = min(results, key=lambda result: abs(math.log(result.entry.value / PAPER_SIGMA)))
    else:
        reference = next(result for result in results if result.entry.family == EVERYTHING)
    return Sweep(config.study, tuple(results), reference)
