"""Texts -> pieces with their characters -> overlapping windows that fit a row, and rows with their special tokens.

Enters: a model's tokenizer and texts. Leaves: ids with the stretch of characters of each piece, windows of them, and
rows as the tokenizer writes them. BERT's code for SQuAD cuts long contexts in the same way, but here the last window
reaches back, so that it is as long as the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from tokenizers import Tokenizer

from domext_ray.errors import ConfigError
from domext_ray.families.readers.words import INVISIBLE
from domext_ray.text.vocabulary.tokenizer import make_backend

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Window = tuple[int, int]
"""First piece, and the piece after the last."""


@dataclass(frozen=True)
class TextPieces:
    """The pieces of a text."""

    ids: np.ndarray  # int64 [P], without special tokens
    starts: np.ndarray  # int64 [P], first character of each piece, spaces and invisible characters left out
    ends: np.ndarray  # int64 [P], the character after its last; not above its start if the piece shows nothing

    def __len__(self) -> int:
        return len(self.ids)

    def cut(self, window: Window) -> TextPieces:
        """Return the pieces of a window; characters are still counted from the text's start."""
        first, end = window
        return TextPieces(self.ids[first:end], self.starts[first:end], self.ends[first:end])

    @property
    def is_visible(self) -> np.ndarray:
        """Bool [P]: the piece has characters that show."""
        return self.ends > self.starts


def encode_texts(backend: Tokenizer, texts: Sequence[str]) -> list[TextPieces]:
    """Tokenise texts, whatever their length."""
    found = []
    for text, encoding in zip(texts, backend.encode_batch(list(texts), add_special_tokens=False), strict=True):
        offsets = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
        found.append(TextPieces(np.array(encoding.ids, dtype=np.int64), *_trim_spaces(text, *offsets.T)))
    return found


def _trim_spaces(text: str, starts: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Move the ends of stretches inwards past spaces, which pieces of many vocabularies begin with, and the like."""
    places = np.arange(len(text) + 1)
    is_space = np.fromiter(map(INVISIBLE.__contains__, text), dtype=bool, count=len(text))
    # For every place the first visible character from there on, and the place after the last one before it.
    first = np.minimum.accumulate(np.where(np.append(is_space, False), len(text), places)[::-1])[::-1]
    last = np.maximum.accumulate(np.where(np.insert(is_space, 0, True), 0, places))
    return first[starts], last[ends]


def plan_windows(num_pieces: int, size: int, overlap: int, stretches: Iterable[Window] = ()) -> list[Window]:
    """Cover a text with windows, in order; the last one by place ends with the text.

    A text without pieces has one empty window. Neighbours share `overlap` pieces, half a window at most. Labelled
    stretches are for training only: one that no window holds whole, and that fits into one, has a window around it.
    """
    step = size - min(overlap, size // 2)
    starts = [*range(0, num_pieces - size, step), max(0, num_pieces - size)]
    windows = [(start, min(num_pieces, start + size)) for start in starts]
    for first, end in stretches:
        if end - first <= size and not any(holds(window, (first, end)) for window in windows):
            start = min(max(0, (first + end - size) // 2), num_pieces - size)
            windows.append((start, start + size))
    return sorted(windows)


def holds(window: Window, stretch: Window) -> bool:
    """Whether a window has the whole of a stretch."""
    return window[0] <= stretch[0] and stretch[1] <= window[1]


def make_cutting_backend(tokenizer: PreTrainedTokenizerBase, max_length: int) -> Tokenizer:
    """Return a tokenizer's engine that cuts rows at their end, of two texts the longer one first."""
    read_template(tokenizer, pair=True).measure_room(max_length, least=2)
    backend = make_backend(tokenizer)
    backend.enable_truncation(max_length, strategy="longest_first")
    return backend


@dataclass(frozen=True)
class RowTemplate:
    """How a tokenizer writes a row: its special tokens and segment types around one text, or two."""

    specials: tuple[np.ndarray, ...]  # int64 ids before, between (two texts only) and after the texts
    types: tuple[np.ndarray, ...] | None
    """Segment types of specials and texts in the row's order, each as long as its part, texts 1; None: all 0."""

    @property
    def num_special(self) -> int:
        """Special tokens of a row."""
        return sum(map(len, self.specials))

    def measure_room(self, max_length: int, least: int) -> int:
        """Return how many pieces a row has room for beside its special tokens; fewer than `least` are refused."""
        if max_length < self.num_special + least:
            raise ConfigError(
                f"max_length is {max_length}; a row of this task has {self.num_special} special tokens and needs "
                f"max_length {self.num_special + least} at least."
            )
        return max_length - self.num_special

    def join(self, *texts: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """Return a row of texts (int64 ids), int64 [N], and its segment types, int64 [N] or None."""
        parts = [self.specials[0]]
        for text, special in zip(texts, self.specials[1:], strict=True):
            parts += [text, special]
        if self.types is None:
            return np.concatenate(parts), None
        types = [kind.repeat(len(parts[i])) if i % 2 else kind for i, kind in enumerate(self.types)]
        return np.concatenate(parts), np.concatenate(types)

    def find_text(self, *before: np.ndarray) -> int:
        """Return the place in a row of the first piece of the text that comes after some texts."""
        return sum(map(len, before)) + sum(map(len, self.specials[: len(before) + 1]))


def read_template(tokenizer: PreTrainedTokenizerBase, *, pair: bool) -> RowTemplate:
    """Read from a tokenizer how it writes a row of one text, or of two."""
    encoding = make_backend(tokenizer).encode("a", "a" if pair else None)
    ids, types = np.array(encoding.ids, dtype=np.int64), np.array(encoding.type_ids, dtype=np.int64)
    bounds = [0]
    for text in range(1 + pair):
        places = np.flatnonzero([sequence_id == text for sequence_id in encoding.sequence_ids])
        bounds += [int(places[0]), int(places[-1]) + 1]
    parts = [slice(*stretch) for stretch in zip(bounds, [*bounds[1:], len(ids)], strict=True)]
    specials = tuple(ids[part] for part in parts[::2])
    # RoBERTa's tokenizers have no types, and its models' tables no row for a second one.
    if "token_type_ids" not in tokenizer.model_input_names or not types.any():
        return RowTemplate(specials, None)
    return RowTemplate(specials, tuple(types[part][: 1 if i % 2 else None] for i, part in enumerate(parts)))
