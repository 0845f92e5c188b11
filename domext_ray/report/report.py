"""A run's figures become one page that needs no network, one picture, and one short table for the terminal.

Enters: a run directory with metrics.jsonl, summary.json and config.yaml. Leaves: report.html (curves inline as SVG) and
curves.png in the same directory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.ticker import MaxNLocator

from domext_ray.errors import RunError
from domext_ray.report.plots import BLUE, DASHED, GREEN, MUTED, ORANGE, VIOLET, new_picture, write_axis
from domext_ray.report.summary import read_summary
from domext_ray.report.tables import fill_page, format_html, list_figures
from domext_ray.training.metrics import read_metrics, write_text

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


_PANELS = (
    _Panel(
        "train/mlm_loss",
        "Training loss",
        "MLM loss (nats per token)",
        BLUE,
        "Mean over the masked tokens of each step's global batch, and the learning rate.",
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
        "bits per character of masked words",
        ORANGE,
        "Held-out words masked by their characters, so that vocabularies compare; dashed: the start.",
        form="{:.3f}",
    ),
    _Panel(
        "throughput/tokens_per_second",
        "Throughput",
        "tokens per second",
        MUTED,
        "Tokens of all workers together; evaluations and checkpoints are not counted.",
        from_zero=True,
    ),
)
"""The first four make curves.png; all of them are in the page."""


def write_report(run_dir: Path) -> Path:
    """Draw a run's curves and write report.html and curves.png.

    Args:
        run_dir: a run's directory, with metrics.jsonl and summary.json.

    Returns:
        Path of report.html.

    Raises:
        RunError: the directory has no metrics or no summary.
    """
    records = read_metrics(run_dir / "metrics.jsonl")
    if not records:
        raise RunError(f"{run_dir / 'metrics.jsonl'} is missing or empty; run the job again to fill it.")
    summary = read_summary(run_dir / "summary.json")
    settings = run_dir / "config.yaml"
    shown = settings.read_text(encoding="utf-8") if settings.exists() else f"{settings.name} is not there"
    _write_picture(run_dir / "curves.png", records)
    page = _build_page(run_dir.resolve().name, records, summary, shown)
    write_text(run_dir / "report.html", page)
    return run_dir / "report.html"


def format_summary(summary: dict[str, Any]) -> str:
    """Return the short table that a run ends with: before, after and change of each figure, then what it took.

    Args:
        summary: content of summary.json.
    """
    rows = [("", "before", "after", "change"), *_compare(summary)]
    lines = [f"{name:<24}{before:>8}{after:>9}{change:>15}".rstrip() for name, before, after, change in rows]
    return "\n".join([*lines, f"{_describe_parameters(summary)}; {_describe_cost(summary)}"])


def describe_result(summary: dict[str, Any]) -> str:
    """Return a run's result as one sentence.

    Args:
        summary: content of summary.json.
    """
    loss, accuracy = summary["domain"]["mlm_loss"], summary["domain"]["mlm_accuracy"]
    general = summary["general"]["mlm_accuracy"]
    learned = []
    if None not in loss.values():
        learned.append(
            f"loss {_verb(loss)} from {loss['before']:.3f} to {loss['after']:.3f} ({_relative_change(loss)})"
        )
    if None not in accuracy.values():
        learned.append(f"domain accuracy {_verb(accuracy)} from {accuracy['before']:.1%} to {accuracy['after']:.1%}")
    sentence = f"Held-out domain {' and '.join(learned) or 'loss was not measured'}"
    if None not in general.values():
        sentence += (
            f", while accuracy on general sentences {_verb(general)} from {general['before']:.1%} to "
            f"{general['after']:.1%} ({_points(general)})"
        )
    return f"{sentence}; {_describe_parameters(summary)}."


def _compare(summary: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    """The rows figure, before, after, change."""
    loss, accuracy = summary["domain"]["mlm_loss"], summary["domain"]["mlm_accuracy"]
    bits, general = summary["domain"]["bits_per_character"], summary["general"]["mlm_accuracy"]
    return [
        ("held-out domain loss", _show(loss["before"], ".3f"), _show(loss["after"], ".3f"), _relative_change(loss)),
        ("held-out domain accuracy", *_show_accuracy(accuracy)),
        ("bits per character", _show(bits["before"], ".3f"), _show(bits["after"], ".3f"), _relative_change(bits)),
        ("general-probe accuracy", *_show_accuracy(general)),
    ]


def _show(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _show_accuracy(pair: dict[str, float | None]) -> tuple[str, str, str]:
    return _show(pair["before"], ".1%"), _show(pair["after"], ".1%"), _points(pair)


def _points(pair: dict[str, float | None]) -> str:
    before, after = pair["before"], pair["after"]
    return "–" if before is None or after is None else f"{100 * (after - before):+.1f} points"


def _relative_change(pair: dict[str, float | None]) -> str:
    before, after = pair["before"], pair["after"]
    return "–" if not before or after is None else f"{after / before - 1:+.1%}"


def _verb(pair: dict[str, float | None]) -> str:
    before, after = pair["before"], pair["after"]
    if before is None or after is None or before == after:
        return "went"
    return "rose" if after > before else "fell"


def _describe_parameters(summary: dict[str, Any]) -> str:
    counts = summary["parameters"]
    return f"{counts['trainable']:,} parameters trained, {counts['trainable_frac']:.1%} of base and extension"


def _describe_cost(summary: dict[str, Any]) -> str:
    train = summary["train"]
    return (
        f"{train['steps']:,} steps, {train['tokens']:,} tokens in {_duration(train['wall_seconds'])} "
        f"({train['tokens_per_second']:,.0f} tokens/s, {train['data_wait_frac']:.1%} of the time waiting for data)"
    )


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 3600 else f"{seconds / 3600:.1f} h"


def read_curve(records: Sequence[dict[str, Any]], name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return one metric over steps, without the steps that have no finite value of it.

    Args:
        records: lines of metrics.jsonl.
        name: the metric, such as `train/mlm_loss`.

    Returns:
        Steps and values, float64 [n] each.
    """
    pairs = [(each["step"], each[name]) for each in records if each.get(name) is not None]
    table = np.asarray([each for each in pairs if math.isfinite(each[1])], dtype=np.float64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def smooth(values: np.ndarray) -> np.ndarray:
    """Return the centred moving average over a fortieth of the curve (5 points at least); ends use what is there.

    Args:
        values: float64 [n].
    """
    if len(values) < 3:
        return values
    window = min(max(5, len(values) // 40), len(values)) | 1
    padded = np.concatenate([[0.0], np.cumsum(values)])
    places = np.arange(len(values))
    first, last = np.maximum(places - window // 2, 0), np.minimum(places + window // 2 + 1, len(values))
    return (padded[last] - padded[first]) / (last - first)


def _write_picture(path: Path, records: Sequence[dict[str, Any]]) -> None:
    """The four curves that tell a run, for a README."""
    with new_picture(path, (11, 7.4)) as figure:
        figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.12)
        parts: Any = figure.subfigures(2, 2)
        for part, panel in zip(parts.flat, _PANELS[:4], strict=True):
            _draw(part, panel, records)


def _draw(figure: Figure | SubFigure, panel: _Panel, records: Sequence[dict[str, Any]]) -> None:
    """Draw one panel; the training loss has a strip with the learning rate below it."""
    steps, values = read_curve(records, panel.metric)
    if panel.metric == "train/mlm_loss":
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
    axes.plot(shown, values[::stride], color=panel.color, alpha=0.25, linewidth=0.9, label="each step")
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


def _build_page(name: str, records: Sequence[dict[str, Any]], summary: dict[str, Any], settings: str) -> str:
    return fill_page(
        name,
        describe_result(summary),
        format_html(("", "before", "after", "change"), _compare(summary)),
        [(partial(_draw, panel=panel, records=records), panel.caption) for panel in _PANELS],
        format_html(("", ""), list_figures({"parameters": summary["parameters"], "train": summary["train"]})),
        settings,
    )
