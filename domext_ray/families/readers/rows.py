"""A row -> one example: texts with a class or a number, marked texts, questions, choices, terms.

Enters: a `Row` (GLUE, SciCite, PubMedQA, CBLUE, GAD, ChemProt, SQuAD, SWAG, CHIP-CDN, or a user's own columns). Leaves:
an example; where the row breaks a rule it is counted, and `LeftOut` is raised.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from domext_ray.errors import CorpusError
from domext_ray.families.readers.cells import read_mark
from domext_ray.families.readers.examples import (
    Choice,
    Entity,
    LabelledText,
    MarkedText,
    Mention,
    MultiLabelText,
    Question,
)
from domext_ray.families.readers.issues import Row, as_offset, as_whole, shorten
from domext_ray.families.readers.json_text import JsonText
from domext_ray.families.readers.records import read_table, read_text
from domext_ray.text.data.files import find_suffix

NEAR_CHARS = 20
"""How far from its offset an answer may be that occurs more than once."""
Stretch = tuple[int, int]


def _read_texts(row: Row) -> tuple[str, str | None]:
    """Return a text and its pair, which is optional unless the description names its column."""
    text = row.read_text("text")
    return text, row.read_text("pair") if "pair" in row.description.required or row.get("pair") is not None else None


def make_classified(row: Row) -> LabelledText:
    """Make a text, or a pair, with a class."""
    return LabelledText("", row.source, *_read_texts(row), row.read_label())


def make_multilabelled(row: Row) -> MultiLabelText:
    """Make a text, or a pair, with any number of labels: a list, or a text with the description's separator."""
    texts, value = _read_texts(row), row.get("labels")
    listed = split_cell(value, row.description.separator) if isinstance(value, str) else value
    labels = [as_whole(label) for label in listed] if isinstance(listed, (list, tuple)) else [None]
    if not all(type(label) in (str, int) and str(label).strip() for label in labels):
        row.leave_out("has no list of labels", value)
    return MultiLabelText("", row.source, *texts, tuple(dict.fromkeys(str(label).strip() for label in labels)))


def split_cell(value: str, separator: str) -> list[str]:
    """Return the parts of a cell that are not blank."""
    return [part.strip() for part in value.split(separator) if part.strip()]


def make_valued(row: Row) -> LabelledText:
    """Make a text, or a pair, with a number."""
    texts, value = _read_texts(row), row.get("value")
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        row.leave_out("has no finite number", value)
    return LabelledText("", row.source, *texts, "", number)


def make_marked(row: Row) -> MarkedText:
    """Make a text with two marked stretches; the first of the description's `marks` is the head.

    Arguments are marked either by placeholders, which stay (@GENE$ and @DISEASE$: GAD and EU-ADR as in BioBERT), or by
    brackets around them, which are taken out (<< >> and [[ ]]: ChemProt as in SciBERT).
    """
    text, label, marks = row.read_text("text"), row.read_label(), row.description.marks
    try:
        return MarkedText("", row.source, *cut_marks(text, marks), label)
    except MarksError as error:
        row.leave_out(str(error), text)


class MarksError(ValueError):
    """Why a text's two arguments are not marked, as it follows "the row" in a sentence."""


def cut_marks(text: str, marks: Sequence[tuple[str, ...]]) -> tuple[str, Entity, Entity]:
    """Return a text without its brackets, and the two stretches that were marked.

    One may be inside the other. A MarksError says why not both are marked, once each.
    """
    marked = [find_marked(text, mark) for mark in marks]
    outer = [(around[0][0], around[1][1]) if around else inner for inner, around in marked]
    (start, end), (other_start, other_end) = sorted(outer)
    if start < other_start < end < other_end:
        raise MarksError(f"has {_name_marks(marks)} that cross")
    brackets = sorted(bracket for _, around in marked for bracket in around)
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


def _name_marks(marks: Sequence[tuple[str, ...]]) -> str:
    return " and ".join(" ".join(mark) for mark in marks)


def find_marked(text: str, mark: tuple[str, ...]) -> tuple[Stretch, list[Stretch]]:
    """Return the marked stretch, and the stretches of its brackets with the space inside them.

    Brackets with a space inside count first: a text of chemistry has [[ and >> of its own. A MarksError says that the
    mark is not there, or not alone.
    """
    if len(mark) == 1:
        _require_once(text, mark[0])
        start = text.find(mark[0])
        return (start, start + len(mark[0])), []
    if any(map(str.isalnum, mark[0])) and mark[0] not in mark[1] and mark[1] not in mark[0]:  # of no text, as <e1> is
        for bracket in mark if any(bracket in text for bracket in mark) else ():
            _require_once(text, bracket)
    opening, closing = (re.escape(bracket) for bracket in mark)
    for space in (" ", ""):
        pattern = f"{opening}{space}(.+?){space}{closing}"
        found = [match for match in re.finditer(pattern, text, re.DOTALL) if match[1].strip()]
        if len(found) > 1:
            raise MarksError(f"has {_name_marks([mark])} more than once")
        if found:
            (match,) = found
            inner = match.span(1)
            start = inner[0] + len(match[1]) - len(match[1].lstrip())
            end = inner[1] - (len(match[1]) - len(match[1].rstrip()))
            return (start, end), [(match.start(), start), (end, match.end())]
    raise MarksError(f"has no {_name_marks([mark])} around an argument")


def _require_once(text: str, mark: str) -> None:
    if (count := text.count(mark)) != 1:
        raise MarksError(f"has {mark} more than once" if count else f"has no {mark}")


def _count_before(brackets: list[Stretch], place: int) -> int:
    """Count the characters of brackets before a place."""
    return sum(min(end, place) - start for start, end in brackets if start < place)


def make_choice(row: Row) -> Choice:
    """Make a beginning with its continuations, from a column each (SWAG) or from one that lists them.

    Its answer is a place among them, as `place_answers` has it.
    """
    context, options, stem = row.read_text("context"), row.get("options"), row.get("stem")
    if not isinstance(options, (list, tuple)) or any(not isinstance(option, str) for option in options):
        raise CorpusError(f"{row.source} has another layout: its options must be texts; set columns.options.")
    if len(options) < 2:
        raise CorpusError(f"{row.source} has {len(options)} options; it must have 2 or more.")
    if any(not option.strip() for option in options):
        row.leave_out("has an empty option")
    answer = row.get("answer")
    if type(answer) is not int or not 0 <= answer < len(options):
        row.leave_out("names no option as its answer", answer)
    stem = stem.strip() if isinstance(stem, str) else ""
    return Choice("", row.source, context, stem, tuple(option.strip() for option in options), answer)


def check_options(choices: Sequence[Any]) -> None:
    """Raise CorpusError unless all choices have as many options as the first."""
    for choice in choices:
        if len(choice.options) != len(choices[0].options):
            raise CorpusError(
                f"{choice.source} has {len(choice.options)} options; it must have {len(choices[0].options)} as the "
                "first row."
            )


def make_mention(row: Row) -> Mention:
    """Make a wording with its terms: in one cell with the description's separator (CHIP-CDN: "##"), or as a list."""
    text, value = row.read_text("text"), row.get("terms")
    parts = split_cell(value, row.description.separator) if isinstance(value, str) else value
    if not isinstance(parts, (list, tuple)) or any(not isinstance(part, str) for part in parts):
        parts = []
    terms = tuple(dict.fromkeys(part.strip() for part in parts if part.strip()))
    if not terms:
        row.leave_out("has no term", value if value not in (None, "") else "")
    return Mention("", row.source, text, terms)


def make_question(row: Row) -> Question:
    """Make a question with the places of its answers; those that the context does not have stay as texts.

    The description's `no_answer` says whether a question without answers is one.
    """
    context, question = row.read_text("context", is_stripped=False), row.get("question")
    is_empty = isinstance(question, str) and not question.strip()  # evaluation scripts count its answers all the same
    question = "" if is_empty else row.read_text("question")
    listed = _read_answers(row)
    if not listed and not row.description.no_answer:
        row.leave_out("has no answer (no_answer is false)", what="question")
    places = [_place_answer(values, context, row) for values in listed]
    answers = tuple(place for place in places if place is not None)
    unplaced = tuple(values["text"] for values, place in zip(listed, places, strict=True) if place is None)
    if unplaced and not answers:
        row.keep_gold("question", "has none of its answers in the context", "")
    if is_empty:
        row.keep_gold("question", "is empty", "")
    return Question("", row.source, question, context, answers, unplaced=unplaced)


def _read_answers(row: Row) -> list[dict[str, Any]]:
    """Return the answers of a question; where `is_impossible` says that it has none, there are none."""
    answers, mark = row.read_objects("answers", "text"), row.get("is_impossible")
    try:
        is_impossible = read_mark(mark)
    except ValueError:
        row.leave_out("has neither true nor false as 'is_impossible'", mark, what="question")
    if is_impossible and any(answer["text"].strip() for answer in answers):
        row.issues.add(
            row.source, "question", "has answers, and is_impossible is true", outcome="kept without its answers"
        )
    if is_impossible is False and not answers and row.description.no_answer:
        row.issues.add(row.source, "question", "has none, and is_impossible is false", outcome="kept without an answer")
    return [] if is_impossible else answers


def _place_answer(values: dict[str, Any], context: str, row: Row) -> Entity | None:
    """Return the stretch of an answer: at its offset, or nearest to it, or where it occurs alone."""
    text, start = values["text"], as_offset(values.get("answer_start"))
    if start is None:
        raise CorpusError(f"{row.source} has an answer without a whole number as 'answer_start'.")
    if not text.strip():
        row.keep_gold("answer", "is empty", text)
        return None
    if start >= 0 and context.startswith(text, start):
        return Entity(start, start + len(text), "")
    places = [match.start() for match in re.finditer(f"(?={re.escape(text)})", context)]
    nearest = min(places, key=lambda place: abs(place - start), default=None)
    if nearest is None or (len(places) > 1 and abs(nearest - start) > NEAR_CHARS):
        row.keep_gold("answer", "is not in the context near its offset", text)
        return None
    row.issues.add(row.source, "answer", "is not at its offset", text, outcome="moved")
    return Entity(nearest, nearest + len(text), "")


def read_catalogue(path: Path) -> tuple[str, ...]:
    """Read the standard terms without duplicates: a .json list, the last column of .csv or .tsv, or one per line."""
    if find_suffix(str(path)) == ".json":
        file, terms = JsonText(path, read_text(path)), []
        for _, term, line in file.list_values(file.value, list, "a catalogue"):
            if not isinstance(term, str):
                raise CorpusError(f"{path}:{line} must be a text, a standard term; found {shorten(term, 40)}.")
            terms.append(term)
    else:
        terms = [cells[-1] for _, cells in read_table(path)]
    catalogue = tuple(dict.fromkeys(term.strip() for term in terms if term.strip()))
    if not catalogue:
        raise CorpusError(f"{path} has no term; give one standard term a line.")
    return catalogue
