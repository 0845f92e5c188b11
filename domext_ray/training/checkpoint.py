"""Training state -> a folder that survives crashes, full disks and resizes, and back.

Enters: what `Engine.gather_state` collected, and JSON about where the run stands. Leaves: one folder a checkpoint,

    checkpoints/step-00000200/tensors.safetensors   trainable tensors, and frozen ones that differ from the base
                              moments.safetensors   AdamW's two moments of each trainable tensor
                              cursor.json           position in the data
                              record.json           identity: base, corpus, tokenizer
                              manifest.json         bytes and sha256 of the four, and the step; written last

No pickle, whole tensors under the model's names: nothing depends on the ZeRO stage or the number of workers. A
checkpoint is built in a temporary folder and renamed when all of it is on the disk, so a crash at any point leaves the
previous ones intact, and a folder counts as a checkpoint only if its manifest verifies.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import uuid
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from domext_ray.errors import RunError
from domext_ray.training.engine import TensorState, TrainState

FORMAT = 1
TENSORS, MOMENTS, CURSOR, RECORD, MANIFEST = (
    "tensors.safetensors",
    "moments.safetensors",
    "cursor.json",
    "record.json",
    "manifest.json",
)
_FOLDER_NAME = re.compile(r"step-(\d{8,})")
_TEMPORARY = ".incomplete-"


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
        RunError: the disk is full or refuses; earlier checkpoints are intact.
    """
    assert keep >= 1 and not fixed.keys() & state.tensors.keys()
    target = folder / f"step-{step:08d}"
    temporary = folder / f"{_TEMPORARY}{target.name}-{uuid.uuid4().hex[:8]}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _delete_incomplete(folder)
        temporary.mkdir()
        _write_files(temporary, step, state, fixed, cursor, record)
        _move_into_place(temporary, target)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        cause = getattr(error, "strerror", None) or str(error)
        raise RunError(
            f"the checkpoint of step {step} cannot be written to {folder} ({cause}): free space there, and the same "
            "command goes on from the checkpoint before it."
        ) from error
    _prune(folder, step, keep)
    return target


def find_latest(folder: Path, step: int = 0) -> Path | None:
    """Return the newest checkpoint of which every file has the size and hash that its manifest states.

    A damaged one is passed over with a warning that names the file. None if there is no sound checkpoint.

    Args:
        folder: the run's `checkpoints` folder.
        step: only the checkpoint of this step; 0: any.
    """
    for found, path in sorted(_list_checkpoints(folder), reverse=True):
        if step not in (0, found):
            continue
        damage = _find_damage(path, hashes=True)
        if damage is None:
            return path
        warnings.warn(f"checkpoint {path} is passed over: {damage}.", stacklevel=2)
    return None


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
        CURSOR: lambda path: _write_json(path, cursor),
        RECORD: lambda path: _write_json(path, record),
    }
    files = {}
    for name, write in writers.items():
        write(temporary / name)
        _flush(temporary / name)
        files[name] = {"bytes": (temporary / name).stat().st_size, "sha256": _hash_file(temporary / name)}
    manifest = {"format": FORMAT, "step": step, "num_updates": state.num_updates, "files": files}
    _write_json(temporary / MANIFEST, manifest)
    _flush(temporary / MANIFEST)
    _flush(temporary)


def _move_into_place(temporary: Path, target: Path) -> None:
    """Rename a complete folder; one of the same step (a damaged one that was passed over) makes way."""
    replaced = temporary.with_name(f"{_TEMPORARY}replaced-{temporary.name.removeprefix(_TEMPORARY)}")
    if target.exists():
        os.rename(target, replaced)
    os.rename(temporary, target)
    _flush(target.parent)
    shutil.rmtree(replaced, ignore_errors=True)


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
            # Renamed first: a half-deleted folder must not look like a damaged checkpoint.
            doomed = path.with_name(f"{_TEMPORARY}old-{path.name}-{uuid.uuid4().hex[:8]}")
            with contextlib.suppress(OSError):
                os.rename(path, doomed)
                shutil.rmtree(doomed, ignore_errors=True)


def _delete_incomplete(folder: Path) -> None:
    """Delete what crashed attempts left behind."""
    for path in folder.glob(f"{_TEMPORARY}*"):
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
        for name in (TENSORS, MOMENTS, CURSOR, RECORD):
            stated = manifest["files"][name]
            size = (path / name).stat().st_size
            if size != stated["bytes"]:
                return f"{name} has {size} bytes, its manifest states {stated['bytes']}"
            if hashes and _hash_file(path / name) != stated["sha256"]:
                return f"{name} differs from the sha256 in its manifest"
    except FileNotFoundError as error:
        return f"{Path(str(error.filename)).name} is missing"
    except OSError as error:
        return f"{Path(str(error.filename)).name} cannot be read ({error.strerror})"
    except (ValueError, KeyError, TypeError) as error:
        return f"{MANIFEST} is damaged ({error!r})"
    return None


def _write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    save_file({name: each.contiguous() for name, each in tensors.items()}, path, metadata={"format": "pt"})


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def _hash_file(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()


def _flush(path: Path) -> None:
    """Bring a file or a folder's entries to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
