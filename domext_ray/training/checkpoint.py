"""Training state -> a folder that survives crashes, full disks and resizes, and back.

Enters: what `Engine.gather_state` collected, and JSON about where the run stands. Leaves: one folder a checkpoint,

    checkpoints/step-00000200/tensors.safetensors   trainable tensors, and frozen ones that differ from the base
                              moments.safetensors   AdamW's two moments of each trainable tensor
                              cursor.json           position in the data
                              record.json           identity: base, corpus, tokenizer
                              manifest.json         bytes and sha256 of the four, the step, and its own sha256; last

No pickle, whole tensors under the model's names: nothing depends on the ZeRO stage or the number of workers. A
checkpoint is built in a temporary folder and renamed when all of it is on the disk, so a crash at any point leaves the
previous ones intact, and a folder counts as a checkpoint only if its manifest verifies. The driver chooses the one that
a run goes on from, rank 0 chooses again when Ray Train restarts the workers, and the other ranks take that one or none.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import socket
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from domext_ray.errors import RunError, StorageError
from domext_ray.files import read_json
from domext_ray.storage import hash_file, hash_values, new_folder, remove_folder, write_json
from domext_ray.training.engine import TensorState, TrainState

FORMAT = 1
TENSORS, MOMENTS, CURSOR, RECORD, MANIFEST = (
    "tensors.safetensors",
    "moments.safetensors",
    "cursor.json",
    "record.json",
    "manifest.json",
)
_MANIFEST_NAMES = {"format", "step", "num_updates", "files", "sha256"}
SEEN_WITHIN_SECONDS = 90.0
"""How long a process waits until it sees a checkpoint that another one chose: network file systems cache listings."""

_FOLDER_NAME = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint in memory.

    Args:
        step: optimiser steps made, skipped ones included.
        state: trainable tensors and moments.
        fixed: frozen tensors that differ from the base, by name.
        cursor: position in the data.
        record: identity of the run.
    """

    step: int
    state: TrainState
    fixed: dict[str, Tensor]
    cursor: dict[str, Any]
    record: dict[str, Any]


def save_checkpoint(
    folder: Path,
    step: int,
    state: TrainState,
    fixed: dict[str, Tensor],
    cursor: dict[str, Any],
    record: dict[str, Any],
    keep: int,
) -> Path:
    """Write one checkpoint, then delete the oldest ones; called on one rank.

    Args:
        folder: the run's `checkpoints` folder; made if missing.
        step: optimiser steps made.
        state: what `Engine.gather_state` returned on rank 0.
        fixed: frozen tensors that differ from the base; names apart from the trainable ones.
        cursor: position in the data, JSON.
        record: identity of the run, JSON.
        keep: checkpoints to keep, the new one included; 1 or more.

    Returns:
        The checkpoint's folder.

    Raises:
        StorageError: the disk is full or refuses; earlier checkpoints are intact.
    """
    assert keep >= 1 and not fixed.keys() & state.tensors.keys()
    target = folder / _name_of(step)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _delete_incomplete(folder)
        with new_folder(target, replaces=True) as temporary:  # a damaged one that was passed over makes way
            _write_files(temporary, step, state, fixed, cursor, record)
    except (OSError, SafetensorError) as error:
        cause = getattr(error, "strerror", None) or str(error)
        raise StorageError(
            f"the checkpoint of step {step} cannot be written to {folder} ({cause}): free space there, and the same "
            "command goes on from the checkpoint before it."
        ) from error
    _prune(folder, step, keep)
    return target


@dataclass(frozen=True)
class CheckpointId:
    """Which checkpoint is meant, on any node.

    Args:
        step: its step.
        sha256: of its manifest.json, which has the hashes of all its other files.
    """

    step: int
    sha256: str


@dataclass(frozen=True)
class Choice:
    """What a run goes on from.

    Args:
        path: the newest sound checkpoint; None: there is no checkpoint at all.
        passed_over: a sentence about each newer one that is damaged.
    """

    path: Path | None
    passed_over: tuple[str, ...]


def choose_checkpoint(folder: Path) -> Choice:
    """Find the checkpoint that a run goes on from.

    Args:
        folder: the run's `checkpoints` folder.

    Raises:
        RunError: there are checkpoints and all of them are damaged.
    """
    return _make_choice(folder, *_search(folder))


def _make_choice(folder: Path, path: Path | None, damages: list[tuple[Path, str]]) -> Choice:
    if path is None and damages:
        found = "; ".join(f"{each.name}: {damage}" for each, damage in damages)
        raise RunError(
            f"no checkpoint in {folder} is sound ({found}); bring a copy of one back, or delete {folder}: "
            "the same command then begins anew at step 0."
        )
    then = f"the run goes on from step {_step_of(path)}" if path else ""
    return Choice(path, tuple(f"checkpoint {each} is passed over ({damage}); {then}." for each, damage in damages))


def identify_checkpoint(path: Path) -> CheckpointId:
    """Return what a sound checkpoint is recognised by."""
    return CheckpointId(_step_of(path), hash_file(path / MANIFEST))


def agree_on_checkpoint(
    folder: Path,
    chosen: CheckpointId | None,
    *,
    rank: int,
    device: torch.device,
    patience: float = SEEN_WITHIN_SECONDS,
) -> Choice:
    """Let rank 0 choose the checkpoint that all ranks go on from; a process group exists.

    Args:
        folder: the run's `checkpoints` folder.
        chosen: what the driver chose before it started the workers. Rank 0 takes that one or, when the workers are
            started again, a newer one.
        rank: this process's.
        device: where tensors of the process group are.
        patience: seconds to wait until this process sees what another one chose.

    Returns:
        The checkpoint; on rank 0 also what was passed over.

    Raises:
        RunError: this process does not see it, or all checkpoints are damaged.
    """
    choice = Choice(None, ())
    told: list[CheckpointId | RunError | None] = [None]
    if rank == 0:
        try:
            choice = _choose_again(folder, chosen, patience)
            told = [identify_checkpoint(choice.path) if choice.path else None]
        except RunError as error:  # all ranks end in the same way
            told = [error]
    dist.broadcast_object_list(told, src=0, device=device)
    if isinstance(told[0], RunError):
        raise told[0]
    if rank == 0 or told[0] is None:
        return choice
    return Choice(wait_for_checkpoint(folder, told[0], patience), ())


def _choose_again(folder: Path, chosen: CheckpointId | None, patience: float) -> Choice:
    """Choose on rank 0, once its node sees what the driver chose, or a newer one."""
    if chosen is not None and max(list_steps(folder), default=0) <= chosen.step:
        return Choice(wait_for_checkpoint(folder, chosen, patience), ())
    path, damages = _search(folder)
    if chosen is not None and (path is None or _step_of(path) < chosen.step):
        path = wait_for_checkpoint(folder, chosen, patience)
    return _make_choice(folder, path, damages)


def wait_for_checkpoint(folder: Path, chosen: CheckpointId, patience: float = SEEN_WITHIN_SECONDS) -> Path:
    """Return a checkpoint that another process chose, once this one sees all of it.

    Raises:
        RunError: it does not within `patience` seconds.
    """
    path = folder / _name_of(chosen.step)
    deadline = time.monotonic() + patience
    while True:
        damage = _find_difference(path, chosen)
        if damage is None:
            return path
        if time.monotonic() > deadline:
            raise RunError(
                f"{socket.gethostname()} does not see the checkpoint {path} that the run goes on from ({damage}, after "
                f"{patience:g} seconds); keep it on storage that all nodes share."
            )
        time.sleep(min(1.0, patience / 10))


def _find_difference(path: Path, chosen: CheckpointId) -> str | None:
    """Return why a checkpoint is not the one that was chosen; None if it is."""
    try:
        if hash_file(path / MANIFEST) != chosen.sha256:
            return f"{MANIFEST} is another one"
    except OSError as error:
        return f"{MANIFEST} is missing" if isinstance(error, FileNotFoundError) else str(error.strerror)
    return _find_damage(path, hashes=True)


def find_latest(folder: Path, step: int = 0) -> Path | None:
    """Return the newest checkpoint of which every file has the size and hash that its manifest states.

    A damaged one is passed over with a warning that names the file. None if there is no sound checkpoint.

    Args:
        folder: the run's `checkpoints` folder.
        step: only the checkpoint of this step; 0: any.
    """
    found, damages = _search(folder, step)
    for path, damage in damages:
        warnings.warn(f"checkpoint {path} is passed over: {damage}.", stacklevel=2)
    return found


def _search(folder: Path, step: int = 0) -> tuple[Path | None, list[tuple[Path, str]]]:
    """Find the newest sound checkpoint; also return what is damaged of those that are newer, and why."""
    damages: list[tuple[Path, str]] = []
    for found, path in sorted(_list_checkpoints(folder), reverse=True):
        if step not in (0, found):
            continue
        damage = _find_damage(path, hashes=True)
        if damage is None:
            return path, damages
        damages.append((path, damage))
    return None, damages


def list_steps(folder: Path) -> list[int]:
    """Return the steps of the checkpoints in a run's `checkpoints` folder, sound or not."""
    return sorted(step for step, _ in _list_checkpoints(folder))


def load_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint that `find_latest` returned.

    Raises:
        RunError: a file is missing or is not what the manifest promises.
    """
    try:
        manifest = _read_json(path / MANIFEST)
        tensors, moments = load_file(path / TENSORS), load_file(path / MOMENTS)
        names = [name.removeprefix("exp_avg.") for name in moments if name.startswith("exp_avg.")]
        states = {
            name: TensorState(tensors.pop(name), moments[f"exp_avg.{name}"], moments[f"exp_avg_sq.{name}"])
            for name in names
        }
        return Checkpoint(
            step=int(manifest["step"]),
            state=TrainState(states, int(manifest["num_updates"])),
            fixed=tensors,
            cursor=_read_json(path / CURSOR),
            record=_read_json(path / RECORD),
        )
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise RunError(
            f"checkpoint {path} cannot be read ({error!r}): delete it to go on from the one before it."
        ) from error


def read_record(path: Path) -> dict[str, Any]:
    """Return a checkpoint's record of what its run is.

    Args:
        path: what `find_latest` returned.

    Raises:
        RunError: it has none.
    """
    remedy = "delete the checkpoint to go on from the one before it"
    return read_json(path / RECORD, remedy, {"base": str, "base_sha256": str})


def find_tensors_sha256(folder: Path, step: int) -> str | None:
    """Return `read_tensors_sha256` of the checkpoint of a step; None where there is none, or a damaged one."""
    path = folder / _name_of(step)
    return None if _find_damage(path, hashes=False) else read_tensors_sha256(path)


def read_tensors_sha256(path: Path) -> str:
    """Return the sha256 of a checkpoint's tensors.safetensors, which identifies what was trained.

    Args:
        path: what `find_latest` returned.
    """
    return str(_read_json(path / MANIFEST)["files"][TENSORS]["sha256"])


def _write_files(
    temporary: Path,
    step: int,
    state: TrainState,
    fixed: dict[str, Tensor],
    cursor: dict[str, Any],
    record: dict[str, Any],
) -> None:
    values = {name: each.param for name, each in state.tensors.items()} | fixed
    moments = {f"exp_avg.{name}": each.exp_avg for name, each in state.tensors.items()}
    moments |= {f"exp_avg_sq.{name}": each.exp_avg_sq for name, each in state.tensors.items()}
    writers: dict[str, Callable[[Path], None]] = {
        TENSORS: lambda path: _write_tensors(path, values),
        MOMENTS: lambda path: _write_tensors(path, moments),
        CURSOR: lambda path: write_json(path, cursor, sort_keys=True),
        RECORD: lambda path: write_json(path, record, sort_keys=True),
    }
    files = {}
    for name, write in writers.items():
        write(temporary / name)
        files[name] = {"bytes": (temporary / name).stat().st_size, "sha256": hash_file(temporary / name)}
    manifest = {"format": FORMAT, "step": step, "num_updates": state.num_updates, "files": files}
    write_json(temporary / MANIFEST, {**manifest, "sha256": hash_values(manifest)}, sort_keys=True)


def _prune(folder: Path, step: int, keep: int) -> None:
    """Delete what is older than the `keep` newest complete checkpoints up to this step.

    Only sizes are checked: the new checkpoint is sound, so a flipped byte in an older one cannot cost the run.
    Checkpoints of later steps were passed over as damaged; training replaces them when it gets there.
    """
    older = sorted((each for each in _list_checkpoints(folder) if each[0] < step), reverse=True)
    complete = [path for _, path in older if _find_damage(path, hashes=False) is None]
    kept = set(complete[: keep - 1])
    for _, path in older:
        if path not in kept:
            with contextlib.suppress(OSError):
                remove_folder(path)


def _delete_incomplete(folder: Path) -> None:
    """Delete what crashed attempts left behind, of this version and of earlier ones."""
    for path in (*folder.glob(".step-*"), *folder.glob(".incomplete-*")):
        shutil.rmtree(path, ignore_errors=True)


def _list_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    if not folder.is_dir():
        return []
    found = ((_FOLDER_NAME.fullmatch(path.name), path) for path in folder.iterdir())
    return [(int(match[1]), path) for match, path in found if match]


def _find_damage(path: Path, *, hashes: bool) -> str | None:
    """Return what is wrong with a checkpoint, naming the file; None if nothing is."""
    try:
        manifest = _read_json(path / MANIFEST)
        if manifest["format"] != FORMAT:
            return f"{MANIFEST} has format {manifest['format']}, this version reads {FORMAT}"
        damage = _find_manifest_damage(manifest, _step_of(path))
        if damage is not None:
            return damage
        for name in (TENSORS, MOMENTS, CURSOR, RECORD):
            stated = manifest["files"][name]
            size = (path / name).stat().st_size
            if size != stated["bytes"]:
                return f"{name} has {size} bytes, its manifest states {stated['bytes']}"
            if hashes and hash_file(path / name) != stated["sha256"]:
                return f"{name} differs from the sha256 in its manifest"
    except FileNotFoundError as error:
        return f"{Path(str(error.filename)).name} is missing"
    except OSError as error:
        return f"{Path(str(error.filename)).name} cannot be read ({error.strerror})"
    except (ValueError, KeyError, TypeError) as error:
        return f"{MANIFEST} is damaged ({error!r})"
    return None


def _find_manifest_damage(manifest: dict[str, Any], step: int) -> str | None:
    """Return what is wrong with a manifest in itself; those of the first version have no hash of their own."""
    own = {name: value for name, value in manifest.items() if name != "sha256"}
    if "sha256" in manifest and manifest["sha256"] != hash_values(own):
        return f"{MANIFEST} differs from its own sha256"
    if not manifest.keys() <= _MANIFEST_NAMES:
        return (
            f"{MANIFEST} has {', '.join(sorted(manifest.keys() - _MANIFEST_NAMES))}, which this version does not know"
        )
    if any(type(manifest[name]) is not int for name in ("step", "num_updates")):
        return f"{MANIFEST} has a step or a number of updates that is no whole number"
    return None if manifest["step"] == step else f"its manifest is one of step {manifest['step']}"


def _name_of(step: int) -> str:
    return f"step-{step:08d}"


def _step_of(path: Path) -> int:
    match = _FOLDER_NAME.fullmatch(path.name)
    assert match is not None, "a checkpoint's folder"
    return int(match[1])


def _write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    save_file({name: each.contiguous() for name, each in tensors.items()}, path, metadata={"format": "pt"})


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))
