"""One fixed mask set over general text, the same for many models (AF Adapter, its test of forgetting).

Enters: a general corpus, and the tokenizer of every model. Leaves: for every tokenizer the masked rows, and which of
their places are scored. Texts and masks are hashes of the seed, the text and the place in it, so they depend neither on
the order of the files nor on the models.

Where all tokenizers are equal, tokens are masked, and all models see the very same rows. Where vocabularies differ (new
words beside the base's, say), whole words are masked, the same stretches of characters for all, with all their pieces;
scored are those of them that are one token in every vocabulary, with the same spelling.
"""

from __future__ import annotations

import hashlib
import heapq
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
from tokenizers import Encoding
from transformers import PreTrainedTokenizerBase

from domext_ray.config.pretrain import PrepareConfig
from domext_ray.errors import ConfigError, CorpusError
from domext_ray.text.data.documents import read_documents
from domext_ray.text.data.draws import Purpose, hash_counters, to_uniform
from domext_ray.text.data.dropped import Dropped
from domext_ray.text.data.files import PACKAGE_DOCS, SourceFile
from domext_ray.text.data.sources import ReadTask, resolve_sources
from domext_ray.text.vocabulary.tokenizer import fingerprint_tokenizer, group_pieces, make_backend

MIN_SHARED_FRAC = 0.5
"""Of the drawn words at least this share must be scored; fewer would be a test of another text."""

Stretch = tuple[int, int]
"""Of a text: its first character, and the one after its last."""


@dataclass(frozen=True)
class GeneralText:
    """A text of the general corpus."""

    text: str  # one document
    source: str  # name of the file that it is from
    draw: int  # 63 bits, the hash of seed and text


@dataclass(frozen=True)
class MaskedText:
    """A text as one tokenizer cuts it, masked."""

    input_ids: np.ndarray  # int64 [N], special tokens included
    places: np.ndarray  # int64 [P], where the scored tokens stand
    labels: np.ndarray  # int64 [P], what stood there

    token_type_ids: ClassVar[None] = None
    segment_lengths: ClassVar[None] = None

    @property
    def length(self) -> int:
        """Tokens of the text."""
        return len(self.input_ids)


@dataclass(frozen=True)
class MaskSet:
    """What every model is asked."""

    sources: tuple[str, ...]  # file of each text
    rows: dict[str, tuple[MaskedText, ...]]  # by a tokenizer's fingerprint, one row a text; all score the same places
    is_shared: bool  # vocabularies differ, so whole words are masked and the shared ones scored
    num_texts: int  # that were drawn; those without a scored token are not in `sources` and `rows`
    num_masked: int  # tokens, or words where `is_shared`

    @property
    def counts(self) -> np.ndarray:
        """Scored tokens of each text, int64 [texts]."""
        return np.array([len(row.places) for row in next(iter(self.rows.values()))], dtype=np.int64)

    def hash_rows(self, fingerprint: str) -> str:
        """Return the sha256 of all that a model with this tokenizer is asked."""
        digest = hashlib.sha256()
        for row in self.rows[fingerprint]:
            for part in (row.input_ids, row.places, row.labels):
                digest.update(f"{len(part)} ".encode() + part.tobytes())
        return digest.hexdigest()

    def describe(self) -> str:
        """Return one sentence on what is masked and scored."""
        scored, texts = f"{int(self.counts.sum()):,}", f"{len(self.sources):,} texts"
        if not self.is_shared:
            return f"{scored} tokens of {texts} are masked once, and the very same ones for all models."
        return (
            f"The models' vocabularies differ: {self.num_masked:,} words are masked once, the same words with all "
            f"their pieces for all models, and scored are the {scored} of them (in {texts}) that are one token in "
            "every vocabulary."
        )


def choose_texts(spec: str, prepare: PrepareConfig, *, num_texts: int, seed: int) -> list[GeneralText]:
    """Draw texts of a corpus without repetition, in the order of their hashes."""
    dropped, seen = Dropped(), set[int]()
    texts = heapq.nsmallest(num_texts, _read_texts(spec, prepare, seed, dropped, seen), key=lambda text: text.draw)
    dropped.tell(spec, len(seen), prepare, is_new=False)
    if not texts:
        reasons = "; ".join(dropped.describe(prepare)) or "no line"
        raise CorpusError(
            f"--corpus {spec!r} has no text of {prepare.min_document_chars} characters or more ({reasons}); give "
            "another one, or set --prepare.min_document_chars."
        )
    return texts


def _read_texts(
    spec: str, prepare: PrepareConfig, seed: int, dropped: Dropped, seen: set[int]
) -> Iterator[GeneralText]:
    tasks = resolve_sources(spec, prepare).tasks
    names = _name_sources([file for task in tasks for file in task.files])
    salt = seed.to_bytes(16, "big")
    for task in tasks:
        for file in task.files:
            for text in read_documents(ReadTask((file,), task.start, task.end), prepare, dropped):
                draw = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8, salt=salt).digest(), "big") >> 1
                if draw not in seen:
                    seen.add(draw)
                    yield GeneralText(text, names[file.path], draw)


def _name_sources(files: Sequence[SourceFile]) -> dict[str, str]:
    """Name each file by its own name where that tells files apart, else by its path; installed packages are one."""
    paths = {file.path for file in files}
    short = {path: Path(path.removesuffix(".gz")).stem for path in paths}
    taken = Counter(short.values())
    names = {path: name if taken[name] == 1 else path for path, name in short.items()}
    return names | {file.path: PACKAGE_DOCS for file in files if file.kind == PACKAGE_DOCS}


def build_mask_set(
    texts: Sequence[GeneralText],
    tokenizers: Mapping[str, PreTrainedTokenizerBase],
    *,
    mask_frac: float,
    max_length: int,
    shared_words: bool = True,
) -> MaskSet:
    """Mask texts once for all models.

    The first model's tokenizer says where words begin and end. A text of more than `max_length` tokens, special tokens
    included, is cut, at the same character for all. Without `shared_words` all tokenizers must be equal.
    """
    cutters: dict[str, _Cutter] = {}
    owners: dict[str, str] = {}
    for name, tokenizer in tokenizers.items():
        fingerprint = fingerprint_tokenizer(tokenizer)
        owners.setdefault(fingerprint, name)
        cutters.setdefault(fingerprint, _Cutter(tokenizer, max_length))
    if len(cutters) > 1 and not shared_words:
        first, second = list(owners.values())[:2]
        raise ConfigError(
            f"--models {first} and {second} have different tokenizers, so their masks would differ; give "
            "--shared_words true, which masks whole words and scores those that are one token in every vocabulary."
        )
    builder = _Builder(list(cutters.values()), mask_frac)
    kept: list[str] = []
    rows: dict[str, list[MaskedText]] = {fingerprint: [] for fingerprint in cutters}
    for text in texts:
        masked = builder.mask(text)
        if masked:
            kept.append(text.source)
            for found, row in zip(rows.values(), masked, strict=True):
                found.append(row)
    builder.check(list(owners.values()))
    frozen = {fingerprint: tuple(found) for fingerprint, found in rows.items()}
    return MaskSet(tuple(kept), frozen, builder.is_shared, len(texts), builder.num_masked)


class _Cutter:
    """One tokenizer's view of a text; special tokens count towards `max_length`."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, max_length: int) -> None:
        self.backend = make_backend(tokenizer)
        self.tokenizer = tokenizer
        self.max_tokens = max_length - 2
        self.spellings: dict[int, str] = {}

    def encode(self, text: str) -> Encoding:
        return self.backend.encode(text, add_special_tokens=False)

    def find_cut(self, encoding: Encoding) -> int:
        """Return the character that the last whole word that fits into a row ends at."""
        if len(encoding.ids) <= self.max_tokens:
            return encoding.offsets[-1][1] if encoding.ids else 0
        last = self.max_tokens
        while last > 0 and encoding.word_ids[last] == encoding.word_ids[last - 1]:
            last -= 1
        # A single word that is longer than a row is cut within.
        return encoding.offsets[(last or self.max_tokens) - 1][1]

    def count_tokens(self, encoding: Encoding, cut: int) -> int:
        """Return how many tokens end at or before a character and fit into a row."""
        return sum(1 for _, end in encoding.offsets[: self.max_tokens] if end <= cut)

    def spell(self, token: int) -> str:
        """Return what a token stands for, without the space before it."""
        if token not in self.spellings:
            self.spellings[token] = str(self.tokenizer.decode([token])).strip()
        return self.spellings[token]

    def build_row(self, tokens: Sequence[int], masked: Collection[int], scored: Sequence[int]) -> MaskedText:
        """Put tokens between the special ones, some of them masked; places count from the first of `tokens`."""
        ids = np.array([self.tokenizer.cls_token_id, *tokens, self.tokenizer.sep_token_id], dtype=np.int64)
        places = np.array(scored, dtype=np.int64) + 1
        labels = ids[places]
        ids[[1 + place for place in masked]] = self.tokenizer.mask_token_id
        return MaskedText(ids, places, labels)


class _Builder:
    """Masks one text after another for several tokenizers, and counts."""

    def __init__(self, cutters: list[_Cutter], mask_frac: float) -> None:
        self.cutters, self.mask_frac = cutters, mask_frac
        self.is_shared = len(cutters) > 1
        self.num_drawn = self.num_masked = self.num_scored = 0

    def mask(self, text: GeneralText) -> list[MaskedText]:
        """Return the text's row for each tokenizer; none where nothing of it is scored."""
        encodings = [cutter.encode(text.text) for cutter in self.cutters]
        cut = min(cutter.find_cut(encoding) for cutter, encoding in zip(self.cutters, encodings, strict=True))
        sizes = [cutter.count_tokens(encoding, cut) for cutter, encoding in zip(self.cutters, encodings, strict=True)]
        find = _find_words if self.is_shared else _find_tokens
        spans = [find(text.text, encoding, size) for encoding, size in zip(encodings, sizes, strict=True)]
        drawn = self._draw(text, list(spans[0]))
        masked = [span for span in drawn if all(span in own for own in spans)]
        scored = [span for span in masked if self._is_shared_token(encodings, [own[span] for own in spans])]
        if not self.is_shared:
            masked = scored
        self.num_drawn += len(drawn)
        self.num_masked += len(masked)
        self.num_scored += len(scored)
        if not scored:
            return []
        rows = []
        for cutter, encoding, size, own in zip(self.cutters, encodings, sizes, spans, strict=True):
            hidden = {place for span in masked for place in own[span]}
            rows.append(cutter.build_row(encoding.ids[:size], hidden, [own[span][0] for span in scored]))
        return rows

    def _draw(self, text: GeneralText, spans: list[Stretch]) -> list[Stretch]:
        """Draw stretches by their first character."""
        firsts = np.array([first for first, _ in spans], dtype=np.int64)
        if not len(firsts):
            return []
        is_drawn = to_uniform(hash_counters(Purpose.PROBED_PLACES, text.draw, firsts)) < self.mask_frac
        return [span for span, chosen in zip(spans, is_drawn, strict=True) if chosen]

    def _is_shared_token(self, encodings: Sequence[Encoding], places: Sequence[list[int]]) -> bool:
        """Whether a stretch is one known token, spelled the same, for every tokenizer."""
        if any(len(own) != 1 for own in places):
            return False
        tokens = [encoding.ids[own[0]] for encoding, own in zip(encodings, places, strict=True)]
        if any(token == cutter.tokenizer.unk_token_id for token, cutter in zip(tokens, self.cutters, strict=True)):
            return False
        return len({cutter.spell(token) for token, cutter in zip(tokens, self.cutters, strict=True)}) == 1

    def check(self, names: Sequence[str]) -> None:
        """Refuse a mask set that has too little to score; `names` has a model of each tokenizer."""
        if self.is_shared and self.num_scored < MIN_SHARED_FRAC * self.num_drawn:
            raise ConfigError(
                f"--models {', '.join(names)} have vocabularies too different to compare: of {self.num_drawn:,} drawn "
                f"words {self.num_scored:,} are one token in all of them, and at least half must be; compare models of "
                "one kind of vocabulary."
            )
        if not self.num_scored:
            raise CorpusError("no token of --corpus is masked; give more text, or a higher --mask_frac.")


def _find_tokens(text: str, encoding: Encoding, size: int) -> dict[Stretch, list[int]]:
    """Place of every token among the first `size`, by its characters; of the pieces of one character the first."""
    spans: dict[Stretch, list[int]] = {}
    for place, span in enumerate(encoding.offsets[:size]):
        spans.setdefault(span, [place])
    return spans


def _find_words(text: str, encoding: Encoding, size: int) -> dict[Stretch, list[int]]:
    """Places of every word among the first `size` tokens that has a letter or digit, by its characters."""
    spans: dict[Stretch, list[int]] = {}
    for places in group_pieces(encoding.word_ids):
        first, end = encoding.offsets[places[0]][0], encoding.offsets[places[-1]][1]
        word_text = text[first:end]
        first += len(word_text) - len(word_text.lstrip())  # some tokenizers count the space before a word to it
        if places[-1] < size and any(char.isalnum() for char in word_text):
            spans[first, end] = places
    return spans
