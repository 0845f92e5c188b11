"""A run in a bucket on nodes that come and go, with no shared disk: it goes on, and reads each row once."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import FEW_SENTENCES, REPOSITORY, write_corpus
from lone_process import check_export
from object_store import BUCKET, serve_objects, use_objects
from raylets import Cluster, run_raylets

from domext_ray.runs.events import EventReader
from domext_ray.storage import Place
from domext_ray.training.checkpoint import list_steps
from domext_ray.training.metrics import find_last_step, read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
NUM_STEPS, SAVE_EVERY = 4000, 100
IMPATIENT = "from domext_ray.training import crew; crew.GROW_SECONDS = 5.0; "
PATIENCE_SECONDS = 400


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
        *("--method.ffn_units", "8", "--optim.lr", "1e-3", "--replay.corpus", "none", "--run.trackers", "[]"),
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


def test_nodes_come_and_go(cluster: Cluster, tiny_base_folder: Path, tmp_path: Path) -> None:
    corpus = f"{BUCKET}/texts/corpus.txt"
    Place(corpus).put(write_corpus(tmp_path / "corpus.txt", 3000))
    run, alone = Place(f"{BUCKET}/elastic/moving"), Place(f"{BUCKET}/elastic/alone")
    nodes = [cluster.add("--num-cpus", "1") for _ in range(3)]
    undisturbed = Submitted(cluster, list_command(tiny_base_folder, corpus, "alone"), tmp_path / "alone.log")
    undisturbed.wait()

    command = list_command(tiny_base_folder, corpus, "moving", "--scale.num_workers", "1-3")
    job = Submitted(cluster, command, tmp_path / "moving.log")
    said = EventReader(run, from_start=True)
    sentences: list[str] = []

    def step() -> int:
        return find_last_step(run / "metrics.jsonl")

    def has_said(part: str) -> bool:
        sentences.extend(each.text for each in said.read())
        return any(part in each for each in sentences)

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
    losses = [[each.get("train/mlm_loss") for each in read_metrics(each / "metrics.jsonl")] for each in (run, alone)]
    tokens = [[each.get("train/tokens") for each in read_metrics(each / "metrics.jsonl")] for each in (run, alone)]
    assert tokens[0] == tokens[1] and len(tokens[0]) == NUM_STEPS + 1
    assert losses[0][1:] == pytest.approx(losses[1][1:], abs=1e-4)
    check_export(run / "export")
