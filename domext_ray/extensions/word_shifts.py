"""Shifts of the base's words: an adapter moves rows of the word table, input and tied output alike, and their biases.

What a frozen base lacks most in a new domain is words, more than layers: the rows of its word table say what a word
means, and the tied output when to expect it.
"""

from __future__ import annotations

import re
from typing import Any

from domext_ray.extensions.base import AdapterPart, TrainedPart
from domext_ray.options.declare import CountOrZero, option_group, require


@option_group
class WordShiftOptions(TrainedPart):
    """Options of word shifts."""

    word_rows: CountOrZero = 0  # words of the base, the adapter's most frequent, whose embeddings it shifts; 0: none
    word_head: bool = False  # the adapter shifts the MLM head's transform, too


class WordShifts(AdapterPart[WordShiftOptions]):
    """Shifts of the base's words; see `words_domext.WordShift`."""

    sizes = ("word_rows",)
    parameters = re.compile(r"^(bert\.embeddings|cls\.predictions)\.adapters\.")
    formats = ("bank",)
    label = "word rows"
    found = "shifts of {:,} words"
    in_layers = False
    citation = ""

    def check(self, method: WordShiftOptions) -> None:
        """See `Extension.check`."""
        rule = "false without shifts of words (--method.word_rows 0)"
        require(method.word_rows > 0 or not method.word_head, "word_head", method.word_head, rule)

    def get_values(self, method: WordShiftOptions) -> dict[str, Any]:
        """See `AdapterPart.get_values`."""
        return {"word_rows": method.word_rows, "word_head": method.word_head}

    def describe_part(self, adapter: Any) -> str:
        """See `AdapterPart.describe_part`."""
        head = " and of the MLM head's transform" if adapter.word_head else ""
        return f"shifts of {adapter.word_rows:,} words' embeddings{head}"
