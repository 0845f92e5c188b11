"""A grid of trainings as Ray tasks: best by dev, test scored once -> a run directory.

Enters: a `FinetuneConfig`. Leaves RUN.DIR/RUN.NAME with config.yaml, identity.json, trainings/ (one JSON a training,
and the tensors of the best one and its restarts), predictions.jsonl, resamples.npz, summary.json, scores.png,
report.html and export/. The same command goes on: trainings that have ended are kept. BERT section A.3 (grid, random
restarts, chosen on dev).
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from safetensors.torch import save_file

from domext_ray.config import dump_yaml, identity_of
from domext_ray.downstream.feature_store import FeatureStore
from domext_ray.downstream.features import prepare_features
from domext_ray.downstream.finetune_output import (
    FinetuneProgress,
    build_summary,
    describe_finetune_plan,
    format_finetune_summary,
    write_finetune_report,
)
from domext_ray.downstream.finetuned import SETS, make_set_task, restore_stages, result_path
from domext_ray.downstream.stages import StagedResult, StagedTask, evaluate_stages
from domext_ray.downstream.start_model import TRAININGS, StartModel, load_start_model
from domext_ray.downstream.task_export import export_stages
from domext_ray.downstream.task_list import SingleTask
from domext_ray.downstream.training import Point, Report, fit_task, join_alone, make_model
from domext_ray.errors import ConfigError, find_user_error
from domext_ray.finetune_config import FinetuneConfig
from domext_ray.labelled.loading import LoadedSet, load_labelled
from domext_ray.run_directory import check_identity, hold_run, resolve_root
from domext_ray.training.metrics import write_text
from domext_ray.training.pretrain import check_shared_storage, start_ray

FEATURES = ".features"
RESAMPLES = "resamples.npz"
RESAMPLING_SEED = 0
"""Of the bootstrap, for all runs: paired comparisons rest on the same draws."""


@dataclass(frozen=True)
class FinetuneWork:
    """What every training of a run shares.

    Args:
        config: the run.
        start: the encoder that all start from.
        task: the task with its set.
        folder: the run's directory.
        cpus: CPUs of a training.
        features: folder of the rows' features, with `config.features`.
    """

    config: FinetuneConfig
    start: StartModel
    task: StagedTask
    folder: Path
    cpus: float
    features: Path | None = None

    def open_features(self) -> FeatureStore | None:
        """Open the features in this process; None where the models have an encoder."""
        return None if self.features is None else FeatureStore(self.features)


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
    start = load_start_model(config.model, config.model_step)
    task = make_set_task(config, start, loaded)
    folder = root / (config.run.name or f"{loaded.data.name}-{start.name}")
    identity = {**identity_of(config), "model_sha256": start.sha256, "data_sha256": loaded.sha256}
    identity["data"] = ""  # where the files are does not matter; what they hold does
    identity["model"] = start.name
    check_identity(folder, identity)
    counts = count_parameters(config, start, task)
    if config.dry_run:
        print(describe_finetune_plan(config, start, task, counts, folder))
        return folder
    if (folder / "summary.json").exists():
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
    shared = ray.put(work)
    final = _call(score_chosen, work, [shared, [Point(**each["point"]) for each in chosen], best["point"]])
    seconds = time.perf_counter() - started
    summary = build_summary(work.config, work.start, loaded, work.task, counts, results, best, chosen, final, seconds)
    write_text(work.folder / "summary.json", json.dumps(summary, indent=2, ensure_ascii=False) + "\n")
    write_finetune_report(work.folder)
    print(format_finetune_summary(summary))
    print(f"\n{work.folder / 'report.html'}")


def choose_best(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the training with the highest figure on dev, the earliest of equals."""
    return max(results, key=lambda each: each["dev"])


def is_restart(point: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two trainings differ in their seed only."""
    return {**point, "seed": 0} == {**other, "seed": 0}


def _train_all(work: FinetuneWork, points: Sequence[Point], parallel: int) -> list[dict[str, Any]]:
    """Run the trainings that have not ended before; keep the tensors of the best one and its restarts only."""
    folder = work.folder / TRAININGS
    folder.mkdir(exist_ok=True)
    waiting = [point for point in points if not result_path(folder, point).exists()]
    shared = ray.put(work)
    running: dict[Any, Point] = {}
    with FinetuneProgress(folder, len(points), len(points) - len(waiting)) as progress:
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


def _call(function: Callable[..., Any], work: FinetuneWork, arguments: Sequence[Any]) -> Any:
    try:
        return ray.get(_submit(function, work, arguments))
    except Exception as error:
        raise find_user_error(error) or error from None


def _prepare_process(work: FinetuneWork) -> torch.device:
    if work.config.scale.use_gpu:
        device = torch.device("cuda", 0)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(max(1, int(work.cpus)))
    join_alone()
    return device


def train_point(work: FinetuneWork, point: Point) -> None:
    """Train all stages at one point of the grid and write what came out; a Ray task's body."""
    device = _prepare_process(work)
    folder = work.folder / TRAININGS
    progress = (folder / f"{point.key}.progress.jsonl").open("w", encoding="utf-8")
    features = work.open_features()
    fitted = {
        name: fit_task(work.start, stage, work.config, point, device, _make_report(progress, name), features)
        for name, stage in work.task.stages.items()
    }
    result = evaluate_stages(work.task, {name: each.predict for name, each in fitted.items()}, splits=("dev",))
    target = folder / point.key
    target.mkdir(exist_ok=True)
    for name, each in fitted.items():
        temporary = target / f".{name}.{os.getpid()}.tmp"
        save_file(each.tensors, temporary)
        os.replace(temporary, target / f"{name}.safetensors")
    record = {
        "point": asdict(point),
        "dev": result.scores["dev"].get(work.task.metric),
        "thresholds": {name: each.thresholds for name, each in fitted.items()},
        "dev_by_epoch": {name: each.dev_scores for name, each in fitted.items()},
        "steps": sum(each.steps for each in fitted.values()),
        "tokens": sum(each.tokens for each in fitted.values()),
        "train_seconds": sum(each.seconds for each in fitted.values()),
        "notes": list(result.notes),
    }
    write_text(result_path(folder, point), json.dumps(record, ensure_ascii=False))
    progress.close()


def _make_report(file: Any, stage: str) -> Report:
    def report(record: dict[str, Any]) -> None:
        file.write(json.dumps({"stage": stage, **record}) + "\n")
        file.flush()

    return report


@dataclass(frozen=True)
class FinalScores:
    """What the chosen point reached.

    Args:
        dev, test: figures with intervals of the best training; test empty where the set has none.
        restarts: dev's and test's figure of every restart, by split.
        baselines: figures of trivial baselines by split and name.
        steps: figures of single steps by split.
        notes: what was counted on the way.
    """

    dev: dict[str, Any]
    test: dict[str, Any]
    restarts: dict[str, list[float]]
    baselines: dict[str, dict[str, dict[str, Any]]]
    steps: dict[str, dict[str, dict[str, Any]]]
    notes: tuple[str, ...]


def score_chosen(work: FinetuneWork, points: Sequence[Point], best: dict[str, Any]) -> FinalScores:
    """Score the chosen training and its restarts on test, write predictions, export; a Ray task's body."""
    device = _prepare_process(work)
    restarts: dict[str, list[float]] = {}
    drawn: dict[str, list[np.ndarray]] = {}
    final: StagedResult | None = None
    trainings, features = work.folder / TRAININGS, work.open_features()
    for point in points:
        fitted = restore_stages(work.start, work.task, work.config, trainings, point, device, features)
        result = evaluate_stages(work.task, {name: each.predict for name, each in fitted.items()})
        for split, score in result.scores.items():
            restarts.setdefault(split, []).append(score.get(work.task.metric))
            resamples = score.resample(work.config.num_resamples, RESAMPLING_SEED)
            drawn.setdefault(split, []).append(resamples[work.task.metric])
        if asdict(point) == best:
            final = result
            _write_predictions(work, result)
            if work.config.export and work.features is None:
                export_stages(work.start, work.task, fitted, work.folder / "export")
    assert final is not None
    notes = final.notes
    if work.config.export and work.features is not None:
        notes = (*notes, f"a model on features is not exported: it reads what {work.start.name}'s layers put out.")
    _write_resamples(work.folder / RESAMPLES, {split: np.stack(each) for split, each in drawn.items()})
    described = {
        split: score.describe(num_resamples=work.config.num_resamples, seed=RESAMPLING_SEED)
        for split, score in final.scores.items()
    }
    return FinalScores(
        described["dev"],
        described.get("test", {}),
        restarts,
        {split: {name: each.values for name, each in scores.items()} for split, scores in final.baselines.items()},
        {split: {name: each.values for name, each in scores.items()} for split, scores in final.steps.items()},
        notes,
    )


def _write_predictions(work: FinetuneWork, result: StagedResult) -> None:
    """Write one line an example of dev and test."""
    lines = []
    for split, predictions in result.predictions.items():
        for example, each in zip(getattr(work.task.data, split), predictions, strict=True):
            record = {"split": split, "id": example.id, "prediction": to_plain(each)}
            lines.append(json.dumps(record, ensure_ascii=False) + "\n")
    write_text(work.folder / "predictions.jsonl", "".join(lines))


def _write_resamples(path: Path, resamples: dict[str, np.ndarray]) -> None:
    """Write the resampled figures [restarts, resamples] of every split.

    Runs on one set draw the same examples, so that two models' paired difference follows from their files alone.
    """
    temporary = path.with_name(f".{path.stem}.{os.getpid()}.npz")
    np.savez_compressed(temporary, **resamples)  # type: ignore[arg-type]
    os.replace(temporary, path)


def to_plain(value: Any) -> Any:
    """Return a prediction as JSON has it."""
    if hasattr(value, "__dataclass_fields__"):
        return to_plain(asdict(value))
    if isinstance(value, dict):
        return {str(name): to_plain(each) for name, each in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted((to_plain(each) for each in value), key=str)
    if isinstance(value, (list, tuple)):
        return [to_plain(each) for each in value]
    return value.item() if isinstance(value, (np.generic, np.ndarray)) and np.ndim(value) == 0 else value
