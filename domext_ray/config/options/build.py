"""What a user gave (a command line, a YAML file, or values in Python) -> a configuration; and back to plain values.

What was given in one place are `Settings`, by the options' names, each with its place; or one sentence about a name
that is no option. A configuration is built of several, each standing on the one before.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from domext_ray.config.options.declare import ConfigT
from domext_ray.config.options.kinds import Option, convert, list_gone, list_options, list_sections, suggest
from domext_ray.config.options.yaml_text import Node, parse_yaml, read_yaml
from domext_ray.errors import ConfigError, OptionError

PRESET, CONFIG = "preset", "config"
"""Flags that name a preset, and a YAML file of options."""
_EMPTY: tuple[Any, ...] = ("", (), None)
"""Defaults that a sentence shows as empty."""


@dataclass(frozen=True)
class Setting:
    """What was given for an option: a value, or the text of a flag or of a file's scalar; and the file and line."""

    value: Any
    place: str = ""


Settings = Mapping[str, Setting]
"""What was given in one place, by the options' names."""


@dataclass(frozen=True)
class Given:
    """What a user gave, as flags or in Python."""

    settings: Settings
    preset: str = ""  # in the place of the job's own; empty: the job's
    config: str = ""  # a YAML file of options, which stands between the preset and `settings`
    repeated: tuple[str, ...] = ()  # flags that stand there more than once; the last one counts


def read_flags(config_class: type, args: Sequence[str]) -> Given:
    """Read a command line of `--OPTION VALUE`, `--OPTION=VALUE`, and `--OPTION` alone of one that is true or false."""
    options, sections = list_options(config_class), list_sections(config_class)
    settings: dict[str, Setting] = {}
    files = {PRESET: "", CONFIG: ""}
    repeated, last, rest = list[str](), "", list(args)
    while rest:
        argument = rest.pop(0)
        name, mark, value = argument.removeprefix("--").partition("=")
        if not argument.startswith("--") or not name:
            raise ConfigError(_explain_word(argument, last, options))
        if name not in {*options, *sections, *files}:
            raise ConfigError(f"--{name} is no option{_hint(config_class, name)}")
        has_value = mark or (rest and not rest[0].startswith("--"))
        if not mark and has_value:
            value = rest.pop(0)
        if not has_value:
            if name not in options or options[name].kind is not bool:
                raise ConfigError(f"--{name} has no value; give one after it.")
            value = "true"
        repeated += [name] if name in settings or files.get(name) else []
        if name in files:
            files[name] = value
            if not value:
                raise ConfigError(
                    f"--{name} has no value; give a {'preset' if name == PRESET else 'YAML file'} after it."
                )
        elif name in sections:
            settings |= {option: Setting(given.value) for option, given in _read_section(config_class, name, value)}
        else:
            settings[name] = Setting(value)
        last = name
    return Given(settings, files[PRESET], files[CONFIG], tuple(dict.fromkeys(repeated)))


def _read_section(config_class: type, name: str, text: str) -> Iterator[tuple[str, Setting]]:
    """Read what was given for a whole section: a mapping in the notation of YAML."""
    if not text.lstrip().startswith("{"):
        some = next(option for option in list_options(config_class) if option.startswith(f"{name}."))
        raise ConfigError(
            f"--{name} is {_show(text)}, and is a group of options; give them by name, such as --{some}, or in a YAML "
            f"file with --{CONFIG}."
        )
    return _flatten(config_class, parse_yaml(text, f"--{name}"), f"--{name}", f"{name}.")


def _explain_word(word: str, last: str, options: Mapping[str, Option]) -> str:
    """Say what is wrong about a word that stands where an option is expected."""
    if word.startswith("-"):
        near = suggest(word.lstrip("-"), options)
        return f"{word!r} is no option; options begin with two dashes, such as --{near[0] if near else 'dry_run'}."
    if last not in options or not (options[last].kind is str or options[last].is_list):
        before = f"after --{last} " if last else ""
        return f"{word!r} stands {before}without an option; options are given as --OPTION VALUE (see --help)."
    return (
        f"--{last} has more than one value ({_show(word)} is left over); put a pattern such as 'notes/*.txt' or a text "
        "with spaces in quotes, and give several files with commas between them."
    )


def _hint(config_class: type, name: str, *, in_file: bool = False) -> str:
    if instead := list_gone(config_class).get(name):
        return f" any more; {instead}."
    known = [*list_options(config_class), *([] if in_file else [PRESET, CONFIG]), *list_sections(config_class)]
    dashes = "" if in_file else "--"
    near = " or ".join(f"{dashes}{candidate}" for candidate in suggest(name, known))
    return f"; did you mean {near}?" if near else "; --help_all lists them."


def read_file(config_class: type, path: Path, option: str = f"--{CONFIG}") -> Settings:
    """Read a YAML file of options."""
    node = read_yaml(path, option)
    settings: dict[str, Setting] = {}
    for name, setting in _flatten(config_class, node, str(path)):
        if name in settings:  # as optim.lr and as lr in optim
            raise ConfigError(f"{setting.place}: {name!r} stands here a second time ({settings[name].place} has it).")
        settings[name] = setting
    return settings


def _flatten(config_class: type, node: Node, name: str, prefix: str = "") -> Iterator[tuple[str, Setting]]:
    """List the options of a mapping with their places; a scalar as it is written: YAML reads no as false, 010 as 8."""
    options, sections = list_options(config_class), list_sections(config_class)
    for key, part in node.parts.items():
        option, place = f"{prefix}{key}", f"{name}, line {part.line}"
        if option in sections:
            if not isinstance(part.value, dict | None):
                raise ConfigError(f"{place}: {option} is {_show(part.value)}; it must have options of its own.")
            yield from _flatten(config_class, part, name, f"{option}.")
        elif instead := list_gone(config_class).get(option):  # what an earlier version wrote is a file, too
            _note(f"{place}: {option} is no option any more, and changes nothing; {instead}.")
        elif option not in options:
            raise ConfigError(f"{place}: {option!r} is no option{_hint(config_class, option, in_file=True)}")
        else:
            yield option, Setting(part.value if options[option].kind is dict else part.as_written, place)


@functools.cache
def _note(sentence: str) -> None:
    """Print a note once, however often its file is read."""
    print(f"note: {sentence}", flush=True)


def read_values(
    config_class: type, values: Mapping[str, Any], prefix: str = "", *, is_stored: bool = False
) -> Settings:
    """Read options that are given in Python: a value by an option's name, or a group's options by the group's name.

    `is_stored`: a job kept them, of an earlier version maybe, so that options that are gone are passed over.
    """
    options, sections = list_options(config_class), list_sections(config_class)
    settings: dict[str, Setting] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if is_stored and name in list_gone(config_class):
            continue
        found: Settings = {name: Setting(value)}
        if name in sections:
            if not isinstance(value, Mapping):
                raise ConfigError(f"{name!r} is a group of options, not {_show(value)}.")
            found = read_values(config_class, value, f"{name}.", is_stored=is_stored)
        elif name not in options:
            raise ConfigError(f"{name!r} is no option{_hint(config_class, name, in_file=True)}")
        if twice := settings.keys() & found.keys():
            raise ConfigError(f"{min(twice)!r} is given twice; give it once.")
        settings |= found
    return settings


def _show(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 120 else f"{shown[:100]}…{shown[-10:]}"


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
