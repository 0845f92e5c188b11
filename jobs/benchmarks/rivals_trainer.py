"""LoRA as transformers' Trainer and peft train it, as a rival of this library's engine; both make whole runs.

Enters: a model with LoRA, and a batch that every step of a run repeats. Leaves: figures to compare, seconds of a step
(a run's first steps left out) and the mean loss of a run, in which both must agree as well.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from benchmarks.timing import Batch, Clock, Seconds
from peft import get_peft_model
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.utils import logging

from domext_ray.config.method import MethodConfig
from domext_ray.config.pretrain import EngineConfig, OptimConfig
from domext_ray.extensions.lora import build_lora_config
from domext_ray.model.build import name_plain
from domext_ray.model.domext.modeling_domext import DomextForMaskedLM
from domext_ray.model.layouts import find_layout
from domext_ray.training.engine import Engine
from domext_ray.training.objective import MaskedBatch

Row = dict[str, Tensor]  # input_ids and labels, int64 [N]
SEED = 0


@dataclass(frozen=True)
class Run:
    """One run.

    Args:
        seconds: of a step, the mean of those after the first ones.
        loss: mean over all steps.
    """

    seconds: Seconds
    loss: float


@dataclass(frozen=True)
class RunLength:
    """Steps of a run.

    Args:
        num_steps: all of them.
        num_untimed: the first of them.
    """

    num_steps: int
    num_untimed: int

    @property
    def num_timed(self) -> int:
        """Steps that are timed."""
        return self.num_steps - self.num_untimed


def split_rows(batch: Batch) -> list[Row]:
    """Return a batch's rows as a dataset holds them."""
    labels = batch.all_labels.view_as(batch.input_ids)
    return [{"input_ids": ids, "labels": each} for ids, each in zip(batch.input_ids.cpu(), labels.cpu(), strict=True)]


def stack_rows(rows: Sequence[Row]) -> Row:
    """Collate rows of one length."""
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


class EngineRuns:
    """Runs of this library's engine, in a process group of one worker.

    Args:
        model: on `device`; it is taken over.
        batch_size: rows of a step.
        length: steps of a run.
        device: where to train.
        bf16: autocast.
    """

    def __init__(
        self, model: DomextForMaskedLM, batch_size: int, length: RunLength, device: torch.device, *, bf16: bool
    ) -> None:
        self.length, self.device = length, device
        self.engine = Engine(
            model,
            engine=EngineConfig(precision="bf16" if bf16 else "fp32"),
            optim=OptimConfig(decay_steps=length.num_steps),
            warmup_steps=0,
            micro_batch_size=batch_size,
            accumulation_steps=1,
            seed=SEED,
            device=device,
        )

    def run(self, rows: Sequence[Row]) -> Run:
        """Make a run, collating the rows in every step."""
        losses, clock = [], Clock(self.device)
        for step in range(self.length.num_steps):
            if step == self.length.num_untimed:
                clock.restart()
            batch = collate_masked(rows)
            losses.append(self.engine.train_step([batch], batch.num_masked, step).loss)
        return Run(clock.read(self.length.num_timed), sum(losses) / len(losses))


def collate_masked(rows: Sequence[Row]) -> MaskedBatch:
    """Make what the engine takes of masked rows."""
    stacked = stack_rows(rows)
    labels = stacked["labels"].flatten()
    positions = (labels >= 0).nonzero().flatten()
    return MaskedBatch(stacked["input_ids"], None, None, positions, labels[positions], torch.ones(len(positions)))


class TrainerRuns(nn.Module):
    """Runs of transformers' Trainer on a plain BERT with peft's LoRA.

    Args:
        model: whose weights are used, LoRA's too.
        method: describes LoRA.
        length: steps of a run.
        device: where to train.
        bf16: Trainer's own mixed precision.
    """

    def __init__(
        self,
        model: DomextForMaskedLM,
        method: MethodConfig,
        length: RunLength,
        device: torch.device,
        *,
        bf16: bool,
    ) -> None:
        super().__init__()
        logging.set_verbosity_error()  # Trainer warns that there is a process group which it does not use
        plain = BertForMaskedLM(
            cast(BertConfig, find_layout(cast(Any, model.config)).restore(cast(Any, model.config), "ForMaskedLM"))
        )
        self.peft_model = cast(nn.Module, get_peft_model(plain, build_lora_config(method))).to(device)
        self.load(model)
        self.length, self.device, self.bf16 = length, device, bf16

    def load(self, model: DomextForMaskedLM) -> None:
        """Take a model's weights."""
        params = dict(model.named_parameters())
        tensors = {f"base_model.model.{plain}": params[own] for own, plain in name_plain(model).items()}
        missing, unexpected = self.peft_model.load_state_dict(tensors, strict=False)
        assert all(".cls.predictions.decoder." in name for name in missing) and not unexpected, (missing, unexpected)

    def forward(self, batch: Batch) -> Tensor:
        """Return BertForMaskedLM's own loss."""
        return self.peft_model(input_ids=batch.input_ids, labels=batch.all_labels.view_as(batch.input_ids)).loss

    def run(self, rows: Sequence[Row]) -> Run:
        """Make a run with a Trainer of its own."""
        optim = OptimConfig()
        timer = StepTimer(self.length, self.device)
        with tempfile.TemporaryDirectory(prefix="domext-trainer-") as folder, without_ranks():
            arguments = TrainingArguments(
                output_dir=folder,
                max_steps=self.length.num_steps,
                per_device_train_batch_size=len(rows),
                train_sampling_strategy="sequential",
                learning_rate=optim.lr,
                weight_decay=optim.weight_decay,
                adam_beta2=optim.beta2,
                max_grad_norm=optim.max_grad_norm,
                lr_scheduler_type="linear",
                bf16=self.bf16,
                use_cpu=self.device.type == "cpu",
                seed=SEED,
                logging_strategy="no",
                save_strategy="no",
                eval_strategy="no",
                report_to="none",
                disable_tqdm=True,
                dataloader_pin_memory=False,
            )
            dataset = cast(Any, [*rows] * self.length.num_steps)
            trainer = Trainer(
                self.peft_model, arguments, train_dataset=dataset, data_collator=stack_rows, callbacks=[timer]
            )
            trainer.remove_callback(PrinterCallback)
            output = trainer.train()
        assert trainer.model_wrapped is self.peft_model, "the rival trains the bare model"
        assert timer.seconds is not None and output.global_step == self.length.num_steps
        return Run(timer.seconds, output.training_loss)


class StepTimer(TrainerCallback):
    """Times the steps after a Trainer's first ones, with the reading of their batches."""

    def __init__(self, length: RunLength, device: torch.device) -> None:
        self.length = length
        self.clock = Clock(device)
        self.seconds: Seconds | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Start."""
        self.clock.restart()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Start again after the untimed steps, and stop after the last one."""
        if state.global_step == self.length.num_untimed:
            self.clock.restart()
        if state.global_step == self.length.num_steps:
            self.seconds = self.clock.read(self.length.num_timed)


@contextmanager
def without_ranks() -> Iterator[None]:
    """Hide the ranks that DeepSpeed put into the environment: accelerate would wrap the model for several workers."""
    names = ("LOCAL_RANK", "RANK", "WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT")
    hidden = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)
