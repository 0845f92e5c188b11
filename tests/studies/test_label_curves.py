"""How many labels the base needs: what is said of a curve, and how often its interval holds the truth."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from domext_ray.intervals import Estimate, Resampled, compare, draw_clusters
from domext_ray.storage import Place
from domext_ray.studies.methods.findings import describe_curve, tabulate_curve
from domext_ray.studies.methods.label_curves import LabelCurve, count_needed, show_labels
from domext_ray.studies.methods.picture import draw_curves

NUMBERS = (100.0, 300.0, 1000.0, 4560.0)
NUM_MODELS = 3
NUM_RESAMPLES = 300
Count = Callable[[Sequence[float], Sequence[Resampled], Sequence[Resampled]], list[Estimate]]


def sample(*values: float, noise: float = 0.002) -> Resampled:
    """A figure of some models on 50 documents, on which all models find the same ones hard."""
    hard = np.random.default_rng(0).normal(0.0, noise, NUM_RESAMPLES)
    return Resampled(np.array(values), np.array(values)[:, None] + hard, 50)


BASE = [sample(value - 0.01, value, value + 0.01) for value in (0.3, 0.5, 0.6, 0.7)]


def test_the_base_needs_what_its_curve_says() -> None:
    needed = count_needed(NUMBERS, BASE, [*BASE, sample(0.39, 0.4, 0.41), sample(0.2, 0.2, 0.2), sample(0.9, 0.9, 0.9)])
    assert [estimate.value for estimate in needed[:4]] == pytest.approx(NUMBERS)
    assert all(estimate.low < estimate.value < estimate.high for estimate in needed[1:3])
    assert (needed[0].low, needed[3].high) == (0.0, math.inf), "a curve says nothing beyond its ends"
    assert 150 < needed[4].value < 170, "a little below the middle of 100 and 300, for the curve flattens"
    for inner in needed[1:3]:
        assert inner.low < inner.value < inner.high and 1.1 < inner.high / inner.low < 2.0
    assert [(estimate.value, estimate.low, estimate.high) for estimate in needed[5:]] == [(0.0,) * 3, (math.inf,) * 3]


def test_an_interval_leaves_out_the_own_number_where_the_table_has_a_difference() -> None:
    generator = np.random.default_rng(1)
    for shift in (0.0, 0.01, 0.02, 0.03, 0.05):
        own = sample(*(0.5 + shift + generator.normal(0.0, 0.01, NUM_MODELS)))
        (needed,) = count_needed(NUMBERS, BASE, [own])
        assert (needed.low > 300 or needed.high < 300) == compare(BASE[1], own).is_apart


def test_a_curve_that_falls_or_stays_is_pooled() -> None:
    falls = [BASE[0], BASE[2], BASE[1], BASE[3]]
    first, second = count_needed(NUMBERS, falls, [sample(0.549, 0.549, 0.549), sample(0.551, 0.551, 0.551)])
    assert first.value <= 301 and second.value >= 999, "both numbers have the mean of 0.55"
    assert first.low < 250 and second.high > 1100
    nothing = [sample(0.0, 0.0, 0.0, noise=0.0)] * 2
    (needed,) = count_needed(NUMBERS, [*nothing, *BASE[2:]], nothing[:1])
    assert needed.value == pytest.approx(100) and needed.high == pytest.approx(300), (
        "no fewer than 100, which learn nothing, too"
    )
    assert count_needed(NUMBERS, [*BASE[:3], sample(0.7)], [BASE[1]])[0].value == pytest.approx(300, rel=0.12)


def test_numbers_beyond_the_curve_are_said_to_be() -> None:
    for found, given, shown in (
        (Estimate(168.4, 131.0, 240.0), 0.0, ("168", "131 to 240")),
        (Estimate(168.4, 131.0, 240.0), 100.0, ("68", "31 to 140")),
        (Estimate(math.inf, 2900.0, math.inf), 0.0, ("more than 4,560", "2,900 to more than 4,560")),
        (Estimate(math.inf, math.inf, math.inf), 1000.0, ("more than 3,560", "more than 3,560")),
        (Estimate(0.0, 0.0, 120.0), 0.0, ("fewer than 100", "fewer than 100 to 120")),
    ):
        assert show_labels(found, NUMBERS, given) == shown


def make_curve() -> LabelCurve:
    better = [sample(*(figure.values + 0.1 - 0.02 * i)) for i, figure in enumerate(BASE)]
    return LabelCurve("set", "f1.micro", "test", NUMBERS, {"base": tuple(BASE), "new": tuple(better)})


def test_what_is_said_of_a_curve(tmp_path: Path) -> None:
    curve = make_curve()
    said = tabulate_curve(curve)
    header, _, *rows = said["table"].splitlines()
    assert header.startswith("| method | labels | the base needs | 95 % interval | mean | 95 % interval | difference")
    assert rows[0].startswith("| base | 100 | – | – | 0.300 ± 0.010 |") and rows[1].startswith("| new | 100 | 160 |")
    assert len(rows) == 8 and "| new | 4,560 | more than 4,560 | " in rows[7]
    assert said["verdict"].startswith("Labels saved, where the interval is above 0: new 60 (42 to 80) with 100; new ")
    assert said["verdict"].endswith(" With 4,560 labels new scores more than the base with any of these numbers.")
    results = json.loads(json.dumps(describe_curve(curve), allow_nan=False))
    assert results["numbers"] == [*NUMBERS] and [score["split"] for score in results["scores"]] == ["test"] * 4
    last = results["base_needs"]["new"][-1]
    assert last["labels"] is None and last["shown"].startswith("more than 4,560 (")
    same = replace(curve, samples={"base": curve.base, "twin": tuple(sample(*figure.values) for figure in BASE)})
    assert tabulate_curve(same)["verdict"] == "No interval is above 0 labels saved."
    draw_curves([curve, curve], Place(tmp_path / "labels.png"))
    picture = imread(tmp_path / "labels.png")
    assert picture.shape[0] > picture.shape[1] and picture.std() > 0.01, "a panel a set, one below the other"


def simulate(
    generator: np.random.Generator, counts: np.ndarray, learn: Callable[[np.ndarray], np.ndarray], gain: float
) -> tuple[list[Resampled], list[Resampled]]:
    """Return the samples of a base and of a method that needs `gain` times fewer labels for the same entity F1.

    Documents, trainings and the labels that a seed takes, the same for both, make a model better or worse.

    Args:
        generator: of all that varies.
        counts: how often each resample has each document, [R, documents].
        learn: numbers of labels -> how well entities are found, in logits.
        gain: the truth.
    """
    num_documents = counts.shape[1]
    hard, gold = generator.normal(0.0, 0.8, num_documents), 1 + generator.poisson(1.0, num_documents)
    taken = generator.normal(0.0, 0.06, (len(NUMBERS), NUM_MODELS)) * (100 / np.array(NUMBERS))[:, None] ** 0.35
    made = []
    for own in (1.0, gain):
        trained = generator.normal(0.0, 0.04, taken.shape)
        skill = learn(own * np.array(NUMBERS))[:, None] + taken + trained
        logits = skill[..., None] + hard + generator.normal(0.0, 0.4, (*skill.shape, num_documents))
        right = generator.binomial(gold, chance := 1 / (1 + np.exp(-logits)))
        wrong = generator.binomial(gold + 1, 0.35 * (1 - chance))
        values = 2 * right.sum(-1) / (right + wrong + gold).sum(-1)
        drawn = 2 * right @ counts.T / ((right + wrong + gold) @ counts.T)
        made.append([Resampled(*pair, num_documents) for pair in zip(values, drawn, strict=True)])
    return made[0], made[1]


def learn_evenly(numbers: np.ndarray) -> np.ndarray:
    return -1.2 + 0.55 * np.log(numbers / 100)


def learn_less_and_less(numbers: np.ndarray) -> np.ndarray:
    return 1.6 - 2.8 * (numbers / 100) ** -0.35


def count_hits(num_draws: int, num_documents: int, count: Count = count_needed) -> tuple[list[bool], list[bool]]:
    """Return whether intervals held the truth: where the base's curve has the figure, and where it is beyond."""
    counts = np.concatenate([*draw_clusters(num_documents, NUM_RESAMPLES, 0)])
    generator, inside, beyond = np.random.default_rng(num_documents), list[bool](), list[bool]()
    for i in range(num_draws):
        gain = math.exp(generator.uniform(math.log(0.7), math.log(2.5)))
        base, own = simulate(generator, counts, (learn_evenly, learn_less_and_less)[i % 2], gain)
        for number, found in zip(NUMBERS, count(NUMBERS, base, own), strict=True):
            truth = gain * number
            holds = found.low <= truth <= found.high
            if truth > NUMBERS[-1] or truth < NUMBERS[0]:
                holds = found.high == math.inf if truth > NUMBERS[-1] else found.low == 0
            (inside if 0 < found.value < math.inf else beyond).append(holds)
    return inside, beyond


def count_without_models(numbers: Sequence[float], *samples: Sequence[Resampled]) -> list[Estimate]:
    """As if models did not differ: only documents are resampled."""
    base, own = (
        [
            Resampled(np.array([model.mean]), model.drawn.mean(axis=0, keepdims=True), model.num_clusters)
            for model in models
        ]
        for models in samples
    )
    return count_needed(numbers, base, own)


def test_an_interval_of_labels_holds_the_truth() -> None:
    found, _ = count_hits(25, 1397)
    sure, _ = count_hits(25, 1397, count_without_models)
    assert np.mean(found) > 0.93 > np.mean(sure), (np.mean(found), np.mean(sure))


@pytest.mark.slow
@pytest.mark.parametrize("num_documents", [100, 500, 940, 1397, 1861, 4797])
def test_an_interval_of_labels_holds_the_truth_in_a_thousand_studies(num_documents: int) -> None:
    """As many as test has: abstracts of NCBI-disease and BC5CDR (and texts of GAD, 508), then texts or sentences of
    NCBI-disease, ChemProt, SciCite and BC5CDR.
    """
    inside, beyond = count_hits(1000, num_documents)
    shares = np.mean(inside), np.mean(beyond)
    print(f"{num_documents} documents: {shares[0]:.3f} of {len(inside)}, {shares[1]:.3f} of {len(beyond)} beyond")
    assert min(shares) >= 0.93, shares
