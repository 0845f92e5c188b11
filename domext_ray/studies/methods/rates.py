"""The rate of each method of a study: every one of --rates is tried, for a part of the budget, on the first seed.

Enters: arms, and where the study lives. Leaves: rates/ with what every rate reached: the bits per character of held-out
text and, where --rates_by is dev, the mean of the figures on dev of the sets on which its model was fine-tuned.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from domext_ray.config.jobs import StudyConfig
from domext_ray.config.options.build import identity_of
from domext_ray.errors import DivergenceError, TrainingError
from domext_ray.report.summary import read_summary
from domext_ray.runtime.trials import Ledger, Step, Trial, run_here
from domext_ray.studies.methods.arms import Arm
from domext_ray.studies.methods.runs import Workplace, limit_run, train_run
from domext_ray.studies.methods.tasks import score_on_dev


def try_rates(place: Workplace, arm: Arm) -> dict[float, float | None]:
    """Train an arm at every rate; the models are not kept.

    Returns by rate the figure that chooses; None where training diverged.
    """
    config = place.config
    asked = {"method": arm.name, **_describe_scoring(config)}
    trials = [Trial(f"{arm.name}-{rate}", {**asked, "rate": rate}) for rate in sorted(config.rates)]
    ledger = Ledger(place.paths.run / "rates")
    outcomes = run_here(trials, lambda trial: _try_rate(place, arm, trial), ledger, DivergenceError)
    for trial, folder in itertools.product(trials, ("checkpoints", "export", "ray")):
        shutil.rmtree(place.locate(f"rate-{trial.name}") / folder, ignore_errors=True)
    if not any(outcome.steps for outcome in outcomes):
        raise TrainingError(f"training of {arm.name} diverged at every rate of --rates; give lower ones.")
    name = "bits" if config.rates_by == "loss" else "dev"
    return {outcome.config["rate"]: outcome.steps[0][name] if outcome.steps else None for outcome in outcomes}


def _describe_scoring(config: StudyConfig) -> dict[str, Any]:
    """What decides the figures on dev, beside the rate; other sets ask anew."""
    if config.rates_by == "loss":
        return {}
    return {"tasks": list(config.tasks), "labels": config.sizes[-1], "grid": identity_of(config.finetune.grid)}


def choose_rate(tried: Mapping[float, float | None], by: str) -> float:
    """Return the rate with the fewest bits, or with the highest figure on dev; of equal ones the lowest."""
    sign = 1.0 if by == "loss" else -1.0
    return min((sign * figure, rate) for rate, figure in tried.items() if figure is not None)[1]


def set_rate(arm: Arm, rate: float) -> Arm:
    """Return an arm with another peak rate."""
    return replace(arm, config=replace(arm.config, optim=replace(arm.config.optim, lr=rate)))


def _try_rate(place: Workplace, arm: Arm, trial: Trial) -> Step:
    rate, name = trial.config["rate"], f"rate-{trial.name}"
    print(f"\n{arm.name} at rate {rate:g}, for {place.config.tune_frac:.0%} of the time or tokens", flush=True)
    try:
        train_run(place, limit_run(place.config, set_rate(arm, rate).config, place.config.tune_frac), name)
    except DivergenceError as error:
        print(f"{arm.name} diverges at rate {rate:g}: {error}", flush=True)
        raise
    bits = read_summary(place.locate(name) / "summary.json")["domain"]["bits_per_character"]["after"]
    return {"bits": bits, **({"dev": score_on_dev(place, name)} if place.config.rates_by == "dev" else {})}
