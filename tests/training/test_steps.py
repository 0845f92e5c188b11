"""Steps are the same however they are made: with joined products, captured, of a batch that is sent as one.

A captured step is the step that Python launches, bit for bit: dropout, accumulation, new shapes, bad steps with it. A
CPU has no CUDA graphs. What stands for one here computes a list of operations again, on the same memory; whatever
Python does beside them, and whatever it bakes into them, shows as a difference. That a GPU is neither sent anything nor
waited for within a pass, which a graph forbids, is shown in `test_devices.py`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from captured_steps import BROKEN, STEPS, record_operations, train_captured
from tiny_models import LENGTH, VOCAB, make_rows
from torch import Tensor, nn
from trained_methods import CPU, DROPOUT, FEW_METHODS, LAYOUTS, METHODS, make_method_engine, make_trainable

from domext_ray.config.pretrain import EngineConfig, PretrainConfig
from domext_ray.errors import RunError
from domext_ray.model import fused
from domext_ray.model.joined import JoinedLinear, join_products
from domext_ray.training import engine
from domext_ray.training.capture import WARM_PASSES, CapturedPasses
from domext_ray.training.cost import count_flops, make_full_batch
from domext_ray.training.losses import MaskedLoss
from domext_ray.training.objective import LOSS, KeptRows, MaskedBatch, ViewBatch
from domext_ray.training.step import _send, move_batch

WAYS: dict[str, dict[str, Any]] = {
    "as written": {"joined": False},
    "in bf16, joined": {"joined": True, "precision": "bf16"},
    "joined, fused": {"joined": True, "fused": True},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("method", FEW_METHODS)
def test_captured_steps_are_those_that_python_launches(method: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "record_graph", record_operations)
    monkeypatch.setattr(fused, "find_fault", lambda device: "")  # on a CPU kernels are one operation each, too
    launched, trained, num_calls = train_captured(method, CPU, capture=False, **WAYS[way])
    assert num_calls == 2 * STEPS
    figures, own, num_calls = train_captured(method, CPU, capture=True, **WAYS[way])
    assert num_calls == 2 * (WARM_PASSES + 1), "of each of two shapes: the first passes, and the one that is captured"
    assert [taken.finite for taken in figures] == [step != BROKEN for step in range(STEPS)]
    assert repr(figures) == repr(launched)  # a loss that is no number equals no other
    assert own.keys() == trained.keys() and all(torch.equal(own[name], tensor) for name, tensor in trained.items())


def test_a_pass_that_waits_for_its_own_result_is_refused() -> None:
    param = nn.Parameter(torch.ones(2))

    def wait(batch: ViewBatch, factors: Tensor) -> Tensor:
        loss = (param * batch.weights).sum() * factors
        return loss.detach() * (2.0 if loss.item() > 0 else 1.0)

    passes = CapturedPasses(wait, [param], record_operations)
    for _ in range(WARM_PASSES):
        passes(ViewBatch(torch.ones(2, 4), None, torch.ones(2)), torch.ones(()))
    with pytest.raises(RunError, match=r"^--engine\.capture is true, and .* \(.*local_scalar.*\); set it false\.$"):
        passes(ViewBatch(torch.ones(2, 4), None, torch.ones(2)), torch.ones(()))


# --- joined products ---


JOINED_STEPS = 20


def draw_batch(step: int) -> MaskedBatch:
    ids, mask = make_rows()
    draw = torch.Generator().manual_seed(step)
    positions = torch.randperm(ids.numel(), generator=draw)[:8].sort().values
    positions = positions[mask.flatten()[positions] > 0]
    labels = torch.randint(VOCAB // 4, (len(positions),), generator=draw)
    return MaskedBatch(ids, mask, None, positions, labels, torch.ones(len(positions)))


def train(method: str, *, joined: bool, layout: str = "bert", dropout: bool = False, **options: Any) -> list[Any]:
    """The figures of steps; each has two micro batches."""
    model = make_trainable(method, **LAYOUTS[layout], **(DROPOUT if dropout else {}))
    trainer = make_method_engine(
        model, EngineConfig(**({"precision": "fp32", "joined": joined} | options)), JOINED_STEPS
    )
    assert any(isinstance(module, JoinedLinear) for module in model.modules()) == joined
    figures = []
    for step in range(JOINED_STEPS):
        batches = [draw_batch(0), draw_batch(1 + step % 2)]
        figures.append(trainer.train_step(batches, {LOSS: sum(batch.num_masked for batch in batches)}, step))
    assert all(taken.finite for taken in figures)
    assert min(taken.loss for taken in figures[2::2]) < figures[0].loss, "of the same rows"
    return figures


def check_equal(joined: list[Any], as_written: list[Any], loss: float = 1e-6, norm: float = 1e-4) -> None:
    assert [step.loss for step in joined] == pytest.approx([step.loss for step in as_written], rel=loss)
    assert [step.grad_norm for step in joined] == pytest.approx([step.grad_norm for step in as_written], rel=norm)


@pytest.mark.parametrize("method", FEW_METHODS)
def test_steps_are_those_of_layers_as_written(method: str) -> None:
    """With dropout; in bf16 within its rounding, which every step carries on."""
    as_written, joined = (train(method, joined=is_joined, dropout=True) for is_joined in (False, True))
    check_equal(joined, as_written)
    as_written, joined = (train(method, joined=is_joined, precision="bf16") for is_joined in (False, True))
    check_equal(joined, as_written, 0.02, 0.2)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_steps_of_other_layouts(layout: str, method: str) -> None:
    """Also with activations that are computed again, and with a sharded optimiser."""
    as_written = train(method, joined=False, layout=layout, dropout=True)
    for options in ({}, {"activation_checkpointing": True}, {"zero_stage": 1}, {"zero_stage": 2, "offload": True}):
        check_equal(train(method, joined=True, layout=layout, dropout=True, **options), as_written)


@pytest.mark.slow
def test_operations_are_counted_as_those_of_layers_as_written() -> None:
    """Without values, as a dry run and a worker count them for a card: they are the same, in fewer products."""
    batch = make_full_batch(PretrainConfig(), VOCAB, LENGTH)
    for method in METHODS:
        counts = []
        for joined in (False, True):
            model = make_trainable(method)
            model.set_attn_implementation("sdpa")
            if joined:
                join_products(model, torch.float32)
            counts.append(count_flops(MaskedLoss(model, CPU, bf16=False), batch))
        as_written, found = counts
        assert (found.forward, found.backward) == (as_written.forward, as_written.backward), method
        assert sum(found.matmuls.values()) < sum(as_written.matmuls.values()), method


# --- how a batch comes to a device ---


def test_a_batch_is_sent_as_one_and_arrives_as_it_is() -> None:
    fields = {
        "ids": torch.arange(21).view(3, 7),
        "nothing": None,
        "parts": KeptRows(torch.tensor([2]), torch.tensor([0, 3]), torch.arange(6)[::2], torch.rand(2)),
        "inputs": {"is_token": torch.tensor([True, False, True]), "cu_seq_lens": torch.arange(5, dtype=torch.int32)},
        "count": 7,
        "empty": torch.zeros(0, 4),
        "kinds": torch.arange(5, dtype=torch.uint8),
        "one": torch.tensor(2.5, dtype=torch.float64),
    }
    sent = _send(fields, CPU)
    assert sent.keys() == fields.keys() and sent["nothing"] is None and sent["count"] == 7
    expected, found = (batch | vars(batch["parts"]) | batch["inputs"] for batch in (fields, sent))
    tensors = {name: value for name, value in expected.items() if isinstance(value, torch.Tensor)}
    for name, tensor in tensors.items():
        assert found[name].dtype is tensor.dtype and found[name].shape == tensor.shape
        assert torch.equal(found[name], tensor)
    assert len({found[name].untyped_storage().data_ptr() for name in tensors}) == 1
    assert move_batch(fields, CPU)["ids"] is fields["ids"], "nothing is copied where the batch is"
