"""A study's models fine-tuned on labelled sets: how much F1 the learned bits are worth.

Enters: the base and finished runs. Leaves: tasks/SET/MODEL, a fine-tuning run each; tasks/points, the rate, batch size
and epochs that dev chose for each method on each set, from a grid that is trained once for the first seed; and of each
set a `SetScores`. Of a method each seed of pre-training counts once, with the mean of its restarts: that is what varies
when the whole path is gone again. The base, which has no seeds, has as many restarts as a method in all.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np

from domext_ray.config.finetune import FinetuneConfig, GridConfig, PlaceConfig
from domext_ray.config.jobs import StudyConfig
from domext_ray.downstream.finetune.comparison import read_finetuned
from domext_ray.downstream.finetune.finetune import run_finetuning
from domext_ray.experiment.runner import Ledger, Step, Trial, run_here
from domext_ray.intervals import Sample
from domext_ray.labelled.readers.loading import load_labelled
from domext_ray.study.figures import SetScores
from domext_ray.study.runs import BASE, Workplace, name_run

FOLDER = "tasks"


def check_sets(config: StudyConfig) -> None:
    """Read all sets of --tasks, and print what they hold.

    Raises:
        DomextError: one is missing, or not of its layout.
    """
    for i in range(len(config.tasks)):
        print(load_labelled(_configure(config, i)).describe(), flush=True)


def name_set(config: StudyConfig, i: int) -> str:
    """Return what a set is called, also as a folder: its task, with a number where a task has several."""
    stems = [re.sub(r"[^\w.-]+", "-", Path(each).stem) for each in config.tasks]
    return stems[i] if stems.count(stems[i]) == 1 else f"{stems[i]}-{i}"


def finetune_seed(place: Workplace, arms: Sequence[str], number: int) -> bool:
    """Fine-tune the methods' models of a seed on all sets, and before the first the base; return whether any is new.

    Args:
        place: the study.
        arms: names of the methods.
        number: of the seed, from 0 on.
    """
    is_new = False
    for i in range(len(place.config.tasks)):
        for arm in [*([] if number else [BASE]), *arms]:
            name = BASE if arm == BASE else name_run(arm, place.config.seed + number)
            print(f"\n{name_set(place.config, i)}: {name}", flush=True)
            is_new |= not (_locate(place, i, name) / "summary.json").exists()
            _finetune(place, i, arm, name)
    return is_new


def read_scores(place: Workplace, arms: Sequence[str], seeds: Sequence[int]) -> tuple[SetScores, ...]:
    """Return what all models score on each set, and of several sets their mean.

    Args:
        place: the study.
        arms: names of the methods.
        seeds: of pre-training, that all methods have finished.
    """
    found = []
    for i in range(len(place.config.tasks)):
        runs = {
            name: read_finetuned(_locate(place, i, name))
            for name in [BASE, *(name_run(*each) for each in product(arms, seeds))]
        }
        samples = {BASE: runs[BASE].sample}
        samples |= {arm: over_models([runs[name_run(arm, seed)].sample for seed in seeds]) for arm in arms}
        found.append(SetScores(name_set(place.config, i), runs[BASE].summary["metric"], runs[BASE].split, samples))
    return (*found, _average(found)) if len(found) > 1 else tuple(found)


def over_models(samples: Sequence[Sample]) -> Sample:
    """Each model of a method once, with the mean of its restarts; of a single model its restarts are all there is."""
    if len(samples) == 1:
        return samples[0]
    values = np.array([each.mean for each in samples])
    return Sample(values, np.stack([each.drawn.mean(axis=0) for each in samples]), samples[0].num_clusters)


def count_trainings(config: StudyConfig, num_arms: int) -> int:
    """Return how many fine-tunings a study has."""
    grid, num_tuned = config.finetune.grid, len(config.finetune.grid.points) - 1
    return len(config.tasks) * (num_arms + 1) * (config.seeds * grid.restarts + num_tuned)


def _locate(place: Workplace, i: int, model: str) -> Path:
    return Path(place.paths.run) / FOLDER / name_set(place.config, i) / model


def _configure(config: StudyConfig, i: int) -> FinetuneConfig:
    return replace(config.finetune, task=config.tasks[i], data=config.places[i], export=False)


def _finetune(place: Workplace, i: int, arm: str, name: str) -> None:
    """Fine-tune a model at its method's point; the first model of a method is given the grid and finds it."""
    grid = place.config.finetune.grid
    if len(grid.points) > 1:
        asked = {"method": arm, "points": [list(each) for each in grid.points]}
        trial = Trial(f"{name_set(place.config, i)}-{arm}", asked)
        ledger = Ledger(place.paths.run / FOLDER / "points")
        (outcome,) = run_here([trial], partial(_choose_point, place, i, name), ledger)
        point = outcome.steps[0]
        grid = replace(grid, lr=(point["lr"],), batch_size=(point["batch_size"],), epochs=(point["epochs"],))
    _run(place, i, name, replace(grid, restarts=grid.restarts * (place.config.seeds if name == BASE else 1)))


def _choose_point(place: Workplace, i: int, name: str, trial: Trial) -> Step:
    _run(place, i, name, replace(place.config.finetune.grid, restarts=1))
    return dict(read_finetuned(_locate(place, i, name)).summary["best"]["point"])


def _run(place: Workplace, i: int, name: str, grid: GridConfig) -> None:
    model, folder = place.config.base if name == BASE else str(place.locate(name)), _locate(place, i, name)
    own = PlaceConfig(name=name, dir=str(folder.parent))
    run_finetuning(replace(_configure(place.config, i), model=model, grid=grid, run=own))


def _average(found: Sequence[SetScores]) -> SetScores:
    """The mean over sets: seed by seed, and resample by resample, for sets are drawn independently."""
    clusters = min(sample.num_clusters for each in found for sample in each.samples.values())
    samples = {}
    for name in found[0].samples:
        own = [each.samples[name] for each in found]
        number = min(len(each.values) for each in own)  # a restart that failed on one set has no mean over sets
        values, drawn = (
            np.mean([getattr(each, part)[:number] for each in own], axis=0) for part in ("values", "drawn")
        )
        samples[name] = Sample(values, drawn, clusters)
    return SetScores(f"mean of {len(found)} sets", "main figure", "/".join({each.split: 0 for each in found}), samples)
