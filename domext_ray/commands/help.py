"""A job -> its help: what it does, examples, and its options with the values that they have without a flag."""

from __future__ import annotations

import inspect
import os
import shutil
import sys
import textwrap
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from domext_ray.commands.job import Job
from domext_ray.config.options.build import CONFIG, PRESET, Settings, list_values, read_file, show_value
from domext_ray.config.options.kinds import Option, list_options, list_sections
from domext_ray.config.presets import find_preset

FEW, ALL = ("--help", "-h"), ("--help_all",)
"""Flags that ask for the options that matter most, and for all of them."""
MOST_SHOWN = 20
"""Options that are all shown at once."""

_METAVARS = {str: "TEXT", int: "N", float: "X", dict: "{…}"}
_COLUMN = 38


def print_text(text: str) -> None:
    """Print to a reader who may stop reading, such as `head`."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def format_help(job: Job[Any], *, is_full: bool, program: str = "") -> str:
    """Return a job's help: what it does, examples, and options with the values that they have without a flag.

    `is_full`: all options in their sections; else those that matter most. `program` is what its examples begin with.
    """
    about = job.about.rstrip().replace(f"domext {job.verb}", program or f"domext {job.verb}")
    preset: Settings = read_file(job.config_class, find_preset(job.preset), "the preset") if job.preset else {}
    values = list_values(job.config_class, [preset])
    options = {name: option for name, option in list_options(job.config_class).items() if not job.is_unused(name)}
    instead = f"a preset instead of {job.preset or 'none'} (domext presets lists them)"
    file = f"  --{PRESET} NAME".ljust(_COLUMN) + f"{instead}\n"
    file += f"  --{CONFIG} FILE".ljust(_COLUMN) + "a YAML file of options, which changes the preset"
    if not is_full and len(options) > MOST_SHOWN:
        shown = _format_options((options[name] for name in job.list_main()), values)
        title = f"The most important of {len(options)} options, with their values here:"
        return "\n".join([about, "", title, shown, file, f"  {ALL[0]}".ljust(_COLUMN) + "all options"])
    parts = [about, "", "Options, with their values here:", file]
    parts.append(_format_options((option for name, option in options.items() if "." not in name), values))
    for section in list_sections(job.config_class).values():
        own = [option for name, option in options.items() if name.rpartition(".")[0] == section.name]
        if own:
            text = textwrap.fill(" ".join((inspect.getdoc(section.owner) or "").split()), _width())
            parts += ["", f"--{section.name}.…", text, _format_options(own, values)]
    return "\n".join(parts)


def _format_options(options: Iterable[Option], values: Mapping[str, Any]) -> str:
    return "\n".join(_format_option(option, values[option.name]) for option in options)


def _format_option(option: Option, value: Any) -> str:
    metavar = _METAVARS.get(option.kind) or "|".join(option.words)
    if option.is_list:
        metavar = "NAME,…" if option.kind is Literal else "|".join([*option.choices, f"{metavar},…"])
    head = f"  --{option.name} {metavar}"
    text = textwrap.wrap(f"{option.help} [{_show(value)}]", _width() - _COLUMN)
    lines = [] if len(head) < _COLUMN else [head]
    first = head if len(head) < _COLUMN else ""
    return "\n".join([*lines, *(f"{first if i == 0 else '':<{_COLUMN}}{line}" for i, line in enumerate(text))])


def _show(value: Any) -> str:
    return (", ".join(value) or "none") if isinstance(value, dict) else show_value(value)


def _width() -> int:
    return min(max(shutil.get_terminal_size((120, 24)).columns, 80), 120)
