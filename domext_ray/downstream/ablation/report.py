"""Studies of bottlenecks become tables and pictures in the form of the paper's (Houlsby et al. figures 1, 4 and 6).

Enters: a `SpanStudy` or a `Sweep`. Leaves: spans.md and spans.png (heat map over first and last removed layer), or
sigma.json, .md and .png (metric over the initial magnitude), or size.json, .md and .png (metric over trained
parameters).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap

from domext_ray.downstream.ablation.spans import Span, SpanStudy
from domext_ray.downstream.ablation.sweeps import (
    BOTTLENECKS,
    EVERYTHING,
    LAYER_NORMS,
    TOP_LAYERS,
    Sweep,
    SweepResult,
)
from domext_ray.downstream.finetune.comparison import compare_finetuned, tabulate_finetuned
from domext_ray.families.metrics.scores import flatten
from domext_ray.intervals import Estimate
from domext_ray.report.compare import Line, tabulate
from domext_ray.report.plots import BLUE, DASHED, GREEN, INK, MUTED, ORANGE, VIOLET, draw_legend, new_picture
from domext_ray.storage import Place, write_json, write_text

Found: TypeAlias = tuple[SweepResult, Line]
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
        score, change = study.spans[span], f"{study.relative_change(span):+.1f} %"
        difference = Estimate(score.difference, score.low, score.high)
        lines.append(Line(name, Estimate(score.value), difference, (change,)))
    lines.append(Line("(majority baseline)", Estimate(study.majority), more=("",)))
    table = tabulate(lines, study.metric, names="removed", more=("change",), change="difference")
    singles = {layer: study.relative_change((layer, layer)) for layer in range(first, last + 1)}
    worst = min(singles, key=lambda layer: singles[layer])
    verdict = (
        f"A single layer's removal changes {study.metric} by {np.mean(list(singles.values())):+.1f} % on average, and "
        f"by {singles[worst]:+.1f} % where it costs most (layer {worst}); the removal of all layers by "
        f"{study.relative_change((first, last)):+.1f} %."
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


def write_sweep(sweep: Sweep, folder: Place) -> str:
    """Write a sweep's figures, table and picture; return the Markdown."""
    results = [sweep.reference, *(result for result in sweep.results if result is not sweep.reference)]
    runs = [result.run for result in results]
    lines = compare_finetuned(runs, [result.entry.name for result in results])
    rates = ", ".join(f"{result.entry.name} {result.run.summary['best']['point']['lr']:g}" for result in results)
    note = f"Trained parameters include the task's head. Rates that dev chose: {rates}."
    text = f"{tabulate_finetuned(runs, lines).show()}\n\n{note}\n"
    by_name = {line.name: line for line in lines}
    found = [(result, by_name[result.entry.name]) for result in sweep.results]
    write_json(folder / f"{sweep.study}.json", to_results(sweep, found))
    write_text(folder / f"{sweep.study}.md", text)
    with new_picture(folder / f"{sweep.study}.png", (8.6, 5.2)) as figure:
        axes = figure.subplots()
        axes.set_xscale("log")
        _plot_families(axes, sweep, found)
        run, summary = sweep.reference.run, sweep.reference.run.summary
        axes.set(title=f"{summary['model']['name']} on {summary['set']['name']}")
        axes.set_ylabel(f"{summary['metric']} on {run.split} (bars: 95 % intervals)")
        draw_legend(axes)
    return text


def to_results(sweep: Sweep, found: Sequence[Found]) -> dict[str, Any]:
    """Return a sweep's figures as plain values."""
    summary = sweep.reference.run.summary
    return {
        "study": sweep.study,
        **{name: summary[name] for name in ("set", "model", "metric")},
        "split": sweep.reference.run.split,
        "reference": sweep.reference.entry.name,
        "majority": _find_majority(sweep.reference),
        "runs": [_describe(*pair) for pair in found],
    }


def _describe(result: SweepResult, line: Line) -> dict[str, Any]:
    change = line.difference or Estimate(0.0, 0.0, 0.0)
    return {
        "name": line.name,
        "family": result.entry.family,
        "value": None if math.isnan(result.entry.value) else result.entry.value,
        "trained": result.num_trained,
        "mean": line.figure.value,
        "sd": result.run.sample.sd,
        "values": list(line.values),
        "interval": line.figure.interval,
        "difference": {"value": change.value, "interval": change.interval, "p_value": change.p_value},
        "point": result.run.summary["best"]["point"],
        "dev": result.run.summary["restarts"]["dev"]["mean"],
    }


def _find_majority(result: SweepResult) -> float | None:
    baselines = result.run.summary["baselines"].get(result.run.split, {})
    return flatten(baselines.get("majority", {})).get(result.run.summary["metric"])


def _plot_families(axes: Axes, sweep: Sweep, found: Sequence[Found]) -> None:
    """The metric's mean over the magnitude, or over trained parameters; a line a family."""
    is_sigma = sweep.study == "sigma"
    for family, color in FAMILY_COLORS.items():
        own = [pair for pair in found if pair[0].entry.family == family]
        places = [result.entry.value if is_sigma else result.num_trained for result, _ in own]
        _plot_line(axes, [line for _, line in own], places, color, family)
        for (result, line), place in zip(own, places, strict=True):
            if not is_sigma and not math.isnan(result.entry.value):
                style: dict[str, Any] = {"textcoords": "offset points", "va": "center", "fontsize": "x-small"}
                axes.annotate(f"{result.entry.value:g}", (place, line.figure.value), (6, -8), color=color, **style)
    axes.margins(x=0.07)
    level = _find_majority(sweep.reference) if is_sigma else sweep.reference.run.mean
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
