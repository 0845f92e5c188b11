"""Paths of this machine stay out of what is shared: cards and reports name a file or folder by its last part."""

from __future__ import annotations

import re
from typing import Any

_PLACE = re.compile(r"(?<![^\s,=])(?:[~/]|(?!hf:)\w+://)[^,\n]*?([^/,\n]+)/*(?=\s*(?:,|$))")


def hide_places(value: Any) -> Any:
    """Return text, or JSON, with every absolute path and address replaced by its last part.

    Hub ids, relative paths and other text stay as they are. Lists of paths are those of options: `/a/b.txt, NAME=~/c`.
    """
    if isinstance(value, str):
        return _PLACE.sub(r"\1", value)
    if isinstance(value, dict):
        return {name: hide_places(item) for name, item in value.items()}
    return [hide_places(item) for item in value] if isinstance(value, (list, tuple)) else value
