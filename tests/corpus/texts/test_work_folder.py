"""Work folders: one job at a time, finished parts that are taken over, and nothing that stays for ever."""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from file_limits import limit_files

from domext_ray.config.pretrain import PrepareConfig
from domext_ray.corpus.texts import work_folder
from domext_ray.corpus.texts.ray_tasks import run_tasks
from domext_ray.corpus.texts.sources import ReadTask, resolve_sources
from domext_ray.corpus.texts.work_folder import (
    KeptParts,
    hold_work_folder,
    make_folder_anew,
)
from domext_ray.errors import CorpusError, RunError, StorageError
from domext_ray.storage import new_file

NAME = "0123456789abcdef"


@pytest.mark.parametrize(
    ("error", "is_kept"),
    [(KeyboardInterrupt, True), (RunError, True), (ZeroDivisionError, True), (CorpusError, False)],
)
def test_a_work_folder_stays_for_a_second_start_unless_the_corpus_is_wrong(
    tmp_path: Path, error: type[BaseException], is_kept: bool
) -> None:
    cache = tmp_path / "made" / "cache"
    with pytest.raises(error), hold_work_folder(cache, NAME, "trying") as work:
        assert work.stat().st_mode & 0o777 == 0o700
        (work / "part").touch()
        raise error
    assert (cache / f".{NAME}" / "part").exists() == is_kept
    assert [each.name for each in tmp_path.rglob("*")] == (["made", "cache", work.name, "part"] if is_kept else [])
    with hold_work_folder(cache, NAME, "trying") as work:
        (work / "another part").touch()
    assert not list(tmp_path.rglob(".*"))


def test_a_second_job_waits_and_says_for_whom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(work_folder, "POLL_SECONDS", 0.02)
    order: list[str] = []

    def go_second() -> None:
        with hold_work_folder(tmp_path, NAME, "preparing --corpus 'x'"):
            order.append("second")

    thread = threading.Thread(target=go_second)
    with hold_work_folder(tmp_path, NAME, "preparing --corpus 'x'"):
        thread.start()
        told = ""
        ends = time.monotonic() + 120
        while "waiting" not in told and time.monotonic() < ends:
            time.sleep(0.02)
            told += capsys.readouterr().err
        order.append("first")
    thread.join(120)
    assert order == ["first", "second"]
    assert re.search(rf"waiting for process {os.getpid()} on \S+, which is preparing --corpus 'x'; {tmp_path}", told)
    assert list(tmp_path.iterdir()) == []


def test_what_nobody_came_back_for_is_removed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    week_ago = time.time() - work_folder.LEFTOVER_SECONDS - 60

    def leave(name: str, changed: float) -> Path:
        folder = tmp_path / name
        (folder / "parts").mkdir(parents=True)
        (folder / "parts" / "rows-000000.json").touch()
        for each in (folder / "parts" / "rows-000000.json", folder / "parts", folder):
            os.utime(each, (changed, changed))
        return folder

    old = [leave(f".{NAME}", week_ago), leave(f".{NAME}-0a1b2c3d", week_ago), leave(f".words-{NAME}", week_ago)]
    lock = tmp_path / f".{NAME}.lock"
    lock.touch()
    os.utime(lock, (week_ago, week_ago))
    kept = [
        leave(".fedcba9876543210", time.time()),  # of a job that was killed today
        leave(".fedcba9876543210-0a1b2c3d", time.time()),
        leave("fedcba9876543210", week_ago),  # a prepared corpus
        leave(".git", week_ago),
    ]
    with hold_work_folder(tmp_path, "00000000aaaaaaaa", "another work"):
        pass
    assert not any(each.exists() for each in [*old, lock]) and all(each.exists() for each in kept)
    assert capsys.readouterr().err.count("which a job left a week ago or more") == 3


def test_a_leftover_that_a_job_holds_is_not_touched(tmp_path: Path) -> None:
    week_ago = time.time() - work_folder.LEFTOVER_SECONDS - 60
    with hold_work_folder(tmp_path, NAME, "a long work") as work:
        for each in (work, tmp_path / f".{NAME}.lock"):
            os.utime(each, (week_ago, week_ago))
        with hold_work_folder(tmp_path, "00000000aaaaaaaa", "another work"):
            pass
        assert work.exists() and (tmp_path / f".{NAME}.lock").exists()


def test_a_folder_is_made_anew_as_a_whole(tmp_path: Path) -> None:
    folder = tmp_path / "tokenizer"
    killed = tmp_path / f".tokenizer.{socket.gethostname()}-{2**22 + 1}-0a1b2c3d"  # no process has that number
    killed.mkdir()
    with make_folder_anew(folder) as temporary:
        (temporary / "vocab.txt").write_text("old")
    assert not killed.exists()
    with pytest.raises(KeyboardInterrupt), make_folder_anew(folder) as temporary:
        (temporary / "vocab.txt").write_text("new")
        raise KeyboardInterrupt
    assert [each.name for each in tmp_path.iterdir()] == ["tokenizer"]
    assert (folder / "vocab.txt").read_text() == "old"
    with make_folder_anew(folder):
        pass
    assert list(folder.iterdir()) == [] and [each.name for each in tmp_path.iterdir()] == ["tokenizer"]
    (folder / "notes.md").write_text("mine")
    with pytest.raises(CorpusError, match=r"notes\.md is no part of the vocabulary"), make_folder_anew(folder):
        pass
    assert (folder / "notes.md").read_text() == "mine"


def test_parts_are_what_was_written(tmp_path: Path) -> None:
    kept = KeptParts(tmp_path, "rows", "key", lambda result: result["fault"])
    result = {"bytes": bytes(range(256)), "words": ["ä", "\u2028"], "nested": {"n": 1.5, "none": None}, "fault": ""}
    kept.write(3, b"plan", result)
    assert kept.read(3, b"plan") == (result, "")
    assert kept.read(4, b"plan") == (None, "")
    assert kept.read(3, b"another plan") == (None, "")
    assert KeptParts(tmp_path, "rows", "another key").read(3, b"plan") == (None, "")
    kept.write(3, b"plan", {**result, "fault": "a shard is gone"})
    assert kept.read(3, b"plan") == (None, "a shard is gone")
    (path,) = (tmp_path / "parts").iterdir()
    for content in (b"", b"{", path.read_bytes()[:-1], path.read_bytes().replace(b"gone", b"here")):
        path.write_bytes(content)
        found, fault = kept.read(3, b"plan")
        assert found is None and fault == f"{path} is damaged"
    with pytest.raises(TypeError, match="holds set"):
        kept.write(5, b"plan", {"words": {"a"}})
    assert [each.name for each in (tmp_path / "parts").iterdir()] == [path.name]


def test_a_full_disk_keeps_the_finished_parts_and_no_half_one(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="File too large"), hold_work_folder(tmp_path, NAME, "trying") as work:
        kept = KeptParts(work, "hashes", "key")
        with limit_files(64 * 1024):
            kept.write(0, b"", {"hashes": bytes(1000)})
            kept.write(1, b"", {"hashes": bytes(100_000)})
    assert [each.name for each in (work / "parts").iterdir()] == ["hashes-000000.json"]
    with (
        pytest.raises(StorageError, match="File too large"),
        new_file(tmp_path / "shard", is_flushed=False) as temporary,
        pa.OSFile(str(temporary), "wb") as sink,  # as shards are written
        limit_files(64 * 1024),
    ):
        sink.write(bytes(100_000))
    assert [each.name for each in tmp_path.iterdir()] == [work.name]


def test_a_task_that_cannot_write_is_a_sentence(local_ray: None, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("a line of text\n" * 300)

    def write(number: int, task: ReadTask, plan: bytes) -> dict[str, Any]:
        if number == 2:
            with open("/dev/full", "wb") as file:
                file.write(b"a shard")
        return {"number": number}

    sources = resolve_sources(str(path), PrepareConfig(shard_bytes=1024))
    with pytest.raises(StorageError, match=rf"^{tmp_path} cannot be .*written \(No space left on device\): free space"):
        list(run_tasks(write, sources, "counting", KeptParts(tmp_path, "numbers", "key")))
    assert (tmp_path / "parts" / "numbers-000000.json").exists()


def test_a_cache_that_is_no_folder_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for cache in (tmp_path / "file", tmp_path / "file" / "cache", tmp_path / ("x" * 300)):
        with (
            pytest.raises(RunError, match=r"cannot be made .*another --prepare.cache_dir"),
            hold_work_folder(cache, NAME, "trying"),
        ):
            pass


def test_a_task_that_is_killed_again_and_again_ends_the_job(local_ray: None, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("a line of text\n" * 300)
    sources = resolve_sources(str(path), PrepareConfig(shard_bytes=1024))
    num_tasks = len(sources.tasks)

    def count_or_die(number: int, task: ReadTask, plan: bytes) -> dict[str, Any]:
        if number == 1 and not (tmp_path / "mended").exists():
            os.kill(os.getpid(), signal.SIGKILL)  # as Linux and Ray do where memory is short
        return {"number": number}

    kept = KeptParts(tmp_path, "numbers", "key", max_tries=2)
    with pytest.raises(RunError, match=rf"the task that reads {path} was killed 2 times, .* --prepare.shard_bytes"):
        list(run_tasks(count_or_die, sources, "counting", kept))
    (tmp_path / "mended").touch()
    results = list(run_tasks(count_or_die, sources, "counting", kept))
    assert [each["number"] for each in results] == list(range(num_tasks)) and num_tasks > 3
