"""An export's folder: it counts only as a whole, and replaces nothing but an earlier export.

Enters: what is exported, and a block of code that fills a folder. Leaves: that folder under its name, with

    domext_export.json   kind, run, step and checkpoint that it was made from, and the sha256 of its other files

A folder without that file, or with a file that is not in it or has changed since, holds somebody's work: it is refused.
While an export is replaced, the file names what there was and what will be, without hashes.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from domext_ray.errors import RunError
from domext_ray.files import Kind, newest_format, read_json
from domext_ray.storage import Place, hash_file, open_to_others, write_json
from domext_ray.training.start import RebuiltRun

FORMAT = newest_format("export")
MARKER = "domext_export.json"
_FIELDS: dict[str, Kind] = {"kind": str, "run": str, "step": int, "checkpoint_sha256": str, "files": dict}
HUGGINGFACE, FINE_TUNED, ADAPTERHUB, PEFT, ONNX = "huggingface", "fine_tuned", "adapterhub", "peft", "onnx"


@dataclass(frozen=True)
class ExportRecord:
    """What an export was made from."""

    kind: str  # `HUGGINGFACE`, `FINE_TUNED`, `ADAPTERHUB`, `PEFT` or `ONNX`
    run: str = ""  # name of the pre-training run; empty: a model that was in memory, or a fine-tuned one
    step: int = 0  # optimiser steps of its checkpoint
    checkpoint_sha256: str = ""  # what the checkpoint's tensors are recognised by
    files: dict[str, str] = field(default_factory=dict, compare=False)  # sha256 by path; "": it is being replaced

    @classmethod
    def of(cls, kind: str, run: RebuiltRun) -> ExportRecord:
        """Return the record of an export of a run's model."""
        return cls(kind, run.name, run.step, run.checkpoint_sha256)


def read_export_record(folder: Place) -> ExportRecord | None:
    """Return what an export was made from; None for a folder without a marker or with half an export, or for none.

    A marker that is damaged or of another version is a RunError.
    """
    record = _read_marker(folder)
    return record if record and all(record.files.values()) else None


def is_export(folder: Place) -> bool:
    """Whether a folder is one that this project has exported, whatever has become of it since."""
    return (folder / MARKER).is_file()


def check_target(folder: Place, kind: str, source: Path | None = None) -> None:
    """Refuse to write an export over anything but an earlier export of its kind.

    It may not be `source`, a folder that the export is made from.
    """
    if folder.is_file():
        raise RunError(f"{folder} is a file; give the export a folder.")
    if not folder.list_names():
        return
    if source is not None and source.is_dir() and folder.is_local and source.samefile(folder):
        raise RunError(f"{folder} is what the export is made from; give another folder.")
    record = _read_marker(folder)
    if record is None:
        raise RunError(
            f"{folder} holds files that are no export of this project (it has no {MARKER}); give another folder or "
            "empty it."
        )
    if record.kind != kind:
        raise RunError(f"{folder} holds an export of another kind ({record.kind}); give another folder.")
    for fault in find_faults(folder, record, may_miss=True):
        raise RunError(fault)


def check_whole(folder: Place) -> None:
    """Refuse half an export, whose files are of two."""
    record = _read_marker(folder)
    if record is not None and not all(record.files.values()):
        raise RunError(f"{folder} holds half an export, whose job was stopped; export the run again.")


def list_exported(folder: Place) -> list[str]:
    """Return the files of an export, its marker, too; refuse one in which a file is missing, foreign or changed."""
    record = _read_marker(folder)
    if record is None:
        raise RunError(f"{folder} holds no export of this project (it has no {MARKER}); export the run first.")
    check_whole(folder)
    for fault in find_faults(folder, record):
        raise RunError(fault)
    return sorted([*record.files, MARKER])


@contextlib.contextmanager
def new_export(target: Place, made_from: ExportRecord, source: Path | None = None) -> Iterator[Path]:
    """A temporary folder whose files get a marker, and their place, when the block ends without an error.

    An earlier export of the same kind in that place is replaced; `source` is a folder that the export is made from.
    """
    check_target(target, made_from.kind, source)

    def describe(files: dict[str, str]) -> dict[str, object]:
        return {"format": FORMAT, **asdict(replace(made_from, files=files))}

    def describe_half(names: list[str]) -> bytes:
        earlier = _read_marker(target)
        return json.dumps(describe(dict.fromkeys([*(earlier.files if earlier else ()), *names], ""))).encode()

    try:
        with target.new_files(MARKER, meanwhile=describe_half) as temporary:
            yield temporary
            made = Place(temporary)
            files = {name: hash_file(temporary / name) for name in made.list_files()}
            write_json(made / MARKER, describe(files), sort_keys=True)
            for name in files:
                open_to_others(temporary / name)
            check_target(target, made_from.kind, source)  # somebody may have put something there meanwhile
    except OSError as error:
        raise RunError(f"the export cannot be written to {target} ({error.strerror or error}).") from error


def find_faults(folder: Place, record: ExportRecord, *, may_miss: bool = False) -> Iterator[str]:
    """Yield a sentence about each file that is no part of an export, has changed, or is missing."""
    names = folder.list_files()
    for name in names:
        sha256 = record.files.get(name, "" if name == MARKER else None)
        if sha256 is None or (sha256 and hash_file((folder / name).local()) != sha256):
            fault = "no part of the export that is there" if sha256 is None else "changed since it was exported"
            yield f"{folder / name}: {fault}; move it away, or give another folder."
    for name in () if may_miss else sorted(record.files.keys() - set(names)):
        yield f"{folder / name}: it is part of the export, and is missing; export the run again."


def _read_marker(folder: Place) -> ExportRecord | None:
    path, remedy = folder / MARKER, "delete the export's folder, or give another"
    if not path.is_file():
        return None
    values = read_json(path, remedy, _FIELDS, "export")
    return ExportRecord(**{name: values[name] for name in _FIELDS})
