"""A preset, a YAML file and flags become a configuration, each standing on the one before."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from domext_ray.config.identity import ConfigT
from domext_ray.config.method import KNOWN_METHODS, MethodConfig, list_names
from domext_ray.config.presets import find_options
from domext_ray.config.pretrain import PretrainConfig
from domext_ray.errors import OptionError
from domext_ray.extensions.table import MAIN_SIZES
from domext_ray.options.option_values import GivenOptions, Settings, build, read_file, read_flags


def parse_config(
    config_class: type[ConfigT], default_path: str | None = None, args: Sequence[str] | None = None
) -> ConfigT:
    """Build a configuration from a preset, a YAML file and flags, each standing on the one before.

    Args:
        config_class: the frozen dataclass to build.
        default_path: the preset, a YAML file; the file of `--config_path` changes what it says, option by option.
        args: command line without the program's name; None reads `sys.argv`.

    Raises:
        ConfigError: a file that is missing or no YAML, an unknown option, or a value outside its rule.
    """
    line = read_flags(config_class, sys.argv[1:] if args is None else args)
    return build_config(config_class, Path(default_path) if default_path else None, line)


def build_config(config_class: type[ConfigT], preset_path: Path | None, given: GivenOptions) -> ConfigT:
    """Build a configuration from a preset and what a user gave.

    Args:
        config_class: the frozen dataclass to build.
        preset_path: the preset, a YAML file; None: the defaults of the class.
        given: options of a command line or of Python; its file, a YAML file of options or a preset's name, stands
            between the preset and them.

    Raises:
        ConfigError: a file that is missing or no YAML, or a value outside its rule.
    """
    preset: Settings = read_file(config_class, preset_path, "the preset") if preset_path else {}
    file: Settings = read_file(config_class, find_options(given.file)) if given.file else {}
    layers = (preset, file, given.settings)
    config = build(config_class, layers)
    if isinstance(config, PretrainConfig):
        _check_name(config.method, config.vocab.extends_base, layers)
    else:
        method = getattr(config, "method", None)
        if method is not None:
            _check_name(method, False, layers)
    return config


def _check_name(method: MethodConfig, has_words: bool, layers: Sequence[Settings]) -> None:
    """Refuse a name that says one method while the sizes say another; warn where it is the preset's.

    Who says a name and all sizes (a run's config.yaml, a sweep's best.yaml) may call them what they are not.
    """
    name = method.name.lower().replace("-", "_")
    fitting = list_names(method, has_words)
    if name not in KNOWN_METHODS or name in fitting:
        return
    said = next((each for each in reversed(layers) if "method.name" in each), layers[0])
    if said is layers[0] or all(f"method.{each}" in said for each in ("trains", *MAIN_SIZES)):
        if fitting:
            print(f"warning: --method.name is {method.name!r}, and what trains is {fitting[0]}.", flush=True)
        return
    rule = f"{', '.join([*fitting, 'a name of your own'])}, or the sizes must change: {name} has {KNOWN_METHODS[name]}"
    raise OptionError("method.name", method.name, rule, said["method.name"].place)
