"""Held-out loss and accuracy in the domain, and the general probe: the forgetting meter.

Both are fixed sets: the same rows and the same masks, whatever the seed or the number of workers, so that figures of
different runs on one corpus compare. In the domain, held-out tokens are masked by the run's own objective (whole words
and rates included). In the general probe every word of some plain sentences is masked once, over seven passes, and
accuracy counts the words that are one token of the base.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from domext_ray.config import ObjectiveConfig
from domext_ray.corpus.shards import Manifest
from domext_ray.corpus.stream import hash_counters, take_rows
from domext_ray.errors import CorpusError
from domext_ray.training.engine import Engine
from domext_ray.training.objective import MaskedBatch, Masker, pad_batch

GENERAL_PROBE = Path(__file__).parent.parent / "assets" / "general_probe.txt"
PROBE_PASSES = 7
_EVALUATION_SEED = 0x0DD_BA11


@dataclass(frozen=True)
class Scores:
    """Result of one evaluation.

    Args:
        loss: mean negative log-likelihood of the predicted tokens, nats; nan without any.
        accuracy: share of them predicted exactly, 0 to 1; nan without any.
        num_tokens: predicted tokens.
    """

    loss: float
    accuracy: float
    num_tokens: int


def build_domain_batches(
    manifest: Manifest,
    tokenizer: PreTrainedTokenizerBase,
    objective: ObjectiveConfig,
    *,
    num_rows: int,
    batch_size: int,
    pad_to: int = 0,
) -> list[MaskedBatch]:
    """Mask a fixed choice of held-out rows.

    Args:
        manifest: the prepared corpus.
        tokenizer: the run's tokenizer.
        objective: the run's masking; the seed of the draws is the evaluation's own.
        num_rows: rows at most; which ones depends on the corpus only.
        batch_size: rows of a forward pass.
        pad_to: length of every batch; 0: its longest row.
    """
    records = manifest.records("held_out")
    ends = np.cumsum([each.num_rows for each in records])
    order = np.argsort(hash_counters(_EVALUATION_SEED, np.arange(int(ends[-1]))), kind="stable")
    chosen = np.sort(order[:num_rows])
    shards = np.searchsorted(ends, chosen, side="right")
    first = np.concatenate([[0], ends])[shards]
    table = take_rows([str(Path(manifest.folder, each.path)) for each in records], shards, chosen - first)
    masker = Masker(tokenizer, objective, _EVALUATION_SEED)
    masked = masker.mask(table.append_column("row_id", pa.array(chosen)), epoch=0)
    return masker.collate(masked, batch_size, pad_to)


def build_probe_batches(
    sentences: Sequence[str], tokenizer: PreTrainedTokenizerBase, *, batch_size: int, max_length: int, pad_to: int = 0
) -> list[MaskedBatch]:
    """Mask every word of the sentences once, over seven passes; one-token words count.

    Args:
        sentences: plain sentences.
        tokenizer: the base's tokenizer.
        batch_size: rows of a forward pass.
        max_length: longer sentences are cut to this many tokens.
        pad_to: length of every batch; 0: its longest row.

    Returns:
        Batches over all passes; empty when no word of the sentences is one token of the base.
    """
    rows: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    encoded = tokenizer(list(sentences), truncation=True, max_length=max_length)
    for i, ids in enumerate(encoded["input_ids"]):
        labels = np.asarray(ids, dtype=np.int64)
        words = [-1 if word is None else word for word in encoded.word_ids(i)]
        spans = _find_words(sentences[i], encoded, i, words)
        for start in range(PROBE_PASSES):
            masked, is_counted = labels.copy(), np.zeros(len(labels), dtype=bool)
            for span in spans[start::PROBE_PASSES]:
                masked[span] = tokenizer.mask_token_id
                is_counted[span] = len(span) == 1 and labels[span[0]] != tokenizer.unk_token_id
            if is_counted.any():
                rows.append((masked, labels, is_counted))
    rows.sort(key=lambda row: len(row[0]))
    groups = [rows[i : i + batch_size] for i in range(0, len(rows), batch_size)]
    batches = []
    for group in groups:
        columns = [[row[i] for row in group] for i in range(3)]
        batches.append(pad_batch(columns[0], columns[1], columns[2], tokenizer.pad_token_id, pad_to))
    return batches


def _find_words(sentence: str, encoded: object, row: int, words: Sequence[int]) -> list[list[int]]:
    """Token places of every word that has a letter or digit, in order."""
    spans: dict[int, list[int]] = {}
    for place, word in enumerate(words):
        if word >= 0:
            spans.setdefault(word, []).append(place)
    kept = []
    for word, places in spans.items():
        characters = encoded.word_to_chars(row, word)  # type: ignore[attr-defined]
        if any(each.isalnum() for each in sentence[characters.start : characters.end]):
            kept.append(places)
    return kept


def read_probe(path: str | Path = "") -> list[str]:
    """Read the sentences of the general probe, one a line.

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
        raise CorpusError(f"--train.general_probe {str(source)!r} has no sentence; give one a line.")
    return sentences


def evaluate(engine: Engine, batches: Sequence[MaskedBatch]) -> Scores:
    """Score a fixed set of batches; collective, every rank gives the same list and takes its share.

    Every rank runs the same number of forwards (ZeRO-3 would wait for ever otherwise): a rank without a batch of its
    own repeats one at weight zero.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    totals = torch.zeros(3, dtype=torch.float64)
    for first in range(0, len(batches), world_size):
        own = first + rank
        batch = batches[min(own, len(batches) - 1)]
        if own >= len(batches):
            batch = replace(batch, weights=torch.zeros_like(batch.weights))
        totals += torch.tensor(engine.evaluate(batch), dtype=torch.float64)
    totals = totals.to(engine.device)
    dist.all_reduce(totals)
    loss, correct, count = totals.tolist()
    if not count:
        return Scores(math.nan, math.nan, 0)
    return Scores(loss / count, correct / count, int(count))
