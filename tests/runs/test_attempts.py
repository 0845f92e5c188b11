"""Who works in a run, on a disk and in a bucket: one job at a time, and what an older one publishes is refused."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from object_store import BUCKET, Proxy, count_seconds, use_objects

from domext_ray.errors import RunError
from domext_ray.runs import attempts
from domext_ray.runs.attempts import Attempt, hold, supersede
from domext_ray.storage import Place, write_text

HOLDER = """
import sys, time
from domext_ray.runs import attempts
from domext_ray.errors import DomextError
from domext_ray.storage import Place, write_json
attempts.BEAT_SECONDS, attempts.STALE_SECONDS = 0.2, float(sys.argv[3])
try:
    with attempts.hold(Place(sys.argv[1])) as run:
        print("held", run.fence.number, flush=True)
        for number in range(int(sys.argv[2])):
            with (run / "checkpoint").new_files("manifest.json") as folder:
                write_json(Place(folder / "manifest.json"), {"by": run.fence.number, "number": number})
            time.sleep(0.05)
except DomextError as error:
    print(error, flush=True)
    raise SystemExit(2)
"""


@pytest.fixture(params=["disk", "bucket"])
def run(request: pytest.FixtureRequest, tmp_path: Path, objects: str) -> Place:
    """A run's directory that is not there yet."""
    return Place(tmp_path / "run") if request.param == "disk" else Place(f"{BUCKET}/{tmp_path.name}/run")


def start_holder(run: Place, number: int = 10_000, stale: float = 60.0) -> subprocess.Popen[str]:
    """A process that holds a run and publishes in it, again and again."""
    command = [sys.executable, "-c", HOLDER, str(run), str(number), str(stale)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def read_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_attempts_are_numbered_and_only_the_last_one_is_kept(run: Place) -> None:
    for number in (1, 2, 3):
        with hold(run) as held:
            assert held == run and held.fence == Attempt(run, number) and not held.check()
            write_text(held / "file", str(number))
    assert (run / "attempts").list_names() == ["000003.json"] and (run / "file").read_text() == "3"


def test_a_second_job_is_told_who_works_there(run: Place) -> None:
    with hold(run):
        started = time.monotonic()
        with pytest.raises(RunError) as raised, hold(run):
            pass
        assert time.monotonic() - started < 5
    said = str(raised.value)
    assert said.startswith(f"another job is working in {run}: process {os.getpid()} on ")
    assert " has held it since 20" in said and said.endswith("wait for it, stop it, or give another --run.name.")
    assert count_seconds(said) < 5
    with hold(run):
        pass


def test_a_killed_job_lets_go_at_once(run: Place) -> None:
    process = start_holder(run)
    assert read_line(process) == "held 1"
    with pytest.raises(RunError, match=f"process {process.pid} on"), hold(run):
        pass
    process.kill()
    process.wait()
    with hold(run) as held:
        assert held.fence is not None and held.fence.number == 2


def test_a_job_that_was_frozen_cannot_publish(run: Place) -> None:
    """It comes back after another one has taken its run over."""
    process = start_holder(run)
    assert read_line(process) == "held 1"
    deadline = time.monotonic() + 60
    while not (run / "checkpoint" / "manifest.json").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGSTOP)
    other = start_holder(run, 3, stale=1.5)
    while read_line(other).startswith("another job is working"):  # until the first one has been still for long enough
        assert time.monotonic() < deadline
        other.wait()
        time.sleep(0.2)
        other = start_holder(run, 3, stale=1.5)
    assert other.wait(60) == 0
    process.send_signal(signal.SIGCONT)
    assert process.stdout is not None
    said = process.stdout.read()
    assert process.wait(60) == 2
    assert said == f"another job has taken over the run in {run}; this one stops without writing.\n"
    manifest = run / "checkpoint" / "manifest.json"
    assert json.loads(manifest.read_bytes()) == {"by": 2, "number": 2}
    assert (run / "attempts").list_names()[-1] == "000002.json"


def test_a_job_of_another_machine_is_given_time(run: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    process = start_holder(run, stale=60.0)
    assert read_line(process) == "held 1"
    here = attempts._describe_process()
    monkeypatch.setattr(attempts, "_describe_process", lambda: {**here, "machine": "another"})
    with pytest.raises(RunError, match=f"process {process.pid} on"), hold(run):
        pass
    process.kill()  # nobody there can tell
    process.wait()
    monkeypatch.setattr(attempts, "STALE_SECONDS", 3.0)
    started = time.monotonic()
    with hold(run) as held:
        assert held.fence is not None and held.fence.number == 2
    assert 0.5 < time.monotonic() - started < 10


def test_a_later_attempt_shuts_the_earlier_one_out(run: Place) -> None:
    old = supersede(run)
    write_text(old / "file", "old")
    new = supersede(run)
    for act in (lambda: write_text(old / "file", "late"), (old / "file").delete, old.check):
        with pytest.raises(RunError, match="another job has taken over the run in"):
            act()
    assert not new.check()
    assert new.fence is not None
    Attempt(run, new.fence.number).ask_to_end()
    assert new.check()
    assert (run / "file").read_text() == "old"


def test_a_job_shuts_its_own_workers_out(run: Place) -> None:
    """What they publish after its last sentence is refused; what the job does itself is not."""
    with hold(run) as held:
        workers = pickle.loads(pickle.dumps(held))
        write_text(workers / "checkpoint", "5")
        assert isinstance(held.fence, Attempt)
        held.fence.shut_out_workers()
        with pytest.raises(RunError, match="another job has taken over the run in"):
            write_text(workers / "checkpoint", "6")
        write_text(held / "report", "of step 5")
        assert (run / "attempts").list_names() == ["000002.json"]
    assert (run / "checkpoint").read_text() == "5" and (run / "report").exists()
    with hold(run) as held:  # it has let go under its new number
        assert held.fence == Attempt(run, 3)


def test_ages_are_the_storages(tmp_path: Path, objects: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server, or this machine, whose clock is two hours off."""
    proxy = Proxy(objects)
    use_objects(proxy.address, monkeypatch)
    for shift in (7200.0, -7200.0):
        run, proxy.shift = Place(f"{BUCKET}/{tmp_path.name}/run{shift}"), shift
        process = start_holder(run)
        assert read_line(process) == "held 1"
        with pytest.raises(RunError, match="another job is working") as raised, hold(run):
            pass
        assert count_seconds(str(raised.value)) < 10
        process.kill()
        process.wait()
    proxy.close()
