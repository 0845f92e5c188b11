"""Documents -> sentences -> token rows, with the starts of words kept for whole-word masking.

Sentences are grouped until a row of `seq_length` tokens is full; a longer sentence is cut, before a word where that is
possible. Words are the tokenizer's pre-tokens in spaced scripts and jieba's words in Han text.
"""

from __future__ import annotations

import functools
import itertools
import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from tokenizers import Encoding, Tokenizer

from domext_ray.errors import CorpusError

SENTENCES_PER_CALL = 2048
_HAN = re.compile(r"[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff]")
_SENTENCE_END = re.compile(r"[.!?…][\"'”’)\]]?\s+|[。！？；][”’」』）]?\s*")


def split_sentences(document: str) -> list[str]:
    """Cut a clean document after sentence ends of Latin and CJK scripts."""
    sentences, first = [], 0
    for match in _SENTENCE_END.finditer(document):
        sentences.append(document[first : match.end()].rstrip())
        first = match.end()
    if first < len(document) and not document[first:].isspace():
        sentences.append(document[first:])
    return sentences


@dataclass(frozen=True)
class RowSettings:
    """What decides how text becomes rows.

    Args:
        tokenizer_json: the fast tokenizer, serialised.
        cls_id, sep_id: ids around a row.
        seq_length: tokens of a full row, [CLS] and [SEP] included.
        cross_documents: a row may go on with the next document, [SEP] between them.
        chinese_words: words of Han text are jieba's.
    """

    tokenizer_json: str
    cls_id: int
    sep_id: int
    seq_length: int
    cross_documents: bool
    chinese_words: bool


@functools.lru_cache(maxsize=2)
def _load_tokenizer(tokenizer_json: str) -> tuple[Tokenizer, np.ndarray | None]:
    tokenizer = Tokenizer.from_str(tokenizer_json)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    if type(tokenizer.model).__name__ != "WordPiece":
        return tokenizer, None
    continues = np.zeros(max(vocab.values()) + 1, dtype=bool)
    prefix = tokenizer.model.continuing_subword_prefix
    continues[[i for token, i in vocab.items() if token.startswith(prefix) and len(token) > len(prefix)]] = True
    return tokenizer, continues


@functools.cache
def load_jieba() -> object:
    """Return jieba's segmenter, its dictionary loaded and its logger silent.

    Raises:
        CorpusError: jieba is not installed.
    """
    try:
        import jieba
    except ImportError as error:
        raise CorpusError(
            "the corpus holds Chinese text and jieba is not installed; "
            'pip install "domext_ray[chinese]", or set --prepare.chinese_words false.'
        ) from error
    jieba.setLogLevel(logging.WARNING)
    jieba.initialize()
    return jieba


def tokenize_sentences(sentences: Sequence[str], settings: RowSettings) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield ids (int32) and word starts (bool) of every sentence, special tokens not included."""
    tokenizer, continues = _load_tokenizer(settings.tokenizer_json)
    # WordPiece makes every Han character a word by itself: only jieba's words need a look at them.
    looks_at_han = settings.chinese_words or continues is None
    has_han = [looks_at_han and _HAN.search(each) is not None for each in sentences]
    needs_offsets = continues is None or any(has_han)
    encode = tokenizer.encode_batch if needs_offsets else tokenizer.encode_batch_fast
    encoded = encode(list(sentences), add_special_tokens=False)
    pieces = [each.ids for each in encoded]
    ends = list(itertools.accumulate(map(len, pieces)))
    ids = np.fromiter(itertools.chain.from_iterable(pieces), dtype=np.int32, count=ends[-1] if ends else 0)
    starts = ~continues[ids] if continues is not None else np.concatenate([_start_words(each) for each in encoded])
    first = 0
    for sentence, encoding, is_han, end in zip(sentences, encoded, has_han, ends, strict=True):
        if is_han and end > first:
            _mark_han_words(sentence, encoding, starts[first:end], settings.chinese_words)
        yield ids[first:end], starts[first:end]
        first = end


def _start_words(encoding: Encoding) -> np.ndarray:
    words = np.asarray([-1 if each is None else each for each in encoding.word_ids], dtype=np.int64)
    return np.concatenate([[True], words[1:] != words[:-1]]) if len(words) else np.zeros(0, dtype=bool)


def _mark_han_words(sentence: str, encoding: Encoding, starts: np.ndarray, chinese_words: bool) -> None:
    """Set the word starts of the tokens that begin at a Han character: where a jieba word, or every character, begins.

    Tokenizers without a Chinese pre-tokenizer (byte-level BPE, SentencePiece) see a run of Han text as one word.
    """
    begins = np.zeros(len(sentence) + 1, dtype=bool)
    if chinese_words:
        lengths = [len(word) for word in load_jieba().cut(sentence, HMM=True)]  # type: ignore[attr-defined]
        begins[np.cumsum([0, *lengths])] = True
    else:
        begins[:] = True
    is_han = np.zeros(len(sentence) + 1, dtype=bool)
    is_han[[match.start() for match in _HAN.finditer(sentence)]] = True
    offsets = np.asarray([first for first, _ in encoding.offsets], dtype=np.int64)
    is_first = np.concatenate([[True], offsets[1:] != offsets[:-1]])  # of the tokens of one character, its bytes
    starts[:] = np.where(is_han[offsets], begins[offsets] & is_first, starts)


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
            cut = _find_cut(starts, capacity)
            self._append(ids[:cut], starts[:cut])
            ids, starts = ids[cut:], starts[cut:]

    def end_document(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Mark the end of a document: a [SEP] in the row, or the row's end."""
        if not self._size or self._ids[-1] is self._sep:
            return
        if not self.settings.cross_documents or self._size + 2 > self.settings.seq_length - 2:
            yield self._finish()
        else:
            self._append(self._sep, self._special)

    def end(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield the last row."""
        if self._size:
            yield self._finish()

    def _append(self, ids: np.ndarray, starts: np.ndarray) -> None:
        self._ids.append(ids)
        self._starts.append(starts)
        self._size += len(ids)

    def _finish(self) -> tuple[np.ndarray, np.ndarray]:
        if self._ids[-1] is self._sep:  # the row's own [SEP] ends the last document
            self._ids.pop()
            self._starts.pop()
        row = np.concatenate([self._cls, *self._ids, self._sep])
        starts = np.concatenate([self._special, *self._starts, self._special])
        self._ids, self._starts, self._size = [], [], 0
        return row, starts


def _find_cut(starts: np.ndarray, capacity: int) -> int:
    """Where to cut a sentence that fills more than a row: before its last word that begins in the row's second half."""
    if starts[capacity]:
        return capacity
    before = np.flatnonzero(starts[:capacity])
    return int(before[-1]) if len(before) and before[-1] > capacity // 2 else capacity


def build_rows(documents: Iterable[str], settings: RowSettings) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Turn documents into rows.

    Args:
        documents: clean text.
        settings: tokenizer and row length.

    Yields:
        Token ids int32 [≤ seq_length] and word starts bool of the same length.
    """
    builder = RowBuilder(settings)
    sentences: list[str] = []
    ends: list[int] = []  # number of sentences before each document's end

    def flush() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        last = iter([*ends, -1])
        end = next(last)
        for i, (ids, starts) in enumerate(tokenize_sentences(sentences, settings)):
            yield from builder.add(ids, starts)
            while i + 1 == end:
                yield from builder.end_document()
                end = next(last)

    for document in documents:
        found = split_sentences(document)
        if found:
            sentences += found
            ends.append(len(sentences))
        if len(sentences) >= SENTENCES_PER_CALL:
            yield from flush()
            sentences, ends = [], []
    if sentences:
        yield from flush()
    yield from builder.end()
