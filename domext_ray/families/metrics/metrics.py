"""Predictions against labels -> scores: entities, classes, numbers, answers, triples, standard terms.

Enters: gold labels and predictions of the same examples, in the examples' own terms. Leaves: a `Score`, whose figures
are fractions from 0 to 1 and can be resampled over the examples. "precision", "recall" and "f1" over several labels
(classes, entity types, predicates) come

- micro: from the counts of all labels together;
- macro: the mean over the labels that occur in the gold labels or in the predictions (scikit-learn's and seqeval's
  rule; in a resample, those that occur in it);
- per_label: 0 for a label that does not occur.

F1 is 2·TP / (2·TP + FP + FN); a negative class ("no relation") is left out of micro and macro.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from domext_ray.families.metrics.answer_metrics import score_answer
from domext_ray.families.metrics.scores import Score, make_score
from domext_ray.families.readers.examples import Entity

RECALL_DEPTHS = (1, 5, 10)

T = TypeVar("T")


def divide(numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
    """Divide, nan where the denominator is 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(denominator > 0, numerator / denominator, np.nan)


def _divide_or_zero(numerator: np.ndarray, denominator: np.ndarray, occurring: np.ndarray) -> np.ndarray:
    """Divide; 0 where only the denominator is 0 (nothing predicted, say), nan where nothing occurs on either side."""
    return np.where(occurring > 0, np.nan_to_num(divide(numerator, denominator)), np.nan)


def _mean_defined(values: np.ndarray) -> np.ndarray:
    """Mean over the last axis of what is not nan; nan without any."""
    is_defined = ~np.isnan(values)
    return divide(np.nan_to_num(values).sum(axis=-1), is_defined.sum(axis=-1))


@dataclass(frozen=True)
class CountFigures:
    """Sums [R, 3·L] of matches, predictions and gold labels by label -> precision, recall and F1."""

    labels: tuple[str, ...]

    def __call__(self, sums: np.ndarray) -> dict[str, Any]:
        matches, predictions, golds = np.split(sums, 3, axis=1)
        total = predictions + golds
        figures: dict[str, Any] = {}
        for name, numerator, denominator in (
            ("precision", matches, predictions),
            ("recall", matches, golds),
            ("f1", 2 * matches, total),
        ):
            by_label = _divide_or_zero(numerator, denominator, total)
            figures[name] = {
                "micro": _divide_or_zero(numerator.sum(axis=1), denominator.sum(axis=1), total.sum(axis=1)),
                "macro": _mean_defined(by_label),
                "per_label": {label: by_label[:, i] for i, label in enumerate(self.labels)},
            }
        return figures


def _score_sets(
    gold: Sequence[Collection[T]],
    predicted: Sequence[Collection[T]],
    labels: Sequence[str],
    find_label: Callable[[T], str],
) -> Score:
    """Score sets of things that each have a label; duplicates count once.

    Labels that occur beside `labels` follow them in the figures.
    """
    sets = [({*g}, {*p}) for g, p in zip(gold, predicted, strict=True)]
    occurring = {find_label(thing) for pair in sets for side in pair for thing in side}
    all_labels = (*labels, *sorted(occurring - {*labels}))
    place = {label: i for i, label in enumerate(all_labels)}
    statistics = np.zeros((len(sets), 3, len(all_labels)))
    for row, (own, found) in zip(statistics, sets, strict=True):
        for counts, things in zip(row, (own & found, found, own), strict=True):
            for thing in things:
                counts[place[find_label(thing)]] += 1
    return make_score(statistics.reshape(len(sets), -1), CountFigures(all_labels))


def score_entities(
    gold: Sequence[Collection[Entity]], predicted: Sequence[Collection[Entity]], types: Sequence[str]
) -> Score:
    """Score entities: one counts as found when start, end and type are right."""
    return _score_sets(gold, predicted, types, lambda entity: entity.label)


@dataclass(frozen=True)
class _ClassFigures:
    """Sums [R, 3·L] of matches, predictions and gold labels by label -> figures of single-label classes."""

    labels: tuple[str, ...]
    negative: str | None
    positive: str | None

    def __call__(self, sums: np.ndarray) -> dict[str, Any]:
        matches, predictions, golds = np.split(sums, 3, axis=1)
        total, correct = golds.sum(axis=1), matches.sum(axis=1)
        figures: dict[str, Any] = {"accuracy": divide(correct, total)}
        kept = [i for i, label in enumerate(self.labels) if label != self.negative]
        own = [part[:, kept] for part in (matches, predictions, golds)]
        averages = CountFigures(tuple(self.labels[i] for i in kept))(np.concatenate(own, axis=1))
        by_label = CountFigures(self.labels)(sums)
        for name in averages:
            figures[name] = {**averages[name], "per_label": by_label[name]["per_label"]}
            if self.positive is not None:
                figures[name]["positive"] = by_label[name]["per_label"][self.positive]
        # Gorodkin's R_K, which is Matthews' coefficient for two classes; undefined when a side has one class only.
        covariance = correct * total - (predictions * golds).sum(axis=1)
        spread = (total**2 - (predictions**2).sum(axis=1)) * (total**2 - (golds**2).sum(axis=1))
        figures["matthews"] = divide(covariance, np.sqrt(np.maximum(spread, 0.0)))
        return figures


def score_classes(
    gold: Sequence[str],
    predicted: Sequence[str],
    labels: Sequence[str],
    *,
    negative: str | None = None,
    positive: str | None = None,
) -> Score:
    """Score one class per example, also by "accuracy" and "matthews".

    Classes that occur beside `labels` follow them in the figures. Micro and macro averages leave out the class
    `negative`; the precision, recall and F1 of the class `positive` are given as "positive", too (binary tasks).
    """
    all_labels = (*labels, *sorted({*gold, *predicted} - {*labels}))
    place = {label: i for i, label in enumerate(all_labels)}
    own = np.array([place[label] for label in gold], dtype=np.int64)
    found = np.array([place[label] for label in predicted], dtype=np.int64)
    one_hot = np.eye(len(all_labels))
    statistics = np.concatenate([one_hot[own] * (own == found)[:, None], one_hot[found], one_hot[own]], axis=1)
    return make_score(statistics, _ClassFigures(all_labels, negative, positive))


@dataclass(frozen=True, eq=False)
class _Correlations:
    """How often each pair was drawn, [R, n] -> correlations of `gold`, [n], with `predicted`, [n]."""

    gold: np.ndarray
    predicted: np.ndarray

    def __call__(self, counts: np.ndarray) -> dict[str, Any]:
        sides = [side - side.mean() for side in (self.gold, self.predicted)]
        pearson = _correlate(counts, *(np.broadcast_to(side, counts.shape) for side in sides))
        return {
            "pearson": pearson,
            "spearman": _correlate(counts, _rank(self.gold, counts), _rank(self.predicted, counts)),
        }


def _correlate(counts: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Pearson's correlation over the last axis, each pair as often as it was drawn; nan where one side is constant."""
    total = counts.sum(axis=1)

    def average(*factors: np.ndarray) -> np.ndarray:
        return np.einsum(",".join(["rn"] * (1 + len(factors))) + "->r", counts, *factors) / total

    means, squares = (average(x), average(y)), (average(x, x), average(y, y))
    variances = [square - mean**2 for mean, square in zip(means, squares, strict=True)]
    varies = [variance > 1e-12 * square for variance, square in zip(variances, squares, strict=True)]
    spread = np.where(varies[0] & varies[1], np.sqrt(np.abs(variances[0] * variances[1])), 0.0)
    return np.clip(divide(average(x, y) - means[0] * means[1], spread), -1.0, 1.0)


def _rank(values: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Ranks of the values [n] among the drawn ones, [R, n]; ties share their mean rank."""
    _, firsts, places = np.unique(np.sort(values), return_index=True, return_inverse=True)
    order = np.argsort(values, kind="stable")
    tied = np.add.reduceat(counts[:, order], firsts, axis=1)
    by_value = np.cumsum(tied, axis=1) - tied / 2 + 0.5
    ranks = np.empty_like(counts)
    ranks[:, order] = by_value[:, places]
    return ranks


def score_values(gold: Sequence[float], predicted: Sequence[float]) -> Score:
    """Score one number per example by its correlation with the gold value.

    "pearson" and "spearman" go from -1 to 1, and are 0 where one side is constant.
    """
    own, found = np.asarray(gold, dtype=np.float64), np.asarray(predicted, dtype=np.float64)
    return make_score(np.stack([own, found], axis=1), _Correlations(own, found), is_additive=False)


@dataclass(frozen=True)
class _AnswerFigures:
    """Sums [R, 6] of (questions, exact, F1) over those with an answer and those without -> figures."""

    are_both: bool  # questions of both kinds are there

    def __call__(self, sums: np.ndarray) -> dict[str, Any]:
        parts = {"has_answer": sums[:, :3], "no_answer": sums[:, 3:]}
        by_kind = {name: _divide_answers(part) for name, part in parts.items()} if self.are_both else {}
        return {**_divide_answers(sums[:, :3] + sums[:, 3:]), **by_kind}


def _divide_answers(sums: np.ndarray) -> dict[str, Any]:
    return {"exact": divide(sums[:, 1], sums[:, 0]), "f1": divide(sums[:, 2], sums[:, 0])}


def score_answers(gold: Sequence[Sequence[str]], predicted: Sequence[str], rule: str) -> Score:
    """Score answers to questions as an official evaluation does, by one of `set_description.RULES`; see `score_answer`.

    "exact" and "f1" are fractions (the scripts print per cents). A set that has questions with and without an answer
    has both figures of each kind as well, in "has_answer" and "no_answer".
    """
    statistics = np.zeros((len(gold), 6))
    for row, answers, answer in zip(statistics, gold, predicted, strict=True):
        first = 0 if answers else 3
        row[first : first + 3] = 1.0, *score_answer(answers, answer, rule)
    return make_score(statistics, _AnswerFigures(any(map(len, gold)) and not all(map(len, gold))))


def score_triples(
    gold: Sequence[Collection[tuple[str, str, str]]],
    predicted: Sequence[Collection[tuple[str, str, str]]],
    predicates: Sequence[str] = (),
) -> Score:
    """Score triples (subject, predicate, object) as CMeIE's evaluation does.

    Case does not count, nor do the marks of a title, 《》.
    """
    own, found = ([{_fold_triple(triple) for triple in triples} for triples in side] for side in (gold, predicted))
    return _score_sets(own, found, predicates, lambda triple: triple[1])


def _fold_triple(triple: tuple[str, str, str]) -> tuple[str, str, str]:
    head, predicate, tail = triple
    return _fold(head), predicate, _fold(tail)


def _fold(text: str) -> str:
    text = text.lower()
    return text[1:-1] if text.startswith("《") and text.endswith("》") else text


@dataclass(frozen=True)
class _TermFigures:
    """Sums [R, 5 + depths] of examples, exact ones, and terms matched, predicted, gold, found by depth -> figures."""

    depths: tuple[int, ...]

    def __call__(self, sums: np.ndarray) -> dict[str, Any]:
        figures = {name: {"micro": averages["micro"]} for name, averages in CountFigures(("",))(sums[:, 2:5]).items()}
        figures["recall"] |= {f"at_{n}": divide(sums[:, 5 + i], sums[:, 4]) for i, n in enumerate(self.depths)}
        return {"accuracy": divide(sums[:, 1], sums[:, 0]), **figures}


def score_terms(
    gold: Sequence[Collection[str]],
    predicted: Sequence[Sequence[str]],
    *,
    ranked: Sequence[Sequence[str]] | None = None,
) -> Score:
    """Score the standard terms that a wording was taken to mean.

    "accuracy" is the share of examples with all of their terms and no other. With `ranked`, longer lists of candidates,
    best first, there are "recall.at_1", "recall.at_5" and "recall.at_10", no deeper than the longest list.
    """
    sets = [({*g}, {*p}) for g, p in zip(gold, predicted, strict=True)]
    rows = [[1.0, g == p, len(g & p), len(p), len(g)] for g, p in sets]
    depths: tuple[int, ...] = ()
    if ranked is not None:
        longest = max(map(len, ranked), default=0)
        depths = tuple(depth for depth in RECALL_DEPTHS if depth <= longest)
        for row, (own, _), terms in zip(rows, sets, ranked, strict=True):
            row += [len(own & {*terms[:depth]}) for depth in depths]
    return make_score(np.array(rows, dtype=np.float64), _TermFigures(depths))
