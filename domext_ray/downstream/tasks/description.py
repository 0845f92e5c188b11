"""What it takes to use a task's trained model without its labelled set: a few values of JSON beside the tensors.

Enters: a task that has learned from its set. Leaves: a `TaskDescription`, and from it the task again, which encodes,
decodes and scores as the first one does. It has no examples, so that it cannot train or make a baseline.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from domext_ray.downstream.tasks.families import SINGLE, STAGED, SingleTask, make_task
from domext_ray.downstream.tasks.learned import (
    check_learned,
    read_bool,
    read_number,
    read_optional_text,
    read_text,
    read_texts,
    read_whole,
)
from domext_ray.downstream.tasks.normalization import Embed
from domext_ray.downstream.tasks.stages import StagedTask
from domext_ray.downstream.tasks.task import TaskOptions
from domext_ray.errors import DomextError, RunError
from domext_ray.labelled.examples import LabelledSet
from domext_ray.labelled.set_families import FAMILIES

WHOLE_TASK = "task"
"""Where a description has the thresholds that are no stage's."""


@dataclass(frozen=True)
class TaskDescription:
    """A task without its labelled set.

    Args:
        family: a key of `FAMILIES`.
        set_name: what its set is called.
        labels: classes, entity types or predicates, in the head's order; none where the family has none.
        metric: path of the figure that dev chose by.
        options: how examples become rows.
        negative_label: the relation that is none.
        positive_label: the class whose F1 is "f1.positive".
        catalogue: standard terms (normalisation only).
        thresholds: what was tuned on dev, by stage and name; `WHOLE_TASK` has those of no stage.
        learned: what the family found out from its set; see `Task.learned`.
    """

    family: str
    set_name: str
    labels: tuple[str, ...]
    metric: str
    options: TaskOptions
    negative_label: str | None = None
    positive_label: str | None = None
    catalogue: tuple[str, ...] = ()
    thresholds: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    learned: Mapping[str, Any] = field(default_factory=dict)

    @property
    def marks(self) -> tuple[tuple[str, ...], ...]:
        """Marks of the two arguments in the set's files (relation only); empty: the set had none."""
        return tuple(map(tuple, self.learned.get("marks", ())))

    def to_json(self) -> dict[str, Any]:
        """Return the values as JSON has them."""
        return {
            "family": self.family,
            "set": self.set_name,
            "labels": list(self.labels),
            "negative_label": self.negative_label,
            "positive_label": self.positive_label,
            "metric": self.metric,
            "options": asdict(self.options),
            "thresholds": {stage: dict(each) for stage, each in self.thresholds.items()},
            "learned": dict(self.learned),
            "catalogue": list(self.catalogue),
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> TaskDescription:
        """Read what `to_json` gave.

        Raises:
            ValueError: a value is missing, or of another kind.
        """
        missing = _NAMES - values.keys()
        if missing:
            raise ValueError(f"it has no {min(missing)}")
        family, metric = read_text(values, "family"), read_text(values, "metric")
        if family not in FAMILIES:
            raise ValueError(f"family is {family!r}; it must be one of {', '.join(FAMILIES)}")
        if not any(fnmatch.fnmatchcase(metric, each) for each in FAMILIES[family].metrics):
            raise ValueError(f"metric is {metric!r}; it must be one of {', '.join(FAMILIES[family].metrics)}")
        labels, negative = read_texts(values, "labels"), read_optional_text(values, "negative_label")
        positive = read_optional_text(values, "positive_label")
        strange = [each for each in (negative, positive) if each is not None and each not in labels]
        if strange:
            raise ValueError(f"{strange[0]!r} is none of its labels")
        return cls(
            family,
            read_text(values, "set"),
            labels,
            metric,
            _read_options(values["options"]),
            negative,
            positive,
            read_texts(values, "catalogue"),
            _read_thresholds(values["thresholds"]),
            _expect_mapping(values, "learned"),
        )


_NAMES = {
    *("family", "set", "labels", "negative_label", "positive_label", "metric", "options", "thresholds", "learned"),
    "catalogue",
}


def _expect_mapping(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = values[name]
    if not isinstance(found, dict):
        raise ValueError(f"{name} is {str(found)[:60]!r}; it must be a JSON object")
    return found


def _read_options(values: Any) -> TaskOptions:
    options = _expect_mapping({"options": values}, "options")
    check_learned(options, "max_length", "stride", "context")
    return TaskOptions(
        read_whole(options, "max_length", 1), read_whole(options, "stride"), read_bool(options, "context")
    )


def _read_thresholds(values: Any) -> dict[str, dict[str, float]]:
    stages = _expect_mapping({"thresholds": values}, "thresholds")
    return {
        stage: {name: read_number(_expect_mapping(stages, stage), name) for name in _expect_mapping(stages, stage)}
        for stage in stages
    }


def describe_task(task: StagedTask) -> TaskDescription:
    """Describe a task with the thresholds that it has now.

    Args:
        task: of any family; one that was made from a description gives that again.
    """
    data = task.data
    return TaskDescription(
        find_family(task),
        data.name,
        data.labels,
        task.metric,
        task.options,
        data.negative_label,
        data.positive_label,
        tuple(dict.fromkeys(data.catalogue)),
        _list_thresholds(task),
        task.learned,
    )


def find_family(task: StagedTask) -> str:
    """Return the name of a task's family."""
    kinds: Mapping[str, Any] = SINGLE if isinstance(task, SingleTask) else STAGED
    own = type(task.task) if isinstance(task, SingleTask) else type(task)
    return next(name for name, kind in kinds.items() if kind is own)


def _list_thresholds(task: StagedTask) -> dict[str, dict[str, float]]:
    found = {WHOLE_TASK: task.thresholds, **{name: stage.thresholds for name, stage in task.stages.items()}}
    return {name: each for name, each in found.items() if each}


def make_described_task(
    description: TaskDescription, tokenizer: PreTrainedTokenizerBase, embed: Embed | None = None
) -> StagedTask:
    """Make the task of a description, with its thresholds.

    Args:
        description: what `describe_task` gave.
        tokenizer: the model's.
        embed: makes the embeddings by which normalisation recalled terms, where it did.

    Raises:
        RunError: the description is of no such task.
    """
    own = description
    data = LabelledSet(
        own.set_name,
        (),
        (),
        (),
        own.labels,
        own.negative_label,
        own.catalogue,
        positive_label=own.positive_label,
    )
    try:
        task = make_task(own.family, data, tokenizer, own.options, own.metric, embed, own.learned)
        _apply_thresholds(task, own.thresholds)
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, DomextError):
            raise
        raise RunError(f"the description of the task {own.set_name!r} is damaged: {error}; export it again.") from error
    return task


def _apply_thresholds(task: StagedTask, thresholds: Mapping[str, Mapping[str, float]]) -> None:
    expected = {stage: sorted(each) for stage, each in _list_thresholds(task).items()}
    if expected != {stage: sorted(each) for stage, each in thresholds.items()}:
        raise ValueError(f"thresholds is {dict(thresholds)!r}; it must have {expected or 'none'}")
    for stage, each in thresholds.items():
        (task if stage == WHOLE_TASK else task.stages[stage]).apply(dict(each))
