"""Forward and backward of a micro batch as one CUDA graph, which a GPU runs again without its host.

A few thousand tokens are computed sooner than Python has launched some thousand kernels, and the GPU waits. Launched as
a graph, they cost the host one call. A graph has fixed addresses and no Python: what differs from pass to pass, a
batch's tensors and the factors of the losses, is copied to where the graph reads it; the learning rate belongs to the
update, which is launched as ever; and dropout draws from torch's generator, whose seed and offset torch hands to a
graph at every launch, so it draws what a pass as written would have drawn.

Enters: what computes a pass, and batches of one shape (`--engine.fixed_shapes`). Leaves: the same sums and gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn

from domext_ray.errors import RunError
from domext_ray.training.step import map_tensors

WARM_PASSES = 2
"""Passes of a shape as they are written before one is captured: libraries start and kernels are compiled in them."""

Record = Callable[[Callable[[], Tensor]], tuple[Tensor, Callable[[], None]]]


class CapturedPasses:
    """Computes passes, the first ones of a shape as they are written, the others as one graph.

    It has the graph of one shape, of which every phase of a run has one: another shape takes its place.

    `make_pass` takes a batch and the factors of its losses, on the GPU, adds to the gradients of `params`, and returns
    the sums of the losses. `record` captures a call, and returns where its result will be and what launches it.
    """

    def __init__(
        self, make_pass: Callable[[Any, Tensor], Tensor], params: Collection[nn.Parameter], record: Record
    ) -> None:
        self._make_pass, self._params, self._record = make_pass, list(params), record
        self._shapes: list[Any] = []
        self._num_warm = 0
        self._launch: Callable[[], None] | None = None
        self._inputs, self._sums = list[Tensor](), torch.empty(0)
        self._gradients = list[Tensor | None]()

    def __call__(self, batch: Any, factors: Tensor) -> Tensor:
        """Compute a pass; the sums that are returned are overwritten by the next one."""
        shapes = _describe_shapes(batch)
        if shapes != self._shapes:
            self._shapes, self._num_warm, self._launch = shapes, 0, None
        if self._num_warm < WARM_PASSES:
            self._num_warm += 1
            return self._make_pass(batch, factors)
        if self._launch is None:
            self._launch = self._capture(batch, factors)
        for own, given in zip(self._inputs, _list_tensors(batch, factors), strict=True):
            own.copy_(given)
        pairs = [*zip(self._params, self._gradients, strict=True)]
        # Of the pass before, in the same step, gradients may stand where the graph will write.
        earlier = [own.clone() if own is not None and param.grad is own else param.grad for param, own in pairs]
        self._launch()
        for (param, gradient), before in zip(pairs, earlier, strict=True):
            if gradient is not None:
                param.grad = gradient if before is None else before.add_(gradient)
        return self._sums

    def _capture(self, batch: Any, factors: Tensor) -> Callable[[], None]:
        """Capture a pass that leaves gradients in memory of its own; return what launches it."""
        own_batch, own_factors = map_tensors(batch, torch.clone), factors.clone()
        self._inputs = _list_tensors(own_batch, own_factors)
        before = [param.grad for param in self._params]
        for param in self._params:
            param.grad = None
        try:
            self._sums, launch = self._record(lambda: self._make_pass(own_batch, own_factors))
        except RuntimeError as error:
            reason = " ".join(str(error).split()).removesuffix(".")
            raise RunError(
                f"--engine.capture is true, and a step of this model cannot be captured ({reason}); set it false."
            ) from error
        self._gradients = [param.grad for param in self._params]
        for param, gradient in zip(self._params, before, strict=True):
            param.grad = gradient
        return launch


def record_graph(function: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
    """Capture what a function launches on the GPU; see `CapturedPasses`. Other threads may go on using the GPU."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        result = function()
    return result, graph.replay


def _list_tensors(batch: Any, factors: Tensor) -> list[Tensor]:
    tensors = list[Tensor]()
    map_tensors(batch, tensors.append)
    return [*tensors, factors]


def _describe_shapes(batch: Any) -> list[Any]:
    """What a graph of a pass has in it for good: shapes and dtypes of tensors, and numbers."""
    described = list[Any]()
    map_tensors(batch, lambda tensor: described.append((tensor.shape, tensor.dtype)))
    return [*described, *(value for value in vars(batch).values() if value is None or isinstance(value, int))]
