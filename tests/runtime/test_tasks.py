"""Tasks with records: taken over, in order, a bounded number at a time, and what kills its worker is named."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from file_limits import limit_files
from object_store import BUCKET

from domext_ray.errors import CorpusError, RunError, StorageError
from domext_ray.progress import StatusLine
from domext_ray.runtime import tasks, waiting
from domext_ray.runtime.on_tune import run_trials
from domext_ray.runtime.ray_cluster import describe_waiting, start_ray
from domext_ray.runtime.records import Records, Result
from domext_ray.runtime.tasks import Pool, Task, run_tasks
from domext_ray.runtime.trials import Ledger, Rules, Trial, Watch
from domext_ray.runtime.waiting import StallTimer
from domext_ray.storage import Place


@pytest.fixture(params=["disk", "bucket"])
def place(request: pytest.FixtureRequest, tmp_path: Path, objects: str) -> Place:
    """Where records are kept; not there yet."""
    return Place(tmp_path / "records") if request.param == "disk" else Place(f"{BUCKET}/{tmp_path.name}/records")


SAID: dict[str, Any] = {"verb": "counting", "unit": "rows", "remedy": "lower --something"}


def run(
    work: Callable[[Any], Result] | Pool, place: Place, number: int = 8, coming: Iterator[Task] | None = None
) -> list[Result]:
    items = coming or (Task(i, i, 1.0, f"file-{i}") for i in range(number))
    return list(run_tasks(work, items, Records(place), total=number, **SAID))


def test_records_are_what_was_written(place: Place) -> None:
    records = Records(place, "key", lambda result: result["fault"])
    result = {"bytes": bytes(range(256)), "words": ["ä", "\u2028"], "nested": {"n": 1.5, "none": None}, "fault": ""}
    records.write(3, result, "plan")
    assert records.read(3, "plan") == (result, "")
    assert records.read(4, "plan") == (None, "")
    assert records.read(3, "another plan") == (None, "")
    assert Records(place, "another key").read(3, "plan") == (None, "")
    records.write(3, {**result, "fault": "a shard is gone"}, "plan")
    assert records.read(3, "plan") == (None, "a shard is gone")
    own = records.find(3)
    content = own.read_bytes()
    for damaged in (b"", b"{", content[:-1], content.replace(b"gone", b"here")):
        own.put(damaged)
        found, fault = records.read(3, "plan")
        assert found is None and fault == f"{own} is damaged"
    with pytest.raises(TypeError, match="holds set"):
        records.write(5, {"words": {"a"}}, "plan")
    assert place.list_names() == [own.name]


def test_results_come_in_order_and_are_taken_over(
    local_ray: None, place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    def work(item: int) -> Result:
        time.sleep(0.2 * (item == 0))  # the first one ends after others
        return {"square": item * item, "pid": os.getpid()}

    first = run(work, place)
    assert [result["square"] for result in first] == [i * i for i in range(8)]
    (place / "000003.json").delete()
    again = run(work, place)
    assert [i for i in range(8) if again[i] != first[i]] in ([], [3]) and again[3]["square"] == 9
    assert "counting: 7 parts were finished before\ncounting: 1 rows in 0:0" in capsys.readouterr().err


def test_a_bounded_number_is_under_way(local_ray: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "count_window", lambda: 5)
    taken: list[int] = []

    def come() -> Iterator[Task]:
        for i in range(30):
            taken.append(i)
            yield Task(i, i, 1.0, "file")

    seen = []
    records = Records(Place(tmp_path / "records"))
    for result in run_tasks(lambda item: {"i": item}, come(), records, total=30, **SAID):
        seen.append(result["i"])
        assert len(taken) - len(seen) <= 5
    assert seen == taken == list(range(30))


def test_tasks_that_wait_ask_for_cpus(
    local_ray: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By this a cluster that can grow knows that it should; and a user why nothing moves."""
    monkeypatch.setattr(waiting, "PATIENCE_SECONDS", 0.1)

    def wait(item: int) -> Result:
        deadline = time.monotonic() + 60
        while not (tmp_path / "seen").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        return {}

    thread = threading.Thread(target=run, args=(wait, Place(tmp_path / "records"), 20))
    thread.start()
    said, told, deadline = "", "", time.monotonic() + 50
    while not ("times 1 CPU" in said and "no news for" in told) and time.monotonic() < deadline:
        time.sleep(0.2)
        said, told = describe_waiting() or said, told + capsys.readouterr().err
    (tmp_path / "seen").touch()
    thread.join(60)
    assert re.search(r"Ray has no room yet for \d+ times 1 CPU", said) and not thread.is_alive()
    assert re.search(
        r"counting: no news for \d+ s \(.*\); wait, or end the job with Ctrl-C: the same command goes on\.", told
    )


def test_a_pool_makes_its_function_once_in_each_worker(local_ray: None, tmp_path: Path) -> None:
    def make() -> Callable[[int], Result]:
        with (tmp_path / "made").open("a") as file:
            file.write("x")
        return lambda item: {"i": item, "pid": os.getpid()}

    found = run(Pool(make, 2, 0.5), Place(tmp_path / "records"), 40)
    assert [result["i"] for result in found] == list(range(40))
    assert len({result["pid"] for result in found}) == len((tmp_path / "made").read_text()) <= 2


def test_an_error_of_a_task_comes_back_as_itself(local_ray: None, tmp_path: Path) -> None:
    """Of a function, of a pool's, and of a pool that is being made."""

    def fail(item: int) -> Result:
        if item == 3:
            raise CorpusError("the third file is no text.")
        return {}

    def make() -> Callable[[int], Result]:
        raise CorpusError("the third file is no text.")

    for i, work in enumerate((fail, Pool(lambda: fail, 1, 0.5), Pool(make, 2, 0.5))):
        with pytest.raises(CorpusError) as raised:
            run(work, Place(tmp_path / f"records{i}"))
        assert str(raised.value) == "the third file is no text." and type(raised.value) is CorpusError


def test_a_task_that_cannot_write_is_a_sentence(local_ray: None, tmp_path: Path) -> None:
    def write(item: int) -> Result:
        if item == 2:
            with open("/dev/full", "wb") as file:
                file.write(b"a shard")
        return {}

    with pytest.raises(StorageError, match=rf"^{tmp_path} cannot be .*written \(No space left on device\): free space"):
        run(write, Place(tmp_path))


def test_a_full_disk_keeps_the_finished_records_and_no_half_one(tmp_path: Path) -> None:
    """A small file is the old one or the new one."""
    records, old = Records(Place(tmp_path / "records")), {"hashes": bytes(1000)}
    records.write(0, old)
    for number in (0, 1):
        with pytest.raises(StorageError, match="File too large"), limit_files(64 * 1024):
            records.write(number, {"hashes": bytes(100_000)})
    assert [path.name for path in (tmp_path / "records").iterdir()] == ["000000.json"] and records.read(0) == (old, "")


def test_a_task_that_kills_its_workers_is_named(
    local_ray: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tasks, "MOST_DEATHS", 1)

    def count_or_die(item: int) -> Result:
        if item == 1 and not (tmp_path / "mended").exists():
            os.kill(os.getpid(), signal.SIGKILL)  # as Linux and Ray do where memory is short
        return {"number": item}

    said = "counting: the task that reads file-1 lost its worker 2 times, as .* short; lower --something, and the same"
    works = {"plain": count_or_die, "pool": Pool(lambda: count_or_die, 1, 0.5)}
    for name, work in works.items():
        with pytest.raises(RunError, match=said):
            run(work, Place(tmp_path / name))
        assert "a worker died (" in capsys.readouterr().err
    (tmp_path / "mended").touch()
    for name, work in works.items():
        assert [result["number"] for result in run(work, Place(tmp_path / name))] == list(range(8))


def test_what_still_runs_is_ended(local_ray: None, tmp_path: Path) -> None:
    """Nothing is written once the generator has ended: what it made may be removed."""

    def wait(item: int) -> Result:
        if item:
            time.sleep(0.5)
            (tmp_path / f"late-{item}").touch()
        return {}

    coming = (Task(i, i, 1.0, "file") for i in range(8))
    running = run_tasks(wait, coming, Records(Place(tmp_path / "records")), total=8, **SAID)
    next(running)
    running.close()  # type: ignore[attr-defined]
    before = sorted(tmp_path.iterdir())
    time.sleep(1.5)
    assert sorted(tmp_path.iterdir()) == before


def test_what_is_waited_for_is_said_after_growing_intervals(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(waiting.time, "monotonic", lambda: now[0])
    stall = StallTimer(StatusLine(), lambda: "Ray has no room yet")

    def list_ends(last: int) -> list[int]:
        begin, ends = now[0], []
        for second in range(last):
            now[0] = begin + second
            stall.look("preparing")
            said = capsys.readouterr().err
            if said:
                assert said.startswith(
                    f"preparing: no news for {second} s (Ray has no room yet); wait, or end the job "
                )
                ends.append(second)
        return ends

    assert list_ends(300) == [30, 60, 120, 240]
    stall.note_move()
    assert list_ends(100) == [30, 60]


@pytest.fixture
def short_wait(local_ray: None) -> Iterator[None]:
    start_ray(3.0)
    yield
    waiting.set_limit(waiting.WAIT_SECONDS)


@contextlib.contextmanager
def hold(spare: float) -> Iterator[None]:
    """Another one's work holds all CPUs but so many."""

    @ray.remote(num_cpus=ray.cluster_resources()["CPU"] - spare)
    class Other:
        def begin(self) -> None: ...

    other = Other.remote()  # type: ignore[attr-defined]
    ray.get(other.begin.remote())
    yield
    ray.kill(other)


def make_work(seconds: float = 0.0) -> Callable[[int], dict[str, int]]:
    """What does a task; processes that import no tests get it by value."""

    def work(item: int) -> dict[str, int]:
        time.sleep(seconds)
        return {"i": item}

    return work


def list_tasks(number: int) -> Iterator[Task]:
    return (Task(i, i, 1.0, f"file-{i}") for i in range(number))


@pytest.mark.slow  # it waits
def test_work_that_has_no_room_ends(short_wait: None, tmp_path: Path) -> None:
    """Tasks, a pool's processes and trials, beside work of others that does not end."""
    trials = [Trial("a", {"x": 1}), Trial("b", {"x": 2})]
    ledger, rules = Ledger(Place(tmp_path / "trials")), Rules("searching", lambda trial, deaths: "died")
    pool, work = Pool(lambda: lambda item: {"f1": 1.0}, 2, 0.5), make_work()
    ways: dict[str, Any] = {
        "counting": lambda: [*run_tasks(work, list_tasks(3), None, total=3, **SAID)],
        "pooling": lambda: [
            *run_tasks(Pool(lambda: work, 2, 0.5), list_tasks(3), None, total=3, **(SAID | {"verb": "pooling"}))
        ],
        "searching": lambda: run_trials(pool, trials, ledger, Watch(2, 0), rules),
    }
    with hold(0.25):
        for verb, start in ways.items():
            with pytest.raises(RunError) as raised:
                start()
            said = str(raised.value)
            assert said.startswith(f"{verb}: nothing of it runs after 3 s (--scale.wait): Ray has no room yet for ")
            assert "; free are 0.25 of " in said and "end what has the room, add nodes" in said
    assert len(ways["counting"]()) == 3, "once there is room, the same goes on"
    ways["searching"]()
    assert [record.status for record in ledger.list()] == ["complete", "complete"]


@pytest.mark.slow  # it waits, too
def test_work_that_has_some_room_is_done_there(short_wait: None) -> None:
    """A process of a pool that never starts is given no task, and a long task is no wait."""
    short, long = make_work(1.5), make_work(5.0)
    with hold(0.75):
        found = [*run_tasks(Pool(lambda: short, 3, 0.5), list_tasks(4), None, total=4, **SAID)]
        assert found == [{"i": i} for i in range(4)]
        assert [*run_tasks(long, list_tasks(1), None, total=1, cpus=0.5, **SAID)] == [{"i": 0}]
