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

from domext_ray.downstream.tasks import state as rules
from domext_ray.downstream.tasks.families import make_task
from domext_ray.downstream.tasks.normalization import Embed
from domext_ray.downstream.tasks.state import State, check_state
from domext_ray.downstream.tasks.task import StagedTask, TaskOptions
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
        state: what the family found out from its set; see `StagedTask.state_dict`.
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
    state: State = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the values as JSON has them."""
        return {**asdict(self), "labels": list(self.labels), "catalogue": list(self.catalogue)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> TaskDescription:
        """Read what `to_json` gave.

        Raises:
            ValueError: a value is missing, or of another kind.
        """
        check_state(values, _RULES)
        check_state(values["options"], _OPTIONS)
        check_state(values["thresholds"], dict.fromkeys(values["thresholds"], rules.OBJECT))
        for each in values["thresholds"].values():
            check_state(each, dict.fromkeys(each, rules.NUMBER))
        metric, labels = values["metric"], values["labels"]
        known = FAMILIES[values["family"]].metrics
        if not any(fnmatch.fnmatchcase(metric, each) for each in known):
            raise ValueError(f"metric is {metric!r}; it must be one of {', '.join(known)}")
        for each in (values["negative_label"], values["positive_label"]):
            if each not in (None, *labels):
                raise ValueError(f"{each!r} is none of its labels")
        own = {"labels": tuple(labels), "catalogue": tuple(values["catalogue"])}
        return cls(**{**values, **own, "options": TaskOptions(**values["options"])})


_RULES: Mapping[str, rules.Rule] = {
    "family": (f"one of {', '.join(FAMILIES)}", lambda value: value in list(FAMILIES)),
    **dict.fromkeys(("set_name", "metric"), rules.TEXT),
    **dict.fromkeys(("labels", "catalogue"), rules.TEXTS),
    **dict.fromkeys(("negative_label", "positive_label"), rules.OPTIONAL_TEXT),
    **dict.fromkeys(("options", "thresholds", "state"), rules.OBJECT),
}
_OPTIONS: Mapping[str, rules.Rule] = {"max_length": rules.COUNT, "stride": rules.WHOLE, "context": rules.BOOL}


def describe_task(task: StagedTask) -> TaskDescription:
    """Describe a task with the thresholds that it has now; one made from a description gives that again."""
    data = task.data
    return TaskDescription(
        task.family,
        data.name,
        data.labels,
        task.metric,
        task.options,
        data.negative_label,
        data.positive_label,
        tuple(dict.fromkeys(data.catalogue)),
        {name: dict(each.thresholds) for name, each in _list_parts(task).items() if each.thresholds},
        task.state_dict(),
    )


def _list_parts(task: StagedTask) -> dict[str, StagedTask]:
    return {**({WHOLE_TASK: task} if task.is_chain else {}), **task.stages}


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
    labels: dict[str, Any] = {each: getattr(own, each) for each in ("labels", "negative_label", "positive_label")}
    data = LabelledSet(own.set_name, (), (), (), catalogue=own.catalogue, **labels)
    try:
        task = make_task(own.family, data, tokenizer, own.options, own.metric, embed, own.state)
        parts = _list_parts(task)
        expected = {name: sorted(each.thresholds) for name, each in parts.items() if each.thresholds}
        if expected != {name: sorted(each) for name, each in own.thresholds.items()}:
            raise ValueError(f"thresholds is {dict(own.thresholds)!r}; it must have {expected or 'none'}")
        for name, each in own.thresholds.items():
            parts[name].set_thresholds(each)
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, DomextError):
            raise
        raise RunError(f"the description of the task {own.set_name!r} is damaged: {error}; export it again.") from error
    return task
