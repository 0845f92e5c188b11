"""Storage that fails or falls silent at any step of reading is told as that: nothing is deleted, or made anew."""

from __future__ import annotations

import builtins
import errno
import io
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from object_store import MEMORY, MemoryBucket, use_memory
from test_hostile_input import TARGETS, Target, read_tree, write_corpus_folder

from domext_ray import storage
from domext_ray.errors import StorageError, find_user_error
from domext_ray.runtime.records import Records
from domext_ray.storage import Place
from domext_ray.text.corpus.manifest import SPLITS, read_manifest, remember_shards
from domext_ray.text.corpus.overlap import read_hashes, write_hashes
from domext_ray.text.corpus.shards import _find_prepared
from domext_ray.training.router import RouterRecord, read_routers, save_routers


def write_routers(folder: Path, base: Path) -> None:
    save_routers(Place(folder), {"clinic": (torch.ones(9), RouterRecord(0.5, 0.9, 0.1))})


def write_whole_corpus(folder: Path, base: Path) -> None:
    write_corpus_folder(folder, base)
    for split in SPLITS:
        write_hashes(Place(folder), split, 2, [np.arange(2, dtype=np.uint64)])
    remember_shards(read_manifest(Place(folder)))


def find_corpus(folder: Path) -> object:
    """What the same command goes on from: without it the text is prepared anew."""
    found = _find_prepared(Place(folder), "a")
    assert found is not None, "it is there"
    return found, read_hashes(Place(folder)).train.sum()


def write_result(folder: Path, base: Path) -> None:
    Records(Place(folder), "key").write(0, {"a": 1})


def read_result(folder: Path) -> object:
    found, fault = Records(Place(folder), "key").read(0)
    assert found is not None and not fault
    return found


OPENED = [
    *TARGETS,
    Target("routers", write_routers, lambda folder: read_routers(Place(folder))),
    Target("a corpus, gone on from", write_whole_corpus, find_corpus),
    Target("a task's result", write_result, read_result),
]
ASKED = [(os, "stat"), (os, "listdir"), (os, "scandir"), (builtins, "open"), (io, "open")]
"""What Python asks an operating system with."""
ASKED_BY_LIBRARIES = ("a base", "a set")
IN_A_BUCKET = (
    *("a prepared corpus", "a run's records", "an attempt", "a checkpoint", "a bank", "an export", "trials"),
    *("routers", "a corpus, gone on from", "a task's result"),
)


class Disk:
    """Counts what is asked of a folder, and fails from one question on."""

    def __init__(self, folder: Path, fails_at: int, number: int, lasts: bool) -> None:
        self.folder, self.fails_at, self.number, self.lasts = str(folder), fails_at, number, lasts
        self.num_asked = 0

    def wrap(self, ask: Any) -> Any:
        def asked(path: Any = ".", *args: Any, **settings: Any) -> Any:
            if not isinstance(path, int) and os.fsdecode(path).startswith(self.folder):
                self.num_asked += 1
                if self.num_asked == self.fails_at or (self.lasts and self.num_asked > self.fails_at > 0):
                    raise OSError(self.number, os.strerror(self.number), os.fsdecode(path))
            return ask(path, *args, **settings)

        return asked


@contextmanager
def ask_disk(folder: Path, fails_at: int = 0, number: int = errno.EIO, lasts: bool = True) -> Iterator[Disk]:
    disk = Disk(folder, fails_at, number, lasts)
    with pytest.MonkeyPatch.context() as patch:
        for module, name in ASKED:
            patch.setattr(module, name, disk.wrap(getattr(module, name)))
        yield disk


def read(target: Target, folder: Any, may_refuse: bool = False) -> str:
    """What is read; nothing where the storage is what is told, or anything else, if that may be."""
    try:
        return str(target.read(folder))
    except Exception as error:
        mistake = find_user_error(error)
        if mistake is None or not (may_refuse or isinstance(mistake, StorageError)):
            raise
        assert len(str(mistake).splitlines()) == 1
        return ""


@pytest.mark.parametrize("target", OPENED, ids=str)
@pytest.mark.parametrize(
    "number", [errno.EIO, pytest.param(errno.EACCES, marks=pytest.mark.slow)], ids=errno.errorcode.get
)
def test_a_disk_that_fails_is_not_damaged(target: Target, number: int, tiny_base_folder: Path, tmp_path: Path) -> None:
    sound, folder = tmp_path / "sound", tmp_path / "folder"
    sound.mkdir()
    target.make(sound, tiny_base_folder)
    shutil.copytree(sound, folder)
    with ask_disk(folder) as disk:
        expected = read(target, folder)
    before, num_asked, num_told = read_tree(sound), disk.num_asked, 0
    for lasts in (True, False):
        for fails_at in {*range(1, num_asked + 1, max(1, num_asked // 8)), num_asked}:
            shutil.rmtree(folder)
            shutil.copytree(sound, folder)
            with ask_disk(folder, fails_at, number, lasts):
                # What fails once, when a library asks, has passed when it is asked after.
                found = read(target, folder, may_refuse=not lasts and target.name.startswith(ASKED_BY_LIBRARIES))
            assert found in ("", expected), f"question {fails_at} of {num_asked}"
            num_told += not found
            assert target.writes or read_tree(folder) == before
    assert num_told or not num_asked


class SilentStore:
    """A store that answers so many more times, and then never."""

    def __init__(self, store: Any) -> None:
        self.store, self.num_asked, self.silent_after = store, 0, 10**9

    def __getattr__(self, name: str) -> Any:
        from obstore import exceptions

        ask = getattr(self.store, name)

        def asked(*args: Any, **settings: Any) -> Any:
            self.num_asked += 1
            if self.num_asked > self.silent_after:
                raise exceptions.GenericError("no answer")
            return ask(*args, **settings)

        return asked


@pytest.mark.parametrize("target", [target for target in OPENED if target.name in IN_A_BUCKET], ids=str)
def test_a_bucket_that_falls_silent_is_not_damaged(
    target: Target, tiny_base_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "PATIENCE_SECONDS", 0.0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    sound = tmp_path / "sound"
    sound.mkdir()
    target.make(sound, tiny_base_folder)

    def fill() -> tuple[MemoryBucket, SilentStore]:
        made = use_memory(monkeypatch)
        for path in sound.rglob("*"):
            if path.is_file():
                (Place(MEMORY) / path.relative_to(sound)).put(path.read_bytes())
        made.store = SilentStore(made.store)
        return made, made.store

    place = Place(f"{MEMORY}/")
    _, store = fill()
    expected, num_asked = read(target, place), store.num_asked
    assert num_asked
    for silent_after in range(num_asked):
        made, store = fill()
        before = made.files("")
        store.num_asked, store.silent_after = 0, silent_after
        assert read(target, place) in ("", expected), f"after {silent_after} of {num_asked} answers"
        made.store = store.store
        after = made.files("")
        assert after == before or (target.writes and after)
