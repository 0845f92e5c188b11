"""The families of tokenizers that take new words: what differs between them, as a few functions.

A new word has a name, which users write and read: its text, or `##` and its text where it stands joined to what is
before it (WordPiece: the inside of a word; byte-level BPE: a word that follows no space). An entry is what the
vocabulary holds, and what a tokenizer's rules cut a text into before its model looks at it, such as `Ġword`.

Held to by every family: with new words, a text without one of them becomes the ids that it had before.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from tokenizers import Tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_WORD_CHARS = 100
"""WordPiece's limit: a longer word is [UNK] whatever the vocabulary. No longer word is new with BPE, either."""
PREFIX = "##"
"""The mark of a name that stands joined to what is before it."""


@dataclass(frozen=True)
class WordCounts:
    """How often words occur in a corpus.

    Args:
        words: distinct words, as the entries that they would be; the most frequent first, ties by text.
        counts: occurrences of each, int64 [W].
        num_documents: documents they are from.
        num_text_bytes: UTF-8 bytes of these documents.
        num_too_long: occurrences of words beyond `TokenizerFamily.max_chars`, which are not among the words.
        num_forgotten: occurrences of rare words that are not among the words: dropped to bound memory, or because too
            few groups have them.
    """

    words: tuple[str, ...]
    counts: np.ndarray
    num_documents: int
    num_text_bytes: int
    num_too_long: int
    num_forgotten: int

    @property
    def num_words(self) -> int:
        """Occurrences of all words, the ones left out included."""
        return int(self.counts.sum()) + self.num_too_long + self.num_forgotten

    def items(self) -> Iterator[tuple[str, int]]:
        """Yield each word with its occurrences."""
        return zip(self.words, self.counts.tolist(), strict=True)


class TokenizerFamily(ABC):
    """One tokenizer, as its family sees it.

    Args:
        record: the fast tokenizer, serialised and parsed: of a base, with new words, or `rules_json` of one.
    """

    max_chars: ClassVar[int]
    """Longer words are not told apart when words are counted."""
    learns_pieces: ClassVar[bool]
    """New words may be pieces of words."""

    def __init__(self, record: dict[str, Any]) -> None:
        self.record = record
        model = record["model"]
        unknown = {model["unk_token"]: 0} if model.get("unk_token") else {}
        nothing: dict[str, Any] = {
            "added_tokens": [],
            "post_processor": None,
            "decoder": None,
            "truncation": None,
            "padding": None,
        }
        stripped = {**model, "vocab": unknown, **({"merges": []} if "merges" in model else {})}
        self.rules_json = json.dumps({**record, **nothing, "model": stripped})
        """What cuts text into words, without the vocabulary: it travels to every task."""
        self._rules = Tokenizer.from_str(self.rules_json)

    @abstractmethod
    def find_fault(self) -> str:
        """Say, as the end of a sentence, why texts without new words would change; empty when they would not."""

    @abstractmethod
    def chunks(self, document: str) -> Iterable[str]:
        """Return the raw chunks of a clean document; no word reaches from one into another."""

    def words(self, text: str) -> list[str]:
        """Return the words of a text, or of a chunk, as the entries that they would be."""
        normalizer = self._rules.normalizer
        normalized = text if normalizer is None else normalizer.normalize_str(text)
        return [word for word, _ in self._rules.pre_tokenizer.pre_tokenize_str(normalized)]

    @abstractmethod
    def to_entry(self, name: str) -> str:
        """Return the entry of a new word's name."""

    @abstractmethod
    def to_name(self, *entries: str) -> str:
        """Return the name of the word that entries make up; of one entry, the inverse of `to_entry`."""

    @abstractmethod
    def cut_name(self, name: str) -> list[str]:
        """Return the names of what the text of a name is cut into; of a possible new word, its name alone."""

    @abstractmethod
    def is_continuation(self, entry: str) -> bool:
        """Whether an entry goes on in the word of the entry before it."""

    @abstractmethod
    def is_learnable(self, word: str, known: Collection[str]) -> bool:
        """Whether a word of a text that is not in a vocabulary is worth learning."""

    @abstractmethod
    def split(self, entry: str, known: Collection[str], without: str = "") -> list[str]:
        """Split a word, or an entry, as the model does.

        Args:
            entry: what to split.
            known: the vocabulary: that of the tokenizer, and new entries.
            without: an entry of it that is not used.

        Returns:
            The entries; none where the vocabulary cannot spell it.
        """

    @abstractmethod
    def make_model(self, entries: dict[str, int]) -> dict[str, Any]:
        """Return the record of the model over a vocabulary: that of the base, and new entries."""

    @abstractmethod
    def make_tokenizer(self, base: PreTrainedTokenizerBase, entries: dict[str, int]) -> PreTrainedTokenizerBase:
        """Make a base's tokenizer anew over another vocabulary; see `make_model`."""
