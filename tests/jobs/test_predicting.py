"""A whole prediction on Ray: a worker of it is killed, then the job, and the same command ends with the same output."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from changed_files import REPLACED
from conftest import REPOSITORY, WORDS
from job_calls import call_job
from job_processes import find_workers, kill_job, start_job

from domext_ray.config.inference import PredictConfig
from domext_ray.errors import CorpusError
from domext_ray.inference.predict import plan_prediction, run_prediction
from domext_ray.runs.run_directory import write_run
from domext_ray.storage import Place

pytestmark = [pytest.mark.jobs, pytest.mark.timeout(1800)]


def write_input(path: Path, num_rows: int) -> str:
    rows = ({"text": f"the {WORDS[i % len(WORDS)]} and the [MASK] {'of it ' * (i % 7)}."} for i in range(num_rows))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + "{no JSON\n")
    return str(path)


def read_output(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in [*(folder / "predictions").iterdir(), folder / "malformed.jsonl"]}


@pytest.mark.usefixtures("local_ray")
def test_killed_and_resumed_is_as_undisturbed(tiny_base_folder: Path, tmp_path: Path) -> None:
    options = ["--model", str(tiny_base_folder), "--input", write_input(tmp_path / "in.jsonl", 8_000)]
    options += ["--format", "jsonl", "--block_rows", "200", "--scale.workers", "2", "--output"]
    process = start_job(
        [sys.executable, str(REPOSITORY / "jobs" / "predict.py"), *options, str(tmp_path / "cut")],
        stderr=subprocess.PIPE,
    )
    try:
        wait_for_blocks(process, tmp_path / "cut", 3)
        find_workers(process, "_Worker")[0].kill()
        wait_for_blocks(process, tmp_path / "cut", len(find_done(tmp_path / "cut")) + 5)
    finally:
        kill_job(process)
    num_done = len(find_done(tmp_path / "cut"))
    assert 8 <= num_done < 40
    whole = call_job("predict", *options, str(tmp_path / "whole"))
    ended = call_job("predict", *options, str(tmp_path / "cut"))
    assert (whole.code, ended.code) == (0, 0), whole.err + ended.err
    assert f"{num_done * 200:,} of 8,001 rows were done before" in ended.err
    assert "1 rows are malformed" in ended.out
    assert len(read_output(tmp_path / "whole")) == 42
    assert read_output(tmp_path / "cut") == read_output(tmp_path / "whole")
    again = call_job("predict", *options, str(tmp_path / "cut"))
    assert again.code == 0 and "nothing is left to do" in again.out


@pytest.mark.usefixtures("local_ray")
def test_an_input_that_changes_while_it_is_read_is_named(tiny_base_folder: Path, tmp_path: Path) -> None:
    """What this start made of it goes, for nobody knows which bytes a row is of; what was made before stays."""
    path, output = Path(write_input(tmp_path / "in.jsonl", 4_000)), tmp_path / "out"
    config = PredictConfig(model=str(tiny_base_folder), input=str(path), output=str(output), block_rows=100)
    plan, content = plan_prediction(config), path.read_bytes()
    output.mkdir()
    write_run(Place(output), identity=plan.identity)
    plan.blocks.make()
    first = plan.input.blocks[0]
    plan.blocks.records.write(0, plan.blocks.make_part(first, plan.load(torch.device("cpu"))))

    def change() -> None:
        deadline = time.monotonic() + 300
        while len(find_done(output)) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        REPLACED["cp -p"](path, content.replace(b"doctor", b"church"))

    changing = threading.Thread(target=change)
    changing.start()
    with pytest.raises(CorpusError, match=rf"--input .* changed while it was read \({path} has changed\); start again"):
        run_prediction(config)
    changing.join()
    assert [done.name for done in find_done(output)] == ["000000.json"]
    REPLACED["rsync -t"](path, content)
    assert len(find_done(Path(run_prediction(config)))) == len(plan.input.blocks) == 41


def find_done(output: Path) -> list[Path]:
    return list(output.glob(".blocks/[0-9]*.json"))


def wait_for_blocks(process: subprocess.Popen[bytes], output: Path, number: int) -> None:
    deadline = time.monotonic() + 600
    while len(find_done(output)) < number:
        assert process.poll() is None, process.stderr and process.stderr.read().decode()
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.usefixtures("local_ray")
def test_a_mistake_that_a_worker_finds_is_one_sentence(tiny_base_folder: Path, tmp_path: Path) -> None:
    path = write_input(tmp_path / "in.jsonl", 20)
    given = ["--model", str(tiny_base_folder), "--input", path, "--output", str(tmp_path / "out")]
    for option, said in (
        (["--scale.workers", "99"], "--scale.workers is 99; there is room for "),
        (["--strict", "true"], "leave out --strict."),
    ):
        ended = call_job("predict", *given, *option)
        assert ended.code == 2
        assert said in ended.err.splitlines()[-1] and "Traceback" not in ended.err
