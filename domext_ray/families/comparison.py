"""Predictions beside labels -> what went wrong, example by example and label by label.

Enters: labelled examples and what a fine-tuned model said of them. Leaves: for each example its mistakes, in the terms
of a reader (missed, spurious, wrong label, wrong boundary, wrong), and over all examples a report by label and a
confusion matrix. The figures that a task is scored by are those of `StagedTask.score`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from domext_ray.families.readers.examples import Entity, Example, order, sort_entities

MISSED, SPURIOUS, WRONG_LABEL, WRONG_BOUNDARY, WRONG = "missed", "spurious", "wrong label", "wrong boundary", "wrong"
KINDS = (MISSED, SPURIOUS, WRONG_LABEL, WRONG_BOUNDARY, WRONG)
"""Kinds of mistakes. A missed one overlaps no prediction that is left, a spurious one no label; a span with the right
label and other ends has a wrong boundary, and one with another label a wrong label, whatever its ends."""


@dataclass(frozen=True)
class Mistake:
    """One thing that is wrong."""

    kind: str  # one of `KINDS`
    gold: str  # the label, or the answer, as it should be; "" where nothing should be
    predicted: str  # "" for nothing
    spans: tuple[Entity, ...] = ()  # the stretches of the text that are concerned, if any


@dataclass(frozen=True)
class Compared:
    """An example, its label and what was predicted."""

    id: str
    source: str
    text: str  # what a reader sees
    gold: tuple[Entity, ...] = ()  # labelled stretches of the text, as `predicted`, which is the same where the task is
    predicted: tuple[Entity, ...] = ()  # not about stretches
    gold_answer: str = ""  # what the task asks for, as `predicted_answer`, where that is no stretch
    predicted_answer: str = ""
    mistakes: tuple[Mistake, ...] = ()
    # gold label and predicted label of everything that is counted, "" for none, and whether it is right
    pairs: tuple[tuple[str, str, bool], ...] = ()
    distance: float = 0.0  # how far a number is off; 0 where there is none


def join_pair(text: str, pair: str | None) -> str:
    """Return what a reader sees of one text or two."""
    return text if pair is None else f"{text} ‖ {pair}"


def compare_spans(example: Example, text: str, predicted: Collection[Entity]) -> Compared:
    """Compare an example's gold entities with predicted ones."""
    gold = example.gold
    pairs, mistakes = [], []
    for own, found in match_spans(gold, predicted):
        labels = (own.label if own else "", found.label if found else "")
        pairs.append((*labels, own == found))
        if own != found:
            mistakes.append(Mistake(_name_kind(own, found), *labels, tuple(span for span in (own, found) if span)))
    return Compared(
        example.id,
        example.source,
        text,
        sort_entities(set(gold)),
        sort_entities(set(predicted)),
        mistakes=tuple(mistakes),
        pairs=tuple(pairs),
    )


def _name_kind(own: Entity | None, found: Entity | None) -> str:
    if own is None or found is None:
        return SPURIOUS if own is None else MISSED
    return WRONG_BOUNDARY if own.label == found.label else WRONG_LABEL


def match_spans(gold: Collection[Entity], predicted: Collection[Entity]) -> list[tuple[Entity | None, Entity | None]]:
    """Match labelled spans with predicted ones, each with one other at most, and return all, in the text's order.

    Equal ones match first; then those that overlap, first those with equal ends, then those that share most
    characters, with equal labels before others. Duplicates count once.
    """
    own, found = set(gold), set(predicted)
    matched: list[tuple[Entity | None, Entity | None]] = [(span, span) for span in own & found]
    own, found = own - found, found - own
    candidates = [
        ((a.start, a.end) != (b.start, b.end), -shared, a.label != b.label, order(a), order(b), a, b)
        for a in own
        for b in found
        if (shared := min(a.end, b.end) - max(a.start, b.start)) > 0
    ]
    for *_, a, b in sorted(candidates, key=lambda candidate: candidate[:5]):
        if a in own and b in found:
            matched.append((a, b))
            own.remove(a)
            found.remove(b)
    matched += [*((span, None) for span in own), *((None, span) for span in found)]
    return sorted(matched, key=lambda pair: order(pair[0] or pair[1] or Entity(0, 0, "")))


def compare_classes(example: Example, text: str, gold: str, predicted: str, spans: tuple[Entity, ...] = ()) -> Compared:
    """Compare a class with the predicted one."""
    mistakes = () if gold == predicted else (Mistake(WRONG_LABEL, gold, predicted),)
    pairs = ((gold, predicted, gold == predicted),)
    return Compared(example.id, example.source, text, spans, spans, gold, predicted, mistakes, pairs)


def compare_sets(example: Example, text: str, gold: set[tuple[str, str]], predicted: set[tuple[str, str]]) -> Compared:
    """Compare sets of (what a reader sees, its label)."""
    mistakes = [
        *(Mistake(MISSED, shown, "") for shown, _ in sorted(gold - predicted)),
        *(Mistake(SPURIOUS, "", shown) for shown, _ in sorted(predicted - gold)),
    ]
    pairs = [
        *((label, label, True) for _, label in sorted(gold & predicted) if label),
        *((label, "", False) for _, label in sorted(gold - predicted) if label),
        *(("", label, False) for _, label in sorted(predicted - gold) if label),
    ]
    shown = ["; ".join(sorted(name for name, _ in side)) or "none" for side in (gold, predicted)]
    return Compared(example.id, example.source, text, (), (), shown[0], shown[1], tuple(mistakes), tuple(pairs))


def describe_classes(compared: Sequence[Compared], labels: Sequence[str] = ()) -> dict[str, Any]:
    """Return a report by label, a confusion matrix, and how many mistakes of each kind there are, JSON-able.

    "labels": by label, in the order of `labels`, others after them, "precision", "recall" and "f1" (fractions from 0 to
    1, 0 where one is undefined), "support" (how often it is the label) and "predicted" (how often it was predicted).
    "confusion": "labels", with "" for none last where spans or labels are missed or spurious, and "rows", one a label:
    how often it was predicted as each. Spans that overlap are taken for each other; in the report only equal ones are
    right. "mistakes": counts by kind. "examples" and "wrong": all examples, and those with a mistake.
    """
    pairs = Counter(pair for item in compared for pair in item.pairs)
    occurring = {label for gold, predicted, _ in pairs for label in (gold, predicted)}
    names = [*labels, *sorted(occurring - {*labels, ""})] if pairs else []
    kinds = Counter(mistake.kind for item in compared for mistake in item.mistakes)
    sides = [*names, *([""] if "" in occurring else [])]
    rows = [[pairs[gold, found, True] + pairs[gold, found, False] for found in sides] for gold in sides]
    return {
        "labels": {name: _describe_label(name, pairs) for name in names},
        "confusion": {"labels": sides, "rows": rows},
        "mistakes": {kind: kinds[kind] for kind in KINDS if kinds[kind]},
        "examples": len(compared),
        "wrong": sum(bool(item.mistakes) for item in compared),
    }


def _describe_label(label: str, pairs: Counter[tuple[str, str, bool]]) -> dict[str, float]:
    right = sum(count for (gold, _, is_right), count in pairs.items() if gold == label and is_right)
    support = sum(count for (gold, _, _), count in pairs.items() if gold == label)
    predicted = sum(count for (_, found, _), count in pairs.items() if found == label)
    return {
        "precision": right / predicted if predicted else 0.0,
        "recall": right / support if support else 0.0,
        "f1": 2 * right / (predicted + support) if predicted + support else 0.0,
        "support": support,
        "predicted": predicted,
    }
