"""One trial of a sweep: pre-train to a rung, fine-tune, score on dev, in one process.

Enters: a point of the space, and what all trials share. Leaves a run's directory (config.yaml, tokenizer/, checkpoints/
and metrics.jsonl: any job takes it as a model), with plan.json. Pre-training goes on from the newest checkpoint,
mid-schedule: its horizon is the whole budget.
"""

from __future__ import annotations

import math
import shutil
import time
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from domext_ray.config.finetune import FinetuneConfig
from domext_ray.config.pretrain import SettledConfig
from domext_ray.errors import RunError, TrainingError
from domext_ray.families.metrics.scores import Score
from domext_ray.families.readers.examples import LabelledSet
from domext_ray.files import read_json
from domext_ray.finetuning.finetuned import make_set_task
from domext_ray.finetuning.training import Point as FinetunePoint
from domext_ray.finetuning.training import fit_stages
from domext_ray.intervals import RESAMPLING_SEED, Resampled, average
from domext_ray.model.spec import ModelSpec
from domext_ray.models.source import open_model
from domext_ray.models.start import StartModel
from domext_ray.runs.attempts import supersede
from domext_ray.runs.run_directory import RunPaths, write_config
from domext_ray.runtime.device import TRAINING, prepare_device
from domext_ray.runtime.trials import Trial
from domext_ray.storage import Place, write_json
from domext_ray.studies.sweep.plan import SweepPlan
from domext_ray.studies.sweep.results import TRIALS
from domext_ray.studies.sweep.space import Point, configure, name_preparation
from domext_ray.text.vocabulary.tokenizer import LAST_FILE, replace_folder
from domext_ray.training.engine import join_alone
from domext_ray.training.metrics import DOMAIN, find_losses, read_metrics
from domext_ray.training.run import Run
from domext_ray.training.worker import PretrainWorker

PLAN_REMEDY = "delete the trial's folder: the same command trains it anew"
PILOT_STEPS = 10
"""Timed steps of a budget in seconds; the first ones are left out."""


class TrialTraining:
    """A trial in this process; a process group of it alone exists."""

    def __init__(self, plan: SweepPlan, folder: Place, point: Point) -> None:
        self.plan, self.folder = plan, folder
        configs = configure(plan.config, plan.space, point)
        self.finetune = configs.finetune
        pretrain = configs.pretrain
        uses_fp32 = not (pretrain.engine.uses_bf16 and self.finetune.engine.uses_bf16)
        self.device = prepare_device(plan.config.scale.uses_gpu, round(plan.cpus), TRAINING, uses_fp32=uses_fp32)
        self.prepared = plan.prepared[name_preparation(pretrain)]
        spec = ModelSpec.of(pretrain, self.prepared.base).with_tokenizer(self.prepared.inputs.tokenizer.local())
        self.spec = spec.solve()
        # What a trial scores the sweep's driver hands to all of them: see `watching.SweepWatch`.
        trackers = tuple(tracker for tracker in pretrain.run.trackers if tracker == "tensorboard")
        settled = replace(
            SettledConfig.of(pretrain),
            method=self.spec.method,
            run=replace(pretrain.run, name=folder.name, dir=str(folder.parent), trackers=trackers),
            scale=replace(pretrain.scale, cpus_per_worker=plan.cpus),
        )
        if not (folder / "tokenizer" / LAST_FILE).is_file():
            with replace_folder(folder / "tokenizer") as temporary:
                shutil.copytree(self.prepared.inputs.tokenizer, temporary, dirs_exist_ok=True)
        self.config = self._plan(settled)
        write_config(folder, self.config)
        self.worker = self._make_worker(self.config, folder)

    def _make_worker(self, config: SettledConfig, folder: Place) -> PretrainWorker:
        inputs = replace(self.prepared.inputs, tokenizer=folder / "tokenizer")
        paths = RunPaths(supersede(folder), inputs.domain.folder.parent, folder.local())
        run = Run(config, paths, self.spec, inputs=inputs)
        return PretrainWorker(run, device=self.device)

    def _plan(self, config: SettledConfig) -> SettledConfig:
        """Turn the budget into steps, once: a trial that goes on keeps its horizon."""
        path = self.folder / "plan.json"
        if path.exists():
            steps = read_json(path, PLAN_REMEDY, {"steps": int})["steps"]
        else:
            steps = self._count_steps(config)
            write_json(path, {"steps": steps})
        return config.with_steps(steps).with_horizon(steps)

    def _count_steps(self, config: SettledConfig) -> int:
        budget = self.plan.config.budget
        if budget.steps:
            return budget.steps
        if budget.tokens:
            manifest = self.prepared.inputs.domain
            per_step = config.train.global_batch_size * manifest.num_tokens("train") / manifest.num_rows("train")
            return max(self.plan.config.search.rungs, math.ceil(budget.tokens / per_step))
        pilot = self.folder / "pilot"
        pilot.local().mkdir(exist_ok=True)
        shutil.copytree(self.folder / "tokenizer", pilot / "tokenizer", dirs_exist_ok=True)
        timed = config.with_steps(PILOT_STEPS).with_horizon(PILOT_STEPS)
        timed = replace(timed, run=replace(timed.run, trackers=()))
        worker = self._make_worker(timed, pilot)
        seconds = worker.time_steps(PILOT_STEPS)
        worker.close()
        shutil.rmtree(pilot)
        return max(self.plan.config.search.rungs, round(budget.seconds / seconds))

    def run_rung(self, rung: int) -> dict[str, Any]:
        """Train to a rung, counted from 0, score it, and return its record; "ended" is its UNIX time."""
        steps = self.config.train.max_steps
        target = max(1, round(self.plan.config.search.shares[rung] * steps))
        started = time.perf_counter()
        trained = self.worker.records.seconds
        self.worker.run(target, evaluate_start=False)  # rungs are what a trial is judged by
        pretrained = time.perf_counter()
        start = open_model(str(self.folder)).load()
        return {
            "rung": rung,
            "step": self.worker.step,
            "steps": steps,
            **score_sets(start, self.plan, self.finetune, self.device),
            **self._read_pretraining(),
            "trainable": self.spec.counts.trainable,
            "ended": time.time(),
            "seconds": {
                "train": self.worker.records.seconds - trained,
                "evaluate": pretrained - started - (self.worker.records.seconds - trained),
                "finetune": time.perf_counter() - pretrained,
            },
        }

    def _read_pretraining(self) -> dict[str, Any]:
        records = read_metrics(self.folder / "metrics.jsonl")
        rates = [
            record["throughput/tokens_per_second"] for record in records if "throughput/tokens_per_second" in record
        ]
        evaluated = [record for record in records if find_losses(record, DOMAIN)][-1]
        return {
            "general_accuracy": evaluated["eval/general_mlm_accuracy"],
            "domain_bits_per_character": evaluated["eval/domain_bits_per_character"],
            "tokens_per_second": float(np.median(rates)),
        }

    def close(self) -> None:
        """Stop reading."""
        self.worker.close()


class SweepWorker:
    """A process of a sweep, which serves one trial after another and keeps its imports."""

    def __init__(self, plan: SweepPlan) -> None:
        self.plan, self.name = plan, ""
        self.trial: TrialTraining | None = None

    def __call__(self, item: tuple[Trial, int | None]) -> dict[str, Any]:
        """Train a trial to a rung and score it; without a rung, let go of it."""
        planned, rung = item
        join_alone()
        if planned.name != self.name or rung is None:
            self._close()
        if rung is None:
            return {}
        try:
            if self.trial is None:
                folder = self.plan.folder / TRIALS / planned.name
                self.trial, self.name = TrialTraining(self.plan, folder, planned.config), planned.name
            record = self.trial.run_rung(rung)
        except BaseException:
            self._close()
            raise
        search = self.plan.config.search
        if rung + 1 == search.rungs:
            self._close()
        missing = [name for name in search.objectives if record[name] is None]
        if missing:
            raise RunError(f"--search.objectives has {missing[0]}, which this base and its probe do not give.")
        return record

    def _close(self) -> None:
        if self.trial is not None:
            self.trial.close()
        self.trial, self.name = None, ""


def score_sets(start: StartModel, plan: SweepPlan, config: FinetuneConfig, device: torch.device) -> dict[str, Any]:
    """Fine-tune on every set of a sweep, in as many steps for few labels as for all, and score it on dev.

    "f1" is the mean over sets, "figure" what it is called, and "f1_interval" its 95 % [low, high] over documents and
    restarts.
    """
    grids = [config.grid.for_labels(plan.config.labels, total) for total in plan.num_examples]
    pairs = [(data, replace(config, grid=grid)) for data, grid in zip(plan.sets, grids, strict=True)]
    scored, metrics = zip(*(_score_set(start, *pair, device) for pair in pairs), strict=True)
    found = average(scored)
    return {
        "figure": "F1" if all(metric.split(".")[0] == "f1" for metric in metrics) else "downstream score",
        "f1": found.value,
        "f1_interval": [found.low, found.high],
        "by_task": {name: sample.mean for name, sample in zip(plan.config.set_names, scored, strict=True)},
    }


def _score_set(
    start: StartModel, data: LabelledSet, config: FinetuneConfig, device: torch.device
) -> tuple[Resampled, str]:
    """Return the figure of the grid's best point, of every restart, with its resamples; and which figure it is."""
    config = replace(config, model=start.id)
    task = make_set_task(config, start, data)

    def fit(point: FinetunePoint) -> Score:
        fitted = fit_stages(start, task, config, point, device, lambda record: None)
        predictors = {name: stage.predict for name, stage in fitted.items()}
        return task.evaluate(predictors, splits=("dev",))["dev"].score

    grid = config.grid
    scores, failures = [], []
    for point in grid.list_points(new_words=bool(start.config.extension_vocab_size)):
        try:
            scores.append([fit(FinetunePoint(**point, seed=config.seed + i)) for i in range(grid.restarts)])
        except TrainingError as error:  # a rate that diverges ends no other
            failures.append(error)
    if not scores:
        raise failures[0]
    values = np.array([[score.get(task.metric) for score in own] for own in scores])
    best = int(np.argmax(values.mean(axis=1)))
    drawn = [score.resample(config.num_resamples, RESAMPLING_SEED)[task.metric] for score in scores[best]]
    return Resampled(values[best], np.stack(drawn), scores[best][0].num_clusters), task.metric


def score_base(plan: SweepPlan, _: Any = None) -> dict[str, Any]:
    """Return what the base scores without any pre-training of the sweep's, as a trial is scored: see `score_sets`."""
    uses_fp32 = not plan.config.finetune.engine.uses_bf16
    device = prepare_device(plan.config.scale.uses_gpu, round(plan.cpus), TRAINING, uses_fp32=uses_fp32)
    return score_sets(open_model(plan.config.base).load(), plan, plan.config.finetune, device)
