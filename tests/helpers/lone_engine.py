"""An engine of one rank, for tests that look at what it computes and not at how it trains; the state of several."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from domext_ray.config.pretrain import EngineConfig, OptimConfig
from domext_ray.training.engine import Engine, TrainState, join_alone


def make_lone_engine(model: nn.Module, **settings: Any) -> Engine:
    """Put an engine around a model, on the CPU and in fp32; one group for all, for DeepSpeed keeps the first one."""
    join_alone()
    usual: dict[str, Any] = {
        "engine": EngineConfig(precision="fp32"),
        "optim": OptimConfig(decay_steps=10),
        "warmup_steps": 1,
        "micro_batch_size": 4,
        "accumulation_steps": 1,
        "seed": 0,
        "device": torch.device("cpu"),
    }
    return Engine(model, **{**usual, **settings})


def gather_whole(engine: Engine) -> TrainState:
    """The state that the ranks of an engine have together."""
    shares: list[TrainState] = [engine.gather_state()] * dist.get_world_size()
    dist.all_gather_object(shares, shares[0])
    return TrainState(
        {name: tensor for share in shares for name, tensor in share.tensors.items()}, shares[0].num_updates
    )


def measure_distance(first: TrainState, second: TrainState) -> float:
    """Largest difference of any element of any tensor."""
    assert first.num_updates == second.num_updates and first.tensors.keys() == second.tensors.keys()
    pairs = (
        (getattr(first.tensors[name], part), getattr(second.tensors[name], part))
        for name in first.tensors
        for part in ("param", "exp_avg", "exp_avg_sq")
    )
    return max((one - other).abs().max().item() for one, other in pairs)
