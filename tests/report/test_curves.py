"""Curves from a metrics file."""

from __future__ import annotations

import math

import numpy as np

from domext_ray.report.plots import read_curve, smooth


def test_a_curve_leaves_out_what_is_not_finite() -> None:
    records = [
        {"step": 0, "eval/domain_mlm_loss": 4.0},
        {"step": 1, "train/mlm_loss": 4.5},
        {"step": 2, "train/mlm_loss": None},
        {"step": 3, "train/mlm_loss": math.inf},
        {"step": 4, "train/mlm_loss": 4.0},
    ]
    steps, values = read_curve(records, "train/mlm_loss")
    assert steps.tolist() == [1.0, 4.0]
    assert values.tolist() == [4.5, 4.0]
    assert len(read_curve(records, "train/lr")[0]) == 0


def test_smoothing_is_a_centred_mean_of_what_is_there() -> None:
    values = np.array([5.0, 1.0, 3.0, 3.0, 8.0, 4.0, 2.0])
    expected = [np.mean(values[max(0, i - 2) : i + 3]) for i in range(len(values))]
    np.testing.assert_allclose(smooth(values), expected)
    np.testing.assert_allclose(smooth(np.full(1000, 2.5)), 2.5)
    assert len(smooth(np.array([1.0, 2.0]))) == 2
    noise = np.random.default_rng(0).normal(size=4000)
    assert smooth(noise).std() < 0.2 * noise.std()
