"""Settings of several places, each standing on the one before -> a configuration; and back to plain values."""

from __future__ import annotations

import dataclasses
import os
import re
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import yaml

from domext_ray.config.options.declare import ConfigT
from domext_ray.config.options.kinds import Option, convert, list_options, list_sections
from domext_ray.config.options.read import Setting, Settings, read_values
from domext_ray.errors import OptionError

_EMPTY: tuple[Any, ...] = ("", (), None)
"""Defaults that a sentence shows as empty."""


def build(config_class: type[ConfigT], layers: Iterable[Settings]) -> ConfigT:
    """Make a configuration from what was given in several places, a later one standing on those before it."""
    settings, whole = _merge(config_class, layers)
    try:
        return _construct(config_class, _list_values(config_class, settings, whole))
    except OptionError as error:
        raise _explain(error, settings, list_options(config_class)) from None


def _explain(error: OptionError, settings: Settings, options: Mapping[str, Option]) -> OptionError:
    """Say where a value was given, or that nobody gave it; and call options in its rule as this class does."""
    given, option = settings.get(error.option), options.get(error.option)
    is_default = given is None and option is not None and error.value == option.default and option.default not in _EMPTY
    place = given.place if given else "its default" if is_default else ""
    starts = [error.option[: dot.end()] for dot in re.finditer(r"\.", error.option)]

    def name(found: re.Match[str]) -> str:
        whole = (f"{start}{found[1]}" for start in ("", *starts))
        return f"--{next((candidate for candidate in whole if candidate in options), found[1])}"

    return OptionError(error.option, error.value, re.sub(r"--([a-z]\w*(?:\.\w+)*)", name, error.rule), place)


def list_values(config_class: type, layers: Iterable[Settings]) -> dict[str, Any]:
    """Return the value of every option, as `build` finds it; the rules of the configuration are not asked."""
    return _list_values(config_class, *_merge(config_class, layers))


def _list_values(config_class: type, settings: Settings, whole: tuple[str, ...]) -> dict[str, Any]:
    return {
        name: convert(option, settings[name].value)
        if name in settings
        else option.plain
        if name.startswith(whole)
        else option.default
        for name, option in list_options(config_class).items()
    }


def _merge(config_class: type, layers: Iterable[Settings]) -> tuple[Settings, tuple[str, ...]]:
    """Lay settings over each other; also say which sections were replaced whole, as beginnings of options."""
    options = list_options(config_class)
    merged: dict[str, Setting] = {}
    replaced: set[str] = set()
    for layer in layers:
        for section in (section for section in list_sections(config_class).values() if section.whole):
            start = f"{section.name}."
            own = [given for name, given in layer.items() if name.startswith(start)]
            if any(section.whole == "any" or given.place for given in own):
                merged = {name: given for name, given in merged.items() if not name.startswith(start)}
                replaced.add(start)
        for name, given in layer.items():
            if name in merged and options[name].kind is dict and not options[name].whole:
                old, new = convert(options[name], merged[name].value), convert(options[name], given.value)
                given = Setting(merge_options(old, new) if isinstance(new, dict) else new, given.place)
            merged[name] = given
    return merged, tuple(replaced)


def merge_options(options: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested options with some of them changed."""
    merged = dict(options)
    for name, value in changes.items():
        old = merged.get(name)
        merged[name] = merge_options(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def _construct(config_class: type[ConfigT], values: Mapping[str, Any], prefix: str = "") -> ConfigT:
    """Make a group from the values of all options, those within it first."""
    fields: dict[str, Any] = config_class.__pydantic_fields__  # type: ignore[attr-defined]
    own = {
        name: _construct(typing.cast(Any, field.annotation), values, f"{prefix}{name}.")
        if dataclasses.is_dataclass(field.annotation)
        else values[f"{prefix}{name}"]
        for name, field in fields.items()
    }
    try:
        return config_class(**own)
    except OptionError as error:
        raise OptionError(f"{prefix}{error.option}", error.value, error.rule) from None


def to_dict(config: Any) -> dict[str, Any]:
    """Return a configuration as nested dictionaries of plain values (the YAML's layout), lists as lists."""
    return {
        name: to_dict(value) if dataclasses.is_dataclass(value) else list(value) if isinstance(value, tuple) else value
        for name, value in ((field.name, getattr(config, field.name)) for field in dataclasses.fields(config))
    }


def from_dict(config_class: type[ConfigT], values: Mapping[str, Any], *, is_stored: bool = False) -> ConfigT:
    """Build a configuration from nested dictionaries, as `to_dict` made them; `is_stored`: see `read_values`."""
    return build(config_class, [read_values(config_class, values, is_stored=is_stored)])


def identity_of(config: Any) -> dict[str, Any]:
    """Return the identity fields as nested dictionaries; equal identities may share a run directory."""
    kept: dict[str, Any] = {}
    for name, value in to_dict(config).items():
        option = list_options(type(config)).get(name)
        if option is None:
            kept[name] = identity_of(getattr(config, name))
        elif not option.is_free and not (option.is_later and getattr(config, name) == option.default):
            kept[name] = value
    return {name: value for name, value in kept.items() if value != {}}


def identity_of_run(config: Any) -> dict[str, Any]:
    """Return what a run's directory keeps of its options: their identity, and None for those that came later.

    Of these, outside of groups, only that tells a default from what a part of an identity leaves out.
    """
    options = list_options(type(config)).items()
    return {name: None for name, option in options if option.is_later and "." not in name} | identity_of(config)


def list_differences(
    old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    """Yield name, old value and new value of the options in which two identities differ; None: there is none."""
    for name in sorted(old.keys() | new.keys()):
        before, after = old.get(name), new.get(name)
        if isinstance(before, dict) and isinstance(after, dict):
            yield from list_differences(before, after, f"{prefix}{name}.")
        elif isinstance(before, str) and os.path.expanduser(before) == after:
            continue  # older versions kept a path as the user wrote it, with ~
        elif before != after:
            yield f"{prefix}{name}", before, after


def describe_difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """List the options in which two identities differ, as `option: old -> new`."""
    return [f"{name}: {before!r} -> {after!r}" for name, before, after in list_differences(old, new)]


def show_value(value: Any) -> str:
    """Return an option's value as a flag gives it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return ",".join(map(show_value, value)) or '""'
    if isinstance(value, float):
        return short if float(short := f"{value:g}") == value else repr(value)  # two values never look alike
    return str(value) if value != "" else '""'


def dump_yaml(config: Any) -> str:
    """Return a configuration as YAML that `--config` reads back."""
    return yaml.safe_dump(to_dict(config), sort_keys=False, allow_unicode=True)
