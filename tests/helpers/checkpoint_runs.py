"""A run directory with one checkpoint of a model, written without training."""

from __future__ import annotations

from pathlib import Path

import torch

from domext_ray.config.pretrain import PretrainConfig
from domext_ray.model.base import Base
from domext_ray.model.domext.modeling_domext import DomextForMaskedLM
from domext_ray.options.build import dump_yaml
from domext_ray.training.checkpoint import save_checkpoint
from domext_ray.training.engine import TensorState, TrainState


def make_run(run_dir: Path, config: PretrainConfig, model: DomextForMaskedLM, base: Base | None, step: int = 3) -> Path:
    state = TrainState(
        {
            name: TensorState(param.detach().clone(), torch.zeros_like(param), torch.zeros_like(param))
            for name, param in model.named_parameters()
            if param.requires_grad
        },
        num_updates=step,
    )
    run_dir.mkdir(exist_ok=True)
    (run_dir / "config.yaml").write_text(dump_yaml(config))
    record = {"base": config.base, "base_sha256": base.sha256 if base else "none"}
    save_checkpoint(run_dir / "checkpoints", step, state, {}, {}, record, keep=2)
    return run_dir
