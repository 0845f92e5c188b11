"""One training of one task: a start model, rows and hyperparameters -> a fitted model that predicts.

Enters: an encoder, a task with its set, and a point of the grid. Leaves: the trained tensors, dev's score after every
epoch, and predictions. The steps are those of pre-training, in one process: one loss over the batch, AdamW, linear
warm-up and decay. With patience a training stops early and leaves its best epoch; the rate's schedule does not know of
it. BERT section A.3; Houlsby section 3.1.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from domext_ray.config.finetune import DROPOUTS, FinetuneConfig
from domext_ray.config.pretrain import CARD_TOKENS, OptimConfig
from domext_ray.errors import TrainingError
from domext_ray.families.family import Prediction
from domext_ray.families.readers.examples import Example
from domext_ray.families.rows import Row, batch_by_length
from domext_ray.families.task import StagedTask, Task, TaskBatch
from domext_ray.finetuning.word_dropout import WordDropout, make_readers, read_anew
from domext_ray.model.build import checkpoint_activations, merge_extensions
from domext_ray.models.rules import scale_rates
from domext_ray.models.start import StartModel, build_task_model
from domext_ray.models.task_model import PREDICTION_TOKENS, TaskModel
from domext_ray.text.data.draws import Purpose, hash_counters
from domext_ray.training.losses import Loss
from domext_ray.training.objective import LOSS
from domext_ray.training.step import SingleProcessTrainer

CPU_TOKENS = 1024
"""Tokens of a forward pass of training on a CPU, padding counted: a step's rows are passed from short to long."""

REPORT_SECONDS = 2.0


@dataclass(frozen=True)
class Point:
    """A point of the grid, and a restart."""

    lr: float  # at its peak
    batch_size: int  # rows of an optimiser step
    epochs: float  # passes over the training split; a part of one is allowed
    seed: int  # of the head's start, the order of the rows and dropout
    word_dropout: float = 0.0  # share of the vocabulary that an epoch leaves out
    new_word_dropout: float = 0.0  # the same of the new words

    @property
    def key(self) -> str:
        """A name for files."""
        dropped = "".join(f"-{name}{share:g}" for name in DROPOUTS if (share := getattr(self, name)))
        return f"lr{self.lr:g}-batch{self.batch_size}-epochs{self.epochs:g}{dropped}-seed{self.seed}"


def at_stage(point: Point, config: FinetuneConfig, stage: str) -> Point:
    """Return a point with the rate and the epochs that a step of a two-step task has."""
    grid = config.grid
    return replace(point, lr=grid.stage_lr.get(stage, point.lr), epochs=grid.stage_epochs.get(stage, point.epochs))


class TaskLoss(Loss):
    """A task's loss over the rows of a batch (`TaskBatch`)."""

    def __init__(self, model: nn.Module, device: torch.device, *, bf16: bool, task: Task) -> None:
        super().__init__(model, device, bf16=bf16)
        self.task = task

    def forward(self, batch: TaskBatch) -> dict[str, Tensor]:
        """Return the loss's sum."""
        with self.autocast():
            outputs = self.model(**batch.inputs)
        return {LOSS: self.task.compute_loss_sum(outputs, batch.targets)}


@dataclass
class Fitted(TaskModel):
    """A trained model of one task; its task's thresholds are tuned on dev, and LoRA's updates are in its matrices."""

    trainer: SingleProcessTrainer | None = None  # None: it only predicts, and nothing of an optimiser is in memory
    tensors: dict[str, Tensor] = field(default_factory=dict)  # what was trained, by the model's names, fp32 on the CPU
    thresholds: dict[str, float] = field(default_factory=dict)  # what the task tuned on dev
    dev_scores: list[float] = field(default_factory=list)  # dev's figure that is chosen by, after each epoch
    last_epoch: float = 0.0  # passes over the training split that were made
    best_epoch: float = 0.0  # passes after which the model was as it is now; below `last_epoch` with patience only
    steps: int = 0  # of the optimiser
    tokens: int = 0  # read in training, padding not counted
    seconds: float = 0.0  # of training steps
    dev_predictions: list[Prediction] | None = None  # of the model as it is; None: not made yet

    def predict(self, examples: Sequence[Example], max_tokens: int = PREDICTION_TOKENS) -> list[Prediction]:
        """Return a prediction an example, with the thresholds as they are."""
        if examples is self.task.data.dev and self.dev_predictions is not None:
            return self.dev_predictions
        return super().predict(examples, max_tokens)


class EarlyStopping:
    """Keeps the epoch with the best figure on dev, the first of equal ones, and says when training is over.

    It is over after `patience` epochs without a better figure; 0: training goes on, and the last epoch counts.
    """

    def __init__(self, patience: int) -> None:
        self._patience = patience
        self._best: Fitted | None = None

    def note_epoch(self, fitted: Fitted) -> bool:
        """Keep what an epoch left, if dev is better than ever; return whether to stop."""
        fitted.best_epoch = fitted.last_epoch
        if not self._patience:
            return False
        best = int(np.argmax(fitted.dev_scores))
        if best + 1 == len(fitted.dev_scores):
            assert fitted.trainer is not None
            self._best = replace(fitted, tensors=fitted.trainer.copy_parameters(), trainer=None)
        return len(fitted.dev_scores) - 1 - best >= self._patience

    def restore_best(self, fitted: Fitted) -> None:
        """Give a model its best epoch back; without patience it stays as it is."""
        best = self._best
        if best is not None and best.best_epoch < fitted.last_epoch:
            fitted.model.load_state_dict(best.tensors, strict=False)
            fitted.task.set_thresholds(best.thresholds)
            fitted.best_epoch, fitted.thresholds = best.best_epoch, best.thresholds
            fitted.dev_predictions = best.dev_predictions


Report = Callable[[dict[str, Any]], None]
"""Takes figures of a training as it goes on: step, steps, loss, tokens_per_second, and dev after an epoch."""


def fit_stages(
    start: StartModel, task: StagedTask, config: FinetuneConfig, point: Point, device: torch.device, report: Report
) -> dict[str, Fitted]:
    """Train the model of every stage of a task as `fit_task` does; its reports also name their "stage"."""

    def fit(name: str, stage: Task) -> Fitted:
        own_point = at_stage(point, config, name)
        return fit_task(start, stage, config, own_point, device, lambda record: report({"stage": name, **record}))

    return {name: fit(name, stage) for name, stage in task.stages.items()}


def fit_task(
    start: StartModel, task: Task, config: FinetuneConfig, point: Point, device: torch.device, report: Report
) -> Fitted:
    """Train a task's model and tune its thresholds on dev; with patience, until dev gets no better."""
    rows = task.encode(task.data.train, is_training=True)
    dev_rows = task.encode(task.data.dev, is_training=False)
    batches = draw_batches(start, task, point, rows)
    epoch_steps = math.ceil(len(rows) / point.batch_size)
    num_steps = max(1, round(point.epochs * epoch_steps))
    fitted = prepare_task(start, task, config, point, device, num_steps)
    stopping = EarlyStopping(config.grid.patience)
    reported = 0.0
    for step in range(num_steps):
        loss = _train_step(fitted, next(batches), config.grid.micro_batch_size, point)
        record: dict[str, Any] = {"step": step + 1, "steps": num_steps, "loss": loss}
        record["tokens_per_second"] = fitted.tokens / fitted.seconds
        if step + 1 == num_steps or ((step + 1) % epoch_steps == 0 and config.grid.score_every_epoch):
            fitted.dev_scores.append(_score_dev(fitted, dev_rows))
            fitted.last_epoch = (step + 1) / epoch_steps
            record |= {"epoch": fitted.last_epoch, "dev": fitted.dev_scores[-1]}
        if "dev" in record or time.perf_counter() - reported > REPORT_SECONDS:
            report(record)
            reported = time.perf_counter()
        if "dev" in record and stopping.note_epoch(fitted):
            break
    stopping.restore_best(fitted)
    assert fitted.trainer is not None
    fitted.tensors = fitted.trainer.copy_parameters()
    fitted.trainer = None  # AdamW's moments go: what was trained only predicts
    if config.method.is_merged:
        merge_extensions(fitted.model)
        _score_dev(fitted, dev_rows)  # thresholds and predictions are those of the model that is exported
    return fitted


def draw_batches(start: StartModel, task: Task, point: Point, rows: Sequence[Row]) -> Iterator[list[Row]]:
    """Yield the rows of the batches of one epoch after another, without end.

    With dropout of words each epoch reads the examples anew, and some of them may need more rows than before.
    """
    dropout = WordDropout(point.word_dropout, point.new_word_dropout, start.config.base_vocab_size)
    readers = make_readers(task, dropout, point.seed) if dropout.known or dropout.new else []
    for epoch in itertools.count():
        if readers:
            rows = read_anew(readers, point.seed, epoch)
        if not rows:
            raise TrainingError(f"no training example of {task.data.name} can be learned from: {' '.join(task.notes)}")
        for places in plan_epoch(len(rows), point.batch_size, point.seed, epoch):
            yield [rows[i] for i in places]


def plan_epoch(num_rows: int, batch_size: int, seed: int, epoch: int) -> list[np.ndarray]:
    """Return the rows of each batch of an epoch, int64 places; every row stands in one batch.

    Rows of any lengths stand together. Batches of similar lengths would save padding, but the mean over a batch's
    targets would let a word of a short sentence weigh more than one of a long sentence, and it costs F1. The last batch
    may be smaller.
    """
    order = np.argsort(hash_counters(seed, Purpose.TRAINING_ROWS, epoch, np.arange(num_rows)), kind="stable")
    return [order[first : first + batch_size] for first in range(0, num_rows, batch_size)]


def _train_step(fitted: Fitted, rows: Sequence[Row], micro_batch_size: int, point: Point) -> float:
    """Make one optimiser step and return its mean loss."""
    started = time.perf_counter()
    batches = collate_passes(fitted.task, rows, fitted.device, micro_batch_size)
    assert fitted.trainer is not None
    num_targets = sum(batch.num_targets for batch in batches)
    figures = fitted.trainer.train_step(batches, {LOSS: num_targets}, fitted.steps)
    if not figures.finite:
        raise TrainingError(
            f"step {fitted.steps + 1:,} of fine-tuning ({point.key}) has a loss of {figures.loss}; lower --grid.lr."
        )
    fitted.dev_predictions = None
    fitted.steps += 1
    fitted.tokens += sum(row.input_ids.size for row in rows)
    fitted.seconds += time.perf_counter() - started
    return figures.loss


def collate_passes(task: Task, rows: Sequence[Row], device: torch.device, max_rows: int = 0) -> list[TaskBatch]:
    """Return a step's rows as the batches of its forward passes, of similar lengths and `max_rows` at most; 0: any."""
    max_tokens = CPU_TOKENS if device.type == "cpu" else CARD_TOKENS
    passes = batch_by_length(rows, max_tokens=max_tokens, max_rows=max_rows)
    return [task.collate([rows[i] for i in places]) for places in passes]


def _score_dev(fitted: Fitted, rows: Sequence[Row]) -> float:
    """Tune the task's thresholds on dev and return dev's figure; the model reads dev's rows once."""
    task, dev = fitted.task, fitted.task.data.dev
    predictions = fitted.predict_rows(dev, rows)
    fitted.thresholds = task.fit_thresholds(dev, predictions)
    fitted.dev_predictions = task.decide_all(dev, predictions)
    return task.score(dev, fitted.dev_predictions).get(task.metric)


def make_model(start: StartModel, task: Task, config: FinetuneConfig, seed: int) -> Any:
    """Make what a configuration trains: an encoder with a task's head."""
    return build_task_model(start, task, config.method, dropout=config.optim.dropout, seed=seed, **config.head_values)


def prepare_task(
    start: StartModel,
    task: Task,
    config: FinetuneConfig,
    point: Point,
    device: torch.device,
    num_steps: int,
) -> Fitted:
    """Make a task's model and what trains it, before the first step; `num_steps` is the schedule's horizon."""
    model = make_model(start, task, config, point.seed)
    fitted = Fitted.place(task, model, device, bf16=config.engine.uses_bf16)
    if config.engine.activation_checkpointing:
        checkpoint_activations(fitted.model)
    fitted.trainer = SingleProcessTrainer(
        TaskLoss(fitted.model, device, bf16=fitted.bf16, task=task),
        optim=_make_optim(config, point, num_steps),
        warmup_steps=round(config.optim.warmup_frac * num_steps),
        seed=point.seed,
        device=device,
        rate_scales=scale_rates(fitted.model, config.optim, point.lr),
    )
    return fitted


def restore_task(
    start: StartModel,
    task: Task,
    config: FinetuneConfig,
    point: Point,
    device: torch.device,
    tensors: dict[str, Tensor],
    thresholds: dict[str, float],
) -> Fitted:
    """Make a model that was trained earlier again, from its trained tensors and thresholds, to predict with it."""
    model = make_model(start, task, config, point.seed)
    fitted = Fitted.place(task, model, device, bf16=config.engine.uses_bf16)
    _, unexpected = fitted.model.load_state_dict(tensors, strict=False)
    assert not unexpected, unexpected
    if config.method.is_merged:
        merge_extensions(fitted.model)
    task.set_thresholds(thresholds)
    fitted.tensors, fitted.thresholds = tensors, thresholds
    return fitted


def _make_optim(config: FinetuneConfig, point: Point, num_steps: int) -> OptimConfig:
    optim = config.optim
    return OptimConfig(
        lr=point.lr,
        decay_steps=num_steps + 1,  # the last step still has a rate
        beta1=optim.beta1,
        beta2=optim.beta2,
        eps=optim.eps,
        weight_decay=optim.weight_decay,
        max_grad_norm=optim.max_grad_norm,
    )
