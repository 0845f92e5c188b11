"""Values of JSON that a task keeps beside its model, checked when they come back from a file."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

State: TypeAlias = Mapping[str, Any]
"""Values of JSON by name."""
NOTHING_LEARNED: State = MappingProxyType({})
Rule: TypeAlias = tuple[str, Callable[[Any], bool]]
"""What a value must be, in words, and whether one is."""


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _is_list(value: Any, is_item: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and all(map(is_item, value))


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


NUMBER: Rule = ("a finite number", _is_number)
POSITIVE: Rule = ("a finite number above 0", lambda value: _is_number(value) and value > 0)
WHOLE: Rule = ("a whole number, 0 or more", lambda value: type(value) is int and value >= 0)
COUNT: Rule = ("a whole number, 1 or more", lambda value: type(value) is int and value >= 1)
BOOL: Rule = ("true or false", lambda value: isinstance(value, bool))
TEXT: Rule = ("a text", _is_text)
OPTIONAL_TEXT: Rule = ("a text or null", lambda value: value is None or _is_text(value))
TEXTS: Rule = ("a list of different texts", lambda value: _is_list(value, _is_text) and len({*value}) == len(value))
PAIRS: Rule = (
    "a list of lists of 2 texts",
    lambda value: _is_list(value, lambda pair: _is_list(pair, lambda text: isinstance(text, str)) and len(pair) == 2),
)
MARKS: Rule = (
    "two marks, each of 1 or 2 texts, or none",
    lambda value: (
        _is_list(value, lambda mark: _is_list(mark, _is_text) and len(mark) in (1, 2)) and len(value) in (0, 2)
    ),
)
RANGE: Rule = (
    "two whole numbers, from and to",
    lambda value: _is_list(value, lambda bound: type(bound) is int) and len(value) == 2 and 1 <= value[0] <= value[1],
)
OBJECT: Rule = ("a JSON object", lambda value: isinstance(value, dict))


def check_state(values: State, rules: Mapping[str, Rule]) -> None:
    """Raise a ValueError unless just these values are there, and each keeps to its rule."""
    if missing := rules.keys() - values.keys():
        raise ValueError(f"it has no {min(missing)}")
    if extra := values.keys() - rules.keys():
        raise ValueError(f"it has {', '.join(sorted(extra))}; it must have {', '.join(sorted(rules)) or 'nothing'}")
    for name, (rule, holds) in rules.items():
        if not holds(values[name]):
            shown = repr(values[name])
            raise ValueError(f"{name} is {shown if len(shown) <= 60 else f'{shown[:60]}…'}; it must be {rule}")
