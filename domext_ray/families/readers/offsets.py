"""What the offsets of entities count: characters, or what another tool counts instead.

Enters: the entities of a split as its rows give them, with their texts. Leaves: the unit that their offsets count,
which the entities' own texts tell; and a warning where entities without such a text look as if it was another one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from domext_ray.families.readers.issues import DataIssues, list_places
from domext_ray.families.readers.words import INVISIBLE, trim

_SHARE = 10
"""Of as many entities one at least must be in doubt: of fewer a coincidence is likelier, and does less harm."""


@dataclass(frozen=True)
class Unit:
    """What offsets count instead of characters."""

    name: str  # in the plural
    users: str  # who count it
    encoding: str  # of a text that is made of such units
    dtype: str
    mask: int
    inner: int  # its bits under the mask, where it goes on with a character

    def find_places(self, text: str) -> np.ndarray | None:
        """Return for every offset its character, int64 [units + 1], -1 inside of one; None: they are the same."""
        units = np.frombuffer(text.encode(self.encoding, "surrogatepass"), self.dtype)
        if len(units) == len(text):
            return None
        is_first = units & self.mask != self.inner
        return np.append(np.where(is_first, np.cumsum(is_first) - 1, -1), len(text))


UNITS = (
    Unit("UTF-16 code units", "JavaScript and Java", "utf-16-le", "<u2", 0xFC00, 0xDC00),
    Unit("bytes of UTF-8", "Go and Rust", "utf-8", "u1", 0xC0, 0x80),
)
GAPS = "gaps"
"""What readers call the stretches within an entity that are not of it, as tuples; a row's own value is none."""


@dataclass(frozen=True)
class Annotation:
    """An entity as a row gives it."""

    start: int
    ends: tuple[int, ...]  # offsets that the character after its last may have, in the order in which they are tried
    label: str
    mention: str | None  # its own text
    place: str  # FILE:PLACE
    gaps: tuple[tuple[int, int], ...] = ()  # stretches in it that are not of it, unless they are white space

    def convert(self, places: np.ndarray | None) -> Annotation:
        """Return it with offsets that count characters (`Unit.find_places`); -1: no character has that."""
        if places is None:
            return self

        def find(offset: int) -> int:
            return int(places[offset]) if 0 <= offset < len(places) else -1

        gaps = tuple((find(start), find(end)) for start, end in self.gaps)
        return replace(self, start=find(self.start), ends=tuple(map(find, self.ends)), gaps=gaps)

    def find_end(self, text: str) -> int | None:
        """Return its end in a text; None: it is not where it says, for its own text is another one.

        Tools write a line's end in it as a space, and leave out what is invisible around it.
        """
        ends = [end for end in self.ends if 0 <= self.start < end <= len(text)]
        if self.mention is None:
            return ends[0] if ends else None
        found = [end for end in ends if text[self.start : end] == self.mention]
        if not found and (words := _split(self.mention)):
            found = [end for end in ends if end == self.ends[-1] and _split(text[self.start : end]) == words]
        return found[0] if found else None

    def is_at_words(self, text: str) -> bool:
        """Whether it begins and ends where a word may."""
        end = self.find_end(text)
        if end is None or text[self.start] in INVISIBLE or text[end - 1] in INVISIBLE:
            return False
        return not any(text[edge - 1 : edge + 1].isalnum() for edge in (self.start, end) if 0 < edge < len(text))


def _split(text: str) -> list[str]:
    start, end = trim(text, 0, len(text))
    return text[start:end].split()


def find_unit(annotated: Sequence[tuple[str, Sequence[Annotation]]], issues: DataIssues) -> Unit | None:
    """Return the unit that all offsets of a split count, by the own texts of its entities; None: characters.

    A warning says where entities without a text of their own leave it in doubt.
    """
    num_entities = sum(len(entities) for _, entities in annotated)
    for unit in UNITS:
        named, nameless = list[_Doubtful](), list[_Doubtful]()
        for text, entities in annotated:
            places = unit.find_places(text) if entities and not text.isascii() else None
            for entity in entities if places is not None else ():
                other = entity.convert(places)
                if other != entity:
                    (nameless if entity.mention is None else named).append((text, entity, other))
        fits = {(entity.find_end(text) is not None, other.find_end(text) is not None) for text, entity, other in named}
        if (False, True) in fits and (True, False) not in fits:
            return unit
        _warn(unit, nameless, num_entities, issues)
    return None


_Doubtful = tuple[str, Annotation, Annotation]
"""A text, and an entity of it whose place depends on the unit: as it counts characters, and as it counts the unit."""


def _warn(unit: Unit, doubtful: Sequence[_Doubtful], num_entities: int, issues: DataIssues) -> None:
    """Warn if the unit makes sense of entities that are no words in characters, or of all as well as characters do."""
    odd = [entity for text, entity, _ in doubtful if not entity.is_at_words(text)]
    num_odd_others = sum(not other.is_at_words(text) for text, _, other in doubtful)
    if not doubtful or num_odd_others * _SHARE > len(odd) or (not odd and len(doubtful) * _SHARE < num_entities):
        return
    text, first, other = doubtful[0]
    char = next(symbol for symbol in text if unit.find_places(symbol) is not None)
    cure = "give each entity its own text, which tells"
    if odd:
        size = np.dtype(unit.dtype).itemsize
        end = f"{size} * offset" if size > 1 else "offset"
        issues.warn(
            f"{len(odd):,} of {num_entities:,} entities begin or end inside a word, at a space or outside of their "
            f"text ({list_places([entity.place for entity in odd])}), and {num_odd_others or 'none'} would if offsets "
            f"counted {unit.name}, as {unit.users} do, of which {char!r} is several; make characters of them "
            f"(len(text.encode('{unit.encoding}')[:{end}].decode('{unit.encoding}'))), or {cure}."
        )
    else:
        here, there = (text[entity.start : entity.find_end(text)] for entity in (first, other))
        issues.warn(
            f"{len(doubtful):,} of {num_entities:,} entities stand behind characters such as {char!r}, which is "
            f"several {unit.name} to {unit.users}, and are whole words whichever of them offsets count: the one of "
            f"{first.place} is {here!r} in characters, as it is read, and {there!r} in {unit.name}; make sure that "
            f"{here!r} is meant, or {cure}."
        )
