"""Training state -> a folder that survives crashes, full storage and resizes, and back.

Enters: what `Engine.gather_state` collected, and JSON about where the run stands. Leaves: one folder a checkpoint,

    checkpoints/step-00000200-0003/tensors.safetensors   trainable tensors, and frozen ones that differ from the base
                                   moments.safetensors   AdamW's two moments of each trainable tensor
                                   cursor.json           position in the data
                                   record.json           identity: base, corpus, tokenizer
                                   manifest.json         bytes and sha256 of the four, the step, its own sha256; last

No pickle, whole tensors under the model's names: nothing depends on the ZeRO stage or the number of workers. A folder
without a manifest is no checkpoint; one that does not verify is passed over. The folder's name ends with the number of
the run's attempt (runs/attempts.py): what an attempt that was thought dead still saves replaces nothing of a later one,
and the later one's comes first. The driver chooses the checkpoint that a run goes on from, rank 0 chooses again when
Ray Train restarts the workers, and the other ranks take that one or none.
"""

from __future__ import annotations

import json
import re
import socket
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from domext_ray.errors import RunError, StorageError
from domext_ray.storage import Place, Where, hash_file, hash_values, write_json
from domext_ray.training.engine import TensorState, TrainState

FORMAT = 1
TENSORS, MOMENTS, CURSOR, RECORD, MANIFEST = (
    "tensors.safetensors",
    "moments.safetensors",
    "cursor.json",
    "record.json",
    "manifest.json",
)
SEEN_WITHIN_SECONDS = 90.0
"""How long a process waits until it sees a checkpoint that another one chose: network file systems cache listings."""

_FOLDER_NAME = re.compile(r"step-(\d{8,})(?:-(\d{4,}))?")


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
    where: Where,
    step: int,
    state: TrainState,
    fixed: dict[str, Tensor],
    cursor: dict[str, Any],
    record: dict[str, Any],
    keep: int,
) -> Place:
    """Write one checkpoint, then delete the oldest ones; called on one rank.

    Args:
        where: the run's `checkpoints` folder; made if missing.
        step: optimiser steps made.
        state: what `Engine.gather_state` returned on rank 0.
        fixed: frozen tensors that differ from the base; names apart from the trainable ones.
        cursor: position in the data, JSON.
        record: identity of the run, JSON.
        keep: checkpoints to keep, the new one included; 1 or more.

    Returns:
        The checkpoint's folder.

    Raises:
        StorageError: the storage is full or refuses; earlier checkpoints are intact.
        RunError: another attempt has taken over the run.
    """
    assert keep >= 1 and not fixed.keys() & state.tensors.keys()
    folder = Place(where)
    attempt = f"-{folder.fence.number:04d}" if folder.fence else ""
    target = folder / f"step-{step:08d}{attempt}"
    values = {name: each.param for name, each in state.tensors.items()} | fixed
    moments = {f"exp_avg.{name}": each.exp_avg for name, each in state.tensors.items()}
    moments |= {f"exp_avg_sq.{name}": each.exp_avg_sq for name, each in state.tensors.items()}
    writers: dict[str, Callable[[Any], None]] = {
        TENSORS: lambda path: _write_tensors(path, values),
        MOMENTS: lambda path: _write_tensors(path, moments),
        CURSOR: lambda path: write_json(path, cursor, sort_keys=True),
        RECORD: lambda path: write_json(path, record, sort_keys=True),
    }
    try:
        with target.new_files(MANIFEST) as temporary:
            files = {}
            for name, write in writers.items():
                write(temporary / name)
                files[name] = {"bytes": (temporary / name).stat().st_size, "sha256": hash_file(temporary / name)}
            manifest = {"format": FORMAT, "step": step, "num_updates": state.num_updates, "files": files}
            write_json(temporary / MANIFEST, {**manifest, "sha256": hash_values(manifest)}, sort_keys=True)
    except (OSError, SafetensorError, StorageError) as error:
        cause = getattr(error.__cause__ or error, "strerror", None) or str(error)
        raise StorageError(
            f"the checkpoint of step {step} cannot be written to {folder} ({cause}): free space there, and the same "
            "command goes on from the checkpoint before it."
        ) from error
    _prune(target, keep)
    return target


def _write_tensors(path: Any, tensors: dict[str, Tensor]) -> None:
    save_file({name: each.contiguous() for name, each in tensors.items()}, path, metadata={"format": "pt"})


def _prune(target: Place, keep: int) -> None:
    """Delete what is older than the `keep` newest complete checkpoints up to this one.

    Only sizes are checked: the new checkpoint is sound, so a flipped byte in an older one cannot cost the run. Those of
    later steps were passed over as damaged; their own attempt, or the next one, replaces them.
    """
    older = [each for each in _list_folders(target.parent) if _order(each) < _order(target)]
    kept = [each for each in older if step_of(each) < step_of(target) and _find_damage(each, hashes=False) is None]
    for each in older:
        if each not in kept[: keep - 1]:
            each.delete()


@dataclass(frozen=True)
class CheckpointId:
    """Which checkpoint is meant, on any node.

    Args:
        name: of its folder.
        sha256: of its manifest.json, which has the hashes of all its other files.
    """

    name: str
    sha256: str

    @property
    def step(self) -> int:
        return _order(self)[1]


@dataclass(frozen=True)
class Choice:
    """What a run goes on from.

    Args:
        path: the newest sound checkpoint; None: there is no checkpoint at all.
        passed_over: a sentence about each newer one that is damaged.
    """

    path: Place | None
    passed_over: tuple[str, ...]


def choose_checkpoint(folder: Where) -> Choice:
    """Find the checkpoint that a run goes on from.

    Args:
        folder: the run's `checkpoints` folder.

    Raises:
        RunError: there are checkpoints and all of them are damaged.
    """
    return _make_choice(Place(folder), *_search(Place(folder)))


def _make_choice(folder: Place, path: Place | None, damages: list[tuple[Place, str]]) -> Choice:
    if path is None and damages:
        found = "; ".join(f"{each.name}: {damage}" for each, damage in damages)
        raise RunError(
            f"no checkpoint in {folder} is sound ({found}); bring a copy of one back, or delete {folder}: "
            "the same command then begins anew at step 0."
        )
    then = f"the run goes on from step {step_of(path)}" if path else ""
    return Choice(path, tuple(f"checkpoint {each} is passed over ({damage}); {then}." for each, damage in damages))


def identify_checkpoint(path: Where) -> CheckpointId:
    """Return what a sound checkpoint is recognised by."""
    return CheckpointId(Place(path).name, hash_file(Place(path) / MANIFEST))


def agree_on_checkpoint(
    where: Where,
    chosen: CheckpointId | None,
    *,
    rank: int,
    device: torch.device,
    patience: float = SEEN_WITHIN_SECONDS,
) -> Choice:
    """Let rank 0 choose the checkpoint that all ranks go on from; a process group exists.

    Args:
        where: the run's `checkpoints` folder.
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
    folder, choice = Place(where), Choice(None, ())
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


def _choose_again(folder: Place, chosen: CheckpointId | None, patience: float) -> Choice:
    """Choose on rank 0, once its node sees what the driver chose, or a newer one."""
    path: Place | None = None
    damages: list[tuple[Place, str]] = []
    if chosen is None or any(_order(each) > _order(chosen) for each in _list_folders(folder)):
        path, damages = _search(folder)
    if chosen is not None and (path is None or _order(path) < _order(chosen)):
        path = wait_for_checkpoint(folder, chosen, patience)
    return _make_choice(folder, path, damages)


def wait_for_checkpoint(where: Where, chosen: CheckpointId, patience: float = SEEN_WITHIN_SECONDS) -> Place:
    """Return a checkpoint that another process chose, once this one sees all of it.

    Raises:
        RunError: it does not within `patience` seconds.
    """
    path = Place(where) / chosen.name
    deadline = time.monotonic() + patience
    while True:
        damage = _find_damage(path, hashes=True, manifest_sha256=chosen.sha256)
        if damage is None:
            return path
        if time.monotonic() > deadline:
            raise RunError(
                f"{socket.gethostname()} does not see the checkpoint {path} that the run goes on from ({damage}, after "
                f"{patience:g} seconds); keep it on storage that all nodes share."
            )
        time.sleep(min(1.0, patience / 10))


def find_latest(folder: Where, step: int = 0) -> Place | None:
    """Return the newest checkpoint of which every file has the size and hash that its manifest states.

    A damaged one is passed over with a warning that names the file. None if there is no sound checkpoint.

    Args:
        folder: the run's `checkpoints` folder.
        step: only the checkpoint of this step; 0: any.
    """
    found, damages = _search(Place(folder), step)
    for path, damage in damages:
        warnings.warn(f"checkpoint {path} is passed over: {damage}.", stacklevel=2)
    return found


def _search(folder: Place, step: int = 0) -> tuple[Place | None, list[tuple[Place, str]]]:
    """Find the newest sound checkpoint; also return what is damaged of those that are newer, and why."""
    damages: list[tuple[Place, str]] = []
    for path in _list_folders(folder):
        if step not in (0, step_of(path)) or not (path / MANIFEST).is_file():
            continue
        damage = _find_damage(path, hashes=True)
        if damage is None:
            return path, damages
        damages.append((path, damage))
    return None, damages


def list_steps(where: Where) -> list[int]:
    """Return the steps of the checkpoints in a run's `checkpoints` folder, sound or not."""
    return sorted({step_of(each) for each in _list_folders(Place(where)) if (each / MANIFEST).is_file()})


def load_checkpoint(where: Where) -> Checkpoint:
    """Read a checkpoint that `find_latest` returned.

    Raises:
        RunError: a file has gone since.
    """
    path = Place(where)
    try:
        manifest = _read_json(path / MANIFEST)
        tensors, moments = (load_file((path / name).local()) for name in (TENSORS, MOMENTS))
        names = [name.removeprefix("exp_avg.") for name in moments if name.startswith("exp_avg.")]
        states = {
            name: TensorState(tensors.pop(name), moments[f"exp_avg.{name}"], moments[f"exp_avg_sq.{name}"])
            for name in names
        }
        return Checkpoint(
            step=manifest["step"],
            state=TrainState(states, manifest["num_updates"]),
            fixed=tensors,
            cursor=_read_json(path / CURSOR),
            record=_read_json(path / RECORD),
        )
    except (OSError, SafetensorError) as error:
        raise RunError(
            f"checkpoint {path} cannot be read ({error!r}): delete it to go on from the one before it."
        ) from error


def read_record(path: Where) -> dict[str, Any]:
    """Return a checkpoint's record of what its run is.

    Args:
        path: what `find_latest` returned.
    """
    return _read_json(Place(path) / RECORD)


def find_tensors_sha256(folder: Where, step: int) -> str | None:
    """Return `read_tensors_sha256` of the newest checkpoint of a step; None where there is none, or a damaged one."""
    found = [each for each in _list_folders(Place(folder)) if step_of(each) == step]
    return None if not found or _find_damage(found[0], hashes=False) else read_tensors_sha256(found[0])


def read_tensors_sha256(path: Where) -> str:
    """Return the sha256 of a checkpoint's tensors.safetensors, which identifies what was trained.

    Args:
        path: what `find_latest` returned.
    """
    return str(_read_json(Place(path) / MANIFEST)["files"][TENSORS]["sha256"])


def _list_folders(folder: Place) -> list[Place]:
    """What is called like a checkpoint, the newest first: by attempt, then by step."""
    return sorted((folder / each for each in folder.list_names() if _FOLDER_NAME.fullmatch(each)), key=_order)[::-1]


def _order(checkpoint: Place | CheckpointId) -> tuple[int, int]:
    match = _FOLDER_NAME.fullmatch(checkpoint.name)
    assert match is not None, "a checkpoint's folder"
    return int(match[2] or 0), int(match[1])


def step_of(checkpoint: Place) -> int:
    """Return the step of a checkpoint's folder."""
    return _order(checkpoint)[1]


def _find_damage(path: Place, *, hashes: bool, manifest_sha256: str = "") -> str | None:
    """Return what is wrong with a checkpoint, or that it is not the one that is meant; None: nothing."""
    name = MANIFEST
    try:
        if manifest_sha256 and hash_file(path / MANIFEST) != manifest_sha256:
            return f"{MANIFEST} is another one"
        manifest = _read_json(path / MANIFEST)
        own = {name: value for name, value in manifest.items() if name != "sha256"}
        if manifest["format"] != FORMAT:
            return f"{MANIFEST} has format {manifest['format']}, this version reads {FORMAT}"
        if manifest["sha256"] != hash_values(own):
            return f"{MANIFEST} differs from its own sha256"
        if manifest["step"] != step_of(path):
            return f"its manifest is one of step {manifest['step']}"
        for name, stated in manifest["files"].items():
            info = (path / name).info()
            if info is None:
                return f"{name} is missing"
            if info.size != stated["bytes"]:
                return f"{name} has {info.size} bytes, its manifest states {stated['bytes']}"
            if hashes and hash_file(path / name) != stated["sha256"]:
                return f"{name} differs from the sha256 in its manifest"
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read ({error.strerror})"
    except (ValueError, KeyError, TypeError) as error:
        return f"{MANIFEST} is damaged ({error!r})"
    return None


def _read_json(path: Place) -> dict[str, Any]:
    return json.loads(path.read_text())
