"""What a labelled set is like: its task family, files, columns, labels and metric, from YAML or a family's defaults.

Enters: a family's name, the name of a description that ships with the package, or a YAML file. Leaves: a checked
`SetDescription`. Nothing here opens a file of labelled data.
"""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import math
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass

from domext_ray.config.options.yaml_text import parse_yaml
from domext_ray.errors import ConfigError, name_file
from domext_ray.families.readers.examples import SPLITS
from domext_ray.families.readers.set_families import BRAT_FILES, DEFAULT_FILES, ENDS, FAMILIES, OPTIONAL, RULES, SCHEMES
from domext_ray.files import ASSETS
from domext_ray.text.data.names import describe_near, find_near

SETS = ASSETS / "sets"
"""Descriptions that ship, and beside its description the folder of a set whose files ship."""
SET_FILE = "set.yaml"
"""Description that a folder of data may hold."""


def _require_different(values: tuple[Any, ...]) -> tuple[Any, ...]:
    if len(set(values)) != len(values):
        raise ValueError
    return values


_LISTED = BeforeValidator(lambda value: tuple(value) if isinstance(value, list | tuple) else (value,))
_DIFFERENT = AfterValidator(_require_different)
_Text = Annotated[str, Field(min_length=1)]
_Label = Annotated[_Text, BeforeValidator(lambda value: str(value) if type(value) is int else value)]
_Texts = Annotated[tuple[_Text, ...], _DIFFERENT, _LISTED]
_Labels = Annotated[tuple[_Label, ...], _DIFFERENT, _LISTED]
_Columns = Annotated[tuple[_Text | int, ...], Field(min_length=1), _DIFFERENT, _LISTED]
_Mark = Annotated[tuple[_Text, ...], Field(min_length=1, max_length=2), _LISTED]
_Marks = Annotated[tuple[_Mark, _Mark], _DIFFERENT, _LISTED]
_Share = Annotated[float, Field(gt=0, le=1)]
_Counts = dict[Literal["examples", "entities"], Annotated[tuple[int, ...], Field(min_length=1), _LISTED]]
_Split = Annotated[str, Field(pattern=f"^({'|'.join(SPLITS)})$")]
_A_TEXT, _PATTERNS, _QUOTED = "a text", "file name patterns", "(quote yes, no, on and off)"
_SOME = f"for some of {', '.join(SPLITS)}"


def _key(rule: str = _A_TEXT, default: Any = "") -> Any:
    """A key of a description: what its value must be, as it ends a sentence."""
    given = "default_factory" if default is dict else "default"
    return Field(**{given: default}, description=rule)


@dataclass(frozen=True, config=ConfigDict(strict=True))
class SetDescription:
    """A labelled set's layout, in the order of a YAML's keys; what is empty has the family's default."""

    name: _Text = _key()
    # its family, a key of `FAMILIES`
    task: _Text = _key()
    # the files' layout: conll, squad, records (a table, JSON or Parquet by the file's ending), label_columns (such with
    # a column of 0 and 1 per label), spans (such with entities by characters), or brat (a folder per split)
    reader: _Text = _key()
    # patterns of each split, tried in order; none: the set has no such split
    files: dict[_Split, _Texts] = _key(f"{_PATTERNS} for {', '.join(SPLITS)}", dict)
    columns: dict[str, _Columns] = _key("a mapping to column names or numbers", dict)  # see `Family`
    # classes, entity types or predicates in the head's order; empty: those of the data
    labels: _Labels = _key(f"a list of different labels {_QUOTED}", ())
    negative_label: _Label | None = _key(f"a label {_QUOTED}", None)  # says that there is no relation
    positive_label: _Label | None = _key(f"a label {_QUOTED}", None)  # the class whose F1 is "f1.positive"
    metric: _Text = _key()  # path of the figure that dev chooses by
    # how answers are compared (qa); empty: as in SQuAD 2.0 where `no_answer`, else as in SQuAD 1.1
    rule: Literal["squad_v1", "squad_v2", "cmrc"] | None = _key(f"one of {', '.join(RULES)}", None)
    scheme: Annotated[_Text, AfterValidator(str.lower)] = _key(f"one of {', '.join(SCHEMES)}", "auto")  # of tags (ner)
    # what the numbers of tags in rows mean, from 0 (ner)
    tags: _Labels = _key("a list of different tags, such as [O, B-TYPE, I-TYPE]", ())
    # whether an entity's end is its last character or the one after; auto: each entity's own text tells, and where it
    # has none ends are exclusive (spans) or must be named (nested_ner)
    ends: _Text = _key(f"one of {', '.join(ENDS)}", "auto")
    # of the two arguments (relation): (open, close), or one placeholder, which stays in the text
    marks: _Marks = _key("two different marks, each a placeholder or [open, close]", (("<<", ">>"), ("[[", "]]")))
    separator: _Text = _key()  # between several terms or labels of one cell (normalization, multilabel)
    no_answer: bool = _key("true or false", True)  # questions may have none (qa)
    schema: _Texts = _key(_PATTERNS, ())  # of the file of predicates with their argument types (relation_extraction)
    catalogue: _Texts = _key(_PATTERNS, ("catalogue.*", "catalog.*"))  # of the file of standard terms (normalization)
    # shares by which splits without a file of their own are cut from the one that has one
    fractions: dict[_Split, _Share] = _key(f"shares above 0 {_SOME}", dict)
    config: _Text = _key()  # of the dataset on the hub, such as "mrpc"
    # column that says whose a row is, such as patient_id: splits that are cut keep all of a group on one side, and no
    # page of mistakes quotes a row
    group_field: _Text | int = _key("a column's name or number")
    source: _Text = _key()  # where the set is from, an address
    licence: _Text = _key()  # where its authors name one
    # what a split's file has when it is whole; several where several copies are usual
    counts: dict[_Split, _Counts] = _key(f"whole numbers of examples or entities {_SOME}", dict)
    path: str = ""  # the YAML that describes it; "" if none does
    required: tuple[str, ...] = dataclasses.field(default=(), init=False)  # roles that every row must have

    @property
    def where(self) -> str:
        """What a message calls the description."""
        return self.path or f"the description of {self.name}"

    @property
    def yaml(self) -> str:
        """What a message tells the user to change."""
        return self.path or "a YAML file that describes the set"

    def __post_init__(self) -> None:
        self._demand("task", self.task, FAMILIES)
        family, given = FAMILIES[self.task], self.columns
        reader = self.reader or next(iter(family.readers))
        for key, value, allowed in (
            ("reader", reader, family.readers),
            ("scheme", self.scheme, SCHEMES),
            ("ends", self.ends, ENDS),
            ("rule", self.rule, (*RULES, None) if self.task == "qa" else (None,)),
            *(("a key of columns", role, family.columns) for role in given),
        ):
            self._demand(key, value, allowed)
        filled: dict[str, Any] = {
            "reader": reader,
            "files": {**(BRAT_FILES if reader == "brat" else DEFAULT_FILES), **self.files},
            "columns": {**family.columns, **given},
            "required": tuple(r for r in family.columns if r in family.readers[reader] or r in given and r in OPTIONAL),
            "metric": self.metric or family.metric,
            "ends": "exclusive" if reader == "brat" else self.ends,
            "separator": self.separator or family.separator,
            "rule": self.rule or (RULES[self.no_answer] if self.task == "qa" else None),
        }
        for key, made in filled.items():
            object.__setattr__(self, key, made)
        if self.group_field != "" and reader not in ("records", "label_columns", "spans"):
            raise self._error(
                "group_field", self.group_field, f"left out with reader: {reader}, whose files have no columns"
            )
        if reader == "label_columns" and "labels" in given:
            raise self._error("columns.labels", given["labels"], "left out: labels name their columns")
        if not any(fnmatch.fnmatchcase(self.metric, pattern) for pattern in family.metrics):
            raise self._error("metric", self.metric, f"one of {', '.join(family.metrics)}")
        if self.metric.endswith(".positive") and self.positive_label is None:
            raise self._error("metric", self.metric, "another one unless positive_label is given")
        for key in ("negative_label", "positive_label"):
            label = getattr(self, key)
            if label is not None and self.labels and label not in self.labels:
                raise self._error(key, label, f"one of labels ({', '.join(self.labels)})")
        if self.fractions and not math.isclose(sum(self.fractions.values()), 1.0, abs_tol=1e-6):
            raise self._error("fractions", self.fractions, "shares that add up to 1")

    def _demand(self, key: str, value: str | None, allowed: Any) -> None:
        if value not in allowed:
            raise self._error(key, value, f"one of {', '.join(map(str, allowed))}")

    def _error(self, key: str, value: object, rule: str) -> ConfigError:
        return ConfigError(f"{self.where}: {key} is {value!r}; it must be {rule}.")


_KEYS = [field.name for field in dataclasses.fields(SetDescription)][:-2]


def make_description(task: str, name: str, path: str = "", **values: Any) -> SetDescription:
    """Make a description, with the family's defaults for what is not given.

    `values` are further fields of `SetDescription`; `files` and `columns` replace single entries.
    """
    try:
        return SetDescription(name=name, task=task, path=path, **values)
    except ValidationError as error:
        found = error.errors(include_url=False)[0]
        cause = found.get("ctx", {}).get("error")
        if isinstance(cause, ConfigError):
            raise cause from None
        key = str(found["loc"][0])
        value = {"name": name, "task": task, **values}[key]
        rule = SetDescription.__pydantic_fields__[key].description  # type: ignore[attr-defined]
        where = path or f"the description of {name}"
        raise ConfigError(f"{where}: {key} is {value!r}; it must be {rule}.") from None


def list_shipped() -> dict[str, Path]:
    """Return the descriptions that ship with the package, by name."""
    return {path.stem: path for path in sorted(SETS.glob("*.yaml"))}


def find_set(task: str, data: str) -> tuple[SetDescription, str]:
    """Find a set's description and its folder or hub name, without reading its files.

    `data` is empty for a set whose files ship. A ConfigError says that there is no such task or path, or that the two
    do not go together.
    """
    ships = (SETS / task).is_dir()
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
    return description, place


def find_description(task: str, data: str) -> SetDescription:
    """Find what describes a labelled set.

    `task` is a family's name (then the set.yaml in the folder `data` counts, or else the family's defaults), the name
    of a shipped description, or the path of a YAML file.
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
    for key in values:
        if key not in _KEYS:
            near = difflib.get_close_matches(str(key), _KEYS, n=1)
            hint = f"did you mean {near[0]}? The keys are" if near else "use"
            raise ConfigError(f"{path}: {key!r} is no key of a description; {hint} {', '.join(_KEYS)}.")
    default_name = path.resolve().parent.name if path.name == SET_FILE else path.stem
    return make_description(**{"name": default_name, **values}, path=str(path))
