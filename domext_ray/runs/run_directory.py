"""A run's directory: where it is, whose it is, who holds it, and whether it is finished."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar, cast

from domext_ray.config.pretrain import PretrainConfig, resolve_warmup_steps
from domext_ray.config.identity import describe_difference, dump_yaml, from_dict
from domext_ray.errors import ConfigError, DomextError, RunError, find_user_error
from domext_ray.files import Kind, read_json, read_text, read_yaml
from domext_ray.storage import hash_text, write_json, write_text

ConfigT = TypeVar("ConfigT")

SUBMITTED_RUNS = Path("~/domext_runs")
CONFIG, IDENTITY, MADE_WITH = "config.yaml", "identity.json", "made_with.json"
_PACKAGES = ("domext_ray", "torch", "ray", "transformers", "deepspeed", "tokenizers", "numpy")
_SEAL = "# sha256 of the lines below: "
_CONFIG_REMEDY = "bring back a copy of it, or run its own command again, which writes it anew"
_IDENTITY_REMEDY = "bring back a copy of it, delete the run directory, or give another --run.name"
_SAME_BYTES = {
    "base": "base_sha256",
    "corpus": "corpus_fingerprint",
    "init_from": "init_sha256",
    "model": "model_sha256",
    "data": "data_sha256",
    "input": "input_sha256",
}
"""Options that say where something is, by the hash of what is there: where the hash is equal, it has only moved."""


@dataclass(frozen=True)
class RunPaths:
    """Places of one run.

    Args:
        run: the run's directory.
        corpora: folder of prepared corpora, shared by the runs beside it.
    """

    run: Path
    corpora: Path


def resolve_paths(config: PretrainConfig) -> RunPaths:
    """Say where a run lives."""
    root = resolve_root(config.run.dir)
    cache = Path(config.prepare.cache_dir).expanduser().resolve() if config.prepare.cache_dir else root / ".corpora"
    return RunPaths(root / (config.run.name or config.method.name), cache)


def resolve_root(directory: str) -> Path:
    """Return the folder of all runs.

    A submitted job (`ray job submit`) runs in a copy of the working directory that a resubmission does not find
    again, so there a relative --run.dir stands below ~/domext_runs.

    Args:
        directory: --run.dir.

    Raises:
        RunError: it is, or is below, something that is no folder.
    """
    root = Path(directory).expanduser()
    if not root.is_absolute() and os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR"):
        root = SUBMITTED_RUNS.expanduser() / ("" if directory == "runs" else root)
    root = root.resolve()
    place = next((each for each in (root, *root.parents) if each.exists()), root)
    if place.exists() and not place.is_dir():
        raise RunError(f"--run.dir is {directory!r}, and {place} is no folder; give a folder.")
    return root


def resolve_schedule(config: PretrainConfig, run_dir: Path) -> PretrainConfig:
    """Fix the schedule's horizon: the option's, or the one that the run started with, or its first limit.

    Beyond it the learning rate is 0, so no run goes there, whatever its limit on tokens or seconds. While
    `train.max_steps` is 0 (the corpus will say how many), so is the horizon of a run that starts.

    Raises:
        ConfigError: `train.max_steps` lies beyond it.
    """
    stored = read_identity(run_dir, {"optim.decay_steps": int})
    decay_steps = config.optim.decay_steps or (stored["optim"]["decay_steps"] if stored else config.train.max_steps)
    if config.train.max_steps > decay_steps:
        _check_steps(config, decay_steps, run_dir if stored else None)
        config = replace(config, train=replace(config.train, max_steps=decay_steps))
    resolved = replace(config, optim=replace(config.optim, decay_steps=decay_steps))
    return replace(
        resolved,
        optim=replace(resolved.optim, warmup_steps=resolve_warmup_steps(resolved)),
    )


def keep_precision(config: ConfigT, run_dir: Path) -> ConfigT:
    """Let `--engine.precision auto` be what a run began with, whatever machine it goes on at."""
    engine = cast(Any, config).engine
    if engine.precision != "auto" or not (run_dir / CONFIG).is_file():
        return config
    try:
        stored = cast(Any, read_config(run_dir, type(config)))
    except RunError:  # a damaged one is written anew
        return config
    return replace(cast(Any, config), engine=replace(engine, precision=stored.engine.precision))


def _check_steps(config: PretrainConfig, decay_steps: int, run_dir: Path | None) -> None:
    """Refuse steps beyond the schedule, unless another limit may end the run before."""
    steps = config.train.max_steps
    options = "--train.max_steps and epochs make" if config.train.epochs else "--train.max_steps is"
    if config.train.max_tokens or config.train.max_seconds:
        print(f"note: the run ends at step {decay_steps:,} at the latest, where its schedule does.", flush=True)
    elif run_dir is None:
        raise ConfigError(
            f"{options} {steps}; it must be at most --optim.decay_steps ({decay_steps}), where the learning rate is 0."
        )
    else:
        more = describe_continuation(config, run_dir, f" --train.max_steps {steps - decay_steps}")
        raise ConfigError(
            f"{options} {steps}; the schedule of {run_dir} ends at step {decay_steps}, and later steps "
            f"would learn nothing: {more}."
        )


def describe_continuation(config: PretrainConfig, run_dir: Path, options: str = "") -> str:
    """Return how the weights of a run whose schedule has ended train on, as a part of a sentence."""
    start = f"--init_from {run_dir}" if config.base != "none" else f"--base {run_dir / 'export'}"
    return f"{start} --run.name NEW{options} trains its weights on"


def check_identity(run_dir: Path, identity: Mapping[str, Any]) -> None:
    """Refuse a run directory that was made by a run of another identity; what has only moved is the same.

    Args:
        run_dir: the run's directory.
        identity: of the run that is asked for, or a part of it.

    Raises:
        RunError: naming every option that differs.
    """
    stored = read_identity(run_dir)
    if stored is None:
        return
    moved = {name for name, key in _SAME_BYTES.items() if stored.get(key) and stored[key] == identity.get(key)}
    compared = [name for name in identity if name in stored and name not in moved]
    old, new = ({name: each[name] for name in compared} for each in (stored, identity))
    differing = describe_difference(old, new)
    if differing:
        raise RunError(
            f"the run directory {run_dir} belongs to another run ({'; '.join(differing)}); "
            "give another --run.name, or the options that it was made with."
        )


def read_identity(run_dir: Path, expected: Mapping[str, Kind] | None = None) -> dict[str, Any] | None:
    """Return the identity that a run's directory was made with; None before its first start.

    Args:
        run_dir: the run's directory.
        expected: see `files.read_json`.

    Raises:
        RunError: identity.json is damaged.
    """
    path = run_dir / IDENTITY
    return read_json(path, _IDENTITY_REMEDY, expected) if path.exists() else None


def write_identity(run_dir: Path, identity: Mapping[str, Any]) -> None:
    """Write what a run is recognised by."""
    write_json(run_dir / IDENTITY, identity)


def check_made_with(run_dir: Path, order: Mapping[str, Any]) -> list[str]:
    """Refuse to go on with a run whose rows or masks this version would draw in another way.

    Args:
        run_dir: the run's directory.
        order: what decides them in this version, beside the run's options.

    Returns:
        Packages that have changed since the run's last start, as `name: old -> new`.

    Raises:
        RunError: naming what differs, or made_with.json is damaged.
    """
    if not (run_dir / IDENTITY).exists():
        return []
    stored = _read_made_with(run_dir)
    differing = describe_difference(stored.get("order", order), dict(order))
    versions = (stored.get("versions") or [{}])[-1]
    if differing:
        by = f" with domext_ray {versions['domext_ray']}" if "domext_ray" in versions else ""
        raise RunError(
            f"the run in {run_dir} draws rows and masks in another way than this version ({'; '.join(differing)}); "
            f"finish it{by or ' with the version that made it'}, or give another --run.name."
        )
    now = list_versions()
    return describe_difference({name: now[name] if name not in versions else versions[name] for name in now}, now)


def write_made_with(run_dir: Path, order: Mapping[str, Any], step: int) -> None:
    """Record what a run is made with from a step on: versions of packages, and what decides its rows and masks."""
    history = [each for each in _read_made_with(run_dir).get("versions", []) if each["from_step"] <= step]
    now = list_versions()
    if not history or {**history[-1], "from_step": 0} != {**now, "from_step": 0}:
        history.append({"from_step": step, **now})
    write_json(run_dir / MADE_WITH, {"order": order, "versions": history})


def list_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that decide what a run computes."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):  # this one may run from its source
            found[name] = version(name)
    return found


def _read_made_with(run_dir: Path) -> dict[str, Any]:
    path = run_dir / MADE_WITH
    if not path.exists():
        return {}
    remedy = "bring back a copy of it, or delete it: only the record of the versions is lost with it"
    values = read_json(path, remedy, {"order": dict, "versions": list})
    if not all(isinstance(each, dict) and isinstance(each.get("from_step"), int) for each in values["versions"]):
        raise RunError(f"{path} has versions of something else; {remedy}.")
    return values


def write_config(run_dir: Path, config: Any) -> None:
    """Write a run's options, with a first line that tells whether all of them are still there."""
    text = dump_yaml(config)
    write_text(run_dir / CONFIG, f"{_SEAL}{hash_text(text)}\n{text}")


def read_config(run_dir: Path, config_class: type[ConfigT]) -> ConfigT:
    """Return the options of a run.

    Args:
        run_dir: the run's directory.
        config_class: what its options are.

    Raises:
        RunError: `run_dir` is no run directory, or its config.yaml is not what a run wrote.
    """
    path = run_dir / CONFIG
    if not path.is_file():
        raise RunError(f"{run_dir} is no run directory: it has no {CONFIG}; give one that a job made.")
    text = read_text(path, _CONFIG_REMEDY)
    first, _, rest = text.partition("\n")
    if first.startswith(_SEAL) and first != f"{_SEAL}{hash_text(rest)}":
        raise RunError(f"{path} is damaged or was edited (its first line has another sha256); {_CONFIG_REMEDY}.")
    values = read_yaml(path, _CONFIG_REMEDY, text)
    try:
        return from_dict(config_class, values)
    except Exception as error:  # of the decoder's many kinds
        cause = " ".join(str(find_user_error(error) or error).split()).removesuffix(".")
        raise RunError(f"{path} cannot be used ({cause}); {_CONFIG_REMEDY}.") from error


@contextlib.contextmanager
def hold_run(run_dir: Path) -> Iterator[None]:
    """Make a run's directory and hold it against a second job; a killed job lets go by itself.

    A mistake that shows before the run has an identity (an empty corpus, say) leaves no new directory behind. A job
    that is stopped leaves what it has made, a learned vocabulary for example; so does one that finds its disk full.

    Raises:
        RunError: another job holds it, or it cannot be made.
    """
    made = [each for each in (run_dir, *run_dir.parents) if not each.exists()]
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        lock = (run_dir / ".lock").open("a")
    except OSError as error:
        raise RunError(
            f"the run directory {run_dir} cannot be made ({error.strerror}); give another --run.dir."
        ) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RunError(
                f"another job is working in {run_dir}; wait for it, stop it, or give another --run.name."
            ) from error
        except OSError as error:
            raise RunError(
                f"the file system of {run_dir} cannot lock files ({error.strerror}), so two jobs could write one run; "
                "give a --run.dir on another one."
            ) from error
        try:
            yield
        except BaseException as error:
            is_mistake = isinstance(error, DomextError) and not isinstance(error, RunError)
            is_empty = {each.name for each in run_dir.glob("*")} <= {".lock"}
            if made and (is_mistake or is_empty) and not (run_dir / "identity.json").exists():
                shutil.rmtree(run_dir, ignore_errors=True)
                for each in made[1:]:
                    with contextlib.suppress(OSError):  # others may have put something there
                        each.rmdir()
            raise
