"""Free wordings with standard terms, and the catalogue of all terms.

Enters: rows with a wording and its terms, in one cell with a separator (CHIP-CDN: "##") or as a list; a catalogue with
one term a line, a table, or a JSON list. Leaves: `Mention`s, and the catalogue's terms without duplicates.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from pathlib import Path

from domext_ray.errors import CorpusError
from domext_ray.labelled.examples import Mention
from domext_ray.labelled.readers.files import Dirt, Ids, Record, check_text, read_text, shorten, split_lines
from domext_ray.labelled.readers.json_places import JsonCursor
from domext_ray.labelled.set_description import SetDescription


def make_mentions(records: Iterable[Record], description: SetDescription, dirt: Dirt) -> list[Mention]:
    """Make mentions.

    Args:
        records: their values by role.
        description: its `separator`.
        dirt: counts rows without text or terms.
    """
    ids = Ids()
    made = []
    for record in records:
        text = check_text(record, "text", dirt)
        if text is None:
            continue
        value = record.values["terms"]
        parts = value.split(description.separator) if isinstance(value, str) else value
        if not isinstance(parts, (list, tuple)) or any(not isinstance(each, str) for each in parts):
            parts = []
        terms = tuple(dict.fromkeys(each.strip() for each in parts if each.strip()))
        if terms:
            made.append(Mention(ids.make(record.values["id"]), record.source, text, terms))
        else:
            dirt.add(record.source, "row", "has no term", value if value not in (None, "") else "")
    return made


def read_catalogue(path: Path) -> tuple[str, ...]:
    """Read the standard terms, in the file's order and without duplicates.

    Args:
        path: .json (a list of texts), .csv or .tsv (the last column), or one term a line.

    Raises:
        CorpusError: a file of another layout, or without terms.
    """
    kind = Path(path.name.removesuffix(".gz")).suffix.lower()
    text = read_text(path)
    if kind == ".json":
        cursor = JsonCursor(path, text)
        terms = []
        for line in cursor.iterate_list("a catalogue"):
            value = cursor.decode()
            if not isinstance(value, str):
                raise CorpusError(f"{path}:{line} must be a text, a standard term; found {shorten(value, 40)}.")
            terms.append(value)
        cursor.expect_end()
    elif kind == ".csv":
        terms = [row[-1] for row in csv.reader(io.StringIO(text, newline="")) if row]
    else:
        terms = [line.split("\t")[-1] for line in split_lines(text)]
    catalogue = tuple(dict.fromkeys(each.strip() for each in terms if each.strip()))
    if not catalogue:
        raise CorpusError(f"{path} has no term; give one standard term a line.")
    return catalogue
