"""A tokenizer without some of its words, by chance: what has one of them is read in smaller pieces.

A model that is trained so meets every text in several readings, and learns more from few labels. Source: Hiraoka,
MaxMatch-Dropout (COLING 2022), and Provilkov et al., BPE-Dropout (ACL 2020). There a chance decides at every
occurrence. Here it makes a few vocabularies, once, by which the tokenizer's own engine reads, and gives each example to
one of them in every epoch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from tokenizers import Tokenizer

from domext_ray.families.rows import Row
from domext_ray.families.task import Task
from domext_ray.text.data.draws import Purpose, hash_counters, to_uniform

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TaskT = TypeVar("TaskT", bound=Task)
NUM_VOCABULARIES = 16
"""One alone an epoch would give all examples the same gaps, and so do less."""
DROPPING = ("WordPiece", "BPE")
"""Kinds of models that read any text by a part of their vocabulary."""


@dataclass(frozen=True)
class WordDropout:
    """Shares of a vocabulary's entries that are left out."""

    known: float  # of the base's, 0 to below 1
    new: float  # of those beside them
    first_new: int  # id of the first of these


def name_model(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the kind of model that a fast tokenizer has, such as WordPiece."""
    return type(tokenizer.backend_tokenizer.model).__name__


def make_readers(task: TaskT, dropout: WordDropout, seed: int) -> list[TaskT]:
    """Return a task by each of the vocabularies of a training."""
    return [task.read_by(drop_words(task.backend, dropout, seed, number)) for number in range(NUM_VOCABULARIES)]


def read_anew(readers: Sequence[Task], seed: int, epoch: int) -> list[Row]:
    """Make the rows of an epoch: each document, or what else `Example.unit` says, is read by one task of several."""
    examples = readers[0].data.train
    places = {unit: i for i, unit in enumerate(dict.fromkeys(example.unit for example in examples))}
    numbers = np.array([places[example.unit] for example in examples])
    chosen = hash_counters(seed, Purpose.READINGS, epoch, numbers) % np.uint64(len(readers))
    shares = [[examples[i] for i in np.flatnonzero(chosen == number)] for number in range(len(readers))]
    pairs = zip(readers, shares, strict=True)
    return [row for reader, own in pairs if own for row in reader.encode(own, is_training=True)]


def drop_words(backend: Tokenizer, dropout: WordDropout, seed: int, number: int) -> Tokenizer:
    """Return a tokenizer's engine without the entries that a chance drops; special tokens and single characters stay.

    What these cannot spell stays, too, so that no word becomes unknown. The engine is of one of the kinds `DROPPING`;
    see `make_backend`.
    """
    record = json.loads(backend.to_str())
    model: dict[str, Any] = record["model"]
    prefix = model.get("continuing_subword_prefix") or ""
    vocab: dict[str, int] = model["vocab"]
    kept = {token["content"] for token in record["added_tokens"]} | {model.get("unk_token")}
    entries = [entry for entry in vocab if entry not in kept and _is_spelled(entry, prefix, vocab)]
    ids = np.array([vocab[entry] for entry in entries], dtype=np.int64)
    shares = np.where(ids < dropout.first_new, dropout.known, dropout.new)
    draws = to_uniform(hash_counters(seed, Purpose.DROPPED_WORDS, number, ids))
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
    return start < len(entry) and entry[:start] in vocab and all(prefix + char in vocab for char in entry[start:])
