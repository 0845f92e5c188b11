"""What a run says of itself in words and numbers: before it starts, of its corpus, and in summary.json at its end."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from domext_ray.config.pretrain import PretrainConfig
from domext_ray.corpus.manifest import SPLITS, Manifest
from domext_ray.corpus.texts.sources import Sources
from domext_ray.errors import RunError
from domext_ray.export.folder import read_export_record
from domext_ray.files import NUMBER, Kind, read_json
from domext_ray.model.counts import ParameterCounts
from domext_ray.options.build import dump_yaml
from domext_ray.options.places import hide_places
from domext_ray.report.forecast import Forecast, describe_forecast
from domext_ray.report.parts import measure_parts
from domext_ray.runs.events import measure_times
from domext_ray.runs.losses import DOMAIN, MLM, TRAIN, find_losses, find_run_losses
from domext_ray.runs.run_directory import RunPaths, describe_continuation, read_config
from domext_ray.storage import Place, Where, write_json
from domext_ray.training.checkpoint import find_latest, find_tensors_sha256, list_steps
from domext_ray.training.metrics import read_metrics
from domext_ray.training.router import read_records

LISTED_FILES = 20
_MEASURED: Kind = (int, float, type(None))
_EXPECTED: dict[str, Kind] = {
    **{f"train.{name}": int for name in ("steps", "tokens")},
    **{f"train.{name}": NUMBER for name in ("tokens_per_second", "data_wait_frac", "wall_seconds")},
    **{f"parameters.{name}": NUMBER for name in ("trainable", "trainable_frac")},
}


def describe_sources(sources: Sources, paths: RunPaths) -> str:
    """Return what a dry run of the preparation prints: the files and their size."""
    files = {file.path: file.size for task in sources.tasks for file in task.files}
    lines = [f"  {size / 1e6:>12,.2f} MB  {path}" for path, size in list(files.items())[:LISTED_FILES]]
    if len(files) > LISTED_FILES:
        lines.append(f"  … and {len(files) - LISTED_FILES:,} more")
    return "\n".join(
        [
            f"corpus: {len(files):,} files, {sources.num_bytes / 1e6:,.2f} MB, {len(sources.tasks):,} read tasks",
            *lines,
            f"folder of prepared corpora: {paths.corpora}",
            "dry run: nothing was started",
        ]
    )


def describe_manifest(manifest: Manifest) -> str:
    """Return the table of a prepared corpus: rows and tokens by split, documents, what was dropped and why."""
    lines = [f"{'split':<10}{'shards':>8}{'rows':>14}{'tokens':>16}"]
    for split in SPLITS:
        records, num_rows, num_tokens = manifest.records(split), manifest.num_rows(split), manifest.num_tokens(split)
        lines.append(f"{split:<10}{len(records):>8,}{num_rows:>14,}{num_tokens:>16,}")
    dropped = ", ".join(f"{number:,} {reason}" for reason, number in sorted(manifest.dropped.items()))
    lines += [f"documents: {manifest.num_documents:,}", f"dropped: {dropped or 'none'}", f"folder: {manifest.folder}"]
    return "\n".join(lines)


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


def measure_run(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of a run before and after, as far as it is: the first evaluation and the newest one.

    Args:
        records: lines of metrics.jsonl.

    Returns:
        "domain" and "general" (after is None while only the start was evaluated), "evaluation" (what they were measured
        on), of a mixture "parts", once a step was trained "train", and of a run with a router "routed": "domain" and
        "general" at its end, where the router sends each row to the domain or to the base.
    """
    names = find_run_losses(records)
    steps = [each for each in records if find_losses(each, TRAIN)]
    evaluated = [each for each in records if find_losses(each, DOMAIN)]
    before = evaluated[0] if evaluated else {}
    after = evaluated[-1] if evaluated and evaluated[-1]["step"] else {}

    def pair(name: str) -> dict[str, float | None]:
        return {"before": before.get(f"eval/{name}"), "after": after.get(f"eval/{name}")}

    figures = (names.loss, names.accuracy, "bits_per_character", "word_bits_per_character")
    sizes = ("domain_tokens", "domain_characters", "general_words")
    measured: dict[str, Any] = {
        "domain": {name: pair(f"domain_{name}") for name in figures},
        "general": {"mlm_accuracy": pair("general_mlm_accuracy")},
        "evaluation": {name: (after or before).get(f"eval/{name}", 0) for name in sizes},
    }
    if any(f"eval/routed_domain_{name}" in after for name in figures):
        measured["routed"] = {
            "domain": {name: after.get(f"eval/routed_domain_{name}") for name in figures},
            "general": {"mlm_accuracy": after.get("eval/routed_general_mlm_accuracy")},
        }
    if parts := measure_parts(records):
        measured["parts"] = parts
    if steps:
        last = steps[-1]
        seconds = last["time/seconds"]
        measured["train"] = {
            "steps": last["step"],
            "tokens": last["train/tokens"],
            "tokens_per_second": last["train/tokens"] / seconds,
            "data_wait_frac": sum(each["data/wait_seconds"] for each in steps) / seconds,
            "wall_seconds": seconds,
            **_measure_speed(steps),
        }
    return measured


_SPEED = {
    "gigaflops_per_second": "throughput/gigaflops_per_second",
    "product_share": "throughput/product_share",
    "mfu": "throughput/mfu",
}


def _measure_speed(steps: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Medians over the steps that say how fast they computed, and the most memory."""
    found = {name: [each[key] for each in steps if key in each] for name, key in _SPEED.items()}
    speed = {name: statistics.median(values) for name, values in found.items() if values}
    peaks = [each["memory/peak_mb"] for each in steps if "memory/peak_mb" in each]
    return speed | ({"peak_memory_mb": max(peaks)} if peaks else {})


def write_summary(where: Where, config: PretrainConfig, counts: ParameterCounts, manifest: Manifest) -> dict[str, Any]:
    """Write summary.json from the metrics of a run and return it."""
    run_dir = Place(where)
    records = read_metrics(run_dir / "metrics.jsonl")
    measured = measure_run(records)
    if "train" not in measured or find_latest(run_dir / "checkpoints") is None:
        raise RunError(f"{run_dir} has no trained step to summarise; run the job again.")
    router = read_records(run_dir).get(config.method.domain)
    summary = {
        "parameters": {
            "total": counts.total,
            "trainable": counts.trainable,
            "trainable_frac": counts.trainable_frac,
            **({"decoder": counts.decoder} if counts.decoder else {}),
        },
        **measured,
        "corpus": {
            "rows": manifest.num_rows("train"),
            "tokens": manifest.num_tokens("train"),
            "dropped": manifest.dropped,
        },
        **({"router": asdict(router)} if router else {}),
        "method": asdict(config.method),
        "base": hide_places(config.base),
    }
    write_json(run_dir / "summary.json", summary)
    return summary


def add_times(run_dir: Where) -> dict[str, float]:
    """Put the seconds of each stage of a run's newest job into its summary.json, and return them by `events.STAGES`."""
    path = Place(run_dir) / "summary.json"
    times = measure_times(run_dir)
    write_json(path, {**read_summary(path), "job_seconds": times})
    return times


def read_summary(where: Where) -> dict[str, Any]:
    """Read a run's summary.json.

    Raises:
        RunError: it is missing or damaged.
    """
    path = Place(where)
    if not path.is_file():
        raise RunError(f"{path} is missing; a run writes it when training ends: run the job again.")
    remedy = "delete it and run the job again, which writes it anew"
    domain = read_json(path, remedy).get("domain")
    names = (find_losses(domain) if isinstance(domain, dict) else None) or MLM
    figures = [f"domain.{each}" for each in (names.loss, names.accuracy, "bits_per_character")]
    measured = {
        f"{name}.{when}": _MEASURED for name in (*figures, "general.mlm_accuracy") for when in ("before", "after")
    }
    return read_json(path, remedy, _EXPECTED | measured)


def is_finished(where: Where, config: PretrainConfig) -> bool:
    """Whether a run has reached one of its limits, and all that it leaves is there and of its newest checkpoint.

    Raises:
        RunError: its summary.json is damaged.
    """
    run_dir = Place(where)
    summary = run_dir / "summary.json"
    if not (summary.is_file() and (run_dir / "report.html").is_file() and (run_dir / "export").exists()):
        return False
    try:
        read_config(run_dir, PretrainConfig)
    except RunError:  # going on writes it anew
        return False
    done, limits = read_summary(summary)["train"], config.train
    has_reached_limit = (
        0 < limits.max_steps <= done["steps"]
        or 0 < limits.max_tokens <= done["tokens"]
        or 0 < limits.max_seconds <= done["wall_seconds"]
    )
    return has_reached_limit and _is_exported(run_dir, done["steps"])


def _is_exported(run_dir: Place, step: int) -> bool:
    """Whether a run's export is of its newest checkpoint, at the step of its summary: it is what a job writes last."""
    record = read_export_record(run_dir / "export")
    if record is None:
        return False
    newest = max(list_steps(run_dir / "checkpoints"), default=step)  # none: they were deleted to save space
    return newest == record.step == step and record.checkpoint_sha256 == (
        find_tensors_sha256(run_dir / "checkpoints", step) or record.checkpoint_sha256
    )


def describe_end(run_dir: Where, config: PretrainConfig) -> str:
    """Return what to say when there is nothing left to do, and how it could go on."""
    steps, horizon = read_summary(Place(run_dir) / "summary.json")["train"]["steps"], config.optim.decay_steps
    if steps < horizon:
        more = f"a larger --train.max_steps, max_tokens or max_seconds goes on, up to step {horizon:,}"
    else:
        more = describe_continuation(config, run_dir)
    return (
        f"the run in {run_dir} has reached its limit; nothing is left to do ({more}; another --run.name starts anew)."
    )
