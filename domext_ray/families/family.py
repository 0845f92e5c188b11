"""What a kind of tasks is, whatever its set: layouts of files, columns, and the figures that it is scored by.

A family is a class in a file of its own, which the registry lists. Sets, options, exports and pages ask it; a task, one
of its instances, is the family over one labelled set and one tokenizer (`task.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import pyarrow as pa

from domext_ray.config.options.declare import require
from domext_ray.families.comparison import Compared
from domext_ray.families.readers.examples import Entity, Example
from domext_ray.families.readers.issues import DataIssues, SetRow
from domext_ray.families.readers.set_description import Column
from domext_ray.families.state import NOTHING_LEARNED, State

Prediction: TypeAlias = dict[str, Any]
"""What is said of an example, JSON-able: a family's fields for users (`Family.fields`), and what scoring needs.

Places are characters of the example's text, ends exclusive. Scores are not rounded.
"""
SplitRows: TypeAlias = Mapping[str, Sequence[SetRow]]
"""Rows by split."""
Fields: TypeAlias = Mapping[str, pa.DataType]

Columns = Mapping[str, tuple[Column, ...]]

ENTITY_METRICS = ("f1.*", "precision.*", "recall.*")
CLASS_METRICS = ("accuracy", "matthews", *ENTITY_METRICS)
ID: Columns = {"id": ("id",)}
TEXTS: Columns = {
    **ID,
    "text": ("text", "sentence", "sentence1", "text1"),
    "pair": ("pair", "sentence2", "text2"),
}
SPANS: Columns = {
    "text": ("text",),
    "entities": ("entities", "spans", "label", "labels"),
    "start": ("start_idx", "start", "start_offset"),
    "end": ("end_idx", "end", "end_offset"),
    "type": ("type", "label", "labels"),
    "mention": ("entity", "mention", "text"),
}
PLACE: Fields = {"start": pa.int64(), "end": pa.int64(), "label": pa.string(), "text": pa.string()}
ENTITY_LIST = pa.list_(pa.struct({**PLACE, "score": pa.float64()}))


class Family(ABC):
    """A kind of tasks."""

    family: ClassVar[str]  # its name
    readers: ClassVar[Mapping[str, tuple[str, ...]]]
    """Layouts of files, with the roles that every row must have; the first is the default."""
    columns: ClassVar[Columns]
    """Names that are tried for each role, in order; "options" is all of its names."""
    metrics: ClassVar[tuple[str, ...]]
    """Patterns of the paths of figures that it is scored by."""
    metric: str
    """Path of the figure that dev chooses by, such as "f1.micro"; higher is better."""
    separator: ClassVar[str] = "##"
    """Between several values of one cell, where a set does not say."""
    rules: ClassVar[tuple[str, ...]] = ()
    """How answers may be compared: the first where each question has one, the second where some have none."""
    needed: ClassVar[tuple[tuple[str, ...], ...]] = (("text",),)
    """Roles of what a row without labels must have, of each group one."""
    annotated: ClassVar[str] = ""
    """Role of what annotation tools make of a text; empty: such sets are not made with them."""
    side_file: ClassVar[str] = ""
    """Key of the description that names a file beside the splits; empty: there is none."""
    reads_by_side: ClassVar[bool] = False
    """Whether rows are read by what that file says, so that a split alone needs it, too."""
    fields: ClassVar[Fields]
    """What users read of a prediction, and its type."""
    weighs_labels: ClassVar[bool] = False
    """Whether they also read "probabilities", by label."""
    cuts_texts: ClassVar[bool] = False
    """Whether a single text that is too long is cut, or read in windows, as `TaskOptions.long_texts` says."""
    found: ClassVar[str] = ""
    """Field that has the labels that were found; empty: there are none."""
    head: ClassVar[str]
    """Name of the head's class in model/heads_domext.py; of a task of several models none."""
    hub_task: ClassVar[str]
    """What the hub calls such a task."""
    outputs: ClassVar[tuple[str, ...]] = ()
    """Names of the head's outputs in order; empty: those are labels of the set."""

    @classmethod
    def check_long_texts(cls, option: str, value: str) -> None:
        """Refuse windows with a family that does not cut single texts."""
        rule = f"left out with a task of the family {cls.family}, which cuts no single texts"
        require(value != "windows" or cls.cuts_texts, option, value, rule)

    @classmethod
    @abstractmethod
    def read(cls, row: SetRow) -> Example:
        """Make a row's example, without its id: with its labels, if the row has them (`SetRow.is_labelled`).

        Where the row breaks a rule it is counted and `LeftOut` is raised, or it is refused: as its issues have it.
        """

    @classmethod
    def read_together(cls, splits: SplitRows, issues: DataIssues) -> SplitRows:
        """Return the rows of all splits with what no row shows alone; default: as they are."""
        return splits

    @classmethod
    def begin_split(cls, rows: Sequence[SetRow], side: Any) -> tuple[Sequence[SetRow], Callable[[SetRow], Example]]:
        """Return a split's rows with what no row shows alone, and what reads each; `side` is of `read_side`."""
        return rows, cls.read

    @classmethod
    def read_side(cls, path: Path) -> Any:
        """Read the `side_file`."""
        raise NotImplementedError

    @classmethod
    def name_labels(cls, side: Any) -> tuple[str, ...]:
        """Return the labels that the `side_file` names. Default: none."""
        return ()

    @classmethod  # noqa: B027
    def check_set(cls, splits: Mapping[str, Sequence[Any]], side: Any, issues: DataIssues) -> None:
        """Refuse, or count, what no example shows alone. Default: nothing."""

    @classmethod
    def list_outputs(cls, labels: tuple[str, ...]) -> tuple[str, ...]:
        """Return the names of the head's outputs in order, given a set's labels."""
        return cls.outputs or labels

    @property
    def names_outputs(self) -> bool:
        """Whether the head's outputs are labels of the set."""
        return not self.outputs

    @classmethod
    def adopt(cls, labels: tuple[str, ...], problem_type: str | None) -> dict[str, Any] | None:
        """Return labels, state and thresholds of a head that came with the names of its outputs alone.

        None: such a head is another family's, as it is by default.
        """
        return None

    @classmethod
    def list_shown(cls) -> tuple[str, ...]:
        """Return the fields of a prediction that users read."""
        return (*cls.fields, *(("probabilities",) if cls.weighs_labels else ()))

    @classmethod
    def list_found(cls, record: Mapping[str, Any]) -> list[str]:
        """Return the labels that a record has, each as often as it has it."""
        found = record[cls.found] if cls.found else None
        if isinstance(found, list):
            return [item["label"] if isinstance(item, dict) else item for item in found]
        return [] if found is None else [str(found)]

    @classmethod
    @abstractmethod
    def compare(cls, example: Any, prediction: Prediction, state: State = NOTHING_LEARNED) -> Compared:
        """Compare a prediction with an example's labels; `state` is what its task learned from its set."""


def describe_entity(text: str, entity: Entity, score: float | None = None) -> Prediction:
    """Return an entity's start, end, label and text, and its score if it has one."""
    values = {"start": entity.start, "end": entity.end, "label": entity.label, "text": text[entity.start : entity.end]}
    return values if score is None else {**values, "score": float(score)}


def read_entity(values: Prediction) -> Entity:
    """Return the entity that `describe_entity` described."""
    return Entity(values["start"], values["end"], values["label"])
