"""A comparison by masked general text becomes results.json, a table in the AF paper's form, and a picture.

Enters: `Forgetting`. Leaves: accuracies in per cent with 95 % intervals over texts, and the points that each model lost
against the first one.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from domext_ray.downstream.forgetting.forgetting import ACCURACY, BY_SOURCE, Forgetting, ModelFigures
from domext_ray.files import write_json
from domext_ray.labelled.metrics.metrics import PairedDifference
from domext_ray.options.places import hide_places
from domext_ray.report.comparison import COLORS
from domext_ray.report.report import GRID, INK, MUTED, STYLE, save_picture
from domext_ray.training.metrics import write_text


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
    )


def _format_table(result: Forgetting, figure: str) -> str:
    path = ACCURACY if figure == ACCURACY else f"{BY_SOURCE}.{figure}"
    lines = [
        f"| model | accuracy (%) | 95 % interval | points lost against {result.models[0].name} | 95 % interval |",
        "|---|---:|---:|---:|---:|",
    ]
    for each in result.models:
        low, high = each.intervals[path]
        lost, bounds = "–", "–"
        if path in each.lost:
            difference = each.lost[path]
            lost, bounds = f"{100 * difference.difference:.2f}", _format_bounds(difference.low, difference.high)
        accuracy = f"{100 * each.score.get(path):.2f}"
        lines.append(f"| {each.name} | {accuracy} | {_format_bounds(low, high)} | {lost} | {bounds} |")
    return "\n".join(lines)


def _format_bounds(low: float, high: float) -> str:
    return f"{100 * low:.2f} to {100 * high:.2f}"


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
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(11, 1.6 + 0.5 * len(models)), layout="constrained")
        left, right = figure.subplots(1, 2, sharey=True)
        kept: list[tuple[float, float, float] | None] = [
            (100 * each.score.get(ACCURACY), 100 * each.intervals[ACCURACY][0], 100 * each.intervals[ACCURACY][1])
            for each in models
        ]
        lost = [
            (100 * found.difference, 100 * found.low, 100 * found.high) if (found := each.lost.get(ACCURACY)) else None
            for each in models
        ]
        _draw_points(left, kept, "Kept: masked words of general text", "predicted (%)")
        _draw_points(right, lost, "Forgotten", f"points lost against {models[0].name} (left is better)")
        right.axvline(0.0, color=MUTED, linewidth=1.2, linestyle=(0, (4, 3)), zorder=1)
        left.set_yticks(range(len(models)), [each.name for each in models], color=INK)
        left.set_ylim(len(models) - 0.5, -0.5)
        save_picture(figure, path)


def _draw_points(axes: Axes, figures: Sequence[tuple[float, float, float] | None], title: str, unit: str) -> None:
    """A point a model with its interval, and its figure in writing; a line where there is none."""
    for i, each in enumerate(figures):
        if each is None:
            continue
        value, low, high = each
        color = COLORS[i % len(COLORS)]
        axes.plot([low, high], [i, i], color=color, linewidth=2.0, solid_capstyle="round", zorder=2)
        axes.plot([value], [i], color=color, marker="o", markersize=7, zorder=3)
        axes.annotate(
            f"{value:.2f}", (value, i), (0, 8), textcoords="offset points", ha="center", color=color, size="small"
        )
    axes.set(title=title, xlabel=unit)
    axes.margins(x=0.12)
    axes.grid(axis="y", color=GRID)
