"""What a run says of itself for programs: where it comes from, in run.json, and what it reached, in summary.json.

The driver writes the one when training starts and the other when it has ended; the run's page, the index and whatever
compares runs read both. They name no folder and no host.
"""

from __future__ import annotations

import contextlib
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from domext_ray.config.options.submitted import hide_places
from domext_ray.config.pretrain import SettledConfig
from domext_ray.errors import RunError
from domext_ray.files import NUMBER, Kind, check_values, read_json
from domext_ray.model.spec import ModelSpec
from domext_ray.report.figures import describe_times, measure_run
from domext_ray.runs.events import measure_times
from domext_ray.runs.run_directory import RUN, add_versions, read_run, write_config, write_run
from domext_ray.storage import Place, write_json
from domext_ray.text.corpus.unknown import find_unknown
from domext_ray.training.checkpoint import find_latest
from domext_ray.training.metrics import MLM, find_losses, read_metrics
from domext_ray.training.phases import ORDER, Phase, describe_reading, make_phases
from domext_ray.training.router import read_records
from domext_ray.training.run import Run

SUMMARY = "summary.json"
_ORIGIN = {"started": str, "command": str, "commit": str, "parameters": dict, "corpus": dict, "machine": str}
_EXPECTED: dict[str, Kind] = {
    **{f"train.{name}": int for name in ("steps", "tokens")},
    **{f"train.{name}": NUMBER for name in ("tokens_per_second", "data_wait_frac", "wall_seconds")},
    **{f"parameters.{name}": NUMBER for name in ("trainable", "trainable_frac")},
}
_REMEDY = "delete it and run the job again, which writes it anew"
_SECONDS = 5.0
"""Git is given up after so long: its disk may hang."""


def record_start(run: Run) -> None:
    """Write what a run is and where it comes from, before it trains, and say what it reads."""
    run_dir, phases = run.paths.run, make_phases(run.config, run.inputs.texts)
    print(*describe_reading(run.config, phases), sep="\n", flush=True)
    write_config(run_dir, run.config)
    versions = add_versions(run_dir, run.goes_on_from.step if run.goes_on_from else 0)
    write_run(run_dir, identity=run.identity, order=ORDER, versions=versions, origin=describe_origin(run, phases))


def describe_origin(run: Run, phases: Sequence[Phase]) -> dict[str, Any]:
    """Return what run.json says of a start, without paths; the first start's time stays. Ray is there."""
    spec, counts, manifest = run.spec, run.spec.counts, run.inputs.domain
    parameters = {
        "total": counts.total,
        "trainable": counts.trainable,
        "trainable_frac": counts.trainable_frac,
        "kinds": count_trained(spec),
    }
    corpus = {
        "sources": hide_places(run.config.corpus),
        "documents": manifest.num_documents,
        "dropped": manifest.dropped,
        "rows": manifest.num_rows("train"),
        "tokens": manifest.num_tokens("train"),
        "held_out_rows": manifest.num_rows("held_out"),
        "overlaps": list(run.inputs.overlaps),
        "unknown": {
            text.name: find_unknown(own.unknown, run.config.prepare_for(text))
            for text, own in zip(run.config.texts, run.inputs.texts[0], strict=True)
        },
        "phases": [[phase.first_step, phase.end_step, phase.steps_per_epoch] for phase in phases],
    }
    return {
        **describe_start(run.paths.run),
        "base_sha256": spec.base_sha256,
        "wrong_rules": hide_places(spec.base.wrong_rules) if spec.base else "",
        "preset": run.preset,
        "parameters": parameters,
        "corpus": corpus,
    }


def describe_start(run_dir: Place) -> dict[str, str]:
    """Return when a run was started first, and by which command, commit and machine it is started now."""
    from domext_ray.runtime.ray_cluster import describe_nodes, list_accelerators, list_nodes  # readers go without Ray

    now = datetime.now(UTC).isoformat(timespec="seconds")
    return {
        "started": read_run(run_dir).get("origin", {}).get("started", now),
        "command": describe_command(sys.argv),
        "commit": find_commit(),
        "machine": f"{describe_nodes(list_nodes())} ({', '.join([_describe_processor(), *list_accelerators()])})",
    }


def read_origin(run_dir: Place) -> dict[str, Any]:
    """Return what `describe_origin` told of a run's newest start, with the versions of packages."""
    run = read_run(run_dir, {f"origin.{name}": kind for name, kind in _ORIGIN.items()} | {"versions": list})
    if not run:
        raise RunError(f"{run_dir / RUN} is missing; a run writes it when training starts: run the job again.")
    versions = {name: version for name, version in run["versions"][-1].items() if name != "from_step"}
    return {**run["origin"], "versions": versions}


def describe_command(args: list[str]) -> str:
    """Return a command line (`sys.argv`) as others may see it: of paths the last part; empty for a call from Python."""
    program = Path(args[0]) if args else Path()
    name = f"python jobs/{program.name}" if program.parent.name == "jobs" else "domext"
    if name == "domext" and program.name not in ("domext", "__main__.py"):
        return ""
    return " ".join([name, *(shlex.quote(hide_places(arg)) for arg in args[1:])])


def find_commit() -> str:
    """Return the commit of a checkout that this package runs from, with "+" where files differ; empty: none."""
    root = Path(__file__).resolve().parents[2]
    git = ["git", "-C", str(root), "describe", "--always", "--exclude=*", "--abbrev=12", "--dirty=+"]
    if not (root / ".git").exists():  # that of a folder around it is another one's
        return ""
    try:
        return subprocess.run(git, capture_output=True, text=True, timeout=_SECONDS, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):  # it is not installed, or does not trust the checkout's owner
        return ""


def _describe_processor() -> str:
    """The type of this machine's CPU; its architecture where Linux does not say more."""
    with contextlib.suppress(OSError):
        if found := re.search(r"^model name\s*:(.*)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE):
            return " ".join(found[1].split())
    return platform.machine()


def count_trained(spec: ModelSpec) -> dict[str, int]:
    """Return how many parameters of a model train by kind, as the page names it."""
    method, counts = spec.method, spec.counts
    whole = {"all": "every parameter", "top_layers": f"the top {method.top_layers} layers", "layer_norms": "LayerNorms"}
    if name := {**whole, "biases": "biases"}.get(method.trains):
        return {name: counts.trainable}
    kinds = {}
    for kind, number in counts.kinds.items():
        words = re.sub("(?<=[a-z])(?=[A-Z])", " ", kind).lower()  # NewWords is "new words"
        kinds[words.replace("lora", "LoRA")] = number
    kinds["heads of the model"] = counts.trainable - sum(kinds.values())
    return {name: number for name, number in kinds.items() if number}


def write_summary(run_dir: Place, config: SettledConfig) -> dict[str, Any]:
    """Write summary.json from the metrics of a run and its run.json, and return it."""
    measured, origin = measure_run(read_metrics(run_dir / "metrics.jsonl")), read_origin(run_dir)
    if "train" not in measured or find_latest(run_dir / "checkpoints") is None:
        raise RunError(f"{run_dir} has no trained step to summarise; run the job again.")
    router = read_records(run_dir).get(config.method.adapter)
    summary = {
        "parameters": {name: value for name, value in origin["parameters"].items() if name != "kinds"},
        **measured,
        "corpus": {name: origin["corpus"].get(name, {}) for name in ("rows", "tokens", "dropped", "unknown")},
        **({"router": asdict(router)} if router else {}),
        "method": asdict(config.method),
        "base": hide_places(config.base),
    }
    write_json(run_dir / SUMMARY, summary)
    return summary


def show_times(run_dir: Place) -> None:
    """Put the seconds of each stage of a run's newest job into its summary.json, by `events.STAGES`, and print them."""
    path = run_dir / SUMMARY
    times = measure_times(run_dir)
    write_json(path, {**read_summary(path), "job_seconds": times})
    print(describe_times(times))


def read_summary(path: Place) -> dict[str, Any]:
    """Read a run's summary.json."""
    if not path.is_file():
        raise RunError(f"{path} is missing; a run writes it when training ends: run the job again.")
    values = read_json(path, _REMEDY)
    domain = values.get("domain")
    names = (find_losses(domain) if isinstance(domain, dict) else None) or MLM
    figures = [f"domain.{key}" for key in (names.loss, names.accuracy, "bits_per_character")]
    pairs = [f"{name}.{when}" for name in (*figures, "general.mlm_accuracy") for when in ("before", "after")]
    check_values(path, values, "JSON object", _REMEDY, _EXPECTED | dict.fromkeys(pairs, (int, float, type(None))))
    return values
