"""Held-out loss, accuracy and bits per character in the domain, and the general probe: the forgetting meter.

All are fixed sets: the same rows and the same masks, whatever the seed or the number of workers, so that figures of
different runs on one corpus compare. In the domain, held-out tokens are masked by the run's own objective (whole words
and rates included). In the general probe every word of some plain sentences is masked once, over seven passes, and
accuracy counts the words that are one token of the base.

Token losses of different vocabularies do not compare. Bits per character and word bits per character, of held-out words
that are chosen by their characters, are the same words for every vocabulary (passages.py). Between models of different
vocabularies the word bits decide; with one vocabulary both do.

Both the probe and the bits ask for masked words, which a model that reads from left to right was never shown:
for such a run they are not measured, and its loss on held-out rows is that of the next token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tokenizers import Encoding
from transformers import PreTrainedTokenizerBase

from domext_ray.config.pretrain import ObjectiveConfig, PretrainConfig, resolve_micro_batch_size
from domext_ray.corpus.draws import hash_counters
from domext_ray.corpus.manifest import Manifest, Split, take_numbered
from domext_ray.corpus.views import make_masker
from domext_ray.errors import CorpusError
from domext_ray.training.engine import Engine
from domext_ray.training.objective import MaskedBatch, to_batch
from domext_ray.training.passages import (
    EVALUATION_SEED,
    CharacterSet,
    WordSet,
    build_character_batches,
    build_word_batches,
    pad_rows,
    read_passages,
)
from domext_ray.vocabulary.tokenizer import group_pieces

GENERAL_PROBE = Path(__file__).parent.parent / "assets" / "general_probe.txt"
PROBE_PASSES = 7


@dataclass(frozen=True)
class Scores:
    """Result of one evaluation.

    Args:
        loss: mean negative log-likelihood of the predicted tokens, nats; nan without any.
        accuracy: share of them predicted exactly, 0 to 1; nan without any.
        num_tokens: predicted tokens.
        next_sentence_accuracy: share of pairs told right, 0 to 1; nan without pairs.
        num_pairs: pairs.
    """

    loss: float
    accuracy: float
    num_tokens: int
    next_sentence_accuracy: float = math.nan
    num_pairs: int = 0


Score = Callable[[Sequence[Any]], Scores]
"""Scores a fixed set of batches, the same one on every rank; collective."""


def build_domain_batches(
    manifest: Manifest,
    tokenizer: PreTrainedTokenizerBase,
    objective: ObjectiveConfig,
    *,
    num_rows: int,
    batch_size: int,
    split: Split = "held_out",
    packed: bool = False,
) -> list[Any]:
    """Mask a fixed choice of rows, those that are held out unless told otherwise; or make views of them.

    Args:
        manifest: the prepared corpus.
        tokenizer: the run's tokenizer.
        objective: the run's masking; the seed of the draws is the evaluation's own.
        num_rows: rows at most; which ones depends on the corpus only.
        batch_size: rows of a forward pass.
        split: where the rows are from.
        packed: rows have several documents.
    """
    order = np.argsort(hash_counters(EVALUATION_SEED, np.arange(manifest.num_rows(split))), kind="stable")[:num_rows]
    num_grouped = (
        len(order) // objective.inseparable_rows * objective.inseparable_rows
    )  # a smaller group would be an easier one
    shard_rows = [each.num_rows for each in manifest.records(split)]
    table = take_numbered(manifest.paths(split), shard_rows, np.sort(order[: num_grouped or len(order)]))
    masker: Any = make_masker(tokenizer, objective, EVALUATION_SEED, packed=packed)
    return [to_batch(each) for each in masker.collate(masker.mask(table, epoch=0), batch_size)]


def build_probe_batches(
    sentences: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    batch_size: int,
    max_length: int,
    full_length: int = 0,
) -> list[MaskedBatch]:
    """Mask every word of the sentences once, over seven passes; one-token words count.

    Args:
        sentences: plain sentences.
        tokenizer: the base's tokenizer.
        batch_size: rows of a forward pass.
        max_length: longer sentences are cut to this many tokens.
        full_length: see `pad_rows`.

    Returns:
        Batches over all passes; empty when no word of the sentences is one token of the base.
    """
    rows: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    encoded = tokenizer(list(sentences), truncation=True, max_length=max_length)
    for i, ids in enumerate(encoded["input_ids"]):
        labels = np.asarray(ids, dtype=np.int64)
        spans = _find_words(sentences[i], encoded[i])
        for start in range(PROBE_PASSES):
            masked, is_counted = labels.copy(), np.zeros(len(labels), dtype=bool)
            for span in spans[start::PROBE_PASSES]:
                masked[span] = tokenizer.mask_token_id
                is_counted[span] = len(span) == 1 and labels[span[0]] != tokenizer.unk_token_id
            if is_counted.any():
                rows.append((masked, labels, is_counted))
    return pad_rows(rows, tokenizer.pad_token_id, batch_size, full_length)


def _find_words(sentence: str, encoding: Encoding) -> list[list[int]]:
    """Token places of every word that has a letter or digit, in order."""
    kept = []
    for places in group_pieces(encoding.word_ids):
        first, end = encoding.offsets[places[0]][0], encoding.offsets[places[-1]][1]
        if any(each.isalnum() for each in sentence[first:end]):
            kept.append(places)
    return kept


def read_probe(path: str | Path = "") -> list[str]:
    """Read the sentences of the general probe, one per line.

    Args:
        path: a file of the user's; empty: the sentences that ship with the package.

    Raises:
        CorpusError: the file is missing, is not UTF-8, or has no sentence.
    """
    source = Path(path) if path else GENERAL_PROBE
    try:
        lines = source.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise CorpusError(f"--train.general_probe {str(source)!r} cannot be read as UTF-8 text ({error}).") from error
    sentences = [line.strip() for line in lines if line.strip()]
    if not sentences:
        raise CorpusError(f"--train.general_probe {str(source)!r} has no sentence; give one per line.")
    return sentences


def evaluate_characters(score: Score, characters: CharacterSet) -> float:
    """Return the bits per character of a fixed set, nan without any; collective, as `evaluate` is."""
    scores = score(characters.batches)
    return scores.loss * scores.num_tokens / math.log(2) / characters.num_chars if characters.num_chars else math.nan


def evaluate_words(score: Score, words: WordSet) -> float:
    """Return the word bits per character of a fixed set, nan without any; collective, as `evaluate` is."""
    if not words.num_chars:
        return math.nan
    scores = score(words.batches)
    return (scores.loss * scores.num_tokens / math.log(2) + words.price_bits) / words.num_chars


def evaluate(engine: Engine, batches: Sequence[Any]) -> Scores:
    """Score a fixed set of batches; collective, every rank gives the same list and takes its share.

    Every rank runs the same number of forwards (ZeRO-3 would wait for ever otherwise): a rank without a batch of its
    own repeats one at weight zero.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    totals = torch.zeros(5, dtype=torch.float64)
    for first in range(0, len(batches), world_size):
        own = first + rank
        batch = batches[min(own, len(batches) - 1)]
        if own >= len(batches):
            batch = batch.without_weight()
        totals += torch.tensor([*engine.evaluate(batch), batch.num_pairs], dtype=torch.float64)
    totals = totals.to(engine.device)
    engine.sum_over_ranks(totals)
    loss, correct, num_tokens, num_in_order, num_pairs = totals.tolist()
    return Scores(
        loss / num_tokens if num_tokens else math.nan,
        correct / num_tokens if num_tokens else math.nan,
        int(num_tokens),
        num_in_order / num_pairs if num_pairs else math.nan,
        int(num_pairs),
    )


@dataclass(frozen=True)
class Evaluations:
    """The fixed batches of a run's evaluations.

    Args:
        domain: held-out rows, masked by the run's objective, or their views.
        general: the general probe; empty if no word of it is one token, or the run masks no words.
        characters: held-out text, the same words masked for every vocabulary; empty without masks, too.
        words: the same words, each one masked alone.
        parts: held-out rows of each text beside the corpus, masked likewise.
    """

    domain: list[Any]
    general: list[MaskedBatch]
    characters: CharacterSet
    words: WordSet
    parts: Sequence[list[Any]] = ()


def build_evaluations(
    config: PretrainConfig,
    manifest: Manifest,
    tokenizer: PreTrainedTokenizerBase,
    beside: Sequence[tuple[Manifest, PreTrainedTokenizerBase]] = (),
) -> Evaluations:
    """Build what `Evaluations` holds, for a corpus and the texts beside it, each with its tokenizer."""
    batch_size, length = resolve_micro_batch_size(config), config.train.seq_length
    domain, *parts = (
        build_domain_batches(
            *each,
            config.objective,
            num_rows=config.train.eval_rows,
            batch_size=batch_size,
            packed=config.prepare.packed,
        )
        for each in ((manifest, tokenizer), *beside)
    )
    if config.objective.kind != "masked":
        nothing = CharacterSet([], num_chars=0, num_words=0), WordSet([], 0.0, num_chars=0)
        return Evaluations(domain, [], *nothing, parts)
    sizes = {"batch_size": batch_size, "full_length": length}
    probe = build_probe_batches(read_probe(config.train.general_probe), tokenizer, max_length=length, **sizes)
    passages = read_passages(manifest, tokenizer, num_passages=config.train.eval_rows, max_length=length)
    characters = build_character_batches(passages, tokenizer, **sizes)
    words = build_word_batches(passages, tokenizer, **sizes)
    return Evaluations(domain, probe, characters, words, parts)
