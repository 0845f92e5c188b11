"""What it takes to use a task's trained model without its labelled set: a few values of JSON beside the tensors.

Enters: a task that has learned from its set. Leaves: a `TaskDescription`, and from it the task again, which encodes,
decodes and scores as the first one does. It has no examples, so that it cannot train or make a baseline.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from domext_ray.config.shared import LongTextsChoice
from domext_ray.errors import DomextError, RunError
from domext_ray.families import state as rules
from domext_ray.families.readers.examples import LabelledSet
from domext_ray.families.registry import FAMILIES
from domext_ray.families.state import State, check_state
from domext_ray.families.task import Embed, StagedTask, TaskOptions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WHOLE_TASK = "task"
"""Where a description has the thresholds that are no stage's."""


@dataclass(frozen=True)
class TaskDescription:
    """A task without its labelled set; the fields of a set are as in `LabelledSet`."""

    family: str
    set_name: str
    labels: tuple[str, ...]  # in the head's order
    metric: str  # path of the figure that dev chose by
    options: TaskOptions
    negative_label: str | None = None
    positive_label: str | None = None
    catalogue: tuple[str, ...] = ()
    thresholds: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # by stage and name, see `WHOLE_TASK`
    state: State = field(default_factory=dict)  # of `StagedTask.state_dict`

    def to_json(self) -> dict[str, Any]:
        """Return the values as JSON has them."""
        values = {**asdict(self), "labels": list(self.labels), "catalogue": list(self.catalogue)}
        if self.options.long_texts == TaskOptions.long_texts:
            del values["options"]["long_texts"]  # as in files of 0.1.0, which cut all that is too long
        return values

    def read_long_texts(self, how: LongTextsChoice) -> TaskDescription:
        """Return the task with other `TaskOptions.long_texts`; "auto": as it was trained."""
        FAMILIES[self.family].check_long_texts("long_texts", how)
        return self if how == "auto" else replace(self, options=replace(self.options, long_texts=how))

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> TaskDescription:
        """Read what `to_json` gave; a ValueError says which value is missing or of another kind."""
        check_state(values, _RULES)
        check_state({"long_texts": TaskOptions.long_texts, **values["options"]}, _OPTIONS)
        check_state(values["thresholds"], dict.fromkeys(values["thresholds"], rules.OBJECT))
        for value in values["thresholds"].values():
            check_state(value, dict.fromkeys(value, rules.NUMBER))
        metric, labels = values["metric"], values["labels"]
        known = FAMILIES[values["family"]].metrics
        if not any(fnmatch.fnmatchcase(metric, pattern) for pattern in known):
            raise ValueError(f"metric is {metric!r}; it must be one of {', '.join(known)}")
        for value in (values["negative_label"], values["positive_label"]):
            if value not in (None, *labels):
                raise ValueError(f"{value!r} is none of its labels")
        own = {"labels": tuple(labels), "catalogue": tuple(values["catalogue"])}
        return cls(**{**values, **own, "options": TaskOptions(**values["options"])})


_RULES: Mapping[str, rules.Rule] = {
    "family": (f"one of {', '.join(FAMILIES)}", lambda value: value in list(FAMILIES)),
    **dict.fromkeys(("set_name", "metric"), rules.TEXT),
    **dict.fromkeys(("labels", "catalogue"), rules.TEXTS),
    **dict.fromkeys(("negative_label", "positive_label"), rules.OPTIONAL_TEXT),
    **dict.fromkeys(("options", "thresholds", "state"), rules.OBJECT),
}
_OPTIONS: Mapping[str, rules.Rule] = {
    **{"max_length": rules.COUNT, "stride": rules.WHOLE, "context": rules.BOOL},
    "long_texts": ("cut or windows", lambda value: value in ("cut", "windows")),
}


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
        data.catalogue,
        {name: dict(part.thresholds) for name, part in _list_parts(task).items() if part.thresholds},
        task.state_dict(),
    )


def _list_parts(task: StagedTask) -> dict[str, StagedTask]:
    return {**({WHOLE_TASK: task} if task.is_chain else {}), **task.stages}


def make_described_task(
    description: TaskDescription, tokenizer: PreTrainedTokenizerBase, embed: Embed | None = None
) -> StagedTask:
    """Make the task of a description, with its thresholds; `embed` is for normalisation that recalled by embeddings."""
    own = description
    labels: dict[str, Any] = {key: getattr(own, key) for key in ("labels", "negative_label", "positive_label")}
    data = LabelledSet(own.set_name, (), (), (), catalogue=own.catalogue, **labels)
    try:
        task = FAMILIES[own.family](data, tokenizer, own.options, metric=own.metric, embed=embed, state=own.state)
        parts = _list_parts(task)
        expected = {name: sorted(part.thresholds) for name, part in parts.items() if part.thresholds}
        if expected != {name: sorted(values) for name, values in own.thresholds.items()}:
            raise ValueError(f"thresholds is {dict(own.thresholds)!r}; it must have {expected or 'none'}")
        for name, thresholds in own.thresholds.items():
            parts[name].set_thresholds(thresholds)
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, DomextError):
            raise
        raise RunError(f"the description of the task {own.set_name!r} is damaged: {error}; export it again.") from error
    return task
