"""What every job does first: read its options, say what is wrong with them, and only then import what is heavy.

Enters: a `Job` and a command line, or options that are given in Python. Leaves: the job's configuration, checked.
Torch, Ray and transformers take seconds to import, and a mistyped option is told before that.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Generic

from domext_ray.config import presets
from domext_ray.config.jobs import CompareConfig, name_models
from domext_ray.config.mixture import NO_TEXT
from domext_ray.config.options.build import CONFIG, PRESET, Given, read_file, read_flags
from domext_ray.config.options.declare import FOUND, MAIN, MODELS, ConfigT
from domext_ray.config.options.kinds import Option, list_options
from domext_ray.config.options.submitted import NAMES, find_input, name_searched, settle_paths
from domext_ray.config.pretrain import PretrainConfig, RunConfig
from domext_ray.errors import ConfigError
from domext_ray.storage import Place
from domext_ray.text.data.names import SHIPPED_BASE, check_name, describe_near, find_near
from domext_ray.training.tracking import TRACKERS

WITHOUT_BASE = ("-shape.", "-vocab.lowercase")
"""What a training job reads with `--base none` only; see `Job.reads`."""
TEXT, FOLDER = ("prepare.document", "prepare.field"), ("run.name", "run.dir", "dry_run")
NOT_FINE_TUNING = (
    *("method.word_", "method.trainable_budget", "method.train_heads"),
    *("engine.compile", "engine.fused", "engine.fixed_shapes", "engine.capture", "engine.joined"),
    *("engine.zero_stage", "engine.offload", "engine.base_dtype"),
)
"""Options of training jobs that fine-tuning refuses or does not read."""


@dataclass(frozen=True)
class Job(Generic[ConfigT]):
    """A verb of the command line. Its options say of themselves which help begins with, and which must be there."""

    verb: str  # what follows `domext`, such as "pretrain af"; jobs/pretrain_af.py is the same as a file
    about: str  # what it does, in a sentence, and examples, which begin with `domext` and the verb
    config_class: type[ConfigT]  # its options
    run: str | Callable[..., object]  # carries it out; MODULE:NAME of this package is imported when it is called
    preset: str = ""  # that a file of the user's and flags stand on, unless --preset names another
    plain_preset: str = ""  # the one instead, with --replay.corpus none; empty: the same
    main: tuple[str, ...] = ()  # options of the first screen of help, beside those that are declared `Main`
    # Options that it reads, where they are few, and behind a dash those that it does not read or decides itself: names,
    # or beginnings that end in a dot or an underscore.
    reads: tuple[str, ...] = ()
    word: str = ""  # the option that a word right behind the verb is
    tells_preset: bool = False  # `run` is given the name of the preset that the options stand on, too
    narrow: Callable[[ConfigT], tuple[str, ...]] | None = None  # further `reads`, which follow from a configuration
    # Refuses what a look at names, places and a sample of the text tells; it imports nothing heavy.
    check: Callable[[ConfigT], None] | None = None

    def read(self, args: Sequence[str]) -> Given:
        """Read a command line without the verb."""
        has_word = self.word and args and not args[0].startswith("-")
        return read_flags(self.config_class, [f"--{self.word}", *args] if has_word else args)

    def start(self, given: Given, instead: str = "") -> Any:
        """Carry it out, by another function of the package if one is named `instead`, and return what that returns."""
        config, run = configure(self, given), instead or self.run
        run = resolve_name(f"domext_ray.{run}") if isinstance(run, str) else run
        with self.name_searched(config):
            return run(config, **self.tell(given))

    def tell(self, given: Given) -> dict[str, str]:
        """Return what `run` is given beside the configuration."""
        return {"preset": choose_preset(self, given)} if self.tells_preset else {}

    def name_searched(self, config: ConfigT) -> contextlib.AbstractContextManager[None]:
        """Let an error about what is not there say where a submitted job has looked for it."""
        return name_searched(config, self.list_read(), PretrainConfig)

    @property
    def sentence(self) -> str:
        """The first sentence of `about`."""
        return " ".join(self.about.split("\n\n")[0].split())

    def list_main(self) -> list[str]:
        """Return the options of the first screen of help; those of another job within this one are not among them."""
        known = list_options(self.config_class)
        marked = {name for name, option in known.items() if MAIN in option.tags and name.count(".") < 2}
        return [name for name in known if name in marked.union(self.main) and not self.is_unused(name)]

    def list_read(self) -> dict[str, Option]:
        """Return the options that change something."""
        return {name: option for name, option in list_options(self.config_class).items() if not self.is_unused(name)}

    def is_unused(self, option: str) -> bool:
        """Whether an option changes nothing."""
        few = [name for name in self.reads if not name.startswith("-")]
        return _is_one_of(f"-{option}", self.reads) or (bool(few) and not _is_one_of(option, few))


def _is_one_of(option: str, names: tuple[str, ...] | list[str]) -> bool:
    return any(option.startswith(name) if name[-1] in "._" else option == name for name in names)


def configure(job: Job[ConfigT], given: Given) -> ConfigT:
    """Return a job's configuration, checked: its preset, then a file, then single options."""
    given = replace(given, config=find_input(given.config))
    with name_searched(None, {}, PretrainConfig, given.config):
        config = presets.configure(job.config_class, choose_preset(job, given), given)
    if job.narrow is not None:
        job = replace(job, reads=(*job.reads, *job.narrow(config)))
    config = settle_paths(config, job.list_read(), PretrainConfig)
    with job.name_searched(config):
        _check_places(job, config)
        if job.check is not None:
            job.check(config)
    _warn(job, given, config)
    return config


def choose_preset(job: Job[Any], given: Given) -> str:
    """Return the name of the preset that options stand on: a user's, or the job's, which lack of general text changes.

    Empty: the defaults.
    """
    if given.preset or not job.plain_preset:
        return given.preset or job.preset
    path = Path(given.config).expanduser()
    file = read_file(job.config_class, path) if path.is_file() else {}
    corpus = {**file, **given.settings}.get("replay.corpus")
    return job.plain_preset if corpus is not None and corpus.value in ("", NO_TEXT) else job.preset


def _check_places(job: Job[Any], config: Any) -> None:
    """Refuse places that are not there and trackers that cannot be written to, also when a job goes on."""
    options = list_options(job.config_class)
    for name in (name for name, option in options.items() if {FOUND, MODELS} & option.tags and not job.is_unused(name)):
        value = attrgetter(name)(config)
        places = value if isinstance(value, tuple) else (value,)
        for place in (model for _, model in name_models(places)) if MODELS in options[name].tags else places:
            folders = (place, place.rpartition(":")[0])  # the second of BANK:NAME
            if not place or place in NAMES or any(folder and Place(folder).exists() for folder in folders):
                continue
            if name.rpartition(".")[2] in ("base", "model", "models", "against"):
                check_name(f"--{name}", place, "model", options[name].help, [SHIPPED_BASE])
            else:
                hint = describe_near(find_near(place)) or f"give {options[name].help}."
                raise ConfigError(f"--{name} names {place!r}, which does not exist; {hint}")
    if "run.dir" in options and os.path.exists(config.run.dir) and not os.path.isdir(config.run.dir):
        raise ConfigError(f"--run.dir is {config.run.dir!r}, which is a file; give the folder of all runs.")
    if "output" in options and not isinstance(config, CompareConfig) and (output := Place(config.output)).is_local:
        above = next(filter(os.path.exists, (output.key, *map(str, Path(output.key).parents))))
        if not os.path.isdir(above):
            raise ConfigError(f"--output is {config.output!r}, and {above} is a file; give a folder.")
    if "run.trackers" in options and not job.is_unused("run.trackers"):
        check_trackers(config.run)


def check_trackers(config: RunConfig) -> None:
    """Refuse trackers that are not installed, or have no place to write to."""
    for name in config.trackers:
        places = TRACKERS[name].places
        if places and importlib.util.find_spec(name) is None:
            raise ConfigError(f'--run.trackers has {name}, which is not installed: pip install "domext_ray[{name}]".')
        if places and not Place(config.dir).is_local and not any(map(os.environ.get, places)):
            fault = f"--run.trackers has {name}, which cannot write to {config.dir}"
            raise ConfigError(f"{fault}; set {' or '.join(places)}.")


def _warn(job: Job[Any], given: Given, config: Any) -> None:
    """Say which options change nothing, and which of several flags counts."""
    for name in given.repeated:
        files = {PRESET: given.preset, CONFIG: given.config}
        last = files[name] if name in files else given.settings[name].value
        print(f"warning: --{name} is given more than once; the last one, {last}, counts.", flush=True)
    has_base = getattr(config, "base", "none") != "none"
    unused = [option for option in given.settings if job.is_unused(option)]
    unused = [option for option in unused if has_base or not _is_one_of(f"-{option}", WITHOUT_BASE)]
    if unused:
        verb = "has" if len(unused) == 1 else "have"
        print(f"warning: {', '.join(f'--{option}' for option in unused)} {verb} no effect in this job.", flush=True)
