"""A configuration as plain values: what it is stored as, and what makes two runs the same run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
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
    kept: dict[str, Any] = {}
    for each in dataclasses.fields(config):
        value = getattr(config, each.name)
        if dataclasses.is_dataclass(value):
            kept[each.name] = identity_of(value)
        elif not each.metadata.get("free"):
            kept[each.name] = value
    return {name: value for name, value in kept.items() if value != {}}


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
