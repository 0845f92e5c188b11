"""What the labelled sets of each task family have in common: layouts, columns and metrics.

Leaves: `FAMILIES`, whose defaults a set's description may replace.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

Column: TypeAlias = str | int
"""A column's name, or its place in a table without header (negative: from the end)."""

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
ENDS = ("auto", "inclusive", "exclusive")
RULES = ("squad_v1", "squad_v2", "cmrc")
"""How answers are compared: SQuAD 1.1's evaluation script, SQuAD 2.0's, or CMRC 2018's."""
OPTIONAL = ("id", "pair", "document", "stem", "is_impossible")
"""Roles that a row may lack unless a description names their columns."""


@dataclass(frozen=True)
class Family:
    """What the sets of a task family have in common."""

    readers: Mapping[str, tuple[str, ...]]  # layouts, with the roles that every row must have; the first is the default
    columns: Mapping[str, tuple[Column, ...]]  # names tried for each role, in order; "options" is all of its names
    metrics: tuple[str, ...]  # patterns of the paths that it is scored by
    metric: str  # default path that dev chooses by
    separator: str = "##"  # default between several values of one cell


_ENTITY_METRICS = ("f1.*", "precision.*", "recall.*")
_CLASS_METRICS = ("accuracy", "matthews", "f1.*", "precision.*", "recall.*")
_ID: dict[str, tuple[Column, ...]] = {"id": ("id",)}
_TEXTS: dict[str, tuple[Column, ...]] = {
    **_ID,
    "text": ("text", "sentence", "sentence1", "text1"),
    "pair": ("pair", "sentence2", "text2"),
}
_SPANS: dict[str, tuple[Column, ...]] = {
    "text": ("text",),
    "entities": ("entities", "spans", "label", "labels"),
    "start": ("start_idx", "start", "start_offset"),
    "end": ("end_idx", "end", "end_offset"),
    "type": ("type", "label", "labels"),
    "mention": ("entity", "mention", "text"),
}
_TRIPLE: dict[str, tuple[Column, ...]] = {
    role: (role,) for role in ("predicate", "subject", "subject_type", "object", "object_type")
}
_OPTIONS: tuple[Column, ...] = ("ending0", "ending1", "ending2", "ending3")
FAMILIES: Mapping[str, Family] = {
    "ner": Family(
        {"conll": ("tokens", "tags"), "records": ("tokens", "tags"), "spans": ("text", "entities"), "brat": ()},
        {
            **_ID,
            "tokens": ("tokens", "words", 0),
            "tags": ("ner_tags", "tags", -1),
            "document": ("document", "doc_id"),
            **_SPANS,
        },
        _ENTITY_METRICS,
        "f1.micro",
    ),
    "nested_ner": Family({"records": ("text", "entities"), "brat": ()}, {**_ID, **_SPANS}, _ENTITY_METRICS, "f1.micro"),
    "relation": Family(
        {"records": ("text", "label")},
        {**_ID, "text": ("text", "sentence"), "label": ("label",)},
        _CLASS_METRICS,
        "f1.micro",
    ),
    "relation_extraction": Family(
        {"records": ("text", "triples")},
        {**_ID, "text": ("text",), "triples": ("spo_list", "triples"), **_TRIPLE},
        ("f1.*",),
        "f1.micro",
    ),
    "classification": Family(
        {"records": ("text", "label")}, {**_TEXTS, "label": ("label", "accept")}, _CLASS_METRICS, "accuracy"
    ),
    "multilabel": Family(
        {"records": ("text", "labels"), "label_columns": ("text",)},
        {**_TEXTS, "labels": ("labels", "label", "accept")},
        ("accuracy", "f1.*", "precision.*", "recall.*"),
        "f1.micro",
        ",",
    ),
    "regression": Family(
        {"records": ("text", "value")},
        {**_TEXTS, "value": ("value", "score", "label")},
        ("pearson", "spearman"),
        "spearman",
    ),
    "qa": Family(
        dict.fromkeys(("squad", "records"), ("question", "context", "answers")),
        {**_ID, **{role: (role,) for role in ("question", "context", "answers", "is_impossible")}},
        ("f1", "exact", "has_answer.*", "no_answer.*"),
        "f1",
    ),
    "multiple_choice": Family(
        {"records": ("context", "options", "answer")},
        {
            **_ID,
            "context": ("context", "sent1"),
            "stem": ("stem", "sent2"),
            "options": _OPTIONS,
            "answer": ("answer", "label"),
        },
        ("accuracy",),
        "accuracy",
    ),
    "normalization": Family(
        {"records": ("text", "terms")},
        {**_ID, "text": ("text",), "terms": ("terms", "normalized_result")},
        ("f1.*", "accuracy", "precision.*", "recall.*"),
        "f1.micro",
    ),
}
