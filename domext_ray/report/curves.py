"""The curves of a run: losses, accuracies and speed by optimiser step.

Enters: the lines of metrics.jsonl. Leaves: curves.png, and the pictures of the run's page.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.ticker import MaxNLocator

from domext_ray.report.page import Picture
from domext_ray.report.plots import BLUE, DASHED, GREEN, MUTED, ORANGE, VIOLET, new_picture, write_axis
from domext_ray.runs.losses import DOMAIN, MLM, TRAIN, LossNames, find_run_losses
from domext_ray.storage import Where

MAX_POINTS = 2000  # of a raw curve; a longer run is thinned, the smoothed curve is not
MIN_ACCURACY_SPAN = 0.06  # shown range of an accuracy at least: noise shall not look like a trend


@dataclass(frozen=True)
class _Panel:
    """One metric as a picture; `form` says how its values are written, "" that it is measured at every step."""

    metric: str
    title: str
    unit: str
    color: str
    caption: str
    form: str = ""
    from_zero: bool = False


_EACH_STEP = "each step's global batch, and the learning rate."
_LOSSES = (
    _Panel(
        "train/mlm_loss",
        "Training loss",
        "MLM loss (nats per token)",
        BLUE,
        f"Mean over the masked tokens of {_EACH_STEP}",
    ),
    _Panel(
        "eval/domain_mlm_loss",
        "Held-out domain loss",
        "MLM loss (nats per token)",
        ORANGE,
        "Loss on domain text that is never trained on; dashed: the start.",
        form="{:.3f}",
    ),
    _Panel(
        "eval/domain_mlm_accuracy",
        "Held-out domain accuracy",
        "masked tokens predicted (%)",
        GREEN,
        "Masked tokens of the same text predicted exactly; dashed: the start.",
        form="{:.1%}",
    ),
)
_WORDS = (
    _Panel(
        "eval/general_mlm_accuracy",
        "General accuracy (forgetting)",
        "masked words predicted (%)",
        VIOLET,
        "Words of plain everyday sentences predicted exactly; what lies below the dashed start is forgotten.",
        form="{:.1%}",
    ),
    _Panel(
        "eval/domain_bits_per_character",
        "Bits per character",
        "bits per character",
        ORANGE,
        "Held-out words masked by their characters, so that vocabularies compare; dashed: the start.",
        form="{:.3f}",
    ),
)
_THROUGHPUT = _Panel(
    "throughput/tokens_per_second",
    "Throughput",
    "tokens per second",
    MUTED,
    "Tokens of all workers together; evaluations and checkpoints are not counted.",
    from_zero=True,
)


def _list_panels(names: LossNames) -> list[_Panel]:
    """The pictures of a run, the first four of which make curves.png."""
    if names is MLM:
        return [*_LOSSES, *_WORDS, _THROUGHPUT]
    share = f"{names.share} (%)"
    training, held_out, accuracy = _LOSSES
    unit, each = f"{names.title} (nats per {names.unit})", f"{names.unit}s"
    return [
        replace(training, metric=TRAIN + names.loss, unit=unit, caption=f"Mean over the {each} of {_EACH_STEP}"),
        replace(held_out, metric=DOMAIN + names.loss, unit=unit),
        replace(
            accuracy,
            metric=DOMAIN + names.accuracy,
            title=f"Held-out {names.share}",
            unit=share,
            caption=f"Of the same text, {names.accuracy_help}; dashed: the start.",
        ),
        _THROUGHPUT,
    ]


def list_curves(records: Sequence[dict[str, Any]]) -> list[Picture]:
    """Return the pictures of a run's page."""
    return [
        Picture(partial(_draw, panel=panel, records=records), panel.caption, _describe(panel, records))
        for panel in _list_panels(find_run_losses(records))
    ]


def write_curves(path: Where, records: Sequence[dict[str, Any]]) -> None:
    """Draw the four curves that tell a run, for a README."""
    with new_picture(path, (11, 7.4)) as figure:
        figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.12)
        parts: Any = figure.subfigures(2, 2)
        for part, panel in zip(parts.flat, _list_panels(find_run_losses(records))[:4], strict=True):
            _draw(part, panel, records)


def _describe(panel: _Panel, records: Sequence[dict[str, Any]]) -> str:
    """What a curve shows, for those who cannot see it."""
    steps, values = read_curve(records, panel.metric)
    if not len(steps):
        return f"{panel.title}: not measured."
    form = panel.form or "{:,.4g}"
    average = values if panel.form else smooth(values)
    said = [f"{form.format(value)} at step {step:,.0f}" for step, value in zip(steps, average, strict=True)]
    return f"{panel.title}, {panel.unit}, by optimiser step: {' and '.join(dict.fromkeys((said[0], said[-1])))}."


def read_curve(records: Sequence[dict[str, Any]], name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the steps that have a finite value of a metric, and these values, float64 [n] each."""
    pairs = [(each["step"], each[name]) for each in records if each.get(name) is not None]
    table = np.asarray([each for each in pairs if math.isfinite(each[1])], dtype=np.float64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def smooth(values: np.ndarray) -> np.ndarray:
    """Return the centred moving average over a fortieth of the curve (5 points at least); ends use what is there."""
    if len(values) < 3:
        return values
    window = min(max(5, len(values) // 40), len(values)) | 1
    padded = np.concatenate([[0.0], np.cumsum(values)])
    places = np.arange(len(values))
    first, last = np.maximum(places - window // 2, 0), np.minimum(places + window // 2 + 1, len(values))
    return (padded[last] - padded[first]) / (last - first)


def _draw(figure: Figure | SubFigure, panel: _Panel, records: Sequence[dict[str, Any]]) -> None:
    """Draw one panel; the training loss has a strip with the learning rate below it."""
    steps, values = read_curve(records, panel.metric)
    if panel.metric.startswith(TRAIN):
        axes, bottom = figure.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": [4, 1]})
        _plot_rate(bottom, *read_curve(records, "train/lr"))
    else:
        axes = bottom = figure.subplots()
    axes.set(title=panel.title, ylabel=panel.unit)
    bottom.set(xlabel="optimiser step")
    if not len(steps):
        axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center", va="center", color=MUTED)
        axes.set(xticks=[], yticks=[])
        return
    plot = _plot_evaluations if panel.form else _plot_steps
    plot(axes, steps, values, panel)
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    bottom.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10], integer=True))
    write_axis(bottom.xaxis, ",.0f")


def _plot_rate(axes: Axes, steps: np.ndarray, values: np.ndarray) -> None:
    axes.plot(steps, values, color=MUTED, linewidth=1.6)
    place: dict[str, Any] = {"transform": axes.transAxes, "ha": "right", "va": "top"}
    axes.text(0.985, 0.85, "learning rate", color=MUTED, fontsize="small", **place)
    axes.set_yticks([0.0, *values.max(initial=0.0, keepdims=True)])
    axes.set_ylim(0.0, None)
    write_axis(axes.yaxis, ".3g")


def _plot_steps(axes: Axes, steps: np.ndarray, values: np.ndarray, panel: _Panel) -> None:
    """The raw curve pale, its moving average on top; the range follows neither first steps nor single outliers."""
    stride = max(1, math.ceil(len(steps) / MAX_POINTS))
    shown, average = steps[::stride], smooth(values)
    axes.plot(shown, values[::stride], color=panel.color, alpha=0.35, linewidth=0.9, label="each step")
    axes.plot(shown, average[::stride], color=panel.color, linewidth=2.0, label="moving average")
    low = 0.0 if panel.from_zero else min(np.quantile(values, 0.005), average.min())
    high = max(np.quantile(values, 0.995), average.max())
    margin = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    axes.set_ylim(low - (0.0 if panel.from_zero else margin), high + margin)
    if panel.from_zero:
        write_axis(axes.yaxis, ",g")
    axes.legend(frameon=False, loc="lower right" if panel.from_zero else "best", fontsize="small", labelcolor=MUTED)


def _plot_evaluations(axes: Axes, steps: np.ndarray, values: np.ndarray, panel: _Panel) -> None:
    """A curve with a mark at each evaluation, its start as a dashed line, first and last value written out."""
    start, end = values[0], values[-1]
    axes.axhline(start, color=MUTED, linewidth=1.2, linestyle=DASHED, zorder=1)
    marker = "o" if len(steps) <= 40 else None
    axes.plot(steps, values, color=panel.color, linewidth=2.0, marker=marker, markersize=5)
    axes.margins(x=0.08, y=0.22)
    if panel.form.endswith("%}"):
        low, high = axes.get_ylim()
        missing = max(0.0, MIN_ACCURACY_SPAN - (high - low))
        axes.set_ylim(low - missing / 2, high + missing / 2)
        write_axis(axes.yaxis, ".3g", scale=100)
    # The figures stand on the side that the curve does not run to.
    side = 1 if end <= start else -1
    _label(axes, f"start {panel.form.format(start)}", steps[0], start, side, ha="left", color=MUTED)
    if len(steps) > 1:
        last = panel.form.format(end)
        _label(axes, last, steps[-1], end, -side, ha="center", color=panel.color, weight="bold")


def _label(axes: Axes, text: str, x: float, y: float, side: int, **style: Any) -> None:
    """Write text just above (side 1) or below (side -1) a point."""
    place: dict[str, Any] = {
        "xytext": (0, 8 * side),
        "textcoords": "offset points",
        "va": "bottom" if side > 0 else "top",
    }
    axes.annotate(text, (x, y), **place, **style)
