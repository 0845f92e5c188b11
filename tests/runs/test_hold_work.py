"""Work that a second start goes on with: one job at a time, others wait, and nothing stays for ever."""

from __future__ import annotations

import os
import re
import threading
import time
from pathlib import Path

import pytest
from object_store import BUCKET

from domext_ray.errors import CorpusError, RunError
from domext_ray.runs import attempts
from domext_ray.runs.attempts import hold, lock_work
from domext_ray.storage import Place

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
