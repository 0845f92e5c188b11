"""Ray Tune searches a space for downstream F1: the driver of a sweep.

Enters: a `SweepConfig`. Leaves RUN.DIR/RUN.NAME with config.yaml, run.json, trials/ (a run's directory each, and its
record), tune/ (what trackers keep), summary.json, best.yaml, sweep.png and sweep.html. The same command goes on:
finished trials are kept, and the others continue from their own checkpoints; --search.trials may grow and shrink.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from domext_ray.config.sweep import SweepConfig
from domext_ray.families.label_counts import describe_set
from domext_ray.pretraining.inputs import get_or_prepare_inputs, require_same_text
from domext_ray.pretraining.plan import load_run_base, pin_corpus
from domext_ray.runs.run_directory import (
    check_identity,
    lock_run,
    read_identity,
    resolve_paths,
    resolve_root,
    write_config,
    write_run,
)
from domext_ray.runtime.on_tune import run_trials
from domext_ray.runtime.ray_cluster import check_shared_storage, start_ray
from domext_ray.runtime.tasks import Pool, Task, run_tasks
from domext_ray.runtime.trials import Rules, Trial
from domext_ray.storage import Place, write_json
from domext_ray.studies.sweep.plan import (
    GROWING,
    Prepared,
    SweepPlan,
    describe_sweep,
    is_finished,
    plan_sweep,
    resolve_trials,
)
from domext_ray.studies.sweep.report import BASE, read_base_scores, write_sweep_report
from domext_ray.studies.sweep.resources import estimate_trial_bytes, plan_resources
from domext_ray.studies.sweep.searcher import Search
from domext_ray.studies.sweep.space import configure, name_preparation
from domext_ray.studies.sweep.trial import SweepWorker, score_base
from domext_ray.studies.sweep.watching import SweepWatch

PREPARED = "prepared"


def run_sweep(config: SweepConfig, make: Callable[[SweepPlan], Any] = SweepWorker) -> Place:
    """Carry a sweep from a space to its leaderboard and its best configuration; return its directory.

    With `dry_run` everything is checked and printed, and nothing is started or written. `make` makes what does the
    rungs of trials, in each process.
    """
    plan = plan_sweep(config)
    folder = plan.folder
    if config.dry_run:
        print(describe_sweep(plan))
        return folder
    if is_finished(plan):
        print(f"the sweep in {folder} has ended; nothing is left to do.")
        return folder
    start_ray(config.scale.wait_seconds)
    plan = replace(plan, config=resolve_trials(plan.config))
    cpus, parallel = plan_resources(plan.config, estimate_trial_bytes(plan.config, plan.space))
    print("\n".join([*map(describe_set, plan.sets), f"sweep directory: {folder}"]), flush=True)
    with lock_run(folder):
        check_shared_storage(folder)
        plan = replace(prepare_sweep(plan), cpus=cpus)
        if plan.config.score_base and plan.config.base != "none":
            _score_base(plan)
        _run_trials(plan, parallel, make)
        text = write_sweep_report(plan.config, plan.space, folder)
    print(f"\n{text}\nreport: {folder / 'sweep.html'}\nbest: {folder / 'best.yaml'}")
    return folder


def prepare_sweep(plan: SweepPlan) -> SweepPlan:
    """Make tokenizers and corpora, once each, before any trial takes the CPUs, and record what the sweep is."""
    config, folder = plan.config, plan.folder
    prepared, stored, identity = dict[str, Prepared](), read_identity(folder) or {}, {**plan.identity}
    for point in plan.space.list_preparations():
        pretrain = configure(config, plan.space, point).pretrain
        name = name_preparation(pretrain)
        if name in prepared:
            continue
        cache = pretrain.prepare.cache_dir or str(resolve_root(config.run.dir) / ".corpora")
        placed = replace(
            pretrain,
            run=replace(pretrain.run, name=name, dir=str(folder / PREPARED)),
            prepare=replace(pretrain.prepare, cache_dir=cache),
        )
        base, paths = load_run_base(pretrain), resolve_paths(placed)
        if known := stored.get(f"corpus_fingerprint.{name}"):
            pinned = pin_corpus(placed, read_identity(paths.run) or {}).corpus
            require_same_text(paths, known, pinned, placed.prepare, f"the sweep in {folder}")
        inputs = get_or_prepare_inputs(placed, base, paths)
        prepared[name] = Prepared(inputs, base)
        identity[f"base_sha256.{name}"] = base.sha256 if base else "none"
    identity |= {f"corpus_fingerprint.{name}": made.inputs.domain.fingerprint for name, made in prepared.items()}
    check_identity(folder, identity, free=GROWING)
    write_config(folder, config)
    write_run(folder, identity=identity)
    return replace(plan, prepared=prepared)


def _score_base(plan: SweepPlan) -> None:
    """Score the base as it is, once: what the best trial has to beat."""
    path = plan.folder / BASE
    if not path.exists():
        task, shares = Task(0, None, 1.0, "the base"), {"total": 1, "cpus": plan.cpus, "gpus": plan.gpus}
        said = {"verb": "scoring the base", "unit": "models", "remedy": "give it a larger machine"}
        (scores,) = run_tasks(partial(score_base, plan), [task], None, **said, **shares)  # type: ignore[arg-type]
        write_json(path, scores)
    scores = read_base_scores(plan.folder)
    print(f"the base without pre-training: {scores['figure']} {scores['f1']:.4f}", flush=True)


def _run_trials(plan: SweepPlan, parallel: int, make: Callable[[SweepPlan], Any]) -> None:
    """Run the trials, or the rest of them; Ray is initialised."""
    config = plan.config
    search = Search(config.search, plan.space, plan.points, plan.ledger.list())
    if search.number == search.num_ended:
        return
    watch = SweepWatch(plan.folder, search, config.run.trackers)
    rules = Rules("searching", _explain_death, config.search.rungs, config.search.max_failures)
    pool = _make_pool(plan, make, min(parallel, search.number - search.num_ended))
    try:
        run_trials(pool, search.list_trials(), plan.ledger, watch, rules)
    finally:
        watch.close()


def _explain_death(trial: Trial, deaths: int) -> str:
    return f"its process died {deaths} times; Ray's logs have what was said"


def _make_pool(plan: SweepPlan, make: Callable[[SweepPlan], Any], number: int) -> Pool:
    return Pool(partial(make, plan), number, plan.cpus, plan.gpus)
