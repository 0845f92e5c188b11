"""What a kind of tasks is, whatever its set: layouts of files, columns, and the figures that it is scored by.

A family is a class in a file of its own, which the registry lists. Sets, options, exports and pages ask it; a task, one
of its instances, is the family over one labelled set and one tokenizer (`task.py`).
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping
from typing import ClassVar

from domext_ray.families.readers.set_description import Column

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
