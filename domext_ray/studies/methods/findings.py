"""What a study says: tables with one sentence each (`assets/comparison.md`), and results.json.

Enters: a `Study`. Leaves: the comparison as Markdown, and all figures as plain values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import combinations
from typing import Any

from domext_ray.config.mixture import DOMAIN
from domext_ray.intervals import Estimate, Resampled, compare
from domext_ray.report.compare import (
    Line,
    compare_with_first,
    correct_lines,
    describe_differences,
    describe_unequal_texts,
    tabulate,
)
from domext_ray.report.page import fill_text
from domext_ray.report.tables import NONE, format_markdown
from domext_ray.studies.methods.figures import (
    MIN_SEEDS,
    PROBE,
    TEXT,
    ArmResult,
    SetScores,
    Study,
    estimate,
    find_front,
    find_share,
    subtract,
)
from domext_ray.studies.methods.label_curves import LabelCurve, show_labels

TIME_TOLERANCE = 0.1
"""Training seconds may miss the wanted ones by this share before a sentence says so."""
_BITS, _ACCURACY = ("domain", "bits_per_character"), ("general", "mlm_accuracy")
_PARAMETER_BYTES = 4  # fp32, of what trained: all that has to be kept beside the base
_LOST = {PROBE: "points_lost", TEXT: "text_points_lost"}
"""What results.json calls points lost, by measure."""
_BY_RATE = {"loss": "bits_per_character_by_rate", "dev": "dev_by_rate"}
"""What it calls the figures of rates, by --rates_by."""


def format_study(study: Study) -> str:
    """Return the study as Markdown: what it cost, a table per measure with its verdict, and how to read it."""
    base, results = study.base, study.results
    words = {result.name: result.read("evaluation", "general_words").mean for result in results}
    seconds = {result.name: result.read("train", "wall_seconds").mean for result in results if study.seconds}
    wanted = study.seconds
    scored = {result.name: int(result.read("evaluation", "domain_characters").mean) for result in results}
    return fill_text(
        "comparison.md",
        setting=study.setting,
        cost=tabulate_cost(study),
        measures=_list_tables(study),
        is_fine_tuned=bool(study.scores or study.curves),
        has_curves=bool(study.curves),
        base=base,
        moved=[result.name for result in results if _starts_elsewhere(result, study)],
        num_seeds=len(results[0].gained.values),
        min_seeds=MIN_SEEDS,
        words=[f"{name} on {number:,.0f}" for name, number in words.items() if number != base.num_words],
        unknown=[f"{result.name} {share:.2%}" for result in results if (share := _find_unknown(result))],
        unequal=describe_unequal_texts({"the base": base.num_characters, **scored}),
        apart=[result.name for result in results if result not in study.comparable],
        seconds=wanted,
        late=[f"{name} {took:.0f}" for name, took in seconds.items() if abs(took - wanted) > TIME_TOLERANCE * wanted],
        edges=[
            f"{result.name} {result.runs.learning_rate:g}"
            for result in results
            if result.runs.tried and result.runs.learning_rate in (min(result.runs.tried), max(result.runs.tried))
        ],
        diverged=[
            f"{result.name} {rate:g}"
            for result in results
            for rate, figure in result.runs.tried.items()
            if figure is None
        ],
        left_out=list(study.left_out),
    )


def _list_tables(study: Study) -> list[dict[str, Any]]:
    return [*list_measures(study), *list_scores(study), *map(tabulate_curve, study.curves)]


def _find_unknown(result: ArmResult) -> float:
    """The share of the domain text's tokens that the tokenizer does not know; 0.0 of runs of 0.1.0, too."""
    summary: dict[str, Any] = next(iter(result.runs.summaries.values()))
    return float(summary["corpus"].get("unknown", {}).get(DOMAIN, {}).get("tokens", 0.0))


def tabulate_cost(study: Study) -> str:
    """Return what every method trained, and from where to where its figures went, as a Markdown table."""
    base = study.base
    header = (
        "method",
        "trained",
        "share",
        "rate",
        "tokens read",
        "seconds",
        "memory (MB)",
        "to keep (MB)",
        "bits per character",
        "general accuracy (%)",
    )
    rows = [("the base", "0", *[NONE] * 6, f"{base.bits:.3f}", f"{100 * base.accuracy:.1f}")]
    for entry in study.results:
        seconds = entry.read("train", "wall_seconds")
        rows.append(
            (
                entry.name,
                f"{entry.read('parameters', 'trainable').mean:,.0f}",
                f"{entry.read('parameters', 'trainable_frac').mean:.1%}" + ("" if entry.runs.budget else " (fixed)"),
                f"{entry.runs.learning_rate:g}",
                f"{entry.read('train', 'tokens').mean:,.0f}",
                f"{seconds.mean:.0f}" + ("" if seconds.sd is None else f" ± {seconds.sd:.0f}"),
                f"{entry.read('train', 'peak_memory_mb').mean:,.0f}",
                f"{entry.read('parameters', 'trainable').mean * _PARAMETER_BYTES / 1e6:,.1f}",
                f"{entry.read(*_BITS, 'before').mean:.3f} → {entry.read(*_BITS, 'after').mean:.3f}",
                f"{100 * entry.read(*_ACCURACY, 'before').mean:.1f} → {100 * entry.read(*_ACCURACY, 'after').mean:.1f}",
            )
        )
    return format_markdown(header, rows)


def list_measures(study: Study) -> list[dict[str, Any]]:
    """Return what was gained and lost: of each measure title, table, verdict and Pareto front.

    Methods are compared with the best that trains everything, or without one with the first.
    """
    found = []
    if study.comparable:
        found.append(_tabulate(study, study.comparable, "Bits per character gained", lambda each: each.gained, ".3f"))
    with_words = tuple(result for result in study.results if result.word_gained is not None)
    if with_words:
        title = "Word bits per character gained, which decide between vocabularies"
        found.append(_tabulate(study, with_words, title, lambda each: each.word_gained, ".3f"))
    for name in study.base.measures:
        read = partial(_read_lost, measure=name)
        front = find_front(study.comparable, name) if len(study.comparable) > 1 else []
        own = _tabulate(study, study.results, f"Points lost of the {name}", read, ".1f")
        found.append({**own, "front": [result.name for result in front]})
    return found


def _read_lost(result: ArmResult, measure: str) -> Resampled:
    return result.lost[measure]


def _tabulate(
    study: Study, results: tuple[ArmResult, ...], title: str, read: Callable[[ArmResult], Any], form: str
) -> dict[str, Any]:
    rival = study.rival if study.rival in results else next(iter(results), None)
    lines = []
    for result in sorted(results, key=lambda each: each is not rival):
        own: Resampled = read(result)
        difference = None if result is rival or rival is None else subtract(own, read(rival))
        lines.append(Line(result.name, estimate(own), difference, values=tuple(own.values.tolist())))
    lines = correct_lines(lines)
    verdict = describe_differences(lines) if len(study.results[0].gained.values) >= MIN_SEEDS else ""
    return {
        "title": title,
        "table": tabulate(lines, "mean", names="method", form=form).show(),
        "verdict": verdict,
        "front": [],
    }


def list_scores(study: Study) -> list[dict[str, Any]]:
    """Return tables as `list_measures` does: each set's figures against the base's, the last also against full's."""
    found = [_tabulate_scores(scores, next(iter(scores.samples))) for scores in study.scores]
    if study.scores and study.rival is not None:
        found.append(_tabulate_scores(study.scores[-1], study.rival.name))
    return found


def _tabulate_scores(scores: SetScores, reference: str) -> dict[str, Any]:
    names = sorted(scores.samples, key=lambda each: each != reference)
    lines = compare_with_first(names, [scores.samples[name] for name in names], [()] * len(names))
    return {
        "title": f"{scores.metric} on {scores.split} after fine-tuning, {scores.name}, against {reference}",
        "table": tabulate(lines, "mean", names="method").show(),
        "verdict": describe_differences(lines),
        "front": [],
    }


def tabulate_curve(curve: LabelCurve) -> dict[str, Any]:
    """Return a set's figures by the number of labels, and how many the base needs for them; as `list_measures` does."""
    lines, saved, beyond, names = list[Line](), list[str](), list[str](), list(curve.samples)
    for k, number in enumerate(curve.numbers):
        shown = {name: show_labels(own[k], curve.numbers) for name, own in curve.needed.items()}
        more = [(f"{number:,.0f}", *shown.get(name, (NONE, NONE))) for name in names]
        lines += compare_with_first(names, [curve.samples[name][k] for name in names], more)
        for name, own in curve.needed.items():
            if math.isinf(own[k].low):
                beyond.append(f" With {number:,.0f} labels {name} scores more than the base with any of these numbers.")
            elif own[k].low > number:
                value, interval = show_labels(own[k], curve.numbers, number)
                saved.append(f"{name} {value} ({interval}) with {number:,.0f}")
    none = "No interval is above 0 labels saved."
    found = f"Labels saved, where the interval is above 0: {'; '.join(saved)}." if saved else "" if beyond else none
    return {
        "title": f"{curve.metric} on {curve.split} by labels, {curve.name}",
        "table": tabulate(lines, "mean", names="method", more=("labels", "the base needs", "95 % interval")).show(),
        "verdict": "".join([found, *beyond]).strip(),
        "front": [],
    }


def _starts_elsewhere(result: ArmResult, study: Study) -> bool:
    bits, accuracy = result.read(*_BITS, "before").mean, result.read(*_ACCURACY, "before").mean
    return abs(bits - study.base.bits) > 1e-3 or abs(accuracy - study.base.accuracy) > 1e-3


def to_results(study: Study) -> dict[str, Any]:
    """Return all figures as plain values for results.json."""
    base, rival = study.base, study.rival
    retained = {} if base.retained is None else {"text_accuracy": base.retained.accuracy}
    return {
        "setting": study.setting,
        "base": {
            "bits_per_character": base.bits,
            "general_accuracy": base.accuracy,
            "domain_characters": base.num_characters,
            "general_words": base.num_words,
            **retained,
        },
        "full_training": None if rival is None else rival.name,
        "methods": {result.name: _describe_method(result, rival) for result in study.results},
        "left_out": dict(study.left_out),
        "pareto_front": [result.name for result in find_front(study.comparable)],
        **({"text_pareto_front": [result.name for result in find_front(study.comparable, TEXT)]} if retained else {}),
        "paired_differences": {
            f"{first.name} - {second.name}": {
                "bits_gained": _describe_difference(first.gained, second.gained),
                **{_LOST[name]: _describe_difference(first.lost[name], second.lost[name]) for name in base.measures},
            }
            for first, second in combinations(study.results, 2)
        },
        "verdicts": {table["title"]: table["verdict"] for table in _list_tables(study)},
        "tasks": {scores.name: _describe_scores(scores) for scores in study.scores},
        **({"labels": {curve.name: describe_curve(curve) for curve in study.curves}} if study.curves else {}),
    }


def _describe_method(result: ArmResult, rival: ArmResult | None) -> dict[str, Any]:
    runs, summaries = result.runs, list(result.runs.summaries.values())
    share = None if rival is None else find_share(rival, result)
    return {
        "trains": runs.trains,
        "budget": runs.budget,
        "learning_rate": runs.learning_rate,
        _BY_RATE[runs.tried_by]: {str(rate): figure for rate, figure in runs.tried.items()},
        "method": summaries[0]["method"],
        "seeds": list(runs.summaries),
        **{name: [summary["parameters"][name] for summary in summaries] for name in ("trainable", "trainable_frac")},
        **{name: [summary["train"][name] for summary in summaries] for name in ("steps", "tokens")},
        "seconds": _describe(result.read("train", "wall_seconds")),
        **{f"bits_per_character_{when}": _describe(result.read(*_BITS, when)) for when in ("before", "after")},
        "bits_gained": _describe(result.gained),
        "word_bits_gained": None if result.word_gained is None else _describe(result.word_gained),
        "share_of_full_training": None if share is None else _describe(share),
        **{f"general_accuracy_{when}": _describe(result.read(*_ACCURACY, when)) for when in ("before", "after")},
        **{_LOST[name]: _describe(lost) for name, lost in result.lost.items()},
    }


def _describe_scores(scores: SetScores) -> dict[str, Any]:
    first = next(iter(scores.samples.values()))
    differences = {name: compare(first, sample) for name, sample in scores.samples.items() if sample is not first}
    return {
        "metric": scores.metric,
        "split": scores.split,
        "methods": {name: _describe(sample) for name, sample in scores.samples.items()},
        "differences_to_base": {
            name: {"mean": difference.value, "interval": difference.interval, "p_value": difference.p_value}
            for name, difference in differences.items()
        },
    }


def describe_curve(curve: LabelCurve) -> dict[str, Any]:
    """Return a curve as plain values for results.json; null is beyond its first or last number, as `shown` says."""
    at = [
        SetScores(curve.name, curve.metric, curve.split, {name: own[k] for name, own in curve.samples.items()})
        for k in range(len(curve.numbers))
    ]
    return {
        "numbers": list(curve.numbers),
        "scores": [_describe_scores(scores) for scores in at],
        "base_needs": {
            name: [_describe_needed(found, curve.numbers) for found in own] for name, own in curve.needed.items()
        },
    }


def _describe_needed(found: Estimate, numbers: Sequence[float]) -> dict[str, Any]:
    value, *interval = (number if 0 < number < math.inf else None for number in (found.value, found.low, found.high))
    return {"labels": value, "interval": interval, "shown": "{} ({})".format(*show_labels(found, numbers))}


def _describe(sample: Resampled) -> dict[str, Any]:
    found = estimate(sample)
    return {"values": sample.values.tolist(), "mean": found.value, "sd": sample.sd, "interval": found.interval}


def _describe_difference(first: Resampled, second: Resampled) -> dict[str, Any]:
    found = subtract(first, second)
    values = (first.values - second.values).tolist()
    return {"values": values, "mean": found.value, "interval": found.interval, "p_value": found.p_value}
