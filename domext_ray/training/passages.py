"""Masked words of held-out passages, chosen by their characters and so the same for every vocabulary, in two forms.

Enters: a prepared corpus' held-out text and a run's tokenizer. Leaves: rows to score, and the characters that the bits
are divided by.

Bits per character mask all chosen words of a passage and all of their pieces at once, and sum -log2 p over the pieces.
The number of masks shows a model into how many pieces its vocabulary cuts a word, and the pieces of a word do not see
each other: the figure depends on the cuts.

Word bits per character are the length of a code for words, which is a fair measure whatever the vocabulary. A word is
masked alone, by as many masks as it has pieces, and predicted piece by piece, each given those before it (within a word
as Kauf and Ivanova 2023, arXiv 2305.10588). A piece competes only with entries that could stand in its place: the first
with those that begin words, the others with those that go on. So the probabilities of all words of as many pieces sum
to 1. The number of pieces, which the masks show, has a price: -log2 of how often the passages' other words have it.

Two limits. Of the ways to cut a word the tokenizer's own is scored; others add to the word's probability, but little
(Chirkova et al. 2023, arXiv 2306.17757; 0.001 bits per character with 2,000 new words before they are trained). And the
price ignores the words around, which favours a vocabulary that cuts less: on biomedical text by at least 0.05 bits per
character (what a logistic regression on general-mini's hidden states tells of the number of pieces), and by no more
than 0.23 (the whole price).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from tokenizers import Encoding
from transformers import PreTrainedTokenizerBase

from domext_ray.corpus.draws import hash_counters, to_uniform
from domext_ray.corpus.manifest import Manifest
from domext_ray.data.sentences import split_sentences
from domext_ray.training.objective import MaskedBatch, pad_batch
from domext_ray.vocabulary.tokenizer import group_pieces, make_backend

CHOSEN_WORDS_FRAC = 0.15
READ_PASSAGES = 4
"""Passages that are looked at for every one that is used; the texts of a large corpus need not be read to the end."""
EVALUATION_SEED = 0x0DD_BA11
_WORDS = 31  # purpose of a hash: no two draws share their counters
_BEGINS_AFTER_SPACE = ("Ġ", "▁")  # of the pieces of byte-level BPE, and of SentencePiece


@dataclass(frozen=True)
class CharacterSet:
    """What bits per character are measured on.

    Args:
        batches: masked passages; all pieces of the scored words are predicted.
        num_chars: characters of the scored words.
        num_words: scored words.
    """

    batches: list[MaskedBatch]
    num_chars: int
    num_words: int


@dataclass(frozen=True)
class WordSet:
    """What word bits per character are measured on.

    Args:
        batches: rows with one masked word each, of which one piece is predicted.
        price_bits: bits of the scored words' numbers of pieces, in sum.
        num_chars: characters of the scored words.
    """

    batches: list[MaskedBatch]
    price_bits: float
    num_chars: int


@dataclass(frozen=True)
class Passage:
    """A row of held-out text and the words of it that are scored.

    Args:
        ids: int64 [N], the row, with [CLS] and [SEP].
        chosen: places of the chosen words' pieces, those that the row has.
        scored: the chosen words that are whole and known: characters, and places in the row.
        other_sizes: numbers of pieces of the passage's other words.
    """

    ids: np.ndarray
    chosen: list[list[int]]
    scored: list[tuple[int, list[int]]]
    other_sizes: list[int]


def read_passages(
    manifest: Manifest, tokenizer: PreTrainedTokenizerBase, *, num_passages: int, max_length: int
) -> list[Passage]:
    """Choose passages of held-out text, and words in them, by their characters: the same for every tokenizer.

    A chosen word that does not fit into the row as a whole, or that the tokenizer has no pieces for ([UNK]), is not
    scored; the scored characters are then fewer than those of other models.

    Args:
        manifest: the prepared corpus.
        tokenizer: the run's tokenizer.
        num_passages: passages at most.
        max_length: tokens of a row, at most, [CLS] and [SEP] included; the passages depend on it.
    """
    backend = make_backend(tokenizer)
    texts = _choose_passages(manifest, num_passages, 2 * (max_length - 2))
    found = []
    for text, encoding in zip(texts, backend.encode_batch(texts, add_special_tokens=False), strict=True):
        size = min(len(encoding.ids), max_length - 2)
        ids = [tokenizer.cls_token_id, *encoding.ids[:size], tokenizer.sep_token_id]
        chosen, others = _choose_words(text, encoding)
        scored = [
            (chars, [1 + place for place in pieces])
            for chars, pieces in chosen
            if pieces[-1] < size and all(encoding.ids[place] != tokenizer.unk_token_id for place in pieces)
        ]
        places = [[1 + place for place in pieces if place < size] for _, pieces in chosen]
        found.append(Passage(np.array(ids, dtype=np.int64), places, scored, [len(each) for each in others]))
    return found


def build_character_batches(
    passages: Sequence[Passage],
    tokenizer: PreTrainedTokenizerBase,
    *,
    batch_size: int,
    full_length: int = 0,
) -> CharacterSet:
    """Mask the chosen words of every passage together; those that are not scored are masked, too.

    Args:
        passages: see `read_passages`.
        tokenizer: the run's tokenizer.
        batch_size: rows of a forward pass.
        full_length: see `pad_rows`.
    """
    rows: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    scored = [word for each in passages for word in each.scored]
    for passage in passages:
        masked, is_scored = passage.ids.copy(), np.zeros(len(passage.ids), dtype=bool)
        for places in passage.chosen:
            masked[places] = tokenizer.mask_token_id
        for _, places in passage.scored:
            is_scored[places] = True
        if is_scored.any():
            rows.append((masked, passage.ids, is_scored))
    batches = pad_rows(rows, tokenizer.pad_token_id, batch_size, full_length)
    return CharacterSet(batches, sum(chars for chars, _ in scored), len(scored))


def build_word_batches(
    passages: Sequence[Passage],
    tokenizer: PreTrainedTokenizerBase,
    *,
    batch_size: int,
    full_length: int = 0,
) -> WordSet:
    """Mask every scored word alone, once for each of its pieces: the piece and those after it are masked.

    Args:
        passages: see `read_passages`.
        tokenizer: the run's tokenizer.
        batch_size: rows of a forward pass.
        full_length: see `pad_rows`.
    """
    rows: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    prices = _price_sizes(Counter(size for each in passages for size in each.other_sizes))
    price_bits, num_chars = 0.0, 0
    for passage in passages:
        for chars, places in passage.scored:
            price_bits, num_chars = price_bits + prices(len(places)), num_chars + chars
            for i, place in enumerate(places):
                masked, is_asked = passage.ids.copy(), np.zeros(len(passage.ids), dtype=bool)
                masked[places[i:]], is_asked[place] = tokenizer.mask_token_id, True
                rows.append((masked, passage.ids, is_asked))
    kinds = find_kinds(tokenizer)
    batches = pad_rows(rows, tokenizer.pad_token_id, batch_size, full_length)
    return WordSet([replace(each, kinds=kinds) for each in batches], price_bits, num_chars)


def _price_sizes(counts: Counter[int]) -> Callable[[int], float]:
    """Return what a number of pieces costs, bits: its frequency, with one word more spread over all numbers."""
    total = counts.total() + 1
    return lambda size: -math.log2((counts[size] + 0.5**size) / total)


def find_kinds(tokenizer: PreTrainedTokenizerBase) -> torch.Tensor:
    """Return the kind of every entry, uint8 [V]: 0 a special token or none, 1 and 2 what can stand in the same place.

    With WordPiece 1 begins a word and 2 goes on in one; with byte-level BPE and SentencePiece 2 follows a space, which
    a model sees anyway, and 1 does not.

    Args:
        tokenizer: a fast tokenizer.
    """
    entries = tokenizer.get_vocab()
    marks = json.loads(tokenizer.backend_tokenizer.to_str())["model"].get("continuing_subword_prefix")
    kinds = torch.zeros(max(entries.values()) + 1, dtype=torch.uint8)
    for entry, i in entries.items():
        kinds[i] = 2 if entry.startswith(marks or _BEGINS_AFTER_SPACE) else 1
    kinds[tokenizer.all_special_ids] = 0
    return kinds


def pad_rows(
    rows: list[tuple[np.ndarray, np.ndarray, np.ndarray]],
    pad_id: int,
    batch_size: int,
    full_length: int = 0,
) -> list[MaskedBatch]:
    """Batch rows of inputs, labels and what counts, those of a length side by side.

    Args:
        rows: what is batched; they are sorted.
        pad_id: the padding token.
        batch_size: rows of a batch.
        full_length: tokens of a full row: a batch of shorter ones has more of them, up to the tokens of `batch_size`
            full ones. 0: no batch has more.
    """
    rows.sort(key=lambda row: len(row[0]))
    batches, first, num_tokens = [], 0, batch_size * full_length
    while first < len(rows):
        end = first + batch_size
        while end < len(rows) and (end + 1 - first) * len(rows[end][0]) <= num_tokens:
            end += 1
        inputs, labels, is_counted = zip(*rows[first:end], strict=True)
        batches.append(pad_batch(inputs, labels, is_counted, pad_id))
        first = end
    return batches


def _choose_passages(manifest: Manifest, num_passages: int, width: int) -> list[str]:
    """Return passages of the held-out text in the order of their hashes; texts are read in the order of theirs."""
    found: dict[bytes, str] = {}
    for record in sorted(manifest.texts, key=lambda each: each.sha256):
        for line in (manifest.folder / record.path).read_text().split("\n"):
            if line:
                found.update((_hash_text(each), each) for each in _split_passages(json.loads(line)["text"], width))
        if len(found) >= READ_PASSAGES * num_passages:
            break
    return [found[each] for each in sorted(found)[:num_passages]]


def _hash_text(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=8).digest()


def _split_passages(document: str, width: int) -> Iterator[str]:
    """Cut a document into runs of whole sentences; a sentence that is too wide is cut at a space where it has one."""
    first = end = 0
    for sentence in split_sentences(document):
        start = document.index(sentence, end)
        if end > first and _measure_width(document[first : start + len(sentence)]) > width:
            yield from _cut_passage(document[first:end], width)
            first = start
        end = start + len(sentence)
    yield from _cut_passage(document[first:end], width)


def _cut_passage(passage: str, width: int) -> Iterator[str]:
    while _measure_width(passage) > width:
        widths = np.cumsum([1 if each.isascii() else 2 for each in passage])
        fits = int(np.searchsorted(widths, width, side="right"))
        cut = passage.rfind(" ", 1, fits + 1)
        yield passage[: cut if cut > 0 else fits]
        passage = passage[cut if cut > 0 else fits :].lstrip()
    if passage:
        yield passage


def _measure_width(text: str) -> int:
    """Characters, those beyond ASCII counted twice: many tokenizers give a Han character or a symbol a token each."""
    return len(text) if text.isascii() else 2 * len(text) - sum(map(str.isascii, text))


def _choose_words(passage: str, encoding: Encoding) -> tuple[list[tuple[int, list[int]]], list[list[int]]]:
    """Draw words with a letter or digit by (passage, offset): characters and piece places, and those of the others."""
    pieces = group_pieces(encoding.word_ids)
    spans = [(encoding.offsets[places[0]][0], encoding.offsets[places[-1]][1]) for places in pieces]
    seed = int.from_bytes(_hash_text(passage), "big") >> 1
    firsts = np.array([first for first, _ in spans], dtype=np.int64)
    drawn = to_uniform(hash_counters(EVALUATION_SEED, _WORDS, seed, firsts)) < CHOSEN_WORDS_FRAC
    words = [
        (end - first, places, is_drawn)
        for (first, end), places, is_drawn in zip(spans, pieces, drawn, strict=True)
        if any(each.isalnum() for each in passage[first:end])
    ]
    return [(size, own) for size, own, is_drawn in words if is_drawn], [
        own for _, own, is_drawn in words if not is_drawn
    ]
