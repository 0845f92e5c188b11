"""Sentences of tagged words -> IOB2, whatever scheme the file has.

Enters: CoNLL files (a word and its tag a line, tab or white space between, a blank line between sentences, -DOCSTART-
between documents; MTL-Bioinformatics, CoNLL-2003, BioBERT) or rows with lists of words and tags. Leaves:
`TaggedSentence`s. A tag sequence that its scheme forbids is refused with its line.

Source: the schemes as in Ramshaw and Marcus (1995, IOB1), Tjong Kim Sang and Veenstra (1999, IOB2), Ratinov and Roth
(2009, BILOU).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from domext_ray.errors import CorpusError
from domext_ray.labelled.examples import TaggedSentence
from domext_ray.labelled.readers.files import Dirt, Ids, Record, read_text, shorten, split_lines
from domext_ray.labelled.set_description import SetDescription
from domext_ray.labelled.set_families import SCHEMES

DOCUMENT_START = "-DOCSTART-"
UNTYPED = "ENTITY"
"""Type of tags without one ("B", "I"), unless the description has exactly one label."""
_SPACES = re.compile("[ \\r\\f\\v]+")
"""Between cells; a space of another kind, such as U+00A0 or U+3000, is part of a word."""
_ROLES = {
    "iob2": {"B": "first", "I": "inner"},
    "iob1": {"B": "first", "I": "inner"},
    "iobes": {"B": "first", "I": "inner", "M": "inner", "E": "last", "S": "only"},
    "bilou": {"B": "first", "I": "inner", "L": "last", "U": "only"},
}


class BadTagError(ValueError):
    """A tag that its scheme forbids where it stands.

    Args:
        place: its place in the sentence, from 0.
        reason: the rule.
        can_mend: whether `to_iob2` knows what to make of it.
    """

    def __init__(self, place: int, reason: str, *, can_mend: bool = True) -> None:
        super().__init__(reason)
        self.place, self.can_mend = place, can_mend


def read_conll(path: Path, description: SetDescription) -> Iterator[Record]:
    """Yield the sentences of a CoNLL file.

    The description's columns "tokens" and "tags" may have places of their own; default first and last. A line without
    word and tag is a CorpusError.
    """
    token_place, tag_place = (
        next((each for each in description.columns[role] if isinstance(each, int)), default)
        for role, default in (("tokens", 0), ("tags", -1))
    )
    tokens: list[str] = []
    tags: list[str] = []
    num_documents = 0
    lines = split_lines(read_text(path))
    for number, line in enumerate([*lines, ""], 1):
        is_document_start = line.startswith(DOCUMENT_START)
        if line.strip() and not is_document_start:
            cells = line.split("\t") if "\t" in line else _SPACES.split(line.strip(" \r\f\v"))
            try:
                token, tag = cells[token_place], cells[tag_place].strip()
            except IndexError:
                token = tag = ""
            if len(cells) < 2 or not token or not tag:
                raise CorpusError(
                    f"{path}:{number} has another layout: a word and its tag are expected, but {shorten(line, 40)} is "
                    "there."
                )
            tokens.append(token)
            tags.append(tag)
            continue
        if tokens:
            document = str(num_documents) if num_documents else ""
            values = {"tokens": tokens, "tags": tags, "document": document, "is_word_a_line": True}
            yield Record(values, str(path), number - len(tokens))
            tokens, tags = [], []
        num_documents += is_document_start


def make_tagged(records: Iterable[Record], description: SetDescription, dirt: Dirt) -> list[TaggedSentence]:
    """Make sentences with IOB2 tags from the records of one file.

    With the scheme "auto" all tags of the file tell it. Rows without words, and tags that are mended, are counted;
    lists of different lengths, and tags that the scheme forbids, are a CorpusError.
    """
    rows = [each for each in records if _check_row(each, dirt)]
    declared = SCHEMES[description.scheme] or description.scheme
    scheme = detect_scheme([each.values["tags"] for each in rows]) if declared == "auto" else declared
    untyped = description.labels[0] if len(description.labels) == 1 else UNTYPED
    ids = Ids()
    made = []
    for row in rows:
        mended: list[int] | None = [] if dirt.mends else None
        try:
            tags = to_iob2(row.values["tags"], scheme, untyped, mended)
        except BadTagError as error:
            tag = row.values["tags"][error.place]
            hint = ", or mend all such tags with --labelled.repair true" if error.can_mend else ""
            raise CorpusError(
                f"{_name_place(row, error.place)} has the tag {tag!r}: {error}; mend it, or set scheme ({scheme} "
                f"here){hint}."
            ) from None
        for place in mended or ():
            dirt.add(_name_place(row, place).rstrip(","), "tag", f"breaks a rule of {scheme}", outcome="mended")
        document = row.values.get("document")
        made.append(
            TaggedSentence(
                ids.make(row.values.get("id")),
                row.source,
                tuple(row.values["tokens"]),
                tags,
                "" if document is None else str(document),
            )
        )
    return made


def _name_place(row: Record, place: int) -> str:
    is_word_a_line = row.values.get("is_word_a_line", False)
    return f"{row.path}:{row.line + place}" if is_word_a_line else f"{row.source}, tag {place + 1},"


def _check_row(row: Record, dirt: Dirt) -> bool:
    tokens, tags = row.values["tokens"], row.values["tags"]
    for role, value in (("tokens", tokens), ("tags", tags)):
        if not isinstance(value, (list, tuple)) or any(not isinstance(each, str) for each in value):
            raise CorpusError(
                f"{row.source} has another layout: {role} must be a list of texts, but {shorten(value, 40)} is there."
            )
    if len(tokens) != len(tags):
        raise CorpusError(f"{row.source} has {len(tokens)} words but {len(tags)} tags; each word needs one tag.")
    if not tokens or not all(tokens):
        dirt.add(row.source, "row", "has no words" if not tokens else "has an empty word")
        return False
    return True


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
            allowed = ", ".join(f"{each}-TYPE" for each in _ROLES[scheme])
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
