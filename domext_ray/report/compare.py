"""Models side by side: one table, one picture and one sentence for all comparisons; and the index of a folder's runs.

Enters: of each model a figure with its interval, and its difference to the first one; or the directories of
pre-training runs. Leaves: tables (Markdown), PNG files, and RUN.DIR/index.html. Of pre-training runs word bits
per character and the general probe compare between vocabularies. Bits per character do with one vocabulary; of another
one they know into how many pieces it cuts a word. Token losses do not compare, so they are left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import quote

import numpy as np
from markupsafe import Markup
from matplotlib.ticker import PercentFormatter

from domext_ray.config.options.submitted import hide_places
from domext_ray.config.pretrain import SettledConfig
from domext_ray.errors import ConfigError, DomextError, RunError, StorageError
from domext_ray.files import NUMBER, read_json
from domext_ray.intervals import LEVEL, Estimate, Resampled, compare, correct_holm
from domext_ray.report.figures import NO_BREAK, list_figures, measure_run
from domext_ray.report.page import fill_page, format_html, format_paragraph, format_section
from domext_ray.report.plots import COLORS, DASHED, MUTED, draw_intervals, new_picture
from domext_ray.report.summary import SUMMARY, read_origin, read_summary
from domext_ray.report.tables import NONE, Table, format_bounds
from domext_ray.runs import run_directory
from domext_ray.storage import Place, write_text
from domext_ray.training.metrics import MLM, find_last_step, find_losses, read_metrics

BITS, GENERAL = "eval/domain_bits_per_character", "eval/general_mlm_accuracy"
INDEX = "index.html"
_HEADER = ("run", "started (UTC)", "method", "base", "steps", "held-out loss", "general accuracy")
_FINETUNED = ("fine-tuned model", "task", "labelled set", "started from", "score", "against another model")
_SCORED = {**dict.fromkeys(("task", "set.name", "model.name", "metric"), str), "restarts.dev.mean": NUMBER}
_PAGES = ("report.html", "sweep.html")
_REMEDY = "delete it and run the job again, which writes it anew"


@dataclass(frozen=True)
class Line:
    """One model of a comparison."""

    name: str
    figure: Estimate
    difference: Estimate | None = None  # to the reference; None: it is the reference
    more: tuple[str, ...] = ()  # cells that follow the name
    values: tuple[float, ...] = ()  # the figure of every restart


def compare_with_first(
    names: Sequence[str], samples: Sequence[Resampled], more: Sequence[tuple[str, ...]]
) -> list[Line]:
    """Compare models with the first one; p values are corrected for their number (Holm)."""
    lines: list[Line] = []
    for name, sample, cells in zip(names, samples, more, strict=True):
        difference = compare(samples[0], sample) if lines else None
        lines.append(Line(name, sample.estimate(), difference, cells, tuple(sample.values.tolist())))
    return correct_lines(lines)


def correct_lines(lines: Sequence[Line]) -> list[Line]:
    """Return the lines with their p values corrected for how many there are (Holm)."""
    found = [line.difference.p_value if line.difference else None for line in lines]
    corrected = iter(correct_holm([p_value for p_value in found if p_value is not None]))
    return [
        line
        if line.difference is None or p_value is None
        else replace(line, difference=replace(line.difference, p_value=next(corrected)))
        for line, p_value in zip(lines, found, strict=True)
    ]


def tabulate(
    lines: Sequence[Line],
    figure: str,
    *,
    names: str = "",
    more: Sequence[str] = (),
    form: str = ".3f",
    change: str = "",
    notes: Sequence[str] = (),
) -> Table:
    """Return a line per model: the figure, its interval, and where there are any the differences.

    `names`, `figure`, `more` and `change` head the columns of names, figures, further cells and differences.
    """
    change = change or f"difference to {lines[0].name}"
    rows = []
    for line in lines:
        own, spread = line.difference, f" ± {np.std(line.values, ddof=1):{form}}" if len(line.values) > 1 else ""
        p_value = own.p_value if own else None
        rows.append(
            [
                *(line.name, *line.more, f"{line.figure.value:{form}}{spread}", show_interval(line.figure, form)),
                *((f"{own.value:+z{form}}", show_interval(own, f"+z{form}")) if own else (NONE, NONE)),
                NONE if p_value is None else "< 0.001" if p_value < 0.001 else f"{p_value:.3f}",
            ]
        )
    header = [names, *more, figure, "95 % interval", change, "95 % interval", "p (Holm)"]
    first = 2 + len(more)  # of the columns that are left out where they say nothing
    kept = [i for i in range(len(header)) if i < first or any(row[i] != NONE for row in rows)]
    return Table([header[i] for i in kept], [[row[i] for i in kept] for row in rows], notes)


def show_interval(found: Estimate, form: str = ".3f") -> str:
    """Return an interval in words; a dash where there is none."""
    return format_bounds(found.low, found.high, form) if found.interval else NONE


def describe_differences(lines: Sequence[Line]) -> str:
    """Return in one sentence which models differ from the reference by more than chance."""
    others = [(line.name, line.difference) for line in lines if line.difference is not None]
    if not others:
        return ""
    reference = next(line.name for line in lines if line.difference is None)
    is_tested = all(gap.p_value is not None for _, gap in others)
    apart = [name for name, gap in others if (gap.is_apart if gap.p_value is None else gap.p_value < LEVEL)]
    said = f"{', '.join(apart) or 'None'} differ{'' if len(apart) > 1 else 's'} from {reference} by more than chance"
    if is_tested:
        return f"{said} (p < {LEVEL:g}, corrected for {len(others)} comparison{'s' * (len(others) > 1)})."
    return f"{said}, by intervals over what was scored; they say nothing about another training."


def draw_lines(
    lines: Sequence[Line], path: Place, title: str, figure: str, form: str = ".3f", *, change: str = ""
) -> None:
    """Draw every model's figure with its interval and its restarts, and the differences beside them, as a PNG."""
    names, differences = [line.name for line in lines], [line.difference for line in lines]
    num_panels = 1 + any(differences)
    with new_picture(path, (2 + 4.5 * num_panels, 1.6 + 0.5 * len(lines))) as picture:
        left, *right = picture.subplots(1, num_panels, sharey=True, squeeze=False)[0]
        draw_intervals(left, names, [line.figure for line in lines], form)
        for place, line in enumerate(lines):
            if len(line.values) > 1:
                color = COLORS[place % len(COLORS)]
                left.plot(line.values, [place + 0.22] * len(line.values), ".", color=color, alpha=0.6)
        has_restarts = any(len(line.values) > 1 for line in lines)
        left.set(title=title, xlabel=figure + (", mean over restarts (dots)" if has_restarts else ""))
        for axes in right:
            draw_intervals(axes, names, differences, f"+z{form}")
            axes.axvline(0.0, color=MUTED, linewidth=1.2, linestyle=DASHED, zorder=1)
            axes.set(title="Difference", xlabel=change or f"difference to {names[0]}")


@dataclass(frozen=True)
class ComparedRun:
    """One run's part of a comparison: its directory's name, its summary, and its records that hold an evaluation."""

    name: str
    summary: dict[str, Any]
    evaluations: tuple[dict[str, Any], ...]


def choose_runs(runs: Sequence[str]) -> list[Place]:
    """Return the folders of --runs, each one once.

    A sweep is refused, and so is a run given twice, by whatever path: it would count as a seed of its own.
    """
    folders = [Place(run).resolve() for run in runs]
    for i, folder in enumerate(folders):
        if folder in folders[:i]:
            raise ConfigError(f"--runs must be different runs, and {str(folder)!r} is given twice.")
        if (folder / _PAGES[1]).is_file():
            raise ConfigError(f"--runs names {str(folder)!r}, a sweep; its page, {_PAGES[1]}, compares its trials.")
    return folders


def read_run(run_dir: Place) -> ComparedRun:
    """Read a finished run."""
    summary = read_summary(run_dir / SUMMARY)
    records = [record for record in read_metrics(run_dir / "metrics.jsonl") if record.get(BITS) is not None]
    if not records:
        raise RunError(f"{run_dir / 'metrics.jsonl'} has no evaluation; run the job again.")
    return ComparedRun(run_dir.name, summary, tuple(records))


def tabulate_runs(runs: Sequence[ComparedRun]) -> Table:
    """Return the runs as a table, and which bits decide; a last note says so if they do not compare."""
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
        for run, figures in ((compared, list_figures(compared.summary)) for compared in runs)
    ]
    warnings = describe_unequal_texts({run.name: run.summary["evaluation"]["domain_characters"] for run in runs})
    decides = "Between different vocabularies the word bits per character decide; with one vocabulary both figures do."
    return Table(header, rows, (decides, *warnings))


def describe_unequal_texts(num_characters: dict[str, int]) -> list[str]:
    """Return a warning if runs or methods scored different texts, given the scored characters; else nothing."""
    if len(set(num_characters.values())) < 2:
        return []
    counts = ", ".join(f"{name} {size:,}" for name, size in num_characters.items())
    return [f"Bits a character do not compare: the runs scored different numbers of characters ({counts})."]


def find_undominated(values: Sequence[Sequence[float]]) -> list[int]:
    """Return the places of the points on the Pareto front, given of each one figure per objective, more is better.

    No other point is at least as good as one of these in all objectives, and better in one.
    """
    table = np.array(values, dtype=np.float64).reshape(len(values), len(values[0]) if values else 0)
    return [i for i, own in enumerate(table) if not ((table >= own).all(axis=1) & (table > own).any(axis=1)).any()]


def draw_comparison(runs: Sequence[ComparedRun], path: Place) -> None:
    """Draw bits per character and general accuracy of the runs over their training seconds as a PNG."""
    panels = {
        BITS: ("Learned: held-out domain text", "bits per character (less is better)"),
        GENERAL: ("Kept: everyday English", "masked words predicted (%)"),
    }
    with new_picture(path, (11, 4.4)) as figure:
        for axes, (metric, (title, unit)) in zip(figure.subplots(1, 2), panels.items(), strict=True):
            for i, run in enumerate(runs):
                axes.plot(
                    *list_points(run, metric), color=COLORS[i % len(COLORS)], marker="o", markersize=4, label=run.name
                )
            axes.set(title=title, ylabel=unit, xlabel="seconds of training")
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, symbol=""))
        figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4)


def list_points(run: ComparedRun, metric: str) -> tuple[list[float], list[float]]:
    """Return a run's values of a metric, and before them the seconds of training that each one took."""
    measured = [record for record in run.evaluations if record[metric] is not None]
    return [record.get("time/seconds", 0.0) for record in measured], [record[metric] for record in measured]


def write_index(folder: Place) -> Place:
    """Write the index of the runs in a folder, RUN.DIR, and return its place.

    A folder that is damaged, or of a run that is being written, has a line that says so and stops nothing.
    """
    names = folder.list_names()
    runs = {name: cells for name in names if (cells := _read_cells(folder / name, _describe_run, len(_HEADER)))}
    newest = sorted(runs, key=lambda name: runs[name][0].removeprefix(NONE), reverse=True)
    rows = [(_link(folder, name, _PAGES[0]), *runs[name]) for name in newest]
    others = [name for name in names if name not in runs and (folder / name / _PAGES[0]).is_file()]
    tuned = [
        (_link(folder, name, _PAGES[0]), *_read_cells(folder / name, _describe_finetuned, len(_FINETUNED)))
        for name in others
    ]
    sweeps = [(_link(folder, name, _PAGES[1]), _PAGES[1]) for name in names if (folder / name / _PAGES[1]).is_file()]
    state = (
        f"{len(runs):,} pre-training run{'' if len(runs) == 1 else 's'}, the newest first; loss and general accuracy "
        "before and after."
    )
    parts = [
        format_paragraph(state, "state"),
        format_html(_HEADER, rows, "runs"),
        format_section("Fine-tuned models", format_html(_FINETUNED, tuned, "runs")),
        format_section("Sweeps", format_html((), sweeps, "pairs")),
    ]
    write_text(folder / INDEX, fill_page("Runs", parts))
    return folder / INDEX


def _read_cells(run_dir: Place, describe: Callable[[Place], tuple[str, ...]], width: int) -> tuple[str, ...]:
    """What the index says of a run behind its name; nothing of a folder that is none, and why not of a damaged one."""
    try:
        return describe(run_dir)
    except (DomextError, OSError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, StorageError) and not run_dir.is_local:  # a bucket that is silent is so for all runs
            raise
        reason = str(error).partition("; ")[0] if isinstance(error, DomextError) else f"{type(error).__name__}: {error}"
        return (*[NONE] * (width - 2), f"cannot be read ({hide_places(reason)[:120]})")


def _describe_finetuned(run_dir: Place) -> tuple[str, ...]:
    """The task of a fine-tuning, its set, its model, what that scored, and how it compares with another one."""
    summary = read_json(run_dir / SUMMARY, _REMEDY, _SCORED)
    split = "test" if "test" in summary["restarts"] else "dev"
    scored = summary["restarts"][split]
    low, high = scored.get("interval") or (math.nan, math.nan)
    score = f"{summary['metric']} {scored['mean']:.4f} on {split}"
    verdict = summary.get("against", {}).get("verdict", NONE)
    bounds = "" if math.isnan(low) else f" [{low:.3f},{NO_BREAK}{high:.3f}]"
    return summary["task"], summary["set"]["name"], summary["model"]["name"], score + bounds, verdict


def _describe_run(run_dir: Place) -> tuple[str, ...]:
    if "origin" not in run_directory.read_run(run_dir):
        return ()
    started, config = read_origin(run_dir)["started"], run_directory.read_config(run_dir, SettledConfig)
    step, path = find_last_step(run_dir / "metrics.jsonl"), run_dir / SUMMARY
    measured, steps = read_summary(path) if path.is_file() else {}, f"{step:,}"
    if not measured or measured["train"]["steps"] != step:  # it trains, or goes on
        measured = measure_run(read_metrics(run_dir / "metrics.jsonl"))
        steps += f" of {config.train.max_steps:,}"
    names, figures = find_losses(measured["domain"]) or MLM, list_figures(measured)
    return (
        started[:16].replace("T", " "),
        config.method.name,
        hide_places(config.base),
        steps,
        figures["loss"].show_pair() + (f" ({names.title})" if names is not MLM else ""),
        figures["general"].show_pair(with_change=True) if "general" in figures else NONE,
    )


def _link(folder: Place, name: str, page: str) -> str:
    if not (folder / name / page).is_file():
        return name
    return Markup('<a href="{}/{}">{}</a>').format(quote(name), page, name)
