"""Gain and loss over the scale of what a run added: the mark, the sentence, the table and the picture."""

from __future__ import annotations

import re
from typing import Any

import pytest
from report_records import SUMMARY

from domext_ray.report.figures import format_summary, measure_run
from domext_ray.report.page import format_pictures
from domext_ray.report.plots import picture_scales
from domext_ray.report.scales import ScaleCurve, measure_scales, read_scales

BEFORE = {"eval/domain_mlm_loss": 5.0, "eval/domain_bits_per_character": 3.0, "eval/general_mlm_accuracy": 0.40}
AFTER = {
    **{"eval/domain_mlm_loss": 4.0, "eval/domain_bits_per_character": 2.0, "eval/general_mlm_accuracy": 0.38},
    **{"eval/scale_0.5_domain_bits_per_character": 2.4, "eval/scale_0.5_general_mlm_accuracy": 0.40},
    **{"eval/scale_0.75_domain_bits_per_character": 2.2, "eval/scale_0.75_general_mlm_accuracy": 0.394},
}
SCALES = [
    {"scale": 0.0, "bits_per_character": 3.0, "mlm_accuracy": 0.40},
    {"scale": 0.5, "bits_per_character": 2.4, "mlm_accuracy": 0.40},
    {"scale": 0.75, "bits_per_character": 2.2, "mlm_accuracy": 0.394},
    {"scale": 1.0, "bits_per_character": 2.0, "mlm_accuracy": 0.38},
]
SENTENCE = (
    "At scale 0.62, 0.3 points of general accuracy are lost and 0.696 bits per character gained (70% of the gain)"
)


def test_a_run_is_measured_from_its_start_to_its_end() -> None:
    assert measure_scales(BEFORE, AFTER) == SCALES
    assert measure_run([{"step": 0, **BEFORE}, {"step": 9, **AFTER}])["scales"] == SCALES
    own = {"eval/scale_0_domain_bits_per_character": 3.1, "eval/scale_0_general_mlm_accuracy": 0.41}
    found = measure_scales(BEFORE, AFTER | own)
    assert found[0] == {"scale": 0.0, "bits_per_character": 3.1, "mlm_accuracy": 0.41}, "it did not begin at the base"
    assert "scales" not in measure_run([{"step": 0, **BEFORE}, {"step": 9, **BEFORE}])
    assert read_scales({}) is None
    without = {**AFTER, "eval/general_mlm_accuracy": None}
    assert read_scales({"scales": measure_scales(BEFORE, without)}) is None, "nothing is asked of general words"


@pytest.mark.parametrize(
    ("lost", "marked"),
    [
        ((0.0, 0.0, 0.006, 0.02), 0.62),
        ((0.0, 0.001, 0.002, 0.003), 1.0),
        ((0.0, -0.01, -0.02, -0.03), 1.0),
        ((0.0, 0.03, 0.04, 0.05), 0.05),
        ((0.0, 0.02, 0.001, 0.005), 0.87),  # the largest, though a smaller one loses more
    ],
)
def test_the_mark_is_the_largest_scale_that_loses_little(lost: tuple[float, ...], marked: float) -> None:
    curve = ScaleCurve((0.0, 0.5, 0.75, 1.0), (0.0, 0.6, 0.8, 1.0), lost)
    assert curve.marked == pytest.approx(marked)
    assert curve.find(curve.marked)[1] <= 0.003 + 1e-12


def test_the_table_and_the_page_say_it() -> None:
    summary: dict[str, Any] = {**SUMMARY, "scales": SCALES}
    curve = read_scales(summary)
    assert curve is not None and curve.describe() == SENTENCE
    assert format_summary(summary).splitlines()[-2] == SENTENCE
    assert len(format_summary(SUMMARY).splitlines()) == len(format_summary(summary).splitlines()) - 1
    kept = {**SUMMARY, "scales": [{**each, "mlm_accuracy": 0.40} for each in SCALES]}
    assert format_summary(kept) == format_summary(SUMMARY), "where nothing is lost there is nothing to choose"
    page = format_pictures([picture_scales(curve)])
    assert SENTENCE in page and "no more than 0.3 points are lost" in page
    assert all(f">{text}</text>" in page for text in ("0.62", "bits gained", "points lost", "scale of what was added"))
    assert len(re.findall("<svg", page)) == 1
