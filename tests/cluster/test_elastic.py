"""A run in a bucket on nodes that come and go, with no shared disk: it goes on, and reads each row once."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from conftest import FEW_SENTENCES, REPOSITORY, write_corpus
from lone_process import check_export
from object_store import BUCKET, serve_objects, use_objects
from raylets import Cluster, find_port, run_raylets

from domext_ray.runs.events import EventReader
from domext_ray.storage import Place
from domext_ray.training.checkpoint import list_steps
from domext_ray.training.metrics import find_last_step, read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
NUM_STEPS, SAVE_EVERY = 4000, 100
IMPATIENT = "from domext_ray.training import elastic; elastic.GROW_SECONDS = 5.0; "
PATIENCE_SECONDS = 1200


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    """An S3 server that all nodes and this process use; yields its address."""
    with serve_objects() as address, pytest.MonkeyPatch.context() as patch:
        use_objects(address, patch)
        yield address


@pytest.fixture
def cluster(bucket: str) -> Iterator[Cluster]:
    with run_raylets([0]) as started:
        yield started


def list_command(base: Path, corpus: str, name: str, *options: str) -> list[str]:
    """A run without dropout, at fp32, whose steps are those of any number of workers."""
    return [
        *(sys.executable, "-c", f"{IMPATIENT}from domext_ray.commands.main import main; main()", "pretrain", "af"),
        *("--base", str(base), "--corpus", corpus, "--run.dir", f"{BUCKET}/elastic", "--run.name", name),
        *("--train.max_steps", str(NUM_STEPS), "--train.global_batch_size", "8", "--train.seq_length", "32"),
        *("--train.save_every", str(SAVE_EVERY), "--train.evaluate_every", "2000", "--train.eval_rows", "16"),
        *("--train.general_probe", str(FEW_SENTENCES), "--train.dropout", "0", "--engine.precision", "fp32"),
        *("--method.ffn_units", "8", "--optim.lr", "1e-3", "--replay.corpus", "none", "--run.trackers", "prometheus"),
        *("--scale.use_gpu", "false", *options),
    ]


class Submitted:
    """A job that is submitted through the dashboard's address, and followed."""

    def __init__(self, cluster: Cluster, command: list[str], log: Path) -> None:
        self.cluster, self.log = cluster, log
        with log.open("w") as file:
            self.process = subprocess.Popen(
                ["ray", "job", "submit", "--address", cluster.dashboard, "--", *command],
                env=cluster.environment, cwd=REPOSITORY, stdout=file, stderr=file,
            )  # fmt: skip

    def wait_until(self, happened: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not happened():
            said = self.log.read_text()
            assert self.process.poll() is None and time.monotonic() < deadline, said[-6000:]
            time.sleep(0.1)

    def wait(self) -> str:
        assert self.process.wait(PATIENCE_SECONDS) == 0, self.log.read_text()[-6000:]
        return self.log.read_text()


@pytest.fixture(scope="module")
def corpus(bucket: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    place = f"{BUCKET}/texts/corpus.txt"
    Place(place).put(write_corpus(tmp_path_factory.mktemp("text") / "corpus.txt", 3000))
    return place


@pytest.fixture(scope="module")
def alone(corpus: str, tiny_base_folder: Path) -> Place:
    """A run of one worker on a Ray of its own."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    command = list_command(tiny_base_folder, corpus, "alone")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return Place(f"{BUCKET}/elastic/alone")


def check_equal(run: Place, alone: Place) -> None:
    """Every step was made once, of the same rows, and has the same loss."""
    found = [read_metrics(place / "metrics.jsonl") for place in (run, alone)]
    tokens, losses = (
        [[record.get(name) for record in own] for own in found] for name in ("train/tokens", "train/mlm_loss")
    )
    assert tokens[0] == tokens[1] and len(tokens[0]) == NUM_STEPS + 1
    assert losses[0][1:] == pytest.approx(losses[1][1:], abs=1e-4)


def find_gauges(ports: list[int]) -> dict[str, float]:
    """What Prometheus finds of a run on nodes, by the ports of their counters."""
    pages = [urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30).read().decode() for port in ports]
    return {name: float(value) for name, value in re.findall(r"^ray_domext_(\w+)\{.*\} (\S+)$", "\n".join(pages), re.M)}


def test_nodes_come_and_go(cluster: Cluster, tiny_base_folder: Path, corpus: str, alone: Place, tmp_path: Path) -> None:
    run = Place(f"{BUCKET}/elastic/moving")
    ports = [find_port() for _ in range(3)]
    nodes = [cluster.add("--num-cpus", "1", "--metrics-export-port", str(port)) for port in ports]
    command = list_command(tiny_base_folder, corpus, "moving", "--scale.num_workers", "1-3")
    job = Submitted(cluster, command, tmp_path / "moving.log")
    said = EventReader(run, from_start=True)
    sentences: list[str] = []

    def step() -> int:
        return find_last_step(run / "metrics.jsonl")

    def has_said(part: str) -> bool:
        sentences.extend(event.text for event in said.read())
        return any(part in sentence for sentence in sentences)

    # Prometheus reads of a node how the run is.
    job.wait_until(lambda: len(find_gauges(ports)) == 5)
    gauges = find_gauges(ports)
    assert (
        gauges["tokens_per_second"] > 0 and gauges["step"] > 0 and abs(gauges["saved_time_seconds"] - time.time()) < 600
    )

    # A node is taken back, with notice: nothing is lost.
    job.wait_until(lambda: step() >= 40)
    drained = nodes.pop()
    drain = ("ray", "drain-node", "--address", cluster.address, "--node-id", drained)
    reason = ("--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "spot")
    cluster.call(*drain, *reason, "--deadline-remaining-seconds", "120")
    job.wait_until(lambda: has_said("a machine of the workers' is taken back; training starts again."))
    saved = max(list_steps(run / "checkpoints"))
    assert saved == step() and saved % SAVE_EVERY
    job.wait_until(lambda: has_said("2 of 1-3 workers train."))
    cluster.kill(drained)

    # A node vanishes: the steps since the last save are lost.
    job.wait_until(lambda: step() >= saved + 150)
    cluster.kill(nodes.pop())
    job.wait_until(lambda: has_said("failure 1 of at most 3 (--scale.max_failures); all workers start again."))
    job.wait_until(lambda: has_said("1 of 1-3 workers train."))

    # Two come: it grows.
    before = step()
    job.wait_until(lambda: step() > before)
    nodes += [cluster.add("--num-cpus", "1") for _ in range(2)]
    job.wait_until(lambda: has_said("training starts again.") and has_said("there is room for "))
    assert step() < NUM_STEPS, "it grew before its end"
    print(job.wait())
    check_equal(run, alone)
    check_export(run / "export")


def test_a_node_that_does_not_answer_is_left_behind(
    cluster: Cluster, tiny_base_folder: Path, corpus: str, alone: Place, tmp_path: Path
) -> None:
    """All of a node is frozen, as one is whose network is gone; when it is back, the run has gone on without it."""
    run = Place(f"{BUCKET}/elastic/frozen")
    nodes = [cluster.add("--num-cpus", "1") for _ in range(2)]
    job = Submitted(
        cluster, list_command(tiny_base_folder, corpus, run.name, "--scale.num_workers", "1-2"), tmp_path / "job.log"
    )
    job.wait_until(lambda: find_last_step(run / "metrics.jsonl") >= 40)
    frozen = cluster.list_processes(nodes[0])
    for process in frozen:
        process.suspend()
    job.wait_until(lambda: "1 of 1-2 workers train." in job.log.read_text())
    for process in frozen:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.resume()
    said = job.wait()
    assert "failure 1 of at most 3" in said and "failure 2" not in said
    check_equal(run, alone)
