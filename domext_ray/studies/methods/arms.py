"""Presets become arms: what a study trains side by side, each at one size, with or without general text.

Enters: a `StudyConfig`. Leaves: an `Arm` per method, and of those that have a size one per
budget, with its parameters counted. Nothing is started or written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from domext_ray.config.extensions.table import SIZES
from domext_ray.config.jobs import StudyConfig, check_limits
from domext_ray.config.method import KNOWN_METHODS, list_names
from domext_ray.config.options.build import from_dict, merge_options, to_dict
from domext_ray.config.options.declare import require
from domext_ray.config.pretrain import PretrainConfig, ReplayConfig
from domext_ray.errors import ConfigError
from domext_ray.model.base import Base
from domext_ray.model.spec import ModelSpec
from domext_ray.pretraining.plan import size_model

_SECTIONS = ("method", "optim", "vocab", "objective", "train", "replay", "init_from")  # what a preset may say
_KEEPING = ("keep", "keep_weight")
_PARTS = (*SIZES, "top_layers")


@dataclass(frozen=True)
class Arm:
    """A method of a study at one size, before its first step."""

    name: str  # the preset's; with --budgets PRESET@BUDGET
    preset: str
    config: PretrainConfig  # its runs, without seed, name and limits
    spec: ModelSpec  # its model, the sizes solved from the budget


def choose_presets(config: StudyConfig) -> dict[str, dict[str, Any]]:
    """Return the presets of the methods that are compared; one that says what a study decides is a ConfigError."""
    presets = config.presets
    for name in config.methods:
        preset = presets[name]
        wrong = (
            [preset] if not isinstance(preset, dict) else [section for section in preset if section not in _SECTIONS]
        )
        if wrong:
            raise ConfigError(f"the preset {name!r} has {wrong[0]!r}; it may have {', '.join(_SECTIONS)}.")
    return {name: presets[name] for name in config.methods}


def keeps(preset: Mapping[str, Any]) -> bool:
    """Whether a method reads general text beside the domain's: its preset says how much, or what it teaches."""
    return "replay" in preset or any(name in preset.get("objective", {}) for name in _KEEPING)


def make_configs(config: StudyConfig, name: str, preset: Mapping[str, Any]) -> dict[str, PretrainConfig]:
    """Return what a method's runs have in common, by the names of its arms: one, or with --budgets one per budget."""
    made = _read_preset(config, name, preset)
    if not made.method.is_sized or "trainable_budget" in preset.get("method", {}):
        return {name: made}
    budgets = {f"{name}@{budget:g}": budget for budget in config.budgets} or {name: config.budget}
    return {arm: replace(made, method=replace(made.method, trainable_budget=budget)) for arm, budget in budgets.items()}


def _read_preset(config: StudyConfig, name: str, preset: Mapping[str, Any]) -> PretrainConfig:
    shared = ("base", "corpus", "prepare", "objective", "train", "optim", "engine", "scale")
    common = PretrainConfig(
        **{field: getattr(config, field) for field in shared}, replay=config.replay if keeps(preset) else ReplayConfig()
    )
    named = merge_options(preset, {"method": {**preset.get("method", {}), "name": name}})
    try:
        made = from_dict(PretrainConfig, merge_options(to_dict(common), named))
        check_limits(made.train, made.optim)
        made = replace(made, optim=replace(made.optim, lr_width=0))  # the study warns of it, once
    except ConfigError as error:
        raise ConfigError(f"the preset {name!r} cannot be used: {' '.join(str(error).split())}") from error
    if name in KNOWN_METHODS and name not in list_names(made.method, made.vocab.extends_base):
        raise ConfigError(
            f"the preset {name!r} must have {KNOWN_METHODS[name]}, or another name than a known method's."
        )
    if keeps(preset) and not made.replay.corpus:
        raise ConfigError(
            f"the method {name!r} reads general text beside the domain's; give --replay.corpus (self: the base writes "
            "it), or leave it out of --methods."
        )
    kind = made.objective.kind
    require(kind == "masked", "objective.kind", kind, "masked in a study, whose measures ask for masked words")
    return made


def plan_arms(
    config: StudyConfig, presets: Mapping[str, Mapping[str, Any]], base: Base
) -> tuple[dict[str, Arm], dict[str, str]]:
    """Solve the sizes of all methods and count their parameters, before new words are learned.

    Returns the arms by name, and those of --budgets that no size of their method meets, with the reason.
    """
    arms: dict[str, Arm] = {}
    left_out: dict[str, str] = {}
    for preset, options in presets.items():
        refused: dict[str, ConfigError] = {}
        configs = make_configs(config, preset, options)
        for name, made in configs.items():
            try:
                spec = size_model(made, base)
                arms[name] = Arm(name, preset, made, spec)
            except ConfigError as error:
                refused[name] = error
        if len(refused) == len(configs):
            name, reason = next(iter(refused.items()))
            raise ConfigError(f"the method {name!r} does not fit: {reason}") from reason
        left_out |= {name: str(error) for name, error in refused.items()}
    return arms, left_out


def describe_arms(arms: Mapping[str, Arm], *, tunes: bool) -> str:
    """Return every arm with its parameters, rate and sizes, as a dry run prints them."""
    width = max(6, *map(len, arms))
    lines = [f"{'method':<{width}}{'trained':>14}{'share':>8}{'rate':>10}  sizes"]
    for name, arm in arms.items():
        counts = arm.spec.counts
        parts = [f"{part} {getattr(arm.spec.method, part)}" for part in _PARTS if getattr(arm.spec.method, part)]
        parts += [f"{arm.config.vocab.size:,} new words"] if arm.config.vocab.size else []
        parts += [f"{arm.config.replay.frac:.0%} general rows"] if arm.config.replay.corpus else []
        parts += [] if arm.config.method.trainable_budget else ["no budget"]
        rate = "tuned" if tunes else f"{arm.config.optim.lr:g}"
        lines.append(
            f"{name:<{width}}{counts.trainable:>14,}{counts.trainable_frac:>8.1%}{rate:>10}  {', '.join(parts)}"
        )
    return "\n".join(lines)
