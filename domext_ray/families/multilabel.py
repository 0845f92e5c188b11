"""Texts and pairs of texts -> any number of labels each, none included.

The head is that of single-label classification. Every label is a decision of its own: the loss is binary cross-entropy,
and a label counts whose probability (sigmoid) is above a threshold that dev chooses. transformers knows such a model by
`problem_type="multi_label_classification"`, and its pipeline gives these probabilities.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pyarrow as pa
from scipy.special import expit

from domext_ray.errors import CorpusError
from domext_ray.families.comparison import Compared, compare_sets, join_pair
from domext_ray.families.family import ENTITY_METRICS, TEXTS, Prediction
from domext_ray.families.losses import ClassTask, balance
from domext_ray.families.metrics.label_set_metrics import (
    USUAL_THRESHOLD,
    choose_threshold,
    mark_labels,
    score_label_sets,
)
from domext_ray.families.metrics.scores import Score
from domext_ray.families.readers.examples import AnyExample, MultiLabelText
from domext_ray.families.state import NOTHING_LEARNED, State
from domext_ray.families.texts import TextRows

if TYPE_CHECKING:
    from torch import Tensor


class MultiLabelTask(TextRows, ClassTask):
    """Labels of every text or pair (`MultiLabelText`). A prediction has "labels", and "probabilities" of all.

    A label of dev or test that is none of the set's is never predicted, and counts as missed.
    """

    family = "multilabel"
    readers = {"records": ("text", "labels"), "label_columns": ("text",)}
    columns = {**TEXTS, "labels": ("labels", "label", "accept")}
    metrics = ("accuracy", *ENTITY_METRICS)
    separator = ","
    head = "DomextForSequenceClassification"
    metric = "f1.micro"
    fields = {"labels": pa.list_(pa.string())}
    weighs_labels = True
    found = "labels"
    hub_task = "text-classification"
    nothing = {"labels": []}
    smooths_labels = False

    def prepare(self) -> None:
        """Start with the usual threshold."""
        self.thresholds = {"threshold": USUAL_THRESHOLD}

    @property
    def head_config(self) -> dict[str, Any]:
        """The problem's type, by which transformers computes the same loss, and its pipeline probabilities."""
        return {"problem_type": "multi_label_classification"}

    @property
    def card_values(self) -> dict[str, Any]:
        """The threshold, which transformers' pipeline does not know."""
        return {"threshold": f"{self.thresholds['threshold']:g}"}

    @classmethod
    def compare(cls, example: MultiLabelText, prediction: Prediction, state: State = NOTHING_LEARNED) -> Compared:
        """Compare label sets; see `Family.compare`."""
        sides = [{(label, label) for label in side} for side in (example.labels, prediction["labels"])]
        return compare_sets(example, join_pair(example.text, example.pair), *sides)

    def make_targets(self, example: Any, is_training: bool) -> dict[str, np.ndarray]:
        """Return the target "labels", float32 [L], 1 for a label that the example has."""
        strange = [label for label in example.labels if label not in self.data.labels]
        if is_training and strange:
            raise CorpusError(
                f"{example.source}: the label {strange[0]!r} is none of {', '.join(self.data.labels)}; name it among "
                "the set's labels."
            )
        return {"labels": mark_labels([example.labels], self.data.labels)[0].astype(np.float32)}

    def count_targets(self, targets: dict[str, Tensor], num_rows: int) -> int:
        """Return rows times labels: each is a term of the loss, as in transformers."""
        return targets["labels"].numel()

    def compute_loss_sum(self, outputs: Any, targets: dict[str, Tensor]) -> Tensor:
        """Return the summed binary cross-entropy; see `Task.compute_loss_sum`."""
        from torch.nn.functional import binary_cross_entropy_with_logits

        logits, labels = outputs.logits.float(), targets["labels"]
        weights = self.place_class_weights(logits)
        if weights is not None:
            absent, present = weights
            weights = present.where(labels > 0, absent)
        return binary_cross_entropy_with_logits(logits, labels, weight=weights, reduction="sum")

    def balance_classes(self) -> np.ndarray:
        """Return weights [2, L] of a label's absence and presence: each label is a balanced problem of its own."""
        examples = cast("Sequence[MultiLabelText]", self.data.train)
        marked = mark_labels([example.labels for example in examples], self.data.labels)
        return np.stack([balance(map(str, column), ("False", "True")) for column in marked.T], axis=1)

    def decode_row(self, example: Any, output: np.ndarray) -> Prediction:
        """Return the labels above the threshold, and the probabilities of all, the highest first."""
        probabilities = expit(output.astype(np.float64))
        order = np.argsort(-probabilities, kind="stable")
        return self.decide(example, {"probabilities": {self.data.labels[i]: float(probabilities[i]) for i in order}})

    def decide(self, example: AnyExample, prediction: Prediction) -> Prediction:
        """Choose the labels above the threshold."""
        probabilities = prediction["probabilities"]
        labels = [label for label, probability in probabilities.items() if probability > self.thresholds["threshold"]]
        return {"labels": labels, "probabilities": probabilities}

    def score(self, examples: Sequence[AnyExample], predictions: Sequence[Prediction]) -> Score:
        """Score label sets; see `score_label_sets`."""
        gold = [cast(MultiLabelText, example).labels for example in examples]
        found = [prediction["labels"] for prediction in predictions]
        return replace(score_label_sets(gold, found, self.data.labels), primary=self.metric)

    def fit_thresholds(self, examples: Sequence[AnyExample], predictions: Sequence[Prediction]) -> dict[str, float]:
        """Choose the threshold by the figure that dev chooses by, or by micro F1 where that is no F1 or accuracy."""
        gold = mark_labels([cast(MultiLabelText, example).labels for example in examples], self.data.labels)
        found = np.array(
            [[prediction["probabilities"][label] for label in self.data.labels] for prediction in predictions]
        )
        path = self.metric if self.metric in ("f1.macro", "accuracy") else "f1.micro"
        self.thresholds = {"threshold": choose_threshold(gold, found, path)}
        return self.thresholds

    def predict_baseline(self, examples: Sequence[AnyExample]) -> list[Prediction]:
        """Return for every example the labels that have the best micro F1 as a constant answer in training."""
        train = cast("Sequence[MultiLabelText]", self.data.train)
        counts = Counter(label for example in train for label in example.labels if label in self.data.labels)
        ranked = sorted(self.data.labels, key=lambda label: -counts[label])
        matches = np.cumsum([counts[label] for label in ranked])
        sizes = 1 + np.arange(len(ranked))
        best = int(np.argmax(2 * matches / (sizes * len(train) + matches[-1])))
        return [{"labels": ranked[: best + 1]}] * len(examples)
