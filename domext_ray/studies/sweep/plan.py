"""A sweep's plan: everything that can be known, and refused, before a trial begins.

Enters: a `SweepConfig`. Leaves: a `SweepPlan`. Nothing is started or written; the sweep's directory is only looked at.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from domext_ray.config.finetune import ALL
from domext_ray.config.options.build import identity_of_run
from domext_ray.config.sweep import SweepConfig
from domext_ray.errors import ConfigError, DomextError, StorageError
from domext_ray.families.label_counts import describe_set
from domext_ray.families.readers.examples import LabelledSet
from domext_ray.families.sets import load_labelled, take_examples
from domext_ray.model.base import Base
from domext_ray.pretraining.inputs import check_texts
from domext_ray.pretraining.plan import load_run_base, pin_other_texts, resolve_files, size_model, warn_of_rules
from domext_ray.runs.run_directory import check_identity, keep_precision, read_identity, resolve_root
from domext_ray.runtime.ray_cluster import resolve_gpu, resolve_precision
from domext_ray.runtime.trials import Ledger, describe_amount
from domext_ray.storage import Place
from domext_ray.studies.sweep.results import TRIALS
from domext_ray.studies.sweep.searcher import count_trials
from domext_ray.studies.sweep.space import Point, Space, TrialConfig, configure, describe_point, read_space
from domext_ray.training.run import Inputs

DEFAULT_NAME = "sweep"
MIN_DRAWS, DRAWS_PER_TRIAL = 200, 10
"""Points that are drawn at most to find so many that can be trained."""
SAMPLED = 20
"""Points of which a dry run takes the largest, where Optuna will draw them."""
GROWING = ("search.trials",)
"""Options that may grow and shrink."""


@dataclass(frozen=True)
class Prepared:
    """What pre-training reads, made once for all trials that agree in it."""

    inputs: Inputs
    base: Base | None  # None: random weights


@dataclass(frozen=True)
class SweepPlan:
    """A sweep, checked: what all its processes are given."""

    config: SweepConfig  # its devices settled as far as they are known
    space: Space
    points: list[Point]  # of its trials; empty: Optuna suggests them
    refused: Counter[str]  # points that cannot be trained, by the reason
    folder: Place  # its directory
    sets: tuple[LabelledSet, ...]  # the tasks', of which --labels are taken, without their test splits
    num_examples: tuple[int, ...]  # all that there are to learn from in each
    identity: dict[str, Any]  # what makes the sweep this one; see `identity_of_run`
    prepared: Mapping[str, Prepared] = field(default_factory=dict)  # by `space.name_preparation`
    cpus: float = 1.0  # of a trial's process

    @property
    def gpus(self) -> float:
        """GPUs of a trial's process."""
        return 1.0 if self.config.scale.uses_gpu else 0.0

    @property
    def ledger(self) -> Ledger:
        """The trials' records."""
        return Ledger(self.folder / TRIALS)


def plan_sweep(config: SweepConfig) -> SweepPlan:
    """Check a sweep, its points and everything that it reads, and return its plan; nothing is started or written."""
    folder = resolve_root(config.run.dir) / (config.run.name or DEFAULT_NAME)
    config = resolve_trials(keep_precision(resolve_files(config), folder))
    config = pin_other_texts(config, read_identity(folder) or {})  # a preparation pins the domain's text
    space = read_space(config.space)
    points, refused = choose_points(config, space)
    found = tuple(_load_sets(config))
    identity = {**identity_of_run(config), **{f"data_sha256.{i}": data.sha256 for i, data in enumerate(found)}}
    check_identity(folder, identity, free=GROWING)
    is_fixed = not any(
        dimension.name == "base" or dimension.name.startswith("vocab.") for dimension in space.dimensions
    )
    check_texts(config, load_run_base(config) if is_fixed else None)
    sets = tuple(_take_labels(config, data) for data in found)
    num_examples = tuple(len(data.train) for data in found)
    return SweepPlan(config, space, points, refused, folder, sets, num_examples, identity)


def is_finished(plan: SweepPlan) -> bool:
    """Whether a planned sweep has its summary and has ended with all these points, or with as many trials."""
    number, num_ended = count_trials(plan.config.search, plan.points, plan.ledger.list())
    return (plan.folder / "summary.json").exists() and num_ended == number


def choose_points(config: SweepConfig, space: Space) -> tuple[list[Point], Counter[str]]:
    """Choose the points of a searcher that knows them beforehand, each one once and those alone that can be trained.

    What can be known without training is checked: a point's options, its base and its sizes. Optuna's space is only
    tried, and has no points here. The counter says how many were refused for each reason.
    """
    search = config.search
    if search.searcher == "grid":
        drawn, wanted = iter(space.list_grid()), None
    else:
        most = max(MIN_DRAWS, DRAWS_PER_TRIAL * search.trials)
        drawn, wanted = itertools.islice(space.sample(search.seed), most), search.trials
    bases: dict[tuple[str, bool], Base | None] = {}
    reasons: Counter[str] = Counter()
    valid: dict[str, Point] = {}
    for point in drawn:
        if len(valid) == wanted:
            break
        try:
            chosen = _check_point(config, space, point, bases)
        except StorageError:  # no fault of the point
            raise
        except DomextError as error:
            reasons[str(error)] += 1
        else:  # values that are written in two ways, such as 1e-4 and 0.0001, are one point
            valid.setdefault(repr(chosen), point)
    if not valid:
        raise ConfigError(f"the space makes no valid trial: {reasons.most_common(1)[0][0]}")
    return [] if search.searcher == "optuna" else list(valid.values()), reasons


def _check_point(
    config: SweepConfig, space: Space, point: Point, bases: dict[tuple[str, bool], Base | None]
) -> TrialConfig:
    configs = configure(config, space, point)
    pretrain = configs.pretrain
    key = pretrain.base, pretrain.objective.next_sentence
    if key not in bases:
        bases[key] = load_run_base(pretrain)
        warn_of_rules(bases[key])
    size_model(pretrain, bases[key])
    return configs


def _load_sets(config: SweepConfig) -> Iterator[LabelledSet]:
    """Read the tasks' sets; their test splits are left behind, so that no trial sees them."""
    for task, place in zip(config.tasks, config.places, strict=True):
        yield replace(load_labelled(replace(config.finetune, task=task, data=place)), test=())


def _take_labels(config: SweepConfig, data: LabelledSet) -> LabelledSet:
    """Return a set with the labels that all trials and the base learn from: those of a study's first seed."""
    return data if config.labels == ALL else take_examples(data, int(config.labels), config.seed, "--labels")


def resolve_trials(config: SweepConfig) -> SweepConfig:
    """Settle whether trials have GPUs and in which precision they train, as far as that is known; again with Ray."""
    config = resolve_precision(resolve_gpu(config, max(config.search.parallel, 1), "--search.parallel"))
    tuned = replace(config, engine=config.finetune.engine)
    return replace(config, finetune=replace(config.finetune, engine=resolve_precision(tuned).engine))


def describe_sweep(plan: SweepPlan) -> str:
    """Return what a dry run prints."""
    config, points = plan.config, plan.points
    search, budget = config.search, config.budget
    amounts = {"steps": f"{budget.steps:,}", "tokens": f"{budget.tokens:,}", "seconds": f"{budget.seconds:g}"}
    amount = next(f"{text} {name}" for name, text in amounts.items() if getattr(budget, name))
    shares = ", ".join(f"{share:.3g}" for share in search.shares)
    begun = plan.ledger.list()
    number, _ = count_trials(search, points, begun)
    lines = [
        *map(describe_set, plan.sets),
        f"{len(points) or search.trials} trials of {amount}, scored at {shares} of it; {search.searcher} search"
        + (", stopped by ASHA" if search.scheduler == "asha" else ""),
        *(describe_point(point) for point in points),
        *(f"{count} points cannot be trained: {reason}" for reason, count in plan.refused.most_common()),
        describe_amount(begun, number, _count_bytes(plan), budget.seconds),
        f"sweep directory: {plan.folder}",
        "dry run: nothing was started",
    ]
    return "\n".join(lines)


def _count_bytes(plan: SweepPlan) -> int:
    """Return what the checkpoints of the largest trial take: weights of what trains, and AdamW's two moments."""
    largest = 0
    for point in plan.points or list(itertools.islice(plan.space.sample(plan.config.search.seed), SAMPLED)):
        with contextlib.suppress(DomextError):
            pretrain = configure(plan.config, plan.space, point).pretrain
            base = load_run_base(pretrain)
            largest = max(largest, size_model(pretrain, base).counts.trainable)
    return 3 * 4 * largest * plan.config.run.keep_checkpoints
