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
from scipy.stats import ttest_1samp

from domext_ray.errors import RunError
from domext_ray.intervals import over_seeds
from domext_ray.storage import Place
from domext_ray.studies.methods.figures import (
    PROBE,
    TEXT,
    ArmRuns,
    BaseFigures,
    Retained,
    Study,
    estimate,
    find_front,
    make_base_figures,
    make_study,
    route_runs,
    subtract,
)
from domext_ray.studies.methods.findings import format_study, list_measures, tabulate_cost, to_results
from domext_ray.studies.methods.picture import draw_study

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


def make_method(name: str, figures: list[tuple[float, float]], trains: str = "extensions", **changes: Any) -> ArmRuns:
    """A method from (bits, accuracy) of each seed; of general text it keeps half of that accuracy."""
    summaries = {seed: make_summary(*pair, **changes) for seed, pair in enumerate(figures)}
    retained = {seed: accuracy / 2 for seed, (_, accuracy) in enumerate(figures)}
    return ArmRuns(name, trains, 0.17 if trains == "extensions" else None, 1e-3, summaries, retained)


FULL = make_method("full", [(1.70, 0.300), (1.71, 0.302), (1.72, 0.301)], "all")
ADAPTER = make_method("adapter", [(1.80, 0.330), (1.81, 0.331), (1.82, 0.333)])
UNSURE = make_method("unsure", [(1.80, 0.340), (1.81, 0.280), (1.85, 0.320)])


def compare(*methods: ArmRuns) -> Study:
    return make_study(BASE, methods, "Setting.", 90.0)


def test_seeds_give_an_interval_from_the_third_on() -> None:
    three = over_seeds([1.0, 2.0, 6.0])
    assert three.mean == 3.0 and three.sd == pytest.approx(math.sqrt(7))
    half = 4.302653 * math.sqrt(7 / 3)
    assert estimate(three).interval == pytest.approx([3 - half, 3 + half])
    assert estimate(over_seeds([1.0, 1.0])).interval is None and over_seeds([1.0]).sd is None
    found = subtract(three, over_seeds([1.0, 1.0, 1.0]))
    assert found.value == 2.0 and found.p_value == pytest.approx(ttest_1samp([0.0, 1.0, 5.0], 0).pvalue)


def test_gains_and_losses_are_counted_from_the_base() -> None:
    moved = make_method("words", [(1.9, 0.34)] * 3, start=2.0)
    study = compare(moved, ADAPTER)
    moved_lost = study.results[0].lost[PROBE].mean
    assert study.results[0].gained.mean == pytest.approx(0.4) and moved_lost == pytest.approx(1.0)
    text = format_study(study)
    assert "words started elsewhere, with new words or random parts" in text and "adapter differs from words" in text
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
    lines = tabulate_cost(compare(FULL, ADAPTER)).splitlines()
    assert lines[2] == "| the base | 0 | – | – | – | – | – | – | 2.300 | 35.0 |"
    expected = (
        "| full | 2,632,704 | 32.1% (fixed) | 0.001 | 245,760 | 90 ± 0 | 1,234 | 10.5 | 2.300 → 1.710 | 35.0 → 30.1 |"
    )
    assert lines[3] == expected and len({line.count("|") for line in lines}) == 1


def test_verdicts_claim_no_more_than_the_seeds_bear() -> None:
    gained, lost = list_measures(compare(ADAPTER, FULL, UNSURE))
    assert gained["table"].splitlines()[2] == "| full | 0.590 ± 0.010 | 0.565 to 0.615 | – | – | – |"
    assert "| adapter | 0.490 ± 0.010 | 0.465 to 0.515 | -0.100 |" in gained["table"]
    assert gained["verdict"].startswith(
        "adapter, unsure differ from full by more than chance (p < 0.05, corrected for 2"
    )
    assert lost["title"] == "Points lost of the general probe" and lost["front"] == ["adapter", "full"]
    assert lost["verdict"].startswith("adapter differs from full by more than chance")
    p_value = subtract(compare(ADAPTER).results[0].lost[PROBE], compare(FULL).results[0].lost[PROBE]).p_value
    assert p_value is not None and f"| {2 * p_value:.3f} |" in lost["table"], "Holm's correction"


def test_word_bits_have_a_column_and_a_sentence_where_they_were_measured() -> None:
    def measure(method: ArmRuns, *after: float) -> ArmRuns:
        summaries = copy.deepcopy(method.summaries)
        for record, bits in zip(summaries.values(), after, strict=True):
            record["domain"]["word_bits_per_character"] = {"before": 2.5, "after": bits}
        return replace(method, summaries=summaries)

    base, full = replace(BASE, word_bits=2.5), measure(FULL, 2.0, 2.1, 2.2)
    study = make_study(base, (full, measure(ADAPTER, 1.9, 1.9, 1.9)), "Setting.", 90.0)
    assert [result.word_gained.mean for result in study.results if result.word_gained] == pytest.approx([0.4, 0.6])
    words = list_measures(study)[1]
    assert words["title"].endswith("which decide between vocabularies") and "| 0.600 ± 0.000 |" in words["table"]
    assert words["table"].index("| full |") < words["table"].index("| adapter |")
    old = make_study(base, (full, ADAPTER), "Setting.", 90.0)
    assert old.results[1].word_gained is None and "| adapter |" not in list_measures(old)[1]["table"]
    summary = make_summary(1.0, 0.1)
    summary["domain"]["word_bits_per_character"] = {"before": 2.5, "after": None}
    assert make_base_figures(summary) == base


def test_general_text_is_a_second_measure(tmp_path: Path) -> None:
    base = replace(BASE, retained=Retained(0.2, "What was masked."))
    kept = make_method("full_kept", [(1.69, 0.340), (1.68, 0.341), (1.70, 0.342)], "all")
    study = make_study(base, (FULL, kept, ADAPTER), "Setting.", 90.0)
    assert study.results[0].lost[TEXT].values == pytest.approx((5.0, 4.9, 4.95))
    assert study.rival is not None and study.rival.name == "full_kept", "of both the one that gains more"
    text, lost = format_study(study), list_measures(study)[2]
    assert lost["front"] == ["full_kept"] and "| full | 5.0 ± 0.1 |" in lost["table"]
    assert "The base predicts 20.0 % of the general text. What was masked." in text
    results = to_results(study)
    assert results["full_training"] == "full_kept" and results["text_pareto_front"] == ["full_kept"]
    assert results["methods"]["adapter"]["share_of_full_training"]["mean"] == pytest.approx(0.803, abs=1e-3)
    assert results["paired_differences"]["full - adapter"]["text_points_lost"]["mean"] == pytest.approx(1.517, abs=1e-3)
    draw_study(make_study(BASE, (FULL, kept, ADAPTER), "Setting.", 90.0), Place(tmp_path / "one.png"))
    draw_study(study, Place(tmp_path / "two.png"))
    one, two = (imread(tmp_path / f"{name}.png") for name in ("one", "two"))
    assert two.shape[1] == one.shape[1] and two.shape[0] > 1.6 * one.shape[0] and (two[..., 3] == 1).all(), (
        "a panel per measure, opaque on any page"
    )


def test_a_method_of_several_budgets_is_one_line_of_the_picture(tmp_path: Path) -> None:
    sized = [
        replace(make_method(f"af@{budget:g}", [(1.9 - budget, 0.33 - budget / 9)] * 3), budget=budget, family="af")
        for budget in (0.01, 0.05, 0.17)
    ]
    study = replace(compare(FULL, *sized), left_out={"lora@0.01": "no size meets the budget"})
    assert "No size of these methods meets the budget: lora@0.01." in format_study(study)
    draw_study(study, Place(tmp_path / "lines.png"))
    assert imread(tmp_path / "lines.png").std() > 0.01


def test_rates_at_the_edge_are_named() -> None:
    tried = {1e-4: 1.9, 1e-3: 1.8, 3e-3: None}
    inner = replace(FULL, tried={1e-4: 1.9, 1e-3: 1.8, 3e-3: 1.85})
    text = format_study(compare(inner, replace(ADAPTER, tried=tried, learning_rate=1e-4)))
    assert "- The best rate is the lowest or the highest of those tried: adapter 0.0001.\n" in text
    assert "- Training diverged at these rates: adapter 0.003.\n" in text


def test_few_seeds_support_nothing() -> None:
    two = [
        make_method(method.name, [(1.7, 0.3 + i / 20)] * 2, method.trains) for i, method in enumerate((FULL, ADAPTER))
    ]
    study = compare(*two)
    assert {measure["verdict"] for measure in list_measures(study)} == {""}
    assert "Fewer than 3 seeds show nothing about chance." in format_study(study)
    difference = to_results(study)["paired_differences"]["full - adapter"]["points_lost"]
    assert difference["interval"] is None and difference["p_value"] is None


def test_reservations_are_named() -> None:
    apart = make_method("apart", [(0.5, 0.35)] * 3, characters=8000, words=2010, seconds=120.0)
    apart.summaries[0]["corpus"]["unknown"]["domain"]["tokens"] = 0.0312
    study = compare(FULL, ADAPTER, apart)
    text = format_study(study)
    assert "apart are not ranked" in text and "| apart |" not in list_measures(study)[0]["table"]
    assert "the limit was 90 seconds, and these took apart 120" in text
    assert "scored on 2,000 words of it, but apart on 2,010" in text
    assert "Tokens of the domain text that a method's tokenizer does not know: apart 3.12%." in text
    assert [measure["title"] for measure in list_measures(compare(apart))] == ["Points lost of the general probe"]
    assert to_results(study)["pareto_front"] == ["adapter", "full"]
    results = compare(
        FULL, ADAPTER, make_method("bad", [(1.9, 0.32)] * 3), make_method("twin", [(1.9, 0.32)] * 3)
    ).results
    assert [result.name for result in find_front(results)] == ["adapter", "full"]
    assert [result.name for result in find_front(results[2:])] == ["bad", "twin"], "equal ones dominate none"


def test_results_are_json_and_the_picture_is_one(tmp_path: Path) -> None:
    crowd = [make_method(f"method_{i}", [(1.80 + i / 500, 0.33 + i / 900)] * 3) for i in range(9)]
    for name, study in (("many", compare(FULL, UNSURE, *crowd)), ("one", compare(make_method("a", [(2.0, 0.3)])))):
        results = json.loads(json.dumps(to_results(study), allow_nan=False))
        assert results["methods"].keys() == {result.name for result in study.results}
        draw_study(study, Place(tmp_path / f"{name}.png"))
        assert imread(tmp_path / f"{name}.png").std() > 0.01
    assert len(list(tmp_path.iterdir())) == 2, "no temporary file stays"


def test_what_cannot_be_scored_is_one_sentence() -> None:
    summary = make_summary(1.0, 0.1)
    summary["general"]["mlm_accuracy"] = {"before": None, "after": None}
    with pytest.raises(RunError, match="the base cannot be scored"):
        make_base_figures(summary)
    blind = make_method("blind", [(1.0, 0.1), (1.0, 0.1)])
    blind.summaries[1]["domain"]["bits_per_character"]["after"] = None
    with pytest.raises(RunError, match="the run of blind, seed 1, has no bits per character"):
        compare(blind)
