"""Intervals hold the truth as often as they say, over documents and restarts, and p values are no smaller than due."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import t

from domext_ray.families.metrics.metrics import score_classes
from domext_ray.families.metrics.scores import compare_scores, over_clusters
from domext_ray.families.readers.examples import LabelledText, Question, TaggedSentence
from domext_ray.intervals import (
    Estimate,
    Resampled,
    average,
    compare,
    compare_seeds,
    correct_holm,
    draw_clusters,
    find_bounds,
    over_seeds,
    subtract,
)


def draw_right(
    rng: np.random.Generator, documents: np.ndarray, num_restarts: int, *, seed_sd: float, both_sd: float
) -> np.ndarray:
    """Chances [F, restarts, documents] of F studies, whose documents are as hard as `documents` [F, documents] say."""
    logits = documents[:, None] + seed_sd * rng.normal(size=(len(documents), num_restarts, 1))
    logits = logits + both_sd * rng.normal(size=(len(documents), num_restarts, documents.shape[1]))
    return 1 / (1 + np.exp(-logits))


def resample(rng: np.random.Generator, chances: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Values [F, restarts] and resamples [F, restarts, R] of the accuracy over sentences."""
    right = rng.binomial(sizes, chances)
    counts = np.concatenate(list(draw_clusters(len(sizes), 250, 0)))
    return right.sum(axis=2) / sizes.sum(), right @ counts.T / (counts @ sizes)


def test_an_interval_holds_the_truth_in_19_of_20_studies() -> None:
    for num_documents, num_restarts, seed_sd, both_sd in (
        (20, 1, 0.0, 0.0),
        (20, 3, 0.0, 0.5),
        (20, 3, 0.4, 0.5),
        (60, 5, 0.4, 0.3),
        (20, 2, 0.2, 0.5),
    ):
        rng = np.random.default_rng(1)
        sizes = rng.integers(2, 12, size=num_documents)
        options = {"seed_sd": seed_sd, "both_sd": both_sd}
        truth = draw_right(rng, 1 + rng.normal(size=(100_000, 1)), 1, **options).mean()
        chances = draw_right(rng, 1 + rng.normal(size=(800, num_documents)), num_restarts, **options)
        values, drawn = resample(rng, chances, sizes)
        low, high = find_bounds(values, drawn, num_documents).T
        covered = np.mean((low <= truth) & (truth <= high))
        assert 0.93 <= covered <= 0.985, (num_documents, num_restarts)
        if num_restarts == 1:  # as if sentences were drawn one by one
            half = 1.96 * np.sqrt(values[:, 0] * (1 - values[:, 0]) / sizes.sum())
            assert np.mean(abs(values[:, 0] - truth) <= half) < covered - 0.1


def test_false_alarms_are_as_rare_as_the_level_says() -> None:
    rng, alarms, of_any = np.random.default_rng(2), 0, 0
    sizes = rng.integers(2, 12, size=30)
    for _ in range(150):
        documents = np.repeat(1 + rng.normal(size=(1, 30)), 4, axis=0)
        values, drawn = resample(rng, draw_right(rng, documents, 3, seed_sd=0.3, both_sd=0.5), sizes)
        first, *others = (Resampled(*pair, 30) for pair in zip(values, drawn, strict=True))
        found = [compare(first, other) for other in others]
        p_values = [difference.p_value or 0.0 for difference in found]
        assert all(difference.is_apart == (p_value < 0.05) for difference, p_value in zip(found, p_values, strict=True))
        alarms += p_values[0] < 0.05
        of_any += min(correct_holm(p_values)) < 0.05
    assert alarms / 150 <= 0.08 and of_any / 150 <= 0.08


def test_a_mean_of_documents_has_students_interval() -> None:
    values = np.random.default_rng(3).uniform(0.3, 0.7, size=12)
    drawn = np.concatenate(list(draw_clusters(12, 20_000, 0))) @ values / 12
    found = Resampled(values.mean(keepdims=True), drawn[None], 12).estimate()
    assert found.interval == pytest.approx(t.interval(0.95, 11, values.mean(), values.std(ddof=1) / 12**0.5), abs=3e-3)
    alone = Resampled(values[:1], np.full((1, 10), values[0]), 1).estimate()
    assert (alone.low, alone.high) == (0.0, 1.0), "one document says nothing about others"
    same = Resampled(values[:1], np.full((1, 10), values[0]), 1)
    assert compare(same, same).interval == [-1.0, 1.0]


def test_one_restart_has_no_p_value() -> None:
    rng = np.random.default_rng(4)
    one, other = (Resampled(np.array([value]), rng.normal(value, 0.01, size=(1, 500)), 50) for value in (0.5, 0.7))
    assert compare(one, other).p_value is None and compare(one, other).low > 0.1
    two = Resampled(np.array([0.69, 0.71]), rng.normal(0.7, 0.01, size=(2, 500)), 50)
    assert compare(one, two).p_value is None
    assert compare_seeds([0.1]).p_value is None and compare_seeds([0.1]).interval is None
    assert compare_seeds([0.1, 0.2, 0.3]).p_value == pytest.approx(0.0742, abs=1e-4)
    with pytest.raises(ValueError, match="resampled differently"):
        compare(one, over_seeds([0.5]))


def test_several_comparisons_are_corrected() -> None:
    assert correct_holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert correct_holm([0.5, 0.9]) == [1.0, 1.0] and correct_holm([]) == []


def test_independent_figures_add_their_arms_in_squares() -> None:
    first, second = Estimate(0.5, 0.47, 0.54), Estimate(0.2, 0.16, 0.23)
    found = subtract(first, second)
    assert (found.value, found.low, found.high) == pytest.approx(
        (0.3, 0.3 - math.hypot(0.03, 0.03), 0.3 + 0.04 * 2**0.5)
    )
    sample = Resampled(np.array([0.5]), np.random.default_rng(0).normal(0.5, 0.02, size=(1, 2000)), 900)
    one, mean = sample.estimate(), average([sample] * 4)
    assert mean.value == 0.5 and mean.high - 0.5 == pytest.approx((one.high - 0.5) / 2)


def test_whole_documents_and_contexts_are_resampled() -> None:
    """Copies of a sentence tell no more than the sentence."""
    gold, predicted = ["a"] * 40, ["a", "a", "b", "a", "b"] * 8
    alone = score_classes(gold, predicted, ("a", "b"))
    sentences = [TaggedSentence(f"{i}", "x", ("w",), ("O",), f"d{i // 3}") for i in range(120)]
    copies = score_classes(
        [label for label in gold for _ in range(3)], [label for label in predicted for _ in range(3)], ("a", "b")
    )
    clustered = over_clusters(copies, sentences)
    assert clustered.describe()["intervals"] == alone.describe()["intervals"]
    assert clustered.describe()["clusters"] == 40 and clustered.describe()["examples"] == 120
    low, high = copies.describe()["intervals"]["accuracy"]
    assert high - low < 0.7 * np.diff(alone.describe()["intervals"]["accuracy"])[0]
    assert compare_scores(clustered, clustered, ["accuracy"])["accuracy"] == Estimate(0.0, 0.0, 0.0)
    questions = [Question(f"{i}", "x", "Who?", f"context {i % 2}", ()) for i in range(4)]
    grouped = [LabelledText(f"{i}", "x", "text", None, "a", group="one" if i < 3 else "") for i in range(4)]
    texts = score_classes(["a"] * 4, ["a", "b", "a", "b"], ("a", "b"))
    assert over_clusters(texts, questions).num_clusters == 2 and over_clusters(texts, grouped).num_clusters == 2
