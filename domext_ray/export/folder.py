"""An export's folder: it appears whole or not at all, and replaces nothing but an earlier export.

Enters: what is exported, and a block of code that fills a folder. Leaves: that folder under its name, with

    domext_export.json   kind, run, step and checkpoint that it was made from, and the sha256 of its other files

A folder without that file, or with a file that is not in it or has changed since, holds somebody's work: it is refused.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from domext_ray.errors import RunError
from domext_ray.files import hash_file, new_folder, write_json

FORMAT = 1
MARKER = "domext_export.json"
_BESIDE = ("task.json",)
"""Files beside the exports of a task of several models."""
KINDS = HUGGINGFACE, FINE_TUNED, ADAPTERHUB, PEFT = "huggingface", "fine_tuned", "adapterhub", "peft"


@dataclass(frozen=True)
class ExportRecord:
    """What an export was made from.

    Args:
        kind: one of `KINDS`.
        run: name of the pre-training run; "" for a model that was in memory, and for a fine-tuned one.
        step: optimiser steps of its checkpoint.
        checkpoint_sha256: sha256 of the checkpoint's tensors.safetensors; "" where there is no run.
    """

    kind: str
    run: str = ""
    step: int = 0
    checkpoint_sha256: str = ""


def read_export_record(folder: Path) -> ExportRecord | None:
    """Return what an export was made from; None for a folder without a marker, or for no folder.

    Raises:
        RunError: the marker is damaged or of another version.
    """
    values = _read_marker(folder)
    return None if values is None else ExportRecord(**values["made_from"])


def check_target(folder: Path, kind: str, source: Path | None = None) -> None:
    """Refuse to write an export over anything but an earlier export of its kind.

    Args:
        folder: where to.
        kind: one of `KINDS`.
        source: a folder that the export is made from, such as its base.

    Raises:
        RunError: `folder` is a file or the source, is no such export, or holds somebody's own files.
    """
    if folder.exists() and not folder.is_dir():
        raise RunError(f"{folder} is a file; give the export a folder.")
    if not folder.is_dir() or not any(folder.iterdir()):
        return
    if source is not None and source.is_dir() and folder.samefile(source):
        raise RunError(f"{folder} is what the export is made from; give another folder.")
    values = _read_marker(folder)
    if values is None:
        raise RunError(
            f"{folder} holds files that are no export of this project (it has no {MARKER}); give another folder or "
            "empty it."
        )
    if values["made_from"]["kind"] != kind:
        raise RunError(
            f"{folder} holds an export of another kind ({values['made_from']['kind']}); give another folder."
        )
    _check_own(folder, values["files"])


def is_export(folder: Path) -> bool:
    """Whether a folder is one that this project has exported, whatever has become of it since."""
    return any((folder / each).is_file() for each in (MARKER, *_BESIDE))


def list_exported(folder: Path) -> list[str]:
    """Return the files of an export, or of the exports that a task of several models has side by side.

    Args:
        folder: the export, or what holds a folder a model, and files that belong to them all.

    Returns:
        Paths inside the folder, sorted; markers are among them.

    Raises:
        RunError: it is no export, or lacks a file, or holds one that is no part of it or has changed.
    """
    values = _read_marker(folder)
    if values is None:
        parts = sorted(each.parent for each in folder.glob(f"*/{MARKER}"))
        if not parts:
            raise RunError(f"{folder} holds no export of this project (it has no {MARKER}); export the run first.")
        beside = sorted(each.name for each in folder.iterdir() if each not in parts)
        foreign = [name for name in beside if name not in _BESIDE]
        if foreign:
            raise RunError(f"{folder / foreign[0]}: no part of the export that is there; move it away.")
        return beside + [f"{part.name}/{name}" for part in parts for name in list_exported(part)]
    _check_own(folder, values["files"])
    missing = [name for name in values["files"] if not (folder / name).is_file()]
    if missing:
        raise RunError(f"{folder / missing[0]}: it is part of the export, and is missing; export the run again.")
    return sorted([*values["files"], MARKER])


def _check_own(folder: Path, files: Mapping[str, str]) -> None:
    """Refuse files that are no part of an export, and those that have changed."""
    foreign = [name for name in _list_files(folder) if name != MARKER and name not in files]
    changed = [name for name, sha256 in files.items() if _is_changed(folder / name, sha256)]
    for names, what in ((foreign, "no part of the export that is there"), (changed, "changed since it was exported")):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise RunError(f"{folder / names[0]}{more}: {what}; move it away, or give another folder.")


@contextlib.contextmanager
def new_export(target: Path, made_from: ExportRecord, source: Path | None = None) -> Iterator[Path]:
    """A temporary folder beside `target` that gets a marker, and its place, when the block ends without an error.

    Args:
        target: where to; an earlier export of the same kind there is replaced.
        made_from: goes into the marker.
        source: a folder that the export is made from.

    Raises:
        RunError: see `check_target`, or the disk refuses.
    """
    check_target(target, made_from.kind, source)
    target = target.resolve()
    try:
        with new_folder(target, replaces=True, check=lambda: check_target(target, made_from.kind, source)) as temporary:
            yield temporary
            _write_marker(temporary, made_from)
    except OSError as error:
        raise RunError(f"the export cannot be written to {target} ({error.strerror or error}).") from error


def _list_files(folder: Path) -> list[str]:
    """Return what is in a folder but folders that have something in them, as sorted paths inside it."""
    entries = (each for each in folder.rglob("*") if each.is_symlink() or not each.is_dir() or not any(each.iterdir()))
    return sorted(each.relative_to(folder).as_posix() for each in entries)


def _is_changed(path: Path, sha256: str) -> bool:
    return path.is_symlink() or (path.exists() and hash_file(path) != sha256)


def _write_marker(folder: Path, made_from: ExportRecord) -> None:
    files = {name: hash_file(folder / name) for name in _list_files(folder)}
    values = {"format": FORMAT, "made_from": asdict(made_from), "files": files}
    write_json(folder / MARKER, values, sort_keys=True)


def _read_marker(folder: Path) -> dict[str, Any] | None:
    path = folder / MARKER
    if not path.is_file():
        return None
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if values["format"] == FORMAT:
            made_from, files = ExportRecord(**values["made_from"]), dict(values["files"])
            is_sound = made_from.kind in KINDS and type(made_from.step) is int
            if not is_sound or not all(isinstance(each, str) for each in files.values()):
                raise ValueError("a value of another type")
            return {"made_from": asdict(made_from), "files": files}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"{path} is damaged ({error!r}); delete the export's folder, or give another.") from error
    raise RunError(f"{path} has format {values['format']!r}, and this version reads {FORMAT}; give another folder.")
