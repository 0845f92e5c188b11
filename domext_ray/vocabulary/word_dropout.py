"""A tokenizer without some of its words, by chance: what has one of them is read in smaller pieces.

A model that is trained so meets every text in several readings, and learns from few labels what its pieces mean. Source:
Hiraoka, MaxMatch-Dropout (COLING 2022), and Provilkov et al., BPE-Dropout (ACL 2020). There a chance decides at every
occurrence; here it decides for an epoch, so that the tokenizer's own engine reads it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import compress
from typing import TYPE_CHECKING, Any

import numpy as np
from tokenizers import Tokenizer

from domext_ray.corpus.draws import Purpose, hash_counters, to_uniform

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DROPPING = ("WordPiece", "BPE")
"""Kinds of models that read any text by a part of their vocabulary."""


@dataclass(frozen=True)
class WordDropout:
    """Shares of a vocabulary's entries that are left out.

    Args:
        known: of the base's, 0 to below 1.
        new: of those beside them.
        first_new: id of the first new one.
    """

    known: float
    new: float
    first_new: int


def name_model(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the kind of model that a fast tokenizer has, such as WordPiece."""
    kind: str = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["type"]
    return kind


def drop_words(backend: Tokenizer, dropout: WordDropout, seed: int, epoch: int) -> Tokenizer:
    """Return a tokenizer's engine without the entries that a chance drops; single characters and special tokens stay.

    Args:
        backend: of one of the kinds `DROPPING`; see `make_backend`.
        dropout: the shares.
        seed: the training's.
        epoch: from 0.
    """
    record = json.loads(backend.to_str())
    model: dict[str, Any] = record["model"]
    prefix = model.get("continuing_subword_prefix") or ""
    kept = {each["content"] for each in record["added_tokens"]} | {model.get("unk_token")}
    entries = [each for each in model["vocab"] if len(each.removeprefix(prefix)) > 1 and each not in kept]
    ids = np.array([model["vocab"][each] for each in entries], dtype=np.int64)
    shares = np.where(ids < dropout.first_new, dropout.known, dropout.new)
    draws = to_uniform(hash_counters(seed, Purpose.DROPPED_WORDS, epoch, ids))
    dropped = {*compress(entries, draws < shares)}
    model["vocab"] = {entry: i for entry, i in model["vocab"].items() if entry not in dropped}
    if "merges" in model:  # pairs of entries, which make up a third
        pairs = [each if isinstance(each, list) else each.split(" ") for each in model["merges"]]
        model["merges"] = [
            each for each in pairs if dropped.isdisjoint([*each, each[0] + each[1].removeprefix(prefix)])
        ]
    thinned = Tokenizer.from_str(json.dumps(record))
    thinned.encode_special_tokens = backend.encode_special_tokens
    return thinned
