"""summary.json: the figures of a run that has ended, for programs and for what compares runs."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from domext_ray.config.pretrain import PretrainConfig
from domext_ray.errors import RunError
from domext_ray.files import NUMBER, Kind, check_values, read_json
from domext_ray.options.places import hide_places
from domext_ray.report.figures import measure_run
from domext_ray.report.origin import read_origin
from domext_ray.runs.events import measure_times
from domext_ray.runs.losses import MLM, find_losses
from domext_ray.storage import Place, Where, write_json
from domext_ray.training.checkpoint import find_latest
from domext_ray.training.metrics import read_metrics
from domext_ray.training.router import read_records

_REMEDY = "delete it and run the job again, which writes it anew"
_MEASURED: Kind = (int, float, type(None))
_EXPECTED: dict[str, Kind] = {
    **{f"train.{name}": int for name in ("steps", "tokens")},
    **{f"train.{name}": NUMBER for name in ("tokens_per_second", "data_wait_frac", "wall_seconds")},
    **{f"parameters.{name}": NUMBER for name in ("trainable", "trainable_frac")},
}


def write_summary(where: Where, config: PretrainConfig) -> dict[str, Any]:
    """Write summary.json from the metrics of a run and its run.json, and return it."""
    run_dir = Place(where)
    measured, origin = measure_run(read_metrics(run_dir / "metrics.jsonl")), read_origin(run_dir)
    if "train" not in measured or find_latest(run_dir / "checkpoints") is None:
        raise RunError(f"{run_dir} has no trained step to summarise; run the job again.")
    router = read_records(run_dir).get(config.method.domain)
    summary = {
        "parameters": {name: value for name, value in origin["parameters"].items() if name != "kinds"},
        **measured,
        "corpus": {name: origin["corpus"][name] for name in ("rows", "tokens", "dropped")},
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
    values = read_json(path, _REMEDY)
    domain = values.get("domain")
    names = (find_losses(domain) if isinstance(domain, dict) else None) or MLM
    figures = [f"domain.{each}" for each in (names.loss, names.accuracy, "bits_per_character")]
    measured = {
        f"{name}.{when}": _MEASURED for name in (*figures, "general.mlm_accuracy") for when in ("before", "after")
    }
    check_values(path, values, "JSON object", _REMEDY, _EXPECTED | measured)
    return values
