"""Shifts of the base's words: a domain moves rows of the word table, input and tied output together, and their biases.

What a frozen base lacks most in a new domain is words, more than layers: the rows of its word table say what a word
means, and the tied output when to expect it.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from domext_ray.extensions.anatomy import DomainPart, Shape, TrainedPart
from domext_ray.options.declare import CountOrZero, option_group, require


@option_group
class WordShiftOptions(TrainedPart):
    """Options of word shifts."""

    word_rows: CountOrZero = 0  # words of the base, the domain's most frequent, whose embeddings it shifts; 0: none
    word_head: bool = False  # the domain shifts the MLM head's transform, too


class WordShifts(DomainPart[WordShiftOptions]):
    """Shifts of the base's words; see `words_domext.WordShift`."""

    sizes = ("word_rows",)
    formats = ("bank",)
    label = "word rows"
    in_layers = False
    citation = ""

    def check(self, method: WordShiftOptions) -> None:
        """See `Extension.check`."""
        rule = "false without shifts of words (--method.word_rows 0)"
        require(method.word_rows > 0 or not method.word_head, "word_head", method.word_head, rule)

    def get_values(self, method: WordShiftOptions) -> dict[str, Any]:
        """See `DomainPart.get_values`."""
        return {"word_rows": method.word_rows, "word_head": method.word_head}

    def count_in_layer(self, shape: Shape, domain: Any) -> int:
        """See `DomainPart.count_in_layer`: it is in none."""
        return 0

    def count_in_domain(self, shape: Shape, domain: Any) -> int:
        """Count d parameters per row."""
        return domain.word_rows * shape.hidden_size

    def count_in_head(self, shape: Shape) -> int:
        """Count those of all domains in the MLM head."""
        return sum(_count_head(shape, domain) for domain in shape.domains.values())

    def count_trainable(self, shape: Shape, method: WordShiftOptions) -> int:
        """Count those of the method's own domain, in the encoder and in the MLM head."""
        return super().count_trainable(shape, method) + self.count_trainable_in_head(shape, method)

    def count_trainable_in_head(self, shape: Shape, method: WordShiftOptions) -> int:
        """See `Extension.count_trainable_in_head`."""
        return _count_head(shape, shape.domains[method.domain]) if self.is_in(method) else 0

    def describe_part(self, domain: Any) -> str:
        """See `DomainPart.describe_part`."""
        head = " and of the MLM head's transform" if domain.word_head else ""
        return f"shifts of {domain.word_rows:,} words' embeddings{head}"

    def find(self, shape: Shape, parameters: Collection[str], domain: str = "") -> str:
        """See `Extension.find`."""
        number = shape.domains[domain].word_rows if domain in shape.domains else 0
        return f"shifts of {number:,} words in the domain {domain!r}" if number else ""


def _count_head(shape: Shape, domain: Any) -> int:
    """A bias per row, and a shifted transform's matrix, its bias and its LayerNorm."""
    width = shape.hidden_size
    return domain.word_rows + (width * width + 3 * width if domain.word_head else 0)
