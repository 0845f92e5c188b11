"""What the layers' parts of an adapter are worth: removed from a fine-tuned model without retraining, span by span.

Enters: a fine-tuning run whose model carries an adapter (bottlenecks, heads or FFN units). Leaves: OUTPUT/spans.json,
the set's metric on dev without the adapter's parts in every contiguous span of layers; what is there is kept.
Houlsby et al. section 3.6 and figure 6.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from domext_ray.config.finetune import AblateConfig, FinetuneConfig
from domext_ray.downstream.finetune.finetuned import FinetunedModel, rebuild_finetuned
from domext_ray.downstream.finetune.training import Fitted, predict_rows
from domext_ray.downstream.tasks.task import ONLY_STAGE, Row
from domext_ray.errors import ConfigError, RunError
from domext_ray.intervals import RESAMPLING_SEED
from domext_ray.labelled.metrics.scores import Score, compare_scores, over_clusters
from domext_ray.model.base import hash_tensors
from domext_ray.model.domext.configuration_domext import DomextConfig
from domext_ray.model.domext.layers_domext import DeltaProjection, Layer, NormShift
from domext_ray.options.build import describe_difference
from domext_ray.progress import StatusLine, format_seconds
from domext_ray.storage import write_json

SPANS = "spans.json"

Span = tuple[int, int]
"""First and last layer, counted from 0."""


@dataclass(frozen=True)
class SpanScore:
    """What a model scores without an adapter's parts in some layers.

    Args:
        value: the set's metric on dev.
        difference: `value` minus the whole model's.
        low: lower end of the difference's 95 % interval (paired bootstrap over dev's examples).
        high: upper end.
    """

    value: float
    difference: float
    low: float
    high: float


@dataclass(frozen=True)
class SpanWork:
    """A model whose layers' parts are to be removed.

    Args:
        finetuned: the model and its run.
        fitted: what predicts.
        adapter: the adapter whose parts are removed.
        layers: first and last layer that have such parts.
        remove_norms: the adapter's LayerNorm shifts go with its outputs.
        num_resamples: bootstrap samples of an interval.
        folder: where results go.
    """

    finetuned: FinetunedModel
    fitted: Fitted
    adapter: str
    layers: Span
    remove_norms: bool
    num_resamples: int
    folder: Path

    @property
    def spans(self) -> list[Span]:
        """Every contiguous span, single layers first."""
        first, last = self.layers
        spans = [(a, b) for a in range(first, last + 1) for b in range(a, last + 1)]
        return sorted(spans, key=lambda span: (span[1] - span[0], span[0]))


@dataclass(frozen=True)
class SpanStudy:
    """Every span's score.

    Args:
        run: name of the fine-tuning run.
        metric: the set's figure.
        adapter: whose parts were removed.
        remove_norms: whether LayerNorm shifts were.
        num_examples: dev's.
        whole: the metric of the model as it is.
        majority: that of the trivial baseline.
        layers: first and last layer.
        spans: scores by span.
    """

    run: str
    metric: str
    adapter: str
    remove_norms: bool
    num_examples: int
    whole: float
    majority: float
    layers: Span
    spans: dict[Span, SpanScore]

    def relative_change(self, span: Span) -> float:
        """Return how much of the whole model's metric a span's removal changes, in per cent."""
        return 100.0 * self.spans[span].difference / self.whole


@contextlib.contextmanager
def remove_parts(model: nn.Module, adapter: str, layers: Collection[int], *, norms: bool) -> Iterator[None]:
    """Take an adapter's parts in some layers out of a model, and put them back afterwards, bit for bit.

    Their output projections (a bottleneck's W_up and b_up, those of heads and FFN units) are set to 0, so that they add
    exactly 0.

    Args:
        model: a model with a task's head; its parameters are whole.
        adapter: the adapter.
        layers: places of the layers, from 0.
        norms: the adapter's shifts of these layers' LayerNorms are set to 0 too; else they stay.
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
    """Return the adapter whose parts are removed.

    Args:
        config: the fine-tuned model's.
        method_adapter: the adapter that fine-tuning made; empty: none.
        wanted: `AblateConfig.adapter`.

    Raises:
        ConfigError: the model has no adapter, not this one, several and none is named, or it does not take part.
    """
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
    """Rebuild the fine-tuned model and choose the adapter; nothing is removed yet.

    Args:
        config: the study (`finetuned`, `adapter`, `remove_norms`, `output`, `scale`).

    Raises:
        DomextError: the run has not ended, its model has no such adapter, or its task takes several models.
    """
    folder = Path(config.finetuned).expanduser()
    model = "" if config.model == FinetuneConfig.model else config.model
    finetuned = rebuild_finetuned(folder, _choose_device(config), data=config.data, model=model)
    if finetuned.task.is_chain:
        raise ConfigError(
            f"--finetuned {config.finetuned!r} is a run of {finetuned.loaded.family}, which takes "
            f"{len(finetuned.task.stages)} models; give a run of a task of one model."
        )
    fitted = finetuned.fitted[ONLY_STAGE]
    method, shape = finetuned.config.method, fitted.model.config
    adapter = choose_adapter(shape, method.adapter if method.has_adapter else "", config.adapter)
    sizes = shape.adapters[adapter]
    output = Path(config.output).expanduser() if config.output else folder / "ablation"
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
        f"{work.finetuned.folder.resolve().name}: {len(work.spans)} spans of the layers {first} to {last}, without the "
        f"parts of the adapter {work.adapter!r}{' and its LayerNorm shifts' if work.remove_norms else ''}, scored by "
        f"{work.finetuned.task.metric} on {len(work.finetuned.task.data.dev):,} dev examples; into {work.folder}"
    )


def study_spans(work: SpanWork) -> SpanStudy:
    """Score dev without the adapter's parts in every span of layers; spans that were scored before are kept.

    Args:
        work: the model and what to remove.

    Raises:
        RunError: the results that are there are another study's, or the model as it is scores 0 or less.
    """
    identity = _identify(work)
    record = _read_record(work.folder / SPANS, identity)
    kept = {(each["first"], each["last"]): each for each in record.get("spans", [])}
    waiting = [span for span in work.spans if span not in kept]
    if waiting:
        task, dev = work.fitted.task, work.fitted.task.data.dev
        rows = task.encode(dev, is_training=False)
        whole = _score(work.fitted, rows)
        value = whole.get(task.metric)
        if value <= 0.0:
            raise RunError(
                f"{work.finetuned.folder} has {task.metric} {value:.3f} on dev, so nothing can be lost; give a run "
                "that has learned its task."
            )
        record = {
            "identity": identity,
            "run": work.finetuned.folder.resolve().name,
            "split": "dev",
            "examples": len(dev),
            "whole": value,
            "majority": task.score(dev, task.predict_baseline(dev)).get(task.metric),
        }
        work.folder.mkdir(parents=True, exist_ok=True)
        for span in _show_progress(waiting, len(kept)):
            kept[span] = _measure(work, rows, whole, span)
            record["spans"] = [kept[each] for each in work.spans if each in kept]
            write_json(work.folder / SPANS, record)
    scores = {
        span: SpanScore(each["value"], each["difference"], *each["interval"])
        for span, each in kept.items()
        if span in work.spans
    }
    return SpanStudy(
        record["run"],
        identity["metric"],
        work.adapter,
        work.remove_norms,
        record["examples"],
        record["whole"],
        record["majority"],
        work.layers,
        scores,
    )


def _identify(work: SpanWork) -> dict[str, Any]:
    """What results depend on."""
    tensors = {name: each.detach().float().cpu() for name, each in work.fitted.model.named_parameters()}
    return {
        "model_sha256": hash_tensors(tensors),
        "data_sha256": work.finetuned.loaded.sha256,
        "metric": work.finetuned.task.metric,
        "adapter": work.adapter,
        "remove_norms": work.remove_norms,
        "num_resamples": work.num_resamples,
    }


def _read_record(path: Path, identity: Mapping[str, Any]) -> dict[str, Any]:
    """Results that are there already; none is an empty record."""
    if not path.exists():
        return {}
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        differing = describe_difference(record["identity"], dict(identity))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(f"{path} is not what this study writes; delete it or give another --output.") from error
    if differing:
        raise RunError(f"{path} belongs to another study ({'; '.join(differing)}); give another --output.")
    return record


def _score(fitted: Fitted, rows: Sequence[Row]) -> Score:
    dev = fitted.task.data.dev
    return over_clusters(fitted.task.score(dev, predict_rows(fitted, dev, rows)), dev)


def _measure(work: SpanWork, rows: Sequence[Row], whole: Score, span: Span) -> dict[str, Any]:
    """Score dev without a span, as spans.json has it; the paired difference rests on the same resamples for all."""
    first, last = span
    metric = work.fitted.task.metric
    with remove_parts(work.fitted.model, work.adapter, range(first, last + 1), norms=work.remove_norms):
        score = _score(work.fitted, rows)
    paired = compare_scores(whole, score, [metric], num_resamples=work.num_resamples, seed=RESAMPLING_SEED)[metric]
    return {
        "first": first,
        "last": last,
        "value": score.get(metric),
        "difference": paired.value,
        "relative_change": paired.value / whole.get(metric),
        "interval": [paired.low, paired.high],
    }


def _show_progress(spans: Sequence[Span], num_kept: int) -> Iterator[Span]:
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
