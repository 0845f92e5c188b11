"""The page of a run: what it reached, how, from what, and what to do next.

Enters: a run directory with metrics.jsonl, run.json and config.yaml; it may still be training. Leaves: report.html,
which needs no network, and curves.png in the same directory.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any, Literal

from domext_ray.config.pretrain import PretrainConfig
from domext_ray.errors import RunError
from domext_ray.options.build import dump_yaml
from domext_ray.report.curves import list_curves, write_curves
from domext_ray.report.examples import Example
from domext_ray.report.facts import list_changed, list_facts, list_words, suggest_next
from domext_ray.report.figures import (
    ROUTED,
    describe_result,
    describe_sizes,
    list_cost,
    list_parts,
    list_rows,
    list_times,
    measure_run,
)
from domext_ray.report.origin import read_origin
from domext_ray.report.page import format_settings, render_page
from domext_ray.runs.events import measure_times
from domext_ray.runs.losses import DOMAIN, find_losses
from domext_ray.runs.run_directory import read_config
from domext_ray.storage import Place, Where, new_file
from domext_ray.training.metrics import read_metrics
from domext_ray.training.router import read_records

State = Literal["running", "stopped", "finished"]


def write_report(where: Where, state: State = "finished", examples: Sequence[Example] = ()) -> Place:
    """Draw a run's curves and write report.html and curves.png.

    Args:
        where: a run's directory, with metrics.jsonl, run.json and config.yaml.
        state: what the run is doing now.
        examples: masked words of held-out text; with them only the owner may read the page, as the text itself.

    Returns:
        Path of report.html.

    Raises:
        RunError: one of the three files is missing or damaged.
    """
    run_dir = Place(where)
    records = read_metrics(run_dir / "metrics.jsonl")
    if not records:
        raise RunError(f"{run_dir / 'metrics.jsonl'} is missing or empty; run the job again to fill it.")
    origin, config = read_origin(run_dir), read_config(run_dir, PretrainConfig)
    summary, router = measure_run(records), read_records(run_dir).get(config.method.domain)
    evaluated = [each["step"] for each in records if find_losses(each, DOMAIN)]
    after = "after" if state == "finished" or not evaluated else f"at step {evaluated[-1]:,}"
    num_words, words = list_words(run_dir / "tokenizer")
    preset, changed = list_changed(config)
    write_curves(run_dir / "curves.png", records)
    page = render_page(
        "run.html",
        run_dir.name,
        state=_describe_state(run_dir, config, records, state),
        result=describe_result(summary),
        header=("", "before", after, "change", *([ROUTED] if "routed" in summary else [])),
        figures=list_rows(summary),
        sizes=describe_sizes(summary),
        parts=list_parts(summary),
        curves=list_curves(records),
        examples=examples,
        excuse=_excuse_examples(config),
        num_words=f"{num_words:,}",
        words=words,
        facts=list_facts(config, origin, records, asdict(router) if router else None),
        cost=list_cost(summary),
        times=list_times(measure_times(run_dir)),
        preset=preset,
        changed=changed,
        settings=format_settings(dump_yaml(config)),
        next=suggest_next(run_dir, config),
    )
    with new_file(run_dir / "report.html") as temporary:
        temporary.touch(mode=0o600 if examples else 0o666)  # in a bucket, its own rules say who may read
        temporary.write_text(page, encoding="utf-8")
    return run_dir / "report.html"


def _excuse_examples(config: PretrainConfig) -> str:
    """Why a page of somebody's text shows none of it; nothing for other text."""
    field = config.prepare.group_field
    reason = f"No text is shown: its rows say whose they are (--prepare.group_field {field}), and pages are passed on."
    return reason if field else ""


def _describe_state(run_dir: Place, config: PretrainConfig, records: Sequence[dict[str, Any]], state: State) -> str:
    """How far a run is, and when that was: the time of its newest figure."""
    step, limit = records[-1]["step"], config.train.max_steps
    info = (run_dir / "metrics.jsonl").info()
    seconds = info.modified if info is not None else time.time()
    moment = f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M} UTC"
    if state == "finished":
        return f"Finished at step {step:,} on {moment}."
    if state == "stopped":
        return f"Stopped at step {step:,} of {limit:,} on {moment}; the same command goes on."
    return f"Running: step {step:,} of {limit:,} on {moment}. The page is written anew after evaluations."
