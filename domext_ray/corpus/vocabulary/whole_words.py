"""What vocabularies that take whole words only have in common: byte-level BPE and SentencePiece's unigram model.

Their models cut a word by all of their entries together, so a new piece of words would change words that are not new. A
whole word is taken before its model cuts it, and no other word sees it. So words save tokens independently of each
other, and the most useful are those with the highest product of occurrences and pieces saved.
"""

from __future__ import annotations

import json
import sys
from abc import abstractmethod
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from tokenizers import Tokenizer

from domext_ray.corpus.vocabulary.kind import (
    MAX_WORD_CHARS,
    NUM_CANDIDATES,
    PREFIX,
    UNKNOWN_PIECES,
    CountPieces,
    PieceCounts,
    Ranking,
    Splitter,
    VocabularyKind,
    WordCounts,
    read_record,
)
from domext_ray.errors import CorpusError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_RANKED_WORDS = 500_000
"""Distinct words that the ranking looks at: the most frequent that the base splits."""
_BLOCK_UNITS = 20_000
_NAMED_TOKENS = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


class LooseSplitter(Splitter):
    """Cuts text into units of any length: of scripts without spaces, whole clauses."""

    max_chars = sys.maxsize


class WholeWords(VocabularyKind):
    """A kind whose new words are units, each a token as a whole."""

    @abstractmethod
    def to_unit(self, word: str) -> str:
        """Return the unit of a new word's name."""

    @abstractmethod
    def to_name(self, unit: str) -> str:
        """Return the name of a unit; inverse of `to_unit`."""

    @abstractmethod
    def pick_base(self, record: dict[str, Any], base: Collection[str]) -> dict[str, Any]:
        """Return the model of a serialised tokenizer without new words.

        Args:
            record: of the base, or with new words.
            base: the base's entries.
        """

    @abstractmethod
    def extend(self, record: dict[str, Any], entries: dict[str, int], words: Sequence[str]) -> dict[str, Any]:
        """Return a base's serialised tokenizer with new words; see `unite`."""

    def list_insides(self, entries: Sequence[str]) -> np.ndarray:
        """None: a new word is one entry, and the base's tokens need no words."""
        return np.zeros(len(entries), dtype=bool)

    def has_entry(self, word: str, entries: Collection[str]) -> bool:
        """Whether the base's model has the unit."""
        return self.to_unit(word) in entries

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
        """Rank the words that the base splits by the tokens that they save; see `VocabularyKind.rank`."""
        num_frequent = int((counts.counts >= min_frequency).sum())
        taken = {self.to_unit(word) for word in given}
        units, occurrences = [], []
        for unit, count in zip(counts.words[:num_frequent], counts.counts.tolist(), strict=False):
            if unit not in entries and unit not in taken and self._can_be_new(unit, entries):
                units.append(unit)
                occurrences.append(count)
                if len(units) == MAX_RANKED_WORDS:
                    break
        num_pieces, is_unknown = self._split_units(units, tokenizer_json, entries)
        pieces = np.where(is_unknown, np.maximum(num_pieces, UNKNOWN_PIECES), num_pieces).tolist()
        saved = {
            self.to_name(unit): count * (number - 1)
            for unit, count, number in zip(units, occurrences, pieces, strict=True)
            if number > 1
        }
        ranked = sorted(saved, key=lambda word: (-saved[word], word))
        return Ranking((), tuple(ranked[: max(NUM_CANDIDATES, 2 * size)]), (), 0.0)

    def _can_be_new(self, unit: str, entries: Collection[str]) -> bool:
        """Whether a unit is worth learning: a word that the base does not have after a space, either."""
        text, name = self.spell(unit), self.to_name(unit)
        return (
            len(text) <= MAX_WORD_CHARS
            and any(map(str.isalnum, text))
            and self.to_unit(name.removeprefix(PREFIX)) not in entries
            and not self.find_fault(name)
            and self.to_unit(name) == unit
        )

    def make_counter(
        self, counts: WordCounts, tokenizer_json: str, base: dict[str, int], unk_token: str
    ) -> CountPieces:
        """Return what takes new words whole, and others as the base does; see `VocabularyKind.make_counter`."""
        num_pieces, is_unknown = self._split_units(counts.words, tokenizer_json, base)
        places = {unit: place for place, unit in enumerate(counts.words)}

        def count(words: Sequence[str]) -> PieceCounts:
            found = np.array([places.get(self.to_unit(word), -1) for word in words], dtype=np.int64)
            usage = np.where(found >= 0, counts.counts[found], 0) if len(found) else np.zeros(0, dtype=np.int64)
            pieces, unknown, new = num_pieces.copy(), is_unknown.copy(), found[found >= 0]
            pieces[new], unknown[new] = 1, False
            return PieceCounts(pieces, unknown, usage)

        return count

    def _split_units(
        self, units: Sequence[str], tokenizer_json: str, base: Collection[str]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return how many pieces the base makes of each unit, and whether one of them is the unknown token."""
        model = self._make_model(json.loads(tokenizer_json), base)
        unk_id = self.find_unk(json.loads(tokenizer_json))
        num_pieces = np.zeros(len(units), dtype=np.int64)
        is_unknown = np.zeros(len(units), dtype=bool)
        for first in range(0, len(units), _BLOCK_UNITS):
            block = list(units[first : first + _BLOCK_UNITS])
            for place, encoding in enumerate(model.encode_batch(block, add_special_tokens=False), first):
                num_pieces[place] = len(encoding.ids)
                is_unknown[place] = unk_id in encoding.ids
        return num_pieces, is_unknown

    @abstractmethod
    def find_unk(self, record: dict[str, Any]) -> int | None:
        """Return the id that a serialised tokenizer gives what it cannot spell; None: it spells everything."""

    def _make_model(self, record: dict[str, Any], base: Collection[str]) -> Tokenizer:
        """Make a tokenizer of the base's model alone, which is given units."""
        return Tokenizer.from_str(json.dumps({"version": "1.0", "model": self.pick_base(record, base)}))

    def unite(
        self, base: PreTrainedTokenizerBase, name: str, entries: dict[str, int], words: Sequence[str]
    ) -> PreTrainedTokenizerBase:
        """Make one tokenizer that transformers loads as its file says, whatever the base's class would make of it."""
        from transformers import PreTrainedTokenizerFast

        record = {**self.extend(read_record(base), entries, words), "truncation": None, "padding": None}
        named = {f"{each}_token": getattr(base, f"{each}_token", None) for each in _NAMED_TOKENS}
        known = [each for each in named.values() if each is not None]
        tokenizer: PreTrainedTokenizerBase = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer.from_str(json.dumps(record)),
            model_max_length=base.model_max_length,
            model_input_names=base.model_input_names,
            padding_side=base.padding_side,
            truncation_side=base.truncation_side,
            extra_special_tokens=[each for each in base.all_special_tokens if each not in known],
            **{key: token for key, token in named.items() if token is not None},
        )
        made = read_record(tokenizer)
        for part in ("normalizer", "pre_tokenizer", "added_tokens", "model", "post_processor", "decoder"):
            if made[part] != json.loads(json.dumps(record[part])):
                raise CorpusError(
                    f"the tokenizer of --base {name} has a {part.replace('_', '-')} that transformers changes when "
                    "it is loaded with new words; leave --vocab.size 0 and --vocab.words empty."
                )
        return tokenizer

    def decompose(self, base: PreTrainedTokenizerBase, words: Sequence[str]) -> list[list[int]]:
        """Return what the base's model makes of each word's unit."""
        model = base.backend_tokenizer.model
        return [[token.id for token in model.tokenize(self.to_unit(word))] for word in words]


def drop_tokens(record: dict[str, Any]) -> dict[str, Any]:
    """Return a serialised tokenizer without what stands beside its model and its rules of words."""
    return {**record, "added_tokens": [], "post_processor": None, "decoder": None, "truncation": None, "padding": None}
