"""What every job does first: read the command line, say what is wrong with it, and only then import what is heavy.

A job is a file with a docstring, a `Job`, and `run_job(JOB)`. Its `run` imports the pipeline when it is called: torch,
Ray and transformers take seconds, and a mistyped option is told before that.
"""

from __future__ import annotations

import inspect
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, Generic

from domext_ray.config.identity import ConfigT
from domext_ray.config.parsing import parse_config
from domext_ray.errors import ConfigError
from domext_ray.options.option_list import Option, list_options, list_sections
from domext_ray.options.option_values import FILE_OPTION, Settings, list_values, read_file, read_flags
from domext_ray.runtime.stopping import exit_on_user_error

FEW, ALL = ("--help", "-h"), ("--help_all",)
"""Flags that ask for the options that matter most, and for all of them."""

WITHOUT_BASE = ("shape.", "vocab.lowercase")
"""Options, or beginnings of their names, that count with `--base none` only."""

TRAINING = ("base", "corpus", "prepare.document", "prepare.field")
LENGTH = ("train.max_steps", "train.global_batch_size", "train.seq_length", "optim.lr")
FOLDER = ("run.name", "run.dir", "dry_run")
PLACE = ("scale.num_workers", "scale.use_gpu", *FOLDER)
"""Options that matter most in every training job, in the order in which help has them."""

NO_EXTENSIONS = (
    *("method.heads", "method.ffn_units", "method.module_", "method.gate_bias", "method.word_init", "method.lora_"),
    *("method.trainable_budget", "method.train_heads", "engine.compile"),
)
"""Options of training jobs that fine-tuning refuses or does not read."""

READ = ("train.general_probe", "vocab.words")
"""Options whose files every start of a job reads."""

_METAVARS = {str: "TEXT", int: "N", float: "X", dict: "{…}"}
_COLUMN = 38


@dataclass(frozen=True)
class Job(Generic[ConfigT]):
    """A job of the command line.

    Args:
        about: what it does, and examples: the docstring of its file.
        config_class: its options.
        run: carries it out; imports what it needs.
        preset: YAML file that a file of the user's and flags stand on.
        main: options of the first screen of help.
        used: options that it reads, where they are few: names, or beginnings that end in a dot or an underscore.
        unused: options that it does not read or that it decides itself; help leaves them out.
        found: options that name a folder of a job, or several by commas, which must be there.
        check: refuses what a look at names and places tells; imports nothing heavy.
    """

    about: str
    config_class: type[ConfigT]
    run: Callable[[ConfigT], object]
    preset: Path | None = None
    main: tuple[str, ...] = ()
    used: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    found: tuple[str, ...] = ()
    check: Callable[[ConfigT], None] | None = None

    def is_unused(self, option: str) -> bool:
        """Whether an option changes nothing."""
        return _is_one_of(option, self.unused) or (bool(self.used) and not _is_one_of(option, self.used))


def _is_one_of(option: str, names: tuple[str, ...]) -> bool:
    return any(option.startswith(each) if each[-1] in "._" else option == each for each in names)


def run_job(job: Job[ConfigT], args: Sequence[str] | None = None) -> None:
    """Carry out a job; a user's mistake is one sentence and exit code 2.

    Args:
        job: the job.
        args: command line without the program's name; None reads `sys.argv`.
    """
    arguments = list(sys.argv[1:] if args is None else args)
    with exit_on_user_error():
        if any(each in arguments for each in (*FEW, *ALL)):
            _print(format_help(job, is_full=any(each in arguments for each in ALL)))
            return
        config = parse_config(job.config_class, str(job.preset) if job.preset else None, arguments)
        _check_found(job, config)
        if job.check is not None:
            job.check(config)
        _warn(job, arguments, config)
        job.run(config)


def _check_found(job: Job[Any], config: Any) -> None:
    """Refuse places that are not there: those that the job reads at every start, also when it goes on."""
    options = list_options(job.config_class)
    asked = [(name, each.strip()) for name in job.found for each in getattr(config, name).split(",")]
    asked += [(name, attrgetter(name)(config)) for name in READ if name in options]
    asked += [(name, getattr(config, name)) for name in ("base", "model") if name in options]
    for name, place in asked:
        is_path = name not in ("base", "model") or place.startswith(("/", "./", "../", "~"))
        if place and is_path and not os.path.exists(os.path.expanduser(place)):
            raise ConfigError(f"--{name} names {place!r}, which does not exist; give {options[name].help}.")
    if "run.dir" in options:
        folder = os.path.expanduser(config.run.dir)
        if os.path.exists(folder) and not os.path.isdir(folder):
            raise ConfigError(f"--run.dir is {config.run.dir!r}, which is a file; give the folder of all runs.")


def _warn(job: Job[Any], arguments: Sequence[str], config: Any) -> None:
    """Say which flags change nothing, and which of several counts."""
    line = read_flags(job.config_class, arguments)
    for name in line.repeated:
        last = line.file if name == FILE_OPTION else line.settings[name].value
        print(f"warning: --{name} is given more than once; the last one, {last}, counts.", flush=True)
    has_base = getattr(config, "base", "none") != "none"
    unused = [each for each in line.settings if job.is_unused(each) and (has_base or not each.startswith(WITHOUT_BASE))]
    if unused:
        verb = "has" if len(unused) == 1 else "have"
        print(f"warning: {', '.join(f'--{each}' for each in unused)} {verb} no effect in this job.", flush=True)


def _print(text: str) -> None:
    """Print to a reader who may stop reading, such as `head`."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def format_help(job: Job[Any], *, is_full: bool) -> str:
    """Return a job's help: what it does, examples, and options with the values that they have without a flag.

    Args:
        job: the job.
        is_full: all options in their sections; else those that matter most.
    """
    preset: Settings = read_file(job.config_class, job.preset, "the preset") if job.preset else {}
    values = list_values(job.config_class, [preset])
    options = {name: each for name, each in list_options(job.config_class).items() if not job.is_unused(name)}
    file = f"  --{FILE_OPTION} FILE".ljust(_COLUMN) + "a YAML file of options, which flags change"
    if not is_full and len(options) > len(job.main) > 0:
        shown = _format_options((options[each] for each in job.main), values)
        title = f"Options that matter most (of {len(options)}), and the values that they have here:"
        return "\n".join([job.about.rstrip(), "", title, shown, file, f"  {ALL[0]}".ljust(_COLUMN) + "all options"])
    parts = [job.about.rstrip(), "", "Options, and the values that they have here:", file]
    parts.append(_format_options((each for name, each in options.items() if "." not in name), values))
    for section in list_sections(job.config_class).values():
        own = [each for name, each in options.items() if name.rpartition(".")[0] == section.name]
        if own:
            about = textwrap.fill(" ".join((inspect.getdoc(section.owner) or "").split()), _width())
            parts += ["", f"--{section.name}.…", about, _format_options(own, values)]
    return "\n".join(parts)


def _format_options(options: Iterable[Option], values: Mapping[str, Any]) -> str:
    return "\n".join(_format_option(each, values[each.name]) for each in options)


def _format_option(option: Option, value: Any) -> str:
    if option.kind is bool:
        metavar = "|".join([*option.choices, "true", "false"])
    else:
        metavar = "|".join(map(str, option.choices)) or _METAVARS[option.kind]
    head = f"  --{option.name} {metavar}"
    text = textwrap.wrap(f"{option.help} [{_show(value)}]", _width() - _COLUMN)
    lines = [] if len(head) < _COLUMN else [head]
    first = head if len(head) < _COLUMN else ""
    return "\n".join([*lines, *(f"{first if i == 0 else '':<{_COLUMN}}{line}" for i, line in enumerate(text))])


def _show(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return ", ".join(value) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value) if value != "" else '""'


def _width() -> int:
    return min(max(shutil.get_terminal_size((120, 24)).columns, 80), 120)
