"""Runs that 3, then 5, then 2 workers train, which divide no global batch, make the steps of one worker."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import FEW_SENTENCES, REPOSITORY, write_corpus
from pretrain_jobs import read_losses, train_here

pytestmark = [pytest.mark.jobs, pytest.mark.timeout(1800)]
NUM_STEPS = 12
RUNS = {
    "one text": ("--train.global_batch_size", "26", "--train.micro_batch_size", "4"),
    "packed": ("--train.global_batch_size", "16", "--prepare.packed", "true"),
    "mixture": ("--train.global_batch_size", "16", "--objective.keep", "kl", "--replay.frac", "0.3"),
    "infonce": (
        *("--train.global_batch_size", "28", "--objective.kind", "infonce", "--objective.views", "crop"),
        *("--objective.group_rows", "4", "--train.micro_batch_size", "4"),
    ),
}


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    for seed, name in enumerate(("corpus", "general")):
        write_corpus(folder / f"{name}.txt", 500, seed=seed)
    return folder


def build_command(base: Path, texts: Path, runs: Path, name: str, *flags: str) -> list[str]:
    """A run at fp32 and without dropout."""
    return [
        sys.executable,
        str(REPOSITORY / "jobs" / "pretrain_bottleneck.py"),
        *("--base", str(base), "--corpus", str(texts / "corpus.txt"), "--run.dir", str(runs), "--run.name", name),
        *("--train.max_steps", str(NUM_STEPS), "--optim.decay_steps", str(NUM_STEPS), "--optim.warmup_steps", "2"),
        *("--train.seq_length", "32", "--train.eval_rows", "8", "--train.general_probe", str(FEW_SENTENCES)),
        *("--train.save_every", "50", "--train.evaluate_every", "50", "--train.dropout", "0"),
        *("--engine.precision", "fp32", "--optim.lr", "1e-2"),
        *flags,
    ]


@pytest.fixture(scope="module")
def alone(local_ray: None, tiny_base_folder: Path, texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one text by one worker."""
    runs = tmp_path_factory.mktemp("alone")
    train_here(build_command(tiny_base_folder, texts, runs, "alone", *RUNS["one text"], "--replay.corpus", "none"))
    return runs / "alone"


def check_equal(run: Path, expected: Path, loss: str = "mlm_loss") -> None:
    """Every step read the same rows, and has the same loss."""
    losses = [read_losses(folder, NUM_STEPS, loss) for folder in (run, expected)]
    np.testing.assert_allclose(*losses, atol=1e-4)
    lines = [(folder / "metrics.jsonl").read_text().splitlines() for folder in (run, expected)]
    tokens = [[json.loads(line).get("train/tokens") for line in own] for own in lines]
    assert tokens[0] == tokens[1], "the rows of every step"


@pytest.mark.parametrize("stage", range(4))
def test_the_number_of_workers_falls_and_rises(
    stage: int, alone: Path, tiny_base_folder: Path, texts: Path, tmp_path: Path
) -> None:
    """4, 2, 3, 1, 4: none of them but 2 and 1 divides the batch."""
    options = (*RUNS["one text"], "--replay.corpus", "none", "--engine.zero_stage", str(stage))
    for max_steps, workers in ((3, 4), (6, 2), (8, 3), (10, 1), (NUM_STEPS, 4)):
        scale = ("--scale.num_workers", str(workers), "--train.max_steps", str(max_steps))
        train_here(build_command(tiny_base_folder, texts, tmp_path, "cut", *options, *scale))
    check_equal(tmp_path / "cut", alone)


@pytest.mark.parametrize("kind", RUNS)
def test_three_five_and_two_workers_make_one_workers_steps(
    kind: str, local_ray: None, tiny_base_folder: Path, texts: Path, tmp_path: Path
) -> None:
    general = ("--replay.corpus", str(texts / "general.txt") if kind == "mixture" else "none")
    loss = "infonce_loss" if kind == "infonce" else "mlm_loss"
    places = (tiny_base_folder, texts, tmp_path)
    train_here(build_command(*places, "alone", *RUNS[kind], *general))
    for max_steps, workers, stage in ((4, 3, 3), (8, 5, 0), (NUM_STEPS, 2, 2)):
        scale = ("--scale.num_workers", str(workers), "--engine.zero_stage", str(stage))
        train_here(build_command(*places, "cut", *RUNS[kind], *general, *scale, "--train.max_steps", str(max_steps)))
    check_equal(tmp_path / "cut", tmp_path / "alone", loss)
