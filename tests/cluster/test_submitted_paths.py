"""Jobs that are submitted with relative paths: one finds what another one wrote, and nothing goes with Ray."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import FEW_SENTENCES, write_corpus
from raylets import Cluster, run_raylets

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

SHORT = (
    "--train.max_steps 4 --train.global_batch_size 8 --train.seq_length 32 --train.eval_rows 16 --replay.corpus none"
)
SHORT += f" --engine.precision fp32 --method.ffn_units 8 --train.general_probe {FEW_SENTENCES} --scale.use_gpu false"
SCRIPT = """
import domext_ray

run = domext_ray.Run("runs/clinic")
tokenizer, model = domext_ray.load(run)
print("loaded", run.summary["train"]["steps"], "steps")
domext_ray.AdapterBank.create("bank", BASE)
domext_ray.AdapterBank.open("runs/bank").add_run("notes", run.directory)
try:
    domext_ray.finetune("ner", "nothing/of/this", run)
except domext_ray.DomextError as error:
    print(error)
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
def working_dir(tmp_path_factory: pytest.TempPathFactory, tiny_base_folder: Path) -> Path:
    folder = tmp_path_factory.mktemp("project")
    (folder / "texts").mkdir()
    write_corpus(folder / "texts" / "notes.txt", 300)
    (folder / "script.py").write_text(SCRIPT.replace("BASE", repr(str(tiny_base_folder))))
    return folder


def test_a_submitted_job_finds_what_an_earlier_one_wrote(
    cluster: Cluster, home: Path, working_dir: Path, tiny_base_folder: Path
) -> None:
    runs = home / "domext_runs"
    train = f"domext pretrain af --base {tiny_base_folder} --corpus texts --run.name clinic {SHORT}"
    for command, says in {
        train: f"run directory: {runs}/clinic",
        "domext embed --model runs/clinic --input texts/*.txt --output vectors": f"vectors, .*: {runs}/vectors",
        "python script.py": rf"loaded 4 steps\n.*'nothing/of/this' was looked for .* and as {runs}/nothing/of/this\.",
    }.items():
        done = cluster.submit("--working-dir", str(working_dir), "--", *command.split())
        said = done.stdout[-3000:] + done.stderr[-3000:]
        assert done.returncode == 0 and re.search(says, done.stdout), said
    assert json.loads((runs / "clinic" / "summary.json").read_text())["train"]["steps"] == 4
    assert [*(runs / "vectors" / "predictions").glob("*.parquet")] and (runs / "bank" / "adapters" / "notes").is_dir()
    left = {path.name for path in runs.iterdir()}
    assert left == {"clinic", "vectors", "bank", ".corpora", "index.html"}
