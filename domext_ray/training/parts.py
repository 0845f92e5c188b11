"""What a run reads of each part of its mixture: tokens, epochs, the loss of its rows, and its held-out loss.

Enters: micro batches, and the sums over all ranks. Leaves: entries of metrics.jsonl, `parts/NAME/FIGURE`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from domext_ray.config.pretrain import PretrainConfig
from domext_ray.training.phases import Phase, count_epochs

CURSOR = "part_tokens"


def name_parts(config: PretrainConfig) -> list[str]:
    """Return what the texts of a mixture are called, in the order of its parts; empty: there is one text."""
    return [text.name for text in config.texts] if config.parts else []


class PartFigures:
    """Counts on, step after step.

    Args:
        config: the run.
        phases: its length phases.
        cursor: of the checkpoint that the run goes on from; None: it begins.
    """

    def __init__(self, config: PretrainConfig, phases: Sequence[Phase], cursor: Mapping[str, Any] | None) -> None:
        self.names = name_parts(config)
        self._phases = phases
        self._tokens: list[int] | None = [0] * len(self.names)
        if cursor is not None:
            found = cursor.get(CURSOR)  # a version that did not count them left none: they stay unknown
            self._tokens = None if found is None else [int(found[name]) for name in self.names]

    def count(self, micro_batches: Sequence[Any], tokens: Sequence[int]) -> list[int]:
        """Return what is to be added up over ranks: tokens of every part, then predicted ones; nothing without parts.

        Args:
            micro_batches: of this rank.
            tokens: in them, by part.
        """
        if not self.names:
            return []
        predicted = [each.count_predicted(len(self.names)) for each in micro_batches]
        return [*tokens, *(sum(each) for each in zip(*predicted, strict=True))]

    def describe(self, step: int, counts: Sequence[int], loss_sums: Sequence[float]) -> dict[str, Any]:
        """Return the entries of a step.

        Args:
            step: from 1.
            counts: sums over ranks of what `count` returned.
            loss_sums: losses of the predicted tokens, by part, nats.
        """
        record: dict[str, Any] = {}
        if not self.names:
            return record
        tokens, predicted = counts[: len(self.names)], counts[len(self.names) :]
        if self._tokens is not None:
            self._tokens = [before + here for before, here in zip(self._tokens, tokens, strict=True)]
            record |= {f"parts/{name}/tokens": each for name, each in zip(self.names, self._tokens, strict=True)}
        epochs = count_epochs(self._phases, step)
        for name, read, number, loss in zip(self.names, epochs, predicted, loss_sums, strict=True):
            record[f"parts/{name}/epochs"] = read
            record |= {f"parts/{name}/train_loss": loss / number} if number else {}
        return record

    def describe_held_out(self, losses: Sequence[float]) -> dict[str, Any]:
        """Return the entries of an evaluation, given the loss on each part's held-out rows, nats."""
        return {f"parts/{name}/held_out_loss": loss for name, loss in zip(self.names, losses, strict=True)}

    def to_cursor(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of it."""
        if not self.names or self._tokens is None:
            return {}
        return {CURSOR: dict(zip(self.names, self._tokens, strict=True))}
