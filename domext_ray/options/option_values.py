"""The values of a job's options: a preset, then a file, then flags, each standing on the one before.

Enters: YAML files and a command line. Leaves: a frozen configuration; or one sentence that says the value, the rule,
and where it was given. draccus makes the configuration, and is imported in this module only.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, TypeVar

import draccus
from draccus.utils import DraccusException

from domext_ray.errors import ConfigError, OptionError, find_user_error
from domext_ray.options.option_list import Option, list_options, list_sections, suggest
from domext_ray.options.yaml_file import Entry, parse_yaml, read_yaml

FILE_OPTION = "config_path"
"""The flag that names a YAML file of options."""

_TRUE, _FALSE = ("true", "yes", "on"), ("false", "no", "off")

ConfigT = TypeVar("ConfigT")


@dataclass(frozen=True)
class Setting:
    """What was given for an option.

    Args:
        value: the text of a flag or of a file's scalar, or a value.
        place: file and line; "" of a flag.
    """

    value: Any
    place: str = ""


Settings = Mapping[str, Setting]
"""What was given in one place, by the options' names."""


@dataclass(frozen=True)
class GivenOptions:
    """What a user gave, as flags or in Python.

    Args:
        settings: options.
        file: what config_path names; "" without one.
        repeated: flags that stand there more than once; the last one counts.
    """

    settings: Settings
    file: str = ""
    repeated: tuple[str, ...] = ()


def read_file(config_class: type, path: Path, option: str = f"--{FILE_OPTION}") -> dict[str, Setting]:
    """Read a YAML file of options.

    Args:
        config_class: whose options.
        path: the file.
        option: what named it.

    Raises:
        ConfigError: it is missing or no YAML, or has a key that is no option; with the line.
    """
    settings: dict[str, Setting] = {}
    for name, each in _flatten(config_class, read_yaml(path, option), str(path)):
        if name in settings:  # as optim.lr and as lr in optim
            raise ConfigError(f"{each.place}: {name!r} stands here a second time ({settings[name].place} has it).")
        settings[name] = each
    return settings


def _flatten(config_class: type, entry: Entry, name: str, prefix: str = "") -> Iterator[tuple[str, Setting]]:
    """List the options of a mapping with their places."""
    options, sections = list_options(config_class), list_sections(config_class)
    for key, each in (entry.parts or {}).items():
        option, place = f"{prefix}{key}", f"{name}, line {each.line}"
        if option in sections:
            if each.parts is None and each.value is not None:
                raise ConfigError(f"{place}: {option} is {_show(each.value)}; it must have options of its own.")
            yield from _flatten(config_class, each, name, f"{option}.")
        elif option not in options:
            raise ConfigError(f"{place}: {option!r} is no option{_hint(config_class, option, in_file=True)}")
        elif options[option].kind is dict or each.parts is not None or isinstance(each.value, (list, type(None))):
            yield option, Setting(each.value, place)
        else:  # as it is written: YAML reads no as false, 010 as 8 and 1e5 as a text
            yield option, Setting(each.text, place)


def list_settings(config_class: type, values: Mapping[str, Any], prefix: str = "") -> dict[str, Setting]:
    """List the options of nested dictionaries.

    Raises:
        ConfigError: a key is no option, or an option stands there twice (as optim.lr and as lr in optim).
    """
    options, sections = list_options(config_class), list_sections(config_class)
    settings: dict[str, Setting] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if name in sections and isinstance(value, Mapping):
            found = list_settings(config_class, value, f"{name}.")
        elif name in options:
            found = {name: Setting(value)}
        else:
            what = f"a group of options, not {_show(value)}." if name in sections else "no option"
            raise ConfigError(
                f"{name!r} is {what}{'' if name in sections else _hint(config_class, name, in_file=True)}"
            )
        twice = settings.keys() & found.keys()
        if twice:
            raise ConfigError(f"{min(twice)!r} is given twice; give it once.")
        settings.update(found)
    return settings


def read_arguments(config_class: type, values: Mapping[str, Any], file: str | os.PathLike[str] = "") -> GivenOptions:
    """Read options that are given in Python.

    Args:
        config_class: whose options.
        values: an option's value by its name, or a group's options by the group's name. An option that is a text takes
            a path too, and several values, which a command line has with commas between them.
        file: a YAML file of options, or the name of a preset.

    Raises:
        ConfigError: a name is no option, or is given twice.
    """
    options = list_options(config_class)
    settings = {
        name: Setting(_to_text(each.value) if options[name].kind is str else _to_plain(each.value))
        for name, each in list_settings(config_class, values).items()
    }
    return GivenOptions(settings, os.fspath(file))


def _to_text(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return ",".join(str(_to_text(each)) for each in value)
    return os.fspath(value) if isinstance(value, os.PathLike) else _to_plain(value)


def _to_plain(value: Any) -> Any:
    """A number of NumPy or torch becomes Python's own."""
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", None) == 0 else value


def read_flags(config_class: type, args: Sequence[str]) -> GivenOptions:
    """Read a command line of `--OPTION VALUE`, `--OPTION=VALUE`, and `--OPTION` alone of one that is true or false.

    Raises:
        ConfigError: an option that there is not, one without its value, or a value without its option.
    """
    options, sections = list_options(config_class), list_sections(config_class)
    settings: dict[str, Setting] = {}
    repeated: list[str] = []
    file, last = "", ""
    rest = list(args)
    while rest:
        argument = rest.pop(0)
        name, mark, value = argument.removeprefix("--").partition("=")
        if not argument.startswith("--") or not name:
            raise ConfigError(_explain_word(argument, last, options))
        if name not in options and name not in sections and name != FILE_OPTION:
            raise ConfigError(f"--{name} is no option{_hint(config_class, name)}")
        has_value = mark or (rest and not rest[0].startswith("--"))
        if not mark and has_value:
            value = rest.pop(0)
        if not has_value:
            if name not in options or options[name].kind is not bool:
                raise ConfigError(f"--{name} has no value; give one after it.")
            value = "true"
        repeated += [name] if name in settings or (name == FILE_OPTION and file) else []
        if name == FILE_OPTION:
            file = value
            if not value:
                raise ConfigError(f"--{FILE_OPTION} has no value; give a YAML file after it.")
        elif name in sections:
            settings.update(_read_section(config_class, name, value))
        else:
            settings[name] = Setting(value)
        last = name
    return GivenOptions(settings, file, tuple(dict.fromkeys(repeated)))


def _read_section(config_class: type, name: str, text: str) -> Iterator[tuple[str, Setting]]:
    """Read what was given for a whole section: a mapping in the notation of YAML."""
    if not text.lstrip().startswith("{"):
        some = next(each for each in list_options(config_class) if each.startswith(f"{name}."))
        raise ConfigError(
            f"--{name} is {_show(text)}, and is a group of options; give them by name, such as --{some}, or in a YAML "
            f"file with --{FILE_OPTION}."
        )
    entry = parse_yaml(text, f"--{name}")
    for option, each in _flatten(config_class, entry, f"--{name}", f"{name}."):
        yield option, Setting(each.value)


def _explain_word(word: str, last: str, options: Mapping[str, Option]) -> str:
    """Say what is wrong about a word that stands where an option is expected."""
    if word.startswith("-"):
        near = suggest(word.lstrip("-"), options)
        return f"{word!r} is no option; options begin with two dashes, such as --{near[0] if near else 'dry_run'}."
    if last not in options or options[last].kind is not str:
        before = f"after --{last} " if last else ""
        return f"{word!r} stands {before}without an option; options are given as --OPTION VALUE (see --help)."
    return (
        f"--{last} has more than one value ({_show(word)} is left over); put a pattern such as 'notes/*.txt' or a text "
        "with spaces in quotes, and give several files with commas between them."
    )


def _hint(config_class: type, name: str, *, in_file: bool = False) -> str:
    known = [*list_options(config_class), *([] if in_file else [FILE_OPTION])]
    near = suggest(name, [*known, *list_sections(config_class)])
    dashes = "" if in_file else "--"
    return f"; did you mean {' or '.join(f'{dashes}{each}' for each in near)}?" if near else "; --help_all lists them."


def build(config_class: type[ConfigT], layers: Iterable[Settings]) -> ConfigT:
    """Make a configuration from what was given in several places, a later one standing on those before it.

    Args:
        config_class: the frozen dataclass.
        layers: what each place gives; what none of them gives has its default.

    Raises:
        ConfigError: a value that is not of its option's kind, or is outside its rule.
    """
    settings, whole = _merge(config_class, layers)
    values: dict[str, Any] = {}
    for name, value in _list_values(config_class, settings, whole).items():
        _put(values, name.split("."), value)
    try:
        return _construct(config_class, values)
    except OptionError as error:
        given = settings.get(error.option)
        raise error.at(given.place if given else "") from error.__cause__


def list_values(config_class: type, layers: Iterable[Settings]) -> dict[str, Any]:
    """Return the value of every option, as `build` finds it; the rules of the configuration are not asked."""
    return _list_values(config_class, *_merge(config_class, layers))


def _list_values(config_class: type, settings: Settings, whole: tuple[str, ...]) -> dict[str, Any]:
    return {
        name: read_value(option, settings[name])
        if name in settings
        else option.plain
        if name.startswith(whole)
        else option.default
        for name, option in list_options(config_class).items()
    }


def _merge(config_class: type, layers: Iterable[Settings]) -> tuple[dict[str, Setting], tuple[str, ...]]:
    """Lay settings over each other; also say which sections were replaced whole, as beginnings of options."""
    options = list_options(config_class)
    merged: dict[str, Setting] = {}
    replaced: set[str] = set()
    for layer in layers:
        for section in (each for each in list_sections(config_class).values() if each.whole):
            start = f"{section.name}."
            given_here = [each for name, each in layer.items() if name.startswith(start)]
            if any(section.whole == "any" or each.place for each in given_here):
                merged = {name: each for name, each in merged.items() if not name.startswith(start)}
                replaced.add(start)
        for name, given in layer.items():
            old = merged.get(name)
            if old is not None and options[name].kind is dict and not options[name].whole:
                new = merge_options(read_value(options[name], old), read_value(options[name], given))
                given = Setting(new, given.place)
            merged[name] = given
    return merged, tuple(replaced)


def merge_options(options: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested options with some of them changed."""
    merged = dict(options)
    for name, value in changes.items():
        old = merged.get(name)
        merged[name] = merge_options(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def _put(nested: dict[str, Any], names: Sequence[str], value: Any) -> None:
    for name in names[:-1]:
        nested = nested.setdefault(name, {})
    nested[names[-1]] = value


def _construct(config_class: type[ConfigT], values: Mapping[str, Any], prefix: str = "") -> ConfigT:
    """Make a dataclass from nested values, which are all there."""
    for name, section in list_sections(config_class).items():
        if "." not in name and list_sections(section.owner):  # its rules know nothing of a name before theirs
            _construct(section.owner, values[name], f"{prefix}{name}.")
    try:
        return draccus.decode(config_class, values)
    except (DraccusException, ValueError, TypeError) as error:
        cause = find_user_error(error)
        if cause is None:
            raise
        raise cause.under(prefix) if isinstance(cause, OptionError) else cause from error


def read_value(option: Option, given: Setting) -> Any:
    """Return a value of the option's kind.

    Raises:
        OptionError: what was given is none.
    """
    value, kind = given.value, option.kind
    made: Any
    if kind is str:
        made, rule = _read_text(value)
    elif kind is bool:
        made = value if value in option.choices else _read_truth(value)
        rule = ", ".join([*option.choices, "true or false"])
    elif kind is int:
        made, rule = read_whole(value)
    elif kind is float:
        made, rule = read_number(value)
    elif kind is dict:
        made, rule = _read_mapping(option, value), "a mapping, such as '{name: {option: value}}'"
    else:
        made, rule = value if value in option.choices else None, f"one of {', '.join(option.choices)}"
    if made is None:
        raise OptionError(option.name, value, rule, given.place)
    return made


def _read_text(value: Any) -> tuple[str | None, str]:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str):
        return None, 'a text ("" is an empty one)'
    if any(ord(each) < 32 or ord(each) == 127 for each in value):
        return None, "a text of one line, without tabs and other control characters"
    if any(0xD800 <= ord(each) < 0xE000 for each in value):  # how Python reads bytes of a command line that are none
        return None, "a text in UTF-8"
    return value, ""


def _read_truth(value: Any) -> bool | None:
    if isinstance(value, bool):
        return value
    lower = value.lower() if isinstance(value, str) else ""
    return True if lower in _TRUE else False if lower in _FALSE else None


def read_whole(value: Any) -> tuple[int | None, str]:
    """Return a whole number, such as 100000 or "1e5"; None for what is none, and the rule that it breaks."""
    number, _ = read_number(value)
    if number is None or not number.is_integer():
        return None, "a whole number"
    if abs(number) >= 2**63:
        return None, "a whole number below 2^63"
    return int(Decimal(value.strip())) if isinstance(value, str) else int(value), ""  # 1e5 is 100000


def read_number(value: Any) -> tuple[float | None, str]:
    """Return a finite number; None for what is none, and the rule that it breaks."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None, "a number"
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None, "a number"
    return number if math.isfinite(number) else None, "a finite number"


def _read_mapping(option: Option, value: Any) -> dict[str, Any] | None:
    made = parse_yaml(value, f"--{option.name}").value if isinstance(value, str) else value
    return made if isinstance(made, dict) else None


def _show(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 120 else f"{shown[:100]}…{shown[-10:]}"
