"""One exported model, however it was trained, served like a bank that has it alone.

Enters: an export of a pre-training run, or of a fine-tuning one. Leaves: what the catalogue, the engine and the
deployment ask a bank for. It has no base beside it: the model may be trained in every tensor, and have a BiLSTM between
encoder and head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from domext_ray.adapters.bank import AdapterBank
from domext_ray.adapters.entry import MASKED_LM, TASKS
from domext_ray.config.serve import ServeConfig
from domext_ray.downstream.finetune.exported import find_export, hash_export, is_finetuned_model, load_exported
from domext_ray.downstream.forgetting.forgetting import load_masked_lm
from domext_ray.downstream.start.model import is_export, name_run
from domext_ray.downstream.start.text_embedding import choose_pooling
from domext_ray.errors import RunError
from domext_ray.model.domext.modeling_domext import AUTO, BASE_NAME
from domext_ray.serving.catalogue import Catalogue, ServedAdapter


@dataclass(frozen=True)
class WholeModel:
    """A model on the disk; `find_whole_model` makes one.

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

    def load(self, device: torch.device) -> tuple[Any, PreTrainedTokenizerBase, ServedAdapter]:
        """Load it with its tokenizer, and what requests see of it.

        Raises:
            RunError: no endpoint answers its task, or a file is damaged.
            BaseModelError: the model's files are not what its configuration says.
        """
        if not is_finetuned_model(self.folder):
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
        (fitted,) = exported.fitted.values()
        return (
            fitted.model,
            exported.tokenizer,
            ServedAdapter(self.name, self.sha256, TASKS[family], family, fitted.task),
        )


def find_whole_model(model: str) -> WholeModel | None:
    """Look at an export, or a run that has one, without loading it; None: it is something else, such as a base.

    Raises:
        RunError: it is a fine-tuning run without an export.
    """
    named = Path(model).expanduser()
    folder = next((each for each in (named, named / "export") if is_export(each)), None)
    if folder is None and is_finetuned_model(named):
        folder = find_export(named)
    return WholeModel(folder.resolve(), name_adapter(folder), hash_export(folder)) if folder else None


def name_adapter(folder: Path) -> str:
    """Return what requests call the model of a run or an export."""
    name = name_run(folder)
    return name if name.isidentifier() and name not in (AUTO, BASE_NAME) else "model"


def open_bank(config: ServeConfig) -> AdapterBank | WholeModel:
    """Open what is served: a bank, or else an exported model.

    Raises:
        RunError: it is neither.
    """
    opened = AdapterBank.open(config.bank, config.base) if config.bank else find_whole_model(config.model)
    if opened is None:
        raise RunError(f"{config.model} holds no exported model; give an export, or a run that has one.")
    return opened


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
        loaded, tokenizer, self._model = model.load(torch.device("cpu"))
        self.bank = model
        self._start(tokenizer, loaded.config.max_row_length, max_length)

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
        self.model, _, _ = model.load(device)
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
        """Return the logits of rows, [N, classes] or [classes], of a masked LM [P, V]; see `MixedStates.score`.

        Args:
            rows: their places in the batch; None: all.
            positions: int64 [P] by row: a masked LM scores these tokens alone.
        """
        chosen = list(range(len(self._inputs["input_ids"])) if rows is None else rows)
        if not chosen:
            return {}
        inputs = {name: each[chosen] for name, each in self._inputs.items()}
        if not positions:
            return dict(zip(chosen, self._model(**inputs).logits, strict=True))
        ids = inputs["input_ids"]
        wanted = [place * ids.shape[1] + positions[row] for place, row in enumerate(chosen)]
        logits = self._model(**inputs, masked_positions=torch.cat(wanted).to(ids.device)).logits
        return dict(zip(chosen, logits.split([len(each) for each in wanted]), strict=True))
