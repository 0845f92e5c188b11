"""Tasks of two steps: stages that are trained one by one -> one prediction.

Enters: a task made of named stages, each a `Task` with a labelled set of its own, and what predicts for each of them.
Leaves: scores and predictions of the whole chain and of its steps. Relation extraction (entities, then the relation of
each pair) and term normalisation (recall, then ranking) are built so, as in the AF Adapter's evaluation on CBLUE. No
stage learns from another's predictions: all of them train on labels, so that their order does not matter.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from domext_ray.downstream.tasks.task import Task, TaskOptions
from domext_ray.errors import ConfigError
from domext_ray.labelled.examples import AnyExample, LabelledSet
from domext_ray.labelled.metrics.scores import Score

Predict: TypeAlias = Callable[[Sequence[Any]], list[Any]]
"""Examples of a stage -> what `Task.decode` says of each."""
Records: TypeAlias = list[dict[str, Any]]
"""What `Task.to_records` says of each example."""


class StagedTask(ABC):
    """A task whose answer takes several models, or a model and a search.

    Args:
        data: the set.
        metric: path of the figure that dev chooses by.
    """

    def __init__(self, data: LabelledSet, metric: str) -> None:
        self.data, self.metric = data, metric
        self.notes: list[str] = []
        self.cases: Counter[str] = Counter()

    @property
    def options(self) -> TaskOptions:
        """How examples become rows, in every stage."""
        return next(iter(self.stages.values())).options

    @property
    def learned(self) -> dict[str, Any]:
        """What the task found out from its set beside labels and options, as JSON has it; see `Task.learned`."""
        return {}

    @property
    @abstractmethod
    def stages(self) -> dict[str, Task]:
        """What has to be trained, by name."""

    @abstractmethod
    def run_steps(self, predictors: Mapping[str, Predict], examples: Sequence[AnyExample]) -> Any:
        """Run all steps on examples and return what each found, for `decode`, `tune` and `score_steps`.

        Args:
            predictors: for each name in `stages` what predicts with its trained model.
            examples: of one split of `data`.
        """

    @abstractmethod
    def decode(self, examples: Sequence[AnyExample], steps: Any) -> list[Any]:
        """Return one prediction an example from what the steps found."""

    @abstractmethod
    def to_records(self, examples: Sequence[AnyExample], steps: Any, stages: Mapping[str, Records]) -> Records:
        """Return for each example the prediction as a user reads it; see `Task.to_records`.

        Args:
            examples: those that the steps were run on.
            steps: what `run_steps` found.
            stages: by stage the records of what `run_steps` asked it about; none where it asked nothing.
        """

    @abstractmethod
    def score(self, examples: Sequence[AnyExample], predictions: Sequence[Any]) -> Score:
        """Score predictions against the examples' labels."""

    @abstractmethod
    def score_steps(self, examples: Sequence[AnyExample], steps: Any) -> dict[str, Score]:
        """Score what single steps found: where the chain loses."""

    @abstractmethod
    def predict_baselines(self, examples: Sequence[AnyExample]) -> dict[str, list[Any]]:
        """Return the predictions of trivial baselines, "majority" among them, by name."""

    def predict_majority(self, examples: Sequence[AnyExample]) -> list[Any]:
        """Return the predictions of the trivial baseline."""
        return self.predict_baselines(examples)["majority"]

    def tune(self, examples: Sequence[AnyExample], steps: Any) -> dict[str, float]:
        """Choose thresholds on dev and keep them; return them by name. Default: none."""
        return {}

    @property
    def thresholds(self) -> dict[str, float]:
        """What `tune` has chosen for the whole task, and `apply` takes over; stages have their own. Default: none."""
        return {}

    def apply(self, thresholds: dict[str, float]) -> None:
        """Take over thresholds that `tune` returned earlier; a task without any takes none."""
        assert not thresholds, thresholds


def choose_metric(metric: str, metrics: Sequence[str], data: LabelledSet) -> str:
    """Return the figure to choose by, the first if none is named.

    Raises:
        ConfigError: there is no such figure.
    """
    if metric and metric not in metrics:
        raise ConfigError(f"the metric of {data.name} is {metric!r}; its figures are {', '.join(metrics)}.")
    return metric or metrics[0]


@dataclass(frozen=True)
class StagedResult:
    """What a chain of trained stages reached, by split.

    Args:
        scores: of the whole chain.
        predictions: one an example.
        steps: scores of single steps, by name.
        thresholds: what was tuned on dev.
        notes: what was counted on the way.
    """

    scores: dict[str, Score]
    predictions: dict[str, list[Any]]
    steps: dict[str, dict[str, Score]]
    thresholds: dict[str, float]
    notes: tuple[str, ...]


def evaluate_stages(
    task: StagedTask,
    predictors: Mapping[str, Predict],
    *,
    splits: Sequence[str] = ("dev", "test"),
    thresholds: dict[str, float] | None = None,
) -> StagedResult:
    """Score a chain of trained stages, tuned on dev.

    Args:
        task: the task; its thresholds are set.
        predictors: for each stage what predicts with its trained model.
        splits: what to score; an empty split is left out.
        thresholds: what was tuned on dev before; None: dev is run in any case, to tune now.
    """
    dev_steps = None
    if thresholds is None:
        dev_steps = task.run_steps(predictors, task.data.dev)
        thresholds = task.tune(task.data.dev, dev_steps)
    else:
        task.apply(thresholds)
    result = StagedResult({}, {}, {}, thresholds, ())
    for split in splits:
        examples = getattr(task.data, split)
        if not examples:
            continue
        has_steps = split == "dev" and dev_steps is not None
        steps = dev_steps if has_steps else task.run_steps(predictors, examples)
        predictions = task.decode(examples, steps)
        result.predictions[split] = predictions
        result.scores[split] = task.score(examples, predictions)
        result.steps[split] = task.score_steps(examples, steps)
    notes = [*task.notes, *(f"{name}: {note}" for name, stage in task.stages.items() for note in stage.notes)]
    return StagedResult(result.scores, result.predictions, result.steps, thresholds, tuple(dict.fromkeys(notes)))


def score_baselines(task: StagedTask, split: str) -> dict[str, Score]:
    """Return what trivial baselines score on a split, by their names."""
    examples = getattr(task.data, split)
    return {name: task.score(examples, each) for name, each in task.predict_baselines(examples).items()}
