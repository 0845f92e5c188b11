"""Requests -> answers: which adapter, which rows, and what refuses a request; nothing of HTTP or Ray is here.

Enters: a `Backend` that computes rows, and requests of texts. Leaves: answers that name the adapter of every text.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from domext_ray.config.serve import ServeConfig
from domext_ray.errors import CorpusError, DomextError
from domext_ray.model.domext.modeling_domext import AUTO, BASE_NAME
from domext_ray.serving.batching import Batcher, QueueFullError
from domext_ray.serving.catalogue import Catalogue, ServedAdapter
from domext_ray.serving.engine import Outcome, ServedRow
from domext_ray.serving.kinds import KINDS, Asked, Kind, TextError, Wishes
from domext_ray.serving.limits import count_retry_seconds
from domext_ray.serving.metrics import NO_ADAPTER, SEVERAL, Metrics

THREAD_CHARACTERS = 20_000
"""Texts of more characters than that are cut into tokens in a thread, so that other requests go on."""


class RefusedError(Exception):
    """A request is not answered; its message is one sentence.

    Args:
        status: of HTTP.
        message: the sentence.
        retry_seconds: when it may be tried again; 0: that changes nothing.
    """

    def __init__(self, status: int, message: str, retry_seconds: float = 0.0) -> None:
        super().__init__(message)
        self.status = status
        self.headers = {"Retry-After": count_retry_seconds(retry_seconds)} if retry_seconds else {}


class LostReplicaError(Exception):
    """The process that computed some rows is gone."""


class Backend(Protocol):
    """The replicas that have the model."""

    num_replicas: int

    async def run(self, rows: list[ServedRow]) -> Sequence[Outcome]:
        """Compute a pass; raise a LostReplicaError if no replica could."""

    async def attach(self, name: str, sha256: str) -> None:
        """Have an adapter in all replicas, or raise a DomextError."""

    async def drop(self, name: str) -> None:
        """Take an adapter out of all replicas."""

    async def is_ready(self) -> bool:
        """Whether a replica would answer now."""


class Service:
    """What the endpoints call; made in the event loop that runs it.

    Args:
        config: limits and batches.
        catalogue: the adapters.
        backend: the replicas.
        on_gpu: whether these have GPUs.
        on_change: called when an adapter has come or gone.
    """

    def __init__(
        self,
        config: ServeConfig,
        catalogue: Catalogue,
        backend: Backend,
        *,
        on_gpu: bool = False,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self.config, self.catalogue, self.backend = config, catalogue, backend
        self.kinds: dict[str, Kind] = {each.name: each(catalogue) for each in KINDS}
        self.batcher: Batcher[ServedRow] = Batcher(
            self._run,
            most_rows=config.batch.rows,
            most_tokens=config.batch.count_tokens(on_gpu=on_gpu),
            wait_seconds=config.batch.wait_ms / 1000,
            most_queued=config.limit.queue,
            num_passes=backend.num_replicas,
        )
        self.metrics = Metrics(lambda: self.batcher.num_queued)
        self._changing, self._on_change = asyncio.Lock(), on_change

    async def _run(self, rows: list[ServedRow]) -> Sequence[Outcome]:
        longest = max(row.length for row in rows)
        self.metrics.count_pass(len(rows), longest * len(rows), len({row.adapter for row in rows}))
        return await self.backend.run(rows)

    async def predict(
        self, kind_name: str, texts: Sequence[str], adapters: Sequence[str], wishes: Wishes
    ) -> tuple[list[dict[str, Any]], str]:
        """Answer texts.

        Args:
            kind_name: of the endpoint.
            texts: one or several.
            adapters: a name for each, or one for all; none: the only one that is served.
            wishes: what else was asked for.

        Returns:
            An answer per text, in order, and what metrics call the request's adapter.

        Raises:
            RefusedError: it is not answered.
        """
        self._check_texts(texts)
        kind = self.kinds[kind_name]
        names = self._complete_names(texts, adapters)
        if sum(map(len, texts)) > THREAD_CHARACTERS:
            asked = await asyncio.to_thread(self._ask, kind, texts, names, wishes)
        else:
            asked = self._ask(kind, texts, names, wishes)
        outcomes = await self._compute([row for each in asked if each is not None for row in each.rows])
        answers, first = [], 0
        for each in asked:
            if each is None:
                answers.append({"adapter": BASE_NAME, **kind.nothing})
                continue
            own, first = outcomes[first : first + len(each.rows)], first + len(each.rows)
            truncated = {"truncated": True} if each.truncated else {}
            answers.append({"adapter": each.adapter.name, **kind.answer(each, own, wishes), **truncated})
        used = {answer["adapter"] for answer in answers}
        return answers, used.pop() if len(used) == 1 else SEVERAL if used else NO_ADAPTER

    def _check_texts(self, texts: Sequence[str]) -> None:
        limit = self.config.limit
        if not texts:
            raise RefusedError(422, "inputs has no text; give at least one.")
        if len(texts) > limit.texts:
            raise RefusedError(413, f"inputs has {len(texts):,} texts; give {limit.texts:,} at most in a request.")
        for each in texts:
            if len(each) > limit.characters:
                raise RefusedError(
                    413, f"a text has {len(each):,} characters; give texts of {limit.characters:,} at most."
                )
            if not each.strip():
                raise RefusedError(422, "a text is empty; give texts that have some words.")
            if not each.isascii() and any("\ud800" <= character <= "\udfff" for character in each):
                raise RefusedError(422, "a text has half a surrogate pair; give text that UTF-8 can hold.")

    def _complete_names(self, texts: Sequence[str], adapters: Sequence[str]) -> Sequence[str]:
        """Return a name for each text."""
        if not adapters:
            names = self.catalogue.names()
            if len(names) != 1:
                raise RefusedError(422, f"adapter is missing; give {self._list_choices()}.")
            adapters = names
        if len(adapters) == 1:
            return [adapters[0]] * len(texts)
        if len(adapters) != len(texts):
            raise RefusedError(
                422, f"adapter has {len(adapters)} names and inputs {len(texts)} texts; give a name for each, or one."
            )
        return adapters

    def _ask(self, kind: Kind, texts: Sequence[str], names: Sequence[str], wishes: Wishes) -> list[Asked | None]:
        """Make the rows of all texts; None for one that no router knows and the base cannot answer."""
        asked: list[Asked | None] = []
        for text, name in zip(texts, names, strict=True):
            adapter = self._find(kind, name, text)
            try:
                asked.append(kind.ask(text, adapter, wishes) if kind.takes(adapter) else None)
            except TextError as error:
                raise RefusedError(error.status, str(error)) from error
            except CorpusError as error:
                raise RefusedError(422, str(error)) from error
        return asked

    def _find(self, kind: Kind, name: str, text: str) -> ServedAdapter:
        """Return the adapter of a text: one that can answer, or with "auto" the base where no router knows the text."""
        if name == AUTO:
            allowed = [each for each in self.catalogue.list() if kind.takes(each)]
            found = self.catalogue.route(kind.encode(text), allowed)
            if found is None:
                raise RefusedError(
                    422, f"adapter is {AUTO!r}, and no adapter that answers {kind.name} has a router; name one."
                )
            return found
        adapter = self.catalogue.find(name)
        if adapter is None:
            raise RefusedError(404, f"no adapter {name[:60]!r} is served here; give {self._list_choices()}.")
        if not kind.takes(adapter):
            able = [each.name for each in self.catalogue.list() if kind.takes(each)]
            raise RefusedError(
                422, f"the adapter {name!r} does not answer {kind.name}; those that do are {', '.join(able) or 'none'}."
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
            raise RefusedError(429, "the queue is full; try again later.", 1.0) from error
        except asyncio.TimeoutError as error:
            raise RefusedError(
                503, f"there was no answer within {self.config.limit.seconds:g} s; try again later.", 1.0
            ) from error
        except LostReplicaError as error:
            raise RefusedError(503, "the process that computed the answer has ended; try again.", 1.0) from error
        except DomextError as error:
            raise RefusedError(503, f"the adapter cannot be used now: {error}", 1.0) from error

    async def add(self, name: str) -> ServedAdapter:
        """Serve one more adapter of the bank, in all replicas or in none.

        Raises:
            RefusedError: it is served already, or cannot be.
        """
        async with self._changing:
            if self.catalogue.find(name) is not None:
                raise RefusedError(409, f"the adapter {name[:60]!r} is served already.")
            if name not in self.catalogue.bank.names():
                raise RefusedError(404, self.catalogue.describe_missing(name))
            try:
                adapter = await asyncio.to_thread(self.catalogue.read, name)
                await self.backend.attach(name, adapter.sha256)
            except (DomextError, LostReplicaError) as error:
                await self.backend.drop(name)
                raise RefusedError(422, f"the adapter cannot be served: {error}") from error
            self.catalogue.put(adapter)
            self._on_change()
            return adapter

    async def remove(self, name: str) -> None:
        """Serve an adapter no longer; requests that are on their way with it get their answer.

        Raises:
            RefusedError: it is not served.
        """
        async with self._changing:
            if self.catalogue.remove(name) is None:
                raise RefusedError(404, f"no adapter {name[:60]!r} is served here.")
            self._on_change()
            await self.backend.drop(name)
