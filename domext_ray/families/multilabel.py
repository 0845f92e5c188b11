"""Texts and pairs of texts -> any number of labels each, none included.

The head is that of single-label classification. Every label is a decision of its own: the loss is binary cross-entropy,
and a label counts whose probability (sigmoid) is above a threshold that dev chooses. transformers knows such a model by
`problem_type="multi_label_classification"`, and its pipeline gives these probabilities.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from scipy.special import expit

from domext_ray.errors import CorpusError
from domext_ray.families.comparison import Compared, compare_sets, join_pair
from domext_ray.families.family import ENTITY_METRICS, TEXTS, Prediction, SplitRows
from domext_ray.families.losses import ClassTask, balance
from domext_ray.families.metrics.label_set_metrics import (
    USUAL_THRESHOLD,
    choose_threshold,
    mark_labels,
    score_label_sets,
)
from domext_ray.families.metrics.scores import Score
from domext_ray.families.readers.cells import as_whole, shorten, split_cell
from domext_ray.families.readers.examples import MultiLabelText
from domext_ray.families.readers.issues import DataIssues, SetRow
from domext_ray.families.state import NOTHING_LEARNED, State
from domext_ray.families.task import ONLY_STAGE
from domext_ray.families.texts import TextRows, read_texts

if TYPE_CHECKING:
    from torch import Tensor

_BITS = re.compile(r"[01](?:\.0)?(?:[\s,;|]+[01](?:\.0)?)+")
_BETWEEN_BITS = re.compile(r"[\s,;|]+")
_OTHER_SEPARATORS = "|;\n"
_JOINTS = ",|;#、，；\n\t/+& "
"""What may stand between several labels."""
_FREE_JOINTS = "/+& "
"""Of these what names of labels often have; a space is one only if all labels that have one are several."""
_FEWEST_SPACED = 3


class MultiLabelTask(TextRows, ClassTask):
    """Labels of every text or pair (`MultiLabelText`). A prediction has "labels", and "probabilities" of all.

    A label of dev or test that is none of the set's is never predicted, and counts as missed.
    """

    family = "multilabel"
    readers = {"records": ("text", "labels"), "label_columns": ("text",)}
    columns = {**TEXTS, "labels": ("labels", "label", "accept")}
    annotated = "labels"
    metrics = ("accuracy", *ENTITY_METRICS)
    separator = ","
    head = "DomextForSequenceClassification"
    # by which transformers computes the same loss, and its pipeline probabilities
    head_config = {"problem_type": "multi_label_classification"}
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

    def make_card_values(self, thresholds: Mapping[str, float]) -> dict[str, Any]:
        """Return the threshold, which transformers' pipeline does not know."""
        return {"threshold": f"{thresholds['threshold']:g}"}

    @classmethod
    def read(cls, row: SetRow) -> MultiLabelText:
        """Make a text, or a pair, with any number of labels: a list, or a text with the set's separator."""
        texts, value = read_texts(row), row.get("labels") if row.is_labelled else []
        listed = split_cell(value, row.description.separator) if isinstance(value, str) else value
        labels = [as_whole(label) for label in listed] if isinstance(listed, (list, tuple)) else [None]
        if not all(type(label) in (str, int) and str(label).strip() for label in labels):
            row.leave_out("has no list of labels", value)
        return MultiLabelText("", row.source, *texts, tuple(dict.fromkeys(str(label).strip() for label in labels)))

    @classmethod
    def read_together(cls, splits: SplitRows, issues: DataIssues) -> SplitRows:
        """Return rows of several labels; of those that have a 0 or 1 for each label, the labels that are there."""
        every = [row for split in splits.values() for row in split if row.get("labels") is not None]
        _check_separator(every)
        vectors = [_read_bits(row.get("labels")) for row in every]
        num_vectors = sum(bits is not None and len(set(bits)) < len(bits) for bits in vectors)  # no label stands twice
        is_even = None not in vectors and len({len(bits) for bits in vectors if bits is not None}) == 1
        if not every or {"0", "1"} & {*every[0].description.labels} or not (is_even or 2 * num_vectors > len(every)):
            _require_single(every)
            return splits
        names, yaml = every[0].description.labels, every[0].description.yaml
        sizes = Counter(len(bits) for bits in vectors if bits is not None)
        size = sizes.most_common(1)[0][0]
        odd = next((row for row, bits in zip(every, vectors, strict=True) if bits is None or len(bits) != size), None)
        if odd is not None:
            raise CorpusError(
                f"{odd.source} has {shorten(odd.get('labels'), 40)} as its labels, where most rows have {size} times 0 "
                "or 1; mend it."
            )
        if size != len(names):
            shown = ", ".join(["NAME"] * min(size, 3)) + (", …" if size > 3 else "")
            has = f" (it names {len(names)})" if names else ""
            raise CorpusError(
                f"{every[0].source} has {shorten(every[0].get('labels'), 40)} as its labels, and so has every row "
                f"{size} times 0 or 1; write labels: [{shown}] in {yaml}, {size} names in the order of the list{has}."
            )
        issues.say(f"The labels of each row are 0 and 1, in the order of labels in {yaml}.")
        made = {
            id(row): row.put("labels", [name for name, bit in zip(names, bits or (), strict=True) if bit])
            for row, bits in zip(every, vectors, strict=True)
        }
        return {split: [made.get(id(row), row) for row in own] for split, own in splits.items()}

    @classmethod
    def adopt(cls, labels: tuple[str, ...], problem_type: str | None) -> dict[str, Any] | None:
        thresholds = {ONLY_STAGE: {"threshold": USUAL_THRESHOLD}}
        is_own = problem_type == "multi_label_classification"
        return {"labels": labels, "thresholds": thresholds} if is_own else None

    @classmethod
    def compare(cls, example: MultiLabelText, prediction: Prediction, state: State = NOTHING_LEARNED) -> Compared:
        sides = [{(label, label) for label in side} for side in (example.labels, prediction["labels"])]
        return compare_sets(example, join_pair(example.text, example.pair), *sides)

    def make_targets(self, example: Any) -> dict[str, np.ndarray]:
        """Return the target "labels", float32 [L], 1 for a label that the example has."""
        return {"labels": mark_labels([example.labels], self.data.labels)[0].astype(np.float32)}

    def count_targets(self, targets: dict[str, Tensor], num_rows: int) -> int:
        """Return rows times labels: each is a term of the loss, as in transformers."""
        return targets["labels"].numel()

    def compute_loss_sum(self, outputs: Any, targets: dict[str, Tensor]) -> Tensor:
        from torch.nn.functional import binary_cross_entropy_with_logits

        logits, labels = outputs.logits.float(), targets["labels"]
        weights = self.place_class_weights(logits)
        if weights is not None:
            absent, present = weights
            weights = present.where(labels > 0, absent)
        return binary_cross_entropy_with_logits(logits, labels, weight=weights, reduction="sum")

    def balance_classes(self) -> np.ndarray:
        """Return weights [2, L] of a label's absence and presence: each label is a balanced problem of its own."""
        marked = mark_labels([example.labels for example in self.data.train], self.data.labels)
        return np.stack([balance(map(str, column), ("False", "True")) for column in marked.T], axis=1)

    def decode_row(self, example: Any, output: np.ndarray) -> Prediction:
        """Return the labels above the threshold, and the probabilities of all, the highest first."""
        probabilities = expit(output.astype(np.float64))
        order = np.argsort(-probabilities, kind="stable")
        return self.decide(example, {"probabilities": {self.data.labels[i]: float(probabilities[i]) for i in order}})

    def decide(self, example: MultiLabelText, prediction: Prediction) -> Prediction:
        """Choose the labels above the threshold."""
        probabilities = prediction["probabilities"]
        labels = [label for label, probability in probabilities.items() if probability > self.thresholds["threshold"]]
        return {"labels": labels, "probabilities": probabilities}

    def score(self, examples: Sequence[MultiLabelText], predictions: Sequence[Prediction]) -> Score:
        """Score label sets; see `score_label_sets`."""
        gold = [example.labels for example in examples]
        found = [prediction["labels"] for prediction in predictions]
        return score_label_sets(gold, found, self.data.labels)

    def fit_thresholds(self, examples: Sequence[MultiLabelText], predictions: Sequence[Prediction]) -> dict[str, float]:
        """Choose the threshold by the figure that dev chooses by, or by micro F1 where that is no F1 or accuracy."""
        gold = mark_labels([example.labels for example in examples], self.data.labels)
        found = np.array(
            [[prediction["probabilities"][label] for label in self.data.labels] for prediction in predictions]
        )
        path = self.metric if self.metric in ("f1.macro", "accuracy") else "f1.micro"
        self.thresholds = {"threshold": choose_threshold(gold, found, path)}
        return self.thresholds

    def predict_baseline(self, examples: Sequence[MultiLabelText]) -> list[Prediction]:
        """Return for every example the labels that have the best micro F1 as a constant answer in training."""
        counts = Counter(label for example in self.data.train for label in example.labels if label in self.data.labels)
        ranked = sorted(self.data.labels, key=lambda label: -counts[label])
        matches = np.cumsum([counts[label] for label in ranked])
        sizes = 1 + np.arange(len(ranked))
        best = int(np.argmax(2 * matches / (sizes * len(self.data.train) + matches[-1])))
        return [{"labels": ranked[: best + 1]}] * len(examples)


def _read_bits(value: Any) -> list[bool] | None:
    """Return a list, or a cell, of nothing but two or more of 0 and 1; None: it is something else."""
    if isinstance(value, str):
        value = _BETWEEN_BITS.split(value.strip()) if _BITS.fullmatch(value.strip()) else None
    if not isinstance(value, (list, tuple)) or len(value) < 2:
        return None
    bits = [as_whole(int(item) if isinstance(item, bool) else item) for item in value]
    return [str(bit) == "1" for bit in bits] if all(str(bit) in ("0", "1") for bit in bits) else None


def _check_separator(rows: Sequence[SetRow]) -> None:
    """Refuse cells that another separator parts where none has that of the description, or fewer have the usual one."""
    cells = [(row, value) for row in rows if isinstance(value := row.get("labels"), str)]
    usual = rows[0].description.separator if rows else ""
    known = dict.fromkeys((usual, *_OTHER_SEPARATORS))
    uses = Counter(mark for _, value in cells for mark in known if len(split_cell(value, mark)) > 1)
    for row, value in cells:
        separator = next((char for char in _OTHER_SEPARATORS if len(split_cell(value, char)) > 1), None)
        is_odd = uses[usual] < (uses[separator] if usual == "," else 1) if separator else False
        if is_odd and value.strip() not in row.description.labels:
            has = f"only {uses[usual]:,} of the set's cells have" if uses[usual] else "no cell of the set has"
            raise CorpusError(
                f"{row.source} has {shorten(value, 40)} as its labels, and {has} the separator {usual!r}; write "
                f"separator: {json.dumps(separator)} in {row.description.yaml}, or name the set's labels there if this "
                "is one."
            )
        if _is_closed(value) and not all(map(_is_closed, split_cell(value, row.description.separator))):
            raise CorpusError(
                f"{row.source} has {shorten(value, 40)} as its labels, whose brackets the separator "
                f'{row.description.separator!r} parts; write a list with quotes (["a", "b"]), or set another separator '
                f"in {row.description.yaml}."
            )


def _require_single(rows: Sequence[SetRow]) -> None:
    """Refuse a label whose parts, between separators, are labels, too."""
    sources: dict[str, SetRow] = {}
    for row in rows if rows and not rows[0].description.labels else ():
        value = row.get("labels")
        listed = split_cell(value, row.description.separator) if isinstance(value, str) else value
        for label in listed if isinstance(listed, list | tuple) else ():
            if isinstance(label, str):
                sources.setdefault(label.strip(), row)
    spaced = [label for label in sources if " " in label]
    is_joined = len(spaced) >= _FEWEST_SPACED and all(sources.keys() >= {*label.split()} for label in spaced)
    usual = rows[0].description.separator if rows else ""
    for char in (_JOINTS if is_joined else _JOINTS.rstrip()).replace(usual, ""):
        parts = {label: list(dict.fromkeys(split_cell(label, char))) for label in sources if char in label}
        counts = Counter(itertools.chain.from_iterable(parts.values() if char not in _FREE_JOINTS else ()))
        known = sources.keys() | {part for part, number in counts.items() if number > 1}
        label = next((label for label, own in parts.items() if len(own) > 1 and known >= {*own}), "")
        if label:
            first, others = sources[label], " and ".join(map(repr, parts[label]))
            raise CorpusError(
                f"{first.source} has the label {shorten(label, 40)}, and {others} are of other rows, too; part several "
                f"labels by {first.description.separator!r}, or set separator, or name all labels if this is one, in "
                f"{first.description.yaml}."
            )


def _is_closed(text: str) -> bool:
    """Whether each bracket has its other one."""
    depths = [*itertools.accumulate((char in "([{") - (char in ")]}") for char in text)]
    return min(depths, default=0) >= 0 and depths[-1:] in ([], [0])
