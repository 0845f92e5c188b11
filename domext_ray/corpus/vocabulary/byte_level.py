"""Byte-level BPE vocabularies, as those of RoBERTa and ModernBERT: new words are pre-tokens taken as a whole.

The model's `ignore_merges` takes a pre-token that is in the vocabulary without merging. New words make it so; any other
pre-token is either none of the vocabulary's entries, and merged as before, or one of the base's that its own merges
lead to, which `check` verifies for every entry that can be a pre-token. So a text without new words keeps its ids.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from domext_ray.corpus.texts.sentences import split_sentences
from domext_ray.corpus.vocabulary.kind import PREFIX, Splitter
from domext_ray.corpus.vocabulary.whole_words import LooseSplitter, WholeWords, drop_tokens
from domext_ray.errors import CorpusError


def _list_characters() -> dict[int, str]:
    """Return the character that stands for each byte: itself where it is printable, else one from 256 on (GPT-2)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [each for each in range(256) if each not in printable]
    return {**{each: chr(each) for each in printable}, **{each: chr(256 + i) for i, each in enumerate(others)}}


_CHARACTERS = _list_characters()
_LINE_END = _CHARACTERS[ord("\n")]
_BYTES = {character: byte for byte, character in _CHARACTERS.items()}


class PreTokenSplitter(LooseSplitter):
    """Cuts raw chunks of text into pre-tokens; a space belongs to the word behind it."""

    def cut(self, document: str) -> Iterator[str]:
        """Yield the chunks of sentences, each with the space before it: rows are made of sentences."""
        for sentence in split_sentences(document):
            first, *others = sentence.split(" ")
            yield first
            yield from (f" {each}" for each in others)


class ByteLevelWords(WholeWords):
    """The kind of RoBERTa and ModernBERT."""

    def check(self, record: dict[str, Any], name: str) -> None:
        """Refuse BPE without bytes or words, and entries that merges do not lead to; see `VocabularyKind.check`."""
        model, rule = record["model"], record.get("pre_tokenizer") or {}
        parts = [each.get("type") for each in (rule, *rule.get("pretokenizers", ()))]
        marks = [each for each in ("continuing_subword_prefix", "end_of_word_suffix") if model.get(each)]
        if "ByteLevel" not in parts or model.get("byte_fallback") or marks:
            raise CorpusError(
                f"the tokenizer of --base {name} is a BPE model that is not byte-level, and new words beside it would "
                "change other words; give a base with WordPiece (as BERT's), byte-level BPE (as RoBERTa's) or a "
                "unigram model (as XLM-R's), or leave --vocab.size 0 and --vocab.words empty."
            )
        if model.get("dropout"):
            raise CorpusError(f"the tokenizer of --base {name} drops merges at random; save it without dropout.")
        splitter = self.make_splitter(json.dumps(self.strip(record)))
        if splitter.split_text("a b") != [*splitter.split_text("a"), "Ġb"]:
            raise CorpusError(
                f"the tokenizer of --base {name} does not cut text into words before its BPE model; new words need "
                "that; leave --vocab.size 0 and --vocab.words empty."
            )
        entries = [*model["vocab"], *(each["content"] for each in record.get("added_tokens") or [])]
        lost = "" if model.get("ignore_merges") else self._find_lost(record, entries, splitter)
        if lost:
            raise CorpusError(
                f"the tokenizer of --base {name} has the entry {lost!r}, which its merges do not lead to, so that "
                "texts would change; take it out, or leave --vocab.size 0 and --vocab.words empty."
            )

    def _find_lost(self, record: dict[str, Any], entries: Sequence[str], splitter: Splitter) -> str:
        """Return an entry that a text can have as a pre-token and that the model cuts; empty when there is none."""
        merged = self._make_model(record, set(entries)).encode_batch(list(entries), add_special_tokens=False)
        for entry, encoding in zip(entries, merged, strict=True):
            if encoding.tokens != [entry]:
                text = _to_text(entry)
                if text is not None and splitter.split_text(text) == [entry]:
                    return entry
        return ""

    def make_splitter(self, tokenizer_json: str) -> PreTokenSplitter:
        """Return what cuts text into pre-tokens."""
        return PreTokenSplitter(tokenizer_json)

    def strip(self, record: dict[str, Any]) -> dict[str, Any]:
        """Leave no entry and no merge."""
        return {**drop_tokens(record), "model": {**record["model"], "vocab": {}, "merges": []}}

    def read_entries(self, record: dict[str, Any]) -> dict[str, int]:
        """Return the model's vocabulary."""
        return dict(record["model"]["vocab"])

    def find_unk(self, record: dict[str, Any]) -> int | None:
        """None: bytes spell everything."""
        return None

    def to_unit(self, word: str) -> str:
        """A name after a space, or joined."""
        text = word.removeprefix(PREFIX) if word.startswith(PREFIX) else f" {word}"
        return "".join(_CHARACTERS[byte] for byte in text.encode())

    def to_entry(self, word: str) -> str:
        """A unit is an entry."""
        return self.to_unit(word)

    def to_name(self, unit: str) -> str:
        """The text behind the space, or `##` and the text."""
        text = _to_text(unit) or ""
        return text[1:] if text.startswith(" ") else PREFIX + text

    def join_entries(self, entries: Sequence[str]) -> str:
        """A new word is one entry."""
        (entry,) = entries
        return self.to_name(entry)

    def spell(self, unit: str) -> str:
        """Decode the bytes."""
        return (_to_text(unit) or "").removeprefix(" ")

    def split_word(self, word: str, splitter: Splitter) -> list[str]:
        """Cut a word after a space, or at the start of a line."""
        is_joined = word.startswith(PREFIX)
        units = splitter.split_text(f"\n{word.removeprefix(PREFIX)}" if is_joined else f" {word}")
        ends = [place for place, unit in enumerate(units, 1) if is_joined and unit.endswith(_LINE_END)]
        return [self.to_name(unit) for unit in units[max(ends, default=0) :]]

    def pick_base(self, record: dict[str, Any], base: Collection[str]) -> dict[str, Any]:
        """Leave the base's entries."""
        model = record["model"]
        return {**model, "vocab": {entry: i for entry, i in model["vocab"].items() if entry in base}}

    def extend(self, record: dict[str, Any], entries: dict[str, int], words: Sequence[str]) -> dict[str, Any]:
        """Add the words to the vocabulary, and take pre-tokens that are in it as a whole."""
        new = {self.to_entry(word): len(entries) + i for i, word in enumerate(words)}
        return {**record, "model": {**record["model"], "vocab": {**entries, **new}, "ignore_merges": True}}


def _to_text(unit: str) -> str | None:
    """Return what a unit or an entry stands for; None where it is no whole characters, or none of bytes."""
    try:
        return bytes(_BYTES[each] for each in unit).decode()
    except (KeyError, UnicodeDecodeError):
        return None
