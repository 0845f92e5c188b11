"""What looks on while Ray Tune runs trials: the terminal, TensorBoard, MLflow, and the scheduler that stops bad ones.

Enters: what trials report. Leaves: lines on the terminal, walls.json with the seconds that each trial has held its
process, and why one died.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ray import tune
from ray.tune.logger import TBXLoggerCallback
from ray.tune.schedulers import ASHAScheduler

from domext_ray.config.sweep import OBJECTIVES, SearchConfig
from domext_ray.errors import ConfigError
from domext_ray.files import read_json
from domext_ray.progress import StatusLine, format_seconds
from domext_ray.search.space import describe_point
from domext_ray.search.trainable import TRIALS
from domext_ray.search.trial import DEATHS, SweepWork, read_rungs, record_failure
from domext_ray.storage import write_json, write_text

WALLS = "walls.json"


def make_callbacks(work: SweepWork, number: int, num_ended: int) -> list[tune.Callback]:
    """Return what is told how trials go: the terminal, TensorBoard, and MLflow on request.

    Args:
        work: what all trials share.
        number: trials of the sweep.
        num_ended: those of them that have ended before.

    Raises:
        ConfigError: MLflow is asked for and is not installed.
    """
    callbacks: list[tune.Callback] = [SweepProgress(work.folder, number, num_ended, work.config.search.objectives)]
    if work.config.run.tensorboard:
        callbacks.append(TBXLoggerCallback())
    if work.config.mlflow:
        if importlib.util.find_spec("mlflow") is None:
            raise ConfigError('--mlflow is True; it must be false without MLflow: pip install "domext_ray[mlflow]".')
        from ray.air.integrations.mlflow import MLflowLoggerCallback

        uri = f"sqlite:///{work.folder / 'mlflow.db'}"
        callbacks.append(MLflowLoggerCallback(tracking_uri=uri, experiment_name=work.folder.name))
    return callbacks


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


def read_walls(folder: Path) -> dict[str, float]:
    """Return the seconds that each trial has held its process."""
    path = folder / WALLS
    return read_json(path, "delete it: only the time of the trials is lost with it") if path.exists() else {}
