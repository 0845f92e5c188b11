"""Texts with nested entities, and with triples, -> entities and relations by characters.

Enters: rows of CMeEE (a text, and entities with start, end, type and the entity's own text) or CMeIE and DuIE (a text,
and triples of a subject, a predicate and an object with one or more parts). Leaves: `AnnotatedText`s. An entity whose
offsets do not give its text, and a triple that the text has not, are counted in `Dirt`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from domext_ray.errors import CorpusError
from domext_ray.labelled.examples import AnnotatedText, Entity, Relation
from domext_ray.labelled.readers.files import Dirt, Record, check_text
from domext_ray.labelled.readers.records import as_objects, get_value, read_json_records
from domext_ray.labelled.set_description import SetDescription

MAIN_PART = "@value"
"""The part of a triple's object that every object has."""
Schema = dict[tuple[str, str], frozenset[tuple[str, str]]]
"""For each predicate and part of its object, the allowed (subject type, object type)s."""


def make_nested(record: Record, description: SetDescription, dirt: Dirt) -> AnnotatedText | None:
    """Make a text with entities, which may nest and overlap.

    The description's `ends` says whether an end is inclusive; with "auto" each entity's own text tells. Entities that
    are not where their offsets say are counted; one without type or offsets is another layout: a CorpusError.
    """
    text = check_text(record, "text", dirt, is_stripped=False)
    listed = _list_objects(record, "entities")
    if text is None:
        return None
    found = {each for values in listed if (each := _read_entity(values, text, record, description, dirt))}
    return AnnotatedText("", record.source, text, tuple(sort_entities(found)))


def _list_objects(record: Record, role: str) -> list[dict[str, Any]]:
    listed = as_objects(record.values[role] or [])
    if listed is None:
        raise CorpusError(f"{record.source} has another layout: its {role} must be a list of objects.")
    return listed


def sort_entities(entities: Iterable[Entity]) -> list[Entity]:
    """Return entities in the order of start, end and label."""
    return sorted(entities, key=lambda each: (each.start, each.end, each.label))


def _read_entity(
    values: Mapping[str, Any], text: str, record: Record, description: SetDescription, dirt: Dirt
) -> Entity | None:
    start, end, kind = (get_value(values, description.columns[role]) for role in ("start", "end", "type"))
    if not all(isinstance(each, int) and not isinstance(each, bool) for each in (start, end)):
        raise CorpusError(f"{record.source} has an entity without whole numbers as start and end; set columns.start.")
    if not isinstance(kind, str) or not kind.strip():
        raise CorpusError(f"{record.source} has an entity without a type; set columns.type.")
    mention: str | None = get_value(values, description.columns["mention"])
    ends = {"inclusive": (end + 1,), "exclusive": (end,), "auto": (end + 1, end)}[description.ends]
    if not isinstance(mention, str):
        if description.ends == "auto":
            raise CorpusError(
                f"{record.source} has an entity without its own text, which tells whether ends are inclusive; set ends "
                "to inclusive or exclusive."
            )
        mention = None
    for each in ends:
        if 0 <= start < each <= len(text) and mention in (None, text[start:each]):
            return Entity(start, each, kind.strip())
    dirt.add(record.source, "entity", "is not where its offsets say", (start, end, mention))
    return None


def read_schema(path: Path) -> Schema:
    """Read the predicates and the types of their arguments, in the file's order.

    Its rows are {subject_type, predicate, object_type}; object_type may be an object by part.
    """
    schema: dict[tuple[str, str], set[tuple[str, str]]] = {}
    for record in read_json_records(path):
        predicate, subject_type, object_type = (
            record.values.get(each) for each in ("predicate", "subject_type", "object_type")
        )
        parts = object_type if isinstance(object_type, dict) else {MAIN_PART: object_type}
        if not all(isinstance(each, str) for each in (predicate, subject_type, *parts.values())):
            raise CorpusError(f"{record.source} must have texts as predicate, subject_type and object_type.")
        for part, kind in parts.items():
            schema.setdefault((str(predicate), part), set()).add((str(subject_type), str(kind)))
    if not schema:
        raise CorpusError(f"{path} has no predicate; give a schema with one object a line.")
    return {key: frozenset(types) for key, types in schema.items()}


def name_relation(predicate: str, part: str) -> str:
    """Return the label of the relation to a part of an object: the predicate, for further parts "predicate.part"."""
    return predicate if part == MAIN_PART else f"{predicate}.{part}"


def make_extraction(
    record: Record, description: SetDescription, dirt: Dirt, schema: Schema | None
) -> AnnotatedText | None:
    """Make a text with relations; subjects and objects are located where they first occur.

    Triples that the text has not, or the schema (None: all are allowed), are counted.
    """
    text = check_text(record, "text", dirt, is_stripped=False)
    triples = _list_objects(record, "triples")
    if text is None:
        return None
    found = {
        relation: None
        for values in triples
        for relation in _read_triple(values, text, record, description, dirt, schema)
    }
    relations = sorted(found, key=lambda r: (r.head.start, r.head.end, r.tail.start, r.tail.end, r.label))
    entities = sort_entities({each for relation in relations for each in (relation.head, relation.tail)})
    return AnnotatedText("", record.source, text, tuple(entities), tuple(relations))


def _read_triple(
    values: Mapping[str, Any],
    text: str,
    record: Record,
    description: SetDescription,
    dirt: Dirt,
    schema: Schema | None,
) -> list[Relation]:
    """Return one relation for each part of the object that the text and the schema have."""
    predicate, subject, subject_type, target, target_type = (
        get_value(values, description.columns[role])
        for role in ("predicate", "subject", "subject_type", "object", "object_type")
    )
    parts = target if isinstance(target, dict) else {MAIN_PART: target}
    types = target_type if isinstance(target_type, dict) else {MAIN_PART: target_type}
    if not all(isinstance(each, str) for each in (predicate, subject, parts.get(MAIN_PART))):
        raise CorpusError(f"{record.source} has a triple without texts as predicate, subject and object.")
    made = []
    for part, mention in parts.items():
        if mention is None or mention == "":  # datasets fill the parts that an object has not
            continue
        kinds = (str(subject_type or ""), str(types.get(part) or ""))
        shown = (subject, predicate, mention)
        if schema is not None and kinds not in schema.get((predicate, part), ()):
            dirt.add(record.source, "triple", "is not allowed by the schema", (*shown, *kinds))
            continue
        head, tail = _locate(text, subject, kinds[0]), _locate(text, mention, kinds[1])
        if head is None or tail is None:
            dirt.add(record.source, "triple", "is not in the text", shown)
            continue
        made.append(Relation(head, tail, name_relation(predicate, part)))
    return made


def _locate(text: str, mention: object, label: str) -> Entity | None:
    if not isinstance(mention, str) or not mention:
        return None
    start = text.find(mention)
    return Entity(start, start + len(mention), label) if start >= 0 else None
