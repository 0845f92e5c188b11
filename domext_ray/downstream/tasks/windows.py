"""Texts -> pieces with their characters -> overlapping windows that fit a row, and rows with their special tokens.

Enters: a model's tokenizer and texts. Leaves: ids with the stretch of characters of each piece, windows of them, and
rows as the tokenizer writes them. BERT's code for SQuAD cuts long contexts in the same way, but here the last window
reaches back, so that it is as long as the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from domext_ray.errors import ConfigError
from domext_ray.vocabulary.tokenizer import make_backend

Window = tuple[int, int]
"""First piece, and the piece after the last."""


@dataclass(frozen=True)
class TextPieces:
    """The pieces of a text.

    Args:
        ids: int64 [P], without special tokens.
        starts: int64 [P], first character of each piece, spaces left out.
        ends: int64 [P], the character after its last; not above its start if the piece is nothing but spaces.
    """

    ids: np.ndarray
    starts: np.ndarray
    ends: np.ndarray

    def __len__(self) -> int:
        return len(self.ids)

    def cut(self, window: Window) -> TextPieces:
        """Return the pieces of a window; characters are still counted from the text's start."""
        first, end = window
        return TextPieces(self.ids[first:end], self.starts[first:end], self.ends[first:end])

    @property
    def is_visible(self) -> np.ndarray:
        """Bool [P]: the piece has characters other than spaces."""
        return self.ends > self.starts


def encode_texts(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[TextPieces]:
    """Tokenise texts, whatever their length; "[SEP]" in a text is text."""
    encodings = make_backend(tokenizer).encode_batch(list(texts), add_special_tokens=False)
    found = []
    for text, encoding in zip(texts, encodings, strict=True):
        offsets = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
        starts, ends = _trim_spaces(text, offsets[:, 0], offsets[:, 1])
        found.append(TextPieces(np.array(encoding.ids, dtype=np.int64), starts, ends))
    return found


def _trim_spaces(text: str, starts: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Move the ends of stretches inwards past spaces, which byte-level pieces begin with."""
    places = np.arange(len(text) + 1)
    is_space = np.fromiter(map(str.isspace, text), dtype=bool, count=len(text))
    # For every place the first visible character from there on, and the place after the last one before it.
    first = np.minimum.accumulate(np.where(np.append(is_space, False), len(text), places)[::-1])[::-1]
    last = np.maximum.accumulate(np.where(np.insert(is_space, 0, True), 0, places))
    return first[starts], last[ends]


def plan_windows(num_pieces: int, size: int, overlap: int) -> list[Window]:
    """Cover a text with windows; the last one ends with the text.

    Args:
        num_pieces: pieces of the text; 0 gives one empty window.
        size: pieces of a window at most, 1 or more.
        overlap: pieces that neighbours share, half a window at most.
    """
    step = size - min(overlap, size // 2)
    starts = [*range(0, num_pieces - size, step), max(0, num_pieces - size)]
    return [(start, min(num_pieces, start + size)) for start in starts]


def add_windows(windows: Sequence[Window], stretches: Iterable[Window], num_pieces: int, size: int) -> list[Window]:
    """Add a window around every stretch that no window holds whole; one longer than a window cannot be helped.

    For training only: in prediction nobody knows where the labelled stretches are.

    Args:
        windows: of `plan_windows`.
        stretches: first piece, and the piece after the last, of the labelled parts.
        num_pieces: pieces of the text.
        size: pieces of a window at most.

    Returns:
        All windows, sorted.
    """
    kept = list(windows)
    for first, end in stretches:
        if end - first <= size and not any(holds(window, (first, end)) for window in kept):
            start = min(max(0, (first + end - size) // 2), num_pieces - size)
            kept.append((start, start + size))
    return sorted(kept)


def holds(window: Window, stretch: Window) -> bool:
    """Whether a window has the whole of a stretch."""
    return window[0] <= stretch[0] and stretch[1] <= window[1]


@dataclass(frozen=True)
class RowTemplate:
    """How a tokenizer writes a row: its special tokens and segment types around one text, or two.

    Args:
        specials: int64 ids before, between (two texts only) and after the texts.
        types: segment types of specials and texts in the row's order, each as long as its part, texts 1; None: all 0.
    """

    specials: tuple[np.ndarray, ...]
    types: tuple[np.ndarray, ...] | None

    @property
    def num_special(self) -> int:
        """Special tokens of a row."""
        return sum(map(len, self.specials))

    def measure_room(self, max_length: int, least: int) -> int:
        """Return how many pieces a row has room for beside its special tokens.

        Args:
            max_length: tokens of a row at most.
            least: pieces that a row of the task has to hold.

        Raises:
            ConfigError: the row is too short.
        """
        if max_length < self.num_special + least:
            raise ConfigError(
                f"max_length is {max_length}; a row of this task has {self.num_special} special tokens and needs "
                f"max_length {self.num_special + least} at least."
            )
        return max_length - self.num_special

    def join(self, *texts: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """Return a row of texts, int64 [N], and its segment types, int64 [N] or None.

        Args:
            *texts: int64 ids, as many texts as the template is for.
        """
        parts: list[np.ndarray] = [self.specials[0]]
        for text, special in zip(texts, self.specials[1:], strict=True):
            parts += [text, special]
        ids = np.concatenate(parts)
        if self.types is None:
            return ids, None
        types = [
            np.full(len(part), kind[0]) if i % 2 else kind
            for i, (part, kind) in enumerate(zip(parts, self.types, strict=True))
        ]
        return ids, np.concatenate(types).astype(np.int64)

    def find_text(self, *before: np.ndarray) -> int:
        """Return the place in a row of the first piece of the text that comes after some texts."""
        return sum(map(len, before)) + sum(map(len, self.specials[: len(before) + 1]))


def read_template(tokenizer: PreTrainedTokenizerBase, *, pair: bool) -> RowTemplate:
    """Read from a tokenizer how it writes a row of one text, or of two."""
    backend: Tokenizer = make_backend(tokenizer)
    encoding = backend.encode("a", "a") if pair else backend.encode("a")
    ids, types = np.array(encoding.ids, dtype=np.int64), np.array(encoding.type_ids, dtype=np.int64)
    places = [np.flatnonzero([each == text for each in encoding.sequence_ids]) for text in range(2 if pair else 1)]
    bounds = [0]
    for each in places:
        bounds += [int(each[0]), int(each[-1]) + 1]
    parts = list(zip(bounds, [*bounds[1:], len(ids)], strict=True))
    specials = tuple(ids[first:end] for first, end in parts[::2])
    # RoBERTa's tokenizers have no types, and its models' tables no row for a second one.
    has_types = "token_type_ids" in tokenizer.model_input_names and bool(types.any())
    if not has_types:
        return RowTemplate(specials, None)
    return RowTemplate(
        specials, tuple(types[first : first + 1 if i % 2 else end] for i, (first, end) in enumerate(parts))
    )
