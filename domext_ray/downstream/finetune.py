"""A grid of trainings as Ray tasks: best by dev, test scored once -> a run directory.

Enters: a `FinetuneConfig`. Leaves RUN.DIR/RUN.NAME with config.yaml, identity.json, trainings/ (one JSON a training,
and the tensors of the best one and its restarts), predictions.jsonl, resamples.npz, summary.json, scores.png,
report.html and export/. The same command goes on: trainings that have ended are kept. BERT section A.3 (grid, random
restarts, chosen on dev).
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray

from domext_ray.config import dump_yaml, identity_of
from domext_ray.downstream.features import prepare_features
from domext_ray.downstream.finetune_comparison import write_resamples
from domext_ray.downstream.finetune_output import (
    FinalScores,
    FinetuneProgress,
    build_summary,
    describe_finetune_plan,
    format_finetune_summary,
    get_figure,
    write_finetune_report,
)
from domext_ray.downstream.finetuned import SETS, make_set_task, result_path
from domext_ray.downstream.stages import StagedTask
from domext_ray.downstream.start_model import StartModel, load_start_model
from domext_ray.downstream.task_list import SingleTask
from domext_ray.downstream.training import Point, make_model
from domext_ray.downstream.trainings import FinetuneWork, score_point, train_point
from domext_ray.errors import ConfigError, find_user_error
from domext_ray.finetune_config import FinetuneConfig
from domext_ray.labelled.loading import LoadedSet, load_labelled
from domext_ray.run_directory import check_identity, hold_run, resolve_root
from domext_ray.training.metrics import write_text
from domext_ray.training.pretrain import check_shared_storage, start_ray

FEATURES = ".features"


def run_finetuning(config: FinetuneConfig) -> Path:
    """Carry a fine-tuning run from labelled files to scores, report and export.

    Args:
        config: the run; with `dry_run` everything is checked and printed and nothing is trained or written.

    Returns:
        The run's directory.

    Raises:
        DomextError: any mistake of the user's, before anything is trained where that can be known.
    """
    root = resolve_root(config.run.dir)
    loaded = load_labelled(config, root / SETS)
    start = load_start_model(config.model, config.model_step, config.keep_head)
    task = make_set_task(config, start, loaded)
    folder = root / (config.run.name or f"{loaded.data.name}-{start.name}")
    identity = {**identity_of(config), "model_sha256": start.sha256, "data_sha256": loaded.sha256}
    identity["data"] = ""  # where the files are does not matter; what they hold does
    identity["model"] = start.name
    check_identity(folder, identity)
    counts = count_parameters(config, start, task)
    if start.brings is not None and start.head is None:
        kind = start.brings.removeprefix("DomextFor")
        print(f"note: {start.name} brings a {kind} head; a new one takes its place (--keep_head true goes on with it).")
    if config.dry_run:
        print(describe_finetune_plan(config, start, task, counts, folder))
        return folder
    if (folder / "summary.json").exists() and (folder / "report.html").exists():
        print(f"the run in {folder} has ended; nothing is left to do.")
        return folder
    with hold_run(folder):
        write_text(folder / "config.yaml", dump_yaml(config))
        write_text(folder / "identity.json", json.dumps(identity, indent=2))
        start_ray()
        check_shared_storage(folder)
        cpus, parallel = _plan_resources(config)
        features = None
        if config.features.layers:
            features = prepare_features(start, list(task.stages.values()), config, root / FEATURES)
        work = FinetuneWork(config, start, task, folder, cpus, features)
        _run(work, loaded, counts, parallel)
    return folder


def count_parameters(config: FinetuneConfig, start: StartModel, task: StagedTask) -> dict[str, tuple[int, int]]:
    """Trained and all parameters of each stage's model; makes the models, which checks that everything fits."""
    frozen = 0
    if config.features.layers:
        if not isinstance(task, SingleTask):
            raise ConfigError(
                f"--features.layers is {config.features.layers!r}; it must be empty with --task {config.task}, whose "
                "second step reads rows that the first one makes."
            )
        frozen = sum(each.numel() for each in start.tensors.values())
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
        counts[name] = sum(size for size, trains in sizes if trains), frozen + sum(size for size, _ in sizes)
    return counts


def _plan_resources(config: FinetuneConfig) -> tuple[float, int]:
    """CPUs of a training, and trainings at once, checked against the cluster's resources."""
    available = ray.cluster_resources()
    cpus, gpus = available.get("CPU", 0.0), available.get("GPU", 0.0)
    num_trainings = len(config.grid.points) * config.grid.restarts
    if config.scale.use_gpu and gpus < 1:
        raise ConfigError("--scale.use_gpu is True; the cluster has no GPU, so it must be false.")
    limit = int(gpus) if config.scale.use_gpu else max(1, int(cpus / (config.scale.cpus or 1.0)))
    parallel = min(num_trainings, config.scale.parallel or limit)
    largest = max(node["Resources"].get("CPU", 0.0) for node in ray.nodes() if node["Alive"])
    share = config.scale.cpus or min(max(1.0, cpus // parallel), largest)
    if share > largest:
        raise ConfigError(f"--scale.cpus is {share:g}; no node has more than {largest:g} CPUs.")
    return share, parallel


def list_points(config: FinetuneConfig) -> list[Point]:
    """Return every training of a run: points of the grid with their restarts."""
    return [
        Point(lr, batch_size, epochs, config.seed + restart)
        for lr, batch_size, epochs in config.grid.points
        for restart in range(config.grid.restarts)
    ]


def _run(work: FinetuneWork, loaded: LoadedSet, counts: dict[str, tuple[int, int]], parallel: int) -> None:
    started = time.perf_counter()
    results = _train_all(work, list_points(work.config), parallel)
    best = choose_best(results)
    chosen = [each for each in results if is_restart(each["point"], best["point"])]
    points = [Point(**each["point"]) for each in chosen]
    _score_all(work, points, Point(**best["point"]))
    final = gather_scores(work, points, Point(**best["point"]))
    seconds = time.perf_counter() - started
    summary = build_summary(work.config, work.start, loaded, work.task, counts, results, best, chosen, final, seconds)
    write_text(work.folder / "summary.json", json.dumps(summary, indent=2, ensure_ascii=False) + "\n")
    write_finetune_report(work.folder)
    print(format_finetune_summary(summary))
    print(f"\n{work.folder / 'report.html'}")


def _score_all(work: FinetuneWork, points: Sequence[Point], best: Point) -> None:
    """Score trainings on test, each in a Ray task, and export the best one."""
    export = work.folder / "export" if work.config.export and work.features is None else None
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
    read = {
        (point, split): json.loads((work.trainings / point.key / f"{split}.json").read_text(encoding="utf-8"))
        for point in points
        for split in splits
    }
    own = {split: read[best, split] for split in splits}
    notes = [note for each in own.values() for note in each["notes"]]
    if work.config.export and work.features is not None:
        notes.append(f"a model on features is not exported: it reads what {work.start.name}'s layers put out.")
    return FinalScores(
        own["dev"]["figures"],
        own["test"]["figures"] if "test" in own else {},
        {split: [get_figure(read[point, split]["figures"], work.task.metric) for point in points] for split in splits},
        {split: each["baselines"] for split, each in own.items()},
        {split: each["steps"] for split, each in own.items()},
        tuple(dict.fromkeys(notes)),
    )


def choose_best(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the training with the highest figure on dev, the earliest of equals."""
    return max(results, key=lambda each: each["dev"])


def is_restart(point: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two trainings differ in their seed only."""
    return {**point, "seed": 0} == {**other, "seed": 0}


def _train_all(work: FinetuneWork, points: Sequence[Point], parallel: int) -> list[dict[str, Any]]:
    """Run the trainings that have not ended before; keep the tensors of the best one and its restarts only."""
    folder = work.trainings
    folder.mkdir(exist_ok=True)
    waiting = [point for point in points if not result_path(folder, point).exists()]
    shared = ray.put(work)
    running: dict[Any, Point] = {}
    with FinetuneProgress(folder, tuple(work.task.stages), len(points), len(points) - len(waiting)) as progress:
        try:
            while waiting or running:
                while waiting and len(running) < parallel:
                    point = waiting.pop(0)
                    running[_submit(train_point, work, [shared, point])] = point
                done, _ = ray.wait(list(running), timeout=1.0)
                for reference in done:
                    running.pop(reference)
                    ray.get(reference)
                    _drop_tensors(folder, points)
                progress.show(list(running.values()))
        except Exception as error:
            for reference in running:
                ray.cancel(reference, force=True)
            raise find_user_error(error) or error from None
    return [json.loads(result_path(folder, point).read_text(encoding="utf-8")) for point in points]


def _drop_tensors(folder: Path, points: Sequence[Point]) -> None:
    """Delete the tensors of trainings that a better one has overtaken."""
    ended = [
        json.loads(result_path(folder, each).read_text(encoding="utf-8"))
        for each in points
        if result_path(folder, each).exists()
    ]
    best = choose_best(ended)["point"]
    for each in ended:
        if not is_restart(each["point"], best):
            shutil.rmtree(folder / Point(**each["point"]).key, ignore_errors=True)


def _submit(function: Callable[..., Any], work: FinetuneWork, arguments: Sequence[Any]) -> Any:
    remote = ray.remote(num_cpus=work.cpus, num_gpus=1 if work.config.scale.use_gpu else 0)(function)
    return remote.remote(*arguments)
