"""What a run gained and lost with less of what its method added: figures over the scale, from 0, the base, to 1.

Enters: a run whose prepared text is still there. Leaves: a `ScaleCurve`, of the sets that its evaluations score
(`training.evaluate`), and the largest scale at which general accuracy has hardly suffered, on straight lines between
the scales that were measured.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from domext_ray.config.jobs import ForgettingConfig
from domext_ray.config.pretrain import SettledConfig, resolve_micro_batch_sizes
from domext_ray.errors import ConfigError, CorpusError
from domext_ray.model.build import prepare_for_device, scale_extensions, store_base
from domext_ray.models.source import Run, open_model
from domext_ray.runs.run_directory import read_config
from domext_ray.runtime.device import TRAINING, as_worker
from domext_ray.storage import Place
from domext_ray.studies.forgetting.forgetting import AskedModel
from domext_ray.text.corpus.manifest import Manifest, find_shard_fault, read_manifest
from domext_ray.training.evaluate import Evaluations, LoneEvaluator, Scores, build_evaluations, evaluate, measure_bits
from domext_ray.training.losses import MaskedLoss, count_chunks
from domext_ray.training.passages import EvalSet
from domext_ray.training.run import find_corpora, find_domain_text
from domext_ray.training.start import rebuild_run

MAX_LOST = 0.003
"""Share of general words that may be lost at the scale that is marked."""


@dataclass(frozen=True)
class ScaleCurve:
    """Figures over the scale of what a method adds."""

    scales: tuple[float, ...]  # rising, from 0 to 1
    bits: tuple[float, ...]  # per character of held-out domain text
    accuracies: tuple[float, ...]  # on general words, shares

    @property
    def gained(self) -> tuple[float, ...]:
        """Bits per character below those at 0."""
        return tuple(self.bits[0] - bits for bits in self.bits)

    @property
    def lost(self) -> tuple[float, ...]:
        """Accuracy below that at 0, shares."""
        return tuple(self.accuracies[0] - accuracy for accuracy in self.accuracies)

    @property
    def marked(self) -> float:
        """The largest scale that loses no more than `MAX_LOST`, on straight lines between the scales; in hundredths."""
        points = [*zip(self.scales, self.lost, strict=True)]
        if points[-1][1] <= MAX_LOST:
            return points[-1][0]
        last = max(i for i, (_, lost) in enumerate(points) if lost <= MAX_LOST)  # at 0 nothing is lost
        (low, before), (high, after) = points[last : last + 2]
        reached = low + (high - low) * (MAX_LOST - before) / (after - before)
        return math.floor(100 * reached + 1e-9) / 100

    def find(self, scale: float) -> tuple[float, float]:
        """Return what is gained and lost at a scale between the ends, on the same lines."""
        gained, lost = (float(np.interp(scale, self.scales, values)) for values in (self.gained, self.lost))
        return gained, lost

    def describe(self) -> str:
        """Say in one sentence where the mark is, and what a model has there."""
        scale, whole = self.marked, self.gained[-1]
        gained, lost = self.find(scale)
        kept = f" ({gained / whole:.0%} of the gain)" if whole > 0 else ""
        start = f"At scale {scale:.2f}, {100 * lost:.1f} points of general accuracy are lost"
        return f"{start} and {gained:.3f} bits per character gained{kept}"


@dataclass(frozen=True)
class MeasuredRun:
    """A run of which a curve is measured."""

    name: str  # what the user called it
    folder: Place
    sets: Evaluations  # what its evaluations score


def find_runs(config: ForgettingConfig, models: Sequence[AskedModel]) -> list[MeasuredRun]:
    """Find the runs that can be measured on text of their own, and say of the other models why they cannot."""
    runs: list[MeasuredRun] = []
    tokenizers = {model.place: model.tokenizer for model in models if model.scale != 1}
    for name, place in config.named_models:
        if place not in tokenizers:
            continue
        folder = Place(place).resolve()
        found = _find_sets(folder, tokenizers[place])
        if isinstance(found, Evaluations):
            runs.append(MeasuredRun(name, folder, found))
        elif config.has_corpus:
            print(f"note: {name} {found}, so that only general text is asked for at each scale.", flush=True)
        else:
            raise ConfigError(
                f"--corpus is empty, so that runs are measured on held-out text of their own, and {name} of --models "
                f"{found}; give general text, or leave the model out."
            )
    return runs


def _find_sets(folder: Place, tokenizer: Any) -> Evaluations | str:
    """Return what a run's evaluations score; or why there is nothing, as what follows its name."""
    if not isinstance(open_model(str(folder.local())), Run):
        return "is no run's directory"
    config = read_config(folder, SettledConfig)
    if config.objective.kind != "masked":
        return f"was trained with --objective.kind {config.objective.kind}, which asks for no masked word"
    if (probe := config.train.general_probe) and not Path(probe).is_file():
        return f"has no general probe at {probe} any more"
    manifest = _find_text(folder, config)
    if manifest is None:
        return f"has no prepared text in {find_corpora(folder, config)} any more"
    sets = build_evaluations(config, manifest, tokenizer, (), resolve_micro_batch_sizes(config)[0])
    is_asked = len(sets.general.rows) and sets.characters.num_chars
    return sets if is_asked else "has no word to ask for in its held-out text, or in the sentences of its general probe"


def _find_text(folder: Place, config: SettledConfig) -> Manifest | None:
    """The prepared text that a run's evaluations are of; None: it has gone."""
    place = find_domain_text(folder, config)
    if place is None:
        return None
    manifest = read_manifest(place)
    if fault := find_shard_fault(manifest):
        raise CorpusError(f"{fault}; the run's own command prepares it anew.")
    return manifest


def measure_curve(run: MeasuredRun, scales: Sequence[float], device: torch.device) -> ScaleCurve:
    """Evaluate a run's newest checkpoint as the run itself does, at some scales and at 0 and 1."""
    rebuilt = rebuild_run(run.folder)
    model, engine, method = rebuilt.model, rebuilt.config.engine, rebuilt.config.method
    network, bf16 = cast(nn.Module, model), engine.uses_bf16
    if engine.has_narrow_base:
        store_base(model, torch.bfloat16)
    prepare_for_device(model, device, bf16=bf16)
    rows = resolve_micro_batch_sizes(rebuilt.config)
    num_chunks = count_chunks(rebuilt.config, cast(Any, model).config.vocab_size, rows)
    evaluator = LoneEvaluator(MaskedLoss(network.to(device), device, bf16=bf16, num_chunks=num_chunks), device)

    def score(asked: EvalSet) -> Scores:
        return Scores.add_up(evaluate(evaluator, asked))

    points: list[tuple[float, float, float]] = []
    with as_worker(TRAINING, uses_fp32=not bf16):
        for scale in (0.0, *sorted(scales), 1.0):
            scale_extensions(network, method, scale)
            characters = run.sets.characters
            points.append((scale, measure_bits(score(characters), characters), score(run.sets.general).accuracy))
            print(f"{run.name}: evaluated at scale {scale:g}", file=sys.stderr, flush=True)
    return ScaleCurve(*map(tuple, zip(*points, strict=True)))
