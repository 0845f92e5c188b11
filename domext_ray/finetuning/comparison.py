"""Several models fine-tuned on one set become one table: figures with intervals, and paired differences.

Enters: fine-tuning runs (summary.json, resamples.npz). Runs on one set resample the same documents, so the difference
of two models' resampled figures is their paired bootstrap. With it goes what a figure does not show: a baseline that
trains nothing reaches it, or train has examples of the split, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from domext_ray.errors import RunError, name_file
from domext_ray.families.metrics.scores import flatten
from domext_ray.finetuning.finetuned import read_finetune_summary
from domext_ray.intervals import Estimate, Resampled
from domext_ray.report.compare import Line, compare_with_first, describe_differences, draw_lines, tabulate
from domext_ray.report.tables import Table
from domext_ray.runs.run_directory import TRAININGS
from domext_ray.storage import Place, new_file

RESAMPLES, AGAINST = "resamples.npz", "against"
"""Of a run: its resampled figures; the folder of the run of --against, which it is compared with."""


@dataclass(frozen=True)
class ScoredRun:
    """One run's part of a comparison: its directory's name, its summary, and the metric on `split`."""

    name: str
    summary: dict[str, Any]
    sample: Resampled

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
        return sum(counts["trainable"] for counts in self.summary["parameters"].values())


def write_resamples(folder: Place, samples: Mapping[str, Resampled]) -> None:
    """Write a run's resampled figures, float64 [restarts, resamples] by split."""
    arrays: Any = {split: sample.drawn for split, sample in samples.items()}
    with new_file(folder / RESAMPLES) as temporary:
        np.savez_compressed(temporary, **arrays)


def is_finetuned(folder: Place) -> bool:
    """Whether a folder is a fine-tuning run's."""
    return (folder / TRAININGS).is_dir()


def read_finetuned(folder: Place) -> ScoredRun:
    """Read a fine-tuning run that has ended."""
    if not (folder / "summary.json").is_file():
        raise RunError(f"{folder} is no fine-tuning run that has ended; finish it with its own command.")
    summary = read_finetune_summary(folder)
    split = "test" if summary["test"] else "dev"
    values, num_clusters = np.array(summary["restarts"][split]["values"]), summary[split]["clusters"]
    try:
        with name_file(folder / RESAMPLES), np.load(folder / RESAMPLES, allow_pickle=False) as arrays:
            sample = Resampled(values, arrays[split], num_clusters)
    except (OSError, ValueError, KeyError) as error:
        raise RunError(f"{folder / RESAMPLES} is missing or damaged; run it again with its own command.") from error
    return ScoredRun(f"{folder.parent.name}/{AGAINST}" if folder.name == AGAINST else folder.name, summary, sample)


def check_comparable(runs: Sequence[ScoredRun]) -> None:
    """Refuse runs on different sets, metrics or numbers of resamples."""
    first = runs[0]
    for run in runs[1:]:
        for what, values in (
            ("sets", (first.summary["set"]["sha256"], run.summary["set"]["sha256"])),
            ("metrics", (first.summary["metric"], run.summary["metric"])),
            ("numbers of resamples", (first.sample.drawn.shape[1], run.sample.drawn.shape[1])),
        ):
            if values[0] != values[1]:
                raise RunError(f"{first.name} and {run.name} have different {what}; compare runs that share them.")


def compare_finetuned(runs: Sequence[ScoredRun], names: Sequence[str] = ()) -> list[Line]:
    """Compare runs with the first one; `names` stand for those of their directories."""
    more = [(f"{run.num_trained:,}", str(len(run.sample.values))) for run in runs]
    return compare_with_first(names or [run.name for run in runs], [run.sample for run in runs], more)


def tabulate_finetuned(runs: Sequence[ScoredRun], lines: Sequence[Line]) -> Table:
    """Return what `compare_finetuned` found as a table."""
    summary, split = runs[0].summary, runs[0].split
    scored, clusters = summary["set"]["examples"][split], runs[0].sample.num_clusters
    resampled = f"in {clusters:,} documents or contexts, which are resampled" * (clusters < scored)
    setting = f"{summary['set']['name']}: {scored:,} {split} examples {resampled}".strip()
    more = ("trained", "restarts")
    notes = (f"{setting}. Figures are means over restarts (±: their sd).", describe_differences(lines))
    return tabulate(lines, f"{summary['metric']} on {split}", names="run", more=more, notes=notes)


def draw_finetuned(runs: Sequence[ScoredRun], lines: Sequence[Line], path: Place) -> None:
    """Draw what `compare_finetuned` found as a PNG."""
    summary = runs[0].summary
    draw_lines(lines, path, summary["set"]["name"], f"{summary['metric']} on {runs[0].split}")


def compare_pair(against: ScoredRun, run: ScoredRun) -> list[Line]:
    """Compare a run with the model of its --against; the lines are called as their models are."""
    names = [side.summary["model"]["name"] for side in (against, run)]
    if names[0] == names[1]:
        names = [f"{names[0]} (--against)", f"{names[1]} (--model)"]
    return compare_finetuned((against, run), names)


def summarize_pair(against: ScoredRun, run: ScoredRun, lines: Sequence[Line]) -> dict[str, Any]:
    """Return what a run's summary.json says of the model of --against; `lines` is what `compare_pair` found."""
    difference = lines[1].difference
    assert difference is not None
    restarts = against.summary["restarts"]
    return {
        "model": against.summary["model"],
        "point": against.summary["best"]["point"],
        "split": run.split,
        "restarts": {"seeds": restarts["seeds"], **restarts[run.split]},
        "difference": difference.value,
        "interval": difference.interval,
        "p_value": difference.p_value,
        "verdict": describe_pair(against, run, lines),
    }


def describe_pair(against: ScoredRun, run: ScoredRun, lines: Sequence[Line]) -> str:
    """Return in one line the difference of two runs, its interval, and what that says and does not say.

    `lines` is what `compare_pair` found.
    """
    difference = lines[1].difference
    assert difference is not None
    found, clusters = difference.scale(100.0), run.sample.num_clusters
    unit = "document" if clusters < run.summary["set"]["examples"][run.split] else "example"
    number = f"{clusters:,} {run.split} {unit}{'s' * (clusters > 1)}"
    restarts = " and ".join(dict.fromkeys(str(len(line.values)) for line in lines))
    seen = number if difference.p_value is None else f"{number} and {restarts} restarts"
    said = [_judge(found, lines, number, seen)]
    if difference.p_value is None:
        said.append("each model was trained only once, so another seed could reverse this: give --grid.restarts 3")
    summary, means = run.summary, {line.name: line.figure.value for line in lines}
    said += list_cautions(summary["set"], run.split, summary["metric"], summary["baselines"][run.split], means)
    where = "dev, which chose both models," if run.split == "dev" else run.split
    points = f"{found.value:+z.1f} points of {summary['metric']}"
    return f"{points} on {where} [{found.low:z.1f}, {found.high:z.1f}]: {'; '.join(said)}."


def _judge(points: Estimate, lines: Sequence[Line], number: str, seen: str) -> str:
    """What the interval of a difference in points says; `number` of documents were scored, `seen` has restarts, too."""
    if points.is_apart:
        worse, better = (line.name for line in (lines if points.value > 0 else lines[::-1]))
        return f"{better} is better than {worse} on text like these {number}; of other text or labels it says nothing"
    half = (points.high - points.low) / 2
    if half >= 100.0:
        return f"no difference was found, and with {seen} none would show"
    if half < 0.05:
        return f"no difference was found, for both score alike on {number}"
    return f"no difference was found; with {seen} a difference under {half:.1f} points does not show, with more it may"


def list_cautions(
    scored: Mapping[str, Any], split: str, metric: str, baselines: Mapping[str, Any], values: Mapping[str, float]
) -> list[str]:
    """Return a clause for each thing that a reader of figures must know, none where there is nothing.

    `scored` has the number of `examples` by split, and how many of them are `shared` with train; `metric` is a path
    into the baselines' figures, and `values` has it by the name of a model.
    """
    found = {name: flatten(dict(figures)).get(metric) for name, figures in baselines.items()}
    known = {name: value for name, value in found.items() if value is not None}
    cautions = []
    if known:
        best = max(known, key=lambda name: known[name])
        poor = [name for name, value in values.items() if value <= known[best]]
        if poor:
            cautions.append(
                f"the {best} baseline, which trains nothing, reaches {known[best]:.3f}, and {' and '.join(poor)} did "
                "no better"
            )
    if shared := scored.get("shared", {}).get(split, 0):  # of 0.1.0 it is not known
        cautions.append(
            f"{shared:,} of the {scored['examples'][split]:,} {split} examples are in train, too, so figures on "
            f"{split} are too high"
        )
    return cautions
