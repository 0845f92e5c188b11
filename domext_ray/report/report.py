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
from domext_ray.report.details import list_changed, list_cost, list_facts, list_times, list_words, suggest_next
from domext_ray.report.examples import Example, format_examples
from domext_ray.report.origin import read_origin
from domext_ray.report.page import (
    fill_page,
    format_code,
    format_counts,
    format_folded,
    format_html,
    format_paragraph,
    format_pictures,
    format_section,
    format_settings,
)
from domext_ray.report.parts import list_parts
from domext_ray.report.results import ROUTED, describe_result, describe_sizes, list_intervals
from domext_ray.report.summary import measure_run
from domext_ray.runs.losses import DOMAIN, find_losses
from domext_ray.runs.run_directory import read_config
from domext_ray.storage import Place, Where, new_file
from domext_ray.training.metrics import read_metrics
from domext_ray.training.router import read_records

State = Literal["running", "stopped", "finished"]
_PART_HEADER = ("", "tokens", "epochs", "training loss", "held-out loss, before", "after", "change")
MAX_WORDS = 30
"""New words that the page shows at once; the others are folded."""


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
    about, config = read_origin(run_dir), read_config(run_dir, PretrainConfig)
    summary = {**measure_run(records), "parameters": about["parameters"]}
    router = read_records(run_dir).get(config.method.domain)
    write_curves(run_dir / "curves.png", records)
    page = fill_page(
        run_dir.name,
        [
            format_paragraph(_describe_state(run_dir, config, records, state), "state"),
            format_paragraph(describe_result(summary), "result"),
            format_html(_name_figures(summary, _name_after(records, state)), list_intervals(summary)),
            format_paragraph(describe_sizes(summary), "note"),
            format_section("The parts of the text", format_html(_PART_HEADER, list_parts(summary))),
            format_section("Curves", format_pictures(list_curves(records))),
            format_section("Masked words, before and after", format_examples(examples)),
            format_section("New words", _format_words(run_dir)),
            format_section(
                "How it was made",
                format_html(("", ""), list_facts(config, about, records, asdict(router) if router else None), "pairs"),
                format_section("What it took", format_html(("", ""), list_cost(summary), "pairs")),
                format_section("Where the time went", format_html(("", ""), list_times(run_dir), "pairs")),
            ),
            format_section("Options", _format_changed(config), format_settings(dump_yaml(config))),
            format_section("What to do next", format_code(suggest_next(run_dir, config))),
        ],
    )
    with new_file(run_dir / "report.html") as temporary:
        temporary.touch(mode=0o600 if examples else 0o666)  # in a bucket, its own rules say who may read
        temporary.write_text(page, encoding="utf-8")
    return run_dir / "report.html"


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


def _name_figures(summary: dict[str, Any], after: str) -> tuple[str, ...]:
    return ("", "before", after, "change", *([ROUTED] if "routed" in summary else []))


def _name_after(records: Sequence[dict[str, Any]], state: State) -> str:
    evaluated = [each["step"] for each in records if find_losses(each, DOMAIN)]
    return "after" if state == "finished" or not evaluated else f"at step {evaluated[-1]:,}"


def _format_words(run_dir: Place) -> str:
    """The run's new words by how often they are in its text."""
    number, words = list_words(run_dir / "tokenizer")
    if not words:
        return ""
    rest = words[MAX_WORDS:]
    return "\n".join(
        [
            format_paragraph(
                f"The run has {number:,} new words beside the base's; ## marks what stands joined to what is before "
                "it. The most frequent ones, and how often the text has them:"
            ),
            format_counts(words[:MAX_WORDS]),
            format_folded(f"{len(rest)} more", format_counts(rest)) if rest else "",
        ]
    )


def _format_changed(config: PretrainConfig) -> str:
    preset, rows = list_changed(config)
    return format_html(("changed", "here", preset), rows, "pairs") if rows else format_paragraph(f"As in {preset}.")
