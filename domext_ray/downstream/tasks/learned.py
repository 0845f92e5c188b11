"""What a task has found out from its labelled set: a few values of JSON, checked when they come back from a file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeAlias

Learned: TypeAlias = Mapping[str, Any]
"""Values of JSON by name."""


def check_learned(learned: Learned, *names: str) -> None:
    """Raise a ValueError unless these values are there, and no others."""
    if set(learned) != set(names):
        found, expected = (", ".join(sorted(each)) or "nothing" for each in (learned, names))
        raise ValueError(f"it has {found}; it must have {expected}")


def read_number(values: Learned, name: str, least: float = -math.inf) -> float:
    """Return a finite number; raise a ValueError unless it is one, `least` or more."""
    value = values.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < least:
        rule = "a finite number" if least == -math.inf else f"a finite number, {least:g} or more"
        raise _complain(name, value, rule)
    return value


def read_whole(values: Learned, name: str, least: int = 0) -> int:
    """Return a whole number; raise a ValueError unless it is one, `least` or more."""
    value = values.get(name)
    if type(value) is not int or value < least:
        raise _complain(name, value, f"a whole number, {least} or more")
    return value


def read_bool(values: Learned, name: str) -> bool:
    """Return a truth value; raise a ValueError unless it is one."""
    value = values.get(name)
    if not isinstance(value, bool):
        raise _complain(name, value, "true or false")
    return value


def read_text(values: Learned, name: str) -> str:
    """Return a text; raise a ValueError unless it is one that is not empty."""
    value = values.get(name)
    if not isinstance(value, str) or not value:
        raise _complain(name, value, "a text")
    return value


def read_optional_text(values: Learned, name: str) -> str | None:
    """Return a text or None; raise a ValueError unless it is one."""
    return None if values.get(name) is None else read_text(values, name)


def read_texts(values: Learned, name: str) -> tuple[str, ...]:
    """Return different texts; raise a ValueError unless they are a list of these."""
    value = values.get(name)
    is_list = isinstance(value, list) and all(isinstance(each, str) and each for each in value)
    if not is_list or len(set(value or ())) != len(value or ()):
        raise _complain(name, value, "a list of different texts")
    return tuple(value or ())


def read_lists_of_texts(values: Learned, name: str, lengths: tuple[int, ...]) -> tuple[tuple[str, ...], ...]:
    """Return lists of texts, each of one of some lengths; raise a ValueError unless it is a list of these."""
    value = values.get(name)
    is_list = isinstance(value, list) and all(
        isinstance(each, list) and len(each) in lengths and all(isinstance(text, str) for text in each)
        for each in value
    )
    if not is_list:
        raise _complain(name, value, f"a list of lists of {' or '.join(map(str, lengths))} texts")
    return tuple(map(tuple, value or ()))


def _complain(name: str, value: object, rule: str) -> ValueError:
    shown = repr(value)
    return ValueError(f"{name} is {shown if len(shown) <= 60 else f'{shown[:60]}…'}; it must be {rule}")
