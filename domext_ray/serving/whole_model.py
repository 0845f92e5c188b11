"""One fine-tuned model, however it was trained, served like a bank that has it alone.

Enters: a fine-tuning run or its export. Leaves: what the catalogue, the engine and the deployment ask a bank for. It
has no base beside it: the model may be trained in every tensor, and have a BiLSTM between encoder and head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from domext_ray.adapters.bank import AdapterBank
from domext_ray.adapters.entry import TASKS
from domext_ray.config.serve import ServeConfig
from domext_ray.downstream.finetune.exported import ExportedModel, find_export, hash_export, load_exported
from domext_ray.downstream.tasks.families import SingleTask
from domext_ray.errors import RunError
from domext_ray.serving.catalogue import Catalogue, ServedAdapter


@dataclass(frozen=True)
class WholeModel:
    """A fine-tuned model on the disk; `find_whole_model` makes one.

    Args:
        folder: its export.
        name: what requests call it.
        sha256: of its files.
    """

    folder: Path
    name: str
    sha256: str

    def names(self) -> list[str]:
        """Return its name."""
        return [self.name]

    def describe(self, name: str) -> WholeModel:
        """Return itself, which has a sha256 as a bank's entry has.

        Raises:
            RunError: it has another name.
        """
        if name != self.name:
            raise RunError(f"there is no model {name!r}; {self.folder} is served as {self.name!r}.")
        return self

    def load(self, device: torch.device) -> ExportedModel:
        """Load model and task.

        Raises:
            RunError: no endpoint answers its task, or a file is damaged.
            BaseModelError: the model's files are not what its configuration says.
        """
        exported = load_exported(self.folder, device)
        family = exported.description.family
        if family not in TASKS:
            raise RunError(
                f"{self.folder} was fine-tuned for {family}, and requests ask for {', '.join(TASKS)} only; domext "
                "predict does its task on files."
            )
        return exported


def find_whole_model(model: str) -> WholeModel:
    """Look at a fine-tuned model, without loading it.

    Args:
        model: a fine-tuning run, or its export.

    Raises:
        RunError: it is neither, or the run has no export.
    """
    folder = find_export(model).resolve()
    name = folder.parent.name if folder.name == "export" else folder.name
    return WholeModel(folder, name if name.isidentifier() else "model", hash_export(folder))


def open_bank(config: ServeConfig) -> AdapterBank | WholeModel:
    """Open what is served: a bank, or else a fine-tuned model.

    Raises:
        RunError: it is neither.
    """
    return AdapterBank.open(config.bank, config.base) if config.bank else find_whole_model(config.model)


def read_catalogue(bank: AdapterBank | WholeModel, max_length: int = 0) -> Catalogue:
    """Make the catalogue of a bank or a model; see `Catalogue` and `WholeCatalogue`."""
    return WholeCatalogue(bank, max_length) if isinstance(bank, WholeModel) else Catalogue(bank, max_length)


class WholeCatalogue(Catalogue):
    """The catalogue of one model.

    Args:
        model: the model.
        max_length: see `Catalogue`.

    Raises:
        RunError: see `WholeModel.load`, or `max_length` is more than the model takes.
        BaseModelError: see `WholeModel.load`.
    """

    base = None

    def __init__(self, model: WholeModel, max_length: int = 0) -> None:
        exported = model.load(torch.device("cpu"))
        (start,) = exported.starts.values()
        assert isinstance(exported.task, SingleTask), "every family of TASKS is one"
        family = exported.description.family
        self.bank, self.note = model, exported.note
        self._start(start.tokenizer, start.config.max_row_length, max_length)
        self._model = ServedAdapter(model.name, model.sha256, TASKS[family], family, exported.task.task)

    def read(self, name: str) -> ServedAdapter:
        """Return the model, whose files are those that were read.

        Raises:
            RunError: it has another name.
        """
        self.bank.describe(name)
        return self._model

    def describe_missing(self, name: str) -> str:
        """Return the sentence for a name that cannot be served; see `Catalogue.describe_missing`."""
        return f"there is no adapter {name[:60]!r}, for one model is served, {self._model.name}; serve a bank for more."


class ModelServer:
    """One model in the place of an `AdapterServer`.

    Args:
        model: the model.
        device: where it computes.

    Raises:
        RunError: see `WholeModel.load`.
        BaseModelError: see `WholeModel.load`.
    """

    def __init__(self, model: WholeModel, device: torch.device) -> None:
        (fitted,) = model.load(device).fitted.values()
        self.model = fitted.model
        self.encoder = self.model.bert

    def attach(self, name: str) -> None:
        """Answer requests with the model, which is there."""

    def drop(self, name: str) -> None:
        """Answer no more; the model stays."""

    def encode(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        adapter_names: Sequence[str],
        token_type_ids: Tensor | None = None,
    ) -> ModelStates:
        """Take a batch, all of whose rows are the model's; see `AdapterServer.encode`."""
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "token_type_ids": token_type_ids}
        return ModelStates(self.model, {name: each for name, each in inputs.items() if each is not None})


class ModelStates:
    """What a model makes of a batch, computed when it is asked for: few passes want both vectors and labels.

    Args:
        model: the model.
        inputs: its arguments, [B, N] each.
    """

    def __init__(self, model: Any, inputs: Mapping[str, Tensor]) -> None:
        self._model, self._inputs = model, inputs

    @cached_property
    def last_hidden_state(self) -> Tensor:
        """The encoder's states, [B, N, d]."""
        return self._model.bert(**self._inputs, pool=False).last_hidden_state

    def score(
        self, rows: Sequence[int] | None = None, positions: Mapping[int, Tensor] | None = None
    ) -> dict[int, Tensor]:
        """Return the logits of rows, [N, classes] or [classes]; see `MixedStates.score`.

        Args:
            rows: their places in the batch; None: all.
            positions: of a masked LM, which this is not.
        """
        chosen = list(range(len(self._inputs["input_ids"])) if rows is None else rows)
        if not chosen:
            return {}
        logits = self._model(**{name: each[chosen] for name, each in self._inputs.items()}).logits
        return dict(zip(chosen, logits, strict=True))
