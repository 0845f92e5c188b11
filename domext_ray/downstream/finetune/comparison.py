"""Several models fine-tuned on one set become one table: figures with intervals, and paired differences.

Enters: fine-tuning runs (summary.json, resamples.npz). Runs on one set resample the same documents, so the difference
of two models' resampled figures is their paired bootstrap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from domext_ray.downstream.finetune.finetuned import read_finetune_summary
from domext_ray.errors import RunError, name_file
from domext_ray.intervals import Sample
from domext_ray.report.compare import Line, compare_with_first, describe_differences, draw_lines, tabulate
from domext_ray.report.tables import Table
from domext_ray.runs.run_directory import TRAININGS
from domext_ray.storage import new_file

RESAMPLES = "resamples.npz"


@dataclass(frozen=True)
class FinetunedRun:
    """One run's part of a comparison: its directory's name, its summary, and the metric on `split`."""

    name: str
    summary: dict[str, Any]
    sample: Sample

    @property
    def split(self) -> str:
        """The split that is compared: test or, without one, dev."""
        return "test" if self.summary["test"] else "dev"

    @property
    def mean(self) -> float:
        """The metric's mean over restarts."""
        return self.sample.mean

    @property
    def num_trained(self) -> int:
        """Parameters that trained, the task's head among them."""
        return sum(each["trainable"] for each in self.summary["parameters"].values())


def write_resamples(folder: Path, resamples: dict[str, np.ndarray]) -> None:
    """Write a run's resampled figures, float64 [restarts, resamples] by split."""
    with new_file(folder / RESAMPLES) as temporary:
        np.savez_compressed(temporary, **resamples)  # type: ignore[arg-type]


def read_sample(folder: Path, split: str, values: Sequence[float], num_clusters: int) -> Sample:
    """Return the metric of a run's restarts with the resamples that `write_resamples` wrote.

    Raises:
        RunError: the file is missing or damaged.
    """
    try:
        with name_file(folder / RESAMPLES), np.load(folder / RESAMPLES, allow_pickle=False) as arrays:
            return Sample(np.array(values), arrays[split], num_clusters)
    except (OSError, ValueError, KeyError) as error:
        raise RunError(f"{folder / RESAMPLES} is missing or damaged; run it again with its own command.") from error


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
    split = "test" if summary["test"] else "dev"
    sample = read_sample(folder, split, summary["restarts"][split]["values"], summary[split]["clusters"])
    return FinetunedRun(folder.resolve().name, summary, sample)


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
            ("numbers of resamples", (first.sample.drawn.shape[1], run.sample.drawn.shape[1])),
        ):
            if values[0] != values[1]:
                raise RunError(f"{first.name} and {run.name} have different {what}; compare runs that share them.")


def compare_finetuned(runs: Sequence[FinetunedRun], names: Sequence[str] = ()) -> list[Line]:
    """Compare runs with the first one; `names` stand for those of their directories."""
    more = [(f"{run.num_trained:,}", str(len(run.sample.values))) for run in runs]
    return compare_with_first(names or [run.name for run in runs], [run.sample for run in runs], more)


def tabulate_finetuned(runs: Sequence[FinetunedRun], lines: Sequence[Line]) -> Table:
    """Return what `compare_finetuned` found as a table."""
    summary, split = runs[0].summary, runs[0].split
    scored, clusters = summary["set"]["examples"][split], runs[0].sample.num_clusters
    resampled = f"in {clusters:,} documents or contexts, which are resampled" * (clusters < scored)
    setting = f"{summary['set']['name']}: {scored:,} {split} examples {resampled}".strip()
    more = ("trained", "restarts")
    notes = (f"{setting}. Figures are means over restarts (±: their sd).", describe_differences(lines))
    return tabulate(lines, f"{summary['metric']} on {split}", names="run", more=more, notes=notes)


def draw_finetuned(runs: Sequence[FinetunedRun], lines: Sequence[Line], path: Path) -> None:
    """Draw what `compare_finetuned` found as a PNG."""
    summary = runs[0].summary
    draw_lines(lines, path, summary["set"]["name"], f"{summary['metric']} on {runs[0].split}")
