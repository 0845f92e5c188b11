"""A run's figures become one page that needs no network, one picture, and one short table for the terminal.

Enters: a run directory with metrics.jsonl, summary.json and config.yaml. Leaves: report.html (curves inline as SVG) and
curves.png in the same directory.
"""

from __future__ import annotations

import html
import io
import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from domext_ray.errors import RunError
from domext_ray.training.metrics import read_metrics, write_text

INK, MUTED, GRID = "#1f2933", "#6b7785", "#e4e8ec"
BLUE, GREEN, ORANGE, VIOLET = "#1f6fb2", "#2b8a57", "#c2571a", "#6a51a3"
MAX_POINTS = 2000  # of a raw curve; a longer run is thinned, the smoothed curve is not
MIN_ACCURACY_SPAN = 0.06  # shown range of an accuracy at least: noise shall not look like a trend
STYLE: dict[str, Any] = {
    "font.size": 11,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.edgecolor": "#c3cad1",
    "axes.labelcolor": MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "figure.facecolor": "white",
    "svg.hashsalt": "domext_ray",  # equal figures are equal files
}


@dataclass(frozen=True)
class Curve:
    """One metric over steps; steps without a finite value are left out.

    Args:
        steps: optimiser steps, float64 [n].
        values: the metric at these steps, float64 [n].
    """

    steps: np.ndarray
    values: np.ndarray

    def __len__(self) -> int:
        return len(self.steps)


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
    summary = _read_summary(run_dir / "summary.json")
    settings = run_dir / "config.yaml"
    with matplotlib.rc_context(STYLE):
        _write_picture(run_dir / "curves.png", records)
        page = _build_page(
            run_dir.name, records, summary, settings.read_text(encoding="utf-8") if settings.exists() else ""
        )
    write_text(run_dir / "report.html", page)
    return run_dir / "report.html"


def format_summary(summary: dict[str, Any]) -> str:
    """Return the short table that a run ends with: before, after and change of each figure, then what it took.

    Args:
        summary: content of summary.json.
    """
    rows = [("", "before", "after", "change"), *_compare(summary)]
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    table = [
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in rows
    ]
    return "\n".join(
        [*(line.rstrip() for line in table), f"{_describe_parameters(summary)}; {_describe_cost(summary)}"]
    )


def describe_result(summary: dict[str, Any]) -> str:
    """Return a run's result as one sentence.

    Args:
        summary: content of summary.json.
    """
    loss, accuracy = summary["domain"]["mlm_loss"], summary["domain"]["mlm_accuracy"]
    general = summary["general"]["mlm_accuracy"]
    sentence = (
        f"Held-out domain loss {_verb(loss)} from {_number(loss['before'])} to {_number(loss['after'])} "
        f"({_relative_change(loss)}) and domain accuracy {_verb(accuracy)} from {_percent(accuracy['before'])} to "
        f"{_percent(accuracy['after'])}"
    )
    if general["before"] is not None and general["after"] is not None:
        sentence += (
            f", while accuracy on general sentences {_verb(general)} from {_percent(general['before'])} to "
            f"{_percent(general['after'])} ({_points(general)})"
        )
    return f"{sentence}; {_describe_parameters(summary)}."


def _read_summary(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise RunError(f"{path} is missing; a run writes it when training ends: run the job again.") from error
    except json.JSONDecodeError as error:
        raise RunError(f"{path} is not valid JSON; delete it and run the job again.") from error


def _compare(summary: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    """The rows figure, before, after, change."""
    loss, accuracy = summary["domain"]["mlm_loss"], summary["domain"]["mlm_accuracy"]
    general = summary["general"]["mlm_accuracy"]
    return [
        ("held-out domain loss", _number(loss["before"]), _number(loss["after"]), _relative_change(loss)),
        ("held-out domain accuracy", _percent(accuracy["before"]), _percent(accuracy["after"]), _points(accuracy)),
        ("general-probe accuracy", _percent(general["before"]), _percent(general["after"]), _points(general)),
    ]


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


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


# ---- curves -------------------------------------------------------------------------------------------------------


def read_curve(records: Sequence[dict[str, Any]], name: str) -> Curve:
    """Return one metric over steps, without the steps that have no finite value of it.

    Args:
        records: lines of metrics.jsonl.
        name: the metric, such as `train/mlm_loss`.
    """
    pairs = [(each["step"], each[name]) for each in records if each.get(name) is not None]
    kept = [(step, value) for step, value in pairs if math.isfinite(value)]
    table = np.asarray(kept, dtype=np.float64).reshape(-1, 2)
    return Curve(table[:, 0], table[:, 1])


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
    figure = Figure(figsize=(11, 7.4))
    figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.12)
    parts = figure.subfigures(2, 2).flat
    for part, draw in zip(
        parts, (_draw_training, _draw_domain_loss, _draw_domain_accuracy, _draw_general), strict=True
    ):
        draw(part, records)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    figure.savefig(temporary, format="png", dpi=150)
    os.replace(temporary, path)


def _draw_training(figure: Figure | SubFigure, records: Sequence[dict[str, Any]]) -> None:
    loss, rate = read_curve(records, "train/mlm_loss"), read_curve(records, "train/lr")
    upper, lower = figure.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": [4, 1]})
    _plot_noisy(upper, loss, BLUE)
    upper.set(title="Training loss", ylabel="MLM loss (nats a token)")
    lower.plot(rate.steps, rate.values, color=MUTED, linewidth=1.6)
    lower.set(xlabel="optimiser step", ylim=(0, None))
    lower.text(
        0.985, 0.8, "learning rate", transform=lower.transAxes, ha="right", va="top", color=MUTED, fontsize="small"
    )
    if len(rate):
        lower.set_yticks([0.0, rate.values.max()])
    lower.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}"))
    _finish(lower)


def _plot_noisy(axes: Axes, curve: Curve, color: str) -> None:
    """The raw curve pale, its moving average on top; the range follows the average, not single outliers."""
    if not len(curve):
        _say_nothing(axes)
        return
    stride = max(1, math.ceil(len(curve) / MAX_POINTS))
    axes.plot(curve.steps[::stride], curve.values[::stride], color=color, alpha=0.25, linewidth=0.9, label="each step")
    average = smooth(curve.values)
    axes.plot(curve.steps[::stride], average[::stride], color=color, linewidth=2.0, label="moving average")
    low, high = (
        min(np.quantile(curve.values, 0.005), average.min()),
        max(np.quantile(curve.values, 0.995), average.max()),
    )
    margin = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    axes.set_ylim(low - margin, high + margin)
    axes.legend(frameon=False, loc="best", fontsize="small", labelcolor=MUTED)


def _draw_domain_loss(figure: Figure | SubFigure, records: Sequence[dict[str, Any]]) -> None:
    axes = figure.subplots()
    curve = read_curve(records, "eval/domain_mlm_loss")
    _plot_evaluations(axes, curve, ORANGE, "{:.3f}")
    axes.set(title="Held-out domain loss", ylabel="MLM loss (nats a token)", xlabel="optimiser step")


def _draw_domain_accuracy(figure: Figure | SubFigure, records: Sequence[dict[str, Any]]) -> None:
    axes = figure.subplots()
    _plot_accuracy(axes, read_curve(records, "eval/domain_mlm_accuracy"), GREEN)
    axes.set(title="Held-out domain accuracy", ylabel="masked tokens predicted (%)", xlabel="optimiser step")


def _draw_general(figure: Figure | SubFigure, records: Sequence[dict[str, Any]]) -> None:
    axes = figure.subplots()
    _plot_accuracy(axes, read_curve(records, "eval/general_mlm_accuracy"), VIOLET)
    axes.set(title="General accuracy (forgetting)", ylabel="masked words predicted (%)", xlabel="optimiser step")


def _draw_throughput(figure: Figure | SubFigure, records: Sequence[dict[str, Any]]) -> None:
    axes = figure.subplots()
    curve = read_curve(records, "throughput/tokens_per_second")
    _plot_noisy(axes, curve, MUTED)
    axes.set(title="Throughput", ylabel="tokens a second", xlabel="optimiser step", ylim=(0, None))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))


def _plot_accuracy(axes: Axes, curve: Curve, color: str) -> None:
    _plot_evaluations(axes, curve, color, "{:.1%}")
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.3g}"))
    low, high = axes.get_ylim()
    missing = MIN_ACCURACY_SPAN - (high - low)
    if missing > 0:
        axes.set_ylim(low - missing / 2, high + missing / 2)


def _plot_evaluations(axes: Axes, curve: Curve, color: str, form: str) -> None:
    """A curve with a mark at each evaluation, its start as a dashed line, first and last value written out."""
    if not len(curve):
        _say_nothing(axes)
        return
    start, end = curve.values[0], curve.values[-1]
    marker = "o" if len(curve) <= 40 else None
    axes.axhline(start, color=MUTED, linewidth=1.2, linestyle=(0, (4, 3)), zorder=1)
    axes.plot(curve.steps, curve.values, color=color, linewidth=2.0, marker=marker, markersize=5)
    axes.margins(x=0.08, y=0.22)
    # Figures stand on the side of the curve that it does not run to.
    above = end <= start
    axes.annotate(
        f"start {form.format(start)}",
        (curve.steps[0], start),
        xytext=(0, 7 if above else -7),
        textcoords="offset points",
        va="bottom" if above else "top",
        color=MUTED,
    )
    if len(curve) > 1:
        axes.annotate(
            form.format(end),
            (curve.steps[-1], end),
            xytext=(0, -9 if above else 9),
            textcoords="offset points",
            ha="center",
            va="top" if above else "bottom",
            color=color,
            weight="bold",
        )
    _finish(axes)


def _finish(axes: Axes) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10], integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))


def _say_nothing(axes: Axes) -> None:
    axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center", va="center", color=MUTED)
    axes.set(xticks=[], yticks=[])


# ---- page ---------------------------------------------------------------------------------------------------------

_Draw = Callable[[Figure | SubFigure, Sequence[dict[str, Any]]], None]

_FIGURES: tuple[tuple[_Draw, str], ...] = (
    (_draw_training, "Loss of each optimiser step, over the masked tokens of its global batch, and the learning rate."),
    (_draw_domain_loss, "Loss on domain text that was never trained on; dashed: the start."),
    (_draw_domain_accuracy, "Masked tokens of the same text predicted exactly; dashed: the start."),
    (
        _draw_general,
        "Words of plain everyday sentences predicted exactly: what falls below the dashed start is forgotten.",
    ),
    (_draw_throughput, "Tokens read by all workers together, evaluations and checkpoints not counted."),
)

_CSS = """
:root { color-scheme: light; }
body { font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; color: #1f2933; background: #fff;
  max-width: 1080px; margin: 2.5rem auto; padding: 0 1.25rem; }
h1 { font-size: 1.6rem; margin: 0 0 .4rem; } h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem; }
.result { font-size: 1.1rem; margin: 0 0 1.6rem; max-width: 52rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem 1.4rem .35rem 0; border-bottom: 1px solid #e4e8ec; text-align: right; font-weight: normal; }
th:first-child, td:first-child { text-align: left; }
thead th, figcaption { color: #6b7785; } td:last-child { font-weight: 600; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 470px), 1fr)); gap: 1.6rem; }
figure { margin: 0; } figure svg { width: 100%; height: auto; } figcaption { font-size: .9rem; }
pre { background: #f6f8fa; padding: 1rem; overflow-x: auto; font-size: .85rem; line-height: 1.45; }
"""


def _build_page(name: str, records: Sequence[dict[str, Any]], summary: dict[str, Any], settings: str) -> str:
    figures = "\n".join(
        f"<figure>{_draw_svg(draw, records)}<figcaption>{html.escape(caption)}</figcaption></figure>"
        for draw, caption in _FIGURES
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(name)} – domext_ray</title>
<style>{_CSS}</style>
</head>
<body>
<h1>{html.escape(name)}</h1>
<p class="result">{html.escape(describe_result(summary))}</p>
{_build_table(("", "before", "after", "change"), _compare(summary))}
<h2>Curves</h2>
<div class="figures">
{figures}
</div>
<h2>What it took</h2>
{_build_table(("", ""), list(_flatten({"parameters": summary["parameters"], "train": summary["train"]})))}
<h2>Settings</h2>
<pre>{html.escape(settings or "config.yaml was not there when this page was made")}</pre>
</body>
</html>
"""


def _draw_svg(draw: _Draw, records: Sequence[dict[str, Any]]) -> str:
    figure = Figure(figsize=(6.2, 4.2), layout="constrained")
    draw(figure, records)
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]  # without the XML prologue, which names a DTD on the network


def _build_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(tag: str, cells: Sequence[str]) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    head = f"<thead>{line('th', header)}</thead>" if any(header) else ""
    return f"<table>{head}<tbody>{''.join(line('td', row) for row in rows)}</tbody></table>"


def _flatten(values: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Nested figures as (path, shown value)."""
    rows: list[tuple[str, str]] = []
    for name, value in values.items():
        if isinstance(value, dict):
            rows += _flatten(value, f"{prefix}{name}.")
        elif isinstance(value, float):
            rows.append((f"{prefix}{name}", f"{value:.2%}" if name.endswith("_frac") else f"{value:,.1f}"))
        else:
            rows.append((f"{prefix}{name}", f"{value:,}" if isinstance(value, int) else str(value)))
    return rows
