"""Predictions beside labels -> what went wrong, example by example and label by label.

Enters: labelled examples and what a fine-tuned model said of them. Leaves: for each example its mistakes, in the terms
of a reader (missed, spurious, wrong label, wrong boundary, wrong), and over all examples a report by label and a
confusion matrix. The figures that a task is scored by are those of `StagedTask.score`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from domext_ray.families.metrics.answer_metrics import SQUAD_V2, score_answer
from domext_ray.families.readers.examples import (
    AnnotatedText,
    AnyExample,
    Choice,
    Entity,
    LabelledText,
    MarkedText,
    Mention,
    MultiLabelText,
    Question,
    TaggedSentence,
)
from domext_ray.families.tagging import place_entities, place_words
from domext_ray.families.task import Prediction, read_entity

MISSED, SPURIOUS, WRONG_LABEL, WRONG_BOUNDARY, WRONG = "missed", "spurious", "wrong label", "wrong boundary", "wrong"
KINDS = (MISSED, SPURIOUS, WRONG_LABEL, WRONG_BOUNDARY, WRONG)
"""Kinds of mistakes. A missed one overlaps no prediction that is left, a spurious one no label; a span with the right
label and other ends has a wrong boundary, and one with another label a wrong label, whatever its ends."""

ANSWER = "answer"


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


def compare_predictions(
    examples: Sequence[AnyExample], predictions: Sequence[Any], rule: str = SQUAD_V2
) -> list[Compared]:
    """Compare predictions (`Predicted.predictions`) with the labels of examples of one family.

    `rule` says how answers are compared, one of `set_description.RULES`.
    """
    return [_compare(example, predicted, rule) for example, predicted in zip(examples, predictions, strict=True)]


def _compare(example: AnyExample, predicted: Prediction, rule: str) -> Compared:
    match example:
        case TaggedSentence():
            gold = (*place_entities(example, example.tags), *example.misplaced)
            return _compare_spans(example, place_words(example)[0], gold, place_entities(example, predicted["tags"]))
        case AnnotatedText() if "relations" in predicted:
            own = {(_cut(example, r.head), r.label, _cut(example, r.tail)) for r in example.relations}
            triples = {(r["head"]["text"], r["label"], r["tail"]["text"]) for r in predicted["relations"]}
            shown = [
                {(_name_triple(triple), triple[1]) for triple in side} for side in ({*own, *example.unplaced}, triples)
            ]
            return _compare_sets(example, example.text, *shown)
        case AnnotatedText():
            return _compare_spans(example, example.text, example.gold, [*map(read_entity, predicted["entities"])])
        case MarkedText():
            head, tail = (replace(span, label=name) for span, name in ((example.head, "1"), (example.tail, "2")))
            return _compare_classes(example, example.text, example.label, predicted["label"], (head, tail))
        case MultiLabelText():
            sides = [{(label, label) for label in side} for side in (example.labels, predicted["labels"])]
            return _compare_sets(example, _join_pair(example.text, example.pair), *sides)
        case LabelledText() if "value" in predicted:
            return _compare_values(example, predicted["value"])
        case LabelledText():
            return _compare_classes(example, _join_pair(example.text, example.pair), example.label, predicted["label"])
        case Question():
            return _compare_answers(example, predicted, rule)
        case Choice():
            options = [f"{place}: {text}" for place, text in enumerate(example.options)]
            text = f"{example.context} {example.stem}".strip()
            return _compare_choice(example, text, options[example.answer], options[predicted["answer"]])
        case Mention():
            # Every term is a label of its own, too many for a report by label.
            terms = [{(term, "") for term in side} for side in (example.terms, predicted["terms"])]
            return _compare_sets(example, example.text, *terms)
    raise TypeError(type(example))


def _cut(example: AnnotatedText, entity: Entity) -> str:
    return example.text[entity.start : entity.end]


def _name_triple(triple: tuple[str, str, str]) -> str:
    return " – ".join(triple)


def _join_pair(text: str, pair: str | None) -> str:
    return text if pair is None else f"{text} ‖ {pair}"


def _compare_spans(example: AnyExample, text: str, gold: Collection[Entity], predicted: Collection[Entity]) -> Compared:
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
        tuple(sorted(set(gold), key=_order)),
        tuple(sorted(set(predicted), key=_order)),
        mistakes=tuple(mistakes),
        pairs=tuple(pairs),
    )


def _name_kind(own: Entity | None, found: Entity | None) -> str:
    if own is None or found is None:
        return SPURIOUS if own is None else MISSED
    return WRONG_BOUNDARY if own.label == found.label else WRONG_LABEL


def _order(entity: Entity) -> tuple[int, int, str]:
    return entity.start, entity.end, entity.label


def match_spans(gold: Collection[Entity], predicted: Collection[Entity]) -> list[tuple[Entity | None, Entity | None]]:
    """Match labelled spans with predicted ones, each with one other at most, and return all, in the text's order.

    Equal ones match first; then those that overlap, first those with equal ends, then those that share most
    characters, with equal labels before others. Duplicates count once.
    """
    own, found = set(gold), set(predicted)
    matched: list[tuple[Entity | None, Entity | None]] = [(span, span) for span in own & found]
    own, found = own - found, found - own
    candidates = [
        ((a.start, a.end) != (b.start, b.end), -shared, a.label != b.label, _order(a), _order(b), a, b)
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
    return sorted(matched, key=lambda pair: _order(pair[0] or pair[1] or Entity(0, 0, "")))


def _compare_classes(
    example: AnyExample, text: str, gold: str, predicted: str, spans: tuple[Entity, ...] = ()
) -> Compared:
    mistakes = () if gold == predicted else (Mistake(WRONG_LABEL, gold, predicted),)
    pairs = ((gold, predicted, gold == predicted),)
    return Compared(example.id, example.source, text, spans, spans, gold, predicted, mistakes, pairs)


def _compare_sets(
    example: AnyExample, text: str, gold: set[tuple[str, str]], predicted: set[tuple[str, str]]
) -> Compared:
    """Sets of (what a reader sees, its label)."""
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


def _compare_values(example: LabelledText, predicted: float) -> Compared:
    text, distance = _join_pair(example.text, example.pair), abs(example.value - predicted)
    shown = f"{example.value:g}", f"{predicted:.4g}"
    return Compared(example.id, example.source, text, (), (), shown[0], shown[1], distance=distance)


def _compare_choice(example: AnyExample, text: str, gold: str, predicted: str) -> Compared:
    mistakes = () if gold == predicted else (Mistake(WRONG, gold, predicted),)
    return Compared(example.id, example.source, text, (), (), gold, predicted, mistakes)


def _compare_answers(example: Question, predicted: Prediction, rule: str) -> Compared:
    """An answer is right if it is one of the accepted ones by the set's rule, or if there is none of both.

    The text that is shown is the question, and the context on the next line.
    """
    place = len(example.question) + 1
    accepted = [Entity(span.start + place, span.end + place, ANSWER) for span in example.answers]
    answer = predicted["answer"]
    found = [Entity(predicted["start"] + place, predicted["end"] + place, ANSWER)] if answer else []
    texts = (*example.answer_texts, "none")[0], answer or "none"
    is_right, _ = score_answer(example.answer_texts, answer or "", rule)
    spans = (*accepted[:1], *found)
    mistakes = () if is_right else (Mistake(_name_answer(example, accepted, found), *texts, spans),)
    text = f"{example.question}\n{example.context}"
    return Compared(example.id, example.source, text, tuple(accepted[:1]), tuple(found), *texts, mistakes=mistakes)


def _name_answer(example: Question, accepted: Sequence[Entity], found: Sequence[Entity]) -> str:
    if not example.answer_texts or not found:
        return MISSED if example.answer_texts else SPURIOUS
    is_near = any(answer.start < found[0].end and found[0].start < answer.end for answer in accepted)
    return WRONG_BOUNDARY if is_near else WRONG


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
    rows = [[sum(pairs[a, b, right] for right in (True, False)) for b in sides] for a in sides]
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
