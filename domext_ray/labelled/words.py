"""A raw text -> words with their places, cut as labelled sets of tagged words are: at white space and punctuation.

Runs of letters, digits, combining marks and format characters are words; every ideograph is one, and so is everything
else that is no white space, an emoji with its modifiers included. BERT's own tokenizer cuts text at the same places.
"""

from __future__ import annotations

from tokenizers import Regex, pre_tokenizers

Offsets = tuple[int, int]

_IDEOGRAPH = r"\p{Han}[\p{M}\p{Cf}]*"
_RUN = r"(?:(?!\p{Han})[\p{L}\p{M}\p{N}\p{Cf}\p{Co}\p{Cn}])+"
_CUTTER = pre_tokenizers.Split(Regex(rf"{_IDEOGRAPH}|{_RUN}|\s|\X"), "isolated")


def cut_words(text: str) -> tuple[tuple[str, ...], tuple[Offsets, ...]]:
    """Cut a text into words.

    Args:
        text: any text without half surrogate pairs.

    Returns:
        The words, and for each its first character in `text` and the one after its last; no character but white space
        is left out.
    """
    found = [(word, offsets) for word, offsets in _CUTTER.pre_tokenize_str(text) if not word.isspace()]
    return tuple(word for word, _ in found), tuple(offsets for _, offsets in found)
