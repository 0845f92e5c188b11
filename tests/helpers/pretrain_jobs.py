"""Pre-training jobs by their command lines: in this process on the session's Ray, or as processes of their own."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import FEW_SENTENCES, REPOSITORY

from domext_ray.commands.job import configure
from domext_ray.commands.pretraining import METHODS
from domext_ray.config.options.build import read_flags
from domext_ray.config.pretrain import PretrainConfig
from domext_ray.errors import DomextError
from domext_ray.pretraining.pipeline import run_pretraining
from domext_ray.training.evaluate import GENERAL_PROBE

LONG_EVALUATIONS = ("--train.general_probe", str(GENERAL_PROBE))
"""Flags of a job that is to be stopped: its steps take milliseconds, an evaluation takes seconds."""

PATIENCE_SECONDS = 600
"""What a step or a job may take on a slow or busy machine, before a test fails."""


COMMON = (
    "--train.global_batch_size 8 --train.seq_length 32 --train.eval_rows 40 --train.dropout 0 --engine.precision fp32 "
    f"--optim.lr 1e-3 --train.general_probe {FEW_SENTENCES}"
)


def write_command(method: str, base: Path, corpus: Path, runs: Path, name: str, options: str, *flags: str) -> list[str]:
    """The command of a small run in fp32 and without dropout, unless the options or flags say something else."""
    places = ("--base", str(base), "--corpus", str(corpus), "--run.dir", str(runs), "--run.name", name)
    job = str(REPOSITORY / "jobs" / f"pretrain_{method}.py")
    return [sys.executable, job, *places, *COMMON.split(), *options.split(), *flags]


def train_here(command: list[str]) -> None:
    """Do in this process what a command does in one of its own; the fixture `local_ray` says which Ray trains."""
    job = METHODS[Path(command[1]).stem.removeprefix("pretrain_")]
    run_pretraining(configure(job, read_flags(PretrainConfig, command[2:])))


def check_mistake(command: list[str], message: str) -> None:
    """What a job's command raises, which `exit_on_user_error` makes a line and an exit code of."""
    with pytest.raises(DomextError) as raised:
        train_here(command)
    assert message in str(raised.value) and len(str(raised.value).splitlines()) == 1


def run_job(command: list[str], expect: int = 0, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command as a process of its own."""
    result = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, cwd="/", env=env)
    assert result.returncode == expect, result.stdout[-2000:] + result.stderr[-4000:]
    return result


def count_steps(run: Path) -> int:
    """Return how many steps a run has recorded; -1 before its first line."""
    path = run / "metrics.jsonl"
    return len(path.read_text().splitlines()) - 1 if path.exists() else -1


def wait_for_step(run: Path, step: int, process: subprocess.Popen[bytes]) -> None:
    """Wait until a job has made a step."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while count_steps(run) < step:
        assert process.poll() is None, "the job ended before the step"
        assert time.monotonic() < deadline
        time.sleep(0.02)


def read_losses(run: Path, num_steps: int, name: str = "mlm_loss") -> list[float]:
    """Return the losses of a run that made all its steps, each once."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if f"train/{name}" in line]
    assert [line["step"] for line in steps] == list(range(1, num_steps + 1))
    return [line[f"train/{name}"] for line in steps]
