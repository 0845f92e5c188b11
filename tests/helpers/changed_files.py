"""Ways in which bytes take the place of others and a file keeps its size and its time, and ways that change no byte."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from domext_ray import storage
from domext_ray.text.data import hashes


def _make_other(path: Path, content: bytes) -> Path:
    """A file beside another one, with its time; a little later, for a clock may tick a hundred times a second."""
    time.sleep(0.03)
    before, other = path.stat(), path.with_name(f".{path.name}.other")
    assert len(content) == before.st_size and content != path.read_bytes()
    other.write_bytes(content)
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    return other


def _copy(path: Path, content: bytes) -> None:
    """As `cp -p`: into the same inode."""
    other = _make_other(path, content)
    subprocess.run(["cp", "-p", other, path], check=True)
    other.unlink()


def _rename(path: Path, content: bytes) -> None:
    """As `rsync -t`."""
    _make_other(path, content).rename(path)


def _unpack(path: Path, content: bytes) -> None:
    """As `tar -x`."""
    other = _make_other(path, content)
    subprocess.run(["tar", "-C", path.parent, "-cf", f"{other}.tar", "--format=posix", other.name], check=True)
    path.unlink()
    subprocess.run(
        ["tar", "-C", path.parent, "-xf", f"{other}.tar", f"--transform=s/{other.name}/{path.name}/"], check=True
    )
    other.unlink()
    Path(f"{other}.tar").unlink()


REPLACED: dict[str, Callable[[Path, bytes], None]] = {"cp -p": _copy, "rsync -t": _rename, "tar -x": _unpack}
"""The bytes are others; size and time are the same."""


def _touch(path: Path) -> None:
    os.utime(path, (1.2e9, 1.2e9))


def _put_again(path: Path) -> None:
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content)


def _bring_back(path: Path) -> None:
    """As from a backup, or from another machine."""
    moved = shutil.copy2(path, path.with_name(".copy"))
    path.unlink()
    Path(moved).rename(path)


TOUCHED: dict[str, Callable[[Path], None]] = {"touched": _touch, "written": _put_again, "brought back": _bring_back}
"""The bytes are the same."""


def watch_hashing(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of the files that are read for their hash from now on; all are taken for older than they are."""
    read, disk, remote = list[str](), hashes.hash_file, hashes.hash_stream

    def note_file(path: Path, *rest: Callable[[int], None]) -> str:
        read.append(path.name)
        return disk(path, *rest)

    def note_stream(stream: storage.Stream, count: Callable[[int], None], num_bytes: int) -> str:
        read.append("remote")
        return remote(stream, count, num_bytes)

    monkeypatch.setattr(hashes, "hash_file", note_file)
    monkeypatch.setattr(hashes, "hash_stream", note_stream)
    monkeypatch.setattr(hashes, "SETTLED_SECONDS", -1.0)
    return read
