"""The presets: YAML files of options that come with the package, each known by its path in presets/ without .yaml."""

from __future__ import annotations

from pathlib import Path

from domext_ray.errors import ConfigError
from domext_ray.options.option_list import suggest
from domext_ray.options.option_values import FILE_OPTION

FOLDER = Path(__file__).resolve().parents[1] / "presets"


def list_presets() -> list[str]:
    """Return the names of all presets, such as af and sweeps/af_mini; those that jobs begin with come first."""
    names = [each.relative_to(FOLDER).with_suffix("").as_posix() for each in FOLDER.rglob("*.yaml")]
    return sorted(names, key=lambda name: ("/" in name, name))


def find_preset(name: str) -> Path:
    """Return the file of a preset.

    Args:
        name: as `list_presets` has it.

    Raises:
        ConfigError: there is no preset of this name.
    """
    if name not in list_presets():
        raise ConfigError(f"{name!r} is no preset{_suggest(name) or '; domext presets lists them.'}")
    return FOLDER / f"{name}.yaml"


def find_options(place: str) -> Path:
    """Return the file that --config_path names: a file of the user's, else a preset by its name.

    Raises:
        ConfigError: there is neither.
    """
    path = Path(place).expanduser()
    if place in list_presets() and not path.is_file():
        return find_preset(place)
    if not path.exists():
        hint = _suggest(path.name.removesuffix(".yaml")) or "."
        raise ConfigError(f"--{FILE_OPTION} names {place!r}, which does not exist{hint}")
    return path


def describe_preset(name: str) -> str:
    """Return the sentence in the first line of a preset."""
    return find_preset(name).read_text(encoding="utf-8").splitlines()[0].lstrip("# ")


def _suggest(name: str) -> str:
    """Return the end of a sentence about a name that no preset has; empty if none is near."""
    known = list_presets()
    leaves = {each.rpartition("/")[2]: each for each in reversed(known)}
    near = [leaves[name]] if name in leaves else suggest(name.lower(), known)
    return f"; did you mean the preset {' or '.join(near)}?" if near else ""
