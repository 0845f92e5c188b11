"""What the methods of a study gained and lost over seeds, counted from the base as it is.

Enters: the base's figures, and of every method the summary.json of each seed and what its models keep of general text.
Leaves: a `Study`, which findings, results and pictures are made from. Gains and losses are not counted from a method's
own start, because new words and random modules change a model before its first step.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from domext_ray.errors import RunError
from domext_ray.report.compare import find_undominated
from domext_ray.report.figures import take_routed

MIN_SEEDS = 3
"""Fewer runs of a method say nothing on chance: figures are counts of words, and two of them are easily equal."""

CHARACTER_TOLERANCE = 0.01
"""Bits a character still compare when the scored characters differ by this share, though not to the last digit."""

WITH_ROUTER = " + router"
"""Behind a method's name: its adapter has the rows that its router gives it, and the base has the others."""

PROBE, TEXT = "general probe", "general text"
"""The measures of forgetting: everyday sentences, and the text of --retention."""

# Two-sided 95 % quantiles of Student's t at 1 to 30 degrees of freedom; beyond, the normal distribution's.
_T_95 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)


@dataclass(frozen=True)
class Retained:
    """What the base predicts of general text that no model was trained on.

    Args:
        accuracy: share of the masked words, 0 to 1.
        sentence: what was masked and scored, the same for all models.
    """

    accuracy: float
    sentence: str


@dataclass(frozen=True)
class BaseFigures:
    """What the base scores as it is.

    Args:
        bits: bits per character of held-out domain text.
        accuracy: of the general probe, 0 to 1.
        num_characters: scored characters.
        num_words: scored words of the general probe.
        retained: of general text; None: there is none.
        word_bits: word bits per character of the same text, which decide between vocabularies; None: not measured.
    """

    bits: float
    accuracy: float
    num_characters: int
    num_words: int
    retained: Retained | None = None
    word_bits: float | None = None

    @property
    def measures(self) -> dict[str, float]:
        """The base's accuracy by each measure of forgetting, 0 to 1."""
        return {PROBE: self.accuracy, **({TEXT: self.retained.accuracy} if self.retained else {})}


@dataclass(frozen=True)
class MethodRuns:
    """The finished runs of one method.

    Args:
        name: the method; of several budgets each has a name of its own.
        trains: `MethodConfig.trains`.
        budget: trainable share that its size was solved from; None: its size is fixed.
        learning_rate: peak.
        summaries: content of summary.json by seed, the same seeds for every method.
        retained: accuracy on general text by seed, 0 to 1; empty: there is none.
        family: what methods of one preset and several budgets have in common; empty: the name.
        tried: bits per character by rate, where rates were tried; None: training diverged.
    """

    name: str
    trains: str
    budget: float | None
    learning_rate: float
    summaries: dict[int, dict[str, Any]]
    retained: Mapping[int, float] = field(default_factory=dict)
    family: str = ""
    tried: Mapping[float, float | None] = field(default_factory=dict)

    @property
    def is_extension(self) -> bool:
        """Whether the base stays as it is."""
        return self.trains in ("extensions", "adapter")

    @property
    def has_router(self) -> bool:
        """Whether every run has a router, and was measured with it."""
        return all("routed" in each for each in self.summaries.values())


def route_runs(runs: MethodRuns, retained: Mapping[int, float]) -> MethodRuns:
    """Return the same runs as a method of its own, whose rows go where the runs' routers send them.

    Args:
        runs: finished runs of one method that has routers.
        retained: accuracy on general text by seed with the routers, 0 to 1; empty: there is none.

    Returns:
        The method with `WITH_ROUTER` behind its name.
    """
    return replace(
        runs,
        name=runs.name + WITH_ROUTER,
        summaries={seed: take_routed(each) for seed, each in runs.summaries.items()},
        retained=retained,
        family=(runs.family or runs.name) + WITH_ROUTER,
        tried={},
    )


@dataclass(frozen=True)
class Spread:
    """A figure over seeds.

    Args:
        values: one a seed.
    """

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def sd(self) -> float | None:
        """Standard deviation over seeds (of a sample); None for a single seed."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """95 % interval of the mean (Student's t); None below three seeds."""
        if self.sd is None or len(self.values) < MIN_SEEDS:
            return None
        num_free = len(self.values) - 1
        half = (_T_95[num_free - 1] if num_free <= len(_T_95) else 1.96) * self.sd / math.sqrt(len(self.values))
        return self.mean - half, self.mean + half

    def __sub__(self, other: Spread) -> Spread:
        """Differences paired by seed."""
        return Spread(tuple(a - b for a, b in zip(self.values, other.values, strict=True)))

    def __truediv__(self, other: Spread) -> Spread:
        """Ratios paired by seed."""
        return Spread(tuple(a / b for a, b in zip(self.values, other.values, strict=True)))

    def show(self, form: str) -> str:
        """Return mean ± standard deviation."""
        return format(self.mean, form) + ("" if self.sd is None else f" ± {self.sd:{form.lstrip('+')}}")


@dataclass(frozen=True)
class MethodResult:
    """A method's figures over seeds.

    Args:
        runs: where they come from.
        gained: bits per character below the base's.
        lost: points of accuracy below the base's, by the measures of forgetting.
        word_gained: word bits per character below the base's; None: not measured.
    """

    runs: MethodRuns
    gained: Spread
    lost: Mapping[str, Spread]
    word_gained: Spread | None = None

    @property
    def name(self) -> str:
        return self.runs.name

    def spread(self, *path: str, scale: float = 1.0) -> Spread:
        """Return a figure of summary.json over the seeds."""
        return Spread(tuple(scale * float(_find(each, path)) for each in self.runs.summaries.values()))


def _find(summary: dict[str, Any], path: Sequence[str]) -> Any:
    value: Any = summary
    for name in path:
        value = value[name]
    return value


@dataclass(frozen=True)
class Study:
    """All methods of a study.

    Args:
        base: what they start from.
        results: one a method.
        setting: one sentence on what all have in common.
        seconds: training seconds that were wanted; 0: runs were ended by tokens.
        left_out: why a method does not run at a budget, by their name.
    """

    base: BaseFigures
    results: tuple[MethodResult, ...]
    setting: str
    seconds: float
    left_out: Mapping[str, str] = field(default_factory=dict)

    @property
    def comparable(self) -> tuple[MethodResult, ...]:
        """The methods whose bits per character were measured on the base's text."""
        return tuple(each for each in self.results if not _is_apart(each, self.base))

    @property
    def rival(self) -> MethodResult | None:
        """Of the methods that train everything the one that gains most; None: there is none."""
        full = [each for each in self.comparable if each.runs.trains == "all"]
        return max(full, key=lambda each: each.gained.mean, default=None)


def _is_apart(result: MethodResult, base: BaseFigures) -> bool:
    """Whether a method's tokenizer cannot score the text that the base was scored on."""
    scored = result.spread("evaluation", "domain_characters").mean
    return abs(scored - base.num_characters) > CHARACTER_TOLERANCE * base.num_characters


def make_base_figures(summary: dict[str, Any], retained: Retained | None = None) -> BaseFigures:
    """Take the base's figures from the summary of a run that starts from it unchanged.

    Args:
        summary: content of its summary.json.
        retained: what the base predicts of general text; None: there is none.

    Raises:
        RunError: there is no bits per character or no general accuracy.
    """
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
    methods: Sequence[MethodRuns],
    setting: str,
    seconds: float,
    left_out: Mapping[str, str] | None = None,
) -> Study:
    """Turn summaries into gains and losses; the arguments are those of `Study`.

    Raises:
        RunError: a run has nothing to compare.
    """
    results = []
    for runs in methods:
        _check_scored(runs)
        summaries = runs.summaries.values()
        gained = Spread(tuple(base.bits - each["domain"]["bits_per_character"]["after"] for each in summaries))
        kept = {PROBE: [each["general"]["mlm_accuracy"]["after"] for each in summaries]}
        kept |= {TEXT: [runs.retained[seed] for seed in runs.summaries]} if base.retained else {}
        lost = {
            name: Spread(tuple(100 * (before - each) for each in kept[name])) for name, before in base.measures.items()
        }
        results.append(MethodResult(runs, gained, lost, _count_word_gain(base, runs)))
    return Study(base, tuple(results), setting, seconds, left_out or {})


def _count_word_gain(base: BaseFigures, runs: MethodRuns) -> Spread | None:
    after = [each["domain"].get("word_bits_per_character", {}).get("after") for each in runs.summaries.values()]
    if base.word_bits is None or None in after:
        return None
    return Spread(tuple(base.word_bits - each for each in after if each is not None))


def _check_scored(runs: MethodRuns) -> None:
    for seed, each in runs.summaries.items():
        if each["domain"]["bits_per_character"]["after"] is None or each["general"]["mlm_accuracy"]["after"] is None:
            raise RunError(
                f"the run of {runs.name}, seed {seed}, has no bits per character or no general accuracy to compare; "
                "leave that method out of --methods."
            )


def find_front(results: Sequence[MethodResult], measure: str = PROBE) -> list[MethodResult]:
    """Return the methods on the Pareto front by means, ascending by loss: none gains as much and loses less."""
    front = find_undominated([(each.gained.mean, -each.lost[measure].mean) for each in results])
    return sorted((results[i] for i in front), key=lambda each: each.lost[measure].mean)
