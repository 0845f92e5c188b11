"""An export's folder: it counts only as a whole, and replaces nothing but an earlier export.

Enters: what is exported, and a block of code that fills a folder. Leaves: that folder under its name, with

    domext_export.json   kind, run, step and checkpoint that it was made from, and the sha256 of its other files

A folder without that file, or with a file that is not in it or has changed since, holds somebody's work: it is refused.
While an export is replaced the file says so, and names what there was and what will be; it has its final content last.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from domext_ray.errors import RunError
from domext_ray.storage import Place, Where, hash_file, write_json

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


def read_export_record(where: Where) -> ExportRecord | None:
    """Return what an export was made from; None for a folder without a marker or with half an export, or for none.

    Raises:
        RunError: the marker is damaged or of another version.
    """
    values = _read_marker(Place(where))
    return None if values is None or values["incomplete"] else ExportRecord(**values["made_from"])


def check_target(where: Where, kind: str, source: Path | None = None) -> None:
    """Refuse to write an export over anything but an earlier export of its kind.

    Args:
        where: where to.
        kind: one of `KINDS`.
        source: a folder that the export is made from, such as its base.

    Raises:
        RunError: it is a file or the source, is no such export, or holds somebody's own files.
    """
    folder = Place(where)
    if folder.is_file():
        raise RunError(f"{folder} is a file; give the export a folder.")
    if not folder.list_names():
        return
    if source is not None and source.is_dir() and folder.is_local and source.samefile(folder):
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
    _check_own(folder, values)


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
    values = _read_marker(Place(folder))
    if values is not None and values["incomplete"]:
        raise RunError(f"{folder} holds half an export, whose job was stopped; export the run again.")
    if values is None:
        parts = sorted(each.parent for each in folder.glob(f"*/{MARKER}"))
        if not parts:
            raise RunError(f"{folder} holds no export of this project (it has no {MARKER}); export the run first.")
        beside = sorted(each.name for each in folder.iterdir() if each not in parts)
        foreign = [name for name in beside if name not in _BESIDE]
        if foreign:
            raise RunError(f"{folder / foreign[0]}: no part of the export that is there; move it away.")
        return beside + [f"{part.name}/{name}" for part in parts for name in list_exported(part)]
    _check_own(Place(folder), values)
    missing = [name for name in values["files"] if not (folder / name).is_file()]
    if missing:
        raise RunError(f"{folder / missing[0]}: it is part of the export, and is missing; export the run again.")
    return sorted([*values["files"], MARKER])


def _check_own(folder: Place, values: Mapping[str, Any]) -> None:
    """Refuse files that are no part of an export, and those that have changed, unless they were being replaced."""
    files = values["files"]
    foreign = [name for name in _list_files(folder) if name != MARKER and name not in files]
    changed = [
        name for name, sha256 in files.items() if not values["incomplete"] and _is_changed(folder / name, sha256)
    ]
    for names, what in ((foreign, "no part of the export that is there"), (changed, "changed since it was exported")):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise RunError(f"{folder / names[0]}{more}: {what}; move it away, or give another folder.")


@contextlib.contextmanager
def new_export(where: Where, made_from: ExportRecord, source: Path | None = None) -> Iterator[Path]:
    """A temporary folder whose files get a marker, and their place, when the block ends without an error.

    Args:
        where: where to; an earlier export of the same kind there is replaced.
        made_from: goes into the marker.
        source: a folder that the export is made from.

    Raises:
        RunError: see `check_target`, or the disk refuses.
    """
    target = Place(where)
    check_target(target, made_from.kind, source)

    def describe(names: list[str]) -> bytes:
        earlier = _read_marker(target) or {"files": {}}
        return json.dumps(_describe(made_from, earlier["files"] | dict.fromkeys(names, ""), incomplete=True)).encode()

    try:
        with target.new_files(MARKER, meanwhile=describe) as temporary:
            yield temporary
            files = {name: hash_file(temporary / name) for name in Place(temporary).list_files()}
            write_json(temporary / MARKER, _describe(made_from, files), sort_keys=True)
            check_target(target, made_from.kind, source)  # somebody may have put something there meanwhile
    except OSError as error:
        raise RunError(f"the export cannot be written to {target} ({error.strerror or error}).") from error


def _describe(made_from: ExportRecord, files: Mapping[str, str], *, incomplete: bool = False) -> dict[str, Any]:
    state = {"incomplete": True} if incomplete else {}
    return {"format": FORMAT, "made_from": asdict(made_from), "files": dict(files), **state}


def _list_files(folder: Place) -> list[str]:
    """Return what is in a folder, empty folders of a disk included, as sorted paths inside it."""
    if not folder.is_local:
        return folder.list_files()
    path = Path(folder)
    entries = (each for each in path.rglob("*") if each.is_symlink() or not each.is_dir() or not any(each.iterdir()))
    return sorted(each.relative_to(path).as_posix() for each in entries)


def _is_changed(place: Place, sha256: str) -> bool:
    is_link = place.is_local and Path(place).is_symlink()
    return is_link or (place.is_file() and hash_file(place) != sha256)


def _read_marker(folder: Place) -> dict[str, Any] | None:
    path = folder / MARKER
    if not path.is_file():
        return None
    try:
        values = json.loads(path.read_text())
        if values["format"] == FORMAT:
            made_from, files = ExportRecord(**values["made_from"]), dict(values["files"])
            is_sound = made_from.kind in KINDS and type(made_from.step) is int
            if not is_sound or not all(isinstance(each, str) for each in files.values()):
                raise ValueError("a value of another type")
            return {"made_from": asdict(made_from), "files": files, "incomplete": bool(values.get("incomplete"))}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"{path} is damaged ({error!r}); delete the export's folder, or give another.") from error
    raise RunError(f"{path} has format {values['format']!r}, and this version reads {FORMAT}; give another folder.")
