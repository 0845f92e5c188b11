"""The loss in chunks of positions: figures and gradients are those of the whole, and the forecast sees less memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from forked import launch
from method_runs import Places, build, draw_batches, make_config, make_places, measure_sharded, shard_everything
from methods import Row, find_row
from torch import Tensor, nn

from domext_ray.config.method import MethodConfig
from domext_ray.config.pretrain import (
    EngineConfig,
    PretrainConfig,
    ShapeConfig,
    TrainConfig,
    VocabConfig,
    resolve_micro_batch_sizes,
)
from domext_ray.model.spec import ModelSpec
from domext_ray.training import losses
from domext_ray.training.cost import estimate_memory, make_dry_run_model
from domext_ray.training.losses import make_loss
from domext_ray.training.objective import MaskedBatch

pytestmark = pytest.mark.timeout(900)
CPU = torch.device("cpu")
WHOLE, SMALL = losses.MAX_SCORES, 3_000
KEPT = "AF + word shifts, keeping the base's predictions"
NAMES = (
    "full",
    "bottleneck after attention, tanh, left to right",
    "AF + word shifts + new words",
    KEPT,
    "exBERT + sentence pairs, keeping the base's predictions",
    "bottleneck, general text learned",
)


@pytest.fixture(scope="module")
def places(tiny_base_folder: Path, tiny_roberta_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Places:
    return make_places(tmp_path_factory.mktemp("chunks"), tiny_base_folder, tiny_roberta_folder, [*NAMES, "new words"])


def measure(row: Row, places: Places) -> tuple[int, list[tuple[Tensor, ...]], dict[str, Tensor | None]]:
    """Chunks; outputs of micro batches in training and evaluation; gradients, of parameters that left their start."""
    built, config = build(row, places), make_config(row, places)
    network, draw = cast(nn.Module, built.model), torch.Generator().manual_seed(3)
    with torch.no_grad():
        for param in network.parameters():
            if param.requires_grad:
                param.add_(torch.randn(param.shape, generator=draw) * 0.05)
    rows = resolve_micro_batch_sizes(config)
    loss: Any = make_loss(config, built.base, network, built.fixed, CPU, rows)(network, CPU, bf16=False)
    batches = [*draw_batches(row, places, 0)[0], take_position(draw_batches(row, places, 1)[0][-1])]
    outputs = [loss.train()(batch) for batch in batches]
    sum(sums[name] for sums in outputs for name in sums.keys() & loss.loss_weights.keys()).backward()
    with torch.no_grad():
        scored = [loss.eval()(batch) for batch in batches]
    gradients = {name: None if tensor.grad is None else tensor.grad for name, tensor in network.named_parameters()}
    return loss.num_chunks, [*outputs, *scored], gradients


def take_position(batch: MaskedBatch) -> MaskedBatch:
    """Leave one position of a batch: there are more chunks."""
    first = {name: getattr(batch, name)[:1] for name in ("masked_positions", "labels", "weights")}
    return replace(batch, **first, parts=None, kept_rows=None)


@pytest.mark.parametrize("name", NAMES)
def test_chunks_are_the_whole(name: str, places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    row = find_row(name)
    whole, expected, gradients = measure(row, places)
    monkeypatch.setattr(losses, "MAX_SCORES", SMALL)
    chunks, found, own = measure(row, places)
    assert whole == 1 and chunks > 3
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(own, gradients, rtol=1e-4, atol=1e-5)


def test_kinds_are_kept_in_chunks(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    row = find_row("new words")
    model = build(row, places).model
    batch = draw_batches(row, places, 0)[0][0]
    batch = replace(batch, kinds=(torch.arange(model.config.vocab_size) % 3).to(torch.uint8))
    found = [losses.MaskedLoss(cast(nn.Module, model), CPU, bf16=False, num_chunks=number) for number in (1, 4)]
    with torch.no_grad():
        whole, chunks = (objective.eval()(batch) for objective in found)
    torch.testing.assert_close(chunks, whole, rtol=1e-5, atol=1e-5)
    assert int(whole[:, 1].sum()) <= int(whole[:, 2].sum()) == batch.num_masked


@pytest.mark.slow
def test_chunks_on_two_workers_at_zero_3(places: Places, tmp_path: Path) -> None:
    """Ranks predict different numbers of tokens, and gather the head equally often."""
    for (expected, before), (found, after) in launch(measure_both, (places,), 2, tmp_path)[0]:
        figures = [[(step.losses, step.grad_norm) for step in steps] for steps in (found, expected)]
        torch.testing.assert_close(*figures, rtol=1e-4, atol=1e-5)
        for name, tensor in before.tensors.items():
            torch.testing.assert_close(after.tensors[name].param, tensor.param, rtol=1e-4, atol=1e-4)


def measure_both(_: int, places: Places) -> Any:
    """What methods' steps are whole and in chunks."""
    shard_everything()
    results = []
    for name in (KEPT, "full", "AF + word shifts + new words"):
        results.append([])
        for losses.MAX_SCORES in (WHOLE, SMALL):
            results[-1].append(measure_sharded(find_row(name), places, 3))
    return results


def test_the_forecast_of_a_large_vocabulary_has_no_whole_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    config = PretrainConfig(
        base="none",
        vocab=VocabConfig(size=250_002),
        shape=ShapeConfig(num_hidden_layers=1, hidden_size=8, num_attention_heads=1, intermediate_size=8),
        method=MethodConfig(name="full", trains="all", heads=0, ffn_units=0),
        train=TrainConfig(seq_length=128, global_batch_size=256, micro_batch_size=256),
        engine=EngineConfig(precision="fp32"),
    )
    chunks = estimate_memory(make_dry_run_model(config, ModelSpec.of(config, None)))["activations"]
    monkeypatch.setattr(losses, "MAX_SCORES", 2**40)
    whole = estimate_memory(make_dry_run_model(config, ModelSpec.of(config, None)))["activations"]
    scores = 0.15 * 256 * 128 * 250_002 * 4
    assert chunks < 4 * 4 * WHOLE < 2 * scores < whole
