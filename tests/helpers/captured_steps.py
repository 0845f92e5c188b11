"""Steps with and without capture, and what a CUDA graph is, on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tiny_models import LENGTH, VOCAB
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from trained_methods import DROPOUT, make_method_engine, make_trainable

from domext_ray.config.pretrain import EngineConfig
from domext_ray.training.objective import LOSS, MaskedBatch
from domext_ray.training.step import StepFigures

STEPS, CHANGE, BROKEN = 9, 5, 7
"""Steps; the first one of longer rows; one whose loss is not finite."""
WAITS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero", "aten::_unique2")
"""Operations whose result the host waits for, which a graph cannot have."""


class OperationLog(TorchDispatchMode):
    """Lists what is computed, with the tensors that are read and written."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = list[tuple[Any, Any, Any, Any]]()

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = operation._schema.name
        if name in WAITS:
            raise RuntimeError(f"operation not permitted when stream is capturing: {name}")
        result = operation(*args, **(kwargs or {}))
        self.calls.append((operation, args, kwargs or {}, result))
        return result


def record_operations(function: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
    """Do on a CPU what `record_graph` does on a GPU.

    What is launched computes the same operations, of the same numbers, from the same memory to the same memory, and
    runs none of the Python that led to them.
    """
    state = torch.get_rng_state()
    with OperationLog() as log:
        result = function()
    torch.set_rng_state(state)  # a capture computes nothing

    @torch.no_grad()
    def launch() -> None:
        for operation, args, kwargs, written in log.calls:
            again = operation(*args, **kwargs)
            for own, new in zip(tree_leaves(written), tree_leaves(again), strict=True):
                if isinstance(own, Tensor) and own.data_ptr() != new.data_ptr():  # else it is a view, or was in place
                    own.copy_(new)

    return result, launch


def draw_batch(step: int, number: int) -> MaskedBatch:
    """Rows that differ from step to step, of one shape before `CHANGE` and of another behind it."""
    draw, length = torch.Generator().manual_seed(2 * step + number), LENGTH if step < CHANGE else LENGTH + 6
    ids = torch.randint(1, VOCAB, (3, length), generator=draw)
    mask = (torch.arange(length) < torch.randint(4, length, (3, 1), generator=draw)).long()
    positions = 3 * length // 8 * torch.arange(8) + torch.randint(4, (8,), generator=draw)
    weights = torch.tensor([1.0] * (5 + number) + [0.0] * (3 - number))
    if step == BROKEN and number:
        weights[0] = torch.inf
    return MaskedBatch(ids, mask, None, positions, torch.randint(VOCAB // 4, (8,), generator=draw), weights)


def train_captured(
    method: str, device: torch.device, *, capture: bool, **engine: Any
) -> tuple[list[StepFigures], dict[str, Tensor], int]:
    """Return the figures of steps of two micro batches, what trained, and how often Python computed a forward."""
    model = make_trainable(method, **DROPOUT).to(device)
    config = EngineConfig(**({"precision": "fp32", "fixed_shapes": capture, "capture": capture} | engine))
    trainer = make_method_engine(model, config, STEPS, device)
    figures, num_calls = list[StepFigures](), 0

    def count(*_: Any) -> None:
        nonlocal num_calls
        num_calls += 1

    model.bert.embeddings.register_forward_pre_hook(count)
    for step in range(STEPS):
        batches = [draw_batch(step, number) for number in range(2)]
        figures.append(trainer.train_step(batches, {LOSS: 2 * 5 + 1}, step))
    state = trainer.gather_state()
    return figures, {name: tensor.param for name, tensor in state.tensors.items()}, num_calls
