"""Learned against forgotten as a picture: one panel per measure of forgetting.

Enters: a `Study`. Leaves: a PNG, legible on a light page and on a dark one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from domext_ray.intervals import Estimate, compare
from domext_ray.report.compare import compare_with_first, draw_lines
from domext_ray.report.plots import COLORS as RUN_COLORS
from domext_ray.report.plots import DASHED, GRID, MUTED, new_picture
from domext_ray.storage import Place
from domext_ray.studies.methods.figures import (
    PROBE,
    TEXT,
    WITH_ROUTER,
    ArmResult,
    SetScores,
    Study,
    estimate,
    find_front,
)
from domext_ray.studies.methods.label_curves import LabelCurve

COLORS = (*RUN_COLORS[:-2], "#0f8b8d", "#9a4fb5", *RUN_COLORS[-2:])
TITLES = {PROBE: "Everyday English (general probe)", TEXT: "General text"}


def draw_study(study: Study, path: Place) -> None:
    """Draw what was gained over points lost as a PNG: a point a method with its interval, a small mark a seed.

    A panel per measure of forgetting has bits gained; where models were fine-tuned, a last one has F1 gained.
    Panels are below each other: a narrow screen shows their text.
    """
    panels = [
        _Panel(measure, TITLES[measure], "bits per character gained in the domain (up is better)")
        for measure in study.base.measures
    ]
    if study.scores:
        scores = study.scores[-1]
        title = f"After fine-tuning: {scores.name}"
        panels.append(_Panel(panels[-1].measure, title, f"points of {scores.metric} gained (up is better)", scores))
    colors = _choose_colors(study.results).items()
    names = [Line2D([], [], color=color, marker="o", linestyle="none", label=name) for name, color in colors]
    key = _make_key(study)
    rows = math.ceil(len(names) / 3) + math.ceil(len(key) / 2)
    with new_picture(path, (7.2, 0.25 * rows + 4.6 * len(panels))) as figure:
        for axes, panel in zip(figure.subplots(len(panels), squeeze=False)[:, 0], panels, strict=True):
            _draw_panel(axes, study, panel)
        figure.legend(handles=names, loc="outside upper center", ncols=3)
        figure.legend(handles=key, loc="outside lower center", ncols=2)


@dataclass(frozen=True)
class _Panel:
    """What a panel shows: what was lost from left to right, and what was gained, bits or points of a set's figure."""

    measure: str
    title: str
    label: str
    scores: SetScores | None = None

    def read_gain(self, result: ArmResult) -> tuple[np.ndarray, Estimate]:
        """Return a method's gain by seed, and its mean with an interval."""
        if self.scores is None:
            return result.gained.values, estimate(result.gained)
        base, *_ = self.scores.samples.values()
        own = self.scores.samples[result.name.removesuffix(WITH_ROUTER)]  # a router sends a model's own texts to it
        return 100 * (own.values - base.mean), compare(base, own).scale(100)


def draw_scores(scores: SetScores, path: Place) -> None:
    """Draw what fine-tuned models score, and their differences to the base, as a PNG."""
    lines = compare_with_first([*scores.samples], [*scores.samples.values()], [()] * len(scores.samples))
    draw_lines(lines, path, f"After fine-tuning: {scores.name}", f"{scores.metric} on {scores.split}")


def draw_curves(curves: Sequence[LabelCurve], path: Place) -> None:
    """Draw what models score by the number of labels as a PNG: a panel a set, a line a method, its interval a band."""
    with new_picture(path, (7.2, 0.5 + 3.8 * len(curves))) as figure:
        for axes, curve in zip(figure.subplots(len(curves), squeeze=False)[:, 0], curves, strict=True):
            for i, (name, samples) in enumerate(curve.samples.items()):
                color, style = (MUTED, DASHED) if samples is curve.base else (COLORS[(i - 1) % len(COLORS)], "solid")
                found = [sample.estimate() for sample in samples]
                lows, highs = [point.low for point in found], [point.high for point in found]
                axes.fill_between(curve.numbers, lows, highs, color=color, alpha=0.15, linewidth=0)
                values = [point.value for point in found]
                axes.plot(curve.numbers, values, color=color, linestyle=style, marker="o", markersize=4, label=name)
            axes.set(title=curve.name, xscale="log", xlabel="labels", ylabel=f"{curve.metric} on {curve.split}")
            axes.set_xticks(curve.numbers, [f"{number:,.0f}" for number in curve.numbers])
            axes.minorticks_off()
        figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=3)


def _draw_panel(axes: Axes, study: Study, panel: _Panel) -> None:
    measure = panel.measure
    axes.set(title=panel.title, xlabel=f"points lost (left is better): {TITLES[measure]}", ylabel=panel.label)
    axes.margins(0.14, 0.12)
    axes.axvline(0.0, color=GRID, linewidth=2.0, zorder=0)
    front = find_front(study.comparable, measure) if panel.scores is None else []
    if len(front) > 1:
        line = [(result.lost[measure].mean, result.gained.mean) for result in front]
        axes.plot(*zip(*line, strict=True), color=MUTED, linewidth=1.4, linestyle=DASHED, zorder=1)
    colors = _choose_colors(study.results)
    for family, color in colors.items():
        own = [result for result in study.results if result.runs.family_name == family]
        sized = sorted((result for result in own if result.runs.budget), key=lambda each: each.runs.budget or 0.0)
        means = [(result.lost[measure].mean, panel.read_gain(result)[1].value) for result in sized]
        if len(sized) > 1:
            axes.plot(*zip(*means, strict=True), color=color, linewidth=1.0, alpha=0.5, zorder=1)
            for result, place in zip(sized, means, strict=True):
                style: dict[str, Any] = {"textcoords": "offset points", "color": color, "size": "small"}
                axes.annotate(f"{100 * (result.runs.budget or 0.0):.3g} %", place, (7, 7), **style)
        for result in own:
            _draw_method(axes, result, panel, color, is_open=result not in study.comparable)


def _choose_colors(results: Sequence[ArmResult]) -> dict[str, str]:
    families = dict.fromkeys(result.runs.family_name for result in results)
    return {family: COLORS[i % len(COLORS)] for i, family in enumerate(families)}


def _draw_method(axes: Axes, result: ArmResult, panel: _Panel, color: str, *, is_open: bool) -> None:
    """The mean with its interval, and each seed; a square has a fixed size, a circle the budget's."""
    lost, (values, gained) = result.lost[panel.measure], panel.read_gain(result)
    if len(values) == len(lost.values):
        axes.scatter(lost.values, values, s=14, color=color, alpha=0.45, linewidths=0, zorder=2)
    axes.errorbar(
        lost.mean,
        gained.value,
        xerr=_half(estimate(lost)),
        yerr=_half(gained),
        fmt="o" if result.runs.budget else "s",
        color=color,
        markerfacecolor="white" if is_open else color,
        markersize=8,
        elinewidth=1.2,
        zorder=3,
    )


def _half(found: Estimate) -> float:
    """Half the width of a mean's interval; 0 where seeds are too few for one."""
    return found.high - found.value if found.interval else 0.0


def _make_key(study: Study) -> list[Line2D]:
    """What the marks mean, as far as the picture has them."""
    has_interval = estimate(study.results[0].gained).interval is not None
    budgets = {bool(result.runs.budget) for result in study.results}
    style: dict[str, Any] = {"color": MUTED, "linestyle": "none", "markersize": 8}
    bars = "mean, 95 % interval" if has_interval else "mean"
    marks = {True: ("o", "size from the budget"), False: ("s", "fixed size")}
    key = [
        Line2D([], [], marker=mark, label=f"{bars} ({size})", **style)
        for has_budget, (mark, size) in marks.items()
        if has_budget in budgets
    ]
    if len(study.results[0].gained.values) > 1:
        key.append(Line2D([], [], marker="o", label="a seed", alpha=0.45, **{**style, "markersize": 4}))
    if len(study.comparable) < len(study.results):
        key.append(Line2D([], [], marker="o", label="scored on another text", markerfacecolor="white", **style))
    families = [result.runs.family_name for result in study.results if result.runs.budget]
    if len(set(families)) < len(families):
        key.append(Line2D([], [], color=MUTED, linewidth=1.0, alpha=0.5, label="one method, several budgets"))
    if any(len(find_front(study.comparable, measure)) > 1 for measure in study.base.measures):
        key.append(Line2D([], [], color=MUTED, linewidth=1.4, linestyle=DASHED, label="Pareto front"))
    return key
