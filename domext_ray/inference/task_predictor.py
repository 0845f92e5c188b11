"""A fine-tuned model as what predicts blocks of rows: its family's columns, labels, and predictions as JSON.

Enters: an `ExportedModel`. Leaves: for each example a record as a user reads it and, of a labelled set, the prediction
that is scored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from domext_ray.downstream.finetune.exported import ExportedModel
from domext_ray.downstream.tasks.description import TaskDescription
from domext_ray.downstream.tasks.task import Prediction
from domext_ray.errors import CorpusError
from domext_ray.inference.examples import make_example
from domext_ray.inference.input_rows import RowError
from domext_ray.labelled.examples import AnyExample

_PLACE = {"start": pa.int64(), "end": pa.int64(), "label": pa.string(), "text": pa.string()}
_ENTITIES = pa.list_(pa.struct({**_PLACE, "score": pa.float64()}))
_RELATION = {"head": pa.struct(_PLACE), "tail": pa.struct(_PLACE), "label": pa.string(), "score": pa.float64()}
_CANDIDATES = pa.list_(pa.struct({"term": pa.string(), "probability": pa.float64()}))
_COLUMNS: Mapping[str, Mapping[str, pa.DataType]] = {
    "ner": {"entities": _ENTITIES},
    "nested_ner": {"entities": _ENTITIES},
    "relation": {"label": pa.string()},
    "relation_extraction": {"entities": _ENTITIES, "relations": pa.list_(pa.struct(_RELATION))},
    "classification": {"label": pa.string()},
    "multilabel": {"labels": pa.list_(pa.string())},
    "regression": {"value": pa.float64()},
    "qa": {"answer": pa.string(), "start": pa.int64(), "end": pa.int64(), "score": pa.float64()},
    "multiple_choice": {"answer": pa.int64(), "text": pa.string(), "probabilities": pa.list_(pa.float64())},
    "normalization": {"terms": pa.list_(pa.string()), "candidates": _CANDIDATES},
}
"""What a record of each family has; "probabilities" by label come with the labels."""
_BY_LABEL = ("relation", "classification", "multilabel")
_LABELLED = ("relations", "entities", "labels", "terms", "label", "answer")
"""Fields of which a record's first one says what was found."""
_WORD = "the row"


def list_columns(description: TaskDescription) -> dict[str, pa.DataType]:
    """Return the type of each field of a task's records."""
    columns = dict(_COLUMNS[description.family])
    if description.family in _BY_LABEL:
        columns["probabilities"] = pa.struct({label: pa.float64() for label in description.labels})
    return columns


class TaskPredictor:
    """Predicts with a fine-tuned model.

    Args:
        model: the model.
    """

    def __init__(self, model: ExportedModel) -> None:
        self.model, self.family, self.marks = model, model.description.family, model.description.marks
        self.schema: Mapping[str, pa.DataType] = list_columns(model.description)

    def make_example(self, values: Mapping[str, Any], shown: str) -> AnyExample:
        """Make an example of a row's fields; see `inference.examples`.

        Raises:
            RowError: they are no example of the family.
        """
        try:
            return make_example(self.family, values, _WORD, marks=self.marks)
        except CorpusError as error:
            raise RowError(str(error).removeprefix(_WORD).strip(" :").removesuffix(".")) from error

    def predict(self, examples: Sequence[AnyExample]) -> list[dict[str, Any]]:
        """Return a record an example; see `StagedTask.show`."""
        return self.model.predict(examples).records

    def predict_labelled(self, examples: Sequence[AnyExample]) -> tuple[list[Prediction], list[Prediction]]:
        """Return a record an example, and the predictions that are scored."""
        found = self.model.predict(examples)
        return found.records, found.predictions

    def take_cases(self) -> dict[str, int]:
        """See `ExportedModel.take_cases`."""
        return self.model.take_cases()

    def count_labels(self, record: Mapping[str, Any]) -> list[str]:
        """Return the labels that a record has, each as often as it has it."""
        if self.family == "regression":
            return []
        found = next(record[name] for name in _LABELLED if name in record)
        if self.family == "qa":
            return ["no answer" if found is None else "answer"]
        if isinstance(found, list):
            return [each["label"] if isinstance(each, dict) else each for each in found]
        return [] if found is None else [str(found)]
