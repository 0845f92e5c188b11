"""What a kind of tokenizer must say about itself so that it can take new words, and the records that pass between.

A new word has a name, which users write and read: the word's text, or `##` and its text where it stands joined to what
is before it (WordPiece: the inside of a word; other kinds: a word that follows no space). A unit is a stretch of text
as a tokenizer's model is given it, such as `Ġword`. An entry is what its vocabulary holds.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from tokenizers import Tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_WORD_CHARS = 100
"""WordPiece's limit: a longer word is [UNK] whatever the vocabulary. No longer word is new with other kinds, either."""
PREFIX = "##"
"""The mark of a name that stands joined to what is before it."""
NUM_CANDIDATES = 40_000
"""Learned entries and whole words that are considered, of each kind, at least; so sizes up to that are nested."""
UNKNOWN_PIECES = 2
"""What a word that cannot be spelled counts as: knowing it is worth a token."""


@dataclass(frozen=True)
class WordCounts:
    """How often words occur in a corpus.

    Args:
        words: distinct units, the most frequent first, ties by text.
        counts: occurrences of each, int64 [W].
        num_documents: documents they are from.
        num_text_bytes: UTF-8 bytes of these documents.
        num_too_long: occurrences of words beyond `MAX_WORD_CHARS`, which are not among the words.
        num_forgotten: occurrences of rare words that are not among the words: dropped to bound memory, or because too
            few groups have them.
        task_seconds: CPU time that the tasks took, summed.
    """

    words: tuple[str, ...]
    counts: np.ndarray
    num_documents: int
    num_text_bytes: int
    num_too_long: int
    num_forgotten: int
    task_seconds: float

    @property
    def num_words(self) -> int:
        """Occurrences of all words, the ones left out included."""
        return int(self.counts.sum()) + self.num_too_long + self.num_forgotten


@dataclass(frozen=True)
class Ranking:
    """Names of new words that a base lacks, the most useful first.

    Args:
        alphabet: entries for characters that the base cannot spell; they come before all others.
        entries: the others, by the tokens that they save.
        unreachable: candidates that no text is ever cut into, sorted.
        feed_scale: what counts were multiplied by for the trainer.
    """

    alphabet: tuple[str, ...]
    entries: tuple[str, ...]
    unreachable: tuple[str, ...]
    feed_scale: float


@dataclass(frozen=True)
class PieceCounts:
    """What the words of a corpus become.

    Args:
        num_pieces: tokens of each word, int64 [W].
        is_unknown: the word is [UNK], bool [W].
        usage: occurrences of each new word in the corpus, int64 [E].
    """

    num_pieces: np.ndarray
    is_unknown: np.ndarray
    usage: np.ndarray


CountPieces = Callable[[Sequence[str]], PieceCounts]
"""New words -> what the counted words become with them."""


class Splitter(ABC):
    """Cuts text into units as one tokenizer does.

    Args:
        tokenizer_json: the fast tokenizer, serialised; `VocabularyKind.strip` says of what it can do without.
    """

    max_chars: ClassVar[int] = MAX_WORD_CHARS
    """Longer units are not told apart."""

    def __init__(self, tokenizer_json: str) -> None:
        self.tokenizer = Tokenizer.from_str(tokenizer_json)

    @abstractmethod
    def cut(self, document: str) -> Iterable[str]:
        """Return the raw chunks of a clean document; no unit reaches from one into another."""

    def split(self, chunk: str) -> list[str]:
        """Return the units of a chunk."""
        return self.split_text(chunk)

    def split_text(self, text: str) -> list[str]:
        """Return the units of any text."""
        normalizer = self.tokenizer.normalizer
        normalized = text if normalizer is None else normalizer.normalize_str(text)
        return [unit for unit, _ in self.tokenizer.pre_tokenizer.pre_tokenize_str(normalized)]


class VocabularyKind(ABC):
    """How tokenizers of one kind take new words. Everything that differs between kinds is asked of it.

    Held to by every kind: with new words, a text without one of them becomes the ids that it had before.
    """

    @abstractmethod
    def check(self, record: dict[str, Any], name: str) -> None:
        """Check that a base's tokenizer can take new words.

        Args:
            record: the fast tokenizer, serialised and parsed.
            name: what the user calls the base.

        Raises:
            CorpusError: it cannot, so that texts without new words would change.
        """

    @abstractmethod
    def make_splitter(self, tokenizer_json: str) -> Splitter:
        """Return what cuts text into units, for a tokenizer with new words or without, stripped or not."""

    @abstractmethod
    def strip(self, record: dict[str, Any]) -> dict[str, Any]:
        """Return what a splitter needs of a tokenizer, without the vocabulary that would travel to every task."""

    @abstractmethod
    def read_entries(self, record: dict[str, Any]) -> dict[str, int]:
        """Return the ids of a serialised tokenizer's entries."""

    @abstractmethod
    def to_entry(self, word: str) -> str:
        """Return the entry of a new word's name."""

    @abstractmethod
    def join_entries(self, entries: Sequence[str]) -> str:
        """Return the name of the word that entries make up, at least one of them new; inverse of `to_entry`."""

    @abstractmethod
    def list_insides(self, entries: Sequence[str]) -> np.ndarray:
        """Say which entries go on in the word of the entry before them, bool [V]."""

    @abstractmethod
    def spell(self, unit: str) -> str:
        """Return the text that a unit stands for, without the space before it."""

    @abstractmethod
    def has_entry(self, word: str, entries: Collection[str]) -> bool:
        """Whether a base's entries have a word already."""

    def find_fault(self, word: str) -> str:
        """Say why a word can be no new one, as the end of a sentence; empty where nothing is known against it."""
        return ""

    @abstractmethod
    def split_word(self, word: str, splitter: Splitter) -> list[str]:
        """Return the names of what a text of a word is cut into; of a possible new word, its name alone."""

    @abstractmethod
    def rank(
        self,
        counts: WordCounts,
        tokenizer_json: str,
        entries: Collection[str],
        given: Collection[str],
        *,
        size: int,
        min_frequency: int,
        whole_words: bool,
    ) -> Ranking:
        """Find what a base's vocabulary lacks, and rank it.

        Args:
            counts: the words of the corpus.
            tokenizer_json: the base's fast tokenizer, serialised.
            entries: the base's.
            given: names of new words that are there in any case.
            size: new words that are wanted; more are ranked.
            min_frequency: occurrences below which a word is not learned from.
            whole_words: new words are whole words, not pieces of words.
        """

    @abstractmethod
    def make_counter(
        self, counts: WordCounts, tokenizer_json: str, base: dict[str, int], unk_token: str
    ) -> CountPieces:
        """Return what tells what the words of a corpus become with some new words.

        Args:
            counts: the words.
            tokenizer_json: the fast tokenizer, serialised, of the base or with new words.
            base: id by entry of the base.
            unk_token: the entry for words that cannot be spelled.
        """

    @abstractmethod
    def unite(
        self, base: PreTrainedTokenizerBase, name: str, entries: dict[str, int], words: Sequence[str]
    ) -> PreTrainedTokenizerBase:
        """Make one tokenizer over base and new words, whose ids follow the base's.

        Args:
            base: the base's tokenizer.
            name: what the user calls the base.
            entries: id by entry of the base, without gaps.
            words: names of the new words.

        Raises:
            CorpusError: the base's tokenizer cannot be had with new words.
        """

    @abstractmethod
    def decompose(self, base: PreTrainedTokenizerBase, words: Sequence[str]) -> list[list[int]]:
        """Return the base's ids of every new word; what cannot be spelled is the unknown token."""


def read_record(tokenizer: PreTrainedTokenizerBase | str) -> dict[str, Any]:
    """Return a fast tokenizer, or its JSON, as a record."""
    text = tokenizer if isinstance(tokenizer, str) else tokenizer.backend_tokenizer.to_str()
    record: dict[str, Any] = json.loads(text)
    return record
