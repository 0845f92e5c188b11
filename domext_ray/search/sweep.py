"""Ray Tune searches a space for downstream F1: the driver of a sweep.

Enters: a `SweepConfig`. Leaves RUN.DIR/RUN.NAME with config.yaml, identity.json, trials/ (a run's directory each),
tune/ (Ray Tune's own state), summary.json, best.yaml, sweep.png and sweep.html. The same command goes on: finished
trials are kept, and the others continue from their own checkpoints.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import math
import os
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import ray
from ray import tune
from ray.tune.logger import TBXLoggerCallback
from ray.tune.schedulers import ASHAScheduler
from ray.tune.search import Searcher
from ray.tune.search.optuna import OptunaSearch

from domext_ray.config import dump_yaml, identity_of
from domext_ray.errors import ConfigError, DomextError, find_user_error
from domext_ray.labelled.loading import LoadedSet, load_labelled
from domext_ray.model.base import Base
from domext_ray.pipeline import count_planned_words, provide_inputs, resolve_files, size_method
from domext_ray.run_directory import check_identity, hold_run, resolve_root
from domext_ray.search.space import Point, Space, configure, describe_point, read_space
from domext_ray.search.sweep_report import BASE, write_sweep_report
from domext_ray.search.trainable import TRIALS, SweepTrial
from domext_ray.search.trial import (
    Prepared,
    SweepWork,
    list_shares,
    load_trial_base,
    name_preparation,
    read_rungs,
    record_failure,
    score_base,
)
from domext_ray.search_config import OBJECTIVES, SearchConfig, SweepConfig
from domext_ray.status_line import StatusLine, format_seconds
from domext_ray.training.metrics import write_text
from domext_ray.training.pretrain import check_shared_storage, start_ray

DEFAULT_NAME = "sweep"
TUNE, SETS, PREPARED, WALLS = "tune", ".sets", "prepared", "walls.json"
MIN_DRAWS, DRAWS_PER_TRIAL = 200, 10
"""Points that are drawn at most to find so many that can be trained."""
READ_CPUS = 0.5
"""CPUs that trials leave to the tasks that read their rows."""


def run_sweep(config: SweepConfig, trainable: type[tune.Trainable] = SweepTrial) -> Path:
    """Carry a sweep from a space to its leaderboard and its best configuration.

    Args:
        config: the sweep; with `dry_run` everything is checked and printed and nothing is started or written.
        trainable: what a trial is.

    Returns:
        The sweep's directory.

    Raises:
        DomextError: any mistake of the user's, before anything is trained where that can be known.
    """
    config = resolve_files(config)
    space = read_space(config.space)
    points, reasons = choose_points(config, space)
    root = resolve_root(config.run.dir)
    folder = root / (config.run.name or DEFAULT_NAME)
    sets = tuple(_load_sets(config, root / SETS))
    identity = {**identity_of(config), **{f"data_sha256.{i}": each.sha256 for i, each in enumerate(sets)}}
    check_identity(folder, identity)
    if config.dry_run:
        print(describe_sweep(config, points, reasons, folder))
        return folder
    if (folder / "summary.json").exists():
        print(f"the sweep in {folder} has ended; nothing is left to do.")
        return folder
    print(f"sweep directory: {folder}", flush=True)
    with hold_run(folder):
        start_ray()
        check_shared_storage(folder)
        cpus, parallel = plan_resources(config)
        prepared = _prepare(config, space, root, folder)
        identity |= {f"base_sha256.{name}": each.base_sha256 for name, each in prepared.items()}
        identity |= {f"corpus_fingerprint.{name}": each.fingerprint for name, each in prepared.items()}
        check_identity(folder, identity)
        write_text(folder / "config.yaml", dump_yaml(config))
        write_text(folder / "identity.json", json.dumps(identity, indent=2) + "\n")
        work = SweepWork(config, space, folder, sets, prepared, cpus)
        if config.score_base and config.base != "none":
            _score_base(work)
        search(work, points, parallel, trainable)
        text = write_sweep_report(config, space, folder, read_walls(folder))
    print(f"\n{text}\nreport: {folder / 'sweep.html'}\nbest: {folder / 'best.yaml'}")
    return folder


def choose_points(config: SweepConfig, space: Space) -> tuple[list[Point], Counter[str]]:
    """Choose the points of a searcher that knows them beforehand, each one once and those alone that can be trained.

    What can be known without training is checked: a point's options, its base and its sizes.

    Returns:
        The points; none for Optuna, whose space is tried only. And how many were refused for each reason.

    Raises:
        ConfigError: no point can be trained.
    """
    search = config.search
    if search.searcher == "grid":
        drawn, wanted = space.list_grid(), None
    else:
        drawn, wanted = space.sample(max(MIN_DRAWS, DRAWS_PER_TRIAL * search.trials), search.seed), search.trials
    bases: dict[tuple[str, bool], Base | None] = {}
    reasons: Counter[str] = Counter()
    valid: dict[str, Point] = {}
    for point in drawn:
        if len(valid) == wanted:
            break
        try:
            _check_point(config, space, point, bases)
        except DomextError as error:
            reasons[str(error)] += 1
        else:
            valid[json.dumps(point)] = point
    if not valid:
        raise ConfigError(f"the space makes no valid trial: {reasons.most_common(1)[0][0]}")
    return [] if search.searcher == "optuna" else list(valid.values()), reasons


def _check_point(config: SweepConfig, space: Space, point: Point, bases: dict[tuple[str, bool], Base | None]) -> None:
    pretrain = configure(config, space, point).pretrain
    key = pretrain.base, pretrain.objective.next_sentence
    if key not in bases:
        bases[key] = load_trial_base(pretrain)
    size_method(pretrain, bases[key], count_planned_words(pretrain, bases[key]))


def _load_sets(config: SweepConfig, cache: Path) -> list[LoadedSet]:
    """Read the tasks' sets; their test splits are left behind, so that no trial sees them."""
    sets = []
    for task, data in zip(config.task_names, config.places, strict=True):
        loaded = load_labelled(replace(config.finetune, task=task, data=data), cache)
        sets.append(replace(loaded, data=replace(loaded.data, test=())))
    return sets


def plan_resources(config: SweepConfig) -> tuple[float, int]:
    """CPUs of a trial's process, and trials at once, checked against the cluster's resources.

    Raises:
        ConfigError: the cluster has less than one trial needs.
    """
    available = ray.cluster_resources()
    cpus, gpus = available.get("CPU", 0.0), available.get("GPU", 0.0)
    scale, parallel = config.scale, config.search.parallel
    wanted = max(parallel, 1)
    if scale.use_gpu and gpus < wanted:
        raise ConfigError(
            f"{wanted} trials at once need {wanted} GPUs, and the cluster has {gpus:g}; lower --search.parallel, or "
            "add nodes."
        )
    room = max(cpus - READ_CPUS, 0.1)
    share = scale.cpus_per_worker or min(1.0, math.floor(100 * room / (parallel or max(1, int(cpus)))) / 100)
    limit = int(room / share + 1e-6)
    if scale.use_gpu:
        limit = min(limit, int(gpus))
    if limit < wanted:
        raise ConfigError(
            f"{wanted} trials at once need {share * wanted:g} CPUs and {READ_CPUS} for reading, and the cluster has "
            f"{cpus:g}; lower --search.parallel or --scale.cpus_per_worker, or add nodes."
        )
    return share, parallel or limit


def _prepare(config: SweepConfig, space: Space, root: Path, folder: Path) -> dict[str, Prepared]:
    """Make tokenizers and corpora, once each, before any trial takes the CPUs."""
    prepared: dict[str, Prepared] = {}
    for point in space.list_preparations():
        pretrain = configure(config, space, point).pretrain
        name = name_preparation(pretrain)
        if name in prepared:
            continue
        cache = pretrain.prepare.cache_dir or str(root / ".corpora")
        placed = replace(
            pretrain,
            run=replace(pretrain.run, name=name, dir=str(folder / PREPARED)),
            prepare=replace(pretrain.prepare, cache_dir=cache),
        )
        base = load_trial_base(pretrain)
        tokenizer, num_new_words, manifest = provide_inputs(placed)
        prepared[name] = Prepared(
            tokenizer, manifest.folder, manifest.fingerprint, base.sha256 if base else "none", num_new_words
        )
    return prepared


def _score_base(work: SweepWork) -> None:
    """Score the base as it is, once: what the best trial has to beat."""
    path = work.folder / BASE
    if not path.exists():
        remote = ray.remote(num_cpus=work.cpus, num_gpus=1 if work.config.scale.use_gpu else 0)(score_base)
        try:
            scores = ray.get(remote.remote(work))
        except Exception as error:
            raise find_user_error(error) or error from None
        write_text(path, json.dumps(scores))
    print(f"the base without pre-training: F1 {json.loads(path.read_text(encoding='utf-8'))['f1']:.4f}", flush=True)


def search(work: SweepWork, points: Sequence[Point], parallel: int, trainable: type[tune.Trainable]) -> None:
    """Let Ray Tune run the trials, or the rest of them; Ray is initialised.

    Args:
        work: what all trials share.
        points: the trials' points; empty: Optuna suggests them.
        parallel: trials at once.
        trainable: what a trial is.
    """
    os.environ["TUNE_DISABLE_AUTO_CALLBACK_LOGGERS"] = "1"  # trials write their own metrics
    os.environ["RAY_AIR_NEW_OUTPUT"] = "0"
    logging.getLogger("ray.tune").setLevel(logging.ERROR)  # it warns that it finds no metrics of its own
    config = work.config
    made = tune.with_resources(tune.with_parameters(trainable, work=work), _describe_resources(work))
    place = work.folder / TUNE
    number = len(points) or config.search.trials
    if tune.Tuner.can_restore(str(place)):
        tuner = tune.Tuner.restore(str(place), made, resume_unfinished=True)
    else:
        shutil.rmtree(place, ignore_errors=True)  # of a driver that died before its first trial
        tuner = tune.Tuner(
            made,
            param_space={"point": tune.grid_search(list(points))} if points else {},
            tune_config=tune.TuneConfig(
                num_samples=1 if points else number,
                search_alg=None if points else make_searcher(work),
                scheduler=make_scheduler(work),
                max_concurrent_trials=parallel,
                reuse_actors=True,
                trial_name_creator=name_trial,
                trial_dirname_creator=name_trial,
            ),
            run_config=tune.RunConfig(
                name=TUNE,
                storage_path=str(work.folder),
                failure_config=tune.FailureConfig(max_failures=config.search.max_failures),
                checkpoint_config=tune.CheckpointConfig(checkpoint_frequency=1),
                callbacks=make_callbacks(work, number),
                verbose=0,
            ),
        )
    try:
        tuner.fit()
    except Exception as error:
        raise find_user_error(error) or error from None


def make_callbacks(work: SweepWork, number: int) -> list[tune.Callback]:
    """Return what is told how trials go: the terminal, TensorBoard, and MLflow on request.

    Raises:
        ConfigError: MLflow is asked for and is not installed.
    """
    callbacks: list[tune.Callback] = [SweepProgress(work.folder, number, work.config.search.objective_names)]
    if work.config.run.tensorboard:
        callbacks.append(TBXLoggerCallback())
    if work.config.mlflow:
        if importlib.util.find_spec("mlflow") is None:
            raise ConfigError('--mlflow is True; it must be false without MLflow: pip install "domext_ray[mlflow]".')
        from ray.air.integrations.mlflow import MLflowLoggerCallback

        uri = f"sqlite:///{work.folder / 'mlflow.db'}"
        callbacks.append(MLflowLoggerCallback(tracking_uri=uri, experiment_name=work.folder.name))
    return callbacks


def _describe_resources(work: SweepWork) -> Any:
    scale = work.config.scale
    return tune.PlacementGroupFactory([{"CPU": work.cpus, **({"GPU": 1.0} if scale.use_gpu else {})}])


def name_trial(trial: Any) -> str:
    """Return the name of a trial and its directory."""
    return str(trial.trial_id)


def make_searcher(work: SweepWork) -> Searcher:
    """Return Optuna's searcher over a space: TPE, or NSGA-II for several objectives."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    search, names = work.config.search, work.config.search.objective_names
    modes = [OBJECTIVES[name] for name in names]
    if len(names) == 1:
        return OptunaSearch(work.space, metric=names[0], mode=modes[0], seed=search.seed)
    return OptunaSearch(
        work.space, metric=list(names), mode=modes, sampler=optuna.samplers.NSGAIISampler(seed=search.seed)
    )


def make_scheduler(work: SweepWork) -> ASHAScheduler | None:
    """Return what stops bad trials."""
    search = work.config.search
    return None if search.scheduler == "none" else RememberingASHA(work.folder / TRIALS, search)


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
            metric=search.objective_names[0],
            mode=OBJECTIVES[search.objective_names[0]],
            max_t=search.reduction ** (search.rungs - 1),
            grace_period=1,
            reduction_factor=search.reduction,
        )

    def on_trial_add(self, tune_controller: Any, trial: Any) -> None:
        """Take a trial with what it has scored."""
        super().on_trial_add(tune_controller, trial)
        name = self.search.objective_names[0]
        for i, rung in enumerate(read_rungs(self.folder / trial.trial_id)):
            self.on_trial_result(tune_controller, trial, {"resource": self.search.reduction**i, name: rung[name]})


class SweepProgress(tune.Callback):
    """Says what every trial scored and how long the others will take, and keeps how long each took.

    Args:
        folder: the sweep's directory.
        number: trials of the sweep.
        objectives: what is searched for.
    """

    def __init__(self, folder: Path, number: int, objectives: Sequence[str]) -> None:
        self.folder, self.number, self.objectives = folder, number, tuple(objectives)
        self.walls = read_walls(folder)
        self.begun: dict[str, float] = {}
        self.ended_before = -1

    def setup(self, stop: Any = None, num_samples: Any = None, total_num_samples: Any = None, **info: Any) -> None:
        """Begin, or go on, in this process."""
        self.line = StatusLine()
        self.begun, self.walls = {}, read_walls(self.folder)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "line"}

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Note when a trial began."""
        self.begun.setdefault(trial.trial_id, self.line.seconds)

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Say what a trial scored."""
        self._end(trials, trial, "")

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Note and say that a trial's process died too often."""
        reason = f"its process died {trial.num_failures} times; {trial.error_file} has what was said"
        record_failure(self.folder / TRIALS / trial.trial_id, trial.config.get("point", trial.config), reason)
        self._end(trials, trial, reason)

    def _end(self, trials: list[Any], trial: Any, reason: str) -> None:
        seconds = self.line.seconds - self.begun.pop(trial.trial_id, self.line.seconds)
        self.walls[trial.trial_id] = self.walls.get(trial.trial_id, 0.0) + seconds
        write_text(self.folder / WALLS, json.dumps(self.walls))
        ended = sum(each.is_finished() for each in trials if each is not trial) + 1
        if self.ended_before < 0:
            self.ended_before = ended - 1
        result = trial.last_result or {}
        figures = ", ".join(
            f"{name} {result[name]:.4g}" for name in self.objectives if isinstance(result.get(name), float | int)
        )
        point = trial.config.get("point", trial.config)
        left = self.line.seconds / max(ended - self.ended_before, 1) * (self.number - ended)
        self.line.keep(
            f"[{ended} of {self.number}] {describe_point(point)}: {reason or figures} "
            f"(resource {result.get('resource', 0)}, {seconds:.0f} s; about {format_seconds(left)} left)"
        )


def read_walls(folder: Path) -> dict[str, float]:
    """Return the seconds that each trial has held its process."""
    path = folder / WALLS
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def describe_sweep(config: SweepConfig, points: Sequence[Point], reasons: Counter[str], folder: Path) -> str:
    """Return what a dry run prints."""
    search, budget = config.search, config.budget
    amounts = {"steps": f"{budget.steps:,}", "tokens": f"{budget.tokens:,}", "seconds": f"{budget.seconds:g}"}
    amount = next(f"{text} {name}" for name, text in amounts.items() if getattr(budget, name))
    shares = ", ".join(f"{each:.3g}" for each in list_shares(config))
    lines = [
        f"{len(points) or search.trials} trials of {amount}, scored at {shares} of it; {search.searcher} search"
        + (", stopped by ASHA" if search.scheduler == "asha" else ""),
        *(describe_point(each) for each in points),
        *(f"{count} points cannot be trained: {reason}" for reason, count in reasons.most_common()),
        f"sweep directory: {folder}",
        "dry run: nothing was started",
    ]
    return "\n".join(lines)
