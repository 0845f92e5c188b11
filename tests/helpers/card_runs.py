"""What runs on a card that is not there (card.py), in a process of its own: who waits for it, by what runs."""

from __future__ import annotations

import contextlib
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from card import Card, Wait, register_card
from method_runs import MICRO_BATCH, OPTIM, Places, build, draw_batches, make_config, make_places
from methods import ROWS, Row
from torch import nn

from domext_ray.config.pretrain import EngineConfig
from domext_ray.model.build import choose_attention, describe_extensions, store_base
from domext_ray.training import engine as engine_module
from domext_ray.training.checkpoint import save_checkpoint
from domext_ray.training.engine import Engine, TensorState, TrainState, join_alone
from domext_ray.training.keeping import make_loss
from domext_ray.training.step import list_trainables

Waits = Counter[Wait]


class WithoutDeepSpeed:
    """What the engine asks of DeepSpeed at ZeRO-0 on one rank, where it reduces nothing."""

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.module, self._optimizer = module, optimizer
        self.train, self.eval = module.train, module.eval
        self.no_sync = contextlib.nullcontext

    def __call__(self, **batch: Any) -> Any:
        return self.module(**batch)

    def backward(self, loss: torch.Tensor, scale_wrt_gas: bool) -> None:
        loss.backward()

    def step(self) -> None:
        self._optimizer.step()
        self.zero_grad()

    def zero_grad(self) -> None:
        self._optimizer.zero_grad()

    def set_gradient_accumulation_boundary(self, is_last: bool) -> None:
        pass


def make_card_engine(model: nn.Module, device: torch.device, objective: Any, precision: Any) -> Engine:
    """Make a run's engine, without DeepSpeed's own."""
    engine_module._initialize = WithoutDeepSpeed  # type: ignore[assignment]
    join_alone()
    return Engine(
        model,
        objective=objective,
        engine=EngineConfig(zero_stage=0, precision=precision),
        optim=OPTIM,
        warmup_steps=OPTIM.warmup_steps,
        micro_batch_size=MICRO_BATCH,
        accumulation_steps=2,
        seed=7,
        device=device,
    )


def run_row(row: Row, places: Places, precision: str) -> dict[str, Waits]:
    """A second step of two micro batches, after which AdamW has its moments; and an evaluation of one batch."""
    device = register_card()
    built = build(row, places, dropout=0.1)
    batches, num_masked, num_distilled = draw_batches(row, places, 0)
    with Card() as card:
        if precision == "bf16":
            store_base(built.model, torch.bfloat16)
        choose_attention(built.model, device, bf16=precision == "bf16")
        model = built.model.to(device)
        objective = make_loss(make_config(row, places), built.base, model, built.fixed, device)
        engine = make_card_engine(model, device, objective, precision)
        for step in range(2):
            card.take_waits()
            engine.train_step(batches, num_masked, step, 8 * row.pairs, num_distilled)
        waits = {"step": card.take_waits()}
        engine.evaluate(batches[0])
        return waits | {"evaluation": card.take_waits()}


def save_start(row: Row, places: Places) -> None:
    """Save a row's model as a checkpoint, for the rows that go on from it."""
    built = build(row, places)
    tensors = {
        name: TensorState(each.detach(), torch.zeros_like(each), torch.zeros_like(each))
        for name, each in list_trainables(built.model).items()
    }
    record = {
        "base": "tiny",
        "base_sha256": built.base.sha256,
        "extensions": asdict(describe_extensions(built.model.config)),
    }
    save_checkpoint(places.run_of(row) / "checkpoints", 1, TrainState(tensors, 1), built.fixed, {}, record, keep=1)


def try_to(call: Callable[..., Any], *arguments: Any) -> Any:
    """Call; a failure is its result, as text."""
    try:
        return call(*arguments)
    except Exception:
        return traceback.format_exc()
