"""A raw text -> words with their places, cut as labelled sets of tagged words are: at white space and punctuation.

Runs of letters, digits, combining marks and format characters are words; every ideograph is one, and so is everything
else that is no white space, an emoji with its modifiers included. BERT's own tokenizer cuts text at the same places. No
word begins or ends with an invisible character, such as a byte-order mark or a soft hyphen.
"""

from __future__ import annotations

from tokenizers import Regex, pre_tokenizers

Offsets = tuple[int, int]

_IDEOGRAPH = r"\p{Han}[\p{M}\p{Cf}]*"
_RUN = r"(?:(?!\p{Han})[\p{L}\p{M}\p{N}\p{Cf}\p{Co}\p{Cn}])+"
_CUTTER = pre_tokenizers.Split(Regex(rf"{_IDEOGRAPH}|{_RUN}|\s|\X"), "isolated")
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
        *(each for each in map(chr, range(0x3001)) if each.isspace()),
        *(chr(each) for first, last in _FORMATS for each in range(first, last + 1)),
        *"\u00ad\u061c\u180e\u2800\u3164\ufeff\uffa0",
    ]
)
"""White space and characters that show nothing: joiners, marks of direction, soft hyphens, byte-order marks, fillers.

Variation selectors and tags show nothing either, but are the end of an emoji."""


def cut_words(text: str) -> tuple[tuple[str, ...], tuple[Offsets, ...]]:
    """Cut a text into words.

    Args:
        text: any text without half surrogate pairs.

    Returns:
        The words, and for each its first character in `text` and the one after its last; nothing but white space and
        invisible characters is left out.
    """
    found = [(word, offsets) for word, offsets in _CUTTER.pre_tokenize_str(text) if not word.isspace()]
    if not text.isascii():
        places = (trim(text, *offsets) for _, offsets in found)
        found = [(text[start:end], (start, end)) for start, end in places if start < end]
    return tuple(word for word, _ in found), tuple(offsets for _, offsets in found)


def trim(text: str, start: int, end: int) -> Offsets:
    """Move the ends of a stretch inwards past white space and invisible characters.

    Args:
        text: any text.
        start: the stretch's first character.
        end: the character after its last.

    Returns:
        Its ends, which are equal where nothing is left.
    """
    while start < end and text[start] in INVISIBLE:
        start += 1
    while start < end and text[end - 1] in INVISIBLE:
        end -= 1
    return start, end
