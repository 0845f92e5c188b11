"""The runs of a study: each ends at rate 0 when its seconds or tokens do; general text is asked.

Enters: arms, and where the study lives. Leaves: a run directory for each arm and seed, and retention/ and
retention-routed/ with what each model predicts of general text.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from domext_ray.config.jobs import ForgettingConfig, StudyConfig
from domext_ray.config.pretrain import PretrainConfig
from domext_ray.errors import ReportError
from domext_ray.pretraining.inputs import run_vocabulary
from domext_ray.pretraining.pipeline import run_pretraining
from domext_ray.pretraining.plan import is_finished
from domext_ray.runs.run_directory import RunPaths
from domext_ray.storage import Place
from domext_ray.studies.forgetting.forgetting import ACCURACY, measure_forgetting
from domext_ray.studies.forgetting.report import write_forgetting
from domext_ray.studies.methods.arms import Arm
from domext_ray.studies.methods.figures import Retained

FAR_STEPS = 10**7
"""Limit of a run's steps, beyond what its seconds or tokens allow."""

BASE = "base"
"""Run of a single step, which scores the base before it, and the base's name among the models of retention/."""


@dataclass(frozen=True)
class Workplace:
    """A study that is being worked on, and where it lives."""

    config: StudyConfig
    paths: RunPaths
    num_examples: tuple[int, ...] = ()  # all that there are to learn from in each set of --tasks

    def locate(self, run: str) -> Place:
        """Return the directory of a run by its name."""
        return self.paths.run / run

    def place(self, config: PretrainConfig, name: str) -> PretrainConfig:
        """Give a run its directory in the study; all runs share the prepared corpora."""
        run = replace(self.config.run, name=name, dir=str(self.paths.run))
        half: Any = "first" if name.startswith("rate-") else "second"  # a rate is chosen on other text than is reported
        is_cut = self.config.rates and self.config.rates_by == "loss"
        config = replace(config, train=replace(config.train, eval_half=half if is_cut else "both"))
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
    optim = replace(config.optim, decay_steps=1, warmup_steps=0)
    train_run(place, replace(config, train=replace(config.train, max_steps=1), optim=optim), BASE)


def train_run(place: Workplace, config: PretrainConfig, name: str, seed: int | None = None) -> bool:
    """Make one run, on the first seed if none is given, or go on with it; return whether anything was left to do."""
    run = replace(place.place(config, name), seed=place.config.seed if seed is None else seed)
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


def measure_retention(
    place: Workplace, names: Sequence[str], *, route: bool = False
) -> tuple[Retained, dict[str, float]]:
    """Ask the base and finished runs for the masked words of general text.

    With `route` the runs' routers choose. Accuracies are 0 to 1.
    """
    config = place.config
    models = (f"{BASE}={config.base}", *(f"{name}={place.locate(name)}" for name in names))
    question = ForgettingConfig(
        models=models,
        corpus=config.retention,
        output=str(place.locate("retention-routed" if route else "retention")),
        num_texts=config.retention_texts,
        use_gpu=config.scale.use_gpu,
        route=route,
        prepare=config.prepare,
    )
    result = measure_forgetting(question)
    write_forgetting(question, result)
    accuracies = {model.name: float(model.score.get(ACCURACY)) for model in result.models}
    return Retained(accuracies.pop(BASE), result.masks.describe()), accuracies
