"""Studies of bottlenecks become tables and pictures in the form of the paper's (Houlsby et al. figures 1, 4 and 6).

Enters: a `SpanStudy`, or arms with their runs. Leaves: spans.md and spans.png (heat map over first and last removed
layer), or sigma.json, .md and .png (metric over the initial magnitude), or size.json, .md and .png (metric over trained
parameters).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap

from domext_ray.families.metrics.scores import flatten
from domext_ray.finetuning.comparison import ScoredRun, compare_finetuned, tabulate_finetuned
from domext_ray.intervals import Estimate
from domext_ray.report.compare import Line, tabulate
from domext_ray.report.plots import BLUE, DASHED, GREEN, INK, MUTED, ORANGE, VIOLET, draw_legend, new_picture
from domext_ray.storage import Place, write_json, write_text
from domext_ray.studies.ablation.arms import BOTTLENECKS, EVERYTHING, LAYER_NORMS, TOP_LAYERS, Arm, choose_reference
from domext_ray.studies.ablation.spans import Span, SpanStudy

Found: TypeAlias = tuple[Arm, ScoredRun, Line]
"""What was trained, what it reached, and how that differs from the reference."""
MAX_ANNOTATED_LAYERS = 12
FAMILY_COLORS = {BOTTLENECKS: BLUE, TOP_LAYERS: ORANGE, LAYER_NORMS: GREEN, EVERYTHING: VIOLET}
LOSSES = LinearSegmentedColormap.from_list("losses", ["#5c2410", ORANGE, "#f0c9ae", "#fbf6f2"])
"""From a whole loss to none."""


def write_spans(study: SpanStudy, folder: Place) -> str:
    """Write spans.md and spans.png beside spans.json; return the Markdown."""
    text = format_spans(study)
    write_text(folder / "spans.md", text)
    draw_spans(study, folder / "spans.png")
    return text


def format_spans(study: SpanStudy) -> str:
    """Return single layers, halves and all layers as a Markdown table, and what follows."""
    first, last = study.layers
    middle = first + (last - first + 1) // 2
    named: dict[Span, str] = {(layer, layer): f"layer {layer}" for layer in range(first, last + 1)}
    if last > first:
        named.setdefault((first, middle - 1), f"lower half ({first} to {middle - 1})")
        named.setdefault((middle, last), f"upper half ({middle} to {last})")
        named[(first, last)] = f"all layers ({first} to {last})"
    setting = (
        f"{study.run} on {study.num_examples:,} dev examples, without the parts of the adapter {study.adapter!r} in "
        f"some layers and without retraining; LayerNorm shifts "
        f"{'are removed with them' if study.remove_norms else 'stay'}. Intervals are over documents, paired."
    )
    lines = [Line("nothing", Estimate(study.whole), more=("",))]
    for span, name in named.items():
        score, change = study.spans[span], f"{study.relative_change(span):+z.1f} %"
        lines.append(Line(name, Estimate(score.value), score.difference, (change,)))
    lines.append(Line("(majority baseline)", Estimate(study.majority), more=("",)))
    table = tabulate(lines, study.metric, names="removed", more=("change",), change="difference")
    singles = {layer: study.relative_change((layer, layer)) for layer in range(first, last + 1)}
    worst = min(singles, key=lambda layer: singles[layer])
    verdict = (
        f"A single layer's removal changes {study.metric} by {np.mean(list(singles.values())):+z.1f} % on average, and "
        f"by {singles[worst]:+z.1f} % where it costs most (layer {worst}); the removal of all layers by "
        f"{study.relative_change((first, last)):+z.1f} %."
    )
    return f"{setting}\n\n{table.show()}\n\n{verdict}\n"


def draw_spans(study: SpanStudy, path: Place) -> None:
    """Draw the relative change of the metric over first and last removed layer as a PNG; the diagonal: single layers.

    Gains have the colour of no loss; their figures are written out where there are at most twelve layers.
    """
    first, last = study.layers
    num_layers = last - first + 1
    changes = np.full((num_layers, num_layers), np.nan)
    for a, b in study.spans:
        changes[a - first, b - first] = study.relative_change((a, b))
    size = max(4.0, 0.55 * num_layers)
    with new_picture(path, (size + 2.2, size + 0.8)) as figure:
        axes = figure.subplots()
        axes.grid(visible=False)
        lowest = min(float(np.nanmin(changes)), -1.0)
        image = axes.imshow(changes, cmap=LOSSES, vmin=lowest, vmax=0.0)
        if num_layers <= MAX_ANNOTATED_LAYERS:
            for row, column in zip(*np.triu_indices(num_layers), strict=True):
                _write_change(axes, int(row), int(column), float(changes[row, column]), lowest)
        ticks = list(range(0, num_layers, math.ceil(num_layers / 24)))
        axes.set_xticks(ticks, [str(first + tick) for tick in ticks])
        axes.set_yticks(ticks, [str(first + tick) for tick in ticks])
        axes.set(title=f"{study.run}: layers removed", xlabel="last removed layer", ylabel="first removed layer")
        bar = figure.colorbar(image, ax=axes, shrink=0.8)
        bar.outline.set_visible(False)
        bar.set_label(f"change of {study.metric} (%)")


def _write_change(axes: Axes, row: int, column: int, change: float, lowest: float) -> None:
    text = f"{change:.0f}" if change <= -9.95 else f"{change:.1f}"
    color = "white" if change < 0.55 * lowest else INK
    axes.text(column, row, text, ha="center", va="center", color=color, fontsize=8)


def write_arms(study: str, arms: Sequence[Arm], runs: Sequence[ScoredRun], folder: Place) -> str:
    """Write the figures, table and picture of arms and their runs; return the Markdown."""
    reference = choose_reference(arms)
    pairs = sorted(zip(arms, runs, strict=True), key=lambda pair: pair[0] is not reference)
    ordered, names = [run for _, run in pairs], [arm.name for arm, _ in pairs]
    lines = compare_finetuned(ordered, names)
    rates = ", ".join(f"{arm.name} {run.summary['best']['point']['lr']:g}" for arm, run in pairs)
    note = f"Trained parameters include the task's head. Rates that dev chose: {rates}."
    text = f"{tabulate_finetuned(ordered, lines).show()}\n\n{note}\n"
    found = [(arm, run, lines[names.index(arm.name)]) for arm, run in zip(arms, runs, strict=True)]
    write_json(folder / f"{study}.json", to_results(study, found, *pairs[0]))
    write_text(folder / f"{study}.md", text)
    with new_picture(folder / f"{study}.png", (8.6, 5.2)) as figure:
        axes = figure.subplots()
        axes.set_xscale("log")
        _plot_families(axes, found, ordered[0], is_sigma=study == "sigma")
        summary = ordered[0].summary
        axes.set(title=f"{summary['model']['name']} on {summary['set']['name']}")
        axes.set_ylabel(f"{summary['metric']} on {ordered[0].split} (bars: 95 % intervals)")
        draw_legend(axes)
    return text


def to_results(study: str, found: Sequence[Found], reference: Arm, run: ScoredRun) -> dict[str, Any]:
    """Return a study's figures as plain values; `run` is the reference's."""
    return {
        "study": study,
        **{name: run.summary[name] for name in ("set", "model", "metric")},
        "split": run.split,
        "reference": reference.name,
        "majority": _find_majority(run),
        "runs": [_describe(*own) for own in found],
    }


def _describe(arm: Arm, run: ScoredRun, line: Line) -> dict[str, Any]:
    change = line.difference or Estimate(0.0, 0.0, 0.0)
    return {
        "name": line.name,
        "family": arm.family,
        "value": None if math.isnan(arm.value) else arm.value,
        "trained": run.num_trained,
        "mean": line.figure.value,
        "sd": run.sample.sd,
        "values": list(line.values),
        "interval": line.figure.interval,
        "difference": {"value": change.value, "interval": change.interval, "p_value": change.p_value},
        "point": run.summary["best"]["point"],
        "dev": run.summary["restarts"]["dev"]["mean"],
    }


def _find_majority(run: ScoredRun) -> float | None:
    baselines = run.summary["baselines"].get(run.split, {})
    return flatten(baselines.get("majority", {})).get(run.summary["metric"])


def _plot_families(axes: Axes, found: Sequence[Found], reference: ScoredRun, *, is_sigma: bool) -> None:
    """The metric's mean over the magnitude, or over trained parameters; a line a family."""
    for family, color in FAMILY_COLORS.items():
        own = [each for each in found if each[0].family == family]
        places = [arm.value if is_sigma else run.num_trained for arm, run, _ in own]
        _plot_line(axes, [line for *_, line in own], places, color, family)
        for (arm, _, line), place in zip(own, places, strict=True):
            if not is_sigma and not math.isnan(arm.value):
                style: dict[str, Any] = {"textcoords": "offset points", "va": "center", "fontsize": "x-small"}
                axes.annotate(f"{arm.value:g}", (place, line.figure.value), (6, -8), color=color, **style)
    axes.margins(x=0.07)
    level = _find_majority(reference) if is_sigma else reference.mean
    if level is not None:
        name = "majority baseline" if is_sigma else None
        axes.axhline(level, color=MUTED, linewidth=1.2, linestyle=DASHED, zorder=1, label=name)
    sizes = "trained parameters, with the head (at the points: bottleneck size, number of layers)"
    axes.set_xlabel("standard deviation of the bottlenecks' initial weights" if is_sigma else sizes)


def _plot_line(axes: Axes, lines: Sequence[Line], places: Sequence[float], color: str, label: str) -> None:
    if not lines:
        return
    means = np.array([line.figure.value for line in lines])
    bars = np.abs(np.array([[line.figure.low, line.figure.high] for line in lines]).T - means)
    axes.errorbar(places, means, yerr=bars, fmt="o-", color=color, capsize=3, markersize=5, label=label)
    for place, line in zip(places, lines, strict=True):
        if len(line.values) > 1:
            axes.plot([place] * len(line.values), line.values, ".", color=color, alpha=0.45, markersize=5)
