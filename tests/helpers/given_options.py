"""A configuration of what a command line gives, on a preset."""

from __future__ import annotations

from collections.abc import Sequence

from domext_ray.config.options.build import read_flags
from domext_ray.config.options.declare import ConfigT
from domext_ray.config.presets import configure


def parse_config(config_class: type[ConfigT], preset: str = "", args: Sequence[str] = ()) -> ConfigT:
    """Return the configuration of flags on a preset; without one, on the defaults of the class."""
    return configure(config_class, preset, read_flags(config_class, args))
