"""Clusters of several raylets on this machine, as `ray start` makes them, with a token."""

from __future__ import annotations

import contextlib
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
from conftest import REPOSITORY
from job_processes import kill_job

START_SECONDS = 240
OBJECT_STORE_BYTES = 150_000_000


@dataclass(frozen=True)
class Cluster:
    """A running cluster: its address, its dashboard, its token, the environment of its clients, and how it grows."""

    address: str
    dashboard: str
    token: str
    environment: dict[str, str]
    add: Callable[..., str] = field(default=lambda *options: "")
    """Start a node with options of `ray start`; returns its id."""
    kill: Callable[[str], None] = field(default=lambda node: None)
    """SIGKILL everything of a node that was added, by its id."""
    list_processes: Callable[[str], list[psutil.Process]] = field(default=lambda node: [])
    """All processes of such a node."""

    def call(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, env=self.environment, cwd=REPOSITORY, capture_output=True, text=True, timeout=900
        )

    def submit(self, *options: str) -> subprocess.CompletedProcess[str]:
        """Call `ray job submit` with some options and a command, once the head takes jobs."""
        deadline = time.monotonic() + START_SECONDS
        while True:
            done = self.call("ray", "job", "submit", "--address", self.dashboard, *options)
            if "No available agent" not in done.stderr or time.monotonic() > deadline:
                return done
            time.sleep(1)

    def get(self, path: str, method: str = "GET") -> Any:
        """Ask the dashboard, with the token."""
        token = {"Authorization": f"Bearer {self.token}"}
        request = urllib.request.Request(f"{self.dashboard}{path}", headers=token, method=method)
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
        is_well = all(process.poll() is None for process in processes) and time.monotonic() < deadline
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


@contextlib.contextmanager
def run_raylets(cpus: Sequence[int], environment: Mapping[str, str] | None = None) -> Iterator[Cluster]:
    """Run a cluster of nodes with so many CPUs each, the first one its head, with some variables more."""
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # paths of sockets are short
    token = folder / "auth_token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32), encoding="utf-8")
    port, dashboard, client = find_port(), find_port(), find_port()
    shared = [
        *("--object-store-memory", str(OBJECT_STORE_BYTES), "--block"),
        *("--dashboard-agent-listen-port", "0"),  # another Ray of this machine may have the usual one
    ]
    started = Cluster(
        f"127.0.0.1:{port}",
        f"http://127.0.0.1:{dashboard}",
        token.read_text(encoding="utf-8"),
        {**make_environment(token), **(environment or {})},
    )
    processes: list[subprocess.Popen[bytes]] = []

    def start(*options: str) -> None:
        own = folder / str(time.monotonic_ns())  # or raylets delete each other's files
        with (folder / f"raylet-{own.name}.log").open("wb") as log:
            command = ["ray", "start", *options, *shared, "--temp-dir", str(own)]
            processes.append(
                subprocess.Popen(command, env=started.environment, stdout=log, stderr=log, start_new_session=True)
            )

    def list_ids() -> set[str]:
        return {listed["node_id"] for listed in started.list("nodes") if listed["state"] == "ALIVE"}

    def join(*options: str) -> str:
        before = list_ids()
        start("--address", started.address, *options)
        wait_for(lambda: bool(list_ids() - before), processes[-1:], folder)
        (node,) = list_ids() - before
        added[node] = processes[-1]
        return node

    def kill(node: str) -> None:
        process = added.pop(node)
        kill_job(process)
        processes.remove(process)

    def list_processes(node: str) -> list[psutil.Process]:
        own = psutil.Process(added[node].pid)
        return [own, *own.children(recursive=True)]

    added: dict[str, subprocess.Popen[bytes]] = {}
    started = replace(started, add=join, kill=kill, list_processes=list_processes)
    try:
        start(
            *("--head", "--port", str(port), "--dashboard-port", str(dashboard), "--num-cpus", str(cpus[0])),
            *("--ray-client-server-port", str(client)),
        )
        wait_for(lambda: bool(started.list("nodes")), processes, folder)
        for number in cpus[1:]:
            start("--address", started.address, "--num-cpus", str(number))
        wait_for(lambda: len(started.list("nodes")) == len(cpus), processes, folder)
        yield started
    finally:
        for process in reversed(processes):  # the head last
            process.terminate()
            try:
                process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)
