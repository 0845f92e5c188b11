"""A comparison by masked general text becomes results.json, a table in the AF paper's form, and a picture.

Enters: `Forgetting`. Leaves: accuracies in per cent with 95 % intervals over texts, and the points that each model lost
against the first one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from domext_ray.downstream.forgetting.forgetting import ACCURACY, BY_SOURCE, Forgetting, ModelFigures
from domext_ray.intervals import Estimate
from domext_ray.options.places import hide_places
from domext_ray.report.compare import Line, draw_lines, tabulate
from domext_ray.storage import write_json, write_text


def write_forgetting(result: Forgetting) -> str:
    """Write results.json, forgetting.md and forgetting.png into the output folder; return the Markdown."""
    folder = Path(result.config.output)
    text = format_forgetting(result)
    write_json(folder / "results.json", to_results(result))
    write_text(folder / "forgetting.md", text)
    draw_forgetting(result, folder / "forgetting.png")
    return text


def format_forgetting(result: Forgetting) -> str:
    """Return the comparison as Markdown: what was predicted, the table, and by source where there are several."""
    parts = [_describe_setting(result), _tabulate(result, ACCURACY)]
    if len(result.sources) > 1:
        for source in result.sources:
            scored, texts = _count_source(result, source)
            said = f"{scored:,} scored tokens of {texts:,} texts."
            parts += [f"### {source}", said, _tabulate(result, f"{BY_SOURCE}.{source}")]
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


def _compare(result: Forgetting, path: str) -> list[Line]:
    """The models by a figure in per cent, and points lost."""
    lines = []
    for each in result.models:
        figure, lost = Estimate(each.score.get(path), *each.intervals[path]), each.lost.get(path)
        lines.append(Line(each.name, figure.scale(100), lost and lost.scale(100)))
    return lines


def _name_change(result: Forgetting) -> str:
    return f"points lost against {result.models[0].name}"


def _tabulate(result: Forgetting, path: str) -> str:
    lines = _compare(result, path)
    return tabulate(lines, "accuracy (%)", names="model", form=".2f", change=_name_change(result)).show()


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
        "lost": {path: {"difference": each.value, "interval": each.interval} for path, each in model.lost.items()},
    }


def draw_forgetting(result: Forgetting, path: Path) -> None:
    """Draw accuracies, and points lost against the first model, with their intervals as a PNG."""
    title, figure = "Masked words of general text", "predicted (%)"
    draw_lines(_compare(result, ACCURACY), path, title, figure, ".2f", change=_name_change(result))
