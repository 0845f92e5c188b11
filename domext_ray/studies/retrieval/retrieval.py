"""How well models search: nDCG@10 and recall@k of exact search by cosine, with intervals over queries.

Enters: models, and a collection in BEIR's layout. Leaves: for every model its figures with bootstrap 95 % intervals,
and paired differences to the first model, over the same queries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from domext_ray.config.jobs import RetrievalConfig
from domext_ray.config.shared import Pooling
from domext_ray.families.metrics.scored_models import ScoredModel
from domext_ray.families.metrics.scores import Score, compare_scores, make_score
from domext_ray.models.source import open_model
from domext_ray.models.text_embedding import TextEmbedding, choose_pooling
from domext_ray.progress import StatusLine
from domext_ray.studies.retrieval.collection import Collection, read_collection

NDCG = "ndcg_at_10"
RECALLS = 1, 10, 100
FIGURES = (NDCG, *(f"recall_at_{k}" for k in RECALLS))
DEPTH = 100
"""Documents that a search finds."""
BLOCK_QUERIES, BLOCK_DOCUMENTS = 256, 65_536
TEXTS_PER_TURN = 2048


@dataclass(frozen=True)
class SearchModel(ScoredModel):
    """A model that searched: `FIGURES`, one row of statistics a query, and how far they are above the first one's."""

    pooling: Pooling


def evaluate_retrieval(config: RetrievalConfig) -> tuple[Collection, list[SearchModel]]:
    """Search with every model."""
    collection = read_collection(Path(config.data), config.split)
    starts = [(name, open_model(model, "--models").load()) for name, model in config.named_models]
    found: list[SearchModel] = []
    for name, start in starts:
        embed = TextEmbedding(
            start,
            choose_pooling(start.id, config.pooling),
            normalize=True,
            max_length=config.max_length,
            batch_size=config.batch_size,
        )
        score = score_model(embed, collection, name)
        intervals = score.describe()["intervals"]
        gained = compare_scores(found[0].score, score, FIGURES) if found else {}
        found.append(SearchModel(name, start.id, start.sha256, score, intervals, gained, embed.pooling))
    return collection, found


def score_model(embed: TextEmbedding, collection: Collection, name: str) -> Score:
    """Embed a collection, search, and score what was found; `name` is what the status line calls the model."""
    texts, line = [*collection.queries, *collection.documents], StatusLine(is_due=False)
    parts = []
    for first in range(0, len(texts), TEXTS_PER_TURN):
        line.show(f"{name}: {first:,} of {len(texts):,} texts")
        parts.append(embed(texts[first : first + TEXTS_PER_TURN]))
    line.end()
    vectors = np.concatenate(parts)
    number = len(collection.queries)
    found = search(vectors[:number], vectors[number:], DEPTH + 1)  # one may be the query itself
    return score_rankings(found, collection.judgements, collection.own_places)


def search(queries: np.ndarray, documents: np.ndarray, depth: int) -> np.ndarray:
    """Find the documents nearest to queries, exactly, by matrix products of bounded size.

    `queries` [Q, d] and `documents` [D, d] are float32 of length 1. The result, int64 [Q, min(depth, D)], has places of
    documents, the nearest first; of equal ones the one with the lower place.
    """
    depth = min(depth, len(documents))
    found = np.empty((len(queries), depth), dtype=np.int64)
    for first in range(0, len(queries), BLOCK_QUERIES):
        own = queries[first : first + BLOCK_QUERIES]
        scores, places = np.empty((len(own), 0), dtype=np.float32), np.empty((len(own), 0), dtype=np.int64)
        for begin in range(0, len(documents), BLOCK_DOCUMENTS):
            block = own @ documents[begin : begin + BLOCK_DOCUMENTS].T
            numbers = np.broadcast_to(np.arange(begin, begin + block.shape[1]), block.shape)
            scores, places = np.hstack([scores, block]), np.hstack([places, numbers])
            order = np.argsort(-scores, axis=1, kind="stable")[:, :depth]
            scores, places = np.take_along_axis(scores, order, 1), np.take_along_axis(places, order, 1)
        found[first : first + len(own)] = places
    return found


def score_rankings(rankings: np.ndarray, judgements: Sequence[dict[int, int]], own_places: Sequence[int]) -> Score:
    """Score what was found for each query as BEIR's evaluator does.

    `rankings`, int64 [Q, K], has places of documents, the best first. A document that is not judged is irrelevant, and
    the query's own one, of `own_places`, is left out (-1: there is none).
    """
    rows = [
        _score_query([place for place in ranking if place != own], judged)
        for ranking, judged, own in zip(rankings.tolist(), judgements, own_places, strict=True)
    ]
    number = np.ones((len(rows), 1))
    return make_score(np.hstack([np.array(rows), number]), _average)


def _score_query(ranking: Sequence[int], judged: dict[int, int]) -> list[float]:
    """nDCG@10 with gains as they are judged (Järvelin and Kekäläinen 2002; trec_eval), and recall@k."""
    gains = [max(0, judged.get(place, 0)) for place in ranking]
    best = sorted((max(0, judgement) for judgement in judged.values()), reverse=True)
    relevant = sum(gain > 0 for gain in best)
    if not relevant:
        return [0.0] * len(FIGURES)
    recalls = [sum(gain > 0 for gain in gains[:k]) / relevant for k in RECALLS]
    return [_discount(gains[:10]) / _discount(best[:10]), *recalls]


def _discount(gains: Sequence[int]) -> float:
    return float(sum(gain / np.log2(rank + 2) for rank, gain in enumerate(gains)))


def _average(sums: np.ndarray) -> dict[str, Any]:
    return {name: sums[:, i] / sums[:, -1] for i, name in enumerate(FIGURES)}
