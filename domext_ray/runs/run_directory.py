"""A run's directory: where it is, whose it is, who holds it, and whether it is finished."""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

from domext_ray.config.options.build import describe_difference, dump_yaml, from_dict, list_differences, show_value
from domext_ray.config.options.kinds import list_gone
from domext_ray.config.options.yaml_text import parse_yaml
from domext_ray.config.pretrain import RunOptions, SettledConfig
from domext_ray.errors import ConfigError, RunError, find_user_error
from domext_ray.files import Kind, check_values, describe_format, newest_format, read_json, read_text
from domext_ray.runs.attempts import RUN as RUN
from domext_ray.runs.attempts import lock_folder
from domext_ray.storage import Place, find_cache, hash_text, write_json, write_text

ConfigT = TypeVar("ConfigT", bound=Any)

CONFIG = "config.yaml"
TRAININGS = "trainings"
"""Folder of a fine-tuning run alone: one JSON a training, and the tensors of the best one and its restarts."""
FORMAT = newest_format("run")
"""Of run.json."""
GONE_VALUES = {"objective.kind": "tsdae", "method.word_init": "distill"}
"""What runs of 0.1.0 may have, and this version has not."""
_PACKAGES = ("domext_ray", "torch", "ray", "transformers", "deepspeed", "tokenizers", "numpy")
_CONFIG_REMEDY = "bring back a copy of it, or run its own command again, which writes it anew"
_RUN_REMEDY = "bring back a copy of it, delete the run directory, or give another --run.name"
_CONTENTS = {
    "base_sha256": ("base", "other weights"),
    "corpus_fingerprint": ("corpus", "other text, or the tokenizer other entries,"),
    "replay_fingerprint": ("replay.corpus", "other text, or the tokenizer other entries,"),
    "part_fingerprint": ("mixture.parts", "other text, or the tokenizer other entries,"),
    "init_sha256": ("init_from", "another checkpoint"),
    "model_sha256": ("model", "other weights"),
    "against_sha256": ("against", "other weights"),
    "data_sha256": ("data", "other examples"),
    "input_sha256": ("input", "other rows"),
}
"""Hashes, some with a name after a dot: the option that says where that is, and what it has where they differ.

Where a hash is equal, what the option names has only moved.
"""


def name_run(folder: Path) -> str:
    """Return the name of the run that a folder is, or is the export of."""
    folder = folder.resolve()
    return folder.parent.name if folder.name == "export" else folder.name


@dataclass(frozen=True)
class RunPaths:
    """Places of one run."""

    run: Place  # its directory
    corpora: Place  # folder of prepared corpora, shared by the runs beside it
    scratch: Path  # of what libraries write by themselves: of a run in a bucket each machine's own


def resolve_paths(config: RunOptions) -> RunPaths:
    """Say where a run lives."""
    root = resolve_root(config.run.dir)
    run = root / (config.run.name or config.method.name)
    corpora = Place(config.prepare.cache_dir or root / ".corpora")
    return RunPaths(run, corpora, Path(run) if run.is_local else find_cache() / "runs" / hash_text(str(run))[:16])


def resolve_root(folder: str) -> Place:
    """Return the folder of all runs, given --run.dir; on a disk it is the folder that links lead to."""
    root = Place(folder).resolve()
    if root.is_local:
        above = root.local()
        while not above.exists():
            above = above.parent
        if not above.is_dir():
            raise RunError(f"--run.dir is {folder!r}, and {above} is no folder; give a folder.")
    return root


def resolve_schedule(config: SettledConfig, run_dir: Place) -> SettledConfig:
    """Fix the schedule's horizon: the option's, or the one that the run started with, or its first limit.

    Beyond it the learning rate is 0, so no run goes there, whatever its limit on tokens or seconds. While
    `train.max_steps` is 0 (the corpus will say how many), so is the horizon of a run that starts.
    """
    if (run_dir / TRAININGS).is_dir():
        raise RunError(f"the run directory {run_dir} belongs to a fine-tuned run; give another --run.name.")
    stored = read_identity(run_dir, {"optim.decay_steps": int})
    decay_steps = config.optim.decay_steps or (stored["optim"]["decay_steps"] if stored else config.train.max_steps)
    if config.train.max_steps > decay_steps:
        _check_steps(config, decay_steps, run_dir if stored else None)
        config = config.with_steps(decay_steps)
    return config.with_horizon(decay_steps)


def keep_precision(config: ConfigT, run_dir: Place) -> ConfigT:
    """Let `--engine.precision auto` be what a run began with, whatever machine it goes on at."""
    if config.engine.precision != "auto":
        return config
    try:
        engine = replace(config.engine, precision=read_config(run_dir, type(config)).engine.precision)
    except RunError:  # there is none yet, or it is damaged and written anew
        return config
    return replace(config, engine=engine)


def _check_steps(config: RunOptions, decay_steps: int, run_dir: Place | None) -> None:
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


def describe_continuation(config: RunOptions, run_dir: Place, options: str = "") -> str:
    """Return how the weights of a run whose schedule has ended train on, as a part of a sentence."""
    run = run_dir if run_dir.is_local else f"COPY-OF-{run_dir.name}"
    given = f"--init_from {run}" if config.base != "none" else f"--base {run}/export"
    return f"{given} --run.name NEW{options} trains its weights on"


def check_identity(
    run_dir: Place, identity: Mapping[str, Any], *, grows: bool = False, free: Collection[str] = ()
) -> None:
    """Refuse a run directory that was made by a run of another identity; what has only moved is the same.

    `identity` may be a part of one. With `grows` it may have what the stored one does not name; options that are `free`
    may have any value.
    """
    stored = read_identity(run_dir)
    if stored is None:
        return
    moved = {
        option for name, (option, _) in _CONTENTS.items() if stored.get(name) and stored[name] == identity.get(name)
    }
    compared = [name for name in identity if name not in moved and (name in stored or not grows)]
    old, new = ({name: values.get(name) for name in compared} for values in (stored, identity))
    differing = describe_other(old, new, free)
    if differing:
        raise RunError(
            f"the run directory {run_dir} belongs to another run ({'; '.join(differing)}); "
            "give another --run.name, or the options that it was made with."
        )


def describe_other(old: Mapping[str, Any], new: Mapping[str, Any], free: Collection[str] = ()) -> list[str]:
    """List in words in what two identities differ: options with both values, and of hashes what they are of.

    Options that are `free` may differ.
    """
    hashes = [name for name in {**old, **new} if name.partition(".")[0] in _CONTENTS]
    told = [(name, *values) for name, *values in list_differences(old, new) if name not in (*hashes, *free)]
    lines = [f"{_name_part(name)} {_tell_change(*values)}" for name, *values in told]
    for name in hashes:
        kind, _, of = name.partition(".")
        option, what = _CONTENTS[kind]
        is_told = any(f"{changed}.".startswith(f"{option}.") for changed, *_ in told)
        if old.get(name) != new.get(name) and not is_told:
            value = of if option == "mixture.parts" else repr(new.get(option) or "")
            lines.append(f"--{option} {value} has {what} than before".replace(" '' ", " "))
    return list(dict.fromkeys(lines))


def _name_part(name: str) -> str:
    """What a user calls a part of an identity: an option, a preset's, or what a base's config.json has."""
    group, _, rest = name.partition(".")
    if group == "base_shape":
        return f"the base's {rest or 'shape'}"
    return {"replay_frac": "--replay.frac", "marks": "the pair of marks around arguments"}.get(name, f"--{name}")


def _tell_change(before: Any, after: Any) -> str:
    was, now = ("left out" if value is None else show_value(value) for value in (before, after))
    return f"was {was} and is {now} now"


def read_run(run_dir: Place, expected: Mapping[str, Kind] | None = None) -> dict[str, Any]:
    """Return what run.json says of a run; empty before its first start. `expected` is `files.read_json`'s."""
    path = run_dir / RUN
    if not path.is_file():
        return {}
    values = read_json(path, _RUN_REMEDY, {"format": int})
    if (found := values.pop("format")) != FORMAT:
        fault = describe_format("run", found, _find_writer(values.get("versions")))
        raise RunError(f"{path} {fault}; go on with that version, or give another --run.name.")
    check_values(path, values, "JSON object", _RUN_REMEDY, {"identity": dict, **(expected or {})})
    return values


def _find_writer(versions: object) -> object:
    """Return the domext_ray that last worked on a run of any format; None where it does not say."""
    last = versions[-1] if isinstance(versions, list) and versions else None
    return last.get("domext_ray") if isinstance(last, dict) else None


def write_run(run_dir: Place, **parts: Any) -> None:
    """Write run.json; parts that are not given stay.

    They are "identity", what the run is recognised by; of pre-training also "order" and "versions", what its rows and
    masks follow from, and "origin", how it was started.
    """
    write_json(run_dir / RUN, {"format": FORMAT, **read_run(run_dir), **parts})


def read_identity(run_dir: Place, expected: Mapping[str, Kind] | None = None) -> dict[str, Any] | None:
    """Return the identity that a run's directory was made with, as `read_run` does; None before its first start."""
    names = {f"identity.{name}": kind for name, kind in (expected or {}).items()}
    identity: dict[str, Any] | None = read_run(run_dir, names).get("identity")
    if identity is None:
        return None
    for option in list_gone(SettledConfig):  # which decides nothing any more
        group, _, name = option.partition(".")
        if isinstance(options := identity.get(group), dict):
            options.pop(name, None)
    return identity


def check_order(run_dir: Place, order: Mapping[str, Any], added: Mapping[str, str]) -> list[str]:
    """Refuse to go on with a run whose rows or masks this version would draw in another way.

    Return what has changed since the run's last start: rules, and packages. `order` is what decides rows and masks in
    this version, beside the run's options; of what earlier versions did not have in it, `added` says what has changed
    by it.
    """
    stored = read_run(run_dir, {"order": dict, "versions": list})
    if not stored:
        return []
    versions, now = stored["versions"][-1], list_versions()
    later = [name for name in added if name not in stored["order"]]
    differing = describe_difference(stored["order"] | {name: order[name] for name in later}, dict(order))
    if differing:
        by = f"domext_ray {versions['domext_ray']}" if "domext_ray" in versions else "the version that made it"
        raise RunError(
            f"the run in {run_dir} draws rows and masks in another way than this version ({'; '.join(differing)}); "
            f"finish it with {by}, or give another --run.name."
        )
    changed = describe_difference({name: versions.get(name, now[name]) for name in now}, now)
    return [
        *(added[name] for name in later),
        *(f"{change} since this run's last start; losses may differ in their last digits" for change in changed),
    ]


def add_versions(run_dir: Place, step: int) -> list[dict[str, Any]]:
    """Return the versions that a run was made with, each from its step on, those of this process, from `step`, last."""
    history = [entry for entry in read_run(run_dir).get("versions", []) if entry["from_step"] <= step]
    now = {"from_step": step, **list_versions()}
    return history if history and {**history[-1], "from_step": step} == now else [*history, now]


def list_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that decide what a run computes."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):  # this one may run from its source
            found[name] = version(name)
    return found


def write_config(run_dir: Place, config: Any) -> None:
    """Write a run's options."""
    write_text(run_dir / CONFIG, dump_yaml(config))


def read_config(run_dir: Place, config_class: type[ConfigT]) -> ConfigT:
    """Return the options of a run; a RunError if it has none, or they are not what a run wrote."""
    path = run_dir / CONFIG
    if not path.is_file():
        raise RunError(f"{run_dir} is no run directory: it has no {CONFIG}; give one that a job made.")
    text = read_text(path, _CONFIG_REMEDY)
    try:
        values = parse_yaml(text, CONFIG).value
    except ConfigError as error:
        raise RunError(f"{path} is not valid YAML ({str(error).removesuffix('.')}); {_CONFIG_REMEDY}.") from error
    check_values(path, values, "YAML mapping", _CONFIG_REMEDY, {})
    try:
        return from_dict(config_class, values, is_stored=True)
    except Exception as error:  # of the decoder's many kinds
        if config_class is SettledConfig and (run_dir / TRAININGS).is_dir():
            raise RunError(
                f"{run_dir} is a fine-tuned run, whose model is its export ({run_dir / 'export'}); give a run of "
                "pre-training here."
            ) from None
        read_run(run_dir)  # of another format, it says so: its options may have other names
        for option, value in GONE_VALUES.items():
            group, _, name = option.partition(".")
            if isinstance(own := values.get(group), dict) and own.get(name) == value:
                raise RunError(
                    f"{path} has {option} {value}, which this version does not; go on with the run, and "
                    "export it, with domext_ray 0.1.0."
                ) from None
        cause = " ".join(str(find_user_error(error) or error).split()).removesuffix(".")
        raise RunError(f"{path} cannot be used ({cause}); {_CONFIG_REMEDY}.") from error


def lock_run(run_dir: Place) -> contextlib.AbstractContextManager[Place]:
    """Make a run's directory and hold it against a second job, as `attempts.lock_folder` does."""
    return lock_folder(run_dir, "the run directory", "--run.dir")
