"""Rows as annotation tools export them -> rows with a text and its entities or labels, by column.

Enters: JSON of Label Studio (tasks with their annotations, or JSON-MIN, whose rows lack what was not annotated), of
Prodigy (whose rows may lack it), of spaCy (whose categories are 0 or 1 each, as `cats`), of Dataturks (whose ends are
inclusive), of GLiNER and SciERC (whose entities count words), of CLUENER (by type and text), of BigBIO and of BioC
(whose texts are passages, and whose entities may have several stretches).
Leaves: the same rows as JSON-MIN has them, complete. Rows of anything else are left as they are.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from domext_ray.errors import CorpusError
from domext_ray.families.readers.argument_rows import place_arguments
from domext_ray.families.readers.cells import read_mark, shorten
from domext_ray.families.readers.columns import get_value
from domext_ray.families.readers.issues import DataIssues, Record
from domext_ray.families.readers.offsets import GAPS
from domext_ray.families.readers.set_description import Column, SetDescription

_MIN_COLUMNS = {"annotation_id", "annotator", "lead_time"}
"""Columns of JSON-MIN beside those of a task."""
_PRODIGY_COLUMNS = {"_input_hash", "_task_hash", "_view_id", "answer"}
"""Columns of Prodigy, whose rows may lack spans, too."""
_CATS = "cats"
"""What spaCy calls the categories of a text."""
_SPELT = ("{", "[")
"""A cell of its CSV that begins so spells several choices."""
_KINDS = {"entities": "labels", "label": "choices", "labels": "choices"}
"""What Label Studio calls that of which a text has one or several, by the role that it plays here."""


def complete_exports(records: Iterable[Record], description: SetDescription, issues: DataIssues) -> Iterator[Record]:
    """Yield the rows of a file, complete; annotations that were cancelled are counted."""
    records = iter(records)
    first = next(records, None)
    if first is None:
        return
    records = itertools.chain([first], records)
    columns = first.values.keys()
    role = description.annotated
    if _is_task(first):
        yield from _read_tasks([*records], description, issues)
    elif {"head", "tail"} <= description.columns.keys():
        yield from map(place_arguments, records)
    elif (role and len(columns & _MIN_COLUMNS) > 1) or (role == "entities" and len(columns & _PRODIGY_COLUMNS) > 1):
        yield from _fill([*records], description, role)
    elif role in ("label", "labels") and (name := _find_marks(first, description.columns[role])) is not None:
        yield from _read_marks(records, description, issues, role, name)
    else:
        readers = _READERS.items() if role == "entities" else ()
        read = next((read for needed, read in readers if needed <= columns), None)
        if role == "entities" and read is None and _has_mentions(get_value(first.values, description.columns[role])):
            read = _read_mentions
        for record in records:
            yield record if read is None else read(record, description)


def _fill(records: Sequence[Record], description: SetDescription, role: str) -> Iterator[Record]:
    """Give each row the column that others have: where there was nothing to annotate it has none."""
    names = description.columns[role]
    used = next((name for name in names if any(name in record.values for record in records)), None)
    for record in records:
        values = dict(record.values)
        if used is not None and not any(name in values for name in names):
            values[used] = []
        elif role == "labels" and isinstance(choice := values.get(used), str) and not choice.startswith(_SPELT):
            values[used] = [choice]  # a single one, whatever separators are in it
        yield replace(record, values=values)


def _find_marks(first: Record, names: Sequence[Column]) -> Column | None:
    """Return the column that has an object of labels with a 0 or 1 each, spaCy's `cats` among them; None: none has."""
    name = next((name for name in (*names, _CATS) if name in first.values), None)
    value = first.values.get(name)
    return name if isinstance(value, Mapping) and "choices" not in value else None


def _read_marks(
    records: Iterable[Record], description: SetDescription, issues: DataIssues, role: str, name: Column
) -> Iterator[Record]:
    """Give each row the labels that are at 1 (or true) as its labels, or the one of them as its class."""
    for record in records:
        given = record.values.get(name)
        try:
            marks = {str(label): read_mark(mark) for label, mark in given.items()} if isinstance(given, Mapping) else {}
        except ValueError:
            marks = {"": None}
        found, detail = [label for label, mark in marks.items() if mark], "" if given is None else given
        if not isinstance(given, Mapping) or None in marks.values():
            issues.add(record.source, "row", f"has no object with 0 or 1 for each label as {name!r}", detail)
        elif role == "label" and len(found) != 1:
            fault = f"has {'several' if found else 'none'} of its {name!r} at 1, of which"
            issues.add(record.source, "row", f"{fault} a class is one (--task multilabel takes all)", detail)
        else:
            values = {**record.values, description.columns[role][0]: found if role == "labels" else found[0]}
            yield replace(record, values=values)


def _is_task(record: Record) -> bool:
    annotations = record.values.get("annotations", record.values.get("completions"))
    return isinstance(record.values.get("data"), Mapping) and isinstance(annotations, list)


def _read_tasks(tasks: Sequence[Record], description: SetDescription, issues: DataIssues) -> Iterator[Record]:
    """Make a row of each annotation of each task, as JSON-MIN does."""
    role, source = description.annotated, tasks[0].source
    if not role:
        cure = "set reader: spans" if "tags" in description.columns else "export JSON-MIN"
        raise CorpusError(
            f"{source} is a task of Label Studio with its annotations, which reader: {description.reader} of "
            f"{description.task} does not read; {cure}."
        )
    rows = [annotation for task in tasks for annotation in _list_annotations(task, role, description, issues)]
    names = list(dict.fromkeys(name for _, found in rows for name in found))
    names = [name for name in names if name in description.columns[role]] or names
    if len(names) > 1:
        raise CorpusError(
            f"{source} has annotations by several names ({', '.join(names)}); set columns.{role} to one of them in "
            f"{description.yaml}."
        )
    column = description.columns[role][0]
    for row, found in rows:
        values = found.get(names[0], []) if names else []
        taken = values if role == "entities" else {"choices": values}
        yield replace(row, values={**row.values, column: taken})


def _list_annotations(
    task: Record, role: str, description: SetDescription, issues: DataIssues
) -> Iterator[tuple[Record, dict[str, list[Any]]]]:
    """Yield for each annotation of a task its row, and beside it what was annotated, by name."""
    if not _is_task(task):
        rule = "a task of Label Studio has an object as 'data' and a list as 'annotations'"
        raise CorpusError(f"{task.source} has another layout: {rule}; export JSON-MIN.")
    data = task.values["data"]
    annotations = task.values.get("annotations", task.values.get("completions"))
    if not annotations:
        issues.add(task.source, "row", "has no annotation")
    for annotation in annotations:
        results = annotation.get("result") if isinstance(annotation, Mapping) else None
        if not isinstance(results, list) or not all(isinstance(result, Mapping) for result in results):
            rule = f"an annotation has a list of objects as 'result', but {shorten(annotation, 40)} is there"
            raise CorpusError(f"{task.source} has another layout: {rule}; export JSON-MIN.")
        if annotation.get("was_cancelled") is True:
            issues.add(task.source, "annotation", "was cancelled")
            continue
        found, texts = dict[str, list[Any]](), dict[str, None]()
        for result in results:
            given = _read_result(task, result, role)
            if given is not None:
                found.setdefault(str(result.get("from_name")), []).extend(given)
                texts[str(result.get("to_name"))] = None
        if role == "entities" and len(texts) > 1:
            raise CorpusError(f"{task.source} has entities of several texts ({', '.join(texts)}); make a task of each.")
        values = {"id": task.values.get("id"), **data, "data": data}
        if get_value(values, description.columns["text"]) is None:
            only = [name for name, value in data.items() if isinstance(value, str)]
            name = next((text for text in texts if text in only), only[0] if len(only) == 1 else None)
            values |= {} if name is None else {description.columns["text"][0]: data[name]}
        yield Record(values, task.path, task.place), found


def _read_result(task: Record, result: Mapping[str, Any], role: str) -> list[Any] | None:
    """Return the entity or the choices of one result; None: it is something else, such as a relation."""
    value, kind = result.get("value"), str(result.get("type"))
    if role == "entities" and kind.endswith("labels") and kind != "labels":
        raise CorpusError(
            f"{task.source} is annotated with {kind!r}, whose places are no characters of a text; annotate it as Text."
        )
    if not isinstance(value, Mapping) or kind != _KINDS[role]:
        return None
    if role == "entities":
        value = {"labels": [], **value}  # that of a stretch without one is not there
        return [{**value, "value": value}]
    if "start" in value:  # of a part of the text
        return None
    choices = value.get("choices") or []
    if not isinstance(choices, list):
        rule = f"a result has a list as 'choices', but {shorten(choices, 40)} is there"
        raise CorpusError(f"{task.source} has another layout: {rule}; export JSON-MIN.")
    return choices


def _read_dataturks(row: Record, description: SetDescription) -> Record:
    """Rename what Dataturks has; the own text of each entity tells that its end is inclusive."""
    start, end, kind, mention = (description.columns[role][0] for role in ("start", "end", "type", "mention"))
    entities: Any = row.values.get("annotation") or []
    try:
        entities = [
            {start: point["start"], end: point["end"], kind: annotation["label"], mention: point["text"]}
            for annotation in entities
            for point in annotation["points"]
        ]
    except (TypeError, LookupError):
        rule = "an annotation of Dataturks has a 'label', and 'points' with 'start', 'end' and 'text'"
        raise CorpusError(f"{row.source} has another layout: {rule}, but {shorten(entities)} is there.") from None
    return _name(row, description, row.values.get("content"), entities)


def _read_gliner(row: Record, description: SetDescription) -> Record:
    """Join the words of GLiNER by spaces; an entity is the places of its first word and its last, and its type."""
    words, given = row.values.get("tokenized_text"), row.values.get("ner") or []
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise CorpusError(f"{row.source} has another layout: tokenized_text must be a list of texts.")
    start, end, kind, mention = (description.columns[role][0] for role in ("start", "end", "type", "mention"))
    text, ends = " ".join(words), [*itertools.accumulate(len(word) + 1 for word in words)]
    entities = []
    for entity in given if isinstance(given, list) else [given]:
        match entity:
            case [int(first), int(last), str(label)] if 0 <= first <= last < len(words):
                place = (ends[first] - len(words[first]) - 1, ends[last] - 1)
            case _:
                rule = f"ner must be a list of [first word, last word, type] among {len(words)} words"
                raise CorpusError(f"{row.source} has another layout: {rule}, but {shorten(entity, 40)} is there.")
        shown = place[1] - (description.ends == "inclusive")
        entities.append({start: place[0], end: shown, kind: label, mention: text[slice(*place)]})
    return _name(row, description, text, entities)


def _read_dygie(row: Record, description: SetDescription) -> Record:
    """Join the sentences of SciERC and DyGIE++; an entity is the places of its words in the document, and its type."""
    parts = [row.values[name] for name in ("sentences", "ner")]
    if not all(isinstance(part, list) and all(isinstance(own, list) for own in part) for part in parts):
        raise CorpusError(f"{row.source} has another layout: sentences and ner must be lists of lists, one a sentence.")
    words, entities = ([*itertools.chain.from_iterable(part)] for part in parts)
    return _read_gliner(replace(row, values={**row.values, "tokenized_text": words, "ner": entities}), description)


def _has_mentions(value: object) -> bool:
    """Whether entities are by type, and then by their own text, as CLUENER has them."""
    return isinstance(value, Mapping) and all(isinstance(own, Mapping) for own in value.values())


def _read_mentions(row: Record, description: SetDescription) -> Record:
    """Read the entities of CLUENER: by type their own texts, each with its places."""
    names = description.columns["entities"]
    start, end, kind, mention = (description.columns[role][0] for role in ("start", "end", "type", "mention"))
    given: Any = get_value(row.values, names) or {}
    try:
        entities = [
            {start: first, end: last, kind: label, mention: text}
            for label, texts in given.items()
            for text, places in texts.items()
            for first, last in places
        ]
    except (AttributeError, TypeError, ValueError):
        rule = "entities by type are an object of texts with lists of [start, end]"
        raise CorpusError(f"{row.source} has another layout: {rule}, but {shorten(given, 60)} is there.") from None
    return replace(row, values={**row.values, names[0]: entities})


def _read_bigbio(row: Record, description: SetDescription) -> Record:
    """Read passages and entities of BigBIO, each with the offsets of its texts."""
    values: Any = row.values
    try:
        parts = [(first, text) for each in values["passages"] for (first, _), text in _pair(each)]
        entities = [
            ([tuple(place) for place, _ in _pair(each)], each["type"], each["text"]) for each in values["entities"]
        ]
        return _place(row, description, parts, entities)
    except (TypeError, LookupError, ValueError):
        rule = "passages and entities of BigBIO have lists as 'text' and 'offsets', and entities a 'type'"
        raise CorpusError(f"{row.source} has another layout: {rule}.") from None


def _pair(part: Mapping[str, Any]) -> Iterable[tuple[Any, Any]]:
    return zip(part["offsets"], part["text"], strict=True)


def _read_bioc(row: Record, description: SetDescription) -> Record:
    """Read passages of BioC, each with its annotations, whose places are those in the document."""
    passages: Any = row.values["passages"]
    try:
        parts = [(each["offset"], each["text"]) for each in passages]
        entities = [
            (
                [(own["offset"], own["offset"] + own["length"]) for own in each["locations"]],
                each["infons"]["type"],
                [each["text"]],
            )
            for passage in passages
            for each in passage.get("annotations") or []
        ]
        return _place(row, description, parts, entities)
    except (TypeError, LookupError, ValueError, AttributeError):
        rule = "passages of BioC have 'text' and 'offset', and annotations 'text', 'locations' and a 'type' in 'infons'"
        raise CorpusError(f"{row.source} has another layout: {rule}.") from None


def _place(row: Record, description: SetDescription, parts: Any, entities: Any) -> Record:
    """Put passages where their offsets say, with spaces between them; an entity has places, its type and its texts."""
    start, end, kind, mention = (description.columns[role][0] for role in ("start", "end", "type", "mention"))
    text, made = "", list[dict[Any, Any]]()
    for first, part in sorted(parts):
        if first < len(text):
            rule = f"passages must not overlap, but one begins at {first}, before the end of another"
            raise CorpusError(f"{row.source} has another layout: {rule}.")
        text += " " * (first - len(text)) + part
    for places, label, texts in entities:
        gaps = tuple((last, first) for (_, last), (first, _) in itertools.pairwise(places))
        shown = places[-1][1] - (description.ends == "inclusive")
        made.append({start: places[0][0], end: shown, kind: label, mention: " ".join(texts), GAPS: gaps})
    return _name(row, description, text, made)


def _name(row: Record, description: SetDescription, text: Any, entities: list[Any]) -> Record:
    names = (description.columns[role][0] for role in ("text", "entities"))
    return replace(row, values={**row.values, **dict(zip(names, (text, entities), strict=True))})


_READERS: Mapping[frozenset[str], Callable[[Record, SetDescription], Record]] = {
    frozenset({"content", "annotation"}): _read_dataturks,
    frozenset({"tokenized_text", "ner"}): _read_gliner,
    frozenset({"sentences", "ner"}): _read_dygie,
    frozenset({"passages", "entities"}): _read_bigbio,
    frozenset({"passages", "infons"}): _read_bioc,
}
"""What reads each row of a file whose first row has these columns."""
