"""What is served: the adapters of a bank over its base, or one model that is alone.

Enters: a bank, an export, or a fine-tuning run. Leaves: what requests see of an adapter, without its tensors, and in a
replica the model that computes rows. A model that is alone may be trained in every tensor, and have a BiLSTM between
encoder and head.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from domext_ray.config.serve import ServeConfig
from domext_ray.config.shared import Pooling
from domext_ray.errors import RunError
from domext_ray.families.registry import FAMILIES
from domext_ray.families.task import Task, TaskOptions
from domext_ray.families.task_description import TaskDescription, make_described_task
from domext_ray.model.domext.modeling_domext import AUTO, BASE_NAME
from domext_ray.model.domext.routers_domext import Router
from domext_ray.models.bank import AdapterBank
from domext_ray.models.bank_entry import MASKED_LM, TASKS, BankEntry
from domext_ray.models.exported import find_export, hash_export, load_exported
from domext_ray.models.masked_lm import load_masked_lm
from domext_ray.models.mixed_adapters import AdapterServer, MixedStates
from domext_ray.models.source import BaseModel, Export, FinetunedRun, Run, open_model
from domext_ray.models.text_embedding import choose_pooling
from domext_ray.runs.run_directory import name_run
from domext_ray.storage import Place
from domext_ray.text.vocabulary.tokenizer import load_tokenizer


@dataclass(frozen=True, eq=False)
class ServedAdapter:
    """An adapter as requests see it."""

    name: str  # the bank's name for it; "__base__": the base
    sha256: str  # of its tensors
    architecture: str  # a key of `entry.ARCHITECTURES`
    family: str = ""  # of its task; empty: a masked LM
    task: Task | None = None  # encodes and decodes; None: a masked LM
    router: Router | None = None  # tells its text; None: it has none
    threshold: float = 0.0  # the router's
    pooling: Pooling = "mean"  # how it learned to make a vector of a text; mean if it did not

    def describe(self) -> dict[str, Any]:
        """Return what GET /v1/adapters says of it."""
        return {
            "name": self.name,
            "architecture": self.architecture,
            "family": self.family,
            "labels": list(self.task.data.labels) if self.task is not None else [],
            "routed": self.router is not None,
            "sha256": self.sha256,
        }


@dataclass(frozen=True)
class TextSide:
    """What encodes texts, without tensors."""

    tokenizer: PreTrainedTokenizerBase
    max_tokens: int  # of a row
    has_words: bool  # whether the base has a masked-LM head


class ServedModel(ABC):
    """A bank's adapters, or one model; methods raise a DomextError where files are missing or damaged."""

    base: ClassVar[ServedAdapter | None]
    """The base as requests see it; None: it is not there on its own."""
    text_side: TextSide

    @abstractmethod
    def list_files(self) -> dict[str, frozenset[str]]:
        """Return the files of the adapters that are there now, by name, sorted: others, where tensors are others."""

    def names(self) -> list[str]:
        """Return the names of the adapters that are there now, sorted."""
        return [*self.list_files()]

    @abstractmethod
    def hash_adapter(self, name: str) -> str:
        """Return the sha256 of an adapter as it is now."""

    @abstractmethod
    def read(self, name: str, max_length: int) -> ServedAdapter:
        """Read what requests see of an adapter; `max_length` is for one without a description of its task."""

    @abstractmethod
    def load(self, device: torch.device) -> AdapterServer | ModelServer:
        """Load what computes rows."""


class ServedBank(ServedModel):
    """The adapters that a bank has at each moment, and its base."""

    base = ServedAdapter(BASE_NAME, "", MASKED_LM)

    def __init__(self, bank: AdapterBank) -> None:
        self.bank = bank

    @cached_property
    def text_side(self) -> TextSide:  # type: ignore[override]
        """See `TextSide`."""
        base = AdapterBank.open(self.bank.folder, self.bank.base_id).base  # its tensors are let go with this object
        return TextSide(load_tokenizer(base.folder), base.config.max_row_length, base.has_mlm_head)

    def list_files(self) -> dict[str, frozenset[str]]:
        """Return what the bank has, listed once."""
        return self.bank.list_files()

    def hash_adapter(self, name: str) -> str:
        """Return the hash that the bank has of an adapter."""
        return self.bank.describe(name).sha256

    def read(self, name: str, max_length: int) -> ServedAdapter:
        """Read an adapter whole, comparing its file with its hash."""
        entry, tensors = self.bank.read_adapter(name)
        family, task = "", cast("Task | None", None)
        if entry.architecture != MASKED_LM:
            description = entry.task or describe_head(name, entry, max_length)
            family, made = description.family, make_described_task(description, self.text_side.tokenizer)
            assert isinstance(made, Task), "a bank holds tasks of one stage"
            task = made
        router = None
        if entry.adapter.router_words:
            router = Router(entry.adapter)
            router.weight.copy_(tensors[f"bert.router.adapters.{name}.weight"])
        threshold = float(entry.adapter.router_threshold)
        return ServedAdapter(name, entry.sha256, entry.architecture, family, task, router, threshold, entry.pooling)

    def load(self, device: torch.device) -> AdapterServer:
        """Load the base; adapters come when rows name them."""
        return AdapterServer(self.bank).to(device)


@dataclass(frozen=True)
class SingleModel(ServedModel):
    """One exported model; `find_single_model` makes one."""

    base = None
    folder: Path
    name: str
    sha256: str  # of its files

    @cached_property
    def _seen(self) -> tuple[TextSide, ServedAdapter]:
        model, tokenizer, adapter = self._load(torch.device("cpu"))
        return TextSide(tokenizer, model.config.max_row_length, has_words=False), adapter

    @property
    def text_side(self) -> TextSide:  # type: ignore[override]
        """See `TextSide`."""
        return self._seen[0]

    def list_files(self) -> dict[str, frozenset[str]]:
        """Return its name, and nothing that could change."""
        return {self.name: frozenset()}

    def hash_adapter(self, name: str) -> str:
        """Return the hash of its files when it was found."""
        return self.sha256

    def read(self, name: str, max_length: int) -> ServedAdapter:
        """Return the model as requests see it."""
        return self._seen[1]

    def load(self, device: torch.device) -> ModelServer:
        """Load it."""
        return ModelServer(self._load(device)[0])

    def _load(self, device: torch.device) -> tuple[Any, PreTrainedTokenizerBase, ServedAdapter]:
        if not open_model(str(self.folder)).does_task:
            model, tokenizer = load_masked_lm(str(self.folder), "--model")
            pooling = choose_pooling(str(self.folder), "auto")
            adapter = ServedAdapter(self.name, self.sha256, MASKED_LM, pooling=pooling)
            return cast(nn.Module, model).to(device), tokenizer, adapter
        exported = load_exported(self.folder, device)
        family = exported.description.family
        if family not in TASKS:
            raise RunError(
                f"{self.folder} was fine-tuned for {family}, and requests ask for {', '.join(TASKS)} only; domext "
                "predict does its task on files."
            )
        (only,) = exported.stages.values()
        adapter = ServedAdapter(self.name, self.sha256, TASKS[family], family, only.task)
        return only.model, exported.tokenizer, adapter


class ModelServer:
    """One model in the place of an `AdapterServer`; it is always there."""

    def __init__(self, model: Any) -> None:
        self.model, self.encoder = model, model.bert

    def attach(self, name: str) -> None:
        """Answer rows of the model."""

    def drop(self, name: str) -> None:
        """Answer them no longer."""

    @torch.no_grad()
    def encode(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        adapter_names: Sequence[str],
        token_type_ids: Tensor | None = None,
    ) -> MixedStates:
        """Encode a batch, all of whose rows are the model's; see `AdapterServer.encode`."""
        layers, bilstm = self.model.config.head_layers, getattr(self.model, "bilstm", None)
        encoded = self.encoder(input_ids, attention_mask, token_type_ids, pool=False, output_hidden_states=bool(layers))
        states = encoded.last_hidden_state
        read = None
        if bilstm is not None:
            read = bilstm([encoded.hidden_states[layer] for layer in layers] or [states], attention_mask)
        word_shifts = dict(self.encoder.embeddings.adapters)
        return MixedStates(states, attention_mask, (self.model,) * len(input_ids), word_shifts, read)


def find_single_model(model: str) -> SingleModel | None:
    """Look at an export, or a run that has one, without loading it; None: it is something else, such as a base.

    A fine-tuning run without an export is a RunError.
    """
    source = open_model(model)
    source.require(Run, FinetunedRun, Export, BaseModel)
    if isinstance(source, Run):
        source = open_model(str(source.folder / "export"))
    if not isinstance(source, Export) and not source.does_task:
        return None
    folder = find_export(source) if source.does_task else source.folder
    return SingleModel(folder.resolve(), name_adapter(folder), hash_export(folder))


def name_adapter(folder: Path) -> str:
    """Return what requests call the model of a run or an export."""
    name = name_run(folder)
    return name if name.isidentifier() and name not in (AUTO, BASE_NAME) else "model"


def open_served(config: ServeConfig) -> ServedModel:
    """Open what is served: a bank, or else an exported model."""
    if config.bank:
        return ServedBank(AdapterBank.open(Place(config.bank), config.base))
    found = find_single_model(config.model)
    if found is None:
        raise RunError(f"{config.model} holds no exported model; give an export, or a run that has one.")
    return found


def describe_head(name: str, entry: BankEntry, max_length: int) -> TaskDescription:
    """Describe the task of an adapter that came without a description, by its head's labels; it is no masked LM."""
    for own in (FAMILIES[task] for task, architecture in TASKS.items() if architecture == entry.architecture):
        if (found := own.adopt(entry.labels, entry.problem_type)) is not None:
            return TaskDescription(own.family, name, metric=own.metric, options=TaskOptions(max_length), **found)
    raise RunError(
        f"the adapter {name!r} has the labels {', '.join(entry.labels[:6])}; tags are served in the order O, B-X, I-X, "
        "B-Y, I-Y, as domext finetune --task ner makes them."
    )
