"""Gain and loss over the scale of what a run added: the mark, the sentence, the table and the picture."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.image import imread

from domext_ray.storage import Place
from domext_ray.studies.forgetting.report import draw_curves, format_curves
from domext_ray.studies.forgetting.scales import ScaleCurve

CURVE = ScaleCurve((0.0, 0.5, 0.75, 1.0), (3.0, 2.4, 2.2, 2.0), (0.40, 0.40, 0.394, 0.38))
SENTENCE = (
    "At scale 0.62, 0.3 points of general accuracy are lost and 0.696 bits per character gained (70% of the gain)"
)


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
    curve = ScaleCurve(CURVE.scales, CURVE.bits, tuple(-each for each in lost))
    assert curve.marked == pytest.approx(marked)
    assert curve.find(curve.marked)[1] <= 0.003 + 1e-12


def test_the_table_and_the_picture_say_it(tmp_path: Path) -> None:
    assert CURVE.describe() == SENTENCE
    text = format_curves({"af": CURVE, "lora": CURVE})
    assert text.count(SENTENCE) == 2 and "### lora\n" in text
    assert "| 0.75 | 2.200 | 0.800 | 39.4 | 0.6 |\n" in text
    draw_curves({"af": CURVE}, Place(tmp_path / "one.png"))
    draw_curves({"af": CURVE, "lora": CURVE}, Place(tmp_path / "two.png"))
    assert imread(tmp_path / "two.png").shape[1] > imread(tmp_path / "one.png").shape[1]
