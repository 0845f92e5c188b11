"""The configuration of a sweep: a training job's options, a space over them, fine-tuning, and how to search.

As in config.py, nothing here reads a file, and `config.parse_config` makes it from YAML and flags.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Literal

from domext_ray.config.finetune import FinetuneConfig
from domext_ray.config.pretrain import OptimConfig, PretrainConfig, TrainConfig
from domext_ray.options.fields import MANY, check_place, free, require, require_at_most, require_one_of, whole

OBJECTIVES = {"f1": "max", "general_accuracy": "max", "trainable": "min", "tokens_per_second": "max"}
"""What a sweep may search for, and which way is better."""


@dataclass(frozen=True)
class BudgetConfig:
    """What the pre-training of a whole trial takes; give one of the three."""

    steps: int = 0  # optimiser steps
    tokens: int = 0  # tokens read
    seconds: float = 0.0  # seconds of training; a few timed steps say how many fit

    def __post_init__(self) -> None:
        for name in ("steps", "tokens", "seconds"):
            require(getattr(self, name) >= 0, f"budget.{name}", getattr(self, name), "0 or more")
        given = [name for name in ("steps", "tokens", "seconds") if getattr(self, name)]
        rule = "above 0, or give --budget.tokens or --budget.seconds"
        require(bool(given), "budget.steps", self.steps, rule)
        require(len(given) == 1, f"budget.{given[-1]}", getattr(self, given[-1]), f"0 beside --budget.{given[0]}")


@dataclass(frozen=True)
class SearchConfig:
    """How a space is searched.

    A trial is scored at every rung: at its whole budget, and with --search.rungs 3 and --search.reduction 4 also at a
    sixteenth and a quarter of it. ASHA stops those that are not among the best quarter of a rung so far.
    """

    searcher: Literal["random", "grid", "optuna"] = "random"  # optuna: TPE, or NSGA-II for several objectives
    scheduler: Literal["none", "asha"] = "none"  # asha: bad trials stop early
    objectives: str = "f1"  # f1, general_accuracy, trainable, tokens_per_second; several by commas
    trials: int = 20  # trials; of a grid, every point is one
    rungs: int = 1  # times that a trial is scored
    reduction: int = 3  # each rung's budget is so many times the one before; asha keeps one trial in so many
    parallel: int = free(0)  # trials at once; 0: as many as the cluster has room for
    max_failures: int = free(2)  # deaths of a trial's process after which it is given up
    axis: str = free("")  # dimension along which F1 is drawn; empty: trained parameters
    curves: str = free("")  # dimension that has a curve per value there
    seed: int = 0  # of the search; a trial's own is --seed

    def __post_init__(self) -> None:
        require_one_of(self.searcher, "search.searcher", ("random", "grid", "optuna"))
        require_one_of(self.scheduler, "search.scheduler", ("none", "asha"))
        names = self.objective_names
        for name in names:
            require(name in OBJECTIVES, "search.objectives", self.objectives, f"of {', '.join(OBJECTIVES)}")
        require(len(set(names)) == len(names), "search.objectives", self.objectives, "different names")
        require(
            len(names) == 1 or self.scheduler == "none",
            "search.scheduler",
            self.scheduler,
            "none, of several objectives",
        )
        require(self.trials >= 1, "search.trials", self.trials, "1 or more")
        require_at_most(self, "search.", trials=MANY, rungs=20, reduction=1000)
        require(self.rungs >= 1, "search.rungs", self.rungs, "1 or more")
        require(self.scheduler == "none" or self.rungs > 1, "search.rungs", self.rungs, "2 or more with asha")
        require(self.reduction >= 2, "search.reduction", self.reduction, "2 or more")
        require(self.parallel >= 0, "search.parallel", self.parallel, "0 (as many as fit) or more")
        require(self.max_failures >= 0, "search.max_failures", self.max_failures, "0 or more")
        require(0 <= self.seed < 2**32, "search.seed", self.seed, "from 0 to below 2^32")

    @property
    def objective_names(self) -> tuple[str, ...]:
        """The objectives; the first one is the leaderboard's."""
        return tuple(each.strip() for each in self.objectives.split(","))


@dataclass(frozen=True)
class SweepConfig(PretrainConfig):
    """Search a space for downstream F1: a trial pre-trains, fine-tunes and is scored on dev; test is never read.

    All options of a training job hold for every trial, unless the space has them.
    """

    tasks: str = "code_entities"  # task, or several by commas, whose mean is F1: families, described sets, YAML files
    data: str = ""  # folders (or hub names) of the tasks' sets, by commas; empty: code_entities, which ships
    space: dict[str, Any] = whole(dict)  # option -> choice, int or float; see the presets sweeps/…
    budget: BudgetConfig = whole(lambda: BudgetConfig(steps=300))
    search: SearchConfig = whole(SearchConfig, by="file")
    finetune: FinetuneConfig = field(default_factory=FinetuneConfig)
    score_base: bool = free(True)  # also fine-tune and score the base without pre-training
    mlflow: bool = free(False)  # also log to MLflow, RUN/mlflow.db; needs pip install mlflow

    def __post_init__(self) -> None:
        super().__post_init__()
        check_place("run.dir", self.run.dir)
        require(bool(self.space), "space", self.space, "a space: options with their values, such as those shipped")
        for name in ("axis", "curves"):
            value = getattr(self.search, name)
            require(value in ("", *self.space), f"search.{name}", value, "a dimension of the space, or empty")
        require(self.scale.num_workers == 1, "scale.num_workers", self.scale.num_workers, "1: a trial is one process")
        for name in ("max_steps", "epochs", "max_tokens", "max_seconds"):
            value = getattr(self.train, name)
            require(value == getattr(TrainConfig, name), f"train.{name}", value, "left out: --budget rules")
        for name in ("decay_steps", "warmup_steps"):
            value = getattr(self.optim, name)
            require(value == getattr(OptimConfig, name), f"optim.{name}", value, "left out: --budget rules")
        require(not self.train.long_seq_length, "train.long_seq_length", self.train.long_seq_length, "0 here")
        for name in ("task", "data", "model", "model_step", "keep_head", "run", "scale"):
            value = getattr(self.finetune, name)
            default = getattr(FinetuneConfig(), name)
            require(value == default, f"finetune.{name}", value, "left out: the sweep decides it")
        for place in self.places:
            check_place("data", place, "hub names, or folders")
        require(
            not self.data or len(self.places) == len(self.task_names),
            "data",
            self.data,
            f"as many as --tasks ({len(self.task_names)})",
        )
        pairs = list(zip(self.task_names, self.places, strict=True))
        require(len(set(pairs)) == len(pairs), "tasks", self.tasks, "different tasks, or of different --data")

    @property
    def task_names(self) -> tuple[str, ...]:
        """The tasks."""
        return tuple(each.strip() for each in self.tasks.split(","))

    @property
    def set_names(self) -> tuple[str, ...]:
        """What the tasks' sets are called: by their tasks, and where a task has several by their place too."""
        names = self.task_names
        return tuple(
            task if names.count(task) == 1 else f"{task} {place}"
            for task, place in zip(names, self.places, strict=True)
        )

    @property
    def places(self) -> tuple[str, ...]:
        """Where their sets are."""
        return tuple(each.strip() for each in self.data.split(",")) if self.data else ("",) * len(self.task_names)

    @property
    def common(self) -> PretrainConfig:
        """What every trial pre-trains with."""
        return PretrainConfig(**{each.name: getattr(self, each.name) for each in fields(PretrainConfig)})
