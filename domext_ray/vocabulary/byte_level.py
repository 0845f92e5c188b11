"""Byte-level BPE tokenizers, as those of RoBERTa and ModernBERT: new words are taken whole, before the model merges.

The model's `ignore_merges` takes a word that is in the vocabulary without merging. New words make it so; any other
word is either none of the vocabulary's entries, and merged as before, or one of the base's that its own merges lead to,
which `find_fault` verifies for every entry that can be a word. So a text without new words keeps its ids. Added tokens
(`tokenizers.AddedToken`) do not: they have another notion of where a word ends than the base's rules, which begin anew
behind each.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer, models

from domext_ray.data.sentences import split_sentences
from domext_ray.vocabulary.family import MAX_WORD_CHARS, PREFIX, TokenizerFamily

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_NAMED_TOKENS = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


def _list_characters() -> dict[int, str]:
    """Return the character that stands for each byte: itself where it is printable, else one from 256 on (GPT-2)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [each for each in range(256) if each not in printable]
    return {**{each: chr(each) for each in printable}, **{each: chr(256 + i) for i, each in enumerate(others)}}


_CHARACTERS = _list_characters()
_LINE_END = _CHARACTERS[ord("\n")]
_BYTES = {character: byte for byte, character in _CHARACTERS.items()}


def _to_text(entry: str) -> str | None:
    """Return what an entry stands for; None where it is no whole characters, or none of bytes."""
    try:
        return bytes(_BYTES[each] for each in entry).decode()
    except (KeyError, UnicodeDecodeError):
        return None


class ByteLevelFamily(TokenizerFamily):
    """The family of RoBERTa and ModernBERT. A new word is a whole word, in the case of the text."""

    max_chars = sys.maxsize  # of scripts without spaces a word is a whole clause
    learns_pieces = False

    def find_fault(self) -> str:
        """Refuse BPE without bytes or words, and entries that merges do not lead to."""
        model, rule = self.record["model"], self.record.get("pre_tokenizer") or {}
        rules = [each.get("type") for each in (rule, *rule.get("pretokenizers", ()))]
        marks = [each for each in ("continuing_subword_prefix", "end_of_word_suffix") if model.get(each)]
        if "ByteLevel" not in rules or model.get("byte_fallback") or marks:
            return "is a BPE model that is not byte-level"
        if model.get("dropout"):
            return "drops merges at random"
        if self.words("a b") != [*self.words("a"), "Ġb"]:
            return "does not cut text into words before its BPE model"
        entries = [*model["vocab"], *(each["content"] for each in self.record.get("added_tokens") or [])]
        for entry in [] if model.get("ignore_merges") else entries:
            if self._merge(entry) != [entry]:
                text = _to_text(entry)
                if text is not None and self.words(text) == [entry]:
                    return f"has the entry {entry!r}, which its merges do not lead to"
        return ""

    def chunks(self, document: str) -> Iterator[str]:
        """Yield the chunks of sentences, each with the space before it: rows are made of sentences."""
        for sentence in split_sentences(document):
            first, *others = sentence.split(" ")
            yield first
            yield from (f" {each}" for each in others)

    def to_entry(self, name: str) -> str:
        """The bytes of a name after a space, or joined."""
        text = name.removeprefix(PREFIX) if name.startswith(PREFIX) else f" {name}"
        return "".join(_CHARACTERS[byte] for byte in text.encode())

    def to_name(self, *entries: str) -> str:
        """The text behind the space, or `##` and the text; a new word is one entry."""
        text = "".join(_to_text(entry) or "" for entry in entries)
        return text[1:] if text.startswith(" ") else PREFIX + text

    def cut_name(self, name: str) -> list[str]:
        """Cut a word after a space, or at the start of a line."""
        is_joined = name.startswith(PREFIX)
        words = self.words(f"\n{name.removeprefix(PREFIX)}" if is_joined else f" {name}")
        ends = [place for place, word in enumerate(words, 1) if is_joined and word.endswith(_LINE_END)]
        return [self.to_name(word) for word in words[max(ends, default=0) :]]

    def is_continuation(self, entry: str) -> bool:
        """Nothing: a new word is one entry, and the base's tokens need no words."""
        return False

    def is_learnable(self, word: str, known: Collection[str]) -> bool:
        """Whether a word has a letter or a digit, and the base does not have it after a space."""
        name = self.to_name(word)
        text = name.removeprefix(PREFIX)
        return (
            len(text) <= MAX_WORD_CHARS
            and any(map(str.isalnum, text))
            and self.to_entry(text) not in known
            and self.to_entry(name) == word
        )

    def split(self, entry: str, known: Collection[str], without: str = "") -> list[str]:
        """A word of the vocabulary is whole; another is merged as the base merges it."""
        return [entry] if entry in known and entry != without else self._merge(entry)

    def _merge(self, word: str) -> list[str]:
        return [token.value for token in self._base_model.tokenize(word)]

    @functools.cached_property
    def _base_model(self) -> models.Model:
        return Tokenizer.from_str(json.dumps({"version": "1.0", "model": self.record["model"]})).model

    def make_model(self, entries: dict[str, int]) -> dict[str, Any]:
        """The base's merges, and words that are taken whole."""
        return {**self.record["model"], "vocab": entries, "ignore_merges": True}

    def make_tokenizer(self, base: PreTrainedTokenizerBase, entries: dict[str, int]) -> PreTrainedTokenizerBase:
        """Make a tokenizer that transformers loads as its file says, whatever the base's class would make of it."""
        from transformers import PreTrainedTokenizerFast

        record = {**self.record, "model": self.make_model(entries), "truncation": None, "padding": None}
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
        return tokenizer
