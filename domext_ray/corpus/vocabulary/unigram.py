"""SentencePiece's unigram vocabularies, as XLM-R has: new words are pieces with a mark inside.

The model takes the pieces of the highest sum of scores, wherever they match, so a piece for `word` would also be the
start of `words`. Therefore the normaliser puts a mark that no text has behind the first character of every new word
that stands alone, letters and digits on neither side, and the word's piece has that mark: it matches there and nowhere
else. A text without new words gets no mark, so it keeps its pieces; a mark that a text does have becomes another
character that no piece has.

`tokenizers` reads some numbers from a file with an error in the last place, so a base's scores change a little whenever
it is saved. Scores of which that is so are rounded to 15 digits here, which files keep: a change of 1e-15 of a score.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from typing import Any

from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers

from domext_ray.corpus.texts.sentences import split_sentences
from domext_ray.corpus.vocabulary.kind import PREFIX, Splitter
from domext_ray.corpus.vocabulary.whole_words import LooseSplitter, WholeWords, drop_tokens
from domext_ray.errors import CorpusError

MARK = "\ufdd0"
OTHER_MARK = "\ufdd1"
"""Noncharacters, which Unicode keeps out of texts."""
SPACE = "▁"
_SCORE = 0.0
"""Of new words: above every piece of the base, so that a word is not the start of another and the rest of it."""
_IS_WORD = normalizers.Replace(Regex(r"\A\w+\z"), "")
"""Removes what is a word to the engine that cuts text; Python's own sees others."""
_PIECE = re.compile(rf"{SPACE}?\w*")


class RunSplitter(LooseSplitter):
    """Cuts raw chunks of text into words of letters and digits, and what is between them."""

    def __init__(self, tokenizer_json: str) -> None:
        super().__init__(tokenizer_json)
        runs = pre_tokenizers.Split(Regex(rf"{SPACE}?\w+"), "isolated")
        self.tokenizer.pre_tokenizer = pre_tokenizers.Sequence([self.tokenizer.pre_tokenizer, runs])

    def cut(self, document: str) -> list[str]:
        """Return the chunks between spaces; each begins as after a space."""
        return [chunk for sentence in split_sentences(document) for chunk in sentence.split(" ")]


class UnigramWords(WholeWords):
    """The kind of XLM-R."""

    def check(self, record: dict[str, Any], name: str) -> None:
        """Refuse models whose texts would change with new words; see `VocabularyKind.check`."""
        fault = _find_fault(record)
        if fault:
            raise CorpusError(
                f"the tokenizer of --base {name} is a unigram model {fault}; new words beside it would change other "
                "texts; give another base, or leave --vocab.size 0 and --vocab.words empty."
            )

    def make_splitter(self, tokenizer_json: str) -> RunSplitter:
        """Return what cuts text into words."""
        return RunSplitter(tokenizer_json)

    def strip(self, record: dict[str, Any]) -> dict[str, Any]:
        """Leave one piece, and no new word's mark."""
        model = {**record["model"], "vocab": [["<unk>", 0.0]], "unk_id": 0}
        return {**drop_tokens(record), "normalizer": _pick_normalizer(record["normalizer"]), "model": model}

    def read_entries(self, record: dict[str, Any]) -> dict[str, int]:
        """Return the places of the model's pieces."""
        return {piece: i for i, (piece, _) in enumerate(record["model"]["vocab"])}

    def find_unk(self, record: dict[str, Any]) -> int | None:
        """The model's."""
        unk_id: int | None = record["model"]["unk_id"]
        return unk_id

    def to_unit(self, word: str) -> str:
        """A name after a space, or joined."""
        return word.removeprefix(PREFIX) if word.startswith(PREFIX) else SPACE + word

    def to_entry(self, word: str) -> str:
        """The unit, with the mark behind the word's first character."""
        unit = self.to_unit(word)
        place = 1 + unit.startswith(SPACE)
        return unit[:place] + MARK + unit[place:]

    def to_name(self, unit: str) -> str:
        """The text behind the space, or `##` and the text."""
        return unit.removeprefix(SPACE) if unit.startswith(SPACE) else PREFIX + unit

    def join_entries(self, entries: Sequence[str]) -> str:
        """A new word is one entry."""
        (entry,) = entries
        return self.to_name(entry.replace(MARK, ""))

    def spell(self, unit: str) -> str:
        """A unit is text behind its space."""
        return unit.removeprefix(SPACE)

    def find_fault(self, word: str) -> str:
        """Refuse what is not of letters and digits."""
        is_word = not _IS_WORD.normalize_str(word.removeprefix(PREFIX))
        return "" if is_word else "is no word of letters and digits alone"

    def split_word(self, word: str, splitter: Splitter) -> list[str]:
        """Cut a word after a space, or behind a parenthesis."""
        if not word.startswith(PREFIX):
            return [self.to_name(unit) for unit in splitter.split_text(word)]
        return [self.to_name(unit) for unit in splitter.split_text(f"({word.removeprefix(PREFIX)}")][1:]

    def pick_base(self, record: dict[str, Any], base: Collection[str]) -> dict[str, Any]:
        """The model as it is: without marks, new words match nothing."""
        model: dict[str, Any] = record["model"]
        return model

    def extend(self, record: dict[str, Any], entries: dict[str, int], words: Sequence[str]) -> dict[str, Any]:
        """Add the words' pieces behind the base's rows, and the normaliser that marks words."""
        pieces = _round_scores(record["model"]["vocab"], record["model"]["unk_id"])
        splits_all = any(each.get("type") == "WhitespaceSplit" for each in _list_rules(record))
        pattern = write_pattern(words, r"\s" if splits_all else " ")
        unused = [[MARK + name, _SCORE] for name, i in entries.items() if i >= len(pieces)]
        new = [[self.to_entry(word), _SCORE] for word in words]
        rules = [
            {"type": "Replace", "pattern": {"String": MARK}, "content": OTHER_MARK},
            {"type": "Replace", "pattern": {"Regex": pattern}, "content": MARK},
        ]
        normalizer = {"type": "Sequence", "normalizers": [*filter(None, [record["normalizer"]]), *rules]}
        unmark = {"type": "Replace", "pattern": {"String": MARK}, "content": ""}
        decoder = {"type": "Sequence", "decoders": [*filter(None, [record["decoder"]]), unmark]}
        model = {**record["model"], "vocab": [*pieces, *unused, *new]}
        return {**record, "normalizer": normalizer, "decoder": decoder, "model": model}


def _find_fault(record: dict[str, Any]) -> str:
    """Say what keeps a unigram model from new words; empty when nothing does."""
    model = record["model"]
    parts = [each for each in _list_rules(record) if each.get("type") == "Metaspace"]
    pieces = dict(model["vocab"])
    added = {each["content"]: each["id"] for each in record.get("added_tokens") or []}
    if not parts or parts[-1].get("prepend_scheme") != "always" or parts[-1].get("replacement") != SPACE:
        return f"whose words do not always begin with {SPACE!r}"
    if model.get("byte_fallback"):
        return "that spells unknown characters as bytes"
    strange = [each for each, i in added.items() if i >= len(model["vocab"]) or model["vocab"][i][0] != each]
    if strange:
        return f"beside which the token {strange[0]!r} stands"
    if any(MARK in piece or OTHER_MARK in piece for piece in pieces):
        return "that has new words already, or their marks"
    high = [each for each, score in pieces.items() if score >= _SCORE and each not in added and _PIECE.fullmatch(each)]
    return f"whose piece {high[0]!r} has a score of 0 or more" if high else ""


def _round_scores(pieces: list[list[Any]], unk_id: int) -> list[list[Any]]:
    """Return pieces with scores that stay as they are when they are written to a file and read again."""
    model = {"type": "Unigram", "unk_id": unk_id, "vocab": pieces, "byte_fallback": False}
    read = json.loads(Tokenizer.from_str(json.dumps({"version": "1.0", "model": model})).to_str())["model"]["vocab"]
    return [
        [piece, score if score == again else float(f"{score:.15g}")]
        for (piece, score), (_, again) in zip(pieces, read, strict=True)
    ]


def _list_rules(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rules that cut text before the model does."""
    rule = record.get("pre_tokenizer") or {}
    return [rule, *rule.get("pretokenizers", ())]


def _pick_normalizer(rule: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the base's own normaliser."""
    parts = (rule or {}).get("normalizers", [])
    if not any(part.get("content") == MARK for part in parts):
        return rule
    return parts[0] if len(parts) > 2 else None


def write_pattern(words: Sequence[str], space: str = r"\s") -> str:
    """Return a regular expression that matches behind the first character of each word that stands alone.

    Words share their beginnings in it, so that the search does not grow with their number.

    Args:
        words: names, one at least.
        space: what is a space to the base, a class of characters.
    """
    spaced = [word for word in words if not word.startswith(PREFIX)]
    joined = [word.removeprefix(PREFIX) for word in words if word.startswith(PREFIX)]
    ways = [(rf"(?<![^{space}])", spaced), (rf"(?<=[^\w{space}])", joined)]
    return "|".join(f"{before}{_write_words(own)}" for before, own in ways if own)


def _write_words(words: Sequence[str]) -> str:
    tails: dict[str, list[str]] = {}
    for word in sorted(words):
        tails.setdefault(word[0], []).append(word[1:])
    ways = [rf"{first}\K(?={_write_tails(rest)}(?!\w))" for first, rest in tails.items()]
    return f"(?:{'|'.join(ways)})"


def _write_tails(tails: Sequence[str]) -> str:
    """Return an expression for any of some distinct texts."""
    groups: dict[str, list[str]] = {}
    for tail in filter(None, tails):
        groups.setdefault(tail[0], []).append(tail[1:])
    written = [first + _write_tails(rest) for first, rest in groups.items()]
    if not written:
        return ""
    is_optional = "" in tails
    if len(written) == 1 and not is_optional:
        return written[0]
    return f"(?:{'|'.join(written)}){'?' if is_optional else ''}"
