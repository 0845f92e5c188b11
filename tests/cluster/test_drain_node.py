"""drain_node.py: a notice of a cloud is seen, and a node of a real Ray is drained, waited for and named."""

from __future__ import annotations

import contextlib
import os
import re
import runpy
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from cluster_files import CLUSTER
from raylets import Cluster, find_port, run_raylets

SCRIPT = str(CLUSTER / "drain_node.py")
HOLDER = """
import ray, time
ray.init(log_to_driver=False)
@ray.remote(num_cpus=2)
class Holder:
    def where(self):
        return ray.get_runtime_context().get_node_id()
holder = Holder.remote()
print(ray.get(holder.where.remote()), flush=True)
input()
"""
"""A driver whose actor keeps the node of two CPUs busy, until it is told to end."""


@contextlib.contextmanager
def serve_metadata(cloud: str, quiet_questions: int) -> Iterator[tuple[str, list[str]]]:
    """Serve a cloud's metadata, with a notice after so many questions; yield the address and what was asked."""
    asked: list[str] = []

    class Metadata(BaseHTTPRequestHandler):
        def answer(self, status: int, text: str = "") -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def do_PUT(self) -> None:
            is_right = cloud == "aws" and self.path == "/latest/api/token"
            seconds = self.headers.get("X-aws-ec2-metadata-token-ttl-seconds", "")
            self.answer(200 if is_right and seconds.isdigit() else 400, "the token")

        def do_GET(self) -> None:
            asked.append(self.path)
            has_notice = len(asked) > quiet_questions
            if cloud == "gcp":
                is_right = self.headers.get("Metadata-Flavor") == "Google"
                self.answer(200 if is_right else 403, "TRUE" if has_notice else "FALSE")
            elif self.headers.get("X-aws-ec2-metadata-token") != "the token":
                self.answer(401)
            elif has_notice:
                self.answer(200, '{"action": "terminate", "time": "2026-11-26T18:00:00Z"}')
            else:
                self.answer(404)

        def log_message(self, *words: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Metadata) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", asked
        server.shutdown()


@pytest.mark.parametrize(
    ("cloud", "page"),
    [("aws", "/latest/meta-data/spot/instance-action"), ("gcp", "/computeMetadata/v1/instance/preempted")],
)
def test_a_notice_is_waited_for(cloud: str, page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # which knows nothing of this machine
    with serve_metadata(cloud, 2) as (url, asked):
        runpy.run_path(SCRIPT)["wait_for_notice"](cloud, url)
    assert asked == [page] * 3


def test_a_machine_of_no_cloud_is_told() -> None:
    with pytest.raises(ConnectionError, match="no metadata service of aws at http://127.0.0.1:"):
        runpy.run_path(SCRIPT)["wait_for_notice"]("aws", f"http://127.0.0.1:{find_port()}")


def test_without_a_cluster_it_says_so() -> None:
    environment = {**os.environ, "RAY_ADDRESS": f"127.0.0.1:{find_port()}"}
    done = subprocess.run([sys.executable, SCRIPT], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "refused" in done.stderr
    assert done.stderr.startswith("error: ") and len(done.stderr.splitlines()) == 1


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with run_raylets([0, 2, 1]) as started:
        started.environment["RAY_ADDRESS"] = started.address
        yield started


def list_alive(cluster: Cluster) -> dict[float, str]:
    """The ids of the nodes that are alive, by their CPUs; the head has none."""
    alive = [node for node in cluster.list("nodes") if node["state"] == "ALIVE"]
    return {node["resources_total"].get("CPU", 0): node["node_id"] for node in alive}


def list_draining(cluster: Cluster) -> list[str]:
    """Ask Ray itself, in a process of its own."""
    code = "import sys; from ray._raylet import GcsClient; print(*GcsClient(address=sys.argv[1]).get_draining_nodes())"
    return cluster.call(sys.executable, "-c", code, cluster.address).stdout.split()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_node_that_cannot_be_drained_is_told_in_a_sentence(cluster: Cluster) -> None:
    """Two workers' nodes have this machine's address, the head is never drained, and a token is asked for."""
    nodes = list_alive(cluster)
    wrong = {"RAY_AUTH_TOKEN": "0" * 64}
    told = {
        "2 workers' nodes at ": ((), {}),
        "0 workers' nodes at ": (("--node-id", nodes[0]), {}),
        "refuses the token": (("--node-id", nodes[1]), wrong),
    }
    for says, (options, environment) in told.items():
        done = replace(cluster, environment=cluster.environment | environment).call(sys.executable, SCRIPT, *options)
        assert done.returncode == 1 and says in done.stderr
        errors = [line for line in done.stderr.splitlines() if not re.match(r"\[.* W ", line)]  # Ray warns, too
        assert len(errors) == 1 and errors[0].startswith("error: "), done.stderr
    assert list_alive(cluster) == nodes and list_draining(cluster) == []


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_node_is_drained_when_the_notice_comes_and_waited_for(cluster: Cluster) -> None:
    """An idle node ends at once; then this machine's only one is drained, and ends when its actor has gone."""
    nodes = list_alive(cluster)
    done = cluster.call(sys.executable, SCRIPT, "--node-id", nodes[1])
    assert (done.returncode, done.stderr) == (0, "") and list_alive(cluster).keys() == {0, 2}
    driver = subprocess.Popen(
        [sys.executable, "-c", HOLDER],
        env=cluster.environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert driver.stdin and driver.stdout and driver.stdout.readline().strip() == nodes[2]
    with serve_metadata("aws", 1) as (url, asked):
        command = [sys.executable, SCRIPT, "--watch", "aws", "--metadata-url", url, "--seconds", "300"]
        with subprocess.Popen(command, env=cluster.environment, stdout=subprocess.PIPE, text=True) as draining:
            assert draining.stdout and draining.stdout.readline() == f"draining the node {nodes[2]} for 300 s\n"
            assert len(asked) == 2 and list_draining(cluster) == [nodes[2]]
            assert draining.poll() is None, "the actor is still there"
            driver.communicate("\n", timeout=120)
            assert draining.wait(120) == 0, "Ray ends a drained node that has no work left"
    assert list_alive(cluster).keys() == {0}
