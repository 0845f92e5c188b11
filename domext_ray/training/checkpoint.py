"""Training state -> a folder that survives crashes, full storage and resizes, and back.

Enters: each rank's share of what training changed (`Engine.gather_state`), and JSON about where the run stands. Leaves:
one folder a checkpoint,

    checkpoints/step-00000200-0003/tensors.safetensors   trainable tensors, and frozen ones that differ from the base
                                   moments.safetensors   AdamW's two moments of each trainable tensor
                                   manifest.json         the step, position in the data, what the run is, bytes and
                                                         sha256 of the other files and of itself; comes last

and of four ranks tensors-00001-of-00004.safetensors and so on. No pickle, whole tensors under the model's names:
nothing depends on the ZeRO stage or the number of workers. A folder without a manifest is no checkpoint; one that does
not verify is passed over. The folder's name ends with the number of the run's attempt (runs/attempts.py): what an
attempt that was thought dead still saves replaces nothing of a later one, and the later one's comes first. The driver
chooses the checkpoint that a run goes on from, rank 0 chooses again when Ray Train restarts the workers, and the other
ranks take that one or none.
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from domext_ray.errors import DomextError, RunError, StorageError, TrainingError
from domext_ray.model.build import Extensions
from domext_ray.storage import Place, Where, hash_file, hash_values, write_json
from domext_ray.training.engine import MOMENTS, TensorState, TrainState

FORMAT = 3
TENSORS, MANIFEST = "tensors", "manifest.json"
SEEN_WITHIN_SECONDS = 90.0
"""How long a process waits until it sees a checkpoint that another one chose: network file systems cache listings."""

_FOLDER_NAME = re.compile(r"step-(\d{8,})(?:-(\d{4,}))?")
T = TypeVar("T")


class CheckpointId(NamedTuple):
    """Which checkpoint is meant, on any node.

    Args:
        name: of its folder.
        sha256: of its manifest, which has the hashes of all its other files.
    """

    name: str
    sha256: str

    @property
    def step(self) -> int:
        return _order(self.name)[1]


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was found sound; its tensors are read when they are asked for, one by one.

    Args:
        path: its folder.
        manifest: what its manifest says.
    """

    path: Place
    manifest: dict[str, Any]

    @property
    def id(self) -> CheckpointId:
        return CheckpointId(self.path.name, self.manifest["sha256"])

    @property
    def step(self) -> int:
        """Optimiser steps made, skipped ones included."""
        return self.manifest["step"]

    @property
    def trainer_state(self) -> dict[str, Any]:
        """Where the run stands in its data and its limits."""
        return self.manifest["trainer_state"]

    @property
    def run_info(self) -> dict[str, Any]:
        """What the run is: base, corpus, tokenizer, extensions."""
        return self.manifest["run_info"]

    @property
    def extensions(self) -> Extensions:
        """What the model carries beside its base."""
        return Extensions(**self.run_info.get("extensions", {}))

    @property
    def tensors_sha256(self) -> str:
        """What all that the run has changed in its model is recognised by."""
        files = self.manifest["files"]
        return hash_values({name: files[name]["sha256"] for name in files if name.startswith(TENSORS)})

    @property
    def state(self) -> TrainState:
        """Trainable tensors and their moments; their files stay open as long as somebody has it."""
        return TrainState(_StoredStates(self._open_files()), self.manifest["num_updates"])

    @property
    def fixed(self) -> dict[str, Tensor]:
        """Frozen tensors that differ from the base, by name; copies, for their file goes in time."""
        files = self._open_files()
        trained = _StoredStates(files)
        values = [name for name in files if name.partition("/")[0] not in MOMENTS and name not in trained]
        return {name: files[name].get_tensor(name).clone() for name in values}

    def _open_files(self) -> dict[str, Any]:
        """The open file that each tensor is in; the moments of a parameter are `exp_avg/NAME` and `exp_avg_sq/NAME`.

        Raises:
            RunError: one has gone since.
        """
        try:
            files = [safe_open((self.path / name).local(), "pt") for name in self.manifest["files"]]
            return {name: file for file in files for name in file.keys()}  # noqa: SIM118 - it is no mapping
        except (OSError, SafetensorError) as error:
            raise RunError(
                f"checkpoint {self.path} cannot be read ({error!r}): delete it to go on from the one before it."
            ) from error


class _StoredStates(Mapping[str, TensorState]):
    """The trainable tensors of a checkpoint by name, read one by one: a large share is never in memory whole."""

    def __init__(self, files: dict[str, Any]) -> None:
        first = f"{MOMENTS[0]}/"
        self._files = files
        self._names = {each.removeprefix(first): None for each in files if each.startswith(first)}

    def __getitem__(self, name: str) -> TensorState:
        names = (name, *(f"{moment}/{name}" for moment in MOMENTS))
        return TensorState(*(self._files[each].get_tensor(each) for each in names))

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def save_checkpoint(
    where: Where,
    step: int,
    state: TrainState,
    fixed: dict[str, Tensor],
    trainer_state: dict[str, Any],
    run_info: dict[str, Any],
    keep: int,
) -> Place:
    """Write one checkpoint, then delete the oldest ones; called on all ranks.

    Args:
        where: the run's `checkpoints` folder; made if missing.
        step: optimiser steps made.
        state: what `Engine.gather_state` returned on this rank.
        fixed: frozen tensors that differ from the base, on any rank; names apart from the trainable ones.
        trainer_state: where the run stands, JSON, on rank 0.
        run_info: what the run is, JSON, on rank 0.
        keep: checkpoints to keep, the new one included; 1 or more.

    Returns:
        The checkpoint's folder; only rank 0 returns when it is whole.

    Raises:
        StorageError: the storage is full or refuses; earlier checkpoints are intact. So too on all ranks:
        RunError: another attempt has taken over the run.
        TrainingError: a tensor is not finite.
    """
    assert keep >= 1 and not fixed.keys() & state.tensors.keys()
    folder = Place(where)
    attempt = f"-{folder.fence.number:04d}" if folder.fence else ""
    target = folder / f"step-{step:08d}{attempt}"
    rank, num_ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)

    def make_room() -> bool:
        """Whether the checkpoint is there already; half of one, or one that was passed over, goes."""
        _check_finite(state, step)
        is_there = rank == 0 and isinstance(_open(target), Checkpoint)
        if rank == 0 and not is_there:
            target.delete()
        return is_there

    def write_share() -> dict[str, Any]:
        values = {name: each.param for name, each in state.tensors.items()} | (fixed if rank == 0 else {})
        moments = {f"{each}/{name}": getattr(own, each) for name, own in state.tensors.items() for each in MOMENTS}
        share = f"-{rank + 1:05d}-of-{num_ranks:05d}.safetensors" if num_ranks > 1 else ".safetensors"
        with target.scratch() as temporary:
            return {
                name + share: _put_tensors(tensors, temporary / (name + share), target)
                for name, tensors in ((TENSORS, values), ("moments", moments))
            }

    try:
        with _saying_which(step, folder):
            if any(_do_on_all_ranks(make_room)):
                return target
            files = {name: each for share in _do_on_all_ranks(write_share) for name, each in share.items()}
            if rank == 0:
                stated = {"trainer_state": trainer_state, "run_info": run_info, "files": files}
                manifest = {"format": FORMAT, "step": step, "num_updates": state.num_updates, **stated}
                write_json(target / MANIFEST, {**manifest, "sha256": hash_values(manifest)}, sort_keys=True)
                _prune(target, keep)
    except DomextError:
        with contextlib.suppress(OSError, DomextError):
            make_room()
        raise
    return target


def _check_finite(state: TrainState, step: int) -> None:
    """Refuse to save what no run can go on from."""
    for name, each in state.tensors.items():
        if not all(values.isfinite().all() for values in (each.param, each.exp_avg, each.exp_avg_sq)):
            raise TrainingError(
                f"after step {step:,} the weights {name} or their moments are not finite, so they are not saved; give "
                "a lower --optim.lr under another --run.name."
            )


def _put_tensors(tensors: dict[str, Tensor], temporary: Path, folder: Place) -> dict[str, Any]:
    """Write a file to a temporary path and put it in a folder; return what the manifest states of it."""
    save_file({name: each.contiguous() for name, each in tensors.items()}, temporary, metadata={"format": "pt"})
    stated = {"bytes": temporary.stat().st_size, "sha256": hash_file(temporary)}
    (folder / temporary.name).put(temporary)
    return stated


def _do_on_all_ranks(work: Callable[[], T]) -> list[T]:
    """Return what `work` returns on each rank; where it fails on one, all raise its error, and none waits for it."""
    own: tuple[T | None, Exception | None]
    try:
        own = work(), None
    except (OSError, SafetensorError, DomextError) as error:
        own = None, error
    told: list[Any] = [own]
    if dist.is_initialized() and dist.get_world_size() > 1:
        told = [None] * dist.get_world_size()
        dist.all_gather_object(told, own)
    for _, failure in [own, *told]:
        if failure is not None:
            raise failure
    return [result for result, _ in told]


@contextlib.contextmanager
def _saying_which(step: int, folder: Place) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError, StorageError) as error:
        cause = getattr(error.__cause__ or error, "strerror", None) or str(error)
        raise StorageError(
            f"the checkpoint of step {step} cannot be written to {folder} ({cause}): free space there, and the same "
            "command goes on from the checkpoint before it."
        ) from error


def _prune(target: Place, keep: int) -> None:
    """Delete what is older than the `keep` newest complete checkpoints up to this one.

    Only sizes are checked: the new checkpoint is sound, so a flipped byte in an older one cannot cost the run. Those of
    later steps were passed over as damaged; their own attempt, or the next one, replaces them.
    """
    num_kept = 1
    for each in _list_folders(target.parent):
        if _order(each.name) < _order(target.name):
            is_sound = isinstance(_open(each, hashes=False), Checkpoint)
            is_kept = num_kept < keep and _step_of(each) < _step_of(target) and is_sound
            num_kept += is_kept
            if not is_kept:
                each.delete()


@dataclass(frozen=True)
class ResumePoint:
    """What a run goes on from.

    Args:
        checkpoint: the newest sound one; None: there is no checkpoint at all.
        passed_over: a sentence about each newer one that is damaged.
    """

    checkpoint: Checkpoint | None
    passed_over: tuple[str, ...] = ()


def find_resume_point(where: Where) -> ResumePoint:
    """Find the checkpoint that a run goes on from.

    Args:
        where: the run's `checkpoints` folder.

    Raises:
        RunError: there are checkpoints and all of them are damaged.
    """
    return _make_point(Place(where), *_search(Place(where)))


def _make_point(folder: Place, found: Checkpoint | None, damages: list[tuple[Place, str]]) -> ResumePoint:
    if found is None and damages:
        reasons = "; ".join(f"{each.name}: {damage}" for each, damage in damages)
        raise RunError(
            f"no checkpoint in {folder} is sound ({reasons}); bring a copy of one back, or delete {folder}: "
            "the same command then begins anew at step 0."
        )
    then = f"the run goes on from step {found.step}" if found else ""
    return ResumePoint(found, tuple(f"checkpoint {each} is passed over ({why}); {then}." for each, why in damages))


def agree_on_resume_point(
    where: Where, chosen: CheckpointId | None, *, device: torch.device, patience: float = SEEN_WITHIN_SECONDS
) -> ResumePoint:
    """Let rank 0 choose the checkpoint that all ranks go on from; a process group exists.

    Args:
        where: the run's `checkpoints` folder.
        chosen: what the driver chose before it started the workers. Rank 0 takes that one or, when the workers are
            started again, a newer one.
        device: where tensors of the process group are.
        patience: seconds to wait until this process sees what another one chose.

    Returns:
        The checkpoint; on rank 0 also what was passed over.

    Raises:
        RunError: this process does not see it, or all checkpoints are damaged.
    """
    folder, point = Place(where), ResumePoint(None)
    told: list[CheckpointId | RunError | None] = [None]
    if dist.get_rank() == 0:
        try:
            point = _choose_again(folder, chosen, patience)
            told = [point.checkpoint.id if point.checkpoint else None]
        except RunError as error:  # all ranks end in the same way
            told = [error]
    dist.broadcast_object_list(told, src=0, device=device)
    if isinstance(told[0], RunError):
        raise told[0]
    if dist.get_rank() == 0 or told[0] is None:
        return point
    return ResumePoint(wait_for_checkpoint(folder, told[0], patience))


def _choose_again(folder: Place, chosen: CheckpointId | None, patience: float) -> ResumePoint:
    """Choose on rank 0, once its node sees what the driver chose, or a newer one."""
    found: Checkpoint | None = None
    damages: list[tuple[Place, str]] = []
    if chosen is None or any(_order(each.name) > _order(chosen.name) for each in _list_folders(folder)):
        found, damages = _search(folder)
    if chosen is not None and (found is None or _order(found.path.name) < _order(chosen.name)):
        found = wait_for_checkpoint(folder, chosen, patience)
    return _make_point(folder, found, damages)


def wait_for_checkpoint(folder: Where, chosen: CheckpointId, patience: float = SEEN_WITHIN_SECONDS) -> Checkpoint:
    """Return a checkpoint that another process chose, once this one sees all of it.

    Args:
        folder: the `checkpoints` folder that it is in.
        chosen: the checkpoint.
        patience: seconds to wait.

    Raises:
        RunError: it does not see it by then.
    """
    path = Place(folder) / chosen.name
    deadline = time.monotonic() + patience
    while True:
        found = _open(path)
        if isinstance(found, Checkpoint) and found.id == chosen:
            return found
        if time.monotonic() > deadline:
            damage = f"{MANIFEST} is another one" if isinstance(found, Checkpoint) else found
            raise RunError(
                f"{socket.gethostname()} does not see the checkpoint {path} that the run goes on from ({damage}, after "
                f"{patience:g} seconds); keep it on storage that all nodes share."
            )
        time.sleep(min(1.0, patience / 10))


def find_latest(folder: Where, step: int = 0) -> Checkpoint | None:
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


def find_tensors_sha256(folder: Where, step: int) -> str | None:
    """Return `tensors_sha256` of the newest checkpoint of a step; None where there is none, or a damaged one."""
    paths = [each for each in _list_folders(Place(folder)) if _step_of(each) == step]
    found = _open(paths[0], hashes=False) if paths else None
    return found.tensors_sha256 if isinstance(found, Checkpoint) else None


def list_steps(folder: Where) -> list[int]:
    """Return the steps of the checkpoints in a run's `checkpoints` folder, sound or not."""
    return sorted({_step_of(each) for each in _list_folders(Place(folder)) if (each / MANIFEST).is_file()})


def _search(folder: Place, step: int = 0) -> tuple[Checkpoint | None, list[tuple[Place, str]]]:
    """Find the newest sound checkpoint; also return what is damaged of those that are newer, and why."""
    damages: list[tuple[Place, str]] = []
    for path in _list_folders(folder):
        if step in (0, _step_of(path)) and (path / MANIFEST).is_file():
            found = _open(path)
            if isinstance(found, Checkpoint):
                return found, damages
            damages.append((path, found))
    return None, damages


def _list_folders(folder: Place) -> list[Place]:
    """What is called like a checkpoint, the newest first: by attempt, then by step."""
    names = [each for each in folder.list_names() if _FOLDER_NAME.fullmatch(each)]
    return [folder / each for each in sorted(names, key=_order, reverse=True)]


def _order(name: str) -> tuple[int, int]:
    match = _FOLDER_NAME.fullmatch(name)
    assert match is not None, "a checkpoint's folder"
    return int(match[2] or 0), int(match[1])


def _step_of(path: Place) -> int:
    return _order(path.name)[1]


def _open(path: Place, *, hashes: bool = True) -> Checkpoint | str:
    """Return a checkpoint whose files are what its manifest states, or what is wrong with it."""
    name = MANIFEST
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        if manifest["format"] != FORMAT:
            return f"{MANIFEST} has format {manifest['format']}, this version reads {FORMAT}"
        if manifest["sha256"] != hash_values({name: manifest[name] for name in manifest.keys() - {"sha256"}}):
            return f"{MANIFEST} differs from its own sha256"
        if manifest["step"] != _step_of(path):
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
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{MANIFEST} is damaged ({error!r})"
    return Checkpoint(path, manifest)
