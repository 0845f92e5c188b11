"""Checkpoints: exact round trip, damage of every kind, full disks and crashes while writing."""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import re
import shutil
import socket
import threading
import warnings
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from file_limits import limit_files
from forked import launch
from object_store import MEMORY, use_memory

from domext_ray import storage
from domext_ray.errors import RunError, StorageError, TrainingError
from domext_ray.runs.attempts import supersede
from domext_ray.storage import Place, Where
from domext_ray.training import checkpoint as checkpoint_module
from domext_ray.training.checkpoint import (
    FORMAT,
    Checkpoint,
    agree_on_checkpoint,
    check_all,
    choose_checkpoint,
    find_latest,
    save_checkpoint,
)
from domext_ray.training.engine import TensorState, TrainState

FILES = ("tensors.safetensors", "moments.safetensors", "manifest.json")


def make_state(num_updates: int = 3, rows: int = 4) -> TrainState:
    generator = torch.Generator().manual_seed(num_updates)

    def draw() -> TensorState:
        return TensorState(*(torch.randn(rows, 5, generator=generator) for _ in range(3)))

    return TrainState({"layer.0.exp_avg.weight": draw(), "layer.1.weight": draw()}, num_updates)


def save(folder: Where, step: int, keep: int = 2, **changes: Any) -> Any:
    settings: dict[str, Any] = {
        "state": make_state(step),
        "fixed": {"head.bias": torch.arange(3.0)},
        "trainer_state": {"epoch": 1, "batch": step},
        "run_info": {"base_sha256": "a" * 64},
    }
    made = save_checkpoint(Place(folder), step, **(settings | changes), keep=keep)
    return Path(made) if made.is_local else made


def find_path(folder: Path) -> Place | None:
    found = find_latest(Place(folder))
    return found and found.path


def choose(folder: Path) -> tuple[Place | None, tuple[str, ...]]:
    told: list[str] = []
    found = choose_checkpoint(Place(folder), tell=told.append)
    return found and found.path, (*told,)


def identify(path: Path) -> Checkpoint:
    found = find_latest(Place(path.parent))
    assert found is not None and found.path == path
    return found


def list_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_round_trip_is_exact(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    path = save(folder, 7)
    assert path == folder / "step-00000007" and list_names(path) == sorted(FILES)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found, expected = find_latest(Place(folder)), make_state(7)
    assert found is not None
    assert (found.step, found.state.num_updates) == (7, 7)
    assert found.trainer_state == {"epoch": 1, "batch": 7} and found.run_info == {"base_sha256": "a" * 64}
    assert list(found.fixed) == ["head.bias"] and torch.equal(found.fixed["head.bias"], torch.arange(3.0))
    assert found.state.tensors.keys() == expected.tensors.keys()
    for name, tensor in expected.tensors.items():
        for moment in ("param", "exp_avg", "exp_avg_sq"):
            assert torch.equal(getattr(found.state.tensors[name], moment), getattr(tensor, moment)), (name, moment)


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_who_may_read_a_checkpoint_is_the_umask_s(tmp_path: Path, mask: int) -> None:
    """A colleague who may read a run may start from it; safetensors makes files for their owner alone."""
    before = os.umask(mask)
    try:
        made = save(tmp_path, 3)
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in made.iterdir()} == {0o666 & ~mask}


def test_keeps_the_newest_and_cleans_what_crashes_left(tmp_path: Path) -> None:
    for step in (5, 10, 15, 20):
        (tmp_path / f".step-{step - 5:08d}.{socket.gethostname()}-{2**22 + 1}-0a1b2c3d").mkdir()  # no process has it
        save(tmp_path, step, keep=3)
    assert list_names(tmp_path) == ["step-00000010", "step-00000015", "step-00000020"]
    assert find_path(tmp_path) == tmp_path / "step-00000020"
    save(tmp_path, 25, keep=1)
    assert list_names(tmp_path) == ["step-00000025"]


def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path) -> None:
    """Whatever file is damaged in whatever way; without a manifest it is none."""
    for number, (name, damage) in enumerate(product(FILES, ("flip", "truncate", "delete"))):
        folder = tmp_path / str(number)
        older, newer = save(folder, 1), save(folder, 2)
        content = bytearray((newer / name).read_bytes())
        if damage == "flip":
            content[len(content) // 2] ^= 0x80
        (newer / name).write_bytes(content[: len(content) // 2] if damage == "truncate" else content)
        if damage == "delete":
            (newer / name).unlink()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert find_path(folder) == older, (name, damage)
        said = " ".join(str(warning.message) for warning in caught)
        if (name, damage) != ("manifest.json", "delete"):
            assert str(newer) in said and (damage == "flip" or name in said), (name, damage)


def test_what_is_no_checkpoint_of_this_version_is_passed_over(tmp_path: Path) -> None:
    """One that has another name, and one of another format."""
    sound, renamed, later = save(tmp_path, 10), tmp_path / "step-00000020", save(tmp_path, 30) / "manifest.json"
    shutil.copytree(sound, renamed)
    later.write_text(later.read_text().replace(f'"format": {FORMAT}', '"format": 9'))
    with pytest.warns(UserWarning) as told:
        assert find_path(tmp_path) == sound
    said = " ".join(str(warning.message) for warning in told)
    assert re.search(f"{renamed} .*its manifest is one of step 10", said)
    assert re.search("manifest.json has format 9, which a later version .* reads format 3", said)


def test_damage_never_costs_the_last_sound_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, 1)
    damaged = save(tmp_path, 3)
    (damaged / "moments.safetensors").unlink()
    newest = save(tmp_path, 4, keep=2)
    assert list_names(tmp_path) == ["step-00000001", "step-00000004"], "what is not whole does not count as kept"
    damaged = save(tmp_path, 6)
    (damaged / "moments.safetensors").unlink()
    newest = save(tmp_path, 5, keep=1)
    assert list_names(tmp_path) == ["step-00000005", "step-00000006"]
    with pytest.warns(UserWarning, match="moments.safetensors is missing"):
        assert find_path(tmp_path) == newest
    replaced = save(tmp_path, 6, keep=2)
    assert replaced == damaged and find_path(tmp_path) == replaced
    assert list_names(tmp_path) == ["step-00000005", "step-00000006"]


def test_a_checkpoint_that_is_refused_leaves_the_one_of_its_step(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    assert save(tmp_path, 1) == path and find_path(tmp_path) == path
    with pytest.raises(TrainingError, match="not finite"):
        save(tmp_path, 1, state=TrainState({"a": TensorState(*[torch.full((1,), torch.nan)] * 3)}, 1))
    assert find_path(tmp_path) == path


def test_full_disk_leaves_the_previous_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    previous = save(tmp_path, 1, keep=1)

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    writes = [(checkpoint_module, name) for name in ("save_file", "write_json", "hash_file")]
    for module, name in [*writes, (storage, "flush_files")]:
        with monkeypatch.context() as full:
            full.setattr(module, name, refuse)
            says = r"step 2 cannot be written to .*No space left on device.*free space"
            with pytest.raises(StorageError, match=says):
                save(tmp_path, 2, keep=1)
        assert list_names(tmp_path) == [previous.name] and find_path(tmp_path) == previous, name
    with pytest.raises(StorageError, match="File too large"), limit_files(64 * 1024):
        save(tmp_path, 2, state=make_state(2, rows=8192))
    assert list_names(tmp_path) == [previous.name] and find_path(tmp_path) == previous


def _save_and_die(folder: Path) -> None:
    checkpoint_module.hash_file = lambda path: os._exit(9)  # nothing cleans up, as after SIGKILL
    save(folder, 2)


def test_crash_between_files_leaves_the_previous_one(tmp_path: Path) -> None:
    previous = save(tmp_path, 1)
    process = multiprocessing.get_context("fork").Process(target=_save_and_die, args=(tmp_path,))
    process.start()
    process.join(timeout=60)
    assert process.exitcode == 9 and len(list_names(tmp_path)) == 2 and find_path(tmp_path) == previous
    save(tmp_path, 2)
    assert list_names(tmp_path) == ["step-00000001", "step-00000002"]


def test_the_choice_says_what_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "step-1x").mkdir()
    assert choose(tmp_path / "absent") == choose(tmp_path) == (None, ())
    older, newer = save(tmp_path, 5), save(tmp_path, 10)
    assert choose(tmp_path) == (newer, ())
    (newer / "moments.safetensors").unlink()
    said = f"checkpoint {newer} is passed over (moments.safetensors is missing); the run goes on from step 5."
    assert choose(tmp_path) == (older, (said,))


def test_where_all_are_damaged_none_is_chosen(tmp_path: Path) -> None:
    older, newer = save(tmp_path, 5), save(tmp_path, 10)
    (newer / "moments.safetensors").unlink()
    (older / "moments.safetensors").write_bytes(b"")
    before = sorted(tmp_path.rglob("*"))
    says = "step-00000010: moments.* missing; step-00000005: moments.* 0 bytes.*delete "
    with pytest.raises(RunError, match=says) as raised:
        choose(tmp_path)
    assert len(str(raised.value).splitlines()) == 1 and sorted(tmp_path.rglob("*")) == before


def _agree(rank: int, questions: list[tuple[tuple[Path, Path], Checkpoint | None, tuple[Path, Path] | None]]) -> Any:
    """What a rank says that sees a folder of its own, beside the driver's choice; what is late comes while it waits."""
    said: list[str | None] = []
    for folders, chosen, late in questions:
        checkpoint_module.SEEN_WITHIN_SECONDS = 20.0 if late else 0.3
        if late and rank == 0:
            threading.Timer(0.5, shutil.copytree, late).start()
        try:
            found = agree_on_checkpoint(Place(folders[rank]), chosen, torch.device("cpu"))
            said.append(found and found.path.name)
        except RunError as error:
            said.append(str(error))
    return said


def test_ranks_go_on_from_one_checkpoint_however_old_their_listing_is(tmp_path: Path) -> None:
    """And from what was saved since the driver chose."""
    fresh, stale, damaged, ranks = (tmp_path / name for name in ("fresh", "stale", "damaged", "ranks"))
    ranks.mkdir()
    chosen = identify(save(fresh, 2))
    shutil.copytree(fresh, stale)
    newest = save(fresh, 4)
    (shutil.copytree(fresh, damaged) / newest.name / "moments.safetensors").unlink()
    assert (find_path(fresh), find_path(stale)) == (newest, stale / "step-00000002"), "each alone goes elsewhere"
    late = newest, stale / newest.name
    questions = [
        ((fresh, stale), None, None),
        ((stale, fresh), None, None),
        ((stale, stale), identify(newest), None),
        ((fresh, fresh), chosen, None),
        ((damaged, damaged), chosen, None),
        ((tmp_path / "none",) * 2, None, None),
        ((fresh, stale), identify(newest), late),
    ]
    said = launch(_agree, (questions,), 2, ranks)
    (first, unseen), older, (refused, also), *others = zip(*said, strict=True)
    assert first == newest.name and f"does not see the checkpoint {late[1]}" in unseen
    assert older == ("step-00000002",) * 2
    assert refused == also and f"does not see the checkpoint {late[1]}" in refused
    assert others == [(name,) * 2 for name in (newest.name, "step-00000002", None, newest.name)]


def test_what_an_older_attempt_saves_late_replaces_nothing(tmp_path: Path) -> None:
    """One that has looked whether the run is still its own, and was frozen before it wrote."""
    old, new = (supersede(Place(tmp_path)) for _ in range(2))
    newest = save(new / "checkpoints", 10)
    assert newest.name == "step-00000010-0002"
    with pytest.raises(RunError, match="another job has taken over the run"):
        save(old / "checkpoints", 20)
    assert list_names(tmp_path / "checkpoints") == [newest.name]
    late = newest.with_name("step-00000020-0001")
    shutil.copytree(save(tmp_path / "other", 20), late)
    assert choose(tmp_path / "checkpoints") == (newest, ())
    latest = save(new / "checkpoints", 30)
    assert list_names(tmp_path / "checkpoints") == [newest.name, latest.name]


def test_a_checkpoint_that_vanishes_is_one_sentence(tmp_path: Path) -> None:
    path, found = save(tmp_path, 1), find_latest(Place(tmp_path))
    (path / "moments.safetensors").unlink()
    with pytest.raises(RunError, match="cannot be read"):
        assert found is not None and found.fixed


def test_a_checkpoint_that_cannot_be_looked_at_is_not_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bucket that once does not answer, at any question of a save: what it holds is as sound as it was."""
    monkeypatch.setattr(storage, "PATIENCE_SECONDS", 0.0)

    def save_with_a_gap(number: int) -> tuple[int, list[int]]:
        """Save a third checkpoint while one question has no answer; return the questions, and the sound steps."""
        made, folder = use_memory(monkeypatch), Place(MEMORY) / "checkpoints"
        for step in (1, 2):
            save(folder, step, keep=2)
        asked, ask = 0, made._ask

        def ask_or_miss(key: str, call: Any, verb: str = "read") -> Any:
            nonlocal asked
            asked += 1
            if asked == number:
                raise StorageError(f"{key} has not answered")
            return ask(key, call, verb)

        made._ask = ask_or_miss
        with contextlib.nullcontext() if not number else pytest.raises(StorageError, match="has not answered"):
            save(folder, 3, keep=2)
        del made._ask
        return asked, [checkpoint.step for _, checkpoint in check_all(folder) if isinstance(checkpoint, Checkpoint)]

    num_asked, steps = save_with_a_gap(0)
    assert num_asked > 10 and steps == [3, 2]
    for number in range(1, num_asked + 1):
        _, steps = save_with_a_gap(number)
        assert 2 in steps, f"question {number} of {num_asked}"
