"""Texts and pairs of texts -> one number each."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from domext_ray.errors import CorpusError
from domext_ray.families.comparison import Compared, join_pair
from domext_ray.families.family import TEXTS, Prediction
from domext_ray.families.metrics.metrics import score_values
from domext_ray.families.metrics.scores import Score
from domext_ray.families.readers.examples import LabelledText
from domext_ray.families.readers.issues import SetRow
from domext_ray.families.state import NOTHING_LEARNED, NUMBER, POSITIVE, State
from domext_ray.families.texts import TextRows, read_texts

if TYPE_CHECKING:
    from torch import Tensor

USUAL_VALUES = (0.1, 10.0)
"""Least standard deviation, and largest mean and standard deviation, of values that a fresh head learns readily."""
_COMMA = re.compile(r"\s*[-+]?[\d.]*\d,\d[\d.,]*\s*")
_LARGEST = float(np.finfo(np.float32).max)
"""What is larger is infinite to the loss."""


class RegressionTask(TextRows):
    """A number for every text or pair (`LabelledText.value`). A prediction has its "value".

    The model predicts in the set's own unit and is trained on it, as in transformers, so that an export needs no other
    knowledge. The loss is the squared error over the variance of the training values: 1 for the best constant, whatever
    the unit. A head starts near 0 and learns values like 1000 slowly; `notes` says so.
    """

    family = "regression"
    readers = {"records": ("text", "value")}
    columns = {**TEXTS, "value": ("value", "score", "label")}
    metrics = ("pearson", "spearman")
    head = "DomextForSequenceClassification"
    head_config = {"problem_type": "regression"}  # by which the head computes a loss of its own outside of here
    metric = "spearman"
    fields = {"value": pa.float64()}
    hub_task = "text-classification"
    outputs = ("value",)
    nothing = {"value": 0.0}
    state_rules = {**TextRows.state_rules, "mean": NUMBER, "std": POSITIVE}

    def learn(self) -> dict[str, Any]:
        """Return mean and standard deviation of the training values."""
        values = np.array([example.value for example in self.data.train], dtype=np.float64)
        mean, std = float(values.mean()), float(values.std()) or 1.0
        if max(abs(mean), std) > USUAL_VALUES[1] or std < USUAL_VALUES[0]:
            self.notes.append(
                f"the values of {self.data.name} have mean {mean:.3g} and standard deviation {std:.3g}, and a head "
                "starts near 0: it learns faster if the values are divided so that they are about 0 to 5."
            )
        return {**super().learn(), "mean": mean, "std": std}

    @classmethod
    def read(cls, row: SetRow) -> LabelledText:
        texts, value = read_texts(row), row.get("value") if row.is_labelled else 0.0
        try:
            number = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if isinstance(value, str) and _COMMA.fullmatch(value):
            raise CorpusError(
                f"{row.source} has the value {value!r}; write numbers with a point before decimals, and without commas."
            )
        if not abs(number) <= _LARGEST:
            row.leave_out("has no finite number", value)
        return LabelledText("", row.source, *texts, "", number)

    @classmethod
    def adopt(cls, labels: tuple[str, ...], problem_type: str | None) -> dict[str, Any] | None:
        return {"labels": (), "state": {"mean": 0.0, "std": 1.0}} if problem_type == "regression" else None

    @classmethod
    def compare(cls, example: LabelledText, prediction: Prediction, state: State = NOTHING_LEARNED) -> Compared:
        values = f"{example.value:g}", f"{prediction['value']:.4g}"
        distance = abs(example.value - prediction["value"])
        text = join_pair(example.text, example.pair)
        return Compared(example.id, example.source, text, (), (), *values, distance=distance)

    def make_targets(self, example: Any) -> dict[str, np.ndarray]:
        """Return the target "values", float32 [], of an example."""
        return {"values": np.array(example.value, dtype=np.float32)}

    def compute_loss_sum(self, outputs: Any, targets: dict[str, Tensor]) -> Tensor:
        """Return the summed squared error in units of the training values' variance."""
        errors = (outputs.logits.float().squeeze(-1) - targets["values"]) / self.state["std"]
        return errors.square().sum()

    def decode_row(self, example: Any, output: np.ndarray) -> Prediction:
        """Return the value, in the set's own unit."""
        return {"value": float(output.item())}

    def score(self, examples: Sequence[LabelledText], predictions: Sequence[Prediction]) -> Score:
        """Score values by their correlations."""
        gold = [example.value for example in examples]
        return score_values(gold, [prediction["value"] for prediction in predictions])

    def predict_baseline(self, examples: Sequence[LabelledText]) -> list[Prediction]:
        """Return the mean of training for every example: the constant with the least squared error."""
        return [{"value": self.state["mean"]}] * len(examples)
