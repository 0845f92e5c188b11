"""What a run reads of each part of its mixture: tokens, epochs, the loss of its rows, and its held-out loss.

Enters: micro batches, and the sums over all ranks. Leaves: entries of metrics.jsonl, `parts/NAME/FIGURE`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from domext_ray.config.pretrain import SettledConfig
from domext_ray.training.phases import Phase, count_epochs

TOKENS = "part_tokens"


class PartFigures:
    """Counts on, step after step, from what the checkpoint says that the run goes on from; nothing without parts."""

    def __init__(self, config: SettledConfig, phases: Sequence[Phase], trainer_state: Mapping[str, Any] | None) -> None:
        self.names, self._phases = [text.name for text in config.texts] if config.parts else [], phases
        self._tokens = [0 if trainer_state is None else int(trainer_state[TOKENS][name]) for name in self.names]

    def count(self, micro_batches: Sequence[Any], tokens: Sequence[int]) -> list[int]:
        """Return what is to be added up over ranks: tokens of every part, given here, and then predicted ones."""
        if not self.names:
            return []
        predicted = [batch.count_predicted(len(self.names)) for batch in micro_batches]
        return [*tokens, *(sum(numbers) for numbers in zip(*predicted, strict=True))]

    def describe(self, step: int, counts: Sequence[int], loss_sums: Sequence[float]) -> dict[str, Any]:
        """Return the entries of a step, from 1, given the sums over ranks of counts and of losses by part, nats."""
        record: dict[str, Any] = {}
        if not self.names:
            return record
        tokens, predicted = counts[: len(self.names)], counts[len(self.names) :]
        self._tokens = [before + here for before, here in zip(self._tokens, tokens, strict=True)]
        figures = zip(self.names, self._tokens, count_epochs(self._phases, step), predicted, loss_sums, strict=True)
        for name, read, epochs, number, loss in figures:
            record |= {f"parts/{name}/tokens": read, f"parts/{name}/epochs": epochs}
            record |= {f"parts/{name}/train_loss": loss / number} if number else {}
        return record

    def describe_held_out(self, losses: Sequence[float]) -> dict[str, Any]:
        """Return the entries of an evaluation, given the loss on each part's held-out rows, nats."""
        return {f"parts/{name}/held_out_loss": loss for name, loss in zip(self.names, losses, strict=True)}

    def to_trainer_state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of it."""
        return {TOKENS: dict(zip(self.names, self._tokens, strict=True))}
