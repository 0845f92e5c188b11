"""A search space: options of a sweep with the values that they may take -> points, and points -> configurations.

    space:
      method.heads: {choice: [0, 1, 2]}
      method.ffn_units: {int: [0, 1024], step: 64}
      optim.lr: {log: [1e-4, 3e-3]}                      # log-uniform; float: uniform
      finetune.grid.lr: {choice: [1e-4, 3e-4]}
      kind:                                              # no option of its own: named bundles of options
        choice:
          af: {method.heads: 1}
          words: {vocab.size: 2000, method.heads: 0}
      vocab.min_frequency: {choice: [2, 5], if: {kind: words}}

A dimension whose condition does not hold has no value in a point; its option keeps the sweep's own.
"""

from __future__ import annotations

import difflib
import functools
import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import optuna

from domext_ray.config.finetune import FinetuneConfig
from domext_ray.config.options.build import from_dict, identity_of, merge_options, to_dict
from domext_ray.config.pretrain import PretrainConfig
from domext_ray.config.sweep import SweepConfig
from domext_ray.errors import ConfigError
from domext_ray.storage import hash_text

Point = dict[str, Any]
"""Value of every dimension whose condition holds: a number, a string, or the name of a bundle."""

FINETUNE = "finetune."
_RANGES = {"int": (int, False), "log_int": (int, True), "float": (float, False), "log": (float, True)}
# What a sweep decides itself for every trial.
_RESERVED = (
    *("run.", "scale.", "train.max_", "train.long_", "optim.decay_steps", "init_from", "dry_run", "finetune.dry_run"),
    *("finetune.task", "finetune.data", "finetune.model", "finetune.against", "finetune.keep_head", "finetune.export"),
    *("finetune.run.", "finetune.scale.", "finetune.labelled.num_examples", "finetune.labelled.examples_seed"),
)
# What decides a prepared corpus or its tokenizer: prepared once for all trials, so its values must be countable.
PREPARATION = (
    *("base", "corpus", "prepare.", "vocab.", "train.seq_length", "objective.next_sentence", "shape."),
    *("replay.corpus", "objective.keep"),
)


@dataclass(frozen=True)
class Dimension:
    """One dimension of a space."""

    name: str  # an option, or a name of its own where the choices are bundles
    choices: tuple[Any, ...] = ()  # the values, or the names of bundles; empty: a range
    bundles: Mapping[str, dict[str, Any]] | None = None  # options by the name of the bundle; None: it is an option
    low: float = 0.0  # of a range
    high: float = 0.0
    step: int = 1  # of an "int" range
    kind: str = "choice"  # or of a range "int", "log_int", "float" or "log"
    condition: tuple[tuple[str, tuple[Any, ...]], ...] = ()  # values of earlier dimensions, one of which each must have

    @property
    def options(self) -> tuple[str, ...]:
        """The options that it sets."""
        if self.bundles is None:
            return (self.name,)
        return tuple(dict.fromkeys(option for bundle in self.bundles.values() for option in bundle))

    def holds(self, point: Point) -> bool:
        """Whether it has a value beside those of the dimensions before it."""
        return all(point.get(name) in allowed for name, allowed in self.condition)

    def expand(self, value: Any) -> dict[str, Any]:
        """Return the options that a value stands for."""
        return {self.name: value} if self.bundles is None else dict(self.bundles[value])

    def suggest(self, trial: Any) -> Any:
        """Return the value that an Optuna trial suggests."""
        if self.kind == "choice":
            return trial.suggest_categorical(self.name, list(self.choices))
        if self.kind == "int":
            high = int(self.low) + (int(self.high) - int(self.low)) // self.step * self.step
            return trial.suggest_int(self.name, int(self.low), high, step=self.step)
        if self.kind == "log_int":
            return trial.suggest_int(self.name, int(self.low), int(self.high), log=True)
        return trial.suggest_float(self.name, self.low, self.high, log=self.kind == "log")


@dataclass(frozen=True)
class Space:
    """The dimensions of a sweep, in the order of its file."""

    dimensions: tuple[Dimension, ...]

    def suggest(self, trial: Any) -> Point:
        """Return the point that an Optuna trial suggests."""
        point: Point = {}
        for dimension in self.dimensions:
            if dimension.holds(point):
                point[dimension.name] = dimension.suggest(trial)
        return point

    def sample(self, seed: int) -> Iterator[Point]:
        """Return points at random, without end."""
        study = make_study(optuna.samplers.RandomSampler(seed))
        while True:
            yield self.suggest(study.ask())

    def list_grid(self) -> list[Point]:
        """Return all points; a dimension that is a range is a ConfigError."""
        for dimension in self.dimensions:
            if dimension.kind != "choice":
                raise ConfigError(
                    f"space.{dimension.name} is a range; it must be a choice with --search.searcher grid."
                )
        return _list_points(self.dimensions)

    def list_preparations(self) -> list[Point]:
        """Return the points over the dimensions that decide a corpus or a tokenizer, and those that they depend on."""
        names = {
            dimension.name for dimension in self.dimensions if any(_is_prepared(option) for option in dimension.options)
        }
        for dimension in reversed(self.dimensions):
            if dimension.name in names:
                names |= {name for name, _ in dimension.condition}
        return _list_points([dimension for dimension in self.dimensions if dimension.name in names])


def make_study(sampler: Any, **options: Any) -> optuna.Study:
    """Return an Optuna study, which says nothing by itself."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna.create_study(sampler=sampler, **options)


def _list_points(dimensions: Any) -> list[Point]:
    points: list[Point] = [{}]
    for dimension in dimensions:
        points = [
            more
            for point in points
            for more in (
                [{**point, dimension.name: value} for value in dimension.choices] if dimension.holds(point) else [point]
            )
        ]
    return points


def _is_prepared(option: str) -> bool:
    return any(option.startswith(name) if name.endswith(".") else option == name for name in PREPARATION)


def read_space(space: Mapping[str, Any]) -> Space:
    """Read and check a space."""
    known = [*_list_options(to_dict(PretrainConfig())), *_list_options(to_dict(FinetuneConfig()), FINETUNE)]
    dimensions: list[Dimension] = []
    for name, values in space.items():
        dimension = _read_dimension(str(name), values, {earlier.name for earlier in dimensions})
        for option in dimension.options:
            _check_option(option, known)
        dimensions.append(dimension)
    for option, names in itertools.groupby(
        sorted((option, dimension.name) for dimension in dimensions for option in dimension.options),
        key=lambda pair: pair[0],
    ):
        own = [name for _, name in names]
        if len(own) > 1:
            raise ConfigError(f"space.{own[0]} and space.{own[1]} both set {option}; it must be in one of them.")
    return Space(tuple(dimensions))


def _list_options(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _list_options(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def _check_option(option: str, known: list[str]) -> None:
    if option not in known:
        near = difflib.get_close_matches(option, known, n=1)
        hint = f"; did you mean {near[0]}?" if near else "; --help lists them."
        raise ConfigError(f"space has {option!r}, which is no option{hint}")
    if any(option.startswith(prefix) for prefix in _RESERVED):
        raise ConfigError(f"space has {option!r}, which the sweep decides itself; take it out.")


def _read_dimension(name: str, values: Any, earlier: set[str]) -> Dimension:
    kinds = [known for known in ("choice", *_RANGES) if isinstance(values, dict) and known in values]
    if len(kinds) != 1:
        raise ConfigError(f"space.{name} is {values!r}; it must have one of choice, {', '.join(_RANGES)}.")
    kind, given = kinds[0], values[kinds[0]]
    allowed = {kind, "if", *(("step",) if kind == "int" else ())}
    wrong = [key for key in values if key not in allowed]
    if wrong:
        raise ConfigError(f"space.{name} has {wrong[0]!r}; beside {kind} it may have {', '.join(allowed - {kind})}.")
    condition = _read_condition(name, values.get("if", {}), earlier)
    if kind == "choice":
        return Dimension(name, *_read_choices(name, given), condition=condition)
    number = _RANGES[kind][0]
    try:
        low, high = (number(float(bound)) for bound in given)
    except (TypeError, ValueError):
        raise ConfigError(f"space.{name}.{kind} is {given!r}; it must be the smallest and largest value.") from None
    step = values.get("step", 1)
    if not low < high or (_RANGES[kind][1] and low <= 0) or not isinstance(step, int) or step < 1:
        rule = "above 0 and rising" if _RANGES[kind][1] else "rising, with a whole step of 1 or more"
        raise ConfigError(f"space.{name}.{kind} is {given!r}; it must be {rule}.")
    return Dimension(name, low=low, high=high, step=step, kind=kind, condition=condition)


def _read_choices(name: str, given: Any) -> tuple[tuple[Any, ...], dict[str, dict[str, Any]] | None]:
    if isinstance(given, list) and given:
        twice = [value for i, value in enumerate(given) if value in given[:i]]
        if twice:
            raise ConfigError(f"space.{name}.choice has {twice[0]!r} twice; its values must be different.")
        return tuple(given), None
    if isinstance(given, dict) and given and all(isinstance(options, dict) for options in given.values()):
        bundles = {str(bundle): dict(options) for bundle, options in given.items()}
        return tuple(bundles), bundles
    raise ConfigError(f"space.{name}.choice is {given!r}; it must be a list of values, or named options.")


def _read_condition(name: str, condition: Any, earlier: set[str]) -> tuple[tuple[str, tuple[Any, ...]], ...]:
    if not isinstance(condition, dict) or not set(map(str, condition)) <= earlier:
        raise ConfigError(f"space.{name}.if is {condition!r}; it must be values of dimensions above it.")
    return tuple(
        (str(key), tuple(values) if isinstance(values, list) else (values,)) for key, values in condition.items()
    )


@dataclass(frozen=True)
class TrialConfig:
    """What one point of a space is trained and scored with."""

    pretrain: PretrainConfig  # without its limit and its place
    finetune: FinetuneConfig  # without task, set and model


def configure(config: SweepConfig, space: Space, point: Point) -> TrialConfig:
    """Return the configuration of a point; values that do not go together are a ConfigError."""
    nested: dict[str, Any] = {}
    for dimension in space.dimensions:
        for option, value in dimension.expand(point[dimension.name]).items() if dimension.name in point else ():
            *sections, name = option.split(".")
            functools.reduce(lambda group, section: group.setdefault(section, {}), sections, nested)[name] = value
    finetune = cast("dict[str, Any]", nested.pop(FINETUNE.rstrip("."), {}))
    try:
        return TrialConfig(
            from_dict(PretrainConfig, merge_options(to_dict(config.common), nested)),
            from_dict(FinetuneConfig, merge_options(to_dict(config.finetune), finetune)),
        )
    except ConfigError as error:
        raise ConfigError(" ".join(str(error).split())) from error


def describe_point(point: Mapping[str, Any]) -> str:
    """Return a point in a line."""
    return ", ".join(
        f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}" for name, value in point.items()
    )


def name_preparation(config: PretrainConfig) -> str:
    """Return a name for everything that a tokenizer and a corpus are made from."""
    identity = identity_of(config)
    parts = {name: identity[name.rstrip(".").split(".")[0]] for name in PREPARATION if name.endswith(".")}
    parts |= {"base": config.base, "corpus": config.corpus, "length": config.train.seq_length}
    parts |= {"pairs": config.objective.next_sentence}
    if config.replay.corpus:
        parts |= {"replay": config.replay.corpus, "keep": config.objective.keep}
    if config.mixture.parts:
        parts |= {"mixture": config.mixture.parts, "keep": config.objective.keep}
    if config.base != "none":
        del parts["shape."]
    return hash_text(json.dumps(parts, sort_keys=True, default=str))[:16]
