"""The length phases of a run: which steps have rows of which length, and the canonical order of each phase's rows."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from domext_ray.config import (
    PretrainConfig,
    resolve_first_long_step,
    resolve_long_micro_batch_size,
    resolve_micro_batch_size,
)
from domext_ray.corpus.manifest import Manifest
from domext_ray.corpus.stream import BatchPlan


@dataclass(frozen=True)
class Phase:
    """Some steps of a run whose rows have one length.

    Args:
        manifest: the corpus, prepared for that length.
        plan: the canonical order of its rows.
        first_step, end_step: 0-based, the end not included.
        micro_batch_size: rows of a forward pass.
        pad_to: length of every micro batch; 0: its longest row.
    """

    manifest: Manifest
    plan: BatchPlan
    first_step: int
    end_step: int
    micro_batch_size: int
    pad_to: int


def make_phases(config: PretrainConfig, manifests: Sequence[Manifest]) -> list[Phase]:
    """Return the length phases of a run (BERT appendix A.2: 90 % of the steps on short rows, then 10 % on long ones).

    Args:
        config: the run, its horizon resolved: phases are parts of the schedule, whatever the limits.
        manifests: the corpus prepared for each phase's length, in order.
    """
    sizes = [resolve_micro_batch_size(config), resolve_long_micro_batch_size(config)]
    lengths = [config.train.seq_length, config.train.long_seq_length]
    starts = [0, resolve_first_long_step(config)] if len(manifests) > 1 else [0]
    ends: list[int] = [*starts[1:], sys.maxsize]
    return [
        Phase(manifest, make_plan(config, manifest), start, end, size, length if config.engine.compile else 0)
        for manifest, start, end, size, length in zip(manifests, starts, ends, sizes, lengths, strict=False)
    ]


def make_plan(config: PretrainConfig, manifest: Manifest) -> BatchPlan:
    """Return the canonical order of a prepared corpus for this run."""
    rows = tuple(each.num_rows for each in manifest.records("train"))
    return BatchPlan(rows, config.seed, config.train.global_batch_size)
