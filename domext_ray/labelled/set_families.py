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
SCHEMES = {
    **dict.fromkeys(("auto", "iob1", "iob2"), ""),
    **dict.fromkeys(("iobes", "bioes", "bmes"), "iobes"),
    **dict.fromkeys(("bilou", "bioul", "biolu", "biluo"), "bilou"),
}
"""Names of tag schemes, and what those that go by several names are here."""
ENDS = ("auto", "inclusive", "exclusive")
RULES = ("squad_v1", "squad_v2", "cmrc")
"""How answers are compared: SQuAD 1.1's evaluation script, SQuAD 2.0's, or CMRC 2018's."""


@dataclass(frozen=True)
class Family:
    """What the sets of a task family have in common.

    Args:
        readers: layouts that it can be read from; the first is the default.
        columns: names tried for what an example is made of, in order; all names together for "options".
        optional: columns that a set may lack.
        metrics: patterns of the paths that it is scored by.
        metric: default path that dev chooses by.
        separator: default of what stands between several values of one cell.
    """

    readers: tuple[str, ...]
    columns: Mapping[str, tuple[Column, ...]]
    optional: tuple[str, ...]
    metrics: tuple[str, ...]
    metric: str
    separator: str = "##"


_ENTITY_METRICS = ("f1.*", "precision.*", "recall.*")
_CLASS_METRICS = ("accuracy", "matthews", "f1.*", "precision.*", "recall.*")
_ID: dict[str, tuple[Column, ...]] = {"id": ("id",)}
_TEXT: dict[str, tuple[Column, ...]] = {"text": ("text", "sentence", "sentence1", "text1")}
_PAIR: dict[str, tuple[Column, ...]] = {"pair": ("pair", "sentence2", "text2")}
_TRIPLE: dict[str, tuple[Column, ...]] = {
    each: (each,) for each in ("predicate", "subject", "subject_type", "object", "object_type")
}
FAMILIES: Mapping[str, Family] = {
    "ner": Family(
        ("conll", "records"),
        {**_ID, "tokens": ("tokens", "words", 0), "tags": ("ner_tags", "tags", -1), "document": ("document", "doc_id")},
        ("id", "document"),
        _ENTITY_METRICS,
        "f1.micro",
    ),
    "nested_ner": Family(
        ("records",),
        {
            **_ID,
            "text": ("text",),
            "entities": ("entities",),
            "start": ("start_idx", "start"),
            "end": ("end_idx", "end"),
            "type": ("type", "label"),
            "mention": ("entity", "mention", "text"),
        },
        ("id", "start", "end", "type", "mention"),  # of an entity, not of a row
        _ENTITY_METRICS,
        "f1.micro",
    ),
    "relation": Family(
        ("records",),
        {**_ID, "text": ("text", "sentence"), "label": ("label",)},
        ("id",),
        _CLASS_METRICS,
        "f1.micro",
    ),
    "relation_extraction": Family(
        ("records",),
        {**_ID, "text": ("text",), "triples": ("spo_list", "triples"), **_TRIPLE},
        ("id", *_TRIPLE),  # of a triple, not of a row
        ("f1.*",),
        "f1.micro",
    ),
    "classification": Family(
        ("records",), {**_ID, **_TEXT, **_PAIR, "label": ("label",)}, ("id", "pair"), _CLASS_METRICS, "accuracy"
    ),
    "multilabel": Family(
        ("records", "label_columns"),
        {**_ID, **_TEXT, **_PAIR, "labels": ("labels", "label")},
        ("id", "pair"),
        ("accuracy", "f1.*", "precision.*", "recall.*"),
        "f1.micro",
        ",",
    ),
    "regression": Family(
        ("records",),
        {**_ID, **_TEXT, **_PAIR, "value": ("value", "score", "label")},
        ("id", "pair"),
        ("pearson", "spearman"),
        "spearman",
    ),
    "qa": Family(
        ("squad", "records"),
        {
            **_ID,
            "question": ("question",),
            "context": ("context",),
            "answers": ("answers",),
            "is_impossible": ("is_impossible",),
        },
        ("id", "is_impossible"),
        ("f1", "exact", "has_answer.*", "no_answer.*"),
        "f1",
    ),
    "multiple_choice": Family(
        ("records",),
        {
            **_ID,
            "context": ("context", "sent1"),
            "stem": ("stem", "sent2"),
            "options": ("ending0", "ending1", "ending2", "ending3"),
            "answer": ("answer", "label"),
        },
        ("id", "stem"),
        ("accuracy",),
        "accuracy",
    ),
    "normalization": Family(
        ("records",),
        {**_ID, "text": ("text",), "terms": ("terms", "normalized_result")},
        ("id",),
        ("f1.*", "accuracy", "precision.*", "recall.*"),
        "f1.micro",
    ),
}
