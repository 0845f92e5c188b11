"""Runs side by side: a table that compares what compares, and a picture."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path

import pytest
from matplotlib.image import imread
from test_report import SUMMARY, make_records, make_run

from domext_ray.comparison import format_comparison, read_run
from domext_ray.errors import RunError

REPOSITORY = Path(__file__).resolve().parents[1]


def make_compared(folder: Path, name: str, num_characters: int = 9000) -> Path:
    records = [{**each, "time/seconds": 1.5 * each["step"]} for each in make_records()]
    summary = {**copy.deepcopy(SUMMARY), "evaluation": {"domain_characters": num_characters}}
    return make_run(folder / name, records, summary)


def run_job(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(REPOSITORY / "jobs" / "compare_runs.py"), *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_the_job_prints_a_table_and_draws_a_picture(tmp_path: Path) -> None:
    runs = [make_compared(tmp_path, name) for name in ("adapter", "words")]
    result = run_job("--runs", ",".join(map(str, runs)), "--output", str(tmp_path / "both.png"))
    assert result.returncode == 0, result.stderr
    assert "| adapter | 2,632,704 | 245,760 | 90 | 1.900 → 1.710 | 38.6% → 36.7% |" in result.stdout
    assert "do not compare" not in result.stdout
    assert imread(tmp_path / "both.png").std() > 0.01


def test_other_texts_do_not_compare(tmp_path: Path) -> None:
    table = format_comparison([read_run(make_compared(tmp_path, *each)) for each in (("a", 9000), ("b", 8990))])
    assert "Bits a character do not compare" in table and "a 9,000, b 8,990" in table


def test_evaluations_stand_at_their_seconds(tmp_path: Path) -> None:
    run = read_run(make_compared(tmp_path, "a"))
    assert [each["seconds"] for each in run.evaluations] == [0.0, 30.0, 60.0, 90.0]


def test_a_folder_without_a_run_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="is missing"):
        read_run(tmp_path)
    result = run_job("--runs", str(tmp_path))
    assert result.returncode == 2 and len(result.stderr.strip().splitlines()) == 1
