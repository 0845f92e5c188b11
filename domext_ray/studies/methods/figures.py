"""What the methods of a study gained and lost over seeds, counted from the base as it is.

Enters: the base's figures, and of every method the summary.json of each seed and what its models keep of general text.
Leaves: a `Study`, which findings, results and pictures are made from. Gains and losses are not counted from a method's
own start, because new words and random modules change a model before its first step.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any

import numpy as np

from domext_ray.errors import RunError
from domext_ray.intervals import Estimate, Resampled, compare_seeds, over_seeds
from domext_ray.report.compare import find_undominated
from domext_ray.report.figures import take_routed
from domext_ray.studies.methods.label_curves import LabelCurve

MIN_SEEDS = 3
"""Fewer runs of a method say nothing on chance: figures are counts of words, and two of them are easily equal."""

CHARACTER_TOLERANCE = 0.01
"""Bits a character still compare when the scored characters differ by this share, though not to the last digit."""

WITH_ROUTER = " + router"
"""Behind a method's name: its adapter has the rows that its router gives it, and the base has the others."""

PROBE, TEXT = "general probe", "general text"
"""The measures of forgetting: everyday sentences, and the text of --retention."""


@dataclass(frozen=True)
class Retained:
    """What the base predicts of general text: its accuracy, 0 to 1, and a sentence on what was masked and scored."""

    accuracy: float
    sentence: str


@dataclass(frozen=True)
class BaseFigures:
    """What the base scores as it is."""

    bits: float  # per character of held-out domain text
    accuracy: float  # of the general probe, 0 to 1
    num_characters: int  # scored
    num_words: int  # of the general probe, scored
    retained: Retained | None = None  # of general text, where there is any
    word_bits: float | None = None  # per character of the same text, which decide between vocabularies

    @property
    def measures(self) -> dict[str, float]:
        """The base's accuracy by each measure of forgetting, 0 to 1."""
        return {PROBE: self.accuracy, **({TEXT: self.retained.accuracy} if self.retained else {})}


@dataclass(frozen=True)
class ArmRuns:
    """The finished runs of an arm, a method at one size; those of one method have `family` in common."""

    name: str
    trains: str  # `MethodConfig.trains`
    budget: float | None  # trainable share that its size was solved from; None: its size is fixed
    learning_rate: float  # peak
    summaries: dict[int, dict[str, Any]]  # content of summary.json by seed, the same seeds for every method
    retained: Mapping[int, float] = field(default_factory=dict)  # accuracy on general text by seed; empty: none
    family: str = ""  # empty: the name
    # bits per character, or the mean on dev, by rate; None: diverged
    tried: Mapping[float, float | None] = field(default_factory=dict)
    tried_by: str = "loss"  # `StudyConfig.rates_by`, which says what these figures are

    @property
    def family_name(self) -> str:
        """What its line of several budgets is called."""
        return self.family or self.name

    @property
    def has_router(self) -> bool:
        """Whether every run has a router, and was measured with it."""
        return all("routed" in summary for summary in self.summaries.values())


def route_runs(runs: ArmRuns, retained: Mapping[int, float]) -> ArmRuns:
    """Return runs with routers as a method of its own, whose rows go where the routers send them.

    `retained` is their accuracy on general text by seed, with the routers.
    """
    return replace(
        runs,
        name=runs.name + WITH_ROUTER,
        summaries={seed: take_routed(summary) for seed, summary in runs.summaries.items()},
        retained=retained,
        family=runs.family_name + WITH_ROUTER,
        tried={},
    )


@dataclass(frozen=True)
class SetScores:
    """What the base and all methods score on one labelled set, or on the mean of several."""

    name: str  # of the set
    metric: str  # what dev chose by, such as f1.micro
    split: str  # test or, where there is none, dev
    samples: Mapping[str, Resampled]  # by method, the base first


@dataclass(frozen=True)
class ArmResult:
    """An arm's figures over seeds."""

    runs: ArmRuns
    gained: Resampled  # bits per character below the base's
    lost: Mapping[str, Resampled]  # points of accuracy below the base's, by the measures of forgetting
    word_gained: Resampled | None = None  # word bits per character below the base's, where they were measured

    @property
    def name(self) -> str:
        return self.runs.name

    def read(self, *path: str) -> Resampled:
        """Return a figure of summary.json over the seeds."""
        summaries: list[Any] = [*self.runs.summaries.values()]
        return over_seeds([reduce(operator.getitem, path, summary) for summary in summaries])


def estimate(values: Resampled) -> Estimate:
    """Return the mean over seeds; its interval needs three of them."""
    return values.estimate() if len(values.values) >= MIN_SEEDS else Estimate(values.mean)


def subtract(first: Resampled, second: Resampled) -> Estimate:
    """Return the mean difference of two methods, paired by seed; its interval and p value need three seeds."""
    differences = first.values - second.values
    return compare_seeds(differences) if len(differences) >= MIN_SEEDS else Estimate(float(np.mean(differences)))


def find_share(rival: ArmResult, result: ArmResult) -> Resampled | None:
    """Return a method's share of the bits that full training gains, paired by seed; None: full training gains none."""
    return over_seeds(result.gained.values / rival.gained.values) if rival.gained.values.min() > 0 else None


@dataclass(frozen=True)
class Study:
    """All methods of a study."""

    base: BaseFigures  # what they start from
    results: tuple[ArmResult, ...]
    setting: str  # one sentence on what all have in common
    seconds: float  # of training that were wanted; 0: runs were ended by tokens
    left_out: Mapping[str, str] = field(default_factory=dict)  # why a method does not run at a budget, by its name
    scores: tuple[SetScores, ...] = ()  # by labelled set, then their mean
    curves: tuple[LabelCurve, ...] = ()  # by labelled set, with --labels

    @property
    def comparable(self) -> tuple[ArmResult, ...]:
        """The methods whose bits per character were measured on the base's text."""
        return tuple(result for result in self.results if not _is_apart(result, self.base))

    @property
    def rival(self) -> ArmResult | None:
        """Of the methods that train everything the one that gains most; None: there is none."""
        full = [result for result in self.comparable if result.runs.trains == "all"]
        return max(full, key=lambda each: each.gained.mean, default=None)


def _is_apart(result: ArmResult, base: BaseFigures) -> bool:
    """Whether a method's tokenizer cannot score the text that the base was scored on."""
    scored = result.read("evaluation", "domain_characters").mean
    return abs(scored - base.num_characters) > CHARACTER_TOLERANCE * base.num_characters


def make_base_figures(summary: dict[str, Any], retained: Retained | None = None) -> BaseFigures:
    """Take the base's figures from the summary.json of a run that starts from it unchanged."""
    bits = summary["domain"]["bits_per_character"]["before"]
    accuracy = summary["general"]["mlm_accuracy"]["before"]
    if bits is None or accuracy is None:
        missing = "held-out text has no word that it can spell" if bits is None else "general probe has no word of it"
        raise RunError(f"the base cannot be scored: the {missing}; give another --corpus or --train.general_probe.")
    scored = summary["evaluation"]
    words = summary["domain"].get("word_bits_per_character", {}).get("before")
    return BaseFigures(bits, accuracy, scored["domain_characters"], scored["general_words"], retained, words)


def make_study(
    base: BaseFigures,
    methods: Sequence[ArmRuns],
    setting: str,
    seconds: float,
    left_out: Mapping[str, str] | None = None,
    scores: tuple[SetScores, ...] = (),
    curves: tuple[LabelCurve, ...] = (),
) -> Study:
    """Turn summaries into gains and losses; the arguments are those of `Study`."""
    results = []
    for runs in methods:
        _check_scored(runs)
        summaries = runs.summaries.values()
        gained = over_seeds([base.bits - summary["domain"]["bits_per_character"]["after"] for summary in summaries])
        kept = {PROBE: [summary["general"]["mlm_accuracy"]["after"] for summary in summaries]}
        kept |= {TEXT: [runs.retained[seed] for seed in runs.summaries]} if base.retained else {}
        lost = {
            name: over_seeds([100 * (was - accuracy) for accuracy in kept[name]]) for name, was in base.measures.items()
        }
        results.append(ArmResult(runs, gained, lost, _count_word_gain(base, runs)))
    return Study(base, tuple(results), setting, seconds, left_out or {}, scores, curves)


def _count_word_gain(base: BaseFigures, runs: ArmRuns) -> Resampled | None:
    after = [summary["domain"].get("word_bits_per_character", {}).get("after") for summary in runs.summaries.values()]
    if base.word_bits is None or None in after:
        return None
    return over_seeds([base.word_bits - bits for bits in after if bits is not None])


def _check_scored(runs: ArmRuns) -> None:
    for seed, summary in runs.summaries.items():
        if (
            summary["domain"]["bits_per_character"]["after"] is None
            or summary["general"]["mlm_accuracy"]["after"] is None
        ):
            raise RunError(
                f"the run of {runs.name}, seed {seed}, has no bits per character or no general accuracy to compare; "
                "leave that method out of --methods."
            )


def find_front(results: Sequence[ArmResult], measure: str = PROBE) -> list[ArmResult]:
    """Return the methods on the Pareto front by means, ascending by loss: none gains as much and loses less."""
    front = find_undominated([(result.gained.mean, -result.lost[measure].mean) for result in results])
    return sorted((results[i] for i in front), key=lambda each: each.lost[measure].mean)
