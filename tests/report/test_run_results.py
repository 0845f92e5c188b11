"""What a run reached: one sentence, a table for the terminal, and intervals that cover what they should."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
from report_records import SUMMARY

from domext_ray.report.figures import (
    NO_BREAK,
    Figure,
    describe_result,
    describe_sizes,
    estimate_share,
    find_comparable,
    format_summary,
    list_columns,
    list_figures,
    list_rows,
)


def test_the_table_for_the_terminal() -> None:
    assert format_summary(SUMMARY).splitlines() == [
        "                           before   after         change",
        "held-out domain loss        4.800   3.600         -25.0%",
        "held-out domain accuracy    29.0%   41.8%   +12.8 points",
        "bits per character          1.900   1.710         -10.0%",
        "general-probe accuracy      38.6%   36.7%    -1.9 points",
        "2,632,704 parameters trained, 32.1% of base and extension; 60 steps, 245,760 tokens in 1:30 "
        "(8,990 tokens/s, 0.4% of the time waiting for data)",
    ]


def test_the_result_in_one_sentence() -> None:
    said = "Held-out domain loss fell and domain accuracy rose, while accuracy on general sentences"
    assert describe_result(SUMMARY) == f"{said} is unchanged, ±{NO_BREAK}2.1 points.", "-1.9 points [-4.0, +0.2]"
    for after, direction in ((0.30, "fell"), (0.3859, f"is unchanged, ±{NO_BREAK}2.1 points"), (0.45, "rose")):
        general = {"mlm_accuracy": {"before": 0.3859, "after": after}}
        assert describe_result({**SUMMARY, "general": general}) == f"{said} {direction}."


def test_a_summary_without_figures_says_so() -> None:
    nothing = {"before": None, "after": None}
    summary = {**SUMMARY, "domain": dict.fromkeys(SUMMARY["domain"], nothing), "general": {"mlm_accuracy": nothing}}
    assert describe_result(summary) == "Held-out domain loss was not measured after training."
    assert format_summary(summary).count("–") == 12
    assert all(row[1:] == ("–", "–", "–") for row in list_rows(summary))


def test_word_bits_stand_below_the_bits_where_they_were_measured() -> None:
    bits = {"before": 2.0, "after": 1.5}
    summary = {**SUMMARY, "domain": {**SUMMARY["domain"], "word_bits_per_character": bits}}
    row = ("word bits per character", "2.000", "1.500", "-25.0%")
    assert [cells[0] for cells in list_rows(summary)][2:4] == [
        "bits per character",
        "word bits per character",
    ]
    assert row in list_rows(summary)
    assert "word bits per character     2.000   1.500         -25.0%" in format_summary(summary)
    assert "the word bits decide" in describe_sizes(summary)
    assert "word bits" not in describe_sizes(SUMMARY) + format_summary(SUMMARY)
    running = {**summary["domain"], "word_bits_per_character": {"before": 2.0, "after": None}}
    assert ("word bits per character", "2.000", "–", "–") in list_rows({**summary, "domain": running})


def test_a_router_has_a_column_of_its_own() -> None:
    routed = {"mlm_loss": 3.72, "mlm_accuracy": 0.40, "bits_per_character": 1.729, "word_bits_per_character": None}
    summary = {**SUMMARY, "routed": {"domain": routed, "general": {"mlm_accuracy": 0.3855}}}
    assert format_summary(summary).splitlines()[:5] == [
        "                           before   after         change        with its router",
        "held-out domain loss        4.800   3.600         -25.0%         3.720 (-22.5%)",
        "held-out domain accuracy    29.0%   41.8%   +12.8 points   40.0% (+11.0 points)",
        "bits per character          1.900   1.710         -10.0%          1.729 (-9.0%)",
        "general-probe accuracy      38.6%   36.7%    -1.9 points    38.6% (-0.1 points)",
    ]
    assert [len(row) for row in list_rows(summary)] == [5] * 4
    assert list_rows(summary)[3][4] == f"38.6% (unchanged, ±{NO_BREAK}2.1 points)"


def test_no_change_is_a_negative_zero() -> None:
    for form, before, after, said in ((".3f", 4.0, 3.9999, "+0.0%"), (".1%", 0.4, 0.39999, "+0.0 points")):
        assert Figure("", "", form, before, after).show_change(after) == said


def test_the_base_stands_before_a_model_that_begins_otherwise() -> None:
    """With new words its loss of tokens says nothing about the others, which are counted from the untrained words."""
    of_base = {"domain": {"mlm_loss": None, "bits_per_character": 2.0}, "general": {"mlm_accuracy": 0.45}}
    summary = {**SUMMARY, "of_base": {**of_base, "general_words": 3000}}
    assert [tuple(cell.replace(NO_BREAK, "~") for cell in row) for row in list_rows(summary)] == [
        ("held-out domain loss", "–", "4.800", "3.600", "-25.0%"),
        ("held-out domain accuracy", "–", "29.0% [27.8,~30.3]", "41.8% [40.4,~43.2]", "+12.8 points [+10.9,~+14.7]"),
        ("bits per character", "2.000", "1.900", "1.710", "-14.5%"),
        (
            "general-probe accuracy",
            "45.0% [43.2,~46.8]",
            "38.6% [37.1,~40.1]",
            "36.7% [35.2,~38.2]",
            "-8.3 points [-10.6,~-6.0]",
        ),
    ]
    assert list_columns(summary) == ("", "before", "untrained", "after", "change")
    lines = format_summary(summary).splitlines()
    assert lines[0].split() == ["before", "untrained", "after", "change"]
    assert lines[3].split() == ["bits", "per", "character", "2.000", "1.900", "1.710", "-14.5%"]
    assert list_figures(summary)["bits"].show_pair(with_change=True) == "2.000 → 1.710 (-14.5%)"
    said = describe_sizes(summary)
    assert "Before is the base itself" in said and "counted from the untrained model" in said
    assert "the 3,000 general words that are one token for it" in said
    assert "untrained" not in describe_sizes(SUMMARY) + "".join(list_columns(SUMMARY))
    assert describe_result(summary) == (
        "Bits per character fell from 2.000 to 1.710 (lower is better), while accuracy on general sentences fell."
    )


def test_the_result_of_new_words_is_told_by_what_compares_vocabularies() -> None:
    """Whatever the loss of tokens did: those of two vocabularies are others."""
    words = {"before": 1.6, "after": 1.539}
    domain = {**SUMMARY["domain"], "word_bits_per_character": words}
    of_base = {"domain": {"word_bits_per_character": 1.490}, "general": {}, "general_words": 3000}
    summary = {**SUMMARY, "domain": domain, "of_base": of_base}
    said = "Word bits per character rose from 1.490 to 1.539 (lower is better)"
    assert describe_result(summary).startswith(said), "the loss fell from 4.8 to 3.6"
    figure = find_comparable(summary)
    assert (figure.name, figure.reference, figure.after) == ("word bits per character", 1.490, 1.539)
    words["after"] = 1.4
    assert describe_result(summary).startswith("Word bits per character fell from 1.490 to 1.400")
    assert find_comparable(SUMMARY).name == "held-out domain loss"


def test_accuracies_have_intervals_and_losses_none() -> None:
    assert [tuple(cell.replace(NO_BREAK, "~") for cell in row) for row in list_rows(SUMMARY)] == [
        ("held-out domain loss", "4.800", "3.600", "-25.0%"),
        (
            "held-out domain accuracy",
            "29.0% [27.8,~30.3]",
            "41.8% [40.4,~43.2]",
            "+12.8 points [+10.9,~+14.7]",
        ),
        ("bits per character", "1.900", "1.710", "-10.0%"),
        (
            "general-probe accuracy",
            "38.6% [37.1,~40.1]",
            "36.7% [35.2,~38.2]",
            "unchanged, ±~2.1 points",
        ),
    ]
    assert describe_sizes(SUMMARY).startswith(
        "Measured on 5,000 masked tokens of held-out text and 3,940 words of general sentences, the same ones"
    )
    without: dict[str, Any] = copy.deepcopy(SUMMARY)
    without["evaluation"]["general_words"] = 0
    assert list_rows(without)[3] == ("general-probe accuracy", "38.6%", "36.7%", "-1.9 points")
    assert "general" not in describe_sizes(without)


def test_an_interval_covers_the_truth_in_19_of_20_draws() -> None:
    for share, number in [(0.3, 3940), (0.05, 400), (0.99, 3000)]:
        drawn = np.random.default_rng(1).binomial(number, share, size=4000) / number
        found = [estimate_share(one, number) for one in drawn]
        assert np.mean([one.low <= share <= one.high for one in found]) == pytest.approx(0.95, abs=0.02)
        assert estimate_share(0.0, number).low == 0.0 and estimate_share(1.0, number).high == pytest.approx(1.0)


def test_the_interval_of_a_change_covers_the_truth() -> None:
    generator = np.random.default_rng(2)
    before, after = (generator.binomial(1000, share, size=4000) / 1000 for share in (0.35, 0.31))
    changes = [Figure("", "", ".1%", *pair, 1000).estimate_change(pair[1]) for pair in zip(before, after, strict=True)]
    assert np.mean([change.low <= -0.04 <= change.high for change in changes]) == pytest.approx(0.95, abs=0.015)
