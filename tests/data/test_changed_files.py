"""A text is what its bytes are: size, time, inode and tag are hints, which lead to a hash and decide nothing."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from changed_files import REPLACED, TOUCHED, watch_hashing
from object_store import BUCKET

from domext_ray import storage
from domext_ray.config.pretrain import PrepareConfig
from domext_ray.errors import CorpusError, RunError
from domext_ray.storage import Place
from domext_ray.text.data import hashes
from domext_ray.text.data.sources import Sources, describe_changes, require_files, resolve_sources, write_files

NAMES, MARKS = b"Mrs Miller was seen by Dr Brown.\n" * 40, b"Mrs [NAME] was seen by Dr Brown.\n" * 40


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "b.txt").write_bytes(b"another file of the text\n")
    (tmp_path / "texts" / "a.txt").write_bytes(NAMES)
    return tmp_path / "texts" / "a.txt"


def find(text: Path | Place | str, corpora: Path) -> Sources:
    """What a new start finds."""
    return resolve_sources(str(text), PrepareConfig(), Place(corpora))


@pytest.mark.parametrize("replace", REPLACED.values(), ids=REPLACED)
def test_other_bytes_of_the_same_size_and_time_are_found(
    text: Path, tmp_path: Path, replace: Callable[[Path, bytes], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    read = watch_hashing(monkeypatch)
    with_names, before = find(text.parent, tmp_path).fingerprint, text.stat()
    assert find(text.parent, tmp_path).fingerprint == with_names and sorted(read) == ["a.txt", "b.txt"]
    replace(text, MARKS)
    assert (before.st_size, before.st_mtime_ns) == (text.stat().st_size, text.stat().st_mtime_ns)
    assert find(text.parent, tmp_path).fingerprint != with_names and read[2:] == ["a.txt"]
    replace(text, NAMES)
    assert find(text.parent, tmp_path).fingerprint == with_names


@pytest.mark.parametrize("touch", TOUCHED.values(), ids=TOUCHED)
def test_the_same_bytes_are_the_same_text_and_read_once_more(
    text: Path, tmp_path: Path, touch: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    read = watch_hashing(monkeypatch)
    before = find(text, tmp_path).fingerprint
    touch(text)
    assert [find(text, tmp_path).fingerprint for _ in range(3)] == [before] * 3
    assert read == ["a.txt", "a.txt"], "once for each state"


def test_a_copied_folder_of_corpora_is_hashed_once_on_its_new_machine(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its memory is of other inodes."""
    read = watch_hashing(monkeypatch)
    before = find(text, tmp_path / "corpora")
    assert before.fingerprint
    (memory,) = (tmp_path / "corpora").iterdir()
    values = json.loads(memory.read_text())
    values[str(text)]["hints"][2:] = [1, 2]
    memory.write_text(json.dumps(values))
    assert [find(text, tmp_path / "corpora").fingerprint for _ in range(2)] == [before.fingerprint] * 2
    assert read == ["a.txt"] * 2


def test_what_0_1_0_remembered_is_read_once_more(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It knew size and time, which prove nothing."""
    read, sources = watch_hashing(monkeypatch), find(text, tmp_path / "corpora")
    assert sources.folder is not None
    info = text.stat()
    record = {str(text): [info.st_size, info.st_mtime, "a" * 64]}
    (sources.folder / f".hashes-{storage.hash_text(str(text))[:16]}.json").put(json.dumps(record).encode())
    assert find(text, tmp_path / "corpora").hashes == (hashlib.sha256(NAMES).hexdigest(),)
    assert find(text, tmp_path / "corpora").fingerprint and read == ["a.txt"]


def test_what_has_just_been_written_proves_nothing(text: Path, tmp_path: Path) -> None:
    """The next change may have the same time by a coarse clock."""
    assert find(text, tmp_path / "corpora").fingerprint and not (tmp_path / "corpora").exists()
    os.utime(text, (1e9, 1e9))
    assert find(text, tmp_path / "corpora").fingerprint and not (tmp_path / "corpora").exists(), "its change is new"


def test_a_bucket_knows_text_by_its_bytes(
    objects: str, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a disk does; what is uploaded again is known by its tag, or is read once more."""
    read = watch_hashing(monkeypatch)
    remote = Place(f"{BUCKET}/{tmp_path.name}/a.txt")
    remote.put(NAMES)
    before = find(remote, tmp_path / "corpora")
    assert before.fingerprint == find(text, tmp_path / "corpora").fingerprint and read == ["remote", "a.txt"]
    remote.put(NAMES)
    assert find(remote, tmp_path / "corpora").fingerprint == before.fingerprint and len(read) == 2, "the tag proves it"
    remote._backend.store.put(remote.key, NAMES, use_multipart=True, chunk_size=5 * 2**20)  # type: ignore[union-attr]
    assert [find(remote, tmp_path / "corpora").fingerprint for _ in range(2)] == [before.fingerprint] * 2
    assert read[2:] == ["remote"], "another tag of the same bytes"
    remote.put(MARKS)
    changed = find(remote, tmp_path / "corpora")
    assert changed.fingerprint != before.fingerprint and len(read) == 4
    assert describe_changes(before.record(), changed.record()) == f"{remote} has changed"
    monkeypatch.setattr(hashes, "SKEW_SECONDS", 0.0)  # as if a minute had gone
    assert find(remote, tmp_path / "corpora").fingerprint == changed.fingerprint
    monkeypatch.setattr(
        Place, "info", lambda self: pytest.fail("for a text that is as it was nobody asks file by file")
    )
    assert find(remote, tmp_path / "corpora").fingerprint == changed.fingerprint and len(read) == 4


def test_a_bucket_s_text_has_the_name_that_0_1_0_gave_it_too(objects: str, text: Path, tmp_path: Path) -> None:
    remote = Place(f"{BUCKET}/{tmp_path.name}/a.txt")
    remote.put(NAMES)
    sources = find(remote, tmp_path / "corpora")
    (file,) = sources.files
    said = json.dumps(["text", len(NAMES)]) + f"runs/{tmp_path.name}/a.txt {file.modified}"
    assert sources.former_fingerprint == hashlib.sha256(said.encode()).hexdigest() != sources.fingerprint
    local = find(text, tmp_path / "corpora")
    said = json.dumps(["text", len(NAMES)]) + hashlib.sha256(NAMES).hexdigest()
    assert local.former_fingerprint == local.fingerprint == hashlib.sha256(said.encode()).hexdigest()


A, B, C, D = (("/t/a", "text 1"), ("/t/b", "text 2"), ("/t/c", "text 3"), ("/t/d", "text 4"))


@pytest.mark.parametrize(
    ("now", "said"),
    [
        ([A, B, C], ""),
        ([("/u/a", "text 1"), ("/u/b", "text 2"), ("/u/c", "text 3")], ""),
        ([A, ("/t/b", "text 9"), C], "/t/b has changed"),
        ([A, ("/t/b", "jsonl 2"), C], "/t/b has changed"),
        ([A, ("/t/b", "text 8"), ("/t/c", "text 9")], "/t/b and 1 more have changed"),
        ([A, ("/t/b", "text 3"), ("/t/c", "text 2")], "/t/b and 1 more have changed"),
        ([A, B, C, D], "/t/d is new"),
        ([A, C], "/t/b is gone"),
        ([D, A, ("/t/b", "text 9")], "/t/b has changed; /t/d is new; /t/c is gone"),
        ([B, C, ("/t/z", "text 1")], "/t/z is new; /t/a is gone"),
        ([A, B, ("/u/c", "text 9")], "/u/c differs from /t/c"),
        ([A, B, C, ("/t/e", "text 2")], "/t/e is new"),
        ([A, C, B], "the files come in another order, from /t/c on"),
    ],
)
def test_what_changed_is_named(now: list[tuple[str, str]], said: str, tmp_path: Path) -> None:
    assert describe_changes([A, B, C], now) == said
    write_files(Place(tmp_path / "made"), [A, B, C])
    if said:
        with pytest.raises(RunError) as error:
            require_files(Place(tmp_path / "made"), lambda: now, "so give another")
        assert str(error.value) == f"{said}, so give another."
    else:
        require_files(Place(tmp_path / "made"), lambda: now, "")


def test_of_what_0_1_0_made_nobody_knows_the_files(tmp_path: Path) -> None:
    require_files(Place(tmp_path), lambda: pytest.fail("the text is not read for nothing"), "")
    for damaged in (b"", b"[]", b"\xff", b'{"files": 3}', b'{"files": [[]]}'):
        (tmp_path / "sources.json").write_bytes(damaged)
        require_files(Place(tmp_path), list, "")


def test_a_text_that_changes_while_it_is_read_is_refused(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its bytes; one that is touched, one that goes and one that comes meanwhile are not looked at again."""
    watch_hashing(monkeypatch)
    sources = find(text.parent, tmp_path / "corpora")
    assert sources.fingerprint
    TOUCHED["touched"](text)
    (text.parent / "b.txt").unlink()
    (text.parent / "c.txt").write_text("comes with the next start\n")
    sources.require_unchanged()
    REPLACED["cp -p"](text, MARKS)
    with pytest.raises(CorpusError, match=rf"changed while it was read \({text} has changed\); start again when"):
        sources.require_unchanged()


def test_hashing_ends_when_the_job_does(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C does not wait for a file of a terabyte, and neither does a file that cannot be read."""
    ends = threading.Event()

    class Endless:
        def read(self, size: int) -> bytes:
            ends.set()
            return b"\0"

    def hash_endless(count: Callable[[int], None]) -> str:
        return storage.hash_stream(Endless(), count)

    def interrupt(num_bytes: int, total: int) -> None:
        assert ends.wait(10)
        raise KeyboardInterrupt

    endless = [hashes.Listed(str(number), 10**12, None, hash_endless) for number in range(3)]
    with pytest.raises(KeyboardInterrupt):
        hashes.hash_listed(endless, watch=interrupt)
    with pytest.raises(FileNotFoundError):
        hashes.hash_listed([*endless, *hashes.list_on_disk([str(text.with_name("none"))])])


def test_long_hashing_says_how_far_it_is(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(hashes.StatusLine, "is_due", True)
    monkeypatch.setattr(hashes, "PLAIN_SECONDS", 0.0)
    assert find(text.parent, tmp_path).fingerprint
    said = capsys.readouterr().err
    assert "hashing 2 files of text: 0 of 0 MB in 0:00, " in said and " MB/s" in said
