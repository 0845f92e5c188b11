"""The bodies of fine-tuning's Ray tasks: one training of the grid, and its test -> files of the run.

Enters: what all trainings of a run share, and a point of the grid. Leaves, in RUN/trainings:

    KEY.progress.jsonl            how the training goes
    KEY.json                      what it reached on dev, and its thresholds; written last
    KEY/STAGE.safetensors         trained tensors
    KEY/SPLIT.json                figures with intervals, of trivial baselines and of single steps
    KEY/SPLIT.predictions.jsonl   one line an example
    KEY/SPLIT.npy                 the metric's bootstrap resamples, float64 [resamples]
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from domext_ray.config.finetune import FinetuneConfig
from domext_ray.downstream.finetune.export import export_stages
from domext_ray.downstream.finetune.finetuned import read_result, restore_stages, result_path
from domext_ray.downstream.finetune.training import Point, fit_stages
from domext_ray.downstream.start.model import TRAININGS, StartModel
from domext_ray.downstream.tasks.stages import StagedResult, evaluate_stages
from domext_ray.downstream.tasks.task import StagedTask
from domext_ray.errors import TrainingError
from domext_ray.files import read_json
from domext_ray.intervals import RESAMPLING_SEED
from domext_ray.runtime.cpu_kernels import TRAINING
from domext_ray.runtime.device import prepare_device
from domext_ray.storage import new_file, write_json, write_text

MORE_MEMORY = "lower --scale.parallel or --grid.micro_batch_size, or give it a larger machine"


class TooLargeError(TrainingError):
    """A training needs more memory than there is; with more, the same one may end."""


@dataclass(frozen=True)
class FinetuneWork:
    """What every training of a run shares.

    Args:
        config: the run.
        start: the encoder that all start from.
        task: the task with its set.
        folder: the run's directory.
        cpus: CPUs of a training.
    """

    config: FinetuneConfig
    start: StartModel
    task: StagedTask
    folder: Path
    cpus: float

    @property
    def trainings(self) -> Path:
        """The run's folder of trainings."""
        return self.folder / TRAININGS

    def has_model(self, point: Point) -> bool:
        """Whether a training's tensors, and what it wrote about dev beside them, are still there."""
        names = [*(f"{name}.safetensors" for name in self.task.stages), "dev.json", "dev.npy", "dev.predictions.jsonl"]
        return all((self.trainings / point.key / each).is_file() for each in names)


def train_point(work: FinetuneWork, point: Point) -> None:
    """Train all stages at one point of the grid, and write what came out on dev.

    Raises:
        TrainingError: a loss is not finite, or the memory is too small.
    """
    try:
        _train_point(work, point)
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise TooLargeError(f"{point.key} needs more memory than there is; {MORE_MEMORY}.") from error


def _train_point(work: FinetuneWork, point: Point) -> None:
    device = _prepare_process(work)
    with (work.trainings / f"{point.key}.progress.jsonl").open("w", encoding="utf-8") as progress:

        def report(record: dict[str, Any]) -> None:
            progress.write(json.dumps(record) + "\n")
            progress.flush()

        fitted = fit_stages(work.start, work.task, work.config, point, device, report)
    result = evaluate_stages(work.task, {name: each.predict for name, each in fitted.items()}, splits=("dev",))
    (work.trainings / point.key).mkdir(exist_ok=True)
    for name, each in fitted.items():
        with new_file(work.trainings / point.key / f"{name}.safetensors") as temporary:
            save_file(each.tensors, temporary)
    _write_splits(work, point, result)
    record = {
        "point": asdict(point),
        "dev": result.scores["dev"].get(work.task.metric),
        "thresholds": {name: each.thresholds for name, each in fitted.items()},
        "task_thresholds": result.thresholds,
        "dev_by_epoch": {name: each.dev_scores for name, each in fitted.items()},
        "last_epoch": {name: each.last_epoch for name, each in fitted.items()},
        "best_epoch": {name: each.best_epoch for name, each in fitted.items()},
        "steps": sum(each.steps for each in fitted.values()),
        "tokens": sum(each.tokens for each in fitted.values()),
        "train_seconds": sum(each.seconds for each in fitted.values()),
    }
    write_json(result_path(work.trainings, point), record)


def score_point(work: FinetuneWork, point: Point, export: Path | None) -> None:
    """Score a training on test, unless that was done, and export its model.

    Args:
        work: the run.
        point: the training; its tensors are kept.
        export: folder of the export; None: no export.
    """
    has_test = not work.task.data.test or (work.trainings / point.key / "test.json").exists()
    if has_test and export is None:
        return
    device = _prepare_process(work)
    fitted = restore_stages(work.start, work.task, work.config, work.trainings, point, device)
    thresholds = read_result(work.trainings, point)["task_thresholds"]
    work.task.set_thresholds(thresholds)
    if not has_test:
        predictors = {name: each.predict for name, each in fitted.items()}
        _write_splits(work, point, evaluate_stages(work.task, predictors, splits=("test",), thresholds=thresholds))
    if export is not None:
        export_stages(work.start, work.task, fitted, export, _read_scores(work, point))


def _read_scores(work: FinetuneWork, point: Point) -> dict[str, Any]:
    """What a training scored, by split, for its card."""
    scores = {}
    for split in ("dev", "test"):
        path = work.trainings / point.key / f"{split}.json"
        if path.exists():
            remedy = "delete it: the same command scores the model again"
            scores[split] = read_json(path, remedy, {"figures": dict})["figures"]
    return scores


def _prepare_process(work: FinetuneWork) -> torch.device:
    uses_fp32 = not work.config.engine.uses_bf16
    return prepare_device(work.config.scale.uses_gpu, work.cpus, TRAINING, uses_fp32=uses_fp32)


def _write_splits(work: FinetuneWork, point: Point, result: StagedResult) -> None:
    """Write predictions, resamples and figures of the splits that were scored, the figures last."""
    folder = work.trainings / point.key
    for split, score in result.scores.items():
        lines = []
        for example, each in zip(getattr(work.task.data, split), result.predictions[split], strict=True):
            record = {"split": split, "id": example.id, "prediction": each}
            lines.append(json.dumps(record, ensure_ascii=False) + "\n")
        write_text(folder / f"{split}.predictions.jsonl", "".join(lines))
        drawn = score.resample(work.config.num_resamples, RESAMPLING_SEED)
        write_array(folder / f"{split}.npy", drawn[work.task.metric])
        figures = {
            "figures": score.describe(num_resamples=work.config.num_resamples, seed=RESAMPLING_SEED),
            "baselines": {name: each.values for name, each in result.baselines[split].items()},
            "steps": {name: each.values for name, each in result.steps[split].items()},
            "notes": list(result.notes),
        }
        write_json(folder / f"{split}.json", figures)


def write_array(path: Path, array: np.ndarray) -> None:
    """Write an array as .npy, whole or not at all."""
    with new_file(path) as temporary:
        np.save(temporary, array, allow_pickle=False)
