"""How every picture looks, how it is written, and the charts that several reports have.

Leaves: PNG files beside the results, and SVG for pages that need no network.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from domext_ray.errors import RunError
from domext_ray.files import new_file

INK, MUTED, GRID = "#1f2933", "#6b7785", "#e4e8ec"
BLUE, GREEN, ORANGE, VIOLET = "#1f6fb2", "#2b8a57", "#c2571a", "#6a51a3"
COLORS = (BLUE, ORANGE, GREEN, VIOLET, "#b3365b", "#8a6d1f", INK, MUTED)
"""Of runs and models, in their order."""
DASHED = (0, (4, 3))
"""Line style of what others are compared with."""
PAGE_SIZE = (6.2, 4.2)
"""Inches of a picture in a page."""
_SOFTWARE = "domext_ray"
"""Is in a picture's metadata."""
_STYLE: Any = {
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


@contextmanager
def new_picture(path: Path, size: tuple[float, float]) -> Iterator[Figure]:
    """Give a figure to draw on; it is written as PNG when the block ends without an error.

    Args:
        path: where to; the file appears whole or not at all.
        size: inches.
    """
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=size, layout="constrained")
        yield figure
        with new_file(path) as temporary:
            figure.savefig(temporary, format="png", dpi=150, metadata={"Software": _SOFTWARE})


def draw_svg(draw: Callable[[Figure], None]) -> str:
    """Return a picture of a page as SVG.

    Args:
        draw: draws on an empty figure.
    """
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=PAGE_SIZE, layout="constrained")
        draw(figure)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]  # without the XML prologue, which names a DTD on the network


def check_picture(path: Path) -> None:
    """Refuse to draw over a file that `new_picture` did not write.

    Raises:
        RunError: `path` is such a file, or a folder.
    """
    if not path.absolute().parent.is_dir():
        raise RunError(f"{path.parent} is no folder; give the picture (--output) one that exists.")
    if not path.exists():
        return
    if path.is_dir():
        raise RunError(f"{path} is a folder; give the picture a file's name (--output comparison.png).")
    with path.open("rb") as file:
        if b"Software\0" + _SOFTWARE.encode() not in file.read(4096):
            raise RunError(f"{path} is no picture that this project drew; give another --output, or move it away.")


def write_axis(axis: Any, form: str, scale: float = 1.0) -> None:
    """Write an axis' numbers in a form.

    Args:
        axis: `axes.xaxis` or `axes.yaxis`.
        form: of a number, as for `format`.
        scale: 100 for per cents.
    """
    axis.set_major_formatter(FuncFormatter(lambda value, _: format(scale * value, form)))


def draw_legend(axes: Axes, **options: Any) -> None:
    """Draw a legend without a frame where anything has a label."""
    if axes.get_legend_handles_labels()[0]:
        axes.legend(**{"frameon": False, "fontsize": "small", **options})


def draw_intervals(
    axes: Axes, names: Sequence[str], figures: Sequence[tuple[float, float, float] | None], form: str
) -> None:
    """Draw a line per name, from above: a point with its interval, and its figure in writing.

    Args:
        axes: where to draw.
        names: what the lines are of.
        figures: value and both ends of its interval; None: the line is empty.
        form: of the written figure, as for `format`.
    """
    for i, each in enumerate(figures):
        if each is None:
            continue
        value, low, high = each
        color = COLORS[i % len(COLORS)]
        axes.plot([low, high], [i, i], color=color, linewidth=2.0, solid_capstyle="round", zorder=2)
        axes.plot([value], [i], color=color, marker="o", markersize=7, zorder=3)
        axes.annotate(
            format(value, form), (value, i), (0, 8), textcoords="offset points", ha="center", color=color, size="small"
        )
    axes.set_yticks(range(len(names)), names, color=INK)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.margins(x=0.12)
