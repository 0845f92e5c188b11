"""Words and texts -> pieces of a vocabulary, in bulk, for the rows of tasks.

Enters: a model's tokenizer, and words or texts. Leaves: ids by word, or encodings with the characters of each piece.
A special token that stands literally in a text ("[SEP]") is text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from tokenizers import Encoding, pre_tokenizers
from transformers import PreTrainedTokenizerBase

from domext_ray.corpus.vocabulary.vocab import make_backend
from domext_ray.errors import ConfigError


@dataclass(frozen=True)
class WordPieces:
    """The pieces of some words.

    Args:
        ids: int64 [P], without special tokens.
        bounds: int64 [W + 1]; word w has the pieces ids[bounds[w] : bounds[w + 1]], none if the tokenizer drops it.
    """

    ids: np.ndarray
    bounds: np.ndarray

    @property
    def sizes(self) -> np.ndarray:
        """Pieces of every word, int64 [W]."""
        return np.diff(self.bounds)


def encode_words(tokenizer: PreTrainedTokenizerBase, sentences: Sequence[Sequence[str]]) -> list[WordPieces]:
    """Tokenise words one by one, as `is_split_into_words` does.

    Args:
        tokenizer: byte-level vocabularies see every word after a space, as with `add_prefix_space`.
        sentences: the words of each sentence.
    """
    backend = make_backend(tokenizer)
    if isinstance(backend.pre_tokenizer, pre_tokenizers.ByteLevel):
        sentences = [[f" {word}" for word in words] for words in sentences]
    encodings = backend.encode_batch(
        [list(words) for words in sentences], is_pretokenized=True, add_special_tokens=False
    )
    return [_count_by_word(encoding, len(words)) for encoding, words in zip(encodings, sentences, strict=True)]


def _count_by_word(encoding: Encoding, num_words: int) -> WordPieces:
    sizes = np.bincount(np.array(encoding.word_ids, dtype=np.int64), minlength=num_words)
    bounds = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    return WordPieces(np.array(encoding.ids, dtype=np.int64), bounds)


def measure_room(max_length: int, num_special: int, least: int) -> int:
    """Return how many pieces a row has room for beside its special tokens.

    Args:
        max_length: tokens of a row at most.
        num_special: special tokens of a row.
        least: pieces that a row of the task has to hold.

    Raises:
        ConfigError: the row is too short.
    """
    if max_length < num_special + least:
        raise ConfigError(
            f"max_length is {max_length}; a row of this task has {num_special} special tokens and needs max_length "
            f"{num_special + least} at least."
        )
    return max_length - num_special
