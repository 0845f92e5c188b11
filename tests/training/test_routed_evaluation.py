"""Evaluation with routers: each row is scored by whom it is sent to, and every word counts once."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from lone_engine import make_lone_engine
from torch import nn

from domext_ray.config.method import MethodConfig
from domext_ray.config.pretrain import ShapeConfig
from domext_ray.model.base import load_base
from domext_ray.model.build import build_model
from domext_ray.model.domext.configuration_domext import AdapterConfig
from domext_ray.model.domext.routers_domext import Router
from domext_ray.training.evaluate import evaluate
from domext_ray.training.objective import MaskedBatch
from domext_ray.training.routed_evaluation import RoutedModel, take_rows

OWN = 50
"""The word by which the router knows the domain's rows."""


@pytest.fixture
def model(tiny_base_folder: Path) -> nn.Module:
    base = load_base(str(tiny_base_folder))
    method = MethodConfig(heads=1, ffn_units=8)
    size = base.config.vocab_size
    made = build_model(base, ShapeConfig(), method, vocab_size=size, causal=False, pad_token_id=0, dropout=0.0, seed=0)
    generator = torch.Generator().manual_seed(1)
    for name, each in made.named_parameters():
        if ".adapters." in name:
            each.data.copy_(torch.randn(each.shape, generator=generator) * 0.3)
    return cast(nn.Module, made)


def make_batches() -> list[MaskedBatch]:
    """Ten rows in batches of four, of which some begin with the domain's word; the last has filler."""
    generator, batches = torch.Generator().manual_seed(2), []
    for number, own in ((4, [1, 0, 0, 1]), (4, [0, 0, 0, 0]), (2, [1, 1])):
        ids = torch.randint(60, 200, (number, 12), generator=generator)
        ids[:, 0] = torch.where(torch.tensor(own).bool(), OWN, 51)
        positions = torch.tensor([[row * 12 + place for place in (3, 7 + row)] for row in range(number)]).flatten()
        labels = torch.randint(60, 200, positions.shape, generator=generator)
        weights = torch.ones(len(labels))
        weights[-1] = 0.0
        batches.append(MaskedBatch(ids, None, None, positions, labels, weights))
    return batches


def test_every_word_is_scored_once_by_whom_its_row_is_sent_to(model: nn.Module) -> None:
    config: Any = model.config
    router = Router(AdapterConfig(router_words=config.vocab_size))
    router.weight[OWN], router.weight[51] = 1000, -1000
    routed = RoutedModel(model, {"domain": router}, {"domain": 0.0})
    engine, batches = make_lone_engine(model), make_batches()
    assert routed.route(batches[0].input_ids) == ["domain", None, None, "domain"]
    found = routed.evaluate(engine, batches)
    assert config.active_adapters is None, "the model is as it was"

    losses, number = 0.0, 0
    for batch in batches:
        for row, name in enumerate(routed.route(batch.input_ids)):
            only = torch.arange(len(batch.input_ids)) == row
            one = take_rows(batch, only)
            if one is None:
                continue
            config.active_adapters = [] if name is None else [name]
            score = evaluate(engine, [one])
            losses, number = losses + score.loss * score.num_tokens, number + score.num_tokens
    config.active_adapters = None
    assert found.num_tokens == number == 17 and found.loss == pytest.approx(losses / number, rel=1e-5)
    score = partial(evaluate, engine)
    assert abs(found.loss - score(batches).loss) > 1e-3, "the adapter changes what its rows get, and no others"


def test_rows_of_a_batch_keep_what_is_asked_of_them() -> None:
    batch = make_batches()[0]
    taken = take_rows(batch, torch.tensor([False, True, False, True]))
    assert taken is not None and torch.equal(taken.input_ids, batch.input_ids[[1, 3]])
    flat, before = taken.input_ids.flatten(), batch.input_ids.flatten()
    asked = [2, 3, 6, 7]
    assert torch.equal(flat[taken.masked_positions], before[batch.masked_positions[asked]])
    assert torch.equal(taken.labels, batch.labels[asked]) and torch.equal(taken.weights, batch.weights[asked])
    filler = make_batches()[2]
    assert take_rows(filler, torch.tensor([True, True])) is filler
    nothing = MaskedBatch(batch.input_ids, None, None, torch.tensor([0]), torch.tensor([5]), torch.ones(1))
    assert take_rows(nothing, torch.tensor([False, True, True, True])) is None
