"""A raw text -> words with their places, cut as labelled sets of tagged words are: at white space and punctuation.

Runs of letters, digits, combining marks and format characters are words; every ideograph is one, and so is everything
else that is no white space, an emoji with its modifiers included. BERT's own tokenizer cuts text at the same places. No
word begins or ends with an invisible character, such as a byte-order mark or a soft hyphen.

Sets differ in what they take for one word: `X-12`, `U.S`, `5%`, `melted.` A model is best at words like those that it
learned from, so what joins them there (`learn_marks`) joins words of running text, too.
"""

from __future__ import annotations

import functools
import itertools
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from tokenizers import Regex, pre_tokenizers

Offsets = tuple[int, int]

MAX_MARK_CHARS = 4
"""Characters of a mark at most; `=====` is a line and not what joins a word."""
_MAX_EDGE_MARKS = 4  # of a word on either side, so that a text of nothing else takes no quadratic time
_IDEOGRAPH = r"\p{Han}[\p{M}\p{Cf}]*"
_RUN = r"(?:(?!\p{Han})[\p{L}\p{M}\p{N}\p{Cf}\p{Co}\p{Cn}])+"
_OTHERS = r"\s|\X"
_FORMATS = (
    (0x200B, 0x200F),
    (0x202A, 0x202E),
    (0x2060, 0x206F),
    (0xFFF9, 0xFFFB),
    (0x1BCA0, 0x1BCA3),
    (0x1D173, 0x1D17A),
)
INVISIBLE = frozenset(
    [
        *(char for char in map(chr, range(0x3001)) if char.isspace()),
        *(chr(code) for first, last in _FORMATS for code in range(first, last + 1)),
        *"\u00ad\u061c\u180e\u2800\u3164\ufeff\uffa0",
    ]
)
"""White space and characters that show nothing: joiners, marks of direction, soft hyphens, byte-order marks, fillers.

Variation selectors and tags show nothing either, but are the end of an emoji."""
_RUNS = pre_tokenizers.Split(Regex(r"(?:(?!\p{Extended_Pictographic})[\p{P}\p{S}])+"), "removed")
_LETTERS = re.compile(r"[^\W\d_](?:\.[^\W\d_])+(\.?)")
_BESIDE = re.compile("[A-Za-z\u00c0-\u024f\u0370-\u052f]{2}")  # Latin, Greek, Cyrillic
_APOSTROPHES = "'’"
_FREE_MARKS = '.,;:!?"…、。，；：！？' + _APOSTROPHES
_FREE_CATEGORIES = ("Ps", "Pe", "Pi", "Pf")  # brackets and quotes


@dataclass(frozen=True)
class WordMarks:
    """Punctuation that is part of a word, each mark one character or several; without any, words have none."""

    inner: tuple[str, ...] = ()  # between two runs of letters and digits: `-` in `X-12`, `::` in `std::sort`
    leading: tuple[str, ...] = ()  # before a run: `$` in `$5`
    trailing: tuple[str, ...] = ()  # after a run: `%` in `5%`, `()` in `fit()`
    closing: tuple[str, ...] = ()  # after each of two or more single letters: `.` in `U.S.`

    def __bool__(self) -> bool:
        return self != NO_MARKS

    def to_json(self) -> dict[str, list[str]]:
        """Return the marks as JSON has them."""
        return {f"{field.name}_marks": list(getattr(self, field.name)) for field in fields(self)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> WordMarks:
        """Read what `to_json` gave, among other values; what is not there has no marks."""
        return cls(*(tuple(values.get(f"{field.name}_marks", ())) for field in fields(cls)))


NO_MARKS = WordMarks()


def cut_words(text: str, marks: WordMarks = NO_MARKS) -> tuple[tuple[str, ...], tuple[Offsets, ...]]:
    """Cut a text without half surrogate pairs into words, and return these with their places, [start, end).

    Nothing but white space and invisible characters is left out.
    """
    found = [(word, offsets) for word, offsets in _make_cutter(marks).pre_tokenize_str(text) if not word.isspace()]
    if not text.isascii():
        places = (trim(text, *offsets) for _, offsets in found)
        found = [(text[start:end], (start, end)) for start, end in places if start < end]
    return tuple(word for word, _ in found), tuple(offsets for _, offsets in found)


def trim(text: str, start: int, end: int) -> Offsets:
    """Move the ends of a stretch, [start, end), inwards past white space and invisible characters.

    They are equal where nothing is left.
    """
    while start < end and text[start] in INVISIBLE:
        start += 1
    while start < end and text[end - 1] in INVISIBLE:
        end -= 1
    return start, end


def is_inside_word(text: str, place: int) -> bool:
    """Whether letters stand on both sides of a place, of an alphabet whose words have spaces between them."""
    return place > 0 and _BESIDE.fullmatch(text[place - 1 : place + 1]) is not None


def is_whole(text: str, start: int, end: int) -> bool:
    """Whether a stretch, [start, end), begins and ends where a word may; see `is_inside_word`."""
    return not is_inside_word(text, start) and not is_inside_word(text, end)


@functools.lru_cache(maxsize=64)
def _make_cutter(marks: WordMarks) -> pre_tokenizers.Split:
    leading, trailing = (
        f"{_match_any(edge)}{{0,{_MAX_EDGE_MARKS}}}" if edge else "" for edge in (marks.leading, marks.trailing)
    )
    inner = f"(?:{_match_any(marks.inner)}{_RUN})*" if marks.inner else ""
    letters = rf"(?:(?!\p{{Han}})\p{{L}}{_match_any(marks.closing)}){{2,}}(?!{_RUN})|" if marks.closing else ""
    pattern = f"{_IDEOGRAPH}|{letters}{leading}{_RUN}{inner}{trailing}|{_OTHERS}"
    return pre_tokenizers.Split(Regex(pattern), "isolated")


def _match_any(marks: Sequence[str]) -> str:
    """A pattern of any of the marks, the longest first; what a combining mark follows, such as a keycap, is none."""
    return f"(?:(?:{'|'.join(map(re.escape, sorted(marks, key=len, reverse=True)))})(?![\\p{{M}}\u200c\u200d]))"


def learn_marks(sentences: Sequence[Sequence[str]]) -> WordMarks:
    """Find which marks belong to words.

    A mark is all that stands between two runs of letters and digits, before the first or after the last. At an edge it
    is part of the word if more words have it there than it is a word of its own. Inside it joins two runs if words have
    it there at least as often as it is a word of its own between two others. A mark that ordinarily has a space beside
    it, such as a comma or a bracket, says nothing by standing between two words: one word that has it inside is enough.
    An apostrophe joins if at least as many words have it inside as at an edge (`John 's`). Words like `U.S.` are
    counted by themselves: their last full stop is part of them if more of them have it than not.
    """
    inside, before, behind, closing = Counter[str](), Counter[str](), Counter[str](), Counter[str]()
    punctuation = set[str]()
    for word, number in Counter(itertools.chain.from_iterable(sentences)).items():
        if word.isalnum():
            continue
        runs = [place for _, place in _RUNS.pre_tokenize_str(word)]
        if not runs:
            punctuation.add(word)
            continue
        before[word[: runs[0][0]]] += number
        if letters := _LETTERS.fullmatch(word):
            closing[letters[1]] += number
        else:
            behind[word[runs[-1][1] :]] += number
        for (_, end), (start, _) in itertools.pairwise(runs):
            inside[word[end:start]] += number
    alone, between = Counter[str](), Counter[str]()
    for words in sentences if inside or before or behind else ():
        groups = [(is_mark, [*group]) for is_mark, group in itertools.groupby(words, punctuation.__contains__)]
        for place, (is_mark, group) in enumerate(groups):
            if is_mark:
                mark = "".join(group)
                alone.update({mark, *group})
                between[mark] += 0 < place < len(groups) - 1

    def joins(mark: str) -> bool:
        if mark in _APOSTROPHES:
            return inside[mark] >= before[mark] + behind[mark]
        return all(map(_stands_free, mark)) or inside[mark] >= between[mark]

    trailing = _choose(behind, lambda mark: behind[mark] > alone[mark])
    return WordMarks(
        _choose(inside, joins),
        _choose(before, lambda mark: before[mark] > alone[mark]),
        trailing,
        _choose(closing, lambda mark: mark not in trailing and closing[mark] > closing[""]),
    )


def _choose(marks: Iterable[str], belongs: Callable[[str], bool]) -> tuple[str, ...]:
    return tuple(sorted(mark for mark in marks if 0 < len(mark) <= MAX_MARK_CHARS and belongs(mark)))


def _stands_free(mark: str) -> bool:
    """Whether a character ordinarily has a space on one side."""
    return mark in _FREE_MARKS or unicodedata.category(mark) in _FREE_CATEGORIES
