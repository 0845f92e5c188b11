"""A model and its masked-LM head: what fills masks, and what forgetting is measured of."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from domext_ray.errors import BaseModelError
from domext_ray.families.rows import TokenRow, pad_rows
from domext_ray.model.base import NEXT_SENTENCE_HEAD, POOLER, hash_tensors
from domext_ray.model.domext.configuration_domext import DomextConfig
from domext_ray.model.domext.modeling_domext import DomextForMaskedLM
from domext_ray.models.source import open_model
from domext_ray.models.start import StartModel
from domext_ray.runtime.device import autocast
from domext_ray.training.step import move_batch

# What a configuration says about files, starts and training; predictions do not depend on it.
_NOT_PREDICTING = frozenset(
    "transformers_version _name_or_path dtype architectures auto_map has_pooler hidden_dropout_prob "
    "attention_probs_dropout_prob classifier_dropout initializer_range gate_bias adapter_init bottleneck_std".split()
)


def load_masked_lm(model: str, option: str = "--models") -> tuple[DomextForMaskedLM, PreTrainedTokenizerBase]:
    """Load a model with its masked-LM head; code that a folder brings along is never run.

    The model is in evaluation mode and fp32, with LoRA's updates merged.
    """
    start = load_to_ask(model, option)
    return build_masked_lm(start, option), start.tokenizer


def load_to_ask(model: str, option: str, scale: float = 1.0) -> StartModel:
    """Read a run's newest checkpoint, an export of this library, a base's folder, or a hub id of one, at a scale."""
    source = open_model(model, option)
    if source.does_task:
        raise BaseModelError(f"{option} {model!r} was fine-tuned and has no masked-LM head; give what it started from.")
    return source.load(scale=scale)


def build_masked_lm(start: StartModel, option: str) -> DomextForMaskedLM:
    """Build what `load_masked_lm` returns of a model that was read; BaseModelError: it predicts no masked word."""
    if not start.mlm_head:
        raise BaseModelError(f"{option} {start.id!r} has no masked-LM head; give a pre-trained model.")
    if start.config.causal:
        raise BaseModelError(f"{option} {start.id!r} reads from left to right, so it predicts no masked word.")
    with torch.random.fork_rng(devices=[]):
        loaded = DomextForMaskedLM(start.config)
    loaded.load_state_dict({**start.tensors, **start.mlm_head}, strict=False)
    cast(nn.Module, loaded).float().eval().requires_grad_(False)
    return loaded


def score_places(
    model: DomextForMaskedLM,
    rows: Sequence[TokenRow],
    places: Sequence[np.ndarray],
    pad_id: int,
    adapter_names: str | None = None,
) -> Tensor:
    """Return the logits [P, V] of some tokens of a batch's rows, row after row.

    `places` are those of each row. With `adapter_names` "auto" the model's routers choose each row's adapter; None: its
    active adapters take part.
    """
    inputs = pad_rows(rows, pad_id)
    length = inputs["input_ids"].shape[-1]
    masked = np.concatenate([number * length + own for number, own in enumerate(places)])
    given = move_batch({**inputs, "masked_positions": torch.from_numpy(masked)}, model.device)
    with torch.inference_mode(), autocast(model.device):
        logits: Tensor = cast(nn.Module, model)(**given, adapter_names=adapter_names).logits
    return logits


def hash_model(model: DomextForMaskedLM) -> str:
    """Return the sha256 of what decides a model's predictions: its shape and its tensors."""
    config = cast(DomextConfig, model.config)
    shape = {name: value for name, value in config.to_dict().items() if name not in _NOT_PREDICTING}
    unread = (POOLER, NEXT_SENTENCE_HEAD)
    tensors = {name: param.detach() for name, param in model.named_parameters() if not name.startswith(unread)}
    tensors |= {name: buffer for name, buffer in model.named_buffers() if name.startswith("bert.router.")}
    record = json.dumps([shape, hash_tensors(tensors)], sort_keys=True, default=str)
    return hashlib.sha256(record.encode()).hexdigest()
