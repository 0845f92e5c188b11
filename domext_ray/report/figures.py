"""The figures of a run: measured once from its records, listed once, and shown by everything that shows them.

Enters: the lines of metrics.jsonl, or summary.json. Leaves: `Figure` rows (what was measured before and after) and rows
of text (what it took), for the terminal, the run's page, its model card, the index of all runs and comparisons.

Accuracies are shares of tokens that are predicted exactly, so their intervals are binomial (Wilson 1927; of a change
Newcombe 1998, method 10). The same tokens are asked before and after: the interval of a change, which takes them for
different ones, is rather too wide than too narrow. Losses have none: their spread over tokens is not recorded.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from domext_ray.config.mixture import DOMAIN as DOMAIN_PART
from domext_ray.progress import format_seconds
from domext_ray.report.tables import NONE, Rows, format_text
from domext_ray.runs.events import STAGES
from domext_ray.runs.losses import DOMAIN, MLM, TRAIN, find_losses, find_run_losses

NO_BREAK = "\u00a0"
"""Between the ends of an interval, which stay on one line."""
RECENT_STEPS = 100
"""A part's training loss is the mean over so many of the newest steps: one step has few rows of it."""
ROUTED = "with its router"
"""Head of the column for a run with a router, which sends each row to the domain or to the base."""
Z = 1.959964
"""Of a normal distribution 95 % are within so many standard deviations."""
Pair = Mapping[str, float | None]
_NOTHING: Pair = {"before": None, "after": None}


def measure_run(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of a run before and after, as far as it is: the first evaluation and the newest one.

    Args:
        records: lines of metrics.jsonl.

    Returns:
        "domain" and "general" (after is None while only the start was evaluated), "evaluation" (what they were measured
        on), of a mixture "parts", once a step was trained "train", and of a run with a router "routed": "domain" and
        "general" at its end, where the router sends each row to the domain or to the base.
    """
    names = find_run_losses(records)
    steps = [each for each in records if find_losses(each, TRAIN)]
    evaluated = [each for each in records if find_losses(each, DOMAIN)]
    before = evaluated[0] if evaluated else {}
    after = evaluated[-1] if evaluated and evaluated[-1]["step"] else {}

    def pair(name: str) -> Pair:
        return {"before": before.get(f"eval/{name}"), "after": after.get(f"eval/{name}")}

    figures = (names.loss, names.accuracy, "bits_per_character", "word_bits_per_character")
    sizes = ("domain_tokens", "domain_characters", "general_words")
    measured: dict[str, Any] = {
        "domain": {name: pair(f"domain_{name}") for name in figures},
        "general": {"mlm_accuracy": pair("general_mlm_accuracy")},
        "evaluation": {name: (after or before).get(f"eval/{name}", 0) for name in sizes},
    }
    if any(f"eval/routed_domain_{name}" in after for name in figures):
        measured["routed"] = {
            "domain": {name: after.get(f"eval/routed_domain_{name}") for name in figures},
            "general": {"mlm_accuracy": after.get("eval/routed_general_mlm_accuracy")},
        }
    if parts := _measure_parts(records):
        measured["parts"] = parts
    if steps:
        last = steps[-1]
        seconds = last["time/seconds"]
        measured["train"] = {
            "steps": last["step"],
            "tokens": last["train/tokens"],
            "tokens_per_second": last["train/tokens"] / seconds,
            "data_wait_frac": sum(each["data/wait_seconds"] for each in steps) / seconds,
            "wall_seconds": seconds,
            **_measure_speed(steps),
        }
    return measured


def _measure_speed(steps: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Medians over the steps that say how fast they computed, and the most memory."""
    speed = {}
    for name in ("gigaflops_per_second", "matmul_share", "mfu"):
        if values := [each[f"throughput/{name}"] for each in steps if f"throughput/{name}" in each]:
            speed[name] = statistics.median(values)
    peaks = [each["memory/peak_mb"] for each in steps if "memory/peak_mb" in each]
    return speed | ({"peak_memory_mb": max(peaks)} if peaks else {})


def _measure_parts(records: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """What was read of each text of a mixture, and what it did to its losses (nats); empty: the run reads one text."""
    found: dict[str, dict[str, list[tuple[int, Any]]]] = {}
    for each in records:
        for key, value in each.items():
            if key.startswith("parts/"):
                _, part, figure = key.split("/")
                own = found.setdefault(part, {}).setdefault(figure, [])
                own += [(each["step"], value)] if value is not None else []
    measured = {}
    for part, figures in found.items():
        recent = [loss for _, loss in figures.get("train_loss", [])[-RECENT_STEPS:]]
        held_out = figures.get("held_out_loss", [])
        newest = {name: figures[name][-1][1] if figures.get(name) else None for name in ("tokens", "epochs")}
        measured[part] = {
            **newest,
            "train_loss": sum(recent) / len(recent) if recent else None,
            "held_out_loss": {
                "before": held_out[0][1] if held_out else None,
                "after": held_out[-1][1] if held_out and held_out[-1][0] else None,
            },
        }
    return measured


@dataclass(frozen=True)
class Figure:
    """One figure of a run, before and after its training.

    Args:
        name: for people who have the run before them.
        help: the same for those who have only its figures, with its unit.
        form: of a value, as for `format`; shares, in per cent, change by points, and others in proportion.
        before, after: its values; None: not measured, or not yet.
        number: it is a share of so many; 0: it has no interval.
        routed: what it is with the run's router.
    """

    name: str
    help: str
    form: str
    before: float | None
    after: float | None
    number: int = 0
    routed: float | None = None

    @property
    def is_measured(self) -> bool:
        """Whether there is any value."""
        return self.before is not None or self.after is not None

    def show(self, value: float | None) -> str:
        """Write a value."""
        return NONE if value is None else format(value, self.form)

    def show_pair(self, *, with_change: bool = False) -> str:
        """Write both values in one cell, of a run that has only begun the first one."""
        if self.after is None:
            return self.show(self.before)
        change = f" ({self.show_change(self.after)})" if with_change else ""
        return f"{self.show(self.before)} → {self.show(self.after)}{change}"

    def show_change(self, after: float | None) -> str:
        """Write how far a value is from the one before."""
        if self.before is None or after is None or (not self.before and not self.is_share):
            return NONE
        if self.is_share:
            return f"{100 * (after - self.before):+.1f} points"
        return f"{after / self.before - 1:+.1%}"

    @property
    def is_share(self) -> bool:
        """Whether it is a share, in per cent."""
        return self.form.endswith("%")

    def list_cells(self) -> tuple[str, str, str]:
        """Return before, after and change."""
        return self.show(self.before), self.show(self.after), self.show_change(self.after)

    def list_intervals(self) -> tuple[str, str, str]:
        """Return before, after and change, with 95 % intervals where the figure has one."""
        before, after, change = self.list_cells()
        if self.before is None or not self.number:
            return before, after, change
        before += _bracket(find_bounds(self.before, self.number), ".1f")
        if self.after is not None:
            after += _bracket(find_bounds(self.after, self.number), ".1f")
            change += _bracket(find_change_bounds(self.before, self.after, self.number), "+.1f")
        return before, after, change

    def show_routed(self) -> str:
        """Write what it is with the run's router, and how far that is from before."""
        return NONE if self.routed is None else f"{self.show(self.routed)} ({self.show_change(self.routed)})"

    def describe_change(self) -> str:
        """Say where it went; empty: that is not known."""
        if self.before is None or self.after is None:
            return ""
        return "stayed" if self.before == self.after else "rose" if self.after > self.before else "fell"


def list_figures(summary: Mapping[str, Any]) -> dict[str, Figure]:
    """Return a run's figures by what they are of: loss, accuracy, and of masked words also bits, word_bits and general.

    Args:
        summary: content of summary.json, or what `measure_run` returns.
    """
    names, sizes = find_losses(summary["domain"]) or MLM, summary.get("evaluation", {})
    number, general_number = sizes.get("domain_tokens", 0), sizes.get("general_words", 0)

    def make(name: str, help: str, form: str, text: str, key: str, number: int = 0) -> Figure:
        pair = summary.get(text, {}).get(key, _NOTHING)
        routed = summary.get("routed", {}).get(text, {}).get(key)
        texts = {"domain": "Held-out domain text", "general": "General sentences"}
        return Figure(name, f"{texts[text]}, {help}", form, pair["before"], pair["after"], number, routed)

    domain = "domain " if names is MLM else ""
    share = names.share or "accuracy"
    figures = {
        "loss": make(f"held-out {domain}{names.title}", names.loss_help, ".3f", "domain", names.loss),
        "accuracy": make(f"held-out {domain}{share}", names.accuracy_help, ".1%", "domain", names.accuracy, number),
    }
    if names is not MLM:
        return figures
    bits, words = "bits_per_character", "word_bits_per_character"
    said = "words one at a time (word bits per character, comparable between vocabularies)"
    figures["bits"] = make("bits per character", "masked words (bits per character)", ".3f", "domain", bits)
    figures["word_bits"] = make("word bits per character", said, ".3f", "domain", words)
    said = "masked words predicted"
    figures["general"] = make("general-probe accuracy", said, ".1%", "general", "mlm_accuracy", general_number)
    return figures if figures["word_bits"].is_measured else {k: v for k, v in figures.items() if k != "word_bits"}


def list_part_figures(summary: Mapping[str, Any]) -> dict[str, Figure]:
    """Return the held-out losses of the texts of a mixture, by their names."""
    return {
        name: Figure(f"held-out {name} loss", "", ".3f", *(each["held_out_loss"][when] for when in ("before", "after")))
        for name, each in summary.get("parts", {}).items()
    }


def list_parts(summary: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return the rows part, tokens, epochs, training loss, held-out loss before, after, and its change."""
    rows = []
    for name, figure in list_part_figures(summary).items():
        each = summary["parts"][name]
        read = (each["tokens"], ","), (each["epochs"], ".2f"), (each["train_loss"], ".3f")
        cells = (NONE if value is None else format(value, form) for value, form in read)
        rows.append((name, *cells, *figure.list_cells()))
    return rows


def take_routed(summary: dict[str, Any]) -> dict[str, Any]:
    """Return a summary whose figures after training are those with the run's router.

    Args:
        summary: content of summary.json, with "routed".
    """
    routed = summary["routed"]

    def put(name: str) -> dict[str, Any]:
        return {each: {**pair, "after": routed[name].get(each)} for each, pair in summary[name].items()}

    return {**summary, "domain": put("domain"), "general": put("general")}


def get_word_bits(summary: Mapping[str, Any]) -> Pair:
    """Return a run's word bits per character, before and after; None where they were not measured."""
    bits: Pair = summary["domain"].get("word_bits_per_character", _NOTHING)
    return bits


def list_rows(summary: Mapping[str, Any], *, with_intervals: bool = True) -> list[tuple[str, ...]]:
    """Return the rows figure, before, after, change; of a run with a router a fifth cell, what it reaches with that."""
    rows = []
    for each in list_figures(summary).values():
        cells = each.list_intervals() if with_intervals else each.list_cells()
        rows.append((each.name, *cells, *([each.show_routed()] if "routed" in summary else [])))
    return rows


def format_summary(summary: Mapping[str, Any]) -> str:
    """Return the short table that a run ends with: before, after and change of each figure, then what it took.

    Args:
        summary: content of summary.json.
    """
    parts = [
        (each.name, *each.list_cells()) for name, each in list_part_figures(summary).items() if name != DOMAIN_PART
    ]
    rows = [("", "before", "after", "change", ROUTED), *list_rows(summary, with_intervals=False), *parts]
    width = 5 if "routed" in summary else 4
    table = format_text([(*row, *[""] * 5)[:width] for row in rows], gap=3)
    counts, train = summary["parameters"], summary["train"]
    decoder = f", and {counts['decoder']:,} of a decoder" if "decoder" in counts else ""
    return (
        f"{table}\n{counts['trainable']:,} parameters trained, {counts['trainable_frac']:.1%} of base and extension"
        f"{decoder}; {train['steps']:,} steps, {train['tokens']:,} tokens in {format_seconds(train['wall_seconds'])} "
        f"({train['tokens_per_second']:,.0f} tokens/s, {train['data_wait_frac']:.1%} of the time waiting for data)"
    )


def describe_result(summary: Mapping[str, Any]) -> str:
    """Return in one sentence where a run's figures went; the figures stand in the table below it."""
    loss, accuracy, *others = list_figures(summary).values()
    if not loss.describe_change():
        return f"{loss.name.capitalize()} was not measured after training."
    said = f"{loss.name.capitalize()} {loss.describe_change()}"
    if accuracy.describe_change():
        said += f" and {accuracy.name.removeprefix('held-out ')} {accuracy.describe_change()}"
    if others and others[-1].describe_change():
        said += f", while accuracy on general sentences {others[-1].describe_change()}"
    return f"{said}."


def describe_sizes(summary: Mapping[str, Any]) -> str:
    """Return what a run's figures were measured on, and what the intervals say."""
    sizes, names = summary["evaluation"], find_losses(summary["domain"]) or MLM
    domain, general = sizes["domain_tokens"], sizes["general_words"]
    counted = "masked tokens" if names is MLM else f"{names.unit}s"
    measured = [
        *([f"{domain:,} {counted} of held-out text"] if domain else []),
        *([f"{general:,} words of general sentences"] if general else []),
    ]
    if not measured:
        return ""
    decides = "Between models of different vocabularies the word bits decide, which the cuts of words do not change. "
    return (decides if "word_bits" in list_figures(summary) else "") + (
        f"Measured on {' and '.join(measured)}, the same ones before and after. In brackets: 95 % intervals in points, "
        f"as if every {names.unit} were drawn on its own; those of a change are on the wide side. Losses have no "
        "interval. One seed: how far another seed lands is not in them."
    )


_COST = {
    "tokens": ("tokens", "{:,}"),
    "tokens_per_second": ("tokens per second", "{:,.0f}"),
    "data_wait_frac": ("share of the steps that waited for data", "{:.1%}"),
    "gigaflops_per_second": ("operations per second", "{:,.0f} GFLOP/s"),
    "matmul_share": ("share of the step that its matrix products alone would take", "{:.0%}"),
    "mfu": ("share of the card's published peak", "{:.0%}"),
    "peak_memory_mb": ("most memory of a worker", "{:,.0f} MB"),
}
"""Of "train" in a summary: what a figure is called, and its form."""


def list_cost(summary: Mapping[str, Any]) -> Rows:
    """Return what a run's steps took so far, and how near they came to what the machine can do; nothing before them."""
    train = summary.get("train")
    if train is None:
        return []
    rows = [(title, form.format(train[name])) for name, (title, form) in _COST.items() if name in train]
    return [("time of steps", format_seconds(train["wall_seconds"])), *rows]


def list_times(times: Mapping[str, float]) -> Rows:
    """Return what each stage of a job took.

    Args:
        times: seconds by `events.STAGES`.
    """
    return [(STAGES[stage], f"{seconds:,.1f} s") for stage, seconds in times.items()]


def describe_times(times: Mapping[str, float]) -> str:
    """Return `list_times` in one line."""
    stages = ", ".join(f"{title} {seconds}" for title, seconds in list_times(times))
    return f"the job took {format_seconds(sum(times.values()))}: {stages}"


def find_bounds(share: float, number: int) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a share.

    Args:
        share: 0 to 1.
        number: of how many; above 0.
    """
    scale = 1 + Z**2 / number
    middle = share + Z**2 / (2 * number)
    half = Z * math.sqrt(share * (1 - share) / number + Z**2 / (4 * number**2))
    return max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale)


def find_change_bounds(before: float, after: float, number: int) -> tuple[float, float]:
    """Return Newcombe's 95 % interval of the difference of two shares, each of `number`."""
    (low, high), (new_low, new_high) = find_bounds(before, number), find_bounds(after, number)
    change = after - before
    return change - math.hypot(after - new_low, high - before), change + math.hypot(new_high - after, before - low)


def _bracket(bounds: tuple[float, float], form: str) -> str:
    low, high = (format(100 * each, form) for each in bounds)
    return f" [{low},{NO_BREAK}{high}]"
