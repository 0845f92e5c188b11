"""A study's figures: gains and losses over seeds, what is said of them, and the picture."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread
from report_records import SUMMARY

from domext_ray.errors import RunError
from domext_ray.study.figures import (
    PROBE,
    TEXT,
    BaseFigures,
    MethodRuns,
    Retained,
    Spread,
    Study,
    find_front,
    make_base_figures,
    make_study,
    route_runs,
)
from domext_ray.study.findings import describe_findings, format_table, to_results
from domext_ray.study.picture import draw_study

BASE = BaseFigures(bits=2.3, accuracy=0.35, num_characters=9000, num_words=2000)


def make_summary(bits: float, accuracy: float, **changes: Any) -> dict[str, Any]:
    summary: dict[str, Any] = copy.deepcopy(SUMMARY)
    summary["domain"]["bits_per_character"] = {"before": changes.get("start", 2.3), "after": bits}
    summary["general"]["mlm_accuracy"] = {"before": 0.35, "after": accuracy}
    summary["evaluation"] = {
        "domain_characters": changes.get("characters", 9000),
        "general_words": changes.get("words", 2000),
    }
    summary["train"]["wall_seconds"] = changes.get("seconds", 90.0)
    summary["method"] = {"name": "x"}
    return summary


def make_method(
    name: str, figures: list[tuple[float, float]], trains: str = "extensions", **changes: Any
) -> MethodRuns:
    """A method from (bits, accuracy) of each seed; of general text it keeps half of that accuracy."""
    summaries = {seed: make_summary(*each, **changes) for seed, each in enumerate(figures)}
    retained = {seed: accuracy / 2 for seed, (_, accuracy) in enumerate(figures)}
    return MethodRuns(name, trains, 0.17 if trains == "extensions" else None, 1e-3, summaries, retained)


FULL = make_method("full", [(1.70, 0.300), (1.71, 0.302), (1.72, 0.301)], "all")
ADAPTER = make_method("adapter", [(1.80, 0.330), (1.81, 0.331), (1.82, 0.333)])
UNSURE = make_method("unsure", [(1.80, 0.340), (1.81, 0.280), (1.85, 0.320)])


def compare(*methods: MethodRuns) -> Study:
    return make_study(BASE, methods, "Setting.", 90.0)


def test_a_spread_knows_mean_deviation_and_interval() -> None:
    spread = Spread((1.0, 2.0, 6.0))
    assert spread.mean == 3.0 and spread.sd == pytest.approx(math.sqrt(7))
    assert spread.interval == pytest.approx((3 - 4.303 * math.sqrt(7 / 3), 3 + 4.303 * math.sqrt(7 / 3)))
    assert Spread((1.0,)).sd is None and Spread((1.0, 1.0)).interval is None
    assert (spread - Spread((1.0, 1.0, 1.0))).values == (0.0, 1.0, 5.0)
    assert Spread((0.5,)).show(".1f") == "0.5"


def test_gains_and_losses_are_counted_from_the_base() -> None:
    moved = make_method("words", [(1.9, 0.34)] * 3, start=2.0)
    study = compare(moved, ADAPTER)
    moved_lost = study.results[0].lost[PROBE].mean
    assert study.results[0].gained.mean == pytest.approx(0.4) and moved_lost == pytest.approx(1.0)
    findings = " ".join(describe_findings(study))
    assert "words starts elsewhere" in findings and "not tested here" in findings
    assert make_base_figures(make_summary(1.0, 0.1)) == BASE


def test_runs_with_routers_count_a_second_time() -> None:
    adapter = make_method("adapter", [(1.80, 0.330), (1.81, 0.331), (1.82, 0.333)])
    assert not adapter.has_router
    for bits, summary in zip((1.83, 1.84, 1.85), adapter.summaries.values(), strict=True):
        routed = {"bits_per_character": bits, "word_bits_per_character": None}
        summary["routed"] = {"domain": routed, "general": {"mlm_accuracy": 0.349}}
    twin = route_runs(adapter, dict.fromkeys(range(3), 0.174))
    assert adapter.has_router
    base = replace(BASE, retained=Retained(0.175, "Masked."))
    full, plain, routed = make_study(base, [FULL, adapter, twin], "Setting.", 90.0).results
    assert (plain.name, routed.name) == ("adapter", "adapter + router")
    assert routed.gained.values == pytest.approx((0.47, 0.46, 0.45)) and plain.gained.mean == pytest.approx(0.49)
    assert routed.lost[PROBE].mean == pytest.approx(0.1) and routed.lost[TEXT].mean == pytest.approx(0.1)
    assert plain.lost[PROBE].mean == pytest.approx(1.8667, abs=1e-3) and full.lost[TEXT].mean > 2


def test_the_table_has_a_line_a_method() -> None:
    lines = format_table(compare(FULL, ADAPTER)).splitlines()
    assert lines[2] == "| the base | 0 | – | – | – | – | 2.300 | – | 35.0 | – |"
    assert lines[3].startswith(
        "| full | 2,632,704 | 32.1% (fixed) | 0.001 | 245,760 | 90 ± 0 | 2.300 → 1.710 ± 0.010 |"
    )
    assert lines[4].endswith("| 0.490 ± 0.010 | 35.0 → 33.1 ± 0.2 | 1.9 ± 0.2 |")
    assert len({line.count("|") for line in lines}) == 1


def test_findings_claim_no_more_than_the_spread_bears() -> None:
    findings = describe_findings(compare(FULL, ADAPTER, UNSURE))
    assert findings[0].startswith("full gains most: 0.590 ± 0.010 bits") and "is beyond the spread" in findings[0]
    assert findings[1].startswith("adapter forgets least of the general probe: 1.9 ± 0.2 points")
    assert "is within the spread" in findings[1]
    assert findings[2].startswith("On the Pareto front of the general probe, by means: adapter, full.")
    assert "(full) is supported for 1 of 2 extensions (adapter)" in findings[3]
    assert findings[4].startswith("Supported means that the paired differences over 3 seeds exclude 0; ")
    assert findings[5] == (
        "adapter gains 83% (82% to 84%) of the bits that full gains, and loses 1.9 (1.5 to 2.2) points of the general "
        "probe, 3.0 (2.7 to 3.4) less than full."
    )
    worse = make_method("worse", [(1.8, 0.20), (1.8, 0.21), (1.8, 0.20)])
    assert any("the opposite for worse" in each for each in describe_findings(compare(FULL, worse)))


def test_word_bits_have_a_column_and_a_sentence_where_they_were_measured() -> None:
    def measure(method: MethodRuns, *after: float) -> MethodRuns:
        summaries = copy.deepcopy(method.summaries)
        for each, bits in zip(summaries.values(), after, strict=True):
            each["domain"]["word_bits_per_character"] = {"before": 2.5, "after": bits}
        return replace(method, summaries=summaries)

    base, full = replace(BASE, word_bits=2.5), measure(FULL, 2.0, 2.1, 2.2)
    study = make_study(base, (full, measure(ADAPTER, 1.9, 1.9, 1.9)), "Setting.", 90.0)
    assert [each.word_gained.mean for each in study.results if each.word_gained] == pytest.approx([0.4, 0.6])
    header, _, *rows = format_table(study).splitlines()
    assert "| gained | word bits gained |" in header and "| 0.600 ± 0.000 |" in rows[2]
    assert "adapter gains most by word bits, which decide between vocabularies: 0.600" in describe_findings(study)[1]
    assert describe_findings(study)[0].startswith("full gains most: 0.590"), "the other measure says otherwise"
    old = make_study(base, (full, ADAPTER), "Setting.", 90.0)
    assert old.results[1].word_gained is None and len({row.count("|") for row in format_table(old).splitlines()}) == 1
    summary = make_summary(1.0, 0.1)
    summary["domain"]["word_bits_per_character"] = {"before": 2.5, "after": None}
    assert make_base_figures(summary) == base


def test_general_text_is_a_second_measure(tmp_path: Path) -> None:
    base = replace(BASE, retained=Retained(0.2, "What was masked."))
    kept = make_method("full_kept", [(1.69, 0.340), (1.68, 0.341), (1.70, 0.342)], "all")
    study = make_study(base, (FULL, kept, ADAPTER), "Setting.", 90.0)
    assert study.results[0].lost[TEXT].values == pytest.approx((5.0, 4.9, 4.95))
    assert study.rival is not None and study.rival.name == "full_kept", "of both the one that gains more"
    table = format_table(study).splitlines()
    assert table[0].endswith("| points lost | general text: points lost |") and table[3].endswith("| 5.0 ± 0.1 |")
    findings = describe_findings(study)
    assert any(each.startswith("full_kept forgets least of the general text: 2.9 ± 0.1 points") for each in findings)
    assert any(each.startswith("On the Pareto front of the general text, by means: full_kept.") for each in findings)
    against = next(each for each in findings if each.startswith("adapter gains 80%"))
    assert "points of the general probe" in against and "3.4 (3.2 to 3.6) points of the general text, 0.5" in against
    assert against.endswith("more than full_kept.")
    assert "Of the general text the base predicts 20.0%. What was masked." in findings
    results = to_results(study)
    assert results["full_training"] == "full_kept" and results["text_pareto_front"] == ["full_kept"]
    assert results["methods"]["adapter"]["share_of_full_training"]["mean"] == pytest.approx(0.803, abs=1e-3)
    assert results["paired_differences"]["full - adapter"]["text_points_lost"]["mean"] == pytest.approx(1.517, abs=1e-3)
    draw_study(make_study(BASE, (FULL, kept, ADAPTER), "Setting.", 90.0), tmp_path / "one.png")
    draw_study(study, tmp_path / "two.png")
    one, two = (imread(tmp_path / f"{name}.png") for name in ("one", "two"))
    assert two.shape[1] > 1.6 * one.shape[1] and (two[..., 3] == 1).all(), "a panel per measure, opaque on any page"


def test_a_method_of_several_budgets_is_one_line_of_the_picture(tmp_path: Path) -> None:
    sized = [
        replace(make_method(f"af@{budget:g}", [(1.9 - budget, 0.33 - budget / 9)] * 3), budget=budget, family="af")
        for budget in (0.01, 0.05, 0.17)
    ]
    study = replace(compare(FULL, *sized), left_out={"lora@0.01": "no size meets the budget"})
    assert "No size of these methods meets the budget: lora@0.01." in describe_findings(study)
    draw_study(study, tmp_path / "lines.png")
    assert imread(tmp_path / "lines.png").std() > 0.01


def test_rates_at_the_edge_are_named() -> None:
    tried = {1e-4: 1.9, 1e-3: 1.8, 3e-3: None}
    inner = replace(FULL, tried={1e-4: 1.9, 1e-3: 1.8, 3e-3: 1.85})
    findings = describe_findings(compare(inner, replace(ADAPTER, tried=tried, learning_rate=1e-4)))
    assert "The best rate is the lowest or the highest that was tried: adapter 0.0001." in findings
    assert "Training diverged at these rates: adapter 0.003." in findings


def test_few_seeds_support_nothing() -> None:
    two = [make_method(each.name, [(1.7, 0.3 + i / 20)] * 2, each.trains) for i, each in enumerate((FULL, ADAPTER))]
    findings = " ".join(describe_findings(compare(*two)))
    assert "fewer than 3 seeds this cannot be told; here 1 of 1 lost less (adapter)" in findings
    assert "supported" not in findings and "chance is not ruled out" in findings


def test_reservations_are_named() -> None:
    apart = make_method("apart", [(0.5, 0.35)] * 3, characters=8000, words=2010, seconds=120.0)
    study = compare(FULL, ADAPTER, apart)
    findings = " ".join(describe_findings(study))
    assert "Gains of apart are therefore not ranked" in findings and "full gains most" in findings
    assert "90 seconds were wanted and these took (apart 120)" in findings
    assert "2,000 for the base, but apart 2,010" in findings
    assert to_results(study)["pareto_front"] == ["adapter", "full"]


def test_a_dominated_method_is_not_on_the_front() -> None:
    study = compare(FULL, ADAPTER, make_method("bad", [(1.9, 0.32)] * 3), make_method("twin", [(1.9, 0.32)] * 3))
    assert [each.name for each in find_front(study.results)] == ["adapter", "full"]
    assert [each.name for each in find_front(study.results[2:])] == ["bad", "twin"], "equal ones dominate none"


def test_results_are_json_and_the_picture_is_one(tmp_path: Path) -> None:
    crowd = [make_method(f"method_{i}", [(1.80 + i / 500, 0.33 + i / 900)] * 3) for i in range(9)]
    for name, study in (("many", compare(FULL, UNSURE, *crowd)), ("one", compare(make_method("a", [(2.0, 0.3)])))):
        results = json.loads(json.dumps(to_results(study), allow_nan=False))
        assert results["methods"].keys() == {each.name for each in study.results}
        draw_study(study, tmp_path / f"{name}.png")
        assert imread(tmp_path / f"{name}.png").std() > 0.01
    assert len(list(tmp_path.iterdir())) == 2, "no temporary file stays"


def test_a_base_that_cannot_be_scored_is_one_sentence() -> None:
    summary = make_summary(1.0, 0.1)
    summary["general"]["mlm_accuracy"] = {"before": None, "after": None}
    with pytest.raises(RunError, match="the base cannot be scored"):
        make_base_figures(summary)


def test_a_method_that_cannot_be_scored_is_one_sentence() -> None:
    blind = make_method("blind", [(1.0, 0.1), (1.0, 0.1)])
    blind.summaries[1]["domain"]["bits_per_character"]["after"] = None
    with pytest.raises(RunError, match="the run of blind, seed 1, has no bits per character"):
        compare(blind)
