"""Questions about a context -> examples with the places of their answers.

Enters: SQuAD v1.1 and v2.0 JSON (and CMRC 2018, which has its layout), or rows as in the `datasets` library's SQuAD.
Leaves: `Question`s. An answer that is not at its offset is looked for nearby; one that cannot be found is counted in
`Dirt`, and a question that thereby loses all its answers is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from domext_ray.errors import CorpusError
from domext_ray.labelled.examples import Entity, Question
from domext_ray.labelled.readers.files import Dirt, Record, check_text, read_text
from domext_ray.labelled.readers.json_places import Part, parse_json
from domext_ray.labelled.readers.records import as_objects
from domext_ray.labelled.set_description import SetDescription

NEAR_CHARS = 20
"""How far from its offset an answer may be that occurs more than once."""


def read_squad(path: Path) -> Iterator[Record]:
    """Yield one record a question of a SQuAD file; a CorpusError names the line of another layout."""
    has_data = False
    for key, data in parse_json(path, read_text(path), 6, "{", "a SQuAD file"):
        if key == "data":
            has_data = True
            articles = (each.list_parts("{", "an article") for _, each in data.list_parts("[", "data"))
            lists = (part for article in articles for name, part in article if name == "paragraphs")
            for _, paragraph in (each for part in lists for each in part.list_parts("[", "paragraphs")):
                yield from _read_paragraph(path, paragraph)
    if not has_data:
        raise CorpusError(f"{path}:1 has another layout: a SQuAD file has a key 'data'.")


def _read_paragraph(path: Path, paragraph: Part) -> Iterator[Record]:
    parts = dict(paragraph.list_parts("{", "a paragraph"))
    context = parts["context"].value if "context" in parts else None
    if not isinstance(context, str):
        raise CorpusError(f"{path}:{paragraph.line} has another layout: a paragraph must have a text as 'context'.")
    for _, part in parts["qas"].list_parts("[", "qas") if "qas" in parts else ():
        values = part.value
        if not isinstance(values, dict) or "question" not in values or "answers" not in values:
            raise CorpusError(f"{path}:{part.line} has another layout: each of qas must have 'question' and 'answers'.")
        roles = {each: values.get(each) for each in ("id", "question", "answers", "is_impossible")}
        yield Record({**roles, "context": context}, str(path), part.line)


def make_question(record: Record, description: SetDescription, dirt: Dirt) -> Question | None:
    """Make a question with the places of its answers.

    The description's `no_answer` says whether a question without answers is one, or dirt. Answers that are not where
    they should be, and questions that have none left, are counted.
    """
    context = check_text(record, "context", dirt, is_stripped=False)
    question = check_text(record, "question", dirt) if context is not None else None
    if context is None or question is None:
        return None
    listed = [] if record.values["is_impossible"] else _list_answers(record)
    if not listed and not description.no_answer:
        dirt.add(record.source, "question", "has no answer (no_answer is false)")
        return None
    answers = [each for values in listed if (each := _place_answer(values, context, record, dirt)) is not None]
    if listed and not answers:
        dirt.add(record.source, "question", "has none of its answers in the context")
        return None
    return Question("", record.source, question, context, tuple(answers))


def _list_answers(record: Record) -> list[dict[str, Any]]:
    answers = record.values["answers"]
    listed = as_objects(answers if answers is not None else [])
    if listed is None or any(not isinstance(each.get("text"), str) for each in listed):
        raise CorpusError(f"{record.source} has another layout: answers must be a list of objects with 'text'.")
    return listed


def _place_answer(values: dict[str, Any], context: str, record: Record, dirt: Dirt) -> Entity | None:
    """Return the stretch of an answer: at its offset, or nearest to it, or where it occurs alone."""
    text, start = values["text"], values.get("answer_start")
    if isinstance(start, bool) or not isinstance(start, int):
        raise CorpusError(f"{record.source} has an answer without a whole number as 'answer_start'.")
    if not text.strip():
        dirt.add(record.source, "answer", "is empty")
        return None
    if start >= 0 and context.startswith(text, start):
        return Entity(start, start + len(text), "")
    places = []
    place = context.find(text)
    while place >= 0:
        places.append(place)
        place = context.find(text, place + 1)
    nearest = min(places, key=lambda each: abs(each - start), default=None)
    if nearest is None or (len(places) > 1 and abs(nearest - start) > NEAR_CHARS):
        dirt.add(record.source, "answer", "is not in the context near its offset", text)
        return None
    dirt.add(record.source, "answer", "is not at its offset", text, outcome="moved")
    return Entity(nearest, nearest + len(text), "")
