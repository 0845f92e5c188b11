"""errors.html: what a model got wrong, for a person to read; it holds the users' own text and needs no network."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from domext_ray.families.comparison import Compared, Mistake, describe_classes
from domext_ray.families.family import Prediction
from domext_ray.families.readers.examples import Entity, Example
from domext_ray.families.task import StagedTask
from domext_ray.report.page import render_page
from domext_ray.storage import Place, write_text

ERRORS = "errors.html"
MAX_ERRORS = 200
CONTEXT_CHARS = 160
"""Text around the stretches of a mistake that is shown."""
LONG_CHARS = 600
"""Texts up to this are shown whole."""
NUM_COLOURS = 6
MAX_CONFUSION = 40
"""Labels of a confusion matrix at most; a larger one is in the JSON only."""
PRIVATE = "No example is shown: its set says whose each row is (group_field), and this page may be passed on."


def write_mistakes(
    path: Place,
    task: StagedTask,
    examples: Sequence[Example],
    predictions: Sequence[Prediction],
    *,
    title: str,
    score: tuple[str, str],
) -> dict[str, Any]:
    """Write the page of a task's predictions, which shows no example of a set that says whose each row is.

    `score` is a figure and its value. Return what `write_errors_page` does.
    """
    return write_errors_page(
        path,
        [task.compare(*pair, task.state) for pair in zip(examples, predictions, strict=True)],
        title=title,
        labels=task.data.labels,
        scores=[score],
        is_private=any(example.group for example in examples),
    )


def write_errors_page(
    path: Place,
    compared: Sequence[Compared],
    *,
    title: str,
    labels: Sequence[str] = (),
    max_errors: int = MAX_ERRORS,
    scores: Sequence[tuple[str, str]] = (),
    is_private: bool = False,
) -> dict[str, Any]:
    """Write a page of the examples that were predicted wrongly, with gold beside predicted, and a report by label.

    Labels that are not in `labels` follow those in report and colours. At most `max_errors` examples are shown, spread
    evenly over all that are wrong, and none that is private. Return what `describe_classes` gives.
    """
    report = describe_classes(compared, labels)
    max_errors = 0 if is_private else max_errors
    wrong = [item for item in compared if item.mistakes]
    if not wrong and any(item.distance for item in compared):  # numbers are more or less wrong
        wrong = sorted((item for item in compared if item.distance), key=lambda item: -item.distance)[:max_errors]
    shown = _spread(wrong, max_errors)
    colours = _choose_colours(report, compared)
    spans = {span.label for item in shown for span in (*item.gold, *item.predicted)}
    page = render_page(
        "errors.html",
        title,
        summary=_summarise(report, len(shown)),
        scores=scores,
        private=PRIVATE if is_private else "",
        kinds=[(kind, f"{n:,}") for kind, n in report["mistakes"].items()],
        labels=_list_figures(report),
        confusion=_tabulate_confusion(report),
        heading="Wrong examples" if report["wrong"] else "Farthest off",
        filters={
            "kind": dict.fromkeys(mistake.kind for item in shown for mistake in item.mistakes),
            "label": sorted({label for item in shown for label in _list_labels(item)}),
        },
        legend=[(label, colour) for label, colour in colours.items() if label in spans],
        cases=[_describe_case(item, colours) for item in shown],
    )
    write_text(path, page)
    return report


def _spread(wrong: Sequence[Compared], most: int) -> list[Compared]:
    """Take at most so many, evenly from all, in their order."""
    if len(wrong) <= most:
        return list(wrong)
    return [wrong[i * len(wrong) // most] for i in range(most)]


def _choose_colours(report: dict[str, Any], compared: Sequence[Compared]) -> dict[str, int]:
    """A colour for each label, by its place; labels of stretches that the report does not have follow."""
    others = {span.label for item in compared for span in (*item.gold, *item.predicted)}
    names = [*report["labels"], *sorted(others - report["labels"].keys())]
    return {label: place % NUM_COLOURS for place, label in enumerate(names)}


def _summarise(report: dict[str, Any], num_shown: int) -> str:
    total, wrong = report["examples"], report["wrong"]
    if not wrong:
        return f"None of {total:,} examples is predicted wrongly." if not num_shown else f"{total:,} examples."
    ending = "all are shown below" if num_shown == wrong else f"{num_shown:,} of them are shown below"
    return f"{wrong:,} of {total:,} examples ({wrong / total:.1%}) are predicted wrongly; {ending}."


def _list_figures(report: dict[str, Any]) -> list[tuple[str, ...]]:
    return [
        (name, *(f"{row[figure]:.3f}" for figure in ("precision", "recall", "f1")), f"{row['support']:,}")
        for name, row in report["labels"].items()
    ]


def _tabulate_confusion(report: dict[str, Any]) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """Header and rows of the confusion matrix; none of one that is too large."""
    names, rows = report["confusion"]["labels"], report["confusion"]["rows"]
    if len(names) > MAX_CONFUSION:
        return (), ()
    header = ("gold \\ predicted", *(name or "missed" for name in names))
    return header, [
        (name or "spurious", *(_format_cell(n, is_diagonal=i == j) for j, n in enumerate(row)))
        for i, (name, row) in enumerate(zip(names, rows, strict=True))
    ]


def _format_cell(count: int, *, is_diagonal: bool) -> Markup:
    return Markup(f"<b>{count:,}</b>" if is_diagonal and count else f"{count:,}" if count else "·")


def _list_labels(item: Compared) -> list[str]:
    """Labels of an example's mistakes; those of answers in words are none."""
    known = {label for pair in item.pairs for label in pair[:2]}
    found = {label for mistake in item.mistakes for label in (mistake.gold, mistake.predicted)}
    return sorted(found & known - {""})


def _describe_case(item: Compared, colours: dict[str, int]) -> dict[str, Any]:
    """What the page shows of an example: its text once where gold and predicted are the same, else once for each."""
    kinds = list(dict.fromkeys(mistake.kind for mistake in item.mistakes))
    sides = [("", item.gold)]
    if item.gold != item.predicted:
        sides = [("gold", item.gold), ("predicted", item.predicted)]
    bad = {span for mistake in item.mistakes for span in mistake.spans}
    return {
        "kinds": kinds,
        "data": json.dumps({"kinds": kinds, "labels": _list_labels(item)}, ensure_ascii=False),
        "name": item.id if item.id == item.source else f"{item.id} · {item.source}",
        "is_both": len(sides) > 1,
        "texts": [
            (name, _cut_text(item.text, first, end, spans, bad, colours))
            for first, end in _list_windows(item)
            for name, spans in sides
        ],
        "answers": (item.gold_answer, item.predicted_answer),
    }


def _list_windows(item: Compared) -> list[tuple[int, int]]:
    """The parts of a text that are shown: all of a short one, of a long one what is around its mistakes."""
    size = len(item.text)
    if size <= LONG_CHARS:
        return [(0, size)]
    windows: list[tuple[int, int]] = []
    for first, end in sorted(_surround(mistake, size) for mistake in item.mistakes if mistake.spans):
        if windows and first <= windows[-1][1]:
            windows[-1] = (windows[-1][0], max(end, windows[-1][1]))
        else:
            windows.append((first, end))
    return windows or [(0, LONG_CHARS)]


def _surround(mistake: Mistake, size: int) -> tuple[int, int]:
    first, end = min(span.start for span in mistake.spans), max(span.end for span in mistake.spans)
    return max(0, min(first, size) - CONTEXT_CHARS), min(size, end + CONTEXT_CHARS)  # gold may be outside of its text


def _cut_text(
    text: str, first: int, end: int, spans: Sequence[Entity], bad: set[Entity], colours: dict[str, int]
) -> list[tuple[str, list[dict[str, Any]]]]:
    """A part of a text in pieces in which no stretch begins or ends, each with all that cover it, the longest first."""
    inside = sorted(
        (span for span in spans if span.start < end and span.end > first), key=lambda e: (e.start - e.end, e.label)
    )
    bounds = sorted({first, end, *(max(first, e.start) for e in inside), *(min(end, e.end) for e in inside)})
    pieces: list[tuple[str, list[dict[str, Any]]]] = []
    for a, b in itertools.pairwise(bounds):
        covering = [
            {"label": e.label, "colour": colours[e.label], "is_bad": e in bad, "ends": e.end == b}
            for e in inside
            if e.start <= a and e.end >= b
        ]
        pieces.append((text[a:b], covering))
    return [*([("… ", [])] if first else []), *pieces, *([(" …", [])] if end < len(text) else [])]
