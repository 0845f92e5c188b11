"""What sweeps found by the compute that they spent."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread

from domext_ray.errors import RunError
from domext_ray.experiment.runner import Ledger, Outcome, Trial
from domext_ray.runs.run_directory import write_run
from domext_ray.search.sweep_comparison import draw_sweeps, format_sweeps, read_sweeps
from domext_ray.storage import Place

SEARCH = {"searcher": "random", "scheduler": "none", "objectives": "f1,trainable", "rungs": 2, "seed": 0}


def make_sweep(folder: Path, rungs: dict[str, list[tuple[float, float, float]]], **options: Any) -> Path:
    """Make a sweep's directory from (time of its end, seconds, F1) of every trial's rungs."""
    identity = {"corpus": options.pop("corpus", "text"), "search": {**SEARCH, **options}}
    for name, own in rungs.items():
        records = [
            {"step": i, "ended": ended, "f1": f1, "trainable": 1, "seconds": {"train": seconds - 1.0, "finetune": 1.0}}
            for i, (ended, seconds, f1) in enumerate(own, start=1)
        ]
        Ledger(Place(folder / "trials")).write(Outcome(Trial(name, {}), tuple(records)))
    write_run(folder, identity=identity)
    return folder


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    whole = make_sweep(tmp_path / "whole", {"a": [(10, 10, 0.4)], "b": [(25, 10, 0.3)], "c": [(40, 30, 0.9)]})
    early = {"a": [(10, 2, 0.2), (50, 8, 0.6)], "b": [(30, 2, 0.1)], "c": [(20, 2, 0.5), (60, 8, 0.55)]}
    halved = make_sweep(tmp_path / "halved", early, scheduler="asha")
    again = make_sweep(tmp_path / "again", {"a": [(1, 3, 0.7)], "b": [(2, 19, 0.1)]}, scheduler="asha", seed=1)
    return [whole, halved, again]


def test_the_best_until_then_is_found_in_the_order_of_time(folders: list[Path]) -> None:
    whole, halved, again = read_sweeps(folders)
    assert halved.seconds.tolist() == [2, 4, 6, 14, 22] and halved.best.tolist() == [0.2, 0.5, 0.5, 0.6, 0.6]
    assert math.isnan(whole.find_best(9.9)) and whole.find_best(10) == whole.find_best(49.9) == 0.4
    assert [each.group for each in (whole, halved, again)] == ["random, whole trials", "random, ASHA", "random, ASHA"]


def test_groups_compare_at_the_compute_that_all_have_spent(folders: list[Path], tmp_path: Path) -> None:
    sweeps = read_sweeps(folders)
    table = format_sweeps(sweeps)
    assert "after 0:22 of compute" in table
    assert "| random, whole trials | 1 | 3 | 0.4000 | 0.4000 |" in table
    assert "| random, ASHA | 2 | 5 | 0.6500 ± 0.0707 | 0.6000, 0.7000 |" in table
    draw_sweeps(sweeps, tmp_path / "sweeps.png")
    assert imread(tmp_path / "sweeps.png").std() > 0.01


def test_sweeps_that_differ_in_more_than_the_search_are_refused(folders: list[Path], tmp_path: Path) -> None:
    other = make_sweep(tmp_path / "other", {"a": [(1, 3, 0.7)]}, corpus="another")
    with pytest.raises(RunError, match="corpus: 'text' -> 'another'"):
        read_sweeps([*folders, other])
    with pytest.raises(RunError, match="is no sweep"):
        read_sweeps([*folders, tmp_path])
    empty = make_sweep(tmp_path / "empty", {"a": []})
    with pytest.raises(RunError, match="was scored"):
        read_sweeps([empty])
