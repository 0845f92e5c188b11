"""jobs/benchmark.py starts: what it times, beside other code too, and what it says of a start that fails."""

from __future__ import annotations

import itertools
import json
import time
from argparse import Namespace
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import REPOSITORY

from domext_ray.errors import RunError

RUN_AF = """
import json, pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
events = pathlib.Path("runs/af/events.jsonl")
events.parent.mkdir(parents=True, exist_ok=True)
is_new = not events.exists()
with events.open("a") as file:
    for second, stage in enumerate(("start_up", "preparing", "first_step", "training")):
        file.write(json.dumps({"seconds": second, "phase": stage, "stage": stage}) + "\\n")
time.sleep(60 if is_new else 0)
"""
"""A run that is new trains until it is stopped; one that goes on ends at once."""
SERVE = """
import http.server, signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
asked = 0
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        global asked
        asked += 1
        self.send_response(200 if self.path == "/readyz" and asked > 2 else 503)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[-1])), Answer).serve_forever()
"""
WORK = "while time.process_time() < 0.5: pass"
PARENT = f"import subprocess, sys\nsys.exit(2 + subprocess.call([sys.executable, '-c', 'import time\\n{WORK}']))"
HANG = "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'import time; time.sleep(61)'])"


STAGES = ("start-up", "preparing the text", "first step")


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(REPOSITORY / "jobs")


def make_checkout(folder: Path, script: str) -> Path:
    """Make what is a checkout to the benchmark, each of whose jobs is a script."""
    (folder / "domext_ray").mkdir(parents=True)
    (folder / "jobs").mkdir()
    for job in ("pretrain_af", "serve"):
        (folder / "jobs" / f"{job}.py").write_text(script, encoding="utf-8")
    return folder


def run_verb(output: Path, only: Iterable[str], against: str = "") -> None:
    from benchmarks.starts import run_starts

    given = {"only": list(only), "against": against, "repeats": 1, "publish": False, "command": "starts"}
    run_starts(Namespace(output=str(output), **given))


def read_record(output: Path) -> dict[str, Any]:
    (path,) = output.iterdir()
    return dict(json.loads(path.read_text(encoding="utf-8")))


def test_a_mistake_beside_another_checkout(tmp_path: Path) -> None:
    other = make_checkout(tmp_path / "other", PARENT)
    run_verb(tmp_path / "records", ["mistake"], str(other))
    record = read_record(tmp_path / "records")
    (row,) = record["rows"]
    results = {result["name"]: result["values"] for result in record["results"]}
    sides = [f"{side}, {what}" for side in ("this code", "the other") for what in ("s", "processor s")]
    assert [*results] == [f"mistake, no base read, {side}" for side in sides]
    assert all(len(values) == 1 for values in results.values())
    own, own_cpu, others, others_cpu = (values[0] for values in results.values())
    assert own > 0.1 < own_cpu and others > 0.2 < others_cpu, "what a job's children use counts"
    assert record["figures"]["ratios"]["mistake, no base read, s"]["ratio"] == own / others
    assert [*row][:7] == ["", *sides, "ratio, s", "ratio, processor s"]
    assert record["case"].keys() == {"base", "against"} and str(tmp_path) not in json.dumps(record)


def test_a_server_is_timed_until_it_answers(tmp_path: Path) -> None:
    from benchmarks.starts import STARTS, time_start

    checkout = make_checkout(tmp_path / "serves", SERVE)
    (start,) = STARTS["serve"].values()
    taken = time_start(start, checkout, checkout, 120.0)
    assert taken.seconds.wall > 0.2 and not taken.stages, "two polls were refused"


def test_what_fails_has_no_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = make_checkout(tmp_path / "other", "print('a word')\nraise SystemExit('all is lost')")
    monkeypatch.setattr("benchmarks.starts.REPOSITORY", make_checkout(tmp_path / "own", RUN_AF))
    with pytest.raises(RunError, match="^1 of the starts failed"):
        run_verb(tmp_path / "records", ["training"], str(other))
    record = read_record(tmp_path / "records")
    said = "first command, to a step, the other: it ended with exit code 1, and must with 143; "
    said += "its last line is: all is lost"
    assert record["figures"] == {"ratios": {}, "errors": [said]}, "what goes on from it is not started"
    assert f"error: {said}\n" in capsys.readouterr().out
    results = {result["name"]: result["values"] for result in record["results"]}
    assert "finished, again, this code, s" in results and not any("the other" in name for name in results)
    stages = [f"{name}: {stage}" for name in ("first command, to a step", "resumed, to a step") for stage in STAGES]
    assert {name: values for name, values in results.items() if ": " in name} == {
        f"{name}, this code, s": [1.0] for name in stages
    }


def test_what_does_not_end_is_killed(tmp_path: Path) -> None:
    from benchmarks.starts import STARTS, time_start

    checkout = make_checkout(tmp_path / "hangs", HANG)
    with pytest.raises(RunError, match=r"^it was killed after 0\.4 seconds\.$"):
        time_start(STARTS["dry_run"]["dry run"], checkout, checkout, 0.4)
    deadline = time.monotonic() + 60
    while any("time.sleep(61)" in str(process.info["cmdline"]) for process in psutil.process_iter(["cmdline"])):
        assert time.monotonic() < deadline, "what it started is left"


def test_sides_are_compared_where_every_turn_was_timed() -> None:
    from benchmarks.starts import OTHER, OURS, Taken, make_record
    from benchmarks.timing import Seconds

    def take(*walls: float, loading: float = 0.0) -> list[Taken]:
        return [Taken(Seconds(wall, 2 * wall), {"loading": loading} if loading else {}, 0.1) for wall in walls]

    timed = {
        "both": {OURS: take(1.0, 2.0, loading=0.5), OTHER: take(2.0, 1.0)},
        "one of two turns": {OURS: take(3.0, 5.0), OTHER: take(1.0)},
    }
    record = make_record({}, timed, 2)
    ratio = {"ratio": 1.25, "ratio_least": 0.5, "ratio_most": 2.0}
    assert record.figures["ratios"] == {"both, s": ratio, "both, processor s": ratio}
    assert [row[""] for row in record.rows] == ["both", "both: loading the model", "one of two turns"]
    assert record.rows[2] == {
        "": "one of two turns",
        f"{OURS}, s": "4.00 (3.00–5.00)",
        f"{OURS}, processor s": "8.00 (6.00–10.0)",
    }
    assert record.others_frac == pytest.approx(0.1)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_start(tmp_path: Path) -> None:
    from benchmarks.starts import STARTS

    run_verb(tmp_path, STARTS)
    record = read_record(tmp_path)
    assert record["figures"] == {"ratios": {}, "errors": []} and record["case"] == {"base": "general-mini"}
    names = {result["name"].removesuffix(", this code, s") for result in record["results"]}
    assert names > set(itertools.chain.from_iterable(STARTS.values()))
    assert names > {f"first command, to a step: {stage}" for stage in ("start-up", "preparing the text", "first step")}
