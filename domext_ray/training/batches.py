"""Prepared corpora -> this rank's masked micro batches, step after step.

Enters: the length phases of a run, each with its corpus and the texts beside it. Leaves:
micro batches from any step on, the same whatever came before.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
from transformers import PreTrainedTokenizerBase

from domext_ray.config.pretrain import PretrainConfig
from domext_ray.corpus.mixture import EPOCH, PART, stream_mixture
from domext_ray.corpus.stream import RankBatch, stream_batches
from domext_ray.training.objective import MaskedRows, join_rows
from domext_ray.training.phases import Phase, seed_parts
from domext_ray.training.views import make_masker


class BatchMaker:
    """Makes the micro batches of one rank.

    Args:
        config: the run.
        phases: its length phases.
        tokenizer: the run's tokenizer.
        general_tokenizer: the one that general text was prepared with.
    """

    def __init__(
        self,
        config: PretrainConfig,
        phases: list[Phase],
        tokenizer: PreTrainedTokenizerBase,
        general_tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        self.phases = phases
        is_general = [False, *(part.keep for part in config.parts)]
        tokenizers = [general_tokenizer if each else tokenizer for each in is_general]
        seeds = seed_parts(config)
        self.maskers = [
            make_masker(each, config.objective, seed, packed=config.prepare.packed)
            for each, seed in zip(tokenizers, seeds, strict=True)
        ]
        self.is_kept = [each and config.objective.keep != "none" for each in is_general]

    def make(self, step: int, *, rank: int, world_size: int) -> Iterator[tuple[list[Any], list[int]]]:
        """Yield this rank's micro batches of every step from one on, and the tokens in them, by part of a mixture."""
        for phase in self.phases:
            if step >= phase.end_step:
                continue
            for each in _read(phase, step - phase.first_step, rank, world_size):
                masked = self._mask(each)
                tokens = masked.count_tokens(len(self.maskers))
                yield self.maskers[0].collate(masked, phase.micro_batch_size), tokens
                step += 1
                if step >= phase.end_step:
                    break

    def _mask(self, batch: RankBatch) -> Any:
        """Mask a batch's rows, each part of a mixture with its own draws; or make views of them."""
        if PART not in batch.rows.column_names:
            return self.maskers[0].mask(batch.rows, batch.epoch)
        parts, epochs = (batch.rows.column(name).to_numpy() for name in (PART, EPOCH))
        rows, places, numbers = list[MaskedRows](), list[np.ndarray](), list[int]()
        for part, epoch in sorted({*zip(parts.tolist(), epochs.tolist(), strict=True)}):
            own = np.flatnonzero((parts == part) & (epochs == epoch))
            rows.append(self.maskers[part].mask(batch.rows.take(pa.array(own)), epoch))
            places.append(own)
            numbers.append(part)
        is_kept = [self.is_kept[part] for part in numbers] if any(self.is_kept) else None
        return join_rows(rows, places, numbers, is_kept)


def _read(phase: Phase, batch: int, rank: int, world_size: int) -> Iterator[RankBatch]:
    """A phase's batches from one on."""
    if phase.mixture is not None:
        manifests = (phase.manifest, *phase.beside)
        return stream_mixture(manifests, phase.mixture, rank=rank, world_size=world_size, batch=batch)
    epoch, within = divmod(batch, phase.plan.batches_per_epoch)
    return stream_batches(phase.manifest, phase.plan, rank=rank, world_size=world_size, epoch=epoch, batch=within)
