"""Fine-tuning by this library against transformers' Trainer: same model, rows and precision, for `jobs/benchmark.py`.

Both see as many rows of the same set, in batches of the same size; padding, order and everything else is each side's
own way. The rival is a plain BertForTokenClassification with DataCollatorForTokenClassification, once with Trainer's
default sampler and once with its sampler by length.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from benchmarks.output import Measured, Record, add_output_options, write_records
from torch import nn
from transformers import (
    BertConfig,
    BertForTokenClassification,
    DataCollatorForTokenClassification,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.utils import logging

from domext_ray.config.finetune import FinetuneConfig
from domext_ray.config.method import MethodConfig
from domext_ray.config.pretrain import EngineConfig
from domext_ray.downstream.finetune.batches import plan_epoch
from domext_ray.downstream.finetune.training import Point, prepare_task
from domext_ray.downstream.start.model import StartModel, build_task_model, load_start_model
from domext_ray.downstream.tasks.families import make_task
from domext_ray.downstream.tasks.task import ONLY_STAGE, Row, Task, TaskOptions
from domext_ray.errors import ConfigError
from domext_ray.labelled.readers.loading import load_labelled
from domext_ray.model.layouts import find_layout
from domext_ray.training.step import move_batch

FULL = MethodConfig(name="full", trains="all", heads=0, ffn_units=0)
SAMPLERS = ("random", "group_by_length")
LOSS_TOLERANCE = 1e-4
UNTIMED_STEPS = 4


def add_finetune_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `jobs/benchmark.py finetune`."""
    parser.add_argument("--task", default="code_entities", help="ner, or a described set of that family")
    parser.add_argument("--data", default="", help="folder of the set; empty: code_entities, which ships")
    parser.add_argument("--model", default="general-mini", help="a BERT without extensions")
    parser.add_argument("--batch_size", type=int, default=32, help="rows of a step")
    parser.add_argument("--steps", type=int, default=60, help="timed steps of a run")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each side, in turn")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help="bf16: autocast")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0: torch's own choice")
    add_output_options(parser)


def run_finetune(options: argparse.Namespace) -> None:
    """Time both sides in turn, compare a batch's loss first, print and write."""
    if options.threads:
        torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    config = FinetuneConfig(
        task=options.task,
        data=options.data,
        model=options.model,
        method=FULL,
        engine=EngineConfig(precision=options.precision),
    )
    loaded = load_labelled(config)
    if loaded.family != "ner":
        raise ConfigError(f"--task {options.task!r} is of the family {loaded.family}; this benchmark takes ner.")
    start = load_start_model(options.model)
    if start.config.has_extension or not find_layout(start.config).has_plain_heads:
        raise ConfigError(f"--model {options.model!r} is no plain BERT; the rival is, so give a base.")
    task = make_task(loaded.family, loaded.data, start.tokenizer, TaskOptions()).stages[ONLY_STAGE]
    num_rows = options.batch_size * (options.steps + UNTIMED_STEPS)
    rows = task.encode(loaded.data.train, is_training=True)
    rows = [rows[i % len(rows)] for i in range(num_rows)]
    check_losses(start, task, rows[: options.batch_size], device)
    seconds: dict[str, list[float]] = {"ours": [], **{sampler: [] for sampler in SAMPLERS}}
    for repeat in range(options.repeats):
        seconds["ours"].append(time_ours(start, task, rows, config, options.batch_size, repeat, device))
        for sampler in SAMPLERS:
            seconds[sampler].append(time_trainer(start, task, rows, options, sampler, repeat, device))
    print_result(seconds, rows, options, device)


def check_losses(start: StartModel, task: Task, rows: Sequence[Row], device: torch.device) -> None:
    """Refuse to compare unless both sides give one batch the same loss."""
    model = build_task_model(start, task, FULL, dropout=0.0, seed=0).to(device).eval()
    rival = cast(nn.Module, make_rival(start, task, dropout=0.0)).to(device).eval()
    batch = task.collate(rows)
    tensors = DataCollatorForTokenClassification(start.tokenizer)(describe_rows(rows)).to(device)
    with torch.no_grad():
        given = move_batch(batch, device)
        loss_sum = task.compute_loss_sum(model(**given["inputs"]), given["targets"])
        difference = abs(loss_sum.item() / batch.num_targets - rival(**tensors).loss.item())
    assert difference < LOSS_TOLERANCE, f"the losses of one batch differ by {difference}"


def make_rival(start: StartModel, task: Task, dropout: float) -> BertForTokenClassification:
    """Return transformers' own model with the weights of ours."""
    model = build_task_model(start, task, FULL, dropout=dropout, seed=0)
    config = cast(BertConfig, find_layout(model.config).restore(model.config, "ForMaskedLM"))
    config.num_labels = len(task.head_labels)
    rival = BertForTokenClassification(config)
    tensors = {name: each for name, each in model.state_dict().items() if not name.startswith("bert.pooler.")}
    rival.load_state_dict(tensors)
    return rival


def describe_rows(rows: Sequence[Row]) -> list[dict[str, list[int]]]:
    """Return rows as a dataset of transformers holds them."""
    return [{"input_ids": row.input_ids.tolist(), "labels": row.targets["labels"].tolist()} for row in rows]


def time_ours(
    start: StartModel,
    task: Task,
    rows: Sequence[Row],
    config: FinetuneConfig,
    batch_size: int,
    seed: int,
    device: torch.device,
) -> float:
    """Return the seconds of a run's timed steps."""
    point = Point(lr=5e-5, batch_size=batch_size, epochs=1.0, seed=seed)
    batches = plan_epoch(rows, batch_size, seed, 0)
    trainer = prepare_task(start, task, replace(config, seed=seed), point, device, len(batches)).trainer
    assert trainer is not None
    started = 0.0
    for step, places in enumerate(batches):
        if step == UNTIMED_STEPS:
            started = time.perf_counter()
        batch = task.collate([rows[i] for i in places])
        trainer.train_step([batch], batch.num_targets, step)
    return time.perf_counter() - started


class Stopwatch(TrainerCallback):
    """Times a Trainer's steps after the first ones."""

    def __init__(self) -> None:
        self.started = self.seconds = 0.0

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Start after the untimed steps, stop after every later one."""
        if state.global_step == UNTIMED_STEPS:
            self.started = time.perf_counter()
        self.seconds = time.perf_counter() - self.started


def time_trainer(
    start: StartModel,
    task: Task,
    rows: Sequence[Row],
    options: argparse.Namespace,
    sampler: str,
    seed: int,
    device: torch.device,
) -> float:
    """Return the seconds of the timed steps of a run of Trainer."""
    logging.set_verbosity_error()
    watch = Stopwatch()
    with tempfile.TemporaryDirectory(prefix="domext-trainer-") as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            num_train_epochs=1,
            per_device_train_batch_size=options.batch_size,
            train_sampling_strategy=sampler,
            warmup_steps=0.1,
            weight_decay=0.01,
            bf16=options.precision == "bf16",
            use_cpu=device.type == "cpu",
            seed=seed,
            logging_strategy="no",
            save_strategy="no",
            eval_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=device.type == "cuda",
        )
        trainer = Trainer(
            make_rival(start, task, dropout=0.1),
            arguments,
            train_dataset=cast(Any, describe_rows(rows)),
            data_collator=DataCollatorForTokenClassification(start.tokenizer),
            callbacks=[watch],
        )
        trainer.remove_callback(PrinterCallback)
        output = trainer.train()
    assert output.global_step == options.steps + UNTIMED_STEPS
    return watch.seconds


def print_result(
    seconds: dict[str, list[float]], rows: Sequence[Row], options: argparse.Namespace, device: torch.device
) -> None:
    """Print medians and ratios, and write them as JSON."""
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    num_rows = options.batch_size * options.steps
    print(f"{'':<32}{'seconds':>9}{'rows/s':>9}{'rival / ours':>14}")
    for name, median in medians.items():
        ratio = "" if name == "ours" else f"{median / medians['ours']:.2f}"
        print(f"{_label(name):<32}{median:>9.2f}{num_rows / median:>9.1f}{ratio:>14}")
    figures = {
        "ratios": {name: medians[name] / medians["ours"] for name in SAMPLERS},
        "rows_per_second": num_rows / medians["ours"],
        "tokens_per_row": sum(row.length for row in rows) / len(rows),
    }
    case = {name: getattr(options, name) for name in ("task", "model", "precision", "batch_size", "steps")}
    results = [Measured(_label(name), "seconds", each) for name, each in seconds.items()]
    write_records(options, [Record("finetune", case, results, figures)], device)


def _label(side: str) -> str:
    return "domext_ray" if side == "ours" else f"Trainer, {side}"
