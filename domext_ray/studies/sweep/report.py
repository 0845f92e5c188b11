"""A sweep's trials -> summary.json, best.yaml, sweep.png and sweep.html.

The page has the leaderboard, the score against the trained parameters (exBERT's Figure 2) and by training step,
parallel coordinates, the front of two objectives, what mattered, and where the time went.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter, PercentFormatter

from domext_ray.config.options.build import dump_yaml
from domext_ray.config.pretrain import PretrainConfig, RunConfig, SettledConfig
from domext_ray.config.sweep import OBJECTIVES, SearchConfig, SweepConfig
from domext_ray.errors import RunError
from domext_ray.files import NUMBER, read_json
from domext_ray.intervals import Estimate, subtract
from domext_ray.progress import format_seconds
from domext_ray.report.page import (
    fill_page,
    format_html,
    format_paragraph,
    format_pictures,
    format_section,
    format_settings,
)
from domext_ray.report.plots import BLUE, COLORS, DASHED, GREEN, MUTED, ORANGE, Picture, draw_legend, new_picture
from domext_ray.report.tables import Table
from domext_ray.runs.run_directory import read_config
from domext_ray.runtime.trials import Outcome, group_by_arm
from domext_ray.storage import Place, write_json, write_text
from domext_ray.studies.sweep.results import TRIALS, estimate, find_front, measure_importance, rank_trials, read_trials
from domext_ray.studies.sweep.space import Dimension, Space, configure, describe_point

BASE = "base.json"
"""What the base scores without pre-training, if that was asked for."""
MAX_ROWS = 50
"""Trials of the leaderboard on the page; summary.json has all."""
NAMES = {
    "general_accuracy": "general accuracy",
    "trainable": "trained parameters",
    "tokens_per_second": "tokens/s",
}
MAX_PRINTED = 10
"""Trials of the table for the terminal."""
BUSY = ("train", "evaluate", "finetune")
TIMES = {
    "train": "pre-training steps",
    "evaluate": "evaluating and saving",
    "finetune": "fine-tuning and scoring",
    "overhead": "starting, importing, loading, waiting",
    "total": "all trials",
}


def write_sweep_report(config: SweepConfig, space: Space, folder: Place) -> str:
    """Write what a sweep found, and return a short table for the terminal; a RunError: no trial was scored."""
    trials = read_trials(folder / TRIALS)
    objectives = config.search.objectives
    ranked = rank_trials(trials, objectives)
    if not ranked:
        reason = next((trial.failure for trial in trials if trial.failure), "their processes died")
        raise RunError(f"no trial of the sweep in {folder} was scored: {reason}")
    time = measure_time(trials)
    importance = measure_importance(space, trials, objectives[0])
    write_text(folder / "best.yaml", dump_yaml(_configure_best(config, space, folder, ranked[0])))
    base = read_base_scores(folder) if (folder / BASE).exists() else None
    result = describe_best(trials, ranked, objectives[0], base)
    header, rows = _list_rows(ranked[:MAX_ROWS], objectives)
    table = Table(header, rows[:MAX_PRINTED], [result], num_texts=len(header))
    summary = {
        "table": table.show(),
        "base": base["f1"] if base else None,
        "best": _describe(ranked[0]),
        "front": [trial.name for trial in find_front(trials, objectives)] if len(objectives) > 1 else [],
        "importance": importance,
        "time": time,
        "trials": [_describe(trial) for trial in [*ranked, *(other for other in trials if other not in ranked)]],
    }
    columns = min(config.search.rungs, 2)
    with new_picture(folder / "sweep.png", (6.2 * columns, 4.4)) as picture:
        panels = picture.subplots(1, columns, squeeze=False)[0]
        draw_sizes(panels[0], config.search, space, trials, base)
        if columns > 1:
            _draw_rungs(panels[1], trials, objectives[0])
    page = fill_page(
        folder.name,
        [
            format_paragraph(result, "result"),
            format_html(header, rows),
            format_section("Pictures", format_pictures(_list_pictures(config, space, trials, importance, base))),
            format_section("What it took", format_html(("", ""), _list_time(time), "pairs")),
            format_section("Options", format_settings(dump_yaml(config))),
        ],
    )
    write_text(folder / "sweep.html", page)
    write_json(folder / "summary.json", summary)
    text = replace(table, notes=["", result]).show_text()
    return f"{text}\ntime: {', '.join(' '.join(pair) for pair in _list_time(time))}"


def describe_best(
    trials: Sequence[Outcome], ranked: Sequence[Outcome], objective: str, base: dict[str, Any] | None
) -> str:
    """Return in one sentence what is best, and whether its interval tells it from the runner-up and the base."""
    best, found = ranked[0], estimate(ranked[0], objective)
    reached = f"{name_objective(objective, trials)} {_show(objective, found)}"
    said = f"Best of {len(trials)} trials: {reached} with {describe_point(best.config)}"
    others = {trial.name: estimate(trial, objective) for trial in ranked[1:2]}
    others |= {"the base as it is": Estimate(base["f1"], *base["f1_interval"])} if base and objective == "f1" else {}
    close = [name for name, estimate in others.items() if estimate.interval and not subtract(found, estimate).is_apart]
    return said + (f"; not distinguishable from {' and '.join(close)}." if close else ".")


def name_objective(objective: str, trials: Sequence[Outcome]) -> str:
    """Return what an objective is called: f1 is F1 only where the metric of every set is one."""
    figures = (rung["figure"] for trial in trials for rung in trial.steps)
    return f"{next(figures, 'downstream score')} on dev" if objective == "f1" else NAMES[objective]


def read_base_scores(folder: Place) -> dict[str, Any]:
    """Return what the base scores without a sweep's pre-training."""
    return read_json(folder / BASE, "delete it: the same command scores the base again", {"f1": NUMBER, "figure": str})


def _configure_best(config: SweepConfig, space: Space, folder: Place, best: Outcome) -> PretrainConfig:
    """Return the best trial's pre-training, as a training job takes it: without the sweep's places."""
    trained = read_config(folder / TRIALS / best.name, SettledConfig)
    pretrain = configure(config, space, best.config).pretrain
    return replace(
        pretrain,
        run=replace(RunConfig(), name=f"{folder.name}-best"),
        train=replace(pretrain.train, max_steps=trained.train.max_steps),
        optim=replace(pretrain.optim, decay_steps=trained.optim.decay_steps),
    )


def _describe(trial: Outcome) -> dict[str, Any]:
    return {
        "id": trial.name,
        "point": trial.config,
        "status": trial.status,
        **({"failure": trial.failure} if trial.failure else {}),
        "rungs": list(trial.steps),
    }


def measure_time(trials: Sequence[Outcome]) -> dict[str, float]:
    """Return where the seconds of all trials' processes went; "overhead_frac" is what was none of the three."""
    spent = {name: sum(rung["seconds"][name] for trial in trials for rung in trial.steps) for name in BUSY}
    wall = sum(trial.seconds for trial in trials)
    overhead = max(wall - sum(spent.values()), 0.0)
    return {**spent, "overhead": overhead, "total": wall, "overhead_frac": overhead / wall if wall else 0.0}


def _list_time(time: Mapping[str, float]) -> list[tuple[str, str]]:
    rows = [(label, format_seconds(time[name])) for name, label in TIMES.items()]
    return [*rows, ("share that is neither training nor scoring", f"{time['overhead_frac']:.1%}")]


def _list_rows(ranked: Sequence[Outcome], objectives: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    shown = list(dict.fromkeys([*objectives, "f1", "general_accuracy", "trainable", "tokens_per_second"]))
    header = ["trial", "scored at", *(name_objective(name, ranked) for name in shown), "point"]
    rows = [
        [
            trial.name,
            f"{trial.steps[-1]['step']:,}/{trial.steps[-1]['steps']:,}",
            *(_show(name, estimate(trial, name)) for name in shown),
            describe_point(trial.config),
        ]
        for trial in ranked
    ]
    return header, rows


def _show(objective: str, found: Estimate) -> str:
    if math.isnan(found.value):
        return "-"
    value = f"{found.value:,.0f}" if objective in ("trainable", "tokens_per_second") else f"{found.value:.4f}"
    return value + (f" [{found.low:.4f}, {found.high:.4f}]" if found.interval else "")


def _list_pictures(
    config: SweepConfig,
    space: Space,
    trials: Sequence[Outcome],
    importance: Mapping[str, float],
    base: dict[str, Any] | None,
) -> list[Picture]:
    search, first = config.search, config.search.objectives[0]
    second = search.objectives[1] if len(search.objectives) > 1 else "trainable" if first != "trainable" else "f1"
    name, other = name_objective(first, trials), name_objective(second, trials)
    best = rank_trials(trials, search.objectives)[0]
    reached = f"The best trial, {best.name}, has {name} {_show(first, estimate(best, first))}"
    front = ", ".join(trial.name for trial in find_front(trials, (first, second)))
    pictures: list[Picture] = []

    def add(draw: Callable[[Axes], None], caption: str, alt: str, *, is_wide: bool = False) -> None:
        pictures.append(Picture(lambda figure: draw(figure.subplots()), caption, alt, is_wide))

    add(
        lambda axes: draw_sizes(axes, search, space, trials, base),
        "Trials of the whole budget, with 95 % intervals over dev's documents; seeds of one point share a mean.",
        f"{name} of {len(trials)} trials by {search.axis or 'size'}. {reached} with {describe_point(best.config)}.",
    )
    if search.rungs > 1:
        alt = f"{name} of every trial at {search.rungs} rungs. {reached} at the last one."
        add(lambda axes: _draw_rungs(axes, trials, first), "What every trial scored as its pre-training went on.", alt)
    add(
        lambda axes: _draw_front(axes, trials, first, second),
        f"No other trial is better than those of the line in both {name} and {other}.",
        f"{name} against {other}; on the front: {front}.",
    )
    if importance:
        said = ", ".join(f"{dimension} {share:.0%}" for dimension, share in importance.items())
        add(
            lambda axes: _draw_importance(axes, importance),
            f"Share of the variance of {name} at the last rung that half of the trials reached (fANOVA).",
            f"Importance of the dimensions: {said}.",
        )
    add(
        lambda axes: _draw_coordinates(axes, space, trials, first),
        f"Parallel coordinates: one line per trial, past what it does not have, the darker the better its {name}.",
        f"One line per trial over {', '.join(dimension.name for dimension in space.dimensions)}. {reached}.",
        is_wide=True,
    )
    return pictures


def draw_sizes(
    axes: Axes, search: SearchConfig, space: Space, trials: Sequence[Outcome], base: dict[str, Any] | None
) -> None:
    """Draw the first objective by trained parameters, or along --search.axis: with modules' sizes, exBERT's Figure 2.

    Dots are trials, lines are means over seeds; `base` is what `read_base_scores` gave, if that was asked for.
    """
    objective = search.objectives[0]
    along = next((dimension for dimension in space.dimensions if dimension.name == search.axis), None)
    scored = [trial for trial in trials if trial.is_complete]
    scored = [trial for trial in scored if not math.isnan(trial.get(objective) + _find_size(trial, along))]
    curves = dict.fromkeys(trial.config.get(search.curves) for trial in scored)
    for value, color in zip(curves, itertools.cycle(COLORS)):
        own = [trial for trial in scored if trial.config.get(search.curves) == value]
        arms = group_by_arm(own)
        for trial in own:
            axes.plot(_find_size(trial, along), trial.get(objective), "o", color=color, alpha=0.45, markersize=5)
            found = estimate(trial, objective)
            if found.interval:
                place = [_find_size(trial, along)] * 2  # lines, which the legend keeps away from
                axes.plot(place, found.interval, color=color, alpha=0.45, linewidth=1)
        if search.curves or len(arms) < len(own):
            means = [(_find_size(arm[0], along), np.mean([trial.get(objective) for trial in arm])) for arm in arms]
            label = f"{search.curves} {value}" if search.curves else None
            axes.plot(*zip(*sorted(means), strict=True), color=color, linewidth=1.6, label=label)
    pruned = [trial for trial in trials if trial.status == "pruned"]
    if pruned:
        places = [_find_size(trial, along) for trial in pruned], [trial.get(objective) for trial in pruned]
        axes.plot(*places, "x", color=MUTED, alpha=0.6, markersize=5, label="pruned")
    if base is not None and objective == "f1":
        axes.axhspan(*base["f1_interval"], color=MUTED, alpha=0.12, linewidth=0)
        axes.axhline(base["f1"], color=MUTED, linewidth=1.2, linestyle=DASHED, label="base, not adapted")
    draw_legend(axes)
    if along is None:
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    elif along.choices:
        axes.set_xticks([_locate(along, choice) for choice in along.choices], [str(choice) for choice in along.choices])
    elif along.kind.startswith("log"):
        axes.set_xscale("log")
    axes.set(
        title=f"{name_objective(objective, trials)} by {search.axis or 'size'}",
        xlabel=search.axis or NAMES["trainable"],
        ylabel=name_objective(objective, trials),
    )


def _find_size(trial: Outcome, along: Dimension | None) -> float:
    """Return a trial's trained parameters, or its place along a dimension; NaN where that does not hold."""
    if along is None:
        return trial.get("trainable")
    return _locate(along, trial.config[along.name]) if along.name in trial.config else math.nan


def _locate(dimension: Dimension, value: Any) -> float:
    """Return a value's place: itself if all are numbers, such as the names of sizes, else its rank."""
    try:
        for choice in dimension.choices:
            float(choice)
        return float(value)
    except (TypeError, ValueError):
        return float(dimension.choices.index(value))


def _draw_rungs(axes: Axes, trials: Sequence[Outcome], objective: str) -> None:
    for trial in trials:
        steps = [rung["step"] / rung["steps"] for rung in trial.steps]
        values = [trial.get(objective, rung) for rung in range(len(trial.steps))]
        color = BLUE if trial.is_complete else MUTED
        axes.plot(steps, values, "-o", color=color, alpha=0.7 if color == BLUE else 0.45, markersize=4, linewidth=1.2)
    axes.plot([], [], "-o", color=BLUE, label="whole budget", markersize=4)
    axes.plot([], [], "-o", color=MUTED, label="pruned", markersize=4)
    draw_legend(axes)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, symbol=" %"))
    name = name_objective(objective, trials)
    axes.set(title=f"{name} at the rungs", xlabel="share of the budget", ylabel=name)


def _draw_coordinates(axes: Axes, space: Space, trials: Sequence[Outcome], objective: str) -> None:
    scored = [trial for trial in trials if not math.isnan(trial.get(objective))]
    scored.sort(key=lambda each: each.get(objective), reverse=OBJECTIVES[objective] == "min")
    values = np.array([trial.get(objective) for trial in scored])
    low, high = values.min(), values.max()
    for rank, trial in enumerate(scored):
        places = [_place(dimension, trial.config.get(dimension.name)) for dimension in space.dimensions]
        places.append((trial.get(objective) - low) / (high - low) if high > low else 0.5)
        shade = 0.12 + 0.88 * (rank + 1) / len(scored)
        held = [(i, place) for i, place in enumerate(places) if not math.isnan(place)]
        axes.plot(*zip(*held, strict=True), color=BLUE, alpha=shade**2, linewidth=0.8 + 1.4 * shade)
    names = [dimension.name.removeprefix("method.") for dimension in space.dimensions] + [
        name_objective(objective, trials)
    ]
    axes.set_xticks(range(len(names)), [name.replace(".", ".\n") for name in names], fontsize="small")
    axes.set_yticks([])
    axes.set_xlim(-0.3, len(names) - 0.7)
    axes.set_ylim(-0.12, 1.12)
    ends = [_describe_ends(dimension) for dimension in space.dimensions]
    ends.append((_show(objective, Estimate(float(low))), _show(objective, Estimate(float(high)))))
    for i, (bottom, top) in enumerate(ends):
        axes.text(i, -0.03, bottom, ha="center", va="top", fontsize="small", color=MUTED)
        axes.text(i, 1.03, top, ha="center", va="bottom", fontsize="small", color=MUTED)
    axes.set_title("Trials")


def _place(dimension: Dimension, value: Any) -> float:
    """A value's place from 0 to 1; NaN where the dimension's condition does not hold."""
    if value is None and None not in dimension.choices:
        return math.nan
    if dimension.kind == "choice":
        return dimension.choices.index(value) / max(len(dimension.choices) - 1, 1)
    scale = math.log if dimension.kind.startswith("log") else float
    low, high = scale(dimension.low), scale(dimension.high)
    return (scale(value) - low) / (high - low)


def _describe_ends(dimension: Dimension) -> tuple[str, str]:
    if dimension.kind == "choice":
        return str(dimension.choices[0])[:12], str(dimension.choices[-1])[:12]
    return f"{dimension.low:.3g}", f"{dimension.high:.3g}"


def _draw_front(axes: Axes, trials: Sequence[Outcome], first: str, second: str) -> None:
    complete = [trial for trial in trials if trial.is_complete]
    front = sorted(find_front(trials, (first, second)), key=lambda each: each.get(second))
    for own, style, color in ((complete, "o", MUTED), (front, "-o", ORANGE)):
        axes.plot([trial.get(second) for trial in own], [trial.get(first) for trial in own], style, color=color)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.set(title="Pareto front", xlabel=name_objective(second, trials), ylabel=name_objective(first, trials))


def _draw_importance(axes: Axes, importance: Mapping[str, float]) -> None:
    names = list(importance)[::-1]
    axes.barh(names, [importance[name] for name in names], color=GREEN)
    axes.grid(axis="y", visible=False)
    axes.set(title="What mattered", xlabel="share of the variance")
