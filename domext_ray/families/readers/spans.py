"""Texts with entities -> where their offsets say that these are.

Enters: rows of CMeEE (a text, and entities with start, end, type and the entity's own text), of doccano, spaCy, Prodigy
and Label Studio (entities may be lists of start, end and label, in spaCy also of its text), or of brat. Leaves: the
entities by characters. White space and invisible characters are no end of an entity. An entity that the text does not
have where it should be is gold that nothing is learned from.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from domext_ray.errors import CorpusError
from domext_ray.families.readers.cells import as_offset, shorten
from domext_ray.families.readers.columns import REJECTED, get_value
from domext_ray.families.readers.examples import Entity, ScatteredEntity
from domext_ray.families.readers.issues import SetRow
from domext_ray.families.readers.offsets import GAPS, Annotation, Unit, find_unit
from domext_ray.families.readers.set_description import WITH_PLACES
from domext_ray.families.readers.tagged import is_tag
from domext_ray.families.readers.words import trim

_UNTRIMMED = "begins or ends with white space or an invisible character"


def read_annotations(rows: Iterable[SetRow]) -> tuple[list[SetRow], Unit | None]:
    """Return the rows of a split, with `Annotation`s as their entities, and what offsets count (None: characters)."""
    read = [row.put("entities", _list_annotations(row)) for row in rows]
    kinds = {entity.label: row for row in reversed(read) for entity in row.get("entities")}
    inner = next((kind for kind in kinds if kind.startswith("I-")), "")
    if inner and all(map(is_tag, kinds)):
        raise CorpusError(
            f"{kinds[inner].source} has an entity of the type {inner!r}, a tag of a word; join the words of each "
            "entity, and give it their type without B- and I-."
        )
    texts = [(text, row.get("entities")) for row in read if isinstance(text := row.get("text"), str)]
    return read, find_unit(texts, read[0].issues) if read else None


def _list_annotations(row: SetRow) -> list[Annotation]:
    """Read a row's entities; those that their annotator has rejected or passed over are counted."""
    columns = row.description.columns
    if isinstance(row.get("text"), list | tuple) and row.get("entities"):
        raise CorpusError(
            f"{row.source} has its text as a list, {shorten(row.get('text'), 40)}, and entities point into one text; "
            "join the list, or, where entities count words, give these tags (--task ner)."
        )
    names = [columns[role][0] for role in ("start", "end", "type", "mention")]
    found = []
    for values in row.read_objects("entities", names=names):
        place = values.get("place", row.source) if row.description.reader in WITH_PLACES else row.source
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
            gaps = values.get(GAPS)
            gaps = gaps if isinstance(gaps, tuple) else ()  # a reader's: JSON and Parquet have lists
            found.append(Annotation(first, _list_ends(row, last, mention), label, mention, place, gaps))
    return found


def _read_types(row: SetRow, kind: Any, place: str) -> list[str]:
    """Return the type of an entity; nested entities may have several, which Label Studio lists."""
    kinds = kind if isinstance(kind, (list, tuple)) else [kind]
    if not kinds or not all(isinstance(label, str) and label.strip() for label in kinds):
        shown = (
            "without a type" if kind in (None, "") else f"with {shorten(kind, 40)} as its type, which must be a text"
        )
        raise CorpusError(f"{place} has an entity {shown}; mend it, or set columns.type.")
    types = list(dict.fromkeys(label.strip() for label in kinds))
    if len(types) > 1 and "tags" in row.description.columns:
        raise CorpusError(
            f"{place} has an entity with the labels {' and '.join(map(repr, types))}, but in ner a word has one tag; "
            "keep one of them, or give task: nested_ner, where each is an entity of its own."
        )
    return types


def _list_ends(row: SetRow, end: int, mention: str | None) -> tuple[int, ...]:
    """Return what may be the character after an entity's last.

    The description's `ends` says whether an end is inclusive; with "auto" each entity's own text tells.
    """
    ends = row.description.ends
    if ends == "auto" and mention is None:
        if "tags" not in row.description.columns:
            raise CorpusError(
                f"{row.source} has an entity without its own text, which tells whether ends are inclusive; set ends to "
                "exclusive (doccano, Prodigy, spaCy) or inclusive."
            )
        ends = "exclusive"
    return {"inclusive": (end + 1,), "exclusive": (end,), "auto": (end + 1, end)}[ends]


def place_annotations(row: SetRow, text: str, unit: Unit | None) -> tuple[dict[Entity, str], dict[Entity, str]]:
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
