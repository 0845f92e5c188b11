"""Ray Tune searches a space for downstream F1: the driver of a sweep.

Enters: a `SweepConfig`. Leaves RUN.DIR/RUN.NAME with config.yaml, identity.json, trials/ (a run's directory each),
tune/ (what Ray Tune logs), summary.json, best.yaml, sweep.png and sweep.html. The same command goes on: finished
trials are kept, and the others continue from their own checkpoints; --search.trials may grow and shrink.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray
from ray import tune
from ray.tune.logger import TBXLoggerCallback
from ray.tune.schedulers import ASHAScheduler

from domext_ray.config.identity import identity_of
from domext_ray.config.sweep import OBJECTIVES, SearchConfig, SweepConfig
from domext_ray.corpus.stream import READ_CPUS
from domext_ray.corpus.texts.check import check_corpus
from domext_ray.errors import ConfigError, DomextError, find_user_error
from domext_ray.files import read_json, write_json
from domext_ray.inputs import count_words, provide_inputs
from domext_ray.labelled.readers.loading import LoadedSet, load_labelled
from domext_ray.model.base import Base
from domext_ray.plan import resolve_files, size_run
from domext_ray.progress import StatusLine, format_seconds
from domext_ray.runs.run_directory import (
    check_identity,
    hold_run,
    read_identity,
    resolve_root,
    write_config,
    write_identity,
)
from domext_ray.runtime.ray_cluster import describe_nodes, find_shortage, list_nodes, settle_gpu, share_cpus, start_ray
from domext_ray.search.results import TrialResult, read_trials
from domext_ray.search.searcher import PointSearcher, list_waiting, make_study
from domext_ray.search.space import Point, Space, TrialConfig, configure, describe_point, read_space
from domext_ray.search.sweep_report import BASE, read_base_scores, write_sweep_report
from domext_ray.search.trainable import TRIALS, SweepTrial
from domext_ray.search.trial import (
    DEATHS,
    FAILURE,
    Prepared,
    SweepWork,
    list_shares,
    load_trial_base,
    name_preparation,
    read_rungs,
    record_failure,
    score_base,
)
from domext_ray.training.metrics import write_text
from domext_ray.training.pretrain import check_shared_storage

DEFAULT_NAME = "sweep"
TUNE, PREPARED, WALLS = "tune", "prepared", "walls.json"
MIN_DRAWS, DRAWS_PER_TRIAL = 200, 10
"""Points that are drawn at most to find so many that can be trained."""
PROCESS_BYTES = 2**30
"""Memory of a trial's process without any model: torch, DeepSpeed, transformers, Ray and the rows that it reads."""


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
    config = _settle_gpu(resolve_files(config))
    space = read_space(config.space)
    points, reasons = choose_points(config, space)
    root = resolve_root(config.run.dir)
    folder = root / (config.run.name or DEFAULT_NAME)
    sets = tuple(_load_sets(config))
    identity = {**identity_of(config), **{f"data_sha256.{i}": each.sha256 for i, each in enumerate(sets)}}
    check_identity(folder, _take_trials(identity, folder), SweepConfig)
    check_corpus(config.corpus, config.prepare)
    if config.dry_run:
        print(describe_sweep(config, points, reasons, folder))
        return folder
    if is_finished(folder, config, points):
        print(f"the sweep in {folder} has ended; nothing is left to do.")
        return folder
    start_ray()
    config = _settle_gpu(config)
    cpus, parallel = plan_resources(config, estimate_trial_bytes(config, space))
    print(f"sweep directory: {folder}", flush=True)
    with hold_run(folder):
        check_shared_storage(folder)
        prepared = _prepare(config, space, root, folder)
        identity |= {f"base_sha256.{name}": each.base_sha256 for name, each in prepared.items()}
        identity |= {f"corpus_fingerprint.{name}": each.fingerprint for name, each in prepared.items()}
        check_identity(folder, _take_trials(identity, folder), SweepConfig)
        write_config(folder, config)
        write_identity(folder, identity)
        work = SweepWork(config, space, folder, sets, prepared, cpus)
        if config.score_base and config.base != "none":
            _score_base(work)
        search(work, points, parallel, trainable)
        text = write_sweep_report(config, space, folder, read_walls(folder))
    print(f"\n{text}\nreport: {folder / 'sweep.html'}\nbest: {folder / 'best.yaml'}")
    return folder


def _take_trials(identity: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return an identity with the number of trials of a sweep that is there: it may grow and shrink."""
    stored = (read_identity(folder) or {}).get("search", {})
    search = identity["search"]
    return {**identity, "search": {**search, "trials": stored.get("trials", search["trials"])}}


def is_finished(folder: Path, config: SweepConfig, points: Sequence[Point]) -> bool:
    """Whether a sweep has ended with all these points, or with as many trials.

    Raises:
        RunError: its summary.json is damaged.
    """
    path = folder / "summary.json"
    if not path.exists():
        return False
    remedy = "delete it and run the job again, which writes it anew"
    trials = [each for each in read_json(path, remedy, {"trials": list})["trials"] if each["status"] != "unfinished"]
    if not points:
        return len(trials) >= config.search.trials
    return {json.dumps(each) for each in points} <= {json.dumps(each["point"]) for each in trials}


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
            chosen = _check_point(config, space, point, bases)
        except DomextError as error:
            reasons[str(error)] += 1
        else:  # values that are written in two ways, such as 1e-4 and 0.0001, are one point
            valid.setdefault(repr(chosen), point)
    if not valid:
        raise ConfigError(f"the space makes no valid trial: {reasons.most_common(1)[0][0]}")
    return [] if search.searcher == "optuna" else list(valid.values()), reasons


def _check_point(
    config: SweepConfig, space: Space, point: Point, bases: dict[tuple[str, bool], Base | None]
) -> TrialConfig:
    configs = configure(config, space, point)
    pretrain = configs.pretrain
    key = pretrain.base, pretrain.objective.next_sentence
    if key not in bases:
        bases[key] = load_trial_base(pretrain)
    size_run(pretrain, bases[key])
    return configs


def _load_sets(config: SweepConfig) -> list[LoadedSet]:
    """Read the tasks' sets; their test splits are left behind, so that no trial sees them."""
    sets = []
    for task, data in zip(config.task_names, config.places, strict=True):
        loaded = load_labelled(replace(config.finetune, task=task, data=data))
        sets.append(replace(loaded, data=replace(loaded.data, test=())))
    return sets


def _settle_gpu(config: SweepConfig) -> SweepConfig:
    return settle_gpu(config, max(config.search.parallel, 1), "--search.parallel")


def estimate_trial_bytes(config: SweepConfig, space: Space) -> int:
    """Return about how much memory a trial's process takes.

    Its libraries, the model that is pre-trained, the tensors that fine-tuning starts from, and in fine-tuning fp32
    weights, gradients and AdamW's two moments of what trains.
    """
    weights = []
    for point in space.list_preparations():
        pretrain = configure(config, space, point).pretrain
        base, shape = load_trial_base(pretrain), pretrain.shape
        if base is not None:
            weights.append(sum(each.numel() for each in base.tensors.values()))
        else:
            layer = 4 * shape.hidden_size**2 + 2 * shape.hidden_size * shape.intermediate_size
            weights.append(shape.num_hidden_layers * layer + pretrain.vocab.size * shape.hidden_size)
    trains_all = any(each.trains == "all" for each in (config.method, config.finetune.method))
    return PROCESS_BYTES + (6 if trains_all else 4) * 4 * max(weights)


def _count_by_memory(trial_bytes: int) -> int:
    """Return the trials for whose memory the nodes have room, 1 at least; Ray knows what a container may use."""
    nodes = [node["Resources"].get("memory", 0.0) for node in ray.nodes() if node["Alive"]]
    return max(1, sum(int(each // trial_bytes) for each in nodes))


def plan_resources(config: SweepConfig, trial_bytes: int = 0) -> tuple[float, int]:
    """CPUs of a trial's process, and trials at once, checked against the cluster's resources.

    Args:
        config: the sweep.
        trial_bytes: about the memory of a trial; 0: not to be looked at.

    Raises:
        ConfigError: the cluster has less than one trial needs.
    """
    scale, nodes, with_gpu = config.scale, list_nodes(), config.scale.uses_gpu
    number = config.search.parallel or max(1, int(sum(each.gpus if with_gpu else each.cpus for each in nodes)))
    share = scale.cpus_per_worker or share_cpus(nodes, number, most=1.0, with_gpu=with_gpu, read_cpus=READ_CPUS)

    def find(trials: int) -> str:
        return find_shortage(nodes, trials, share or READ_CPUS, with_gpu=with_gpu, read_cpus=READ_CPUS)

    if not config.search.parallel:
        number = next((each for each in range(number, 1, -1) if not find(each)), 1)
    shortage = find(number)
    if shortage:
        trials = f"{number} trial{'s' if number > 1 else ''} at once"
        raise ConfigError(
            f"{trials} would take {share or READ_CPUS:g} CPUs{' and a GPU' if with_gpu else ''} each, and on "
            f"{describe_nodes(nodes)} {shortage}; lower --search.parallel or --scale.cpus_per_worker, or add nodes."
        )
    room_for = _count_by_memory(trial_bytes) if trial_bytes else number
    if room_for < number:
        needs = f"a trial takes about {trial_bytes / 2**30:.1f} GB of memory, and there is room for {room_for} at once"
        if config.search.parallel:
            print(f"warning: {needs}; --search.parallel is {number}.", flush=True)
        else:
            print(f"{needs}, not {number} as by CPUs and GPUs (--search.parallel decides otherwise).", flush=True)
            number = room_for
    return share, number


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
        tokenizer_dir, corpora = provide_inputs(placed)
        prepared[name] = Prepared(
            tokenizer_dir,
            corpora.domain[0].folder,
            corpora.domain[0].fingerprint,
            base.sha256 if base else "none",
            count_words(tokenizer_dir)[1],
            tuple(manifests[0].folder for manifests in corpora.beside),
            corpora.general_tokenizer_dir,
        )
    return prepared


def _score_base(work: SweepWork) -> None:
    """Score the base as it is, once: what the best trial has to beat."""
    path = work.folder / BASE
    if not path.exists():
        remote = ray.remote(num_cpus=work.cpus, num_gpus=1 if work.config.scale.uses_gpu else 0)(score_base)
        try:
            scores = ray.get(remote.remote(work))
        except Exception as error:
            raise find_user_error(error) or error from None
        write_json(path, scores)
    print(f"the base without pre-training: F1 {read_base_scores(work.folder)['f1']:.4f}", flush=True)


def search(work: SweepWork, points: Sequence[Point], parallel: int, trainable: type[tune.Trainable]) -> None:
    """Let Ray Tune run the trials, or the rest of them; Ray is initialised.

    What trials have left is all that is known of an earlier start; Ray Tune's own state of it is not read.

    Args:
        work: what all trials share.
        points: the trials' points; empty: Optuna suggests them.
        parallel: trials at once.
        trainable: what a trial is.
    """
    os.environ["TUNE_DISABLE_AUTO_CALLBACK_LOGGERS"] = "1"  # trials write their own metrics
    os.environ["RAY_AIR_NEW_OUTPUT"] = "0"
    os.environ["TUNE_DISABLE_SIGINT_HANDLER"] = "1"  # its own answer to Ctrl-C returns as if all trials had ended
    logging.getLogger("ray.tune").setLevel(logging.CRITICAL)  # `SweepProgress` says in a line whose process died
    search = work.config.search
    begun = read_trials(work.folder / TRIALS, search.rungs)
    ended = list_ended(work, begun)
    waiting = list_waiting(points, begun, ended)
    number = len(points) or max(search.trials, len(ended))
    num_left = len(waiting) if points else number - len(ended)
    if not num_left:
        return
    study = None if points else make_study(search, work.space, ended)
    searcher = PointSearcher(waiting[:num_left], study, work.space, len(begun), search.objective_names)
    tuner = tune.Tuner(
        tune.with_resources(tune.with_parameters(trainable, work=work), _describe_resources(work)),
        tune_config=tune.TuneConfig(
            num_samples=num_left,
            search_alg=searcher,
            scheduler=make_scheduler(work, [each.id for each in ended]),
            max_concurrent_trials=parallel,
            reuse_actors=True,
            trial_name_creator=get_trial_name,
            trial_dirname_creator=get_trial_name,
        ),
        run_config=tune.RunConfig(
            name=TUNE,
            storage_path=str(work.folder),
            failure_config=tune.FailureConfig(max_failures=search.max_failures),
            checkpoint_config=tune.CheckpointConfig(checkpoint_frequency=1),
            callbacks=make_callbacks(work, number, number - num_left),
            verbose=0,
        ),
    )
    try:
        tuner.fit()
    except Exception as error:
        raise find_user_error(error) or error from None


def list_ended(work: SweepWork, begun: Sequence[TrialResult]) -> list[TrialResult]:
    """Return the trials that need no more: complete, failed, or stopped by the scheduler.

    One whose process died too often is tried again where --search.max_failures allows more deaths by now.
    """
    walls = read_walls(work.folder)
    ended = []
    for each in begun:
        folder = work.folder / TRIALS / each.id
        has_died = each.status == "failed" and (folder / DEATHS).exists()
        if has_died and int((folder / DEATHS).read_text(encoding="utf-8")) <= work.config.search.max_failures:
            (folder / FAILURE).unlink()
        elif each.status in ("complete", "failed") or (each.status == "stopped" and each.id in walls):
            ended.append(each)
    return ended


def make_callbacks(work: SweepWork, number: int, num_ended: int) -> list[tune.Callback]:
    """Return what is told how trials go: the terminal, TensorBoard, and MLflow on request.

    Args:
        work: what all trials share.
        number: trials of the sweep.
        num_ended: those of them that have ended before.

    Raises:
        ConfigError: MLflow is asked for and is not installed.
    """
    callbacks: list[tune.Callback] = [SweepProgress(work.folder, number, num_ended, work.config.search.objective_names)]
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
    return tune.PlacementGroupFactory([{"CPU": work.cpus, **({"GPU": 1.0} if scale.uses_gpu else {})}])


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
