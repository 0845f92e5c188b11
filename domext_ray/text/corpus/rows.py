"""Documents -> sentences -> token rows, with the starts of words kept for whole-word masking.

Sentences are grouped until a row of `seq_length` tokens is full; a longer sentence is cut, before a word where that is
possible. Words are the tokenizer's pre-tokens in spaced scripts; in Han text they are jieba's words, or single
characters. A document that is two texts, such as title and body (`--prepare.pair`), is one row whatever its length: at
most `seq_length` tokens of each text.
"""

from __future__ import annotations

import functools
import itertools
import json
import logging
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from tokenizers import Encoding

from domext_ray.errors import CorpusError
from domext_ray.text.data.documents import PAIR_SEPARATOR, split_sentences
from domext_ray.text.vocabulary.family import ASCII_WORD
from domext_ray.text.vocabulary.tokenizer import make_backend

SENTENCES_PER_CALL = 2048
MAX_CACHED_CHARS = 8 * 2**20
"""Characters of chunks that a tokenizer remembers, at most: about 100 MB with their tokens."""

SCHEMA = pa.schema([("input_ids", pa.list_(pa.int32())), ("word_starts", pa.list_(pa.bool_()))])
SECOND_START = "second_start"
TWO_TEXT_SCHEMA = SCHEMA.append(pa.field(SECOND_START, pa.int32()))
NO_TOKEN = "no_token"
"""Why a document makes no row: one of its two texts is of characters that the tokenizer leaves out."""

Tokens = tuple[np.ndarray, np.ndarray]
"""Ids, int32 [N], and whether a word starts at each, bool [N]; a special token starts one."""
MAX_COUNTED_WORDS, MAX_KEPT_WORDS, MAX_WORD_CHARS = 10_000, 8, 40
"""Different words that one task counts, of which it keeps the most frequent, and how much of a long one it shows."""

_HAN = re.compile(r"[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff]")


def count_han(text: str) -> int:
    """Return the number of Han characters."""
    return 0 if text.isascii() else len(_HAN.findall(text))


@dataclass(frozen=True)
class RowSettings:
    """What decides how text becomes rows."""

    tokenizer_json: str
    cls_id: int
    sep_id: int
    seq_length: int  # of a full row, [CLS] and [SEP] included
    cross_documents: bool  # a row may go on with the next document, [SEP] between them
    chinese_words: bool  # words of Han text are jieba's; else every Han character is a word
    pairs: bool = False  # rows are pairs for next-sentence prediction (see `pairs`)
    packed: bool = False  # a row may go on with the next document, which has a [CLS] of its own
    has_two_texts: bool = False  # a document is two texts, and becomes one row
    unk_id: int = -1  # -1: what the tokenizer does not know is not counted


@dataclass
class TokenCounts:
    """What was tokenised, and how much of it is unknown to the tokenizer."""

    num_tokens: int = 0  # special ones not included
    num_unknown: int = 0
    num_chars: int = 0  # spaces not included
    unknown_chars: int = 0  # that unknown tokens stand for
    words: Counter[str] = field(default_factory=Counter)  # what unknown tokens stand for, a long one cut

    def add_words(self, words: Iterable[str]) -> None:
        """Count what unknown tokens stand for."""
        for word in words:
            self.unknown_chars += len(word)
            shown = word[:MAX_WORD_CHARS]
            if shown in self.words or len(self.words) < MAX_COUNTED_WORDS:
                self.words[shown] += 1

    def merge(self, later: Mapping[str, Any]) -> None:
        """Add what was counted elsewhere: `pack` of it."""
        for name in ("num_tokens", "num_unknown", "num_chars", "unknown_chars"):
            setattr(self, name, getattr(self, name) + later[name])
        self.words.update(later["words"])

    def pack(self) -> dict[str, Any]:
        """Return the counts as plain values, the same in any order of counting."""
        kept = sorted(self.words.items(), key=lambda each: (-each[1], each[0]))[:MAX_KEPT_WORDS]
        return {**vars(self), "words": dict(kept)}


@functools.cache
def load_jieba() -> Any:
    """Return jieba's segmenter, its dictionary loaded and its logger silent."""
    try:
        import jieba
    except ImportError as error:
        raise CorpusError(
            "the corpus is Chinese and jieba, which finds its words, is not installed; "
            'pip install "domext_ray[chinese]", or set --prepare.chinese_words false.'
        ) from error
    jieba.setLogLevel(logging.WARNING)
    jieba.initialize()
    return jieba


class SentenceTokenizer:
    """Turns sentences into tokens exactly as the tokenizer does, each one integer `id << 1 | starts a word`.

    A BERT tokenizer works on every chunk between spaces by itself, and on every Han character by itself; so chunks are
    tokenised once and looked up afterwards, several times faster than anew. Other tokenizers see whole sentences.
    """

    def __init__(self, tokenizer_json: str, chinese_words: bool, unk_id: int = -1) -> None:
        self.chinese_words, self.unk_id = chinese_words, unk_id
        self.tokenizer = make_backend(tokenizer_json)
        self.splits_at_spaces = _splits_at_spaces(json.loads(tokenizer_json))
        self._cache: dict[str, list[int]] = {}
        self._cached_chars = 0
        self._unknown: dict[str, list[str]] = {}  # by chunk or sentence

    def encode(self, sentences: Sequence[str]) -> list[list[int]]:
        """Return the tokens of every sentence, special ones not included."""
        if not self.splits_at_spaces:
            self._unknown = {}
            encodings = self.tokenizer.encode_batch(list(sentences), add_special_tokens=False)
            return [self._pack_sentence(text, encoding) for text, encoding in zip(sentences, encodings, strict=True)]
        chunked = [self._split_chunks(sentence) for sentence in sentences]
        if self._cached_chars > MAX_CACHED_CHARS:
            self._cache, self._cached_chars, self._unknown = {}, 0, {}
        missing = list(dict.fromkeys(chunk for chunks in chunked for chunk in chunks if chunk not in self._cache))
        for chunk, encoding in zip(
            missing, self.tokenizer.encode_batch(missing, add_special_tokens=False), strict=True
        ):
            self._cache[chunk] = self._pack_chunk(chunk, encoding)
            self._cached_chars += len(chunk)
        lookup = self._cache.__getitem__
        return [list(itertools.chain.from_iterable(map(lookup, chunks))) for chunks in chunked]

    def find_unknown(self, sentence: str) -> Iterator[str]:
        """Yield what unknown tokens stand for in a sentence of the last call of `encode`."""
        for text in self._split_chunks(sentence) if self.splits_at_spaces else [sentence]:
            yield from self._unknown.get(text, ())

    def _note_unknown(self, text: str, encoding: Encoding) -> list[int]:
        """Return the ids of a text, and keep what of it is unknown."""
        ids = encoding.ids
        if self.unk_id in ids:
            places = (span for own, span in zip(ids, encoding.offsets, strict=True) if own == self.unk_id)
            self._unknown[text] = [text[first:end] for first, end in places]
        return ids

    def _split_chunks(self, sentence: str) -> list[str]:
        """Cut at spaces, and where a jieba word begins or ends with a Han character."""
        if not self.chinese_words or sentence.isascii() or not _HAN.search(sentence):
            return ASCII_WORD.findall(sentence)
        chunks: list[str] = []
        for part in sentence.split(" "):
            first = len(chunks)
            for word in load_jieba().cut(part):
                if len(chunks) > first and not _HAN.match(chunks[-1][-1]) and not _HAN.match(word):
                    chunks[-1] += word  # the tokenizer must see a run without Han as a whole
                else:
                    chunks.append(word)
        return chunks

    def _pack_chunk(self, chunk: str, encoding: Encoding) -> list[int]:
        starts = _start_pre_tokens(encoding)
        if self.chinese_words and not chunk.isascii():
            # A Han character that begins no chunk stands inside of a jieba word.
            starts = [
                start and (first == 0 or not _HAN.match(chunk[first]))
                for start, (first, _) in zip(starts, encoding.offsets, strict=True)
            ]
        return [number << 1 | start for number, start in zip(self._note_unknown(chunk, encoding), starts, strict=True)]

    def _pack_sentence(self, sentence: str, encoding: Encoding) -> list[int]:
        starts = _start_pre_tokens(encoding)
        if not sentence.isascii() and _HAN.search(sentence):
            begins = self._begin_words(sentence)
            is_han = [_HAN.match(character) is not None for character in sentence]
            previous = -1
            for i, (first, _) in enumerate(encoding.offsets):
                if first < len(sentence) and (is_han[first] or (first and is_han[first - 1])):
                    starts[i] = first in begins and first != previous
                previous = first
        ids = self._note_unknown(sentence, encoding)
        return [number << 1 | start for number, start in zip(ids, starts, strict=True)]

    def _begin_words(self, sentence: str) -> set[int]:
        words = load_jieba().cut(sentence) if self.chinese_words else sentence
        return set(itertools.accumulate((len(word) for word in words), initial=0))


def _splits_at_spaces(record: dict[str, Any]) -> bool:
    """Whether a tokenizer's result for a text is that of its chunks between spaces and Han characters, joined."""
    normalizer = record.get("normalizer") or {}
    return (
        normalizer.get("type") == "BertNormalizer"
        and bool(normalizer.get("handle_chinese_chars"))
        and (record.get("pre_tokenizer") or {}).get("type") == "BertPreTokenizer"
        and record["model"].get("type") == "WordPiece"
        and all(token["special"] for token in record.get("added_tokens") or [])
    )


def _start_pre_tokens(encoding: Encoding) -> list[bool]:
    words = encoding.word_ids
    return [word is None or i == 0 or word != words[i - 1] for i, word in enumerate(words)]


@functools.lru_cache(maxsize=2)
def _load_tokenizer(tokenizer_json: str, chinese_words: bool, unk_id: int) -> SentenceTokenizer:
    return SentenceTokenizer(tokenizer_json, chinese_words, unk_id)


class TwoTextRow(NamedTuple):
    """Two texts in a row of N tokens, and the place where the second begins."""

    ids: np.ndarray
    word_starts: np.ndarray
    second_start: int


def tokenize_sentences(
    sentences: Sequence[str], settings: RowSettings, counts: TokenCounts | None = None
) -> Iterator[Tokens]:
    """Yield the tokens of every sentence, special ones not included."""
    tokenizer = _load_tokenizer(settings.tokenizer_json, settings.chinese_words, settings.unk_id)
    encoded = tokenizer.encode(sentences)
    ends = list(itertools.accumulate(map(len, encoded), initial=0))
    packed = np.fromiter(itertools.chain.from_iterable(encoded), dtype=np.int64, count=ends[-1])
    ids, starts = (packed >> 1).astype(np.int32), (packed & 1).astype(bool)
    if counts is not None:
        unknown = np.flatnonzero(ids == settings.unk_id)
        counts.num_tokens += len(ids)
        counts.num_unknown += len(unknown)
        counts.num_chars += sum(len(sentence) - sentence.count(" ") for sentence in sentences)
        for place in np.unique(np.searchsorted(ends, unknown, side="right")) - 1:
            counts.add_words(tokenizer.find_unknown(sentences[place]))
    for first, end in itertools.pairwise(ends):
        yield ids[first:end], starts[first:end]


def tokenize_documents(
    documents: Iterable[str], settings: RowSettings, counts: TokenCounts | None = None
) -> Iterator[list[Tokens]]:
    """Yield every document as the tokens of its sentences."""
    waiting, num_sentences = list[list[str]](), 0

    def flush() -> Iterator[list[Tokens]]:
        tokenized = tokenize_sentences([*itertools.chain(*waiting)], settings, counts)
        return (list(itertools.islice(tokenized, len(sentences))) for sentences in waiting)

    for document in documents:
        waiting.append(split_sentences(document))
        num_sentences += len(waiting[-1])
        if num_sentences >= SENTENCES_PER_CALL:
            yield from flush()
            waiting, num_sentences = [], 0
    yield from flush()


def join_tokens(*parts: int | Tokens) -> Tokens:
    """Join tokens, and special ones that are given by their id."""
    one = np.ones(1, dtype=bool)
    tokens = [(np.array([part], dtype=np.int32), one) if isinstance(part, int) else part for part in parts]
    ids, starts = zip(*tokens, strict=True)
    return np.concatenate(ids), np.concatenate(starts)


def find_cut(starts: np.ndarray, capacity: int) -> int:
    """Say where to cut a sentence that is too long: before its last word that begins in the second half of the room.

    `starts`, bool, says of more than `capacity` tokens whether a word starts there.
    """
    if starts[capacity]:
        return capacity
    before = np.flatnonzero(starts[:capacity])
    return int(before[-1]) if len(before) and before[-1] > capacity // 2 else capacity


def cut_tokens(tokens: Tokens, capacity: int) -> Iterator[Tokens]:
    """Yield parts of a sentence that there is room for."""
    ids, starts = tokens
    while len(ids) > capacity:
        cut = find_cut(starts, capacity)
        yield ids[:cut], starts[:cut]
        ids, starts = ids[cut:], starts[cut:]
    if len(ids):
        yield ids, starts


class _RowBuilder:
    """Groups sentences into rows."""

    def __init__(self, settings: RowSettings) -> None:
        self.settings, self.capacity = settings, settings.seq_length - 2
        self.parts, self.size = list[Tokens](), 0
        special = [settings.sep_id, settings.cls_id] if settings.packed else [settings.sep_id]
        self.between = join_tokens(*special)

    def add(self, tokens: Tokens) -> Iterator[Tokens]:
        """Take a sentence; yield the rows that it completes, [CLS] and [SEP] included."""
        if self.size and self.size + len(tokens[0]) > self.capacity:
            yield self._finish()
        for part in cut_tokens(tokens, self.capacity):
            if self.size + len(part[0]) > self.capacity:
                yield self._finish()
            self._append(part)

    def end_document(self) -> Iterator[Tokens]:
        """Mark the end of a document: a [SEP] in the row, and a [CLS] where rows are packed, or the row's end."""
        if not self.size or self.parts[-1] is self.between:
            return
        goes_on = self.settings.cross_documents or self.settings.packed
        if not goes_on or self.size + len(self.between[0]) + 1 > self.capacity:
            yield self._finish()
        else:
            self._append(self.between)

    def end(self) -> Iterator[Tokens]:
        """Yield the last row."""
        if self.size:
            yield self._finish()

    def _append(self, tokens: Tokens) -> None:
        self.parts.append(tokens)
        self.size += len(tokens[0])

    def _finish(self) -> Tokens:
        if self.parts[-1] is self.between:  # the row's own [SEP] ends the last document
            self.parts.pop()
        row = join_tokens(self.settings.cls_id, *self.parts, self.settings.sep_id)
        self.parts, self.size = [], 0
        return row


def build_rows(documents: Iterable[str], settings: RowSettings, tokens: TokenCounts | None = None) -> Iterator[Tokens]:
    """Turn clean documents into rows of at most `seq_length` tokens, which are counted."""
    builder = _RowBuilder(settings)
    for sentences in tokenize_documents(documents, settings, tokens):
        for sentence in sentences:
            yield from builder.add(sentence)
        yield from builder.end_document()
    yield from builder.end()


def build_two_text_rows(
    documents: Iterable[str], settings: RowSettings, counts: Counter[str], tokens: TokenCounts | None = None
) -> Iterator[TwoTextRow]:
    """Turn documents of two texts, `PAIR_SEPARATOR` between them, into rows [CLS] first [SEP] [CLS] second [SEP].

    `counts` counts documents: "used", and `NO_TOKEN` those without a token in one of their texts.
    """
    texts = (text for document in documents for text in document.partition(PAIR_SEPARATOR)[::2])
    tokenized = tokenize_documents(texts, settings, tokens)
    for pair in zip(tokenized, tokenized, strict=True):
        is_used = all(any(len(ids) for ids, _ in text) for text in pair)
        counts["used" if is_used else NO_TOKEN] += 1
        if is_used:
            first, second = (_enclose(join_tokens(*text), settings) for text in pair)
            yield TwoTextRow(*join_tokens(first, second), len(first[0]))


def _enclose(text: Tokens, settings: RowSettings) -> Tokens:
    """Put special tokens around a text; what a long one has beyond is not read."""
    return join_tokens(settings.cls_id, next(cut_tokens(text, settings.seq_length - 2)), settings.sep_id)
