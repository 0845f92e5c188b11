"""Learned against forgotten: several methods over several seeds become one table, plain sentences and one picture.

Enters: the base's figures, and of every method the summary.json of each seed. Leaves: results as plain values, the
comparison as Markdown, and a PNG. Gains and losses are counted from the base as it is, not from a method's own start,
because new words and random modules change a model before its first step.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Annotation
from matplotlib.transforms import Bbox

from domext_ray.errors import RunError
from domext_ray.report.comparison import describe_unequal_texts, find_undominated
from domext_ray.report.plots import COLORS as RUN_COLORS
from domext_ray.report.plots import DASHED, GRID, INK, MUTED, new_picture
from domext_ray.report.tables import NONE, format_markdown

COLORS = (*RUN_COLORS, "#0f8b8d", "#9a4fb5")
TIME_TOLERANCE = 0.1
"""Training seconds may miss the wanted ones by this share before a sentence says so."""

MIN_SEEDS = 3
"""Fewer runs of a method say nothing on chance: figures are counts of words, and two of them are easily equal."""

CHARACTER_TOLERANCE = 0.01
"""Bits a character still compare when the scored characters differ by this share, though not to the last digit."""

# Two-sided 95 % quantiles of Student's t at 1 to 30 degrees of freedom; beyond, the normal distribution's.
_T_95 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
# Offsets of a label from its point, the first choice first.
_PLACES = (
    *((7, 7), (7, -7), (-7, 7), (-7, -7), (0, 10), (0, -10), (12, 0), (-12, 0)),
    *((0, 22), (0, -22), (22, 16), (-22, 16), (22, -16), (-22, -16)),
)


@dataclass(frozen=True)
class BaseFigures:
    """What the base scores as it is.

    Args:
        bits: bits per character of held-out domain text.
        accuracy: of the general probe, 0 to 1.
        num_characters: scored characters.
        num_words: scored words of the general probe.
    """

    bits: float
    accuracy: float
    num_characters: int
    num_words: int


@dataclass(frozen=True)
class MethodRuns:
    """The finished runs of one method.

    Args:
        name: the method.
        trains: `MethodConfig.trains`.
        budget: trainable share that its size was solved from; None: its size is fixed.
        learning_rate: peak.
        summaries: content of summary.json by seed, the same seeds for every method.
    """

    name: str
    trains: str
    budget: float | None
    learning_rate: float
    summaries: dict[int, dict[str, Any]]

    @property
    def is_extension(self) -> bool:
        """Whether the base stays as it is."""
        return self.trains in ("extensions", "domain")


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

    def show(self, form: str) -> str:
        """Return mean ± standard deviation."""
        return format(self.mean, form) + ("" if self.sd is None else f" ± {self.sd:{form.lstrip('+')}}")


@dataclass(frozen=True)
class MethodResult:
    """A method's figures over seeds.

    Args:
        runs: where they come from.
        gained: bits per character below the base's.
        lost: points of general accuracy below the base's.
    """

    runs: MethodRuns
    gained: Spread
    lost: Spread

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
    """

    base: BaseFigures
    results: tuple[MethodResult, ...]
    setting: str
    seconds: float

    @property
    def comparable(self) -> tuple[MethodResult, ...]:
        """The methods whose bits per character were measured on the base's text."""
        return tuple(each for each in self.results if not _is_apart(each, self.base))


def _is_apart(result: MethodResult, base: BaseFigures) -> bool:
    """Whether a method's tokenizer cannot score the text that the base was scored on."""
    scored = result.spread("evaluation", "domain_characters").mean
    return abs(scored - base.num_characters) > CHARACTER_TOLERANCE * base.num_characters


def make_base_figures(summary: dict[str, Any]) -> BaseFigures:
    """Take the base's figures from the summary of a run that starts from it unchanged.

    Raises:
        RunError: there is no bits per character or no general accuracy.
    """
    bits = summary["domain"]["bits_per_character"]["before"]
    accuracy = summary["general"]["mlm_accuracy"]["before"]
    if bits is None or accuracy is None:
        missing = "held-out text has no word that it can spell" if bits is None else "general probe has no word of it"
        raise RunError(f"the base cannot be scored: the {missing}; give another --corpus or --train.general_probe.")
    scored = summary["evaluation"]
    return BaseFigures(bits, accuracy, scored["domain_characters"], scored["general_words"])


def make_study(base: BaseFigures, methods: Sequence[MethodRuns], setting: str, seconds: float) -> Study:
    """Turn summaries into gains and losses."""
    results = []
    for runs in methods:
        summaries = runs.summaries.values()
        _check_scored(runs)
        gained = Spread(tuple(base.bits - each["domain"]["bits_per_character"]["after"] for each in summaries))
        lost = Spread(tuple(100 * (base.accuracy - each["general"]["mlm_accuracy"]["after"]) for each in summaries))
        results.append(MethodResult(runs, gained, lost))
    return Study(base, tuple(results), setting, seconds)


def _check_scored(runs: MethodRuns) -> None:
    for seed, each in runs.summaries.items():
        if each["domain"]["bits_per_character"]["after"] is None or each["general"]["mlm_accuracy"]["after"] is None:
            raise RunError(
                f"the run of {runs.name}, seed {seed}, has no bits per character or no general accuracy to compare; "
                "leave that method out of --methods."
            )


def find_front(results: Sequence[MethodResult]) -> list[MethodResult]:
    """Return the methods on the Pareto front by means, ascending by loss: none gains as much and loses less."""
    front = find_undominated([(each.gained.mean, -each.lost.mean) for each in results])
    return sorted((results[i] for i in front), key=lambda each: each.lost.mean)


def format_study(study: Study) -> str:
    """Return the study as Markdown: its setting, the table, and what follows from it."""
    sentences = "\n".join(f"- {each}" for each in describe_findings(study))
    return f"{study.setting}\n\n{format_table(study)}\n\n{sentences}\n"


def format_table(study: Study) -> str:
    """Return the Markdown table: one line for the base, one a method; mean ± standard deviation over seeds."""
    bits, accuracy = study.base.bits, 100 * study.base.accuracy
    header = ["method", "trained", "share", "tokens read", "seconds", "bits per character", "gained"]
    header += ["general accuracy (%)", "points lost"]
    rows = [("the base", "0", NONE, NONE, NONE, f"{bits:.3f}", NONE, f"{accuracy:.1f}", NONE)]
    for each in study.results:
        domain, general = ("domain", "bits_per_character"), ("general", "mlm_accuracy")
        cells = (
            each.name,
            f"{each.spread('parameters', 'trainable').mean:,.0f}",
            f"{each.spread('parameters', 'trainable_frac').mean:.1%}" + ("" if each.runs.budget else " (fixed)"),
            f"{each.spread('train', 'tokens').mean:,.0f}",
            each.spread("train", "wall_seconds").show(".0f"),
            f"{each.spread(*domain, 'before').mean:.3f} → {each.spread(*domain, 'after').show('.3f')}",
            each.gained.show(".3f"),
            f"{each.spread(*general, 'before', scale=100).mean:.1f} → "
            f"{each.spread(*general, 'after', scale=100).show('.1f')}",
            each.lost.show(".1f"),
        )
        rows.append(cells)
    return format_markdown(header, rows)


def describe_findings(study: Study) -> list[str]:
    """Return what follows from the figures, as plain sentences that claim no more than the spread bears."""
    results, comparable = study.results, study.comparable
    sentences = [*_rank(comparable, "gains most", lambda each: each.gained, 1, ".3f", "bits per character")]
    sentences += _rank(results, "forgets least", lambda each: each.lost, -1, ".1f", "points")
    if len(comparable) > 1:
        front = ", ".join(each.name for each in find_front(comparable))
        sentences.append(f"On the Pareto front, by means: {front}. No method here gains as much and loses less.")
    return sentences + _test_claim(study) + _list_reservations(study)


def _rank(
    results: Sequence[MethodResult],
    verb: str,
    figure: Callable[[MethodResult], Spread],
    sign: int,
    form: str,
    unit: str,
) -> list[str]:
    """The first method by a figure (sign 1: the highest is best), and whether it differs from the second."""
    if len(results) < 2:
        return []
    first, second = sorted(results, key=lambda each: -sign * figure(each).mean)[:2]
    sentence = (
        f"{first.name} {verb}: {figure(first).show(form)} {unit}; next is {second.name} with "
        f"{figure(second).show(form)}"
    )
    return [f"{sentence} ({_describe_difference(figure(first) - figure(second), form, unit)})."]


def _describe_difference(difference: Spread, form: str, unit: str) -> str:
    if difference.interval is None:
        return f"fewer than {MIN_SEEDS} seeds, so chance is not ruled out"
    low, high = difference.interval
    verdict = "is within the spread of the seeds" if low <= 0 <= high else "is beyond the spread of the seeds"
    return (
        f"the difference of {abs(difference.mean):{form}} {unit} {verdict}: paired by seed, 95 % interval "
        f"{low:+{form}} to {high:+{form}}"
    )


def _test_claim(study: Study) -> list[str]:
    """Whether extensions forget less than full training, method by method."""
    results = study.results
    full = next((each for each in results if each.runs.trains == "all"), None)
    extensions = [each for each in results if each.runs.is_extension]
    if full is None or not extensions:
        return ["'Extensions forget less than full training' is not tested here: it needs full and an extension."]
    if full.lost.interval is None:
        fewer = [each.name for each in extensions if each.lost.mean < full.lost.mean]
        return [
            f"'Extensions forget less than full training': with fewer than {MIN_SEEDS} seeds this cannot be told; here "
            f"{len(fewer)} of {len(extensions)} lost less ({', '.join(fewer) or 'none'})."
        ]
    supported = [each.name for each in extensions if (interval := (full.lost - each.lost).interval) and interval[0] > 0]
    refuted = [each.name for each in extensions if (interval := (full.lost - each.lost).interval) and interval[1] < 0]
    sentences = [
        f"'Extensions forget less than full training' is supported for {len(supported)} of {len(extensions)} "
        f"extensions ({', '.join(supported) or 'none'})"
        + (f", and the opposite for {', '.join(refuted)}" if refuted else "")
        + f"; supported means that the paired differences over {len(full.lost.values)} seeds exclude 0 (95 % interval, "
        "not corrected for the number of methods)."
    ]
    for each in extensions:
        lost, gained = full.lost - each.lost, full.gained - each.gained
        low, high = lost.interval or (lost.mean, lost.mean)
        gain = f" and gains {abs(gained.mean):.3f} bits per character {'less' if gained.mean >= 0 else 'more'}"
        sentences.append(
            f"{each.name} loses {abs(lost.mean):.1f} points {'less' if lost.mean >= 0 else 'more'} than {full.name} "
            f"(interval {low:+.1f} to {high:+.1f}){gain if each in study.comparable else ''}."
        )
    return sentences


def _list_reservations(study: Study) -> list[str]:
    """What a reader must know before believing the table."""
    base, sentences = study.base, []
    moved = [each.name for each in study.results if _starts_elsewhere(each, base)]
    if moved:
        sentences.append(
            f"Gains and losses are counted from the base; {', '.join(moved)} "
            f"start{'s' if len(moved) == 1 else ''} elsewhere, with new words or random parts before the first step."
        )
    if study.seconds:
        misses = [
            f"{each.name} {mean:.0f}"
            for each in study.results
            if abs((mean := each.spread("train", "wall_seconds").mean) - study.seconds) > TIME_TOLERANCE * study.seconds
        ]
        if misses:
            sentences.append(
                f"Not quite equal time: {study.seconds:g} seconds were wanted and these took ({', '.join(misses)}); "
                "the number of steps follows from a pilot, and the machine's speed changed since."
            )
    scored = {each.name: int(each.spread("evaluation", "domain_characters").mean) for each in study.results}
    apart = [each.name for each in study.results if each not in study.comparable]
    sentences += describe_unequal_texts({"the base": base.num_characters, **scored})
    if apart:
        sentences[-1] += f" Gains of {', '.join(apart)} are therefore not ranked."
    words = {each.name: each.spread("evaluation", "general_words").mean for each in study.results}
    others = [f"{name} {number:,.0f}" for name, number in words.items() if number != base.num_words]
    if others:
        sentences.append(
            f"General accuracy counts words that are one token: {base.num_words:,} for the base, but "
            f"{', '.join(others)}; small differences to these methods mean little."
        )
    sentences.append(
        f"One word of the general probe is {100 / base.num_words:.2f} points; seeds change data order, masks and "
        "initialisation, not the text that is scored, so the spread says nothing about other texts."
    )
    return sentences


def _starts_elsewhere(result: MethodResult, base: BaseFigures) -> bool:
    bits = result.spread("domain", "bits_per_character", "before").mean
    accuracy = result.spread("general", "mlm_accuracy", "before").mean
    return abs(bits - base.bits) > 1e-3 or abs(accuracy - base.accuracy) > 1e-3


def to_results(study: Study) -> dict[str, Any]:
    """Return all figures as plain values for results.json."""
    return {
        "setting": study.setting,
        "base": {
            "bits_per_character": study.base.bits,
            "general_accuracy": study.base.accuracy,
            "domain_characters": study.base.num_characters,
            "general_words": study.base.num_words,
        },
        "methods": {each.name: _describe_method(each) for each in study.results},
        "pareto_front": [each.name for each in find_front(study.comparable)],
        "paired_differences": {
            f"{first.name} - {second.name}": {
                "bits_gained": _describe_spread(first.gained - second.gained),
                "points_lost": _describe_spread(first.lost - second.lost),
            }
            for first, second in combinations(study.results, 2)
        },
        "findings": describe_findings(study),
    }


def _describe_method(result: MethodResult) -> dict[str, Any]:
    runs = result.runs
    return {
        "trains": runs.trains,
        "budget": runs.budget,
        "learning_rate": runs.learning_rate,
        "method": next(iter(runs.summaries.values()))["method"],
        "seeds": list(runs.summaries),
        "trainable": [each["parameters"]["trainable"] for each in runs.summaries.values()],
        "trainable_frac": [each["parameters"]["trainable_frac"] for each in runs.summaries.values()],
        "steps": [each["train"]["steps"] for each in runs.summaries.values()],
        "tokens": [each["train"]["tokens"] for each in runs.summaries.values()],
        "seconds": _describe_spread(result.spread("train", "wall_seconds")),
        "bits_per_character_before": _describe_spread(result.spread("domain", "bits_per_character", "before")),
        "bits_per_character_after": _describe_spread(result.spread("domain", "bits_per_character", "after")),
        "bits_gained": _describe_spread(result.gained),
        "general_accuracy_before": _describe_spread(result.spread("general", "mlm_accuracy", "before")),
        "general_accuracy_after": _describe_spread(result.spread("general", "mlm_accuracy", "after")),
        "points_lost": _describe_spread(result.lost),
    }


def _describe_spread(spread: Spread) -> dict[str, Any]:
    return {
        "values": list(spread.values),
        "mean": spread.mean,
        "sd": spread.sd,
        "interval": None if spread.interval is None else list(spread.interval),
    }


def draw_study(study: Study, path: Path) -> None:
    """Draw bits gained over points lost as a PNG: a point a method with its spread, a small mark a seed."""
    with new_picture(path, (8.6, 5.6)) as figure:
        FigureCanvasAgg(figure)
        axes = figure.subplots()
        axes.set(
            title="Learned against forgotten",
            xlabel="general accuracy lost (points; left is better)",
            ylabel="bits per character gained in the domain (up is better)",
        )
        axes.margins(0.14, 0.12)
        front = find_front(study.comparable)
        if len(front) > 1:
            line = [(each.lost.mean, each.gained.mean) for each in front]
            axes.plot(*zip(*line, strict=True), color=MUTED, linewidth=1.4, linestyle=DASHED, zorder=1)
        for i, each in enumerate(study.results):
            _draw_method(axes, each, COLORS[i % len(COLORS)], is_open=each not in study.comparable)
        axes.axvline(0.0, color=GRID, linewidth=2.0, zorder=0)
        _place_labels(figure, axes, study.results)
        figure.text(
            0.995, 0.985, _describe_marks(study, len(front) > 1), ha="right", va="top", color=MUTED, size="small"
        )


def _draw_method(axes: Axes, result: MethodResult, color: str, *, is_open: bool) -> None:
    """The mean with its standard deviations, and each seed; a square has a fixed size, a circle the budget's."""
    axes.scatter(result.lost.values, result.gained.values, s=14, color=color, alpha=0.45, linewidths=0, zorder=2)
    axes.errorbar(
        result.lost.mean,
        result.gained.mean,
        xerr=result.lost.sd or 0.0,
        yerr=result.gained.sd or 0.0,
        fmt="o" if result.runs.budget else "s",
        color=color,
        markerfacecolor="white" if is_open else color,
        markersize=8,
        elinewidth=1.2,
        zorder=3,
    )


def _describe_marks(study: Study, has_front: bool) -> str:
    parts = ["small marks: seeds"] if len(study.results[0].lost.values) > 1 else []
    if len({bool(each.runs.budget) for each in study.results}) > 1:
        parts.append("squares: size fixed by the method")
    if len(study.comparable) < len(study.results):
        parts.append("open: scored on another text")
    return "  ·  ".join([*parts, *(["dashed: Pareto front"] if has_front else [])])


def _place_labels(figure: Figure, axes: Axes, results: Sequence[MethodResult]) -> None:
    """Write each method's name beside its point, where it covers no other name and no other point."""
    figure.draw_without_rendering()
    to_pixels = axes.transData.transform
    taken = []
    for each in results:
        (x, y), (right, up) = (
            to_pixels((each.lost.mean + k * (each.lost.sd or 0.0), each.gained.mean + k * (each.gained.sd or 0.0)))
            for k in (0, 1)
        )
        width, height = right - x, up - y  # of the error bars, in pixels
        taken.append(Bbox.from_extents(x - 9, y - 9, x + 9, y + 9))
        taken.append(Bbox.from_extents(x - width, y - 2, x + width, y + 2))
        taken.append(Bbox.from_extents(x - 2, y - height, x + 2, y + height))
    for each, color in zip(results, (COLORS[i % len(COLORS)] for i in range(len(results))), strict=True):
        labels = [_write_label(axes, each, place, color) for place in _PLACES]
        boxes = [label.get_window_extent() for label in labels]
        inside = axes.get_window_extent()
        costs = [
            sum(1 for other in taken if box.overlaps(other))
            + 2 * (box.x0 < inside.x0 or box.x1 > inside.x1 or box.y0 < inside.y0 or box.y1 > inside.y1)
            for box in boxes
        ]
        best = costs.index(min(costs))
        for i, label in enumerate(labels):
            if i != best:
                label.remove()
        taken.append(boxes[best])


def _write_label(axes: Axes, result: MethodResult, place: tuple[int, int], color: str) -> Annotation:
    right, up = place
    return axes.annotate(
        result.name,
        (result.lost.mean, result.gained.mean),
        xytext=place,
        textcoords="offset points",
        ha="center" if right == 0 else "left" if right > 0 else "right",
        va="center" if up == 0 else "bottom" if up > 0 else "top",
        color=color if color != MUTED else INK,
        weight="bold",
        size="small",
    )
