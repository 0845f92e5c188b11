"""Prepared corpora -> this rank's masked micro batches, step after step.

Enters: the length phases of a run, each with its corpus and the texts beside it. Leaves:
micro batches from any step on, the same whatever came before; equally many on every rank.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedTokenizerBase

from domext_ray.config.pretrain import PretrainConfig, count_passes
from domext_ray.corpus.sampler import share_rows
from domext_ray.corpus.stream import BatchReader, stream_batches
from domext_ray.corpus.views import make_masker
from domext_ray.training.objective import to_batch
from domext_ray.training.phases import Phase, seed_parts


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
        self.config, self.phases = config, phases
        is_general = [text.keep for text in config.texts]
        tokenizers = [general_tokenizer if each else tokenizer for each in is_general]
        self.maskers = tuple(
            make_masker(each, config.objective, seed, packed=config.prepare.packed)
            for each, seed in zip(tokenizers, seed_parts(config), strict=True)
        )
        self.is_distilled = tuple(is_general) if any(is_general) and config.objective.keep != "none" else ()

    def make(self, step: int, *, rank: int, world_size: int) -> Iterator[tuple[list[Any], list[int]]]:
        """Yield this rank's micro batches of every step from one on, and the tokens in them, by part of a mixture."""
        for phase in self.phases:
            if step >= phase.end_step:
                continue
            passes = count_passes(self.config, phase.micro_batch_size, world_size)
            reader = self.open(phase, rank=rank, world_size=world_size)
            end = min(phase.end_step, self.config.train.max_steps or sys.maxsize)
            for arrays, tokens in stream_batches(reader, step - phase.first_step, end - phase.first_step):
                batches = [to_batch(each) for each in arrays]
                # A rank with a row less may have a pass less, for which the others would wait for ever at ZeRO-3.
                batches += [batches[-1].without_weight()] * (passes - len(batches))
                yield batches, tokens
                step += 1

    def open(self, phase: Phase, *, rank: int, world_size: int) -> BatchReader:
        """Return what reads a rank's share of the batches of a phase."""
        sampler = phase.sampler
        corpora = tuple(manifest.paths("train") for manifest in (phase.manifest, *phase.beside))
        rows = share_rows(sampler.global_batch_size, rank, world_size, self.config.objective.inseparable_rows)
        return BatchReader(corpora, sampler, self.maskers, self.is_distilled, rows, phase.micro_batch_size)
