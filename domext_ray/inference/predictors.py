"""What the user calls a model -> what predicts with it.

Enters: `--model` and `--task`. Leaves: a `ModelPlace`, which is a few names and a hash, and, in each process that
predicts, a `Predictor`: rows become examples, examples become records, as a user reads them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import pyarrow as pa
import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from domext_ray.adapters.bank import BANK, AdapterBank
from domext_ray.adapters.entry import MASKED_LM
from domext_ray.config.inference import FILL_MASK, PredictConfig
from domext_ray.corpus.vocabulary.vocab import load_tokenizer
from domext_ray.downstream.forgetting.forgetting import hash_model, load_masked_lm
from domext_ray.errors import ConfigError
from domext_ray.inference.fill_mask import FillMask
from domext_ray.model.domext.configuration_domext import DomextConfig
from domext_ray.model.domext.modeling_domext import DomextForMaskedLM


class Predictor(Protocol):
    """Predicts with a model that is in memory."""

    schema: Mapping[str, pa.DataType]
    """Type of each field of its records; a row without text has none of them, or empty lists."""

    def make_example(self, values: Mapping[str, Any], shown: str) -> Any:
        """Make an example of a row's fields.

        Args:
            values: the fields.
            shown: what the file calls its text.

        Raises:
            RowError: they are no example of the task.
        """

    def predict(self, examples: Sequence[Any]) -> list[dict[str, Any]]:
        """Return a record an example, JSON-able."""

    def count_labels(self, record: Mapping[str, Any]) -> list[str]:
        """Return the labels that a record has, each as often as it has it."""


@dataclass(frozen=True)
class ModelPlace:
    """A model that was looked at, and where it is.

    Args:
        id: what the user called it.
        task: what it does.
        sha256: hash of all that its predictions depend on.
        fields: fields of a row that it may read, beside `text`.
    """

    id: str
    task: str
    sha256: str
    fields: tuple[str, ...] = ()


def find_model(config: PredictConfig) -> ModelPlace:
    """Look at the model that a configuration names.

    Args:
        config: its `model`, `task` and options of rows.

    Raises:
        ConfigError: it does another task, or takes shorter rows.
        BaseModelError: it is not to be had.
        RunError: it is damaged, or a run or bank without it.
    """
    if config.task not in ("", FILL_MASK):
        raise ConfigError(f"--task is {config.task!r}; {config.model!r} fills masks, so it must be {FILL_MASK}.")
    model, tokenizer = _load_masked_lm(config.model)
    longest = cast(DomextConfig, model.config).max_row_length
    if config.max_length > longest:
        raise ConfigError(f"--max_length is {config.max_length}; {config.model!r} takes rows of up to {longest}.")
    FillMask(model, tokenizer, top_k=config.top_k, batch_tokens=config.batch_tokens, max_length=config.max_length)
    return ModelPlace(config.model, FILL_MASK, hash_model(model))


def load_predictor(place: ModelPlace, config: PredictConfig, device: torch.device) -> Predictor:
    """Load a model on a device.

    Args:
        place: of `find_model`.
        config: the same as there.
        device: where to predict.
    """
    model, tokenizer = _load_masked_lm(place.id)
    cast(nn.Module, model).to(device)
    return FillMask(
        model, tokenizer, top_k=config.top_k, batch_tokens=config.batch_tokens, max_length=config.max_length
    )


def split_bank(model: str) -> tuple[Path, str] | None:
    """Return the folder and the adapter of BANK:NAME; None: it is another kind of model."""
    folder, mark, name = model.rpartition(":")
    path = Path(folder).expanduser()
    return (path, name) if mark and (path / BANK).is_file() else None


def _load_masked_lm(model: str) -> tuple[DomextForMaskedLM, PreTrainedTokenizerBase]:
    found = split_bank(model)
    if found is None:
        return load_masked_lm(model, "--model")
    bank = AdapterBank.open(found[0])
    entry = bank.describe(found[1])
    if entry.architecture != MASKED_LM:
        raise ConfigError(f"--model {model!r} fills no masks ({entry.architecture}); give an adapter that does.")
    loaded = cast(DomextForMaskedLM, bank.load(found[1]))
    return loaded, load_tokenizer(bank.base.tokenizer_folder)
