"""jobs/benchmark.py: what its verbs write, and the tables that are made of it."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import FEW_SENTENCES, REPOSITORY, write_corpus
from ray._private import services

from domext_ray.errors import RunError

JOBS = REPOSITORY / "jobs"


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(JOBS)


def write_step(folder: Path, *, seconds: tuple[float, ...] = (1.0, 3.0, 2.0), **case: Any) -> dict[str, Any]:
    """Write the record of a step that took another side twice as long; return what the file holds."""
    from benchmarks.output import Measured, Record, write_records

    case = {"layout": "bert", "layers": 12, "precision": "fp32", "length": 128, "rows": 8, "method": "af"} | case
    results = [Measured("domext_ray", "s", seconds), Measured("rival", "s", [2 * each for each in seconds])]
    figures = {"ratio": 2.0, "tokens_per_second": 512.0}
    options = Namespace(output=str(folder), publish=False, base="/home/somebody/bert", run=print, repeats=3)
    known = {*folder.glob("*")}
    write_records(options, [Record("step", {**case, "sizes": "1 head"}, results, figures)], torch.device("cpu"))
    (path,) = {*folder.glob("*")} - known
    return dict(json.loads(path.read_text()))


def make_repository(folder: Path, **documents: str) -> Path:
    from benchmarks.tables import DOCUMENTS

    for name in DOCUMENTS:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(documents.get(Path(name).stem, "nothing is marked here\n"))
    (folder / ".github" / "benchmarks").mkdir()
    return folder


def test_a_record_has_every_repetition_and_no_place(tmp_path: Path) -> None:
    content = write_step(tmp_path / "records")
    assert content["results"][0] == {
        "name": "domext_ray",
        "unit": "s",
        "values": [1.0, 3.0, 2.0],
        "median": 2.0,
        "min": 1.0,
        "max": 3.0,
    }
    assert content["versions"].keys() >= {"python", "torch", "transformers", "domext_ray"}
    assert content["machine"]["threads"] == torch.get_num_threads()
    assert content["settings"] == {"base": "bert", "repeats": 3}
    (path,) = (tmp_path / "records").iterdir()
    assert path.name.endswith("_step_bert_12_fp32_128_8_af_1-head.json")
    assert str(tmp_path) not in path.read_text() and "/home" not in path.read_text()


def test_a_table_and_a_figure_are_made_of_records(tmp_path: Path) -> None:
    from benchmarks.tables import update_documents

    marked = (
        "before\n<!-- benchmark: step layout=bert -->\n<!-- end -->\n<!-- figure: step ratio rows=4 --><!-- end --> x\n"
    )
    folder = make_repository(tmp_path, README=marked)
    records = folder / ".github" / "benchmarks"
    for rows, length in ((4, 512), (8, 128)):
        write_step(records, rows=rows, length=length)
    write_step(records, rows=8, length=128, process="worker")
    write_step(records, layout="modernbert")
    assert update_documents(folder, is_check=True) == ["README.md", "jobs/README.md"]
    assert (folder / "README.md").read_text() == marked
    assert update_documents(folder) == ["README.md", "jobs/README.md"]
    lines = (folder / "README.md").read_text().splitlines()
    assert lines[2] == "| | precision | tokens per row | rows | ours, s | other, s | ratio | tokens/s |"
    assert lines[4] == "| AF Adapter (1 head) | fp32 | 128 | 8 | 2.00 (1.00–3.00) | 4.00 (2.00–6.00) | 2.00 | 512 |"
    assert lines[5].startswith("| AF Adapter (1 head), as a worker | fp32 | 128 | 8 |")
    assert lines[6].startswith("| AF Adapter (1 head) | fp32 | 512 | 4 |")
    assert "torch" in lines[8] and lines[-1] == "<!-- figure: step ratio rows=4 -->2.00<!-- end --> x"
    assert update_documents(folder) == update_documents(folder, is_check=True) == []


@pytest.mark.parametrize(
    ("marker", "says"),
    [
        ("benchmark: step layout=roberta", "does not have; measure it with --publish"),
        ("benchmark: nothing", "does not have"),
        ("figure: step speed rows=8", "names no figure; .* takes: ratio, tokens_per_second"),
        ("figure: step ratio", "fits 2 records; add a condition"),
    ],
)
def test_a_marker_that_nothing_fits_is_named(marker: str, says: str, tmp_path: Path) -> None:
    from benchmarks.tables import update_documents

    folder = make_repository(tmp_path, RESULTS=f"<!-- {marker} --><!-- end -->")
    for rows in (4, 8):
        write_step(folder / ".github" / "benchmarks", rows=rows)
    with pytest.raises(RunError, match=says) as error:
        update_documents(folder)
    assert marker.split(": ")[1] in str(error.value)


def test_a_damaged_record_is_named(tmp_path: Path) -> None:
    from benchmarks.tables import update_documents

    folder = make_repository(tmp_path)
    (folder / ".github" / "benchmarks" / "x.json").write_text('{"kind": "step"}')
    with pytest.raises(RunError, match=r"x\.json .*--publish"):
        update_documents(folder)


def run_verb(*words: str) -> None:
    options = runpy.run_path(str(JOBS / "benchmark.py"))["parse_options"](words)
    options.run(options)


SMALL = "--layers 2 --lengths 16 --tokens 32 --repeats 2 --warmup 0".split()


@pytest.mark.jobs
@pytest.mark.parametrize("verb", ["step", "profile", "methods", "keep"])
def test_the_table_of_a_verb_shows_what_it_wrote(verb: str, tmp_path: Path) -> None:
    from benchmarks.output import read_records
    from benchmarks.tables import make_table

    run_verb(verb, *SMALL, "--output", str(tmp_path))
    (record,) = read_records(tmp_path)
    assert record["kind"] == verb and all(len(each["values"]) == 2 for each in record["results"])
    rows = [line for line in make_table([record]).splitlines() if line.startswith("|")][2:]
    assert len(rows) == (len(record["results"]) if verb == "methods" else 1)
    assert verb != "methods" or rows[2].startswith("| AF Adapter, layers 1–1 |")


@pytest.mark.parametrize(
    ("operation", "kind"),
    [
        ("aten::addmm", "matrix products"),
        ("mkldnn::_linear_pointwise", "matrix products"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", "fused attention"),
        ("aten::_log_softmax_backward_data", "softmax and loss"),
        ("aten::gelu_backward", "GELU"),
        ("aten::_to_copy", "copies and casts"),
        ("aten::add_", "sums and scaling"),
        ("aten::_fused_adamw_", "AdamW"),
        ("aten::fill_", "filling zeros"),
        ("aten::embedding_dense_backward", "all else"),
    ],
)
def test_an_operation_is_of_one_kind(operation: str, kind: str) -> None:
    from benchmarks.profiling import name_kind

    assert name_kind(operation) == kind


@pytest.mark.slow
@pytest.mark.jobs
def test_a_step_is_timed_in_several_processes(tmp_path: Path) -> None:
    from benchmarks.output import read_records

    run_verb("step", *SMALL, "--layers", "1", "--repeats", "3", "--processes", "2", "--output", str(tmp_path))
    (record,) = read_records(tmp_path)
    assert record["settings"]["processes"] == 2
    assert all(len(each["values"]) == 2 for each in record["results"]), "the median of each process"


@pytest.mark.slow
@pytest.mark.skipif(services.JEMALLOC_SO is None, reason="this Ray ships no jemalloc")
def test_a_benchmark_gets_the_allocator_of_a_jobs_workers(tmp_path: Path) -> None:
    script = tmp_path / "look.py"
    script.write_text(
        "import os, sys\n"
        "from benchmarks.as_worker import configure_allocator, strip_allocator\n"
        "configure_allocator()\n"
        "print(sys.argv[1], os.environ['LD_PRELOAD'] in open('/proc/self/maps').read(), strip_allocator().keys())\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(JOBS)}
    command = [sys.executable, str(script), "an option"]
    said = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True).stdout
    assert said.startswith("an option True ") and "'LD_PRELOAD'" not in said


@pytest.mark.jobs
def test_a_job_is_held_against_a_bare_loop(tiny_base_folder: Path, tmp_path: Path) -> None:
    from benchmarks.output import read_records

    job = ["--base", str(tiny_base_folder), "--corpus", str(write_corpus(tmp_path / "text.txt", 400))]
    job += ["--train.seq_length", "32", "--train.general_probe", str(FEW_SENTENCES), "--engine.precision", "fp32"]
    run_verb("overhead", "--steps", "8", "--window", "2", "--output", str(tmp_path / "out"), "--", *job)
    (record,) = read_records(tmp_path / "out")
    assert record["kind"] == "overhead" and [len(each["values"]) for each in record["results"]] == [3, 3]


@pytest.mark.jobs
def test_memory_is_measured_in_processes_of_their_own(tmp_path: Path) -> None:
    from benchmarks.output import read_records
    from benchmarks.tables import make_table

    run_verb("memory", *SMALL, "--layers", "1", "--repeats", "1", "--output", str(tmp_path))
    (record,) = read_records(tmp_path)
    assert 0 < record["figures"]["ratio"] < 1, "full training has moments and gradients of all weights"
    assert len(make_table([record]).splitlines()) == 5


@pytest.mark.jobs
def test_a_plan_is_what_two_ranks_take(tmp_path: Path) -> None:
    from benchmarks.output import read_records

    chosen = "--methods full --stages 0 2 --repeats 1".split()
    run_verb("plan", *SMALL, *chosen, "--output", str(tmp_path))
    (record,) = read_records(tmp_path)
    assert [each["stage"] for each in record["figures"]["cases"]] == [0, 2]
    assert record["figures"]["worst_frac"] < 0.3  # weights of 150 MiB, beside which an allocator's rest is large
