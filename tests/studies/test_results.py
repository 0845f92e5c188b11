"""Leaderboards, fronts and importance of trials whose figures are known."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from domext_ray.api import Folder
from domext_ray.config.method import MethodConfig
from domext_ray.config.sweep import SearchConfig, SweepConfig
from domext_ray.runtime.trials import Ledger, Outcome, Trial
from domext_ray.storage import Place
from domext_ray.studies.sweep.report import draw_sizes, measure_time, write_sweep_report
from domext_ray.studies.sweep.results import find_front, measure_importance, rank_trials, read_trials
from domext_ray.studies.sweep.space import read_space


def make_trial(
    name: str, f1: float | None, trainable: int = 10, rungs: int = 2, seconds: float = 10.0, **point: Any
) -> Outcome:
    record: dict[str, Any] = {"figure": "F1", "f1": f1, "trainable": trainable, "general_accuracy": 0.3, "steps": 9}
    record |= {"tokens_per_second": 100.0, "seconds": {"train": 1.0, "evaluate": 0.5, "finetune": 2.0}}
    record |= {"f1_interval": None if f1 is None else [f1 - 0.1, f1 + 0.1]}
    steps = tuple({**record, "rung": i, "step": 3 ** (i + 1)} for i in range(rungs))
    return Outcome(Trial(name, point), steps, "complete" if rungs == 2 else "pruned", seconds=seconds)


def test_those_of_the_whole_budget_come_first() -> None:
    trials = [make_trial("a", 0.9, rungs=1), make_trial("b", 0.5), make_trial("c", 0.7), make_trial("d", None)]
    trials.append(Outcome(Trial("e", {})).fail("no size meets the budget"))
    assert [trial.name for trial in rank_trials(trials, ("f1",))] == ["c", "b", "a"]
    small = [make_trial("a", 0.5, 30), make_trial("b", 0.5, 20)]
    assert [trial.name for trial in rank_trials(small, ("trainable",))] == ["b", "a"], "fewer parameters are better"


def test_the_front_has_what_nothing_beats_in_both() -> None:
    random = np.random.default_rng(0)
    trials = [make_trial(str(i), float(random.random()), int(random.integers(100))) for i in range(60)]
    front = {best.name for best in find_front(trials, ("f1", "trainable"))}
    for trial in trials:
        beaten = any(
            other.get("f1") >= trial.get("f1")
            and other.get("trainable") <= trial.get("trainable")
            and (other.get("f1"), other.get("trainable")) != (trial.get("f1"), trial.get("trainable"))
            for other in trials
        )
        assert beaten == (trial.name not in front)


def test_importance_finds_the_dimension_that_matters() -> None:
    space = read_space({"method.heads": {"choice": [0, 1, 2]}, "optim.lr": {"log": [1e-4, 1e-2]}})
    points = list(islice(space.sample(0), 60))
    trials = [make_trial(str(i), 0.1 * point["method.heads"], **point) for i, point in enumerate(points)]
    found = measure_importance(space, trials, "f1")
    assert found["method.heads"] > 0.9 and sum(found.values()) == pytest.approx(1.0)
    assert measure_importance(space, trials[:3], "f1") == {}, "too few"
    stopped = [replace(trial, steps=trial.steps[:1], status="pruned") for trial in trials[2:]]
    assert measure_importance(space, [*trials[:2], *stopped], "f1")["method.heads"] > 0.9, "at the first rung"
    assert measure_importance(space, [make_trial(trial.name, 0.5, **trial.config) for trial in trials], "f1") == {}


def test_overhead_is_what_is_neither_training_nor_scoring() -> None:
    time = measure_time([make_trial("a", 0.5, seconds=8.0), make_trial("b", 0.4, seconds=12.0)])
    assert time["train"] == 4.0 and time["finetune"] == 8.0 and time["total"] == 20.0
    assert time["overhead"] == pytest.approx(6.0) and time["overhead_frac"] == pytest.approx(0.3)


def test_trials_are_read_from_their_folders(tmp_path: Path) -> None:
    ledger = Ledger(Place(tmp_path))
    ledger.write(Outcome(Trial("t0", {"method.heads": 0}), ({"step": 2, "f1": 0.25},)))
    ledger.write(Outcome(Trial("t1", {"method.heads": 1})).fail("too large"))
    ledger.write(Outcome(Trial("t2", {"method.heads": 2})))
    first, second, third = read_trials(Place(tmp_path))
    assert first.status == "pruned" and first.get("f1") == 0.25 and first.config == {"method.heads": 0}
    assert second.status == "failed" and math.isnan(second.get("f1")) and second.failure == "too large"
    assert third.status == "unfinished"


def test_the_objective_is_drawn_along_a_dimension() -> None:
    values = {
        "words": {"choice": {"with": {"vocab.size": 40}, "without": {"vocab.size": 0}}},
        "size": {"choice": {"0": {"method.heads": 0}, "33": {"method.heads": 1}, "100": {"method.heads": 2}}},
        "seed": {"choice": [0, 1], "if": {"size": "33"}},
    }
    space = read_space(values)
    trials = [make_trial(str(i), 0.5 + 0.01 * i, **point) for i, point in enumerate(space.list_grid())]
    axes = Figure().subplots()
    base = {"f1": 0.4, "f1_interval": [0.3, 0.5]}
    draw_sizes(axes, SearchConfig(axis="size", curves="words"), space, trials, base)
    lines = {str(line.get_label()): line for line in axes.get_lines()}
    assert lines["words with"].get_xydata().tolist() == [[0.0, 0.5], [33.0, pytest.approx(0.515)], [100.0, 0.53]]
    assert lines["words without"].get_xydata()[1].tolist() == [33.0, pytest.approx(0.555)], "a mean over seeds"
    assert [label.get_text() for label in axes.get_xticklabels()] == ["0", "33", "100"]
    assert lines["base, not adapted"].get_ydata()[0] == 0.4
    named = Figure().subplots()
    draw_sizes(named, SearchConfig(axis="words"), space, trials, None)
    assert [label.get_text() for label in named.get_xticklabels()] == ["with", "without"]
    assert {line.get_xdata()[0] for line in named.get_lines() if len(line.get_xdata()) == 1} == {0.0, 1.0}


def test_the_page_has_every_figure_and_needs_no_network(tmp_path: Path) -> None:
    values = {"method.heads": {"choice": [0, 1, 2]}, "optim.lr": {"log": [1e-4, 1e-2]}, "seed": {"choice": [0, 1]}}
    config = SweepConfig(
        space=values, method=MethodConfig(heads=1, ffn_units=8), search=SearchConfig(rungs=2, reduction=3)
    )
    space = read_space(values)
    for i, point in enumerate(islice(space.sample(0), 12)):
        trial = make_trial(f"t{i:02}", 0.2 + 0.1 * point["method.heads"] + 0.01 * i, 10 + i, rungs=1 + i % 2, **point)
        folder = tmp_path / "trials" / trial.name
        folder.mkdir(parents=True)
        Ledger(Place(folder.parent)).write(trial)
        (folder / "config.yaml").write_text("train: {max_steps: 9}\noptim: {decay_steps: 9}\n")
    table = write_sweep_report(config, space, Place(tmp_path))
    page = (tmp_path / "sweep.html").read_text(encoding="utf-8")
    assert page.count("<svg") == 5 and 'src="http' not in page and 'href="http' not in page
    summary = json.loads((tmp_path / "summary.json").read_text())
    best = max(
        (ended for ended in summary["trials"] if ended["status"] == "complete"),
        key=lambda ended: ended["rungs"][-1]["f1"],
    )
    assert summary["best"]["id"] == best["id"] and best["id"] in table.splitlines()[1]
    shown = Folder(tmp_path)._repr_markdown_()
    assert shown is not None and shown.startswith("| trial | scored at |") and "\n\nBest of 12 trials: " in shown
    assert f"\n| {best['id']} | " in shown and "\n\nBest of 12 trials: " in table
    assert (tmp_path / "sweep.png").stat().st_size > 10_000 and not list(tmp_path.glob(".*.tmp"))
