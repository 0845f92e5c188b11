"""A grid of trainings as Ray tasks: best mean on dev, test scored once -> a run directory.

Enters: a `FinetuneConfig`. Leaves RUN.DIR/RUN.NAME with config.yaml, identity.json, trainings/ (one JSON a training,
and the tensors of the best one and its restarts), predictions.jsonl, resamples.npz, summary.json, scores.png,
report.html and export/. The same command goes on, also with a grid that has grown or shrunk: trainings that have ended
are kept. BERT section A.3 (grid, random restarts, chosen on dev).
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import ray

from domext_ray.config.finetune import FinetuneConfig
from domext_ray.config.identity import identity_of
from domext_ray.downstream.finetune.comparison import write_resamples
from domext_ray.downstream.finetune.export import check_places
from domext_ray.downstream.finetune.finetuned import make_set_task, read_finetune_summary, result_path
from domext_ray.downstream.finetune.grid import (
    choose_point,
    forget_failures,
    has_ended,
    list_overtaken,
    list_points,
    read_results,
    record_failure,
)
from domext_ray.downstream.finetune.output import (
    FinalScores,
    FinetuneProgress,
    build_summary,
    describe_finetune_plan,
    format_finetune_summary,
    get_figure,
    write_finetune_report,
)
from domext_ray.downstream.finetune.training import Point, make_model
from domext_ray.downstream.finetune.trainings import MORE_MEMORY, FinetuneWork, TooLargeError, score_point, train_point
from domext_ray.downstream.start.model import StartModel, load_start_model
from domext_ray.downstream.tasks.stages import StagedTask
from domext_ray.errors import ConfigError, RunError, TrainingError, find_user_error
from domext_ray.files import read_json, write_json
from domext_ray.labelled.readers.loading import LoadedSet, load_labelled
from domext_ray.runs.run_directory import (
    check_identity,
    hold_run,
    read_identity,
    resolve_root,
    write_config,
    write_identity,
)
from domext_ray.runtime.ray_cluster import settle_gpu, start_ray
from domext_ray.training.metrics import write_text
from domext_ray.training.pretrain import check_shared_storage


def run_finetuning(config: FinetuneConfig) -> Path:
    """Carry a fine-tuning run from labelled files to scores, report and export.

    Args:
        config: the run; with `dry_run` everything is checked and printed and nothing is trained or written.

    Returns:
        The run's directory.

    Raises:
        DomextError: any mistake of the user's, before anything is trained where that can be known.
    """
    config = settle_gpu(config)
    root = resolve_root(config.run.dir)
    start = load_start_model(config.model, config.model_step, config.keep_head)
    loaded = load_labelled(config)
    task = make_set_task(config, start, loaded)
    default_name = f"{loaded.data.name}-{start.name}".replace("/", "-")  # names of the hub have an owner
    folder = root / (config.run.name or default_name)
    identity = {**identity_of(config), "model_sha256": start.sha256, "data_sha256": loaded.sha256}
    identity["data"] = ""  # where the files are does not matter; what they hold does
    identity["model"] = start.name
    check_identity(folder, _take_grid(identity, read_identity(folder) or {}), FinetuneConfig)
    counts = count_parameters(config, start, task)
    if start.brings is not None and start.head is None:
        kind = start.brings.removeprefix("DomextFor")
        print(f"note: {start.name} brings a {kind} head; a new one takes its place (--keep_head true goes on with it).")
    if config.dry_run:
        print(describe_finetune_plan(config, start, task, counts, folder))
        return folder
    if is_finished(folder, config):
        print(f"the run in {folder} has ended; nothing is left to do.")
        return folder
    if config.export:
        check_places(task, folder / "export")
    start_ray()
    config = settle_gpu(config)
    cpus, parallel = _plan_resources(config)
    with hold_run(folder):
        write_config(folder, config)
        write_identity(folder, identity)
        check_shared_storage(folder)
        work = FinetuneWork(config, start, task, folder, cpus)
        work.trainings.mkdir(exist_ok=True)
        _run(work, loaded, counts, parallel)
    return folder


def _take_grid(identity: dict[str, Any], stored: dict[str, Any]) -> dict[str, Any]:
    """Return an identity with the grid's values and the seed of a run that is there: these may grow and shrink."""
    grid, stored_grid = identity["grid"], stored.get("grid", {})
    kept = {name: stored_grid.get(name, grid[name]) for name in ("lr", "batch_size", "epochs", "restarts")}
    return {**identity, "seed": stored.get("seed", identity["seed"]), "grid": {**grid, **kept}}


def is_finished(folder: Path, config: FinetuneConfig) -> bool:
    """Whether a run has ended with just these trainings, and its report and its export are there.

    Raises:
        RunError: its summary.json is damaged.
    """
    path = folder / "summary.json"
    has_export = not config.export or (folder / "export").exists()
    if not (path.exists() and (folder / "report.html").exists() and has_export):
        return False
    summary = read_finetune_summary(folder)
    try:
        trained = [*summary["trainings"], *(each for each in summary.get("failed", ()) if not each["may_try_again"])]
        ended = [Point(**{each.name: record[each.name] for each in fields(Point)}) for record in trained]
    except (KeyError, TypeError) as error:
        raise RunError(f"{path} has a training without its point; delete it and run the job again.") from error
    return sorted(ended, key=str) == sorted(list_points(config), key=str)


def count_parameters(config: FinetuneConfig, start: StartModel, task: StagedTask) -> dict[str, tuple[int, int]]:
    """Trained and all parameters of each stage's model; makes the models, which checks that everything fits."""
    grid = config.grid
    for option, text, named in (
        ("stage_lr", grid.stage_lr, grid.rates_by_stage),
        ("stage_epochs", grid.stage_epochs, grid.epochs_by_stage),
    ):
        if not named.keys() <= task.stages.keys():
            steps = ", ".join(task.stages)
            raise ConfigError(f"--grid.{option} is {text!r}; the steps of --task {config.task} are {steps}.")
    counts = {}
    for name, stage in task.stages.items():
        model = make_model(start, stage, config, config.seed)
        sizes = [(each.numel(), each.requires_grad) for each in model.parameters()]
        counts[name] = sum(size for size, trains in sizes if trains), sum(size for size, _ in sizes)
    return counts


def _plan_resources(config: FinetuneConfig) -> tuple[float, int]:
    """CPUs of a training, and trainings at once, checked against the cluster's resources."""
    available = ray.cluster_resources()
    cpus, gpus = available.get("CPU", 0.0), available.get("GPU", 0.0)
    num_trainings = len(config.grid.points) * config.grid.restarts
    limit = int(gpus) if config.scale.uses_gpu else max(1, int(cpus / (config.scale.cpus or 1.0)))
    parallel = min(num_trainings, config.scale.parallel or limit)
    largest = max(node["Resources"].get("CPU", 0.0) for node in ray.nodes() if node["Alive"])
    share = config.scale.cpus or min(max(1.0, cpus // parallel), largest)
    if share > largest:
        raise ConfigError(f"--scale.cpus is {share:g}; no node has more than {largest:g} CPUs.")
    return share, parallel


def _run(work: FinetuneWork, loaded: LoadedSet, counts: dict[str, tuple[int, int]], parallel: int) -> None:
    started = time.perf_counter()
    points = list_points(work.config)
    forget_failures(work.trainings, points)
    _train_all(work, points, parallel)
    results = read_results(work.trainings, points)
    if not results.ended:
        raise TrainingError(f"all {len(points)} trainings failed; of the first: {results.failed[0]['reason']}")
    best, chosen = choose_point(results)
    _restore_tensors(work, [Point(**each["point"]) for each in chosen], parallel)
    chosen_points, best_point = [Point(**each["point"]) for each in chosen], Point(**best["point"])
    _score_all(work, chosen_points, best_point)
    final = gather_scores(work, chosen_points, best_point)
    seconds = time.perf_counter() - started
    summary = build_summary(work.config, work.start, loaded, work.task, counts, results, best, chosen, final, seconds)
    write_json(work.folder / "summary.json", summary)
    write_finetune_report(work.folder)
    print(format_finetune_summary(summary))
    print(f"\n{work.folder / 'report.html'}")


def _score_all(work: FinetuneWork, points: Sequence[Point], best: Point) -> None:
    """Score trainings on test, each in a Ray task, and export the best one."""
    export = work.folder / "export" if work.config.export else None
    shared = ray.put(work)
    try:
        ray.get([_submit(score_point, work, [shared, each, export if each == best else None]) for each in points])
    except Exception as error:
        raise find_user_error(error) or error from None


def gather_scores(work: FinetuneWork, points: Sequence[Point], best: Point) -> FinalScores:
    """Read what the chosen training and its restarts reached, and write the run's predictions and resamples.

    Leaves predictions.jsonl of the best training, and resamples.npz: for each split the metric's resampled figures
    [restarts, resamples]. Runs on one set draw the same examples, so two models' paired difference follows from these
    files alone.
    """
    splits = ("dev", "test") if work.task.data.test else ("dev",)
    folder = work.trainings / best.key
    lines = [(folder / f"{split}.predictions.jsonl").read_text(encoding="utf-8") for split in splits]
    write_text(work.folder / "predictions.jsonl", "".join(lines))
    drawn = {split: [np.load(work.trainings / each.key / f"{split}.npy") for each in points] for split in splits}
    write_resamples(work.folder, {split: np.stack(each) for split, each in drawn.items()})
    remedy = "delete the training's folder and the .json beside it: the same command trains it again"
    read = {
        (point, split): read_json(work.trainings / point.key / f"{split}.json", remedy, {"figures": dict})
        for point in points
        for split in splits
    }
    own = {split: read[best, split] for split in splits}
    notes = [note for each in own.values() for note in each["notes"]]
    return FinalScores(
        own["dev"]["figures"],
        own["test"]["figures"] if "test" in own else {},
        {split: [get_figure(read[point, split]["figures"], work.task.metric) for point in points] for split in splits},
        {split: each["baselines"] for split, each in own.items()},
        {split: each["steps"] for split, each in own.items()},
        tuple(dict.fromkeys(notes)),
    )


def _train_all(work: FinetuneWork, points: Sequence[Point], parallel: int, *, keep_all: bool = False) -> None:
    """Run the trainings that have not ended before; one that fails leaves its reason, and the others go on.

    Args:
        work: the run.
        points: its trainings.
        parallel: trainings at once.
        keep_all: keep all tensors; else those of trainings that may still be chosen.
    """
    folder = work.trainings
    waiting = [point for point in points if not has_ended(folder, point)]
    shared = ray.put(work)
    running: dict[Any, Point] = {}
    with FinetuneProgress(folder, tuple(work.task.stages), points) as progress:
        try:
            while waiting or running:
                while waiting and len(running) < parallel:
                    point = waiting.pop(0)
                    running[_submit(train_point, work, [shared, point])] = point
                done, _ = ray.wait(list(running), timeout=1.0)
                for reference in done:
                    point = running.pop(reference)
                    try:
                        ray.get(reference)
                    except Exception as error:
                        _note_failure(folder, point, error)
                        progress.tell_failure(point)
                    if not keep_all:
                        for each in list_overtaken(folder, points):
                            shutil.rmtree(folder / each.key, ignore_errors=True)
                progress.show(list(running.values()))
        except Exception as error:
            for reference in running:
                ray.cancel(reference, force=True)
            raise find_user_error(error) or error from None


def _note_failure(trainings: Path, point: Point, error: Exception) -> None:
    """Record why a training failed; a mistake that all trainings share, or a defect, is raised instead."""
    if isinstance(error, ray.exceptions.OutOfMemoryError | ray.exceptions.WorkerCrashedError):
        reason = f"the process of {point.key} died, as one does that needs more memory than there is; {MORE_MEMORY}."
        record_failure(trainings, point, reason, may_try_again=True)
        return
    cause = find_user_error(error)
    if not isinstance(cause, TrainingError):
        raise error
    record_failure(trainings, point, str(cause), may_try_again=isinstance(cause, TooLargeError))


def _restore_tensors(work: FinetuneWork, points: Sequence[Point], parallel: int) -> None:
    """Train those of the chosen trainings again whose tensors were dropped: an earlier grid had a better point."""
    lost = [each for each in points if not work.has_model(each)]
    if not lost:
        return
    print(f"{len(lost)} of the chosen trainings were overtaken in an earlier grid: trained again for their tensors.")
    for each in lost:
        result_path(work.trainings, each).unlink()
    _train_all(work, lost, parallel, keep_all=True)
    failed = read_results(work.trainings, lost).failed
    if failed:
        raise TrainingError(failed[0]["reason"])


def _submit(function: Callable[..., Any], work: FinetuneWork, arguments: Sequence[Any]) -> Any:
    remote = ray.remote(num_cpus=work.cpus, num_gpus=1 if work.config.scale.uses_gpu else 0)(function)
    return remote.remote(*arguments)
