"""Where the paths of options are: below the home folder, and in a submitted job, whose working directory Ray deletes.

One rule for every option, whose annotation says what it is (`Read`, `Written`, `Texts`, `Models`, `Described`,
`Options`). A ~ at the beginning is the home folder, also where no shell has seen it: in a file, or behind `=`. In a
submitted job (`ray job submit`) what it writes goes below ~/domext_runs, and what it reads is looked for in the working
directory, which was submitted with it, and then there. There `runs`, the folder of all runs, is ~/domext_runs itself.
Absolute paths, addresses and names stay as they are. What is shared (cards, reports) names a file or folder by its last
part, whatever machine it lies on.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from typing import Any

from domext_ray.config.options.build import Setting, build, read_values, to_dict
from domext_ray.config.options.declare import DESCRIBED, FOUND, MODELS, OPTIONS, READ, TEXTS, WRITTEN, ConfigT
from domext_ray.config.options.kinds import Option, list_options
from domext_ray.errors import DomextError, OptionError
from domext_ray.files import split_paths

HOME, RUNS = "~/domext_runs", "runs"
ROLES = frozenset((READ, FOUND, WRITTEN, TEXTS, MODELS, DESCRIBED, OPTIONS))
"""What the annotation of an option says that has a path; see `declare`."""
NAMES = ("general-mini", "package-docs", "repair-notes", "none", "self")
"""What ships with the package, or is nothing: no paths."""
Change = Callable[[Option, str], str]
_PLACE = re.compile(r"(?<![^\s,=])(?:[~/]|(?!hf:)\w+://)[^,\n]*?([^/,\n]+)/*(?=\s*(?:,|$))")


def find_submission(environment: Mapping[str, str] = os.environ) -> str:
    """Return the id under which `ray job submit` has started this process; empty: something else has."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return str(json.loads(environment["RAY_JOB_CONFIG_JSON_ENV_VAR"])["metadata"]["job_submission_id"])
    return ""


def settle_paths(config: ConfigT, options: Mapping[str, Option], within: type) -> ConfigT:
    """Return a configuration with every path where its job has it.

    `options` are those that its job reads; a mapping of `Options` names options of `within`.
    """
    values = {name: attrgetter(name)(config) for name in options}
    settled = {name: _map_paths(options[name], value, within, _settle) for name, value in values.items()}
    changed = {name: Setting(value) for name, value in settled.items() if value != values[name]}
    return build(type(config), [read_values(type(config), to_dict(config)), changed]) if changed else config


@contextlib.contextmanager
def name_searched(config: Any, options: Mapping[str, Option], within: type, *paths: str) -> Iterator[None]:
    """Add to an error about what is not there where a submitted job has looked for it.

    `paths` are those that the job reads beside its options'; the rest is as of `settle_paths`.
    """
    try:
        yield
    except DomextError as error:
        missing = list[str]()

        def note(option: Option, path: str) -> str:
            missing.extend([path] if _is_relative(path) and not _exists(path) else [])
            return path

        for name, option in options.items() if find_submission() else ():
            _map_paths(option, attrgetter(name)(config), within, note)
        missing += [path for path in paths if _is_relative(path) and not _exists(path)]
        named = max((path for path in missing if path in str(error)), key=len, default="")
        if named and not isinstance(error, OptionError):
            looked = f"{named!r} was looked for in the working directory of this submitted job, and as"
            error.args = (f"{error} ({looked} {_move(named)}.)",)
        raise


def _settle(option: Option, path: str) -> str:
    path = os.path.expanduser(path)
    if WRITTEN not in option.tags or (READ in option.tags and _exists(path) and not _exists(find_output(path))):
        return find_input(path)
    if _is_relative(path) and ".." in path.split("/"):
        rule = f"a path without .., which a submitted job has below {HOME}, or an absolute one"
        raise OptionError(option.name, path, rule)
    return find_output(path)


def _map_paths(option: Option, value: Any, within: type, change: Change) -> Any:
    """Return the value of an option with each path in it changed."""
    if OPTIONS in option.tags:
        return _map_options(value, list_options(within), "", change)
    if isinstance(value, tuple):
        return tuple(_map_paths(option, item, within, change) for item in value)
    if not isinstance(value, str) or not value.strip() or not ROLES & option.tags:
        return value
    if DESCRIBED in option.tags:
        return change(option, value) if value.endswith((".yaml", ".yml")) else value
    if TEXTS in option.tags:
        paths = split_paths(value)
        changed = [change(option, path) for path in paths]
        return value if changed == paths else ",".join(changed)
    label, mark, model = value.partition("=") if MODELS in option.tags else ("", "", value)
    return f"{label}{mark}{change(option, model.strip())}" if "/" not in label else change(option, value)


def _map_options(value: Any, options: Mapping[str, Option], name: str, change: Change) -> Any:
    """The same within a mapping, however it is nested; `name` is the option, or the group, whose value this is."""
    if isinstance(value, Mapping):
        names = {key: _find_option(f"{name}.{key}", options) or name for key in value}
        return {key: _map_options(item, options, names[key], change) for key, item in value.items()}
    if isinstance(value, list):
        return [_map_options(item, options, name, change) for item in value]
    is_leaf = name in options and OPTIONS not in options[name].tags
    return _map_paths(options[name], value, type(None), change) if is_leaf else value


def _find_option(path: str, options: Mapping[str, Option]) -> str:
    """The option, or group of options, that the keys on the way to a value end with; empty if there is none."""
    parts = path.strip(".").split(".")
    ends = (".".join(parts[start:]) for start in range(len(parts)))
    return next((end for end in ends if any(f"{option}.".startswith(f"{end}.") for option in options)), "")


def find_input(path: str) -> str:
    """Return where a submitted job reads a path: as it is, or below ~/domext_runs if it is there alone."""
    is_there = _is_relative(path) and not _exists(path) and _exists(_move(path))
    return _move(path) if is_there else path


def find_output(path: str) -> str:
    """Return where a submitted job writes what a path names."""
    return _move(path) if _is_relative(path) else path


def require_lasting(option: str, path: str, instead: str = "") -> None:
    """Refuse to write into what went along with a submitted job.

    `path` is settled; `instead` says what else may be given, such as "given with --output".
    """
    if _is_relative(path):
        rule = f"absolute, or below {HOME}{instead and f', or {instead}'}: a submitted job has a copy of the working"
        raise OptionError(option, path, f"{rule} directory, and what is written there is gone with it")


def _is_relative(path: str) -> bool:
    is_name = path in NAMES or path.startswith(("/", "~")) or "://" in path
    return bool(path) and not is_name and bool(find_submission())


def _move(path: str) -> str:
    """A relative path as one below ~/domext_runs."""
    parts = [part for part in path.split("/") if part not in ("", ".")]
    return os.path.join(os.path.expanduser(HOME), *(parts[1:] if parts[:1] == [RUNS] else parts))


def _exists(path: str) -> bool:
    """Whether something has a path, or matches it; of BANK:NAME the bank counts."""
    forms = filter(None, (path, path.rpartition(":")[0]))
    return any(os.path.lexists(form) or glob.glob(form, recursive=True) for form in forms)


def hide_places(value: Any) -> Any:
    """Return text, or JSON, with every absolute path and address replaced by its last part.

    Hub ids, relative paths and other text stay as they are. Lists of paths are those of options: `/a/b.txt, NAME=~/c`.
    """
    if isinstance(value, str):
        return _PLACE.sub(r"\1", value)
    if isinstance(value, dict):
        return {name: hide_places(item) for name, item in value.items()}
    return [hide_places(item) for item in value] if isinstance(value, (list, tuple)) else value
