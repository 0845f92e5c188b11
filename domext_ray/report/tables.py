"""Rows of cells as Markdown and as text for a terminal; pages have theirs as HTML (page.py).

In all of them the columns of text are the first `num_texts`; the others are numbers and end at the right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

NONE = "–"
"""Cell of a figure that there is not."""
Rows = Sequence[Sequence[str]]


@dataclass(frozen=True)
class Table:
    """Rows under a header, and sentences that tell how to read them."""

    header: Sequence[str]
    rows: Rows
    notes: Sequence[str] = ()
    num_texts: int = 1

    def show(self) -> str:
        """Return the table in Markdown, with its notes below."""
        table = format_markdown(self.header, self.rows, num_texts=self.num_texts)
        return "\n\n".join([table, *filter(None, self.notes)])

    def show_text(self, *, gap: int = 2) -> str:
        """Return it for a terminal, with its notes below."""
        return "\n".join([format_text([self.header, *self.rows], gap=gap, num_texts=self.num_texts), *self.notes])


def format_markdown(header: Sequence[str], rows: Rows, *, num_texts: int = 1) -> str:
    """Return a Markdown table."""
    rules = ["---" if i < num_texts else "---:" for i in range(len(header))]
    lines = [f"| {' | '.join(header)} |", f"|{'|'.join(rules)}|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def format_text(rows: Rows, *, gap: int = 2, num_texts: int = 1) -> str:
    """Return a table for a terminal, with so many spaces between its columns; its first row is its header."""
    columns = []
    for i, column in enumerate(zip(*rows, strict=True)):
        width = max(map(len, column))
        columns.append([cell.ljust(width) if i < num_texts else cell.rjust(width) for cell in column])
    return "\n".join((" " * gap).join(line).rstrip() for line in zip(*columns, strict=True))


def format_bounds(low: float, high: float, form: str = ".3f") -> str:
    """Return an interval in words."""
    return f"{low:{form}} to {high:{form}}"
