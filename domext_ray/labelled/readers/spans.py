"""Texts with entities, and with triples, -> entities and relations by characters, or tags.

Enters: rows of CMeEE (a text, and entities with start, end, type and the entity's own text), of doccano, spaCy, Prodigy
and Label Studio (entities may be lists of start, end and label), of brat, or of CMeIE and DuIE (a text, and triples of
a subject, a predicate and an object with one or more parts). Leaves: `AnnotatedText`s, or for flat entities
`RawSentence`s, whose words are those that tokenizers cut. An entity or a triple that the text does not have where it
should be, or that no tags can say, is gold that nothing is learned from.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from domext_ray.errors import CorpusError
from domext_ray.labelled.examples import AnnotatedText, Entity, RawSentence, Relation, ScatteredEntity
from domext_ray.labelled.readers.columns import get_value
from domext_ray.labelled.readers.issues import Row
from domext_ray.labelled.readers.records import read_json_records
from domext_ray.labelled.words import cut_words

MAIN_PART = "@value"
"""The part of a triple's object that every object has."""
Schema = dict[tuple[str, str], frozenset[tuple[str, str]]]
"""For each predicate and part of its object, the allowed (subject type, object type)s."""


def make_nested(row: Row) -> AnnotatedText:
    """Make a text with entities, which may nest and overlap."""
    text = row.read_text("text", is_stripped=False)
    entities, misplaced = _read_entities(row, text)
    return AnnotatedText("", row.source, text, _sort(entities), misplaced=_sort(misplaced))


def make_raw_sentence(row: Row) -> RawSentence:
    """Make the words of a text, with the tags of its entities; of those that overlap the longest is tagged."""
    text = row.read_text("text", is_stripped=False)
    entities, misplaced = _read_entities(row, text)
    words, offsets = cut_words(text)
    if not words:
        row.leave_out("has no words")
    firsts = {start: i for i, (start, _) in enumerate(offsets)}
    lasts = {end: i for i, (_, end) in enumerate(offsets)}
    tags = ["O"] * len(words)
    for each, place in sorted(entities.items(), key=lambda pair: (pair[0].start - pair[0].end, _order(pair[0]))):
        first, last = firsts.get(each.start), lasts.get(each.end)
        fault = ""
        if first is None or last is None:
            fault = "begins or ends inside a word"
        elif any(tag != "O" for tag in tags[first : last + 1]):
            fault = "overlaps another, and a word has one tag"
        else:
            tags[first : last + 1] = [f"B-{each.label}", *[f"I-{each.label}"] * (last - first)]
        if fault:
            row.keep_gold("entity", fault, text[each.start : each.end], place)
            misplaced[each] = place
    return RawSentence("", row.source, words, tuple(tags), "", text, offsets, misplaced=_sort(misplaced))


def _read_entities(row: Row, text: str) -> tuple[dict[Entity, str], dict[Entity, str]]:
    """Return the entities that are where their offsets say, and those that are not, with their places in files."""
    found: tuple[dict[Entity, str], dict[Entity, str]] = ({}, {})
    names = [row.description.columns[role][0] for role in ("start", "end", "type")]
    for values in row.read_objects("entities", names=names):
        is_brat = row.description.reader == "brat"
        place = values.get("place", row.source) if is_brat else row.source
        entity, is_misplaced = _read_entity(row, values, text, place)
        found[is_misplaced].setdefault(entity, place)
    return found


def _read_entity(row: Row, values: Mapping[str, Any], text: str, place: str) -> tuple[Entity, bool]:
    """Return an entity, and whether it is not where its offsets say, which is counted.

    The description's `ends` says whether an end is inclusive; with "auto" each entity's own text tells.
    """
    columns, ends = row.description.columns, row.description.ends
    start, end, kind, mention = (get_value(values, columns[role]) for role in ("start", "end", "type", "mention"))
    kind = kind[0] if isinstance(kind, (list, tuple)) and len(kind) == 1 else kind  # Label Studio
    if type(start) is not int or type(end) is not int:
        raise CorpusError(f"{row.source} has an entity without whole numbers as start and end; set columns.start.")
    if not isinstance(kind, str) or not kind.strip():
        raise CorpusError(f"{row.source} has an entity without a type; set columns.type.")
    mention = mention if isinstance(mention, str) else None
    if ends == "auto" and mention is None:
        if row.description.task == "nested_ner":
            raise CorpusError(
                f"{row.source} has an entity without its own text, which tells whether ends are inclusive; set ends to "
                "inclusive or exclusive."
            )
        ends = "exclusive"
    tried = {"inclusive": (end + 1,), "exclusive": (end,), "auto": (end + 1, end)}[ends]
    is_scattered = row.description.reader == "brat" and values.get("is_scattered", False)
    for each in () if is_scattered else tried:
        if 0 <= start < each <= len(text) and mention in (None, text[start:each]):
            return Entity(start, each, kind.strip()), False
    fault = "has several stretches" if is_scattered else "is not where its offsets say"
    row.keep_gold("entity", fault, (start, end, mention), place)
    end = next((each for each in tried if mention is not None and each - start == len(mention)), tried[0])
    return (ScatteredEntity if is_scattered else Entity)(start, end, kind.strip()), True


def _order(entity: Entity) -> tuple[int, int, str]:
    return entity.start, entity.end, entity.label


def _sort(entities: Collection[Entity]) -> tuple[Entity, ...]:
    return tuple(sorted(entities, key=_order))


def read_schema(path: Path) -> Schema:
    """Read the predicates and the types of their arguments, in the file's order.

    Its rows are {subject_type, predicate, object_type}; object_type may be an object by part.
    """
    schema: dict[tuple[str, str], set[tuple[str, str]]] = {}
    for record in read_json_records(path, ("predicate",)):
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


def make_extraction(row: Row, schema: Schema | None) -> AnnotatedText:
    """Make a text with relations; subjects and objects are located where they first occur.

    Triples that the text does not have, or the schema (None: all are allowed), are gold without a place.
    """
    text = row.read_text("text", is_stripped=False)
    found: dict[Relation, None] = {}
    unplaced: dict[tuple[str, str, str], None] = {}
    for values in row.read_objects("triples"):
        for triple, kinds, key in _list_triples(row, values):
            subject, label, mention = triple
            head, tail = _locate(text, subject, kinds[0]), _locate(text, mention, kinds[1])
            if schema is not None and kinds not in schema.get(key, ()):
                row.keep_gold("triple", "is not allowed by the schema", (subject, key[0], mention, *kinds))
            elif head is None or tail is None:
                row.keep_gold("triple", "is not in the text", (subject, key[0], mention))
            else:
                found[Relation(head, tail, label)] = None
                continue
            unplaced[triple] = None
    relations = sorted(found, key=lambda r: (r.head.start, r.head.end, r.tail.start, r.tail.end, r.label))
    entities = _sort({each for relation in relations for each in (relation.head, relation.tail)})
    return AnnotatedText("", row.source, text, entities, tuple(relations), unplaced=tuple(unplaced))


def _list_triples(
    row: Row, values: Mapping[str, Any]
) -> Sequence[tuple[tuple[str, str, str], tuple[str, str], tuple[str, str]]]:
    """Return for each part of the object the triple, the types of its arguments, and predicate and part."""
    roles = ("predicate", "subject", "subject_type", "object", "object_type")
    predicate, subject, subject_type, target, target_type = (
        get_value(values, row.description.columns[role]) for role in roles
    )
    parts = target if isinstance(target, dict) else {MAIN_PART: target}
    types = target_type if isinstance(target_type, dict) else {MAIN_PART: target_type}
    if not all(isinstance(each, str) for each in (predicate, subject, parts.get(MAIN_PART))):
        raise CorpusError(f"{row.source} has a triple without texts as predicate, subject and object.")
    return [
        (
            (subject, name_relation(predicate, part), str(mention)),
            (str(subject_type or ""), str(types.get(part) or "")),
            (predicate, part),
        )
        for part, mention in parts.items()
        if mention not in (None, "")  # datasets fill the parts that an object has not
    ]


def _locate(text: str, mention: str, label: str) -> Entity | None:
    start = text.find(mention) if mention else -1
    return Entity(start, start + len(mention), label) if start >= 0 else None
