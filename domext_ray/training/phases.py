"""The length phases of a run: which steps have rows of which length, the order of these rows, and their batches.

Enters: a run's prepared texts. Leaves: this rank's masked micro batches, step after step; equally many on every rank.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from domext_ray.config.mixture import GENERAL
from domext_ray.config.pretrain import (
    RunOptions,
    SettledConfig,
    count_passes,
    find_first_long_step,
    resolve_micro_batch_sizes,
)
from domext_ray.text.corpus.batching import SPAN_TOKENS, RowLengths
from domext_ray.text.corpus.manifest import Manifest
from domext_ray.text.corpus.sampler import BLOCK_ROWS, MAX_LANES, Part, Sampler, Stage, share_rows
from domext_ray.text.corpus.stream import BatchReader, stream_batches
from domext_ray.text.corpus.views import make_masker
from domext_ray.text.data.draws import Purpose, hash_counters
from domext_ray.training.objective import to_batch

ORDER = {"version": 1, "max_lanes": MAX_LANES, "block_rows": BLOCK_ROWS, "span_tokens": SPAN_TOKENS}
"""What decides rows and masks beside a run's options: a run records it, and only code with the same goes on with it.
Whoever changes the golden orders and masks of tests/corpus gives another version."""
ADDED_TO_ORDER = {
    "span_tokens": f"words of over {SPAN_TOKENS} tokens (DNA, base64) are masked in spans now, no longer as wholes; if "
    "the text has such words, losses do not compare with those before this start",
}
"""What a run is told whose record lacks a key of `ORDER`: its other rows and masks are what they were."""


FEW_EPOCHS = 0.1
"""Below this a run says how little of its corpus it reads."""


@dataclass(frozen=True)
class Phase:
    """Some steps of a run whose rows have one length."""

    manifest: Manifest  # the corpus, prepared for that length
    sampler: Sampler  # the canonical order of its rows and of those beside it
    first_step: int  # 0-based
    end_step: int  # 0-based, not included
    micro_batch_size: int  # rows of a forward pass
    beside: tuple[Manifest, ...] = ()  # the texts of `config.parts`, prepared for that length

    @property
    def steps_per_epoch(self) -> float:
        """Steps that read the corpus once, while a mixture has the shares that it begins with."""
        own = self.sampler.stages[0].shares[0] * self.sampler.global_batch_size
        return float(self.sampler.rows_per_epoch(0) / own)


def make_phases(config: SettledConfig, texts: Sequence[Sequence[Manifest]], num_workers: int = 0) -> list[Phase]:
    """Return the length phases of a run (BERT appendix A.2: 90 % of the steps on short rows, then 10 % on long ones).

    Phases are parts of the schedule, whatever the limits. With `num_workers` 0, the run has as many as it may have.
    """
    sizes = resolve_micro_batch_sizes(config, num_workers)
    starts = [0, find_first_long_step(config, config.optim.decay_steps)] if len(texts) > 1 else [0]
    ends: list[int] = [*starts[1:], sys.maxsize]
    return [
        Phase(own[0], make_sampler(config, own, start), start, end, size, tuple(own[1:]))
        for own, start, end, size in zip(texts, starts, ends, sizes, strict=False)
    ]


def describe_reading(config: SettledConfig, phases: Sequence[Phase]) -> list[str]:
    """Return what a run says of its texts before it trains, a line each: rows, tokens, epochs."""
    limits, lines, num_epochs = config.train, list[str](), 0.0
    is_open = config.optim.schedule == "wsd" and (limits.max_seconds > 0 or limits.max_tokens > 0)  # steps are no guess
    for phase in phases:
        manifest, sampler = phase.manifest, phase.sampler
        num_steps = max(0, min(limits.max_steps, phase.end_step) - phase.first_step)
        own, *others = sampler.count_epochs(num_steps)
        num_epochs += own
        lines.append(
            f"corpus: {manifest.num_rows('train'):,} rows of {config.prepare.describe_length(manifest.seq_length)}, "
            f"{manifest.num_tokens('train'):,} tokens for training, {manifest.num_rows('held_out'):,} rows held out; "
            f"{num_steps / own if own else phase.steps_per_epoch:,.0f} steps an epoch"
            + (f", {own:.2f} epochs" if not is_open else "")
        )
        num_rows = sampler.rows_before(num_steps)
        for part, beside, read, number in zip(config.parts, phase.beside, others, num_rows[1:], strict=True):
            lines.append(
                f"{part.title}: {beside.num_rows('train'):,} rows, {beside.num_tokens('train'):,} tokens; "
                f"{number / max(sum(num_rows), 1):.0%} of all rows" + (f", {read:.2f} epochs" if not is_open else "")
            )
    if num_epochs < FEW_EPOCHS and not is_open:
        lines.append(
            f"note: {limits.max_steps:,} steps read {num_epochs:.1%} of the corpus; --train.max_steps 0 "
            "--train.epochs 1 reads it once."
        )
    return lines


def count_epochs(phases: Sequence[Phase], step: int) -> list[float]:
    """Return how often a run has read its corpus, and each text beside it, after some steps."""
    read = [phase.sampler.count_epochs(max(0, min(step, phase.end_step) - phase.first_step)) for phase in phases]
    return [sum(epochs) for epochs in zip(*read, strict=True)]


def resolve_max_steps(config: SettledConfig, manifests: Sequence[Manifest]) -> SettledConfig:
    """Put steps in the place of `train.epochs` and, where `train.max_steps` is 0, of `train.max_tokens`.

    `manifests` are the corpus, prepared for each phase's length.
    """
    sizes = [(manifest.num_rows("train"), manifest.num_tokens("train")) for manifest in manifests]
    tokens = 0 if config.train.max_steps else config.train.max_tokens
    counted = replace(config, train=replace(config.train, max_tokens=tokens))
    return config.with_steps(count_limited_steps(counted, sizes))


def count_limited_steps(config: RunOptions, sizes: Sequence[tuple[int, int]]) -> int:
    """Return the steps until the first of `train.max_steps`, `train.epochs` and `train.max_tokens`, not all of them 0.

    `sizes` are the training rows of each length phase, and the tokens in them.
    """
    train = config.train
    limits = [train.max_steps] if train.max_steps else []
    shares = [1.0] if len(sizes) == 1 else [1.0 - train.long_frac, train.long_frac]
    if train.epochs:
        texts = [Sampler((Part("--corpus", (rows,), config.seed),), train.global_batch_size) for rows, _ in sizes]
        epochs_per_step = sum(share * text.count_epochs(1)[0] for share, text in zip(shares, texts, strict=True))
        epochs_per_step *= float(average_shares(config)[0])
        limits.append(round(train.epochs / epochs_per_step))
    if train.max_tokens:
        tokens_per_row = sum(share * tokens / rows for share, (rows, tokens) in zip(shares, sizes, strict=True))
        limits.append(math.ceil(train.max_tokens / tokens_per_row / train.global_batch_size))
    return max(1, min(limits))


def count_phase_steps(config: RunOptions, num_steps: int) -> list[int]:
    """Return the steps of each length phase among a run's first `num_steps`.

    Without `optim.decay_steps`, these are the horizon.
    """
    if not config.train.long_seq_length:
        return [num_steps]
    first = find_first_long_step(config, config.optim.decay_steps or num_steps)
    return [min(num_steps, first), max(0, num_steps - first)]


def make_sampler(config: SettledConfig, manifests: Sequence[Manifest], first_step: int = 0) -> Sampler:
    """Return the canonical order of a prepared corpus and of the texts beside it; batch 0 is `first_step`'s."""
    parts = tuple(
        Part(text.option, tuple(shard.num_rows for shard in own.records("train")), seed)
        for text, own, seed in zip(config.texts, manifests, seed_parts(config), strict=True)
    )
    return Sampler(parts, config.train.global_batch_size, tuple(make_stages(config, first_step)))


def make_stages(config: SettledConfig, first_step: int = 0) -> list[Stage]:
    """Return from which batch on a run's parts have which shares; batch 0 is `first_step`'s."""
    starts = [(round(share * config.optim.decay_steps) - first_step, own) for share, own in config.part_shares]
    ends = [*(start for start, _ in starts[1:]), sys.maxsize]
    return [
        Stage(max(0, start), shares) for (start, shares), end in zip(starts, ends, strict=True) if end > max(0, start)
    ]


def average_shares(config: RunOptions) -> list[Fraction]:
    """Return the shares of all rows that `--corpus` and the texts beside it have over the whole horizon."""
    stages = config.part_shares
    ends = [*(first for first, _ in stages[1:]), Fraction(1)]
    lengths = [end - first for (first, _), end in zip(stages, ends, strict=True)]
    return [
        sum((length * share for length, share in zip(lengths, own, strict=True)), Fraction(0))
        for own in zip(*(shares for _, shares in stages), strict=True)
    ]


def seed_parts(config: RunOptions) -> list[int]:
    """Return the seeds of the order and masks of the corpus and of each text beside it.

    Those of a part of the mixture depend on its name, not on its neighbours.
    """
    seeds = [config.seed]
    for part in config.parts:
        digest = hashlib.sha256(part.name.encode()).digest()[:8]
        purposes = [Purpose.REPLAY] if part.name == GENERAL else [Purpose.PARTS, int.from_bytes(digest, "little") >> 1]
        seeds.append(int(hash_counters(config.seed, *purposes)[0] >> np.uint64(1)))
    return seeds


class BatchMaker:
    """Makes the micro batches of one rank from any step on, the same whatever came before."""

    def __init__(
        self,
        config: SettledConfig,
        phases: list[Phase],
        tokenizer: PreTrainedTokenizerBase,
        general_tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        self.config, self.phases = config, phases
        is_general = [text.keep for text in config.texts]
        self.tokenizers = [general_tokenizer if keep else tokenizer for keep in is_general]
        self.is_kept = tuple(is_general) if any(is_general) and config.objective.keep != "none" else ()

    def make(self, step: int, *, rank: int, world_size: int) -> Iterator[tuple[list[Any], list[int]]]:
        """Yield this rank's micro batches of every step from one on, and the tokens in them, by part of a mixture."""
        for phase in self.phases:
            if step >= phase.end_step:
                continue
            passes = count_passes(self.config, phase.micro_batch_size, world_size)
            reader = self.open(phase, rank=rank, world_size=world_size)
            end = min(phase.end_step, self.config.train.max_steps or sys.maxsize)
            first, last = step - phase.first_step, end - phase.first_step
            for arrays, tokens in stream_batches(reader, first, last, self.config.scale.wait_seconds):
                batches = [to_batch(batch) for batch in arrays]
                # A rank with a row less may have a pass less, for which the others would wait for ever at ZeRO-3.
                batches += [batches[-1].without_weight()] * (passes - len(batches))
                yield batches, tokens
                step += 1

    def open(self, phase: Phase, *, rank: int, world_size: int) -> BatchReader:
        """Return what reads a rank's share of the batches of a phase."""
        sampler = phase.sampler
        corpora = tuple(manifest.shards("train") for manifest in (phase.manifest, *phase.beside))
        objective, engine = self.config.objective, self.config.engine
        rows = share_rows(sampler.global_batch_size, rank, world_size, objective.inseparable_rows)
        lengths = None
        if engine.fixed_shapes:  # of a mixture, as if all rows were as full as those of its fullest text
            means = [
                manifest.num_tokens("train") / manifest.num_rows("train")
                for manifest in (phase.manifest, *phase.beside)
            ]
            lengths = RowLengths(phase.manifest.seq_length, max(means))
        maskers = tuple(
            make_masker(tokenizer, objective, seed, packed=self.config.prepare.packed, lengths=lengths)
            for tokenizer, seed in zip(self.tokenizers, seed_parts(self.config), strict=True)
        )
        return BatchReader(corpora, sampler, maskers, self.is_kept, rows, phase.micro_batch_size)
