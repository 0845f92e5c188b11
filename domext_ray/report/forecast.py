"""What a run will take, before it starts: rows, steps, epochs, hours and disk.

Enters: a configuration and its model. Leaves: a `Forecast`, which a dry run prints. Rows are estimated from
a sample of the text, hours from a rate that is given or measured here; nothing is prepared, and Ray is not started.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import psutil

from domext_ray.config.options.build import dump_yaml
from domext_ray.config.pretrain import RunOptions, SettledConfig
from domext_ray.files import ASSETS
from domext_ray.model.spec import ModelSpec
from domext_ray.progress import format_seconds
from domext_ray.runtime.machine import find_free_disk, find_free_memory, is_cluster
from domext_ray.text.corpus.estimate import (
    RESEMBLANCE,
    SHINGLE_WORDS,
    NearDuplicates,
    RowEstimate,
    count_near_duplicates,
    estimate_rows,
)
from domext_ray.text.corpus.sampler import count_rows
from domext_ray.text.corpus.shards import make_settings
from domext_ray.text.corpus.unknown import describe_unknown, find_unknown
from domext_ray.text.data.names import SHIPPED_BASE
from domext_ray.text.data.sample import Sample
from domext_ray.text.vocabulary.tokenizer import load_tokenizer
from domext_ray.training.cost import StepCost, estimate_memory, make_dry_run_model, measure_step_cost
from domext_ray.training.evaluate import read_probe
from domext_ray.training.phases import count_limited_steps, count_phase_steps, make_stages
from domext_ray.training.run import Plan
from domext_ray.training.writing import estimate_written

LOAD_SECONDS, MAX_LOAD = 0.5, 0.3
"""So long the work of others is watched before a step is timed; a greater share of the processors is told."""
BYTES_PER_VALUE = 4  # checkpoints and exports are fp32
TENSORS_PER_PARAMETER = 3  # a checkpoint holds a parameter and its two moments


@dataclass(frozen=True)
class TextForecast:
    """What a run is expected to read of one of its texts over all length phases, and the bytes of it prepared."""

    title: str
    num_rows: int
    num_tokens: int
    num_epochs: float
    num_bytes: int


@dataclass(frozen=True)
class Forecast:
    """What a run is expected to take."""

    estimates: tuple[RowEstimate | None, ...]  # the domain's, by length phase; None: they cannot be estimated
    texts: tuple[TextForecast, ...] = ()  # the domain's first; empty: not known without rows
    num_steps: int = 0  # until the first limit; 0: not known
    rate: StepCost = StepCost(0.0, 0.0)  # of all workers together
    origin: str = ""  # where the rate is from, or why there is none
    seconds: float = 0.0  # training time; 0: not known
    checkpoint_bytes: int = 0
    export_bytes: int = 0
    near_duplicates: NearDuplicates | None = None  # in the sample; None: not known
    unknown: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # in the sample, by a text's title

    @property
    def corpus_bytes(self) -> int:
        """Of the prepared texts, as far as they are known."""
        own = sum(estimate.num_bytes for estimate in self.estimates if estimate is not None)
        return own + sum(text.num_bytes for text in self.texts[1:])

    @property
    def num_bytes(self) -> int:
        """Of all that the run leaves."""
        return self.corpus_bytes + self.checkpoint_bytes + self.export_bytes


def forecast_run(plan: Plan, samples: Sequence[Sample | None]) -> str:
    """Return what a dry run prints of a run, given a sample of each of its texts; its model is timed for a moment."""
    model = make_dry_run_model(plan.config, plan.spec)
    forecast = make_forecast(plan.config, plan.spec, samples, lambda: measure_step_cost(model))
    return describe_plan(plan, estimate_memory(model), forecast)


def make_forecast(
    config: SettledConfig, spec: ModelSpec, samples: Sequence[Sample | None], measure: Callable[[], StepCost]
) -> Forecast:
    """Estimate what a run will take.

    Without a base, words are still to be learned, and rows are those of the base that ships. A sample is None of text
    that the base is going to write. `measure`, of one worker, is called unless `train.tokens_per_second` is given.
    """
    base, counts = spec.base, spec.counts
    tokenizer = base.tokenizer if base else load_tokenizer(ASSETS / SHIPPED_BASE)
    pairs = config.objective.next_sentence

    def estimate(sample: Sample | None, length: int) -> RowEstimate | None:
        if sample is None:
            return estimate_written(length)
        return estimate_rows(sample, make_settings(tokenizer, sample.prepare, length, pairs))

    estimates = [[estimate(sample, length) for length in config.train.lengths] for sample in samples]
    num_steps, texts, seconds = 0, list[TextForecast](), 0.0
    known = [rows for rows in estimates[0] if rows is not None]
    rate, origin = _find_rate(config, measure, known[0] if known else None)
    if len(known) == len(estimates[0]):
        num_steps = count_limited_steps(config, [(rows.num_rows, rows.num_tokens) for rows in known])
        config = config.with_horizon(config.optim.decay_steps or num_steps)
        texts = _count_read(config, num_steps, estimates)
        num_tokens, limit = sum(text.num_tokens for text in texts), config.train.max_seconds
        seconds = num_tokens / rate.tokens_per_second if rate.tokens_per_second else 0.0
        if limit and seconds > limit:
            num_steps, seconds = int(num_steps * limit / seconds), limit
            texts = _count_read(config, num_steps, estimates)
    counted = zip(config.texts, (own[0].unknown if own[0] and base else {} for own in estimates), strict=True)
    return Forecast(
        tuple(estimates[0]),
        tuple(texts),
        num_steps,
        rate,
        origin,
        seconds,
        checkpoint_bytes=counts.trainable * BYTES_PER_VALUE * TENSORS_PER_PARAMETER * config.run.keep_checkpoints,
        export_bytes=counts.total * BYTES_PER_VALUE,
        near_duplicates=count_near_duplicates(samples[0]) if samples[0] is not None else None,
        unknown={text.title: find_unknown(tokens, config.prepare_for(text)) for text, tokens in counted if tokens},
    )


def _find_rate(config: RunOptions, measure: Callable[[], StepCost], rows: RowEstimate | None) -> tuple[StepCost, str]:
    """The rate of all workers together, as it is given or measured, and where it is from.

    Full rows are measured. A row with padding has fewer tokens, and takes as long where padding is computed, too.
    """
    if config.train.tokens_per_second:
        return StepCost(0.0, config.train.tokens_per_second), "--train.tokens_per_second"
    origin = "measured here"
    is_timed = config.scale.use_gpu is not True and not is_cluster()
    if is_timed and (load := psutil.cpu_percent(LOAD_SECONDS) / 100) > MAX_LOAD:
        origin += f", beside other work that took {load:.0%} of the processors: alone it is faster"
    measured = measure()
    if not measured.tokens_per_second:
        return measured, "the cluster trains, not this machine" if is_cluster() else "no GPU is here to measure on"
    rate = measured.tokens_per_second * (config.scale.most_workers if config.scale.use_gpu is True else 1)
    if rows is not None:
        rate *= min(1.0, rows.num_tokens / (rows.num_rows * config.train.seq_length))
    return replace(measured, tokens_per_second=rate), origin


def _count_read(
    config: SettledConfig, num_steps: int, estimates: Sequence[Sequence[RowEstimate | None]]
) -> list[TextForecast]:
    """Count what a run's first steps read of each text, given its estimates by phase; one without them is left out."""
    rows_by_phase, first_step = [], 0
    for steps in count_phase_steps(config, num_steps):
        rows_by_phase.append(count_rows(make_stages(config, first_step), steps, config.train.global_batch_size))
        first_step += steps
    texts = []
    for text, own, rows in zip(config.texts, estimates, zip(*rows_by_phase, strict=True), strict=True):
        known = [estimate for estimate in own if estimate is not None]
        if len(known) == len(own):
            pairs = list(zip(known, rows, strict=True))
            num_tokens = sum(round(number * estimate.num_tokens / estimate.num_rows) for estimate, number in pairs)
            num_epochs = sum(number / estimate.num_rows for estimate, number in pairs)
            num_bytes = sum(estimate.num_bytes for estimate in known)
            texts.append(TextForecast(text.title, sum(rows), num_tokens, num_epochs, num_bytes))
    return texts


def describe_forecast(forecast: Forecast, config: RunOptions) -> str:
    """Return the lines of a dry run."""
    lines = []
    for estimate, length in zip(forecast.estimates, config.train.lengths, strict=False):
        rows = "not estimated: no sample of the text makes a row quickly (domext prepare corpus counts them)"
        if estimate is not None:
            share = f"estimated from {estimate.sampled_frac:.0%} of the text"
            if config.vocab.extends_base and config.base != "none":
                share += " without new words, which make fewer"
            rows = f"{estimate.num_rows:,} of {config.prepare.describe_length(length)} ({share})"
        lines.append(("training rows", rows))
    for title, own in forecast.unknown.items():
        without = ", without new words" if config.vocab.extends_base else ""
        lines.append((f"unknown, {title}", f"{describe_unknown(own)} (in this sample{without})"))
    if found := forecast.near_duplicates:
        found_text = (
            f"{found.num_similar:,} of {found.num_held_out:,} held-out documents share {RESEMBLANCE:.0%} of their runs "
            f"of {SHINGLE_WORDS} words with one of {found.num_train:,} training documents (in this sample)"
        )
        lines.append(("near-duplicates", found_text))
    if forecast.texts:
        read = [
            (text.title, f"{text.num_rows:,} rows, {text.num_tokens:,} tokens, {text.num_epochs:.2f} epochs")
            for text in forecast.texts
        ]
        num_tokens = sum(text.num_tokens for text in forecast.texts)
        steps = f"{forecast.num_steps:,}, {forecast.texts[0].num_epochs:.2f} epochs, {num_tokens:,} tokens"
        lines += [("steps", steps), *(read if config.parts else []), *_describe_time(forecast)]
        lines.append(("evaluations", _describe_evaluations(config)))
    sizes = {
        "prepared corpus": forecast.corpus_bytes,
        "checkpoints": forecast.checkpoint_bytes,
        "export": forecast.export_bytes,
    }
    lines.append(("disk", ", ".join(f"{size / 1e6:,.0f} MB {name}" for name, size in sizes.items() if size)))
    return "\n".join(["expected:", *(f"  {name:<22}{text}" for name, text in lines)])


def _describe_time(forecast: Forecast) -> list[tuple[str, str]]:
    """The operations of a token, and what they take."""
    rate, per_token, lines = forecast.rate.tokens_per_second, forecast.rate.flops_per_token, []
    if per_token:
        done = f", {rate * per_token / 1e9:,.0f} GFLOP/s ({forecast.origin})" if rate else ""
        lines.append(("operations", f"{per_token / 1e6:,.1f} MFLOP per token, forward and backward{done}"))
    time = f"not known: {forecast.origin}; give --train.tokens_per_second"
    if rate:
        daily = f"{rate * 86_400 / 1e6:,.0f} million tokens per day"
        time = f"{format_seconds(forecast.seconds)} at {rate:,.0f} tokens/s ({forecast.origin}), {daily}"
    return [*lines, ("training time", time)]


def _describe_evaluations(config: RunOptions) -> str:
    """When a run evaluates, and what: on a CPU the first takes minutes, before any step."""
    every, num_sentences = config.train.evaluate_every, len(read_probe(config.train.general_probe))
    when = f"after every {every} steps" if isinstance(every, int) else f"every {every}"
    return (
        f"at the start, {when} and at the end, beside the training time: {config.train.eval_rows:,} held-out rows "
        f"(--train.eval_rows), and {num_sentences:,} sentences, each once per word (--train.general_probe)"
    )


def describe_plan(plan: Plan, memory: Mapping[str, int], forecast: Forecast) -> str:
    """Return what a dry run prints: whether the run fits, and from what that follows.

    With `--dry_run full` the resolved configuration follows, as YAML that `--config` reads.
    """
    config, paths, counts = plan.config, plan.paths, plan.spec.counts
    corpora = "" if paths.run.is_local else f"folder of prepared corpora: {paths.corpora}\n"
    held = {**{name.replace("_", " "): value for name, value in memory.items() if value}, "sum": sum(memory.values())}
    # Whether a cluster has GPUs is known once the job is there.
    device = ", on a CPU (--scale.use_gpu true: on a GPU)" if config.scale.use_gpu == "auto" else ""
    parts = "\n".join(f"  {name:<22}{value / 2**20:>10,.1f} MiB" for name, value in held.items())
    return (
        f"{_describe_answer(plan, held['sum'], forecast)}\n\n"
        f"base: {config.base}\n"
        f"run directory: {paths.run}\n{corpora}"
        f"parameters: {counts.total:,} in all, {counts.trainable:,} trainable "
        f"({counts.trainable_frac:.2%} of base + extension)\n"
        f"memory per rank when a step needs most, without Python and its libraries{device}:\n{parts}\n"
        f"{describe_forecast(forecast, config)}\n"
        + (f"\n{dump_yaml(config)}\n" if config.dry_run == "full" else "all options: --dry_run full\n")
        + "dry run: nothing was started"
    )


def _describe_answer(plan: Plan, memory: int, forecast: Forecast) -> str:
    """Whether a run fits here, how long it takes, and how much it holds; what other machines have is not known here."""
    config, paths = plan.config, plan.paths
    workers, disk = config.scale.most_workers, forecast.num_bytes
    takes = f"{forecast.num_steps:,} steps" if forecast.num_steps else "steps that the text decides"
    takes += f" in {format_seconds(forecast.seconds)}" if forecast.seconds else ", for a time that is not known"
    if config.scale.use_gpu is True or is_cluster():
        needs = [(f"{_show_size(memory)} of memory for each worker", 0, 0)]
    else:
        shared = f" for {workers} workers" if workers > 1 else ""
        needs = [(f"{_show_size(memory * workers)} of memory{shared}", memory * workers, find_free_memory())]
    room = find_free_disk(str(paths.run)) if paths.run.is_local else 0
    needs.append((f"{_show_size(disk)} of disk", disk, room))
    shown = [f"{what} ({_show_size(free)} are free)" if free else what for what, _, free in needs]
    verdict = "too large for this machine" if any(need > free > 0 for _, need, free in needs) else "fits"
    return f"{verdict}: {takes}, {' and '.join(shown)}"


def _show_size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:,.0f} MB"
