"""The batch script really runs, on one machine: Slurm's own commands are stand-ins, the rest is real."""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from conftest import REPOSITORY

SCRIPT = REPOSITORY / "cluster" / "slurm.sbatch"
SRUN = """#!/bin/bash
# One process a node, all of them here; as srun does, it ends them when it is told to end or one of them ends.
while [[ $1 == --* ]]; do shift; done
for ((node = 0; node < SLURM_JOB_NUM_NODES; node++)); do SLURM_PROCID=$node "$@" & done
trap 'kill $(jobs -p)' TERM
wait -n
kill $(jobs -p)
wait
"""
SCONTROL = """#!/bin/bash
echo "$@" >>"$SLURM_SUBMIT_DIR/scontrol"
"""
COUNT = """
import ray, time
ray.init(logging_level="ERROR")
print(len(ray.nodes()), "nodes,", ray.cluster_resources()["CPU"], "CPUs", flush=True)
time.sleep({seconds})
raise SystemExit(7)
"""
WAIT_SECONDS = 240


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    """A folder to submit from, with its virtual environment, and what Slurm tells a job; two nodes of one CPU."""
    programs = tmp_path / "programs"
    programs.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (programs / name).write_text(text, encoding="utf-8")
        (programs / name).chmod(0o755)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "activate").write_text(f'PATH="{Path(sys.executable).parent}:$PATH"\n')
    job = next(
        number for number in iter(lambda: random.randrange(10**6, 10**7), None) if is_free(20000 + number % 10000)
    )
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "SLURM_"))}
    slurm = {"JOB_ID": job, "JOB_NUM_NODES": 2, "CPUS_PER_TASK": 1, "SUBMIT_DIR": tmp_path}
    yield {
        **kept,
        "PATH": f"{programs}{os.pathsep}{kept['PATH']}",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES": "150000000",
        **{f"SLURM_{name}": str(value) for name, value in slurm.items()},
    }
    shutil.rmtree(f"/tmp/ray-{job}", ignore_errors=True)


def is_free(port: int) -> bool:
    with socket.socket() as each:
        return each.connect_ex(("127.0.0.1", port)) != 0


def start(environment: dict[str, str], *command: str) -> subprocess.Popen[str]:
    folder = Path(environment["SLURM_SUBMIT_DIR"])
    with (folder / "output").open("w") as output:
        return subprocess.Popen(
            ["bash", str(SCRIPT), *command], env=environment, cwd=folder, stdout=output, stderr=output, text=True
        )


def find_raylets(environment: dict[str, str]) -> list[psutil.Process]:
    place = f"/tmp/ray-{environment['SLURM_JOB_ID']}"
    return [process for process in psutil.process_iter(["cmdline"]) if place in " ".join(process.info["cmdline"] or ())]


def end(process: subprocess.Popen[str], environment: dict[str, str]) -> None:
    """Leave nothing behind of a test that failed."""
    process.kill()
    process.wait()
    for raylet in find_raylets(environment):
        raylet.kill()


def test_the_command_is_needed() -> None:
    done = subprocess.run(["bash", str(SCRIPT)], capture_output=True, text=True, timeout=120)
    assert done.returncode != 0 and "give the command" in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_job_has_all_nodes_and_is_requeued_at_its_time_limit(environment: dict[str, str]) -> None:
    folder = Path(environment["SLURM_SUBMIT_DIR"])
    private = folder / f".slurm-{environment['SLURM_JOB_ID']}"
    process = start(environment, "python", "-c", COUNT.format(seconds=600))
    try:
        deadline = time.monotonic() + WAIT_SECONDS
        while "2 nodes, 2.0 CPUs" not in (folder / "output").read_text():
            assert process.poll() is None and time.monotonic() < deadline, (folder / "output").read_text()
            time.sleep(0.5)
        modes = [stat.S_IMODE(path.stat().st_mode) for path in (private, private / "auth_token")]
        assert modes == [0o700, 0o600], "nobody else reads the token"
        process.send_signal(signal.SIGUSR1)
        assert process.wait(timeout=WAIT_SECONDS) != 0
        assert (folder / "scontrol").read_text() == f"requeue {environment['SLURM_JOB_ID']}\n"
        assert not private.exists() and not find_raylets(environment)
    finally:
        end(process, environment)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_job_ends_as_its_command_does(environment: dict[str, str]) -> None:
    environment["SLURM_JOB_NUM_NODES"] = "1"
    process = start(environment, "python", "-c", COUNT.format(seconds=0))
    try:
        assert process.wait(timeout=WAIT_SECONDS) == 7
        assert not find_raylets(environment)
    finally:
        end(process, environment)
