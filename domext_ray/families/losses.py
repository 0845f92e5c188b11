"""Losses over classes, which may weigh classes against each other and smooth labels.

Enters: how often each class is a target in training. Leaves: a weight a class, and the summed cross-entropy with it. By
default classes weigh the same and labels are not smoothed.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from domext_ray.config.options.declare import require
from domext_ray.families.task import StagedTask, Task

if TYPE_CHECKING:
    from torch import Tensor

NO_TARGET = -100
"""Target of what has no class, or none that the head has: no part of the loss."""


@dataclass(frozen=True)
class LossOptions:
    """What changes the loss of training: see the options of these names."""

    class_weights: Literal["none", "balanced"] = "none"
    label_smoothing: float = 0.0


class ClassTask(Task):
    """A task whose loss is over classes.

    Whatever the weights, the loss of a batch is divided by its number of targets, not by their weights: over the
    training split balanced weights have a mean of 1, so that rates mean what they mean without.
    """

    smooths_labels = True
    """Whether the loss is a cross-entropy, whose targets can be smoothed."""
    class_weights: Tensor | None = None
    """Weights of the classes, float; None: all weigh 1."""
    label_smoothing = 0.0

    @abstractmethod
    def balance_classes(self) -> np.ndarray:
        """Return the weights, float64, with which classes are balanced over `data.train`."""

    def count_targets(self, targets: dict[str, Tensor], num_rows: int) -> int:
        """Return the rows, or words, whose label the head has."""
        return int((targets["labels"] != NO_TARGET).count_nonzero())

    def sum_cross_entropy(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the summed cross-entropy of fp32 logits [M, classes] and int64 labels [M]."""
        from torch.nn.functional import cross_entropy

        return cross_entropy(
            logits,
            labels,
            weight=self.place_class_weights(logits),
            ignore_index=NO_TARGET,
            reduction="sum",
            label_smoothing=self.label_smoothing,
        )

    def place_class_weights(self, logits: Tensor) -> Tensor | None:
        """Return the weights as logits are, on their device, where they stay: no step sends them again."""
        if self.class_weights is not None:
            self.class_weights = self.class_weights.to(logits, non_blocking=True)
        return self.class_weights


def balance(targets: Iterable[str], classes: Sequence[str]) -> np.ndarray:
    """Return weights that balance classes: n / (k · n_c), for n targets of k different classes, n_c of them of class c.

    A target of another class does not count, and a class that is no target weighs 1 (King and Zeng, Logistic Regression
    in Rare Events Data, 2001, as in scikit-learn's `class_weight="balanced"`).
    """
    counted = Counter(targets)
    counts = np.array([counted[label] for label in classes], dtype=np.float64)
    occurs = counts > 0
    return np.where(occurs, counts.sum() / (max(1, occurs.sum()) * np.maximum(counts, 1)), 1.0)


def set_loss(task: StagedTask, options: LossOptions) -> None:
    """Make a task train with other losses than the default; what its loss cannot do is refused."""
    import torch

    weights, smoothing = options.class_weights, options.label_smoothing
    has_classes = isinstance(task, ClassTask)
    rule = f"with a task of the family {task.family}, whose loss is not over classes"
    require(weights == "none" or has_classes, "labelled.class_weights", weights, f"none {rule}")
    smooths = isinstance(task, ClassTask) and task.smooths_labels
    require(smoothing == 0.0 or smooths, "optim.label_smoothing", smoothing, f"0 {rule} that exclude each other")
    if isinstance(task, ClassTask):
        task.label_smoothing = smoothing
        task.class_weights = torch.from_numpy(task.balance_classes()) if weights == "balanced" else None
