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
from domext_ray.errors import ConfigError
from domext_ray.families.label_counts import describe_set
from domext_ray.families.sets import load_labelled
from domext_ray.finetuning.comparison import ScoredRun, check_comparable, read_finetuned
from domext_ray.finetuning.finetune import run_finetuning
from domext_ray.finetuning.finetuned import make_set_task
from domext_ray.finetuning.plan import count_parameters, list_trials
from domext_ray.models.source import open_model
from domext_ray.models.start import StartModel
from domext_ray.runs.run_directory import resolve_root
from domext_ray.storage import Place

BOTTLENECKS, TOP_LAYERS, LAYER_NORMS, EVERYTHING = "bottlenecks", "top layers", "LayerNorms", "everything"
PAPER_SIGMA = 0.01
"""The magnitude that others are compared with: the paper's own."""


@dataclass(frozen=True)
class Arm:
    """A way to train that is compared with others, before its first step."""

    family: str  # what trains
    value: float  # sigma, a bottleneck's size or the number of top layers; nan where nothing varies
    config: FinetuneConfig

    @property
    def name(self) -> str:
        """Its run's name."""
        return self.config.run.name


def plan_arms(config: AblateConfig) -> list[Arm]:
    """Return what a study trains, each with a run of its own."""
    plain = config.make_finetune_config()
    num_layers = _load_start(plain).config.num_hidden_layers
    if config.study == "sigma":
        methods = [
            (BOTTLENECKS, sigma, replace(config.method, name=f"sigma{sigma:g}", init="paper", bottleneck_std=sigma))
            for sigma in sorted(config.sigmas)
        ]
        return [_make_arm(config, *method) for method in methods]
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
    return [_make_arm(config, *method) for method in (*bottlenecks, *tops, *others)]


def _load_start(config: FinetuneConfig) -> StartModel:
    return open_model(config.model).load(step=config.model_step, keep_head=config.keep_head)


def name_runs(config: AblateConfig) -> str:
    """Return what the names of a study's runs begin with."""
    return config.run.name or "ablate"


def find_folder(config: AblateConfig) -> Place:
    """Return the folder of a study's figures and tables."""
    if config.output:
        return Place(config.output)
    return resolve_root(config.run.dir) / f"{name_runs(config)}-{config.study}"


def _make_arm(config: AblateConfig, family: str, value: float, method: MethodConfig) -> Arm:
    plain = config.make_finetune_config()
    name = f"{name_runs(config)}-{method.name}"
    run = replace(plain.run, name=name)
    return Arm(family, value, replace(plain, method=method, run=run, export=False, dry_run=False))


def describe_arms(config: AblateConfig, arms: Sequence[Arm]) -> str:
    """Return what a study would train: its set, and a line a run with its parameters."""
    data, start = load_labelled(arms[0].config), _load_start(arms[0].config)
    task = make_set_task(arms[0].config, start, data)
    lines = [describe_set(data)]
    for arm in arms:
        trained = sum(number for number, _ in count_parameters(arm.config, start, task).values())
        lines.append(f"{arm.name}: {len(list_trials(arm.config, start))} trainings of {trained:,} parameters")
    lines.append(f"{len(arms)} runs into {resolve_root(config.run.dir)}, chosen by {task.metric} on dev")
    return "\n".join(lines)


def train_arms(arms: Sequence[Arm]) -> list[ScoredRun]:
    """Fine-tune the arms that `plan_arms` returned, but for those that have ended."""
    runs = []
    for i, arm in enumerate(arms):
        print(f"run {i + 1} of {len(arms)}: {arm.name}", flush=True)
        runs.append(read_finetuned(run_finetuning(arm.config)))
    check_comparable(runs)
    return runs


def choose_reference(arms: Sequence[Arm]) -> Arm:
    """Return the arm that others are compared with: the one that trains everything, or the nearest to the paper's."""
    full = [arm for arm in arms if arm.family == EVERYTHING]
    return full[0] if full else min(arms, key=lambda arm: abs(math.log(arm.value / PAPER_SIGMA)))
