"""A column of 0 and 1 per label -> a list of labels per row, as a set of several labels a text has it otherwise.

Enters: the records of a table with a header, of JSON or of a dataset, as they were read. Leaves: records with the value
"labels". The description names them: a column that one split lacks, or an index beside them, would pass for a guess.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from domext_ray.errors import CorpusError
from domext_ray.labelled.readers.files import Dirt, Record, as_whole
from domext_ray.labelled.readers.records import find_missing_role, lacks_column
from domext_ray.labelled.set_description import SetDescription

LABEL_COLUMNS = "label_columns"
"""What a description calls this reader."""
_SHOWN_COLUMNS = 12


def gather_labels(records: Iterable[Record], description: SetDescription, dirt: Dirt) -> Iterator[Record]:
    """Yield records with the labels whose columns hold 1; the description's `labels` name the columns."""
    for number, record in enumerate(records):
        if number == 0:
            _check_columns(record, description)
        marks = {label: _read_mark(record.values.get(label)) for label in description.labels}
        wrong = next((label for label, mark in marks.items() if mark is None), None)
        if wrong is not None:
            dirt.add(record.source, "row", f"has neither 0 nor 1 for {wrong!r}", record.values.get(wrong))
            continue
        found = [label for label, mark in marks.items() if mark]
        yield Record({**record.values, "labels": found}, record.path, record.line)


def _check_columns(first: Record, description: SetDescription) -> None:
    """Refuse a file that has no column for the text or for a label, by its first row."""
    names = list(first.values)
    if any(isinstance(each, int) for each in names):
        raise CorpusError(f"{first.source} is a table without a header; a column per label needs its name there.")
    if find_missing_role(first.values, description) is not None:
        raise lacks_column(first.source, first.values, description)
    shown = ", ".join(map(str, names[:_SHOWN_COLUMNS]))
    if not description.labels:
        raise CorpusError(
            f"{first.source} has the columns {shown}; name those that have 0 and 1 as labels in {description.yaml}."
        )
    missing = [each for each in description.labels if each not in first.values]
    if missing:
        raise CorpusError(
            f"{first.source} has no column for the label {missing[0]!r}, only {shown}; name those that it has as "
            f"labels in {description.yaml}."
        )


def _read_mark(value: Any) -> bool | None:
    """Return whether a cell says that the label is there; None: it says neither."""
    value = as_whole(value)
    text = value.strip().lower() if isinstance(value, str) else str(int(value)) if isinstance(value, int) else ""
    return {"1": True, "true": True, "0": False, "false": False}.get(text)
