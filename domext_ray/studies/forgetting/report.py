"""A comparison by masked general text becomes results.json, a table in the AF paper's form, and a picture.

Enters: `Forgetting`, and curves over the scale of what runs added. Leaves: accuracies in per cent with 95 % intervals
over texts, and the points that each model lost against the first one; of each curve its table and its mark.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from domext_ray.config.jobs import ForgettingConfig
from domext_ray.config.options.submitted import hide_places
from domext_ray.report.compare import Line, draw_lines, tabulate
from domext_ray.report.plots import DASHED, MUTED, ORANGE, VIOLET, new_picture
from domext_ray.report.tables import format_markdown
from domext_ray.storage import Place, write_json, write_text
from domext_ray.studies.forgetting.forgetting import ACCURACY, BY_SOURCE, Forgetting
from domext_ray.studies.forgetting.scales import MAX_LOST, ScaleCurve

SCALED = "scales"
"""Of results.json: figures of runs by the scale of what they added."""


def write_forgetting(
    config: ForgettingConfig, result: Forgetting | None, curves: Mapping[str, ScaleCurve] | None = None
) -> str:
    """Write results.json, forgetting.md and pictures into the output folder; return the Markdown.

    `result` is None where there was no general text; `curves` are by the names that the user gave the runs.
    """
    folder, curves = Place(config.output), curves or {}
    parts = ([format_forgetting(result)] if result else []) + ([format_curves(curves)] if curves else [])
    text = "\n".join(parts)
    values = to_results(result) if result else {}
    write_json(folder / "results.json", values | ({SCALED: _list_points(curves)} if curves else {}))
    write_text(folder / "forgetting.md", text)
    compared, scaled = folder / "forgetting.png", folder / "scales.png"
    for picture in (compared, scaled):  # one of an earlier call would show other figures
        picture.delete()
    if result:
        draw_forgetting(result, compared)
    if curves:
        draw_curves(curves, scaled)
    return text


def format_curves(curves: Mapping[str, ScaleCurve]) -> str:
    """Return what runs gained and lost at each scale as Markdown."""
    about = (
        "What runs gain on held-out text of their own, in bits per character, and lose on everyday sentences, with "
        "less of what they added: at scale 0 without it, at 1 as they were trained. No router chooses."
    )
    parts = ["## By scale", about]
    header = ("scale", "bits per character", "bits gained", "accuracy (%)", "points lost")
    for name, curve in curves.items():
        rows = [
            (f"{scale:g}", f"{bits:.3f}", f"{gained:.3f}", f"{100 * accuracy:.1f}", f"{100 * lost:.1f}")
            for scale, bits, gained, accuracy, lost in zip(
                curve.scales, curve.bits, curve.gained, curve.accuracies, curve.lost, strict=True
            )
        ]
        parts += [f"### {name}", f"{curve.describe()}.", format_markdown(header, rows)]
    return "\n\n".join(parts) + "\n"


def _list_points(curves: Mapping[str, ScaleCurve]) -> dict[str, list[dict[str, float]]]:
    names = ("scale", "bits_per_character", "mlm_accuracy")
    return {
        name: [
            dict(zip(names, point, strict=True))
            for point in zip(curve.scales, curve.bits, curve.accuracies, strict=True)
        ]
        for name, curve in curves.items()
    }


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
    return [model.make_line(path) for model in result.models]


def _name_change(result: Forgetting) -> str:
    return f"points lost against {result.models[0].name}"


def _tabulate(result: Forgetting, path: str) -> str:
    lines = _compare(result, path)
    return tabulate(lines, "accuracy (%)", names="model", form=".2f", change=_name_change(result)).show()


def _count_source(result: Forgetting, source: str) -> tuple[int, int]:
    """Scored tokens and texts of a source."""
    is_own = [name == source for name in result.masks.sources]
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
        "models": {
            model.name: {"model": model.model, "sha256": model.sha256, **model.describe("lost")}
            for model in result.models
        },
    }


def draw_forgetting(result: Forgetting, path: Place) -> None:
    """Draw accuracies, and points lost against the first model, with their intervals as a PNG."""
    title, figure = "Masked words of general text", "predicted (%)"
    draw_lines(_compare(result, ACCURACY), path, title, figure, ".2f", change=_name_change(result))


def draw_curves(curves: Mapping[str, ScaleCurve], path: Place) -> None:
    """Draw each run's gain above its loss by scale, and where the loss passes what may be lost, as a PNG."""
    with new_picture(path, (1 + 4 * len(curves), 4.4)) as figure:
        panels = figure.subplots(2, len(curves), sharex=True, sharey="row", squeeze=False)
        for (name, curve), (top, bottom) in zip(curves.items(), panels.T, strict=True):
            _draw_figures(top, curve, curve.gained, ORANGE)
            _draw_figures(bottom, curve, [100 * lost for lost in curve.lost], VIOLET)
            bottom.axhline(100 * MAX_LOST, color=MUTED, linewidth=1.2, linestyle=DASHED, zorder=1)
            top.set(title=name)
            bottom.set(xlabel="scale of what was added")
            at_end: Any = {"ha": "right" if curve.marked > 0.5 else "left", "va": "bottom"}
            offset, place = (-4 if curve.marked > 0.5 else 4, 4), (curve.marked, 0)
            style: Any = {"xycoords": top.get_xaxis_transform(), "textcoords": "offset points", "size": "small"}
            top.annotate(f"{curve.marked:.2f}", place, offset, color=MUTED, **at_end, **style)
        panels[0, 0].set(ylabel="bits gained")
        panels[1, 0].set(ylabel="points lost")


def _draw_figures(axes: Axes, curve: ScaleCurve, values: Sequence[float], color: str) -> None:
    axes.plot(curve.scales, values, color=color, linewidth=2.0, marker="o", markersize=5)
    axes.axvline(curve.marked, color=MUTED, linewidth=1.2, linestyle=DASHED, zorder=1)
    axes.margins(x=0.04, y=0.15)
    axes.yaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10]))
