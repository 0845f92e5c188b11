"""Sentences with two marked arguments -> the text, the two stretches and the relation between them.

Enters: rows whose text marks its arguments, either by placeholders that stand for them (@GENE$ and @DISEASE$: GAD and
EU-ADR as in BioBERT) or by brackets around them (<< >> and [[ ]]: ChemProt as in SciBERT). Leaves: `MarkedText`s;
brackets are taken out, placeholders stay.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from domext_ray.labelled.examples import Entity, MarkedText
from domext_ray.labelled.readers.files import Dirt, Ids, Record, check_label, check_text
from domext_ray.labelled.set_description import SetDescription

Stretch = tuple[int, int]


def make_marked(records: Iterable[Record], description: SetDescription, dirt: Dirt) -> list[MarkedText]:
    """Make texts with two marked stretches; the first of `marks` is the head.

    Args:
        records: their values by role.
        description: its `marks`.
        dirt: counts rows without label, and those that have not each mark once.
    """
    ids = Ids()
    made = []
    for record in records:
        text = check_text(record, "text", dirt)
        label = check_label(record, dirt, description.labels) if text is not None else None
        if text is None or label is None:
            continue
        marked = [each for mark in description.marks if (each := find_marked(text, mark)) is not None]
        if len(marked) < 2:
            shown = " and ".join(" ".join(mark) for mark in description.marks)
            dirt.add(record.source, "row", f"has not once {shown}", text)
            continue
        brackets = sorted(each for _, around in marked for each in around)
        head, tail = (
            Entity(
                start - _count_before(brackets, start),
                end - _count_before(brackets, end),
                mark[0].strip("@$") if len(mark) == 1 else "",
            )
            for ((start, end), _), mark in zip(marked, description.marks, strict=True)
        )
        for start, end in reversed(brackets):
            text = text[:start] + text[end:]
        made.append(MarkedText(ids.make(record.values["id"]), record.source, text, head, tail, label))
    return made


def find_marked(text: str, mark: tuple[str, ...]) -> tuple[Stretch, list[Stretch]] | None:
    """Return the marked stretch, and the stretches of its brackets with the space inside them.

    Brackets with a space inside count first: a text of chemistry has [[ and >> of its own.

    Args:
        text: with marks.
        mark: a placeholder, or what opens and closes.
    """
    if len(mark) == 1:
        start = text.find(mark[0])
        is_single = start >= 0 and text.find(mark[0], start + 1) < 0
        return ((start, start + len(mark[0])), []) if is_single else None
    opening, closing = (re.escape(each) for each in mark)
    for space in (" ", ""):
        match = re.search(f"{opening}{space}(.+?){space}{closing}", text, re.DOTALL)
        if match is not None and match[1].strip():
            inner = match.span(1)
            start = inner[0] + len(match[1]) - len(match[1].lstrip())
            end = inner[1] - (len(match[1]) - len(match[1].rstrip()))
            return (start, end), [(match.start(), start), (end, match.end())]
    return None


def _count_before(brackets: list[Stretch], place: int) -> int:
    """Count the characters of brackets before a place."""
    return sum(min(end, place) - start for start, end in brackets if start < place)
