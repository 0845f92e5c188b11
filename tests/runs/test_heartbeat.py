"""The sign of life of a job, whatever its threads and other jobs do at the same time, and what it says at its end."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from object_store import MEMORY, use_memory
from obstore.store import MemoryStore

from domext_ray.errors import RunError, StorageError
from domext_ray.runs import attempts
from domext_ray.runs.attempts import Attempt, hold, supersede
from domext_ray.storage import Place

LIMIT_SECONDS = 30.0


class Schedule:
    """One order: at every question to the storage it is settled which thread goes on."""

    def __init__(self, chosen: list[int]) -> None:
        self.chosen = chosen  # of each turn, which of those that could; beyond its end the first one
        self.options: list[int] = []  # how many could
        self.errors: dict[str, Exception] = {}
        self._gates: dict[threading.Thread, threading.Semaphore] = {}
        self._waits_for: dict[threading.Thread, Lock] = {}
        self._ended: set[threading.Thread] = set()
        self._back = threading.Semaphore(0)

    def run(self, **works: Callable[[], object]) -> None:
        """Run threads by their names until all have ended; `errors` has what they raised."""
        for name, work in works.items():
            thread = threading.Thread(target=self._work, args=(name, work), daemon=True)
            self._gates[thread] = threading.Semaphore(0)
            thread.start()
        while living := [worker for worker in self._gates if worker.is_alive()]:
            able = [
                worker for worker in living if worker not in self._waits_for or self._waits_for[worker].owner is None
            ]
            assert able, "they wait for each other"
            turn = len(self.options)
            self.options.append(len(able))
            thread = able[self.chosen[turn] if turn < len(self.chosen) else 0]
            self._gates[thread].release()
            assert self._back.acquire(timeout=LIMIT_SECONDS)
            if thread in self._ended:
                thread.join()

    def _work(self, name: str, work: Callable[[], object]) -> None:
        me = threading.current_thread()
        assert self._gates[me].acquire(timeout=LIMIT_SECONDS)
        try:
            work()
        except Exception as error:
            self.errors[name] = error
        self._ended.add(me)
        self._back.release()

    def pause(self) -> None:
        """Let another thread go on, or this one; nothing, in a thread that is none of the schedule's."""
        if (gate := self._gates.get(threading.current_thread())) is not None:
            self._back.release()
            assert gate.acquire(timeout=LIMIT_SECONDS)

    def wait_for(self, lock: Lock) -> None:
        me = threading.current_thread()
        self._waits_for[me] = lock
        self.pause()
        del self._waits_for[me]


class Lock:
    """A lock that a thread may take again, in whose place another thread goes on."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.owner: threading.Thread | None = None
        self.depth = 0

    def __enter__(self) -> None:
        while self.owner not in (None, threading.current_thread()):
            self.schedule.wait_for(self)
        self.owner, self.depth = threading.current_thread(), self.depth + 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1
        self.owner = self.owner if self.depth else None


class PausingStore:
    """A store that lets another thread go on before each question."""

    def __init__(self, schedule: Schedule) -> None:
        self.store, self.schedule = MemoryStore(), schedule

    def __getattr__(self, name: str) -> Any:
        ask = getattr(self.store, name)

        def asked(*args: Any, **settings: Any) -> Any:
            self.schedule.pause()
            return ask(*args, **settings)

        return asked


def list_schedules() -> Iterator[Schedule]:
    """Yield a schedule for every order that there is; each is to be run before the next one is asked for."""
    chosen: list[int] | None = []
    while chosen is not None:
        schedule = Schedule(chosen)
        yield schedule
        taken = [*chosen, *[0] * (len(schedule.options) - len(chosen))]
        open_turns = [turn for turn, number in enumerate(schedule.options) if taken[turn] + 1 < number]
        chosen = [*taken[: open_turns[-1]], taken[open_turns[-1]] + 1] if open_turns else None


class Beats(threading.Event):
    """A job that lasts for so many beats."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.left, self.pauses = number, list[float]()

    def wait(self, timeout: float | None = None) -> bool:
        self.left -= 1
        self.pauses.append(timeout or 0.0)
        return self.left < 0


def make_attempt(monkeypatch: pytest.MonkeyPatch, schedule: Schedule) -> Attempt:
    """A run's first attempt, in a bucket where its threads take turns."""
    use_memory(monkeypatch).store = PausingStore(schedule)
    attempt = supersede(Place(MEMORY) / "run").fence
    assert isinstance(attempt, Attempt) and attempt.number == 1
    attempt._turn = Lock(schedule)
    return attempt


def list_numbers(run: Place) -> list[str]:
    return (run / "attempts").list_names()


def test_a_job_that_shuts_its_workers_out_goes_on_showing_that_it_lives(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In every order of the takeover, a beat, and a look of another thread that is about to publish something."""
    num_orders = 0
    for schedule in list_schedules():
        num_orders += 1
        attempt = make_attempt(monkeypatch, schedule)
        schedule.run(
            restart=attempt.shut_out_workers,
            beat=lambda attempt=attempt: attempts._beat(attempt, Beats(1)),  # type: ignore[misc]
            page=attempt.check,
        )
        assert schedule.errors == {} and capsys.readouterr().err == "", schedule.chosen
        assert attempt.number == 2 and list_numbers(attempt.run) == ["000002.json"]
        attempts._beat(attempt, Beats(1))
        assert not attempt.check() and capsys.readouterr().err == ""
    assert num_orders > 50


@pytest.mark.parametrize("num_beats", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_of_two_jobs_one_has_the_run_and_the_other_is_told(
    num_beats: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In every order of a takeover by another job, by the job itself from its workers, and a beat."""
    winners = set()
    for schedule in list_schedules():
        attempt = make_attempt(monkeypatch, schedule)
        other = Attempt(attempt.run, 0, {"who": "other"})
        schedule.run(
            restart=attempt.shut_out_workers,
            other=lambda other=other: other.begin(1),  # type: ignore[misc]
            beat=lambda attempt=attempt: attempts._beat(attempt, Beats(num_beats)),  # type: ignore[misc]
        )
        newest = (attempt.run / "attempts" / "000002.json").read_bytes()
        lost = schedule.errors.keys() - {"beat"}
        assert lost == ({"restart"} if json.loads(newest).get("who") == "other" else {"other"}), schedule.chosen
        assert list_numbers(attempt.run)[-1] == "000002.json"
        if lost == {"restart"}:
            assert isinstance(schedule.errors["restart"], RunError) and other.number == 2
            attempts._beat(attempt, Beats(1))
            assert "warning: another job has taken over the run in s3://memory/run;" in capsys.readouterr().err
        else:
            assert isinstance(schedule.errors["other"], FileExistsError) and attempt.number == 2
            assert not attempt.check() and capsys.readouterr().err == ""
        winners |= lost
    assert winners == {"restart", "other"}


def test_a_takeover_that_its_storage_stops_halfway_is_the_jobs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    attempt = make_attempt(monkeypatch, Schedule([]))

    def refuse(place: Place) -> None:
        raise StorageError(f"{place} has not answered")

    with monkeypatch.context() as patch, pytest.raises(StorageError, match="has not answered"):
        patch.setattr(Place, "delete", refuse)
        attempt.shut_out_workers()
    assert attempt.number == 2 and not attempt.check()


def test_a_heartbeat_that_has_lost_its_run_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(attempts, "BEAT_SECONDS", 0.05)
    with hold(Place(tmp_path)):
        supersede(Place(tmp_path))
        deadline, said = time.monotonic() + 60, ""
        while not said:
            assert time.monotonic() < deadline
            time.sleep(0.02)
            said = capsys.readouterr().err
    assert said == f"warning: another job has taken over the run in {tmp_path}; this one stops without writing.\n"


def test_whatever_a_beat_meets_the_next_one_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    attempt, put, met = (
        supersede(Place(tmp_path)).fence,
        Place.put,
        [ValueError("odd"), StorageError("full"), OSError("gone")],
    )
    assert isinstance(attempt, Attempt)

    def meet(self: Place, *args: Any, **settings: Any) -> str:
        if met:
            raise met.pop()
        return put(self, *args, **settings)

    attempt.place.delete()
    monkeypatch.setattr(Place, "put", meet)
    attempts._beat(attempt, Beats(4))
    assert capsys.readouterr().err == "warning: gone\nwarning: full\nwarning: odd\n" and attempt.place.is_file()


@pytest.mark.parametrize("fails", [False, True])
def test_a_mark_of_the_end_that_cannot_be_written_is_a_warning_unless_the_work_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fails: bool
) -> None:
    def refuse(*_: Any, **__: Any) -> str:
        raise StorageError("the disk is full")

    with monkeypatch.context() as patch, contextlib.suppress(ValueError), hold(Place(tmp_path)):
        patch.setattr(Place, "put", refuse)
        if fails:
            raise ValueError
    assert capsys.readouterr().err == ("" if fails else "warning: the disk is full\n")


def test_slow_storage_does_not_make_signs_of_life_rare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a put takes is taken from the pause after it: else a minute would pass with one that takes nearly that."""
    attempt, beats = supersede(Place(tmp_path)).fence, Beats(3)
    assert isinstance(attempt, Attempt)
    seconds = iter([0.0, 9.0, 50.0, 108.0, 200.0, 204.0])  # before and after each put
    monkeypatch.setattr(attempts.time, "monotonic", lambda: next(seconds))
    attempts._beat(attempt, beats)
    assert beats.pauses == [10.0, 1.0, 0.0, 6.0]


def test_numbers_are_compared_as_numbers(tmp_path: Path) -> None:
    """Beyond a million they have more digits."""
    (Place(tmp_path) / "attempts" / "999999.json").put(
        json.dumps({**attempts._describe_process(), "ended": True}).encode()
    )
    for number in (1_000_000, 1_000_001):
        with hold(Place(tmp_path)) as held:
            assert held.fence == Attempt(Place(tmp_path), number) and not held.check()
            with pytest.raises(RunError, match="another job has taken over"):
                Attempt(Place(tmp_path), 999_999).check()
    assert list_numbers(Place(tmp_path)) == ["1000001.json"]


def test_a_file_in_the_place_of_a_runs_attempts_is_no_endless_wait(tmp_path: Path) -> None:
    (tmp_path / "attempts").write_text("")
    with pytest.raises(NotADirectoryError), hold(Place(tmp_path)):
        pass
