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
chooses the checkpoint that a run goes on from; rank 0 takes that one, or a newer one where Ray Train restarts the
workers, and the other ranks take rank 0's or none.

A checkpoint is saved before its step is evaluated, for an evaluation may take minutes. Until then it is provisional: it
carries the step's record, the run goes on from it with that evaluation, and whoever else looks for a checkpoint takes
the one before. One whose evaluation is not finite is deleted.
"""

from __future__ import annotations

import contextlib
import re
import socket
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from domext_ray.errors import DomextError, RunError, StorageError, TrainingError, name_file
from domext_ray.files import describe_format, newest_format
from domext_ray.model.build import Extensions
from domext_ray.model.domext.configuration_domext import AdapterConfig
from domext_ray.storage import Place, hash_file, hash_values, open_to_others, parse_json, write_json
from domext_ray.training.engine import MOMENTS, TensorState, TrainState

FORMAT = newest_format("checkpoint")
TENSORS, MANIFEST = "tensors", "manifest.json"
STATED = ("step", "num_updates", "trainer_state", "run_info", "files")
"""What a manifest states of its checkpoint, beside the format and its own hash."""
UNEVALUATED = "unevaluated"
"""What a provisional checkpoint has in the state of its trainer."""
SEEN_WITHIN_SECONDS = 90.0
"""How long a process waits until it sees a checkpoint that another one chose: network file systems cache listings."""

_FOLDER_NAME = re.compile(r"step-(\d{8,})(?:-(\d{4,}))?")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was found sound, on any node; its tensors stay in their files until they are used."""

    path: Place = field(compare=False)  # its folder
    step: int  # optimiser steps made, skipped ones included
    num_updates: int  # those that were not skipped
    trainer_state: dict[str, Any] = field(compare=False)  # where the run stands in its data and its limits
    run_info: dict[str, Any]  # what the run is: base, corpus, tokenizer, extensions
    files: dict[str, dict[str, Any]]  # bytes and sha256 of the files of tensors

    @property
    def unevaluated(self) -> dict[str, Any] | None:
        """Of a provisional checkpoint what its step's record has so far; None: its evaluation was made, or none is."""
        return self.trainer_state.get(UNEVALUATED)

    @property
    def extensions(self) -> Extensions:
        """What the model carries beside its base."""
        known = self.run_info.get("extensions", {})
        adapters = {name: AdapterConfig(**values) for name, values in known.get("adapters", {}).items()}
        return Extensions(**(known | {"adapters": adapters}))

    @property
    def tensors_sha256(self) -> str:
        """What all that the run has changed in its model is recognised by."""
        return hash_values({name: stated["sha256"] for name, stated in self.files.items() if name.startswith(TENSORS)})

    @property
    def state(self) -> TrainState:
        """Trainable tensors and their moments, mapped from their files: a large share is never in memory whole."""
        stored, first = self._map_tensors(), f"{MOMENTS[0]}/"
        names = [key.removeprefix(first) for key in stored if key.startswith(first)]
        tensors = {
            name: TensorState(stored[name], *(stored[f"{moment}/{name}"] for moment in MOMENTS)) for name in names
        }
        return TrainState(tensors, self.num_updates)

    @property
    def fixed(self) -> dict[str, Tensor]:
        """Frozen tensors that differ from the base, by name; copies, for their file goes in time."""
        stored = self._map_tensors()
        values = [name for name in stored if name.partition("/")[0] not in MOMENTS]
        return {name: stored[name].clone() for name in values if f"{MOMENTS[0]}/{name}" not in stored}

    @property
    def changed(self) -> dict[str, Tensor]:
        """Every tensor of the model that may differ from the base, trained in its run or before."""
        return {name: tensor.param for name, tensor in self.state.tensors.items()} | self.fixed

    def _map_tensors(self) -> dict[str, Tensor]:
        """All tensors by name; the moments of a parameter are `exp_avg/NAME` and `exp_avg_sq/NAME`."""
        try:
            with name_file(self.path):
                files = [safe_open((self.path / name).local(), "pt") for name in self.files]
                return {name: file.get_tensor(name) for file in files for name in file.keys()}  # noqa: SIM118 - no mapping
        except (OSError, SafetensorError) as error:
            raise RunError(
                f"checkpoint {self.path} cannot be read ({error!r}): delete it to go on from the one before it."
            ) from error


def save_checkpoint(
    folder: Place,
    step: int,
    state: TrainState,
    fixed: dict[str, Tensor],
    trainer_state: dict[str, Any],
    run_info: dict[str, Any],
    keep: int,
    group: dist.ProcessGroup | None = None,
) -> Place:
    """Write one checkpoint, then delete the oldest ones unless it is provisional; called on all ranks.

    A rank that raises does not tell the others, which wait for it: whoever started them ends them all. Rank 0
    alone writes `fixed`, frozen tensors that differ from the base, and `trainer_state` and `run_info`, which are JSON.
    `keep` counts the new checkpoint, too. `group` has all ranks and is for this thread alone; None: that of the
    process. Returns the checkpoint's folder, on rank 0 once it is whole.
    """
    assert keep >= 1 and not fixed.keys() & state.tensors.keys()
    target = folder / (f"step-{step:08d}" + (f"-{folder.fence.number:04d}" if folder.fence else ""))
    rank, num_ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    ending = f"-{rank + 1:05d}-of-{num_ranks:05d}.safetensors" if num_ranks > 1 else ".safetensors"
    shares: list[Any] = [None] * num_ranks
    try:
        values = {name: tensor.param for name, tensor in state.tensors.items()} | (fixed if rank == 0 else {})
        moments = {
            f"{moment}/{name}": getattr(own, moment) for name, own in state.tensors.items() for moment in MOMENTS
        }
        _check_finite(state, step)
        shares[rank] = _write_files(target, {TENSORS + ending: values, f"moments{ending}": moments})
        if num_ranks > 1:
            dist.all_gather_object(shares, shares[rank], group)
        if rank != 0:
            return target
        files = {name: stated for share in shares for name, stated in share.items()}
        made = Checkpoint(target, step, state.num_updates, trainer_state, run_info, files)
        _write_manifest(made)
    except (OSError, SafetensorError, StorageError) as error:
        if isinstance(error, StorageError) and not folder.is_local:  # what is there counts for nothing
            raise
        folder.check()  # a later attempt may have removed what this one was writing
        with contextlib.suppress(OSError, DomextError):
            if not (target / MANIFEST).is_file():  # other ranks still write theirs: what is left counts for nothing
                (target if num_ranks == 1 else target / (TENSORS + ending)).delete()
        cause = getattr(error.__cause__ or error, "strerror", None) or str(error.__cause__ or error)
        raise StorageError(
            f"the checkpoint of step {step} cannot be written to {folder} ({cause}): free space there, and the same "
            "command goes on from the checkpoint before it."
        ) from error
    if made.unevaluated is None:
        _prune(target, keep)
    return target


def confirm_checkpoint(path: Place, keep: int) -> None:
    """Let a provisional checkpoint count, whose step was evaluated, and delete the oldest ones; called on rank 0."""
    made = _open(path, hashes=False)
    if not isinstance(made, Checkpoint):
        raise RunError(f"checkpoint {path} is damaged ({made}); the same command goes on from the one before it.")
    state = {name: value for name, value in made.trainer_state.items() if name != UNEVALUATED}
    _write_manifest(replace(made, trainer_state=state))
    _prune(path, keep)


def _write_manifest(made: Checkpoint) -> None:
    manifest = {"format": FORMAT, **{name: getattr(made, name) for name in STATED}}
    write_json(made.path / MANIFEST, {**manifest, "sha256": hash_values(manifest)}, sort_keys=True)


def _check_finite(state: TrainState, step: int) -> None:
    """Refuse to save what no run can go on from."""
    for name, tensor in state.tensors.items():
        if not all(values.isfinite().all() for values in (tensor.param, tensor.exp_avg, tensor.exp_avg_sq)):
            raise TrainingError(
                f"after step {step:,} the weights {name} or their moments are not finite, so they are not saved; give "
                "a lower --optim.lr under another --run.name."
            )


def _write_files(target: Place, files: dict[str, dict[str, Tensor]]) -> dict[str, Any]:
    """Put a rank's files in a checkpoint's folder; return what the manifest states of them."""
    stated = {}
    with target.scratch() as temporary:
        for name, tensors in files.items():
            path = temporary / name
            save_file({key: values.contiguous() for key, values in tensors.items()}, path, metadata={"format": "pt"})
            open_to_others(path)
            stated[name] = {"bytes": path.stat().st_size, "sha256": hash_file(path)}
            (target / name).put(path)
    return stated


def _prune(target: Place, keep: int) -> None:
    """Delete what is older than the `keep` newest complete checkpoints up to this one.

    Only sizes are checked: the new checkpoint is sound, so a flipped byte in an older one cannot cost the run. Those of
    later steps were passed over as damaged; their own attempt, or the next one, replaces them.
    """
    older = [path for path in _list_folders(target.parent) if _order(path) < _order(target)]
    lower = [path for path in older if _order(path)[1] < _order(target)[1]]
    sound = [path for path in lower if isinstance(_open(path, hashes=False), Checkpoint)]
    for folder in older:
        if folder not in sound[: keep - 1]:
            folder.delete()


def find_latest(folder: Place, step: int = 0, *, hashes: bool = True, provisional: bool = False) -> Checkpoint | None:
    """Return the newest sound checkpoint; None where there is none. A damaged one is passed over with a warning.

    Step 0 is any. Without `hashes`, the files' sizes alone are checked. With `provisional`, one will do whose step is
    still to be evaluated.
    """
    found, damages = _search(folder, step, hashes=hashes, provisional=provisional)
    for path, damage in damages:
        warnings.warn(f"checkpoint {path} is passed over: {damage}.", stacklevel=2)
    return found


def choose_checkpoint(
    folder: Place,
    chosen: Checkpoint | None = None,
    tell: Callable[[str], None] = lambda sentence: None,
) -> Checkpoint | None:
    """Return the checkpoint that a run goes on from, the newest sound one; None: there is no checkpoint at all.

    If another process has `chosen` one before, it is that one or a newer one. `tell` takes a sentence about each
    damaged one that is newer, unless `chosen` is returned.
    """
    found, damages = _search(folder)
    if chosen and found != chosen and (found is None or _order(found.path) <= _order(chosen.path)):
        return wait_for_checkpoint(folder, chosen)
    if found is None and damages:
        reasons = "; ".join(f"{place.name}: {damage}" for place, damage in damages)
        raise RunError(
            f"no checkpoint in {folder} is sound ({reasons}); bring a copy of one back, or delete {folder}: "
            "the same command then begins anew at step 0."
        )
    if found and found != chosen:
        for path, damage in damages:
            tell(f"checkpoint {path} is passed over ({damage}); the run goes on from step {found.step}.")
    return found


def agree_on_checkpoint(
    folder: Place,
    chosen: Checkpoint | None,
    device: torch.device,
    tell: Callable[[str], None] = lambda sentence: None,
) -> Checkpoint | None:
    """Return what rank 0 chooses, given what the driver chose, on all ranks of a process group.

    See `choose_checkpoint`; `device` is where tensors of the process group are.
    """
    told: list[Checkpoint | DomextError | None] = [None]
    if dist.get_rank() == 0:
        try:
            told = [choose_checkpoint(folder, chosen, tell)]
        except DomextError as error:  # all ranks end in the same way
            told = [error]
    dist.broadcast_object_list(told, src=0, device=device)
    if isinstance(told[0], DomextError):
        raise told[0]
    if told[0] is None or dist.get_rank() == 0:
        return told[0]
    return wait_for_checkpoint(folder, told[0])


def wait_for_checkpoint(folder: Place, chosen: Checkpoint) -> Checkpoint:
    """Return a checkpoint that another process chose, once this one sees all of it."""
    path, deadline = folder / chosen.path.name, time.monotonic() + SEEN_WITHIN_SECONDS
    while True:
        found: Checkpoint | str
        try:
            found = _open(path)
        except StorageError as error:  # a share that another machine has changed just now, for example
            if time.monotonic() > deadline:
                raise
            found = str(error)
        if isinstance(found, Checkpoint) and found == chosen:
            return found
        if time.monotonic() > deadline:
            damage = f"{MANIFEST} is another one" if isinstance(found, Checkpoint) else found
            raise RunError(
                f"{socket.gethostname()} does not see the checkpoint {path} that the run goes on from ({damage}, after "
                f"{SEEN_WITHIN_SECONDS:g} seconds); keep it on storage that all nodes share."
            )
        time.sleep(min(1.0, SEEN_WITHIN_SECONDS / 10))


def list_steps(folder: Place) -> list[int]:
    """Return the steps of the checkpoints in a run's `checkpoints` folder, sound or not."""
    return sorted({_order(path)[1] for path in _list_folders(folder) if (path / MANIFEST).is_file()})


def check_all(folder: Place) -> list[tuple[Place, Checkpoint | str]]:
    """Return every checkpoint of a run's `checkpoints` folder, the newest first; of a damaged one what is wrong."""
    return [(path, _open(path)) for path in _list_folders(folder) if (path / MANIFEST).is_file()]


def describe_resumption(folder: Place) -> str:
    """Return what the same command does, as a part of a sentence, given a run's `checkpoints` folder."""
    newest = max(list_steps(folder), default=0)
    return f"goes on from step {newest:,}" if newest else "starts anew"


def _search(
    folder: Place, step: int = 0, *, hashes: bool = True, provisional: bool = True
) -> tuple[Checkpoint | None, list[tuple[Place, str]]]:
    """Find the newest sound checkpoint; also return what is damaged of those that are newer, and why."""
    damages: list[tuple[Place, str]] = []
    for path in _list_folders(folder):
        if step in (0, _order(path)[1]) and (path / MANIFEST).is_file():
            found = _open(path, hashes=hashes)
            if isinstance(found, str):
                damages.append((path, found))
            elif provisional or found.unevaluated is None:
                return found, damages
    return None, damages


def _list_folders(folder: Place) -> list[Place]:
    """What is called like a checkpoint, the newest first."""
    found = [folder / name for name in folder.list_names() if _FOLDER_NAME.fullmatch(name)]
    return sorted(found, key=_order, reverse=True)


def _order(path: Place) -> tuple[int, int]:
    """Attempt and step of a checkpoint's folder."""
    match = _FOLDER_NAME.fullmatch(path.name)
    assert match is not None, "a checkpoint's folder"
    return int(match[2] or 0), int(match[1])


def _open(path: Place, *, hashes: bool = True) -> Checkpoint | str:
    """Return a checkpoint whose files are what its manifest states, or what is wrong with it."""
    name = MANIFEST
    try:
        manifest = parse_json((path / MANIFEST).read_text())
        if manifest["format"] != FORMAT:
            return f"{MANIFEST} {describe_format('checkpoint', manifest['format'])}"
        if manifest["sha256"] != hash_values({name: manifest[name] for name in manifest.keys() - {"sha256"}}):
            return f"{MANIFEST} differs from its own sha256"
        if manifest["step"] != _order(path)[1]:
            return f"its manifest is one of step {manifest['step']!r}"
        found = Checkpoint(path, *(manifest[key] for key in STATED))
        for name, stated in found.files.items():
            info = (path / name).info()
            if info is None:
                return f"{name} is missing"
            if info.size != stated["bytes"]:
                return f"{name} has {info.size} bytes, its manifest states {stated['bytes']}"
            if hashes and hash_file((path / name).local()) != stated["sha256"]:
                return f"{name} differs from the sha256 in its manifest"
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read ({error.strerror})"
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return f"{MANIFEST} is damaged ({error!r})"
    return found
