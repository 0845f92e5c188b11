"""The pages of all reports: one template, its sections, and pictures that a screen reader and a dark screen can show.

Enters: text, tables and what draws pictures. Leaves: HTML that needs no network, for a wide screen and a narrow one.
"""

from __future__ import annotations

import html
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from matplotlib.figure import Figure

from domext_ray.options.places import hide_places
from domext_ray.report.plots import PAGE_SIZE, WIDE_SIZE, draw_svg

TEMPLATE = Path(__file__).parent.parent / "assets" / "report.html"
Rows = Sequence[Sequence[str]]


@dataclass(frozen=True)
class Picture:
    """A picture of a page.

    Args:
        draw: draws it on an empty figure.
        caption: what it shows, below it.
        alt: what a reader sees in it, for those who cannot.
        is_wide: it takes the page's whole width, and scrolls where that is too narrow for its text.
    """

    draw: Callable[[Figure], None]
    caption: str
    alt: str
    is_wide: bool = False


def fill_page(title: str, parts: Sequence[str]) -> str:
    """Return a page.

    Args:
        title: its heading, and that of the browser's tab.
        parts: HTML, from above.
    """
    page = string.Template(TEMPLATE.read_text(encoding="utf-8"))
    return page.substitute(title=html.escape(title), body="\n".join(each for each in parts if each))


def format_section(heading: str, *parts: str) -> str:
    """Return HTML under a heading; nothing where there is nothing to say."""
    content = "\n".join(each for each in parts if each)
    return f"<section>\n<h2>{html.escape(heading)}</h2>\n{content}\n</section>" if content else ""


def format_paragraph(text: str, kind: str = "") -> str:
    """Return a paragraph; nothing for no text.

    Args:
        text: what it says.
        kind: state, result, note, or empty: plain.
    """
    return f"<p{_name_class(kind)}>{html.escape(text)}</p>" if text else ""


def format_html(header: Sequence[str], rows: Rows, kind: str = "numbers") -> str:
    """Return a table whose first column says what its lines are, in a box that scrolls; nothing without lines.

    Args:
        header: names of the columns; left out where all are empty.
        rows: their cells; `Markup` stays as it is.
        kind: numbers (at the right), pairs (a name and what it is), or another class of the template.
    """
    if not rows:
        return ""
    head = "".join(f'<th scope="col">{escape(each)}</th>' for each in header)
    lines = [
        f'<tr><th scope="row">{escape(first)}</th>{"".join(f"<td>{escape(each)}</td>" for each in rest)}</tr>'
        for first, *rest in rows
    ]
    return (
        f'<div class="wide"><table{_name_class(kind)}>{f"<thead><tr>{head}</tr></thead>" if any(header) else ""}'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def format_counts(counts: Sequence[tuple[str, int]]) -> str:
    """Return words and how often each one is there, in as many columns as the screen has room for."""
    items = "".join(f"<li>{html.escape(word)} <span>{number:,}</span></li>" for word, number in counts)
    return f'<ul class="words">{items}</ul>'


class Markup(str):
    """Text of a cell that is HTML already."""


def escape(text: str) -> str:
    """Return text as HTML; `Markup` as it is."""
    return text if isinstance(text, Markup) else html.escape(text)


def format_pictures(pictures: Sequence[Picture]) -> str:
    """Return pictures beside each other, or below where the screen is narrow."""
    figures = []
    for each in pictures:
        svg = draw_svg(each.draw, each.alt, WIDE_SIZE if each.is_wide else PAGE_SIZE)
        opened, closed = ('<figure class="full"><div class="wide">', "</div>") if each.is_wide else ("<figure>", "")
        figures.append(f"{opened}{svg}{closed}<figcaption>{html.escape(each.caption)}</figcaption></figure>")
    return f'<div class="figures">\n{chr(10).join(figures)}\n</div>'


def format_folded(label: str, content: str) -> str:
    """Return HTML that a click on its label shows."""
    return f"<details><summary>{html.escape(label)}</summary>\n{content}\n</details>"


def format_code(text: str) -> str:
    """Return commands, code or settings as they are, in a box that scrolls."""
    return f'<pre tabindex="0">{html.escape(text)}</pre>'


def format_settings(settings: str) -> str:
    """Return a configuration, folded; of paths only the last part is shown.

    Args:
        settings: YAML.
    """
    values: Any = yaml.safe_load(settings)
    if isinstance(values, dict):
        settings = yaml.safe_dump(hide_places(values), sort_keys=False, allow_unicode=True)
    return format_folded("All options", format_code(settings))


def _name_class(kind: str) -> str:
    return f' class="{kind}"' if kind else ""
