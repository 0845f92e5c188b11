"""What a user gave: a command line, a YAML file, or values in Python -> settings by the options' names.

Enters: text and values as they were written. Leaves: `Settings`, each with its place; or one sentence about a name that
is no option.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from domext_ray.config.options.kinds import Option, list_gone, list_options, list_sections, suggest
from domext_ray.config.options.yaml_text import Node, parse_yaml, read_yaml
from domext_ray.errors import ConfigError

PRESET, CONFIG = "preset", "config"
"""Flags that name a preset, and a YAML file of options."""


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
