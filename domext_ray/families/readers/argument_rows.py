"""Rows of relations whose arguments have places beside the text -> rows with these as `head` and `tail`.

Enters: rows as TACRED, FewRel and OpenNRE have them: words, or a text, and where each argument is. Leaves: the same
rows with a text, and for each argument its first character, the end behind its last one, and its name if it has one.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from domext_ray.errors import CorpusError
from domext_ray.families.readers.issues import Record

_WORDS = ("token", "tokens", "words")
_TACRED = ("subj_start", "subj_end", "obj_start", "obj_end")
_RULE = (
    "arguments are subj_start, subj_end, obj_start and obj_end, places of words, or h and t, each an object with its "
    "pos, [start, end], or [name, id, [[places of words]]]"
)


def place_arguments(row: Record) -> Record:
    """Return a row with `text`, `head` and `tail`; one of another layout as it is."""
    values: Mapping[Any, Any] = row.values
    is_tacred = all(name in values for name in _TACRED)
    if not is_tacred and not {"h", "t"} <= values.keys():
        return row
    words = next((values[name] for name in _WORDS if isinstance(values.get(name), list)), None)
    try:
        if is_tacred:
            first, last, other_first, other_last = (values[name] for name in _TACRED)
            arguments = [("", first, last + 1), ("", other_first, other_last + 1)]
        else:
            arguments = [_read_argument(values[name]) for name in ("h", "t")]
        if words is not None:
            if any(start < 0 for _, start, _ in arguments):
                raise ValueError
            ends = [0, *itertools.accumulate(len(word) + 1 for word in words)]
            values = {**values, "text": " ".join(words)}
            arguments = [(name, ends[start], ends[end] - 1) for name, start, end in arguments]
    except (KeyError, IndexError, TypeError, ValueError):
        raise CorpusError(f"{row.source} has another layout: {_RULE}.") from None
    head, tail = ({"name": name, "start": start, "end": end} for name, start, end in arguments)
    return replace(row, values={**values, "head": head, "tail": tail})


def _read_argument(value: Any) -> tuple[str, int, int]:
    """Return an argument's name, and where it is first; the end is exclusive."""
    if isinstance(value, Mapping):
        start, end = value["pos"]
        return str(value.get("name") or ""), int(start), int(end)
    name, _, places = value
    return str(name), int(places[0][0]), int(places[0][-1]) + 1
