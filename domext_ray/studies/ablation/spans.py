"""What the layers' parts of an adapter are worth: removed from a fine-tuned model without retraining, span by span.

Enters: a fine-tuning run whose model carries an adapter (bottlenecks, heads or FFN units). Leaves: OUTPUT/spans.json,
the set's metric on dev without the adapter's parts in every contiguous span of layers, and OUTPUT/spans, from which
the same command goes on. Houlsby et al. section 3.6 and figure 6.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from domext_ray.config.finetune import AblateConfig
from domext_ray.errors import ConfigError, RunError
from domext_ray.families.metrics.scores import Score, compare_scores, over_clusters
from domext_ray.families.rows import Row
from domext_ray.families.task import ONLY_STAGE
from domext_ray.finetuning.finetuned import FinetunedModel, rebuild_finetuned
from domext_ray.finetuning.training import Fitted
from domext_ray.intervals import RESAMPLING_SEED, Estimate
from domext_ray.model.base import hash_tensors
from domext_ray.model.domext.configuration_domext import DomextConfig
from domext_ray.model.domext.layers_domext import DeltaProjection, Layer, NormShift
from domext_ray.progress import StatusLine, format_seconds
from domext_ray.runs.run_directory import describe_other
from domext_ray.runtime.trials import Ledger, Trial, run_here
from domext_ray.storage import Place, write_json

SPANS = "spans"
"""Folder of the spans' records, and name of the file with all of them."""

Span = tuple[int, int]
"""First and last layer, counted from 0."""


@dataclass(frozen=True)
class SpanScore:
    """What a model scores on dev without an adapter's parts in some layers."""

    value: float
    difference: Estimate  # to the whole model, paired over dev's examples


@dataclass(frozen=True)
class SpanWork:
    """A model whose layers' parts are to be removed."""

    finetuned: FinetunedModel  # the model and its run
    fitted: Fitted  # what predicts
    adapter: str  # whose parts are removed
    layers: Span  # first and last that have such parts
    remove_norms: bool  # the adapter's LayerNorm shifts go with its outputs
    num_resamples: int  # of an interval
    folder: Place  # of results

    @property
    def spans(self) -> list[Span]:
        """Every contiguous span, single layers first."""
        first, last = self.layers
        spans = [(a, b) for a in range(first, last + 1) for b in range(a, last + 1)]
        return sorted(spans, key=lambda span: (span[1] - span[0], span[0]))


@dataclass(frozen=True)
class SpanStudy:
    """Every span's score on dev."""

    run: str  # name of the fine-tuning run
    metric: str
    adapter: str  # whose parts were removed
    remove_norms: bool  # whether LayerNorm shifts were, too
    num_examples: int
    whole: float  # the metric of the model as it is
    majority: float  # that of the trivial baseline
    layers: Span  # first and last
    spans: dict[Span, SpanScore]

    def relative_change(self, span: Span) -> float:
        """Return how much of the whole model's metric a span's removal changes, in per cent."""
        return 100.0 * self.spans[span].difference.value / self.whole


@contextlib.contextmanager
def remove_parts(model: nn.Module, adapter: str, layers: Collection[int], *, norms: bool) -> Iterator[None]:
    """Take an adapter's parts in some layers out of a model, and put them back afterwards, bit for bit.

    Their output projections (a bottleneck's W_up and b_up, those of heads and FFN units) are set to 0, so that they add
    exactly 0; with `norms` so are the adapter's shifts of these layers' LayerNorms.
    """
    kinds = (DeltaProjection, NormShift) if norms else (DeltaProjection,)
    kept: list[tuple[nn.Parameter, Tensor]] = []
    for index in sorted(layers):
        for part in _find_parts(model, adapter, index):
            for module in part.modules():
                if isinstance(module, kinds):
                    kept += [(param, param.detach().clone()) for param in module.parameters(recurse=False)]
    try:
        with torch.no_grad():
            for param, _ in kept:
                param.zero_()
        yield
    finally:
        with torch.no_grad():
            for param, before in kept:
                param.copy_(before)


def _find_parts(model: Any, adapter: str, index: int) -> list[nn.Module]:
    layer: Layer = model.bert.encoder.layer[index]
    places = (layer.attention.adapters, layer.adapters, layer.attention.output.adapters, layer.output.adapters)
    return [place[adapter] for place in places if adapter in place]


def choose_adapter(config: DomextConfig, method_adapter: str, wanted: str) -> str:
    """Return the adapter whose parts are removed: `wanted`, or that which fine-tuning made, or the only one."""
    names = ", ".join(config.adapters) or "none"
    if not config.adapters:
        raise ConfigError(
            "--finetuned is a run whose model has no adapter; give one that was fine-tuned with bottlenecks, or from a "
            "model with heads, FFN units or bottlenecks."
        )
    chosen = wanted or method_adapter or (names if len(config.adapters) == 1 else "")
    if chosen not in config.adapters:
        raise ConfigError(f"--adapter is {wanted!r}; it must be one of the model's adapters ({names}).")
    if config.active_adapters is not None and chosen not in config.active_adapters:
        active = ", ".join(config.active_adapters) or "none"
        raise ConfigError(f"--adapter is {chosen!r}, which takes no part in the model; active are {active}.")
    return chosen


def prepare_spans(config: AblateConfig) -> SpanWork:
    """Rebuild the fine-tuned model and choose the adapter; nothing is removed yet."""
    folder = Place(config.finetuned).resolve()
    finetuned = rebuild_finetuned(folder, _choose_device(config), data=config.data, model=config.model)
    if finetuned.task.is_chain:
        raise ConfigError(
            f"--finetuned {config.finetuned!r} is a run of {finetuned.task.family}, which takes "
            f"{len(finetuned.task.stages)} models; give a run of a task of one model."
        )
    fitted = finetuned.fitted[ONLY_STAGE]
    method, shape = finetuned.config.method, fitted.model.config
    adapter = choose_adapter(shape, method.adapter if method.has_adapter else "", config.adapter)
    sizes = shape.adapters[adapter]
    output = Place(config.output) if config.output else folder / "ablation"
    return SpanWork(
        finetuned,
        fitted,
        adapter,
        (sizes.first_layer, sizes.last_layer),
        config.remove_norms,
        config.num_resamples,
        output,
    )


def _choose_device(config: AblateConfig) -> torch.device:
    has_gpu = torch.cuda.is_available()
    if config.scale.use_gpu is True and not has_gpu:
        raise ConfigError("--scale.use_gpu true needs 1 GPU and this machine has 0; leave --scale.use_gpu at auto.")
    if config.scale.use_gpu and has_gpu:
        return torch.device("cuda", 0)
    if config.scale.cpus:
        torch.set_num_threads(max(1, int(config.scale.cpus)))
    return torch.device("cpu")


def describe_spans(work: SpanWork) -> str:
    """Return what a study would do, in one sentence."""
    first, last = work.layers
    return (
        f"{work.finetuned.folder.name}: {len(work.spans)} spans of the layers {first} to {last}, without the "
        f"parts of the adapter {work.adapter!r}{' and its LayerNorm shifts' if work.remove_norms else ''}, scored by "
        f"{work.finetuned.task.metric} on {len(work.finetuned.task.data.dev):,} dev examples; into {work.folder}"
    )


def study_spans(work: SpanWork) -> SpanStudy:
    """Score dev without the adapter's parts in every span of layers; spans that were scored before are kept."""
    identity, ledger = _identify(work), Ledger(work.folder / SPANS)
    for outcome in ledger.list():
        if differing := describe_other(outcome.config, identity, free=("first", "last")):
            raise RunError(f"{ledger.place} belongs to another study ({'; '.join(differing)}); give another --output.")
    trials = [Trial(f"{first}-{last}", {**identity, "first": first, "last": last}) for first, last in work.spans]
    waiting = [outcome.trial for outcome in ledger.read_all(trials) if not outcome.has_ended]
    scorer = _Scorer(work)
    (whole,) = run_here([Trial("whole", identity)], lambda trial: scorer.score_whole(), ledger)
    run_here(_show_progress(waiting, len(trials) - len(waiting)), scorer.measure, ledger)
    figures, spans = whole.reached, [outcome.reached for outcome in ledger.read_all(trials)]
    write_json(work.folder / f"{SPANS}.json", {"identity": identity, **figures, "spans": spans})
    return SpanStudy(
        figures["run"],
        identity["metric"],
        work.adapter,
        work.remove_norms,
        figures["examples"],
        figures["whole"],
        figures["majority"],
        work.layers,
        {
            (span["first"], span["last"]): SpanScore(span["value"], Estimate(span["difference"], *span["interval"]))
            for span in spans
        },
    )


def _identify(work: SpanWork) -> dict[str, Any]:
    """What results depend on."""
    tensors = {name: param.detach().float().cpu() for name, param in work.fitted.model.named_parameters()}
    return {
        "model_sha256": hash_tensors(tensors),
        "data_sha256": work.finetuned.task.data.sha256,
        "metric": work.finetuned.task.metric,
        "adapter": work.adapter,
        "remove_norms": work.remove_norms,
        "num_resamples": work.num_resamples,
    }


class _Scorer:
    """Dev's rows and the whole model's score, made when they are first asked for."""

    def __init__(self, work: SpanWork) -> None:
        self.work, self.task, self.dev = work, work.fitted.task, work.fitted.task.data.dev

    @functools.cached_property
    def rows(self) -> Sequence[Row]:
        return self.task.encode(self.dev, is_training=False)

    @functools.cached_property
    def whole(self) -> Score:
        return self._score()

    def _score(self) -> Score:
        return over_clusters(self.task.score(self.dev, self.work.fitted.predict_rows(self.dev, self.rows)), self.dev)

    def score_whole(self) -> dict[str, Any]:
        """Return what is known of the model as it is."""
        folder, metric, value = self.work.finetuned.folder, self.task.metric, self.whole.get(self.task.metric)
        if value <= 0.0:
            raise RunError(
                f"{folder} has {metric} {value:.3f} on dev, so nothing can be lost; give a run that has learned its "
                "task."
            )
        majority = self.task.score(self.dev, self.task.predict_baseline(self.dev)).get(metric)
        figures = {"split": "dev", "examples": len(self.dev), "whole": value, "majority": majority}
        return {"run": folder.name, **figures}

    def measure(self, trial: Trial) -> dict[str, Any]:
        """Score dev without a span; the paired difference rests on the same resamples for all."""
        first, last, work, metric = trial.config["first"], trial.config["last"], self.work, self.task.metric
        with remove_parts(work.fitted.model, work.adapter, range(first, last + 1), norms=work.remove_norms):
            score = self._score()
        drawn = {"num_resamples": work.num_resamples, "seed": RESAMPLING_SEED}
        paired = compare_scores(self.whole, score, [metric], **drawn)[metric]
        return {
            "first": first,
            "last": last,
            "value": score.get(metric),
            "difference": paired.value,
            "relative_change": paired.value / self.whole.get(metric),
            "interval": [paired.low, paired.high],
        }


def _show_progress(spans: Sequence[Trial], num_kept: int) -> Iterator[Trial]:
    """Yield spans and show how many are done and how long the others will take."""
    line = StatusLine(is_due=False)
    if num_kept:
        line.keep(f"{num_kept} of {num_kept + len(spans)} spans were scored before.")
    for i, span in enumerate(spans):
        yield span
        left = line.seconds / (i + 1) * (len(spans) - i - 1)
        text = f"{num_kept + i + 1} of {num_kept + len(spans)} spans  {format_seconds(left)} left"
        if i + 1 == len(spans):
            line.keep(text)
        else:
            line.show(text)
