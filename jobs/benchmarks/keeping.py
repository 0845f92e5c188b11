"""What keeping to the base's predictions costs: a training step with general rows that ask the base, and without.

The rows, the model and the predicted tokens are the same on both sides; on one of them a quarter of the rows ask the
base what it predicts.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import numpy as np
import torch
from benchmarks.as_worker import configure_process
from benchmarks.output import Measured, Record, write_records
from benchmarks.steps import SECONDS, VOCAB_SIZE, describe_case, make_model
from benchmarks.timing import MASK_PROB, Seconds, make_step
from torch import Tensor, nn

from domext_ray.training.losses import MaskedLoss
from domext_ray.training.objective import MaskedBatch, pad_batch
from domext_ray.training.step import move_batch

KEPT_FRAC = 0.25


def run_keeping(options: argparse.Namespace) -> None:
    """Time both sides in turn at every length; print and write the medians and their ratio."""
    configure_process(options)
    device, bf16 = torch.device(options.device), options.precision == "bf16"
    records = []
    print(f"{'length':>6} {'rows':>5} {'without s':>10} {'keeping s':>10} {'ratio':>6}")
    for length in options.lengths:
        rows = max(4, options.tokens // length)
        sides = {keeps: _make_side(options, rows, length, device, keeps=keeps, bf16=bf16) for keeps in (False, True)}
        for _ in range(options.warmup):
            for step in sides.values():
                step()
        times = [{keeps: step().wall for keeps, step in sides.items()} for _ in range(options.repeats)]
        without, keeping = (statistics.median(each[keeps] for each in times) for keeps in (False, True))
        ratio = statistics.median(each[True] / each[False] for each in times)
        print(f"{length:>6} {rows:>5} {without:>10.4f} {keeping:>10.4f} {ratio:>6.2f}")
        names = {"without": False, "keeping": True}
        results = [Measured(name, SECONDS, [each[keeps] for each in times]) for name, keeps in names.items()]
        figures = {"ratio": ratio, "kept_frac": KEPT_FRAC}
        records.append(Record("keep", describe_case(options, length, rows), results, figures))
    write_records(options, records, device)


def _make_side(
    options: argparse.Namespace, rows: int, length: int, device: torch.device, *, keeps: bool, bf16: bool
) -> Callable[[], Seconds]:
    """Return a function that times one step of an AF Adapter of BERT-base width."""
    model: nn.Module = make_model(options, "af")
    loss = MaskedLoss(model, device, bf16=bf16, teacher=model, num_words=VOCAB_SIZE).train()
    batch = _make_batch(rows, length, keeps=keeps)
    tensors = move_batch(batch, device)

    def compute(_: object) -> Tensor:
        words, _, kept, *_ = loss(**tensors)
        return words / batch.num_masked + kept / max(batch.num_distilled, 1)

    return make_step(model, compute, batch, bf16=False)  # the loss has autocast of its own


def _make_batch(rows: int, length: int, *, keeps: bool) -> MaskedBatch:
    """Full rows of random tokens; with `keeps` every fourth is general."""
    draw = np.random.default_rng(length)
    ids = draw.integers(1000, VOCAB_SIZE, (rows, length))
    chosen = draw.random((rows, length)) < MASK_PROB
    is_distilled = np.arange(rows) % round(1 / KEPT_FRAC) == 0 if keeps else None
    return pad_batch(list(ids), list(ids), list(chosen), pad_id=0, pad_to=length, is_distilled=is_distilled)
