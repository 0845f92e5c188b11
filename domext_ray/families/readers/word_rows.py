"""Rows of a table, of which each is a word -> records.

The table's header names the columns of words, of their tags and of sentences.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from domext_ray.errors import CorpusError
from domext_ray.families.readers.issues import Record
from domext_ray.families.readers.set_description import SetDescription
from domext_ray.text.data.files import find_suffix

WORD_NAMES = frozenset({"word", "words", "token", "tokens", "text", "form"})
TAG_NAMES = frozenset({"tag", "tags", "label", "labels", "ner", "ner_tag", "ner_tags"})
"""Names of columns, in small letters."""
_SENTENCE = re.compile(r"(sentence|sent)[_ .-]*(id|idx|index|no|num|number|nr)?[_ .#]*")


def find_word_columns(path: Path, line: str, description: SetDescription) -> tuple[int, int, int] | None:
    """Return the places of a row's word, its tag and its sentence if a file's first line names all of them."""
    separator = "," if find_suffix(str(path)) == ".csv" else "\t"
    names = [name.strip().lower() for name in next(csv.reader([line], delimiter=separator), [])]
    words, tags = (
        known.union(str(name).lower() for name in description.columns[role])
        for role, known in (("tokens", WORD_NAMES), ("tags", TAG_NAMES))
    )
    sentences = (i for i, name in enumerate(names) if _SENTENCE.fullmatch(name))
    found = [next((i for i, name in enumerate(names) if name in known), -1) for known in (words, tags)]
    found.append(next(sentences, -1))
    return None if -1 in found else (found[0], found[1], found[2])


def join_word_rows(
    rows: Iterable[tuple[int, list[str]]], path: Path, columns: tuple[int, int, int]
) -> Iterator[Record]:
    """Yield the sentences of rows with their lines, by role; one begins where its cell changes, and is not empty."""
    current, first = "", 0
    tokens: list[str] = []
    tags: list[str] = []
    for number, cells in rows:
        try:
            token, tag, sentence = (cells[place].strip() for place in columns)
        except IndexError:
            token = tag = sentence = ""
        if not token or not tag:
            what = "has another layout: a word and its tag are expected, but one of the cells is empty or not there"
            raise CorpusError(f"{path}:{number} {what}.")
        if tokens and sentence and sentence != current:
            yield Record({"tokens": tokens, "tags": tags}, str(path), first)
            tokens, tags = [], []
        first = first if tokens else number
        current = sentence or current
        tokens.append(token)
        tags.append(tag)
    if tokens:
        yield Record({"tokens": tokens, "tags": tags}, str(path), first)
