"""Four nodes of one CPU each, where sums over the cluster say nothing: what fits trains, what does not is refused."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import write_corpus
from raylets import Cluster, run_raylets

from domext_ray.runtime.device import has_bf16_units

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with run_raylets([1, 1, 1, 1]) as started:
        started.environment["RAY_ADDRESS"] = started.address
        yield started


@pytest.fixture(scope="module")
def command(tiny_base_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("small")
    corpus = write_corpus(folder / "corpus.txt", 1000)
    options = {
        "base": tiny_base_folder,
        "corpus": corpus,
        "run.dir": folder / "runs",
        "run.trackers": "[]",
        "train.max_steps": 6,
        "train.global_batch_size": 8,
        "train.seq_length": 32,
        "train.eval_rows": 20,
    }
    flags = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return [sys.executable, "jobs/pretrain_af.py", "--replay.corpus", "none", "--method.ffn_units", "8", *flags]


def test_a_worker_on_every_node_trains(cluster: Cluster, command: list[str]) -> None:
    done = cluster.call(*command, "--scale.num_workers", "4", "--run.name", "four")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    folder = Path(command[command.index("--run.dir") + 1]) / "four"
    assert json.loads((folder / "summary.json").read_text(encoding="utf-8"))["train"]["steps"] == 6
    # Every node was asked for its processor, and all are this machine.
    precision = "bf16" if has_bf16_units() else "fp32"
    assert f"  precision: {precision}\n" in (folder / "config.yaml").read_text(encoding="utf-8")


def test_workers_that_leave_no_room_for_reading_are_refused(cluster: Cluster, command: list[str]) -> None:
    options = ("--scale.num_workers", "4", "--scale.cpus_per_worker", "0.87", "--run.name", "refused")
    done = cluster.call(*command, *options)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert (
        "error: --scale.num_workers 4 needs 0.87 CPUs for each worker (--scale.cpus_per_worker), and on 4 nodes of 1 "
        "CPU they may leave no node the 0.25 CPUs that a reading task asks for; lower one of the two, or add nodes."
    ) in done.stderr
    assert not (Path(command[command.index("--run.dir") + 1]) / "refused").exists()
