"""What a corpus loses on its way to documents: counted by reason, with the first place of each, and told.

Rows that hold no text (no UTF-8, no JSON, another field, null, ...) are a sign that a file or `--prepare.field` is not
what the user meant: above 1 % of all rows that is a warning, above `--prepare.max_dropped_frac` an error. Documents
that are too short, and duplicates, are counted and told, and no more.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from domext_ray.config.pretrain import PrepareConfig
from domext_ray.data.files import JSONL, PACKAGE_DOCS, TEXT, SourceFile
from domext_ray.errors import CorpusError

WARNING_FRAC = 0.01
BLANK = "blank"
"""Lines without a character stand between texts, so they are no loss."""

_NOT_TEXT = {
    "bad_utf8": "that are not UTF-8",
    "bad_json": "that are no JSON",
    "too_long": "of JSON above {limit:,} bytes (four times --prepare.max_document_chars)",
    "bad_csv": "of another width than the header",
    "no_field": "without the field {field}",
    "null": "with null as {field}",
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


@dataclass(frozen=True)
class Place:
    """Where something was dropped.

    Args:
        path: the file.
        unit: "line", "row" or "paragraph"; "file": all of it.
        number: of the unit, from 1.
        note: what is there.
        start: the byte from which on units are counted: lines before a range are not read for their number.
    """

    path: str
    unit: str
    number: int
    note: str = ""
    start: int = 0

    @classmethod
    def of(cls, file: SourceFile, number: int, note: str = "", start: int = 0) -> Place:
        """Return the place of a line, row or paragraph of a file; number 0: all of it."""
        return cls(file.path, _UNITS.get(file.kind, "row") if number else "file", number, note, start)

    def __str__(self) -> str:
        if self.unit == "file":
            place = self.path
        elif self.start:
            place = f"{self.path}, {self.unit} {self.number} from byte {self.start:,} on"
        else:
            place = f"{self.path}:{self.number}" if self.unit == "line" else f"{self.path}, {self.unit} {self.number}"
        return place + (f" ({self.note})" if self.note else "")


@dataclass
class Dropped:
    """Counts what is left out, by reason, and keeps the first place of each.

    Args:
        counts: how often, by reason.
        places: the first place, by reason.
    """

    counts: Counter[str] = field(default_factory=Counter)
    places: dict[str, Place] = field(default_factory=dict)

    def add(self, reason: str, file: SourceFile, number: int, note: str = "", start: int = 0) -> None:
        """Count one.

        Args:
            reason: a key of the tables above, or `BLANK`.
            file: where it stands.
            number: which line, row or paragraph of what is read of the file, from 1; 0: the whole file.
            note: what is there instead.
            start: where reading began.
        """
        self.counts[reason] += 1
        if reason not in self.places:
            self.places[reason] = Place.of(file, number, note, start)

    def merge(self, later: Dropped) -> None:
        """Add what was dropped from the next task in order."""
        self.counts.update(later.counts)
        self.places = {**later.places, **self.places}

    def to_record(self) -> dict[str, Any]:
        """Return the same as plain values."""
        return {
            "counts": dict(self.counts),
            "places": {reason: asdict(place) for reason, place in self.places.items()},
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Dropped:
        """Return what `to_record` made plain."""
        places = {reason: Place(**place) for reason, place in record["places"].items()}
        return cls(Counter(record["counts"]), places)

    def describe_places(self) -> dict[str, str]:
        """Return the first place by reason, in words."""
        return {reason: str(place) for reason, place in self.places.items()}


def count_rows(counts: Mapping[str, int], num_documents: int) -> tuple[int, int]:
    """Return how many rows hold no text, and how many rows there are.

    Args:
        counts: what was dropped, by reason.
        num_documents: documents that stayed.
    """
    num_not_text = sum(counts.get(reason, 0) for reason in _NOT_TEXT)
    return num_not_text, num_documents + sum(number for reason, number in counts.items() if reason != BLANK)


def describe_dropped(counts: Mapping[str, int], places: Mapping[str, str], prepare: PrepareConfig) -> list[str]:
    """Return one line for each reason: how many, which, and the first of them.

    Args:
        counts: what was dropped, by reason.
        places: the first place, by reason, as far as it is known.
        prepare: the options that the reasons speak of.
    """
    values = {
        "field": " or ".join(map(repr, prepare.text_fields)),
        "limit": 4 * prepare.max_document_chars,
        "shortest": prepare.min_document_chars,
    }
    lines = []
    for reasons, noun in ((_NOT_TEXT, "row"), (_OTHER, "document")):
        for reason, words in reasons.items():
            if number := counts.get(reason, 0):
                first = f"; the first is {places[reason]}" if reason in places else ""
                lines.append(f"{number:,} {noun}{'s' * (number != 1)} {words.format(**values)}{first}")
    return lines


def check_dropped(
    spec: str,
    counts: Mapping[str, int],
    places: Mapping[str, str],
    num_documents: int,
    prepare: PrepareConfig,
    *,
    is_new: bool = True,
) -> None:
    """Say on standard error what was dropped; warn, or refuse, where too many rows hold no text.

    Args:
        spec: the `--corpus` option.
        counts: what was dropped, by reason.
        places: the first place, by reason, as far as it is known.
        num_documents: documents that stayed.
        prepare: which share is too much.
        is_new: the corpus is read for the first time; of one that is used again only a warning is said.

    Raises:
        CorpusError: see `require_text`.
    """
    require_text(spec, counts, places, num_documents, prepare)
    num_not_text, num_rows = count_rows(counts, num_documents)
    is_warning = num_not_text > WARNING_FRAC * num_rows
    if is_new or is_warning:
        for line in describe_dropped(counts, places, prepare):
            print(f"dropped: {line}", file=sys.stderr)
    if is_warning:
        print(
            f"warning: {num_not_text:,} of {num_rows:,} rows of --corpus {spec!r} ({num_not_text / num_rows:.1%}) hold "
            f"no text and are left out; {_advise(counts, prepare)}.",
            file=sys.stderr,
            flush=True,
        )


def require_text(
    spec: str, counts: Mapping[str, int], places: Mapping[str, str], num_documents: int, prepare: PrepareConfig
) -> None:
    """Refuse a corpus of which too many rows hold no text; arguments as of `check_dropped`.

    Raises:
        CorpusError: more than `--prepare.max_dropped_frac` of the rows hold no text.
    """
    num_not_text, num_rows = count_rows(counts, num_documents)
    if num_not_text > prepare.max_dropped_frac * num_rows:
        reasons = "; ".join(describe_dropped({each: counts.get(each, 0) for each in _NOT_TEXT}, places, prepare))
        advice = _advise(counts, prepare)
        needed = math.ceil(100 * num_not_text / num_rows) / 100
        rest = f", or train on the rest with --prepare.max_dropped_frac {needed:g}"
        raise CorpusError(
            f"{num_not_text:,} of {num_rows:,} rows of --corpus {spec!r} hold no text ({reasons}); {advice}"
            f"{rest if num_not_text < num_rows else ''}."
        )


def _advise(counts: Mapping[str, int], prepare: PrepareConfig) -> str:
    """What to do about the most frequent reason for which rows hold no text."""
    most = max(_NOT_TEXT, key=lambda reason: counts.get(reason, 0))
    if most in _FIELD_REASONS:
        what = "the two fields that hold the texts" if prepare.pair else "the field that holds the text"
        return f"set {prepare.fields_option} to {what}"
    if most == "bad_utf8":
        return "make the files UTF-8 (of Windows or Latin-1: iconv -f WINDOWS-1252 -t UTF-8 FILE > NEW)"
    return "mend these rows"
