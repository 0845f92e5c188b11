"""How every picture looks, how it is written, and the charts that several reports have.

Leaves: PNG files beside the results, and SVG for pages that need no network.
"""

from __future__ import annotations

import html
import io
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from domext_ray.errors import RunError
from domext_ray.storage import Where, new_file

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
PAGE_SIZE, WIDE_SIZE = (5.0, 3.7), (11.0, 4.6)
"""Inches of a picture in a page: a third of a wide screen or all of a narrow one, and one of the whole width."""
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
def new_picture(path: Where, size: tuple[float, float]) -> Iterator[Figure]:
    """Give a figure to draw on; it is written as PNG when the block ends without an error.

    Args:
        path: where to; the file appears whole or not at all.
        size: inches.
    """
    with _SETTINGS, matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=size, layout="constrained")
        yield figure
        with new_file(path) as temporary:
            figure.savefig(temporary, format="png", dpi=150, metadata={"Software": _SOFTWARE})


def draw_svg(draw: Callable[[Figure], None], alt: str, size: tuple[float, float] = PAGE_SIZE) -> str:
    """Return a picture of a page as SVG: its text is text, its colours are the page's, light or dark.

    Args:
        draw: draws on an empty figure.
        alt: what a reader sees in it, for those who cannot.
        size: inches.
    """
    with _SETTINGS, matplotlib.rc_context(_STYLE | _PAGE_STYLE):
        figure = Figure(figsize=size, layout="constrained")
        draw(figure)
        buffer = io.StringIO()
        nothing: Any = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(buffer, format="svg", metadata=nothing, transparent=True)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]  # without the XML prologue, which names a DTD on the network
    text = re.sub(r' id="[A-Za-z0-9]+_\d+"| (?:width|height)="[\d.]+pt"|<!--.*?-->', "", text)
    text = re.sub('#[0-9a-f]{6}(?=[;"])', _name_color, text)
    return text.replace("<svg", f'<svg role="img" aria-label="{html.escape(alt)}"', 1)


def _name_color(found: re.Match[str]) -> str:
    """A colour of a picture as the page has it; one that the page has no variable for stays, light or dark."""
    name = _VARIABLES.get(found[0])
    return f"var(--{name})" if name else found[0]


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
