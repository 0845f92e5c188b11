"""A tokenizer without some of its words, by chance: what has one of them is read in smaller pieces.

A model that is trained so meets every text in several readings, and learns more from few labels. Source: Hiraoka,
MaxMatch-Dropout (COLING 2022), and Provilkov et al., BPE-Dropout (ACL 2020). There a chance decides at every
occurrence; here it decides for an epoch, which the tokenizer's own engine then reads.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
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
    """Return a tokenizer's engine without the entries that a chance drops; special tokens and single characters stay.

    What these cannot spell stays, too, so that no word becomes unknown.

    Args:
        backend: of one of the kinds `DROPPING`; see `make_backend`.
        dropout: the shares.
        seed: the training's.
        epoch: from 0.
    """
    record = json.loads(backend.to_str())
    model: dict[str, Any] = record["model"]
    prefix = model.get("continuing_subword_prefix") or ""
    vocab: dict[str, int] = model["vocab"]
    kept = {each["content"] for each in record["added_tokens"]} | {model.get("unk_token")}
    entries = [each for each in vocab if each not in kept and _is_spelled(each, prefix, vocab)]
    ids = np.array([vocab[each] for each in entries], dtype=np.int64)
    shares = np.where(ids < dropout.first_new, dropout.known, dropout.new)
    draws = to_uniform(hash_counters(seed, Purpose.DROPPED_WORDS, epoch, ids))
    dropped = {*compress(entries, draws < shares)}
    model["vocab"] = {entry: i for entry, i in vocab.items() if entry not in dropped}
    if "merges" in model:
        made = ((pair, pair[0] + pair[1].removeprefix(prefix)) for pair in model["merges"])
        model["merges"] = [pair for pair, entry in made if dropped.isdisjoint([*pair, entry])]
    thinned = Tokenizer.from_str(json.dumps(record))
    thinned.encode_special_tokens = backend.encode_special_tokens
    return thinned


def _is_spelled(entry: str, prefix: str, vocab: Mapping[str, int]) -> bool:
    """Whether an entry has several characters, all of which are entries."""
    start = len(entry) - len(entry.removeprefix(prefix)) + 1
    return start < len(entry) and entry[:start] in vocab and all(prefix + each in vocab for each in entry[start:])
