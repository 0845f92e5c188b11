"""The runs of a study: each ends at rate 0 when its seconds or tokens do; rates are tried; general text is asked.

Enters: arms, and where the study lives. Leaves: a run directory for each arm and seed, rates.json with what every rate
reached, and retention/ and retention-routed/ with what each model predicts of general text.
"""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from domext_ray.config.jobs import ForgettingConfig, StudyConfig
from domext_ray.config.pretrain import PretrainConfig
from domext_ray.downstream.forgetting.forgetting import ACCURACY, measure_forgetting
from domext_ray.downstream.forgetting.report import write_forgetting
from domext_ray.errors import DivergenceError, ReportError, RunError, TrainingError
from domext_ray.files import read_json
from domext_ray.inputs import run_vocabulary
from domext_ray.pipeline import is_finished, run_pretraining
from domext_ray.report.summary import read_summary
from domext_ray.runs.run_directory import RunPaths
from domext_ray.storage import write_json
from domext_ray.study.arms import Arm
from domext_ray.study.figures import Retained

FAR_STEPS = 10**7
"""Limit of a run's steps, beyond what its seconds or tokens allow."""

BASE = "base"
"""Run of a single step, which scores the base before it, and the base's name among the models of retention/."""

_RATES_REMEDY = "bring back a copy of it, or delete it: rates are tried anew"


@dataclass(frozen=True)
class Workplace:
    """A study that is being worked on.

    Args:
        config: the study.
        paths: where it lives.
    """

    config: StudyConfig
    paths: RunPaths

    def locate(self, run: str) -> Path:
        """Return the directory of a run by its name."""
        return Path(self.paths.run / run)

    def place(self, config: PretrainConfig, name: str) -> PretrainConfig:
        """Give a run its directory in the study; all runs share the prepared corpora."""
        run = replace(self.config.run, name=name, dir=str(self.paths.run))
        half: Any = "first" if name.startswith("rate-") else "second"  # a rate is chosen on other text than is reported
        config = replace(config, train=replace(config.train, eval_half=half if self.config.rates else "both"))
        return replace(config, run=run, prepare=replace(config.prepare, cache_dir=str(self.paths.corpora)))


def name_run(arm: str, seed: int) -> str:
    """Return the name of a run's directory in its study."""
    return f"{arm}-seed{seed}"


def limit_run(config: StudyConfig, run: PretrainConfig, share: float = 1.0) -> PretrainConfig:
    """End a run after a share of the study's seconds or tokens, at rate 0.

    The horizon in steps is out of reach: the schedule sees which limit is near. Seconds are those of training steps,
    counted on over all attempts of a run.
    """
    tokens = math.ceil(share * config.count_tokens(run.method.name))
    train = replace(run.train, max_steps=FAR_STEPS, max_tokens=tokens, max_seconds=share * config.seconds)
    return replace(run, train=train, optim=replace(run.optim, schedule="wsd", decay_steps=FAR_STEPS))


def train_base(place: Workplace, config: PretrainConfig) -> None:
    """Score the base: a run that starts from it unchanged evaluates it before its only step."""
    one_step = replace(
        config, train=replace(config.train, max_steps=1), optim=replace(config.optim, decay_steps=1, warmup_steps=0)
    )
    train_run(place, one_step, BASE, place.config.seed)


def train_run(place: Workplace, config: PretrainConfig, name: str, seed: int) -> bool:
    """Make one run, or go on with it; return whether there was anything left to do."""
    run = replace(place.place(config, name), seed=seed)
    if is_finished(place.locate(name), run):
        print(f"{name} is finished", flush=True)
        return False
    try:
        run_pretraining(run)
    except ReportError as error:
        print(f"warning: {error}", file=sys.stderr, flush=True)
    return True


def get_or_learn_words(place: Workplace, arm: Arm) -> Arm:
    """Learn the new words of a method once, so that its runs differ in their seeds only."""
    if not arm.config.vocab.size:
        return arm
    vocabulary = run_vocabulary(place.place(arm.config, f"vocabulary-{arm.preset}"))
    assert vocabulary is not None, "no dry run"
    words = replace(arm.config.vocab, size=0, words=str(vocabulary.folder), extend="", protected="")
    return replace(arm, config=replace(arm.config, vocab=words))


def try_rates(place: Workplace, arms: Sequence[Arm]) -> dict[str, dict[float, float | None]]:
    """Train every arm at every rate for a part of the budget, on the first seed.

    Returns:
        By arm and rate the bits per character of held-out text afterwards; None where training diverged. They are kept
        in rates.json, and the models are not.

    Raises:
        TrainingError: every rate of an arm diverged.
    """
    path = Path(place.paths.run / "rates.json")
    known = _read_rates(path)
    for arm in arms:
        own = known.setdefault(arm.name, {})
        for rate in sorted(place.config.rates):
            if rate not in own:
                own[rate] = _try_rate(place, arm, rate)
                write_json(
                    path, {name: {f"{each:g}": bits for each, bits in tried.items()} for name, tried in known.items()}
                )
        if all(bits is None for bits in own.values()):
            raise TrainingError(f"training of {arm.name} diverged at every rate of --rates; give lower ones.")
    return {arm.name: known[arm.name] for arm in arms}


def choose_rate(tried: Mapping[float, float | None]) -> float:
    """Return the rate that learns most: after it held-out text takes the fewest bits; of equal ones the lowest."""
    return min((bits, rate) for rate, bits in tried.items() if bits is not None)[1]


def set_rate(arm: Arm, rate: float) -> Arm:
    """Return an arm with another peak rate."""
    return replace(arm, config=replace(arm.config, optim=replace(arm.config.optim, lr=rate)))


def _try_rate(place: Workplace, arm: Arm, rate: float) -> float | None:
    name = f"rate-{arm.name}-{rate}"
    print(f"\n{arm.name} at rate {rate:g}, for {place.config.tune_frac:.0%} of the time or tokens", flush=True)
    run = limit_run(place.config, set_rate(arm, rate).config, place.config.tune_frac)
    try:
        train_run(place, run, name, place.config.seed)
        bits = read_summary(place.locate(name) / "summary.json")["domain"]["bits_per_character"]["after"]
    except DivergenceError as error:
        print(f"{arm.name} diverges at rate {rate:g}: {error}", flush=True)
        bits = None
    for folder in ("checkpoints", "export", "ray"):
        shutil.rmtree(place.locate(name) / folder, ignore_errors=True)
    return None if bits is None else float(bits)


def _read_rates(path: Path) -> dict[str, dict[float, float | None]]:
    known = read_json(path, _RATES_REMEDY) if path.exists() else {}
    try:
        return {
            name: {float(rate): None if bits is None else float(bits) for rate, bits in tried.items()}
            for name, tried in known.items()
        }
    except (AttributeError, TypeError, ValueError) as error:
        raise RunError(f"{path} does not say what rates reached; {_RATES_REMEDY}.") from error


def configure_retention(
    config: StudyConfig, models: Mapping[str, str], folder: Path, *, route: bool = False
) -> ForgettingConfig:
    """Return the question of what models still predict of the text of --retention.

    Args:
        config: the study.
        models: where each model is, by name; the first one is the base.
        folder: where the answers go.
        route: the models' routers choose.
    """
    return ForgettingConfig(
        models=tuple(f"{name}={model}" for name, model in models.items()),
        corpus=config.retention,
        output=str(folder),
        num_texts=config.retention_texts,
        use_gpu=config.scale.use_gpu,
        route=route,
        prepare=config.prepare,
    )


def measure_retention(
    place: Workplace, names: Sequence[str], *, route: bool = False
) -> tuple[Retained, dict[str, float]]:
    """Ask the base and finished runs for the masked words of general text; what was predicted before is read.

    Args:
        place: the study.
        names: of the runs.
        route: the runs' routers choose; the answers have a folder of their own.

    Returns:
        What the base predicts, and each run's accuracy, 0 to 1.
    """
    models = {BASE: place.config.base, **{name: str(place.locate(name)) for name in names}}
    folder = Path(place.paths.run) / ("retention-routed" if route else "retention")
    result = measure_forgetting(configure_retention(place.config, models, folder, route=route))
    write_forgetting(result)
    accuracies = {each.name: float(each.score.get(ACCURACY)) for each in result.models}
    return Retained(accuracies.pop(BASE), result.masks.describe()), accuracies
