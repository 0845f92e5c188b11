"""The description of a task in the folder of its models: task.json, and a catalogue in a file of its own.

task.json has its format, the sha256 of "task", "task" (a `TaskDescription`), "stages" (the folder of each model, "."
for this one) and "catalogue" (the sha256 of catalogue.json, or null). catalogue.json has "terms", the standard terms
(normalisation only).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from domext_ray.errors import RunError
from domext_ray.families.state import TEXTS, check_state
from domext_ray.families.task_description import TaskDescription
from domext_ray.files import newest_format, read_json
from domext_ray.storage import Place, hash_file, hash_values, write_json

FORMAT = newest_format("task")
TASK_FILE, CATALOGUE_FILE = "task.json", "catalogue.json"
HERE = "."
"""The folder of a stage whose model is beside task.json."""
_REMEDY = "export the model again"


@dataclass(frozen=True)
class TaskFile:
    """What task.json says."""

    description: TaskDescription
    stages: Mapping[str, str]
    """For each stage's model its folder, from the one that holds task.json: `HERE`, or a folder inside it."""


def write_task_file(folder: Path, content: TaskFile) -> None:
    """Write task.json, and the catalogue where there is one; task.json comes last."""
    terms, place = content.description.catalogue, Place(folder)
    if terms:
        write_json(place / CATALOGUE_FILE, {"terms": list(terms)})
    task = replace(content.description, catalogue=()).to_json()
    values = {
        "format": FORMAT,
        "sha256": hash_values(task),
        "task": task,
        "stages": dict(content.stages),
        "catalogue": hash_file(folder / CATALOGUE_FILE) if terms else None,
    }
    write_json(place / TASK_FILE, values)


def read_task_file(folder: Path) -> TaskFile:
    """Read task.json, and the catalogue where there is one."""
    place = Place(folder)
    path = place / TASK_FILE
    values = read_json(path, _REMEDY, {"sha256": str, "task": dict, "stages": dict}, "task")
    if hash_values(values["task"]) != values["sha256"]:
        raise RunError(f"{path} differs from its sha256, so it is damaged or was changed; {_REMEDY}.")
    try:
        description = TaskDescription.from_json(values["task"])
        stages = {name: _check_place(at) for name, at in values["stages"].items()}
    except ValueError as error:
        raise RunError(f"{path} is damaged ({error}); {_REMEDY}.") from error
    if values.get("catalogue") is not None:
        description = replace(description, catalogue=_read_catalogue(place / CATALOGUE_FILE, values["catalogue"]))
    return TaskFile(description, stages)


def _read_catalogue(path: Place, sha256: str) -> tuple[str, ...]:
    values = read_json(path, _REMEDY)
    if hash_file(path.local()) != sha256:
        raise RunError(f"{path} differs from the sha256 in {TASK_FILE}; {_REMEDY}.")
    try:
        check_state(values, {"terms": TEXTS})
    except ValueError as error:
        raise RunError(f"{path} is damaged ({error}); {_REMEDY}.") from error
    return tuple(values["terms"])


def _check_place(place: Any) -> str:
    """A stage's folder is this one or one inside it, and nowhere else."""
    if not isinstance(place, str) or (place != HERE and not place.isidentifier()):
        raise ValueError(f"a stage's folder is {str(place)[:60]!r}")
    return place
