"""The families of tokenizers that take new words: what differs between them, as a few functions.

A new word has a name, which users write and read: its text, or `##` and its text where it stands joined to what is
before it (WordPiece: the inside of a word; byte-level BPE: a word that follows no space). An entry is what the
vocabulary holds, and what a tokenizer's rules cut a text into before its model looks at it, such as `Ġword`.

Held to by every family: with new words, a text without one of them becomes the ids that it had before.
"""

from __future__ import annotations

import functools
import json
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar

from tokenizers import Tokenizer, models

from domext_ray.errors import CorpusError
from domext_ray.text.data.documents import split_sentences

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_WORD_CHARS = 100
"""WordPiece's limit: a longer word is [UNK] whatever the vocabulary. No longer word is new with BPE, either."""
PREFIX = "##"
"""The mark of a name that stands joined to what is before it."""
Groups = dict[str, tuple[int, ...]]
"""Hashes of different groups that a word occurs in, up to as many as are asked for."""

ASCII_WORD = re.compile(r"[^ !-/:-@\[-`{-~]+|[!-/:-@\[-`{-~]")
"""BERT isolates every ASCII punctuation mark."""
_NAMED_TOKENS = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


def add_groups(groups: Groups, word: str, found: Iterable[int], enough: int) -> None:
    """Note groups that a word occurs in, until there are enough."""
    known = groups.get(word, ())
    if len(known) < enough:
        groups[word] = tuple(dict.fromkeys((*known, *found)))[:enough]


def _list_characters() -> dict[int, str]:
    """Return the character that stands for each byte: itself where it is printable, else one from 256 on (GPT-2)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {**{byte: chr(byte) for byte in printable}, **{byte: chr(256 + i) for i, byte in enumerate(others)}}


_CHARACTERS = _list_characters()
_LINE_END = _CHARACTERS[ord("\n")]
_BYTES = {character: byte for byte, character in _CHARACTERS.items()}


def _to_text(entry: str) -> str | None:
    """Return what an entry stands for; None where it is no whole characters, or none of bytes."""
    try:
        return bytes(_BYTES[character] for character in entry).decode()
    except (KeyError, UnicodeDecodeError):
        return None


class TokenizerFamily(ABC):
    """One tokenizer, as its family sees it.

    Args:
        record: the fast tokenizer, serialised and parsed: of a base, with new words, or `rules_json` of one.
    """

    max_chars: ClassVar[int]
    """Longer words are not counted."""
    learns_pieces: ClassVar[bool]
    """New words may be pieces of words."""

    def __init__(self, record: dict[str, Any]) -> None:
        self.record = record
        model = record["model"]
        unknown = {model["unk_token"]: 0} if model.get("unk_token") else {}
        nothing: dict[str, Any] = {
            "added_tokens": [],
            **dict.fromkeys(("post_processor", "decoder", "truncation", "padding")),
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
        """Split a word, or an entry, as the model does by a vocabulary, one of whose entries may be left unused.

        Returns:
            The entries; none where the vocabulary cannot spell it.
        """

    @abstractmethod
    def make_model(self, entries: dict[str, int]) -> dict[str, Any]:
        """Return the record of the model over a vocabulary: that of the base, and new entries."""

    @abstractmethod
    def make_tokenizer(self, base: PreTrainedTokenizerBase, entries: dict[str, int]) -> PreTrainedTokenizerBase:
        """Make a base's tokenizer anew over another vocabulary; see `make_model`."""


class WordPieceFamily(TokenizerFamily):
    """The family of BERT: new words, and pieces of words, are further entries of the one model.

    A word is cut by greedy longest match, so one that has none of the new entries inside is cut as before.
    """

    max_chars = MAX_WORD_CHARS
    learns_pieces = True

    def find_fault(self) -> str:
        for part, wanted in (("normalizer", "BertNormalizer"), ("pre_tokenizer", "BertPreTokenizer")):
            found = (self.record.get(part) or {}).get("type")
            if found != wanted:
                return f"has the {part.replace('_', '-')} {found} in place of {wanted}"
        added = [token["content"] for token in self.record.get("added_tokens") or [] if not token["special"]]
        return f"has {len(added)} added tokens outside of its model, the first is {added[0]!r}" if added else ""

    def chunks(self, document: str) -> list[str]:
        return document.split(" ")

    def words(self, text: str) -> list[str]:
        if text.isascii():  # nothing to decompose: BERT isolates the punctuation, and the rest are words
            return ASCII_WORD.findall(text.lower() if self.record["normalizer"]["lowercase"] else text)
        return super().words(text)

    def to_entry(self, name: str) -> str:
        return name

    def to_name(self, *entries: str) -> str:
        return entries[0] + "".join(entry.removeprefix(PREFIX) for entry in entries[1:])

    def cut_name(self, name: str) -> list[str]:
        if not name.startswith(PREFIX):
            return super().words(name)
        seen = super().words(f"a{name.removeprefix(PREFIX)}")
        return [PREFIX + seen[0][1:], *seen[1:]]

    def is_continuation(self, entry: str) -> bool:
        return entry.startswith(PREFIX) and entry != PREFIX

    def is_learnable(self, word: str, known: Collection[str]) -> bool:
        return True

    def split(self, entry: str, known: Collection[str], without: str = "") -> list[str]:
        pieces = []
        prefix, start = (PREFIX, len(PREFIX)) if self.is_continuation(entry) else ("", 0)
        while start < len(entry):
            for end in range(len(entry), start, -1):
                piece = prefix + entry[start:end]
                if piece in known and piece != without:
                    pieces.append(piece)
                    start = end
                    break
            else:
                return []
            prefix = PREFIX
        return pieces

    def make_model(self, entries: dict[str, int]) -> dict[str, Any]:
        return {**self.record["model"], "vocab": entries}

    def make_tokenizer(self, base: PreTrainedTokenizerBase, entries: dict[str, int]) -> PreTrainedTokenizerBase:
        from transformers import BertTokenizer

        rule = self.record["normalizer"]
        tokenizer = BertTokenizer(
            vocab=entries,
            do_lower_case=rule["lowercase"],
            strip_accents=rule["strip_accents"],
            tokenize_chinese_chars=rule["handle_chinese_chars"],
            model_max_length=base.model_max_length,
            **{f"{name}_token": getattr(base, f"{name}_token") for name in ("unk", "sep", "pad", "cls", "mask")},
        )
        extra = [token for token in base.all_special_tokens if token not in tokenizer.all_special_tokens]
        if extra:
            tokenizer.add_special_tokens({"additional_special_tokens": extra})  # they have their base's ids
        return tokenizer


class ByteLevelFamily(TokenizerFamily):
    """The family of RoBERTa and ModernBERT: a new word is a whole word, taken before the model merges.

    The model's `ignore_merges` takes a word that is in the vocabulary without merging. New words make it so; any other
    word is either none of the vocabulary's entries, and merged as before, or one of the base's that its own merges lead
    to, which `find_fault` verifies for every entry that can be a word. So a text without new words keeps its ids. Added
    tokens (`tokenizers.AddedToken`) do not: they have another notion of where a word ends than the base's rules, which
    begin anew behind each.
    """

    max_chars = sys.maxsize  # of scripts without spaces a word is a whole clause
    learns_pieces = False

    def find_fault(self) -> str:
        model, rule = self.record["model"], self.record.get("pre_tokenizer") or {}
        rules = [part.get("type") for part in (rule, *rule.get("pretokenizers", ()))]
        marks = [name for name in ("continuing_subword_prefix", "end_of_word_suffix") if model.get(name)]
        if "ByteLevel" not in rules or model.get("byte_fallback") or marks:
            return "is a BPE model that is not byte-level"
        if model.get("dropout"):
            return "drops merges at random"
        if self.words("a b") != [*self.words("a"), "Ġb"]:
            return "does not cut text into words before its BPE model"
        entries = [*model["vocab"], *(token["content"] for token in self.record.get("added_tokens") or [])]
        for entry in [] if model.get("ignore_merges") else entries:
            if self._merge(entry) != [entry]:
                text = _to_text(entry)
                if text is not None and self.words(text) == [entry]:
                    return f"has the entry {entry!r}, which its merges do not lead to"
        return ""

    def chunks(self, document: str) -> Iterator[str]:
        for sentence in split_sentences(document):
            first, *others = sentence.split(" ")
            yield first
            yield from (f" {chunk}" for chunk in others)

    def to_entry(self, name: str) -> str:
        text = name.removeprefix(PREFIX) if name.startswith(PREFIX) else f" {name}"
        return "".join(_CHARACTERS[byte] for byte in text.encode())

    def to_name(self, *entries: str) -> str:
        text = "".join(_to_text(entry) or "" for entry in entries)
        return text[1:] if text.startswith(" ") else PREFIX + text

    def cut_name(self, name: str) -> list[str]:
        is_joined = name.startswith(PREFIX)
        words = self.words(f"\n{name.removeprefix(PREFIX)}" if is_joined else f" {name}")
        ends = [place for place, word in enumerate(words, 1) if is_joined and word.endswith(_LINE_END)]
        return [self.to_name(word) for word in words[max(ends, default=0) :]]

    def is_continuation(self, entry: str) -> bool:
        return False

    def is_learnable(self, word: str, known: Collection[str]) -> bool:
        name = self.to_name(word)
        text = name.removeprefix(PREFIX)
        return (
            len(text) <= MAX_WORD_CHARS
            and any(map(str.isalnum, text))
            and self.to_entry(text) not in known
            and self.to_entry(name) == word
        )

    def split(self, entry: str, known: Collection[str], without: str = "") -> list[str]:
        return [entry] if entry in known and entry != without else self._merge(entry)

    def _merge(self, word: str) -> list[str]:
        return [token.value for token in self._base_model.tokenize(word)]

    @functools.cached_property
    def _base_model(self) -> models.Model:
        return Tokenizer.from_str(json.dumps({"version": "1.0", "model": self.record["model"]})).model

    def make_model(self, entries: dict[str, int]) -> dict[str, Any]:
        return {**self.record["model"], "vocab": entries, "ignore_merges": True}

    def make_tokenizer(self, base: PreTrainedTokenizerBase, entries: dict[str, int]) -> PreTrainedTokenizerBase:
        from transformers import PreTrainedTokenizerFast

        record = {**self.record, "model": self.make_model(entries), "truncation": None, "padding": None}
        named = {f"{name}_token": getattr(base, f"{name}_token", None) for name in _NAMED_TOKENS}
        known = [token for token in named.values() if token is not None]
        tokenizer: PreTrainedTokenizerBase = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer.from_str(json.dumps(record)),
            model_max_length=base.model_max_length,
            model_input_names=base.model_input_names,
            padding_side=base.padding_side,
            truncation_side=base.truncation_side,
            extra_special_tokens=[token for token in base.all_special_tokens if token not in known],
            **{key: token for key, token in named.items() if token is not None},
        )
        return tokenizer


FAMILIES: dict[str, type[TokenizerFamily]] = {"WordPiece": WordPieceFamily, "BPE": ByteLevelFamily}


def tokenizer_family(tokenizer: PreTrainedTokenizerBase | str, base: str = "") -> TokenizerFamily:
    """Return a fast tokenizer, or its JSON, as its family sees it.

    `base`, what the user calls it, is for messages; without it `find_fault` is not asked.
    """
    record = json.loads(tokenizer if isinstance(tokenizer, str) else tokenizer.backend_tokenizer.to_str())
    model = record["model"].get("type")
    if model not in FAMILIES:
        raise make_refusal(base, f"is a {model} model")
    family = FAMILIES[model](record)
    fault = family.find_fault() if base else ""
    if fault:
        raise make_refusal(base, fault)
    return family


def make_refusal(base: str, fault: str) -> CorpusError:
    """Say that a base's tokenizer takes no new words; `fault`: as `TokenizerFamily.find_fault` has it."""
    return CorpusError(
        f"the tokenizer of --base {base} {fault}, and new words beside it would change other texts; give a base with "
        "WordPiece (as BERT's) or byte-level BPE (as RoBERTa's), or leave --vocab.size 0 and --vocab.words empty."
    )
