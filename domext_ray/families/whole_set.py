"""Rows of all splits -> the same rows, with what no row shows alone: which option an answer means, what labels are.

Train, dev and test are read alike, so that what one of them shows holds for all.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from domext_ray.errors import CorpusError
from domext_ray.families.readers.issues import DataIssues, Row, as_offset, as_whole, shorten
from domext_ray.families.readers.rows import split_cell

Rows: TypeAlias = Mapping[str, Sequence[Row]]
"""By split."""
_LETTER = re.compile(r"\(?([A-Za-z])[.)]?")
_BITS = re.compile(r"[01](?:\.0)?(?:[\s,;|]+[01](?:\.0)?)+")
_BETWEEN_BITS = re.compile(r"[\s,;|]+")
_OTHER_SEPARATORS = "|;"
_UNLABELLED = ("-1", "-")
MOST_UNLABELLED, MOST_UNLABELLED_PAIRS = 0.05, 0.5
"""Share of texts, and of pairs, with a label that may say "none" above which it may be a class as well: opinions about
a text are often -1, 0 and 1, those about a pair hardly ever."""


def place_answers(rows: Rows, issues: DataIssues) -> Rows:
    """Return rows of choices whose answers are places among their options, from 0.

    A file may count from 1, which no 0 and a number as high as there are options show, or have letters, or the options'
    own texts; of two ways that differ the one that fits more rows is meant, and a tie is a CorpusError. An answer that
    is none stays as it is.
    """
    every = [row for split in rows.values() for row in split if _has_options(row)]
    numbers = {
        (number, len(row.get("options"))) for row in every if (number := as_offset(row.get("answer"))) is not None
    }
    has_zero = any(number == 0 for number, _ in numbers)
    first = int(not has_zero and any(number == count for number, count in numbers))
    ways: dict[str, Callable[[Row], int | None]] = {
        "a place": lambda row: _find_place(row, first),
        "a letter, and A is the first option": _find_letter,
        "the text of its option": _find_text,
    }
    found = [{way: place for way, read in ways.items() if (place := read(row)) is not None} for row in every]
    counts = Counter(way for places in found for way in places)
    chosen, used = dict[int, int](), Counter[str]()
    for row, places in zip(every, found, strict=True):
        best = [way for way in places if counts[way] == max(counts[other] for other in places)]
        if len({places[way] for way in best}) > 1:
            raise CorpusError(
                f"{row.source} has the answer {row.get('answer')!r}, which is a place and the text of another option; "
                "write answers as places from 0, and options that are no numbers or letters."
            )
        if best:
            chosen[id(row)] = places[best[0]]
            used[best[0]] += 1
    for way, number in used.items():
        if way != "a place":
            issues.say(f"{number:,} x answer read as {way}.")
    if used["a place"] and first:
        issues.say("Answers are counted from 1: none is 0, and some are as high as the number of options.")
    elif used["a place"] and not has_zero:
        issues.say("Answers are counted from 0, though none is 0; write letters if they are counted from 1.")
    return {
        split: [row.put("answer", chosen[id(row)]) if id(row) in chosen else row for row in own]
        for split, own in rows.items()
    }


def _has_options(row: Row) -> bool:
    options = row.get("options")
    return isinstance(options, (list, tuple)) and all(isinstance(option, str) for option in options)


def _find_place(row: Row, first: int) -> int | None:
    number = as_offset(row.get("answer"))
    return number - first if number is not None and 0 <= number - first < len(row.get("options")) else None


def _find_letter(row: Row) -> int | None:
    match = _LETTER.fullmatch(str(row.get("answer")).strip())
    place = ord(match[1].upper()) - ord("A") if match else -1
    return place if 0 <= place < len(row.get("options")) else None


def _find_text(row: Row) -> int | None:
    answer = str(as_whole(row.get("answer"))).strip()
    places = [i for i, option in enumerate(row.get("options")) if option.strip() == answer]
    return places[0] if len(places) == 1 and answer else None


def leave_out_unlabelled(rows: Rows, issues: DataIssues) -> Rows:
    """Leave out the rows whose label says that they have none: -1 beside whole numbers from 0, - beside words.

    SNLI and MNLI have "-" where annotators did not agree (Bowman et al., 2015, section 2.2), and such texts are part of
    no score; `datasets` writes -1 for it, and for all labels of a test that is kept secret. Labels that are named in
    the description are labels.
    """
    every = [row for split in rows.values() for row in split]
    counts = {split: Counter(filter(None, map(_find_class, own))) for split, own in rows.items()}
    labels = {label for counter in counts.values() for label in counter}
    mark = next((label for label in _UNLABELLED if label in labels and label not in every[0].description.labels), None)
    others = labels - {*_UNLABELLED}
    if mark is None or not (all(map(str.isdecimal, others)) if mark == "-1" else "+" not in others):
        return rows
    # a split with no other label is a test that is kept secret
    shown = [counter for counter in counts.values() if counter.keys() != {mark}]
    share = sum(counter[mark] for counter in shown) / max(1, sum(counter.total() for counter in shown))
    has_pairs = any(row.get("pair") is not None for row in every)
    description = every[0].description
    if share > (MOST_UNLABELLED_PAIRS if has_pairs else MOST_UNLABELLED) and not description.labels:
        names = ", ".join(sorted(others))
        raise CorpusError(
            f"{share:.0%} of the examples of {description.name} have the label {mark!r}, which often says that there "
            f"is none; name the classes as labels in {description.yaml}: [{names}], or with {mark!r} where it is one."
        )
    for row in every:
        if _find_class(row) == mark:
            issues.add(row.source, "row", f"has the label {mark!r}, which says that it has none")
    return {split: [row for row in own if _find_class(row) != mark] for split, own in rows.items()}


def _find_class(row: Row) -> str:
    """Return a row's label, as `Row.read_label` reads it; empty: it has none."""
    value = row.get("label")
    return "" if value is None else str(as_whole(value)).strip()


def name_labels(rows: Rows, issues: DataIssues) -> Rows:
    """Return rows of several labels; of those that have a 0 or 1 for each label, the labels that are there."""
    every = [row for split in rows.values() for row in split if row.get("labels") is not None]
    _check_separator(every)
    vectors = [_read_bits(row.get("labels")) for row in every]
    num_vectors = sum(bits is not None and len(set(bits)) < len(bits) for bits in vectors)  # no label stands twice
    is_even = None not in vectors and len({len(bits) for bits in vectors if bits is not None}) == 1
    if not every or {"0", "1"} & {*every[0].description.labels} or not (is_even or 2 * num_vectors > len(every)):
        return rows
    names, yaml = every[0].description.labels, every[0].description.yaml
    sizes = Counter(len(bits) for bits in vectors if bits is not None)
    size = sizes.most_common(1)[0][0]
    odd = next((row for row, bits in zip(every, vectors, strict=True) if bits is None or len(bits) != size), None)
    if odd is not None:
        raise CorpusError(
            f"{odd.source} has {shorten(odd.get('labels'), 40)} as its labels, where most rows have {size} times 0 or "
            "1; mend it."
        )
    if size != len(names):
        shown = ", ".join(["NAME"] * min(size, 3)) + (", …" if size > 3 else "")
        has = f" (it names {len(names)})" if names else ""
        raise CorpusError(
            f"{every[0].source} has {shorten(every[0].get('labels'), 40)} as its labels, and so has every row {size} "
            f"times 0 or 1; write labels: [{shown}] in {yaml}, {size} names in the order of the list{has}."
        )
    issues.say(f"The labels of each row are 0 and 1, in the order of labels in {yaml}.")
    made = {
        id(row): row.put("labels", [name for name, bit in zip(names, bits or (), strict=True) if bit])
        for row, bits in zip(every, vectors, strict=True)
    }
    return {split: [made.get(id(row), row) for row in own] for split, own in rows.items()}


def _read_bits(value: Any) -> list[bool] | None:
    """Return a list, or a cell, of nothing but two or more of 0 and 1; None: it is something else."""
    if isinstance(value, str):
        value = _BETWEEN_BITS.split(value.strip()) if _BITS.fullmatch(value.strip()) else None
    if not isinstance(value, (list, tuple)) or len(value) < 2:
        return None
    bits = [as_whole(int(item) if isinstance(item, bool) else item) for item in value]
    return [str(bit) == "1" for bit in bits] if all(str(bit) in ("0", "1") for bit in bits) else None


def _check_separator(rows: Sequence[Row]) -> None:
    """Refuse cells that another separator parts, while none has that of the description."""
    cells = [(row, value) for row in rows if isinstance(value := row.get("labels"), str)]
    if any(row.description.separator in value for row, value in cells):
        return
    for row, value in cells:
        separator = next((char for char in _OTHER_SEPARATORS if len(split_cell(value, char)) > 1), None)
        if separator and value.strip() not in row.description.labels:
            raise CorpusError(
                f"{row.source} has {shorten(value, 40)} as its labels, and no cell of the set has the separator "
                f'{row.description.separator!r}; write separator: "{separator}" in {row.description.yaml}, or name the '
                "set's labels there if this is one."
            )
