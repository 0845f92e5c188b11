"""Rows with masked words, the same words for every vocabulary: passages of held-out text, and the general probe.

Enters: a prepared corpus' held-out text, or plain sentences, and a run's tokenizer. Leaves: rows to score, and the
characters that bits are divided by. Words of passages are chosen by their characters, and asked for in two forms.

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
import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from tokenizers import Encoding
from transformers import PreTrainedTokenizerBase

from domext_ray.text.corpus.batching import MaskedRows, pad_masked
from domext_ray.text.corpus.manifest import Manifest
from domext_ray.text.data.documents import split_sentences
from domext_ray.text.data.draws import Purpose, hash_counters, to_uniform
from domext_ray.text.vocabulary.tokenizer import group_pieces, make_backend
from domext_ray.training.objective import MaskedBatch, to_batch

CHOSEN_WORDS_FRAC = 0.15
READ_PASSAGES = 4
"""Passages that are looked at for every one that is used; the texts of a large corpus need not be read to the end."""
PROBE_PASSES = 7
EVALUATION_SEED = 0x0DD_BA11
_BEGINS_AFTER_SPACE = ("Ġ", "▁")  # of the pieces of byte-level BPE, and of SentencePiece
Row = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Tokens that the model sees, tokens as they were, and which of them it is asked for."""


@dataclass(frozen=True)
class EvalSet:
    """Fixed rows that an evaluation scores."""

    rows: Any  # in the order of their batches
    collate: Callable[[Any], list[Any]]  # makes batches of some of them
    num_chars: int = 0  # of the scored words; 0: no bits are measured on them
    price_bits: float = 0.0  # of the scored words' numbers of pieces, in sum
    group_rows: int = 1  # so many are compared with each other, and stay in one batch

    @property
    def fingerprint(self) -> str:
        """What rows of masked words are recognised by: all that a model is asked."""
        digest = hashlib.sha256()
        for field in vars(self.rows).values():
            digest.update(b"" if field is None else field.tobytes())
        return digest.hexdigest()

    @property
    def batches(self) -> list[Any]:
        """Made anew each time: they take more memory than rows, and little time."""
        return self.collate(self.rows)

    def find_share(self, rank: int, world_size: int) -> np.ndarray:
        """Return which rows a rank scores, int64, neighbours on different ranks."""
        return np.flatnonzero(np.arange(len(self.rows)) // self.group_rows % world_size == rank)


NOTHING = EvalSet(MaskedRows(*[np.arange(0)] * 4), lambda rows: [])


@dataclass(frozen=True)
class Passage:
    """A row of held-out text and the words of it that are scored."""

    ids: np.ndarray  # int64 [N], the row, with [CLS] and [SEP]
    chosen: list[list[int]]  # places of the chosen words' pieces, those that the row has
    scored: list[tuple[int, list[int]]]  # the chosen words that are whole and known: characters, and places in the row
    other_sizes: list[int]  # numbers of pieces of the passage's other words


def read_passages(
    manifest: Manifest, tokenizer: PreTrainedTokenizerBase, *, num_passages: int, max_length: int
) -> list[Passage]:
    """Choose passages of held-out text, and words in them, by their characters: the same for every tokenizer.

    A chosen word that does not fit into the row as a whole, or that the tokenizer has no pieces for ([UNK]), is not
    scored; the scored characters are then fewer than those of other models. The passages depend on `max_length`, the
    most tokens of a row, [CLS] and [SEP] included.
    """
    texts = _choose_passages(manifest, num_passages, 2 * (max_length - 2))
    encodings = make_backend(tokenizer).encode_batch(texts, add_special_tokens=False)
    found = []
    for text, encoding in zip(texts, encodings, strict=True):
        size = min(len(encoding.ids), max_length - 2)
        ids = [tokenizer.cls_token_id, *encoding.ids[:size], tokenizer.sep_token_id]
        words = _find_words(text, encoding)
        firsts = np.array([first for first, *_ in words], dtype=np.int64)
        seed = int.from_bytes(_hash_text(text), "big") >> 1
        is_chosen = to_uniform(hash_counters(EVALUATION_SEED, Purpose.WORDS, seed, firsts)) < CHOSEN_WORDS_FRAC
        chosen = [*itertools.compress(words, is_chosen)]
        scored = [
            (end - first, [1 + place for place in pieces])
            for first, end, pieces in chosen
            if pieces[-1] < size and all(encoding.ids[place] != tokenizer.unk_token_id for place in pieces)
        ]
        places = [[1 + place for place in pieces if place < size] for *_, pieces in chosen]
        others = [len(pieces) for *_, pieces in itertools.compress(words, ~is_chosen)]
        found.append(Passage(np.array(ids, dtype=np.int64), places, scored, others))
    return found


def build_character_set(
    passages: Sequence[Passage], tokenizer: PreTrainedTokenizerBase, *, batch_size: int, full_length: int = 0
) -> EvalSet:
    """Mask the chosen words of every passage together; those that are not scored are masked, too.

    A batch of rows that are shorter than `full_length` has more than `batch_size` of them, up to the tokens of
    `batch_size` full ones. 0: no batch has more.
    """
    rows = [
        _mask(
            passage.ids,
            itertools.chain(*passage.chosen),
            itertools.chain(*(own for _, own in passage.scored)),
            tokenizer,
        )
        for passage in passages
        if passage.scored
    ]
    num_chars = sum(chars for passage in passages for chars, _ in passage.scored)
    return _make_set(rows, tokenizer, batch_size, full_length, num_chars)


def build_word_set(
    passages: Sequence[Passage], tokenizer: PreTrainedTokenizerBase, *, batch_size: int, full_length: int = 0
) -> EvalSet:
    """Mask every scored word alone, once for each of its pieces: it and those after it; see `build_character_set`."""
    words = [(passage.ids, chars, places) for passage in passages for chars, places in passage.scored]
    rows = [_mask(ids, places[i:], [place], tokenizer) for ids, _, places in words for i, place in enumerate(places)]
    counts = Counter(size for passage in passages for size in passage.other_sizes)
    # A number of pieces is as likely as it is frequent, with one word more spread over all numbers.
    all_bits = math.log2(counts.total() + 1)
    sizes = [len(places) for *_, places in words]
    # 0.5 ** 1075 is 0.
    prices = (all_bits - (math.log2(counts[size] + 0.5**size) if counts[size] else -size) for size in sizes)
    num_chars = sum(chars for _, chars, _ in words)
    return _make_set(rows, tokenizer, batch_size, full_length, num_chars, sum(prices), find_kinds(tokenizer))


def build_probe_set(
    sentences: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    batch_size: int,
    max_length: int,
    full_length: int = 0,
) -> EvalSet:
    """Mask every word of plain sentences once, over seven passes; one-token words count; see `build_character_set`."""
    rows: list[Row] = []
    encoded = tokenizer(list(sentences), truncation=True, max_length=max_length)
    for i, ids in enumerate(encoded["input_ids"]):
        words = [pieces for *_, pieces in _find_words(sentences[i], encoded[i])]
        for own in (words[start::PROBE_PASSES] for start in range(PROBE_PASSES)):
            counted = [pieces[0] for pieces in own if len(pieces) == 1 and ids[pieces[0]] != tokenizer.unk_token_id]
            if counted:
                rows.append(_mask(np.asarray(ids, dtype=np.int64), itertools.chain(*own), counted, tokenizer))
    return _make_set(rows, tokenizer, batch_size, full_length)


def find_kinds(tokenizer: PreTrainedTokenizerBase) -> torch.Tensor:
    """Return the kind of every entry, uint8 [V]: 0 a special token or none, 1 and 2 what can stand in the same place.

    With WordPiece 1 begins a word and 2 goes on in one; with byte-level BPE and SentencePiece 2 follows a space, which
    a model sees anyway, and 1 does not.
    """
    entries = tokenizer.get_vocab()
    marks = json.loads(tokenizer.backend_tokenizer.to_str())["model"].get("continuing_subword_prefix")
    kinds = torch.zeros(max(entries.values()) + 1, dtype=torch.uint8)
    for entry, i in entries.items():
        kinds[i] = 2 if entry.startswith(marks or _BEGINS_AFTER_SPACE) else 1
    kinds[tokenizer.all_special_ids] = 0
    return kinds


def _find_words(text: str, encoding: Encoding) -> list[tuple[int, int, list[int]]]:
    """First and end character, and piece places, of every word that has a letter or digit, in order."""
    found = []
    for places in group_pieces(encoding.word_ids):
        first, end = encoding.offsets[places[0]][0], encoding.offsets[places[-1]][1]
        if any(map(str.isalnum, text[first:end])):
            found.append((first, end, places))
    return found


def _mask(ids: np.ndarray, masked: Iterable[int], asked: Iterable[int], tokenizer: PreTrainedTokenizerBase) -> Row:
    inputs, is_asked = ids.copy(), np.zeros(len(ids), dtype=bool)
    inputs[[*masked]], is_asked[[*asked]] = tokenizer.mask_token_id, True
    return inputs, ids, is_asked


def _make_set(
    rows: list[Row],
    tokenizer: PreTrainedTokenizerBase,
    batch_size: int,
    full_length: int,
    num_chars: int = 0,
    price_bits: float = 0.0,
    kinds: torch.Tensor | None = None,
) -> EvalSet:
    """Put rows of a length side by side."""
    if not rows:
        return NOTHING
    rows.sort(key=lambda row: len(row[0]))

    def collate(some: MaskedRows) -> list[MaskedBatch]:
        batches, first, lengths = list[MaskedBatch](), 0, some.lengths
        while first < len(lengths):
            end = first + batch_size
            while end < len(lengths) and (end + 1 - first) * lengths[end] <= batch_size * full_length:
                end += 1
            batch = to_batch(pad_masked(some.cut(slice(first, end)), tokenizer.pad_token_id))
            batches.append(replace(batch, kinds=kinds))
            first = end
        return batches

    return EvalSet(MaskedRows.join(rows), collate, num_chars, price_bits)


def _choose_passages(manifest: Manifest, num_passages: int, width: int) -> list[str]:
    """Return passages of the held-out text in the order of their hashes; texts are read in the order of theirs."""
    found: dict[bytes, str] = {}
    for record in sorted(manifest.texts, key=lambda text: text.sha256):
        for line in (manifest.folder / record.path).read_text().split("\n"):
            if line:
                found.update(
                    (_hash_text(passage), passage) for passage in _split_passages(json.loads(line)["text"], width)
                )
        if len(found) >= READ_PASSAGES * num_passages:
            break
    return [found[digest] for digest in sorted(found)[:num_passages]]


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
        widths = np.cumsum([1 if char.isascii() else 2 for char in passage])
        fits = int(np.searchsorted(widths, width, side="right"))
        cut = passage.rfind(" ", 1, fits + 1)
        yield passage[: cut if cut > 0 else fits]
        passage = passage[cut if cut > 0 else fits :].lstrip()
    if passage:
        yield passage


def _measure_width(text: str) -> int:
    """Characters, those beyond ASCII counted twice: many tokenizers give a Han character or a symbol a token each."""
    return len(text) if text.isascii() else 2 * len(text) - sum(map(str.isascii, text))
