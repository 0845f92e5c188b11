"""What is asked of a text: one class per endpoint. A text, or a pair, becomes rows; their outcomes its answer.

Answers have the fields of the predictions that `domext predict` writes, and the name of the adapter.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar, cast

import numpy as np
from fastapi import HTTPException
from pydantic import BaseModel, ConfigDict, Field

from domext_ray.config.shared import PoolingChoice
from domext_ray.errors import CorpusError
from domext_ray.families.rows import Row
from domext_ray.families.task import Task
from domext_ray.families.windows import read_template
from domext_ray.inference.examples import make_example
from domext_ray.inference.fill_mask import MASK, MaskCodec
from domext_ray.models.bank_entry import ARCHITECTURES, MASKED_LM, SEQUENCES, TOKENS
from domext_ray.serving.catalogue import Catalogue
from domext_ray.serving.engine import ServedRow
from domext_ray.serving.served_model import ServedAdapter
from domext_ray.text.vocabulary.tokenizer import make_backend

_TEXT = "the text"


class TextRequest(BaseModel):
    """One text or several, and who answers them."""

    model_config = ConfigDict(extra="forbid", strict=True)

    inputs: str | list[str] = Field(description="a text, or several")
    adapter: str | list[str] | None = Field(
        None, description="for all texts, or for each: a name, __base__, or auto (routers choose)"
    )

    def list_records(self) -> list[dict[str, str]]:
        """Return what is asked of each text, with the fields of the records that `domext predict` reads."""
        return [{"text": text} for text in list_values(self.inputs)]


class EntitiesRequest(TextRequest):
    """Texts of any length: long ones are read in windows."""


class ShortTextRequest(TextRequest):
    """Texts that a row must hold."""

    truncate: bool = Field(False, description="cut texts that are too long, instead of refusing them (413)")


class ClassifyRequest(ShortTextRequest):
    """Texts, or pairs of texts, to classify."""

    pairs: str | list[str] | None = Field(None, description="the second text of each, for a model that reads pairs")

    def list_records(self) -> list[dict[str, str]]:
        """Return the texts with their second ones, as "pair"; see `TextRequest.list_records`."""
        records = super().list_records()
        if self.pairs is None:
            return records
        pairs = list_values(self.pairs)
        if len(pairs) != len(records):
            raise RefusedError(422, f"pairs has {len(pairs)} texts and inputs {len(records)}; give one for each.")
        return [{**record, "pair": pair} for record, pair in zip(records, pairs, strict=True)]


class FillMaskRequest(ShortTextRequest):
    """Texts with [MASK]."""

    top_k: int = Field(5, ge=1, le=100, description="words in the place of each mask")


class EmbedRequest(ShortTextRequest):
    """Texts to embed."""

    pooling: PoolingChoice = Field(
        "auto", description="mean of all tokens, or the first one; auto: as the adapter learned it"
    )
    normalize: bool = Field(False, description="vectors of length 1")


def list_values(given: str | list[str] | None) -> list[str]:
    """Return what a request has of something of which it may have one, several or none."""
    return [given] if isinstance(given, str) else given or []


class RefusedError(HTTPException):
    """A request is not answered; it may be tried again after `retry_seconds`, unless they are 0."""

    def __init__(self, status: int, sentence: str, retry_seconds: int = 0) -> None:
        super().__init__(status, sentence, {"Retry-After": str(retry_seconds)} if retry_seconds else {})


class FaultyTextError(Exception):
    """One text of a request cannot be answered; `fault` goes on behind the text's name."""

    def __init__(self, status: int, fault: str) -> None:
        super().__init__(fault)
        self.status = status


@dataclass(frozen=True)
class EncodedText:
    """A text on its way."""

    adapter: ServedAdapter  # answers it
    rows: tuple[ServedRow, ...]  # what is computed
    truncated: bool = False
    place: Any = None  # what the answer needs, in the endpoint's own terms


Outcomes = Sequence[tuple[np.ndarray, ...]]
RequestT = TypeVar("RequestT", bound=TextRequest)


class Endpoint(ABC, Generic[RequestT]):
    """An endpoint's work; its docstring is OpenAPI's."""

    name: ClassVar[str]
    """The last part of its path."""
    request: ClassVar[type[TextRequest]]
    """What a request's body is."""
    architectures: ClassVar[tuple[str, ...]]
    """Of adapters that can answer."""
    nothing: ClassVar[dict[str, Any]]
    """Every field of its answers, empty."""

    def __init__(self, catalogue: Catalogue) -> None:
        self.catalogue = catalogue
        self.backend = make_backend(catalogue.tokenizer)
        self.template = read_template(catalogue.tokenizer, pair=False)
        self.room = catalogue.max_length - self.template.num_special

    def takes(self, adapter: ServedAdapter) -> bool:
        """Whether an adapter can answer."""
        return adapter.architecture in self.architectures

    @abstractmethod
    def ask(self, record: Mapping[str, str], adapter: ServedAdapter, request: RequestT) -> EncodedText:
        """Make the rows of a record, or raise a FaultyTextError."""

    @abstractmethod
    def answer(self, encoded: EncodedText, outcomes: Outcomes, request: RequestT) -> dict[str, Any]:
        """Return what a text's rows say, without the adapter's name."""

    def say_nothing(self) -> dict[str, Any]:
        """Return the answer to a text that no router knows, where the base cannot answer."""
        return self.nothing

    def encode(self, text: str) -> np.ndarray:
        """Return the ids of a text, int64, without special tokens."""
        return np.array(self.backend.encode(text, add_special_tokens=False).ids, dtype=np.int64)

    def cut(self, ids: np.ndarray, truncate: bool) -> tuple[np.ndarray, bool]:
        """Return ids that fit a row, and whether some were left out; refuse those that do not fit and may not be."""
        return ids[: self.room], self.check_length(len(ids), self.room, self.name, truncate)

    def check_length(self, num_tokens: int, room: int, taker: str, truncate: bool) -> bool:
        """Return whether a text is too long; refuse it if it may not be cut."""
        if num_tokens > room and not truncate:
            fault = f"has {num_tokens:,} tokens, and {taker} takes {room:,}; shorten it, or set truncate."
            raise FaultyTextError(413, fault)
        return num_tokens > room


class FillMask(Endpoint[FillMaskRequest]):
    """The likeliest words in the place of each [MASK]."""

    name, request, architectures = "fill-mask", FillMaskRequest, (MASKED_LM,)
    nothing: ClassVar[dict[str, Any]] = {"masks": []}

    def __init__(self, catalogue: Catalogue) -> None:
        super().__init__(catalogue)
        self.codec = MaskCodec(catalogue.tokenizer)

    def takes(self, adapter: ServedAdapter) -> bool:
        """Whether an adapter can answer; the base may have no masked-LM head."""
        return super().takes(adapter) and (adapter is not self.catalogue.base or self.catalogue.has_words)

    def ask(self, record: Mapping[str, str], adapter: ServedAdapter, request: FillMaskRequest) -> EncodedText:
        """Make one row; see `Endpoint.ask`."""
        text = record["text"]
        spans = self.codec.find(text)
        if not spans:
            raise FaultyTextError(422, f"has no {MASK}; write {MASK} where a word is to be filled in.")
        (all_ids,) = self.codec.encode([text])
        ids, truncated = self.cut(all_ids, request.truncate)
        if (all_ids[self.room :] == self.codec.mask_id).any():
            raise FaultyTextError(413, f"has a {MASK} behind its first {self.room:,} tokens; shorten it.")
        joined, types = self.template.join(ids)
        places = np.flatnonzero(joined == self.codec.mask_id)
        row = ServedRow(adapter.name, adapter.sha256, joined, types, "words", places, request.top_k)
        return EncodedText(adapter, (row,), truncated, spans)

    def answer(self, encoded: EncodedText, outcomes: Outcomes, request: FillMaskRequest) -> dict[str, Any]:
        """Return "masks", each with start, end and its fills."""
        ((probabilities, ids),) = outcomes
        found = zip(encoded.place, probabilities.tolist(), ids.tolist(), strict=True)
        return {"masks": [{"start": s, "end": e, "fills": self.codec.name(*fills)} for (s, e), *fills in found]}


class Embed(Endpoint[EmbedRequest]):
    """The vector of each text."""

    name, request, architectures = "embed", EmbedRequest, tuple(ARCHITECTURES)
    nothing: ClassVar[dict[str, Any]] = {"embedding": None}

    def ask(self, record: Mapping[str, str], adapter: ServedAdapter, request: EmbedRequest) -> EncodedText:
        """Make one row; see `Endpoint.ask`."""
        ids, truncated = self.cut(self.encode(record["text"]), request.truncate)
        joined, types = self.template.join(ids)
        pooling = adapter.pooling if request.pooling == "auto" else request.pooling
        return EncodedText(adapter, (ServedRow(adapter.name, adapter.sha256, joined, types, pooling),), truncated)

    def answer(self, encoded: EncodedText, outcomes: Outcomes, request: EmbedRequest) -> dict[str, Any]:
        """Return "embedding", d numbers."""
        ((vector,),) = outcomes
        if request.normalize:
            vector = vector / max(float(np.linalg.norm(vector)), 1e-12)
        return {"embedding": vector.tolist()}


class _TaskEndpoint(Endpoint[RequestT]):
    """What an adapter's own task makes of a text."""

    def ask(self, record: Mapping[str, str], adapter: ServedAdapter, request: RequestT) -> EncodedText:
        """Make the task's rows; see `Endpoint.ask`."""
        task = cast(Task, adapter.task)
        try:
            example = make_example(adapter.family, record, _TEXT, task.state)
        except CorpusError as error:  # the adapter reads pairs of texts
            raise FaultyTextError(422, str(error).removeprefix(f"{_TEXT} ")) from None
        rows = task.encode([example], is_training=False)
        task.notes.clear()  # on odd texts; a server would keep them for ever
        own = tuple(
            ServedRow(adapter.name, adapter.sha256, row.input_ids, row.token_type_ids, "labels") for row in rows
        )
        return EncodedText(adapter, own, self.check(record, task, request), (example, rows))

    def check(self, record: Mapping[str, str], task: Task, request: RequestT) -> bool:
        """Return whether the task cuts the record; refuse one that may not be cut. Default: it makes windows."""
        return False

    def say_nothing(self) -> dict[str, Any]:
        """Return the fields of the adapters whose routers chose; see `Endpoint.say_nothing`."""
        routed = [adapter for adapter in self.catalogue.list() if self.takes(adapter) and adapter.router is not None]
        shown = {name for adapter in routed for name in cast(Task, adapter.task).list_shown()}
        return {name: empty for name, empty in self.nothing.items() if name in shown}

    def answer(self, encoded: EncodedText, outcomes: Outcomes, request: RequestT) -> dict[str, Any]:
        """Return the task's prediction."""
        example, rows = encoded.place
        task = cast(Task, encoded.adapter.task)
        (prediction,) = task.decode([example], cast("list[Row]", rows), list(outcomes))
        return task.show(prediction)


class Entities(_TaskEndpoint[EntitiesRequest]):
    """The entities of each text, with their places; a text of any length is read in windows."""

    name, request, architectures = "entities", EntitiesRequest, (TOKENS,)
    nothing: ClassVar[dict[str, Any]] = {"entities": []}


class Classify(_TaskEndpoint[ClassifyRequest]):
    """The label of each text or pair, or those above their threshold, with the probabilities of all; or its value."""

    name, request, architectures = "classify", ClassifyRequest, (SEQUENCES,)
    nothing: ClassVar[dict[str, Any]] = {"label": None, "labels": [], "probabilities": {}, "value": None}

    def __init__(self, catalogue: Catalogue) -> None:
        super().__init__(catalogue)
        self.pair_template = read_template(catalogue.tokenizer, pair=True)

    def check(self, record: Mapping[str, str], task: Task, request: ClassifyRequest) -> bool:
        """Refuse a text, or a pair, that the task would cut, unless it may; see `_TaskEndpoint.check`."""
        is_pair = "pair" in record
        if task.options.long_texts == "windows" and not is_pair:
            return False
        room = task.options.max_length - (self.pair_template if is_pair else self.template).num_special
        num_tokens = sum(len(self.encode(text)) for text in record.values())
        return self.check_length(num_tokens, room, "the adapter", request.truncate)


ENDPOINTS: tuple[type[Endpoint[Any]], ...] = (FillMask, Classify, Entities, Embed)
