"""A cluster of three raylets with token authentication: a submitted sweep spreads over them."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import write_corpus
from labelled_fixtures import write_ner

REPOSITORY = Path(__file__).resolve().parents[2]
NUM_WORKERS = 2
"""Raylets beside the head, which has no CPU, as in the cluster files."""
START_SECONDS = 240
OBJECT_STORE_BYTES = 150_000_000

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@dataclass(frozen=True)
class Cluster:
    """A running cluster: its dashboard, its token, and the environment of its clients."""

    dashboard: str
    token: str
    environment: dict[str, str]

    def call(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, env=self.environment, cwd=REPOSITORY, capture_output=True, text=True, timeout=900
        )

    def get(self, path: str) -> Any:
        """Ask the dashboard, with the token."""
        request = urllib.request.Request(f"{self.dashboard}{path}", headers={"Authorization": f"Bearer {self.token}"})
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)

    def list(self, what: str) -> list[dict[str, Any]]:
        """List the nodes or the actors; empty while the cluster starts."""
        try:
            return self.get(f"/api/v0/{what}")["data"]["result"]["result"]
        except (urllib.error.URLError, TimeoutError):
            return []


def find_port() -> int:
    with socket.socket() as each:
        each.bind(("127.0.0.1", 0))
        return int(each.getsockname()[1])


def wait_for(condition: Callable[[], bool], processes: list[subprocess.Popen[bytes]], folder: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not condition():
        is_well = all(each.poll() is None for each in processes) and time.monotonic() < deadline
        assert is_well, "\n".join(path.read_text(encoding="utf-8") for path in sorted(folder.glob("raylet-*.log")))
        time.sleep(1)


def make_environment(token: Path) -> dict[str, str]:
    """The environment of a cluster of its own: nothing of a Ray that this session runs, and the token of a file."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return {
        **kept,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{kept['PATH']}",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_USAGE_STATS_ENABLED": "0",
        "OMP_NUM_THREADS": "1",
    }


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # paths of sockets are short
    token = folder / "auth_token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32), encoding="utf-8")
    port, dashboard, client = find_port(), find_port(), find_port()
    shared = [
        *("--object-store-memory", str(OBJECT_STORE_BYTES), "--block"),
        *("--dashboard-agent-listen-port", "0"),  # another Ray of this machine may have the usual one
    ]
    started = Cluster(f"http://127.0.0.1:{dashboard}", token.read_text(encoding="utf-8"), make_environment(token))
    processes: list[subprocess.Popen[bytes]] = []

    def start(*options: str) -> None:
        own = folder / str(len(processes))  # as on a machine of its own: raylets delete each other's files otherwise
        with (folder / f"raylet-{len(processes)}.log").open("wb") as log:
            command = ["ray", "start", *options, *shared, "--temp-dir", str(own)]
            processes.append(
                subprocess.Popen(command, env=started.environment, stdout=log, stderr=log, start_new_session=True)
            )

    try:
        start(
            *("--head", "--port", str(port), "--dashboard-port", str(dashboard), "--num-cpus", "0"),
            *("--ray-client-server-port", str(client)),
        )
        wait_for(lambda: bool(started.list("nodes")), processes, folder)
        for _ in range(NUM_WORKERS):
            start("--address", f"127.0.0.1:{port}", "--num-cpus", "1")
        wait_for(lambda: len(started.list("nodes")) == 1 + NUM_WORKERS, processes, folder)
        yield started
    finally:
        for process in reversed(processes):  # the head last
            process.terminate()
            try:
                process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def sweep_file(tiny_base_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep of four trials, for a few seconds each."""
    folder = tmp_path_factory.mktemp("sweep")
    options = {
        "space": {"method.heads": {"choice": [0, 1]}, "method.ffn_units": {"choice": [8, 16]}},
        "search": {"searcher": "grid", "parallel": NUM_WORKERS},
        "budget": {"steps": 6},
        "base": str(tiny_base_folder),
        "corpus": str(write_corpus(folder / "corpus.txt", 1000)),
        "tasks": "ner",
        "data": str(write_ner(folder / "ner")),
        "run": {"name": "tiny", "dir": str(folder / "runs"), "tensorboard": False, "keep_checkpoints": 1},
        "train": {"global_batch_size": 8, "seq_length": 32, "eval_rows": 40, "eval_every": 100, "dropout": 0.0},
        "engine": {"precision": "fp32"},
        "finetune": {
            "method": {"name": "full", "trains": "all", "domain": "task", "heads": 0, "ffn_units": 0},
            "labelled": {"max_length": 32, "stride": 8},
            "grid": {"lr": "6e-3", "batch_size": "8", "epochs": "1"},
            "engine": {"precision": "fp32"},
        },
    }
    path = folder / "sweep.yaml"
    path.write_text(yaml.safe_dump(options), encoding="utf-8")
    return path


def submit(cluster: Cluster, *command: str) -> subprocess.CompletedProcess[str]:
    """Submit a job and follow it to its end."""
    options = ("--address", cluster.dashboard, "--working-dir", str(REPOSITORY))
    deadline = time.monotonic() + START_SECONDS
    while True:
        done = cluster.call("ray", "job", "submit", *options, "--", *command)
        if "No available agent" not in done.stderr or time.monotonic() > deadline:  # the head still starts
            return done
        time.sleep(1)


def test_the_job_server_refuses_who_has_no_token(cluster: Cluster) -> None:
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(f"{cluster.dashboard}/api/jobs/")


def test_a_submitted_sweep_spreads_over_the_cluster(cluster: Cluster, sweep_file: Path) -> None:
    command = ("python", "jobs/sweep.py", "--config_path", str(sweep_file))
    done = submit(cluster, *command)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    folder = sweep_file.parent / "runs" / "tiny"
    trials = json.loads((folder / "summary.json").read_text(encoding="utf-8"))["trials"]
    assert len(trials) == 4 and all(each["status"] == "complete" for each in trials)
    assert (folder / "best.yaml").exists() and (folder / "sweep.html").exists()
    actors = [each for each in cluster.list("actors") if each["class_name"].endswith("ResourceTrainable")]  # Ray Tune's
    assert len({each["node_id"] for each in actors}) == NUM_WORKERS, "trials ran on every worker"
    again = submit(cluster, *command)
    assert again.returncode == 0 and "nothing is left to do" in again.stdout
