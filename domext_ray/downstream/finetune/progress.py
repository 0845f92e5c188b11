"""How a fine-tuning run goes on: its trainings' progress files -> a line on standard error."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from domext_ray.downstream.finetune.grid import has_ended, read_results
from domext_ray.downstream.finetune.training import Point
from domext_ray.progress import StallTimer, StatusLine, format_seconds
from domext_ray.runtime.ray_cluster import describe_waiting
from domext_ray.training.metrics import read_metrics

MIN_ENDED = 0.05
"""Part of a training before which no time left is estimated."""


class FinetuneProgress:
    """A line on standard error: trainings that have ended, and where the slowest running one is.

    Args:
        folder: where trainings write their progress.
        stages: steps of the task, in their order.
        points: all of them; those that have ended already count as kept.
    """

    def __init__(self, folder: Path, stages: Sequence[str], points: Sequence[Point]) -> None:
        self.folder, self.stages, self.points, self.num_trainings = folder, stages, points, len(points)
        self.num_kept = self._count_ended()
        self.line = StatusLine(is_due=False)
        self._place: Any = None
        self._stall = StallTimer(self.line, describe_waiting)

    def __enter__(self) -> FinetuneProgress:
        if self.num_kept:
            self.line.keep(f"{self.num_kept} of {self.num_trainings} trainings have ended before.")
        return self

    def __exit__(self, *_: object) -> None:
        self.line.keep(self._describe_ended())

    def tell_failure(self, point: Point) -> None:
        """Say why a training failed."""
        self.line.keep(f"failed, the others go on: {read_results(self.folder, [point]).failed[0]['reason']}")

    def show(self, running: Sequence[Point]) -> None:
        """Show how far the running trainings are."""
        if not running or not self.line.is_due:
            return
        states = [state for each in running if (state := self._read(each)) is not None]
        line = self._describe_ended()
        self._note_move(line, [(state["stage"], state["step"]) for state in states])
        if states:
            done = [
                (self.stages.index(state["stage"]) + state["step"] / state["steps"]) / len(self.stages)
                for state in states
            ]
            slowest = states[int(np.argmin(done))]
            rate = sum(state["tokens_per_second"] for state in states)
            line += (
                f"; {slowest['stage']} step {slowest['step']:,}/{slowest['steps']:,}  loss {slowest['loss']:.3f}  "
                f"{rate:,.0f} tokens/s"
            )
            ended_now = self._count_ended() - self.num_kept + sum(done)
            if ended_now > MIN_ENDED:
                left = self.line.seconds / ended_now * (self.num_trainings - self.num_kept - ended_now)
                line += f"  about {format_seconds(max(left, 0.0))} left"
        self.line.show(line)

    def _note_move(self, *place: Any) -> None:
        """Say what is waited for when the trainings have stood where they are for a while."""
        if place != self._place:
            self._place = place
            self._stall.note_move()
        else:
            self._stall.look("fine-tuning")

    def _count_ended(self) -> int:
        return sum(has_ended(self.folder, each) for each in self.points)

    def _describe_ended(self) -> str:
        return f"{self._count_ended()} of {self.num_trainings} trainings ended"

    def _read(self, point: Point) -> dict[str, Any] | None:
        records = read_metrics(self.folder / f"{point.key}.progress.jsonl")
        return records[-1] if records else None
