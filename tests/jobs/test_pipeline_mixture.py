"""A job on a mixture, general text kept to the base in it: killed, and gone on with on 2, 4 and 1 workers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from conftest import write_corpus
from job_processes import find_workers, kill_job, start_job
from pretrain_jobs import LONG_EVALUATIONS, count_steps, read_losses, train_here, wait_for_step, write_command

pytestmark = [pytest.mark.jobs, pytest.mark.timeout(1800)]
NUM_STEPS = 40
FIGURES = ("train/mlm_loss", "train/keep_loss", "parts/general/tokens", "parts/further/tokens")


def build_command(base: Path, texts: Path, runs: Path, name: str, *flags: str) -> list[str]:
    """A run on three texts, of which one comes in the second half."""
    further = {"further": {"corpus": str(texts / "further.txt"), "weight": {"0": 0, "0.5": 2}}}
    options = f"--replay.corpus {texts / 'general.txt'} --objective.keep kl --train.max_steps {NUM_STEPS}"
    options += f" --optim.decay_steps {NUM_STEPS} --optim.warmup_steps 4 --train.save_every 5 --train.evaluate_every 20"
    options += " --method.ffn_units 16 --method.word_rows 80 --method.word_head true"
    parts = ("--mixture.parts", json.dumps(further))
    return write_command("af", base, texts / "corpus.txt", runs, name, options, *parts, *flags)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    for seed, (name, num_lines) in enumerate({"corpus": 900, "general": 600, "further": 300}.items()):
        write_corpus(folder / f"{name}.txt", num_lines, seed=seed)
    return folder


@pytest.fixture(scope="module")
def undisturbed(local_ray: None, tiny_base_folder: Path, texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs = tmp_path_factory.mktemp("runs")
    train_here(build_command(tiny_base_folder, texts, runs, "plain"))
    return runs / "plain"


def read_figures(run: Path) -> np.ndarray:
    """The figures of all steps, [steps, FIGURES]; each step was made once (`read_losses`)."""
    read_losses(run, NUM_STEPS)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return np.array([[line[name] for name in FIGURES] for line in lines if "train/mlm_loss" in line])


def test_killed_and_resized_it_reads_the_same_rows(undisturbed: Path, tiny_base_folder: Path, texts: Path) -> None:
    run = undisturbed.parent / "resized"
    process = start_job([*build_command(tiny_base_folder, texts, run.parent, run.name), *LONG_EVALUATIONS])
    wait_for_step(run, 7, process)
    find_workers(process, "TrainWorker")[0].kill()
    wait_for_step(run, 12, process)
    kill_job(process)
    assert count_steps(run) < NUM_STEPS
    for num_workers, max_steps in ((2, 20), (4, 30), (1, NUM_STEPS)):
        flags = ("--scale.num_workers", str(num_workers), "--train.max_steps", str(max_steps))
        train_here(build_command(tiny_base_folder, texts, run.parent, run.name, *flags))
    found, expected = read_figures(run), read_figures(undisturbed)
    assert np.array_equal(found[:, 2:], expected[:, 2:]), "the tokens of every part at every step"
    half = NUM_STEPS // 2
    assert expected[half - 1, 3] == 0 < expected[half, 3], "a part comes in the second half"
    np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_two_workers_at_every_stage_make_the_same_steps(
    undisturbed: Path, tiny_base_folder: Path, texts: Path, zero_stage: int
) -> None:
    run = undisturbed.parent / f"zero-{zero_stage}"
    flags = ("--scale.num_workers", "2", "--engine.zero_stage", str(zero_stage))
    train_here(build_command(tiny_base_folder, texts, run.parent, run.name, *flags))
    np.testing.assert_allclose(read_figures(run), read_figures(undisturbed), atol=1e-4)
