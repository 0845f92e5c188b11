"""The whole path, with real Ray, DeepSpeed and processes that die: text in, the same losses and an export out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from job_processes import find_workers, kill_job, start_job

from domext_ray.config import PretrainConfig, parse_config
from domext_ray.errors import DomextError
from domext_ray.pipeline import run_pretraining

REPOSITORY = Path(__file__).parent.parent
NUM_STEPS = 30


@pytest.fixture(scope="module")
def corpus_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text of 3,000 lines over a small vocabulary."""
    random = np.random.default_rng(0)
    words = "the a house tree river small old bright runs sees finds near under over and but dog cat child".split()
    lines = [" ".join(random.choice(words, 14)) + "." for _ in range(3000)]
    path = tmp_path_factory.mktemp("text") / "corpus.txt"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def build_command(base: Path, corpus: Path, runs: Path, name: str, *flags: str) -> list[str]:
    return [
        sys.executable,
        str(REPOSITORY / "jobs" / "pretrain_af.py"),
        *("--base", str(base), "--corpus", str(corpus), "--run.dir", str(runs), "--run.name", name),
        *("--train.max_steps", str(NUM_STEPS), "--train.global_batch_size", "8", "--train.seq_length", "32"),
        *("--train.checkpoint_every", "5", "--train.eval_every", "15", "--train.eval_rows", "40"),
        *("--engine.precision", "fp32", "--method.ffn_units", "16", "--optim.lr", "1e-3"),
        *flags,
    ]


def run_job(command: list[str], expect: int = 0) -> subprocess.CompletedProcess[str]:
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd="/")
    assert result.returncode == expect, result.stdout[-2000:] + result.stderr[-4000:]
    return result


def read_losses(run: Path) -> list[float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "train/mlm_loss" in line]
    assert [line["step"] for line in steps] == list(range(1, NUM_STEPS + 1))
    return [line["train/mlm_loss"] for line in steps]


def count_steps(run: Path) -> int:
    path = run / "metrics.jsonl"
    return len(path.read_text().splitlines()) - 1 if path.exists() else -1


def wait_for_step(run: Path, step: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 240
    while count_steps(run) < step:
        assert process.poll() is None, "the job ended before the step"
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture(scope="module")
def undisturbed(tiny_base_folder: Path, corpus_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with dropout that nothing disturbs."""
    runs = tmp_path_factory.mktemp("runs")
    run_job(build_command(tiny_base_folder, corpus_file, runs, "plain", "--train.dropout", "0.1"))
    return runs / "plain"


def test_a_run_leaves_everything_and_says_when_it_is_finished(
    undisturbed: Path, tiny_base_folder: Path, corpus_file: Path
) -> None:
    for name in ("metrics.jsonl", "summary.json", "report.html", "config.yaml", "identity.json", "tensorboard"):
        assert (undisturbed / name).exists(), name
    assert (undisturbed / "export" / "model.safetensors").exists()
    summary: dict[str, Any] = json.loads((undisturbed / "summary.json").read_text())
    assert summary["train"]["steps"] == NUM_STEPS
    assert summary["domain"]["mlm_loss"]["after"] < summary["domain"]["mlm_loss"]["before"]
    assert 0 < summary["parameters"]["trainable_frac"] < 1
    before = (undisturbed / "metrics.jsonl").read_bytes()
    again = build_command(tiny_base_folder, corpus_file, undisturbed.parent, "plain", "--train.dropout", "0.1")
    assert "nothing is left to do" in run_job(again).stdout
    assert (undisturbed / "metrics.jsonl").read_bytes() == before


def test_another_identity_is_refused(undisturbed: Path, tiny_base_folder: Path, corpus_file: Path) -> None:
    flags = ("--train.dropout", "0.1", "--method.heads", "2")
    result = run_job(build_command(tiny_base_folder, corpus_file, undisturbed.parent, "plain", *flags), expect=2)
    assert "method.heads: 1 -> 2" in result.stderr and "Traceback" not in result.stderr


def test_killed_worker_and_killed_job_leave_the_same_losses(
    undisturbed: Path, tiny_base_folder: Path, corpus_file: Path
) -> None:
    """SIGKILL of a worker at step 7, of the whole job at step 13, then the same command."""
    command = build_command(tiny_base_folder, corpus_file, undisturbed.parent, "killed", "--train.dropout", "0.1")
    run = undisturbed.parent / "killed"
    process = start_job(command)
    wait_for_step(run, 7, process)
    find_workers(process, "TrainWorker")[0].kill()
    killed_at = time.monotonic()
    wait_for_step(run, 13, process)
    assert time.monotonic() - killed_at < 120
    kill_job(process)
    assert count_steps(run) < NUM_STEPS
    run_job(command)
    assert read_losses(run) == read_losses(undisturbed)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--corpus", "/no/such/file.txt"), "/no/such/file.txt"),
        (("--base", "/no/such/base"), "/no/such/base"),
        (("--engine.zero_stage", "7"), "--engine.zero_stage is 7"),
        (("--method.heads", "-1"), "--method.heads is -1"),
        (("--train.global_batch_size", "30", "--scale.num_workers", "4"), "--scale.num_workers is 4"),
        (("--no_such_flag", "1"), "no_such_flag"),
    ],
)
def test_a_mistake_is_one_sentence_and_leaves_nothing(
    tiny_base_folder: Path, corpus_file: Path, tmp_path: Path, flags: tuple[str, ...], message: str
) -> None:
    command = build_command(tiny_base_folder, corpus_file, tmp_path / "runs", "bad", "--dry_run", "true", *flags)
    check_mistake(command, message)
    assert not (tmp_path / "runs").exists()


def check_mistake(command: list[str], message: str) -> None:
    """What a job's command raises, which `exit_on_user_error` makes a line and an exit code of."""
    config_path = REPOSITORY / "jobs" / "configs" / f"{Path(command[1]).stem.removeprefix('pretrain_')}.yaml"
    with pytest.raises(DomextError) as raised:
        run_pretraining(parse_config(PretrainConfig, str(config_path), command[2:]))
    assert message in str(raised.value) and len(str(raised.value).splitlines()) == 1


def test_a_mistake_ends_a_job(tiny_base_folder: Path, tmp_path: Path) -> None:
    missing = tmp_path / "missing.txt"
    result = run_job(build_command(tiny_base_folder, missing, tmp_path / "runs", "bad"), expect=2)
    assert result.stderr.startswith("error: ") and str(missing) in result.stderr
    assert "Traceback" not in result.stderr and len(result.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "runs").exists()


SHAPES = [(1, 1, 8), (1, 2, 4), (1, 3, 8), (2, 0, 4), (2, 0, 2), (2, 1, 2), (2, 2, 4), (4, 0, 2), (4, 3, 1)]


@pytest.mark.parametrize(
    ("num_workers", "zero_stage", "micro_batch_size"),
    [(2, 3, 4), *(pytest.param(*each, marks=pytest.mark.slow) for each in SHAPES)],
)
def test_losses_do_not_depend_on_workers_stage_or_accumulation(
    tiny_base_folder: Path,
    corpus_file: Path,
    still: Path,
    num_workers: int,
    zero_stage: int,
    micro_batch_size: int,
) -> None:
    name = f"w{num_workers}-z{zero_stage}-m{micro_batch_size}"
    flags = ("--train.dropout", "0", "--scale.num_workers", str(num_workers))
    flags += ("--engine.zero_stage", str(zero_stage), "--train.micro_batch_size", str(micro_batch_size))
    run_job(build_command(tiny_base_folder, corpus_file, still.parent, name, *flags))
    np.testing.assert_allclose(read_losses(still.parent / name), read_losses(still), atol=1e-4)


@pytest.fixture(scope="module")
def still(tiny_base_folder: Path, corpus_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without dropout on one worker at ZeRO 0."""
    runs = tmp_path_factory.mktemp("still")
    run_job(build_command(tiny_base_folder, corpus_file, runs, "plain", "--train.dropout", "0"))
    return runs / "plain"


def test_dry_run_starts_nothing(tiny_base_folder: Path, corpus_file: Path, tmp_path: Path) -> None:
    command = build_command(tiny_base_folder, corpus_file, tmp_path / "runs", "dry", "--dry_run", "true")
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={**os.environ, "RAY_ADDRESS": "x:1"}
    )
    assert result.returncode == 0, result.stderr
    assert "trainable" in result.stdout and "memory per rank" in result.stdout
    assert not (tmp_path / "runs").exists()
