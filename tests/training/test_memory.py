"""Memory of a step as it is planned: what fake tensors hold is what real ones do, and how ZeRO shares it."""

from __future__ import annotations

import copy
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from test_engine import CPU, build_model, join, split
from torch import nn

from domext_ray.config.method import MethodConfig
from domext_ray.config.pretrain import (
    EngineConfig,
    ObjectiveConfig,
    PretrainConfig,
    ScaleConfig,
    ShapeConfig,
    TrainConfig,
    VocabConfig,
)
from domext_ray.model.base import load_base
from domext_ray.model.build import store_base
from domext_ray.model.joined import join_products
from domext_ray.model.spec import ModelSpec
from domext_ray.training.cost import (
    Sharding,
    StepMemory,
    estimate_memory,
    list_moments,
    make_dry_run_model,
    make_fake,
    measure_step_memory,
    plan_memory,
)
from domext_ray.training.engine import MAX_BUCKET_ELEMENTS
from domext_ray.training.losses import MaskedLoss

ALONE = Sharding(stage=0, world_size=1, accumulates=False)


def build_objective(method: str = "af", *, bf16: bool = False) -> MaskedLoss:
    return MaskedLoss(build_model(dropout=0.1, method=method), CPU, bf16=bf16).train()


def make_batch() -> Any:
    return join(split(0, 0, 1, 1)[0])


def test_a_step_without_values_holds_what_a_real_one_holds() -> None:
    for method, keeps, bf16, joined in product(("af", "full"), *[(True, False)] * 3):
        objective, batch = build_objective(method, bf16=bf16), make_batch()
        if joined:
            join_products(objective.model, torch.bfloat16 if bf16 else torch.float32)
        real = measure_step_memory(copy.deepcopy(objective), batch, keeps_gradients=keeps)
        fake, mode = make_fake(objective)
        with mode:
            planned = measure_step_memory(fake, batch, keeps_gradients=keeps)
        # kernels make a few bytes of their own
        assert asdict(planned) == pytest.approx(asdict(real), rel=1e-3), (method, keeps, bf16, joined)
        assert real.before > real.after // 2 > 0
        assert (real.gradients > 0) <= keeps


def test_planning_leaves_the_model_as_it_is() -> None:
    objective = build_objective()
    before = copy.deepcopy(objective.state_dict())
    plan_memory(objective, make_batch(), ALONE, recomputes=True)
    assert all(param.grad is None and param.dtype == torch.float32 for param in objective.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in objective.state_dict().items())
    assert not cast(Any, objective.model).is_gradient_checkpointing


def test_a_narrow_base_takes_half() -> None:
    objective = build_objective()
    plain = plan_memory(objective, make_batch(), ALONE)
    store_base(cast(Any, objective.model), torch.bfloat16)
    narrow = plan_memory(objective, make_batch(), ALONE)
    assert 0.5 <= narrow["frozen_weights"] / plain["frozen_weights"] < 0.55, "all but LayerNorms"


def test_recomputed_activations_are_those_of_one_layer() -> None:
    config = PretrainConfig(
        base="none",
        vocab=VocabConfig(size=100),
        shape=ShapeConfig(num_hidden_layers=8, hidden_size=64, num_attention_heads=2, intermediate_size=128),
        method=MethodConfig(name="full", trains="all", heads=0, ffn_units=0),
        train=TrainConfig(seq_length=64, global_batch_size=32),
        engine=EngineConfig(precision="fp32"),
    )
    recomputed = replace(config, engine=replace(config.engine, activation_checkpointing=True))
    plain, one = (
        estimate_memory(make_dry_run_model(variant, ModelSpec.of(variant, None)))["activations"]
        for variant in (config, recomputed)
    )
    assert one < 0.4 * plain


def test_joined_weights_are_counted_where_they_are_stored_twice() -> None:
    """Of a base in fp32 under autocast all of them, and else the output projections and what trains, d 64."""
    outputs, trained = 2 * (64 * (64 + 16) + 64 * (128 + 1600) + 2 * 64), 2 * (64 + 1) * (3 * 16 + 1600)
    for bf16, stored, expected in (
        (False, None, 4 * (outputs + trained)),
        (True, torch.bfloat16, 2 * (outputs + trained)),
        (True, None, 2 * (outputs + trained + 2 * (64 + 1) * (3 * 64 + 128))),
    ):
        objective = build_objective(bf16=bf16)
        if stored is not None:
            store_base(objective.model, stored)
        assert "joined_weights" not in plan_memory(objective, make_batch(), ALONE)
        join_products(objective.model, torch.bfloat16 if bf16 else torch.float32)
        assert plan_memory(objective, make_batch(), ALONE)["joined_weights"] == expected


def test_zero_shares_what_it_says() -> None:
    objective = build_objective("full")
    trained = sum(4 * param.numel() for param in objective.parameters())
    for stage in range(4):
        parts = plan_memory(objective, make_batch(), Sharding(stage, world_size=4, accumulates=True))
        assert parts["trainable_weights"] == trained
        assert parts["optimizer_moments"] == 2 * (trained // 4 if stage else trained)
        assert parts.get("optimizer_masters", 0) == (trained // 4 if stage else 0)
        assert parts.get("shards_of_weights", 0) == (trained // 4 if stage == 3 else 0)
        assert parts["gradients"] >= (trained if stage < 2 else trained // 4)
        offloaded = plan_memory(objective, make_batch(), Sharding(stage, 4, accumulates=True, offload=True))
        assert not offloaded.keys() & {"optimizer_masters", "optimizer_moments"}


def test_a_large_model_is_reduced_bucket_by_bucket() -> None:
    bucket = 4 * MAX_BUCKET_ELEMENTS
    step = StepMemory(before=10, after=5, gradients=3, reducing=4)
    moments = list(list_moments(10 * bucket, 0, step, Sharding(2, 10, accumulates=False)))
    assert {"gradients": bucket, "buffers": 2 * bucket, "activations": 4} in moments
    assert max(moment["buffers"] for moment in moments) == 2 * bucket


def test_a_dry_run_plans_the_longest_rows_and_a_gpu_without_one(tiny_base_folder: Path) -> None:
    config = PretrainConfig(
        base=str(tiny_base_folder),
        method=MethodConfig(heads=1, ffn_units=16),
        train=TrainConfig(seq_length=16, long_seq_length=64, global_batch_size=8, long_micro_batch_size=4),
        engine=EngineConfig(precision="fp32"),
    )
    base = load_base(config.base)

    def plan(config: PretrainConfig) -> dict[str, int]:
        return estimate_memory(make_dry_run_model(config, ModelSpec.of(config, base)))

    short = plan(replace(config, train=replace(config.train, long_seq_length=0)))
    assert plan(config)["activations"] > 1.5 * short["activations"]
    on_gpu = plan(replace(config, scale=ScaleConfig(use_gpu=True)))
    assert on_gpu["activations"] < plan(config)["activations"], "fused attention keeps no weights"
    plain = replace(config, train=TrainConfig(seq_length=16, global_batch_size=8))
    contrast = plan(replace(plain, objective=ObjectiveConfig(kind="infonce", group_rows=8)))
    assert contrast["activations"] > 0 and "buffers" in contrast


def test_a_copy_of_the_base_is_counted(tiny_base_folder: Path) -> None:
    config = PretrainConfig(base=str(tiny_base_folder), method=MethodConfig(trains="all", heads=0, ffn_units=0))
    config = replace(config, replay=replace(config.replay, corpus="general.txt"), train=TrainConfig(seq_length=16))
    trial = make_dry_run_model(config, ModelSpec.of(config, load_base(config.base)))
    parts = estimate_memory(trial)
    assert parts["copy_of_the_base"] == parts["trainable_weights"] // 2, "in bf16, as it computes"
    assert isinstance(trial.objective, nn.Module)
