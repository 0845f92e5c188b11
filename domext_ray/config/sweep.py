"""The configuration of a sweep: a training job's options, a space over them, fine-tuning, and how to search.

Nothing here reads a file; `presets.configure` makes it from YAML and flags.
"""

from __future__ import annotations

from dataclasses import field, fields
from typing import Annotated, Any, Literal, cast

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PlainValidator

from domext_ray.config.finetune import ALL, FinetuneConfig, SetPlaces, SeveralSets
from domext_ray.config.options.declare import (
    DIFFERENT,
    SOME,
    Count,
    Described,
    Main,
    Options,
    free,
    later,
    option_group,
    require,
    require_disk,
    whole,
)
from domext_ray.config.pretrain import REPAIR_NOTES, Corpus, OptimConfig, PretrainConfig, TrainConfig

Aim = Literal["f1", "general_accuracy", "trainable", "tokens_per_second"]
OBJECTIVES: dict[str, str] = {
    "f1": "max",
    "general_accuracy": "max",
    "trainable": "min",
    "tokens_per_second": "max",
}
"""What a sweep may search for, and which way is better."""


@option_group
class BudgetConfig:
    """The pre-training of a whole trial; give one of the three."""

    steps: Main[NonNegativeInt] = 0  # optimiser steps
    tokens: Main[NonNegativeInt] = 0  # tokens read
    seconds: Main[NonNegativeFloat] = 0.0  # seconds of training; a few timed steps decide how many steps fit

    def __post_init__(self) -> None:
        given = [name for name in ("steps", "tokens", "seconds") if getattr(self, name)]
        rule = "above 0, or give --budget.tokens or --budget.seconds"
        require(bool(given), "steps", self.steps, rule)
        require(len(given) == 1, given[-1], getattr(self, given[-1]), f"0 beside --budget.{given[0]}")


@option_group
class SearchConfig:
    """How a space is searched.

    A trial is scored at every rung: at its whole budget, and with --search.rungs 3 and --search.reduction 4 also at a
    sixteenth and a quarter of it. ASHA stops trials that are not among the best quarter of a rung so far.
    """

    searcher: Main[Literal["random", "grid", "optuna"]] = "random"  # optuna: TPE, or NSGA-II for several objectives
    scheduler: Main[Literal["none", "asha"]] = "none"  # asha: bad trials stop early
    # aims: f1, general_accuracy, trainable, tokens_per_second
    objectives: Main[Annotated[tuple[Aim, ...], SOME, DIFFERENT]] = ("f1",)
    trials: Main[Count] = 20  # trials; in a grid, every point is one
    rungs: Annotated[int, Field(ge=1, le=20)] = 1  # how often a trial is scored
    # ratio of each rung's budget to that of the rung before; asha keeps one trial in this many
    reduction: Annotated[int, Field(ge=2, le=1000)] = 3
    parallel: NonNegativeInt = free(0)  # trials at once; 0: as many as the cluster has room for
    max_failures: NonNegativeInt = free(2)  # deaths of a trial's process after which the sweep gives it up
    axis: str = free("")  # dimension along which F1 is drawn; empty: trained parameters
    curves: str = free("")  # dimension with a curve per value in that drawing
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0  # seed of the search; that of a trial is --seed

    @property
    def shares(self) -> list[float]:
        """Share of a trial's budget at each rung, rising to 1."""
        return [float(self.reduction) ** (rung + 1 - self.rungs) for rung in range(self.rungs)]

    def __post_init__(self) -> None:
        is_one = len(self.objectives) == 1 or self.scheduler == "none"
        require(is_one, "scheduler", self.scheduler, "none, of several objectives")
        require(self.scheduler == "none" or self.rungs > 1, "rungs", self.rungs, "2 or more with asha")


def _check_number(value: Any) -> int | str:
    """Return a number of labels, or `ALL`."""
    if value != ALL and (type(value) is not int or value < 1):
        raise ValueError(f"one number of labels, such as 300, or {ALL}, for a sweep ranks its trials by one score")
    return cast("int | str", value)


@option_group
class SweepConfig(SeveralSets, PretrainConfig):
    """Search a space for downstream F1: a trial pre-trains, fine-tunes and is scored on dev; test is never read.

    All options of a training job apply to every trial, unless the space has them.
    """

    # repair-notes, package-docs, or comma-separated files, globs, folders, s3:// addresses, hf://NAME:CONFIG@REVISION
    corpus: Main[Corpus] = REPAIR_NOTES
    # labelled sets, whose mean F1 counts: families, described sets, YAML files
    tasks: Main[Described[Annotated[tuple[str, ...], SOME]]] = ("repair_notes",)
    # folders (or hub names) of the tasks' sets; empty: repair_notes, which ships
    data: Main[SetPlaces] = ()
    # number of labels of each set for fine-tuning trials and base, such as 300; all: those that there are
    labels: Annotated[int | str, PlainValidator(_check_number)] = later(ALL)
    space: Main[Options[dict[str, Any]]] = whole(dict)  # option -> choice, int or float; see the presets sweeps/…
    budget: BudgetConfig = whole(lambda: BudgetConfig(steps=300))
    search: SearchConfig = whole(SearchConfig, by="file")
    finetune: FinetuneConfig = field(default_factory=FinetuneConfig)
    score_base: bool = free(True)  # also fine-tune and score the base without pre-training

    def __post_init__(self) -> None:
        super().__post_init__()
        require_disk("run.dir", self.run.dir)
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
        self.check_sets("the sweep", ("scale",))
        is_shipped = self.tasks == ("repair_notes",)
        needed = f"{REPAIR_NOTES}, or --tasks and --data yours" if is_shipped else "a text of the field of --tasks"
        require(is_shipped == (self.corpus == REPAIR_NOTES), "corpus", self.corpus, needed)

    @property
    def set_names(self) -> tuple[str, ...]:
        """What the tasks' sets are called: by their tasks, and where a task has several by their place too."""
        names = self.tasks
        return tuple(
            task if names.count(task) == 1 else f"{task} {place}"
            for task, place in zip(names, self.places, strict=True)
        )

    @property
    def common(self) -> PretrainConfig:
        """What every trial pre-trains with."""
        return PretrainConfig(**{option.name: getattr(self, option.name) for option in fields(PretrainConfig)})
