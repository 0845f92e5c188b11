"""Texts and pairs of texts -> one class each."""

from __future__ import annotations

from typing import Any

from domext_ray.families.comparison import Compared, compare_classes, join_pair
from domext_ray.families.family import CLASS_METRICS, TEXTS, Prediction
from domext_ray.families.readers.examples import LabelledText
from domext_ray.families.readers.issues import SetRow
from domext_ray.families.state import NOTHING_LEARNED, State
from domext_ray.families.texts import SingleLabelTask, TextRows, read_texts


class ClassificationTask(SingleLabelTask, TextRows):
    """A class of every text or pair (`LabelledText`); see `SingleLabelTask`."""

    family = "classification"
    readers = {"records": ("text", "label")}
    columns = {**TEXTS, "label": ("label", "accept")}
    annotated = "label"
    metrics = CLASS_METRICS
    head = "DomextForSequenceClassification"
    metric = "accuracy"

    @classmethod
    def read(cls, row: SetRow) -> LabelledText:
        return LabelledText("", row.source, *read_texts(row), row.read_label() if row.is_labelled else "")

    @classmethod
    def adopt(cls, labels: tuple[str, ...], problem_type: str | None) -> dict[str, Any] | None:
        return {"labels": labels} if problem_type in (None, "single_label_classification") else None

    @classmethod
    def compare(cls, example: LabelledText, prediction: Prediction, state: State = NOTHING_LEARNED) -> Compared:
        return compare_classes(example, join_pair(example.text, example.pair), example.label, prediction["label"])
