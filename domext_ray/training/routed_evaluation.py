"""What a run's model reaches with its router: each row is scored by the adapter that it is sent to, or by the base.

Enters: a run's routers (router.py) and its fixed evaluations. Leaves: the figures that users of `adapter_names="auto"`
get. Rows are sent as they are asked, with their words masked.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from domext_ray.model.domext.configuration_domext import AdapterConfig, DomextConfig
from domext_ray.model.domext.routers_domext import ROUTER_PAIRS, Router, choose_adapters
from domext_ray.storage import Where
from domext_ray.training.engine import Engine
from domext_ray.training.evaluate import Scores, evaluate
from domext_ray.training.objective import MaskedBatch
from domext_ray.training.router import read_routers


@dataclass(frozen=True)
class RoutedModel:
    """A run's model and the routers of its adapters.

    Args:
        model: the model that `engine` trains.
        routers: by adapter.
        thresholds: log-odds from which a row is an adapter's.
    """

    model: nn.Module
    routers: Mapping[str, Router]
    thresholds: Mapping[str, float]

    def route(self, input_ids: Tensor) -> list[str | None]:
        """Return the adapter of each row of int64 [B, N], as `DomextModel.route` does; None: the base."""
        return choose_adapters(self.routers, self.thresholds, input_ids)

    def evaluate(self, engine: Engine, batches: Sequence[MaskedBatch]) -> Scores:
        """Score a fixed set of batches, as `training.evaluate.evaluate` does."""
        groups: dict[str | None, list[MaskedBatch]] = {name: [] for name in (None, *sorted(self.routers))}
        for batch in batches:
            names = self.route(batch.input_ids)
            for name in dict.fromkeys(names):
                rows = take_rows(batch, torch.tensor([each == name for each in names]))
                groups[name] += [] if rows is None else [rows]
        scores = []
        for name, own in groups.items():
            with _activate(self.model, [] if name is None else [name]):
                scores.append(evaluate(engine, own))
        return _join(scores)


def find_routed_model(model: nn.Module, run_dir: Where) -> RoutedModel | None:
    """Put a run's routers beside its model; None where the run has none.

    Args:
        model: on any device; routers stay on the CPU, where batches are.
        run_dir: the run's directory, with what `router.get_or_train_routers` left.

    Raises:
        RunError: a file is damaged.
    """
    routers, thresholds = {}, {}
    for name, (table, record) in read_routers(run_dir).items():
        if name in cast(DomextConfig, model.config).adapters:
            routers[name] = Router(AdapterConfig(router_words=len(table) - ROUTER_PAIRS))
            routers[name].weight.copy_(table)
            thresholds[name] = record.threshold
    return RoutedModel(model, routers, thresholds) if routers else None


@contextmanager
def _activate(model: nn.Module, adapters: list[str]) -> Iterator[None]:
    config = cast(Any, model.config)
    before, config.active_adapters = config.active_adapters, adapters
    try:
        yield
    finally:
        config.active_adapters = before


def take_rows(batch: MaskedBatch, is_taken: Tensor) -> MaskedBatch | None:
    """Return some rows of a batch that is evaluated; None if nothing is asked of them.

    Args:
        batch: B rows, without a distillation term.
        is_taken: bool [B].
    """
    if is_taken.all():
        return batch
    length = batch.input_ids.shape[1]
    rows, places = batch.masked_positions // length, batch.masked_positions % length
    asked = is_taken[rows]
    if not batch.weights[asked].any():
        return None
    numbers = is_taken.cumsum(0) - 1

    def choose(values: Tensor | None, chosen: Tensor) -> Tensor | None:
        return None if values is None else values[chosen]

    return replace(
        batch,
        input_ids=batch.input_ids[is_taken],
        attention_mask=choose(batch.attention_mask, is_taken),
        token_type_ids=choose(batch.token_type_ids, is_taken),
        masked_positions=numbers[rows[asked]] * length + places[asked],
        labels=batch.labels[asked],
        weights=batch.weights[asked],
        next_sentence_labels=choose(batch.next_sentence_labels, is_taken),
        parts=choose(batch.parts, asked),
        document_ids=choose(batch.document_ids, is_taken),
        token_indices=None,
    )


def _join(scores: Sequence[Scores]) -> Scores:
    """The scores of all rows, from those of groups of them."""
    num_tokens, num_pairs = sum(each.num_tokens for each in scores), sum(each.num_pairs for each in scores)

    def mean(name: str, size: str, total: int) -> float:
        return sum(getattr(each, name) * getattr(each, size) for each in scores if getattr(each, size)) / total

    return Scores(
        mean("loss", "num_tokens", num_tokens) if num_tokens else math.nan,
        mean("accuracy", "num_tokens", num_tokens) if num_tokens else math.nan,
        num_tokens,
        mean("next_sentence_accuracy", "num_pairs", num_pairs) if num_pairs else math.nan,
        num_pairs,
    )
