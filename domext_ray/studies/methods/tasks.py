"""A study's models fine-tuned on labelled sets: how much F1 the learned bits are worth.

Enters: the base and finished runs. Leaves: tasks/SET/MODEL, a fine-tuning run each, with fewer labels
tasks/SET/LABELS/MODEL; tasks/points, the point of the grid that dev chose for each method on each set and number of
labels, trained once for the first seed; and of each set a `SetScores`, and with --labels a `LabelCurve`. Of a method
each seed of pre-training counts once, with the mean of its restarts: that is what varies when the whole path is gone
again. The base, which has no seeds, has as many restarts as a method in all.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise, product
from pathlib import Path

import numpy as np

from domext_ray.config.finetune import ALL, DROPOUTS, FinetuneConfig, GridConfig, PlaceConfig
from domext_ray.config.jobs import StudyConfig
from domext_ray.errors import CorpusError
from domext_ray.families.label_counts import describe_set
from domext_ray.families.readers.examples import LabelledSet
from domext_ray.families.sets import load_labelled, take_examples
from domext_ray.finetuning.comparison import ScoredRun, read_finetuned
from domext_ray.finetuning.finetune import run_finetuning
from domext_ray.intervals import Resampled
from domext_ray.runtime.trials import Ledger, Step, Trial, run_here
from domext_ray.storage import Place
from domext_ray.studies.methods.figures import SetScores
from domext_ray.studies.methods.label_curves import LabelCurve
from domext_ray.studies.methods.runs import BASE, Workplace, name_run

FOLDER = "tasks"


def check_sets(config: StudyConfig) -> tuple[int, ...]:
    """Read all sets of --tasks, print what they hold, and return how many labels there are to learn from in each."""
    totals = []
    for i in range(len(config.tasks)):
        data = load_labelled(_configure(config, i))
        print(describe_set(data), flush=True)
        totals.append(len(data.train))
        for seed in range(config.seed, config.seed + config.seeds) if config.labels else ():
            print(f"seed {seed}: {_count_taken(config, data, seed)} labels are taken", flush=True)
    return tuple(totals)


def _count_taken(config: StudyConfig, data: LabelledSet, seed: int) -> str:
    """Return how many labels of a set are taken for each of --labels."""
    if not data.test:
        raise CorpusError(f"--labels needs a test, and {data.name} has none: dev is another one for each number.")
    sets = {size: data if size == ALL else take_examples(data, int(size), seed, "--labels") for size in config.labels}
    taken = {size: len(own.train) for size, own in sets.items()}
    for first, second in pairwise(taken):
        if taken[first] == taken[second]:
            raise CorpusError(
                f"--labels has {first} and {second}, for which the same {taken[first]:,} examples of {data.name} are "
                "taken, in whole documents; leave one out."
            )
    return ", ".join(f"{number:,}" for number in taken.values())


def name_set(config: StudyConfig, i: int) -> str:
    """Return what a set is called, also as a folder: its task, with a number where a task has several."""
    stems = [re.sub(r"[^\w.-]+", "-", Path(task).stem) for task in config.tasks]
    return stems[i] if stems.count(stems[i]) == 1 else f"{stems[i]}-{i}"


def finetune_seed(place: Workplace, arms: Sequence[str], number: int) -> bool:
    """Fine-tune the methods' models of a seed on all sets, and before the first the base; return whether any is new.

    `number` is the seed's, from 0 on.
    """
    is_new = False
    for i, size in product(range(len(place.config.tasks)), place.config.sizes):
        own = _SomeLabels(place, i, size, number)
        for arm in [*([] if number and size == ALL else [BASE]), *arms]:
            print(f"\n{own.title}: {own.name_model(arm)}", flush=True)
            is_new |= not (own.locate(arm) / "summary.json").exists()
            _finetune(own, arm)
    return is_new


@dataclass(frozen=True)
class _SomeLabels:
    """A labelled set with so many labels, and the models of a seed that learn from them.

    With fewer than all labels each seed has an order of its own, in which they are taken, the same for all methods.
    """

    place: Workplace
    i: int  # of the set
    size: int | str
    number: int  # of the seed, from 0 on

    @property
    def title(self) -> str:
        """What is said of it while it goes on."""
        name = name_set(self.place.config, self.i)
        return f"{name}, {self.size} labels" if self.place.config.labels else name

    def name_model(self, arm: str) -> str:
        """Return what a fine-tuning run is called; of the base one with all labels is enough for all seeds."""
        return BASE if arm == BASE and self.size == ALL else name_run(arm, self.place.config.seed + self.number)

    @property
    def folder(self) -> Place:
        """Where models are fine-tuned: tasks/SET, or tasks/SET/SIZE."""
        folder = self.place.paths.run / FOLDER / name_set(self.place.config, self.i)
        return folder if self.size == ALL else folder / str(self.size)

    def locate(self, arm: str) -> Place:
        """Return where a method's model is fine-tuned."""
        return self.folder / self.name_model(arm)

    def configure(self) -> FinetuneConfig:
        """Return how models are fine-tuned: with few labels in as many steps as with all."""
        config = _configure(self.place.config, self.i)
        if self.size == ALL:
            return config
        number, seed = int(self.size), self.place.config.seed + self.number
        return replace(
            config,
            seed=config.seed + self.number * config.grid.restarts,
            labelled=replace(config.labelled, num_examples=number, examples_seed=seed),
            grid=config.grid.for_labels(number, self.place.num_examples[self.i]),
        )


def read_scores(place: Workplace, arms: Sequence[str], seeds: Sequence[int]) -> tuple[SetScores, ...]:
    """Return what all models score on each set, and of several sets their mean.

    The seeds are those of pre-training that all methods have finished.
    """
    found = []
    for i in range(len(place.config.tasks)) if ALL in place.config.sizes else ():
        base, *_ = _read_models(place, i, ALL, BASE, seeds)
        samples = {BASE: base.sample}
        samples |= {
            arm: over_models([model.sample for model in _read_models(place, i, ALL, arm, seeds)]) for arm in arms
        }
        found.append(SetScores(name_set(place.config, i), base.summary["metric"], base.split, samples))
    return (*found, _average(found)) if len(found) > 1 else tuple(found)


def read_curves(place: Workplace, arms: Sequence[str], seeds: Sequence[int]) -> tuple[LabelCurve, ...]:
    """Return what all models score on each set by the number of labels; seeds as in `read_scores`."""
    found = []
    for i in range(len(place.config.tasks)) if place.config.labels else ():
        runs = {
            arm: [_read_models(place, i, size, arm, seeds) for size in place.config.labels] for arm in (BASE, *arms)
        }
        taken = [[model.summary["set"]["examples"]["train"] for model in own] for own in runs[BASE]]
        samples = {
            arm: tuple(over_models(_split_restarts([model.sample for model in models], len(seeds))) for models in own)
            for arm, own in runs.items()
        }
        first = runs[BASE][0][0]
        numbers = tuple(float(np.mean(counts)) for counts in taken)
        found.append(LabelCurve(name_set(place.config, i), first.summary["metric"], first.split, numbers, samples))
    return tuple(found)


def _read_models(place: Workplace, i: int, size: int | str, arm: str, seeds: Sequence[int]) -> list[ScoredRun]:
    """Return the fine-tuned models of a method, one a seed; of the base with all labels the one that there is."""
    of_seeds = [_SomeLabels(place, i, size, seed - place.config.seed) for seed in seeds]
    return [read_finetuned(folder) for folder in dict.fromkeys(labels.locate(arm) for labels in of_seeds)]


def _split_restarts(samples: list[Resampled], number: int) -> list[Resampled]:
    """Return a sample a seed: as there are or, of the base with all labels, from the restarts of its only one."""
    if len(samples) == number:
        return samples
    parts = np.array_split(np.arange(len(samples[0].values)), min(number, len(samples[0].values)))
    return [replace(samples[0], values=samples[0].values[part], drawn=samples[0].drawn[part]) for part in parts]


def over_models(samples: Sequence[Resampled]) -> Resampled:
    """Each model of a method once, with the mean of its restarts; of a single model its restarts are all there is."""
    if len(samples) == 1:
        return samples[0]
    values = np.array([sample.mean for sample in samples])
    return Resampled(values, np.stack([sample.drawn.mean(axis=0) for sample in samples]), samples[0].num_clusters)


def count_trainings(config: StudyConfig, new_words: Sequence[bool]) -> int:
    """Return how many fine-tunings a study has; `new_words` says of each method whether it has some."""
    grid = config.finetune.grid
    points = [len(grid.list_points(new_words=has_some)) for has_some in (False, *new_words)]
    trained = len(config.sizes) * sum(config.seeds * grid.restarts + number - 1 for number in points)
    if config.rates_by == "dev":
        trained += len(config.rates) * grid.restarts * sum(points[1:])
    return len(config.tasks) * trained


def _configure(config: StudyConfig, i: int) -> FinetuneConfig:
    return replace(config.finetune, task=config.tasks[i], data=config.places[i], export=False)


def _finetune(own: _SomeLabels, arm: str) -> None:
    """Fine-tune a model at its method's point; the first model of a method is given the grid and finds it."""
    grid = own.configure().grid
    if len(grid.list_points()) > 1:
        asked = {"method": arm, "points": [list(values) for values in product(grid.lr, grid.batch_size, grid.epochs)]}
        asked |= {name: list(shares) for name in DROPOUTS if any(shares := getattr(grid, name))}
        name = name_set(own.place.config, own.i) + ("" if own.size == ALL else f"@{own.size}")
        ledger = Ledger(own.place.paths.run / FOLDER / "points")
        (outcome,) = run_here([Trial(f"{name}-{arm}", asked)], partial(_choose_point, own, arm), ledger)
        grid = grid.at(outcome.steps[0])
    is_for_all = own.name_model(arm) == BASE
    _run(own, arm, replace(grid, restarts=grid.restarts * (own.place.config.seeds if is_for_all else 1)))


def _choose_point(own: _SomeLabels, arm: str, trial: Trial) -> Step:
    _run(own, arm, replace(own.configure().grid, restarts=1))
    return dict(read_finetuned(own.locate(arm)).summary["best"]["point"])


def _run(own: _SomeLabels, arm: str, grid: GridConfig) -> None:
    name = own.name_model(arm)
    _run_model(own, own.place.config.base if arm == BASE else str(own.place.locate(name)), name, grid)


def _run_model(own: _SomeLabels, model: str, name: str, grid: GridConfig) -> None:
    run = PlaceConfig(name=name, dir=str(own.folder))
    run_finetuning(replace(own.configure(), model=model, grid=grid, run=run))


def score_on_dev(place: Workplace, name: str) -> float:
    """Fine-tune a run's model on each set, with the most labels, and return the mean over sets of the figures on dev.

    A set's is that of the point of the grid that dev chose, the mean over its restarts; test has no part in it.
    """
    found = []
    for i in range(len(place.config.tasks)):
        own = _SomeLabels(place, i, place.config.sizes[-1], 0)
        print(f"\n{own.title}: {name}", flush=True)
        _run_model(own, str(place.locate(name)), name, own.configure().grid)
        found.append(read_finetuned(own.folder / name).summary["restarts"]["dev"]["mean"])
    return float(np.mean(found))


def _average(found: Sequence[SetScores]) -> SetScores:
    """The mean over sets: seed by seed, and resample by resample, for sets are drawn independently."""
    clusters = min(sample.num_clusters for scores in found for sample in scores.samples.values())
    samples = {}
    for name in found[0].samples:
        own = [scores.samples[name] for scores in found]
        number = min(len(sample.values) for sample in own)  # a restart that failed on one set has no mean over sets
        values, drawn = (
            np.mean([getattr(sample, part)[:number] for sample in own], axis=0) for part in ("values", "drawn")
        )
        samples[name] = Resampled(values, drawn, clusters)
    return SetScores(
        f"mean of {len(found)} sets", "main figure", "/".join({scores.split: 0 for scores in found}), samples
    )
