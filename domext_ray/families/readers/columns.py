"""Records whose values go by column -> rows whose values go by role.

A column of 0 and 1 per label becomes the list of a row's labels, as a set of several labels per text has it otherwise.
The description names those columns: one that a split lacks, or an index beside them, would pass for a guess.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from domext_ray.errors import CorpusError
from domext_ray.families.readers.cells import read_mark, read_nested
from domext_ray.families.readers.issues import DataIssues, Record, is_missing, shorten
from domext_ray.families.readers.set_description import Column, SetDescription

LABEL_COLUMNS = "label_columns"
"""What a description calls the reader of a column per label."""
GROUP = "group"
"""Beside the roles of columns: what says whose a row is."""
_NAMED_COLUMNS = 12
_ABSENT = object()
_LISTS = ("tokens", "tags", "entities", "triples", "label", "labels", "options", "answers", "terms")
"""Roles whose cell may spell a list."""
_STATUS, _ACCEPTED = "answer", "accept"
REJECTED = ("reject", "ignore")
"""What Prodigy has as the answer to a row, or a span, that its annotator has rejected or passed over."""


def _look_up(values: Mapping[Any, Any], name: Column) -> Any:
    """Return a column's value; "a.b" is also the part b of column a."""
    if name in values:
        return values[name]
    outer, _, inner = str(name).partition(".")
    part = values.get(outer)
    return _look_up(part, inner) if inner and isinstance(part, Mapping) else _ABSENT


def get_value(values: Mapping[Any, Any], names: tuple[Column, ...]) -> Any:
    """Return the value of the first of several columns that is there, or None."""
    found = (_look_up(values, name) for name in names)
    return next((value for value in found if value is not _ABSENT), None)


def find_missing(values: Mapping[Any, Any], description: SetDescription) -> str | None:
    """Return the first required role that none of a row's columns plays, or None."""
    for role in description.required:
        test = all if role == "options" else any
        if not test(_look_up(values, name) is not _ABSENT for name in description.columns[role]):
            return role
    return None


def lacks_column(source: str, columns: Iterable[Column], description: SetDescription) -> CorpusError:
    """Return the error for a file without a required column."""
    listed = list(columns)
    role = find_missing(dict.fromkeys(listed), description)
    assert role is not None
    wanted = (" and " if role == "options" else " or ").join(repr(name) for name in description.columns[role])
    shown = ", ".join(shorten(column, 40) for column in listed[:_NAMED_COLUMNS]) or "none"
    other = ", or reader: label_columns for a column of 0 and 1 per label," if role == "labels" else ""
    return CorpusError(
        f"{source} has no column {wanted} for {role!r}, only {shown}; set columns.{role}{other} in {description.yaml}."
    )


def select_columns(records: Iterable[Record], description: SetDescription, issues: DataIssues) -> Iterator[Record]:
    """Yield records whose values go by role; optional ones may be None.

    If the first row lacks a required column, the file has another layout: a CorpusError. Later ones are counted.
    """
    is_first = True
    for record in _drop_rejected(records, description, issues):
        missing = find_missing(record.values, description)
        if missing is not None and is_first:
            raise lacks_column(record.source, record.values, description)
        if is_first and description.reader == LABEL_COLUMNS:
            _check_label_columns(record, description)
        is_first = False
        if missing is not None:
            issues.add(record.source, "row", f"has no column for {missing!r}")
            continue
        values = {role: get_value(record.values, names) for role, names in description.columns.items()}
        if len(options := description.columns.get("options", ())) > 1:
            values["options"] = [_look_up(record.values, name) for name in options]
        if description.group_field != "":
            values[GROUP] = get_value(record.values, (description.group_field,))
        if description.reader == LABEL_COLUMNS:
            marks = {label: _find_mark(record.values.get(label)) for label in description.labels}
            wrong = next((label for label, mark in marks.items() if mark is None), None)
            if wrong is not None:
                issues.add(record.source, "row", f"has neither 0 nor 1 for {wrong!r}", record.values.get(wrong))
                continue
            values["labels"] = [label for label, mark in marks.items() if mark]
        if broken := _read_lists(values):
            issues.add(record.source, "row", f"has a list as {broken!r} that cannot be read", values[broken])
            continue
        yield Record(values, record.path, record.place)


def _drop_rejected(records: Iterable[Record], description: SetDescription, issues: DataIssues) -> Iterator[Record]:
    """Yield the records that an annotator accepted; those that Prodigy says were rejected or skipped are counted.

    It writes one of three words as `answer`. A column of that name that has others, or plays a role, is not Prodigy's.
    """
    listed = list(records)
    statuses = [record.values.get(_STATUS) for record in listed]
    has_role = any(_STATUS in names for names in description.columns.values())
    is_prodigy = not has_role and all(is_missing(status) or status in ("", _ACCEPTED, *REJECTED) for status in statuses)
    for record, status in zip(listed, statuses, strict=True):
        if is_prodigy and status in REJECTED:
            issues.add(record.source, "row", f"has the answer {status!r} of Prodigy")
        else:
            yield record


def _read_lists(values: dict[str, Any]) -> str:
    """Make lists of the cells that spell them; return the role of one that cannot be read, or an empty text."""
    for role in (key for key in _LISTS if key in values):
        try:
            values[role] = read_nested(values[role])
        except ValueError:
            return role
    return ""


def _check_label_columns(first: Record, description: SetDescription) -> None:
    """Refuse a file that has no column for a label, by its first row."""
    names = list(first.values)
    if any(isinstance(name, int) for name in names):
        raise CorpusError(f"{first.source} is a table without a header; a column per label needs its name there.")
    shown = ", ".join(map(str, names[:_NAMED_COLUMNS]))
    if not description.labels:
        raise CorpusError(
            f"{first.source} has the columns {shown}; name those that have 0 and 1 as labels in {description.yaml}."
        )
    missing = [label for label in description.labels if label not in first.values]
    if missing:
        raise CorpusError(
            f"{first.source} has no column for the label {missing[0]!r}, only {shown}; name those that it has as "
            f"labels in {description.yaml}."
        )


def _find_mark(value: Any) -> bool | None:
    """Return whether a cell says that the label is there; None: it says neither."""
    try:
        return read_mark(value)
    except ValueError:
        return None
