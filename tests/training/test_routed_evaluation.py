"""Evaluation with routers: each row is scored by whom it is sent to, and every word counts once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from lone_engine import make_lone_engine
from torch import nn

from domext_ray.config.method import MethodConfig
from domext_ray.model.base import load_base
from domext_ray.model.domext.modeling_domext import BASE_NAME
from domext_ray.model.domext.routers_domext import ROUTER_PAIRS
from domext_ray.model.spec import ModelSpec
from domext_ray.text.corpus.batching import MaskedRows, pad_masked
from domext_ray.training.evaluate import evaluate, evaluate_routed
from domext_ray.training.objective import to_batch
from domext_ray.training.passages import EvalSet

OWN, OTHER = 50, 51
"""The words by which the router knows the domain's rows, and others."""
FIRST = [OWN, OTHER, OTHER, OWN, OTHER, OTHER, OTHER, OTHER, OWN, OWN]
SIZES = [11, 11, 9, 14, 11, 8, 12, 11, 20, 10]


@pytest.fixture
def model(tiny_base_folder: Path) -> nn.Module:
    base = load_base(str(tiny_base_folder))
    method = MethodConfig(heads=1, ffn_units=8)
    made = ModelSpec(base, method).build()
    generator = torch.Generator().manual_seed(1)
    for name, param in made.named_parameters():
        if ".adapters." in name:
            param.data.copy_(torch.randn(param.shape, generator=generator) * 0.3)
    return cast(nn.Module, made)


def make_set() -> EvalSet:
    """Ten rows in batches of four, of which some begin with the domain's word; nothing is asked of one of them."""
    draw = np.random.default_rng(2)
    rows = [np.array([own, *draw.integers(60, 200, size)]) for own, size in zip(FIRST, SIZES, strict=True)]
    selected = [np.isin(np.arange(len(row)), (3, 7) if i != 6 else ()) for i, row in enumerate(rows)]
    flat = [np.concatenate(column) for column in (rows, [row + 1 for row in rows], selected)]
    lengths = np.array([len(row) for row in rows])

    def collate(some: MaskedRows) -> list[Any]:
        cuts = (some.cut(slice(first, first + 4)) for first in range(0, len(some.lengths), 4))
        return [to_batch(pad_masked(cut, 0, with_filler=True)) for cut in cuts]

    return EvalSet(MaskedRows(flat[0], flat[1], flat[2], lengths), collate)


def test_every_row_is_scored_once_by_whom_it_is_sent_to(model: nn.Module) -> None:
    """Whether all that are asked score theirs now, or some or all have scored every row before."""
    network: Any = model
    table = torch.zeros(network.config.vocab_size + ROUTER_PAIRS, dtype=torch.int32)
    table[OWN], table[OTHER] = 1000, -1000
    network.bert.set_router("domain", table, 0.0)
    engine, asked = make_lone_engine(model), make_set()
    alone = []
    for row, first in enumerate(FIRST):
        network.config.active_adapters = ["domain"] if first == OWN else []
        alone.append(evaluate(engine, replace(asked, rows=asked.rows.take(np.array([row]))))[0])
    network.config.active_adapters = []
    of_base = evaluate(engine, asked)
    network.config.active_adapters = None
    adapted, score, scored = evaluate(engine, asked), engine.evaluate, list[Any]()

    def note(batch: Any) -> torch.Tensor:
        scored.append(batch)
        return score(batch)

    engine.evaluate = note  # type: ignore[method-assign]
    both = {"domain": adapted, BASE_NAME: of_base}
    for names, num_batches in (((), 3), (("domain",), 2), ((BASE_NAME,), 1), (("domain", BASE_NAME), 0)):
        known = {name: both[name] for name in names}
        scored.clear()
        found = evaluate_routed(engine, model, asked, known, lambda: None)
        assert network.config.active_adapters is None, "the model is as it was"
        assert len(scored) == num_batches, names
        np.testing.assert_allclose(found, alone, rtol=1e-5)
    assert found[:, 2].sum() == 18 and (found[:, 2] == 0).sum() == 1
    assert abs(found - adapted)[:, 0].max() > 1e-3, "the adapter changes what its rows get alone"
