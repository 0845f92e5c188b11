"""Requests -> answers: which adapter, which rows, and what refuses a request; nothing of Ray is here.

Enters: a `Backend` that computes rows, and requests of texts. Leaves: answers that name the adapter of every text.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from domext_ray.config.serve import ServeConfig
from domext_ray.errors import DomextError
from domext_ray.model.domext.modeling_domext import AUTO, BASE_NAME
from domext_ray.serving.batching import Batcher, QueueFullError
from domext_ray.serving.catalogue import Catalogue
from domext_ray.serving.endpoints import (
    ENDPOINTS,
    EncodedText,
    Endpoint,
    FaultyTextError,
    RefusedError,
    TextRequest,
    list_values,
)
from domext_ray.serving.engine import Outcome, ServedRow
from domext_ray.serving.served_model import ServedAdapter
from domext_ray.text.data.files import part_words
from domext_ray.text.data.readers import has_half_pair

_LOG = logging.getLogger(__name__)
THREAD_CHARACTERS = 20_000
"""Texts of more characters than that are cut into tokens in a thread, so that other requests go on."""
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
NO_ADAPTER, SEVERAL = "", "several"


class LostReplicaError(Exception):
    """The process that computed some rows is gone."""


@contextlib.contextmanager
def _name_text(number: int, total: int, part: str) -> Iterator[None]:
    """Refuse a request for a part of it, a "text" or a "pair", that cannot be answered, and say which one that is."""
    try:
        yield
    except FaultyTextError as error:
        name = f"a {part}" if total == 1 else f"{part} {number} of {total}, counted from 1,"
        raise RefusedError(error.status, f"{name} {error}") from error


class Backend(Protocol):
    """The replicas that have the model."""

    num_replicas: int
    is_ready: bool
    """Whether a replica would answer now, as far as is known: nobody is asked."""

    async def run(self, rows: list[ServedRow]) -> Sequence[Outcome]:
        """Compute a pass; raise a LostReplicaError if no replica could."""


class Metrics:
    """Counters of one process, for Prometheus; `count_queued` tells how many rows wait or run."""

    def __init__(self, count_queued: Callable[[], int]) -> None:
        self._registry = CollectorRegistry()
        own: Any = {"registry": self._registry, "namespace": "domext"}
        self._requests = Counter("requests", "Requests answered.", ["route", "status", "adapter"], **own)
        self._seconds = Histogram("request_seconds", "Seconds to the answer.", ["route"], buckets=_SECONDS, **own)
        self._rows = Histogram("batch_rows", "Rows of a pass.", buckets=_ROWS, **own)
        self._tokens = Counter("batch_tokens", "Tokens of passes, padding counted.", **own)
        self._adapters = Histogram("batch_adapters", "Adapters of a pass.", buckets=_ROWS, **own)
        Gauge("queue_rows", "Rows that wait or run.", **own).set_function(count_queued)

    def count_request(self, route: str, status: int, adapter: str, seconds: float) -> None:
        """Count an answer; the adapter is one that was served, `SEVERAL` or `NO_ADAPTER`."""
        self._requests.labels(route, str(status), adapter).inc()
        self._seconds.labels(route).observe(seconds)

    def count_pass(self, num_rows: int, num_tokens: int, num_adapters: int) -> None:
        """Count a pass through the encoder."""
        self._rows.observe(num_rows)
        self._tokens.inc(num_tokens)
        self._adapters.observe(num_adapters)

    def write(self) -> bytes:
        """Return all of them in Prometheus' text format."""
        return generate_latest(self._registry)


class Service:
    """What the endpoints call; made in the event loop that runs it."""

    def __init__(self, config: ServeConfig, catalogue: Catalogue, backend: Backend, *, on_gpu: bool = False) -> None:
        self.config, self.catalogue, self.backend = config, catalogue, backend
        self.endpoints: list[Endpoint[Any]] = [endpoint(catalogue) for endpoint in ENDPOINTS]
        self.batcher: Batcher[ServedRow] = Batcher(
            self._run,
            max_rows=config.batch.rows,
            max_tokens=config.batch.count_tokens(on_gpu=on_gpu),
            wait_seconds=config.batch.wait_ms / 1000,
            max_queued=config.limit.queue,
            num_passes=backend.num_replicas,
        )
        self.metrics = Metrics(lambda: self.batcher.num_queued)
        self._looking = asyncio.Lock()

    async def _run(self, rows: list[ServedRow]) -> Sequence[Outcome]:
        longest = max(row.length for row in rows)
        self.metrics.count_pass(len(rows), longest * len(rows), len({row.adapter for row in rows}))
        return await self.backend.run(rows)

    async def predict(self, endpoint: Endpoint[Any], request: TextRequest) -> tuple[list[dict[str, Any]], str]:
        """Return an answer per text, in order, and what metrics call the request's adapter; or raise a RefusedError."""
        records = [{part: part_words(text) for part, text in record.items()} for record in request.list_records()]
        names = list_values(request.adapter)
        self._check_texts(records)
        await self.look(names)
        adapters = self._complete_names(len(records), names)
        if sum(len(text) for record in records for text in record.values()) > THREAD_CHARACTERS:
            encoded = await asyncio.to_thread(self._encode, endpoint, records, adapters, request)
        else:
            encoded = self._encode(endpoint, records, adapters, request)
        outcomes = await self._compute([row for text in encoded if text is not None for row in text.rows])
        answers, first = [], 0
        for text in encoded:
            if text is None:
                answers.append({"adapter": BASE_NAME, **endpoint.say_nothing()})
                continue
            own, first = outcomes[first : first + len(text.rows)], first + len(text.rows)
            truncated = {"truncated": True} if text.truncated else {}
            answers.append({"adapter": text.adapter.name, **endpoint.answer(text, own, request), **truncated})
        used = {answer["adapter"] for answer in answers}
        return answers, used.pop() if len(used) == 1 else SEVERAL if used else NO_ADAPTER

    async def look(self, names: Sequence[str] = ()) -> None:
        """Have the bank looked at again, if that was a while ago, or if it must be for one of these names."""
        is_missing = any(name != AUTO and self.catalogue.find(name) is None for name in names)
        if not is_missing and (self._looking.locked() or not self.catalogue.is_old()):
            return
        async with self._looking:
            try:
                await asyncio.to_thread(self.catalogue.refresh)
            except DomextError:  # storage that does not answer; what was read goes on
                _LOG.exception("the bank cannot be looked at")

    def _check_texts(self, records: Sequence[Mapping[str, str]]) -> None:
        limit = self.config.limit
        if not records:
            raise RefusedError(422, "inputs has no text; give at least one.")
        if len(records) > limit.texts:
            raise RefusedError(413, f"inputs has {len(records):,} texts; give {limit.texts:,} at most in a request.")
        for number, record in enumerate(records, 1):
            for part, text in record.items():
                with _name_text(number, len(records), part):
                    self._check_text(text)

    def _check_text(self, text: str) -> None:
        longest = self.config.limit.characters
        if len(text) > longest:
            raise FaultyTextError(413, f"has {len(text):,} characters; give texts of {longest:,} at most.")
        if not text.strip():
            raise FaultyTextError(422, "is empty; give texts that have some words.")
        if has_half_pair(text):
            raise FaultyTextError(422, "has half a surrogate pair; give text that UTF-8 can hold.")

    def _complete_names(self, num_texts: int, adapters: Sequence[str]) -> Sequence[str]:
        """Return a name for each text."""
        if not adapters:
            names = self.catalogue.names()
            if len(names) != 1:
                raise RefusedError(422, f"adapter is missing; give {self._list_choices()}.")
            adapters = names
        if len(adapters) == 1:
            return [adapters[0]] * num_texts
        if len(adapters) != num_texts:
            raise RefusedError(
                422, f"adapter has {len(adapters)} names and inputs {num_texts} texts; give a name for each, or one."
            )
        return adapters

    def _encode(
        self,
        endpoint: Endpoint[Any],
        records: Sequence[Mapping[str, str]],
        names: Sequence[str],
        request: TextRequest,
    ) -> list[EncodedText | None]:
        """Make the rows of all texts; None for one that no router knows and the base cannot answer."""
        encoded: list[EncodedText | None] = []
        for number, (record, name) in enumerate(zip(records, names, strict=True), 1):
            adapter = self._find(endpoint, name, " ".join(record.values()))
            with _name_text(number, len(records), "pair" if "pair" in record else "text"):
                encoded.append(endpoint.ask(record, adapter, request) if endpoint.takes(adapter) else None)
        return encoded

    def _find(self, endpoint: Endpoint[Any], name: str, text: str) -> ServedAdapter:
        """Return the adapter of a text: one that can answer, or with "auto" the base where no router knows the text."""
        if name == AUTO:
            allowed = [candidate for candidate in self.catalogue.list() if endpoint.takes(candidate)]
            found = self.catalogue.route(endpoint.encode(text), allowed)
            if found is None:
                raise RefusedError(
                    422, f"adapter is {AUTO!r}, and no adapter that answers {endpoint.name} has a router; name one."
                )
            return found
        adapter = self.catalogue.find(name)
        if adapter is None:
            if problem := self.catalogue.problems.get(name):
                raise RefusedError(503, f"the adapter {name!r} cannot be used now: {problem}")
            raise RefusedError(404, f"no adapter {name[:60]!r} is served here; give {self._list_choices()}.")
        if not endpoint.takes(adapter):
            able = [candidate.name for candidate in self.catalogue.list() if endpoint.takes(candidate)]
            raise RefusedError(
                422,
                f"the adapter {name!r} does not answer {endpoint.name}; those that do are {', '.join(able) or 'none'}.",
            )
        return adapter

    def _list_choices(self) -> str:
        return f"one of {self.catalogue.list_choices()}"

    async def _compute(self, rows: list[ServedRow]) -> list[tuple[np.ndarray, ...]]:
        if not rows:
            return []
        if len(rows) > self.config.limit.queue:
            raise RefusedError(
                413, f"the texts make {len(rows):,} rows of tokens, more than the queue holds; send fewer."
            )
        try:
            return await asyncio.wait_for(self.batcher.submit(rows), self.config.limit.seconds)
        except QueueFullError as error:
            raise RefusedError(429, "the queue is full; try again later.", 1) from error
        except TimeoutError as error:
            raise RefusedError(
                503, f"there was no answer within {self.config.limit.seconds:g} s; try again later.", 1
            ) from error
        except LostReplicaError as error:
            raise RefusedError(503, "the process that computed the answer has ended; try again.", 1) from error
        except DomextError as error:
            raise RefusedError(503, f"the adapter cannot be used now: {error}", 1) from error
