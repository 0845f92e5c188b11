"""A grid of trainings as Ray tasks: best mean on dev, test scored once -> a run directory.

Enters: a `FinetuneConfig`. Leaves RUN.DIR/RUN.NAME with config.yaml, run.json, trainings/ (one JSON a training,
and the tensors of the best one and its restarts), predictions.jsonl, resamples.npz, summary.json, scores.png,
report.html and export/. The same command goes on, also with a grid that has grown or shrunk: trainings that have ended
are kept. BERT section A.3 (grid, random restarts, chosen on dev).
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import ray

from domext_ray.config.finetune import FinetuneConfig
from domext_ray.downstream.finetune.comparison import write_resamples
from domext_ray.downstream.finetune.finetuned import result_path
from domext_ray.downstream.finetune.grid import (
    GridResults,
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
    ScoredGrid,
    build_summary,
    describe_finetune_plan,
    format_finetune_summary,
    get_figure,
    write_finetune_report,
)
from domext_ray.downstream.finetune.plan import FinetunePlan, is_finished, plan_finetuning
from domext_ray.downstream.finetune.progress import FinetuneProgress
from domext_ray.downstream.finetune.training import Point
from domext_ray.downstream.finetune.trainings import MORE_MEMORY, FinetuneWork, TooLargeError, score_point, train_point
from domext_ray.errors import ConfigError, TrainingError, find_user_error
from domext_ray.export.folder import FINE_TUNED, check_target
from domext_ray.files import read_json
from domext_ray.runs.run_directory import lock_run, write_config, write_run
from domext_ray.runtime.ray_cluster import resolve_gpu, resolve_precision, start_ray
from domext_ray.storage import write_json, write_text
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
    plan = plan_finetuning(config)
    if plan.note:
        print(plan.note)
    if config.dry_run:
        print(describe_finetune_plan(plan))
        return plan.folder
    if is_finished(plan):
        print(f"the run in {plan.folder} has ended; nothing is left to do.")
        return plan.folder
    if config.export:
        check_target(plan.folder / "export", FINE_TUNED)
    start_ray()
    plan = replace(plan, config=resolve_precision(resolve_gpu(plan.config)))
    cpus, parallel = _plan_resources(plan.config)
    with lock_run(plan.folder):
        write_config(plan.folder, plan.config)
        write_run(plan.folder, identity=plan.identity)
        check_shared_storage(plan.folder)
        work = FinetuneWork(plan.config, plan.start, plan.task, plan.folder, cpus)
        work.trainings.mkdir(exist_ok=True)
        started = time.perf_counter()
        scored = score_grid(work, train_grid(work, parallel), parallel)
        report_finetuning(plan, scored, time.perf_counter() - started)
    return plan.folder


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


def train_grid(work: FinetuneWork, parallel: int) -> GridResults:
    """Run the trainings of a grid that have not ended before.

    Args:
        work: the run.
        parallel: trainings at once.

    Returns:
        The records of all of them, of which one at least has ended well.

    Raises:
        TrainingError: all of them failed.
    """
    points = list_points(work.config)
    forget_failures(work.trainings, points)
    _train_all(work, points, parallel)
    results = read_results(work.trainings, points)
    if not results.ended:
        raise TrainingError(f"all {len(points)} trainings failed; of the first: {results.failed[0]['reason']}")
    return results


def score_grid(work: FinetuneWork, results: GridResults, parallel: int) -> ScoredGrid:
    """Choose a point by dev, score its restarts on test, and export the best of them.

    Args:
        work: the run.
        results: records of its trainings.
        parallel: trainings at once, where tensors must be made again.

    Returns:
        What they reached.
    """
    best, chosen = choose_point(results)
    points, best_point = [Point(**each["point"]) for each in chosen], Point(**best["point"])
    _restore_tensors(work, points, parallel)
    _score_all(work, points, best_point)
    return ScoredGrid(results, best, chosen, gather_scores(work, points, best_point))


def report_finetuning(plan: FinetunePlan, scored: ScoredGrid, seconds: float) -> None:
    """Write a run's summary and report, and print the table; `seconds` is the wall clock of this start."""
    summary = build_summary(plan, scored, seconds)
    write_json(plan.folder / "summary.json", summary)
    write_finetune_report(plan.folder)
    print(format_finetune_summary(summary))
    print(f"\n{plan.folder / 'report.html'}")


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
