"""A comparison of models that search becomes results.json and a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from domext_ray.config.retrieval import RetrievalConfig
from domext_ray.downstream.retrieval.collection import Collection
from domext_ray.downstream.retrieval.retrieval import FIGURES, SearchFigures
from domext_ray.options.places import hide_places
from domext_ray.report.tables import NONE, format_bounds, format_markdown
from domext_ray.storage import write_json, write_text

_TITLES = {name: name.replace("ndcg", "nDCG").replace("_at_", "@").replace("_", " ") for name in FIGURES}


def write_retrieval(config: RetrievalConfig, collection: Collection, models: Sequence[SearchFigures]) -> str:
    """Write results.json and retrieval.md into the output folder; return the Markdown."""
    folder = Path(config.output).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    text = format_retrieval(config, collection, models)
    write_json(folder / "results.json", to_results(config, collection, models))
    write_text(folder / "retrieval.md", text)
    return text


def format_retrieval(config: RetrievalConfig, collection: Collection, models: Sequence[SearchFigures]) -> str:
    """Return the comparison as Markdown: what was searched, and a table with a row for each model and figure."""
    header = ("model", "figure", "%", "95 % interval", f"points above {models[0].name}", "95 % interval", "p")
    rows = [_format_row(each, figure) for figure in FIGURES for each in models]
    setting = (
        f"{len(collection.queries):,} queries, {len(collection.documents):,} documents; exact search by cosine, "
        f"texts of up to {config.max_length} tokens. Intervals are 95 %, by bootstrap over queries; differences "
        "are paired."
    )
    return "\n\n".join([setting, format_markdown(header, rows, num_texts=2)]) + "\n"


def _format_row(model: SearchFigures, figure: str) -> list[str]:
    low, high = model.intervals[figure]
    cells = [model.name, _TITLES[figure], f"{100 * model.score.get(figure):.1f}"]
    cells.append(format_bounds(100 * low, 100 * high, ".1f"))
    gained = model.gained.get(figure)
    if gained is None:
        return [*cells, NONE, NONE, NONE]
    bounds = format_bounds(100 * gained.low, 100 * gained.high, "+.1f")
    return [*cells, f"{100 * gained.difference:+.1f}", bounds, f"{gained.p_value:.4f}"]


def to_results(config: RetrievalConfig, collection: Collection, models: Sequence[SearchFigures]) -> dict[str, Any]:
    """Return all figures as plain values for results.json; figures are fractions."""
    return {
        "data": hide_places(config.data),
        "split": config.split,
        "sha256": collection.sha256,
        "queries": len(collection.queries),
        "documents": len(collection.documents),
        "max_length": config.max_length,
        "models": {each.name: _describe_model(each) for each in models},
    }


def _describe_model(model: SearchFigures) -> dict[str, Any]:
    return {
        "model": model.model,
        "sha256": model.sha256,
        "pooling": model.pooling,
        **model.score.values,
        "intervals": model.intervals,
        "gained": {figure: asdict(each) for figure, each in model.gained.items()},
    }
