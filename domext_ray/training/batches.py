"""Prepared corpora -> this rank's masked micro batches, step after step.

Enters: the length phases of a run, each with its corpus and, where there is replay, general text beside it. Leaves:
micro batches from any step on, the same whatever came before.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
from transformers import PreTrainedTokenizerBase

from domext_ray.config.pretrain import PretrainConfig
from domext_ray.corpus.mixture import EPOCH, PART, stream_mixture
from domext_ray.corpus.stream import RankBatch, stream_batches
from domext_ray.training.objective import MaskedBatch, MaskedRows, Masker, join_rows
from domext_ray.training.phases import Phase, seed_replay


class BatchMaker:
    """Makes the micro batches of one rank.

    Args:
        config: the run.
        phases: its length phases.
        tokenizer: the run's tokenizer.
        replay_tokenizer: the one that the general text was prepared with.
    """

    def __init__(
        self,
        config: PretrainConfig,
        phases: list[Phase],
        tokenizer: PreTrainedTokenizerBase,
        replay_tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        self.phases = phases
        self.maskers = (
            Masker(tokenizer, config.objective, config.seed),
            Masker(replay_tokenizer, config.objective, seed_replay(config.seed)),
        )
        self.is_kept = (False, config.objective.keep != "none")

    def make(self, step: int, *, rank: int, world_size: int) -> Iterator[tuple[list[MaskedBatch], int]]:
        """Yield this rank's micro batches of every step from one on, and the tokens in them."""
        for phase in self.phases:
            if step >= phase.end_step:
                continue
            for each in _read(phase, step - phase.first_step, rank, world_size):
                masked = self._mask(each)
                yield self.maskers[0].collate(masked, phase.micro_batch_size, phase.pad_to), int(masked.lengths.sum())
                step += 1
                if step >= phase.end_step:
                    break

    def _mask(self, batch: RankBatch) -> MaskedRows:
        """Mask a batch's rows, each part of a mixture with its own draws."""
        if PART not in batch.rows.column_names:
            return self.maskers[0].mask(batch.rows, batch.epoch)
        parts, epochs = (batch.rows.column(name).to_numpy() for name in (PART, EPOCH))
        rows, places, is_kept = list[MaskedRows](), list[np.ndarray](), list[bool]()
        for part, epoch in sorted({*zip(parts.tolist(), epochs.tolist(), strict=True)}):
            own = np.flatnonzero((parts == part) & (epochs == epoch))
            rows.append(self.maskers[part].mask(batch.rows.take(pa.array(own)), epoch))
            places.append(own)
            is_kept.append(self.is_kept[part])
        return join_rows(rows, places, is_kept if any(self.is_kept) else None)


def _read(phase: Phase, batch: int, rank: int, world_size: int) -> Iterator[RankBatch]:
    """A phase's batches from one on."""
    if phase.mixture is not None and phase.replay is not None:
        parts = (phase.manifest, phase.replay)
        return stream_mixture(parts, phase.mixture, rank=rank, world_size=world_size, batch=batch)
    epoch, within = divmod(batch, phase.plan.batches_per_epoch)
    return stream_batches(phase.manifest, phase.plan, rank=rank, world_size=world_size, epoch=epoch, batch=within)
