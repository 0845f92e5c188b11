"""What every request passes first: drain, rate, token, size; and what counts its answer.

Bodies are read here, whole and within their limit, before the endpoint sees them. Nothing of a request is logged.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from domext_ray.config.serve import LimitConfig
from domext_ray.serving.limits import RateLimit, is_token
from domext_ray.serving.metrics import NO_ADAPTER, Metrics
from domext_ray.serving.service import RefusedError

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN = frozenset({"/", "/healthz", "/readyz", "/openapi.json", "/favicon.ico"})
"""Paths that need no token: they say nothing of texts or models."""
USED_ADAPTER = "used_adapter"
"""Where an endpoint leaves the name of the adapter in the request's state."""
_LOG = logging.getLogger(__name__)


class Gate:
    """An ASGI application around another one.

    Args:
        app: the endpoints.
        limits: of a request.
        token_sha256: of the token.
        metrics: counts answers.
        routes: paths by which answers are counted, without what follows them.
    """

    def __init__(self, app: App, limits: LimitConfig, token_sha256: str, metrics: Metrics, routes: list[str]) -> None:
        self._app, self._limits, self._token_sha256, self._metrics = app, limits, token_sha256, metrics
        self._routes = sorted(routes, key=len, reverse=True)
        self._rate = RateLimit(limits.rate)
        self.num_open = 0
        self.is_draining = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, status = time.perf_counter(), 500

        async def note(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        self.num_open += 1
        try:
            await self._answer(scope, receive, note)
        finally:
            self.num_open -= 1
            adapter = scope.get("state", {}).get(USED_ADAPTER, NO_ADAPTER)
            self._metrics.count_request(self._name_route(scope["path"]), status, adapter, time.perf_counter() - started)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def begin(message: MutableMapping[str, Any]) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            self._check(scope)
            body = await self._read(scope, receive)
            await self._app(scope, _replay(body, receive), begin)
        except RefusedError as error:
            await refuse(send, error.status, str(error), error.headers)
        except Exception:
            if begun:
                raise
            _LOG.exception("a request to %s failed", self._name_route(scope["path"]))
            await refuse(send, 500, "something went wrong here; the log of the server says what.", {})

    def _check(self, scope: Scope) -> None:
        path, headers = scope["path"], dict(scope["headers"])
        if path == "/healthz":
            return
        if self.is_draining:
            raise RefusedError(503, "the server is ending, and takes no further requests.", 5.0)
        wait = self._rate.take(str((scope.get("client") or ("",))[0]))
        if wait:
            raise RefusedError(429, f"more than {self._limits.rate:g} requests per second; send them slower.", wait)
        given = headers.get(b"authorization", b"").decode("latin-1")
        if path not in OPEN and not is_token(given, self._token_sha256):
            raise RefusedError(401, "the token is missing or wrong; send the header Authorization: Bearer TOKEN.")
        length = headers.get(b"content-length", b"")
        if length.isdigit() and int(length[:20]) > self._limits.bytes:
            raise self._refuse_size()

    def _refuse_size(self) -> RefusedError:
        return RefusedError(
            413, f"the request has more than {self._limits.bytes:,} bytes; send fewer or shorter texts."
        )

    async def _read(self, scope: Scope, receive: Receive) -> bytes:
        if scope["method"] in ("GET", "HEAD"):
            return b""
        parts, size = list[bytes](), 0
        while True:
            message = await receive()
            if message["type"] != "http.request":  # the client is gone
                return b"".join(parts)
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self._limits.bytes:
                raise self._refuse_size()
            if not message.get("more_body", False):
                return b"".join(parts)

    def _name_route(self, path: str) -> str:
        """Return the path by which a request is counted: clients may not make new ones up."""
        return next((each for each in self._routes if path == each or path.startswith(f"{each}/")), "other")


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return what gives an application a body that was read."""
    given = False

    async def take() -> MutableMapping[str, Any]:
        nonlocal given
        if not given:
            given = True
            return {"type": "http.request", "body": body, "more_body": False}
        return await receive()

    return take


async def refuse(send: Send, status: int, message: str, headers: dict[str, str]) -> None:
    """Send an error as JSON."""
    body = json.dumps({"error": message}, ensure_ascii=False).encode()
    more = {"WWW-Authenticate": "Bearer"} if status == 401 else {}
    lines = {"Content-Type": "application/json", "Content-Length": str(len(body)), **more, **headers}
    encoded = [(name.lower().encode(), value.encode("latin-1")) for name, value in lines.items()]
    await send({"type": "http.response.start", "status": status, "headers": encoded})
    await send({"type": "http.response.body", "body": body})
