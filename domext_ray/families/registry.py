"""The task families by name -> the task of a labelled set."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from domext_ray.families.choices import ChoiceTask
from domext_ray.families.multilabel import MultiLabelTask
from domext_ray.families.nested import SpanTask
from domext_ray.families.normalization import Embed, NormalizationTask, RecallOptions
from domext_ray.families.questions import QuestionTask
from domext_ray.families.readers.examples import LabelledSet
from domext_ray.families.relations import RelationTask
from domext_ray.families.state import State
from domext_ray.families.tagging import TokenClassificationTask
from domext_ray.families.task import StagedTask, TaskOptions
from domext_ray.families.texts import ClassificationTask, RegressionTask
from domext_ray.families.triples import ExtractionTask

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FAMILIES: Mapping[str, type[StagedTask]] = {
    task.family: task
    for task in (
        *(TokenClassificationTask, SpanTask, RelationTask, ExtractionTask, ClassificationTask),
        *(MultiLabelTask, RegressionTask, QuestionTask, ChoiceTask, NormalizationTask),
    )
}


def make_task(
    family: str,
    data: LabelledSet,
    tokenizer: PreTrainedTokenizerBase,
    options: TaskOptions,
    metric: str = "",
    embed: Embed | None = None,
    state: State | None = None,
) -> StagedTask:
    """Make the task of a labelled set; see `StagedTask`. With `embed` normalisation recalls by embeddings, too."""
    recall: dict[str, Any] = {}
    if embed is not None and family == NormalizationTask.family:
        recall["recall_options"] = RecallOptions(embed=embed)
    return FAMILIES[family](data, tokenizer, options, metric=metric, state=state, **recall)
