"""What the user calls a model -> what predicts with it.

Enters: `--model` and `--task`. Leaves: a `PlannedModel`, which is a few names and a hash, and, in each process that
predicts, a `Predictor`: rows become examples, examples become records, as a user reads them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import pyarrow as pa
import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from domext_ray.config.inference import FILL_MASK, PredictConfig
from domext_ray.config.shared import LongTextsChoice
from domext_ray.errors import ConfigError, CorpusError
from domext_ray.export.onnx_graph import POSITIONS, OnnxModel, is_graph
from domext_ray.families.readers.examples import Example
from domext_ray.families.readers.words import NO_MARKS, WordMarks
from domext_ray.families.registry import FAMILIES
from domext_ray.families.task_description import make_described_task
from domext_ray.families.texts import HAS_PAIRS
from domext_ray.inference.examples import list_fields, list_needed, make_example
from domext_ray.inference.fill_mask import FillMask
from domext_ray.inference.input_rows import TEXT_FIELD, FieldNames, RowError
from domext_ray.model.build import has_router
from domext_ray.model.domext.configuration_domext import DomextConfig
from domext_ray.model.domext.modeling_domext import DomextForMaskedLM
from domext_ray.models.bank import AdapterBank
from domext_ray.models.bank_entry import MASKED_LM
from domext_ray.models.exported import ExportedModel, OpenedTask, Predicted, hash_export, open_exported
from domext_ray.models.masked_lm import hash_model, load_masked_lm
from domext_ray.models.source import BankAdapter, Graphs, Source
from domext_ray.storage import hash_values
from domext_ray.text.vocabulary.tokenizer import load_tokenizer

_WORD = "the row"
_PAIRS = (
    "rows have a second text, and the model has not learned from pairs alone (one of version 0.1.0 does not say it): "
    "what is predicted of them may mean little"
)


class Predictor(Protocol):
    """Predicts with a model that is in memory."""

    schema: Mapping[str, pa.DataType]
    """Type of each field of its records; a row without text has none of them, or empty lists."""

    def make_example(self, values: Mapping[str, Any], shown: str) -> Any:
        """Make an example of a row's fields, or raise a RowError; `shown` is what the file calls its text."""

    def predict(self, examples: Sequence[Any]) -> Predicted:
        """Return a record an example, JSON-able, and what is scored of it."""

    def take_cases(self) -> dict[str, int]:
        """Return how many of the examples so far were odd (cut, above all), by what is said of them, and begin anew."""

    def count_labels(self, record: Mapping[str, Any]) -> list[str]:
        """Return the labels that a record has, each as often as it has it."""


class TaskPredictor:
    """Predicts with a fine-tuned model."""

    def __init__(self, model: ExportedModel) -> None:
        description = model.description
        self.family, self.state = FAMILIES[description.family], description.state
        self.schema: Mapping[str, pa.DataType] = self.family.fields
        if self.family.weighs_labels:
            by_label = pa.struct({label: pa.float64() for label in description.labels})
            self.schema = {**self.schema, "probabilities": by_label}
        self._model, self._num_pairs = model, 0
        self._knows_pairs = HAS_PAIRS not in self.family.state_rules or bool(self.state.get(HAS_PAIRS))

    def make_example(self, values: Mapping[str, Any], shown: str) -> Example:
        """Make an example of the family; see `inference.examples`."""
        try:
            return make_example(self.family.family, values, _WORD, self.state)
        except CorpusError as error:
            raise RowError(str(error).removeprefix(_WORD).strip(" :").removesuffix(".")) from error

    def predict(self, examples: Sequence[Example]) -> Predicted:
        """See `Predictor.predict`."""
        if not self._knows_pairs:
            self._num_pairs += sum(getattr(example, "pair", None) is not None for example in examples)
        return self._model.predict(examples)

    def take_cases(self) -> dict[str, int]:
        """See `Predictor.take_cases`; of pairs, whether the model has learned from pairs alone."""
        cases, self._num_pairs = {_PAIRS: self._num_pairs} if self._num_pairs else {}, 0
        return {**self._model.take_cases(), **cases}

    def count_labels(self, record: Mapping[str, Any]) -> list[str]:
        """See `Predictor.count_labels`."""
        return self.family.list_found(record)


@dataclass(frozen=True)
class PlannedModel:
    """A model that was looked at, and what it does."""

    source: Source  # what the user called it, and what that is
    task: str  # what it does: fill_mask, or a family
    sha256: str  # of all that its predictions depend on
    labels: tuple[str, ...] = ()  # classes, entity types or predicates, where the task has any
    marks: WordMarks = NO_MARKS  # by which it cuts running text
    has_pairs: bool = False  # all that it has learned from are pairs of texts

    def name_fields(self, text: str) -> FieldNames:
        """Return the fields that are read of a row; `text` is the one that holds the text."""
        if self.task == FILL_MASK:
            return FieldNames(text)
        needed = list_needed(self.task, text)
        return FieldNames(text, list_fields(self.task), needs_text=text != TEXT_FIELD, needed=needed)


def find_model(source: Source, config: PredictConfig) -> PlannedModel:
    """Look at a model; of a task no tensor is read but those that recall terms."""
    if config.task != FILL_MASK and (found := open_task(source, config.long_texts)) is not None:
        own = found.description
        marks, has_pairs = WordMarks.from_json(own.state), bool(own.state.get(HAS_PAIRS))
        return PlannedModel(source, own.family, found.hash(), own.labels, marks, has_pairs)
    masked_lm, tokenizer = _load_masked_lm(source)
    config.check_length(cast(DomextConfig, masked_lm.config).max_row_length)
    _make_fill_mask(masked_lm, tokenizer, source, config, torch.device("cpu"))
    sha256 = hash_export(source.folder) if isinstance(source, Graphs) else hash_model(masked_lm)
    return PlannedModel(source, FILL_MASK, sha256)


def open_task(source: Source, long_texts: LongTextsChoice = "auto") -> OpenedTask | None:
    """Look at a fine-tuned model: an export, a run that has one, or BANK:NAME; None: it does no task."""
    if not isinstance(source, BankAdapter):
        return open_exported(source, takes_graphs=True, long_texts=long_texts) if source.does_task else None
    bank, name = AdapterBank.open(source.bank), source.adapter
    entry = bank.describe(name)
    if entry.task is None:
        return None
    description, tokenizer = entry.task.read_long_texts(long_texts), load_tokenizer(bank.base.folder)
    task = make_described_task(description, tokenizer)
    return OpenedTask(description, tokenizer, task, lambda: hash_values(entry.to_json()), lambda stage: bank.load(name))


def load_predictor(place: PlannedModel, config: PredictConfig, device: torch.device) -> Predictor:
    """Load a model that `find_model` found on a device."""
    if place.task != FILL_MASK:
        found = cast(OpenedTask, open_task(place.source, config.long_texts))
        return TaskPredictor(found.load(device, config.count_batch_tokens(device.type)))
    model, tokenizer = _load_masked_lm(place.source)
    return _make_fill_mask(model, tokenizer, place.source, config, device)


def _make_fill_mask(
    model: DomextForMaskedLM,
    tokenizer: PreTrainedTokenizerBase,
    source: Source,
    config: PredictConfig,
    device: torch.device,
) -> FillMask:
    cast(nn.Module, model).to(device)
    is_one_adapter = isinstance(source, Graphs | BankAdapter)
    return FillMask(
        model,
        tokenizer,
        top_k=config.top_k,
        batch_tokens=config.count_batch_tokens(device.type),
        max_length=config.max_length,
        routes=config.router and not is_one_adapter and has_router(cast(DomextConfig, model.config)),
    )


def _load_masked_lm(source: Source) -> tuple[DomextForMaskedLM, PreTrainedTokenizerBase]:
    match source:
        case Graphs():
            graph = OnnxModel(source.folder) if is_graph(source.folder) else None
            if graph is None or POSITIONS not in graph.inputs:
                raise ConfigError(f"--model {source.id!r} fills no masks: it is the graph of a task; leave --task out.")
            return cast(DomextForMaskedLM, graph), load_tokenizer(source.folder)
        case BankAdapter():
            bank = AdapterBank.open(source.bank)
            if bank.describe(source.adapter).architecture != MASKED_LM:
                raise ConfigError(
                    f"--model {source.id!r} fills no masks; leave --task out or, if the bank does not know its task, "
                    "add it again from its fine-tuning run."
                )
            return cast(DomextForMaskedLM, bank.load(source.adapter)), load_tokenizer(bank.base.folder)
        case _:
            return load_masked_lm(source.id, source.option)
