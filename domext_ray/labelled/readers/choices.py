"""A beginning and several continuations, one of them right -> examples.

Enters: rows with a column a continuation (SWAG: sent1, sent2, ending0 to ending3, label), or with one that lists them.
Leaves: `Choice`s.
"""

from __future__ import annotations

from collections.abc import Iterable

from domext_ray.errors import CorpusError
from domext_ray.labelled.examples import Choice
from domext_ray.labelled.readers.files import Dirt, Ids, Record, as_whole, check_text
from domext_ray.labelled.set_description import SetDescription


def make_choices(records: Iterable[Record], description: SetDescription, dirt: Dirt) -> list[Choice]:
    """Make choices.

    Args:
        records: their values by role.
        description: the set's.
        dirt: counts rows with an empty continuation, and those whose answer is none of them.

    Raises:
        CorpusError: continuations of another layout, or not equally many in all rows.
    """
    ids = Ids()
    made: list[Choice] = []
    for record in records:
        context = check_text(record, "context", dirt)
        if context is None:
            continue
        options = record.values["options"]
        if not isinstance(options, (list, tuple)) or any(not isinstance(each, str) for each in options):
            raise CorpusError(f"{record.source} has another layout: its options must be texts; set columns.options.")
        if len(options) < 2 or (made and len(options) != len(made[0].options)):
            rule = f"{len(made[0].options)} as the first row" if made else "2 or more"
            raise CorpusError(f"{record.source} has {len(options)} options; it must have {rule}.")
        if any(not each.strip() for each in options):
            dirt.add(record.source, "row", "has an empty option")
            continue
        answer = _to_place(record.values["answer"], len(options))
        if answer is None:
            dirt.add(record.source, "row", "names no option as its answer (from 0)", record.values["answer"])
            continue
        stem = record.values["stem"]
        made.append(
            Choice(
                ids.make(record.values["id"]),
                record.source,
                context,
                stem.strip() if isinstance(stem, str) else "",
                tuple(each.strip() for each in options),
                answer,
            )
        )
    return made


def _to_place(value: object, num_options: int) -> int | None:
    value = as_whole(value)
    if isinstance(value, str) and value.strip().isdecimal():
        value = int(value)
    is_place = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < num_options
    return int(value) if is_place else None  # type: ignore[call-overload]
