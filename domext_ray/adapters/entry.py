"""An adapter of a bank: what its description says, which of a model's tensors are its own, and what fits the base.

Enters: a base, and a model or a description. Leaves: the tensors of a domain and of its task's head under names that do
not have the domain's, checked against the base; or the domain in a model in memory.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from domext_ray.config.vectors import Pooling
from domext_ray.downstream.tasks.description import TaskDescription
from domext_ray.downstream.tasks.tokens import list_tags
from domext_ray.errors import RunError
from domext_ray.extensions.table import find_others, is_extension
from domext_ray.model.base import Base
from domext_ray.model.domext.configuration_domext import Domain, DomextConfig, complete_domain
from domext_ray.model.domext.heads_domext import DomextForSequenceClassification, DomextForTokenClassification
from domext_ray.model.domext.modeling_domext import DomextForMaskedLM, DomextModel
from domext_ray.model.layouts.layout import SHARED_FIELDS

TENSORS, DESCRIPTION = "adapter.safetensors", "adapter.json"
MASKED_LM, TOKENS, SEQUENCES = "masked_lm", "token_classification", "sequence_classification"
ARCHITECTURES: dict[str, type[PreTrainedModel]] = {
    MASKED_LM: DomextForMaskedLM,
    TOKENS: DomextForTokenClassification,
    SEQUENCES: DomextForSequenceClassification,
}
_NOT_SHAPE = ("hidden_dropout_prob", "attention_probs_dropout_prob", "initializer_range")
_SHAPE = (*(each for each in SHARED_FIELDS if each not in _NOT_SHAPE), "position_rule", "mlm_head_act", "has_pooler")
"""Fields of a configuration that decide what a base computes; the bank's base and a model for it agree on them, and on
those of a layout other than BERT's."""
SHAPE_TYPES: dict[str, type | tuple[type, ...]] = {
    name: (str, type(None)) if name == "mlm_head_act" else type(getattr(DomextConfig(), name)) for name in _SHAPE
}
ENTRY_TYPES: dict[str, type | tuple[type, ...]] = {
    "base_sha256": str,
    "architecture": str,
    "domain": dict,
    "id2label": (dict, type(None)),
    "problem_type": (str, type(None)),
    "origin": dict,
    "num_parameters": int,
    "num_bytes": int,
    "sha256": str,
    "task": (dict, type(None)),
}
TASKS = {"ner": TOKENS, **dict.fromkeys(("classification", "multilabel", "regression"), SEQUENCES)}
"""Task families whose models a bank holds and requests ask, and their architecture."""
_PROBLEM_TYPES = (None, "regression", "single_label_classification", "multi_label_classification")
HEAD_PREFIX = "head."
WORD_HEAD = "cls."
"""Tensors of a domain in the MLM head begin so: what its shifts of words add to the scores."""
ADD_AGAIN = "remove the adapter and add it again"


@dataclass(frozen=True)
class BankEntry:
    """What adapter.json says.

    Args:
        base_sha256: of the base that the domain was trained on.
        architecture: a key of `ARCHITECTURES`.
        domain: its sizes and layers.
        id2label: the classes' names; None: a masked LM.
        problem_type: as in transformers; None: it follows from the labels.
        origin: where the adapter comes from; of a run its name, method and step, and its pooling if it makes vectors.
        num_parameters: of domain and head.
        num_bytes: size of adapter.safetensors.
        sha256: of adapter.safetensors.
        task: what the head was fine-tuned for, as `TaskDescription.to_json` has it; None: nobody said.
    """

    base_sha256: str
    architecture: str
    domain: Domain
    id2label: dict[int, str] | None
    problem_type: str | None
    origin: dict[str, Any]
    num_parameters: int
    num_bytes: int
    sha256: str
    task: dict[str, Any] | None = None

    @property
    def pooling(self) -> Pooling:
        """How its run made a vector of a text; the mean if it made none."""
        return "cls" if self.origin.get("pooling") == "cls" else "mean"

    @property
    def description(self) -> TaskDescription | None:
        """What the head was fine-tuned for; with it `make_described_task` encodes texts and decodes logits."""
        return None if self.task is None else TaskDescription.from_json(self.task)


def describe_shape(config: DomextConfig) -> dict[str, Any]:
    """Return what decides what a base computes, by field."""
    return {name: getattr(config, name) for name in _SHAPE} | config.describe_layout()


def check_types(values: Any, types: dict[str, type | tuple[type, ...]]) -> None:
    """Raise a ValueError, or a TypeError, unless JSON has these keys with values of these types, bool being no int."""
    for name, expected in types.items():
        allowed = expected if isinstance(expected, tuple) else (expected,)
        if type(values[name]) not in allowed:
            shown = repr(values[name])
            raise ValueError(f"{name} is {shown if len(shown) < 60 else f'{shown[:60]}…'}")


def read_domain(name: str, values: dict[str, Any], num_layers: int) -> Domain:
    """Return the domain of a description; raise a ValueError or a TypeError unless it is one."""
    domain = complete_domain(name, values, num_layers)
    check_types(asdict(domain), {each.name: type(each.default) for each in fields(Domain)})
    return domain


def check_entry(entry: BankEntry) -> None:
    """Raise a ValueError unless a description is one that `add` could have written."""
    if entry.architecture not in ARCHITECTURES:
        raise ValueError(f"architecture is {entry.architecture!r}, none of {', '.join(ARCHITECTURES)}")
    labels = entry.id2label
    if labels is not None and (
        sorted(labels, key=int) != [str(number) for number in range(len(labels))]
        or not all(isinstance(label, str) for label in labels.values())
    ):
        raise ValueError("id2label does not number its labels from 0")
    if (labels is None) != (entry.architecture == MASKED_LM):
        raise ValueError(f"id2label is {labels} with the architecture {entry.architecture}")
    if entry.problem_type not in _PROBLEM_TYPES:
        raise ValueError(f"problem_type is {entry.problem_type!r}")
    if entry.description is not None:
        own = labels or {}
        check_task(entry.description, entry.architecture, tuple(own[key] for key in sorted(own, key=int)))


def check_task(task: TaskDescription, architecture: str, labels: tuple[str, ...]) -> None:
    """Raise a ValueError unless a head of an architecture, with labels in this order, is one of a task."""
    if TASKS.get(task.family) != architecture:
        raise ValueError(f"its task is {task.family} with the architecture {architecture}")
    own = {"ner": list_tags(task.labels), "regression": ("value",)}.get(task.family, task.labels)
    if own != labels:
        raise ValueError(f"its task has other labels ({', '.join(own)}) than its head ({', '.join(labels)})")


def describe_tensors(base: Base, name: str, entry: BankEntry, folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes that an adapter's description asks for, before anything of that size is made.

    Args:
        base: the bank's.
        name: what the bank calls the adapter.
        entry: its description.
        folder: where it is, for the sentence.

    Raises:
        RunError: the description makes no model.
    """
    config = configure_adapter(base, entry)
    config.domains = {name: entry.domain}
    try:
        with torch.device("meta"):
            model = ARCHITECTURES[entry.architecture](config)
    except (RuntimeError, TypeError, ValueError, OverflowError) as error:
        reason = str(error).splitlines()[0]
        raise RunError(f"{folder / DESCRIPTION} describes no model ({reason}); {ADD_AGAIN}.") from error
    own = list_domain(model, name) | list_head(model, base)
    return {key: tuple(each.shape) for key, each in own.items()}


def configure_adapter(base: Base, entry: BankEntry) -> DomextConfig:
    """Return the configuration of an adapter's model, without its domain."""
    config = copy.deepcopy(base.config)
    if entry.id2label is not None:
        config.id2label = entry.id2label
        config.label2id = {label: number for number, label in entry.id2label.items()}
        config.problem_type = cast(Any, entry.problem_type)
    return config


def read_labels(config: DomextConfig) -> dict[int, str]:
    """Return a head's labels by number."""
    return {int(number): str(label) for number, label in (config.id2label or {}).items()}


def find_architecture(model: nn.Module) -> str:
    """Return a model's key in `ARCHITECTURES`, by its class's name: an export's own code has classes of its own.

    Raises:
        RunError: a bank holds no such model.
    """
    for architecture, each in ARCHITECTURES.items():
        if type(model).__name__ == each.__name__:
            return architecture
    known = ", ".join(each.__name__ for each in ARCHITECTURES.values())
    raise RunError(f"a bank does not hold a {type(model).__name__}; give a {known}.")


def list_domain(model: nn.Module, name: str) -> dict[str, Tensor]:
    """Return a domain's tensors in an encoder, or a model that has one, under the names that they have in a file."""
    part = f".domains.{name}."
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}  # which words it shifts is a buffer
    return {
        key.removeprefix("bert.").replace(part, ".domains.", 1): each for key, each in tensors.items() if part in key
    }


def count_parameters(tensors: Mapping[str, Tensor]) -> int:
    """Count the elements of tensors that are parameters; those that say which words are shifted are none."""
    return sum(each.numel() for each in tensors.values() if each.is_floating_point())


def list_head(model: nn.Module, base: Base) -> dict[str, nn.Parameter]:
    """Return the parameters that are neither an extension's nor the base's, under their names in a file."""
    params = model.named_parameters()
    return {f"{HEAD_PREFIX}{key}": each for key, each in params if key not in base.tensors and not is_extension(key)}


def check_model(model: nn.Module, domain: str, base: Base) -> None:
    """Refuse a model that is not the base, one domain and a head.

    Args:
        model: the model.
        domain: the domain that is to be kept.
        base: the bank's.

    Raises:
        RunError: it is more, or something else.
    """
    config = cast(DomextConfig, model.config)
    if domain not in config.domains:
        raise RunError(
            f"the model has no domain {domain!r} for the bank; it has {', '.join(config.domains) or 'none'}."
        )
    names = [name for name, _ in model.named_parameters()]
    for part in find_others("bank", config, names, domain):
        raise RunError(f"the model has {part}, and a bank holds domains beside an unchanged base only.")
    active = list(config.domains) if config.active_domains is None else config.active_domains
    if active != [domain]:
        raise RunError(
            f"the model's active domains are {', '.join(active) or 'none'}, and a bank holds {domain!r} alone; train "
            f"it so (--method.active_domains {domain}), or call set_active_domains([{domain!r}]) if it was."
        )
    _check_shape(config, base)
    own = dict(model.named_parameters())
    _check_tensors({name: own[name] for name in base.tensors.keys() & own.keys()}, base)


def check_encoder(encoder: nn.Module, base: Base) -> None:
    """Refuse an encoder of another base; one that is stored in another dtype may have lost its bits.

    Raises:
        RunError: it is another base's.
    """
    _check_shape(cast(DomextConfig, encoder.config), base)
    own = {f"bert.{name}": param for name, param in encoder.named_parameters()}
    names = {name for name in base.tensors if name.startswith(("bert.embeddings.", "bert.encoder."))}
    missing = sorted(names - own.keys())
    if missing:
        raise RunError(f"the model has no {missing[0]} of its own (merge LoRA first), so no adapter fits it.")
    _check_tensors({name: own[name] for name in names}, base, rounded=True)


def _check_shape(config: DomextConfig, base: Base) -> None:
    if config.causal:
        raise RunError("the model reads from left to right (--objective.kind), and a bank's base reads both sides.")
    for name, value in describe_shape(base.config).items():
        if getattr(config, name) != value:
            raise RunError(
                f"the model has {name} {getattr(config, name)!r} and the bank's base has {value!r}; a bank holds "
                "adapters of one base."
            )


def _check_tensors(params: dict[str, nn.Parameter], base: Base, *, rounded: bool = False) -> None:
    """Compare parameters with the base's, bit by bit, or after rounding the base's to their dtype."""
    changed = []
    for name, param in sorted(params.items()):
        value = base.tensors[name].to(param.device, param.dtype if rounded else None)
        if param.dtype != value.dtype or not torch.equal(param, value):
            changed.append(name)
    if changed:
        dtype = params[changed[0]].dtype
        raise RunError(
            f"{changed[0]} ({str(dtype).removeprefix('torch.')}) is not as in the bank's base ({len(changed)} "
            "tensors differ); a bank holds what was trained beside a frozen base, and takes it in float32."
        )


def put_domain(model: nn.Module, name: str, entry: BankEntry, tensors: dict[str, Tensor], folder: Path) -> None:
    """Add a domain to a model and give it its tensors, or leave the model as it was; an encoder scores no words.

    Args:
        model: a model, or an encoder, with the bank's base in it.
        name: what the domain is to be called.
        entry: the adapter's description.
        tensors: the adapter's.
        folder: where it is, for the sentence.

    Raises:
        RunError: the model has a domain of that name, or another shape.
    """
    changed = cast(DomextModel, model)
    if name in changed.config.domains:
        raise RunError(f"the model has a domain {name!r} already; drop it first.")
    left_out = (HEAD_PREFIX,) if hasattr(model, "cls") else (HEAD_PREFIX, WORD_HEAD)
    try:
        changed.add_domain(name, **asdict(entry.domain))
        own = {key: each for key, each in tensors.items() if not key.startswith(left_out)}
        fill_parameters(list_domain(model, name), own, folder)
    except BaseException:
        if name in changed.config.domains:
            changed.drop_domain(name)
        raise


def fill_parameters(params: Mapping[str, Tensor], tensors: dict[str, Tensor], folder: Path) -> None:
    """Copy tensors into parameters and buffers of the same names.

    Raises:
        RunError: names or shapes differ.
    """
    wrong = sorted(
        name
        for name in params.keys() | tensors.keys()
        if name not in params or name not in tensors or params[name].shape != tensors[name].shape
    )
    if wrong:
        raise RunError(f"{folder} does not fit the model that its description makes (first at {wrong[0]}).")
    with torch.no_grad():
        for name, param in params.items():
            param.copy_(tensors[name])
