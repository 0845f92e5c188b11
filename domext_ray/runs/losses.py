"""What a run's loss and accuracy are called, by its objective: in metrics.jsonl, in summary.json and for people.

Figures say themselves which they are: `train/infonce_loss` is that of infonce.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

TRAIN, DOMAIN = "train/", "eval/domain_"
"""What stands before `LossNames.loss` in metrics.jsonl: of a step, and of an evaluation on held-out text."""


@dataclass(frozen=True)
class LossNames:
    """How the figures of an objective are called."""

    key: str  # mlm makes mlm_loss and mlm_accuracy
    title: str  # the loss for people
    unit: str  # what the loss is a mean over
    count: str  # name of the number of these in metrics.jsonl
    loss_help: str  # what the two are, for those who do not know the objective
    accuracy_help: str
    share: str = ""  # what the accuracy is a share of, and when one counts, for people; empty: accuracy

    @property
    def loss(self) -> str:
        return f"{self.key}_loss"

    @property
    def accuracy(self) -> str:
        return f"{self.key}_accuracy"


MLM = LossNames("mlm", "loss", "token", "masked_tokens", "masked-LM loss (nats per token)", "masked tokens predicted")
_VECTORS = {
    "infonce": LossNames(
        "infonce",
        "InfoNCE loss",
        "row",
        "compared_rows",
        "loss (nats per row)",
        "rows whose vector is nearest to their other view's",
        "rows matched",
    ),
}
_ALL = (MLM, *_VECTORS.values())


def name_losses(kind: str) -> LossNames:
    """Return how the figures of an `objective.kind` are called."""
    return _VECTORS.get(kind, MLM)


def find_losses(figures: Mapping[str, Any], place: str = "") -> LossNames | None:
    """Return how a run's figures are called, given some of them; None: they have no loss.

    They are "domain" of summary.json, or a line of metrics.jsonl, with `TRAIN` or `DOMAIN` as `place`.
    """
    return next((names for names in _ALL if place + names.loss in figures), None)


def find_run_losses(records: Sequence[Mapping[str, Any]]) -> LossNames:
    """Return how a run's figures are called, given its lines of metrics.jsonl; without a loss those of masked words."""
    found = (find_losses(record, place) for record in reversed(records) for place in (TRAIN, DOMAIN))
    return next(filter(None, found), MLM)
