"""Which punctuation is part of words is learned from a set's words, and running text is cut by it."""

from __future__ import annotations

import random

import pytest

from domext_ray.families.readers.words import INVISIBLE, NO_MARKS, WordMarks, cut_words, learn_marks

MELTED = ("Ilvera melted.", "It melted, (slowly) at 5% of X-12.", "Then it (Ilvera) stopped.")
SPLIT = ("the steel X - 12 ( new ) melted .", "5 % of it , and John 's")
LEARNED: dict[str, tuple[tuple[str, ...], WordMarks, str, str]] = {
    "all punctuation is words": (SPLIT[:1], NO_MARKS, "the X-12 (new) melted.", "the|X|-|12|(|new|)|melted|."),
    "marks inside": (
        ("the alloy X-12 of search.rungs .", "std::sort , and X-13 - new"),
        WordMarks(("-", ".", "::")),
        "X-12, std::sort (X-13-a). new.",
        "X-12|,|std::sort|(|X-13-a|)|.|new|.",
    ),
    "as often inside as alone": (("X-1 and X - 2",), WordMarks(("-",)), "X-1", "X-1"),
    "seldomer inside than alone": (("X-1 and X - 2 or X - 3",), NO_MARKS, "X-1", "X|-|1"),
    "a mark at an end of a sentence stood beside nothing": (("- X-1", "X -"), WordMarks(("-",)), "X-1", "X-1"),
    "a comma has a space beside it anyway": (("a , b , c , d 1,000",), WordMarks((",",)), "2,000, a", "2,000|,|a"),
    "marks at an edge": (
        ("about 5% or $7 of fit()", "-1 ( or )"),
        WordMarks((), ("$", "-"), ("%", "()")),
        "($9) is 8%\u200b. -3 fit(x) and\ufeff fit().",
        "(|$9|)|is|8%|.|-3|fit|(|x|)|and|fit()|.",
    ),
    "a mark at an edge as often as alone": (("5% or 5 %",), NO_MARKS, "5%", "5|%"),
    "a full stop of letters is not that of sentences": (
        ("the U.S. or U.K. fell .", "Mr. X fell"),
        WordMarks((".",), (), (), (".",)),
        "the (U.S.) e.g. U.K.X fell. A. Mr. B.C",
        "the|(|U.S.|)|e.g.|U.K.X|fell|.|A|.|Mr|.|B.C",
    ),
    "letters as often without a full stop at the end": (("U.S. or U.S .",), WordMarks((".",)), "U.S.", "U.S|."),
    "words between white space": (
        MELTED,
        WordMarks(("-",), ("(",), ("%", ")", ",", ".")),
        "(X-12), 5%. It melted (so).",
        "(X-12),|5%.|It|melted|(so).",
    ),
    "clitics stay words": (
        ("John 's dog , Mary 's cat and O'Brien",),
        WordMarks((), ("'",)),
        "John's O'Brien",
        "John|'s|O|'Brien",
    ),
    "contractions are words": (("don't , can't and John 's",), WordMarks(("'",), ("'",)), "don't", "don't"),
    "several marks are not one, and one is not several": (
        ("std::sort a : b",),
        WordMarks(("::",)),
        "a::b a:b a:::b",
        "a::b|a|:|b|a|:|:|:|b",
    ),
    "signs of patterns": (
        ("a[*]b C++ (.+)x",),
        WordMarks(("[*]",), ("(.+)",), ("++",)),
        "c[*]d[b C++",
        "c[*]d|[|b|C++",
    ),
    "ideographs and emoji stay words": (
        ("心-脏 X-1 \U0001f600X 5% #a",),
        WordMarks(("-",), ("#",), ("%",)),
        "心-脏 \U0001f600X-2 #\ufe0f\u20e3a X-病",
        "心|-|脏|\U0001f600|X-2|#\ufe0f\u20e3|a|X|-|病",
    ),
    "a line is no mark": (("=====a a-----b",), NO_MARKS, "=====a", "=|=|=|=|=|a"),
}


@pytest.mark.parametrize("name", LEARNED)
def test_text_is_cut_as_the_words_that_were_learned_from(name: str) -> None:
    sentences, marks, text, words = LEARNED[name]
    learned = learn_marks([each.split() for each in sentences])
    assert learned == marks == WordMarks.from_json(learned.to_json())
    assert "|".join(cut_words(text, learned)[0]) == words


def test_nothing_learned_is_nothing_joined() -> None:
    for sentences in ([], [[]], [["..."]], [["a", "b"], ["\U0001f600", "心"]]):
        assert learn_marks(sentences) == NO_MARKS
    assert not NO_MARKS and WordMarks.from_json({}) == NO_MARKS


def test_no_character_but_white_space_is_lost_with_marks() -> None:
    generator = random.Random(0)
    signs = "ab1 .,-_\n\u0301\u200d\ufe0f\U0001f600心'(#\u20e3%"
    marks = WordMarks((".", "-", "--", "_"), ("#", "-", "'"), ("%", ".", "-", "--"), (".",))
    for _ in range(300):
        text = "".join(generator.choices(signs, k=generator.randrange(1, 40)))
        words, offsets = cut_words(text, marks)
        assert [text[start:end] for start, end in offsets] == list(words)
        assert [each for each in "".join(words) if each not in INVISIBLE] == [
            each for each in text if each not in INVISIBLE
        ]
        assert all(word[0] not in INVISIBLE and word[-1] not in INVISIBLE for word in words)
    assert cut_words("-" * 50_000, marks)[0] == ("-",) * 50_000, "in a time that grows with the text alone"
