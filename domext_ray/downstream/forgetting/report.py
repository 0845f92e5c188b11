"""A comparison by masked general text becomes results.json, a table in the AF paper's form, and a picture.

Enters: `Forgetting`. Leaves: accuracies in per cent with 95 % intervals over texts, and the points that each model lost
against the first one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeAlias

from domext_ray.downstream.forgetting.forgetting import ACCURACY, BY_SOURCE, Forgetting, ModelFigures
from domext_ray.labelled.metrics.scores import PairedDifference
from domext_ray.options.places import hide_places
from domext_ray.report.plots import DASHED, MUTED, draw_intervals, new_picture
from domext_ray.report.tables import NONE, format_bounds, format_markdown
from domext_ray.storage import write_json, write_text

Points: TypeAlias = tuple[float, float, float]
"""A figure in per cents, and both ends of its interval."""


def write_forgetting(result: Forgetting) -> str:
    """Write results.json, forgetting.md and forgetting.png into the output folder; return the Markdown.

    Args:
        result: the comparison.
    """
    folder = Path(result.config.output).expanduser()
    text = format_forgetting(result)
    write_json(folder / "results.json", to_results(result))
    write_text(folder / "forgetting.md", text)
    draw_forgetting(result, folder / "forgetting.png")
    return text


def format_forgetting(result: Forgetting) -> str:
    """Return the comparison as Markdown: what was predicted, the table, and by source where there are several."""
    parts = [_describe_setting(result), _format_table(result, ACCURACY)]
    if len(result.sources) > 1:
        for source in result.sources:
            scored, texts = _count_source(result, source)
            parts += [f"### {source}", f"{scored:,} scored tokens of {texts:,} texts.", _format_table(result, source)]
    return "\n\n".join(parts) + "\n"


def _describe_setting(result: Forgetting) -> str:
    config, masks = result.config, result.masks
    unit = "words" if masks.is_shared else "tokens"
    drawn = f"{masks.num_texts:,} texts were drawn (seed {config.seed})"
    if masks.num_texts < config.num_texts:
        drawn += f", all that the corpus has, where --num_texts is {config.num_texts:,}"
    return (
        f"{drawn}; {config.mask_frac:.0%} of their {unit} are drawn and replaced by the mask, up to "
        f"{config.max_length} tokens a text. {masks.describe()} A model is right where its most likely "
        f"entry is what stood there. Intervals are 95 %, by bootstrap over texts; points lost against "
        f"{result.models[0].name} are paired over texts."
        + " A model with a router sends each text to its adapter or to the base."
        * config.route
    )


def _format_table(result: Forgetting, figure: str) -> str:
    path = ACCURACY if figure == ACCURACY else f"{BY_SOURCE}.{figure}"
    lost = f"points lost against {result.models[0].name}"
    header = ("model", "accuracy (%)", "95 % interval", lost, "95 % interval")
    rows = []
    for each in result.models:
        accuracy, low, high = _to_points(each, path)
        rows.append([each.name, f"{accuracy:.2f}", format_bounds(low, high, ".2f"), NONE, NONE])
        if (found := _to_lost_points(each, path)) is not None:
            rows[-1][3:] = [f"{found[0]:.2f}", format_bounds(found[1], found[2], ".2f")]
    return format_markdown(header, rows)


def _to_points(model: ModelFigures, path: str) -> Points:
    low, high = model.intervals[path]
    return 100 * model.score.get(path), 100 * low, 100 * high


def _to_lost_points(model: ModelFigures, path: str) -> Points | None:
    lost = model.lost.get(path)
    return None if lost is None else (100 * lost.difference, 100 * lost.low, 100 * lost.high)


def _count_source(result: Forgetting, source: str) -> tuple[int, int]:
    """Scored tokens and texts of a source."""
    is_own = [each == source for each in result.masks.sources]
    return int(result.masks.counts[is_own].sum()), sum(is_own)


def to_results(result: Forgetting) -> dict[str, Any]:
    """Return all figures as plain values for results.json; accuracies and losses are fractions."""
    config, masks = result.config, result.masks
    return {
        "corpus": hide_places(config.corpus),
        "num_texts": masks.num_texts,
        "seed": config.seed,
        "mask_frac": config.mask_frac,
        "max_length": config.max_length,
        "shared_words": masks.is_shared,
        "route": config.route,
        "masked": masks.num_masked,
        "scored_tokens": int(masks.counts.sum()),
        "scored_texts": len(masks.sources),
        "sources": {
            source: dict(zip(("scored_tokens", "scored_texts"), _count_source(result, source), strict=True))
            for source in result.sources
        },
        "mask_set": {fingerprint: masks.hash_rows(fingerprint) for fingerprint in masks.rows},
        "models": {each.name: _describe_model(each) for each in result.models},
    }


def _describe_model(model: ModelFigures) -> dict[str, Any]:
    return {
        "model": model.model,
        "sha256": model.sha256,
        **model.score.values,
        "intervals": model.intervals,
        "lost": {path: _describe_difference(each) for path, each in model.lost.items()},
    }


def _describe_difference(lost: PairedDifference) -> dict[str, Any]:
    return {"difference": lost.difference, "interval": [lost.low, lost.high], "p_value": lost.p_value}


def draw_forgetting(result: Forgetting, path: Path) -> None:
    """Draw accuracies, and points lost against the first model, with their intervals as a PNG."""
    models = result.models
    names = [each.name for each in models]
    with new_picture(path, (11, 1.6 + 0.5 * len(models))) as figure:
        left, right = figure.subplots(1, 2, sharey=True)
        draw_intervals(left, names, [_to_points(each, ACCURACY) for each in models], ".2f")
        left.set(title="Kept: masked words of general text", xlabel="predicted (%)")
        draw_intervals(right, names, [_to_lost_points(each, ACCURACY) for each in models], ".2f")
        right.set(title="Forgotten", xlabel=f"points lost against {models[0].name} (left is better)")
        right.axvline(0.0, color=MUTED, linewidth=1.2, linestyle=DASHED, zorder=1)
