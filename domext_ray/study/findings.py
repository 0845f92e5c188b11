"""What a study says: one table, plain sentences that claim no more than the spread bears, and results.json.

Enters: a `Study`. Leaves: the comparison as Markdown, and all figures as plain values.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

from domext_ray.report.compare import describe_unequal_texts
from domext_ray.report.tables import NONE, format_markdown
from domext_ray.study.figures import MIN_SEEDS, PROBE, TEXT, BaseFigures, MethodResult, Spread, Study, find_front

TIME_TOLERANCE = 0.1
"""Training seconds may miss the wanted ones by this share before a sentence says so."""


def format_study(study: Study) -> str:
    """Return the study as Markdown: its setting, the table, and what follows from it."""
    sentences = "\n".join(f"- {each}" for each in describe_findings(study))
    return f"{study.setting}\n\n{format_table(study)}\n\n{sentences}\n"


def format_table(study: Study) -> str:
    """Return the Markdown table: one line for the base, one a method; mean ± standard deviation over seeds."""
    base = study.base
    header = ["method", "trained", "share", "rate", "tokens read", "seconds", "bits per character", "gained"]
    has_words = base.word_bits is not None
    header += [*(["word bits gained"] if has_words else []), "general accuracy (%)", "points lost"]
    header += ["general text: points lost"] if base.retained else []
    gained = [NONE] * (1 + has_words)
    first = ["the base", "0", *[NONE] * 4, f"{base.bits:.3f}", *gained, f"{100 * base.accuracy:.1f}"]
    rows = [[*first, *[NONE] * len(base.measures)]]
    for each in study.results:
        domain, general = ("domain", "bits_per_character"), ("general", "mlm_accuracy")
        cells = [
            each.name,
            f"{each.spread('parameters', 'trainable').mean:,.0f}",
            f"{each.spread('parameters', 'trainable_frac').mean:.1%}" + ("" if each.runs.budget else " (fixed)"),
            f"{each.runs.learning_rate:g}",
            f"{each.spread('train', 'tokens').mean:,.0f}",
            each.spread("train", "wall_seconds").show(".0f"),
            f"{each.spread(*domain, 'before').mean:.3f} → {each.spread(*domain, 'after').show('.3f')}",
            each.gained.show(".3f"),
            *([each.word_gained.show(".3f") if each.word_gained else NONE] if has_words else []),
            f"{each.spread(*general, 'before', scale=100).mean:.1f} → "
            f"{each.spread(*general, 'after', scale=100).show('.1f')}",
            *(lost.show(".1f") for lost in each.lost.values()),
        ]
        rows.append(cells)
    return format_markdown(header, rows)


def describe_findings(study: Study) -> list[str]:
    """Return what follows from the figures, as plain sentences that claim no more than the spread bears."""
    comparable = study.comparable
    gained = [(each.name, each.gained) for each in comparable]
    sentences = _rank(gained, "gains most", 1, ".3f", "bits per character")
    by_words = [(each.name, each.word_gained) for each in study.results if each.word_gained is not None]
    verb = "gains most by word bits, which decide between vocabularies"
    sentences += _rank(by_words, verb, 1, ".3f", "bits per character")
    for measure in study.base.measures:
        lost = [(each.name, each.lost[measure]) for each in study.results]
        sentences += _rank(lost, f"forgets least of the {measure}", -1, ".1f", "points")
        if len(comparable) > 1:
            front = ", ".join(each.name for each in find_front(comparable, measure))
            sentences.append(
                f"On the Pareto front of the {measure}, by means: {front}. No method here gains as much and loses less."
            )
    return [*sentences, *_compare_with_rival(study), *_list_reservations(study)]


def _rank(figures: Sequence[tuple[str, Spread]], verb: str, sign: int, form: str, unit: str) -> list[str]:
    """The first method by a figure (sign 1: the highest is best), and whether it differs from the second."""
    if len(figures) < 2:
        return []
    (first, best), (second, next_best) = sorted(figures, key=lambda each: -sign * each[1].mean)[:2]
    sentence = f"{first} {verb}: {best.show(form)} {unit}; next is {second} with {next_best.show(form)}"
    return [f"{sentence} ({_describe_difference(best - next_best, form, unit)})."]


def _describe_difference(difference: Spread, form: str, unit: str) -> str:
    if difference.interval is None:
        return f"fewer than {MIN_SEEDS} seeds, so chance is not ruled out"
    low, high = difference.interval
    verdict = "is within the spread of the seeds" if low <= 0 <= high else "is beyond the spread of the seeds"
    return (
        f"the difference of {abs(difference.mean):{form}} {unit} {verdict}: paired by seed, 95 % interval "
        f"{low:+{form}} to {high:+{form}}"
    )


def _compare_with_rival(study: Study) -> list[str]:
    """Every method over a frozen base against the best of those that train everything."""
    rival, extensions = study.rival, [each for each in study.results if each.runs.is_extension]
    if rival is None or not extensions:
        return ["'Extensions forget less than full training' is not tested here: it needs full and an extension."]
    num_seeds = len(rival.gained.values)
    claims = [_test_claim(rival, extensions, measure) for measure in study.base.measures]
    if num_seeds >= MIN_SEEDS:
        claims.append(
            f"Supported means that the paired differences over {num_seeds} seeds exclude 0; 95 % intervals, here and "
            "below in brackets, are not corrected for the number of methods."
        )
    return claims + [_describe_against(rival, each, each in study.comparable) for each in extensions]


def _test_claim(rival: MethodResult, extensions: Sequence[MethodResult], measure: str) -> str:
    """Whether extensions forget less than full training."""
    saved = {each.name: rival.lost[measure] - each.lost[measure] for each in extensions}
    claim = f"'Extensions forget less of the {measure} than full training' ({rival.name})"
    if rival.lost[measure].interval is None:
        fewer = [name for name, each in saved.items() if each.mean > 0]
        return (
            f"{claim}: with fewer than {MIN_SEEDS} seeds this cannot be told; here {len(fewer)} of {len(extensions)} "
            f"lost less ({', '.join(fewer) or 'none'})."
        )
    supported = [name for name, each in saved.items() if each.interval and each.interval[0] > 0]
    refuted = [name for name, each in saved.items() if each.interval and each.interval[1] < 0]
    return (
        f"{claim} is supported for {len(supported)} of {len(extensions)} extensions ({', '.join(supported) or 'none'})"
        + (f", and the opposite for {', '.join(refuted)}" if refuted else "")
        + "."
    )


def _describe_against(rival: MethodResult, result: MethodResult, is_comparable: bool) -> str:
    """One method's share of what full training gains, and what it loses."""
    share = find_share(rival, result) if is_comparable else None
    gain = f"gains {_show(share, '.0%')} of the bits that {rival.name} gains, and " if share else ""
    losses = []
    for measure, lost in result.lost.items():
        is_less = lost.mean <= rival.lost[measure].mean
        difference = rival.lost[measure] - lost if is_less else lost - rival.lost[measure]
        losses.append(
            f"{_show(lost, '.1f')} points of the {measure}, {_show(difference, '.1f')} {'less' if is_less else 'more'} "
            f"than {rival.name}"
        )
    return f"{result.name} {gain}loses {', and '.join(losses)}."


def find_share(rival: MethodResult, result: MethodResult) -> Spread | None:
    """Return a method's share of the bits that full training gains, paired by seed; None: full training gains none."""
    return result.gained / rival.gained if min(rival.gained.values) > 0 else None


def _show(spread: Spread, form: str) -> str:
    """The mean, with its interval in brackets."""
    if spread.interval is None:
        return f"{spread.mean:{form}}"
    low, high = spread.interval
    return f"{spread.mean:{form}} ({low:{form}} to {high:{form}})"


def _list_reservations(study: Study) -> list[str]:
    """What a reader must know before believing the table."""
    base, sentences = study.base, []
    moved = [each.name for each in study.results if _starts_elsewhere(each, base)]
    if moved:
        sentences.append(
            f"Gains and losses are counted from the base; {', '.join(moved)} "
            f"start{'s' if len(moved) == 1 else ''} elsewhere, with new words or random parts before the first step."
        )
    sentences += [*_describe_time(study), *_describe_edges(study), *_describe_left_out(study)]
    scored = {each.name: int(each.spread("evaluation", "domain_characters").mean) for each in study.results}
    apart = [each.name for each in study.results if each not in study.comparable]
    sentences += describe_unequal_texts({"the base": base.num_characters, **scored})
    if apart:
        sentences[-1] += f" Gains of {', '.join(apart)} are therefore not ranked."
    words = {each.name: each.spread("evaluation", "general_words").mean for each in study.results}
    others = [f"{name} {number:,.0f}" for name, number in words.items() if number != base.num_words]
    if others:
        sentences.append(
            f"General accuracy counts words that are one token: {base.num_words:,} for the base, but "
            f"{', '.join(others)}; small differences to these methods mean little."
        )
    if base.retained:
        sentences.append(
            f"Of the general text the base predicts {base.retained.accuracy:.1%}. {base.retained.sentence}"
        )
    sentences.append(
        f"One word of the general probe is {100 / base.num_words:.2f} points; seeds change data order, masks and "
        "initialisation, not the text that is scored, so the spread says nothing about other texts."
    )
    return sentences


def _describe_time(study: Study) -> list[str]:
    """Runs that took much more or less than they should: one step of them is long."""
    seconds = {each.name: each.spread("train", "wall_seconds").mean for each in study.results} if study.seconds else {}
    misses = [
        f"{name} {mean:.0f}"
        for name, mean in seconds.items()
        if abs(mean - study.seconds) > TIME_TOLERANCE * study.seconds
    ]
    if not misses:
        return []
    return [
        f"Not quite equal time: {study.seconds:g} seconds were wanted and these took ({', '.join(misses)}), because a "
        "run ends with the step during which its time is up."
    ]


def _describe_edges(study: Study) -> list[str]:
    """Methods whose best rate may lie beyond those that were tried, and rates that were too high."""
    edges, diverged = [], []
    for each in study.results:
        tried = each.runs.tried
        if tried and each.runs.learning_rate in (min(tried), max(tried)):
            edges.append(f"{each.name} {each.runs.learning_rate:g}")
        diverged += [f"{each.name} {rate:g}" for rate, bits in tried.items() if bits is None]
    sentences = [f"The best rate is the lowest or the highest that was tried: {', '.join(edges)}."] if edges else []
    return sentences + ([f"Training diverged at these rates: {', '.join(diverged)}."] if diverged else [])


def _describe_left_out(study: Study) -> list[str]:
    if not study.left_out:
        return []
    return [f"No size of these methods meets the budget: {', '.join(study.left_out)}."]


def _starts_elsewhere(result: MethodResult, base: BaseFigures) -> bool:
    bits = result.spread("domain", "bits_per_character", "before").mean
    accuracy = result.spread("general", "mlm_accuracy", "before").mean
    return abs(bits - base.bits) > 1e-3 or abs(accuracy - base.accuracy) > 1e-3


_LOST = {PROBE: "points_lost", TEXT: "text_points_lost"}
"""What results.json calls points lost, by measure."""


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
        "methods": {each.name: _describe_method(each, rival) for each in study.results},
        "left_out": dict(study.left_out),
        "pareto_front": [each.name for each in find_front(study.comparable)],
        **({"text_pareto_front": [each.name for each in find_front(study.comparable, TEXT)]} if retained else {}),
        "paired_differences": {
            f"{first.name} - {second.name}": {
                "bits_gained": _describe_spread(first.gained - second.gained),
                **{_LOST[name]: _describe_spread(first.lost[name] - second.lost[name]) for name in base.measures},
            }
            for first, second in combinations(study.results, 2)
        },
        "findings": describe_findings(study),
    }


def _describe_method(result: MethodResult, rival: MethodResult | None) -> dict[str, Any]:
    runs = result.runs
    share = None if rival is None else find_share(rival, result)
    return {
        "trains": runs.trains,
        "budget": runs.budget,
        "learning_rate": runs.learning_rate,
        "bits_per_character_by_rate": {str(rate): bits for rate, bits in runs.tried.items()},
        "method": next(iter(runs.summaries.values()))["method"],
        "seeds": list(runs.summaries),
        "trainable": [each["parameters"]["trainable"] for each in runs.summaries.values()],
        "trainable_frac": [each["parameters"]["trainable_frac"] for each in runs.summaries.values()],
        "steps": [each["train"]["steps"] for each in runs.summaries.values()],
        "tokens": [each["train"]["tokens"] for each in runs.summaries.values()],
        "seconds": _describe_spread(result.spread("train", "wall_seconds")),
        "bits_per_character_before": _describe_spread(result.spread("domain", "bits_per_character", "before")),
        "bits_per_character_after": _describe_spread(result.spread("domain", "bits_per_character", "after")),
        "bits_gained": _describe_spread(result.gained),
        "word_bits_gained": None if result.word_gained is None else _describe_spread(result.word_gained),
        "share_of_full_training": None if share is None else _describe_spread(share),
        "general_accuracy_before": _describe_spread(result.spread("general", "mlm_accuracy", "before")),
        "general_accuracy_after": _describe_spread(result.spread("general", "mlm_accuracy", "after")),
        **{_LOST[name]: _describe_spread(lost) for name, lost in result.lost.items()},
    }


def _describe_spread(spread: Spread) -> dict[str, Any]:
    return {
        "values": list(spread.values),
        "mean": spread.mean,
        "sd": spread.sd,
        "interval": None if spread.interval is None else list(spread.interval),
    }
