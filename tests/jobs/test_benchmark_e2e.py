"""Minutes to a number of bits per character: both sides train, see the same base, and their runs are kept."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import FEW_SENTENCES, REPOSITORY, write_corpus

from domext_ray.runs.events import Event

RIVAL, OURS = "Trainer", "domext_ray"


OPTIONS = """--train.evaluate_every 2 --train.eval_rows 20 --train.global_batch_size 4 --train.seq_length 32
  --train.general_probe""".split()


def call(runs: Path, base: Path, text: Path, *flags: str, steps: int = 6) -> subprocess.CompletedProcess[str]:
    options = [*OPTIONS, FEW_SENTENCES, "--base", str(base), "--train.max_steps", str(steps)]
    command = [sys.executable, str(REPOSITORY / "jobs" / "benchmark.py"), "e2e", "--text", str(text)]
    command += ["--runs", str(runs), "--output", str(runs.parent / "records"), *flags, "--", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=900, cwd="/")


@pytest.mark.jobs
@pytest.mark.timeout(1800)
def test_both_sides(tiny_base_folder: Path, tmp_path: Path) -> None:
    text, runs = write_corpus(tmp_path / "text.txt", 300), tmp_path / "runs.json"
    first = call(runs, tiny_base_folder, text, "--rival_rates", "1e-3", "--rates")
    assert first.returncode == 0, first.stderr[-4000:]
    (rival,) = json.loads(runs.read_text())["runs"]

    again = call(runs, tiny_base_folder, text, "--rival_rates", "1e-3", "--rates", "1e-3")
    assert again.returncode == 0, again.stderr[-4000:]
    made = json.loads(runs.read_text())["runs"]
    assert made[0] == rival  # it was not made again
    assert [(entry["side"], entry["rate"]) for entry in made] == [(RIVAL, 1e-3), (OURS, 1e-3)]
    for run in made:
        check_run(run)
    (record,) = (tmp_path / "records").iterdir()
    figures = json.loads(record.read_text())["figures"]
    assert figures["target"] == rival["curve"][-1]["bits_per_character"]
    assert {entry["side"]: entry["start_seconds"] > 1.0 for entry in figures["runs"]} == {OURS: True, RIVAL: True}

    other = call(runs, tiny_base_folder, text, steps=4)
    assert other.returncode == 2 and "has runs of another options; give another file" in other.stderr


def check_run(run: dict[str, Any]) -> None:
    """Every evaluation is there, later ones came later, and what the clock left out is not in it."""
    curve = run["curve"]
    assert [point["step"] for point in curve] == [0, 2, 4, 6]
    seconds = [point["seconds"] for point in curve]
    assert seconds == sorted(seconds) and seconds[0] == run["start_seconds"] > 1.0
    assert abs(curve[-1]["bits_per_character"] - curve[0]["bits_per_character"]) > 1e-3  # something was learned
    assert run["tokens"] > 0 and 0 < run["epochs"] < 10


@pytest.fixture
def end_to_end(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(REPOSITORY / "jobs")
    return importlib.import_module("benchmarks.training")


def test_evaluations_are_not_on_the_clock(end_to_end: Any) -> None:
    events = [
        Event("loading the model", True, 103.0),
        Event("evaluating the start: held-out text", True, 110.0),
        Event("a sentence", False, 112.0),
        Event("evaluating the start: bits per character", True, 115.0),
        Event("reading the first rows", True, 120.0),
        Event("training", True, 121.0),
        Event("evaluating step 2: held-out text", True, 130.0),
        Event("saving the checkpoint of step 2", True, 133.0),
    ]
    assert end_to_end.time_evaluations(events, 100.0) == [10.0, 20.0]


def test_seconds_are_read_off_between_evaluations(end_to_end: Any) -> None:
    points = [(0, 10.0, 3.0), (1, 20.0, 2.0), (2, 30.0, 2.5), (3, 40.0, 1.0)]
    curve = [dict(zip(("step", "seconds", "bits_per_character"), point, strict=True)) for point in points]
    assert end_to_end.find_seconds(curve, 2.25) == 17.5
    assert end_to_end.find_seconds(curve, 1.75) == 35.0
    assert end_to_end.find_seconds(curve, 3.5) == 10.0
    assert end_to_end.find_seconds(curve, 0.9) is None


def test_the_best_run_of_each_side_counts(end_to_end: Any) -> None:
    def make_run(side: str, rate: float, *points: tuple[float, float]) -> dict[str, Any]:
        curve = [{"step": i, "seconds": at, "bits_per_character": bits} for i, (at, bits) in enumerate(points)]
        return {"side": side, "rate": rate, "curve": curve, "start_seconds": points[0][0], "tokens": 800, "epochs": 0.5}

    runs = [
        make_run(RIVAL, 1e-4, (10, 3.0), (90, 2.2)),
        make_run(RIVAL, 3e-4, (10, 3.0), (90, 2.0)),
        make_run(OURS, 2e-3, (20, 3.0), (60, 1.0)),
        make_run(OURS, 1e-3, (20, 3.0), (60, 2.5)),
    ]
    figures = end_to_end.summarize(runs, None)
    assert (figures["target"], figures["seconds"], figures["ratio"]) == (2.0, {OURS: 40.0, RIVAL: 90.0}, 90.0 / 40.0)
    assert [entry["rate"] for entry in figures["runs"]] == [1e-4, 3e-4, 1e-3, 2e-3]
    assert [row["minutes to 2.000"] for row in end_to_end.make_rows(figures)] == ["–", "1.50", "–", "0.667"]
    figures = end_to_end.summarize(runs, 1.5)
    assert (figures["seconds"], figures["ratio"]) == ({OURS: 50.0, RIVAL: None}, None)
    assert end_to_end.summarize(runs[2:], None)["target"] is None
