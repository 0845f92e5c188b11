"""errors.html: what a model got wrong, for a person to read; it holds the users' own text and needs no network."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from domext_ray.families.comparison import Compared, Mistake, describe_classes
from domext_ray.families.readers.examples import Entity
from domext_ray.files import ASSETS
from domext_ray.report.page import fill_page, format_html, format_paragraph, format_section
from domext_ray.storage import Place, write_text

MAX_ERRORS = 200
CONTEXT_CHARS = 160
"""Text around the stretches of a mistake that is shown."""
LONG_CHARS = 600
"""Texts up to this are shown whole."""
NUM_COLOURS = 6
MAX_CONFUSION = 40
"""Labels of a confusion matrix at most; a larger one is in the JSON only."""
PRIVATE = "No example is shown: its set says whose each row is (group_field), and this page may be passed on."


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
    parts = [
        f"<style>{(ASSETS / 'errors.css').read_text(encoding='utf-8')}</style>",
        format_paragraph(_summarise(compared, report, len(shown)), "result"),
        format_html(("", ""), scores, "pairs"),
        format_paragraph(PRIVATE if is_private else "", "note"),
        format_section("Kinds of mistakes", _format_kinds(report)),
        format_section("By label", _format_labels(report)),
        format_section("Confusion", _format_confusion(report)),
        format_section(
            "Wrong examples" if report["wrong"] else "Farthest off",
            _format_filter(shown),
            _format_legend(sorted(spans, key=[*colours].index), colours),
            *(_format_case(item, colours) for item in shown),
            format_paragraph("This is your own text: think of it before you pass this page on.", "note"),
        )
        if shown
        else "",
        f"<script>{(ASSETS / 'errors.js').read_text(encoding='utf-8')}</script>",
    ]
    write_text(path, fill_page(title, parts))
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


def _summarise(compared: Sequence[Compared], report: dict[str, Any], num_shown: int) -> str:
    total, wrong = report["examples"], report["wrong"]
    if not wrong:
        return f"None of {total:,} examples is predicted wrongly." if not num_shown else f"{total:,} examples."
    ending = "all are shown below" if num_shown == wrong else f"{num_shown:,} of them are shown below"
    return f"{wrong:,} of {total:,} examples ({wrong / total:.1%}) are predicted wrongly; {ending}."


def _format_kinds(report: dict[str, Any]) -> str:
    return format_html(("kind", "mistakes"), [(kind, f"{n:,}") for kind, n in report["mistakes"].items()])


def _format_labels(report: dict[str, Any]) -> str:
    rows = [
        (name, *(f"{row[figure]:.3f}" for figure in ("precision", "recall", "f1")), f"{row['support']:,}")
        for name, row in report["labels"].items()
    ]
    return format_html(("label", "precision", "recall", "F1", "support"), rows)


def _format_confusion(report: dict[str, Any]) -> str:
    names, rows = report["confusion"]["labels"], report["confusion"]["rows"]
    if not names or len(names) > MAX_CONFUSION:
        return ""
    header = ("gold \\ predicted", *(name or "missed" for name in names))
    lines = [
        (name or "spurious", *(_format_cell(n, is_diagonal=i == j) for j, n in enumerate(row)))
        for i, (name, row) in enumerate(zip(names, rows, strict=True))
    ]
    return format_html(header, lines)


def _format_cell(count: int, *, is_diagonal: bool) -> Markup:
    return Markup(f"<b>{count:,}</b>" if is_diagonal and count else f"{count:,}" if count else "·")


def _format_filter(shown: Sequence[Compared]) -> str:
    """Choices of a kind and of a label; a script shows them where scripts run."""
    kinds = dict.fromkeys(mistake.kind for item in shown for mistake in item.mistakes)
    labels = sorted({label for item in shown for label in _list_labels(item)})
    if not kinds:
        return ""
    return (
        '<form class="filter" hidden>'
        f"{_format_choice('kind', kinds)}{_format_choice('label', labels)}"
        '<output aria-live="polite"></output></form>'
    )


def _format_choice(name: str, values: Any) -> str:
    options = "".join(f'<option value="{html.escape(value)}">{html.escape(value)}</option>' for value in values)
    return f'<label>{name} <select name="{name}"><option value="">all</option>{options}</select></label>'


def _list_labels(item: Compared) -> list[str]:
    """Labels of an example's mistakes; those of answers in words are none."""
    known = {label for pair in item.pairs for label in pair[:2]}
    found = {label for mistake in item.mistakes for label in (mistake.gold, mistake.predicted)}
    return sorted(found & known - {""})


def _format_legend(labels: Sequence[str], colours: dict[str, int]) -> str:
    if not labels:
        return ""
    named = " ".join(f'<span class="span c{colours[label]}">{html.escape(label)}</span>' for label in labels)
    return f'<p class="legend">{named} <span class="span bad">✗ dashed: part of a mistake</span></p>'


def _format_case(item: Compared, colours: dict[str, int]) -> str:
    kinds = list(dict.fromkeys(mistake.kind for mistake in item.mistakes))
    badges = "".join(f'<span class="kind">{html.escape(kind)}</span>' for kind in kinds)
    data = html.escape(json.dumps({"kinds": kinds, "labels": _list_labels(item)}, ensure_ascii=False))
    name = item.id if item.id == item.source else f"{item.id} · {item.source}"
    return (
        f'<article data-case="{data}"><header>{badges}<span class="source">{html.escape(name)}</span></header>'
        f"{_format_texts(item, colours)}{_format_answers(item)}</article>"
    )


def _format_texts(item: Compared, colours: dict[str, int]) -> str:
    """The text with its stretches: once where gold and predicted are the same, else once for each."""
    sides = [("", item.gold)]
    if item.gold != item.predicted:
        sides = [("gold", item.gold), ("predicted", item.predicted)]
    bad = {span for mistake in item.mistakes for span in mistake.spans}
    blocks = []
    for first, end in _list_windows(item):
        for name, spans in sides:
            head = f'<span class="side">{name}</span>' if name else ""
            text = _format_text(item.text, first, end, spans, bad, colours)
            blocks.append(f'<p class="text" dir="auto">{head}{text}</p>')
    return f'<div class="{"both" if len(sides) > 1 else "one"}">{"".join(blocks)}</div>'


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
    return max(0, first - CONTEXT_CHARS), min(size, end + CONTEXT_CHARS)


def _format_text(
    text: str, first: int, end: int, spans: Sequence[Entity], bad: set[Entity], colours: dict[str, int]
) -> str:
    """A part of a text, its stretches marked; stretches may nest and overlap."""
    inside = [span for span in spans if span.start < end and span.end > first]
    bounds = sorted({first, end, *(max(first, e.start) for e in inside), *(min(end, e.end) for e in inside)})
    pieces = [_format_piece(text[a:b], a, b, inside, bad, colours) for a, b in zip(bounds, bounds[1:], strict=False)]
    return f"{'… ' if first else ''}{''.join(pieces)}{' …' if end < len(text) else ''}"


def _format_piece(
    piece: str, start: int, end: int, spans: Sequence[Entity], bad: set[Entity], colours: dict[str, int]
) -> str:
    """A piece that no stretch begins or ends in, within all stretches that cover it, the longest outside."""
    covering = sorted((e for e in spans if e.start <= start and e.end >= end), key=lambda e: (e.start - e.end, e.label))
    opened, closed = "", ""
    for span in covering:
        is_bad = span in bad
        opened += f'<span class="span c{colours[span.label]}{" bad" if is_bad else ""}">'
        named = f"<small>{'✗ ' if is_bad else ''}{html.escape(span.label)}</small>" if span.end == end else ""
        closed = f"{named}</span>{closed}"
    return f"{opened}{html.escape(piece)}{closed}"


def _format_answers(item: Compared) -> str:
    sides = [("gold", item.gold_answer), ("predicted", item.predicted_answer)]
    lines = [
        f'<div><dt class="side">{name}</dt><dd dir="auto">{html.escape(answer)}</dd></div>' for name, answer in sides
    ]
    is_asked = any(answer for _, answer in sides)
    return f'<dl class="answers">{"".join(lines)}</dl>' if is_asked else ""
