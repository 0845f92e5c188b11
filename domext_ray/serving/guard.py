"""What every request passes first: drain, token, size; and what counts its answer. Nothing of a request is logged.

The token is kept nowhere but where the user has it: replicas and logs have its hash alone.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from pathlib import Path
from typing import Any

from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from domext_ray.config.serve import LimitConfig
from domext_ray.errors import ConfigError, name_file
from domext_ray.serving.endpoints import RefusedError
from domext_ray.serving.service import NO_ADAPTER, Metrics

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN = frozenset({"/", "/healthz", "/readyz", "/openapi.json", "/favicon.ico"})
"""Paths that need no token: they say nothing of texts or models, and cost nothing."""
USED_ADAPTER = "used_adapter"
"""Where an endpoint leaves the name of the adapter in the request's state."""
TOKEN_VARIABLE = "DOMEXT_SERVE_TOKEN"
MIN_CHARACTERS = 16
_LOG = logging.getLogger(__name__)


class RequestGuard:
    """An ASGI application around another one: FastAPI reads a body before it asks its own guards, such as HTTPBearer.

    `paths` are those by which answers are counted: clients may not make new ones up.
    """

    def __init__(
        self, app: App, limits: LimitConfig, token_sha256: str, metrics: Metrics, paths: Iterable[str]
    ) -> None:
        self._app, self._limits, self._token_sha256, self._metrics = app, limits, token_sha256, metrics
        self._paths = frozenset(paths)
        self.num_open = 0
        self.is_draining = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, status, num_bytes = time.perf_counter(), 0, 0
        is_head = scope["method"] == "HEAD"
        if is_head:  # a GET whose answer has no body
            scope = {**scope, "method": "GET"}
        path = scope["path"] if scope["path"] in self._paths else "other"

        async def note(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            elif is_head:
                message = {**message, "body": b""}
            await send(message)

        async def read() -> MutableMapping[str, Any]:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._limits.bytes:
                raise self._refuse_size()
            return message

        self.num_open += 1
        try:
            self._check(scope)
            await self._app(scope, read, note)
        except RefusedError as error:
            await show_error(error)(scope, receive, note)
        except Exception:  # an endpoint's, which has been answered
            _LOG.exception("a request to %s failed", path)
        finally:
            self.num_open -= 1
            adapter = scope.get("state", {}).get(USED_ADAPTER, NO_ADAPTER)
            self._metrics.count_request(path, status or 500, adapter, time.perf_counter() - started)

    def _check(self, scope: Scope) -> None:
        path, headers = scope["path"], dict(scope["headers"])
        if path == "/healthz":
            return
        if self.is_draining:
            raise RefusedError(503, "the server is ending, and takes no further requests.", 5)
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


def show_error(error: HTTPException) -> JSONResponse:
    """Return what a client gets for an error."""
    more = {"WWW-Authenticate": "Bearer"} if error.status_code == 401 else {}
    return JSONResponse({"error": error.detail}, error.status_code, {**more, **(error.headers or {})})


def hash_token(token: str) -> str:
    """Return what replicas know of a token, hexadecimal."""
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).hexdigest()


def is_token(header: str, token_sha256: str) -> bool:
    """Whether an Authorization header shows the token; the comparison takes the same time whatever it shows."""
    scheme, _, given = header.partition(" ")
    return hmac.compare_digest(hash_token(given.strip()), token_sha256) and scheme.lower() == "bearer"


def find_token(token_file: str, new_file: Path) -> tuple[str, str]:
    """Return the token, and where a user finds it.

    Without a `token_file` it is the environment's, or else a new one in `new_file`, which nobody else can read.
    """
    if token_file:
        path = Path(token_file)
        try:
            token = path.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is no UTF-8"
            raise ConfigError(f"--token_file names {token_file!r}, which cannot be read ({reason}).") from error
        return _check_token(token, "--token_file"), str(path)
    if os.environ.get(TOKEN_VARIABLE, "").strip():
        return find_environment_token(), f"{TOKEN_VARIABLE} of this environment"
    token = secrets.token_urlsafe(32)
    with name_file(new_file):
        new_file.parent.mkdir(mode=0o700, exist_ok=True)
        new_file.unlink(missing_ok=True)
        descriptor = os.open(new_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(f"{token}\n")
    return token, str(new_file)


def find_environment_token() -> str:
    """Return the token that DOMEXT_SERVE_TOKEN has; none, or a short one, is a ConfigError."""
    return _check_token(os.environ.get(TOKEN_VARIABLE, "").strip(), TOKEN_VARIABLE)


def _check_token(token: str, source: str) -> str:
    if len(token) < MIN_CHARACTERS or not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(
            f"the token of {source} has {len(token)} characters; it must be {MIN_CHARACTERS} or more printable ASCII "
            'characters without spaces, such as python -c "import secrets; print(secrets.token_urlsafe(32))" prints.'
        )
    return token
