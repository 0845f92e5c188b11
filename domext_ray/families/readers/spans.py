"""Texts with entities, and with triples, -> entities and relations by characters, or tags.

Enters: rows of CMeEE (a text, and entities with start, end, type and the entity's own text), of doccano, spaCy, Prodigy
and Label Studio (entities may be lists of start, end and label, in spaCy also of its text), of brat, or of CMeIE and
DuIE (a text, and triples of a subject, a predicate and an object with one or more parts). Leaves: `AnnotatedText`s, or
for flat entities `RawSentence`s, whose words are those that tokenizers cut. White space and invisible characters are no
end of an entity. An entity or a triple that the text does not have where it should be, or that no tags can say, is gold
that nothing is learned from.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from domext_ray.errors import CorpusError
from domext_ray.families.readers.columns import REJECTED, get_value
from domext_ray.families.readers.examples import AnnotatedText, Entity, RawSentence, Relation, ScatteredEntity
from domext_ray.families.readers.issues import Row, as_offset, shorten
from domext_ray.families.readers.offsets import Annotation, Unit, find_unit
from domext_ray.families.readers.records import read_json_records
from domext_ray.families.readers.words import cut_words, trim

MAIN_PART = "@value"
"""The part of a triple's object that every object has."""
_UNTRIMMED = "begins or ends with white space or an invisible character"
Schema = dict[tuple[str, str], frozenset[tuple[str, str]]]
"""For each predicate and part of its object, the allowed (subject type, object type)s."""


def read_annotations(rows: Iterable[Row]) -> tuple[list[Row], Unit | None]:
    """Return the rows of a split, with `Annotation`s as their entities, and what offsets count (None: characters)."""
    read = [row.put("entities", _list_annotations(row)) for row in rows]
    texts = [(text, row.get("entities")) for row in read if isinstance(text := row.get("text"), str)]
    return read, find_unit(texts, read[0].issues) if read else None


def make_nested(row: Row, unit: Unit | None = None) -> AnnotatedText:
    """Make a text with entities, which may nest and overlap; both makers take rows of `read_annotations`."""
    text = row.read_text("text", is_stripped=False)
    entities, misplaced = _place_entities(row, text, unit)
    return AnnotatedText("", row.source, text, _sort(entities), misplaced=_sort(misplaced))


def make_raw_sentence(row: Row, unit: Unit | None = None) -> RawSentence:
    """Make the words of a text, with the tags of its entities; of those that overlap the longest is tagged."""
    text = row.read_text("text", is_stripped=False)
    entities, misplaced = _place_entities(row, text, unit)
    words, offsets = cut_words(text)
    if not words:
        row.leave_out("has no words")
    firsts = {start: i for i, (start, _) in enumerate(offsets)}
    lasts = {end: i for i, (_, end) in enumerate(offsets)}
    tags = ["O"] * len(words)
    for entity, place in sorted(entities.items(), key=lambda pair: (pair[0].start - pair[0].end, _order(pair[0]))):
        first, last = firsts.get(entity.start), lasts.get(entity.end)
        fault = ""
        if first is None or last is None:
            fault = "begins or ends inside a word"
        elif any(tag != "O" for tag in tags[first : last + 1]):
            fault = "overlaps another, and a word has one tag"
        else:
            tags[first : last + 1] = [f"B-{entity.label}", *[f"I-{entity.label}"] * (last - first)]
        if fault:
            row.keep_gold("entity", fault, text[entity.start : entity.end], place)
            misplaced[entity] = place
    return RawSentence("", row.source, words, tuple(tags), "", text, offsets, misplaced=_sort(misplaced))


def _list_annotations(row: Row) -> list[Annotation]:
    """Read a row's entities; those that their annotator has rejected or passed over are counted."""
    columns = row.description.columns
    names = [columns[role][0] for role in ("start", "end", "type", "mention")]
    found = []
    for values in row.read_objects("entities", names=names):
        place = values.get("place", row.source) if row.description.reader == "brat" else row.source
        start, end, kind, mention = (get_value(values, columns[role]) for role in ("start", "end", "type", "mention"))
        if as_offset(start) is None and None not in (as_offset(end), as_offset(kind)):
            start, end, kind = end, kind, start  # a list that begins with the type
        if values.get("answer") in REJECTED:
            row.issues.add(place, "entity", f"is marked {values['answer']!r} by its annotator", (start, end, kind))
            continue
        first, last = as_offset(start), as_offset(end)
        if first is None or last is None:
            shown = f"{shorten(start, 30)} and {shorten(end, 30)}"
            raise CorpusError(
                f"{place} has an entity without whole numbers as start and end, but {shown}; set columns.start."
            )
        mention = mention if isinstance(mention, str) else None
        if kind == []:
            row.issues.add(place, "entity", "has no label", (start, end))
            continue
        for label in _read_types(row, kind, place):
            gaps = values.get("gaps", ()) if row.description.reader == "brat" else ()
            found.append(Annotation(first, _list_ends(row, last, mention), label, mention, place, gaps))
    return found


def _read_types(row: Row, kind: Any, place: str) -> list[str]:
    """Return the type of an entity; nested entities may have several, which Label Studio lists."""
    kinds = kind if isinstance(kind, (list, tuple)) else [kind]
    if not kinds or not all(isinstance(label, str) and label.strip() for label in kinds):
        shown = (
            "without a type" if kind in (None, "") else f"with {shorten(kind, 40)} as its type, which must be a text"
        )
        raise CorpusError(f"{place} has an entity {shown}; mend it, or set columns.type.")
    types = list(dict.fromkeys(label.strip() for label in kinds))
    if len(types) > 1 and row.description.task == "ner":
        raise CorpusError(
            f"{place} has an entity with the labels {' and '.join(map(repr, types))}, but in ner a word has one tag; "
            "keep one of them, or give task: nested_ner, where each is an entity of its own."
        )
    return types


def _list_ends(row: Row, end: int, mention: str | None) -> tuple[int, ...]:
    """Return what may be the character after an entity's last.

    The description's `ends` says whether an end is inclusive; with "auto" each entity's own text tells.
    """
    ends = row.description.ends
    if ends == "auto" and mention is None:
        if row.description.task == "nested_ner":
            raise CorpusError(
                f"{row.source} has an entity without its own text, which tells whether ends are inclusive; set ends to "
                "inclusive or exclusive."
            )
        ends = "exclusive"
    return {"inclusive": (end + 1,), "exclusive": (end,), "auto": (end + 1, end)}[ends]


def _place_entities(row: Row, text: str, unit: Unit | None) -> tuple[dict[Entity, str], dict[Entity, str]]:
    """Return the entities that are where their offsets say, and those that are not, with their places in files."""
    found, misplaced = dict[Entity, str](), dict[Entity, str]()
    places = unit.find_places(text) if unit else None
    for given in row.get("entities"):
        entity = given.convert(places)
        end = entity.find_end(text)
        is_scattered = any(text[first:last].strip() or -1 in (first, last) for first, last in entity.gaps)
        start, stop = trim(text, entity.start, end) if end is not None else (0, 0)
        if start < stop and not is_scattered:
            found.setdefault(Entity(start, stop, entity.label), entity.place)
            if unit and entity != given:
                row.issues.add(entity.place, "entity", f"has offsets in {unit.name}", text[start:stop], outcome="moved")
            if (start, stop) != (entity.start, end):
                row.issues.add(entity.place, "entity", _UNTRIMMED, text[entity.start : end], outcome="trimmed")
            continue
        detail = (given.start, given.ends[-1], given.mention)
        is_empty = end is not None or (entity.start in entity.ends and not entity.mention)
        fault = "is empty" if is_empty else "is not where its offsets say"
        row.keep_gold("entity", "has several stretches" if is_scattered else fault, detail, entity.place)
        ends = (last for last in given.ends if given.mention is not None and last - given.start == len(given.mention))
        kind = ScatteredEntity if is_scattered else Entity
        misplaced.setdefault(kind(given.start, next(ends, given.ends[0]), given.label), entity.place)
    return found, misplaced


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
            record.values.get(role) for role in ("predicate", "subject_type", "object_type")
        )
        parts = object_type if isinstance(object_type, dict) else {MAIN_PART: object_type}
        if not all(isinstance(value, str) for value in (predicate, subject_type, *parts.values())):
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
    entities = _sort({entity for relation in relations for entity in (relation.head, relation.tail)})
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
    if not all(isinstance(value, str) for value in (predicate, subject, parts.get(MAIN_PART))):
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
