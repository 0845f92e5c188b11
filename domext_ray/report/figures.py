"""The figures of a run: measured once from its records, listed once, and shown by everything that shows them.

Enters: the lines of metrics.jsonl, or summary.json. Leaves: `Figure` rows (what was measured before and after) and rows
of text (what it took), for the terminal, the run's page, its model card, the index of all runs and comparisons.

"Before" is the base: the model before its first step, or where new words or modules change that, the base itself. The
model before its first step is then "untrained". Changes are counted from the base where it was asked the same.

Accuracies are shares of tokens that are predicted exactly, so their intervals are binomial (Wilson 1927; of a change
Newcombe 1998, method 10). The same tokens are asked before and after: the interval of a change, which takes them for
different ones, is rather too wide than too narrow. Losses have none: their spread over tokens is not recorded.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from domext_ray.config.mixture import DOMAIN as DOMAIN_PART
from domext_ray.files import NUMBER
from domext_ray.intervals import Estimate, subtract
from domext_ray.progress import format_seconds
from domext_ray.report.tables import NONE, Rows, Table
from domext_ray.runs.events import STAGES
from domext_ray.training.metrics import DOMAIN, MLM, TRAIN, find_losses, find_run_losses

NO_BREAK = "\u00a0"
"""Between the ends of an interval, which stay on one line."""
UNTRAINED = "untrained"
"""Head of the column for a model that does not begin as its base, before its first step."""
RECENT_STEPS = 100
"""A part's training loss is the mean over so many of the newest steps: one step has few rows of it."""
ROUTED = "with its router"
"""Head of the column for a run with a router, which sends each row to its adapter or to the base."""
Z = 1.959964
"""Of a normal distribution 95 % are within so many standard deviations."""
_WORD_BITS = "word_bits_per_character"
_COST = {
    "tokens": ("tokens", "{:,}"),
    "tokens_per_second": ("tokens per second", "{:,.0f}"),
    "data_wait_frac": ("share of the steps that waited for data", "{:.1%}"),
    "gigaflops_per_second": ("operations per second", "{:,.0f} GFLOP/s"),
    "mfu": ("share of the card's published peak", "{:.0%}"),
    "peak_memory_mb": ("most memory of a worker", "{:,.0f} MB"),
}
"""Of "train" in a summary: what a figure is called, and its form."""


def measure_run(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of a run before and after, as far as it is: the first evaluation and the newest one.

    They are "domain" and "general" (after is None while only the start was evaluated), "evaluation" (what they were
    measured on), of a mixture "parts", once a step was trained "train", and of a run with a router "routed": "domain"
    and "general" at its end, where the router sends each row to its adapter or to the base. "of_base" are those of the
    base itself, and how many general words it was asked for, where the model does not begin as its base.
    """
    names = find_run_losses(records)
    keys = {"domain": (names.loss, names.accuracy, "bits_per_character", _WORD_BITS), "general": ("mlm_accuracy",)}
    evaluated = [record for record in records if find_losses(record, DOMAIN)]
    before = evaluated[0] if evaluated else {}
    after = evaluated[-1] if evaluated and evaluated[-1]["step"] else {}

    def pick(record: Mapping[str, Any], start: str = "eval/") -> dict[str, dict[str, Any]]:
        return {text: {key: record.get(f"{start}{text}_{key}") for key in own} for text, own in keys.items()}

    first, last, routed = pick(before), pick(after), pick(after, "eval/routed_")
    sizes = ("domain_tokens", "domain_characters", "general_words")
    measured: dict[str, Any] = {
        **{text: {key: _pair(first[text][key], last[text][key]) for key in own} for text, own in keys.items()},
        "evaluation": {name: (after or before).get(f"eval/{name}", 0) for name in sizes},
    }
    if any(f"eval/routed_domain_{key}" in after for key in keys["domain"]):
        measured["routed"] = routed
    if "eval/base_general_words" in before:
        measured["of_base"] = {**pick(before, "eval/base_"), "general_words": before["eval/base_general_words"]}
    if parts := _measure_parts(records):
        measured["parts"] = parts
    if steps := [record for record in records if find_losses(record, TRAIN) and _is_timed(record)]:
        measured["train"] = _measure_steps(steps)
    return measured


def _pair(before: float | None, after: float | None) -> dict[str, float | None]:
    return {"before": before, "after": after}


def _is_timed(record: Mapping[str, Any]) -> bool:
    """Whether a step's line has what all lines of steps have, and nobody has edited it."""
    figures = [record.get(name) for name in ("train/tokens", "time/seconds", "data/wait_seconds")]
    return all(isinstance(figure, NUMBER) for figure in figures) and record["time/seconds"] > 0


def _measure_steps(steps: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What the steps took so far; of how fast they computed the median of those that say it."""
    last, seconds = steps[-1], steps[-1]["time/seconds"]
    measured = {
        "steps": last["step"],
        "tokens": last["train/tokens"],
        "tokens_per_second": last["train/tokens"] / seconds,
        "data_wait_frac": sum(step["data/wait_seconds"] for step in steps) / seconds,
        "wall_seconds": seconds,
    }
    for name in ("gigaflops_per_second", "mfu"):
        if values := [step[f"throughput/{name}"] for step in steps if f"throughput/{name}" in step]:
            measured[name] = statistics.median(values)
    peaks = [step["memory/peak_mb"] for step in steps if "memory/peak_mb" in step]
    return measured | ({"peak_memory_mb": max(peaks)} if peaks else {})


def _measure_parts(records: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """What was read of each text of a mixture, and what it did to its losses (nats); empty: the run reads one text."""
    found: dict[str, dict[str, list[tuple[int, Any]]]] = {}
    for record in records:
        for key in record:
            if key.startswith("parts/") and key.count("/") == 2:
                _, part, figure = key.split("/")
                values = found.setdefault(part, defaultdict(list))[figure]
                values += [(record["step"], record[key])] if record[key] is not None else []
    measured = {}
    for part, figures in found.items():
        tokens, epochs, recent = (
            [value for _, value in figures[name][-RECENT_STEPS:]] for name in ("tokens", "epochs", "train_loss")
        )
        held_out = figures["held_out_loss"] or [(0, None)]
        measured[part] = {
            "tokens": tokens[-1] if tokens else None,
            "epochs": epochs[-1] if epochs else None,
            "train_loss": sum(recent) / len(recent) if recent else None,
            "held_out_loss": _pair(held_out[0][1], held_out[-1][1] if held_out[-1][0] else None),
        }
    return measured


@dataclass(frozen=True)
class Figure:
    """One figure of a run, before and after its training."""

    name: str  # for people who have the run before them
    help: str  # the same for those who have only its figures, with its unit
    form: str  # as for `format`; shares, in per cent, change by points, and others in proportion
    before: float | None  # of the base; None: not measured
    after: float | None  # None: not measured, or not yet
    number: int = 0  # it is a share of so many; 0: it has no interval
    routed: float | None = None  # what it is with the run's router
    untrained: float | None = None  # before the first step, where that is not the base
    base_number: int = 0  # `number` of the base

    @property
    def is_measured(self) -> bool:
        """Whether there is any value."""
        return not (self.reference is self.after is None)

    @property
    def reference(self) -> float | None:
        """What changes are counted from: the base, or the untrained model where the base was not asked the same."""
        return self.untrained if self.before is None else self.before

    @property
    def direction(self) -> str:
        """Where it went; empty: that is not known."""
        change = self.estimate_change(self.after)
        if change is None:
            return ""
        if change.interval and not change.is_apart:
            return f"is {self.show_change(self.after)}"
        return "rose" if change.value > 0 else "fell" if change.value else "is unchanged"

    def show(self, value: float | None) -> str:
        """Write a value."""
        return NONE if value is None else format(value, self.form)

    def estimate_change(self, after: float | None) -> Estimate | None:
        """Return how far a value is from the reference, with its interval where it has one; None: that is not known."""
        if self.reference is None or after is None:
            return None
        if not self.number:
            return Estimate(after - self.reference)
        return subtract(estimate_share(after, self.number), estimate_share(self.reference, self._reference_number))

    @property
    def _reference_number(self) -> int:
        return self.number if self.before is None else self.base_number or self.number

    def show_change(self, after: float | None, *, as_number: bool = False) -> str:
        """Write how far a value is from the reference; unless `as_number`, "unchanged" where an interval has 0."""
        change = self.estimate_change(after)
        if change is None:
            return NONE
        if change.interval and not change.is_apart and not as_number:
            return f"unchanged, ±{NO_BREAK}{50 * (change.high - change.low):.1f} points"
        if self.form.endswith("%"):
            return f"{100 * change.value:+z.1f} points"
        return f"{change.value / self.reference:+z.1%}" if self.reference else NONE

    def show_pair(self, *, with_change: bool = False) -> str:
        """Write both values in one cell, of a run that has only begun the first one."""
        if self.after is None:
            return self.show(self.reference)
        change = f" ({self.show_change(self.after)})" if with_change else ""
        return f"{self.show(self.reference)} → {self.show(self.after)}{change}"

    def list_cells(self, *, with_untrained: bool = False, with_intervals: bool = False) -> list[str]:
        """Return before, untrained if asked for, after and change; if asked for, with those 95 % intervals it has."""
        values = [(self.before, self._reference_number), (self.after, self.number)]
        values[1:1] = [(self.untrained, self.number)] if with_untrained else []
        cells = [self.show(value) for value, _ in values]
        if not with_intervals or not self.number:
            return [*cells, self.show_change(self.after, as_number=True)]
        found = [None if value is None else estimate_share(value, number) for value, number in values]
        cells = [cell + _show_bounds(share, ".1f") for cell, share in zip(cells, found, strict=True)]
        change = self.estimate_change(self.after)
        bounds = _show_bounds(change, "+z.1f") if change and change.is_apart else ""
        return [*cells, self.show_change(self.after) + bounds]


def _show_bounds(found: Estimate | None, form: str) -> str:
    """Write an interval in per cent; nothing where there is none."""
    return "" if found is None else f" [{100 * found.low:{form}},{NO_BREAK}{100 * found.high:{form}}]"


def list_figures(summary: Mapping[str, Any]) -> dict[str, Figure]:
    """Return the figures of a summary: loss, accuracy, and of masked words also bits, word_bits and general."""
    names, sizes = find_losses(summary["domain"]) or MLM, summary.get("evaluation", {})
    start, share = "held-out domain" if names is MLM else "held-out", names.share or "accuracy"
    bits, word_bits = "bits per character", "word bits per character"
    alone = f"words one at a time ({word_bits}, comparable between vocabularies)"
    rows = [
        ("loss", f"{start} {names.title}", names.loss_help, ".3f", names.loss),
        ("accuracy", f"{start} {share}", names.accuracy_help, ".1%", names.accuracy),
        ("bits", bits, f"masked words ({bits})", ".3f", "bits_per_character"),
        ("word_bits", word_bits, alone, ".3f", _WORD_BITS),
        ("general", "general-probe accuracy", "masked words predicted", ".1%", "mlm_accuracy"),
    ]
    figures = {}
    for name, title, help, form, key in rows if names is MLM else rows[:2]:
        text, source, size = "domain", "Held-out domain text", "domain_tokens"
        if name == "general":
            text, source, size = "general", "General sentences", "general_words"
        values = summary.get(text, {}).get(key, _pair(None, None))
        routed, base = (summary.get(whose, {}).get(text, {}).get(key) for whose in ("routed", "of_base"))
        figure = Figure(title, f"{source}, {help}", form, values["before"], values["after"], routed=routed)
        if "of_base" in summary:
            figure = replace(figure, before=base, untrained=values["before"])
        if form == ".1%":
            asked = summary.get("of_base", {}).get("general_words", 0) if name == "general" else 0
            figure = replace(figure, number=sizes.get(size, 0), base_number=asked)
        figures[name] = figure
    return {name: figure for name, figure in figures.items() if name != "word_bits" or figure.is_measured}


def list_parts(summary: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return the rows part, tokens, epochs, training loss, held-out loss before, after, and its change."""
    rows = []
    for name, part in summary.get("parts", {}).items():
        forms = {"tokens": ",", "epochs": ".2f", "train_loss": ".3f"}
        read = [NONE if part[key] is None else format(part[key], form) for key, form in forms.items()]
        rows.append((name, *read, *Figure(name, "", ".3f", **part["held_out_loss"]).list_cells()))
    return rows


def list_columns(summary: Mapping[str, Any], after: str = "after") -> tuple[str, ...]:
    """Return the header of `list_rows`; `after` is what the newest figures are called."""
    return (
        *("", "before", *([UNTRAINED] if "of_base" in summary else []), after, "change"),
        *([ROUTED] if "routed" in summary else []),
    )


def list_rows(summary: Mapping[str, Any], *, with_intervals: bool = True) -> list[tuple[str, ...]]:
    """Return a row for each figure, under `list_columns`; with a router the last cell is what is reached with that."""
    rows = []
    for figure in list_figures(summary).values():
        reached = figure.show_change(figure.routed, as_number=not with_intervals)
        routed = NONE if figure.routed is None else f"{figure.show(figure.routed)} ({reached})"
        cells = figure.list_cells(with_untrained="of_base" in summary, with_intervals=with_intervals)
        rows.append((figure.name, *cells, *([routed] if "routed" in summary else [])))
    return rows


def take_routed(summary: dict[str, Any]) -> dict[str, Any]:
    """Return a summary, of a run with a router, whose figures after training are those with it."""
    routed: dict[str, Any] = {}
    for text, after in summary["routed"].items():
        routed[text] = {name: {**pair, "after": after.get(name)} for name, pair in summary[text].items()}
    return {**summary, **routed}


def tabulate_summary(summary: Mapping[str, Any]) -> Table:
    """Return the short table that a run ends with: before, after and change of each figure, then what it took."""
    columns, start = list_columns(summary), [NONE] if "of_base" in summary else []
    parts = [(f"held-out {name} loss", *start, *own[3:]) for name, *own in list_parts(summary) if name != DOMAIN_PART]
    rows = [columns, *list_rows(summary, with_intervals=False), *parts]
    header, *cells = [(*row, "")[: len(columns)] for row in rows]
    counts, train = summary["parameters"], summary["train"]
    took = (
        f"{counts['trainable']:,} parameters trained, {counts['trainable_frac']:.1%} of base and extension; "
        f"{train['steps']:,} steps, {train['tokens']:,} tokens in {format_seconds(train['wall_seconds'])} "
        f"({train['tokens_per_second']:,.0f} tokens/s, {train['data_wait_frac']:.1%} of the time waiting for data)"
    )
    return Table(header, cells, [took])


def format_summary(summary: Mapping[str, Any]) -> str:
    """Return that table for the terminal."""
    return tabulate_summary(summary).show_text(gap=3)


def find_comparable(summary: Mapping[str, Any]) -> Figure:
    """Return the figure that says what a run has changed: its loss, or of another vocabulary than the base's the bits.

    The losses of two vocabularies are of other tokens, and do not compare.
    """
    figures = list_figures(summary)
    names = ("word_bits", "bits", "loss") if "of_base" in summary else ("loss",)
    return next((figures[name] for name in names if name in figures and figures[name].direction), figures["loss"])


def describe_result(summary: Mapping[str, Any]) -> str:
    """Return in one sentence where a run's figures went; the figures stand in the table below it."""
    figures, own = list_figures(summary), find_comparable(summary)
    loss, accuracy, *others = figures.values()
    name = f"{own.name[0].upper()}{own.name[1:]}"
    if not own.direction:
        return f"{name} was not measured after training."
    said = f"{name} {own.direction}"
    if own.name != loss.name:
        said = f"{name} {own.direction} from {own.show(own.reference)} to {own.show(own.after)} (lower is better)"
    elif accuracy.direction:
        said += f" and {accuracy.name.removeprefix('held-out ')} {accuracy.direction}"
    if others and others[-1].direction:
        said += f", while accuracy on general sentences {others[-1].direction}"
    return f"{said}."


def describe_sizes(summary: Mapping[str, Any]) -> str:
    """Return what a run's figures were measured on, and what the intervals say."""
    sizes, names = summary["evaluation"], find_losses(summary["domain"]) or MLM
    counted = "masked tokens" if names is MLM else f"{names.unit}s"
    said = {"domain_tokens": f"{counted} of held-out text", "general_words": "words of general sentences"}
    measured = [f"{sizes[name]:,} {text}" for name, text in said.items() if sizes[name]]
    if not measured:
        return ""
    decides = "Between models of different vocabularies the word bits decide, which the cuts of words do not change. "
    return (decides if "word_bits" in list_figures(summary) else "") + (
        f"Measured on {' and '.join(measured)}, the same ones before and after. {_describe_base(summary)}In brackets: "
        f"95 % intervals in points, as if every {names.unit} were drawn on its own; those of a change are on the wide "
        "side, and a change that its interval does not tell from 0 is called unchanged, with half of the interval. "
        "Losses have no interval. One seed: how far another seed lands is not in them."
    )


def _describe_base(summary: Mapping[str, Any]) -> str:
    """Say what "before" and "untrained" are, where they differ; else nothing."""
    base = summary.get("of_base")
    if base is None:
        return ""
    said = "Before is the base itself; untrained is the model before its first step, when its new parts knew nothing. "
    if base["general_words"] != summary["evaluation"]["general_words"]:
        said += f"The base was asked for the {base['general_words']:,} general words that are one token for it. "
    if any(figure.before is None and figure.untrained is not None for figure in list_figures(summary).values()):
        said += "What depends on the vocabulary is counted from the untrained model. "
    return said


def list_cost(summary: Mapping[str, Any]) -> Rows:
    """Return what a run's steps took so far, and how near they came to what the machine can do; nothing before them."""
    train = summary.get("train")
    if train is None:
        return []
    rows = [(title, form.format(train[name])) for name, (title, form) in _COST.items() if name in train]
    return [("time of steps", format_seconds(train["wall_seconds"])), *rows]


def list_times(times: Mapping[str, float]) -> Rows:
    """Return what each stage of a job took, given its seconds by `events.STAGES`."""
    return [(STAGES[stage], f"{seconds:,.1f} s") for stage, seconds in times.items()]


def describe_times(times: Mapping[str, float]) -> str:
    """Return `list_times` in one line."""
    stages = ", ".join(f"{title} {seconds}" for title, seconds in list_times(times))
    return f"the job took {format_seconds(sum(times.values()))}: {stages}"


def estimate_share(share: float, number: int) -> Estimate:
    """Return a share of 0 to 1, of so many, with Wilson's 95 % interval."""
    scale = 1 + Z**2 / number
    middle = share + Z**2 / (2 * number)
    half = Z * math.sqrt(share * (1 - share) / number + Z**2 / (4 * number**2))
    return Estimate(share, max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale))
