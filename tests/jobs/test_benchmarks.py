"""jobs/benchmark.py: what its verbs write, and the tables that are made of it."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import FEW_SENTENCES, REPOSITORY, write_corpus
from ray._private import services

from domext_ray.errors import ConfigError, RunError

JOBS = REPOSITORY / "jobs"


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(JOBS)


def write_step(
    folder: Path, *, seconds: tuple[float, ...] = (1.0, 3.0, 2.0), others_frac: float = 0.0, **case: Any
) -> dict[str, Any]:
    """Write the record of a step that took another side twice as long; return what the file holds."""
    from benchmarks.output import Record, describe_command, report, show_spread
    from benchmarks.timing import compare

    case = {"layout": "bert", "layers": 12, "precision": "fp32", "length": 128, "rows": 8, "method": "af"} | case
    results = {"domext_ray": seconds, "rival": [2 * value for value in seconds]}
    figures = {**compare(results["rival"], seconds), "tokens_per_second": 512.0}
    row = {"": "AF Adapter", "rows": str(case["rows"]), "process": case.get("process", "")}
    row |= {"ours, s": show_spread(seconds), "ratio": f"{figures['ratio']:.2f}"}
    command = describe_command(["step", "--rival_python", "/home/somebody/bin/python", "--repeats", "3"])
    options = Namespace(output=str(folder), publish=False, command=command)
    known = {*folder.glob("*")}
    record = Record("step", {**case, "sizes": "1 head"}, [row], "s", results, figures, others_frac)
    report(options, [record], torch.device("cpu"))
    (path,) = {*folder.glob("*")} - known
    return dict(json.loads(path.read_text()))


def make_repository(folder: Path, **documents: str) -> Path:
    from benchmarks.output import DOCUMENTS

    for name in DOCUMENTS:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(documents.get(Path(name).stem, "nothing is marked here\n"))
    (folder / ".github" / "benchmarks").mkdir()
    return folder


def test_a_record_has_every_repetition_and_no_place(tmp_path: Path) -> None:
    content = write_step(tmp_path / "records")
    assert content["results"][0] == {"name": "domext_ray", "unit": "s", "values": [1.0, 3.0, 2.0]}
    assert content["figures"] == {"ratio": 2.0, "ratio_least": 2.0, "ratio_most": 2.0, "tokens_per_second": 512.0}
    assert content["versions"].keys() >= {"python", "torch", "transformers", "domext_ray"}
    assert content["machine"]["threads"] == torch.get_num_threads()
    assert content["command"] == "python jobs/benchmark.py step --rival_python python --repeats 3"
    (path,) = (tmp_path / "records").iterdir()
    assert path.name.endswith("_step_bert_12_fp32_128_8_af_1-head.json")
    assert str(tmp_path) not in path.read_text() and "/home" not in path.read_text()


def test_what_disturbs_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert not write_step(tmp_path / "records")["is_disturbed"] and "disturbed" not in capsys.readouterr().out
    assert write_step(tmp_path / "records", others_frac=0.25, length=512)["is_disturbed"]
    printed = capsys.readouterr().out
    assert "disturbed: other programs took" in printed and "25%" in printed


def test_a_watch_tells_own_work_from_that_of_others(tmp_path: Path) -> None:
    from benchmarks.timing import Watch

    busy = "import time\nwhile time.process_time() < 1: pass"
    started = time.perf_counter()
    with Watch(every=0.1) as watch:  # a child that ends meanwhile counts
        subprocess.run([sys.executable, "-c", busy], check=True)
    assert 0.4 < watch.cores * (time.perf_counter() - started) < 3 and max(watch.memory_mb) > 10
    other = subprocess.Popen([sys.executable, "-c", busy], start_new_session=True)
    others = Watch()
    others._list = lambda: []  # type: ignore[method-assign]
    started = time.perf_counter()
    with others:
        other.wait()
    assert others.others_frac * (os.cpu_count() or 1) * (time.perf_counter() - started) > 0.4


def test_a_table_and_a_figure_are_made_of_records(tmp_path: Path) -> None:
    from benchmarks.output import update_documents

    marked = "before\n<!-- benchmark: step layout=bert -->\n<!-- end -->\n"
    marked += "<!-- figure: step ratio rows=4 device=cpu --><!-- end --> x\n"
    folder = make_repository(tmp_path, README=marked)
    records = folder / ".github" / "benchmarks"
    for rows, length in ((4, 512), (8, 128)):
        write_step(records, rows=rows, length=length)
    write_step(records, rows=8, length=128, process="worker")
    write_step(records, layout="modernbert")
    assert update_documents(folder, is_check=True) == ["README.md"]
    assert (folder / "README.md").read_text() == marked
    assert update_documents(folder) == ["README.md"]
    lines = (folder / "README.md").read_text().splitlines()
    assert lines[2:5] == [
        "| | rows | process | ours, s | ratio |",
        "| :--- | ---: | :--- | ---: | ---: |",
        "| AF Adapter | 8 | – | 2.00 (1.00–3.00) | 2.00 |",
    ]
    assert lines[5].startswith("| AF Adapter | 8 | worker |")
    assert lines[6].startswith("| AF Adapter | 4 | – |")
    assert "torch" in lines[8] and lines[-1] == "<!-- figure: step ratio rows=4 device=cpu -->2.00<!-- end --> x"
    assert update_documents(folder) == update_documents(folder, is_check=True) == []


def test_a_marker_that_nothing_fits_is_named(tmp_path: Path) -> None:
    from benchmarks.output import DOCUMENTS, update_documents

    folder = make_repository(tmp_path)
    (results,) = (folder / document for document in DOCUMENTS if Path(document).stem == "RESULTS")
    for rows in (4, 8):
        write_step(folder / ".github" / "benchmarks", rows=rows)
    for marker, says in (
        ("benchmark: step layout=roberta", "does not have; measure it with --publish"),
        ("benchmark: nothing", "does not have"),
        ("benchmark: step device=cuda", "does not have"),
        ("figure: step speed rows=8", "names no figure; .* takes: ratio, .*tokens_per_second"),
        ("figure: step ratio", "fits 2 records; add a condition"),
    ):
        results.write_text(f"<!-- {marker} --><!-- end -->")
        with pytest.raises(RunError, match=says) as error:
            update_documents(folder)
        assert marker.split(": ")[1] in str(error.value)


def test_a_damaged_record_is_named(tmp_path: Path) -> None:
    from benchmarks.output import update_documents

    folder = make_repository(tmp_path)
    (folder / ".github" / "benchmarks" / "x.json").write_text('{"kind": "step"}')
    with pytest.raises(RunError, match=r"x\.json .*--publish"):
        update_documents(folder)


def run_verb(*words: str) -> None:
    made = runpy.run_path(str(JOBS / "benchmark.py"))
    made["run"](made["parse_options"](words))


SMALL = "--bases tiny-bert --lengths 16 --tokens 32 --repeats 2 --warmup 0".split()


@pytest.mark.jobs
def test_methods_are_held_against_their_rivals(tmp_path: Path) -> None:
    from benchmarks.output import read_records

    run_verb("step", *SMALL, "--methods", "full", "af", "exbert", "lora", "--output", str(tmp_path))
    records = {record["case"]["method"]: record for record in read_records(tmp_path)}
    assert records.keys() == {"full", "af", "exbert", "lora"}
    for measured in records.values():
        assert all(len(result["values"]) == 2 for result in measured["results"])
        assert measured["figures"]["loss_difference"] < 1e-3


@pytest.mark.jobs
def test_methods_are_shares_of_full_training(tmp_path: Path) -> None:
    from benchmarks.output import read_records

    run_verb("step", *SMALL, "--methods", "all", "--against", "full", "--output", str(tmp_path))
    records = {record["case"]["method"]: record for record in read_records(tmp_path)}
    assert records.keys() == {"af", "af_upper", "af_kept", "exbert", "bottleneck", "lora", "frozen"}
    for measured in records.values():
        assert measured["case"]["against"] == "full" and 0 < measured["figures"]["share"] < 10


def test_a_wrong_option_is_named() -> None:
    for words, says in (
        ("step --methods lora --against equations", "--against is 'equations', which is for af and exbert"),
        ("step --methods bottleneck", "--rival_python is empty; --methods bottleneck needs"),
        (
            "step --methods exbert --bases tiny-modernbert",
            "--methods has exbert; a ModernBERT has no",
        ),
        ("step --repeats 0", "--repeats is 0; it must be 1 or more"),
        ("memory --lengths 16 0", r"--lengths is \[16, 0\]; it must be 1 or more"),
        ("serve --checked_answers -1", "--checked_answers is -1; it must be 0 or more"),
        ("overhead --window 300", "--window is 300; it must be from 1 to half of --steps"),
        ("starts --against nothing", "--against is 'nothing'; it must be a checkout, with jobs and domext_ray"),
    ):
        with pytest.raises(ConfigError, match=says):
            run_verb(*words.split())


@pytest.mark.slow
@pytest.mark.jobs
def test_a_step_is_timed_in_several_processes(tmp_path: Path) -> None:
    from benchmarks.output import read_records

    run_verb("step", *SMALL, "--layers", "1", "--repeats", "3", "--processes", "2", "--output", str(tmp_path))
    (record,) = read_records(tmp_path)
    assert record["command"].endswith("--processes 2 --output " + tmp_path.name)
    assert all(len(result["values"]) == 2 for result in record["results"]), "the median of each process"


@pytest.mark.slow
@pytest.mark.skipif(services.JEMALLOC_SO is None, reason="this Ray ships no jemalloc")
def test_a_benchmark_gets_the_allocator_of_a_jobs_workers(tmp_path: Path) -> None:
    script = tmp_path / "look.py"
    script.write_text(
        "import os, sys\n"
        "from benchmarks.timing import configure_allocator, strip_allocator\n"
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
    assert record["kind"] == "overhead" and [len(result["values"]) for result in record["results"]] == [3, 3]


@pytest.mark.jobs
@pytest.mark.parametrize("verb", ["finetune --steps 2 --repeats 2", "parity --seeds 2 --epochs 0.1 --max_length 32"])
def test_fine_tuning_is_held_against_trainer(verb: str, tiny_base_folder: Path, tmp_path: Path) -> None:
    from benchmarks.output import read_records

    run_verb(*verb.split(), "--model", str(tiny_base_folder), "--output", str(tmp_path))
    (record,) = read_records(tmp_path)
    sides = {result["name"]: result["values"] for result in record["results"]}
    assert next(iter(sides)) == "domext_ray" and len(sides) > 1
    assert all(len(values) == 2 for values in sides.values())


@pytest.mark.jobs
def test_memory_is_measured_in_processes_of_their_own(tmp_path: Path) -> None:
    from benchmarks.output import read_records

    chosen = "--methods full af --stages 0 2 --ranks 2 --repeats 1 --layers 1 --lengths 16 --tokens 32".split()
    run_verb("memory", *chosen, "--output", str(tmp_path))
    records = {
        (record["case"]["method"], record["case"]["zero"]): record["figures"] for record in read_records(tmp_path)
    }
    assert records.keys() == {(method, stage) for method in ("full", "af") for stage in (0, 2)}
    # Weights of 150 MiB, beside which an allocator's rest is large.
    assert max(abs(records["full", stage]["off_frac"]) for stage in (0, 2)) < 0.3
    assert records["full", 0]["ratio"] == 1
    assert 0 < records["af", 0]["ratio"] < 1, "full training has moments and gradients of all weights"
