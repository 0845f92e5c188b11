"""PubTator -> records: title and abstract are a line each, and an entity is a line with its places in the two.

Enters: files as BC5CDR, NCBI-disease and BioRED are published. Leaves: one `Record` a document, by role. Lines of
relations are left alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from domext_ray.errors import CorpusError
from domext_ray.families.readers.cells import shorten
from domext_ray.families.readers.issues import Record
from domext_ray.families.readers.records import read_text, split_lines
from domext_ray.text.data.line_forms import PUBTATOR_TITLE

_PART = re.compile(r"([^|\s]+)\|([ta])\|(.*)")
_RULE = "an entity is its document, start, end, text and type, with tabs between"


def is_pubtator(path: Path) -> bool:
    """Whether a file begins with the title of a document of PubTator."""
    return PUBTATOR_TITLE.match(read_text(path)) is not None


def read_pubtator(path: Path) -> Iterator[Record]:
    """Yield one record a document; a CorpusError says which line is of another layout."""
    parts: dict[str, str] = {}
    entities: list[dict[str, Any]] = []
    document, first = "", 0

    def make() -> Record:
        values = {"id": document, "text": f"{parts.get('t', '')} {parts.get('a', '')}", "entities": entities}
        return Record(values, str(path), first)

    for number, line in enumerate(split_lines(read_text(path)), 1):
        cells = line.split("\t")
        part = _PART.fullmatch(line)
        if part is not None and part[2] == "t":
            if first:
                yield make()
            document, first, parts, entities = part[1], number, {"t": part[3]}, []
        elif part is not None or line.strip():
            named = part[1] if part is not None else cells[0]
            if named != document:
                rule = f"a line of {shorten(named, 30)} must follow its title" if part or len(cells) > 1 else _RULE
                raise CorpusError(f"{path}:{number} has another layout: {rule}, but {shorten(line, 40)} is there.")
            if part is not None:
                parts[part[2]] = part[3]
            elif len(cells) > 1 and cells[1].isdecimal():
                if len(cells) < 5 or not cells[2].isdecimal():
                    raise CorpusError(f"{path}:{number} has another layout: {_RULE}, but {shorten(line, 40)} is there.")
                places = {"start": int(cells[1]), "end": int(cells[2]), "place": f"{path}:{number}"}
                entities.append({**places, "mention": cells[3], "type": cells[4]})
    if first:
        yield make()
