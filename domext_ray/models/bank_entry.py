"""An adapter: what a bank says of it, which tensors are its own, and the model that they make with the base."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from domext_ray.config.extensions.table import ADAPTER_PARTS, find_others, name_options
from domext_ray.config.shared import Pooling
from domext_ray.errors import RunError
from domext_ray.families.registry import FAMILIES
from domext_ray.families.task_description import TaskDescription
from domext_ray.model.base import Base, describe_base
from domext_ray.model.domext.configuration_domext import AdapterConfig, DomextConfig
from domext_ray.model.domext.heads_domext import DomextForSequenceClassification, DomextForTokenClassification
from domext_ray.model.domext.modeling_domext import DomextForMaskedLM

MASKED_LM, TOKENS, SEQUENCES = "masked_lm", "token_classification", "sequence_classification"
ARCHITECTURES: dict[str, type[PreTrainedModel]] = {
    MASKED_LM: DomextForMaskedLM,
    TOKENS: DomextForTokenClassification,
    SEQUENCES: DomextForSequenceClassification,
}
TASKS = {
    name: architecture
    for name, family in FAMILIES.items()
    for architecture, model in ARCHITECTURES.items()
    if getattr(family, "head", "") == model.__name__
}
"""Task families whose models a bank holds and requests ask, and their architecture."""
_NOT_SHAPE = ("hidden_dropout_prob", "attention_probs_dropout_prob", "initializer_range")
"""What decides nothing that a trained base computes."""


@dataclass(frozen=True)
class BankEntry:
    """What adapter.json says; with its `task`, `make_described_task` encodes texts and decodes logits."""

    base_sha256: str  # of the base that the adapter was trained on
    architecture: str  # a key of `ARCHITECTURES`
    adapter: AdapterConfig
    labels: tuple[str, ...]  # the classes' names, in the head's order; none: a masked LM
    problem_type: str | None  # as in transformers; None: it follows from the labels
    origin: dict[str, Any]  # of a run its name, method and step, and its pooling if it makes vectors
    num_parameters: int  # of adapter and head
    num_bytes: int  # of the file of tensors, as its sha256
    sha256: str
    task: TaskDescription | None  # what the head was fine-tuned for; None: nobody said

    @property
    def pooling(self) -> Pooling:
        """How its run made a vector of a text; the mean if it made none."""
        return "cls" if self.origin.get("pooling") == "cls" else "mean"

    def to_json(self) -> dict[str, Any]:
        """Return the values as JSON has them."""
        return asdict(self) | {"task": None if self.task is None else self.task.to_json()}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> BankEntry:
        """Read what `to_json` gave."""
        task = values["task"] and TaskDescription.from_json(values["task"])
        own = {"adapter": AdapterConfig(**values["adapter"]), "labels": tuple(values["labels"]), "task": task}
        return cls(**{**values, **own})

    def configure(self, base: Base, name: str) -> DomextConfig:
        """Return the configuration of a model with the adapter, called `name`."""
        config = copy.deepcopy(base.config)
        config.adapters = {name: self.adapter}
        if self.labels:
            config.id2label = dict(enumerate(self.labels))
            config.label2id = {label: number for number, label in enumerate(self.labels)}
            config.problem_type = cast(Any, self.problem_type)
        return config


def describe_shape(config: DomextConfig) -> dict[str, Any]:
    """Return what decides what a base computes, by field."""
    values = describe_base(config) | {"has_pooler": config.has_pooler, "causal": config.causal}
    return {name: value for name, value in values.items() if name not in _NOT_SHAPE}


def find_architecture(model: nn.Module) -> str:
    """Return a model's key in `ARCHITECTURES`, by its class's name: an export's own code has classes of its own."""
    for architecture, model_class in ARCHITECTURES.items():
        if type(model).__name__ == model_class.__name__:
            return architecture
    known = ", ".join(model_class.__name__ for model_class in ARCHITECTURES.values())
    raise RunError(f"a bank does not hold a {type(model).__name__}; give a {known}.")


def list_own(model: nn.Module, adapter: str, base: Base) -> dict[str, Tensor]:
    """Return the tensors of an adapter and of its task's head, under the model's names without the adapter's."""
    part = f".adapters.{adapter}."
    tensors: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {
        key.replace(part, ".adapters.", 1): tensor.detach().cpu().contiguous()
        for key, tensor in tensors.items()
        if part in key or (key not in base.tensors and ".adapters." not in key)
    }


def name_own(tensors: Mapping[str, Tensor], adapter: str) -> dict[str, Tensor]:
    """Return what `list_own` gave under the names that it has in a model with an adapter of that name."""
    return {key.replace(".adapters.", f".adapters.{adapter}.", 1): tensor for key, tensor in tensors.items()}


def make_model(
    architecture: str, config: DomextConfig, tensors: Mapping[str, Tensor], encoder: nn.Module | None = None
) -> Any:
    """Make a model of copies of tensors alone, in `eval` mode; `encoder` is its `bert`, where that is made already."""
    with torch.device("meta"):
        model: Any = ARCHITECTURES[architecture](config)
    if encoder is not None:
        model.bert = encoder
    model.load_state_dict({key: tensor.clone() for key, tensor in tensors.items()}, strict=False, assign=True)
    model.tie_weights()
    return model.eval()


def put_adapter(model: Any, name: str, entry: BankEntry, tensors: Mapping[str, Tensor]) -> None:
    """Add an adapter to a model, or an encoder, with its tensors, or leave the model as it was; heads stay."""
    if name in model.config.adapters:
        raise RunError(f"the model has an adapter {name!r} already; detach it first.")
    prefix = "" if hasattr(model, "bert") else "bert."
    own = {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if f".adapters.{name}." in key}
    try:
        model.attach_adapter(name, **asdict(entry.adapter))
        model.load_state_dict(own, strict=False)
    except BaseException:
        if name in model.config.adapters:
            model.detach_adapter(name)
        raise


def check_task(task: TaskDescription, architecture: str, labels: tuple[str, ...]) -> None:
    """Refuse a task that a head of an architecture, with labels in this order, is not for."""
    if TASKS.get(task.family) != architecture:
        raise RunError(f"a bank does not hold a {architecture} head of the task {task.family}.")
    own = FAMILIES[task.family].list_outputs(task.labels)
    if own != labels:
        raise RunError(f"the task has other labels ({', '.join(own)}) than the model's head ({', '.join(labels)}).")


def check_model(model: nn.Module, adapter: str, base: Base) -> None:
    """Refuse a model that is not the base, one adapter and a head."""
    config = cast(DomextConfig, model.config)
    if adapter not in config.adapters:
        named = f" {adapter!r} (it has {', '.join(config.adapters)})" if config.adapters else ""
        raise RunError(
            f"the model has no adapter{named}, and a bank holds adapters beside a frozen base; train one with one of "
            f"{name_options(ADAPTER_PARTS)} (--method.trains extensions)."
        )
    others = list(find_others("bank", config, [name for name, _ in model.named_parameters()], adapter))
    if others or config.head_bilstm:
        raise RunError(
            f"the model has {[*others, 'a BiLSTM below its head'][0]}, and a bank holds adapters and heads only."
        )
    active = list(config.adapters) if config.active_adapters is None else config.active_adapters
    if active != [adapter]:
        raise RunError(
            f"the model's active adapters are {', '.join(active) or 'none'}, and a bank holds {adapter!r} alone; train "
            f"it so (--method.active_adapters {adapter}), or call set_active_adapters([{adapter!r}]) if it was."
        )
    check_base(model, base)


def check_base(model: nn.Module, base: Base, *, only_encoder: bool = False) -> None:
    """Refuse a model of another base: bit by bit, or an encoder whose base is rounded to its dtype."""
    prefix = "" if hasattr(model, "bert") else "bert."
    params = {f"{prefix}{name}": param for name, param in model.named_parameters()}
    names = {name for name in base.tensors if name.startswith(("bert.embeddings.", "bert.encoder."))}
    if missing := sorted(names - params.keys()):
        raise RunError(f"the model has no {missing[0]} of its own (merge LoRA first), so no adapter fits it.")
    config = cast(DomextConfig, model.config)
    for name, value in describe_shape(base.config).items():
        if getattr(config, name) != value:
            raise RunError(
                f"the model has {name} {getattr(config, name)!r} and the bank's base has {value!r}; give each base a "
                "bank of its own."
            )
    changed = []
    for name in sorted(names if only_encoder else base.tensors.keys() & params.keys()):
        param = params[name]
        value = base.tensors[name].to(param.device, param.dtype if only_encoder else None)
        if param.dtype != value.dtype or not torch.equal(param, value):
            changed.append(f"{name} ({str(param.dtype).removeprefix('torch.')})")
    if changed:
        raise RunError(
            f"{changed[0]} is not as in the bank's base ({len(changed)} tensors differ); a bank holds what was trained "
            "beside one frozen base, and takes it in float32; give each base a bank of its own."
        )
