"""Texts and pairs of texts with a class or a number -> examples.

Enters: rows of a table or of JSON (GLUE, SciCite, PubMedQA, CBLUE, or a user's own columns). Leaves: `LabelledText`s.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from domext_ray.labelled.examples import LabelledText
from domext_ray.labelled.readers.files import Dirt, Ids, Record, check_label, check_text
from domext_ray.labelled.set_description import SetDescription


def make_classified(records: Iterable[Record], description: SetDescription, dirt: Dirt) -> list[LabelledText]:
    """Make texts, or pairs, with a class.

    Args:
        records: their values by role; a pair is optional unless the description names its column.
        description: the set's.
        dirt: counts rows without text or class.
    """
    ids = Ids()
    made = []
    for record in records:
        texts = _check_texts(record, description, dirt)
        label = check_label(record, dirt, description.labels) if texts is not None else None
        if texts is not None and label is not None:
            made.append(LabelledText(ids.make(record.values["id"]), record.source, *texts, label))
    return made


def make_valued(records: Iterable[Record], description: SetDescription, dirt: Dirt) -> list[LabelledText]:
    """Make texts, or pairs, with a number.

    Args:
        records: their values by role.
        description: the set's.
        dirt: counts rows without text or finite number.
    """
    ids = Ids()
    made = []
    for record in records:
        texts = _check_texts(record, description, dirt)
        if texts is None:
            continue
        value = _to_number(record.values["value"])
        if value is None:
            dirt.add(record.source, "row", "has no finite number", record.values["value"])
        else:
            made.append(LabelledText(ids.make(record.values["id"]), record.source, *texts, "", value))
    return made


def _check_texts(record: Record, description: SetDescription, dirt: Dirt) -> tuple[str, str | None] | None:
    text = check_text(record, "text", dirt)
    if text is None:
        return None
    if "pair" not in description.required and record.values["pair"] is None:
        return text, None
    pair = check_text(record, "pair", dirt)
    return None if pair is None else (text, pair)


def _to_number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None
