"""What a labelled set is like: its task family, files, columns, labels and metric, as a YAML describes them.

Enters: the values of a YAML's keys. Leaves: a `SetDescription`, each of whose fields is one that it may be.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass

from domext_ray.families.readers.examples import SPLITS
from domext_ray.files import ASSETS

Column: TypeAlias = str | int
"""A column's name, or its place in a table without header (negative: from the end)."""

SETS = ASSETS / "sets"
"""Descriptions that ship, and beside its description the folder of a set whose files ship."""
SET_FILE = "set.yaml"
"""Description that a folder of data may hold."""
DEFAULT_FILES: Mapping[str, tuple[str, ...]] = {
    "train": ("train.*",),
    "dev": ("devel.*", "dev.*", "validation.*", "valid.*", "val.*"),
    "test": ("test.*",),
}
BRAT_FILES: Mapping[str, tuple[str, ...]] = {
    "train": ("train", "."),
    "dev": ("dev", "devel", "validation", "valid", "val"),
    "test": ("test",),
}
"""Folders; one that has no folders of its own is a single split."""
SCHEMES = {
    **dict.fromkeys(("auto", "iob1", "iob2"), ""),
    **dict.fromkeys(("iobes", "bioes", "bmes"), "iobes"),
    **dict.fromkeys(("bilou", "bioul", "biolu", "biluo"), "bilou"),
}
"""Names of tag schemes, and what those that go by several names are here."""
WITH_PLACES = ("brat", "pubtator")
"""Readers of texts with notes on their entities, which have exclusive ends, and each a place in a file."""
RULES = ("squad_v1", "squad_v2", "cmrc")
"""How answers are compared: SQuAD 1.1's evaluation script, SQuAD 2.0's, or CMRC 2018's."""
OPTIONAL = ("id", "pair", "document", "stem", "is_impossible", "head", "tail")
"""Roles that a row may lack unless a description names their columns."""


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
    # its family's name
    task: _Text = _key()
    # the files' layout: conll, squad, records (a table, JSON or Parquet by the file's ending), label_columns (such with
    # a column of 0 and 1 per label), spans (such with entities by characters), pubtator, or brat (a folder per split)
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
    ends: Literal["auto", "inclusive", "exclusive"] = _key("one of auto, inclusive, exclusive", "auto")
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
    path: str = ""  # the YAML that describes it; "" if none does
    data: str = ""  # where it is: a folder, or a name on the hub
    required: tuple[str, ...] = ()  # roles that every row must have
    annotated: str = ""  # role of what annotation tools make; empty: such a set is not made with them
    ignored: tuple[str, ...] = ()  # those of `RETIRED` that the YAML has
    others: tuple[SetDescription, ...] = ()  # itself with each other reader of its family; empty where one is named

    @property
    def where(self) -> str:
        """What a message calls the description."""
        return self.path or f"the description of {self.name}"

    @property
    def yaml(self) -> str:
        """What a message tells the user to change, or to write."""
        new = f"{Path(self.data) / SET_FILE} (a new file, with task: {self.task})"
        if Path(self.path).parent == SETS:
            return f"a copy of {self.path}, named as --task"
        return self.path or (new if Path(self.data).is_dir() else "a YAML file that describes the set")

    def fill(self, **values: Any) -> SetDescription:
        """Return it with its family's values in the place of those that it left out."""
        filled = copy.copy(self)
        for key, value in values.items():
            object.__setattr__(filled, key, value)
        return filled


KEYS = [field.name for field in dataclasses.fields(SetDescription)][:-6]
"""Keys of a YAML."""
RETIRED = ("counts",)
"""Keys that 0.1.0 read, and that say nothing any more."""
