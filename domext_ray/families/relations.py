"""Texts with two marked stretches -> the relation between them.

Both stretches are surrounded by marks: "@ … @" the first argument, "# … #" the second, or other characters where the
vocabulary lacks these. No token is added. The head reads the states at the two opening marks (entity start; Baldini
Soares et al., "Matching the Blanks", ACL 2019, section 3.2; marks of plain characters as in Zhou and Chen, "An Improved
Baseline for Sentence-level Relation Extraction", 2022, section 3.1, without types).

A text that is too long keeps all four marks. It loses first what is farthest from the marked stretches, then what lies
between them, and last the ends of the stretches themselves.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from domext_ray.errors import ConfigError, CorpusError
from domext_ray.families import state
from domext_ray.families.comparison import Compared, compare_classes
from domext_ray.families.family import CLASS_METRICS, ID, Prediction, SplitRows
from domext_ray.families.readers.examples import Entity, MarkedText
from domext_ray.families.readers.issues import DataIssues, SetRow
from domext_ray.families.readers.set_description import SetDescription
from domext_ray.families.rows import Row
from domext_ray.families.state import NOTHING_LEARNED, State
from domext_ray.families.task import StagedTask
from domext_ray.families.texts import SingleLabelTask
from domext_ray.families.windows import read_template
from domext_ray.text.vocabulary.tokenizer import make_backend

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Stretch = tuple[int, int]
MARKS = "@#$%&*^~|=+_<>/\\`{}[]!?;:()-,."
"""Characters to mark stretches with, the first two that the base's vocabulary has."""

_WITHOUT = re.compile(r"no[-_ ]?(?:relation|rel|ne)|n/?a|other|unrelated|negative|false", re.IGNORECASE)
"""Names of labels that say of a pair that it has no relation, such as TACRED's and SemEval's."""

_INSIDE, _BETWEEN, _OUTSIDE = 1, 2, 3  # what is kept first; marks, 0, always


class MarkingTask(StagedTask):
    """A family whose rows have marks around the two arguments of a relation.

    The marks are words of the base: those that an extension has added are hardly trained, and look alike. They are in
    the state as "written", and left out of files where any word of the vocabulary would be the same, as in 0.1.0.
    """

    @cached_property
    def _any_marks(self) -> list[str]:
        return find_marks(self.tokenizer)

    def learn(self) -> dict[str, Any]:
        """Choose the marks that are written into texts."""
        return {**super().learn(), "written": find_marks(self.tokenizer, self.base_words)}

    def state_dict(self) -> dict[str, Any]:
        """See `StagedTask.state_dict`."""
        values = super().state_dict()
        return {name: value for name, value in values.items() if name != "written" or value != self._any_marks}

    def load_state_dict(self, state: State) -> None:
        """See `StagedTask.load_state_dict`."""
        super().load_state_dict({"written": self._any_marks, **state})

    @property
    def identity(self) -> dict[str, Any]:
        """See `StagedTask.identity`."""
        return {"marks": written} if (written := self.state_dict().get("written")) else {}


class RelationTask(MarkingTask, SingleLabelTask):
    """A relation for every marked pair (`MarkedText`); see `SingleLabelTask`.

    Its state has the marks of the set's files, by which raw texts say which stretches they are about.
    """

    family = "relation"
    readers = {"records": ("text", "label")}
    columns = {
        **ID,
        "text": ("text", "sentence"),
        "label": ("label", "relation"),
        "head": ("head", "subject"),
        "tail": ("tail", "object"),
    }
    metrics = CLASS_METRICS
    head = "DomextForRelationClassification"
    metric = "f1.micro"
    state_rules = {"marks": state.MARKS, "written": state.TEXTS}

    def learn(self) -> dict[str, Any]:
        """Return the set's marks."""
        return {**super().learn(), "marks": [list(mark) for mark in self.data.marks]}

    def prepare(self) -> None:
        """Take the room of a row."""
        super().prepare()
        self._template = read_template(self.tokenizer, pair=False)
        self._room = self._template.measure_room(self.options.max_length, least=4)

    @classmethod
    def read(cls, row: SetRow) -> MarkedText:
        """Make a text with two marked stretches; the first of the set's marks is the head. See `Family.read`.

        Arguments are marked either by placeholders, which stay (@GENE$ and @DISEASE$: GAD and EU-ADR as in BioBERT),
        or by brackets around them, which are taken out (<< >> and [[ ]]: ChemProt as in SciBERT). Where a text has none
        of these, `head` and `tail` say where they are.
        """
        text, label = row.read_text("text", is_stripped=False), row.read_label() if row.is_labelled else ""
        marks = [tuple(mark) for mark in row.state.get("marks", ())] or row.description.marks
        given = [row.get(role) for role in ("head", "tail")]
        is_placed = not row.is_labelled and any(isinstance(value, Mapping) for value in given)
        if is_placed or (any(value is not None for value in given) and not _has_brackets([text], marks)):
            head, tail = (_read_place(row, role, text) for role in ("head", "tail"))
            return MarkedText("", row.source, text, head, tail, label)
        text = text.strip()
        try:
            return MarkedText("", row.source, *cut_marks(text, marks), label)
        except MarksError as error:
            rule = "" if row.is_labelled else "; mark each argument once, or give fields 'head' and 'tail'"
            row.leave_out(f"{error}{rule}", text if row.is_labelled else "")

    @classmethod
    def read_together(cls, splits: SplitRows, issues: DataIssues) -> SplitRows:
        """Return the rows; a CorpusError says that no text has any of the marks.

        A label whose name says that there is no relation, which would count in F1, is told.
        """
        rows = [row for own in splits.values() for row in own if isinstance(row.get("text"), str)]
        if rows:
            _require_arguments(rows, rows[0].description)
            _tell_negatives(rows, rows[0].description, issues)
        return splits

    @classmethod
    def compare(cls, example: MarkedText, prediction: Prediction, state: State = NOTHING_LEARNED) -> Compared:
        spans = replace(example.head, label="1"), replace(example.tail, label="2")
        return compare_classes(example, example.text, example.label, prediction["label"], spans)

    def encode(self, examples: Sequence[MarkedText], *, is_training: bool) -> list[Row]:
        marked = [mark_text(text, self.state["written"]) for text in examples]
        encodings = self.backend.encode_batch([text for text, _ in marked], add_special_tokens=False)
        rows: list[Row] = []
        num_cut: dict[int, list[str]] = {_OUTSIDE: [], _BETWEEN: []}
        for i, (example, (_, characters), encoding) in enumerate(zip(examples, marked, encodings, strict=True)):
            # A mark is a piece of its own.
            places = [cast(int, encoding.char_to_token(character)) for character in characters]
            kept, lost = choose_pieces(len(encoding.ids), places, self._room)
            if lost:
                num_cut[lost].append(example.source)
            row_ids, types = self._template.join(np.array(encoding.ids, dtype=np.int64)[kept])
            opening = self._template.find_text() + np.searchsorted(kept, [places[0], places[2]]).astype(np.int64)
            targets = {**self.make_targets(example), "input_entity_positions": opening}
            rows.append(Row(i, row_ids, types, targets))
        what = f"texts have more than {self.options.max_length} tokens and are cut around their marked stretches"
        self.note_cases(num_cut[_OUTSIDE], len(examples), what)
        what = "texts have marked stretches farther apart than a row and are cut between them as well"
        self.note_cases(num_cut[_BETWEEN], len(examples), what)
        return rows


def find_marks(tokenizer: PreTrainedTokenizerBase, base_words: int = 0) -> list[str]:
    """Return the first two characters of `MARKS` that a vocabulary has among its first entries; 0: among all."""
    encodings = make_backend(tokenizer).encode_batch([f" {mark} " for mark in MARKS], add_special_tokens=False)
    most, unknown = base_words or len(tokenizer), tokenizer.unk_token_id
    known = [
        mark
        for mark, encoding in zip(MARKS, encodings, strict=True)
        if encoding.ids and unknown not in encoding.ids and max(encoding.ids) < most
    ]
    if len(known) < 2:
        raise ConfigError(
            f"the model's vocabulary has {len(known)} of the characters {MARKS}; marking two stretches of a text takes "
            "two of them, so choose a model whose vocabulary has these."
        )
    return known[:2]


def mark_text(example: MarkedText, marks: Sequence[str]) -> tuple[str, list[int]]:
    """Write marks around both stretches, a space on each side; stretches may nest, touch or overlap.

    Returned with the text are the places of the characters that open and close the first argument, and the second.
    """
    # At one place, what closes comes before what opens; of two that open the longer is outside, likewise of two that
    # close the shorter comes first.
    events: list[tuple[int, int, int, int]] = []
    for i, span in enumerate((example.head, example.tail)):
        length = span.end - span.start
        events += [(span.start, 1, -length, 2 * i), (span.end, 0, length, 2 * i + 1)]
    text, last, places = "", 0, [0, 0, 0, 0]
    for place, _, _, number in sorted(events):
        text += f"{example.text[last:place]} {marks[number // 2]} "
        places[number], last = len(text) - 2, place
    return text + example.text[last:], places


def choose_pieces(num_pieces: int, marks: Sequence[int], room: int) -> tuple[np.ndarray, int]:
    """Return the places of a text's pieces that a row keeps, int64 in ascending order, and the nearest that was lost.

    `marks` are the places of the marks that open and close the first stretch, and the second; `room` is 4 or more. What
    was lost is 0 for nothing, 2 for pieces between or in the stretches, and 3 for pieces around them only.
    """
    if num_pieces <= room:
        return np.arange(num_pieces), 0
    places = np.arange(num_pieces)
    blocks = sorted([(marks[0], marks[1]), (marks[2], marks[3])])
    first, last = min(marks), max(marks)
    # Distances to the stretches' own beginnings, to the nearer stretch, and to both together.
    kinds = np.where((places < first) | (places > last), _OUTSIDE, _BETWEEN)
    distances = np.maximum(first - places, places - last)
    between = kinds == _BETWEEN
    to_blocks = [np.maximum(begin - places, places - end) for begin, end in blocks]
    distances[between] = np.minimum(*to_blocks)[between]
    for begin, end in blocks:
        inside = (places >= begin) & (places <= end)
        nearer = inside & ((kinds != _INSIDE) | (places - begin < distances))
        kinds[nearer], distances[nearer] = _INSIDE, (places - begin)[nearer]
    kinds[list(marks)] = 0
    order = np.lexsort((distances, kinds))
    lost = kinds[order[room:]].min()
    return np.sort(order[:room]), _OUTSIDE if lost == _OUTSIDE else _BETWEEN


def _require_arguments(rows: Sequence[SetRow], description: SetDescription) -> None:
    has_places = any(row.get("head") is not None and row.get("tail") is not None for row in rows)
    if not has_places and not _has_brackets([row.get("text") for row in rows], description.marks):
        raise CorpusError(
            f"No text of {description.data} has {_name_marks(description.marks)} for its two arguments; write marks: "
            f'[["<e1>", "</e1>"], ["<e2>", "</e2>"]], or as they are, in {description.yaml}, or give each row its head '
            "and tail, their texts or {start: N, end: N}."
        )


def _tell_negatives(rows: Sequence[SetRow], description: SetDescription, issues: DataIssues) -> None:
    """Warn of labels by whose names a pair has no relation, which F1 counts where a description does not say so."""
    labels = {label.strip() for row in rows if isinstance(label := row.get("label"), str)}
    for label in sorted(labels) if description.negative_label is None else ():
        if _WITHOUT.fullmatch(label):
            issues.warn(
                f"The label {label!r} of {description.data} counts as a relation in F1; if it says that there is none, "
                f"write negative_label: {json.dumps(label, ensure_ascii=False)} in {description.yaml}."
            )


def _has_brackets(texts: Sequence[str], marks: Sequence[tuple[str, ...]]) -> bool:
    brackets = {bracket for mark in marks for bracket in mark}
    return any(bracket in text for text in texts for bracket in brackets)


def _read_place(row: SetRow, role: str, text: str) -> Entity:
    """Return where an argument is, which is given by its characters, or by its own text, if that is there once."""
    values = row.get(role)
    if isinstance(values, str):
        if (number := text.count(values)) != 1:
            row.leave_out(f"has a {role} that is {'more than once' if number else 'not'} in its text", values)
        return Entity(text.index(values), text.index(values) + len(values), "")
    start, end = (values.get("start"), values.get("end")) if isinstance(values, Mapping) else (None, None)
    if type(start) is not int or type(end) is not int or not 0 <= start < end <= len(text):
        row.leave_out(
            f"has {str(values)[:60]!r} as {role!r}; it must be an object with 'start' and 'end', places among the "
            f"{len(text)} characters of its text"
        )
    name = str(values.get("name") or "")
    if name and _join_words(text[start:end]) != _join_words(name):
        row.leave_out(f"has a {role} whose places are those of other text than its name", [name, text[start:end]])
    return Entity(start, end, "")


def _join_words(text: str) -> str:
    return "".join(text.split()).casefold()


class MarksError(ValueError):
    """Why a text's two arguments are not marked, as it follows "the row" in a sentence."""


def cut_marks(text: str, marks: Sequence[tuple[str, ...]]) -> tuple[str, Entity, Entity]:
    """Return a text without its brackets, and the two stretches that were marked.

    One may be inside the other. A MarksError says why not both are marked, once each.
    """
    marked = [find_marked(text, mark) for mark in marks]
    outer = [(around[0][0], around[1][1]) if around else inner for inner, around in marked]
    (start, end), (other_start, other_end) = sorted(outer)
    if start < other_start < end < other_end:
        raise MarksError(f"has {_name_marks(marks)} that cross")
    brackets = sorted(bracket for _, around in marked for bracket in around)
    head, tail = (
        Entity(
            start - _count_before(brackets, start),
            end - _count_before(brackets, end),
            mark[0].strip("@$") if len(mark) == 1 else "",
        )
        for ((start, end), _), mark in zip(marked, marks, strict=True)
    )
    for start, end in reversed(brackets):
        text = text[:start] + text[end:]
    return text, head, tail


def _name_marks(marks: Sequence[tuple[str, ...]]) -> str:
    return " and ".join(" ".join(mark) for mark in marks)


def find_marked(text: str, mark: tuple[str, ...]) -> tuple[Stretch, list[Stretch]]:
    """Return the marked stretch, and the stretches of its brackets with the space inside them.

    Brackets with a space inside count first: a text of chemistry has [[ and >> of its own. A MarksError says that the
    mark is not there, or not alone.
    """
    if len(mark) == 1:
        _require_once(text, mark[0])
        start = text.find(mark[0])
        return (start, start + len(mark[0])), []
    if any(map(str.isalnum, mark[0])) and mark[0] not in mark[1] and mark[1] not in mark[0]:  # of no text, as <e1> is
        for bracket in mark if any(bracket in text for bracket in mark) else ():
            _require_once(text, bracket)
    opening, closing = (re.escape(bracket) for bracket in mark)
    for space in (" ", ""):
        pattern = f"{opening}{space}(.+?){space}{closing}"
        found = [match for match in re.finditer(pattern, text, re.DOTALL) if match[1].strip()]
        if len(found) > 1:
            raise MarksError(f"has {_name_marks([mark])} more than once")
        if found:
            (match,) = found
            inner = match.span(1)
            start = inner[0] + len(match[1]) - len(match[1].lstrip())
            end = inner[1] - (len(match[1]) - len(match[1].rstrip()))
            return (start, end), [(match.start(), start), (end, match.end())]
    raise MarksError(f"has no {_name_marks([mark])} around an argument")


def _require_once(text: str, mark: str) -> None:
    if (count := text.count(mark)) != 1:
        raise MarksError(f"has {mark} more than once" if count else f"has no {mark}")


def _count_before(brackets: list[Stretch], place: int) -> int:
    """Count the characters of brackets before a place."""
    return sum(min(end, place) - start for start, end in brackets if start < place)
