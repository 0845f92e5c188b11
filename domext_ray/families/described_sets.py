"""What a user calls a labelled set -> its description, with its family's defaults.

Enters: a family's name, the name of a description that ships with the package, or a YAML file; and where the data are.
Leaves: a checked `SetDescription`. Nothing here opens a file of labelled data.
"""

from __future__ import annotations

import contextlib
import difflib
import fnmatch
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from domext_ray.config.options.yaml_text import parse_yaml
from domext_ray.errors import ConfigError, name_file
from domext_ray.families.readers.set_description import (
    BRAT_FILES,
    DEFAULT_FILES,
    KEYS,
    OPTIONAL,
    RETIRED,
    SCHEMES,
    SET_FILE,
    SETS,
    WITH_PLACES,
    SetDescription,
)
from domext_ray.families.registry import FAMILIES
from domext_ray.text.data.names import describe_near, find_near


def make_description(task: str, name: str, **values: Any) -> SetDescription:
    """Make a description, with the family's defaults for what is not given.

    `values` are further fields of `SetDescription`, and may be anything; `files` and `columns` replace single entries.
    """
    values = {"name": name, "task": task, **values}
    try:
        own = SetDescription(**values)
    except ValidationError as error:
        key = str(error.errors(include_url=False)[0]["loc"][0])
        rule = SetDescription.__pydantic_fields__[key].description  # type: ignore[attr-defined]
        where = values.get("path") or f"the description of {name}"
        raise ConfigError(f"{where}: {key} is {values[key]!r}; it must be {rule}.") from None
    _demand(own, "task", task, FAMILIES)
    family, given = FAMILIES[task], own.columns
    reader = own.reader or next(iter(family.readers))
    for key, value, allowed in (
        ("reader", reader, family.readers),
        ("scheme", own.scheme, SCHEMES),
        ("rule", own.rule, (*family.rules, None)),
        *(("a key of columns", role, family.columns) for role in given),
    ):
        _demand(own, key, value, allowed)
    required = tuple(r for r in family.columns if r in family.readers[reader] or r in given and r in OPTIONAL)
    made = own.fill(
        reader=reader,
        files={**(BRAT_FILES if reader == "brat" else DEFAULT_FILES), **own.files},
        columns={**family.columns, **given},
        required=required,
        annotated=family.annotated if family.annotated in required else "",
        metric=own.metric or family.metric,
        ends="exclusive" if reader in WITH_PLACES else own.ends,
        separator=own.separator or family.separator,
        rule=own.rule or (family.rules[own.no_answer] if family.rules else None),
        others=() if own.reader else tuple(_make_others([*family.readers][1:], values)),
    )
    if reader == "label_columns" and "labels" in given:
        raise _refuse(made, "columns.labels", given["labels"], "left out: labels name their columns")
    if not any(fnmatch.fnmatchcase(made.metric, pattern) for pattern in family.metrics):
        raise _refuse(made, "metric", made.metric, f"one of {', '.join(family.metrics)}")
    if made.metric.endswith(".positive") and made.positive_label is None:
        raise _refuse(made, "metric", made.metric, "another one unless positive_label is given")
    for key in ("negative_label", "positive_label"):
        label = getattr(made, key)
        if label is not None and made.labels and label not in made.labels:
            raise _refuse(made, key, label, f"one of labels ({', '.join(made.labels)})")
    if made.fractions and not math.isclose(sum(made.fractions.values()), 1.0, abs_tol=1e-6):
        raise _refuse(made, "fractions", made.fractions, "shares that add up to 1")
    return made


def _make_others(readers: Sequence[str], values: dict[str, Any]) -> Iterator[SetDescription]:
    """Yield a set's description with other readers, where what else it says goes with them."""
    for reader in readers:
        with contextlib.suppress(ConfigError):
            yield make_description(**{**values, "reader": reader})


def _demand(description: SetDescription, key: str, value: str | None, allowed: Any) -> None:
    if value not in allowed:
        raise _refuse(description, key, value, f"one of {', '.join(map(str, allowed))}")


def _refuse(description: SetDescription, key: str, value: object, rule: str) -> ConfigError:
    return ConfigError(f"{description.where}: {key} is {value!r}; it must be {rule}.")


def list_shipped() -> dict[str, Path]:
    """Return the descriptions that ship with the package, by name."""
    return {path.stem: path for path in sorted(SETS.glob("*.yaml"))}


def find_set(task: str, data: str) -> SetDescription:
    """Find a set's description, with its folder or hub name, without reading its files.

    `data` is empty for a set whose files ship. A ConfigError says that there is no such task or path, or that the two
    do not go together.
    """
    ships = task in list_shipped() and (SETS / task).is_dir()
    if ships and data:
        raise ConfigError(f"--data is {data!r}; it must be empty with --task {task}, which ships.")
    if not data and task not in FAMILIES and Path(task).is_dir():
        raise ConfigError(
            f"--task is {task!r}, which is a folder; give a family or a described set as --task, and --data {task}."
        )
    if not ships and not data:
        raise ConfigError(f"--data is empty; --task {task} needs a folder, or a name on the hub.")
    place = str(SETS / task) if ships else data
    description = find_description(task, place)
    if (place[0] in "/.~" or place.count("/") > 1) and not Path(place).exists():
        hint = describe_near(find_near(data)) or "give a folder of labelled files, or a hub name."
        raise ConfigError(f"--data is {data!r}, which does not exist; {hint}")
    return description


def find_description(task: str, data: str) -> SetDescription:
    """Find what describes a labelled set.

    `task` is a family's name (then the set.yaml in the folder `data` counts, or else the family's defaults), the name
    of a shipped description, or the path of a YAML file.
    """
    own_file = Path(data) / SET_FILE
    if task in FAMILIES:
        if not own_file.is_file():
            return make_description(task, Path(data).resolve().name if Path(data).is_dir() else data, data=data)
        found = read_description(own_file, data)
        if found.task != task:
            raise ConfigError(f"{own_file} describes a set for {found.task}, not for {task!r}; give that as --task.")
        return found
    shipped = list_shipped()
    if task in shipped:
        return read_description(shipped[task], data)
    if Path(task).suffix in (".yaml", ".yml") or Path(task).is_file():
        return read_description(Path(task), data)
    near = difflib.get_close_matches(task.lower(), [*FAMILIES, *shipped], n=1)
    hint = f"did you mean {near[0]}? It" if near else "it"
    raise ConfigError(
        f"--task is {task!r}; {hint} must be a family ({', '.join(FAMILIES)}), a described set "
        f"({', '.join(shipped)}) or a YAML file that describes one."
    )


def read_description(path: Path, data: str = "") -> SetDescription:
    """Read a description from YAML; without a key `name` its stem names the set (set.yaml: the folder does)."""
    try:
        with name_file(path):
            text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}); name a YAML file that describes a set.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is no YAML: it is not in UTF-8.") from None
    values = parse_yaml(text, str(path)).value
    if not isinstance(values, dict) or "task" not in values:
        raise ConfigError(f"{path} must be a mapping with a key 'task', one of {', '.join(FAMILIES)}.")
    ignored = tuple(key for key in RETIRED if key in values)
    for key in values:
        if key not in (*KEYS, *RETIRED):
            near = difflib.get_close_matches(str(key), KEYS, n=1)
            hint = f"did you mean {near[0]}? The keys are" if near else "use"
            raise ConfigError(f"{path}: {key!r} is no key of a description; {hint} {', '.join(KEYS)}.")
    default_name = path.resolve().parent.name if path.name == SET_FILE else path.stem
    kept = {key: value for key, value in values.items() if key not in RETIRED}
    return make_description(**{"name": default_name, **kept}, path=str(path), data=data, ignored=ignored)
