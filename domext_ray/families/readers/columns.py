"""Records whose values go by column -> rows whose values go by role.

A column of 0 and 1 per label becomes the list of a row's labels, as a set of several labels per text has it otherwise.
The description names those columns: one that a split lacks, or an index beside them, would pass for a guess.
"""

from __future__ import annotations

import contextlib
import fnmatch
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from domext_ray.errors import CorpusError
from domext_ray.families.readers.cells import is_missing, read_mark, read_nested, shorten
from domext_ray.families.readers.issues import DataIssues, Record
from domext_ray.families.readers.set_description import Column, SetDescription

LABEL_COLUMNS = "label_columns"
"""What a description calls the reader of a column per label."""
GROUP = "group"
"""Beside the roles of columns: what says whose a row is."""
_NAMED_COLUMNS = 12
_ABSENT = object()
_LISTS = ("tokens", "tags", "entities", "triples", "label", "labels", "options", "answers", "terms")
"""Roles whose cell may spell a list."""
_BESIDE = {"pair": "a second text", "stem": "a question beside the context"}
"""Roles of texts that a row may lack, and what plays them."""
_SEEN_ROWS, _FEWEST_WORDS, _FEWEST_SIGNS = 50, 4, 20
"""Rows that show which columns have texts, and words of a text, or characters of one without spaces."""
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
    return next(_list_missing(values, description), None)


def _list_missing(values: Mapping[Any, Any], description: SetDescription) -> Iterator[str]:
    for role in description.required:
        test = all if role == "options" else any
        if not test(_look_up(values, name) is not _ABSENT for name in description.columns[role]):
            yield role


def lacks_column(
    source: str, columns: Iterable[Column], description: SetDescription, *, is_table: bool = False
) -> CorpusError:
    """Return the error for a file without required columns; a table may have no header."""
    listed = list(columns)
    places = range(-len(listed), len(listed)) if is_table else ()
    missing = list(_list_missing(dict.fromkeys([*listed, *places]), description))
    if is_table and len(listed) < len(description.required):
        return CorpusError(
            f"{source} has a single column, {shorten(listed[0], 40)}, where {description.task} needs one each for "
            f"{' and '.join(map(repr, description.required))}; write JSON Lines or a table with these."
        )
    wanted = ", and none of ".join(
        f"{(' and ' if role == 'options' else ' or ').join(map(repr, description.columns[role]))} for {role!r}"
        for role in missing
    )
    shown = ", ".join(shorten(column, 40) for column in listed[:_NAMED_COLUMNS]) or "none"
    given = ", ".join(f"{role}: NAME" for role in missing)
    other = ", or reader: label_columns for a column of 0 and 1 per label," if "labels" in missing else ""
    rules = [f"and {role}: NAME if it has {what}" for role, what in _BESIDE.items() if role in description.columns]
    has_none = is_table and missing == [*description.required]
    rules += ["with places from 0 as names if the first line is a row"] if has_none else []
    rules += ["or files: {test: []} if it has no labels"] if _is_test(source, description) else []
    cure = ", ".join([f"write columns: {{{given}}}{other} in {description.yaml}", *rules])
    return CorpusError(f"{source} has no column {wanted}, only {shown}; {cure}.")


def _is_test(source: str, description: SetDescription) -> bool:
    """Whether a place, FILE:LINE or DATASET/SPLIT:ROW, is of the set's test."""
    name, patterns = source.rpartition(":")[0].rpartition("/")[2], description.files["test"]
    return any(fnmatch.fnmatch(each, pattern) for each in (name, f"{name}.") for pattern in patterns)


def require_one_each(source: str, names: Sequence[str], description: SetDescription) -> None:
    """Refuse a header that has a column twice which is read."""
    read = {next((name for name in own if name in names), "") for own in description.columns.values()}
    read |= {*description.columns.get("options", ()), description.group_field}
    read |= {*description.labels} if description.reader == LABEL_COLUMNS else set()
    for name, number in Counter(names).items():
        if number > 1 and name and name in read:
            raise CorpusError(f"{source} has the column {name!r} {number} times; give each its own name.")


def select_columns(records: Iterable[Record], description: SetDescription, issues: DataIssues) -> Iterator[Record]:
    """Yield records whose values go by role; optional ones may be None.

    If the first row lacks a required column, the file has another layout: a CorpusError. Later ones are counted, and so
    are those that an annotator has rejected or skipped, for which Prodigy writes a word as `answer`. A column of that
    name that has other words, or plays a role, is not Prodigy's.
    """
    listed = list(records)
    _tell_unread(listed[:_SEEN_ROWS], description, issues)
    statuses = [record.values.get(_STATUS) for record in listed]
    has_role = any(_STATUS in names for names in description.columns.values())
    is_prodigy = not has_role and all(is_missing(status) or status in ("", _ACCEPTED, *REJECTED) for status in statuses)
    is_first = True
    for record, status in zip(listed, statuses, strict=True):
        if is_prodigy and status in REJECTED:
            values, fault, detail = dict[str, Any](), f"has the answer {status!r} of Prodigy", ""
        else:
            if is_first:
                _check_first(record, description)
            is_first = False
            values, fault, detail = _read_roles(record, description)
        if fault:
            issues.add(record.source, "row", fault, detail)
        else:
            yield Record(values, record.path, record.place)


def _tell_unread(records: Sequence[Record], description: SetDescription, issues: DataIssues) -> None:
    """Say which columns have texts that nothing reads, where a row may have another text than it has."""
    role = next((own for own in _BESIDE if own in description.columns), None)
    first = records[0].values if records else {}
    if role is None or get_value(first, description.columns[role]) is not None:
        return
    chosen = (next((name for name in own if name in first), None) for own in description.columns.values())
    read = {*chosen, *description.columns.get("options", ()), description.group_field, *description.labels}
    for name in first:
        texts = sum(_is_text(record.values.get(name)) for record in records)
        if isinstance(name, str) and name not in read and 2 * texts > len(records):
            issues.say_once(
                f"The column {name!r} of {description.data} has texts and is not read; if it is {_BESIDE[role]}, write "
                f"columns: {{{role}: {name}}} in {description.yaml}."
            )


def _is_text(value: object) -> bool:
    """Whether a value is a sentence, rather than a name, a number or a date."""
    is_spaceless = isinstance(value, str) and not value.isascii() and " " not in value and len(value) >= _FEWEST_SIGNS
    return is_spaceless or (isinstance(value, str) and sum(map(str.isalpha, value.split())) >= _FEWEST_WORDS)


def _read_roles(record: Record, description: SetDescription) -> tuple[dict[str, Any], str, Any]:
    """Return a row's values by role; and of one that cannot be used why, as it follows "the row", and what shows it."""
    if (missing := find_missing(record.values, description)) is not None:
        return {}, f"has no column for {missing!r}", ""
    values = {role: get_value(record.values, names) for role, names in description.columns.items()}
    if len(options := description.columns.get("options", ())) > 1:
        values["options"] = [_look_up(record.values, name) for name in options]
    if description.group_field != "":
        values[GROUP] = get_value(record.values, (description.group_field,))
    if description.reader == LABEL_COLUMNS:
        marks = dict[str, bool | None]()
        for label in description.labels:
            with contextlib.suppress(ValueError):
                marks[label] = read_mark(record.values.get(label))
            if marks.get(label) is None:
                return {}, f"has neither 0 nor 1 for {label!r}", record.values.get(label)
        values["labels"] = [label for label, mark in marks.items() if mark]
    for role in (key for key in _LISTS if key in values):
        try:
            values[role] = read_nested(values[role])
        except ValueError:
            return {}, f"has a list as {role!r} that cannot be read", values[role]
    choices = values[description.annotated] if description.annotated else None
    choices = choices.get("choices") if isinstance(choices, Mapping) else None
    if isinstance(choices, list | tuple):  # of Label Studio
        if description.annotated == "label" and len(choices) > 1:
            return {}, "has several choices, of which a class is one (--task multilabel takes them all)", choices
        values[description.annotated] = choices if description.annotated == "labels" else next(iter(choices), None)
    return values, "", ""


def _check_first(first: Record, description: SetDescription) -> None:
    """Refuse a file whose first row lacks a required column, or the column of a label."""
    names = list(first.values)
    if find_missing(first.values, description) is not None:
        raise lacks_column(first.source, names, description)
    if description.reader != LABEL_COLUMNS:
        return
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
