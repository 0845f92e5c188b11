"""Raw records -> unlabelled examples of a task family, which its task encodes and decodes.

A record is a JSON object, or a row of a table. Its fields have the names that the readers of labelled sets know:

    ner                                                   text, or tokens (a list of words)
    nested_ner, relation_extraction, normalization        text
    classification, multilabel, regression                text, and pair where the model reads pairs
    relation                                              text with the two arguments marked as in the set, or text
                                                          with head and tail, each {"start": …, "end": …}
    qa                                                    question, context
    multiple_choice                                       context, options (a list, or ending0, ending1, …), and stem

`id` is optional. Other fields are left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias

from domext_ray.errors import CorpusError
from domext_ray.families.readers.cells import read_nested
from domext_ray.families.readers.examples import (
    AnnotatedText,
    AnyExample,
    Choice,
    Entity,
    LabelledText,
    MarkedText,
    Mention,
    MultiLabelText,
    Question,
    RawSentence,
    TaggedSentence,
)
from domext_ray.families.readers.issues import is_missing
from domext_ray.families.readers.rows import MarksError, cut_marks
from domext_ray.families.readers.words import WordMarks, cut_words
from domext_ray.families.registry import FAMILIES
from domext_ray.families.state import State

RawRecord: TypeAlias = Mapping[str, Any]
Marks: TypeAlias = Sequence[tuple[str, ...]]

USUAL_MARKS: Marks = (("<<", ">>"), ("[[", "]]"))
"""Marks of the first argument of a relation and of the second, where a set says nothing else (ChemProt's)."""

NOTHING_LEARNED: State = MappingProxyType({})
_NEEDED = {"qa": ("question", "context"), "multiple_choice": ("context", "options")}
"""What families other than those of a text read."""
_PAIR_NAMES = {"text": ("text_a",), "pair": ("text_b",)}


def make_example(family: str, record: RawRecord, source: str, state: State = NOTHING_LEARNED) -> AnyExample:
    """Make an unlabelled example of a family.

    Args:
        family: a key of `FAMILIES`.
        record: a raw record.
        source: where it comes from, as FILE:LINE, for messages; its id, where the record has none.
        state: what the model's task learned from its set (`TaskDescription.state`): the marks of a relation's arguments
            in the place of `USUAL_MARKS`, and the marks that are part of words.

    Raises:
        CorpusError: it is not one of the family's.
    """
    if not isinstance(record, Mapping):
        raise CorpusError(f"{source} is {type(record).__name__}; it must be an object with the fields of {family}.")
    reader = _Reader(family, record, source, state)
    given = record.get("id")
    name = source if is_missing(given) or given == "" else str(given)
    return _MAKERS[family](reader, name)


def list_fields(family: str) -> tuple[str, ...]:
    """Return the names of all fields that an example of a family may be made of, "text" and "id" apart."""
    known = FAMILIES[family].columns
    names = {*known, *(name for columns in known.values() for name in columns if isinstance(name, str))}
    names |= {name for further in _PAIR_NAMES.values() for name in further} | {"head", "tail"}
    return tuple(sorted(names - {"id", "text"}))


def list_needed(family: str, text: str) -> tuple[tuple[str, ...], ...]:
    """Return the names of the fields that an example of a family needs, of each group one.

    `text` is the field that plays the part of "text"; another one than that is needed itself.
    """
    reader = _Reader(family, {}, "", NOTHING_LEARNED)
    names = [tuple(dict.fromkeys([role, *reader.names(role)])) for role in _NEEDED.get(family, ("text",))]
    if family == "ner":
        names = [(*names[0], "tokens")]
    return tuple((text,) if "text" in group and text != "text" else group for group in names)


class _Reader:
    """Reads the fields of one record, by the names that its family's labelled sets have."""

    def __init__(self, family: str, record: RawRecord, source: str, state: State) -> None:
        self.family, self.record, self.source, self.state = family, record, source, state

    def names(self, role: str) -> tuple[str, ...]:
        known = FAMILIES[self.family].columns
        columns = (column for column in known.get(role, (role,)) if isinstance(column, str))
        return (*columns, *(_PAIR_NAMES.get(role, ()) if "pair" in known else ()))

    def find(self, role: str) -> Any:
        """Return what is in the first field of a role that is there; None if none is."""
        return next((self.record[name] for name in self.names(role) if not is_missing(self.record.get(name))), None)

    def read_text(self, role: str, *, is_stripped: bool = True) -> str:
        value = self.find(role)
        if value is None:
            named = " or ".join(map(repr, dict.fromkeys([role, *self.names(role)])))
            raise CorpusError(f"{self.source} has no field {named}; {self.family} needs one.")
        return self.check_text(value, role, is_stripped=is_stripped)

    def check_text(self, value: Any, role: str, *, is_stripped: bool = True) -> str:
        if not isinstance(value, str):
            raise CorpusError(f"{self.source} has {str(value)[:60]!r} as {role!r}; it must be a text.")
        if not value.strip():
            raise CorpusError(f"{self.source} has an empty {role!r}; it must have some text.")
        if not value.isascii() and any("\ud800" <= char <= "\udfff" for char in value):
            raise CorpusError(f"{self.source} has half a surrogate pair in {role!r}; save it as UTF-8.")
        return value.strip() if is_stripped else value


def _make_sentence(reader: _Reader, name: str) -> TaggedSentence:
    tokens = _read_list(reader.find("tokens")) if is_missing(reader.record.get("text")) else None
    if tokens is None:
        text = reader.read_text("text", is_stripped=False)
        words, offsets = cut_words(text, WordMarks.from_json(reader.state))
        return RawSentence(name, reader.source, words, ("O",) * len(words), "", text, offsets)
    if not isinstance(tokens, (list, tuple)) or not tokens:
        raise CorpusError(f"{reader.source} has {str(tokens)[:60]!r} as 'tokens'; it must be a list of words.")
    words = tuple(reader.check_text(token, "tokens", is_stripped=False) for token in tokens)
    return TaggedSentence(name, reader.source, words, ("O",) * len(words))


def _read_list(value: Any) -> Any:
    """Return a list, which a cell may spell; what is none is refused by whoever wants one."""
    try:
        return read_nested(value)
    except ValueError:
        return value


def _make_annotated(reader: _Reader, name: str) -> AnnotatedText:
    return AnnotatedText(name, reader.source, reader.read_text("text", is_stripped=False), ())


def _make_text(reader: _Reader, name: str) -> LabelledText:
    text = reader.read_text("text")
    pair = None if reader.find("pair") is None else reader.read_text("pair")
    return LabelledText(name, reader.source, text, pair, "")


def _make_unlabelled(reader: _Reader, name: str) -> MultiLabelText:
    example = _make_text(reader, name)
    return MultiLabelText(name, reader.source, example.text, example.pair, ())


def _make_question(reader: _Reader, name: str) -> Question:
    context = reader.read_text("context", is_stripped=False)
    return Question(name, reader.source, reader.read_text("question"), context, ())


def _make_choice(reader: _Reader, name: str) -> Choice:
    options = _read_list(reader.record.get("options"))
    if options is None:
        options = [reader.record[column] for column in reader.names("options") if column in reader.record]
    if not isinstance(options, (list, tuple)) or len(options) < 2:
        raise CorpusError(f"{reader.source} has {str(options)[:60]!r} as 'options'; give 2 texts or more.")
    stem = reader.find("stem")
    texts = tuple(reader.check_text(option, "options") for option in options)
    stem = reader.check_text(stem, "stem") if stem not in (None, "") else ""
    return Choice(name, reader.source, reader.read_text("context"), stem, texts, 0)


def _make_mention(reader: _Reader, name: str) -> Mention:
    return Mention(name, reader.source, reader.read_text("text"), ())


def _make_marked(reader: _Reader, name: str) -> MarkedText:
    record = reader.record
    marks: Marks = [*map(tuple, reader.state.get("marks", ()))] or USUAL_MARKS
    if "head" in record or "tail" in record:
        text = reader.read_text("text", is_stripped=False)
        head, tail = (_read_span(reader, role, text) for role in ("head", "tail"))
        return MarkedText(name, reader.source, text, head, tail, "")
    try:
        text, head, tail = cut_marks(reader.read_text("text"), marks)
    except MarksError as error:
        rule = "mark each argument once, or give fields 'head' and 'tail'"
        raise CorpusError(f"{reader.source} {error}; {rule}.") from None
    return MarkedText(name, reader.source, text, head, tail, "")


def _read_span(reader: _Reader, role: str, text: str) -> Entity:
    values = reader.record.get(role)
    start, end = (values.get("start"), values.get("end")) if isinstance(values, Mapping) else (None, None)
    if type(start) is not int or type(end) is not int or not 0 <= start < end <= len(text):
        raise CorpusError(
            f"{reader.source} has {str(values)[:60]!r} as {role!r}; it must be an object with 'start' and 'end', "
            f"places among the {len(text)} characters of its text."
        )
    return Entity(start, end, "")


_MAKERS: Mapping[str, Callable[[_Reader, str], AnyExample]] = {
    "ner": _make_sentence,
    "nested_ner": _make_annotated,
    "relation_extraction": _make_annotated,
    "relation": _make_marked,
    "classification": _make_text,
    "multilabel": _make_unlabelled,
    "regression": _make_text,
    "qa": _make_question,
    "multiple_choice": _make_choice,
    "normalization": _make_mention,
}
