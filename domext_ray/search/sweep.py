"""Ray Tune searches a space for downstream F1: the driver of a sweep.

Enters: a `SweepConfig`. Leaves RUN.DIR/RUN.NAME with config.yaml, run.json, trials/ (a run's directory each),
tune/ (what Ray Tune logs), summary.json, best.yaml, sweep.png and sweep.html. The same command goes on: finished
trials are kept, and the others continue from their own checkpoints; --search.trials may grow and shrink.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray import tune

from domext_ray.config.sweep import SweepConfig
from domext_ray.errors import find_user_error
from domext_ray.inputs import count_words, get_or_prepare_inputs
from domext_ray.plan import load_run_base
from domext_ray.runs.run_directory import check_identity, lock_run, resolve_paths, resolve_root, write_config, write_run
from domext_ray.runtime.ray_cluster import start_ray
from domext_ray.search.plan import SweepPlan, describe_sweep, is_finished, plan_sweep, resolve_trials, take_trials
from domext_ray.search.resources import estimate_trial_bytes, plan_resources
from domext_ray.search.results import TrialResult, read_trials
from domext_ray.search.searcher import PointSearcher, list_waiting, make_study
from domext_ray.search.space import Point, Space, configure
from domext_ray.search.sweep_report import BASE, read_base_scores, write_sweep_report
from domext_ray.search.trainable import TRIALS, SweepTrial
from domext_ray.search.trial import DEATHS, FAILURE, Prepared, SweepWork, name_preparation, score_base
from domext_ray.search.watching import TUNE, get_trial_name, make_callbacks, make_scheduler, read_walls
from domext_ray.storage import write_json
from domext_ray.training.pretrain import check_shared_storage

PREPARED = "prepared"


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
    plan = plan_sweep(config)
    folder = plan.folder
    if config.dry_run:
        print(describe_sweep(plan))
        return folder
    if is_finished(plan):
        print(f"the sweep in {folder} has ended; nothing is left to do.")
        return folder
    start_ray()
    plan = replace(plan, config=resolve_trials(plan.config))
    cpus, parallel = plan_resources(plan.config, estimate_trial_bytes(plan.config, plan.space))
    print(f"sweep directory: {folder}", flush=True)
    with lock_run(folder):
        check_shared_storage(folder)
        work = prepare_sweep(plan, cpus)
        if plan.config.score_base and plan.config.base != "none":
            _score_base(work)
        search(work, plan.points, parallel, trainable)
        text = write_sweep_report(plan.config, plan.space, folder, read_walls(folder))
    print(f"\n{text}\nreport: {folder / 'sweep.html'}\nbest: {folder / 'best.yaml'}")
    return folder


def prepare_sweep(plan: SweepPlan, cpus: float) -> SweepWork:
    """Make what all trials share, and record what the sweep is.

    Args:
        plan: the sweep; its directory is held, and Ray is initialised.
        cpus: CPUs of a trial's process.

    Returns:
        What its trials share.

    Raises:
        DomextError: a text or base is not the sweep's, or cannot be prepared.
    """
    config, folder = plan.config, plan.folder
    prepared = _prepare(config, plan.space, folder)
    identity = {**plan.identity, **{f"base_sha256.{name}": each.base_sha256 for name, each in prepared.items()}}
    identity |= {f"corpus_fingerprint.{name}": each.inputs.domain.fingerprint for name, each in prepared.items()}
    check_identity(folder, take_trials(identity, folder))
    write_config(folder, config)
    write_run(folder, identity=identity)
    return SweepWork(config, plan.space, folder, plan.sets, prepared, cpus)


def _prepare(config: SweepConfig, space: Space, folder: Path) -> dict[str, Prepared]:
    """Make tokenizers and corpora, once each, before any trial takes the CPUs."""
    prepared: dict[str, Prepared] = {}
    for point in space.list_preparations():
        pretrain = configure(config, space, point).pretrain
        name = name_preparation(pretrain)
        if name in prepared:
            continue
        cache = pretrain.prepare.cache_dir or str(resolve_root(config.run.dir) / ".corpora")
        placed = replace(
            pretrain,
            run=replace(pretrain.run, name=name, dir=str(folder / PREPARED)),
            prepare=replace(pretrain.prepare, cache_dir=cache),
        )
        base = load_run_base(pretrain)
        inputs = get_or_prepare_inputs(placed, base, resolve_paths(placed))
        num_new_words = count_words(inputs.tokenizer.local())[1]
        prepared[name] = Prepared(inputs, base.sha256 if base else "none", num_new_words)
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
    searcher = PointSearcher(waiting[:num_left], study, work.space, len(begun), search.objectives)
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
        elif each.status in ("complete", "failed") or (each.status == "pruned" and each.id in walls):
            ended.append(each)
    return ended


def _describe_resources(work: SweepWork) -> Any:
    scale = work.config.scale
    return tune.PlacementGroupFactory([{"CPU": work.cpus, **({"GPU": 1.0} if scale.uses_gpu else {})}])
