"""What work waits for is said, and a wait for room on Ray has an end, with what has the room."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from domext_ray.errors import RunError
from domext_ray.progress import StatusLine
from domext_ray.runtime import waiting
from domext_ray.runtime.on_tune import run_trials
from domext_ray.runtime.ray_cluster import start_ray
from domext_ray.runtime.tasks import Pool, Task, run_tasks
from domext_ray.runtime.trials import Ledger, Rules, Trial, Watch
from domext_ray.runtime.waiting import StallTimer
from domext_ray.storage import Place

SAID: dict[str, Any] = {"verb": "counting", "unit": "rows", "remedy": "lower --something"}


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
