"""Several sweeps over one space become one table and one picture: the best figure that each has found, by compute.

Enters: sweeps' directories. Leaves: a Markdown table and a PNG. A searcher and scheduler is a group, its sweeps differ
in --search.seed; groups compare at the compute that every sweep has spent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from domext_ray.config.sweep import OBJECTIVES
from domext_ray.errors import RunError
from domext_ray.options.build import describe_difference
from domext_ray.progress import format_seconds
from domext_ray.report.plots import COLORS, DASHED, MUTED, draw_legend, new_picture
from domext_ray.report.tables import format_markdown
from domext_ray.runs.run_directory import read_identity
from domext_ray.search.results import TRIALS, read_trials
from domext_ray.search.sweep_report import NAMES


@dataclass(frozen=True)
class ComparedSweep:
    """One sweep's part of a comparison.

    Args:
        name: its directory's name.
        group: its searcher and scheduler.
        objective: what was searched for.
        num_trials: trials that were scored.
        seconds: float64 [scored rungs], rising: pre-training, evaluation and fine-tuning of all trials until then.
        best: float64 [scored rungs]: the best figure of any rung until then.
    """

    name: str
    group: str
    objective: str
    num_trials: int
    seconds: np.ndarray
    best: np.ndarray

    def find_best(self, seconds: float) -> float:
        """Return the best figure after so much compute; NaN before the first."""
        scored = int(np.searchsorted(self.seconds, seconds, side="right"))
        return float(self.best[scored - 1]) if scored else float("nan")


def is_sweep(folder: Path) -> bool:
    """Whether a folder is a sweep's."""
    return (folder / TRIALS).is_dir()


def read_sweeps(folders: Sequence[Path]) -> list[ComparedSweep]:
    """Read sweeps that have scored something.

    Raises:
        RunError: one is no sweep or has scored nothing, or two differ in more than how they search.
    """
    identities = [read_identity(each) for each in folders]
    sweeps = []
    for folder, identity in zip(folders, identities, strict=True):
        if identity is None or not is_sweep(folder):
            raise RunError(f"{folder} is no sweep; compare sweeps with sweeps.")
        differing = describe_difference(_drop_search(identities[0]), _drop_search(identity))
        if differing:
            raise RunError(f"{folders[0]} and {folder} differ ({'; '.join(differing)}); only --search may differ.")
        sweeps.append(_read_sweep(folder, identity["search"]))
    return sweeps


def _drop_search(identity: Any) -> dict[str, Any]:
    return {name: value for name, value in identity.items() if name != "search"}


def _read_sweep(folder: Path, search: dict[str, Any]) -> ComparedSweep:
    objective = search["objectives"].split(",")[0].strip()
    trials = read_trials(folder / TRIALS, search["rungs"])
    rungs = sorted((rung for each in trials for rung in each.rungs), key=lambda rung: rung["ended"])
    if not rungs:
        raise RunError(f"no trial of the sweep in {folder} was scored; go on with its own command.")
    take_best = np.fmax if OBJECTIVES[objective] == "max" else np.fmin
    return ComparedSweep(
        folder.resolve().name,
        f"{search['searcher']}, {'ASHA' if search['scheduler'] == 'asha' else 'whole trials'}",
        objective,
        sum(bool(each.rungs) for each in trials),
        np.cumsum([sum(rung["seconds"].values()) for rung in rungs]),
        take_best.accumulate(np.array([rung[objective] for rung in rungs], dtype=np.float64)),
    )


def format_sweeps(sweeps: Sequence[ComparedSweep]) -> str:
    """Return groups of sweeps as a Markdown table, at the compute that every sweep has spent."""
    limit = min(float(each.seconds[-1]) for each in sweeps)
    figure = f"best {NAMES[sweeps[0].objective]} after {format_seconds(limit)} of compute"
    rows = []
    for group in dict.fromkeys(each.group for each in sweeps):
        own = [each for each in sweeps if each.group == group]
        values = [each.find_best(limit) for each in own]
        deviation = f" ± {np.std(values, ddof=1):.4f}" if len(own) > 1 else ""
        trials = sum(each.num_trials for each in own)
        listed = ", ".join(f"{value:.4f}" for value in values)
        rows.append((group, str(len(own)), str(trials), f"{np.mean(values):.4f}{deviation}", listed))
    return format_markdown(("search", "sweeps", "trials begun", figure, "each"), rows)


def draw_sweeps(sweeps: Sequence[ComparedSweep], path: Path) -> None:
    """Draw the best figure of every sweep, and the mean of every group, over compute as a PNG."""
    with new_picture(path, (7, 4.4)) as figure:
        axes = figure.subplots()
        for color, group in zip(COLORS, dict.fromkeys(each.group for each in sweeps), strict=False):
            own = [each for each in sweeps if each.group == group]
            for each in own:
                axes.step(each.seconds / 60, each.best, where="post", color=color, alpha=0.35, linewidth=1)
            times = np.unique(np.concatenate([each.seconds for each in own]))
            times = times[times >= max(each.seconds[0] for each in own)]
            mean = np.mean([[each.find_best(time) for time in times] for each in own], axis=0)
            axes.step(times / 60, mean, where="post", color=color, linewidth=2, label=group)
        axes.axvline(min(each.seconds[-1] for each in sweeps) / 60, color=MUTED, linestyle=DASHED, linewidth=1)
        axes.set(xlabel="minutes of training and scoring, all trials", ylabel=f"best {NAMES[sweeps[0].objective]}")
        draw_legend(axes)
