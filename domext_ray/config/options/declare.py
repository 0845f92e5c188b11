"""A configuration is a class of `option_group`, whose fields are options or groups of options.

Field `max_steps` of the group `train` is the option train.max_steps; the comment beside it is its help. pydantic holds
values to their types and ranges, and a mistake is one sentence: the value and the rule. An option that a released
version had and this one has not is in the class's `gone`, with what to do instead.

Options are *identity* (two runs that differ in one are different runs and may not share a directory) or *free* (they
may change when a run goes on).
"""

from __future__ import annotations

import functools
import operator
import os
import re
import typing
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, TypeVar

import pydantic
from pydantic import AfterValidator, ConfigDict, Field, PlainValidator, ValidationError
from typing_extensions import dataclass_transform

from domext_ray.config.options.kinds import convert, explain, list_options
from domext_ray.errors import OptionError
from domext_ray.storage import MOST_KEY_BYTES, ROOM_BYTES, find_fault, is_address

ConfigT = TypeVar("ConfigT")
T = TypeVar("T")
MAIN, FOUND = "main", "found"
READ, WRITTEN, TEXTS, MODELS, DESCRIBED, OPTIONS = "read", "written", "texts", "models", "described", "options"
Main = Annotated[T, MAIN]
"""An option on the first screen of help."""
Found = Annotated[T, FOUND]
"""A place, or several, that must be there whenever a job starts; of a base or a model only if it is a path."""
Read = Annotated[T, READ]
"""A place, or several, that a job reads (as it does those of `Found`); of some also a name of the hub."""
Written = Annotated[T, WRITTEN]
"""A place that a job writes to; what is `Read`, too, it changes."""
Texts = Annotated[T, TEXTS]
"""Files, globs and folders with commas between them, or a name of text."""
Models = Annotated[T, MODELS]
"""Models, each [NAME=]MODEL."""
Described = Annotated[T, DESCRIBED]
"""A name of a task or a set, or the YAML file that describes one; or several."""
Options = Annotated[T, OPTIONS]
"""A mapping whose keys, somewhere in it, are options of a training job."""
MANY = 2**20
"""More than any machine has of what a bound speaks of: a slip of the finger, told before memory is asked for it."""


def free(default: Any) -> Any:
    """Declare an option that may differ between the attempts of one run; of a mapping, `default` is dict."""
    return Field(**{"default_factory" if default is dict else "default": default}, json_schema_extra={"free": True})


def later(default: Any) -> Any:
    """Declare an option that came after runs were released: at its default they are runs of the same identity."""
    return Field(default=default, json_schema_extra={"later": True})


def whole(default: Callable[[], Any], by: Literal["file", "any"] = "any") -> Any:
    """Declare an option whose content a file, or any later place, replaces whole instead of value by value."""
    return Field(default_factory=default, json_schema_extra={"whole": by})


@dataclass_transform(frozen_default=True)
def option_group(owner: type[ConfigT]) -> type[ConfigT]:
    """Make a class a frozen dataclass whose values are held to their rules, by one OptionError for the first mistake.

    Its `__post_init__` checks rules over several options with `require`, which names them as this class does.
    """
    settings = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    made = pydantic.dataclasses.dataclass(frozen=True, config=settings)(owner)
    init = made.__init__

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **values: Any) -> None:
        known = list_options(made)
        values = {name: convert(known[name], value) if name in known else value for name, value in values.items()}
        try:
            init(self, *args, **values)
        except ValidationError as error:
            raise explain(made, error) from None

    made.__init__ = checked  # type: ignore[method-assign]
    return typing.cast("type[ConfigT]", made)


def require(condition: bool, option: str, value: object, rule: str) -> None:
    """Raise OptionError, which names the option, its value and the rule, unless the condition holds."""
    if not condition:
        raise OptionError(option, value, rule)


def _demand(condition: object, rule: str) -> None:
    """Raise ValueError, whose text is the rule, unless the condition holds."""
    if not condition:
        raise ValueError(rule)


def filled(what: str) -> Any:
    """Annotate a text that must not be empty; `what` ends the sentence about one that is."""

    def check(text: str) -> str:
        _demand(text.strip(), what)
        return text

    return AfterValidator(check)


def place(what: str = "a folder", *, buckets: bool = False) -> Any:
    """Annotate a text as a path of a file system, which names `what`; with `buckets` s3:// and gs:// will do, too."""
    return AfterValidator(lambda path: check_place(path, what, buckets=buckets))


def require_disk(option: str, path: str) -> None:
    """Raise OptionError where a folder that may be a bucket's is one, and the job's files do not go there yet."""
    try:
        check_place(path)
    except ValueError as error:
        raise OptionError(option, path, str(error)) from None


def check_place(path: str, what: str = "a folder", *, buckets: bool = False) -> str:
    """Return a path, or an address without a slash at its end; see `place`."""
    if buckets and is_address(path):
        fault = find_fault(path, MOST_KEY_BYTES - ROOM_BYTES)
        _demand(not fault, fault)
        path = path.removesuffix("/")
        _demand(path.count("/") > 2, f"{path}/FOLDER, for a job takes a folder of a bucket, never all of it")
        return path
    scheme, mark, rest = path.partition(":/")
    is_other = mark and re.fullmatch("[A-Za-z][A-Za-z0-9+.-]*", scheme)
    rule = f"{what} on a file system that all nodes have (mount the storage, and give the folder where it is mounted)"
    rule += ", or s3://BUCKET/FOLDER" if buckets else ""
    if is_other and scheme.lower() == "file":
        rule = f"{what} as a plain path, such as /{rest.lstrip('/')}"
    _demand(not is_other, rule)
    _demand("\0" not in path, "a path without NUL characters")
    parts = path.encode("utf-8", "surrogateescape").split(b"/")
    is_short = max(map(len, parts)) <= 255 and len(path) <= 4000
    _demand(is_short, "a path that file systems take: parts of at most 255 bytes")
    is_known = not path.startswith("~") or not os.path.expanduser(path).startswith("~")
    _demand(is_known, "a path that begins with ~ or with the name of a user of this machine")
    return path


def check_folder_name(name: str) -> str:
    """Return a name that can be a folder's: of a run, or of a method, which names its run. Empty: none is given."""
    _demand(name.strip() == name, "a name without spaces at its ends")
    _demand("/" not in name and name not in (".", ".."), "a plain folder name, without a path")
    _demand(name[:1] not in tuple(".-"), "a name that begins with neither a dot nor a dash")
    _demand(name.isprintable(), "a name of one line, without control characters")
    is_short = len(name.encode("utf-8", "surrogateescape")) <= 200  # file systems end at 255, and jobs add endings
    _demand(is_short, "at most 200 bytes long")
    return name


def check_different(values: Sequence[Any]) -> Sequence[Any]:
    """Return values that are none of them empty or there twice."""
    _demand(len(set(values)) == len(values) and "" not in values, "different ones, with one comma between them")
    return values


def check_identifier(name: str) -> str:
    """Return a name that can be one of the program's own."""
    _demand(name.isidentifier(), "a name of letters, digits and underscores")
    return name


def read_layer_range(text: str) -> tuple[int, int]:
    """Return the first and the last of some layers, such as 6-11 or 6."""
    first, _, last = text.partition("-")
    last = last or first
    is_range = first.strip().isdecimal() and last.strip().isdecimal() and int(first) <= int(last)
    _demand(is_range, "a layer, or the first and the last one, such as 6-11")
    return int(first), int(last)


_TIME, _SECONDS = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)([smh])"), {"s": 1.0, "m": 60.0, "h": 3600.0}
_WORKERS = re.compile(r"\d{1,6}-\d{1,6}")
_A_TIME = "a time, such as 90s, 15m or 2h"


def read_seconds(text: str) -> float:
    """Return the seconds of a time, such as 90s, 15m or 2h."""
    found = _TIME.fullmatch(text)
    if found is None:
        raise ValueError(_A_TIME)
    return float(found[1]) * _SECONDS[found[2]]


def check_time(text: str) -> str:
    """Return a text that `read_seconds` reads."""
    read_seconds(text)
    return text


def check_cadence(value: Any) -> int | str:
    """Return a number of steps, or a time that `read_seconds` reads."""
    is_time = isinstance(value, str) and _TIME.fullmatch(value) and read_seconds(value) > 0
    _demand(is_time or (type(value) is int and value > 0), f"steps, 1 or more, or {_A_TIME}")
    return typing.cast("int | str", value)


def read_workers(value: int | str) -> tuple[int, int]:
    """Return the smallest and the largest number of `Workers`."""
    least, _, most = str(value).partition("-")
    return int(least), int(most or least)


def check_workers(value: Any) -> int | str:
    """Return a number, or a range of numbers that `read_workers` reads."""
    is_range = isinstance(value, str) and _WORKERS.fullmatch(value) and int(value.split("-")[0]) >= 1
    is_range = is_range and operator.lt(*read_workers(value))
    _demand(is_range or (type(value) is int and value > 0), "a number, 1 or more, or a range of them, such as 1-8")
    return typing.cast("int | str", value)


def check_layer_range(text: str) -> str:
    """Return a text that is empty, or that `read_layer_range` reads."""
    _ = text and read_layer_range(text)
    return text


FolderName = Annotated[str, AfterValidator(check_folder_name)]
DIFFERENT = AfterValidator(check_different)
SOME = Field(min_length=1)
Count = Annotated[int, Field(ge=1, le=16 * MANY)]
CountOrZero = Annotated[int, Field(ge=0, le=16 * MANY)]
Length = Annotated[int, Field(ge=8, le=MANY)]
"""Tokens of a row."""
Share = Annotated[float, Field(gt=0.0, lt=1.0)]
ShareOrZero = Annotated[float, Field(ge=0.0, lt=1.0)]
Ratio = Annotated[float, Field(ge=0.0, le=1.0)]
Rate = Annotated[float, Field(gt=0.0, le=1.0)]
"""A learning rate: above 1 somebody has left out a minus (1e4)."""
Scale = Annotated[float, Field(ge=0.0, le=10.0)]
"""What an adapter adds is multiplied by it."""
RunFolder = Read[Annotated[str, place("a run's directory")]]
FilePlace = Annotated[str, place("a file")]
ModelPlace = Found[Annotated[str, place("a hub id, or a folder")]]
LayerRange = Annotated[str, AfterValidator(check_layer_range)]
Time = Annotated[str, AfterValidator(check_time)]
"""How long something may take, such as 10m."""
Cadence = Annotated[int | str, PlainValidator(check_cadence)]
"""How often something is done: every so many steps, such as 200, or after each such time, as 15m."""
Workers = Annotated[int | str, PlainValidator(check_workers)]
"""A number of processes, or a range of numbers, such as 1-8."""
Identifier = Annotated[str, AfterValidator(check_identifier)]
