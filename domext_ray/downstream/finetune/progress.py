"""How a fine-tuning run goes on: its trainings' progress files -> a line on standard error."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from domext_ray.runtime.trials import Outcome, Trial, Watch, choose_arm, group_by_arm
from domext_ray.storage import Place
from domext_ray.training.metrics import read_metrics

PROGRESS = ".progress.jsonl"
"""How the name of a file ends that says how a training goes on; before it stands the training's."""


class FinetuneWatch(Watch):
    """Says how many trainings have ended and where the slowest running one is, and drops tensors that nobody needs.

    With `keep_all` it drops none.
    """

    def __init__(self, folder: Place, stages: Sequence[str], outcomes: Sequence[Outcome], *, keep_all: bool) -> None:
        self.folder, self.stages, self.keep_all = folder, stages, keep_all
        self.place: list[Any] = []
        self.outcomes = {outcome.name: outcome if outcome.has_ended else Outcome(outcome.trial) for outcome in outcomes}
        super().__init__(len(outcomes), sum(outcome.has_ended for outcome in outcomes))
        if self.num_kept:
            self.line.keep(f"{self.num_kept} of {self.number} trainings have ended before.")

    def end(self, outcome: Outcome) -> None:
        """Say why a training failed, and drop the tensors of those that are overtaken."""
        self.outcomes[outcome.name] = outcome
        if outcome.failure:
            self.line.keep(f"failed, the others go on: {outcome.failure}")
        for overtaken in () if self.keep_all else list_overtaken(self.outcomes.values()):
            shutil.rmtree(self.folder / overtaken.name, ignore_errors=True)

    def look(self, running: Sequence[Trial]) -> object:
        """Show how far the running trainings are; return where they are."""
        if self.line.is_due:
            states = [read[-1] for trial in running if (read := self._read(trial.name))]
            self.place = [(state["stage"], state["step"]) for state in states]
            done = [
                (self.stages.index(state["stage"]) + state["step"] / state["steps"]) / len(self.stages)
                for state in states
            ]
            shown = self._describe(states, done) if states else ""
            self.line.show(f"{self.describe_ended()}{shown}", (self.num_ended + sum(done)) / self.number)
        return self.place

    def _describe(self, states: Sequence[dict[str, Any]], done: Sequence[float]) -> str:
        """Where the slowest of the running trainings is, given how much of each is done."""
        slowest = states[int(np.argmin(done))]
        rate, left = sum(state["tokens_per_second"] for state in states), self.describe_left(sum(done))
        return (
            f"; {slowest['stage']} step {slowest['step']:,}/{slowest['steps']:,}  loss {slowest['loss']:.3f}  "
            f"{rate:,.0f} tokens/s{left and f'  {left}'}"
        )

    def describe_ended(self) -> str:
        """Return how many trainings have ended."""
        return f"{self.num_ended} of {self.number} trainings ended"

    def _read(self, name: str) -> list[dict[str, Any]]:
        return read_metrics(self.folder / f"{name}{PROGRESS}")


def list_overtaken(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """Return the trainings that cannot be chosen any more: another point, all of whose restarts ended, is better."""
    ended = [outcome for arm in group_by_arm(outcomes) if all(outcome.status for outcome in arm) for outcome in arm]
    complete = [outcome for outcome in ended if outcome.is_complete]
    chosen = choose_arm(ended, "dev") if complete else []
    return [outcome for outcome in complete if outcome not in chosen]
