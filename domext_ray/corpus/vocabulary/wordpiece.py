"""WordPiece vocabularies, as BERT's: new words, and pieces of words, are further entries of the one model.

A text is cut by greedy longest match, so one that has none of the new entries inside is cut as before.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from tokenizers import Tokenizer, models

from domext_ray.corpus.vocabulary.kind import (
    MAX_WORD_CHARS,
    PREFIX,
    CountPieces,
    PieceCounts,
    Ranking,
    Splitter,
    VocabularyKind,
    WordCounts,
    read_record,
)
from domext_ray.corpus.vocabulary.new_words import find_longest, rank_entries, split_greedily
from domext_ray.errors import CorpusError

if TYPE_CHECKING:
    from transformers import BertTokenizer, PreTrainedTokenizerBase

_ASCII_WORD = re.compile(r"[^ !-/:-@\[-`{-~]+|[!-/:-@\[-`{-~]")
_BLOCK_WORDS = 20_000


class WordSplitter(Splitter):
    """Cuts raw chunks of text into words as a BERT tokenizer does."""

    def __init__(self, tokenizer_json: str) -> None:
        super().__init__(tokenizer_json)
        self._lowercase = bool(json.loads(tokenizer_json)["normalizer"]["lowercase"])

    def cut(self, document: str) -> list[str]:
        """Return the chunks between spaces: no word reaches across one."""
        return document.split(" ")

    def split(self, chunk: str) -> list[str]:
        """Return the words of a chunk."""
        if chunk.isascii():  # nothing to decompose: BERT isolates the punctuation, and the rest are words
            return _ASCII_WORD.findall(chunk.lower() if self._lowercase else chunk)
        return self.split_text(chunk)


class WordPieces(VocabularyKind):
    """BERT's kind."""

    def check(self, record: dict[str, Any], name: str) -> None:
        """Refuse other words than BERT's, and tokens beside the model; see `VocabularyKind.check`."""
        for part, wanted in (("normalizer", "BertNormalizer"), ("pre_tokenizer", "BertPreTokenizer")):
            found = (record.get(part) or {}).get("type")
            if found != wanted:
                raise CorpusError(
                    f"the tokenizer of --base {name} has the {part.replace('_', '-')} {found}; new words need "
                    f"{wanted}; leave --vocab.size 0 and --vocab.words empty."
                )
        added = [each["content"] for each in record.get("added_tokens") or [] if not each["special"]]
        if added:
            raise CorpusError(
                f"the tokenizer of --base {name} has {len(added)} added tokens outside of its WordPiece model, the "
                f"first is {added[0]!r}; new words need one model: put these tokens into its vocabulary."
            )

    def make_splitter(self, tokenizer_json: str) -> WordSplitter:
        """Return what cuts text as BERT does."""
        return WordSplitter(tokenizer_json)

    def strip(self, record: dict[str, Any]) -> dict[str, Any]:
        """Leave the unknown token alone in the vocabulary."""
        model = {**record["model"], "vocab": {record["model"]["unk_token"]: 0}}
        return {
            **record,
            "model": model,
            "added_tokens": [],
            "post_processor": None,
            "truncation": None,
            "padding": None,
        }

    def read_entries(self, record: dict[str, Any]) -> dict[str, int]:
        """Return the model's vocabulary."""
        return dict(record["model"]["vocab"])

    def to_entry(self, word: str) -> str:
        """A name is an entry."""
        return word

    def join_entries(self, entries: Sequence[str]) -> str:
        """Join pieces of a word."""
        return entries[0] + "".join(each.removeprefix(PREFIX) for each in entries[1:])

    def list_insides(self, entries: Sequence[str]) -> np.ndarray:
        """Entries with the prefix."""
        return np.array([each.startswith(PREFIX) and each != PREFIX for each in entries])

    def spell(self, unit: str) -> str:
        """A unit is text."""
        return unit

    def has_entry(self, word: str, entries: Collection[str]) -> bool:
        """Whether the name is an entry."""
        return word in entries

    def split_word(self, word: str, splitter: Splitter) -> list[str]:
        """Cut a word, or one that it is the inside of."""
        if not word.startswith(PREFIX):
            return splitter.split_text(word)
        seen = splitter.split_text(f"a{word.removeprefix(PREFIX)}")
        return [PREFIX + seen[0][1:], *seen[1:]]

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
        """Rank words and learned pieces; see `new_words.rank_entries`."""
        known = {*entries, *given}
        return rank_entries(counts.words, counts.counts.tolist(), known, size, min_frequency, whole_words)

    def make_counter(
        self, counts: WordCounts, tokenizer_json: str, base: dict[str, int], unk_token: str
    ) -> CountPieces:
        """Return what tokenises every counted word once; see `VocabularyKind.make_counter`."""
        first_id = max(base.values()) + 1

        def count(words: Sequence[str]) -> PieceCounts:
            pieces = _count_pieces(counts, {**base, **{word: first_id + i for i, word in enumerate(words)}}, unk_token)
            return PieceCounts(pieces.num_pieces, pieces.is_unknown, pieces.usage[first_id:])

        return count

    def unite(
        self, base: PreTrainedTokenizerBase, name: str, entries: dict[str, int], words: Sequence[str]
    ) -> BertTokenizer:
        """Make one WordPiece tokenizer; it normalises and cuts text exactly as the base's does."""
        from transformers import BertTokenizer

        rule = read_record(base)
        tokenizer = BertTokenizer(
            vocab={**entries, **{word: len(entries) + i for i, word in enumerate(words)}},
            do_lower_case=rule["normalizer"]["lowercase"],
            strip_accents=rule["normalizer"]["strip_accents"],
            tokenize_chinese_chars=rule["normalizer"]["handle_chinese_chars"],
            model_max_length=base.model_max_length,
            **{f"{each}_token": getattr(base, f"{each}_token") for each in ("unk", "sep", "pad", "cls", "mask")},
        )
        extra = [each for each in base.all_special_tokens if each not in tokenizer.all_special_tokens]
        if extra:
            tokenizer.add_special_tokens({"additional_special_tokens": extra})  # they have their base's ids
        _require_same_parts(name, rule, read_record(tokenizer))
        return tokenizer

    def decompose(self, base: PreTrainedTokenizerBase, words: Sequence[str]) -> list[list[int]]:
        """Split by greedy longest match; `##…` is the inside of a word."""
        entries = base.get_vocab()
        longest = find_longest(entries)
        return [
            [entries[piece] for piece in split_greedily(word, entries, longest) or [str(base.unk_token)]]
            for word in words
        ]


def _split_words(
    words: Sequence[str], vocabulary: dict[str, int], unk_token: str
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield (ids, number of ids of each word) of blocks of words, which are not cut or normalised any more."""
    model = models.WordPiece(vocabulary, unk_token=unk_token, max_input_chars_per_word=MAX_WORD_CHARS)
    tokenizer = Tokenizer(model)
    for first in range(0, len(words), _BLOCK_WORDS):
        block = list(words[first : first + _BLOCK_WORDS])
        ids = [each.ids for each in tokenizer.encode_batch(block, add_special_tokens=False)]
        yield np.fromiter(itertools.chain.from_iterable(ids), dtype=np.int64), np.fromiter(map(len, ids), np.int64)


def _count_pieces(counts: WordCounts, vocabulary: dict[str, int], unk_token: str) -> PieceCounts:
    """Tokenise every counted word once.

    Args:
        counts: the words.
        vocabulary: id by entry.
        unk_token: the entry for words that cannot be spelled.
    """
    num_pieces = np.ones(len(counts.words), dtype=np.int64)
    is_unknown = np.zeros(len(counts.words), dtype=bool)
    usage = np.zeros(max(vocabulary.values()) + 1, dtype=np.int64)
    # Greedy longest match takes a word that is an entry as a whole.
    whole = np.fromiter((vocabulary.get(each, -1) for each in counts.words), dtype=np.int64)
    np.add.at(usage, whole[whole >= 0], counts.counts[whole >= 0])
    rest = np.flatnonzero(whole < 0)
    first = 0
    for ids, sizes in _split_words([counts.words[i] for i in rest], vocabulary, unk_token):
        places = rest[first : first + len(sizes)]
        first += len(sizes)
        num_pieces[places] = sizes
        is_unknown[places] = ids[np.cumsum(sizes) - sizes] == vocabulary[unk_token]
        np.add.at(usage, ids, np.repeat(counts.counts[places], sizes))
    return PieceCounts(num_pieces, is_unknown, usage)


def _require_same_parts(name: str, rule: dict[str, Any], made: dict[str, Any]) -> None:
    """Refuse a base whose tokenizer changes beyond its vocabulary when it is made anew."""
    for part in ("normalizer", "pre_tokenizer", "added_tokens", "model"):
        old, new = ({**each[part], "vocab": None} if part == "model" else each[part] for each in (rule, made))
        if old != new:
            raise CorpusError(
                f"the tokenizer of --base {name} has a {part.replace('_', '-')} that a BERT tokenizer cannot "
                f"have ({json.dumps(old)[:200]}); new words need a BERT tokenizer."
            )
