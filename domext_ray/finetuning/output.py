"""What a fine-tuning run shows: its plan, a summary, a table, a picture and a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes

from domext_ray.config.finetune import FinetuneConfig
from domext_ray.config.options.build import dump_yaml
from domext_ray.families.errors_page import ERRORS
from domext_ray.families.label_counts import count_labels, count_shared, describe_set, list_label_rows
from domext_ray.families.metrics.scores import flatten
from domext_ray.finetuning.comparison import ScoredRun, list_cautions, tabulate_finetuned
from domext_ray.finetuning.plan import FinetunePlan
from domext_ray.finetuning.training import Point
from domext_ray.finetuning.trainings import PROGRESS
from domext_ray.intervals import Resampled
from domext_ray.progress import format_seconds
from domext_ray.report.compare import Line
from domext_ray.report.page import (
    fill_page,
    format_html,
    format_paragraph,
    format_pictures,
    format_section,
    format_settings,
)
from domext_ray.report.plots import BLUE, GREEN, MUTED, ORANGE, VIOLET, Picture, draw_legend, new_picture
from domext_ray.report.tables import NONE, Table
from domext_ray.runs.run_directory import TRAININGS
from domext_ray.runtime.trials import Outcome
from domext_ray.storage import Place, write_text
from domext_ray.training.metrics import read_metrics

MAX_BARS = 24
"""Figures of a picture at most; a set of many labels has the most important ones first."""
SCORED = ("dev", "test")
BY_LABEL = ".per_label."
"""In paths of figures of one label."""
_DROPPED = {"word_dropout": "words dropped", "new_word_dropout": "new words dropped"}
"""What shares of a training are called; one without them has none."""
_EPOCHS = ("last_epoch", "best_epoch")
"""Epochs of a training by its stage."""


@dataclass(frozen=True)
class ScoredGrid:
    """What a grid's trainings left, and what the chosen point reached."""

    outcomes: Sequence[Outcome]  # of all trainings, in the grid's order
    chosen: Sequence[Outcome]  # of the chosen point's restarts
    best: Outcome  # of these, the exported one
    splits: dict[str, dict[str, Any]]  # by split, "figures" of the exported one, those of its "steps", and "notes"
    samples: dict[str, Resampled]  # by split, the metric of the restarts
    baselines: dict[str, dict[str, dict[str, Any]]]  # figures of trivial baselines by split and name


def describe_finetune_plan(plan: FinetunePlan, against: FinetunePlan | None = None) -> str:
    """Return what a run would do: set, model and the one that it is compared with, parameters, trainings.

    With `--dry_run full` all options, as YAML, follow.
    """
    numbers = [len(each.trials) for each in (plan, against) if each]
    each = f"{numbers[0]} of each model" if len({*numbers}) == 1 else "{} of model, {} of against".format(*numbers)
    lines = [
        describe_set(plan.task.data),
        f"chosen by {plan.task.metric} on dev",
        *_describe_model(plan, "model"),
        *(_describe_model(against, "against") if against else []),
        f"trainings: {f'{each}, {sum(numbers)} in all' if against else numbers[0]}",
        f"run directory: {plan.folder}",
        f"\n{dump_yaml(plan.config).rstrip()}\n" if plan.config.dry_run == "full" else "all options: --dry_run full",
        "dry run: nothing was started",
    ]
    return "\n".join(lines)


def _describe_model(plan: FinetunePlan, role: str) -> list[str]:
    start = plan.start
    step = f", step {start.step:,}" if start.step else ""
    return [
        f"{role}: {start.kind} {start.name}{step}, its encoder's sha256 {start.sha256[:12]}",
        *(
            f"{name}: {trained:,} of {total:,} parameters train ({trained / total:.1%})"
            for name, (trained, total) in plan.counts.items()
        ),
    ]


def build_summary(plan: FinetunePlan, scored: ScoredGrid, seconds: float) -> dict[str, Any]:
    """Return the content of summary.json; `seconds` is the wall clock of this start, scoring and export included."""
    start, data, metric = plan.start, plan.task.data, plan.task.metric
    samples, best = scored.samples, scored.best
    figures = {split: record["figures"] for split, record in scored.splits.items()}
    complete = [outcome for outcome in scored.outcomes if outcome.is_complete]
    seconds_trained = sum(outcome.reached["train_seconds"] for outcome in complete)
    described = {
        "name": data.name,
        "sha256": data.sha256,
        "examples": {split: len(examples) for split, examples in data.splits.items()},
        "shared": count_shared(data),
        "labels": count_labels(data.splits, data.labels),
    }
    split = plan.splits[-1]
    means = {start.name: samples[split].mean}
    return {
        "task": plan.task.family,
        "set": described,
        "model": {"name": start.name, "kind": start.kind, "sha256": start.sha256},
        "metric": metric,
        "dev": figures["dev"],
        "test": figures.get("test", {}),
        "restarts": {
            "seeds": [outcome.config["seed"] for outcome in scored.chosen],
            **{
                split: {
                    "values": sample.values.tolist(),
                    "mean": sample.mean,
                    "std": sample.sd or 0.0,
                    "interval": sample.estimate().interval,
                }
                for split, sample in samples.items()
            },
        },
        "baselines": scored.baselines,
        "steps": {split: record["steps"] for split, record in scored.splits.items()},
        "best": {
            "point": best.config,
            **_pick(best, *_EPOCHS, "thresholds"),
            "chosen_by": f"mean of {metric} on dev over restarts",
        },
        "trainings": [
            {**outcome.config, **_pick(outcome, "dev", "steps", "train_seconds", *_EPOCHS)} for outcome in complete
        ],
        "failed": [
            {**outcome.config, "reason": outcome.failure, "may_try_again": outcome.may_try_again}
            for outcome in scored.outcomes
            if not outcome.is_complete
        ],
        "parameters": {
            name: {"trainable": trained, "total": total, "trainable_frac": trained / total}
            for name, (trained, total) in plan.counts.items()
        },
        "train": {
            "seconds": seconds_trained,
            "tokens_per_second": sum(outcome.reached["tokens"] for outcome in complete) / seconds_trained,
            "wall_seconds": seconds,
        },
        "notes": list(dict.fromkeys([*data.notes, *(note for own in scored.splits.values() for note in own["notes"])])),
        "warning": warn_of_little(plan.config, scored, metric),
        "cautions": list_cautions(described, split, metric, scored.baselines[split], means),
    }


def _pick(outcome: Outcome, *names: str) -> dict[str, Any]:
    return {name: outcome.reached[name] for name in names}


def warn_of_little(config: FinetuneConfig, scored: ScoredGrid, metric: str) -> str:
    """Return a sentence where the chosen training learned no more than a trivial baseline knows; "" where it did."""
    steps, baselines = scored.best.reached["steps"], scored.baselines["dev"]
    figure, majority = (get_figure(own, metric) for own in (scored.splits["dev"]["figures"], baselines["majority"]))
    if figure > max(0.0, majority) or figure >= 1.0:
        return ""
    rates, epochs = (", ".join(f"{value:g}" for value in values) for values in (config.grid.lr, config.grid.epochs))
    return (
        f"{metric} of {figure:.3f} on dev is no better than the majority baseline's {majority:.3f}: "
        f"{steps:,} steps taught the model too little; raise --grid.epochs (now {epochs}), or try other rates "
        f"with --grid.lr (now {rates})."
    )


def tabulate_summary(summary: Mapping[str, Any]) -> Table:
    """Return the short table that a run ends with, given the content of summary.json."""
    path, restarts = summary["metric"], summary["restarts"]
    rows: list[tuple[str, ...]] = []
    if len(restarts["seeds"]) > 1:
        name = f"{path}, mean of {len(restarts['seeds'])} restarts"
        rows.append((name, *(_show_restarts(restarts, split) for split in SCORED)))
    rows.append((f"{path}, exported model", *(_show_interval(summary[split], path) for split in SCORED)))
    for name in summary["baselines"]["dev"]:
        values = (summary["baselines"].get(split, {}).get(name) for split in SCORED)
        rows.append((f"baseline: {name}", *("" if own is None else f"{flatten(own)[path]:.3f}" for own in values)))
    point, seconds = summary["best"]["point"], summary["train"]["wall_seconds"]
    trained = sum(counts["trainable"] for counts in summary["parameters"].values())
    choice = " by the mean on dev over restarts" if len(restarts["seeds"]) > 1 else ""
    lines = [
        f"{summary['model']['name']} on {summary['set']['name']}: {trained:,} parameters trained; best of "
        f"{len(summary['trainings'])} trainings{choice}: {_describe_point({**point, **summary['best']})}; "
        f"{seconds / 60:.1f} min, {summary['train']['tokens_per_second']:,.0f} tokens/s a training",
    ]
    lines += [f"failed: {_describe_point(training)}: {training['reason']}" for training in summary["failed"]]
    lines += [f"note: {note}" for note in summary["notes"]]
    lines += [f"warning: {warning}" for warning in _list_warnings(summary)]
    return Table(("", *SCORED), rows, lines)


def _list_warnings(summary: Mapping[str, Any]) -> list[str]:
    """What a reader of a run's figures must know, each a sentence."""
    found = [summary["warning"]] if summary["warning"] else []
    for split in SCORED:
        values = summary["restarts"].get(split, {}).get("values", ())
        if not found and (number := sum(value <= 0.0 for value in values)):
            found.append(
                f"{number} of {len(values)} restarts have {summary['metric']} 0 or less on {split}: they learned "
                "nothing, and widen the interval of the mean; raise --grid.epochs, or give other rates (--grid.lr)."
            )
    return [*found, *(f"{text[0].upper()}{text[1:]}." for text in summary.get("cautions", []))]  # of 0.1.0 none


def describe_epochs(training: Mapping[str, Any]) -> str:
    """Return a training's epochs, and where patience ended it or kept an earlier one: "20 (7 trained, 4 best)"."""
    last, best = training.get("last_epoch", {}), training.get("best_epoch", {})
    parts = [
        f"{f'{name}: ' if len(last) > 1 else ''}{last[name]:g} trained, {best[name]:g} best"
        for name in last
        if best[name] < last[name]
    ]
    return f"{training['epochs']:g}" + (f" ({'; '.join(parts)})" if parts else "")


def _describe_point(point: Mapping[str, Any]) -> str:
    dropped = "".join(f"{what} {point[name]:g}, " for name, what in _DROPPED.items() if name in point)
    trained = f"rate {point['lr']:g}, batch {point['batch_size']}, {describe_epochs(point)} epochs"
    return f"{trained}, {dropped}seed {point['seed']}"


def get_figure(figures: Mapping[str, Any], path: str) -> float:
    """Return one of the figures that `Score.describe` gave."""
    return float(flatten(dict(figures))[path])


def _show_interval(figures: Mapping[str, Any], path: str) -> str:
    if not figures:
        return "none"
    low, high = figures["intervals"][path]
    return f"{get_figure(figures, path):.3f} [{low:.3f}, {high:.3f}]"


def _show_restarts(restarts: Mapping[str, Any], split: str) -> str:
    if split not in restarts:
        return "none"
    low, high = restarts[split]["interval"]
    return f"{restarts[split]['mean']:.3f} [{low:.3f}, {high:.3f}]"


def write_finetune_report(folder: Place, summary: Mapping[str, Any], compared: str = "") -> None:
    """Write report.html and scores.png into a run's directory, given the content of its summary.json.

    `compared` is what `format_pair` returned of a run with --against.
    """
    progress = {
        name.removesuffix(PROGRESS): read_metrics(folder / TRAININGS / name)
        for name in (folder / TRAININGS).list_names()
        if name.endswith(PROGRESS)
    }
    with new_picture(folder / "scores.png", (12.4, 4.4)) as picture:
        left, right = picture.subplots(1, 2)
        _draw_training(left, progress, summary)
        _draw_scores(right, summary)
    outcomes = [*((point, f"{point['dev']:.3f}") for point in summary["trainings"])]
    outcomes += [(point, f"failed: {point['reason']}") for point in summary["failed"]]
    dropped = [name for name in _DROPPED if any(name in point for point, _ in outcomes)]
    trainings = [
        (
            *(str(i), f"{point['lr']:g}", str(point["batch_size"]), describe_epochs(point)),
            *(f"{point.get(name, 0.0):g}" for name in dropped),
            *(str(point["seed"]), outcome),
        )
        for i, (point, outcome) in enumerate(outcomes, 1)
    ]
    paths = sorted(summary["dev"]["intervals"], key=lambda path: path != summary["metric"])  # the metric is first
    scores = [_show_splits(summary, path, path) for path in paths if BY_LABEL not in path]
    labels = list_label_rows(summary["set"].get("labels", {}))  # of 0.1.0 there are none
    by_label = [_show_splits(summary, row[0], f"f1{BY_LABEL}{row[0]}")[1:] for row in labels[1:]]
    has_scores = any(any(cells) for cells in by_label)
    shares = [_DROPPED[name] for name in dropped]
    header = ("", "rate", "batch", "epochs", *shares, "seed", f"{summary['metric']} on dev")
    parts = [
        format_paragraph(_describe_result(summary), "result"),
        *map(format_paragraph, _list_warnings(summary)),
        format_paragraph(summary.get("against", {}).get("verdict", ""), "result"),
        format_html(("", "dev", "test"), scores),
        compared,
        format_section(
            "Labels",
            format_html(
                (*labels[0], *(("F1 on dev", "F1 on test") if has_scores else ())),
                [(*row, *(cells if has_scores else ())) for row, cells in zip(labels[1:], by_label, strict=True)],
            ),
            *map(format_paragraph, summary["notes"]),
        ),
        format_section("Mistakes", _format_mistakes(summary.get("mistakes", {}))),  # of 0.1.0 there are none
        format_section("Pictures", format_pictures(_list_pictures(summary, progress))),
        format_section("Trainings", format_html(header, trainings)),
        format_section("What it took", format_html(("", ""), _list_costs(summary), "pairs")),
        format_section("Options", format_settings((folder / "config.yaml").read_text(encoding="utf-8"))),
    ]
    write_text(folder / "report.html", fill_page(folder.name, parts))


def _show_splits(summary: Mapping[str, Any], name: str, path: str) -> tuple[str, ...]:
    """A figure of dev and test under a name; empty where a split, or the figure, is not there."""
    splits = (summary[split] if path in summary[split].get("intervals", {}) else {} for split in SCORED)
    return (name, *(_show_interval(own, path) if own else "" for own in splits))


def _format_mistakes(mistakes: Mapping[str, Any]) -> str:
    if not mistakes:
        return ""
    kinds = ", ".join(f"{kind}: {number:,}" for kind, number in mistakes["mistakes"].items())
    said = f"{mistakes['wrong']:,} of {mistakes['examples']:,} dev examples are predicted wrongly ({kinds})."
    link = Markup('<a href="{}">What is wrong on dev</a>, with the text of the examples.')
    # numbers are more or less wrong, and counted nowhere
    return format_paragraph(said if kinds else "") + format_paragraph(link.format(ERRORS))


def _list_costs(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What a run took, in words."""
    took, counts = summary["train"], summary["parameters"]
    return [
        *(
            (
                f"parameters trained{f', {name}' * (len(counts) > 1)}",
                f"{own['trainable']:,} of {own['total']:,} ({own['trainable_frac']:.1%})",
            )
            for name, own in counts.items()
        ),
        (f"training, {len(summary['trainings'])} in all", format_seconds(took["seconds"])),
        ("speed of a training", f"{took['tokens_per_second']:,.0f} tokens/s"),
        ("the last start, with scoring and export", format_seconds(took["wall_seconds"])),
    ]


def format_pair(against: ScoredRun, run: ScoredRun, lines: Sequence[Line]) -> str:
    """Return the comparison with the model of --against: the difference, and what every restart of both reached.

    `lines` is what `compare_pair` found.
    """
    pair = against, run
    table = tabulate_finetuned(pair, lines)
    reached = [dict(zip(own.summary["restarts"]["seeds"], own.sample.values, strict=True)) for own in pair]
    restarts = [
        (f"seed {seed}", *(f"{values[seed]:.3f}" if seed in values else NONE for values in reached))
        for seed in sorted({**reached[0], **reached[1]})
    ]
    shared = f"{table.notes[0]} Both models have the same grid, seeds and examples; dev chose the point of each."
    return format_section(
        f"Compared with {lines[0].name}",
        format_html(table.header, table.rows),
        format_html(("", *(line.name for line in lines)), restarts),
        format_paragraph(shared),
    )


def _list_pictures(summary: Mapping[str, Any], progress: Mapping[str, list[dict[str, Any]]]) -> list[Picture]:
    return [
        Picture(
            lambda figure: _draw_training(figure.subplots(), progress, summary),
            "Loss of the trainings as they went on.",
            f"Training loss of {len(progress)} trainings by step.",
        ),
        Picture(
            lambda figure: _draw_scores(figure.subplots(), summary),
            "The exported model, with 95 % intervals over documents (over examples, if the set names none).",
            f"Scores of the exported model. {_describe_result(summary)}",
        ),
    ]


def _describe_result(summary: Mapping[str, Any]) -> str:
    """The run in one sentence: the mean over restarts where there are several."""
    split, restarts = "test" if summary["test"] else "dev", summary["restarts"]
    number = len(restarts["seeds"])
    return (
        f"{summary['model']['name']} on {summary['set']['name']}: {summary['metric']} {_show_restarts(restarts, split)}"
        f" on {split}{f', mean of {number} restarts' * (number > 1)}."
    )


def _draw_training(axes: Axes, progress: Mapping[str, Sequence[Mapping[str, Any]]], summary: Mapping[str, Any]) -> None:
    """Training loss by step, one line a training; the best one in colour."""
    best = Point(**summary["best"]["point"]).key
    for key, records in progress.items():
        for stage in dict.fromkeys(record["stage"] for record in records):
            own = [record for record in records if record["stage"] == stage]
            steps, losses = [record["step"] for record in own], [record["loss"] for record in own]
            is_best = key == best
            axes.plot(
                steps, losses, color=BLUE if is_best else MUTED, linewidth=1.6 if is_best else 0.8, zorder=1 + is_best
            )
    axes.set_title("Training loss")
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats a target)")
    axes.set_ylim(bottom=0)


def _draw_scores(axes: Axes, summary: Mapping[str, Any]) -> None:
    """Figures of dev and test with their intervals."""
    metric = summary["metric"].split(".")[0]
    paths = [path for path in summary["dev"]["intervals"] if path.split(".")[0] == metric][:MAX_BARS]
    places = np.arange(len(paths))[::-1]
    splits = [(split, color) for split, color in (("dev", GREEN), ("test", ORANGE)) if summary[split]]
    for i, (split, color) in enumerate(splits):
        values = flatten(summary[split])
        shown = [values.get(path, np.nan) for path in paths]
        bounds = np.array([summary[split]["intervals"].get(path, (np.nan, np.nan)) for path in paths])
        errors = np.abs(bounds.T - np.array(shown))
        offset = 0.12 - 0.24 * i if len(splits) > 1 else 0.0
        axes.errorbar(shown, places + offset, xerr=errors, fmt="o", color=color, capsize=3, label=split)
    baseline = flatten(summary["baselines"]["dev"].get("majority", {})).get(summary["metric"])
    if baseline is not None:
        axes.axvline(baseline, color=VIOLET, linewidth=1.0, linestyle="--", label="majority baseline (dev)")
    axes.set_yticks(places, [path.rpartition(BY_LABEL)[2] for path in paths])
    axes.set_title(f"{summary['model']['name']} on {summary['set']['name']}")
    draw_legend(axes, loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=3)
