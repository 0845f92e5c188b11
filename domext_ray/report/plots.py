"""How every picture looks and is written, the charts that several reports have, and the curves of a run.

Leaves: PNG files beside the results, and SVG for pages that need no network. Curves are drawn from the lines of
metrics.jsonl, by optimiser step.
"""

from __future__ import annotations

import html
import io
import math
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import matplotlib
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.ticker import FixedLocator, MaxNLocator, PercentFormatter, StrMethodFormatter
from scipy.ndimage import uniform_filter1d

from domext_ray.errors import RunError
from domext_ray.intervals import Estimate
from domext_ray.storage import Place, new_file, open_file
from domext_ray.training.metrics import DOMAIN, MLM, TRAIN, LossNames, find_run_losses

PAPER, INK, MUTED, GRID, LINE = "#ffffff", "#1f2933", "#5b6672", "#e4e8ec", "#c3cad1"
BLUE, GREEN, ORANGE, VIOLET, RED, OCHRE = "#1f6fb2", "#23794b", "#b34d14", "#6a51a3", "#b3365b", "#7a5f14"
COLORS = (BLUE, ORANGE, GREEN, VIOLET, RED, OCHRE, INK, MUTED)
"""Of runs and models, in their order."""
_VARIABLES = {
    **{PAPER: "paper", INK: "ink", MUTED: "muted", GRID: "grid", LINE: "line", "#000000": "ink"},
    **{BLUE: "blue", GREEN: "green", ORANGE: "orange", VIOLET: "violet", RED: "red", OCHRE: "ochre"},
}
"""Colour -> the variable of a page's style that stands for it, which is another one on a dark screen."""
DASHED = (0, (4, 3))
"""Line style of what others are compared with."""
MAX_POINTS = 2000
"""Of a raw curve; a longer run is thinned, the smoothed curve is not."""
MIN_ACCURACY_SPAN = 0.06
"""Shown range of an accuracy at least: noise shall not look like a trend."""
_SOFTWARE = "domext_ray"
"""Is in a picture's metadata."""
_STYLE: Any = {
    "font.size": 11,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.edgecolor": LINE,
    "axes.labelcolor": MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "legend.frameon": False,
    "legend.fontsize": "small",
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "figure.facecolor": PAPER,
    "svg.hashsalt": "domext_ray",  # equal figures are equal files
}
_PAGE_STYLE: Any = {
    "svg.fonttype": "none",
    "font.size": 13.2,  # "small" is then 11, and a picture is as wide as a phone
    "axes.titlesize": 14,
    "axes.labelsize": 11.5,
    "xtick.labelsize": 12,
    "ytick.labelsize": 12,
}
"""On top of the other, in pages."""
_SETTINGS = threading.RLock()
"""Matplotlib's settings are the process's, and SVG knows from them alone how to write text: one thread draws at a time.
"""


@contextmanager
def new_picture(path: Place, size: tuple[float, float]) -> Iterator[Figure]:
    """Give a figure of so many inches; it is written whole, as PNG, when the block ends without an error."""
    with _SETTINGS, matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=size, layout="constrained")
        yield figure
        with new_file(path) as temporary:
            figure.savefig(temporary, format="png", dpi=150, metadata={"Software": _SOFTWARE})


@dataclass(frozen=True)
class Picture:
    """A picture of a page."""

    draw: Callable[[Figure], None]  # on an empty figure
    caption: str  # what it shows, below it
    alt: str  # what a reader sees in it, for those who cannot
    is_wide: bool = False  # it takes the page's whole width, and scrolls where that is too narrow for its text

    @property
    def svg(self) -> Markup:
        """The picture, drawn: its text is text, its colours are the page's, light or dark."""
        buffer = io.StringIO()
        nothing: Any = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        with _SETTINGS, matplotlib.rc_context(_STYLE | _PAGE_STYLE):
            # all of a page's width, or a third of a wide page, which is all of a narrow one
            figure = Figure(figsize=(11.0, 4.6) if self.is_wide else (5.0, 3.7), layout="constrained")
            self.draw(figure)
            figure.savefig(buffer, format="svg", metadata=nothing, transparent=True)
        text = buffer.getvalue()
        text = text[text.index("<svg") :]  # without the XML prologue, which names a DTD on the network
        text = re.sub(r' id="[A-Za-z0-9]+_\d+"| (?:width|height)="[\d.]+pt"|<!--.*?-->', "", text)
        text = re.sub('#[0-9a-f]{6}(?=[;"])', _name_color, text)
        return Markup(text.replace("<svg", f'<svg role="img" aria-label="{html.escape(self.alt)}"', 1))


def _name_color(found: re.Match[str]) -> str:
    """A colour of a picture as the page has it; one that the page has no variable for stays, light or dark."""
    name = _VARIABLES.get(found[0])
    return f"var(--{name})" if name else found[0]


def check_picture(path: Place) -> None:
    """Refuse to draw over a file that `new_picture` did not write."""
    if not path.parent.is_dir():
        raise RunError(f"{path.parent} is no folder; give the picture (--output) one that exists.")
    if path.is_dir():
        raise RunError(f"{path} is a folder; give the picture a file's name (--output comparison.png).")
    if path.is_file():
        with open_file(path.local()) as file:
            if b"Software\0" + _SOFTWARE.encode() not in file.read(4096):
                raise RunError(f"{path} is no picture that this project drew; give another --output, or move it away.")


def draw_legend(axes: Axes, **options: Any) -> None:
    """Draw a legend where anything has a label."""
    if axes.get_legend_handles_labels()[0]:
        axes.legend(**options)


def draw_intervals(axes: Axes, names: Sequence[str], figures: Sequence[Estimate | None], form: str) -> None:
    """Draw a line per name, from above: a value between the ends of its interval, and written; None: an empty line."""
    for i, figure in enumerate(figures):
        if figure is None:
            continue
        color = COLORS[i % len(COLORS)]
        if figure.interval:
            axes.plot(figure.interval, [i, i], color=color, linewidth=2.0, solid_capstyle="round", zorder=2)
        axes.plot([figure.value], [i], color=color, marker="o", markersize=7, zorder=3)
        style: Any = {"textcoords": "offset points", "ha": "center", "color": color, "size": "small"}
        axes.annotate(format(figure.value, form), (figure.value, i), (0, 8), **style)
    axes.set_yticks(range(len(names)), names, color=INK)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.margins(x=0.12)


@dataclass(frozen=True)
class _Curve:
    """One metric as a picture; `form` says how its values are written, "" that it is measured at every step."""

    metric: str
    title: str
    unit: str
    color: str
    caption: str
    form: str = ""
    from_zero: bool = False


def _list_curves(names: LossNames) -> list[_Curve]:
    """The pictures of a run, the first four of which make curves.png."""
    is_masked = names is MLM
    loss = f"{'MLM loss' if is_masked else names.title} (nats per {names.unit})"
    mean = f"Mean over the {'masked tokens' if is_masked else f'{names.unit}s'} of each step's global batch"
    never = "Loss on domain text that is never trained on"
    title, unit = f"Held-out {names.share or 'domain accuracy'}", f"{names.share or names.accuracy_help} (%)"
    same = f"Of the same text, {names.accuracy_help}{' exactly' if is_masked else ''}"
    said = "Words of plain everyday sentences predicted exactly; what lies below the dashed start is forgotten."
    bits = "bits per character"
    words = "Held-out words masked by their characters; between vocabularies, word bits compare"
    busy = "Tokens of all workers together; evaluations and checkpoints are not counted."
    forgetting, kept = "General accuracy (forgetting)", "masked words predicted (%)"
    curves = [
        _Curve(TRAIN + names.loss, "Training loss", loss, BLUE, f"{mean}, and the learning rate."),
        _Curve(DOMAIN + names.loss, "Held-out domain loss", loss, ORANGE, f"{never}; dashed: the start.", ".3f"),
        _Curve(DOMAIN + names.accuracy, title, unit, GREEN, f"{same}; dashed: the start.", ".1%"),
        _Curve("eval/general_mlm_accuracy", forgetting, kept, VIOLET, said, ".1%"),
        _Curve(f"{DOMAIN}bits_per_character", bits.capitalize(), bits, ORANGE, f"{words}; dashed: the start.", ".3f"),
        _Curve("throughput/tokens_per_second", "Throughput", "tokens per second", MUTED, busy, from_zero=True),
    ]
    return curves if is_masked else [*curves[:3], curves[-1]]


def list_curves(records: Sequence[dict[str, Any]]) -> list[Picture]:
    """Return the pictures of a run's page."""
    return [
        Picture(partial(_draw, curve=curve, records=records), curve.caption, _describe(curve, records))
        for curve in _list_curves(find_run_losses(records))
    ]


def write_curves(path: Place, records: Sequence[dict[str, Any]]) -> None:
    """Draw the four curves that tell a run, for a README."""
    with new_picture(path, (8.2, 7.0)) as figure:  # a phone shows its text
        figure.set_layout_engine("constrained", w_pad=0.08, h_pad=0.08)
        parts: Any = figure.subfigures(2, 2)
        for part, curve in zip(parts.flat, _list_curves(find_run_losses(records)), strict=False):
            _draw(part, curve, records)


def _describe(curve: _Curve, records: Sequence[dict[str, Any]]) -> str:
    """What a curve shows, for those who cannot see it."""
    steps, values = read_curve(records, curve.metric)
    if not len(steps):
        return f"{curve.title}: not measured."
    average = values if curve.form else smooth(values)
    said = [f"{average[i]:{curve.form or ',.4g'}} at step {steps[i]:,.0f}" for i in (0, -1)]
    return f"{curve.title}, {curve.unit}, by optimiser step: {' and '.join(dict.fromkeys(said))}."


def read_curve(records: Sequence[dict[str, Any]], name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the steps that have a finite value of a metric, and these values, float64 [n] each."""
    pairs = [(record["step"], record[name]) for record in records if record.get(name) is not None]
    table = np.asarray([pair for pair in pairs if math.isfinite(pair[1])], dtype=np.float64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def smooth(values: np.ndarray) -> np.ndarray:
    """Return the centred moving average over a fortieth of the curve (5 points at least); ends use what is there."""
    if len(values) < 3:
        return values
    window = min(max(5, len(values) // 40), len(values)) | 1
    sums, counts = (uniform_filter1d(array, window, mode="constant") for array in (values, np.ones_like(values)))
    return sums / counts


def _draw(figure: Figure | SubFigure, curve: _Curve, records: Sequence[dict[str, Any]]) -> None:
    """Draw one curve; the training loss has a strip with the learning rate below it."""
    steps, values = read_curve(records, curve.metric)
    if curve.metric.startswith(TRAIN):
        axes, bottom = figure.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": [4, 1]})
        _plot_rate(bottom, *read_curve(records, "train/lr"))
    else:
        axes = bottom = figure.subplots()
    axes.set(title=curve.title, ylabel=curve.unit)
    bottom.set(xlabel="optimiser step")
    if not len(steps):
        axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center", va="center", color=MUTED)
        axes.set(xticks=[], yticks=[])
        return
    (_plot_evaluations if curve.form else _plot_steps)(axes, steps, values, curve)
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    integers = MaxNLocator(6, steps=[1, 2, 5, 10], integer=True)
    bottom.xaxis.set_major_locator(integers if len(steps) > 1 else FixedLocator(list(steps)))
    bottom.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))


def _plot_rate(axes: Axes, steps: np.ndarray, values: np.ndarray) -> None:
    axes.plot(steps, values, color=MUTED, linewidth=1.6)
    axes.text(0.985, 0.85, "learning rate", color=MUTED, size="small", transform=axes.transAxes, ha="right", va="top")
    axes.set_yticks([0.0, *values.max(initial=0.0, keepdims=True)])
    axes.set_ylim(0.0, None)
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:.3g}"))


def _plot_steps(axes: Axes, steps: np.ndarray, values: np.ndarray, curve: _Curve) -> None:
    """The raw curve pale, its moving average on top; the range follows neither first steps nor single outliers."""
    stride = max(1, math.ceil(len(steps) / MAX_POINTS))
    shown, average = steps[::stride], smooth(values)
    axes.plot(shown, values[::stride], color=curve.color, alpha=0.35, linewidth=0.9, label="each step")
    marker = "o" if len(steps) == 1 else None
    axes.plot(shown, average[::stride], color=curve.color, linewidth=2.0, marker=marker, label="average")
    low = 0.0 if curve.from_zero else min(np.quantile(values, 0.005), average.min())
    high = max(np.quantile(values, 0.995), average.max())
    margin = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    axes.set_ylim(low - (0.0 if curve.from_zero else margin), high + margin)
    if curve.from_zero:
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    # beside the title, where no curve runs
    axes.legend(
        loc="lower right", bbox_to_anchor=(1.03, 1.0), ncols=2, labelcolor=MUTED, handlelength=1.2, columnspacing=1.0
    )


def _plot_evaluations(axes: Axes, steps: np.ndarray, values: np.ndarray, curve: _Curve) -> None:
    """A curve with a mark at each evaluation, its start as a dashed line, first and last value written out."""
    start, end = values[0], values[-1]
    axes.axhline(start, color=MUTED, linewidth=1.2, linestyle=DASHED, zorder=1)
    marker = "o" if len(steps) <= 40 else None
    axes.plot(steps, values, color=curve.color, linewidth=2.0, marker=marker, markersize=5)
    axes.margins(x=0.08, y=0.22)
    if curve.form.endswith("%"):
        low, high = axes.get_ylim()
        missing = max(0.0, MIN_ACCURACY_SPAN - (high - low))
        axes.set_ylim(low - missing / 2, high + missing / 2)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, symbol=""))
    # The figures stand where the curve does not run to, or come from.
    style: dict[str, Any] = {"ha": "left", "color": MUTED}
    labels = [(f"start {start:{curve.form}}", 0, 1 if values[min(1, len(values) - 1)] <= start else -1, style)]
    if len(steps) > 1:
        side = 1 if end > values[-2] else -1
        labels.append((format(end, curve.form), -1, side, {"ha": "center", "color": curve.color, "weight": "bold"}))
    for text, place, above, style in labels:
        style["va"] = "bottom" if above > 0 else "top"
        point = (steps[place], values[place])
        axes.annotate(text, point, (0, 8 * above), textcoords="offset points", **style)
