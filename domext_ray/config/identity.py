"""A configuration as plain values: what it is stored as, and what makes two runs the same run."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import yaml

from domext_ray.options.option_values import build, list_settings

ConfigT = TypeVar("ConfigT")


def to_dict(config: Any) -> dict[str, Any]:
    """Return a configuration as nested dictionaries of plain values (the YAML's layout)."""
    return dataclasses.asdict(config)


def from_dict(config_class: type[ConfigT], values: Mapping[str, Any]) -> ConfigT:
    """Build a configuration from nested dictionaries, as `to_dict` made them.

    Raises:
        ConfigError: an unknown option, or a value outside its rule.
    """
    return build(config_class, [list_settings(config_class, values)])


def identity_of(config: Any) -> dict[str, Any]:
    """Return the identity fields as nested dictionaries; equal identities may share a run directory."""
    return _pick(config, lambda field, value: True)


def hashed_options(config: Any) -> dict[str, Any]:
    """Return the identity fields as they go into a hash: `added` ones only where they are not as it was before them."""
    return _pick(config, lambda field, value: field.metadata.get("before", dataclasses.MISSING) != value)


def _pick(config: Any, wanted: Callable[[dataclasses.Field[Any], Any], bool]) -> dict[str, Any]:
    """The identity fields that are wanted, as nested dictionaries, empty ones left out."""
    kept: dict[str, Any] = {}
    for each in dataclasses.fields(config):
        value = getattr(config, each.name)
        if dataclasses.is_dataclass(value):
            kept[each.name] = _pick(value, wanted)
        elif not each.metadata.get("free") and wanted(each, value):
            kept[each.name] = value
    return {name: value for name, value in kept.items() if value != {}}


def defaults_before(config_class: type, *, identity_only: bool, made: Any = None) -> dict[str, Any]:
    """Return what a stored run means by the fields that it does not name, as nested dictionaries.

    A field that was added after a run was made stands for its default, or for what `added` says that runs did before.

    Args:
        config_class: the configuration's class.
        identity_only: leave the free fields out.
        made: the defaults, where they are not those of the class.
    """
    hints = typing.get_type_hints(config_class)
    values: dict[str, Any] = {}
    for each in dataclasses.fields(config_class):
        default = getattr(made, each.name) if made is not None else each.default
        if default is dataclasses.MISSING and each.default_factory is not dataclasses.MISSING:
            default = each.default_factory()
        if dataclasses.is_dataclass(hints[each.name]):
            nested = None if default is dataclasses.MISSING else default
            values[each.name] = defaults_before(hints[each.name], identity_only=identity_only, made=nested)
        elif not (identity_only and each.metadata.get("free")):
            values[each.name] = each.metadata.get("before", default)
    return {name: value for name, value in values.items() if value is not dataclasses.MISSING and value != {}}


def describe_difference(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[str]:
    """List the options in which two identities differ, as `option: old -> new`."""
    lines: list[str] = []
    for name in sorted(old.keys() | new.keys()):
        before, after = old.get(name), new.get(name)
        if isinstance(before, dict) and isinstance(after, dict):
            lines += describe_difference(before, after, f"{prefix}{name}.")
        elif before != after:
            lines.append(f"{prefix}{name}: {before!r} -> {after!r}")
    return lines


def dump_yaml(config: Any) -> str:
    """Return a configuration as YAML that `parse_config` reads back."""
    return yaml.safe_dump(to_dict(config), sort_keys=False, allow_unicode=True)
