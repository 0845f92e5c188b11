"""Which family a tokenizer is of, by its model. A further one is a class in a file of its own, and a row here."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from domext_ray.errors import CorpusError
from domext_ray.vocabulary.byte_level import ByteLevelFamily
from domext_ray.vocabulary.family import TokenizerFamily
from domext_ray.vocabulary.wordpiece import WordPieceFamily

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FAMILIES: dict[str, type[TokenizerFamily]] = {"WordPiece": WordPieceFamily, "BPE": ByteLevelFamily}


def tokenizer_family(tokenizer: PreTrainedTokenizerBase | str, base: str = "") -> TokenizerFamily:
    """Return a fast tokenizer, or its JSON, as its family sees it.

    Args:
        tokenizer: of a base, or with new words.
        base: what the user calls a base, for the sentence that refuses it; then it is checked.

    Raises:
        CorpusError: it takes no new words.
    """
    record = json.loads(tokenizer if isinstance(tokenizer, str) else tokenizer.backend_tokenizer.to_str())
    model = record["model"].get("type")
    if model not in FAMILIES:
        raise make_refusal(base, f"is a {model} model")
    family = FAMILIES[model](record)
    fault = family.find_fault() if base else ""
    if fault:
        raise make_refusal(base, fault)
    return family


def make_refusal(base: str, fault: str) -> CorpusError:
    """Say that a base's tokenizer takes no new words; `fault`: as `TokenizerFamily.find_fault` has it."""
    return CorpusError(
        f"the tokenizer of --base {base} {fault}, and new words beside it would change other texts; give a base with "
        "WordPiece (as BERT's) or byte-level BPE (as RoBERTa's), or leave --vocab.size 0 and --vocab.words empty."
    )
