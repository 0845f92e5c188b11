"""What a run will take, before it starts: rows, steps, epochs, hours and disk.

Enters: a configuration, its base and its counts. Leaves: a `Forecast`, which a dry run prints. Rows are estimated from
a sample of the text, hours from a rate that is given or measured here; nothing is prepared, and Ray is not started.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from domext_ray.config.pretrain import PretrainConfig
from domext_ray.corpus.estimate import RowEstimate, estimate_rows
from domext_ray.corpus.near_duplicates import RESEMBLANCE, SHINGLE_WORDS, NearDuplicates, count_near_duplicates
from domext_ray.corpus.sampler import count_rows
from domext_ray.corpus.shards import make_settings
from domext_ray.data.sources import Sources
from domext_ray.model.base import Base, load_base
from domext_ray.model.base_folder import SHIPPED_BASE
from domext_ray.model.counts import ParameterCounts
from domext_ray.options.build import dump_yaml
from domext_ray.progress import format_seconds
from domext_ray.runs.run_directory import RunPaths
from domext_ray.training.cost import StepCost
from domext_ray.training.phases import count_limited_steps, count_phase_steps, make_stages
from domext_ray.training.writing import estimate_written
from domext_ray.vocabulary.tokenizer import load_tokenizer

BYTES_PER_VALUE = 4  # checkpoints and exports are fp32
TENSORS_PER_PARAMETER = 3  # a checkpoint holds a parameter and its two moments


@dataclass(frozen=True)
class PartForecast:
    """What a run is expected to read of one of its texts, over all length phases.

    Args:
        title: what lines of text call it.
        num_rows: rows read.
        num_tokens: tokens in these.
        num_epochs: passes over its training rows.
        num_bytes: bytes that it takes prepared.
    """

    title: str
    num_rows: int
    num_tokens: int
    num_epochs: float
    num_bytes: int


@dataclass(frozen=True)
class Forecast:
    """What a run is expected to take.

    Args:
        estimates: training rows by length phase; None where they cannot be estimated.
        num_steps: steps until the first limit; 0: not known without rows.
        num_epochs: passes over the corpus in these.
        num_tokens: tokens read in these.
        tokens_per_second: of all workers together; 0: not known.
        is_measured: whether that rate was measured here.
        seconds: training time; 0: not known.
        checkpoint_bytes, export_bytes: what the run's directory will hold, beside the prepared corpus.
        parts: of a mixture, what is read of each text; empty: there is one text, or nothing is known.
        flops_per_token: floating-point operations per token, forward and backward; 0: not known.
        near_duplicates: held-out documents of the sample that training text nearly repeats; None: not known.
    """

    estimates: tuple[RowEstimate | None, ...]
    num_steps: int
    num_epochs: float
    num_tokens: int
    tokens_per_second: float
    is_measured: bool
    seconds: float
    checkpoint_bytes: int
    export_bytes: int
    parts: tuple[PartForecast, ...] = ()
    flops_per_token: float = 0.0
    near_duplicates: NearDuplicates | None = None

    @property
    def corpus_bytes(self) -> int:
        """Bytes of the prepared corpora."""
        domain = sum(each.num_bytes for each in self.estimates if each is not None)
        return domain + sum(each.num_bytes for each in self.parts[1:])


def make_forecast(
    config: PretrainConfig,
    base: Base | None,
    sources: Sources,
    counts: ParameterCounts,
    measure: Callable[[], StepCost],
    beside: Sequence[Sources | None] = (),
) -> Forecast:
    """Estimate what a run will take.

    Args:
        config: the run, its method's sizes solved.
        base: its base; None for words and weights that are still to be learned: rows are then those of the words that
            ship.
        sources: its corpus.
        counts: its parameters.
        measure: measures one worker; called unless `train.tokens_per_second` is given.
        beside: the texts of `config.parts`; None: text that the base is going to write.

    Raises:
        CorpusError: the sample that is read is damaged, or lacks the field.
    """
    tokenizer = load_tokenizer((base or load_base(SHIPPED_BASE)).tokenizer_folder)
    pairs = config.objective.next_sentence
    lengths = [each for each in (config.train.seq_length, config.train.long_seq_length) if each]
    own = [config.prepare, *map(config.prepare_for, config.parts)]
    estimates, *others = (
        tuple(
            estimate_rows(each, prepare, make_settings(tokenizer, prepare, length, pairs))
            if each is not None
            else estimate_written(length)
            for length in lengths
        )
        for each, prepare in zip((sources, *beside), own, strict=False)
    )
    rate, flops_per_token, is_measured = config.train.tokens_per_second, 0.0, False
    if not rate:
        measured, num_workers = measure(), config.scale.num_workers
        flops_per_token = measured.flops_per_token
        is_measured = not (config.train.teraflops and flops_per_token)
        rate = measured.tokens_per_second * (num_workers if config.scale.use_gpu is True else 1)
        if not is_measured:
            rate = config.train.teraflops * 1e12 * num_workers / flops_per_token
    known = [each for each in estimates if each is not None]
    num_steps, num_epochs, num_tokens, parts = 0, 0.0, 0, list[PartForecast]()
    if len(known) == len(lengths):
        num_steps = count_limited_steps(config, [(each.num_rows, each.num_tokens) for each in known])
        parts = _forecast_parts(config, num_steps, num_steps, (estimates, *others))
        num_epochs, num_tokens = parts[0].num_epochs, sum(each.num_tokens for each in parts)
    seconds = num_tokens / rate if rate else 0.0
    if config.train.max_seconds and seconds > config.train.max_seconds:
        share = config.train.max_seconds / seconds
        parts = _forecast_parts(config, int(num_steps * share), num_steps, (estimates, *others))
        num_steps, num_epochs, num_tokens = int(num_steps * share), num_epochs * share, int(num_tokens * share)
        seconds = config.train.max_seconds
    trained = (counts.trainable + counts.decoder) * BYTES_PER_VALUE
    return Forecast(
        estimates,
        num_steps,
        num_epochs,
        num_tokens,
        rate,
        is_measured,
        seconds,
        trained * TENSORS_PER_PARAMETER * config.run.keep_checkpoints,
        counts.total * BYTES_PER_VALUE,
        tuple(parts) if config.parts else (),
        flops_per_token,
        count_near_duplicates(sources, config.prepare),
    )


def _forecast_parts(
    config: PretrainConfig, num_steps: int, limit: int, estimates: Sequence[Sequence[RowEstimate | None]]
) -> list[PartForecast]:
    """Count what the first steps of a run read of each text, given its estimates by length phase.

    A text without estimates is left out; `limit`, the run's steps, is its horizon unless there is another.
    """
    config = replace(config, optim=replace(config.optim, decay_steps=config.optim.decay_steps or limit))
    rows_by_phase, first_step = [], 0
    for steps in count_phase_steps(config, num_steps):
        rows_by_phase.append(count_rows(make_stages(config, first_step), steps, config.train.global_batch_size))
        first_step += steps
    parts = []
    titles = ["domain text", *(part.title for part in config.parts)]
    for title, own, rows in zip(titles, estimates, zip(*rows_by_phase, strict=True), strict=True):
        known = [(each, number) for each, number in zip(own, rows, strict=True) if each is not None]
        if len(known) == len(own):
            num_tokens = sum(round(number * each.num_tokens / each.num_rows) for each, number in known)
            num_epochs = sum(number / each.num_rows for each, number in known)
            num_bytes = sum(each.num_bytes for each, _ in known)
            parts.append(PartForecast(title, sum(rows), num_tokens, num_epochs, num_bytes))
    return parts


def describe_forecast(forecast: Forecast, config: PretrainConfig) -> str:
    """Return the lines of a dry run."""
    lines = []
    for estimate, length in zip(
        forecast.estimates, (config.train.seq_length, config.train.long_seq_length), strict=False
    ):
        rows = "not estimated: no sample of the text makes a row quickly (domext prepare counts them)"
        if estimate is not None:
            share = f"estimated from {estimate.sampled_frac:.0%} of the text"
            rows = f"{estimate.num_rows:,} of {config.prepare.describe_length(length)} ({share})"
        lines.append(("training rows", rows))
    if found := forecast.near_duplicates:
        found_text = (
            f"{found.num_similar:,} of {found.num_held_out:,} held-out documents share {RESEMBLANCE:.0%} of their runs "
            f"of {SHINGLE_WORDS} words with one of {found.num_train:,} training documents (in this sample)"
        )
        lines.append(("near-duplicates", found_text))
    if forecast.num_steps:
        steps = f"{forecast.num_steps:,}, {forecast.num_epochs:.2f} epochs, {forecast.num_tokens:,} tokens"
        lines.append(("steps", steps))
        for part in forecast.parts:
            read = f"{part.num_rows:,} rows, {part.num_tokens:,} tokens, {part.num_epochs:.2f} epochs"
            lines.append((part.title, read))
        lines += _describe_time(forecast)
    sizes = {
        "prepared corpus": forecast.corpus_bytes,
        "checkpoints": forecast.checkpoint_bytes,
        "export": forecast.export_bytes,
    }
    lines.append(("disk", ", ".join(f"{size / 1e6:,.0f} MB {name}" for name, size in sizes.items() if size)))
    return "\n".join(["expected:", *(f"  {name:<22}{text}" for name, text in lines)])


def _describe_time(forecast: Forecast) -> list[tuple[str, str]]:
    """The operations of a token, and what they take."""
    rate, per_token = forecast.tokens_per_second, forecast.flops_per_token
    lines, origin = [], "--train.tokens_per_second"
    if per_token:
        origin = "measured here" if forecast.is_measured else "--train.teraflops"
        done = f", {rate * per_token / 1e9:,.0f} GFLOP/s ({origin})" if rate else ""
        lines.append(("operations", f"{per_token / 1e6:,.1f} MFLOP per token, forward and backward{done}"))
    time = "not known: no GPU is here to measure on; give --train.tokens_per_second or --train.teraflops"
    if rate:
        daily = f"{rate * 86_400 / 1e6:,.0f} million tokens per day"
        time = f"{format_seconds(forecast.seconds)} at {rate:,.0f} tokens/s ({origin}), {daily}"
    return [*lines, ("training time", time)]


def describe_plan(
    config: PretrainConfig, paths: RunPaths, counts: ParameterCounts, memory: Mapping[str, int], forecast: Forecast
) -> str:
    """Return what a dry run prints: the resolved configuration, parameter counts, memory per rank, and the forecast.

    Args:
        config: the run.
        paths: its places.
        counts: its parameters.
        memory: bytes of a rank by part.
        forecast: what it will take.
    """
    decoder = f", and {counts.decoder:,} of a decoder, which no export has" if counts.decoder else ""
    corpora = "" if paths.run.is_local else f"folder of prepared corpora: {paths.corpora}\n"
    parts = "\n".join(
        f"  {name.replace('_', ' '):<22}{value / 2**20:>10,.1f} MiB" for name, value in memory.items() if value
    )
    return (
        f"{dump_yaml(config)}\nrun directory: {paths.run}\n{corpora}"
        f"parameters: {counts.total:,} in all, {counts.trainable:,} trainable "
        f"({counts.trainable_frac:.2%} of base + extension){decoder}\n"
        f"memory per rank when a step needs most, without Python and its libraries:\n{parts}\n"
        f"  {'sum':<22}{sum(memory.values()) / 2**20:>10,.1f} MiB\n"
        f"{describe_forecast(forecast, config)}\n"
        "dry run: nothing was started"
    )
