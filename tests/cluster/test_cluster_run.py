"""A cluster of three raylets with token authentication: a submitted sweep spreads over them."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from conftest import write_corpus
from labelled_fixtures import write_ner
from raylets import REPOSITORY, Cluster, run_raylets

NUM_WORKERS = 2
"""Raylets beside the head, which has no CPU, as in the cluster files."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with run_raylets([0] + NUM_WORKERS * [1]) as started:
        yield started


@pytest.fixture(scope="module")
def sweep_file(tiny_base_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep of four trials, each longer than a second process takes to start: Ray Tune uses again what is there."""
    folder = tmp_path_factory.mktemp("sweep")
    options = {
        "space": {"method.heads": {"choice": [0, 1]}, "method.ffn_units": {"choice": [8, 16]}},
        "search": {"searcher": "grid", "parallel": NUM_WORKERS},
        "budget": {"steps": 400},
        "base": str(tiny_base_folder),
        "corpus": str(write_corpus(folder / "corpus.txt", 1000)),
        "tasks": "ner",
        "data": str(write_ner(folder / "ner")),
        "run": {"name": "tiny", "dir": str(folder / "runs"), "trackers": [], "keep_checkpoints": 1},
        "train": {"global_batch_size": 8, "seq_length": 32, "eval_rows": 40, "evaluate_every": 100, "dropout": 0.0},
        "engine": {"precision": "fp32"},
        "scale": {"cpus_per_worker": 0.6},  # two of them do not fit on one node
        "finetune": {
            "method": {"name": "full", "trains": "all", "adapter": "task", "heads": 0, "ffn_units": 0},
            "labelled": {"max_length": 32, "stride": 8},
            "grid": {"lr": "6e-3", "batch_size": "8", "epochs": "1"},
            "engine": {"precision": "fp32"},
        },
    }
    path = folder / "sweep.yaml"
    path.write_text(yaml.safe_dump(options), encoding="utf-8")
    return path


def test_the_job_server_refuses_who_has_no_token(cluster: Cluster) -> None:
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(f"{cluster.dashboard}/api/jobs/")


def test_a_submitted_sweep_spreads_over_the_cluster(cluster: Cluster, sweep_file: Path) -> None:
    command = ("--working-dir", str(REPOSITORY), "--", "python", "jobs/sweep.py", "--config", str(sweep_file))
    done = cluster.submit(*command)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    folder = sweep_file.parent / "runs" / "tiny"
    trials = json.loads((folder / "summary.json").read_text(encoding="utf-8"))["trials"]
    assert len(trials) == 4 and all(trial["status"] == "complete" for trial in trials)
    assert (folder / "best.yaml").exists() and (folder / "sweep.html").exists()
    actors = [
        actor
        for actor in cluster.list("actors")
        if actor["class_name"].endswith("ResourceTrainable")  # Ray Tune's
    ]
    assert len({actor["node_id"] for actor in actors}) == NUM_WORKERS, "trials ran on every worker"
    again = cluster.submit(*command)
    assert again.returncode == 0 and "nothing is left to do" in again.stdout
