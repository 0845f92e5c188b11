"""What a disk and a bucket promise alike."""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from object_store import BUCKET, GS_BUCKET, MEMORY, Proxy, use_gs, use_memory

from domext_ray import storage
from domext_ray.errors import RunError, StorageError
from domext_ray.storage import NEW, Log, Place, hash_file, new_file, write_json, write_text

NAMES = ["plain", "with space", "äöü", "a,b", "50%", "x=1&y#z+?", "[1]*", "…" * 20]


@pytest.fixture(params=["disk", "bucket"])
def place(request: pytest.FixtureRequest, tmp_path: Path, objects: str) -> Place:
    """An empty folder of either kind."""
    return Place(tmp_path / "room") if request.param == "disk" else Place(f"{BUCKET}/{tmp_path.name}/room")


@pytest.fixture(params=["disk", "bucket", "memory", "gs"])
def any_place(
    request: pytest.FixtureRequest, tmp_path: Path, objects: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Place]:
    """An empty folder of any kind; gs:// is this library's client before a server that answers as Google's does."""
    proxy = Proxy(objects, is_gs=True)
    use_gs(proxy.address, monkeypatch)
    use_memory(monkeypatch)
    roots = {"disk": tmp_path, "bucket": BUCKET, "memory": MEMORY, "gs": GS_BUCKET}
    yield Place(f"{roots[request.param]}/{tmp_path.name}/room")
    proxy.close()


def test_what_is_put_comes_back(any_place: Place) -> None:
    file = any_place / "a" / "b.bin"
    assert not any_place.exists() and not file.exists() and file.info() is None and any_place.list_names() == []
    file.put(b"\0one")
    assert file.exists() and file.is_file() and not file.is_dir() and any_place.is_dir() and not any_place.is_file()
    assert file.read_bytes() == b"\0one" and file.read_bytes(2) == b"ne" and file.read_bytes(4) == b""
    info = file.info()
    assert info is not None and info.size == 4
    file.put(b"another")
    changed = file.info()
    assert file.read_bytes() == b"another" and changed is not None and changed.tag != info.tag
    assert any_place.list_names() == ["a"] and any_place.list_files() == ["a/b.bin"]


@pytest.fixture
def own_temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files is this test's: what it deletes can be nobody else's, whatever the code does."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_what_is_made_for_a_bucket_is_its_owner_s(place: Place, own_temporary: Path) -> None:
    """On a disk the folder that it is made for says who may read; everybody has the one for temporary files."""
    before = os.umask(0)
    try:
        with new_file(place / "rows") as file:
            file.parent.mkdir(exist_ok=True, parents=True)
            file.write_bytes(b"rows")
            modes = {path.stat().st_mode & 0o777 for path in own_temporary.iterdir()}
        with place.scratch() as folder:
            modes |= {folder.stat().st_mode & 0o777}
    finally:
        os.umask(before)
    assert modes == ({0o777} if place.is_local else {0o700})
    assert (place / "rows").read_bytes() == b"rows" and not [*own_temporary.iterdir()]


def test_a_folder_for_temporary_files_that_is_cleaned_is_told(place: Place, own_temporary: Path) -> None:
    """What cleans /tmp may take what was made for a bucket; nothing of it is put, and nothing is passed over."""
    if place.is_local:
        pytest.skip("its files are made beside it")

    def clean() -> None:
        for path in own_temporary.iterdir():  # and nothing above it
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    told = r"^s3://.* cannot be written: its files were made in .*, which somebody has deleted; .* TMPDIR"
    with pytest.raises(StorageError, match=told), new_file(place / "rows") as file:
        file.write_bytes(b"rows")
        clean()
    with pytest.raises(StorageError, match=told), place.new_files("manifest.json") as folder:
        (folder / "manifest.json").write_bytes(b"{}")
        clean()
    assert not place.exists()


def test_any_name_will_do(any_place: Place) -> None:
    for name in NAMES:
        write_text(any_place / name / f"{name}.txt", name)
        assert (any_place / name).list_names() == [f"{name}.txt"]
        assert (any_place / name / f"{name}.txt").read_text() == name
    assert {*any_place.list_names()} == {*NAMES}
    assert {*any_place.list_files()} == {f"{name}/{name}.txt" for name in NAMES}


def test_what_is_not_there(any_place: Place) -> None:
    with pytest.raises(FileNotFoundError):
        (any_place / "none").read_bytes()
    (any_place / "none").delete()
    any_place.delete()


def test_the_end_of_a_file(place: Place) -> None:
    own = place / "log"
    with pytest.raises(FileNotFoundError):
        own.read_end(3)
    for content in (b"", b"a", b"abc", b"abcdef"):
        own.put(content)
        assert own.read_end(3) == (content[-3:], max(0, len(content) - 3))


def test_places_are_values(place: Place) -> None:
    below = place / "a/b"
    assert (below.name, below.parent.name, below.parent.parent) == ("b", "a", place)
    assert str(below) == f"{place}/a/b" and Place(str(below)) == below == Place(below)
    assert pickle.loads(pickle.dumps(below)) == below and {below: 1}[Place(str(below))] == 1


def test_links_of_a_disk_lead_to_a_place(place: Place, tmp_path: Path) -> None:
    (place / "a" / "1.txt").put(b"1")
    assert (place / "a").resolve() == place / "a"
    (linked := tmp_path / "linked").symlink_to(tmp_path / "elsewhere")
    assert Place(linked / "a").resolve() == Place(tmp_path / "elsewhere" / "a"), "also where nothing is"


def test_only_one_makes_a_file(any_place: Place) -> None:
    barrier = threading.Barrier(8)

    def make(number: int) -> list[int]:
        barrier.wait()
        with contextlib.suppress(FileExistsError):
            (any_place / "lock").put(b"%d" % number, NEW)
            return [number]
        return []

    with ThreadPoolExecutor(8) as pool:
        (made,) = sum(pool.map(make, range(8)), [])
    assert (any_place / "lock").read_bytes() == b"%d" % made and any_place.list_names() == ["lock"]


def test_a_deleted_folder_is_gone(any_place: Place) -> None:
    for name in ("a/1", "a/b/2", "ab"):
        write_text(any_place / name, name)
    (any_place / "a").delete()
    assert any_place.list_files() == ["ab"]


def test_a_file_is_read_at_a_local_path(any_place: Place) -> None:
    write_text(any_place / "a" / "1.txt", "one")
    write_text(any_place / "a" / "b" / "2.txt", "two")
    path = (any_place / "a" / "1.txt").local()
    assert path.name == "1.txt" and path.read_text() == "one"
    folder = (any_place / "a").local()
    assert (folder / "1.txt").read_text() == "one" and (folder / "b" / "2.txt").read_text() == "two"
    write_text(any_place / "a" / "1.txt", "new")
    assert (any_place / "a" / "1.txt").local().read_text() == "new"
    assert hash_file((any_place / "a" / "1.txt").local()) == storage.hash_text("new")


def test_a_block_that_fails_leaves_the_old_file(place: Place) -> None:
    write_text(place / "x.txt", "old")
    with pytest.raises(KeyError), new_file(place / "x.txt") as path:
        path.write_text("half")
        raise KeyError
    assert (place / "x.txt").read_text() == "old" and place.list_names() == ["x.txt"]
    with new_file(place / "x.txt") as path:
        assert path.suffix == ".txt"
        path.write_text("new")
    assert (place / "x.txt").read_text() == "new" and place.list_names() == ["x.txt"]


def publish(place: Place, version: str, *names: str, **settings: Any) -> None:
    with place.new_files("manifest.json", **settings) as folder:
        for name in names:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(version)
        write_json(Place(folder / "manifest.json"), {"version": version})


def test_a_folder_is_replaced_whole(any_place: Place) -> None:
    publish(any_place / "model", "1", "a", "sub/b")
    publish(any_place / "model", "2", "a", "c")
    assert (any_place / "model").list_files() == (any_place / "model").list_names() == ["a", "c", "manifest.json"]
    assert any_place.list_names() == ["model"]
    assert (any_place / "model" / "a").read_text() == "2"
    with pytest.raises(KeyError), (any_place / "model").new_files("manifest.json"):
        raise KeyError
    assert (any_place / "model" / "manifest.json").exists() and any_place.list_names() == ["model"]


@pytest.mark.parametrize("meanwhile", [b"", b"half"])
def test_a_folder_counts_for_nothing_while_it_is_replaced(
    place: Place, meanwhile: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(place / "model", "1", "a", "b")
    real, seen = Place.put, []

    def put(self: Place, source: Any, *args: Any, **settings: Any) -> str:
        if self.name == "b":
            manifest = place / "model" / "manifest.json"
            seen.append(manifest.read_bytes() if manifest.exists() else b"")
            raise OSError("gone")
        return real(self, source, *args, **settings)

    monkeypatch.setattr(Place, "put", put)
    with pytest.raises(OSError, match="gone"):
        publish(place / "model", "2", "a", "b", meanwhile=(lambda names: meanwhile) if meanwhile else None)
    assert seen == [meanwhile]


def test_a_log_grows(any_place: Place) -> None:
    log = Log(any_place / "log", start="0\n")
    for number in range(1, 4):
        log.add(f"{number}\n")
    log.flush()
    assert (any_place / "log").read_text() == "0\n1\n2\n3\n" and (any_place / "log").read_bytes(4) == b"2\n3\n"
    log.close()


ADD_LINES = """
import sys
from domext_ray.storage import Log, Place
for number in range(10):
    Log(Place(sys.argv[1])).add(f"{sys.argv[2]} {number}\\n")
"""


def test_several_add_to_one_log(place: Place) -> None:
    commands = [[sys.executable, "-c", ADD_LINES, str(place / "log"), name] for name in "ab"]
    processes = [subprocess.Popen(command) for command in commands]
    for number in range(10):
        Log(place / "log").add(f"c {number}\n")
    assert [process.wait(timeout=120) for process in processes] == [0, 0]
    lines = (place / "log").read_text().splitlines()
    assert sorted(lines) == [f"{name} {number}" for name in "abc" for number in range(10)]


def test_a_log_that_another_began_anew_is_not_added_to(place: Place) -> None:
    old = Log(place / "log", start="0\n")
    Log(place / "log", start="other\n").close()
    try:
        old.add("late\n")
        old.close()
    except RunError as error:
        assert "another job writes" in str(error)
    assert (place / "log").read_text() == "other\n"


def test_a_fence_keeps_writers_out(place: Place) -> None:
    class Fence:
        is_shut = False

        def check(self) -> None:
            if self.is_shut:
                raise RunError("shut")

    fence = Fence()
    own = Place(place, fence)
    write_text(own / "a", "1")
    with pytest.raises(RunError, match="shut"), (own / "model").new_files("manifest.json") as folder:
        (folder / "manifest.json").write_text("{}")
        fence.is_shut = True
    for act in (lambda: write_text(own / "a", "2"), (own / "a").delete, lambda: Log(own / "a").add("3")):
        if act.__name__ != "<lambda>" or not place.is_local:
            with pytest.raises(RunError, match="shut"):
                act()
    assert place.list_files() == ["a"]


def test_copies_that_nobody_uses_leave_the_cache(objects: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looked at by the first download and then once an hour: a corpus is thousands of them."""
    monkeypatch.setattr(storage, "TIDY_SECONDS", 0.0)
    place = Place(f"{BUCKET}/{tmp_path.name}/cached")
    for name in ("old", "used", "next"):
        (place / name).put(name.encode())
    old, used = ((place / name).local() for name in ("old", "used"))
    for path in (old, used):
        os.utime(path.parent, (0, 0))
    assert (place / "used").local() == used and (place / "next").local().read_bytes() == b"next"
    assert used.read_bytes() == b"used" and not old.exists()
    assert (place / "old").local().read_bytes() == b"old", "it is fetched again"
    monkeypatch.setattr(storage, "TIDY_SECONDS", 3600.0)
    for name in ("more", "last"):
        (place / name).put(b"")
    (place / "more").local()  # the last time that all are looked at
    os.utime(used.parent, (0, 0))
    (place / "last").local()
    assert used.exists()
