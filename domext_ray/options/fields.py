"""Kinds of fields, and the rules that several configurations share.

A field is *identity* (two runs that differ in it are different runs and may not share a directory) or *free* (it may
change when a run is resumed). Fields are identity unless declared with `free(...)`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import field
from typing import Any, Literal

from domext_ray.errors import OptionError


def free(default: Any) -> Any:
    """Declare a field that may differ between the attempts of one run."""
    return field(default=default, metadata={"free": True})


def whole(default_factory: Callable[[], Any], by: Literal["file", "any"] = "any") -> Any:
    """Declare a field whose content a file, or any later place, replaces whole instead of option by option."""
    return field(default_factory=default_factory, metadata={"whole": by})


def require(condition: bool, option: str, value: object, rule: str) -> None:
    """Raise OptionError, which names the option, its value and the rule, unless the condition holds."""
    if not condition:
        raise OptionError(option, value, rule)


def require_one_of(value: str | int, option: str, allowed: Sequence[str | int]) -> None:
    """Raise OptionError unless an option's value is one of those allowed."""
    require(value in allowed, option, value, "one of " + ", ".join(str(each) for each in allowed))


MANY = 2**20


"""More than any machine has of what a bound speaks of: a slip of the finger, told before memory is asked for it."""


def require_at_most(config: object, section: str, **limits: float) -> None:
    """Raise OptionError unless fields of a section are at most what is given by their names."""
    for name, limit in limits.items():
        require(getattr(config, name) <= limit, f"{section}{name}", getattr(config, name), f"at most {limit:,}")


MAX_NAME_BYTES = 200


"""Longest name of a folder that jobs make: file systems end at 255, and jobs add endings."""


def check_folder_name(option: str, name: str) -> None:
    """Raise OptionError unless a name can be a folder's: of a run, or of a method, which names its run."""
    require(name.strip() == name != "", option, name, "a name without spaces at its ends")
    require("/" not in name and name not in (".", ".."), option, name, "a plain folder name, without a path")
    require(name[0] not in ".-", option, name, "a name that begins with neither a dot nor a dash")
    require(name.isprintable(), option, name, "a name of one line, without control characters")
    is_short = len(name.encode("utf-8", "surrogateescape")) <= MAX_NAME_BYTES
    require(is_short, option, name, f"at most {MAX_NAME_BYTES} bytes long")


def check_place(option: str, path: str, what: str = "a folder", *, buckets: bool = False) -> None:
    """Raise OptionError unless a path is one of a file system: runs are made, locked and renamed there.

    Args:
        option: the option.
        path: its value; empty: left out.
        what: what it names.
        buckets: s3://BUCKET/PREFIX and gs://BUCKET/PREFIX will do, too.
    """
    if buckets and re.fullmatch("(s3|gs)://[^/]+/.+", path):
        return
    scheme, mark, rest = path.partition(":/")
    is_address = mark and re.fullmatch("[A-Za-z][A-Za-z0-9+.-]*", scheme)
    rule = f"{what} on a file system that all nodes have (mount the storage, and give the folder where it is mounted)"
    if is_address and scheme.lower() == "file":
        rule = f"{what} as a plain path, such as /{rest.lstrip('/')}"
    require(not is_address, option, path, rule)
    require("\0" not in path, option, path, "a path without NUL characters")
    parts = path.encode("utf-8", "surrogateescape").split(b"/")
    is_short = max(map(len, parts)) <= 255 and len(path) <= 4000
    require(is_short, option, path, "a path that file systems take: parts of at most 255 bytes")
    is_known = not path.startswith("~") or not os.path.expanduser(path).startswith("~")
    require(is_known, option, path, "a path that begins with ~ or with the name of a user of this machine")


UseGpu = bool | Literal["auto"]


"""A GPU for each worker, or not; auto until it is known how many GPUs there are."""


def check_use_gpu(value: UseGpu) -> None:
    """Raise ConfigError unless `--scale.use_gpu` is one of its three values."""
    require(value in (True, False, "auto"), "scale.use_gpu", value, "auto, true or false")


def is_gpu_used(value: UseGpu) -> bool:
    """Return `--scale.use_gpu` once it is known."""
    if value == "auto":
        raise ValueError("--scale.use_gpu auto is not settled yet")
    return value
