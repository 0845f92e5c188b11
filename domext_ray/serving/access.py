"""The token that requests show. It is kept nowhere: replicas and logs have its hash alone."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from pathlib import Path

from domext_ray.errors import ConfigError, name_file

TOKEN_VARIABLE = "DOMEXT_SERVE_TOKEN"
MIN_CHARACTERS = 16


def hash_token(token: str) -> str:
    """Return what replicas know of a token, hexadecimal."""
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).hexdigest()


def is_token(header: str, token_sha256: str) -> bool:
    """Whether an Authorization header shows the token; the comparison takes the same time whatever it shows."""
    scheme, _, given = header.partition(" ")
    return hmac.compare_digest(hash_token(given.strip()), token_sha256) and scheme.lower() == "bearer"


def find_token(token_file: str, new_file: Path) -> tuple[str, str]:
    """Return the hash of the token, and where a user finds the token itself.

    Without a `token_file` it is the environment's, or else a new one in `new_file`, which nobody else can read.
    """
    if token_file:
        path = Path(token_file)
        try:
            token = path.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is no UTF-8"
            raise ConfigError(f"--token_file names {token_file!r}, which cannot be read ({reason}).") from error
        return hash_token(_check_token(token, "--token_file")), str(path)
    if os.environ.get(TOKEN_VARIABLE, "").strip():
        return find_environment_token(), f"{TOKEN_VARIABLE} of this environment"
    token = secrets.token_urlsafe(32)
    with name_file(new_file):
        new_file.parent.mkdir(mode=0o700, exist_ok=True)
        new_file.unlink(missing_ok=True)
        descriptor = os.open(new_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(f"{token}\n")
    return hash_token(token), str(new_file)


def find_environment_token() -> str:
    """Return the hash of the token that DOMEXT_SERVE_TOKEN has; none, or a short one, is a ConfigError."""
    return hash_token(_check_token(os.environ.get(TOKEN_VARIABLE, "").strip(), TOKEN_VARIABLE))


def _check_token(token: str, source: str) -> str:
    if len(token) < MIN_CHARACTERS or not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(
            f"the token of {source} has {len(token)} characters; it must be {MIN_CHARACTERS} or more printable ASCII "
            'characters without spaces, such as python -c "import secrets; print(secrets.token_urlsafe(32))" prints.'
        )
    return token
