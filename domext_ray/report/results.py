"""What a run reached, in one sentence, as a table for the terminal, and as a table with intervals for its page.

Enters: the figures of `summary.measure_run` (or summary.json) and the run's parameters. Leaves: text and rows.

Accuracies are shares of tokens that are predicted exactly, so their intervals are binomial (Wilson 1927; of a change
Newcombe 1998, method 10). The same tokens are asked before and after: the interval of a change, which takes them for
different ones, is rather too wide than too narrow. Losses have none: their spread over tokens is not recorded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from domext_ray.config.mixture import DOMAIN
from domext_ray.runs.events import STAGES
from domext_ray.runs.losses import MLM, LossNames, find_losses

NO_BREAK = "\u00a0"
"""Between the ends of an interval, which stay on one line."""
ROUTED = "with its router"
"""Head of the column for a run with a router, which sends each row to the domain or to the base."""
Z = 1.959964
"""Of a normal distribution 95 % are within so many standard deviations."""


def format_summary(summary: dict[str, Any]) -> str:
    """Return the short table that a run ends with: before, after and change of each figure, then what it took.

    Args:
        summary: content of summary.json.
    """
    figures, parts = _compare(summary), _compare_parts(summary)
    routed = [ROUTED, *_compare_routed(summary), *[""] * len(parts)] if "routed" in summary else []
    rows = [("", "before", "after", "change"), *figures, *parts]
    lines = [
        f"{name:<24}{before:>8}{after:>9}{change:>15}{beside:>24}".rstrip()
        for (name, before, after, change), beside in zip(rows, routed or [""] * len(rows), strict=True)
    ]
    return "\n".join([*lines, f"{_describe_parameters(summary)}; {_describe_cost(summary)}"])


def describe_result(summary: dict[str, Any]) -> str:
    """Return a run's result as one sentence.

    Args:
        summary: content of summary.json.
    """
    names, loss, accuracy = _get_learned(summary)
    general = summary["general"]["mlm_accuracy"]
    learned = []
    if None not in loss.values():
        learned.append(
            f"{names.title} {_verb(loss)} from {loss['before']:.3f} to {loss['after']:.3f} ({_relative_change(loss)})"
        )
    if None not in accuracy.values():
        share = f"{_verb(accuracy)} from {accuracy['before']:.1%} to {accuracy['after']:.1%}"
        learned.append(f"{names.share or 'domain accuracy'} {share}")
    sentence = f"Held-out domain {' and '.join(learned) or f'{names.title} was not measured'}"
    if None not in general.values():
        sentence += (
            f", while accuracy on general sentences {_verb(general)} from {general['before']:.1%} to "
            f"{general['after']:.1%} ({_points(general)})"
        )
    return f"{sentence}; {_describe_parameters(summary)}."


def _compare(summary: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    """The rows figure, before, after, change; loss and accuracy alone of a run that makes vectors."""
    names, loss, accuracy = _get_learned(summary)
    changed = _show(loss["before"], ".3f"), _show(loss["after"], ".3f"), _relative_change(loss)
    if names is not MLM:
        return [(f"held-out {names.title}", *changed), (f"held-out {names.share}", *_show_accuracy(accuracy))]
    general, words = summary["general"]["mlm_accuracy"], get_word_bits(summary)
    return [
        ("held-out domain loss", *changed),
        ("held-out domain accuracy", *_show_accuracy(accuracy)),
        _compare_bits("bits per character", summary["domain"]["bits_per_character"]),
        *([_compare_bits("word bits per character", words)] if _is_measured(words) else []),
        ("general-probe accuracy", *_show_accuracy(general)),
    ]


def _get_learned(summary: dict[str, Any]) -> tuple[LossNames, dict[str, float | None], dict[str, float | None]]:
    """Loss and accuracy of held-out text, before and after, and how they are called."""
    domain = summary["domain"]
    names = find_losses(domain) or MLM
    return names, domain[names.loss], domain[names.accuracy]


def take_routed(summary: dict[str, Any]) -> dict[str, Any]:
    """Return a summary whose figures after training are those with the run's router.

    Args:
        summary: content of summary.json, with "routed".
    """
    routed = summary["routed"]

    def put(name: str) -> dict[str, Any]:
        return {each: {**pair, "after": routed[name].get(each)} for each, pair in summary[name].items()}

    return {**summary, "domain": put("domain"), "general": put("general")}


def _compare_routed(summary: dict[str, Any]) -> list[str]:
    """A cell for each row of `_compare`: what it is with the run's router, and how far that is from before."""
    return [f"{after} ({change})" for _, _, after, change in _compare(take_routed(summary))]


def _is_measured(pair: dict[str, float | None]) -> bool:
    return pair["before"] is not None or pair["after"] is not None


def _compare_bits(name: str, bits: dict[str, float | None]) -> tuple[str, str, str, str]:
    return name, _show(bits["before"], ".3f"), _show(bits["after"], ".3f"), _relative_change(bits)


def get_word_bits(summary: dict[str, Any]) -> dict[str, float | None]:
    """Return a run's word bits per character, before and after; None where they were not measured.

    Args:
        summary: content of summary.json.
    """
    bits: dict[str, float | None] = summary["domain"].get("word_bits_per_character", {"before": None, "after": None})
    return bits


def _compare_parts(summary: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    """The same of the texts beside the domain's."""
    losses = {name: each["held_out_loss"] for name, each in summary.get("parts", {}).items() if name != DOMAIN}
    return [
        (f"held-out {name} loss", _show(loss["before"], ".3f"), _show(loss["after"], ".3f"), _relative_change(loss))
        for name, loss in losses.items()
    ]


def _show(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def list_intervals(summary: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the rows figure, before, after, change, with 95 % intervals where a figure has one.

    A run with a router has a fifth cell: what it reaches with that.

    Args:
        summary: content of summary.json.
    """
    sizes = summary["evaluation"]
    names, _, accuracy = _get_learned(summary)
    loss, share, *rest = _compare(summary)
    rows: list[tuple[str, ...]] = [loss, (share[0], *_show_bounds(accuracy, sizes["domain_tokens"]))]
    if names is MLM:
        *bits, general = rest
        rows += [*bits, (general[0], *_show_bounds(summary["general"]["mlm_accuracy"], sizes["general_words"]))]
    if "routed" not in summary:
        return rows
    return [(*row, cell) for row, cell in zip(rows, _compare_routed(summary), strict=True)]


def describe_sizes(summary: dict[str, Any]) -> str:
    """Return what a run's figures were measured on, and what the intervals say.

    Args:
        summary: content of summary.json.
    """
    sizes = summary["evaluation"]
    domain, general, names = sizes["domain_tokens"], sizes["general_words"], _get_learned(summary)[0]
    counted = "masked tokens" if names is MLM else f"{names.unit}s"
    measured = " and ".join(
        [
            *([f"{domain:,} {counted} of held-out text"] if domain else []),
            *([f"{general:,} words of general sentences"] if general else []),
        ]
    )
    if not measured:
        return ""
    decides = "Between models of different vocabularies the word bits decide, which the cuts of words do not change. "
    return (decides if _is_measured(get_word_bits(summary)) else "") + (
        f"Measured on {measured}, the same ones before and after. In brackets: 95 % intervals in points, as if every "
        f"{names.unit} were drawn on its own; those of a change are on the wide side. Losses have no interval. One "
        "seed: how far another seed lands is not in them."
    )


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


def _show_bounds(pair: dict[str, float | None], number: int) -> tuple[str, str, str]:
    first, second, change = _show_accuracy(pair)
    before, after = pair["before"], pair["after"]
    if before is None or not number:
        return first, second, change
    first += _bracket(find_bounds(before, number), ".1f")
    if after is not None:
        second += _bracket(find_bounds(after, number), ".1f")
        change += _bracket(find_change_bounds(before, after, number), "+.1f")
    return first, second, change


def _bracket(bounds: tuple[float, float], form: str) -> str:
    low, high = (format(100 * each, form) for each in bounds)
    return f" [{low},{NO_BREAK}{high}]"


def _show_accuracy(pair: dict[str, float | None]) -> tuple[str, str, str]:
    return _show(pair["before"], ".1%"), _show(pair["after"], ".1%"), _points(pair)


def _points(pair: dict[str, float | None]) -> str:
    before, after = pair["before"], pair["after"]
    return "–" if before is None or after is None else f"{100 * (after - before):+.1f} points"


def _relative_change(pair: dict[str, float | None]) -> str:
    before, after = pair["before"], pair["after"]
    return "–" if not before or after is None else f"{after / before - 1:+.1%}"


def _verb(pair: dict[str, float | None]) -> str:
    before, after = pair["before"], pair["after"]
    if before is None or after is None or before == after:
        return "went"
    return "rose" if after > before else "fell"


def _describe_parameters(summary: dict[str, Any]) -> str:
    counts = summary["parameters"]
    decoder = f", and {counts['decoder']:,} of a decoder" if "decoder" in counts else ""
    return f"{counts['trainable']:,} parameters trained, {counts['trainable_frac']:.1%} of base and extension{decoder}"


def _describe_cost(summary: dict[str, Any]) -> str:
    train = summary["train"]
    return (
        f"{train['steps']:,} steps, {train['tokens']:,} tokens in {_duration(train['wall_seconds'])} "
        f"({train['tokens_per_second']:,.0f} tokens/s, {train['data_wait_frac']:.1%} of the time waiting for data)"
    )


def describe_times(times: Mapping[str, float]) -> str:
    """Return in one line what each stage of a job took.

    Args:
        times: seconds by `events.STAGES`.
    """
    stages = ", ".join(f"{STAGES[stage]} {_duration(seconds)}" for stage, seconds in times.items())
    return f"the job took {_duration(sum(times.values()))}: {stages}"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 3600 else f"{seconds / 3600:.1f} h"
