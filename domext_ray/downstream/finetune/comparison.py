"""Several models fine-tuned on one set become one table: figures with intervals, and paired differences.

Enters: fine-tuning runs (summary.json, resamples.npz). Leaves: a Markdown table and a PNG. Runs on one set resample the
same examples, so the difference of two models' resampled figures is their paired bootstrap (Efron, Tibshirani, 1993).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from domext_ray.downstream.finetune.finetuned import read_finetune_summary
from domext_ray.downstream.start.model import TRAININGS
from domext_ray.errors import RunError
from domext_ray.labelled.metrics.scores import PairedDifference, find_bounds, summarize_difference
from domext_ray.report.plots import COLORS, draw_intervals, new_picture
from domext_ray.report.tables import format_bounds, format_markdown
from domext_ray.storage import new_file

RESAMPLES = "resamples.npz"


@dataclass(frozen=True)
class FinetunedRun:
    """One run's part of a comparison.

    Args:
        name: its directory's name.
        summary: content of summary.json.
        resamples: the metric's resampled figures [restarts, resamples], of test or, without one, dev.
    """

    name: str
    summary: dict[str, Any]
    resamples: np.ndarray

    @property
    def split(self) -> str:
        """The split that is compared."""
        return "test" if self.summary["test"] else "dev"

    @property
    def mean(self) -> float:
        """The metric's mean over restarts."""
        return float(self.summary["restarts"][self.split]["mean"])

    @property
    def interval(self) -> tuple[float, float]:
        """Bootstrap 95 % interval of that mean, over examples."""
        low, high = find_bounds(self.resamples.mean(axis=0)[None])[0]
        return float(low), float(high)


def write_resamples(folder: Path, resamples: dict[str, np.ndarray]) -> None:
    """Write a run's resampled figures, float64 [restarts, resamples] by split."""
    with new_file(folder / RESAMPLES) as temporary:
        np.savez_compressed(temporary, **resamples)  # type: ignore[arg-type]


def is_finetuned(folder: Path) -> bool:
    """Whether a folder is a fine-tuning run's."""
    return (folder / TRAININGS).is_dir()


def read_finetuned(folder: Path) -> FinetunedRun:
    """Read a fine-tuning run that has ended.

    Raises:
        RunError: it has not.
    """
    if not (folder / "summary.json").is_file():
        raise RunError(f"{folder} is no fine-tuning run that has ended; finish it with its own command.")
    summary = read_finetune_summary(folder)
    try:
        with np.load(folder / RESAMPLES, allow_pickle=False) as arrays:
            resamples = arrays["test" if summary["test"] else "dev"]
    except (OSError, ValueError, KeyError) as error:
        raise RunError(f"{folder / RESAMPLES} is missing or damaged; run it again with its own command.") from error
    return FinetunedRun(folder.resolve().name, summary, resamples)


def check_comparable(runs: Sequence[FinetunedRun]) -> None:
    """Refuse runs on different sets, metrics or numbers of resamples.

    Raises:
        RunError: naming the first two that differ.
    """
    first = runs[0]
    for run in runs[1:]:
        for what, values in (
            ("sets", (first.summary["set"]["sha256"], run.summary["set"]["sha256"])),
            ("metrics", (first.summary["metric"], run.summary["metric"])),
            ("numbers of resamples", (first.resamples.shape[1], run.resamples.shape[1])),
        ):
            if values[0] != values[1]:
                raise RunError(f"{first.name} and {run.name} have different {what}; compare runs that share them.")


def compare_means(first: FinetunedRun, second: FinetunedRun) -> PairedDifference:
    """Return how much the second run's mean over restarts differs from the first's, over the same resamples."""
    drawn = second.resamples.mean(axis=0) - first.resamples.mean(axis=0)
    return summarize_difference(second.mean - first.mean, drawn)


def format_finetuned(runs: Sequence[FinetunedRun]) -> str:
    """Return the runs as a Markdown table; differences are to the first run."""
    metric, split = runs[0].summary["metric"], runs[0].split
    header = ("run", "trained", f"{metric} on {split}", "95 % interval", "difference", "95 % interval", "p")
    rows = []
    for run in runs:
        restarts = run.summary["restarts"]
        spread = f" ± {restarts[run.split]['std']:.3f}" if len(restarts["seeds"]) > 1 else ""
        trained = sum(each["trainable"] for each in run.summary["parameters"].values())
        rows.append([run.name, f"{trained:,}", f"{run.mean:.3f}{spread}", format_bounds(*run.interval), "", "", ""])
        if run is not runs[0]:
            paired = compare_means(runs[0], run)
            bounds = format_bounds(paired.low, paired.high, "+.3f")
            rows[-1][4:] = [f"{paired.difference:+.3f}", bounds, f"{paired.p_value:.3f}"]
    data = runs[0].summary["set"]
    seeds = sorted({len(run.summary["restarts"]["seeds"]) for run in runs})
    setting = f"{data['name']}: {data['examples'][split]:,} {split} examples, means over {seeds[0]} restart(s)."
    return f"{format_markdown(header, rows)}\n\n{setting}"


def draw_finetuned(runs: Sequence[FinetunedRun], path: Path) -> None:
    """Draw every run's mean with its bootstrap 95 % interval, and its restarts, as a PNG."""
    with new_picture(path, (8, 1.6 + 0.5 * len(runs))) as figure:
        axes = figure.subplots()
        draw_intervals(axes, [run.name for run in runs], [(run.mean, *run.interval) for run in runs], ".3f")
        for place, run in enumerate(runs):
            values = run.summary["restarts"][run.split]["values"]
            axes.plot(values, [place + 0.22] * len(values), ".", color=COLORS[place % len(COLORS)], alpha=0.6)
        data = runs[0].summary["set"]["name"]
        axes.set(title=f"{data}: {runs[0].summary['metric']} on {runs[0].split}", xlabel="mean over restarts (dots)")
