"""A file of words, one per line -> names of new entries; lines that can be none are told together, by kind.

A word is read as text is: cleaned like a document, and as the base's normaliser has it ("Zoë" is "zoe" beside an
uncased base), for no text has another one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from domext_ray.config.pretrain import WORD_FAULTS, WordFault
from domext_ray.errors import CorpusError
from domext_ray.text.data.documents import clean_text
from domext_ray.text.data.files import read_list
from domext_ray.text.vocabulary.extension import BaseVocabulary
from domext_ray.text.vocabulary.family import MAX_WORD_CHARS, PREFIX

_SPECIAL = re.compile(r"\[\w+\]|<[^<>\s]+>")
"""How special tokens look, those of another tokenizer's vocabulary file, too: [PAD], [unused1], <s>, </s>."""
_SPACE_MARKS = {"▁": 0.0, "Ġ": 0.25}
"""How entries of unigram and of byte-level BPE begin that follow a space -> the share of a list's lines above which
they are such entries: Ġ is a letter, too, of Maltese."""
_LISTED_LINES = 5
_SHOWN_CHARS = 40


@dataclass(frozen=True)
class _Line:
    """A line of a list: what it says, the name of the entry that it makes, and why it can make none."""

    number: int
    text: str
    name: str
    kind: WordFault | None = None
    fault: str = ""


def read_words(
    path: str,
    option: str,
    known: BaseVocabulary,
    skip: Collection[WordFault] = (),
    tell: Callable[[str], None] = lambda sentence: None,
) -> list[str]:
    """Read a list of new words, one per line, and return their names.

    Lines that can be no new word are refused, or left out if their kind is in `skip`. `tell` takes a sentence about
    those that are left out, and one about those that are read otherwise than they are written.
    """
    text = read_list(Path(path).expanduser(), f"--{option} {path!r}")
    texts = re.sub("\r\n?", "\n", text).removesuffix("\n").split("\n")
    if texts == [""]:
        raise CorpusError(f"--{option} {path!r} is empty; give one word per line.")
    lines, taken = list[_Line](), dict[str, int]()
    starts = [text.lstrip()[:1] for text in texts]
    marks = [mark for mark, frac in _SPACE_MARKS.items() if starts.count(mark) > frac * len(texts)]
    for number, text in enumerate(texts, start=1):
        line = _read_line(number, text, known)
        if starts[number - 1] in marks and line.kind != "special":
            fault = f"begins with {starts[number - 1]!r}, which stands for a space in another tokenizer's vocabulary"
            line = replace(line, kind="malformed", fault=fault)
        if line.name in taken and line.kind is None:
            line = replace(line, kind="doublets", fault=f"stands in line {taken[line.name]} already")
        taken.setdefault(line.name, number)
        lines.append(line)
    named = f"--{option} {path!r}"
    refused = [line for line in lines if line.kind and line.kind not in skip]
    if refused:
        kinds = ",".join(kind for kind in WORD_FAULTS if any(line.kind == kind for line in lines))
        cure = f"mend these lines, or leave them out with --vocab.skip {kinds}"
        raise CorpusError(f"{named} has {_describe(refused)}; {cure}.")
    left_out = [line for line in lines if line.kind]
    if left_out:
        tell(f"{named}: {len(left_out):,} of {len(lines):,} lines are left out: {_describe(left_out)}.")
    words = [line for line in lines if not line.kind]
    changed = [line for line in words if line.name != line.text]
    if changed:
        first = f"line {changed[0].number}, {changed[0].text!r} as {changed[0].name!r}"
        rule = "taken as text is read (in NFC, and as the base's normaliser has it)"
        tell(f"{named}: {len(changed):,} of {len(words):,} words are {rule}, first {first}.")
    return [line.name for line in words]


def _read_line(number: int, text: str, known: BaseVocabulary) -> _Line:
    """Read a line by itself."""
    word = clean_text(text)
    line = _Line(number, text, word)
    if word in known.tokenizer.all_special_tokens or _SPECIAL.fullmatch(word):
        return replace(line, kind="special", fault="is a special token")
    if not word.removeprefix(PREFIX):
        return replace(line, kind="malformed", fault="is empty")
    if known.has(word):
        return replace(line, kind="known", fault="is in the base's vocabulary already")
    if len(word.removeprefix(PREFIX)) > MAX_WORD_CHARS:
        fault = f"has more than {MAX_WORD_CHARS} characters, so no text can produce it"
        return replace(line, kind="malformed", fault=fault)
    names = known.family.cut_name(word)
    if names == [PREFIX]:  # of an accent alone, which is stripped
        names = []
    if len(names) != 1:
        return replace(line, kind="malformed", fault=f"is {len(names)} words to the base's tokenizer")
    if known.has(names[0]):
        return replace(line, kind="known", fault=f"is in the base's vocabulary already, as {names[0]!r}")
    return replace(line, name=names[0])


def _describe(lines: Sequence[_Line]) -> str:
    """Say how many lines of each kind there are, with the first of each whole and some more by their numbers."""
    said = []
    for kind in WORD_FAULTS:
        own = [line for line in lines if line.kind == kind]
        if own:
            first, *more = own
            shown = ", ".join(str(line.number) for line in more[:_LISTED_LINES])
            others = f"; also line{'s' * (len(more) > 1)} {shown}{', …' * (len(more) > _LISTED_LINES)}" if more else ""
            text = first.text if len(first.text) <= _SHOWN_CHARS else f"{first.text[:_SHOWN_CHARS]}…"
            said.append(f"{len(own):,} {kind} (line {first.number}: {text!r} {first.fault}{others})")
    return ", ".join(said)
