"""What a corpus loses on its way to documents: counted by reason, with the first place of each, and told.

Rows that hold no text (no UTF-8, no JSON, another field, null, ...) are a sign that a file or `--prepare.field` is not
what the user meant: above 1 % of all rows that is a warning, above `--prepare.max_dropped_frac` an error. Documents
that are too short, and duplicates, are counted and told, and no more.
"""

from __future__ import annotations

import json
import math
import shlex
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from domext_ray.config.pretrain import PrepareConfig
from domext_ray.errors import CorpusError
from domext_ray.text.data.files import JSONL, PACKAGE_DOCS, RECODE, TEXT, SourceFile
from domext_ray.text.data.groups import FieldValues, join_values
from domext_ray.text.data.line_forms import COLUMNS
from domext_ray.text.data.tables import Forms, tell_forms

WARNING_FRAC = 0.01
_MOST_NOT_UTF8 = 0.05
"""Of the rows of a file, or of all: above it they are in another encoding, and not damaged."""
_FEW_ROWS = 1
BLANK = "blank"
"""Lines without a character stand between texts, so they are no loss."""

_NOT_TEXT = {
    "bad_utf8": "that are not UTF-8",
    "bad_json": "that are no JSON",
    "too_long": "of JSON above {limit:,} bytes (four times --prepare.max_document_chars)",
    "bad_csv": "of another width than the header",
    "bad_quote": "with a quote that is neither doubled nor the end of its cell",
    "no_field": "without the field {field}",
    "nested": "with {field} within another object",
    "null": "with null as {field}",
    "list": "with a list as {field}",
    "not_text": "with something other than text as {field}",
    "empty": "with an empty {field}",
}
_OTHER = {
    "too_short": "under {shortest} characters (--prepare.min_document_chars)",
    "duplicate": "equal to an earlier one",
    "no next sentence": "of a single sentence",
    "no other text": "without another of the same split in their reading task (--prepare.shard_bytes)",
    "no_token": "of which a text makes no token",
}
_FIELD_REASONS = ("no_field", "null", "not_text", "empty")
_UNITS = {TEXT: "line", JSONL: "line", PACKAGE_DOCS: "paragraph"}


def describe_place(file: SourceFile, number: int, start: int = 0, note: str = "") -> str:
    """Return the place of a line, row or paragraph of a file, in words.

    `number` counts from 1 at the byte `start`, as nothing before a range is read; 0 stands for the whole file.
    """
    unit, place = _UNITS.get(file.kind, "row"), file.path
    if number and start:
        place += f", {unit} {number} from byte {start:,} on"
    elif number:
        place += f":{number}" if unit == "line" else f", {unit} {number}"
    return place + (f" ({note})" if note else "")


@dataclass
class Dropped:
    """Counts what is left out, by reason, and keeps the first place of each, and what a reading shows beside."""

    counts: Counter[str] = field(default_factory=Counter)
    places: dict[str, str] = field(default_factory=dict)
    forms: Forms = field(default_factory=dict)  # see `tables.tell_forms`
    watched: Sequence[str] = ()  # kinds of fields whose values are counted
    values: FieldValues = field(default_factory=dict)  # of these; see `groups.tell_groups`

    def add(self, reason: str, file: SourceFile, number: int, note: str = "", start: int = 0) -> None:
        """Count one, by a reason of the tables above or `BLANK`; where it is, see `describe_place`."""
        self.counts[reason] += 1
        if reason not in self.places:
            self.places[reason] = describe_place(file, number, start, note)

    def merge(self, later: Mapping[str, Any]) -> None:
        """Add what was dropped from the next task in order: `vars` of another one."""
        self.counts.update(later["counts"])
        self.places = {**later["places"], **self.places}
        for form, (number, place) in later.get("forms", {}).items():  # 0.1.0 had none
            self.forms.setdefault(form, [0, place])[0] += number
        join_values(self.values, later.get("values", {}))

    @property
    def num_not_text(self) -> int:
        """Rows that hold no text."""
        return sum(self.counts[reason] for reason in _NOT_TEXT)

    def count_rows(self, num_documents: int) -> int:
        """Return how many rows there are, given the documents that stayed."""
        return num_documents + self.counts.total() - self.counts[BLANK]

    def describe(self, prepare: PrepareConfig, *, others: bool = True) -> list[str]:
        """Return one line for each reason: how many, which, and the first of them.

        With `others` it also tells of documents that are left out though they hold text.
        """
        values = {
            "field": " or ".join(map(repr, prepare.text_fields)),
            "limit": 4 * prepare.max_document_chars,
            "shortest": prepare.min_document_chars,
        }
        lines = []
        for reasons, noun in ((_NOT_TEXT, "row"), *([(_OTHER, "document")] if others else [])):
            for reason, words in reasons.items():
                if number := self.counts[reason]:
                    first = f"; the first is {self.places[reason]}" if reason in self.places else ""
                    words = words.replace("that are", "that is") if number == 1 else words
                    lines.append(f"{number:,} {noun}{'s' * (number != 1)} {words.format(**values)}{first}")
        return lines

    def tell(self, spec: str, num_documents: int, prepare: PrepareConfig, *, is_new: bool) -> None:
        """Say on standard error what was dropped; warn, or refuse, where too many rows hold no text.

        Of a corpus that was read before, only a warning is said.
        """
        self.require_text(spec, num_documents, prepare)
        num_not_text, num_rows = self.num_not_text, self.count_rows(num_documents)
        is_warning = num_not_text > WARNING_FRAC * num_rows
        if is_new or is_warning:
            for line in self.describe(prepare):
                print(f"dropped: {line}", file=sys.stderr)
        if is_warning:
            print(
                f"warning: {num_not_text:,} of {num_rows:,} rows of --corpus {spec!r} ({num_not_text / num_rows:.1%}) "
                f"hold no text and are left out; {self._advise(prepare)}.",
                file=sys.stderr,
                flush=True,
            )

    def require_text(self, spec: str, num_documents: int, prepare: PrepareConfig, *, is_sample: bool = False) -> None:
        """Refuse a corpus of which too many rows hold no text or are not UTF-8, and say how it was read."""
        tell_forms(self.forms)
        num_not_text, num_rows = self.num_not_text, self.count_rows(num_documents)
        require_encoding(f"--corpus {spec!r}", self.counts["bad_utf8"], num_rows, self.places.get("bad_utf8", ""))
        if num_not_text > prepare.max_dropped_frac * num_rows:
            needed = math.ceil(100 * num_not_text / num_rows) / 100
            rest = f", or train on the rest with --prepare.max_dropped_frac {needed:g}"
            raise CorpusError(
                f"{num_not_text:,} of {num_rows:,} rows of --corpus {spec!r}{' that were looked at' * is_sample} hold "
                f"no text ({'; '.join(self.describe(prepare, others=False))}); {self._advise(prepare)}"
                f"{rest if num_not_text < num_rows else ''}."
            )

    def _advise(self, prepare: PrepareConfig) -> str:
        """What to do about the most frequent reason for which rows hold no text."""
        most = max(_NOT_TEXT, key=self.counts.__getitem__)
        if most in _FIELD_REASONS:
            what = "the two fields that hold the texts" if prepare.pair else "the field that holds the text"
            return f"set {prepare.fields_option} to {what}"
        if most == "bad_utf8":
            return RECODE
        if most == "nested":
            return "run jq -c '. + .OUTER' FILE > NEW.jsonl, where OUTER is the field around it"
        if most == "list" and self.counts[most] == 1:
            return f"if its lists are columns, run jq -c {shlex.quote(COLUMNS)} FILE > NEW.jsonl"
        if most == "list":
            program = f'.[{json.dumps(prepare.text_fields[0], ensure_ascii=False)}] |= join(" ")'
            return f"run jq -c {shlex.quote(program)} FILE > NEW.jsonl to join the texts of each list"
        return "mend these rows"


def require_encoding(name: str, num_bad: int, num_rows: int, place: str = "") -> None:
    """Refuse text of which a considerable share is not UTF-8; `num_rows` are all but blank ones."""
    if num_bad > max(_MOST_NOT_UTF8 * num_rows, _FEW_ROWS):
        first = f" (the first is {place})" if place else ""
        raise CorpusError(
            f"{num_bad:,} of {num_rows:,} rows of {name} are not UTF-8{first}; the text is in another encoding, or "
            f"damaged: {RECODE}."
        )
