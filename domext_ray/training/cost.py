"""What a training step costs: its operations, its time on this machine, and its memory, before the run and beside it.

Operations are those of the matrix products, two per multiply-add, of the model and of a base that is asked what it
predicts: not what is computed per element, a second forward pass for checkpointed activations, or the optimiser. They
are counted on the device `meta`, so every method and layout counts as it trains, and attention as its two products,
whatever kernel computes it. Time is measured: a dry run makes some steps. A worker's steps are held against the peak
that a card's maker publishes, and the benchmark times products alone. Of the memory, what autograd keeps is measured on
tensors without values; what DeepSpeed holds beside follows from its code.

Not in the memory: Python and its libraries; what a kernel needs while it runs (packed weights of oneDNN, cuBLAS
workspaces); what the allocator keeps between blocks; the copy of a rank's share of a checkpoint that is being written.
"""

from __future__ import annotations

import copy
import functools
import resource
import statistics
import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from domext_ray.config.extensions.table import is_extension
from domext_ray.config.pretrain import (
    RunOptions,
    SettledConfig,
    count_passes,
    resolve_micro_batch_sizes,
)
from domext_ray.model.build import checkpoint_activations, prepare_for_device, store_base
from domext_ray.model.fused import fuse
from domext_ray.model.joined import JoinedLinear, join_products
from domext_ray.model.spec import META, ModelSpec
from domext_ray.runtime.device import TRAINING, as_worker
from domext_ray.runtime.machine import is_cluster
from domext_ray.text.corpus.batching import find_sequences, round_up
from domext_ray.text.corpus.views import pad_views
from domext_ray.training.engine import MAX_BUCKET_ELEMENTS
from domext_ray.training.losses import Loss, make_loss, needs_teacher
from domext_ray.training.objective import LOSS, KeptRows, MaskedBatch, ViewBatch, to_batch, to_tensors
from domext_ray.training.step import SingleProcessTrainer, move_batch

COUNTED_TOKENS = 1024
"""Tokens, about, of the rows whose operations are counted."""
TIMED_SECONDS, NUM_TIMED = 2.0, 10
"""Steps of a dry run are timed until one of these is reached; one more warms up."""
CALL_SECONDS, NUM_CALLS = 0.2, 3
"""The same of a single call on a CPU, of which the fastest time counts: the machine can do that."""
NUM_QUEUED = 20
"""Calls on a card between two events: one after the other, so that the launch of each but the first is hidden."""
GATHERED_ELEMENTS = 50_000_000
"""Of parameters that ZeRO-3 gathers ahead of their use (DeepSpeed's `stage3_prefetch_bucket_size`)."""
PEAKS = {
    "B200": 2250e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "GH200": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "A10G": 70e12,
    "A10": 125e12,
}
"""Dense bf16 operations per second that the makers' data sheets publish, by words of the card's name; first fit."""


@dataclass(frozen=True)
class Roofline:
    """What a batch computes, and what a rank's steps are held against."""

    forward: int  # operations of the loss
    backward: int  # of its gradient
    num_tokens: int  # of the batch
    matmuls: Mapping[Any, float]  # how often each is computed: torch's operation, its tensors' sizes and strides
    peak: float = 0.0  # bf16 operations per second that the card's maker publishes; 0.0: not known, or not in bf16
    matmul_seconds: float = 0.0  # per token, what a device takes for the products alone; 0.0: not timed

    @property
    def flops_per_token(self) -> float:
        """Operations per token, forward and backward."""
        return (self.forward + self.backward) / self.num_tokens

    def describe(self, num_tokens: int, seconds: float, world_size: int) -> dict[str, float]:
        """Return a step's figures for metrics.jsonl: the rate of all ranks, and its share of a known peak.

        `num_tokens` are those of the global batch, padding left out, which ranks share evenly.
        """
        rate = self.flops_per_token * num_tokens / seconds
        share = {"throughput/mfu": rate / world_size / self.peak} if self.peak else {}
        return {"throughput/gigaflops_per_second": rate / 1e9, **share}


class _Matmuls(TorchDispatchMode):
    """Lists the matrix products that run."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in flop_registry:
            self.found[func, tuple((tuple(tensor.shape), tensor.stride()) for tensor in args)] += 1
        return func(*args, **(kwargs or {}))


def count_flops(objective: Loss, batch: Any) -> Roofline:
    """Count what a batch of full rows computes, of parameters that ZeRO-3 has not sharded; nothing is computed."""
    tensors = {**dict(objective.named_parameters()), **dict(objective.named_buffers())}
    # All of one precision, for no autocast is at work there: a frozen base may be stored in another one.
    shapes = {
        name: torch.empty_like(tensor, device=META, dtype=torch.float32 if tensor.is_floating_point() else tensor.dtype)
        for name, tensor in tensors.items()
    }
    for name, param in objective.named_parameters():
        shapes[name].requires_grad_(param.requires_grad)
    # Without bounds attention is its products, which a kernel of one card would hide.
    unbound: dict[str, Any] = {"cu_seq_lens": None, "max_length": 0}
    asked = batch.kept_rows
    batch = replace(batch, **unbound, kept_rows=asked and replace(asked, **unbound))
    with _Matmuls() as matmuls, FlopCounterMode(display=False) as counter:
        loss: Tensor = functional_call(objective, shapes, (move_batch(batch, META),))[LOSS]
        forward = counter.get_total_flops()
        loss.backward()
    backward, is_on_gpu = counter.get_total_flops() - forward, objective.device_type == "cuda"
    peak = find_peak(torch.cuda.get_device_name()) if is_on_gpu and objective.bf16 else 0.0
    return Roofline(forward, backward, batch.input_ids.numel(), matmuls.found, peak)


def count_step(config: RunOptions, objective: Loss, vocab_size: int, length: int) -> Roofline:
    """Count what a run computes of full rows of some length, as `count_flops` does.

    The base is asked about a share of them, which need not be whole rows: a batch of which it is asked about none and
    one of which it is asked about all are counted, and mixed.
    """
    batch, share = make_full_batch(config, vocab_size, length), _find_asked_share(config)
    plain = count_flops(objective, batch)
    if not share:
        return plain
    asked = count_flops(objective, _make_general(batch, 1.0))
    return replace(
        plain,
        forward=round((1 - share) * plain.forward + share * asked.forward),
        matmuls={
            matmul: (1 - share) * plain.matmuls.get(matmul, 0) + share * number
            for matmul, number in asked.matmuls.items()
        },
    )


def find_peak(name: str) -> float:
    """Return the bf16 operations per second that are published for a card of torch's name; 0.0: `PEAKS` has none."""
    words = name.replace("-", " ").split()
    return next((peak for part, peak in PEAKS.items() if set(part.split()) <= set(words)), 0.0)


@torch.no_grad()
def time_matmuls(roofline: Roofline, device: torch.device, *, bf16: bool) -> Roofline:
    """Time a batch's products, each alone, on a device that should do nothing else meanwhile.

    With `bf16` all are what autocast makes of them. A card's attention is timed as its fused kernel computes it: each
    of the two products forward and four backward takes a sixth of both passes.
    """
    total, dtype = 0.0, torch.bfloat16 if bf16 else torch.float32
    for (call, inputs), number in roofline.matmuls.items():
        if device.type == "cuda" and call.overloadpacket is torch.ops.aten.bmm:
            total += number / 6 * time_call(make_attention(inputs, dtype, device), device)
            continue
        tensors = [torch.empty_strided(*layout, dtype=dtype, device=device).fill_(0.01) for layout in inputs]
        total += number * time_call(functools.partial(call, *tensors), device)
    return replace(roofline, matmul_seconds=total / roofline.num_tokens)


def make_attention(inputs: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Callable[[], Any]:
    """Return both passes of the fused attention that has a product of these sizes (and strides) among its six.

    Of a product's three sizes two are the row's length, N, and one is that of a head, d_k: [G, N, d_k] are all heads of
    all rows.
    """
    ((groups, *left), _), (right, _) = inputs
    (length, _), *others = Counter([*left, right[-1]]).most_common()
    size = others[0][0] if others else length
    draw = functools.partial(torch.full, (groups, 1, length, size), 0.01, dtype=dtype, device=device)
    query, key, value = (draw(requires_grad=True) for _ in range(3))

    def attend() -> tuple[Tensor, ...]:
        with torch.enable_grad():
            context = nn.functional.scaled_dot_product_attention(query, key, value)
        return torch.autograd.grad(context, (query, key, value), value)

    return attend


def time_call(call: Callable[[], Any], device: torch.device) -> float:
    """Return the seconds that a call takes: on a card the mean of many in a row, by events, else the fastest of few."""
    if device.type != "cuda":
        seconds = list[float]()
        while len(seconds) <= NUM_CALLS and sum(seconds) < CALL_SECONDS:  # the first one warms up
            begun = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - begun)
        return min(seconds[1:] or seconds)
    call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(NUM_QUEUED):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000 / NUM_QUEUED


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure_peak_memory(device: torch.device) -> float:
    """Return the most memory that this process has had: a card's allocations, or else what was resident; MB."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e6


# --- a run's model before there is a run ---


@dataclass(frozen=True)
class StepCost:
    """What a worker that has the machine to itself computes per token of a full row, and how fast."""

    flops_per_token: float  # forward and backward; 0.0: not counted, for the objective makes vectors
    tokens_per_second: float  # 0.0: not timed


@dataclass(frozen=True)
class DryRunModel:
    """A run's model and loss, and micro batches that have what the run's own have, but for their text."""

    config: SettledConfig
    objective: Loss
    rows: Sequence[int]  # of a micro batch, by length phase
    batches: Sequence[MaskedBatch | ViewBatch]  # of these, on the CPU
    device: torch.device  # of the model
    spec: ModelSpec


def make_dry_run_model(config: SettledConfig, spec: ModelSpec) -> DryRunModel:
    """Make a run's model and micro batches of random tokens; no Ray, no text.

    On a machine without a GPU, what a GPU would train is made on the CPU.
    """
    is_for_gpu, rows = config.scale.use_gpu is True, resolve_micro_batch_sizes(config)
    device = torch.device("cuda" if is_for_gpu and torch.cuda.is_available() else "cpu")
    # A GPU's fused attention keeps no weights with dropout either; a CPU's has no dropout, so it is left out.
    if is_for_gpu and device.type == "cpu":
        spec = replace(spec, attention_dropout=0.0)
    model = spec.build()
    if config.engine.has_narrow_base:
        store_base(model, torch.bfloat16)
    prepare_for_device(model, torch.device("cuda" if is_for_gpu else "cpu"), bf16=config.engine.uses_bf16)
    network = cast(nn.Module, model).to(device).train()
    fuse(network, device, is_asked=config.engine.fused)
    if config.engine.joins_products(on_gpu=is_for_gpu):
        join_products(network, torch.bfloat16 if config.engine.uses_bf16 else torch.float32)
    objective = make_loss(config, None, network, (), device, rows)(network, device, bf16=config.engine.uses_bf16)
    sizes = zip(config.train.lengths, rows, strict=True)
    batches = [make_full_batch(config, spec.shape.base_vocab_size, *size) for size in sizes]
    return DryRunModel(config, objective, rows, batches, device, spec)


def make_full_batch(config: RunOptions, vocab_size: int, length: int, num_rows: int = 0) -> MaskedBatch | ViewBatch:
    """Return full rows of random tokens, of which the first ones are predicted; or two views of each.

    There are `num_rows`, or 0: those of about `COUNTED_TOKENS`.
    """
    draw = torch.Generator().manual_seed(0)
    input_ids = torch.randint(vocab_size, (num_rows or max(1, COUNTED_TOKENS // length), length), generator=draw)
    if config.objective.makes_vectors:
        return cast(ViewBatch, to_batch(pad_views([*input_ids.numpy()], [*input_ids.numpy()], 0)))
    share = 1.0 if config.objective.is_causal else config.objective.mask_prob
    num_positions = round_up(max(1, round(share * input_ids.numel())))
    positions = torch.arange(min(num_positions, input_ids.numel()))
    labels = input_ids.flatten()[positions]
    bounds = _find_bounds(*input_ids.shape)
    return MaskedBatch(input_ids, None, None, positions, labels, torch.ones(len(positions)), **bounds)


def _find_bounds(num_rows: int, length: int) -> dict[str, Any]:
    return to_tensors(find_sequences(np.ones((num_rows, length), dtype=bool)))


def measure_step_cost(model: DryRunModel) -> StepCost:
    """Count the operations of full rows, and time some steps of one micro batch on this machine.

    Nothing is timed where a GPU is wanted and none is here, or where a cluster's machines are going to train.
    """
    config, length, flops_per_token = model.config, model.config.train.seq_length, 0.0
    network, bf16 = model.objective.model, config.engine.uses_bf16
    loss = make_loss(config, model.spec.base, network, (), model.device, model.rows)
    if not config.objective.makes_vectors:  # whose two views of a row differ in length
        whole = loss(network, model.device, bf16=bf16, num_chunks=1)
        flops_per_token = count_step(config, whole, model.spec.shape.base_vocab_size, length).flops_per_token
    if is_cluster() or (config.scale.use_gpu is True and model.device.type != "cuda"):
        return StepCost(flops_per_token, 0.0)
    objective = loss(network, model.device, bf16=bf16)
    trainer = SingleProcessTrainer(
        objective, optim=config.optim, warmup_steps=NUM_TIMED + 1, seed=config.seed, device=model.device
    )
    share = _find_asked_share(config)
    batch = _make_general(model.batches[0], share) if share else model.batches[0]
    seconds: list[float] = []
    with as_worker(TRAINING, uses_fp32=not bf16):
        while len(seconds) <= NUM_TIMED and sum(seconds[1:]) < TIMED_SECONDS:
            start = time.perf_counter()
            trainer.train_step([batch], batch.counts, len(seconds))
            _wait(model.device)
            seconds.append(time.perf_counter() - start)
    return StepCost(flops_per_token, model.rows[0] * length / statistics.median(seconds[1:]))


def _find_asked_share(config: RunOptions) -> float:
    """Return the share of a run's rows about which the base is asked."""
    if not needs_teacher(config):
        return 0.0
    firsts, shares = zip(*config.part_shares, strict=True)
    kept = (sum(share for text, share in zip(config.texts, own, strict=True) if text.keep) for own in shares)
    ends = (*firsts[1:], 1)  # of the horizon
    return float(sum(share * (end - first) for share, first, end in zip(kept, firsts, ends, strict=True)))


def _make_general(batch: Any, share: float) -> Any:
    """Let a share of a batch's rows, the first ones, be general ones, about which the base is asked."""
    num_rows, length = max(1, round(share * len(batch.input_ids))), batch.input_ids.shape[1]
    kept = torch.arange(max(1, min(round(share * len(batch.labels)), num_rows * length)))
    asked = torch.arange(num_rows), kept, batch.masked_positions[kept], batch.weights[kept]
    return replace(batch, kept_rows=KeptRows(*asked, **_find_bounds(num_rows, length)))


# --- memory ---


@dataclass(frozen=True)
class StepMemory:
    """Bytes that forward and backward of a micro batch hold at their peaks, beside the parameters."""

    before: int  # until the first gradient is whole
    after: int  # from then on, whole gradients not counted
    gradients: int  # whole gradients at that second peak, if they stay
    reducing: int  # when a bucket of gradients is full, if they do not stay


@dataclass(frozen=True)
class Sharding:
    """How a run spreads its state over ranks: `stage` is of ZeRO."""

    stage: int
    world_size: int
    accumulates: bool  # a step has several micro batches
    offload: bool = False  # masters and moments are in the CPU's memory, the model is on a GPU
    on_gpu: bool = False  # ranks speak through NCCL instead of gloo


def estimate_memory(model: DryRunModel) -> dict[str, int]:
    """Return the bytes of one rank by part, at the moment of a step that needs most.

    A run that keeps to its base without having it in its own model has a copy of it, whose passes are not counted.
    """
    config, engine, is_on_gpu = model.config, model.config.engine, model.config.scale.use_gpu is True
    plans = []
    for batch, rows in zip(model.batches, model.rows, strict=True):
        accumulates, offload = count_passes(config, rows) > 1, engine.offload and is_on_gpu
        sharding = Sharding(engine.zero_stage, config.scale.most_workers, accumulates, offload, is_on_gpu)
        plans.append(plan_memory(model.objective, batch, sharding, recomputes=engine.activation_checkpointing))
    parts = max(plans, key=lambda plan: sum(plan.values()))
    if needs_teacher(config) and not config.method.keeps_base:
        size = sum(param.numel() for name, param in model.objective.model.named_parameters() if not is_extension(name))
        parts["copy_of_the_base"] = size * (2 if engine.has_narrow_base else 4)
    return parts


def plan_memory(objective: Loss, batch: Any, sharding: Sharding, *, recomputes: bool = False) -> dict[str, int]:
    """Return the bytes of one rank by part at the moment of a step that needs most.

    The objective, in training mode and stored as in training, stays as it is. With `recomputes`, activations are
    computed again in the backward pass.
    """
    fake, mode = make_fake(objective)
    if recomputes:
        checkpoint_activations(fake.model)
    with mode:
        step = measure_step_memory(fake, batch, keeps_gradients=sharding.stage < 2)
    sizes = [(param.numel() * param.element_size(), param.requires_grad) for param in fake.parameters()]
    trained, frozen = (sum(size for size, trains in sizes if trains == which) for which in (True, False))
    share = trained // (sharding.world_size if sharding.stage else 1)
    joined = sum(module.num_copied_bytes for module in fake.modules() if isinstance(module, JoinedLinear))
    kept = {"frozen_weights": frozen, "trainable_weights": trained, "joined_weights": joined}
    if sharding.stage == 3:
        # Gathered parameters are let go where a billion others are used before they are again
        # (`stage3_max_reuse_distance`): a BERT stays whole, beside the shards that it is made of.
        kept["shards_of_weights"] = (trained + frozen) // sharding.world_size
    if not sharding.offload:
        kept["optimizer_masters"] = share if sharding.stage else 0  # a copy of its share, which the optimizer steps
        kept["optimizer_moments"] = 2 * share
    moments = list_moments(trained, frozen, step, sharding)
    return {name: size for name, size in kept.items() if size} | max(moments, key=lambda moment: sum(moment.values()))


def make_fake(objective: Loss) -> tuple[Loss, FakeTensorMode]:
    """Copy an objective without its values: its tensors have shapes, dtypes and a device, and take no memory."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)  # a batch's tensors are real
    with FakeCopyMode(mode):
        return copy.deepcopy(objective), mode


def list_moments(trained: int, frozen: int, step: StepMemory, sharding: Sharding) -> list[dict[str, int]]:
    """Return what a rank holds beside its state in the moments of a step that may need most; sizes are bytes."""
    bucket = min(trained, 4 * MAX_BUCKET_ELEMENTS)
    filled = bucket * (2 if sharding.on_gpu else 1)  # in turn, where reductions overlap (engine.py, `overlap_comm`)
    share = trained // sharding.world_size
    earlier = (trained if sharding.stage < 2 else share) if sharding.accumulates else 0
    # Parameters are gathered into one tensor and copied from it; gloo gathers into a tensor of its own before that
    # (ProcessGroupGloo.cpp, `allgather`).
    gathered = min(trained + frozen, 4 * GATHERED_ELEMENTS)
    moments = {  # gradients, buffers, activations
        0: (
            (earlier, 0, step.before),
            (earlier or step.gradients, 0, step.after),
            # All gradients are copied into one tensor, which is reduced (engine.py, `allreduce_bucket`).
            (trained, trained if sharding.world_size > 1 else 0, 0),
        ),
        1: (
            (earlier, 0, step.before),
            (earlier or step.gradients, filled, step.after),
            # A bucket is reduced as a flat copy of itself; then a rank's share is copied for the optimizer.
            (trained, filled + bucket, 0),
            (trained + share, 0, 0),
        ),
        2: (
            (earlier, 0, step.before),
            (earlier, filled, step.after),
            (earlier + share, filled + bucket, step.reducing),
            (2 * share, 0, 0),
        ),
        3: (  # buffers of gradients are there from the start
            (share, bucket + gathered * (1 if sharding.on_gpu else 2), 0),
            (share, bucket + gathered, step.before),  # ahead of the backward pass
            (share, bucket, step.after),
            (share, 2 * bucket, step.reducing),
        ),
    }
    names = ("gradients", "buffers", "activations")
    return [dict(zip(names, sizes, strict=True)) for sizes in moments[sharding.stage]]


def measure_step_memory(objective: Loss, batch: Any, *, keeps_gradients: bool) -> StepMemory:
    """Run forward and backward of a micro batch, and watch what is held.

    Gradients that are not kept until the update make way once they are whole, as DeepSpeed copies them away.
    """
    watch = _LiveBytes(objective, keeps_gradients=keeps_gradients)
    trained = [param for param in objective.parameters() if param.requires_grad]
    handles = [param.register_post_accumulate_grad_hook(watch.take_gradient) for param in trained]
    with watch:
        objective(move_batch(batch, next(objective.parameters()).device))[LOSS].backward()
    for handle in handles:
        handle.remove()
    objective.zero_grad()
    return StepMemory(watch.before, watch.peak, watch.gradients_at_peak, watch.reducing)


class _LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that are alive beside a module's own, and the most there ever were."""

    def __init__(self, module: nn.Module, *, keeps_gradients: bool) -> None:
        super().__init__()
        self.live = self.peak = self.before = self.gradients = self.gradients_at_peak = 0
        self.reducing = self._filled = 0
        self._keeps_gradients = keeps_gradients
        known = (tensor.untyped_storage() for tensor in (*module.parameters(), *module.buffers()))
        self._storages = weakref.WeakSet[Any](known)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.untyped_storage() not in self._storages:
                self._add(leaf.untyped_storage())
        return output

    def take_gradient(self, param: Tensor) -> None:
        """A parameter's gradient is whole: it stays, counted by itself, or makes way."""
        if not self.before:
            self.before, self.peak = self.peak, 0
        assert param.grad is not None
        size = param.grad.untyped_storage().nbytes()
        if self._keeps_gradients:
            self.gradients, self.live = self.gradients + size, self.live - size
            return
        if self._filled + size > 4 * MAX_BUCKET_ELEMENTS:
            self.reducing, self._filled = max(self.reducing, self.live), 0
        self._filled += size
        param.grad = None

    def _add(self, storage: torch.UntypedStorage) -> None:
        size = storage.nbytes()
        self._storages.add(storage)
        weakref.finalize(storage, self._free, size)
        self.live += size
        if self.live + self.gradients > self.peak + self.gradients_at_peak:
            self.peak, self.gradients_at_peak = self.live, self.gradients

    def _free(self, size: int) -> None:
        self.live -= size
