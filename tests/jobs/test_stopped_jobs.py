"""Ctrl-C in every kind of job: SIGINT to its process group, as a terminal sends it, while it works."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from signal import SIGHUP, SIGINT, Signals

import pytest
from conftest import REPOSITORY, write_corpus
from job_processes import kill_job, start_job, stop_job
from labelled_fixtures import write_ner

from domext_ray.storage import Place
from domext_ray.training.checkpoint import list_steps

pytestmark = [pytest.mark.jobs, pytest.mark.timeout(1800)]
JOBS = REPOSITORY / "jobs"
NOT_FINISHED = "stopped by Ctrl-C; the same command goes on with what is not finished.\n"


def stop(command: Sequence[str], begun: Path, pattern: str, number: Signals = SIGINT) -> str:
    """Start a job, wait until a file is there that says that its work has begun, and stop it."""
    process = start_job([sys.executable, str(JOBS / command[0]), *command[1:]], stderr=subprocess.PIPE)
    deadline = time.monotonic() + 600
    try:
        while not any(path.stat().st_size for path in begun.glob(pattern)):
            assert process.poll() is None, process.stderr and process.stderr.read().decode()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        return stop_job(process, number, group=True)
    finally:
        if process.poll() is None:
            kill_job(process)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """More text than any job of these tests gets through."""
    return str(write_corpus(tmp_path_factory.mktemp("text") / "corpus.txt", 300_000))


def list_options(base: Path, corpus: str, runs: Path) -> list[str]:
    return ["--base", str(base), "--corpus", corpus, "--run.dir", str(runs), "--train.seq_length", "32"]


@pytest.mark.parametrize("number", [SIGINT, SIGHUP])
def test_training(tiny_base_folder: Path, tmp_path: Path, number: Signals) -> None:
    corpus = str(write_corpus(tmp_path / "corpus.txt", 2000))
    options = ["--train.max_steps", "100000", "--train.save_every", "10", "--engine.precision", "fp32"]
    command = ["pretrain_af.py", *list_options(tiny_base_folder, corpus, tmp_path), *options, "--run.name", "af"]
    said = stop(command, tmp_path / "af" / "checkpoints", "*/manifest.json", number)
    newest = max(list_steps(Place(tmp_path / "af" / "checkpoints")))
    name = "Ctrl-C" if number == SIGINT else "SIGHUP"
    assert said.endswith(f"stopped at step {newest:,} by {name}; the same command goes on from there.\n")


def test_preparing(tiny_base_folder: Path, corpus: str, tmp_path: Path) -> None:
    command = ["prepare_corpus.py", *list_options(tiny_base_folder, corpus, tmp_path)]
    assert stop(command, tmp_path, ".corpora/**/*.arrow").endswith(NOT_FINISHED)


def test_fine_tuning(tiny_base_folder: Path, tmp_path: Path) -> None:
    data = str(write_ner(tmp_path / "ner"))
    options = ["--task", "ner", "--data", data, "--model", str(tiny_base_folder), "--run.dir", str(tmp_path)]
    command = ["finetune.py", *options, "--run.name", "ner", "--grid.epochs", "10000"]
    assert stop(command, tmp_path / "ner" / "trainings", "*.jsonl").endswith(NOT_FINISHED)


def test_a_sweep(tiny_base_folder: Path, tmp_path: Path) -> None:
    data = str(write_ner(tmp_path / "ner"))
    corpus = str(write_corpus(tmp_path / "corpus.txt", 2000))
    path = tmp_path / "sweep.yaml"
    path.write_text("space:\n  optim.lr: {log: [1.0e-3, 1.0e-2]}\n", encoding="utf-8")
    options = ["--config", str(path), "--tasks", "ner", "--data", data, "--budget.steps", "100000"]
    command = ["sweep.py", *list_options(tiny_base_folder, corpus, tmp_path), *options, "--score_base", "false"]
    assert stop([*command, "--run.name", "sweep"], tmp_path / "sweep", "trials/*/metrics.jsonl").endswith(NOT_FINISHED)
    assert not (tmp_path / "sweep" / "summary.json").exists()


def test_forgetting(tiny_base_folder: Path, tmp_path: Path) -> None:
    corpus = str(write_corpus(tmp_path / "corpus.txt", 20_000))
    bases = {name: shutil.copytree(tiny_base_folder, tmp_path / name) for name in "abcdefgh"}
    models = ",".join(f"{name}={folder}" for name, folder in bases.items())
    output = tmp_path / "forgetting"
    command = ["evaluate_forgetting.py", "--models", models, "--corpus", corpus, "--output", str(output)]
    said = stop([*command, "--max_length", "32"], tmp_path, output.name)  # which is made before anything is asked
    assert said.endswith(NOT_FINISHED) and not (output / "results.json").exists()
