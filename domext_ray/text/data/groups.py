"""Whose a row is: a person, a household, a site, which must not be on both sides of a split.

Enters: rows with fields, and what `--prepare.group_field` says of them. Leaves: hashes of groups; and, where nothing is
said, a sentence on the fields whose names or values show that rows belong together.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
import shlex
import unicodedata
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import pyarrow as pa

from domext_ray.config.pretrain import NO_GROUPS, PrepareConfig
from domext_ray.errors import CorpusError
from domext_ray.text.data.folders import say
from domext_ray.text.data.readers import is_text

FieldValues: TypeAlias = dict[str, dict[str, int]]
"""Of a field, whose names from the outermost on are joined by `_WITHIN`: hashes of values, and the rows of each."""
FieldKind: TypeAlias = Literal["person", "stay", "id", "other", "none", ""]
"""What a field's name says that it is; empty: neither whose a row is nor anything that a group could be known by."""

PEOPLE: Sequence[FieldKind] = ("person", "stay")
"""Fields that a corpus is read to its end for."""
ALL_KINDS: Sequence[FieldKind] = (*PEOPLE, "id", "other", "none")

_WITHIN = "\x1f"
_MOST_VALUES = 4096
"""Of a field: those with the lowest hashes, which are as good as drawn, so that memory does not grow with the text."""
_LONGEST_NAME = 64

_WHOSE = re.compile(
    r"(?P<person>patient|(?<![a-z])mrn(?![a-z])|(?<![a-z])subject_?(?:id|identifier|no|nr|num|number|key|code)s?(?![a-z]))"
    r"|(?<![a-z])(?:hadm(?:_?id)?(?![a-z])|encounter|visit)|(?<=patient)(?:encounter|visit)"
)
_COUNTED = re.compile(r"(?:n|num|number_of|is|has)_.*(?<!_id)|(?:in|out)patients?|.*(?:patient|encounter|visit)s")
"""Names of fields that count patients or stays, or flag them."""
_ABOUT = frozenset(
    """admission age amount arm at begin birth birthdate birthday bmi category city class cohort complaint condition
    cost count country date datetime day death department dept description diagnosis dob duration end ethnicity
    experience facility feedback gender group height history hospital hour instruction insurance kind label lang
    language length level location los month note payer price race rating reason region score sex site stage start
    state status summary text time timestamp title total type unit ward weight year zip""".split()
)
"""Words in the name of a field that says something about a patient or a stay, and not which one it is."""
_ID = frozenset("accession code guid hash id identifier key mrn no nr num number pseudonym ref uid uuid".split())
_OWNERS = frozenset(
    """author case client conversation customer doc document episode family household member owner participant person
    respondent sender session speaker stay student thread user""".split()
)
_NUMBER = re.compile(r"[-+\d.,\s]+")
_MOMENT = re.compile(r"\d{1,4}[-/.]\d{1,2}[-/.]\d{1,4}(?:\D.*)?|\d{1,2}:\d\d.*")
_TOLD: set[tuple[str, str]] = set()
"""Texts and their fields that were told of: a sample and the whole of one have other figures, and say the same."""
_FEW_VALUES, _REPEATED_FRAC, _MOST_ROWS = 30, 0.2, 50
"""Fewer values are categories; less of the rows with a value that others have, too, is chance; more rows of a value are
a category's."""


def hash_group(name: Any, place: object, field: object, option: str) -> bytes:
    """Return a hash, 8 bytes long, of a group's name: a text or a whole number, however a file writes it.

    A row without one is refused; the message has its `place`, and never quotes a name.
    """
    text = _read_name(name)
    if not text:
        has = "has no" if name is None or isinstance(name, str) else "has neither text nor a whole number as"
        raise CorpusError(
            f"{place} {has} {field!r}, and {option} needs it in every row, so that no group is on both sides of a "
            "split; fill it in, or leave the row out."
        )
    return _hash_name(text).digest()


def _read_name(name: Any) -> str:
    """A group's name as text; empty: it is none."""
    if isinstance(name, float) and name.is_integer():
        name = int(name)
    is_name = isinstance(name, str | int) and not isinstance(name, bool)
    return " ".join(unicodedata.normalize("NFC", str(name)).split()) if is_name else ""


def _hash_name(text: str) -> Any:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8, key=b"group")


@functools.lru_cache(4096)
def _find_kind(name: str) -> FieldKind:
    """What a field's name says that it is."""
    if name == NO_GROUPS:
        return "none"
    parted = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", unicodedata.normalize("NFKC", name))
    key = "_".join(re.findall(r"[^\W_]+", parted)).lower()
    words, found = {*key.split("_")}, [*_WHOSE.finditer(key)]
    if not found:
        return "id" if words & (_ID | _OWNERS) else "other"
    about = f"{key[found[-1].end() :]}_{key.rpartition('_of_')[0]}"
    said = {word for part in about.split("_") for word in (part, part.removesuffix("s"))}
    if said & _ABOUT or _COUNTED.fullmatch(key):
        return ""
    return "person" if found[-1]["person"] else "stay"


def may_say_whose(name: str, kind: pa.DataType | None, kinds: Collection[str]) -> bool:
    """Whether a column, or a field within it, is of some kinds (`FieldKind`) by its name and holds texts or numbers.

    Of a file with types each column costs its reading, which may be of long texts: those of the kind "other" are left.
    A column without a type holds texts.
    """
    if kind is not None and pa.types.is_struct(kind):
        return any(may_say_whose(field.name, field.type, kinds) for field in kind)
    found = _find_kind(name)
    if kind is None or found not in kinds:
        return found in kinds
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return found != "other" and (is_text(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind))


def count_values(
    values: FieldValues, row: Mapping[str, Any], texts: Collection[str], kinds: Collection[str], within: str = ""
) -> None:
    """Count a row's values of fields that may say whose it is, but for `texts`, the fields that are read as text.

    `within`: the names of the objects around the row, each with `_WITHIN` behind it.
    """
    for name, value in row.items():
        if isinstance(value, dict):
            count_values(values, value, (), kinds, f"{within}{name}{_WITHIN}")
        elif (kind := _find_kind(name)) in kinds and name not in texts:
            text = _read_name(value)
            if kind == "none":
                values[within + name] = {"": 1}  # that it is there is all that matters
            elif 0 < len(text) <= _LONGEST_NAME and (kind in PEOPLE or _is_known_by(text, kind)):
                _add(values, within + name, {_hash_name(text).hexdigest(): 1})


def find_within(row: Mapping[str, Any], field: str, outer: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Return the names, from the outermost on, of a field within an object of a row; empty: there is no such field.

    `field` is its own name, or all names with dots between them; `outer` are those of the objects around the row.
    """
    for name, value in row.items():
        if outer and field in (name, ".".join((*outer, name))):
            return (*outer, name)
        if isinstance(value, dict) and (found := find_within(value, field, (*outer, name))):
            return found
    return ()


def describe_option(names: Sequence[str]) -> str:
    """Say what to give, and to do before, so that a field decides what is held out; `names`: from the outermost on."""
    *outer, name = names
    option = f"give --prepare.group_field {shlex.quote(name)}"
    if not outer:
        return option
    program = shlex.quote(". + ." + ".".join(json.dumps(key, ensure_ascii=False) for key in outer))
    return f"take {name!r} out of {'.'.join(outer)!r} (of JSONL: jq -c {program} FILE > NEW.jsonl) and {option}"


def join_values(values: FieldValues, later: FieldValues) -> None:
    """Add what `count_values` counted elsewhere."""
    for path, found in later.items():
        _add(values, path, found)


def _add(values: FieldValues, path: str, found: Mapping[str, int]) -> None:
    own = values.setdefault(path, {})
    for digest, number in found.items():
        own[digest] = own.get(digest, 0) + number
    if len(own) > 2 * _MOST_VALUES:
        values[path] = _keep_lowest(own)


def _is_known_by(text: str, kind: FieldKind) -> bool:
    """Whether something could be known by a value: not a figure, a date, or a word."""
    if _MOMENT.fullmatch(text):
        return False
    return kind == "id" or (" " not in text and any(map(str.isdigit, text)) and not _NUMBER.fullmatch(text))


def _keep_lowest(own: Mapping[str, int]) -> dict[str, int]:
    """Keep the values that are kept of any more: their rows are counted in full, for they never were left out."""
    return {digest: own[digest] for digest in sorted(own)[:_MOST_VALUES]}


@dataclass(frozen=True)
class _Counted:
    """A field, and how often its values occur."""

    names: Sequence[str]  # from the outermost object on
    kind: FieldKind
    rows: Sequence[int]  # of each of its values, or of those that were kept
    num_values: int  # about, where not all were kept

    @property
    def num_rows(self) -> int:
        """Rows with a value; about, where not all values were kept."""
        return round(sum(self.rows) * self.num_values / len(self.rows))

    @property
    def about(self) -> str:
        """What stands before these figures."""
        return "about " if self.num_values > len(self.rows) else ""

    def count(self, name: str) -> str:
        """Say how many values it has."""
        return f"{self.about}{self.num_values:,} different {name}"

    @property
    def repeats(self) -> bool:
        """Whether rows belong together, by its values and, where it has such a one, its name."""
        most, repeated = max(self.rows), sum(number for number in self.rows if number > 1)
        if self.kind in PEOPLE:
            return most > 1
        is_usual = self.num_values >= _FEW_VALUES and self.num_rows <= _MOST_ROWS * self.num_values
        return self.kind != "none" and is_usual and repeated >= _REPEATED_FRAC * sum(self.rows)


def _list_counted(values: FieldValues) -> list[_Counted]:
    counted = list[_Counted]()
    for path, found in values.items():
        own = _keep_lowest(found)
        num_values = len(own)
        if num_values == _MOST_VALUES:
            num_values = round(_MOST_VALUES * 16**16 / int(max(own), 16))
        names = path.split(_WITHIN)
        counted.append(_Counted(names, _find_kind(names[-1]), [*own.values()], num_values))
    order = [*ALL_KINDS]
    return sorted(counted, key=lambda field: (len(field.names) > 1, order.index(field.kind), field.num_values))


def tell_groups(
    values: FieldValues,
    spec: str,
    prepare: PrepareConfig,
    *,
    option: str = "--corpus",
    learned: str = "",
    is_general: bool = False,
) -> None:
    """Say on standard error, once a process, which field seems to say whose a row is, where no option does.

    Two things are errors: new words, learned by the option `learned`, that a person's rows alone may have; and a field
    called `none` beside `--prepare.group_field none`. With `is_general` the text is read as nobody's.
    """
    fields = _list_counted(values)
    if prepare.group_field == NO_GROUPS:
        if not is_general and any(field.names == [NO_GROUPS] for field in fields):
            raise CorpusError(
                f"{option} {spec!r} has a field {NO_GROUPS!r}, and --prepare.group_field {NO_GROUPS} says that no rows "
                "belong together; give that field another name, whether or not it is the one that you mean."
            )
        return
    given = next((field for field in fields if field.names == [prepare.group_field]), None)
    if is_general or not prepare.group_field:
        fields = [field for field in fields if field.repeats and (field.kind in PEOPLE or not is_general)]
    elif given is not None and given.kind != "person":  # a stay, say, and a person may have several
        fields = [field for field in fields if field.kind == "person" and field.num_values < given.num_values]
    else:
        return
    if not fields:
        return
    found, no_groups = fields[0], f"{NO_GROUPS} if no rows belong together"
    name, give = repr(".".join(found.names)), describe_option(found.names)
    has = f"{option} {spec!r} has {found.count(name)}"
    read = f"in {found.about}{found.num_rows:,} rows that were read"
    both = f"rows of one {name} are on both sides of the held-out split"
    if is_general:
        note = f"{has} {read}, and general text is read as nobody's, so that {both}: text of people goes into "
        note += "--mixture.parts, without keep"
    elif given is not None:
        note = f"{has} and {given.count(repr(prepare.group_field))} {read}; if one {name} may have several "
        note += f"{prepare.group_field!r}, {give}: otherwise {both}"
    elif learned and found.kind in PEOPLE:
        raise CorpusError(
            f"{has} {read}, and {learned} learns new words from them: a name that a single {name} has could become a "
            f"word of the exported tokenizer; {give}, or --prepare.group_field {no_groups}."
        )
    else:
        seems = "" if found.kind in PEOPLE else ", so that rows seem to belong together"
        note = f"{has} {read}{seems}; {give}, or {no_groups}: otherwise {both}, and the run's page may quote them"
    if (spec, name) not in _TOLD:
        _TOLD.add((spec, name))
        say(note)
