"""A comparison of models that search becomes results.json and a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from domext_ray.config.jobs import RetrievalConfig
from domext_ray.config.options.submitted import hide_places
from domext_ray.report.compare import tabulate
from domext_ray.storage import Place, write_json, write_text
from domext_ray.studies.retrieval.collection import Collection
from domext_ray.studies.retrieval.retrieval import FIGURES, SearchModel

_TITLES = {name: name.replace("ndcg", "nDCG").replace("_at_", "@").replace("_", " ") for name in FIGURES}


def write_retrieval(config: RetrievalConfig, collection: Collection, models: Sequence[SearchModel]) -> str:
    """Write results.json and retrieval.md into the output folder; return the Markdown."""
    folder = Place(config.output)
    text = format_retrieval(config, collection, models)
    write_json(folder / "results.json", to_results(config, collection, models))
    write_text(folder / "retrieval.md", text)
    return text


def format_retrieval(config: RetrievalConfig, collection: Collection, models: Sequence[SearchModel]) -> str:
    """Return the comparison as Markdown: what was searched, and a table for each figure."""
    setting = (
        f"{len(collection.queries):,} queries, {len(collection.documents):,} documents; exact search by cosine, "
        f"texts of up to {config.max_length} tokens. Intervals are 95 %, by bootstrap over queries; differences to "
        f"{models[0].name} are paired."
    )
    return "\n\n".join([setting, *(_tabulate(models, figure) for figure in FIGURES)]) + "\n"


def _tabulate(models: Sequence[SearchModel], figure: str) -> str:
    lines = [model.make_line(figure) for model in models]
    return tabulate(
        lines, f"{_TITLES[figure]} (%)", names="model", form=".1f", change=f"points above {models[0].name}"
    ).show()


def to_results(config: RetrievalConfig, collection: Collection, models: Sequence[SearchModel]) -> dict[str, Any]:
    """Return all figures as plain values for results.json; figures are fractions."""
    return {
        "data": hide_places(config.data),
        "split": config.split,
        "sha256": collection.sha256,
        "queries": len(collection.queries),
        "documents": len(collection.documents),
        "max_length": config.max_length,
        "models": {model.name: _describe_model(model) for model in models},
    }


def _describe_model(model: SearchModel) -> dict[str, Any]:
    return {"model": model.model, "sha256": model.sha256, "pooling": model.pooling, **model.describe("gained")}
