"""Documents -> sentences -> token rows, with the starts of words kept for whole-word masking.

Sentences are grouped until a row of `seq_length` tokens is full; a longer sentence is cut, before a word where that is
possible. Words are the tokenizer's pre-tokens in spaced scripts; in Han text they are jieba's words, or single
characters.
"""

from __future__ import annotations

import functools
import itertools
import json
import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tokenizers import Encoding

from domext_ray.data.sentences import split_sentences
from domext_ray.errors import CorpusError
from domext_ray.vocabulary.tokenizer import make_backend

SENTENCES_PER_CALL = 2048
MAX_CACHED_CHARS = 8 * 2**20
"""Characters of chunks that a tokenizer remembers, at most: about 100 MB with their tokens."""

_HAN = re.compile(r"[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff]")
_CHUNK = re.compile(r"[^ !-/:-@\[-`{-~]+|[!-/:-@\[-`{-~]")  # BERT isolates every ASCII punctuation mark


def count_han(text: str) -> int:
    """Return the number of Han characters."""
    return 0 if text.isascii() else len(_HAN.findall(text))


@dataclass(frozen=True)
class RowSettings:
    """What decides how text becomes rows.

    Args:
        tokenizer_json: the fast tokenizer, serialised.
        cls_id, sep_id: ids around a row.
        seq_length: tokens of a full row, [CLS] and [SEP] included.
        cross_documents: a row may go on with the next document, [SEP] between them.
        chinese_words: words of Han text are jieba's; else every Han character is a word.
        pairs: rows are pairs for next-sentence prediction (see `pairs`).
        packed: a row may go on with the next document, which has a [CLS] of its own.
        has_two_texts: documents are two texts, and each is a row (see `two_texts`).
    """

    tokenizer_json: str
    cls_id: int
    sep_id: int
    seq_length: int
    cross_documents: bool
    chinese_words: bool
    pairs: bool = False
    packed: bool = False
    has_two_texts: bool = False


@functools.cache
def load_jieba() -> Any:
    """Return jieba's segmenter, its dictionary loaded and its logger silent.

    Raises:
        CorpusError: jieba is not installed.
    """
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

    Args:
        tokenizer_json: the fast tokenizer, serialised.
        chinese_words: words of Han text are jieba's; else every Han character is a word.
    """

    def __init__(self, tokenizer_json: str, chinese_words: bool) -> None:
        self.chinese_words = chinese_words
        self.tokenizer = make_backend(tokenizer_json)
        self.splits_at_spaces = _splits_at_spaces(json.loads(tokenizer_json))
        self._cache: dict[str, list[int]] = {}
        self._cached_chars = 0

    def encode(self, sentences: Sequence[str]) -> list[list[int]]:
        """Return the tokens of every sentence, special ones not included."""
        if not self.splits_at_spaces:
            encodings = self.tokenizer.encode_batch(list(sentences), add_special_tokens=False)
            return [self._pack_sentence(each, encoding) for each, encoding in zip(sentences, encodings, strict=True)]
        chunked = [self._split_chunks(each) for each in sentences]
        if self._cached_chars > MAX_CACHED_CHARS:
            self._cache, self._cached_chars = {}, 0
        missing = list(dict.fromkeys(chunk for chunks in chunked for chunk in chunks if chunk not in self._cache))
        for chunk, encoding in zip(
            missing, self.tokenizer.encode_batch(missing, add_special_tokens=False), strict=True
        ):
            self._cache[chunk] = self._pack_chunk(chunk, encoding)
            self._cached_chars += len(chunk)
        lookup = self._cache.__getitem__
        return [list(itertools.chain.from_iterable(map(lookup, chunks))) for chunks in chunked]

    def _split_chunks(self, sentence: str) -> list[str]:
        """Cut at spaces, and where a jieba word begins or ends with a Han character."""
        if not self.chinese_words or sentence.isascii() or not _HAN.search(sentence):
            return _CHUNK.findall(sentence)
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
        return [number << 1 | start for number, start in zip(encoding.ids, starts, strict=True)]

    def _pack_sentence(self, sentence: str, encoding: Encoding) -> list[int]:
        starts = _start_pre_tokens(encoding)
        if not sentence.isascii() and _HAN.search(sentence):
            begins = self._begin_words(sentence)
            is_han = [_HAN.match(each) is not None for each in sentence]
            previous = -1
            for i, (first, _) in enumerate(encoding.offsets):
                if first < len(sentence) and (is_han[first] or (first and is_han[first - 1])):
                    starts[i] = first in begins and first != previous
                previous = first
        return [number << 1 | start for number, start in zip(encoding.ids, starts, strict=True)]

    def _begin_words(self, sentence: str) -> set[int]:
        words = load_jieba().cut(sentence) if self.chinese_words else sentence
        return set(itertools.accumulate((len(each) for each in words), initial=0))


def _splits_at_spaces(record: dict[str, Any]) -> bool:
    """Whether a tokenizer's result for a text is that of its chunks between spaces and Han characters, joined."""
    normalizer = record.get("normalizer") or {}
    return (
        normalizer.get("type") == "BertNormalizer"
        and bool(normalizer.get("handle_chinese_chars"))
        and (record.get("pre_tokenizer") or {}).get("type") == "BertPreTokenizer"
        and record["model"].get("type") == "WordPiece"
        and all(each["special"] for each in record.get("added_tokens") or [])
    )


def _start_pre_tokens(encoding: Encoding) -> list[bool]:
    words = encoding.word_ids
    return [each is None or i == 0 or each != words[i - 1] for i, each in enumerate(words)]


@functools.lru_cache(maxsize=2)
def _load_tokenizer(tokenizer_json: str, chinese_words: bool) -> SentenceTokenizer:
    return SentenceTokenizer(tokenizer_json, chinese_words)


def tokenize_sentences(sentences: Sequence[str], settings: RowSettings) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield ids (int32) and word starts (bool) of every sentence, special tokens not included."""
    encoded = _load_tokenizer(settings.tokenizer_json, settings.chinese_words).encode(sentences)
    ends = list(itertools.accumulate(map(len, encoded), initial=0))
    packed = np.fromiter(itertools.chain.from_iterable(encoded), dtype=np.int64, count=ends[-1])
    ids, starts = (packed >> 1).astype(np.int32), (packed & 1).astype(bool)
    for first, end in itertools.pairwise(ends):
        yield ids[first:end], starts[first:end]


@dataclass
class RowBuilder:
    """Groups sentences into rows.

    Args:
        settings: length of a row and the tokens around it.
    """

    settings: RowSettings
    _ids: list[np.ndarray] = field(default_factory=list)
    _starts: list[np.ndarray] = field(default_factory=list)
    _size: int = 0

    def __post_init__(self) -> None:
        self._cls, self._sep = (np.array([i], dtype=np.int32) for i in (self.settings.cls_id, self.settings.sep_id))
        self._special = np.ones(1, dtype=bool)
        self._between = np.concatenate([self._sep, self._cls]) if self.settings.packed else self._sep

    def add(self, ids: np.ndarray, starts: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Take a sentence; yield the rows that it completes, [CLS] and [SEP] included."""
        capacity = self.settings.seq_length - 2
        while len(ids):
            if self._size + len(ids) <= capacity:
                self._append(ids, starts)
                return
            if self._size:
                yield self._finish()
                continue
            cut = find_cut(starts, capacity)
            self._append(ids[:cut], starts[:cut])
            ids, starts = ids[cut:], starts[cut:]

    def end_document(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Mark the end of a document: a [SEP] in the row, and a [CLS] where rows are packed, or the row's end."""
        if not self._size or self._ids[-1] is self._between:
            return
        goes_on = self.settings.cross_documents or self.settings.packed
        if not goes_on or self._size + len(self._between) + 1 > self.settings.seq_length - 2:
            yield self._finish()
        else:
            self._append(self._between, np.ones(len(self._between), dtype=bool))

    def end(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield the last row."""
        if self._size:
            yield self._finish()

    def _append(self, ids: np.ndarray, starts: np.ndarray) -> None:
        self._ids.append(ids)
        self._starts.append(starts)
        self._size += len(ids)

    def _finish(self) -> tuple[np.ndarray, np.ndarray]:
        if self._ids[-1] is self._between:  # the row's own [SEP] ends the last document
            self._ids.pop()
            self._starts.pop()
        row = np.concatenate([self._cls, *self._ids, self._sep])
        starts = np.concatenate([self._special, *self._starts, self._special])
        self._ids, self._starts, self._size = [], [], 0
        return row, starts


def find_cut(starts: np.ndarray, capacity: int) -> int:
    """Say where to cut a sentence that is too long: before its last word that begins in the second half of the room.

    Args:
        starts: bool, whether a word starts at a token; more than `capacity` of them.
        capacity: tokens that there is room for.
    """
    if starts[capacity]:
        return capacity
    before = np.flatnonzero(starts[:capacity])
    return int(before[-1]) if len(before) and before[-1] > capacity // 2 else capacity


def tokenize_documents(
    documents: Iterable[str], settings: RowSettings
) -> Iterator[list[tuple[np.ndarray, np.ndarray]]]:
    """Yield every document as its sentences: ids (int32) and word starts (bool) of each, without special tokens."""
    sentences: list[str] = []
    counts: list[int] = []
    for document in documents:
        found = split_sentences(document)
        sentences += found
        counts.append(len(found))
        if len(sentences) >= SENTENCES_PER_CALL:
            tokenized = tokenize_sentences(sentences, settings)
            yield from (list(itertools.islice(tokenized, count)) for count in counts)
            sentences, counts = [], []
    tokenized = tokenize_sentences(sentences, settings)
    yield from (list(itertools.islice(tokenized, count)) for count in counts)


def build_rows(documents: Iterable[str], settings: RowSettings) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Turn documents into rows.

    Args:
        documents: clean text.
        settings: tokenizer and row length.

    Yields:
        Token ids int32 [≤ seq_length] and word starts bool of the same length.
    """
    builder = RowBuilder(settings)
    for sentences in tokenize_documents(documents, settings):
        for ids, starts in sentences:
            yield from builder.add(ids, starts)
        yield from builder.end_document()
    yield from builder.end()
