"""A run with one checkpoint of a model, made without training: as a directory, and as it is rebuilt from one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from domext_ray.config.options.build import dump_yaml
from domext_ray.config.pretrain import PretrainConfig
from domext_ray.model.base import Base
from domext_ray.model.build import describe_extensions
from domext_ray.model.domext.modeling_domext import DomextForMaskedLM
from domext_ray.model.spec import UNKNOWN_WORD, ModelSpec
from domext_ray.storage import Place
from domext_ray.training.checkpoint import save_checkpoint
from domext_ray.training.engine import TensorState, TrainState
from domext_ray.training.start import RebuiltRun


def make_run(
    run_dir: Path,
    config: PretrainConfig,
    model: DomextForMaskedLM,
    base: Base | None,
    step: int = 3,
    changed: Mapping[str, torch.Tensor] = {},
) -> Path:
    """Write the directory; `changed` are frozen tensors that are no longer the base's."""
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
    save_checkpoint(Place(run_dir / "checkpoints"), step, state, dict(changed), {}, record, keep=2)
    return run_dir


def as_rebuilt(
    model: Any, base: Base | None, tokenizer: PreTrainedTokenizerBase, config: PretrainConfig, name: str = "tiny"
) -> RebuiltRun:
    """A run with a model; its spec has the options' own adapter, whatever the model has of that name."""
    known, method = describe_extensions(model.config), config.method
    own = [method.adapter] if method.has_adapter else []
    others = {name: adapter for name, adapter in known.adapters.items() if name not in own}
    spec = ModelSpec(
        base,
        method,
        vocab_size=0 if base else model.config.base_vocab_size,
        new_words=[UNKNOWN_WORD] * model.config.extension_vocab_size,
        next_sentence=model.predicts_next_sentence,
        causal=model.config.causal,
        reads_words=config.objective.reads_words,
        earlier=replace(known, adapters=others),
    )
    return RebuiltRun(name, config, spec, model, tokenizer, 3, "0" * 64)
