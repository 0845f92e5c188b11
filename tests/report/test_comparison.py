"""Runs side by side: a table that compares what compares, and a picture."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from job_calls import call_job
from matplotlib.image import imread
from report_records import SUMMARY, make_records, make_run

from domext_ray.config.jobs import ForgettingConfig
from domext_ray.errors import ConfigError, RunError
from domext_ray.report.comparison import GENERAL, choose_runs, draw_comparison, format_comparison, read_run
from domext_ray.report.plots import check_picture, new_picture
from domext_ray.study.tradeoff import (
    BaseFigures,
    MethodRuns,
    Spread,
    Study,
    describe_findings,
    draw_study,
    find_front,
    format_table,
    make_base_figures,
    make_study,
    to_results,
)


def make_compared(folder: Path, name: str, num_characters: int = 9000) -> Path:
    records = [{**each, "time/seconds": 1.5 * each["step"]} for each in make_records()]
    summary = {**copy.deepcopy(SUMMARY), "evaluation": {"domain_characters": num_characters}}
    return make_run(folder / name, records, summary)


def test_the_job_prints_a_table_and_draws_a_picture(tmp_path: Path) -> None:
    runs = [make_compared(tmp_path, name) for name in ("adapter", "words")]
    summary = json.loads((runs[0] / "summary.json").read_text())
    summary["domain"]["word_bits_per_character"] = {"before": 2.0, "after": 1.5}  # an earlier version wrote the other
    (runs[0] / "summary.json").write_text(json.dumps(summary))
    code, out, err = call_job(
        "compare_runs", "--runs", ",".join(map(str, runs)), "--output", str(tmp_path / "both.png")
    )
    assert code == 0, err
    assert "| adapter | 2,632,704 | 245,760 | 90 | 1.900 → 1.710 | 2.000 → 1.500 | 38.6% → 36.7% |" in out
    assert "| words | 2,632,704 | 245,760 | 90 | 1.900 → 1.710 | – → – | 38.6% → 36.7% |" in out
    assert "the word bits per character decide" in out and "do not compare" not in out
    assert imread(tmp_path / "both.png").std() > 0.01


def test_only_a_picture_of_our_own_is_drawn_over(tmp_path: Path) -> None:
    with new_picture(tmp_path / "own.png", (2, 2)) as figure:
        figure.subplots()
    check_picture(tmp_path / "own.png")
    check_picture(tmp_path / "new.png")
    figure.savefig(tmp_path / "mine.png")
    (tmp_path / "thesis.tex").write_text("years of work")
    for name, reason in (
        ("mine.png", "is no picture that this project drew"),
        ("thesis.tex", "is no picture that this project drew"),
        ("", "is a folder"),
        ("absent/new.png", "absent is no folder"),
    ):
        with pytest.raises(RunError, match=reason):
            check_picture(tmp_path / name)
    code, out, err = call_job(
        "compare_runs", "--runs", str(make_compared(tmp_path, "a")), "--output", str(tmp_path / "thesis.tex")
    )
    assert code == 2 and "thesis.tex is no picture" in err
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_a_run_given_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(ConfigError, match=r"it must be different runs, and .*/a' is given twice"):
        choose_runs(f"{tmp_path}/a,{tmp_path}/b, {tmp_path}/./a/")
    with pytest.raises(ConfigError, match="--models is .*; it must be different models, each one once"):
        ForgettingConfig(models="one=runs/af,two=runs/af/", corpus="x")


def test_other_texts_do_not_compare(tmp_path: Path) -> None:
    table = format_comparison([read_run(make_compared(tmp_path, *each)) for each in (("a", 9000), ("b", 8990))])
    assert "Bits a character do not compare" in table and "a 9,000, b 8,990" in table


def test_evaluations_stand_at_their_seconds(tmp_path: Path) -> None:
    run = read_run(make_compared(tmp_path, "a"))
    assert [each["seconds"] for each in run.evaluations] == [0.0, 30.0, 60.0, 90.0]


def test_a_run_without_general_words_is_drawn(tmp_path: Path) -> None:
    run = read_run(make_compared(tmp_path, "a"))
    blind = replace(run, evaluations=tuple({**each, GENERAL: None} for each in run.evaluations))
    draw_comparison([run, blind], tmp_path / "both.png")
    assert imread(tmp_path / "both.png").std() > 0.01


def test_a_folder_without_a_run_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="is missing"):
        read_run(tmp_path)
    code, out, err = call_job("compare_runs", "--runs", str(tmp_path))
    assert code == 2 and len(err.strip().splitlines()) == 1


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
    """A method from (bits, accuracy) of each seed."""
    summaries = {seed: make_summary(*each, **changes) for seed, each in enumerate(figures)}
    return MethodRuns(name, trains, 0.17 if trains == "extensions" else None, 1e-3, summaries)


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
    assert study.results[0].gained.mean == pytest.approx(0.4) and study.results[0].lost.mean == pytest.approx(1.0)
    findings = " ".join(describe_findings(study))
    assert "words starts elsewhere" in findings and "not tested here" in findings
    assert make_base_figures(make_summary(1.0, 0.1)) == BASE


def test_the_table_has_a_line_a_method() -> None:
    lines = format_table(compare(FULL, ADAPTER)).splitlines()
    assert lines[2] == "| the base | 0 | – | – | – | 2.300 | – | 35.0 | – |"
    assert lines[3].startswith("| full | 2,632,704 | 32.1% (fixed) | 245,760 | 90 ± 0 | 2.300 → 1.710 ± 0.010 |")
    assert lines[4].endswith("| 0.490 ± 0.010 | 35.0 → 33.1 ± 0.2 | 1.9 ± 0.2 |")
    assert len({line.count("|") for line in lines}) == 1


def test_findings_claim_no_more_than_the_spread_bears() -> None:
    findings = describe_findings(compare(FULL, ADAPTER, UNSURE))
    assert findings[0].startswith("full gains most: 0.590 ± 0.010 bits") and "is beyond the spread" in findings[0]
    assert findings[1].startswith("adapter forgets least: 1.9 ± 0.2 points") and "is within the spread" in findings[1]
    assert findings[2].startswith("On the Pareto front, by means: adapter, full.")
    assert "is supported for 1 of 2 extensions (adapter)" in findings[3]
    assert any("adapter loses 3.0 points less than full" in each and "0.100 bits" in each for each in findings)
    worse = make_method("worse", [(1.8, 0.20), (1.8, 0.21), (1.8, 0.20)])
    assert any("the opposite for worse" in each for each in describe_findings(compare(FULL, worse)))


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
