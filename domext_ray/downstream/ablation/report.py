"""Studies of bottlenecks become tables and pictures in the form of the paper's (Houlsby et al. figures 1, 4 and 6).

Enters: a `SpanStudy` or a `Sweep`. Leaves: spans.md and spans.png (heat map over first and last removed layer), or
sigma.json, .md and .png (metric over the initial magnitude), or size.json, .md and .png (metric over trained
parameters).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

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
from domext_ray.downstream.finetune.comparison import compare_means, format_finetuned
from domext_ray.labelled.metrics.scores import flatten
from domext_ray.report.plots import BLUE, DASHED, GREEN, INK, MUTED, ORANGE, VIOLET, draw_legend, new_picture
from domext_ray.report.tables import format_bounds, format_markdown
from domext_ray.storage import write_json, write_text

MAX_ANNOTATED_LAYERS = 12
FAMILY_COLORS = {BOTTLENECKS: BLUE, TOP_LAYERS: ORANGE, LAYER_NORMS: GREEN, EVERYTHING: VIOLET}
LOSSES = LinearSegmentedColormap.from_list("losses", ["#5c2410", ORANGE, "#f0c9ae", "#fbf6f2"])
"""From a whole loss to none."""


def write_spans(study: SpanStudy, folder: Path) -> str:
    """Write spans.md and spans.png beside spans.json; return the Markdown."""
    text = format_spans(study)
    write_text(folder / "spans.md", text)
    draw_spans(study, folder / "spans.png")
    return text


def format_spans(study: SpanStudy) -> str:
    """Return single layers, halves and all layers as a Markdown table, with what follows from them."""
    first, last = study.layers
    middle = first + (last - first + 1) // 2
    named: dict[Span, str] = {(layer, layer): f"layer {layer}" for layer in range(first, last + 1)}
    if last > first:
        named.setdefault((first, middle - 1), f"lower half ({first} to {middle - 1})")
        named.setdefault((middle, last), f"upper half ({middle} to {last})")
        named[(first, last)] = f"all layers ({first} to {last})"
    setting = (
        f"{study.run}: {study.metric} on {study.num_examples:,} dev examples without the parts of the adapter "
        f"{study.adapter!r} in some layers, without retraining; LayerNorm shifts "
        f"{'are removed with them' if study.remove_norms else 'stay'}. Differences are to the whole model, with paired "
        "bootstrap 95 % intervals over examples."
    )
    rows = [("nothing", f"{study.whole:.3f}", "", "", "")]
    for span, name in named.items():
        score, change = study.spans[span], f"{study.relative_change(span):+.1f} %"
        bounds = format_bounds(score.low, score.high, "+.3f")
        rows.append((name, f"{score.value:.3f}", change, f"{score.difference:+.3f}", bounds))
    rows.append(("(majority baseline)", f"{study.majority:.3f}", "", "", ""))
    table = format_markdown(("removed", study.metric, "change", "difference", "95 % interval"), rows)
    return f"{setting}\n\n{table}\n\n{_describe_layers(study)}\n"


def _describe_layers(study: SpanStudy) -> str:
    first, last = study.layers
    singles = {layer: study.relative_change((layer, layer)) for layer in range(first, last + 1)}
    worst = min(singles, key=lambda layer: singles[layer])
    return (
        f"A single layer's removal changes {study.metric} by {np.mean(list(singles.values())):+.1f} % on average, and "
        f"by {singles[worst]:+.1f} % where it costs most (layer {worst}); the removal of all layers by "
        f"{study.relative_change((first, last)):+.1f} %."
    )


def draw_spans(study: SpanStudy, path: Path) -> None:
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


def write_sweep(sweep: Sweep, folder: Path) -> str:
    """Write a sweep's figures, table and picture; return the Markdown."""
    folder.mkdir(parents=True, exist_ok=True)
    text = format_sweep(sweep)
    write_json(folder / f"{sweep.study}.json", to_results(sweep))
    write_text(folder / f"{sweep.study}.md", text)
    _draw(_plot_sigmas if sweep.study == "sigma" else _plot_sizes, sweep, folder / f"{sweep.study}.png")
    return text


def format_sweep(sweep: Sweep) -> str:
    """Return a sweep as a Markdown table; differences are to the reference, which stands first."""
    others = [each.run for each in sweep.results if each is not sweep.reference]
    points = [
        f"{each.entry.name} {each.run.summary['best']['point']['lr']:g}"
        for each in sorted(sweep.results, key=lambda each: each is not sweep.reference)
    ]
    return (
        f"{format_finetuned([sweep.reference.run, *others])} ± is the standard deviation over restarts; differences "
        f"are to {sweep.reference.entry.name}, paired over examples. Trained parameters include the task's head. Rates "
        f"that dev chose: {', '.join(points)}.\n"
    )


def to_results(sweep: Sweep) -> dict[str, Any]:
    """Return a sweep's figures as plain values."""
    summary, split = sweep.reference.run.summary, sweep.reference.run.split
    return {
        "study": sweep.study,
        "set": summary["set"],
        "model": summary["model"],
        "metric": summary["metric"],
        "split": split,
        "reference": sweep.reference.entry.name,
        "majority": _find_majority(sweep.reference),
        "runs": [_describe(each, sweep.reference) for each in sweep.results],
    }


def _describe(result: SweepResult, reference: SweepResult) -> dict[str, Any]:
    paired = compare_means(reference.run, result.run)
    return {
        "name": result.entry.name,
        "family": result.entry.family,
        "value": None if math.isnan(result.entry.value) else result.entry.value,
        "trained": result.num_trained,
        "mean": result.run.mean,
        "sd": result.sd if len(result.values) > 1 else None,
        "values": result.values,
        "interval": list(result.run.interval),
        "difference": {"value": paired.difference, "interval": [paired.low, paired.high], "p_value": paired.p_value},
        "point": result.run.summary["best"]["point"],
        "dev": result.run.summary["restarts"]["dev"]["mean"],
    }


def _find_majority(result: SweepResult) -> float | None:
    baselines = result.run.summary["baselines"].get(result.run.split, {})
    return flatten(baselines.get("majority", {})).get(result.run.summary["metric"])


def _draw(plot: Callable[[Axes, Sweep], None], sweep: Sweep, path: Path) -> None:
    with new_picture(path, (8.6, 5.2)) as figure:
        axes = figure.subplots()
        axes.set_xscale("log")
        plot(axes, sweep)
        run = sweep.reference.run
        axes.set_ylabel(f"{run.summary['metric']} on {run.split}")
        draw_legend(axes)


def _plot_sigmas(axes: Axes, sweep: Sweep) -> None:
    """The metric's mean over the magnitude; bars are standard deviations over restarts, or else intervals."""
    restarts = len(sweep.reference.values)
    bars = f"mean ± sd of {restarts} restarts" if restarts > 1 else "bootstrap 95 % interval"
    _plot_line(
        axes, sweep.results, [each.entry.value for each in sweep.results], BLUE, bars, over_restarts=restarts > 1
    )
    majority = _find_majority(sweep.reference)
    if majority is not None:
        axes.axhline(majority, color=MUTED, linewidth=1.2, linestyle=DASHED, zorder=1, label="majority baseline")
    axes.set(
        title=f"{_name_setting(sweep)}: initial magnitude",
        xlabel="standard deviation of the bottlenecks' initial weights",
    )


def _plot_sizes(axes: Axes, sweep: Sweep) -> None:
    """The metric's mean over trained parameters, a line a family; bars are bootstrap 95 % intervals over examples."""
    for family, color in FAMILY_COLORS.items():
        own = [each for each in sweep.results if each.entry.family == family]
        if own:
            _plot_line(axes, own, [each.num_trained for each in own], color, family, over_restarts=False)
        for each in own:
            if not math.isnan(each.entry.value):
                axes.annotate(
                    f"{each.entry.value:g}",
                    (each.num_trained, each.run.mean),
                    xytext=(6, -8),
                    textcoords="offset points",
                    va="center",
                    color=color,
                    fontsize="x-small",
                )
    axes.margins(x=0.07)
    axes.axhline(sweep.reference.run.mean, color=VIOLET, linewidth=1.0, linestyle=DASHED, zorder=1)
    axes.set(
        title=f"{_name_setting(sweep)}: trained parameters",
        xlabel="trained parameters, the task's head among them (at the points: bottleneck size, number of layers)",
    )


def _plot_line(
    axes: Axes, results: Sequence[SweepResult], places: Sequence[float], color: str, label: str, *, over_restarts: bool
) -> None:
    means = np.array([each.run.mean for each in results])
    if over_restarts:
        bars = np.array([[each.sd, each.sd] for each in results]).T
    else:
        low, high = np.array([each.run.interval for each in results]).T
        bars = np.stack([means - low, high - means])
    axes.errorbar(places, means, yerr=bars.clip(min=0.0), fmt="o-", color=color, capsize=3, markersize=5, label=label)
    for place, each in zip(places, results, strict=True):
        if len(each.values) > 1:
            axes.plot([place] * len(each.values), each.values, ".", color=color, alpha=0.45, markersize=5)


def _name_setting(sweep: Sweep) -> str:
    summary = sweep.reference.run.summary
    return f"{summary['model']['name']} on {summary['set']['name']}"
