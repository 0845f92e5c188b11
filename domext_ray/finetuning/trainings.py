"""What the processes of a fine-tuning run do: one training of the grid, and its test -> files of the run.

Enters: what all trainings of a run share, and a point of the grid. Leaves a line on standard error, which says how they
go on, and, in RUN/trainings, beside the records of `runtime.trials`:

    KEY.progress.jsonl            how the training goes
    KEY/STAGE.safetensors         trained tensors
    KEY/SPLIT.json                figures with intervals, and of single steps
    KEY/SPLIT.predictions.jsonl   one line an example
    KEY/SPLIT.npy                 the metric's bootstrap resamples, float64 [resamples]
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from domext_ray.errors import TrainingError, name_file
from domext_ray.families.task import ScoredSplit
from domext_ray.files import read_json
from domext_ray.finetuning.export import export_stages
from domext_ray.finetuning.finetuned import restore_stages
from domext_ray.finetuning.plan import FinetunePlan
from domext_ray.finetuning.training import Point, fit_stages
from domext_ray.intervals import RESAMPLING_SEED
from domext_ray.runtime.device import TRAINING, prepare_device
from domext_ray.runtime.tasks import Pool
from domext_ray.runtime.trials import Outcome, Step, Trial, Watch, choose_arm, group_by_arm
from domext_ray.storage import Place, new_file, open_to_others, write_json, write_text
from domext_ray.training.metrics import read_metrics

PROGRESS = ".progress.jsonl"
"""How the name of a file ends that says how a training goes on; before it stands the training's."""
MORE_MEMORY = "lower --scale.parallel or --grid.micro_batch_size, or give it a larger machine"


class TooLargeError(TrainingError):
    """A training needs more memory than there is; with more, the same one may end."""

    may_try_again = True


def make_pool(plan: FinetunePlan, number: int) -> Pool:
    """Return a pool for so many trainings."""
    return Pool(partial(partial, train, plan), min(plan.parallel, number), plan.cpus, plan.gpus)


def train(plan: FinetunePlan, item: tuple[Trial, int | None]) -> Step:
    """Train all stages at one point of the grid, write what came out on dev, and return what it reached.

    A loss that is not finite, or too little memory, raises a TrainingError.
    """
    point = Point(**item[0].config)
    try:
        return _train_point(plan, point)
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise TooLargeError(f"{point.key} needs more memory than there is; {MORE_MEMORY}.") from error


def _train_point(plan: FinetunePlan, point: Point) -> Step:
    device = _prepare_process(plan)
    folder, path = plan.trainings / point.key, plan.trainings / f"{point.key}{PROGRESS}"
    with path.local().open("w", encoding="utf-8") as progress:

        def report(record: dict[str, Any]) -> None:
            with name_file(path):
                progress.write(json.dumps(record) + "\n")
                progress.flush()

        fitted = fit_stages(plan.start, plan.task, plan.config, point, device, report)
    scored = plan.task.evaluate({name: model.predict for name, model in fitted.items()}, splits=("dev",))
    folder.local().mkdir(exist_ok=True)
    for name, model in fitted.items():
        with new_file(folder / f"{name}.safetensors") as temporary:
            save_file(model.tensors, temporary)
            open_to_others(temporary)
    _write_splits(plan, folder, scored)
    return {
        "dev": scored["dev"].score.get(plan.task.metric),
        "thresholds": {name: model.thresholds for name, model in fitted.items()},
        "task_thresholds": plan.task.thresholds,
        "dev_by_epoch": {name: model.dev_scores for name, model in fitted.items()},
        "last_epoch": {name: model.last_epoch for name, model in fitted.items()},
        "best_epoch": {name: model.best_epoch for name, model in fitted.items()},
        "steps": sum(model.steps for model in fitted.values()),
        "tokens": sum(model.tokens for model in fitted.values()),
        "train_seconds": sum(model.seconds for model in fitted.values()),
    }


def score(plan: FinetunePlan, item: tuple[Outcome, bool]) -> Step:
    """Score a training; of the best one return what trivial baselines score, by split and name, and export it."""
    training, is_best = item
    baselines: dict[str, dict[str, Any]] = {}
    if is_best:
        baselines = {
            split: {name: scored.values for name, scored in plan.task.score_baselines(split).items()}
            for split in plan.splits
        }
    _score_training(plan, training, plan.folder / "export" if is_best and plan.config.export else None, baselines)
    return baselines


def _score_training(plan: FinetunePlan, training: Outcome, export: Place | None, baselines: dict[str, Any]) -> None:
    """Score a training, whose tensors are kept, on test, unless that was done; where a folder is given, export it."""
    folder = plan.trainings / training.name
    is_due = bool(plan.task.data.test) and not (folder / "test.json").exists()
    if not is_due and export is None:
        return
    device = _prepare_process(plan)
    fitted = restore_stages(plan.start, plan.task, plan.config, plan.trainings, training, device)
    plan.task.set_thresholds(training.reached["task_thresholds"])
    if is_due:
        predictors = {name: model.predict for name, model in fitted.items()}
        _write_splits(plan, folder, plan.task.evaluate(predictors, splits=("test",)))
    if export is not None:
        scores = {split: read_split(folder, split)["figures"] for split in plan.splits}
        export_stages(plan.start, plan.task, fitted, export, scores, baselines)


def _prepare_process(plan: FinetunePlan) -> torch.device:
    uses_fp32 = not plan.config.engine.uses_bf16
    return prepare_device(plan.config.scale.uses_gpu, plan.cpus, TRAINING, uses_fp32=uses_fp32)


def _write_splits(plan: FinetunePlan, folder: Place, scored: Mapping[str, ScoredSplit]) -> None:
    """Write predictions, resamples and figures of the splits that were scored, the figures last."""
    for split, found in scored.items():
        lines = []
        for example, prediction in zip(getattr(plan.task.data, split), found.predictions, strict=True):
            record = {"split": split, "id": example.id, "prediction": prediction}
            lines.append(json.dumps(record, ensure_ascii=False) + "\n")
        write_text(folder / f"{split}.predictions.jsonl", "".join(lines))
        with new_file(folder / f"{split}.npy") as temporary:
            np.save(temporary, found.score.resample(plan.config.num_resamples, RESAMPLING_SEED)[plan.task.metric])
        figures = {
            "figures": found.score.describe(num_resamples=plan.config.num_resamples, seed=RESAMPLING_SEED),
            "steps": {name: step.values for name, step in found.steps.items()},
            "notes": plan.task.list_notes(),
        }
        write_json(folder / f"{split}.json", figures)


def read_split(folder: Place, split: str) -> dict[str, Any]:
    """Return what a training scored on a split, given its folder: the file that `_write_splits` writes last."""
    remedy = "delete it: the same command scores the model again"
    return read_json(folder / f"{split}.json", remedy, {"figures": dict})


class FinetuneWatch(Watch):
    """Says how many trainings have ended and where the slowest running one is, and drops tensors that nobody needs.

    With `keep_all` it drops none.
    """

    def __init__(self, folder: Place, stages: Sequence[str], outcomes: Sequence[Outcome], *, keep_all: bool) -> None:
        self.folder, self.stages, self.keep_all = folder, stages, keep_all
        self.place: list[Any] = []
        self.outcomes = {outcome.name: outcome if outcome.has_ended else Outcome(outcome.trial) for outcome in outcomes}
        super().__init__(len(outcomes), sum(outcome.has_ended for outcome in outcomes))
        if self.num_kept:
            self.line.keep(f"{self.num_kept} of {self.number} trainings have ended before.")

    def end(self, outcome: Outcome) -> None:
        """Say why a training failed, and drop the tensors of those that are overtaken."""
        self.outcomes[outcome.name] = outcome
        if outcome.failure:
            self.line.keep(f"failed, the others go on: {outcome.failure}")
        for overtaken in () if self.keep_all else list_overtaken(self.outcomes.values()):
            shutil.rmtree(self.folder / overtaken.name, ignore_errors=True)

    def look(self, running: Sequence[Trial]) -> object:
        """Show how far the running trainings are; return where they are."""
        if self.line.is_due:
            states = [read[-1] for trial in running if (read := self._read(trial.name))]
            self.place = [(state["stage"], state["step"]) for state in states]
            done = [
                (self.stages.index(state["stage"]) + state["step"] / state["steps"]) / len(self.stages)
                for state in states
            ]
            shown = self._describe(states, done) if states else ""
            self.line.show(f"{self.describe_ended()}{shown}", (self.num_ended + sum(done)) / self.number)
        return self.place

    def _describe(self, states: Sequence[dict[str, Any]], done: Sequence[float]) -> str:
        """Where the slowest of the running trainings is, given how much of each is done."""
        slowest = states[int(np.argmin(done))]
        rate, left = sum(state["tokens_per_second"] for state in states), self.describe_left(sum(done))
        return (
            f"; {slowest['stage']} step {slowest['step']:,}/{slowest['steps']:,}  loss {slowest['loss']:.3f}  "
            f"{rate:,.0f} tokens/s{left and f'  {left}'}"
        )

    def describe_ended(self) -> str:
        """Return how many trainings have ended."""
        return f"{self.num_ended} of {self.number} trainings ended"

    def _read(self, name: str) -> list[dict[str, Any]]:
        return read_metrics(self.folder / f"{name}{PROGRESS}")


def list_overtaken(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """Return the trainings that cannot be chosen any more: another point, all of whose restarts ended, is better."""
    ended = [outcome for arm in group_by_arm(outcomes) if all(outcome.status for outcome in arm) for outcome in arm]
    complete = [outcome for outcome in ended if outcome.is_complete]
    chosen = choose_arm(ended, "dev") if complete else []
    return [outcome for outcome in complete if outcome not in chosen]
