"""What looks on while Ray Tune runs trials: the terminal, trackers, and the scheduler that stops bad ones.

Enters: what trials report. Leaves: lines on the terminal, walls.json with the seconds that each trial has held its
process, and why one died.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ray import tune
from ray.tune.schedulers import ASHAScheduler

from domext_ray.config.sweep import OBJECTIVES, SearchConfig
from domext_ray.files import read_json
from domext_ray.progress import StatusLine, format_seconds
from domext_ray.search.space import describe_point
from domext_ray.search.trainable import TRIALS
from domext_ray.search.trial import DEATHS, SweepWork, read_rungs, record_failure
from domext_ray.storage import Place, write_json, write_text
from domext_ray.training.tracking import CLOSE_SECONDS, Tracked, Tracking

TUNE, WALLS = "tune", "walls.json"


def make_callbacks(work: SweepWork, number: int, num_ended: int) -> list[tune.Callback]:
    """Return what is told how trials go: the terminal, and trackers.

    Args:
        work: what all trials share.
        number: trials of the sweep.
        num_ended: those of them that have ended before.
    """
    search = work.config.search
    return [
        SweepProgress(work.folder, number, num_ended, search.objectives),
        TrialTracking(work.folder, work.config.run.trackers, search.reduction),
    ]


def get_trial_name(trial: Any) -> str:
    """Return the name of a trial and its directory."""
    return str(trial.config["name"])


def make_scheduler(work: SweepWork, ended: Sequence[str] = ()) -> ASHAScheduler | None:
    """Return what stops bad trials; it knows what the trials that have ended scored."""
    search = work.config.search
    if search.scheduler == "none":
        return None
    scheduler = RememberingASHA(work.folder / TRIALS, search)
    for name in ended:
        scheduler.on_trial_add(None, SimpleNamespace(trial_id=name, config={"name": name}))
    return scheduler


class RememberingASHA(ASHAScheduler):
    """ASHA that knows the scored rungs of the trials that are there when a sweep goes on: Ray Tune begins it anew.

    Args:
        folder: the trials' directories.
        search: how the space is searched.
    """

    def __init__(self, folder: Path, search: SearchConfig) -> None:
        self.folder, self.search = folder, search
        super().__init__(
            time_attr="resource",
            metric=search.objectives[0],
            mode=OBJECTIVES[search.objectives[0]],
            max_t=search.reduction ** (search.rungs - 1),
            grace_period=1,
            reduction_factor=search.reduction,
        )

    def on_trial_add(self, tune_controller: Any, trial: Any) -> None:
        """Take a trial with what it has scored."""
        super().on_trial_add(tune_controller, trial)
        name = self.search.objectives[0]
        for i, rung in enumerate(read_rungs(self.folder / get_trial_name(trial))):
            self.on_trial_result(tune_controller, trial, {"resource": self.search.reduction**i, name: rung[name]})


class SweepProgress(tune.Callback):
    """Says what every trial scored and how long the others will take, and keeps how long each took.

    Args:
        folder: the sweep's directory.
        number: trials of the sweep.
        num_ended: those of them that have ended before.
        objectives: what is searched for.
    """

    def __init__(self, folder: Path, number: int, num_ended: int, objectives: Sequence[str]) -> None:
        self.folder, self.number, self.ended_before = folder, number, num_ended
        self.objectives = tuple(objectives)
        self.walls = read_walls(folder)
        self.begun: dict[str, float] = {}

    def setup(self, stop: Any = None, num_samples: Any = None, total_num_samples: Any = None, **info: Any) -> None:
        """Begin, or go on, in this process."""
        self.line = StatusLine()
        self.begun, self.walls = {}, read_walls(self.folder)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "line"}

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Note when a trial began."""
        self.begun.setdefault(get_trial_name(trial), self.line.seconds)

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Say what a trial scored."""
        self._end(trials, trial, "")

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Note and say that a trial's process died too often."""
        reason = f"its process died {trial.num_failures} times; {trial.error_file} has what was said"
        folder = self.folder / TRIALS / get_trial_name(trial)
        record_failure(folder, trial.config["point"], reason)
        write_text(folder / DEATHS, str(trial.num_failures))
        self._end(trials, trial, reason)

    def _end(self, trials: list[Any], trial: Any, reason: str) -> None:
        name = get_trial_name(trial)
        seconds = self.line.seconds - self.begun.pop(name, self.line.seconds)
        self.walls[name] = self.walls.get(name, 0.0) + seconds
        write_json(self.folder / WALLS, self.walls)
        ended = self.ended_before + sum(each.is_finished() for each in trials if each is not trial) + 1
        result = trial.last_result or {}
        figures = ", ".join(
            f"{name} {result[name]:.4g}" for name in self.objectives if isinstance(result.get(name), float | int)
        )
        point = trial.config["point"]
        left = self.line.seconds / max(ended - self.ended_before, 1) * (self.number - ended)
        self.line.keep(
            f"[{ended} of {self.number}] {describe_point(point)}: {reason or figures} "
            f"(resource {result.get('resource', 0)}, {seconds:.0f} s; about {format_seconds(left)} left)"
        )


class TrialTracking(tune.Callback):
    """Hands what trials score to trackers; each trial is a run of theirs, and a rung's resource is its step.

    Args:
        folder: the sweep's directory.
        trackers: their names.
        reduction: see `SearchConfig`.
    """

    def __init__(self, folder: Path, trackers: Sequence[str], reduction: int) -> None:
        self.folder, self.trackers, self.reduction = folder, list(trackers), reduction
        self.begun: dict[str, Tracking] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "begun": {}}

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Begin a trial, or go on with it."""
        name = get_trial_name(trial)
        if name not in self.begun:
            scored = self._list_scores(name)
            own, step = Place(self.folder / TUNE / name), max((each["step"] for each in scored), default=0)
            tracked = Tracked(own, Place(self.folder), trial.config["point"], step)
            self.begun[name] = Tracking(self.trackers, tracked, scored, self._leave)

    def on_trial_result(self, iteration: int, trials: list[Any], trial: Any, result: Any, **info: Any) -> None:
        """Hand on what a rung has scored; nothing for a trial that has failed."""
        for scores in self._list_scores(get_trial_name(trial))[-1:]:
            self.begun[get_trial_name(trial)].write(scores)

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """End a trial, which may never have started."""
        if (begun := self.begun.get(get_trial_name(trial))) is not None:
            begun.end()

    on_trial_error = on_trial_complete

    def on_experiment_end(self, trials: list[Any], **info: Any) -> None:
        """Wait for what trackers have not taken yet, but not for long."""
        until = time.monotonic() + CLOSE_SECONDS
        for each in self.begun.values():
            each.close(until)

    def _list_scores(self, name: str) -> list[dict[str, Any]]:
        rungs = enumerate(read_rungs(self.folder / TRIALS / name))
        return [
            {"step": self.reduction**i, **{each: rung[each] for each in OBJECTIVES if each in rung}}
            for i, rung in rungs
        ]

    def _leave(self, tracker: str, sentence: str) -> None:
        if tracker in self.trackers:  # it is told once, and trials to come do without
            self.trackers.remove(tracker)
            print(sentence, file=sys.stderr, flush=True)


def read_walls(folder: Path) -> dict[str, float]:
    """Return the seconds that each trial has held its process."""
    path = folder / WALLS
    return read_json(path, "delete it: only the time of the trials is lost with it") if path.exists() else {}
