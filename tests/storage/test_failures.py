"""Storage that refuses, or does not answer: one sentence within seconds, or patience with an end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from object_store import BUCKET, Proxy, use_objects

from domext_ray import storage
from domext_ray.errors import StorageError
from domext_ray.storage import NEW, Place, write_text


@pytest.fixture
def proxy(objects: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    made = Proxy(objects)
    use_objects(made.address, monkeypatch)
    yield made
    made.close()


def test_a_bucket_that_is_not_there(objects: str) -> None:
    for act in (
        Place("s3://none/x").list_names,
        lambda: write_text(Place("s3://none/x"), "1"),
        Place("s3://none/x").read_bytes,
    ):
        started = time.monotonic()
        with pytest.raises(StorageError, match=r"^s3://none/x cannot be .*: there is no bucket s3://none; make it"):
            act()
        assert time.monotonic() - started < 5


def test_a_key_without_the_right(proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it is, is not said."""
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "top-secret")
    storage._open_backend.cache_clear()
    place = Place(f"{BUCKET}/{tmp_path.name}")
    write_text(place / "x", "1")
    for method, act in (
        ("PUT", lambda: write_text(place / "x", "2")),
        ("GET", (place / "x").read_bytes),
        ("POST", (place / "x").delete),
    ):
        proxy.refused, started = method, time.monotonic()
        says = r"^s3://.* cannot be .* \(AccessDenied\): see to the rights of the key"
        with pytest.raises(StorageError, match=says) as raised:
            act()
        assert time.monotonic() - started < 5 and (place / "x").info() is not None
        assert "top-secret" not in str(raised.value)


def test_no_credentials(objects: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    storage._open_backend.cache_clear()
    started = time.monotonic()
    with pytest.raises(StorageError, match="there are no credentials; set AWS_ACCESS_KEY_ID"):
        write_text(Place(f"{BUCKET}/x"), "1")
    assert time.monotonic() - started < 30


def test_a_while_without_an_answer_is_waited_for(
    proxy: Proxy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = Place(f"{BUCKET}/{tmp_path.name}/x")
    for seconds in (2.0, 1.0):
        proxy.silent_until = time.monotonic() + seconds
        write_text(place, str(seconds))
        assert time.monotonic() >= proxy.silent_until and place.read_text() == str(seconds)
        said = capsys.readouterr().err
        assert said.count("does not answer (SlowDown); this job asks again for 120 s.") == 1
        assert said.endswith("note: s3://runs answers again.\n")


def test_patience_has_an_end(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "PATIENCE_SECONDS", 2.0)
    proxy.silent_until = time.monotonic() + 60
    started = time.monotonic()
    with pytest.raises(
        StorageError, match=r"has not answered for \d s \(SlowDown\); look after that storage, and the same"
    ):
        write_text(Place(f"{BUCKET}/x"), "1")
    assert time.monotonic() - started < 10


def test_nobody_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    use_objects("http://127.0.0.1:9", monkeypatch)
    monkeypatch.setattr(storage, "PATIENCE_SECONDS", 1.0)
    with pytest.raises(StorageError, match=r"has not answered for \d s \(no answer\)"):
        Place(f"{BUCKET}/x").read_bytes()


def test_a_lost_answer_does_not_make_a_stranger_of_oneself(proxy: Proxy, tmp_path: Path) -> None:
    """The file was made, the answer was 503: what asks again finds its own file, and a stranger's is one."""
    place = Place(f"{BUCKET}/{tmp_path.name}/x")
    proxy.loses_answers = 1
    place.put(b"mine", NEW)
    assert proxy.loses_answers == 0 and place.read_bytes() == b"mine"
    with pytest.raises(FileExistsError):
        place.put(b"another", NEW)
