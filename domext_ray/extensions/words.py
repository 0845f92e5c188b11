"""exBERT's new words: embeddings of their own behind the base's table, tied to their rows of the output."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Literal

from domext_ray.extensions.base import Extension, Shape, TrainedPart
from domext_ray.extensions.modules import EXBERT
from domext_ray.options.declare import option_group


@option_group
class WordOptions(TrainedPart):
    """Options of new words; which ones there are is an option of the vocabulary."""

    # new words' start; or the mean of the base's pieces; or fitted to what the base makes of these
    word_init: Literal["random", "subword_mean", "distill"] = "random"


class NewWords(Extension[WordOptions]):
    """New words; see `words_domext.Embeddings`."""

    parameters = re.compile(r"^(bert\.embeddings|cls\.predictions)\.extension\.")
    paper = "exBERT"
    citation = EXBERT

    def is_in(self, method: WordOptions) -> bool:
        """Always: words train wherever extensions do."""
        return True

    def describe(self, shape: Shape, method: WordOptions) -> str:
        """See `Extension.describe`."""
        number = shape.extension_vocab_size
        return f"{number:,} new words with embeddings of their own" if number else ""

    def find(self, shape: Shape, parameters: Collection[str], adapter: str = "") -> str:
        """See `Extension.find`."""
        return f"{shape.extension_vocab_size} new words" if shape.extension_vocab_size else ""
