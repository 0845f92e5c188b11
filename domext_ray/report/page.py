"""The pages of all reports: HTML that needs no network, for a wide screen and a narrow one, light or dark.

Enters: text, tables and what draws pictures. `assets/macros.html` has the pieces, `assets/page.html` what all pages
share, and `assets/run.html` the page of a run.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape
from markupsafe import Markup

from domext_ray.config.options.submitted import hide_places
from domext_ray.config.options.yaml_text import parse_yaml
from domext_ray.files import ASSETS
from domext_ray.report.plots import Picture
from domext_ray.report.tables import Rows, Table


@functools.cache
def _read_templates() -> Environment:
    loader = FileSystemLoader(ASSETS)
    escape = select_autoescape(default=True, disabled_extensions=("md",))
    return Environment(
        loader=loader, autoescape=escape, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined
    )


def _fill(macro: str, *values: Any) -> Markup:
    module: Any = _read_templates().get_template("macros.html").module
    return Markup(str(getattr(module, macro)(*values)).strip())


def _join(parts: Sequence[str]) -> Markup:
    return Markup("\n".join(filter(None, parts)))


def render_page(template: str, title: str, **values: Any) -> str:
    """Return a page: a template of `assets`, its heading, and what else it asks for."""
    return _read_templates().get_template(template).render(title=title, **values) + "\n"


def fill_text(template: str, **values: Any) -> str:
    """Return a text of a template of `assets` that is no HTML."""
    return _read_templates().get_template(template).render(**values).strip() + "\n"


def fill_page(title: str, parts: Sequence[str]) -> str:
    """Return a page of parts that are HTML, from above."""
    return render_page("page.html", title, body=_join(parts))


def format_section(heading: str, *parts: str) -> Markup:
    """Return HTML under a heading; nothing where there is nothing to say."""
    return _fill("section", heading, _join(parts))


def format_paragraph(text: str, kind: str = "") -> Markup:
    """Return a paragraph of a kind of the template (state, result, note, or empty: plain); nothing for no text."""
    return _fill("paragraph", text, kind)


def format_html(header: Sequence[str], rows: Rows, kind: str = "numbers") -> Markup:
    """Return a table whose first column says what its lines are, in a box that scrolls; nothing without lines.

    A header of empty names is left out, and `Markup` stays as it is. Kinds are numbers (at the right), pairs (a name
    and what it is), and further classes of the template.
    """
    return _fill("table", header, rows, kind)


def format_result(table: Table, page: str) -> str:
    """Return a table, its notes and a link to a page, given its path: what a notebook shows of a run."""
    link = Markup('<a href="{}">{}</a>').format(quote(page), page)
    return str(_join([format_html(table.header, table.rows), *map(format_paragraph, [*table.notes, link])]))


def format_pictures(pictures: Sequence[Picture]) -> Markup:
    """Return pictures beside each other, or below where the screen is narrow."""
    return _fill("pictures", pictures)


def format_settings(settings: str) -> Markup:
    """Return a configuration, given as YAML, folded; of paths only the last part is shown."""
    values = hide_places(parse_yaml(settings, "config.yaml").value)
    shown = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
    return _fill("folded", "All options", _fill("code", shown))
