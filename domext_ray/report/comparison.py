"""Several runs on one corpus become one table and one picture: what was learned and what was forgotten, by seconds.

Enters: run directories with metrics.jsonl and summary.json. Leaves: the table as Markdown, and a PNG. Word bits per
character and the general probe compare between vocabularies. Bits per character do with one vocabulary; of another one
they know into how many pieces it cuts a word. Token losses do not compare, so they are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from domext_ray.errors import ConfigError, RunError
from domext_ray.report.figures import list_figures
from domext_ray.report.plots import COLORS, new_picture, write_axis
from domext_ray.report.summary import read_summary
from domext_ray.report.tables import NONE, format_markdown
from domext_ray.training.metrics import read_metrics

BITS, GENERAL = "eval/domain_bits_per_character", "eval/general_mlm_accuracy"


@dataclass(frozen=True)
class ComparedRun:
    """One run's part of a comparison.

    Args:
        name: its directory's name.
        summary: content of summary.json.
        evaluations: records of metrics.jsonl that hold an evaluation, each with `seconds` spent in training before it.
    """

    name: str
    summary: dict[str, Any]
    evaluations: tuple[dict[str, Any], ...]


def choose_runs(runs: Sequence[str]) -> list[Path]:
    """Return the folders of --runs, each one once.

    Raises:
        ConfigError: a run is given twice, by whatever path: it would count as a seed of its own.
    """
    folders = [Path(each).expanduser() for each in runs]
    places = [each.resolve() for each in folders]
    twice = [folder for i, folder in enumerate(folders) if places[i] in places[:i]]
    if twice:
        raise ConfigError(f"--runs must be different runs, and {str(twice[0])!r} is given twice.")
    return folders


def read_run(run_dir: Path) -> ComparedRun:
    """Read a finished run.

    Raises:
        RunError: it has no summary or no metrics.
    """
    summary = read_summary(run_dir / "summary.json")
    records = [each for each in read_metrics(run_dir / "metrics.jsonl") if each.get(BITS) is not None]
    if not records:
        raise RunError(f"{run_dir / 'metrics.jsonl'} has no evaluation; run the job again.")
    evaluations = tuple({**each, "seconds": each.get("time/seconds", 0.0)} for each in records)
    return ComparedRun(run_dir.resolve().name, summary, evaluations)


def format_comparison(runs: Sequence[ComparedRun]) -> str:
    """Return the runs as a Markdown table, and which bits decide; a last line says so if they do not compare."""
    bits = ("bits per character", "word bits per character")
    header = ("run", "trained", "tokens read", "training seconds", *bits, "general accuracy")
    rows = [
        (
            run.name,
            f"{run.summary['parameters']['trainable']:,}",
            f"{run.summary['train']['tokens']:,}",
            f"{run.summary['train']['wall_seconds']:.0f}",
            *(figures[name].show_pair() if name in figures else NONE for name in ("bits", "word_bits", "general")),
        )
        for run, figures in ((each, list_figures(each.summary)) for each in runs)
    ]
    warnings = describe_unequal_texts({run.name: run.summary["evaluation"]["domain_characters"] for run in runs})
    decides = "Between different vocabularies the word bits per character decide; with one vocabulary both figures do."
    return "\n\n".join([format_markdown(header, rows), decides, *warnings])


def describe_unequal_texts(num_characters: dict[str, int]) -> list[str]:
    """Return a warning if runs scored different texts; nothing if their bits per character compare.

    Args:
        num_characters: scored characters by run or method.
    """
    if len(set(num_characters.values())) < 2:
        return []
    counts = ", ".join(f"{name} {size:,}" for name, size in num_characters.items())
    return [f"Bits a character do not compare: the runs scored different numbers of characters ({counts})."]


def find_undominated(values: Sequence[Sequence[float]]) -> list[int]:
    """Return the places of the points on the Pareto front: no other is at least as good in all, and better in one.

    Args:
        values: of each point one figure per objective, more is better.
    """
    table = np.array(values, dtype=np.float64).reshape(len(values), len(values[0]) if values else 0)
    return [i for i, own in enumerate(table) if not ((table >= own).all(axis=1) & (table > own).any(axis=1)).any()]


def draw_comparison(runs: Sequence[ComparedRun], path: Path) -> None:
    """Draw bits per character and general accuracy of the runs over their training seconds as a PNG."""
    with new_picture(path, (11, 4.4)) as figure:
        left, right = figure.subplots(1, 2)
        _plot(left, runs, BITS, "Learned: held-out domain text", "bits per character (less is better)")
        _plot(right, runs, GENERAL, "Kept: everyday English", "masked words predicted (%)")
        write_axis(right.yaxis, ".3g", scale=100)
        figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)


def _plot(axes: Axes, runs: Sequence[ComparedRun], metric: str, title: str, unit: str) -> None:
    for i, run in enumerate(runs):
        points = [(each["seconds"], each[metric]) for each in run.evaluations if each[metric] is not None]
        axes.plot(*zip(*points, strict=True), color=COLORS[i % len(COLORS)], marker="o", markersize=4, label=run.name)
    axes.set(title=title, ylabel=unit, xlabel="seconds of training")
