"""The kinds of vocabularies that take new words, by the model that their tokenizer has.

A further kind is a class in a file of its own, and a row here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from domext_ray.corpus.vocabulary.byte_level import ByteLevelWords
from domext_ray.corpus.vocabulary.kind import VocabularyKind, read_record
from domext_ray.corpus.vocabulary.unigram import UnigramWords
from domext_ray.corpus.vocabulary.wordpiece import WordPieces
from domext_ray.errors import CorpusError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

KINDS: dict[str, VocabularyKind] = {"WordPiece": WordPieces(), "BPE": ByteLevelWords(), "Unigram": UnigramWords()}


def find_kind(tokenizer: PreTrainedTokenizerBase | str) -> VocabularyKind:
    """Return the kind of a tokenizer, or of its JSON, that takes new words."""
    return KINDS[_read_model(tokenizer)]


def require_kind(tokenizer: PreTrainedTokenizerBase | str, name: str) -> VocabularyKind:
    """Return the kind of a base's tokenizer.

    Args:
        tokenizer: the tokenizer, or its JSON.
        name: what the user calls the base.

    Raises:
        CorpusError: it takes no new words.
    """
    model = _read_model(tokenizer)
    if model not in KINDS:
        raise CorpusError(
            f"the tokenizer of --base {name} is a {model} model; new words need WordPiece (as BERT's), byte-level BPE "
            "(as RoBERTa's) or a unigram model (as XLM-R's); give such a base, or leave --vocab.size 0 and "
            "--vocab.words empty."
        )
    KINDS[model].check(read_record(tokenizer), name)
    return KINDS[model]


def _read_model(tokenizer: PreTrainedTokenizerBase | str) -> Any:
    if isinstance(tokenizer, str):
        return read_record(tokenizer)["model"].get("type")
    return type(tokenizer.backend_tokenizer.model).__name__
