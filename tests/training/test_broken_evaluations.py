"""Evaluations that are broken off, by a kill or because the run is to end: the next start makes them, once."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import write_corpus
from small_runs import attempts, find_saved, list_saved, make_config, make_train, read_records, train_in_cuts

from domext_ray.config.pretrain import RunConfig
from domext_ray.errors import DivergenceError
from domext_ray.pretraining.inputs import prepare_run
from domext_ray.pretraining.plan import resolve
from domext_ray.runs.attempts import Attempt
from domext_ray.storage import Place
from domext_ray.training.checkpoint import check_all
from domext_ray.training.notices import ASKED, LIMIT, TAKEN, TOLD, Notices
from domext_ray.training.run import Run
from domext_ray.training.worker import PretrainWorker

MIDDLE, LAST = 7, 16
"""Steps that are evaluated; checkpoints are due at every fifth."""


class Killed(BaseException):
    """In the place of SIGKILL."""


@pytest.fixture(scope="module")
def task(tiny_base_folder: Path, tmp_path_factory: pytest.TempPathFactory, local_ray: None) -> Run:
    folder = tmp_path_factory.mktemp("evaluations")
    train = make_train(LAST, evaluate_every=MIDDLE, eval_rows=16, micro_batch_size=2)
    run = RunConfig(name="run", dir=str(folder / "runs"), trackers=(), keep_checkpoints=1)
    config = make_config(tiny_base_folder, write_corpus(folder / "corpus.txt", 400), train=train, run=run)
    return prepare_run(resolve(config))


@pytest.fixture(scope="module")
def straight(task: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("straight")
    train_in_cuts(task, folder, LAST)
    return folder


def disturb(worker: PretrainWorker, step: int, act: Callable[[], torch.Tensor | None]) -> list[int]:
    """Have `act` called in the place of the second forward of a step's evaluation; return the steps of all forwards."""
    evaluate, steps = worker.engine.evaluate, list[int]()

    def look(batch: Any) -> torch.Tensor:
        steps.append(worker.step)
        changed = act() if steps.count(step) == 2 else None
        return evaluate(batch) if changed is None else changed

    worker.engine.evaluate = look  # type: ignore[method-assign]
    return steps


def read_figures(folder: Path) -> list[dict[str, Any]]:
    """All lines of a run, less what a clock and the machine's memory have to do with."""
    measured = ("time/", "throughput/", "data/", "memory/")
    records = read_records(folder)
    return [{name: value for name, value in record.items() if not name.startswith(measured)} for record in records]


def check_as_if_undisturbed(folder: Path, straight: Path) -> None:
    assert read_figures(folder) == read_figures(straight)
    own, other = (find_saved(run_dir) for run_dir in (folder, straight))
    assert own is not None and own == other and own.trainer_state.keys() == other.trainer_state.keys()
    assert list_saved(folder) == list_saved(straight) == [LAST]


def kill() -> None:
    raise Killed


@pytest.mark.parametrize(("step", "before"), [(MIDDLE, 5), (LAST, 15)])
def test_killed_in_an_evaluation(step: int, before: int, task: Run, straight: Path, tmp_path: Path) -> None:
    with attempts() as begin:
        worker = begin(task, tmp_path)
        disturb(worker, step, kill)
        with pytest.raises(Killed):
            worker.run()
    assert list_saved(tmp_path) == [before, step], "the one that counts stays until another one does"
    assert [found.unevaluated is None for _, found in check_all(Place(tmp_path / "checkpoints"))] == [False, True]
    assert find_saved(tmp_path).step == before
    assert read_figures(tmp_path)[-1]["step"] == step - 1
    with attempts() as begin:
        worker = begin(task, tmp_path)
        steps = disturb(worker, 0, kill)
        assert worker.step == step
        worker.run()
    assert steps[0] == step and worker.end == LIMIT
    check_as_if_undisturbed(tmp_path, straight)


@pytest.mark.parametrize(("step", "reason"), [(MIDDLE, ASKED), (MIDDLE, TAKEN), (LAST, TOLD)])
def test_an_evaluation_listens(
    step: int, reason: str, task: Run, straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends before the next forward, whoever says so."""
    monkeypatch.setattr("domext_ray.training.metrics.CHECK_REST", 0.0)
    monkeypatch.setattr("domext_ray.training.ranks.ASK_SECONDS", 0.0)
    told = list[bool]()
    with attempts() as begin:
        worker = begin(task, tmp_path)
        attempt = worker.run_dir.fence
        assert isinstance(attempt, Attempt)
        ways = {ASKED: Notices(), TAKEN: Notices(is_taken=lambda: bool(told)), TOLD: Notices(lambda: bool(told))}
        worker.ranks.notices = ways[reason]
        steps = disturb(worker, step, lambda: attempt.ask_to_end() if reason == ASKED else told.append(True))
        worker.run()
        assert worker.end == reason and steps.count(step) == 2 and max(steps) == step
        assert attempt.is_end_confirmed() and list_saved(tmp_path)[-1] == step
    train_in_cuts(task, tmp_path, LAST)
    check_as_if_undisturbed(tmp_path, straight)


def test_the_first_evaluation_listens_too(task: Run, straight: Path, tmp_path: Path) -> None:
    with attempts() as begin:
        worker, told = begin(task, tmp_path), list[bool]()
        worker.ranks.notices = Notices(lambda: bool(told))
        steps = disturb(worker, 0, lambda: told.append(True))
        worker.run()
    assert worker.end == TOLD and steps == [0, 0]
    assert read_figures(tmp_path) == [] and list_saved(tmp_path) == []
    train_in_cuts(task, tmp_path, LAST)
    check_as_if_undisturbed(tmp_path, straight)


def test_a_loss_that_is_not_finite_takes_its_checkpoint_along(task: Run, tmp_path: Path) -> None:
    """At once, or where the evaluation was broken off before; the checkpoint before it counts."""

    def ruin() -> torch.Tensor:
        return torch.tensor([[math.nan, 0.0, 0.0]] * 2, dtype=torch.float64)

    for cuts in ([ruin], [kill, ruin], [ruin]):
        for act in cuts:
            with attempts() as begin:
                worker = begin(task, tmp_path)
                disturb(worker, MIDDLE, act)
                says = f"after step {MIDDLE} the held-out loss is nan, so the weights are not kept"
                with pytest.raises((DivergenceError, Killed), match=says if act is ruin else None):
                    worker.run()
        assert list_saved(tmp_path) == [5] and find_saved(tmp_path).step == 5
        assert read_figures(tmp_path)[-1]["eval/domain_mlm_loss"] is None


def test_a_larger_limit_before_the_last_evaluation_makes_a_middle_one_of_it(task: Run, tmp_path: Path) -> None:
    with attempts() as begin:
        worker = begin(task, tmp_path)
        disturb(worker, LAST, kill)
        with pytest.raises(Killed):
            worker.run()
        longer = replace(task.config.train, max_steps=LAST + 2)
        begin(task, tmp_path, train=longer).run()
    figures = {record["step"]: record for record in read_figures(tmp_path)}
    name = "eval/domain_word_bits_per_character"
    assert [*figures] == [*range(LAST + 3)] and name in figures[LAST + 2] and name not in figures[LAST]
    assert "eval/domain_mlm_loss" in figures[LAST]
