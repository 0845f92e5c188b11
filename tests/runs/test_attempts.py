"""Who works in a run, or at other work, on a disk and in a bucket: one job at a time, and an older one is refused."""

from __future__ import annotations

import json
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from object_store import BUCKET, Proxy, count_seconds, use_objects

from domext_ray.errors import CorpusError, RunError
from domext_ray.runs import attempts
from domext_ray.runs.attempts import Attempt, hold, lock_work, supersede
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


NAME = "0123456789abcdef"


@pytest.fixture(params=["disk", "bucket"])
def cache(request: pytest.FixtureRequest, tmp_path: Path, objects: str) -> Place:
    """Where work is done; not there yet."""
    return Place(tmp_path / "made" / "cache") if request.param == "disk" else Place(f"{BUCKET}/{tmp_path.name}/cache")


def test_work_stays_for_a_second_start_unless_the_corpus_is_wrong(cache: Place, tmp_path: Path) -> None:
    for error, is_kept in (
        (CorpusError, False),
        (KeyboardInterrupt, True),
        (RunError, True),
        (ZeroDivisionError, True),
    ):
        with pytest.raises(error), lock_work(cache / NAME, "trying") as work:
            assert not work.is_local or Path(work).stat().st_mode & 0o777 == 0o700
            (work / "part").put(b"")
            raise error
        assert (cache / NAME / "part").is_file() == is_kept
        assert is_kept or (cache.list_files() == [] and list(tmp_path.iterdir()) == [])
        with lock_work(cache / NAME, "trying") as work:
            work.delete()
        assert cache.list_files() == []


def test_a_second_job_waits_and_says_for_whom(
    cache: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(attempts, "BEAT_SECONDS", 0.2)
    order: list[str] = []

    def go_second() -> None:
        with lock_work(cache / NAME, "preparing --corpus 'x'"):
            order.append("second")

    thread = threading.Thread(target=go_second)
    with lock_work(cache / NAME, "preparing --corpus 'x'"):
        thread.start()
        told = ""
        ends = time.monotonic() + 120
        while "waiting" not in told and time.monotonic() < ends:
            time.sleep(0.02)
            told += capsys.readouterr().err
        order.append("first")
    thread.join(120)
    assert order == ["first", "second"]
    assert re.search(
        rf"waiting for process {os.getpid()} on \S+, which is preparing --corpus 'x'; {cache / NAME} will", told
    )


def test_what_nobody_came_back_for_is_removed(
    cache: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = ["fedcba9876543210", "not-a-hash", "eeeeeeeeeeeeeeee", "dddddddddddddddd"]
    for name in (NAME, f"words-{NAME}", *kept[:2]):
        with hold(cache / name) as place:
            (place / "train-000000.arrow").put(b"a part")
    (cache / kept[0] / "manifest.json").put(b"{}")  # it is finished
    (cache / kept[2] / "train-000000.arrow").put(b"somebody's")
    time.sleep(1.1)  # a bucket's times are whole seconds
    monkeypatch.setattr(attempts, "LEFTOVER_SECONDS", 1.0)
    with hold(cache / kept[3]):
        with lock_work(cache / "00000000aaaaaaaa", "another work"):
            pass
        assert {*cache.list_names()} == {*kept, "00000000aaaaaaaa"}
    told = capsys.readouterr().err
    assert told.count("which a job left a week ago or more") == 2 and f"removed {cache / NAME}, " in told


def test_a_leftover_that_a_job_holds_is_not_touched(cache: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    with lock_work(cache / NAME, "a long work"):
        time.sleep(1.1)
        monkeypatch.setattr(attempts, "LEFTOVER_SECONDS", 0.5)
        with lock_work(cache / "00000000aaaaaaaa", "another work"):
            pass
        assert NAME in cache.list_names()


def test_a_cache_that_is_no_folder_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for cache in (tmp_path / "file", tmp_path / "file" / "cache", tmp_path / ("x" * 300)):
        with (
            pytest.raises(RunError, match=r"cannot be made .*another --prepare.cache_dir"),
            lock_work(Place(cache / NAME), "trying"),
        ):
            pass
