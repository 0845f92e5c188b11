"""Words with tags -> IOB2, whatever scheme the file has.

Enters: rows with lists of words and tags (MTL-Bioinformatics, CoNLL-2003, BioBERT), or numbers that the description
names. Leaves: valid tags. A tag sequence that its scheme forbids is refused with its line.

Source: the schemes as in Ramshaw and Marcus (1995, IOB1), Tjong Kim Sang and Veenstra (1999, IOB2), Ratinov and Roth
(2009, BILOU).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from domext_ray.errors import CorpusError
from domext_ray.families.readers.cells import as_offset, shorten
from domext_ray.families.readers.issues import SetRow
from domext_ray.families.readers.set_description import SCHEMES

UNTYPED = "ENTITY"
"""Type of tags without one ("B", "I"), unless the description has exactly one label."""
_ROLES = {
    "iob2": {"B": "first", "I": "inner"},
    "iob1": {"B": "first", "I": "inner"},
    "iobes": {"B": "first", "I": "inner", "M": "inner", "E": "last", "S": "only"},
    "bilou": {"B": "first", "I": "inner", "L": "last", "U": "only"},
}


_USUAL = re.compile(r"[BIESMLU](-.+)?|O")
_PREFIX = "(?P<prefix>[BIESMLU])"
_SPELLINGS = [
    re.compile(pattern, re.IGNORECASE)
    for pattern in (rf"{_PREFIX}(-(?P<type>.+))?|O", rf"{_PREFIX}_(?P<type>.+)|O", rf"(?P<type>.+)-{_PREFIX}|O")
]
"""b-TYPE, B_TYPE and TYPE-B, of which all tags of a file must be one."""


class BadTagError(ValueError):
    """A tag that its scheme forbids at a place of its sentence; whether `to_iob2` knows what to make of it."""

    def __init__(self, place: int, reason: str, *, can_mend: bool = True) -> None:
        super().__init__(reason)
        self.place, self.can_mend = place, can_mend


def is_tag(text: str) -> bool:
    """Whether a text is a tag in one of the ways that they are spelled."""
    return any(spelling.fullmatch(text) for spelling in _SPELLINGS)


def name_tags(rows: Sequence[SetRow]) -> list[SetRow]:
    """Return the rows of a file with tags such as B-TYPE: numbers by their names, other spellings where all are of one.

    Lists that are none, and numbers without names, are a CorpusError.
    """
    named = [_name_tags(row) for row in rows]
    found = {tag for row in named for tag in row.get("tags")}
    spelling = next((pattern for pattern in _SPELLINGS if all(map(pattern.fullmatch, found))), None)
    if spelling is None or all(map(_USUAL.fullmatch, found)):
        return named
    usual = {tag: _spell(match["prefix"], match["type"]) for tag in found if (match := spelling.fullmatch(tag))}
    example = min(tag for tag in found if tag != usual[tag])
    rows[0].issues.say(f"Tags of {rows[0].record.path} such as {example} are read as {usual[example]}.")
    return [row.put("tags", [usual[tag] for tag in row.get("tags")]) for row in named]


def _spell(prefix: str | None, kind: str | None) -> str:
    return f"{prefix.upper()}-{kind}" if prefix and kind else (prefix or "O").upper()


def _name_tags(row: SetRow) -> SetRow:
    tokens, tags = row.get("tokens"), row.get("tags")
    numbers = _list_numbers(tags) if isinstance(tags, (list, tuple)) else []
    if numbers:
        row = row.put("tags", [_name_tag(row, place, number) for place, number in enumerate(numbers)])
    for role, value in (("tokens", tokens), ("tags", row.get("tags"))):
        if not isinstance(value, (list, tuple)) or any(not isinstance(item, str) for item in value):
            rule = f"{role} must be a list of texts, but {shorten(value, 40)} is there"
            raise CorpusError(f"{row.source} has another layout: {rule}.")
    if len(tokens) != len(tags):
        raise CorpusError(f"{row.source} has {len(tokens)} words but {len(tags)} tags; each word needs one tag.")
    return row


def _list_numbers(tags: Sequence[object]) -> list[int]:
    """List tags that are numbers; where one is not, none are."""
    numbers = [number for tag in tags if (number := as_offset(tag)) is not None]
    return numbers if len(numbers) == len(tags) else []


def _name_tag(row: SetRow, place: int, number: int) -> str:
    names, where = row.description.tags, row.description.yaml
    if not 0 <= number < len(names):
        has = f"which has no name there (0 to {len(names) - 1} have)" if names else "a number"
        raise CorpusError(
            f"{_name_place(row, place)} has the tag {number}, {has}; name the tags in the order of their numbers in "
            f"{where}, such as tags: [O, B-TYPE, I-TYPE]."
        )
    return names[number]


def choose_scheme(rows: Sequence[SetRow]) -> str:
    """Return the scheme of a file's tags, which with "auto" all of them tell."""
    scheme = rows[0].description.scheme if rows else "iob2"
    scheme = SCHEMES[scheme] or scheme
    return detect_scheme([row.get("tags") for row in rows]) if scheme == "auto" else scheme


def convert_tags(row: SetRow, scheme: str) -> tuple[str, ...]:
    """Return a row's tags as IOB2; tags that are mended are counted, and those that the scheme forbids refused."""
    labels = row.description.labels
    mended: list[int] | None = [] if row.issues.mends else None
    try:
        tags = to_iob2(row.get("tags"), scheme, labels[0] if len(labels) == 1 else UNTYPED, mended)
    except BadTagError as error:
        tag = row.get("tags")[error.place]
        advice = _advise(row, error, tag, scheme)
        raise CorpusError(f"{_name_place(row, error.place)} has the tag {tag!r}{advice}") from None
    for place in mended or ():
        row.issues.add(_name_place(row, place).rstrip(","), "tag", f"breaks a rule of {scheme}", outcome="mended")
    return tags


def _advise(row: SetRow, error: BadTagError, tag: str, scheme: str) -> str:
    if tag[1:2] != "-" and not is_tag(tag):
        column = ", or set columns.tags if the tags are in another column" if row.get("is_word_a_line") else ""
        return (
            f", a type without B- or I-; write B-{tag} for the first word of an entity and I-{tag} for those that "
            f"follow{column}."
        )
    hint = ", or mend all such tags with --labelled.repair true" if error.can_mend else ""
    return f": {error}; mend it, or set scheme ({scheme} here){hint}."


def _name_place(row: SetRow, place: int) -> str:
    record = row.record
    if row.get("is_word_a_line") and isinstance(record.place, int):
        return f"{record.path}:{record.place + place}"
    return f"{row.source}, tag {place + 1},"


def _parse(tag: str, untyped: str) -> tuple[str, str]:
    prefix, dash, kind = tag.partition("-")
    return prefix, kind if dash else ("" if tag == "O" else untyped)


def detect_scheme(sentences: Sequence[Sequence[str]]) -> str:
    """Return the scheme of a file's tags: "iobes", "bilou", "iob1" or "iob2".

    E- or S- tell IOBES, L- or U- BILOU. Otherwise IOB1 is the one where an I- opens an entity and every B- stands
    behind another entity of its type; all else is IOB2, or a mistake in it.
    """
    prefixes = {tag.partition("-")[0] for tags in sentences for tag in tags}
    if prefixes & {"E", "S", "M"}:
        return "iobes"
    if prefixes & {"L", "U"}:
        return "bilou"
    has_opening_inner = False
    for tags in sentences:
        before = ("O", "")
        for tag in tags:
            here = _parse(tag, UNTYPED)
            is_behind_own_type = before[0] != "O" and before[1] == here[1]
            if here[0] == "B" and not is_behind_own_type:
                return "iob2"
            has_opening_inner |= here[0] == "I" and not is_behind_own_type
            before = here
    return "iob1" if has_opening_inner else "iob2"


def to_iob2(
    tags: Sequence[str], scheme: str, untyped: str = UNTYPED, mended: list[int] | None = None
) -> tuple[str, ...]:
    """Convert the tags of a sentence to valid IOB2; a BadTagError names one that the scheme forbids there.

    A prefix alone has the type `untyped`. `mended` gets the places of tags that were mended; None: none is. An entity
    begins where one is continued that is not there, and ends where it has no last word, as in the evaluation of
    CoNLL-2000.
    """

    def mend(place: int, reason: str) -> None:
        if mended is None:
            raise BadTagError(place, reason)
        if place not in mended[-1:]:
            mended.append(place)

    made = []
    before = ""  # type of the entity that the tag before is in
    is_open = False  # that entity must go on (IOBES, BILOU)
    for i, tag in enumerate(tags):
        prefix, kind = _parse(tag, untyped)
        role = "outside" if tag == "O" else _ROLES[scheme].get(prefix, "")
        if not role or (role != "outside" and not kind):
            allowed = ", ".join(f"{letter}-TYPE" for letter in _ROLES[scheme])
            raise BadTagError(i, f"tags of the scheme {scheme} are O, {allowed}", can_mend=False)
        if is_open and role in ("outside", "first", "only"):
            mend(i, f"the entity of type {before!r} before it has no last word")
        starts = role in ("first", "only")
        if scheme == "iob1":
            if role == "first" and before != kind:
                mend(i, "B- stands behind another entity of the same type only")
            starts = starts or before != kind
        elif role in ("inner", "last") and before != kind:
            mend(i, "it continues no entity of its type")
            starts = True
        made.append("O" if role == "outside" else f"{'B' if starts else 'I'}-{kind}")
        can_continue = scheme in ("iob1", "iob2") or role in ("first", "inner")
        before = kind if role != "outside" and can_continue else ""
        is_open = bool(before) and scheme in ("iobes", "bilou")
    if is_open:
        mend(len(tags) - 1, f"the entity of type {before!r} has no last word")
    return tuple(made)
