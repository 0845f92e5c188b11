"""Rows of labelled files by the roles of their values, and the count of what is wrong with them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from domext_ray.errors import CorpusError
from domext_ray.families.readers.cells import as_whole, is_missing, shorten
from domext_ray.families.readers.set_description import SetDescription
from domext_ray.text.data.readers import has_half_pair

STRICT = "{place}: the {what} {said}; mend it, or leave out --labelled.strict."
UNLABELLED = "{place} {said}."
"""How a row that breaks a rule is refused: one of a labelled set, and one that somebody wants a prediction of."""
_NAMED_PLACES = 3


@dataclass(frozen=True)
class Record:
    """One row as it was read: values by column or by role, and where it stands."""

    values: Mapping[Any, Any]
    path: str  # its file or split
    place: int | str  # its line there (or row), from 1; or its path inside of a JSON document, such as data[3]; 0: none

    @property
    def source(self) -> str:
        """FILE:PLACE, or what else a message calls it."""
        return f"{self.path}:{self.place}" if self.place else self.path


class LeftOut(Exception):  # noqa: N818 (it is no error: it was counted)
    """A row breaks a rule, which was counted."""


class DataIssues:
    """Counts rows, and parts of rows, that break a rule; a strict counter refuses the first.

    If it `mends`, readers put right and count what they can, instead of refusing it.
    """

    def __init__(self, is_strict: bool, *, mends: bool = False, refusal: str = STRICT) -> None:
        self.is_strict, self.mends, self.refusal = is_strict, mends, refusal
        self._places: dict[tuple[str, str, str], list[tuple[str, str]]] = {}
        self.warnings: list[str] = []
        self._said: list[str] = []

    def add(
        self, place: str, what: str, fault: str, detail: object = "", *, outcome: str = "left out", source: str = ""
    ) -> None:
        """Count one, or refuse it where the counter is strict.

        The place is FILE:PLACE; the fault is the same for all of a kind, as it follows "the row" in a sentence. Without
        an outcome it is gold, of the example that was read at `source`: left out of training, and kept to be scored.
        """
        if self.is_strict:
            shown = f" ({shorten(detail)})" if detail != "" else ""
            raise CorpusError(self.refusal.format(place=place, what=what, said=f"{fault}{shown}"))
        self._places.setdefault((what, fault, outcome), []).append((place, source))

    def warn(self, sentence: str) -> None:
        """Keep what must be heard before training, a sentence."""
        self.warnings.append(sentence)

    def say(self, sentence: str) -> None:
        """Tell how a file, or the whole set, is read where that was not a matter of course."""
        self._said.append(sentence)

    def say_once(self, sentence: str) -> None:
        """Tell it, unless another split has."""
        if sentence not in self._said:
            self.say(sentence)

    def list_notes(self, train: Collection[str] = ()) -> list[str]:
        """Return one sentence a kind of fault, with the first places, and what was said.

        `train` has the sources of training examples.
        """
        notes = []
        for (what, fault, outcome), found in self._places.items():
            sides = {outcome: [place for place, _ in found]}
            if not outcome:
                sides = {
                    "left out": [place for place, source in found if source in train],
                    "kept to be scored": [place for place, source in found if source not in train],
                }
            notes += [f"{len(p)} x {what} {done}: it {fault} ({list_places(p)})." for done, p in sides.items() if p]
        return [*notes, *self._said]


def list_places(places: list[str]) -> str:
    """Name the first places, and how many more there are."""
    named = ", ".join(places[:_NAMED_PLACES])
    return named if len(places) <= _NAMED_PLACES else f"{named} and {len(places) - _NAMED_PLACES} more"


@dataclass(frozen=True)
class SetRow:
    """A record whose values go by role, and what it takes to make an example of it."""

    record: Record
    description: SetDescription
    issues: DataIssues
    fields: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Of a row without labels the names that its fields may have, by role; empty: it has its labels."""
    state: Mapping[str, Any] = field(default_factory=dict)  # of a row without labels what the model's task learned

    @property
    def is_labelled(self) -> bool:
        """Whether its labels are read, too."""
        return not self.fields

    @property
    def source(self) -> str:
        """FILE:PLACE."""
        return self.record.source

    def get(self, role: str) -> Any:
        """Return the value of a role, or None."""
        value = self.record.values.get(role)
        return None if is_missing(value) else value

    def put(self, role: str, value: object) -> SetRow:
        """Return the row with another value of a role."""
        return replace(self, record=replace(self.record, values={**self.record.values, role: value}))

    def leave_out(self, fault: str, detail: object = "", what: str = "row") -> NoReturn:
        """Count the row, and make no example of it."""
        self.issues.add(self.source, what, fault, detail)
        raise LeftOut

    def keep_gold(self, what: str, fault: str, detail: object, place: str = "") -> None:
        """Count gold that nothing can be learned from."""
        self.issues.add(place or self.source, what, fault, detail, outcome="", source=self.source)

    def read_text(self, role: str, *, is_stripped: bool = True) -> str:
        """Return the text that plays a role; in a row with labels a list of texts is joined by spaces.

        White space at both ends is not stripped off texts that offsets point into.
        """
        value = self.get(role)
        if value is None and not self.is_labelled:
            named = " or ".join(map(repr, self.fields.get(role, (role,))))
            self.leave_out(f"has no field {named}; {self.description.task} needs one")
        is_list = self.is_labelled and isinstance(value, (list, tuple)) and value
        if is_list and all(isinstance(text, str) for text in value):
            value = " ".join(value)
        if not isinstance(value, str):
            self.leave_out(f"has no text as {role!r}", value)
        if not value.strip():
            self.leave_out(f"has an empty {role!r}")
        self.check_text(value, role)
        return value.strip() if is_stripped else value

    def check_text(self, text: str, role: str) -> None:
        """Leave out a row with a text that no tokenizer takes."""
        if has_half_pair(text):
            self.leave_out(f"has half a surrogate pair in {role!r}", text)

    def read_label(self) -> str:
        """Return the label: a text, a whole number or a truth value, or a list of one of them.

        One that the description has is returned as it is there.
        """
        value = self.get("label")
        if isinstance(value, (list, tuple)):
            if len(value) > 1:
                self.leave_out("has several labels, and its task takes one", value)
            value = value[0] if value else None
        if isinstance(value, bool):
            return str(value).lower()
        if not (isinstance(value, str) and value.strip() in self.description.labels):
            value = as_whole(value)
        if not isinstance(value, int) and not (isinstance(value, str) and value.strip()):
            self.leave_out("has no label", "" if value in (None, "") else value)
        return str(value).strip()

    def read_objects(self, role: str, text: str = "", names: Sequence[Any] = ()) -> list[dict[str, Any]]:
        """Return a list of objects, also from the object of lists that some datasets have.

        Each must have a text as `text`, if that is given; a list in place of an object has values of these `names`, and
        may lack the last.
        """
        value = self.get(role)
        value = [] if value in (None, "") else value
        if isinstance(value, Mapping) and all(isinstance(column, (list, tuple)) for column in value.values()):
            columns = list(value.values())
            is_even = all(len(column) == len(columns[0]) for column in columns)
            value = [dict(zip(value, cells, strict=True)) for cells in zip(*columns, strict=True)] if is_even else None
        if names and isinstance(value, (list, tuple)):
            sizes = (len(names) - 1, len(names))
            is_list = [isinstance(item, (list, tuple)) and len(item) in sizes for item in value]
            value = [dict(zip(names, v, strict=False)) if short else v for v, short in zip(value, is_list, strict=True)]
        is_whole = isinstance(value, (list, tuple)) and all(isinstance(item, dict) for item in value)
        if not is_whole or (text and not all(isinstance(item.get(text), str) for item in value)):
            what, ending = (role, f" with {text!r}") if text else (f"its {role}", "")
            rule = f"{what} must be a list of objects{ending}, but {shorten(self.get(role), 60)} is there"
            raise CorpusError(f"{self.source} has another layout: {rule}.")
        return list(value)
