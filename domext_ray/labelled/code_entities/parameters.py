"""Docstrings -> the names in their lists of parameters and of attributes."""

from __future__ import annotations

import re
from collections.abc import Iterator

_LIST_TITLE = re.compile(
    r"^(?P<indent>[ \t]*)(?P<title>(?:Other |Keyword )?(?:Parameters?|Params|Args|Arguments)|Attributes)"
    r"\s*(?P<colon>:?)\s*$"
)
_LISTED = re.compile(r"^[ \t]*(?P<names>\*{0,2}`{0,2}\w+`{0,2}(?:\s*,\s*\*{0,2}\w+)*)\s*(?:\(.*)?(?::|$)")
_SPHINX_PARAMETER = re.compile(
    r"^[ \t]*:(?:param|parameter|arg|argument|key|keyword)\s+(?:[^:\n]*\s)?\\?\*{0,2}(\w+)\s*:", re.M
)


def list_parameters(docstring: str) -> tuple[set[str], set[str]]:
    """Return the names in a docstring's lists of parameters (NumPy's, Google's or Sphinx's way) and of attributes.

    Args:
        docstring: the text between the quotes.
    """
    found: tuple[set[str], set[str]] = set(_SPHINX_PARAMETER.findall(docstring)), set()
    lines = docstring.expandtabs().split("\n")
    for place, line in enumerate(lines):
        title = _LIST_TITLE.match(line)
        underlined = place + 1 < len(lines) and re.fullmatch(r"\s*-{3,}\s*", lines[place + 1])
        if title and (title["colon"] or underlined):
            names = _list_section(lines[place + (2 if underlined else 1) :], len(title["indent"]), bool(underlined))
            found[title["title"] == "Attributes"].update(names)
    return found[0] - {"self", "cls"}, found[1]


def _list_section(lines: list[str], title_indent: int, is_numpy: bool) -> Iterator[str]:
    """Names at the outermost level of a section; what stands deeper describes them."""
    level: int | None = None
    for place, line in enumerate(lines):
        indent = len(line) - len(line.lstrip())
        if not line.strip():
            continue
        if is_numpy and place + 1 < len(lines) and re.fullmatch(r"\s*[-=]{3,}\s*", lines[place + 1]):
            return  # the next section's title
        if indent < title_indent or (not is_numpy and indent == title_indent):
            return
        level = indent if level is None else level
        match = _LISTED.match(line) if indent <= level else None
        if match:
            yield from re.findall(r"\w+", match["names"])
