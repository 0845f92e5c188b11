"""The task families by name -> the tasks of a labelled set."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from domext_ray.downstream.tasks.choices import ChoiceTask
from domext_ray.downstream.tasks.extraction import ExtractionTask
from domext_ray.downstream.tasks.learned import Learned
from domext_ray.downstream.tasks.multilabel import MultiLabelTask
from domext_ray.downstream.tasks.normalization import Embed, NormalizationTask, RecallOptions
from domext_ray.downstream.tasks.questions import QuestionTask
from domext_ray.downstream.tasks.relations import RelationTask
from domext_ray.downstream.tasks.spans import SpanTask
from domext_ray.downstream.tasks.stages import Predict, Records, StagedTask
from domext_ray.downstream.tasks.task import Task, TaskOptions
from domext_ray.downstream.tasks.texts import ClassificationTask, RegressionTask
from domext_ray.downstream.tasks.tokens import TokenClassificationTask
from domext_ray.labelled.examples import AnyExample, LabelledSet
from domext_ray.labelled.metrics.scores import Score

ONLY_STAGE = "model"
"""Name of the stage of a task that has one model."""

SINGLE: dict[str, Callable[..., Task]] = {
    "ner": TokenClassificationTask,
    "nested_ner": SpanTask,
    "relation": RelationTask,
    "classification": ClassificationTask,
    "multilabel": MultiLabelTask,
    "regression": RegressionTask,
    "qa": QuestionTask,
    "multiple_choice": ChoiceTask,
}
STAGED: dict[str, Callable[..., StagedTask]] = {
    "relation_extraction": ExtractionTask,
    "normalization": NormalizationTask,
}


class SingleTask(StagedTask):
    """A task of one model, seen as a chain of one stage."""

    def __init__(self, task: Task) -> None:
        super().__init__(task.data, task.metric)
        self.task = task

    @property
    def stages(self) -> dict[str, Task]:
        """The task itself."""
        return {ONLY_STAGE: self.task}

    def run_steps(self, predictors: Mapping[str, Predict], examples: Sequence[AnyExample]) -> Any:
        """Predict; the task's own thresholds were tuned when it was trained."""
        return predictors[ONLY_STAGE](examples)

    def decode(self, examples: Sequence[AnyExample], steps: Any) -> list[Any]:
        """Return the predictions."""
        return list(steps)

    @property
    def learned(self) -> dict[str, Any]:
        """What the task found out."""
        return self.task.learned

    def to_records(self, examples: Sequence[AnyExample], steps: Any, stages: Mapping[str, Records]) -> Records:
        """Return the task's own records."""
        return stages[ONLY_STAGE]

    def score(self, examples: Sequence[AnyExample], predictions: Sequence[Any]) -> Score:
        """Score predictions as the task does."""
        return self.task.score(examples, predictions)

    def score_steps(self, examples: Sequence[AnyExample], steps: Any) -> dict[str, Score]:
        """There is one step, which is the whole."""
        return {}

    def predict_baselines(self, examples: Sequence[AnyExample]) -> dict[str, list[Any]]:
        """Return the task's trivial baseline."""
        return {"majority": self.task.predict_majority(examples)}


def make_task(
    family: str,
    data: LabelledSet,
    tokenizer: PreTrainedTokenizerBase,
    options: TaskOptions,
    metric: str = "",
    embed: Embed | None = None,
    learned: Learned | None = None,
) -> StagedTask:
    """Make the task of a labelled set.

    Args:
        family: a name of `SINGLE` or `STAGED`.
        data: the set.
        tokenizer: the model's tokenizer.
        options: how examples become rows.
        metric: path of the figure that dev chooses by; empty: the family's.
        embed: makes the embeddings by which normalisation recalls terms, besides n-grams; None: n-grams only.
        learned: what an earlier task found out from the set, instead of examples; None: it is found out from `data`.

    Raises:
        ConfigError: there is no figure `metric`, or a rule of the family's is broken.
        ValueError: `learned` is not what such a task finds out.
    """
    if embed is not None and family == "normalization":
        recall = RecallOptions(embed=embed)
        return NormalizationTask(data, tokenizer, options, metric=metric, recall_options=recall, learned=learned)
    if family in STAGED:
        return STAGED[family](data, tokenizer, options, metric=metric, learned=learned)
    return SingleTask(SINGLE[family](data, tokenizer, options, metric=metric, learned=learned))
