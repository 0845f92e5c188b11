"""A captured step is the step that Python launches, bit for bit: dropout, accumulation, new shapes, bad steps with it.

A CPU has no CUDA graphs. What stands for one here computes a list of operations again, on the same memory; whatever
Python does beside them, and whatever it bakes into them, shows as a difference. That a GPU is neither sent anything nor
waited for within a pass, which a graph forbids, is shown in `test_devices.py`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from captured_steps import BROKEN, STEPS, record_operations, train_captured
from torch import Tensor, nn
from trained_methods import FEW_METHODS

from domext_ray.errors import RunError
from domext_ray.model import fused
from domext_ray.training import engine
from domext_ray.training.capture import WARM_PASSES, CapturedPasses
from domext_ray.training.objective import ViewBatch

CPU = torch.device("cpu")
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
