"""Training with joined products makes the steps that it makes as layers are written: 20 of them, of every method."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import LENGTH, VOCAB, make_rows
from trained_methods import CPU, DROPOUT, FEW_METHODS, LAYOUTS, METHODS, make_method_engine, make_trainable

from domext_ray.config.pretrain import EngineConfig, PretrainConfig
from domext_ray.model.joined import JoinedLinear, join_products
from domext_ray.training.cost import count_flops, make_full_batch
from domext_ray.training.losses import MaskedLoss
from domext_ray.training.objective import LOSS, MaskedBatch

STEPS = 20


def draw_batch(step: int) -> MaskedBatch:
    ids, mask = make_rows()
    draw = torch.Generator().manual_seed(step)
    positions = torch.randperm(ids.numel(), generator=draw)[:8].sort().values
    positions = positions[mask.flatten()[positions] > 0]
    labels = torch.randint(VOCAB // 4, (len(positions),), generator=draw)
    return MaskedBatch(ids, mask, None, positions, labels, torch.ones(len(positions)))


def train(method: str, *, joined: bool, layout: str = "bert", dropout: bool = False, **engine: Any) -> list[Any]:
    """The figures of steps; each has two micro batches."""
    model = make_trainable(method, **LAYOUTS[layout], **(DROPOUT if dropout else {}))
    trainer = make_method_engine(model, EngineConfig(**({"precision": "fp32", "joined": joined} | engine)), STEPS)
    assert any(isinstance(module, JoinedLinear) for module in model.modules()) == joined
    figures = []
    for step in range(STEPS):
        batches = [draw_batch(0), draw_batch(1 + step % 2)]
        figures.append(trainer.train_step(batches, {LOSS: sum(batch.num_masked for batch in batches)}, step))
    assert all(taken.finite for taken in figures)
    assert min(taken.loss for taken in figures[2::2]) < figures[0].loss, "of the same rows"
    return figures


def check_equal(joined: list[Any], as_written: list[Any], loss: float = 1e-6, norm: float = 1e-4) -> None:
    assert [step.loss for step in joined] == pytest.approx([step.loss for step in as_written], rel=loss)
    assert [step.grad_norm for step in joined] == pytest.approx([step.grad_norm for step in as_written], rel=norm)


@pytest.mark.parametrize("method", FEW_METHODS)
def test_steps_are_those_of_layers_as_written(method: str) -> None:
    """With dropout; in bf16 within its rounding, which every step carries on."""
    as_written, joined = (train(method, joined=is_joined, dropout=True) for is_joined in (False, True))
    check_equal(joined, as_written)
    as_written, joined = (train(method, joined=is_joined, precision="bf16") for is_joined in (False, True))
    check_equal(joined, as_written, 0.02, 0.2)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_steps_of_other_layouts(layout: str, method: str) -> None:
    """Also with activations that are computed again, and with a sharded optimiser."""
    as_written = train(method, joined=False, layout=layout, dropout=True)
    for engine in ({}, {"activation_checkpointing": True}, {"zero_stage": 1}, {"zero_stage": 2, "offload": True}):
        check_equal(train(method, joined=True, layout=layout, dropout=True, **engine), as_written)


def test_operations_are_counted_as_those_of_layers_as_written() -> None:
    """Without values, as a dry run and a worker count them for a card: they are the same, in fewer products."""
    batch = make_full_batch(PretrainConfig(), VOCAB, LENGTH)
    for method in METHODS:
        counts = []
        for joined in (False, True):
            model = make_trainable(method)
            model.set_attn_implementation("sdpa")
            if joined:
                join_products(model, torch.float32)
            counts.append(count_flops(MaskedLoss(model, CPU, bf16=False), batch))
        as_written, found = counts
        assert (found.forward, found.backward) == (as_written.forward, as_written.backward), method
        assert sum(found.matmuls.values()) < sum(as_written.matmuls.values()), method
