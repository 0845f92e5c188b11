"""Runs side by side: a table that compares what compares, and a picture."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path

import pytest
from job_calls import call_job
from matplotlib.image import imread
from report_records import SUMMARY, make_records, make_run

from domext_ray.config.jobs import ForgettingConfig
from domext_ray.errors import ConfigError, RunError
from domext_ray.report.compare import GENERAL, choose_runs, draw_comparison, list_points, read_run, tabulate_runs
from domext_ray.report.plots import check_picture, new_picture
from domext_ray.storage import Place


def make_compared(folder: Path, name: str, num_characters: int = 9000) -> Path:
    records = [{**record, "time/seconds": 1.5 * record["step"]} for record in make_records()]
    summary = {**copy.deepcopy(SUMMARY), "evaluation": {"domain_characters": num_characters}}
    return make_run(folder / name, records, summary)


def test_the_job_prints_a_table_and_draws_a_picture(tmp_path: Path) -> None:
    runs = [make_compared(tmp_path, name) for name in ("adapter", "words")]
    summary = json.loads((runs[0] / "summary.json").read_text())
    summary["domain"]["word_bits_per_character"] = {"before": 2.0, "after": 1.5}
    (runs[0] / "summary.json").write_text(json.dumps(summary))
    code, out, err = call_job(
        "compare_runs", "--runs", ",".join(map(str, runs)), "--output", str(tmp_path / "both.png")
    )
    assert code == 0, err
    assert "| adapter | 2,632,704 | 245,760 | 90 | 1.900 → 1.710 | 2.000 → 1.500 | 38.6% → 36.7% |" in out
    assert "| words | 2,632,704 | 245,760 | 90 | 1.900 → 1.710 | – | 38.6% → 36.7% |" in out
    assert "the word bits per character decide" in out and "do not compare" not in out
    assert imread(tmp_path / "both.png").std() > 0.01


def test_only_a_picture_of_our_own_is_drawn_over(tmp_path: Path) -> None:
    with new_picture(Place(tmp_path / "own.png"), (2, 2)) as figure:
        figure.subplots()
    check_picture(Place(tmp_path / "own.png"))
    check_picture(Place(tmp_path / "new.png"))
    figure.savefig(tmp_path / "mine.png")
    (tmp_path / "thesis.tex").write_text("years of work")
    for name, reason in (
        ("mine.png", "is no picture that this project drew"),
        ("thesis.tex", "is no picture that this project drew"),
        ("", "is a folder"),
        ("absent/new.png", "absent is no folder"),
    ):
        with pytest.raises(RunError, match=reason):
            check_picture(Place(tmp_path / name))
    code, out, err = call_job(
        "compare_runs", "--runs", str(make_compared(tmp_path, "a")), "--output", str(tmp_path / "thesis.tex")
    )
    assert code == 2 and "thesis.tex is no picture" in err
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_a_run_given_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(ConfigError, match=r"--runs must be different runs, and .*/a' is given twice"):
        choose_runs([f"{tmp_path}/a", f"{tmp_path}/b", f"{tmp_path}/./a/"])
    (tmp_path / "a" / "sweep.html").touch()
    with pytest.raises(ConfigError, match=r"--runs names '.*/a', a sweep; its page, sweep.html, compares its trials"):
        choose_runs([f"{tmp_path}/a"])
    with pytest.raises(ConfigError, match="--models is .*; it must be different ones"):
        ForgettingConfig(models=("one=runs/af", "two=runs/af/"), corpus="x")


def test_other_texts_do_not_compare(tmp_path: Path) -> None:
    table = tabulate_runs(
        [read_run(Place(make_compared(tmp_path, *pair))) for pair in (("a", 9000), ("b", 8990))]
    ).show()
    assert "Bits a character do not compare" in table and "a 9,000, b 8,990" in table


def test_evaluations_stand_at_their_seconds(tmp_path: Path) -> None:
    run = read_run(Place(make_compared(tmp_path, "a")))
    assert list_points(run, GENERAL) == ([0.0, 30.0, 60.0, 90.0], [record[GENERAL] for record in run.evaluations])


def test_a_run_without_general_words_is_drawn(tmp_path: Path) -> None:
    run = read_run(Place(make_compared(tmp_path, "a")))
    blind = replace(run, evaluations=tuple({**record, GENERAL: None} for record in run.evaluations))
    draw_comparison([run, blind], Place(tmp_path / "both.png"))
    assert imread(tmp_path / "both.png").std() > 0.01


def test_a_folder_without_a_run_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="is missing"):
        read_run(Place(tmp_path))
    code, out, err = call_job("compare_runs", "--runs", str(tmp_path))
    assert code == 2 and len(err.strip().splitlines()) == 1
