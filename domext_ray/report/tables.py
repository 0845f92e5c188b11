"""Rows of cells as Markdown and as text for a terminal; pages have theirs as HTML (page.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
