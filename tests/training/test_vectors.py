"""Objectives that make vectors of rows: their views, their losses, and that nothing depends on how rows are dealt."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from lone_engine import make_lone_engine
from row_files import make_token_rows
from torch.nn import functional as F

from domext_ray.config.method import MethodConfig
from domext_ray.config.pretrain import (
    ObjectiveConfig,
    OptimConfig,
    PretrainConfig,
    TrainConfig,
    resolve_micro_batch_sizes,
)
from domext_ray.model.base import load_base
from domext_ray.model.build import detach
from domext_ray.model.spec import ModelSpec, build_base
from domext_ray.text.corpus.views import Viewer
from domext_ray.text.vocabulary.tokenizer import load_tokenizer
from domext_ray.training.engine import Engine
from domext_ray.training.losses import InfoNCELoss
from domext_ray.training.objective import LOSS, ViewBatch, to_batch
from domext_ray.training.step import move_batch

CROP = ObjectiveConfig(kind="infonce", views="crop", group_rows=4)
DROPOUT = ObjectiveConfig(kind="infonce", group_rows=4)
OBJECTIVES = {"crop": CROP, "dropout": DROPOUT}
METHODS = {
    "bottlenecks": MethodConfig(name="bottleneck", heads=0, ffn_units=0, bottleneck_size=8),
    "shifts": MethodConfig(heads=1, ffn_units=8, word_rows=1000, word_head=True),
    "full": MethodConfig(name="full", trains="all", heads=0, ffn_units=0),
    "adapter": MethodConfig(trains="adapter", heads=1, ffn_units=0),
    "top": MethodConfig(name="top", trains="top_layers", top_layers=1, heads=0, ffn_units=0),
}
each_objective = pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES)


def make_rows(num_rows: int) -> pa.Table:
    """Rows of 8 to 31 tokens, every third of which goes on with the word before it."""
    random = np.random.default_rng(0)
    ids = [[2, *random.integers(5, 60, length - 2).tolist(), 3] for length in random.integers(8, 32, num_rows)]
    starts = [[i % 3 != 2 for i in range(len(row))] for row in ids]
    return make_token_rows(ids, starts)


def make_viewer(folder: Path, objective: ObjectiveConfig) -> Viewer:
    return Viewer(load_tokenizer(folder), objective, seed=3)


def make_batches(folder: Path, objective: ObjectiveConfig, size: int = 8, num_rows: int = 8) -> list[ViewBatch]:
    viewer = make_viewer(folder, objective)
    return [to_batch(batch) for batch in viewer.collate(viewer.mask(make_rows(num_rows), epoch=0), size)]


def make_engine(
    folder: Path, objective: ObjectiveConfig, method: MethodConfig = METHODS["bottlenecks"], **spec: Any
) -> Engine:
    model: Any = ModelSpec(load_base(str(folder)), method, reads_words=objective.reads_words, **spec).build()
    optim = OptimConfig(lr=1e-2, decay_steps=20, warmup_steps=1)
    return make_lone_engine(
        model, optim=optim, micro_batch_size=8, objective=functools.partial(InfoNCELoss, objective=objective)
    )


def get_model(engine: Engine) -> Any:
    return engine._deepspeed.module.model


def train(engine: Engine, batches: list[ViewBatch], steps: range) -> list[float]:
    counts = {LOSS: sum(batch.counts[LOSS] for batch in batches)}
    return [engine.train_step(batches, counts, step).loss for step in steps]


@each_objective
def test_views_move_with_their_row(objective: ObjectiveConfig, tiny_base_folder: Path) -> None:
    """A row's views are the same beside other rows; another epoch, seed or row has others."""
    viewer, rows = make_viewer(tiny_base_folder, objective), make_rows(12)
    whole, part = viewer.mask(rows, epoch=1), viewer.mask(rows.slice(5, 3), epoch=1)
    for views, own in ((whole.first, part.first), (whole.second, part.second)):
        assert all(np.array_equal(*pair) for pair in zip(views[5:8], own, strict=True))
    if objective is not DROPOUT:
        other = viewer.mask(rows, epoch=2).first
        assert sum(np.array_equal(*pair) for pair in zip(whole.first, other, strict=True)) < 4
        seeded = Viewer(load_tokenizer(tiny_base_folder), objective, seed=4).mask(rows, epoch=1).first
        assert sum(np.array_equal(*pair) for pair in zip(whole.first, seeded, strict=True)) < 4


def test_crops_are_stretches_of_whole_words(tiny_base_folder: Path) -> None:
    rows = make_rows(50)
    viewed = make_viewer(tiny_base_folder, CROP).mask(rows, epoch=0)
    assert any(not np.array_equal(*pair) for pair in zip(viewed.first, viewed.second, strict=True))
    columns = rows.select([0, 1]).to_pydict().values()
    for before, starts, *views in zip(*columns, viewed.first, viewed.second, strict=True):
        for view in views:
            inner = view[1:-1].tolist()
            firsts = [i for i in range(1, len(before) - 1) if before[i : i + len(inner)] == inner]
            assert any(starts[i] for i in firsts) and view[0] == 2 and view[-1] == 3
            assert 1 <= len(inner) <= 0.75 * len(before)


def test_a_row_that_is_one_word_is_cropped(tiny_base_folder: Path) -> None:
    """Such as DNA: the row may begin within the word, behind [CLS]."""
    ids = [[2, *range(5, 59), 3]] * 50
    for begins in (True, False):
        starts = [[True, begins, *[False] * 53, True]] * 50
        first = make_viewer(tiny_base_folder, CROP).mask(make_token_rows(ids, starts), epoch=0).first
        assert 15 < np.mean([*map(len, first)]) < 31
        assert all(view[0] == 2 and view[-1] == 3 and (np.diff(view[1:-1]) > 0).all() for view in first)
        assert all((view[1:-1] > 3).all() for view in first), "[CLS] comes once"


def test_a_row_of_special_tokens_has_views(tiny_base_folder: Path) -> None:
    rows = make_token_rows([[2, 3]], [[True, True]])
    for objective in OBJECTIVES.values():
        viewed = make_viewer(tiny_base_folder, objective).mask(rows, epoch=0)
        assert viewed.first[0].tolist() == viewed.second[0].tolist() == [2, 3]


def test_contrast_is_infonce_within_groups(tiny_base_folder: Path) -> None:
    engine = make_engine(tiny_base_folder, CROP)
    (batch,) = make_batches(tiny_base_folder, CROP)
    losses, num_right, num_scored = engine.evaluate(batch).T.tolist()
    model = get_model(engine).eval()
    with torch.no_grad():
        states = model.bert(batch.input_ids, attention_mask=batch.attention_mask).last_hidden_state
    assert batch.attention_mask is not None
    rows = [row_states[mask.bool()].mean(0) for row_states, mask in zip(states, batch.attention_mask, strict=True)]
    expected, right = list[float](), list[bool]()
    for first in (0, 4):
        scores = torch.stack(
            [F.cosine_similarity(rows[i], torch.stack(rows[8 + first : 12 + first])) for i in range(first, first + 4)]
        )
        expected += F.cross_entropy(scores / 0.05, torch.arange(4), reduction="none").tolist()
        right += (scores.argmax(1) == torch.arange(4)).tolist()
    assert losses == pytest.approx(expected, abs=1e-3) and (num_right, num_scored) == (right, [1] * 8)


def test_what_trains_has_a_gradient_and_is_counted(tiny_base_folder: Path) -> None:
    base = load_base(str(tiny_base_folder))
    for method in METHODS.values():
        engine = make_engine(tiny_base_folder, CROP, method, dropout=0.1)
        model = get_model(engine)
        batch = move_batch(make_batches(tiny_base_folder, CROP)[0], torch.device("cpu"))
        with torch.no_grad():  # away from the zero start, at which the way in has no gradient
            for param in engine._trainables.values():
                param.add_(0.05 * torch.randn(param.shape, generator=torch.Generator().manual_seed(1)))
        engine._deepspeed.module(batch)[LOSS].backward()
        for name, param in model.named_parameters():
            assert (param.grad is not None) == param.requires_grad, (name, method)
        counts = ModelSpec(base, method, reads_words=CROP.reads_words).counts
        assert counts.trainable == sum(tensor.numel() for tensor in engine._trainables.values()), method


@each_objective
def test_training_learns_and_the_base_stays(objective: ObjectiveConfig, tiny_base_folder: Path) -> None:
    base = load_base(str(tiny_base_folder))
    engine = make_engine(tiny_base_folder, objective, dropout=0.1)
    batches, model = make_batches(tiny_base_folder, objective), get_model(engine)
    ids = batches[0].input_ids
    losses = train(engine, batches, range(12))
    assert losses[-1] < 0.95 * losses[0]
    for name, tensor in detach(model, {name: name for name in base.tensors}).items():
        assert torch.equal(tensor, base.tensors[name]), name
    plain: Any = build_base(base, torch.device("cpu"))
    model.eval()
    with torch.no_grad():
        adapted = model.bert(ids).last_hidden_state
        model.bert.set_active_adapters([])
        taken_off = model.bert(ids).last_hidden_state
        assert torch.equal(taken_off, plain.eval().bert(ids).last_hidden_state), "the base's, bit for bit"
    assert not torch.allclose(adapted, taken_off)


def test_micro_batches_change_nothing(tiny_base_folder: Path) -> None:
    batches = [make_batches(tiny_base_folder, CROP, size) for size in (8, 4)]
    one, two = (train(make_engine(tiny_base_folder, CROP), own, range(3)) for own in batches)
    assert one == pytest.approx(two, rel=1e-5)


def test_automatic_micro_batches_cut_no_group() -> None:
    train = TrainConfig(global_batch_size=96)
    for objective, rows in (
        (replace(CROP, group_rows=48), 48),
        (replace(CROP, group_rows=12), 24),
        (ObjectiveConfig(), 32),
    ):
        config = PretrainConfig(objective=objective, train=train, method=METHODS["bottlenecks"])
        assert resolve_micro_batch_sizes(config)[0] == rows
