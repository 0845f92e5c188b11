"""What a labelled set is like: its task family, files, columns, labels and metric, from YAML or a family's defaults.

Enters: a family's name, the name of a description that ships with the package, or a YAML file. Leaves: a checked
`SetDescription`. Nothing here opens a file of labelled data.
"""

from __future__ import annotations

import difflib
import fnmatch
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

from domext_ray.errors import ConfigError
from domext_ray.labelled.examples import SPLITS
from domext_ray.labelled.set_families import DEFAULT_FILES, ENDS, FAMILIES, RULES, SCHEMES, Column
from domext_ray.options.yaml_text import parse_yaml

SETS = Path(str(resources.files("domext_ray"))) / "assets" / "sets"
"""Descriptions that ship, and beside its description the folder of a set whose files ship."""
SET_FILE = "set.yaml"
"""Description that a folder of data may hold."""


@dataclass(frozen=True)
class SetDescription:
    """A labelled set's layout; `make_description` fills in what a family has by default.

    Args:
        name: what the set is called.
        task: its family, a key of `FAMILIES`.
        path: the YAML that describes it; "" if none does.
        reader: the files' layout: "conll", "squad", "records" (CSV, TSV, JSON, JSON Lines or Parquet by the file's
            ending), or "label_columns" (the same, with a column of 0 and 1 per label).
        files: file name patterns of each split, tried in order; none: the set has no such split.
        columns: see `Family`.
        required: columns that every row must have.
        labels: classes, entity types or predicates in the head's order; empty: those of the data.
        negative_label: the label that says that there is no relation.
        positive_label: the class whose F1 is "f1.positive".
        metric: path of the figure that dev chooses by.
        scheme: tag scheme (ner), a key of `SCHEMES`.
        ends: whether an entity's end is its last character (inclusive) or the one after (exclusive); auto: each
            entity's own text tells (nested_ner).
        marks: the two arguments' marks (relation): (open, close), or one placeholder, which stays in the text.
        separator: stands between several terms or labels of one cell (normalization, multilabel).
        no_answer: questions may have no answer (qa).
        rule: how answers are compared (qa), one of `RULES`; empty: SQuAD 2.0's where `no_answer`, else SQuAD 1.1's.
        schema: name patterns of the file of predicates with their argument types (relation_extraction).
        catalogue: name patterns of the file of standard terms (normalization).
        fractions: shares by which splits without a file of their own are cut from the one that has one.
        config: configuration of the dataset on the hub, such as "mrpc".
        group_field: column that says whose a row is, such as patient_id: splits that are cut keep all of a group on one
            side, and no page of mistakes quotes a row.
    """

    name: str
    task: str
    path: str
    reader: str
    files: Mapping[str, tuple[str, ...]]
    columns: Mapping[str, tuple[Column, ...]]
    required: tuple[str, ...]
    metric: str
    labels: tuple[str, ...] = ()
    negative_label: str | None = None
    positive_label: str | None = None
    scheme: str = "auto"
    ends: str = "auto"
    marks: tuple[tuple[str, ...], ...] = (("<<", ">>"), ("[[", "]]"))
    separator: str = "##"
    no_answer: bool = True
    rule: str | None = None
    schema: tuple[str, ...] = ()
    catalogue: tuple[str, ...] = ("catalogue.*", "catalog.*")
    fractions: Mapping[str, float] = field(default_factory=dict)
    config: str = ""
    group_field: Column = ""

    @property
    def where(self) -> str:
        """What a message calls the description."""
        return self.path or f"the description of {self.name}"

    @property
    def yaml(self) -> str:
        """What a message tells the user to change."""
        return self.path or "a YAML file that describes the set"

    def __post_init__(self) -> None:
        family = FAMILIES.get(self.task)
        if family is None:
            raise self._error("task", self.task, f"one of {', '.join(FAMILIES)}")
        for key, value, allowed in (
            ("reader", self.reader, family.readers),
            ("scheme", self.scheme, tuple(SCHEMES)),
            ("ends", self.ends, ENDS),
            ("rule", self.rule, RULES if self.task == "qa" else (None,)),
        ):
            if value not in allowed:
                raise self._error(key, value, f"one of {', '.join(map(str, allowed))}")
        if self.group_field != "" and self.reader not in ("records", "label_columns"):
            rule = f"left out with reader: {self.reader}, whose files have no columns"
            raise self._error("group_field", self.group_field, rule)
        if self.reader == "label_columns" and self.columns["labels"] != family.columns["labels"]:
            raise self._error("columns.labels", self.columns["labels"], "left out: labels name their columns")
        for key, names, known in (("columns", self.columns, family.columns), ("fractions", self.fractions, SPLITS)):
            strange = [each for each in names if each not in known]
            if strange:
                raise self._error(f"a key of {key}", strange[0], f"one of {', '.join(known)}")
        if not any(fnmatch.fnmatchcase(self.metric, each) for each in family.metrics):
            raise self._error("metric", self.metric, f"one of {', '.join(family.metrics)}")
        if self.metric.endswith(".positive") and self.positive_label is None:
            raise self._error("metric", self.metric, "another one unless positive_label is given")
        for key, label in (("negative_label", self.negative_label), ("positive_label", self.positive_label)):
            if label is not None and self.labels and label not in self.labels:
                raise self._error(key, label, f"one of labels ({', '.join(self.labels)})")
        if self.fractions and not math.isclose(sum(self.fractions.values()), 1.0, abs_tol=1e-6):
            raise self._error("fractions", dict(self.fractions), "shares that add up to 1")

    def _error(self, key: str, value: object, rule: str) -> ConfigError:
        return ConfigError(f"{self.where}: {key} is {value!r}; it must be {rule}.")


def make_description(task: str, name: str, path: str = "", **values: Any) -> SetDescription:
    """Make a description, with the family's defaults for what is not given.

    Args:
        task: the family.
        name: what the set is called.
        path: the YAML that it comes from, if any.
        values: further fields of `SetDescription`; `files` and `columns` replace single entries.

    Raises:
        ConfigError: a value outside its rule.
    """
    family = FAMILIES.get(task)
    if family is None:
        raise ConfigError(f"{path or name}: task is {task!r}; it must be one of {', '.join(FAMILIES)}.")
    given = values.pop("columns", {})
    reader = values.pop("reader", family.readers[0])
    required = tuple(each for each in family.columns if each not in family.optional or each in given)
    if task in ("nested_ner", "relation_extraction"):
        required = tuple(each for each in family.columns if each not in family.optional)
    elif reader == "label_columns":
        required = tuple(each for each in required if each != "labels")
    if task == "qa":
        values.setdefault("rule", RULES[values.get("no_answer", True)])
    return SetDescription(
        name=name,
        task=task,
        path=path,
        reader=reader,
        files={**DEFAULT_FILES, **values.pop("files", {})},
        columns={**family.columns, **given},
        required=required,
        metric=values.pop("metric", family.metric),
        separator=values.pop("separator", family.separator),
        **values,
    )


def list_shipped() -> dict[str, Path]:
    """Return the descriptions that ship with the package, by name."""
    return {path.stem: path for path in sorted(SETS.glob("*.yaml"))}


def find_set(task: str, data: str) -> tuple[SetDescription, str]:
    """Find a set's description and its files, without reading these.

    Args:
        task: as for `find_description`.
        data: folder, or hub name, of the set; empty for a set whose files ship.

    Returns:
        The description, and the folder or hub name.

    Raises:
        ConfigError: there is no such task or path, or the two do not go together.
    """
    ships = (SETS / task).is_dir()
    if ships and data:
        raise ConfigError(f"--data is {data!r}; it must be empty with --task {task}, which ships.")
    if not ships and not data:
        raise ConfigError(f"--data is empty; --task {task} needs a folder, or a name on the hub.")
    place = str(SETS / task) if ships else data
    description = find_description(task, place)
    if (place[0] in "/.~" or place.count("/") > 1) and not Path(place).exists():
        raise ConfigError(f"--data is {data!r}, which does not exist; give a folder of labelled files, or a hub name.")
    return description, place


def find_description(task: str, data: str) -> SetDescription:
    """Find what describes a labelled set.

    Args:
        task: a family's name (then the folder's set.yaml counts, or else the family's defaults), the name of a shipped
            description, or the path of a YAML file.
        data: folder, or hub name, of the set.

    Raises:
        ConfigError: a name that is none of these, or a description that breaks a rule.
    """
    own_file = Path(data) / SET_FILE
    if task in FAMILIES:
        if not own_file.is_file():
            return make_description(task, Path(data).resolve().name if Path(data).is_dir() else data)
        found = read_description(own_file)
        if found.task != task:
            raise ConfigError(f"{own_file} describes a set for {found.task}, not for {task!r}; give that as --task.")
        return found
    shipped = list_shipped()
    if task in shipped:
        return read_description(shipped[task])
    if Path(task).suffix in (".yaml", ".yml") or Path(task).is_file():
        return read_description(Path(task))
    near = difflib.get_close_matches(task.lower(), [*FAMILIES, *shipped], n=1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    raise ConfigError(
        f"--task is {task!r}; it must be a family ({', '.join(FAMILIES)}), a described set ({', '.join(shipped)}) or a "
        f"YAML file that describes one{hint}."
    )


def read_description(path: Path) -> SetDescription:
    """Read a description from YAML.

    Args:
        path: the file; its stem names the set unless it has a key `name` (set.yaml: the folder's name).

    Raises:
        ConfigError: a file that is missing or no YAML, an unknown key, or a value outside its rule.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}); name a YAML file that describes a set.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is no YAML: it is not in UTF-8.") from None
    values = parse_yaml(text, str(path)).value
    if not isinstance(values, dict) or "task" not in values:
        raise ConfigError(f"{path} must be a mapping with a key 'task', one of {', '.join(FAMILIES)}.")
    checked = {}
    for key, value in values.items():
        if key not in _KEYS:
            near = difflib.get_close_matches(str(key), _KEYS, n=1)
            hint = f"did you mean {near[0]}? The keys are" if near else "use"
            raise ConfigError(f"{path}: {key!r} is no key of a description; {hint} {', '.join(_KEYS)}.")
        convert, rule = _KEYS[key]
        try:
            checked[key] = convert(value)
        except (TypeError, ValueError):
            raise ConfigError(f"{path}: {key} is {value!r}; it must be {rule}.") from None
    default_name = path.resolve().parent.name if path.name == SET_FILE else path.stem
    return make_description(checked.pop("task"), checked.pop("name", default_name), str(path), **checked)


def _to_text(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise TypeError
    return value


def _to_label(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, (str, int)) or value == "":
        raise TypeError  # YAML reads an unquoted yes, no, on or off as a truth value
    return str(value)


def _to_bool(value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError
    return value


def _to_list(value: object, convert: Callable[[Any], Any], *, is_empty_allowed: bool = True) -> tuple[Any, ...]:
    listed = value if isinstance(value, list) else [value]
    if not listed and not is_empty_allowed:
        raise TypeError
    made = tuple(convert(each) for each in listed)
    if len(set(made)) != len(made):
        raise ValueError
    return made


def _to_column(value: object) -> Column:
    if isinstance(value, bool) or not isinstance(value, (str, int)) or value == "":
        raise TypeError
    return value


def _to_mapping(value: object, convert: Callable[[Any], Any], keys: tuple[str, ...] = ()) -> dict[str, Any]:
    if not isinstance(value, dict) or any(not isinstance(key, str) or (keys and key not in keys) for key in value):
        raise TypeError
    return {key: convert(each) for key, each in value.items()}


def _to_share(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1:
        raise TypeError
    return float(value)


def _to_marks(value: object) -> tuple[tuple[str, ...], ...]:
    if not isinstance(value, list) or len(value) != 2:
        raise TypeError
    marks = tuple(_to_list(each, _to_text, is_empty_allowed=False) for each in value)
    if any(len(each) > 2 for each in marks) or marks[0] == marks[1]:
        raise ValueError
    return marks


_texts = partial(_to_list, convert=_to_text)
_A_TEXT = "a text"
_PATTERNS = "file name patterns"
_KEYS: Mapping[str, tuple[Callable[[Any], Any], str]] = {
    "name": (_to_text, _A_TEXT),
    "task": (_to_text, _A_TEXT),
    "reader": (_to_text, _A_TEXT),
    "files": (partial(_to_mapping, convert=_texts, keys=SPLITS), f"{_PATTERNS} for {', '.join(SPLITS)}"),
    "columns": (
        partial(_to_mapping, convert=partial(_to_list, convert=_to_column, is_empty_allowed=False)),
        "a mapping to column names or numbers",
    ),
    "labels": (partial(_to_list, convert=_to_label), "a list of different labels (quote yes, no, on and off)"),
    "negative_label": (_to_label, "a label (quote yes, no, on and off)"),
    "positive_label": (_to_label, "a label (quote yes, no, on and off)"),
    "metric": (_to_text, _A_TEXT),
    "scheme": (lambda value: _to_text(value).lower(), f"one of {', '.join(SCHEMES)}"),
    "ends": (_to_text, f"one of {', '.join(ENDS)}"),
    "marks": (_to_marks, "two different marks, each a placeholder or [open, close]"),
    "separator": (_to_text, _A_TEXT),
    "no_answer": (_to_bool, "true or false"),
    "rule": (_to_text, f"one of {', '.join(RULES)}"),
    "schema": (_texts, _PATTERNS),
    "catalogue": (_texts, _PATTERNS),
    "fractions": (
        partial(_to_mapping, convert=_to_share, keys=SPLITS),
        f"shares above 0 for some of {', '.join(SPLITS)}",
    ),
    "config": (_to_text, _A_TEXT),
    "group_field": (_to_column, "a column's name or number"),
}
