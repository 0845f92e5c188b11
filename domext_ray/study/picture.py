"""Learned against forgotten as a picture: one panel per measure of forgetting.

Enters: a `Study`. Leaves: a PNG, legible on a light page and on a dark one.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from domext_ray.intervals import Sample
from domext_ray.report.plots import COLORS as RUN_COLORS
from domext_ray.report.plots import DASHED, GRID, MUTED, new_picture
from domext_ray.study.figures import PROBE, TEXT, MethodResult, Study, estimate, find_front

COLORS = (*RUN_COLORS[:-2], "#0f8b8d", "#9a4fb5", *RUN_COLORS[-2:])
TITLES = {PROBE: "Everyday English (general probe)", TEXT: "General text"}


def draw_study(study: Study, path: Path) -> None:
    """Draw bits gained over points lost as a PNG: a point a method with its interval, a small mark a seed."""
    measures = list(study.base.measures)
    with new_picture(path, (1.0 + 7.2 * len(measures), 6.2)) as figure:
        panels = figure.subplots(1, len(measures), sharey=True, squeeze=False)[0]
        for axes, measure in zip(panels, measures, strict=True):
            _draw_panel(axes, study, measure)
            _label_budgets(axes, study.results, measure)
        panels[0].set_ylabel("bits per character gained in the domain (up is better)")
        colors = _choose_colors(study.results).items()
        names = [Line2D([], [], color=color, marker="o", linestyle="none", label=name) for name, color in colors]
        figure.legend(handles=names, loc="outside right upper")
        figure.legend(handles=_make_key(study), loc="outside lower center", ncols=3)


def _draw_panel(axes: Axes, study: Study, measure: str) -> None:
    axes.set(title=TITLES[measure], xlabel="accuracy lost (points; left is better)")
    axes.margins(0.14, 0.12)
    axes.axvline(0.0, color=GRID, linewidth=2.0, zorder=0)
    front = find_front(study.comparable, measure)
    if len(front) > 1:
        line = [(each.lost[measure].mean, each.gained.mean) for each in front]
        axes.plot(*zip(*line, strict=True), color=MUTED, linewidth=1.4, linestyle=DASHED, zorder=1)
    colors = _choose_colors(study.results)
    for family, color in colors.items():
        own = [each for each in study.results if each.runs.family_name == family]
        sized = sorted((each for each in own if each.runs.budget), key=lambda each: each.runs.budget or 0.0)
        means = [(each.lost[measure].mean, each.gained.mean) for each in sized]
        if len(sized) > 1:
            axes.plot(*zip(*means, strict=True), color=color, linewidth=1.0, alpha=0.5, zorder=1)
        for each in own:
            _draw_method(axes, each, measure, color, is_open=each not in study.comparable)


def _choose_colors(results: Sequence[MethodResult]) -> dict[str, str]:
    families = dict.fromkeys(each.runs.family_name for each in results)
    return {family: COLORS[i % len(COLORS)] for i, family in enumerate(families)}


def _draw_method(axes: Axes, result: MethodResult, measure: str, color: str, *, is_open: bool) -> None:
    """The mean with its interval, and each seed; a square has a fixed size, a circle the budget's."""
    lost = result.lost[measure]
    axes.scatter(lost.values, result.gained.values, s=14, color=color, alpha=0.45, linewidths=0, zorder=2)
    axes.errorbar(
        lost.mean,
        result.gained.mean,
        xerr=_half(lost),
        yerr=_half(result.gained),
        fmt="o" if result.runs.budget else "s",
        color=color,
        markerfacecolor="white" if is_open else color,
        markersize=8,
        elinewidth=1.2,
        zorder=3,
    )


def _half(sample: Sample) -> float:
    """Half the width of a mean's interval; 0 where seeds are too few for one."""
    found = estimate(sample)
    return found.high - found.value if found.interval else 0.0


def _make_key(study: Study) -> list[Line2D]:
    """What the marks mean, as far as the picture has them."""
    has_interval = estimate(study.results[0].gained).interval is not None
    budgets = {bool(each.runs.budget) for each in study.results}
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
    families = [each.runs.family_name for each in study.results if each.runs.budget]
    if len(set(families)) < len(families):
        key.append(Line2D([], [], color=MUTED, linewidth=1.0, alpha=0.5, label="one method, several budgets"))
    if any(len(find_front(study.comparable, each)) > 1 for each in study.base.measures):
        key.append(Line2D([], [], color=MUTED, linewidth=1.4, linestyle=DASHED, label="Pareto front"))
    return key


def _label_budgets(axes: Axes, results: Sequence[MethodResult], measure: str) -> None:
    """Write beside each point of a line of several budgets which one it is."""
    colors = _choose_colors(results)
    for each in results:
        family = each.runs.family_name
        if each.runs.budget and sum(other.runs.family_name == family for other in results) > 1:
            style: dict[str, Any] = {"textcoords": "offset points", "color": colors[family], "size": "small"}
            axes.annotate(
                f"{100 * each.runs.budget:.3g} %", (each.lost[measure].mean, each.gained.mean), (7, 7), **style
            )
