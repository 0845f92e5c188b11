"""What is the user's to mend, in a task, too, is its own sentence and exit code 2: mistakes, full disks."""

from __future__ import annotations

import errno
import functools
import importlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib.figure
import numpy as np
import pyarrow.parquet
import pytest
import ray
import torch
from file_limits import limit_files
from ray.exceptions import RayError
from row_files import write_arrow
from safetensors.torch import save_file
from transformers import AutoModelForMaskedLM, AutoTokenizer

from domext_ray.errors import CorpusError, StorageError, find_user_error
from domext_ray.runtime.stopping import exit_on_user_error
from domext_ray.storage import Place, new_file

SIZE = 10_000


def test_a_job_that_meets_a_full_disk_says_so() -> None:
    code = """
from domext_ray.runtime.stopping import exit_on_user_error
with exit_on_user_error(), open("/dev/full", "w") as file:
    file.write("text")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert done.returncode == 2
    assert done.stderr == (
        "error: a file of this job cannot be read or written (No space left on device): free space there, and the "
        "same command goes on.\n"
    )


def write_lines(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:  # what is left is written as it is closed
        file.write(text)


def draw(path: Path) -> None:
    figure = matplotlib.figure.Figure(figsize=(9, 9))
    figure.figimage(np.random.default_rng(0).random((900, 900)))
    figure.savefig(path, format="png")


NUMBERS = np.random.default_rng(0).random(5 * SIZE)
TABLE = pyarrow.table({"x": NUMBERS})
TENSORS = {"x": torch.zeros(SIZE)}
WRITERS: dict[str, Callable[[Path], object]] = {
    "text.md": lambda path: path.write_text("x" * 2 * SIZE),
    "lines.jsonl": lambda path: write_lines(path, "x" * (SIZE + 100)),
    "array.npy": lambda path: np.save(path, NUMBERS),  # NumPy says how much was written, and not why
    "arrays.npz": lambda path: np.savez(path, NUMBERS),
    "packed.npz": lambda path: np.savez_compressed(path, NUMBERS),
    "raw.bin": lambda path: NUMBERS.tofile(path),
    "shard.arrow": lambda path: write_arrow(path, TABLE),
    "table.parquet": lambda path: pyarrow.parquet.write_table(TABLE, path),
    "tensors.safetensors": lambda path: save_file(TENSORS, path),
    "picture.png": draw,
}


@pytest.mark.parametrize("name", WRITERS)
def test_what_there_is_no_room_for_is_named(name: str, tmp_path: Path) -> None:
    """A file, however it is written; of one among the files of a folder the folder, for most errors name no file."""
    said = r"^{}(/{})? cannot be read or written \((File too large|No space left on device)\): "
    with (
        pytest.raises(StorageError, match=said.format(tmp_path / name, "")),
        new_file(Place(tmp_path / name)) as path,
        limit_files(SIZE),
    ):
        WRITERS[name](path)
    export = Place(tmp_path / "export")
    with (
        pytest.raises(StorageError, match=said.format(export, name)),
        export.new_files("last.json") as temporary,
        limit_files(SIZE),
    ):
        WRITERS[name](temporary / name)
    assert [*tmp_path.iterdir()] == []


def test_folders_that_libraries_write_are_named(tiny_base_folder: Path, tmp_path: Path) -> None:
    model = AutoModelForMaskedLM.from_pretrained(tiny_base_folder)
    tokenizer = AutoTokenizer.from_pretrained(tiny_base_folder)
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "large.bin").write_bytes(bytes(2 * SIZE))
    copy = functools.partial(shutil.copytree, tmp_path / "source", dirs_exist_ok=True)
    for write in (model.save_pretrained, tokenizer.save_pretrained, copy):
        with (
            pytest.raises(StorageError, match=rf"^{tmp_path / 'made'} cannot be read or written \(File too large"),
            Place(tmp_path / "made").new_files("last.json") as temporary,
            limit_files(2000),
        ):
            write(temporary)


def test_a_file_that_is_read_meanwhile_is_not_the_one_that_is_written(tmp_path: Path) -> None:
    with pytest.raises(OSError) as caught, new_file(Place(tmp_path / "part.jsonl")):
        raise OSError(errno.EIO, os.strerror(errno.EIO), "/data/notes.txt")
    assert str(find_user_error(caught.value)).startswith("/data/notes.txt cannot be read or written (Input/output err")


def test_files_reach_the_disk_before_they_have_their_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    flush, replace = os.fsync, os.replace

    def note_flush(descriptor: int) -> None:
        told.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        flush(descriptor)

    def note_name(call: Callable[..., None]) -> Callable[..., None]:
        def noted(source: Any, target: Any) -> None:
            told.append(f"named {Path(target).name}")
            call(source, target)

        return noted

    monkeypatch.setattr(os, "fsync", note_flush)
    monkeypatch.setattr(os, "replace", note_name(replace))
    with new_file(Place(tmp_path / "record")) as path:
        path.write_text("2")
    *before, flushed, named, folder = told
    assert flushed.startswith(".record.") and (named, folder) == ("named record", tmp_path.name)
    assert all(event.startswith("named .record.") for event in before), "from one temporary name to another"


def test_a_task_that_meets_one_is_a_sentence_too(local_ray: None) -> None:
    def fail() -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "/data/x.npy")

    with pytest.raises(OSError) as caught:
        ray.get(ray.remote(num_cpus=0)(fail).remote())
    assert str(find_user_error(caught.value)).startswith("/data/x.npy cannot be read or written (No space left")


def test_a_defect_stays_one() -> None:
    for error in (FileNotFoundError(errno.ENOENT, "gone", "x"), OSError("odd"), ValueError("os")):
        assert find_user_error(error) is None


@pytest.mark.parametrize("door", ["function", "argument", "actor", "import"])
def test_a_node_without_a_package_is_a_sentence(
    local_ray: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, door: str
) -> None:
    """Workers of this machine know a module of this process' own as little as a node does that lacks a package."""
    (tmp_path / f"only_{door}.py").write_text("class Thing:\n    pass\n\n\ndef work(*_):\n    pass\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module(f"only_{door}")

    def find_it() -> None:
        importlib.import_module(f"only_{door}")

    with pytest.raises(RayError) as caught:
        if door == "actor":
            ray.get(ray.remote(num_cpus=0)(module.Thing).remote().__ray_ready__.remote())
        work = {"function": module.work, "import": find_it}.get(door, lambda _: None)
        ray.get(ray.remote(num_cpus=0)(work).remote(*([module.Thing()] if door == "argument" else [])))
    told = rf"(the node 127\.0\.0\.1|a node) has no Python package 'only_{door}' \(only_{door}\), which this job needs"
    assert re.match(told, str(find_user_error(caught.value)))


SENTENCE = "text.txt cannot be read; mend it or leave it out."


def test_an_error_of_a_task_is_the_sentence_that_it_raised(local_ray: None, capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise CorpusError(SENTENCE)

    def wait_for_another() -> Any:
        return ray.get(ray.remote(num_cpus=0)(fail).remote())

    for work in (fail, wait_for_another):
        with pytest.raises(CorpusError) as caught:
            ray.get(ray.remote(num_cpus=0)(work).remote())
        assert "\n" in str(caught.value)  # what Ray raises is a CorpusError, too, with a traceback as its text
        found = find_user_error(caught.value)
        assert type(found) is CorpusError and str(found) == SENTENCE
        with pytest.raises(SystemExit) as ended, exit_on_user_error():
            raise caught.value
        assert ended.value.code == 2 and capsys.readouterr().err.endswith(f"error: {SENTENCE}\n")


def test_a_defect_met_while_a_mistake_is_told_keeps_its_traceback() -> None:
    try:
        try:
            raise CorpusError(SENTENCE)
        except CorpusError:
            {}["a defect"]
    except KeyError as error:
        assert find_user_error(error) is None
    try:
        try:
            raise CorpusError(SENTENCE)
        except CorpusError as mistake:
            raise RuntimeError("what a library makes of it") from mistake
    except RuntimeError as error:
        assert str(find_user_error(error)) == SENTENCE
