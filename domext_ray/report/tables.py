"""Rows of cells as Markdown, as text for a terminal and as HTML; and the page that holds tables and pictures."""

from __future__ import annotations

import html
import string
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml
from matplotlib.figure import Figure

from domext_ray.options.places import hide_places
from domext_ray.report.plots import draw_svg

PAGE = Path(__file__).parent.parent / "assets" / "report.html"
NONE = "–"
"""Cell of a figure that there is not."""
Rows = Sequence[Sequence[str]]


def format_markdown(header: Sequence[str], rows: Rows, *, num_texts: int = 1) -> str:
    """Return a Markdown table.

    Args:
        header: names of the columns.
        rows: their cells.
        num_texts: columns of text, from the left; the others are numbers and end at the right.
    """
    rules = ["---" if i < num_texts else "---:" for i in range(len(header))]
    lines = [f"| {' | '.join(header)} |", f"|{'|'.join(rules)}|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def format_text(rows: Rows, *, gap: int = 2, num_texts: int = 1) -> str:
    """Return a table for a terminal, whose first row is its header.

    Args:
        rows: the cells.
        gap: spaces between columns.
        num_texts: columns of text, from the left; the others are numbers and end at the right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        (" " * gap)
        .join(
            cell.ljust(width) if i < num_texts else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        .rstrip()
        for row in rows
    )


def format_html(header: Sequence[str], rows: Rows) -> str:
    """Return an HTML table; a header of empty cells is left out."""

    def line(tag: str, cells: Sequence[str]) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    head = f"<thead>{line('th', header)}</thead>" if any(header) else ""
    return f"<table>{head}<tbody>{''.join(line('td', row) for row in rows)}</tbody></table>"


def format_bounds(low: float, high: float, form: str = ".3f") -> str:
    """Return an interval in words."""
    return f"{low:{form}} to {high:{form}}"


def list_figures(values: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Return nested figures as (path, shown value)."""
    rows: list[tuple[str, str]] = []
    for name, value in values.items():
        if isinstance(value, dict):
            rows += list_figures(value, f"{prefix}{name}.")
        elif isinstance(value, float):
            rows.append((f"{prefix}{name}", f"{value:.2%}" if name.endswith("_frac") else f"{value:,.1f}"))
        else:
            rows.append((f"{prefix}{name}", f"{value:,}" if isinstance(value, int) else str(value)))
    return rows


def fill_page(
    name: str,
    result: str,
    comparison: str,
    pictures: Sequence[tuple[Callable[[Figure], None], str]],
    cost: str,
    settings: str,
) -> str:
    """Return a page that needs no network.

    Args:
        name: the run's name.
        result: one sentence.
        comparison: HTML tables.
        pictures: what draws each on an empty figure, and its caption.
        cost: an HTML table.
        settings: the run's configuration, YAML; of paths only the last part is shown.
    """
    values = yaml.safe_load(settings)
    if isinstance(values, dict):
        settings = yaml.safe_dump(hide_places(values), sort_keys=False, allow_unicode=True)
    drawn = "\n".join(
        f"<figure>{draw_svg(draw)}<figcaption>{html.escape(caption)}</figcaption></figure>"
        for draw, caption in pictures
    )
    page = string.Template(PAGE.read_text(encoding="utf-8"))
    return page.substitute(
        name=html.escape(name),
        result=html.escape(result),
        comparison=comparison,
        figures=drawn,
        cost=cost,
        settings=html.escape(settings),
    )
