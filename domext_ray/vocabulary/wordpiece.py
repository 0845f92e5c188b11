"""WordPiece tokenizers, as BERT's: new words, and pieces of words, are further entries of the one model.

A word is cut by greedy longest match, so one that has none of the new entries inside is cut as before.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from domext_ray.vocabulary.family import MAX_WORD_CHARS, PREFIX, TokenizerFamily

if TYPE_CHECKING:
    from transformers import BertTokenizer, PreTrainedTokenizerBase

_ASCII_WORD = re.compile(r"[^ !-/:-@\[-`{-~]+|[!-/:-@\[-`{-~]")


class WordPieceFamily(TokenizerFamily):
    """The family of BERT."""

    max_chars = MAX_WORD_CHARS
    learns_pieces = True

    def find_fault(self) -> str:
        """Refuse other words than BERT's, and tokens beside the model."""
        for part, wanted in (("normalizer", "BertNormalizer"), ("pre_tokenizer", "BertPreTokenizer")):
            found = (self.record.get(part) or {}).get("type")
            if found != wanted:
                return f"has the {part.replace('_', '-')} {found} in place of {wanted}"
        added = [each["content"] for each in self.record.get("added_tokens") or [] if not each["special"]]
        return f"has {len(added)} added tokens outside of its model, the first is {added[0]!r}" if added else ""

    def chunks(self, document: str) -> list[str]:
        """Cut at spaces: no word reaches across one."""
        return document.split(" ")

    def words(self, text: str) -> list[str]:
        """Return the words of a chunk."""
        if text.isascii():  # nothing to decompose: BERT isolates the punctuation, and the rest are words
            return _ASCII_WORD.findall(text.lower() if self.record["normalizer"]["lowercase"] else text)
        return super().words(text)

    def to_entry(self, name: str) -> str:
        """A name is an entry."""
        return name

    def to_name(self, *entries: str) -> str:
        """Join pieces of a word."""
        return entries[0] + "".join(each.removeprefix(PREFIX) for each in entries[1:])

    def cut_name(self, name: str) -> list[str]:
        """Cut a word, or one that it is the inside of."""
        if not name.startswith(PREFIX):
            return super().words(name)
        seen = super().words(f"a{name.removeprefix(PREFIX)}")
        return [PREFIX + seen[0][1:], *seen[1:]]

    def is_continuation(self, entry: str) -> bool:
        """What has the prefix."""
        return entry.startswith(PREFIX) and entry != PREFIX

    def is_learnable(self, word: str, known: Collection[str]) -> bool:
        """Every word."""
        return True

    def split(self, entry: str, known: Collection[str], without: str = "") -> list[str]:
        """Split by greedy longest match; `##…` is the inside of a word."""
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
        """One WordPiece model over all entries."""
        return {**self.record["model"], "vocab": entries}

    def make_tokenizer(self, base: PreTrainedTokenizerBase, entries: dict[str, int]) -> BertTokenizer:
        """Make a `BertTokenizer`, which every version of transformers knows."""
        from transformers import BertTokenizer

        rule = self.record["normalizer"]
        tokenizer = BertTokenizer(
            vocab=entries,
            do_lower_case=rule["lowercase"],
            strip_accents=rule["strip_accents"],
            tokenize_chinese_chars=rule["handle_chinese_chars"],
            model_max_length=base.model_max_length,
            **{f"{each}_token": getattr(base, f"{each}_token") for each in ("unk", "sep", "pad", "cls", "mask")},
        )
        extra = [each for each in base.all_special_tokens if each not in tokenizer.all_special_tokens]
        if extra:
            tokenizer.add_special_tokens({"additional_special_tokens": extra})  # they have their base's ids
        return tokenizer
