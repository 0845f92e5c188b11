"""A row of a table, or an object of JSON -> one example: texts with a class or a number, choices, terms.

Enters: a record whose values go by role (GLUE, SciCite, PubMedQA, CBLUE, GAD, ChemProt, SWAG, CHIP-CDN, or a user's own
columns). Leaves: an example, or none where the row breaks a rule, which is counted in `Dirt`.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Sequence
from pathlib import Path

from domext_ray.errors import CorpusError
from domext_ray.labelled.examples import Choice, Entity, LabelledText, MarkedText, Mention, MultiLabelText
from domext_ray.labelled.readers.files import (
    Dirt,
    Record,
    as_whole,
    check_label,
    check_text,
    read_text,
    shorten,
    split_lines,
)
from domext_ray.labelled.readers.json_places import parse_json
from domext_ray.labelled.set_description import SetDescription

Stretch = tuple[int, int]


def make_classified(record: Record, description: SetDescription, dirt: Dirt) -> LabelledText | None:
    """Make a text, or a pair, with a class; a pair is optional unless the description names its column."""
    texts = _check_texts(record, description, dirt)
    label = check_label(record, dirt, description.labels) if texts is not None else None
    return None if texts is None or label is None else LabelledText("", record.source, *texts, label)


def make_multilabelled(record: Record, description: SetDescription, dirt: Dirt) -> MultiLabelText | None:
    """Make a text, or a pair, with any number of labels: a list, or a text with the description's separator."""
    texts = _check_texts(record, description, dirt)
    value = record.values["labels"]
    is_text = isinstance(value, str)
    parts = [each for each in value.split(description.separator) if each.strip()] if is_text else value
    labels = [_to_label(each) for each in parts] if isinstance(parts, (list, tuple)) else [None]
    if texts is None:
        return None
    if None in labels:
        dirt.add(record.source, "row", "has no list of labels", value)
        return None
    return MultiLabelText("", record.source, *texts, tuple(dict.fromkeys(each for each in labels if each is not None)))


def _to_label(value: object) -> str | None:
    value = as_whole(value)
    is_label = isinstance(value, (str, int)) and not isinstance(value, bool) and bool(str(value).strip())
    return str(value).strip() if is_label else None


def make_valued(record: Record, description: SetDescription, dirt: Dirt) -> LabelledText | None:
    """Make a text, or a pair, with a number."""
    texts = _check_texts(record, description, dirt)
    if texts is None:
        return None
    value = _to_number(record.values["value"])
    if value is None:
        dirt.add(record.source, "row", "has no finite number", record.values["value"])
        return None
    return LabelledText("", record.source, *texts, "", value)


def _check_texts(record: Record, description: SetDescription, dirt: Dirt) -> tuple[str, str | None] | None:
    text = check_text(record, "text", dirt)
    if text is None:
        return None
    if "pair" not in description.required and record.values["pair"] is None:
        return text, None
    pair = check_text(record, "pair", dirt)
    return None if pair is None else (text, pair)


def _to_number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def make_marked(record: Record, description: SetDescription, dirt: Dirt) -> MarkedText | None:
    """Make a text with two marked stretches; the first of the description's `marks` is the head.

    Arguments are marked either by placeholders, which stay (@GENE$ and @DISEASE$: GAD and EU-ADR as in BioBERT), or by
    brackets around them, which are taken out (<< >> and [[ ]]: ChemProt as in SciBERT).
    """
    text = check_text(record, "text", dirt)
    label = check_label(record, dirt, description.labels) if text is not None else None
    if text is None or label is None:
        return None
    cut = cut_marks(text, description.marks)
    if cut is None:
        shown = " and ".join(" ".join(mark) for mark in description.marks)
        dirt.add(record.source, "row", f"has not once {shown}", text)
        return None
    return MarkedText("", record.source, *cut, label)


def cut_marks(text: str, marks: Sequence[tuple[str, ...]]) -> tuple[str, Entity, Entity] | None:
    """Return a text without its brackets, and the two stretches that were marked; None if not both are, once each.

    Args:
        text: with marks.
        marks: of the head and of the tail, each a placeholder or what opens and closes.
    """
    marked = [each for mark in marks if (each := find_marked(text, mark)) is not None]
    if len(marked) < 2:
        return None
    brackets = sorted(each for _, around in marked for each in around)
    head, tail = (
        Entity(
            start - _count_before(brackets, start),
            end - _count_before(brackets, end),
            mark[0].strip("@$") if len(mark) == 1 else "",
        )
        for ((start, end), _), mark in zip(marked, marks, strict=True)
    )
    for start, end in reversed(brackets):
        text = text[:start] + text[end:]
    return text, head, tail


def find_marked(text: str, mark: tuple[str, ...]) -> tuple[Stretch, list[Stretch]] | None:
    """Return the marked stretch, and the stretches of its brackets with the space inside them.

    Brackets with a space inside count first: a text of chemistry has [[ and >> of its own.
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


def make_choice(record: Record, description: SetDescription, dirt: Dirt) -> Choice | None:
    """Make a beginning with its continuations, from a column each (SWAG) or from one that lists them."""
    context = check_text(record, "context", dirt)
    if context is None:
        return None
    options = record.values["options"]
    if not isinstance(options, (list, tuple)) or any(not isinstance(each, str) for each in options):
        raise CorpusError(f"{record.source} has another layout: its options must be texts; set columns.options.")
    if len(options) < 2:
        raise CorpusError(f"{record.source} has {len(options)} options; it must have 2 or more.")
    if any(not each.strip() for each in options):
        dirt.add(record.source, "row", "has an empty option")
        return None
    answer = _to_place(record.values["answer"], len(options))
    if answer is None:
        dirt.add(record.source, "row", "names no option as its answer (from 0)", record.values["answer"])
        return None
    stem = record.values["stem"]
    stem = stem.strip() if isinstance(stem, str) else ""
    return Choice("", record.source, context, stem, tuple(each.strip() for each in options), answer)


def check_options(choices: Sequence[Choice]) -> None:
    """Raise CorpusError unless all choices have as many options as the first."""
    for each in choices:
        if len(each.options) != len(choices[0].options):
            raise CorpusError(
                f"{each.source} has {len(each.options)} options; it must have {len(choices[0].options)} as the first "
                "row."
            )


def _to_place(value: object, num_options: int) -> int | None:
    value = as_whole(value)
    if isinstance(value, str) and value.strip().isdecimal():
        value = int(value)
    is_place = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < num_options
    return int(value) if is_place else None  # type: ignore[call-overload]


def make_mention(record: Record, description: SetDescription, dirt: Dirt) -> Mention | None:
    """Make a wording with its terms: in one cell with the description's separator (CHIP-CDN: "##"), or as a list."""
    text = check_text(record, "text", dirt)
    if text is None:
        return None
    value = record.values["terms"]
    parts = value.split(description.separator) if isinstance(value, str) else value
    if not isinstance(parts, (list, tuple)) or any(not isinstance(each, str) for each in parts):
        parts = []
    terms = tuple(dict.fromkeys(each.strip() for each in parts if each.strip()))
    if not terms:
        dirt.add(record.source, "row", "has no term", value if value not in (None, "") else "")
        return None
    return Mention("", record.source, text, terms)


def read_catalogue(path: Path) -> tuple[str, ...]:
    """Read the standard terms, in the file's order and without duplicates.

    Args:
        path: .json (a list of texts), .csv or .tsv (the last column), or one term per line.

    Raises:
        CorpusError: a file of another layout, or without terms.
    """
    kind = Path(path.name.removesuffix(".gz")).suffix.lower()
    text = read_text(path)
    if kind == ".json":
        terms = []
        for _, part in parse_json(path, text, 1, "[", "a catalogue"):
            if not isinstance(part.value, str):
                found = shorten(part.value, 40)
                raise CorpusError(f"{path}:{part.line} must be a text, a standard term; found {found}.")
            terms.append(part.value)
    elif kind == ".csv":
        terms = [row[-1] for row in csv.reader(io.StringIO(text, newline="")) if row]
    else:
        terms = [line.split("\t")[-1] for line in split_lines(text)]
    catalogue = tuple(dict.fromkeys(each.strip() for each in terms if each.strip()))
    if not catalogue:
        raise CorpusError(f"{path} has no term; give one standard term a line.")
    return catalogue
