"""An encoder's tensors, of whatever `source` read -> the encoder, or a model with a task's head.

Any base is an encoder of this library without extensions, so published models compare directly with
adapted ones.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from domext_ray.config.method import MethodConfig
from domext_ray.errors import ConfigError
from domext_ray.export.card import Terms
from domext_ray.families.task import Task
from domext_ray.model.base import hash_tensors
from domext_ray.model.build import (
    attach_extensions,
    describe_extensions,
    describe_method,
    fold_scales,
    merge_extensions,
    prepare_for_device,
)
from domext_ray.model.domext import heads_domext
from domext_ray.model.domext.configuration_domext import DomextConfig
from domext_ray.model.domext.modeling_domext import DomextModel, DomextPreTrainedModel
from domext_ray.models.head import StartHead, fit_head
from domext_ray.models.rules import choose_trainables
from domext_ray.runs.run_directory import name_run
from domext_ray.runtime.device import has_bf16

ENCODER = "bert."
NO_BILSTM = {"head_bilstm": 0, "head_bilstm_layers": 1, "head_layers": [], "head_mix": False}


@dataclass(frozen=True)
class StartModel:
    """An encoder to start from: a run's newest checkpoint, an export of this library, a base, or a bank's adapter."""

    id: str  # what the user called it
    kind: str  # "run", "export", "base", or "adapter" of a bank
    config: DomextConfig
    tensors: dict[str, Tensor]
    """fp32 tensors of the encoder by this library's names ("bert.…"), LoRA's updates and scales merged."""
    tokenizer: PreTrainedTokenizerBase
    files: Path = Path()  # folder of its files; of a bank's adapter none
    mlm_head: dict[str, Tensor] = field(default_factory=dict)  # empty: it has none
    brings: str | None = None  # kind of the head that it has, see `find_head`
    head: StartHead | None = None  # that head, if it goes on
    terms: Terms = field(default_factory=Terms)  # those of its card, or of the card of a run's base
    step: int = 0  # of a run, the checkpoint's
    wrong_rules: str = ""  # what a base's tokenizer gets wrong, see `model.base.Base`
    no_scale: str = ""  # with what it has no scale of what was added to its base; empty: it has one
    option: str = "--model"  # the command's option that named it, for messages

    @property
    def name(self) -> str:
        """A short name, which says nothing about the machine's folders."""
        path = Path(self.id).expanduser()
        return name_run(path) if path.is_dir() else self.id

    @cached_property
    def sha256(self) -> str:
        """`hash_tensors` of the encoder, and of the head that goes on."""
        return hash_tensors({**self.tensors, **(self.head.tensors if self.head else {})})


def take_tensors(model: Any) -> dict[str, Tensor]:
    """Merge LoRA updates and scales into a model; return its tensors, fp32 by this library's names, tied ones once."""
    merge_extensions(model)
    fold_scales(model)
    tied = model.all_tied_weights_keys
    return {
        name: tensor.detach().float().contiguous() for name, tensor in model.state_dict().items() if name not in tied
    }


def pick_tensors(tensors: Mapping[str, Tensor], start: str = ENCODER) -> dict[str, Tensor]:
    """Return the encoder's tensors among a model's, or those of another part, by the start of their names."""
    return {name: tensor for name, tensor in tensors.items() if name.startswith(start)}


def build_encoder(start: StartModel, device: torch.device) -> DomextModel:
    """Make a start model's encoder without a head, in evaluation mode; on the CPU its tensors are the start's own."""
    encoder: Any = DomextModel(copy.deepcopy(start.config))
    tensors = {name.removeprefix(ENCODER): tensor for name, tensor in start.tensors.items()}
    encoder.load_state_dict(tensors, assign=True)
    prepare_for_device(encoder, device, bf16=has_bf16(device))
    return encoder.to(device).eval()


def describe_task_model(start: StartModel, task: Task, method: MethodConfig, dropout: float) -> DomextConfig:
    """Return the configuration of a start model with a task's head and the extensions that a method adds."""
    config = copy.deepcopy(start.config)
    if task.options.max_length > config.max_row_length:
        raise ConfigError(
            f"--labelled.max_length is {task.options.max_length}; {start.id!r} takes rows of at most "
            f"{config.max_row_length} tokens."
        )
    describe_method(config, method, describe_extensions(config), start.option)
    if start.config.active_adapters is not None and not method.active_adapters:  # what was left out stays left out
        own = [method.adapter] if method.has_adapter else []
        config.active_adapters = list(dict.fromkeys([*start.config.active_adapters, *own]))
    labels = task.head_labels
    config.id2label, config.label2id = dict(enumerate(labels)), {label: i for i, label in enumerate(labels)}
    config.problem_type = None  # a start model's own head may have had another
    for name, value in task.head_config.items():
        setattr(config, name, value)
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = dropout
    return config


def _freeze(config: DomextConfig, start: StartModel, dropout: float) -> None:
    """Let a BiLSTM read an encoder's layers as they are: no dropout within the encoder."""
    last = max(config.head_layers)
    if last > config.num_hidden_layers:
        raise ConfigError(
            f"--features.layers goes up to {last}; it must be at most {config.num_hidden_layers}, the layers of "
            f"{start.id!r}."
        )
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    config.classifier_dropout = dropout


def build_task_model(
    start: StartModel, task: Task, method: MethodConfig, *, dropout: float, seed: int, **head_values: Any
) -> Any:
    """Make a start model with a task's head; a new head, and what the method adds, start from `seed`.

    `head_values` say what is between encoder and head, see `FinetuneConfig.head_values`. `requires_grad` is set as
    `choose_trainables` says.
    """
    config = describe_task_model(start, task, method, dropout)
    config.update(NO_BILSTM | head_values)
    if config.head_layers:
        _freeze(config, start, dropout)
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(seed)
        model: DomextPreTrainedModel = getattr(heads_domext, task.head)(config)
        tensors = start.tensors
        if start.head is not None:
            own_head = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith(ENCODER)}
            tensors = {**tensors, **fit_head(start.head, task, own_head)}
        model.load_state_dict(tensors, strict=False)
        attach_extensions(cast(nn.Module, model), method)
    names = choose_trainables(model, method)
    for name, param in model.named_parameters():
        param.requires_grad_(name in names)
    return model
