"""Jobs that are submitted with relative paths: the second one finds what the first one wrote, and nothing goes with Ray."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import FEW_SENTENCES, write_corpus
from raylets import START_SECONDS, Cluster, run_raylets

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

SHORT = (
    "--train.max_steps 4 --train.global_batch_size 8 --train.seq_length 32 --train.eval_rows 16 --replay.corpus none"
)
SHORT += f" --engine.precision fp32 --method.ffn_units 8 --train.general_probe {FEW_SENTENCES} --scale.use_gpu false"
SCRIPT = """
import json, sys, domext_ray

run = domext_ray.Run("runs/clinic")
tokenizer, model = domext_ray.load(run)
print("loaded", run.summary["train"]["steps"], type(model).__name__)
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def cluster(home: Path) -> Iterator[Cluster]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("HOME", str(home))
        patched.setenv("XDG_CACHE_HOME", str(home / ".cache"))
        with run_raylets([2]) as started:
            yield started


@pytest.fixture(scope="module")
def working_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    (folder / "texts").mkdir()
    write_corpus(folder / "texts" / "notes.txt", 300)
    (folder / "script.py").write_text(SCRIPT)
    return folder


def submit(cluster: Cluster, folder: Path, command: str) -> subprocess.CompletedProcess[str]:
    deadline = time.monotonic() + START_SECONDS
    words = ("ray", "job", "submit", "--address", cluster.dashboard, "--working-dir", str(folder), "--")
    while True:
        done = cluster.call(*words, *command.split())
        if "No available agent" not in done.stderr or time.monotonic() > deadline:  # the head still starts
            return done
        time.sleep(1)


def test_a_submitted_job_finds_what_an_earlier_one_wrote(
    cluster: Cluster, home: Path, working_dir: Path, tiny_base_folder: Path
) -> None:
    runs = home / "domext_runs"
    train = f"domext pretrain af --base {tiny_base_folder} --corpus texts --run.name clinic {SHORT}"
    for command, says in {
        train: f"run directory: {runs}/clinic",
        "domext embed --model runs/clinic --input texts/*.txt --output vectors --scale.use_gpu false": f"{runs}/vectors",
        "domext bank --bank bank --add runs/clinic --name notes": f"{runs}/bank",
        "domext export_hf --run runs/clinic --output exported": f"export: {runs}/exported",
        "domext verify runs/clinic": "whole",
        "python script.py": "loaded 4 ",
    }.items():
        done = submit(cluster, working_dir, command)
        assert done.returncode == 0 and says in done.stdout, done.stdout[-3000:] + done.stderr[-3000:]
    summary = json.loads((runs / "clinic" / "summary.json").read_text())
    assert summary["train"]["steps"] == 4 and [*(runs / "vectors" / "predictions").glob("*.parquet")]
    assert (runs / "bank" / "bank.json").is_file() and (runs / "exported" / "config.json").is_file()
    refused = submit(cluster, working_dir, "domext predict --model runs/nope/x/y --input texts --output found")
    assert refused.returncode != 0
    assert (
        f"'runs/nope/x/y' was looked for in the working directory of this submitted job, and as {runs}/nope/x/y."
        in (refused.stdout)
    )
    left = {each.name for each in runs.iterdir()}
    assert left == {"clinic", "vectors", "bank", "exported", ".corpora", "index.html"}
