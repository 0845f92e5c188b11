"""Raw records -> unlabelled examples of a family, which its task encodes and decodes.

A record is a JSON object, or a row of a table. Its fields have the names that labelled sets of the family have, and it
is read as their rows are, without labels:

    ner                                                   text, or tokens (a list of words)
    nested_ner, relation_extraction, normalization        text
    classification, multilabel, regression                text, and pair where the model reads pairs
    relation                                              text with the two arguments marked as in the set, or text
                                                          with head and tail, each {"start": …, "end": …}
    qa                                                    question, context
    multiple_choice                                       context, options (a list, or ending0, ending1, …), and stem

`id` is optional. Other fields are left alone.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeAlias

from domext_ray.errors import CorpusError
from domext_ray.families.described_sets import make_description
from domext_ray.families.readers.cells import is_missing, read_nested
from domext_ray.families.readers.examples import Example
from domext_ray.families.readers.issues import UNLABELLED, DataIssues, Record, SetRow
from domext_ray.families.readers.set_description import SetDescription
from domext_ray.families.registry import FAMILIES
from domext_ray.families.state import NOTHING_LEARNED, State

RawRecord: TypeAlias = Mapping[str, Any]

_REFUSALS = DataIssues(is_strict=True, refusal=UNLABELLED)
_PAIR_NAMES = {"text": ("text_a",), "pair": ("text_b",)}


def make_example(family: str, record: RawRecord, source: str, state: State = NOTHING_LEARNED) -> Example:
    """Make an unlabelled example; a CorpusError says that the record is none.

    `source` is FILE:PLACE, or what else a message calls it, and the id of a record that has none; `state` is what the
    model's task learned from its set.
    """
    if not isinstance(record, Mapping):
        raise CorpusError(f"{source} is {type(record).__name__}; it must be an object with the fields of {family}.")
    fields = name_roles(family)
    values = {**record, **{role: _find(record, role, names) for role, names in fields.items()}}
    row = SetRow(Record(values, source, 0), _describe(family), _REFUSALS, fields, state)
    given = record.get("id")
    return replace(FAMILIES[family].read(row), id=source if is_missing(given) or given == "" else str(given))


@functools.cache
def _describe(family: str) -> SetDescription:
    return make_description(family, family)


@functools.cache
def name_roles(family: str) -> Mapping[str, tuple[str, ...]]:
    """Return the names that a record's fields may have, by role."""
    known = FAMILIES[family].columns
    roles = {role: tuple(name for name in names if isinstance(name, str)) for role, names in known.items()}
    return {
        role: tuple(dict.fromkeys((role, *names, *(_PAIR_NAMES.get(role, ()) if "pair" in known else ()))))
        for role, names in roles.items()
    }


def _find(record: RawRecord, role: str, names: tuple[str, ...]) -> Any:
    """Return what is in the first field of a role that is there; a list of options may have a field each."""
    value = next((record[name] for name in names if not is_missing(record.get(name))), None)
    if role == "options" and is_missing(record.get(role)):
        return [record[name] for name in names if name != role and name in record]
    if role not in ("options", "tokens"):
        return value
    try:
        return read_nested(value)
    except ValueError:  # whoever wants a list refuses it
        return value


def list_fields(family: str) -> tuple[str, ...]:
    """Return the names of all fields that an example of a family may be made of, "text" and "id" apart."""
    names = {name for own in name_roles(family).values() for name in own}
    return tuple(sorted(names - {"id", "text"}))


def list_needed(family: str, text: str) -> tuple[tuple[str, ...], ...]:
    """Return the names of the fields that an example of a family needs, of each group one.

    `text` is the field that plays the part of "text"; another one than that is needed itself.
    """
    known = name_roles(family)
    groups = [tuple(name for role in roles for name in known[role]) for roles in FAMILIES[family].needed]
    return tuple((text,) if "text" in group and text != "text" else group for group in groups)
