"""What every job does first: read its options, say what is wrong with them, and only then import what is heavy.

Enters: a `Job` and a command line, or options that are given in Python. Leaves: the job's configuration, checked. A
job's `run` imports the pipeline when it is called: torch, Ray and transformers take seconds, and a mistyped option is
told before that.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, Generic

from domext_ray.config import presets
from domext_ray.config.mixture import NO_TEXT
from domext_ray.errors import ConfigError
from domext_ray.options.declare import ConfigT
from domext_ray.options.kinds import list_options
from domext_ray.options.read import CONFIG, PRESET, Given, read_file
from domext_ray.storage import Place

WITHOUT_BASE = ("shape.", "vocab.lowercase")
"""Options, or beginnings of their names, that count with `--base none` only."""

TRAINING = ("base", "corpus", "prepare.document", "prepare.field")
LENGTH = ("train.max_steps", "train.global_batch_size", "train.seq_length", "optim.lr")
FOLDER = ("run.name", "run.dir", "dry_run")
PLACE = ("scale.num_workers", "scale.use_gpu", *FOLDER)
"""Options that matter most in every training job, in the order in which help has them."""

NOT_FINE_TUNING = (
    *("method.word_", "method.trainable_budget", "method.train_heads"),
    *("engine.compile", "engine.zero_stage", "engine.offload", "engine.base_dtype"),
)
"""Options of training jobs that fine-tuning refuses or does not read."""

READ = ("train.general_probe", "vocab.words")
"""Options whose files every start of a job reads."""


@dataclass(frozen=True)
class Job(Generic[ConfigT]):
    """A verb of the command line.

    Args:
        verb: what follows `domext`, such as "pretrain af".
        about: what it does, in a sentence, and examples, which begin with `domext` and the verb.
        config_class: its options.
        run: carries it out; imports what it needs.
        preset: the preset that a file of the user's and flags stand on, unless --preset names another.
        plain_preset: the one instead, with --replay.corpus none; empty: the same.
        main: options of the first screen of help.
        used: options that it reads, where they are few: names, or beginnings that end in a dot or an underscore.
        unused: options that it does not read or that it decides itself; help leaves them out.
        found: options that name a folder of a job, or several by commas, which must be there.
        check: refuses what a look at names and places tells; imports nothing heavy.
    """

    verb: str
    about: str
    config_class: type[ConfigT]
    run: Callable[[ConfigT], object]
    preset: str = ""
    plain_preset: str = ""
    main: tuple[str, ...] = ()
    used: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    found: tuple[str, ...] = ()
    check: Callable[[ConfigT], None] | None = None

    @property
    def sentence(self) -> str:
        """The first sentence of `about`."""
        return " ".join(self.about.split("\n\n")[0].split())

    def is_unused(self, option: str) -> bool:
        """Whether an option changes nothing."""
        return _is_one_of(option, self.unused) or (bool(self.used) and not _is_one_of(option, self.used))


def _is_one_of(option: str, names: tuple[str, ...]) -> bool:
    return any(option.startswith(each) if each[-1] in "._" else option == each for each in names)


def configure(job: Job[ConfigT], given: Given) -> ConfigT:
    """Return a job's configuration: its preset, then a file, then single options.

    Args:
        job: the job.
        given: what the user gave.

    Raises:
        ConfigError: an option outside its rule, or a place that is not there.
        CorpusError: a task or a labelled set that there is not.
    """
    config = presets.configure(job.config_class, _choose_preset(job, given), given)
    _check_found(job, config)
    if job.check is not None:
        job.check(config)
    _warn(job, given, config)
    return config


def _choose_preset(job: Job[Any], given: Given) -> str:
    """Return the name of a job's preset, which the lack of general text changes."""
    if not job.plain_preset:
        return job.preset
    path = Path(given.config).expanduser()
    file = read_file(job.config_class, path) if path.is_file() else {}
    corpus = {**file, **given.settings}.get("replay.corpus")
    return job.plain_preset if corpus is not None and corpus.value in ("", NO_TEXT) else job.preset


def _check_found(job: Job[Any], config: Any) -> None:
    """Refuse places that are not there: those that the job reads at every start, also when it goes on."""
    options = list_options(job.config_class)
    values = [(name, getattr(config, name)) for name in job.found]
    asked = [(name, each) for name, value in values for each in (value if isinstance(value, tuple) else [value])]
    asked += [(name, attrgetter(name)(config)) for name in READ if name in options]
    asked += [(name, getattr(config, name)) for name in ("base", "model") if name in options]
    for name, place in asked:
        is_path = name not in ("base", "model") or place.startswith(("/", "./", "../", "~"))
        folders = (place, place.rpartition(":")[0])  # the second of BANK:NAME
        if place and is_path and not any(each and Place(each).exists() for each in folders):
            raise ConfigError(f"--{name} names {place!r}, which does not exist; give {options[name].help}.")
    if "run.dir" in options:
        folder = os.path.expanduser(config.run.dir)
        if os.path.exists(folder) and not os.path.isdir(folder):
            raise ConfigError(f"--run.dir is {config.run.dir!r}, which is a file; give the folder of all runs.")


def _warn(job: Job[Any], given: Given, config: Any) -> None:
    """Say which options change nothing, and which of several flags counts."""
    for name in given.repeated:
        files = {PRESET: given.preset, CONFIG: given.config}
        last = files[name] if name in files else given.settings[name].value
        print(f"warning: --{name} is given more than once; the last one, {last}, counts.", flush=True)
    has_base = getattr(config, "base", "none") != "none"
    unused = [each for each in given.settings if job.is_unused(each)]
    unused = [each for each in unused if has_base or not each.startswith(WITHOUT_BASE)]
    if unused:
        verb = "has" if len(unused) == 1 else "have"
        print(f"warning: {', '.join(f'--{each}' for each in unused)} {verb} no effect in this job.", flush=True)
