"""Several methods at an equal trainable budget and for an equal time, several seeds each: what `domext compare` calls.

Enters: a `StudyConfig` and the methods' presets. Leaves: the study directory RUN.DIR/RUN.NAME with a run directory for
every method and seed, comparison.md, comparison.png and results.json. The same command goes on where it stopped.

A linear decay needs its horizon in steps before it starts, so equal seconds are made equal in steps that a short pilot
of each method times; the numbers are kept in steps.json. All pilots come first, then seeds are the outer loop and
methods the inner one, so that a machine whose speed drifts treats all methods alike.
"""

from __future__ import annotations

import math
import shutil
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from domext_ray.config.identity import from_dict, identity_of, to_dict
from domext_ray.config.jobs import StudyConfig
from domext_ray.config.method import KNOWN_METHODS, MethodConfig, list_names
from domext_ray.config.pretrain import PretrainConfig, RunConfig
from domext_ray.corpus.texts.sources import resolve_sources
from domext_ray.errors import ConfigError, RunError, find_user_error
from domext_ray.extensions.table import SIZES
from domext_ray.files import read_json, write_json, write_text
from domext_ray.inputs import run_preparation, run_vocabulary
from domext_ray.model.base import Base, load_base
from domext_ray.model.counts import ParameterCounts
from domext_ray.options.fields import require
from domext_ray.options.option_values import merge_options
from domext_ray.options.places import hide_places
from domext_ray.pipeline import run_pretraining
from domext_ray.plan import size_run
from domext_ray.report.summary import is_finished, read_summary
from domext_ray.runs.run_directory import (
    RunPaths,
    check_identity,
    hold_run,
    read_identity,
    resolve_paths,
    write_identity,
)
from domext_ray.study.tradeoff import MethodRuns, draw_study, format_study, make_base_figures, make_study, to_results
from domext_ray.training.evaluate import read_probe
from domext_ray.training.metrics import read_metrics

DEFAULT_NAME = "comparison"
PILOT_STEPS = 200
"""Steps of a pilot, at most; --pilot_seconds usually ends it earlier."""

MIN_PILOT_STEPS = 10
"""Steps of a pilot, at least, however long they take."""

PILOT_WARMUP_STEPS = 5
"""First steps of a pilot that are not timed, at most: memory is allocated and kernels are chosen in them."""

_STEPS_REMEDY = "bring back a copy of it, or give another --run.name"
_SECTIONS = ("method", "optim", "vocab", "objective", "train", "init_from")  # what a preset may say
_PARTS = (*SIZES, "top_layers")
_BASE = {"method": {"trains": "biases", "heads": 0, "ffn_units": 0}}  # starts from the base as it is


@dataclass(frozen=True)
class PlannedMethod:
    """A method of a study before its first step.

    Args:
        config: its runs, without seed, name and number of steps.
        sized: its method, the sizes solved from the budget.
        counts: its parameters.
    """

    config: PretrainConfig
    sized: MethodConfig
    counts: ParameterCounts


def read_presets(path: Path) -> dict[str, Any]:
    """Read the presets of a study's YAML file: options of a training job by the method's name."""
    return dict(yaml.safe_load(path.read_text(encoding="utf-8"))["presets"])


def run_study(config: StudyConfig, shipped: Mapping[str, Any]) -> Path:
    """Train every method on every seed and compare them.

    Args:
        config: the study; with `dry_run` everything is checked and the plan printed, and nothing is started or written.
        shipped: presets that `config.presets` adds to, or changes option by option.

    Returns:
        The study's directory.

    Raises:
        DomextError: any mistake of the user's, before anything is written where that can be known.
    """
    presets = choose_presets(config, shipped)
    configs = {name: make_method_config(config, name, preset) for name, preset in presets.items()}
    for each in configs.values():
        kind = each.objective.kind
        require(kind == "masked", "objective.kind", kind, "masked in a study, whose measures ask for masked words")
    base = load_base(config.base, next_sentence=config.objective.next_sentence)
    read_probe(config.train.general_probe)
    sources = resolve_sources(config.corpus, config.prepare)
    methods = {name: plan_method(each, base) for name, each in configs.items()}
    paths = _resolve_study_paths(config)
    identity = _describe_identity(config, presets, base.sha256, sources.fingerprint)
    _check_study(paths.run, identity)
    if config.dry_run:
        print(describe_plan(config, methods, paths))
        return paths.run
    print(f"study directory: {paths.run}", flush=True)
    with hold_run(paths.run):
        _run_all(config, configs, paths, identity)
    return paths.run


def choose_presets(config: StudyConfig, shipped: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the presets of the methods that are compared.

    Raises:
        ConfigError: a method has no preset, or a preset says what a study decides.
    """
    presets = merge_options(shipped, config.presets)
    for name in config.method_names:
        if name not in presets:
            raise ConfigError(
                f"--methods names {name!r}; it must be one of {', '.join(presets)}, or a name in --presets or "
                "in presets: of a --config_path file."
            )
        preset = presets[name]
        wrong = [preset] if not isinstance(preset, dict) else [each for each in preset if each not in _SECTIONS]
        if wrong:
            raise ConfigError(f"the preset {name!r} has {wrong[0]!r}; it may have {', '.join(_SECTIONS)}.")
    return {name: presets[name] for name in config.method_names}


def make_method_config(config: StudyConfig, name: str, preset: Mapping[str, Any]) -> PretrainConfig:
    """Return what the runs of a method have in common: the study's options, changed by the preset, and the budget.

    Raises:
        ConfigError: the preset has an unknown option, or a value outside its rule.
    """
    shared = ("base", "corpus", "prepare", "objective", "train", "optim", "engine", "scale")
    common = PretrainConfig(**{each: getattr(config, each) for each in shared})
    try:
        made = from_dict(
            PretrainConfig, merge_options(to_dict(common), merge_options(preset, {"method": _named(preset, name)}))
        )
    except Exception as error:  # of the decoder's many kinds
        cause = find_user_error(error) or error
        raise ConfigError(f"the preset {name!r} cannot be used: {' '.join(str(cause).split())}") from error
    if name in KNOWN_METHODS and name not in list_names(made.method, made.vocab.extends_base):
        raise ConfigError(
            f"the preset {name!r} must have {KNOWN_METHODS[name]}, or another name than a known method's."
        )
    if config.budget and made.method.is_sized:
        made = replace(made, method=replace(made.method, trainable_budget=config.budget))
    return made


def _named(preset: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {**preset.get("method", {}), "name": name}


def plan_method(config: PretrainConfig, base: Base) -> PlannedMethod:
    """Solve a method's sizes and count its parameters, before its new words are learned.

    Raises:
        ConfigError: the method does not fit the base, or no size of it meets the budget.
    """
    try:
        sized, _, counts = size_run(config, base)
    except ConfigError as error:
        raise ConfigError(f"the method {config.method.name!r} does not fit: {error}") from error
    return PlannedMethod(config, sized.method, counts)


def describe_plan(config: StudyConfig, methods: Mapping[str, PlannedMethod], paths: RunPaths) -> str:
    """Return what a dry run prints: every method with its sizes, parameters and rate, and what the study will take."""
    width = max(map(len, methods))
    lines = [f"{'method':<{width}}{'trained':>14}{'share':>8}{'rate':>10}  sizes"]
    for name, each in methods.items():
        parts = [f"{part} {getattr(each.sized, part)}" for part in _PARTS if getattr(each.sized, part)]
        parts += [f"{each.config.vocab.size:,} new words"] if each.config.vocab.size else []
        fixed = [] if each.config.method.trainable_budget else ["no budget"]
        lines.append(
            f"{name:<{width}}{each.counts.trainable:>14,}{each.counts.trainable_frac:>8.1%}"
            f"{each.config.optim.lr:>10g}  {', '.join([*parts, *fixed])}"
        )
    num_runs = len(methods) * config.seeds
    goal = f"{config.seconds:g} seconds" if config.seconds else f"{config.tokens:,} tokens"
    hours = f", {num_runs * config.seconds / 3600:.1f} hours of training" if config.seconds else ""
    return "\n".join(
        [
            *lines,
            f"{len(methods)} methods, {config.seeds} seeds, {goal} per run: {num_runs} runs{hours}; starts, "
            "evaluations and pilots come on top",
            f"study directory: {paths.run}",
            "dry run: nothing was started",
        ]
    )


def _resolve_study_paths(config: StudyConfig) -> RunPaths:
    named = replace(config.run, name=config.run.name or DEFAULT_NAME)
    return resolve_paths(PretrainConfig(run=named, prepare=config.prepare))


def _describe_identity(
    config: StudyConfig, presets: Mapping[str, Any], base_sha256: str, corpus_fingerprint: str
) -> dict[str, Any]:
    """What may not change in a study's directory; further methods and seeds may come."""
    identity = identity_of(config)
    scored = {name: getattr(config.train, name) for name in ("eval_rows", "general_probe")}
    return {
        **identity,
        "train": {**identity["train"], **scored},
        "base_sha256": base_sha256,
        "corpus_fingerprint": corpus_fingerprint,
        **{f"presets.{name}": preset for name, preset in presets.items()},
    }


def _check_study(folder: Path, identity: dict[str, Any]) -> None:
    stored = read_identity(folder) or {}
    compared = {name: each for name, each in identity.items() if name in stored or name[:8] != "presets."}
    check_identity(folder, compared, StudyConfig)


def _run_all(
    config: StudyConfig, methods: Mapping[str, PretrainConfig], paths: RunPaths, identity: dict[str, Any]
) -> None:
    """Score the base, learn vocabularies, time every method, then train every seed of every method."""
    folder = paths.run
    start = make_method_config(config, "base", _BASE)
    _train(config, start, paths, "base", config.seed, num_steps=1)
    stored = read_identity(folder) or {}
    write_identity(folder, {**stored, **identity})
    methods = {name: _provide_words(config, each, paths) for name, each in methods.items()}
    num_steps = _provide_steps(config, methods, paths)
    for i in range(config.seeds):
        seed = config.seed + i
        for k, (name, each) in enumerate(methods.items(), start=i * len(methods) + 1):
            print(
                f"\n[{k} of {config.seeds * len(methods)}] {name}, seed {seed}: {num_steps[name]:,} steps", flush=True
            )
            _train(config, each, paths, name_run(name, seed), seed, num_steps[name])
        text = _write_results(config, methods, folder, range(config.seed, seed + 1))
    print(f"\n{text}\ntable: {folder / 'comparison.md'}\npicture: {folder / 'comparison.png'}")


def name_run(method: str, seed: int) -> str:
    """Return the name of a run's directory in its study."""
    return f"{method}-seed{seed}"


def _train(config: StudyConfig, method: PretrainConfig, paths: RunPaths, name: str, seed: int, num_steps: int) -> None:
    """Make one run, or go on with it; a finished one is left as it is."""
    run = _place(config, method, paths, name)
    run = replace(
        run,
        seed=seed,
        train=replace(run.train, max_steps=num_steps),
        optim=replace(run.optim, decay_steps=num_steps),
    )
    if is_finished(paths.run / name, run):
        print(f"{name} is finished", flush=True)
    else:
        run_pretraining(run)


def _place(config: StudyConfig, method: PretrainConfig, paths: RunPaths, name: str) -> PretrainConfig:
    """Give a run its directory in the study; all runs share the prepared corpora."""
    run: RunConfig = replace(config.run, name=name, dir=str(paths.run))
    return replace(method, run=run, prepare=replace(method.prepare, cache_dir=str(paths.corpora)))


def _provide_words(config: StudyConfig, method: PretrainConfig, paths: RunPaths) -> PretrainConfig:
    """Learn the new words of a method once, so that its runs differ in their seeds only."""
    if not method.vocab.size:
        return method
    vocabulary = run_vocabulary(_place(config, method, paths, f"vocabulary-{method.method.name}"))
    assert vocabulary is not None, "no dry run"
    return replace(method, vocab=replace(method.vocab, size=0, words=str(vocabulary.folder), extend="", protected=""))


def _provide_steps(config: StudyConfig, methods: Mapping[str, PretrainConfig], paths: RunPaths) -> dict[str, int]:
    """Return the steps of a run of each method, counted once and kept in steps.json."""
    path = paths.run / "steps.json"
    known = read_json(path, _STEPS_REMEDY) if path.exists() else {}
    for name, each in known.items():
        if not isinstance(each, dict) or not isinstance(each.get("steps"), int):
            raise RunError(f"{path} has no number of steps for {name!r}; {_STEPS_REMEDY}.")
    for name, method in methods.items():
        if name not in known:
            known[name] = (_time_steps if config.seconds else _count_tokens)(config, method, paths)
            write_json(path, known)
            _drop_model(paths.run / f"pilot-{name}")
    return {name: known[name]["steps"] for name in methods}


def _time_steps(config: StudyConfig, method: PretrainConfig, paths: RunPaths) -> dict[str, Any]:
    """Train a method for a moment: how many steps fit into the study's seconds."""
    name = f"pilot-{method.method.name}"
    print(f"\npilot of {method.method.name}: {config.pilot_seconds:g} seconds", flush=True)
    pilot = _place(config, method, paths, name)
    rare = PILOT_STEPS + 1
    pilot = replace(
        pilot,
        seed=config.seed,
        train=replace(
            pilot.train,
            max_steps=PILOT_STEPS,
            max_seconds=config.pilot_seconds,
            eval_every=rare,
            checkpoint_every=rare,
            eval_rows=1,
        ),
        optim=replace(pilot.optim, decay_steps=PILOT_STEPS, warmup_steps=0),
    )
    run_pretraining(pilot)
    records = read_metrics(paths.run / name / "metrics.jsonl")
    if records[-1]["step"] < MIN_PILOT_STEPS:  # the clock ended it too early: it goes on
        run_pretraining(replace(pilot, train=replace(pilot.train, max_steps=MIN_PILOT_STEPS, max_seconds=0.0)))
        records = read_metrics(paths.run / name / "metrics.jsonl")
    seconds = estimate_step_seconds(each["time/step_seconds"] for each in records if "time/step_seconds" in each)
    return {
        "steps": max(1, round(config.seconds / seconds)),
        "step_seconds": seconds,
        "pilot_steps": records[-1]["step"],
    }


def estimate_step_seconds(seconds: Iterable[float]) -> float:
    """Return the median of a pilot's steps, its first ones left out."""
    values = list(seconds)
    num_warmup = min(PILOT_WARMUP_STEPS, len(values) // 3)
    return statistics.median(values[num_warmup:])


def _count_tokens(config: StudyConfig, method: PretrainConfig, paths: RunPaths) -> dict[str, Any]:
    """Prepare a method's corpus: in how many steps it reads the study's tokens."""
    manifest = run_preparation(_place(config, method, paths, f"pilot-{method.method.name}"))
    assert manifest is not None, "no dry run"
    tokens = method.train.global_batch_size * manifest.num_tokens("train") / manifest.num_rows("train")
    return {"steps": max(1, math.ceil(config.tokens / tokens)), "tokens_per_step": tokens}


def _drop_model(pilot: Path) -> None:
    """Remove the tensors of a pilot that is no longer needed."""
    for name in ("checkpoints", "export", "ray"):
        shutil.rmtree(pilot / name, ignore_errors=True)


def _write_results(
    config: StudyConfig, methods: Mapping[str, PretrainConfig], folder: Path, seeds: Iterable[int]
) -> str:
    """Compare the seeds that all methods have finished; return the comparison as Markdown."""
    done = list(seeds)
    runs = [
        MethodRuns(
            name,
            each.method.trains,
            each.method.trainable_budget or None,
            each.optim.lr,
            {seed: read_summary(folder / name_run(name, seed) / "summary.json") for seed in done},
        )
        for name, each in methods.items()
    ]
    base = make_base_figures(read_summary(folder / "base" / "summary.json"))
    study = make_study(base, runs, describe_setting(config, len(done)), config.seconds)
    text = format_study(study)
    results = {"seeds": done, "budget": config.budget, "seconds": config.seconds, "tokens": config.tokens}
    write_json(folder / "results.json", {**results, **to_results(study)})
    write_text(folder / "comparison.md", text)
    draw_study(study, folder / "comparison.png")
    return text


def describe_setting(config: StudyConfig, num_seeds: int) -> str:
    """Return what all runs of a study have in common, as one sentence."""
    goal = f"{config.seconds:g} seconds of training" if config.seconds else f"{config.tokens:,} tokens"
    size = f"a trainable budget of {config.budget:.0%} where a method has a size" if config.budget else "sizes as given"
    seeds = "1 seed" if num_seeds == 1 else f"{num_seeds} seeds (mean ± standard deviation)"
    base, corpus = hide_places(config.base), hide_places(config.corpus)
    return f"Base {base}, corpus {corpus}: {goal} per run, {size}, {seeds}."
