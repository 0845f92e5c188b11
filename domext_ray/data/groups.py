"""Whose a row is: a person, a household, a site, which must not be on both sides of a split."""

from __future__ import annotations

import hashlib
import unicodedata
from typing import Any

from domext_ray.errors import CorpusError


def hash_group(name: Any, place: object, field: object, option: str) -> bytes:
    """Return a hash, 8 bytes long, of a group's name: a text or a whole number, however a file writes it.

    Args:
        name: what the row has; None: nothing.
        place: of the row, for the message, which never quotes the name.
        field: what names it.
        option: where that was given.

    Raises:
        CorpusError: the row has none.
    """
    if isinstance(name, float) and name.is_integer():
        name = int(name)
    is_name = isinstance(name, str | int) and not isinstance(name, bool)
    text = " ".join(unicodedata.normalize("NFC", str(name)).split()) if is_name else ""
    if not text:
        has = "has no" if name is None or isinstance(name, str) else "has neither text nor a whole number as"
        raise CorpusError(
            f"{place} {has} {field!r}, and {option} needs it in every row, so that no group is on both sides of a "
            "split; fill it in, or leave the row out."
        )
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8, key=b"group").digest()
