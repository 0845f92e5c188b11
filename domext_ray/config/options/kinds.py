"""The options of a class: their kinds, how text becomes their values, and what is said of a value that is none.

A class is one of `declare.option_group`; its fields are options, or classes with options of their own.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import inspect
import io
import math
import os
import tokenize
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import ValidationError

from domext_ray.config.options.yaml_text import parse_yaml
from domext_ray.errors import ConfigError, OptionError, hide_passwords

_NO_PASSWORD = "an address without a password, for options are kept in files (AWS_SECRET_ACCESS_KEY has a bucket's)"
_TRUTH = {**dict.fromkeys(("true", "yes", "on"), True), **dict.fromkeys(("false", "no", "off"), False)}


@dataclass(frozen=True)
class Option:
    """An option of a job; its help is the comment beside its field."""

    name: str  # such as train.max_steps
    kind: Any  # str, int, float, bool, dict, or Literal; of a list, its values' kind
    item: Any  # of a mapping, its values' kind; else the kind
    is_list: bool
    choices: tuple[str, ...]  # the words of a Literal; of others, what they may be beside their kind
    default: Any
    plain: Any  # its value where its section, which is taken whole, is given without it
    owner: type  # the class that has the field
    limits: Mapping[str, float]  # its bounds: ge, gt, le, lt
    is_free: bool  # this one and the next two: see `free`, `later` and `whole`
    is_later: bool
    whole: str
    tags: frozenset[str]  # what else its annotation says; see `Main` and `Found`

    @property
    def help(self) -> str:
        """The comment beside its field; empty if there is none."""
        leaf = self.name.rpartition(".")[2]
        return next((found for owner in self.owner.__mro__ if (found := read_comments(owner).get(leaf))), "")

    @property
    def words(self) -> tuple[str, ...]:
        """The words that a value, or one of a list, may be."""
        return (*self.choices, "true", "false") if self.kind is bool else self.choices


@dataclass(frozen=True)
class Section:
    """A group of options within another; see `whole`."""

    name: str
    owner: type
    whole: str


@functools.cache
def read_comments(owner: type) -> Mapping[str, str]:
    """Return the comments beside the fields of a class, or above them where they would make long lines."""
    if owner.__module__ in ("builtins", "typing"):
        return {}
    source = inspect.getsource(owner)
    lines = source.splitlines()
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {token.start[0]: token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT}
    found = {}
    for node in typing.cast(ast.ClassDef, ast.parse(source).body[0]).body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            first = node.lineno
            while node.lineno not in comments and lines[first - 2].lstrip().startswith("#"):
                first -= 1
            above = " ".join(comments[number] for number in range(first, node.lineno))
            found[node.target.id] = comments.get(node.lineno, above)
    return found


def list_options(config_class: type) -> Mapping[str, Option]:
    """Return a class's options by name, in the order of its fields."""
    return _list(config_class)[0]


def list_sections(config_class: type) -> Mapping[str, Section]:
    """Return a class's sections by name, in the order of its fields, a section before those within it."""
    return _list(config_class)[1]


@functools.cache
def list_gone(config_class: type) -> Mapping[str, str]:
    """Return the options that an earlier version had, by name, and what to do instead: `gone` of the class of each."""
    owners = {"": config_class, **{f"{part.name}.": part.owner for part in list_sections(config_class).values()}}
    gone = {start: getattr(owner, "gone", {}) for start, owner in owners.items()}
    return {f"{start}{name}": instead for start, names in gone.items() for name, instead in names.items()}


@functools.cache
def _list(config_class: type) -> tuple[Mapping[str, Option], Mapping[str, Section]]:
    found = list(_walk(config_class))
    options = {option.name: option for option in found if isinstance(option, Option)}
    return options, {section.name: section for section in found if isinstance(section, Section)}


def _walk(config_class: Any, instance: Any = None, prefix: str = "") -> Iterator[Option | Section]:
    for name, field in config_class.__pydantic_fields__.items():
        made, said = field.get_default(call_default_factory=True), field.json_schema_extra or {}
        default = getattr(instance, name, made)
        if dataclasses.is_dataclass(field.annotation):
            yield Section(f"{prefix}{name}", typing.cast(type, field.annotation), said.get("whole", ""))
            yield from _walk(field.annotation, default, f"{prefix}{name}.")
        else:
            limits = {key: getattr(bound, key) for bound in field.metadata for key in _BOUNDS if hasattr(bound, key)}
            kind, item, is_list, choices = _read_kind(field.annotation)
            marks = (
                said.get("free", False),
                said.get("later", False),
                said.get("whole", ""),
                frozenset(t for t in field.metadata if type(t) is str),
            )
            yield Option(f"{prefix}{name}", kind, item, is_list, choices, default, made, config_class, limits, *marks)


def _read_kind(annotation: Any) -> tuple[Any, Any, bool, tuple[str, ...]]:
    """Return an annotation as an option's kind, its values' kind, whether it is a list, and its choices."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _read_kind(parts[0])
    if origin is Literal:
        return Literal, Literal, False, parts
    if origin is tuple:
        kind, _, _, choices = _read_kind(parts[0])
        return kind, kind, True, choices
    if origin is dict:
        return dict, _read_kind(parts[1])[0], False, ()
    if parts:  # such as bool | Literal["auto"], or int | str, which has rules of its own
        words = next((get_args(part) for part in parts if get_origin(part) is Literal), ())
        kind, item, is_list, _ = _read_kind(next(part for part in parts if get_origin(part) is not Literal))
        return kind, item, is_list, words
    return annotation, annotation, False, ()


def suggest(name: str, known: Iterable[str]) -> list[str]:
    """Return the names that an unknown one was probably meant to be, at most three.

    The last part counts most: `lr` and `train.lr` are probably optim.lr.
    """
    known, name = list(known), name.lower().replace("-", "_")
    if name in known:
        return [name]
    leaf = name.rpartition(".")[2]
    same = [candidate for candidate in known if candidate.rpartition(".")[2] == leaf]
    if same:
        return sorted(same, key=len)[:3]
    begun = [candidate for candidate in known if len(name) > 2 and candidate.startswith(name)]
    if begun:
        return begun[:3]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
    if near:
        return near
    leaves = {candidate.rpartition(".")[2]: candidate for candidate in reversed(known)}
    return [leaves[match] for match in difflib.get_close_matches(leaf, leaves, n=2, cutoff=0.75)]


def to_number(value: Any) -> Any:
    """Return the finite number that a value is or says, as a float; what is none as it is."""
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        return value
    return number if math.isfinite(number) else value


def convert(option: Option, value: Any) -> Any:
    """Turn what was given into the option's kind where that can be; pydantic refuses the rest.

    A text of several lines or with a password, a number that is too long, a list within itself and a name that stands
    twice are refused here.
    """
    try:
        value = _to_plain(value)
        for text in _list_texts(value):
            shown = hide_passwords(text)
            _demand(shown == text, option.name, shown, _NO_PASSWORD)
    except RecursionError:
        raise OptionError(option.name, value, "plain values, with no list within itself") from None
    if option.is_list:
        words = () if option.kind is Literal else option.choices  # beside a list, such as all or none
        if isinstance(value, str) and value not in words:
            listed = value.lstrip().startswith("[")
            value = parse_yaml(value, f"--{option.name}").as_written if listed else value.split(",") if value else []
        values = value if isinstance(value, list | tuple) else [value]
        return value if value in words else tuple(_convert_scalar(option, item) for item in values)
    if option.kind is dict:
        if isinstance(value, str) and "=" in value and not value.lstrip().startswith("{"):
            pairs = [pair.partition("=") for pair in value.split(",")]
            made = {name.strip(): number for name, _, number in pairs}
            _demand(len(made) == len(pairs), option.name, value, "different names, each one once")
            value = made
        elif isinstance(value, str):
            value = parse_yaml(value, f"--{option.name}").value
        is_scalar = isinstance(value, dict) and option.item in (int, float)
        return {name: _convert_scalar(option, item) for name, item in value.items()} if is_scalar else value
    if option.kind is str and isinstance(value, list):  # paths, which flags have with commas between them
        value = ",".join(map(str, value))
    return _convert_scalar(option, value)


def _demand(condition: bool, option: str, value: object, rule: str) -> None:
    if not condition:
        raise OptionError(option, value, rule)


def _list_texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for item in (*value, *value.values()) if isinstance(value, dict) else value:
            yield from _list_texts(item)


def _to_plain(value: Any) -> Any:
    """A number or an array of NumPy or torch becomes Python's own, and a path a text."""
    if isinstance(value, list | tuple):
        return [_to_plain(item) for item in value]
    is_array = hasattr(value, "tolist")
    return os.fspath(value) if isinstance(value, os.PathLike) else value.tolist() if is_array else value


def _convert_scalar(option: Option, value: Any) -> Any:
    if not isinstance(value, str):
        if option.item is int and isinstance(value, float) and value.is_integer():
            value = int(value)
        _demand_short(option, value, value)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return str(value) if option.item is str and is_number else value
    if option.item is bool:
        return _TRUTH.get(value.lower(), value)
    if option.item is str:
        value = value.strip() if option.is_list else value
        rule = "a text of one line, without tabs and other control characters"
        _demand(not any(ord(char) < 32 or ord(char) == 127 for char in value), option.name, value, rule)
        is_text = not any(0xD800 <= ord(char) < 0xE000 for char in value)  # how Python reads bytes that are none
        _demand(is_text, option.name, value, "a text in UTF-8")
        return value
    if option.item is not int:
        return to_number(value) if option.item is float else value
    number = to_number(value)
    if not isinstance(number, float) or not number.is_integer():
        return value
    _demand_short(option, number, value)
    return int(Decimal(value.strip()))  # 1e5 is 100000


def _demand_short(option: Option, number: Any, value: Any) -> None:
    is_long = option.item is int and isinstance(number, int | float) and abs(number) >= 2**63
    _demand(not is_long, option.name, value, "a whole number below 2^63")


_KIND_RULES = {int: "a whole number", float: "a number", bool: "true or false", str: 'a text ("" is an empty one)'}
_BOUNDS = ("ge", "gt", "le", "lt")


def explain(owner: Any, error: ValidationError) -> ConfigError:
    """Make the sentence about the first mistake that pydantic found in a group."""
    found = error.errors(include_url=False)[0]
    cause = found.get("ctx", {}).get("error")
    if isinstance(cause, ConfigError):
        return cause
    name = str(found["loc"][0]) if found["loc"] else ""
    if name not in list_options(owner):
        raise TypeError(f"{owner.__name__}: {found['msg']} ({name})") from error  # the program's mistake, not a user's
    option, value = list_options(owner)[name], found["input"]
    kind = option.kind
    if kind is dict and len(found["loc"]) > 1:
        name, kind = f"{name}.{found['loc'][1]}", option.item
    broken = {key: limit for key, limit in found.get("ctx", {}).items() if key in _BOUNDS}
    if isinstance(cause, ValueError):
        rule = str(cause)
    elif broken:
        limits = option.limits if broken.items() <= option.limits.items() else broken
        rule = _describe_limits(limits, broken, is_whole=kind is int)
    else:
        rule = _describe_kind(option, kind, value)
    return OptionError(name, value, rule)


def _describe_kind(option: Option, kind: Any, value: Any) -> str:
    if option.is_list and value == ():
        return "one value, or several with commas between them"
    if kind is float and str(value).strip(" +-").lower() in ("nan", "inf", "infinity"):
        return "a finite number"
    if kind is Literal:
        return f"one of {', '.join(option.choices)}"
    if kind is dict:
        return "a mapping, such as '{name: {option: value}}'"
    return ", ".join([*option.choices, _KIND_RULES.get(kind, "under a name that is a text")])


def _describe_limits(limits: Mapping[str, float], broken: Mapping[str, float], *, is_whole: bool) -> str:
    """Say a range; of one that is wide, the end that was passed."""
    shown = {key: f"{limit:,}" if isinstance(limit, int) else f"{limit:,g}" for key, limit in limits.items()}
    if len(limits) > 1 and max(limits.values()) >= 100_000:
        shown = {key: shown[key] for key in broken}
    lower, upper = shown.get("ge", shown.get("gt")), shown.get("le", shown.get("lt"))
    if upper is None and is_whole and "gt" in shown:
        return f"{limits['gt'] + 1:,} or more"  # as pydantic has PositiveInt
    if upper is None:
        return f"{lower} or more" if "ge" in shown else f"above {lower}"
    if lower is None:
        return f"at most {upper}" if "le" in shown else f"below {upper}"
    if "ge" in shown:
        return f"from {lower} to {'' if 'le' in shown else 'below '}{upper}"
    return f"above {lower} and at most {upper}" if "le" in shown else f"between {lower} and {upper}"
