"""The baseline of nested entities: a dictionary of the training entities, looked up in texts."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from domext_ray.families.readers.examples import AnnotatedText, Entity


class DictionaryMatcher:
    """Finds a dictionary's entries, each with a type, in texts: left to right, the longest first, as whole words."""

    def __init__(self, entries: dict[str, str]) -> None:
        self.entries = entries
        lengths: defaultdict[str, set[int]] = defaultdict(set)
        for entry in entries:
            lengths[entry[:2]].add(len(entry))
        self._lengths = {start: sorted(sizes, reverse=True) for start, sizes in lengths.items()}

    def match(self, text: str) -> Iterator[Entity]:
        """Yield the entries in a text; they do not overlap."""
        place = 0
        while place < len(text):
            entity = self._match_at(text, place)
            if entity is not None:
                yield entity
            place = place + 1 if entity is None else entity.end

    def _match_at(self, text: str, start: int) -> Entity | None:
        if _is_inside_word(text, start):
            return None
        for length in (*self._lengths.get(text[start : start + 2], ()), *self._lengths.get(text[start], ())):
            label = self.entries.get(text[start : start + length])
            if label is not None and start + length <= len(text) and not _is_inside_word(text, start + length):
                return Entity(start, start + length, label)
        return None


def _is_inside_word(text: str, place: int) -> bool:
    """Whether a place has ASCII letters or digits on both sides; scripts without spaces have words everywhere."""
    around = text[max(0, place - 1) : place + 1]
    return place > 0 and len(around) == 2 and around.isascii() and around.isalnum()


def build_matcher(texts: Sequence[AnnotatedText]) -> DictionaryMatcher:
    """Make the dictionary of the entities of some texts."""
    types: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for text in texts:
        for entity in text.entities:
            types[text.text[entity.start : entity.end]][entity.label] += 1
    matcher = DictionaryMatcher({string: counts.most_common(1)[0][0] for string, counts in types.items() if string})
    found: Counter[str] = Counter()
    right: Counter[str] = Counter()
    for text in texts:
        gold = {(entity.start, entity.end) for entity in text.entities}
        for entity in matcher.match(text.text):
            string = text.text[entity.start : entity.end]
            found[string] += 1
            right[string] += (entity.start, entity.end) in gold
    return DictionaryMatcher(
        {string: label for string, label in matcher.entries.items() if 2 * right[string] >= found[string]}
    )
