"""exBERT with next-sentence prediction on the engine: two losses, two tables of words, any split, at every stage."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lone_engine import gather_whole
from test_engine import (
    DEFAULT_STAGES,
    LENGTH,
    OPTIM,
    OTHER_STAGES,
    ROWS,
    START,
    STEPS,
    VOCAB,
    Stages,
    build_engine,
    draw_rows,
    each_stage,
    join,
    launch,
)
from torch import nn

from domext_ray.config.method import MethodConfig
from domext_ray.model.base import HEADS
from domext_ray.model.build import trainable_names
from domext_ray.model.domext.configuration_domext import DomextConfig
from domext_ray.model.domext.modeling_domext import DomextForPreTraining
from domext_ray.training.engine import Engine
from domext_ray.training.objective import MaskedBatch
from domext_ray.training.step import StepFigures

pytestmark = pytest.mark.timeout(900)  # processes that import torch and DeepSpeed: minutes on a busy machine
LONG_FROM = 4
"""From this step on a step has twice as many micro batches, as in the phase of long rows."""


def build_model(trains: str) -> DomextForPreTraining:
    """Two layers, half of the words new; tensors above and below DeepSpeed's threshold for sharding."""
    config = DomextConfig(
        vocab_size=VOCAB,
        extension_vocab_size=VOCAB // 2,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=LENGTH,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        initializer_range=0.1,
        module_hidden_size=32,
        module_ffn_size=1600,
        has_pooler=True,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = DomextForPreTraining(config)
    method = MethodConfig(heads=0, ffn_units=0, trains=trains, train_heads=True)  # type: ignore[arg-type]
    names = trainable_names(model, method, HEADS)
    for name, param in model.named_parameters():
        param.requires_grad_(name in names)
    return model


def draw_pairs(step: int) -> list[MaskedBatch]:
    """The rows of `draw_rows`, with segments and labels."""
    generator = torch.Generator().manual_seed(step)
    segments = (torch.arange(LENGTH) >= LENGTH // 2).long()[None]
    return [
        replace(
            each,
            token_type_ids=segments,
            next_sentence_labels=torch.randint(2, (1,), generator=generator),
        )
        for each in draw_rows(step)
    ]


def join_pairs(rows: list[MaskedBatch]) -> MaskedBatch:
    return replace(
        join(rows),
        token_type_ids=torch.cat([each.token_type_ids for each in rows]),
        next_sentence_labels=torch.cat([each.next_sentence_labels for each in rows]),
    )


def train_bare(trains: str) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor]]:
    """Both losses of each step, and the trained tensors; written without the engine."""
    model = build_model(trains)
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    groups = [
        {"params": [each for each in trained.values() if each.ndim > 1], "weight_decay": 0.1},
        {"params": [each for each in trained.values() if each.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.0, eps=1e-6)
    losses = []
    for step in range(STEPS):
        batch = join_pairs(draw_pairs(step))
        for group in optimizer.param_groups:
            group["lr"] = 5e-3 * ((step + 1) / 2 if step < 2 else (8 - step) / 6)
        scores = model(batch.input_ids, token_type_ids=batch.token_type_ids, masked_positions=batch.masked_positions)
        kept = batch.weights > 0
        words = nn.functional.cross_entropy(scores.prediction_logits[kept], batch.labels[kept])
        order = nn.functional.cross_entropy(scores.seq_relationship_logits, batch.next_sentence_labels)
        optimizer.zero_grad()
        (words + order).backward()
        nn.utils.clip_grad_norm_(trained.values(), 0.7)
        optimizer.step()
        losses.append((words.item(), order.item()))
    return losses, {name: each.detach() for name, each in trained.items()}


def train(engine: Engine, first: int, last: int, accumulation_steps: int) -> list[StepFigures]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    figures = []
    for step in range(first, last):
        rows = draw_pairs(step)
        num_parts = accumulation_steps * (2 if step >= LONG_FROM else 1)
        size = ROWS // world_size // num_parts
        own = rows[rank * ROWS // world_size :][: ROWS // world_size]
        parts = [join_pairs(own[i : i + size]) for i in range(0, len(own), size)]
        figures.append(engine.train_step(parts, sum(each.num_masked for each in rows), step, num_pairs=ROWS))
    return figures


def measure(_: Path, stages: Stages) -> dict[str, Any]:
    """Stage one and stage two at every ZeRO stage, and a resumed run."""
    results: dict[str, Any] = {}
    for stage in stages:
        for trains in ("extensions", "all"):
            engine = build_engine(stage, 2, model=build_model(trains))
            figures = train(engine, 0, START, 2)
            state = [gather_whole(engine)]
            dist.broadcast_object_list(state)
            resumed = build_engine(stage, 2, state=state[0], model=build_model(trains))
            figures += train(engine, START, STEPS, 2)
            scores = engine.evaluate(join_pairs(draw_pairs(99))).tolist()
            results[f"{stage}/{trains}"] = figures, gather_whole(engine), train(resumed, START, STEPS, 2), scores
    return results


def make_launch(world_size: int, stages: Stages) -> Any:
    """A fixture: what the ranks of a world gave that ran some stages."""

    @pytest.fixture(scope="module")
    def ranks_of_launch(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
        return launch(world_size, measure, tmp_path_factory.mktemp("pairs"), stages)

    return ranks_of_launch


launch_1_default, launch_2_default = make_launch(1, DEFAULT_STAGES), make_launch(2, DEFAULT_STAGES)
launch_1_slow, launch_2_slow = make_launch(1, OTHER_STAGES), make_launch(2, OTHER_STAGES)


@pytest.fixture(params=[pytest.param(1, marks=pytest.mark.slow), 2])
def ranks(request: pytest.FixtureRequest, stage: int) -> list[Any]:
    return request.getfixturevalue(f"launch_{request.param}_{'default' if stage in DEFAULT_STAGES else 'slow'}")


@pytest.mark.parametrize("trains", ["extensions", "all"])
@each_stage
def test_both_losses_equal_the_bare_loop(ranks: list[Any], stage: int, trains: str) -> None:
    assert OPTIM.max_grad_norm == 0.7
    losses, tensors = train_bare(trains)
    for rank, result in enumerate(ranks):
        figures, state, resumed, scores = result[f"{stage}/{trains}"]
        assert [each.loss for each in figures] == pytest.approx([each[0] for each in losses], abs=1e-4)
        assert [each.next_sentence_loss for each in figures] == pytest.approx([each[1] for each in losses], abs=1e-4)
        assert [each.loss for each in resumed] == [each.loss for each in figures[START:]]
        assert scores[0] > 0 and 0 <= scores[2] <= ROWS
        if rank == 0:
            assert set(state.tensors) == set(tensors)
            assert max(float((state.tensors[name].param - tensors[name]).abs().max()) for name in tensors) < 2e-4
