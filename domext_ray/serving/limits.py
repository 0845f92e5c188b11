"""What a request must show and may not exceed: the token, the rate of its client, the size of its body.

The token itself is kept nowhere: replicas and logs have its hash alone.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import os
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

from domext_ray.errors import ConfigError, name_file

TOKEN_VARIABLE = "DOMEXT_SERVE_TOKEN"
LEAST_CHARACTERS = 16
BURST_SECONDS = 2.0
MOST_CLIENTS = 10_000


class RateLimit:
    """A bucket of tokens per client, which fills at a rate and holds what two seconds bring.

    Args:
        rate: requests per second; 0: any number.
        clock: seconds that only grow.
    """

    def __init__(self, rate: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate, self._clock = rate, clock
        self._room = max(1.0, BURST_SECONDS * rate)
        self._clients: OrderedDict[str, tuple[float, float]] = OrderedDict()  # what is left, and when that was

    def take(self, client: str) -> float:
        """Count a request; return 0.0, or the seconds until the client may send another one."""
        if not self._rate:
            return 0.0
        now = self._clock()
        left, then = self._clients.pop(client, (self._room, now))
        left = min(self._room, left + (now - then) * self._rate)
        wait = 0.0 if left >= 1.0 else (1.0 - left) / self._rate
        self._clients[client] = (left if wait else left - 1.0, now)
        if len(self._clients) > MOST_CLIENTS:
            self._clients.popitem(last=False)
        return wait


def hash_token(token: str) -> str:
    """Return what replicas know of a token, hexadecimal."""
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).hexdigest()


def is_token(header: str, token_sha256: str) -> bool:
    """Whether an Authorization header shows the token; the comparison takes the same time whatever it shows."""
    scheme, _, given = header.partition(" ")
    return hmac.compare_digest(hash_token(given.strip()), token_sha256) and scheme.lower() == "bearer"


def find_token(token_file: str, folder: Path) -> tuple[str, str]:
    """Return the hash of the token, and where a user finds the token itself.

    Args:
        token_file: the option; empty: the environment's, or a new one in a file that nobody else can read.
        folder: where a new one's file is put.

    Raises:
        ConfigError: the file cannot be read, or the token is short.
    """
    if token_file:
        path = Path(token_file).expanduser()
        try:
            token = path.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is no UTF-8"
            raise ConfigError(f"--token_file names {token_file!r}, which cannot be read ({reason}).") from error
        return hash_token(_check_token(token, "--token_file")), str(path)
    if os.environ.get(TOKEN_VARIABLE, "").strip():
        return find_environment_token(), f"{TOKEN_VARIABLE} of this environment"
    token = secrets.token_urlsafe(32)
    path = folder / "serve-token"
    with name_file(path):
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(f"{token}\n")
    return hash_token(token), str(path)


def find_environment_token() -> str:
    """Return the hash of the token that DOMEXT_SERVE_TOKEN has.

    Raises:
        ConfigError: there is none, or it is short.
    """
    return hash_token(_check_token(os.environ.get(TOKEN_VARIABLE, "").strip(), TOKEN_VARIABLE))


def _check_token(token: str, source: str) -> str:
    if len(token) < LEAST_CHARACTERS or not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(
            f"the token of {source} has {len(token)} characters; it must be {LEAST_CHARACTERS} or more printable ASCII "
            'characters without spaces, such as python -c "import secrets; print(secrets.token_urlsafe(32))" prints.'
        )
    return token


def count_retry_seconds(wait: float) -> str:
    """Return what a Retry-After header says: whole seconds, 1 or more."""
    return str(max(1, math.ceil(wait)))
