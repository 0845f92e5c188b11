"""The families by name: whoever is given a name of one asks here."""

from __future__ import annotations

from collections.abc import Mapping

from domext_ray.families.choices import ChoiceTask
from domext_ray.families.classification import ClassificationTask
from domext_ray.families.multilabel import MultiLabelTask
from domext_ray.families.nested import SpanTask
from domext_ray.families.normalization import NormalizationTask
from domext_ray.families.questions import QuestionTask
from domext_ray.families.regression import RegressionTask
from domext_ray.families.relations import RelationTask
from domext_ray.families.tagging import TokenClassificationTask
from domext_ray.families.task import StagedTask
from domext_ray.families.triples import ExtractionTask

FAMILIES: Mapping[str, type[StagedTask]] = {
    task.family: task
    for task in (
        *(TokenClassificationTask, SpanTask, RelationTask, ExtractionTask, ClassificationTask),
        *(MultiLabelTask, RegressionTask, QuestionTask, ChoiceTask, NormalizationTask),
    )
}
