"""What fine-tuning starts from: a run, an export, a base -> an encoder's tensors, and a model with a task's head.

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
from domext_ray.errors import BaseModelError, ConfigError, find_storage_error
from domext_ray.export.card import Terms, read_terms
from domext_ray.families.task import Task
from domext_ray.model.base import MLM_HEAD, hash_tensors, load_base, name_base
from domext_ray.model.build import (
    attach_extensions,
    describe_extensions,
    describe_method,
    fold_scales,
    merge_extensions,
    prepare_for_device,
    refuse_scale,
    scale_extensions,
)
from domext_ray.model.domext import heads_domext
from domext_ray.model.domext.configuration_domext import DomextConfig
from domext_ray.model.domext.modeling_domext import DomextForMaskedLM, DomextModel, DomextPreTrainedModel
from domext_ray.models.head import StartHead, find_head, fit_head, read_head
from domext_ray.models.rules import choose_trainables
from domext_ray.models.source import SourceKind, name_run, open_model
from domext_ray.progress import quiet_libraries
from domext_ray.runtime.device import has_bf16
from domext_ray.storage import Place, require_readable
from domext_ray.text.vocabulary.tokenizer import check_fit, load_tokenizer
from domext_ray.training.start import rebuild_run

_ENCODER = "bert."
_NO_ADAPTER = "with a model that has no adapter, such as a base or an export of LoRA"
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


def _refuse_scale(config: DomextConfig) -> str:
    """Say with what an export has no scale; empty: it has one, its adapter's."""
    if config.extension_vocab_size:
        return "with new words, which have no scale"
    if config.module_hidden_size:
        return "with gated modules, which have no scale"
    if len(config.adapters) > 1:
        return f"with several adapters ({', '.join(config.adapters)}), of which a scale is one's; give the run"
    return "" if config.adapters else _NO_ADAPTER


def _read_export(model: str, folder: Path, option: str, scale: float) -> tuple[DomextConfig, dict[str, Tensor]]:
    with quiet_libraries():
        try:
            loaded, info = cast(Any, DomextForMaskedLM).from_pretrained(
                str(folder), dtype=torch.float32, output_loading_info=True
            )
        except Exception as error:  # a damaged folder raises whatever its reader raises
            reason = " ".join(str(error).split())[:200]
            require_readable(folder)
            fault = BaseModelError(f"{option} {model!r} cannot be read as an export of this library ({reason}).")
            raise find_storage_error(error, folder) or fault from error
    missing = sorted(info["missing_keys"])
    lacking = [name for name in missing if name.startswith(_ENCODER)]
    if lacking:
        raise BaseModelError(
            f"{option} {model!r} lacks the tensor {lacking[0]} that its config.json asks for; export it again."
        )
    if scale != 1 and not _refuse_scale(loaded.config):
        for name, adapter in loaded.config.adapters.items():
            loaded.set_adapter_scale(name, scale * adapter.scale)
    tensors = take_tensors(loaded)
    return loaded.config, pick_tensors(tensors) if missing else tensors


def take_tensors(model: Any) -> dict[str, Tensor]:
    """Merge LoRA updates and scales into a model; return its tensors, fp32 by this library's names, tied ones once."""
    merge_extensions(model)
    fold_scales(model)
    tied = model.all_tied_weights_keys
    return {
        name: tensor.detach().float().contiguous() for name, tensor in model.state_dict().items() if name not in tied
    }


def pick_tensors(tensors: Mapping[str, Tensor], start: str = _ENCODER) -> dict[str, Tensor]:
    """Return the encoder's tensors among a model's, or those of another part, by the start of their names."""
    return {name: tensor for name, tensor in tensors.items() if name.startswith(start)}


def load_start_model(
    model: str, step: int = 0, keep_head: bool = False, option: str = "--model", scale: float = 1.0
) -> StartModel:
    """Read a run, an export, or a base (a folder or a hub id); code that a folder brings along is never run.

    `step` is a run's checkpoint, 0 the newest. `scale` is of what a run's method adds (`scale_extensions`), or of what
    an export's adapter adds, beside its own.
    """
    source = open_model(model, option)
    folder = source.folder
    if step and source.kind != SourceKind.RUN:
        raise ConfigError(
            f"--model_step is {step}; it must be 0 unless --model is a run's directory ({model!r} is not)."
        )
    source.require(SourceKind.RUN, SourceKind.EXPORT, SourceKind.BASE)
    card: Path | None = folder
    wrong_rules = ""
    if source.kind == SourceKind.RUN:
        run = rebuild_run(Place(folder), step)
        network, method = cast(nn.Module, run.model), run.config.method
        no_scale = refuse_scale(network, method)
        if scale != 1:
            scale_extensions(network, method, scale)
        kind, config, tokenizer, step = "run", cast(DomextConfig, run.model.config), run.tokenizer, run.step
        tensors, card = take_tensors(run.model), run.spec.base.folder if run.spec.base else None
    elif source.kind == SourceKind.EXPORT:
        kind, (config, tensors) = "export", _read_export(model, folder, option, scale)
        no_scale, tokenizer = _refuse_scale(config), load_tokenizer(folder)
        check_fit(tokenizer, config.vocab_size, f"{option} {model!r}")
    else:
        with name_base(option):
            base = load_base(model)
        kind, tensors, folder = "base", base.tensors, base.folder
        config = copy.deepcopy(base.config)  # a model changes its own, and others may hold the base
        wrong_rules = base.wrong_rules.replace("--base", option)
        card, tokenizer, no_scale = folder, load_tokenizer(folder), _NO_ADAPTER
    if scale != 1 and no_scale:
        raise ConfigError(f"--scale is {scale:g}; it must be 1 {no_scale}.")
    return StartModel(
        model,
        kind,
        config,
        pick_tensors(tensors),
        tokenizer,
        pick_tensors(tensors, MLM_HEAD),
        find_head(folder),
        read_head(folder, model, option) if keep_head else None,
        read_terms(card) if card else Terms(),
        step,
        wrong_rules,
        no_scale,
        option,
    )


def build_encoder(start: StartModel, device: torch.device) -> DomextModel:
    """Make a start model's encoder without a head, in evaluation mode; on the CPU its tensors are the start's own."""
    encoder: Any = DomextModel(copy.deepcopy(start.config))
    tensors = {name.removeprefix(_ENCODER): tensor for name, tensor in start.tensors.items()}
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
            own_head = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith(_ENCODER)}
            tensors = {**tensors, **fit_head(start.head, task, own_head)}
        model.load_state_dict(tensors, strict=False)
        attach_extensions(cast(nn.Module, model), method)
    names = choose_trainables(model, method)
    for name, param in model.named_parameters():
        param.requires_grad_(name in names)
    return model
