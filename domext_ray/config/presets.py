"""A job's configuration: a preset, a YAML file and flags, each standing on the one before.

The presets are YAML files that come with the package, each known by its path in presets/ without .yaml.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from domext_ray.config.extensions.table import MAIN_SIZES
from domext_ray.config.method import KNOWN_METHODS, MethodConfig, list_names
from domext_ray.config.options.build import PRESET, Given, Setting, Settings, build, read_file
from domext_ray.config.options.declare import ConfigT
from domext_ray.config.options.kinds import suggest
from domext_ray.config.pretrain import PretrainConfig
from domext_ray.errors import ConfigError, OptionError

FOLDER = Path(__file__).resolve().parents[1] / "presets"


def list_presets() -> list[str]:
    """Return the names of all presets, such as af and sweeps/af_mini; those that jobs begin with come first."""
    names = [path.relative_to(FOLDER).with_suffix("").as_posix() for path in FOLDER.rglob("*.yaml")]
    return sorted(names, key=lambda name: ("/" in name, name))


def find_preset(name: str, option: str = "") -> Path:
    """Return the file of a preset; `option` is what named it, for the sentence."""
    if name not in list_presets():
        file = " (--config takes a file of yours)" if option and Path(name).expanduser().exists() else ""
        near = _suggest(name)
        hint = f"; did you mean the preset {near}?" if near else "; domext presets lists them."
        raise ConfigError(f"{option and f'{option}: '}{name!r} is no preset{file}{hint}")
    return FOLDER / f"{name}.yaml"


def _suggest(name: str) -> str:
    """Return the names of presets that a name was probably meant to be; empty if none is near."""
    known = list_presets()
    leaf = Path(name).name.removesuffix(".yaml")
    leaves = {preset.rpartition("/")[2]: preset for preset in reversed(known)}
    near = suggest(leaf.lower(), known) or [leaves[match] for match in suggest(leaf.lower(), leaves)]
    return " or ".join([leaves[leaf]] if leaf in leaves else near)


def describe_preset(name: str) -> str:
    """Return the sentence in the first line of a preset."""
    return find_preset(name).read_text(encoding="utf-8").splitlines()[0].lstrip("# ")


def configure(config_class: type[ConfigT], preset: str, given: Given) -> ConfigT:
    """Build a configuration from a preset, a YAML file and single options.

    `preset` is the job's own; empty: the defaults of the class.
    """
    start = find_preset(given.preset, f"--{PRESET}") if given.preset else find_preset(preset) if preset else None
    layers: list[Settings] = [read_file(config_class, start, "the preset") if start else {}]
    if given.config:
        if not Path(given.config).expanduser().exists() and (near := _suggest(given.config)):
            raise ConfigError(f"--config names {given.config!r}, which does not exist; did you mean --preset {near}?")
        layers.append(read_file(config_class, Path(given.config)))
    layers += [given.settings]
    own = [{"optim.lr_width": Setting(0), **layer} if "optim.lr" in layer else layer for layer in layers[1:]]
    config = build(config_class, [layers[0], *own])  # the width is of the preset's rate alone
    method = getattr(config, "method", None)
    if method is not None:
        _check_name(method, isinstance(config, PretrainConfig) and config.vocab.extends_base, layers)
    return config


def _check_name(method: MethodConfig, has_words: bool, layers: Sequence[Settings]) -> None:
    """Refuse a name that says one method while the sizes say another; warn where it is the preset's.

    Who says a name and all sizes (a run's config.yaml, a sweep's best.yaml) may call them what they are not.
    """
    name = method.name.lower().replace("-", "_")
    fitting = list_names(method, has_words)
    if name not in KNOWN_METHODS or name in fitting:
        return
    said = next((layer for layer in reversed(layers) if "method.name" in layer), layers[0])
    if said is layers[0] or all(f"method.{option}" in said for option in ("trains", *MAIN_SIZES)):
        if fitting:
            print(f"warning: --method.name is {method.name!r}, and what trains is {fitting[0]}.", flush=True)
        return
    rule = f"{', '.join([*fitting, 'a name of your own'])}, or the sizes must change: {name} has {KNOWN_METHODS[name]}"
    raise OptionError("method.name", method.name, rule, said["method.name"].place)
