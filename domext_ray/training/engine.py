"""A model and masked batches -> optimiser steps, on DeepSpeed ZeRO 0 to 3.

Enters: a model of which some parameters train, an objective, and this rank's micro batches. Leaves: the figures of each
step, and the training state (trainable tensors and their AdamW moments), each whole and on one rank's CPU, whatever the
ZeRO stage and the number of workers. AF Adapter section 4 (AdamW, weight decay, linear warm-up and decay), BERT
appendix A.2.

Three decisions hold at every stage. bf16 means torch's autocast around the forward pass, over fp32 trainables:
DeepSpeed's own bf16 modes cast the base, or communicate in bf16, depending on the stage. The loss is one mean over the
masked tokens of the global batch. A step whose loss or gradient is not finite on any rank changes nothing on any rank.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_layers import GradientCheckpointingLayer

from domext_ray.config.pretrain import EngineConfig, OptimConfig, SettledConfig
from domext_ray.errors import ConfigError, RunError
from domext_ray.model.build import checkpoint_activations, pick_attention
from domext_ray.model.domext.layers_domext import VARLEN
from domext_ray.model.fused import fuse
from domext_ray.model.joined import join_products
from domext_ray.runtime.device import has_bf16, has_bf16_units
from domext_ray.training.capture import CapturedPasses, record_graph
from domext_ray.training.losses import Loss, MaskedLoss
from domext_ray.training.optimizer import MOMENTS, clip_gradients, create_moments, set_learning_rate
from domext_ray.training.step import Trainer, list_trainables, move_batch

MAX_BUCKET_ELEMENTS = 2**25  # of a gradient reduction: 128 MiB in fp32; DeepSpeed's default allocates 2 GB
MOST_COMPILED = 64
"""Variants of a layer that are compiled at most: with padding and without, all tokens and some, the base's alone."""
_COMPILED_OP = "deepspeed_shm_comm"


@dataclass(frozen=True)
class TensorState:
    """One trainable tensor: its value and AdamW's two moments, all fp32 on the CPU and of one shape."""

    param: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor


@dataclass(frozen=True)
class TrainState:
    """Everything that training changes in a model, independent of ZeRO stage and world size."""

    tensors: Mapping[str, TensorState]  # by the model's names of the trainable parameters: all, or one rank's share
    num_updates: int  # AdamW's step count; skipped steps are not counted


def join_alone() -> None:
    """Make a process group of this process alone, unless there is one: the engine reduces over ranks."""
    if not dist.is_initialized():
        # DeepSpeed broadcasts a model: one on a GPU through Gloo would go by way of the host.
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def leave_alone() -> None:
    """End the group of `join_alone`, where there is one; DeepSpeed has groups of its own beside torch's."""
    if dist.is_initialized():
        from deepspeed import comm

        (comm if comm.is_initialized() else dist).destroy_process_group()


class Engine(Trainer):
    """Trains and evaluates one model on this rank; torch.distributed's process group exists already.

    Every method is collective: all ranks call it equally often.

    The model, on `device`, is taken over: at ZeRO-3 its parameters are sharded from here on. Those with `requires_grad`
    train and are fp32, the others may be stored in bf16. Without a `state` to go on from, the model
    starts as it is, with moments of zero.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        engine: EngineConfig,
        optim: OptimConfig,
        warmup_steps: int,
        micro_batch_size: int,
        accumulation_steps: int,
        seed: int,
        device: torch.device,
        objective: Callable[..., Loss] = MaskedLoss,
        state: TrainState | None = None,
    ) -> None:
        device = torch.device(device)
        if state is not None:
            _load_parameters(list_trainables(model), state)
        if engine.activation_checkpointing:
            checkpoint_activations(model)
        self.fused = fuse(model, device, is_asked=engine.fused)
        """Whether the model computes with kernels of our own, and why; for the run's user."""
        if engine.compile:
            compile_layers(model, device, dynamic=not engine.fixed_shapes)
        if engine.joins_products(on_gpu=device.type == "cuda"):
            join_products(model, torch.bfloat16 if engine.uses_bf16 else torch.float32)
        module = objective(model, device, bf16=engine.uses_bf16)
        super().__init__(module, optim=optim, warmup_steps=warmup_steps, seed=seed, device=device)
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._stage, self._compiled, self._captures = engine.zero_stage, engine.compile, engine.capture
        if engine.capture:
            self._compute_pass = CapturedPasses(self._make_pass, self._trainables.values(), record_graph)
        sizes = {name: param.numel() for name, param in self._trainables.items()}
        self._owners = _share_out(sizes, self.world_size)
        config = _build_config(engine, optim, micro_batch_size, accumulation_steps, sum(sizes.values()), device.type)
        self._deepspeed = _initialize(module, self._optimizer, config, device)
        self._deepspeed.train()
        if engine.zero_stage < 3:
            create_moments(self._optimizer)
        if state is not None and state.num_updates:
            self._load_moments(state)

    def evaluate(self, batch: Any) -> Tensor:
        """Score the rows of this rank's batch without dropout; return the fields of `evaluate.Scores` of each."""
        self._deepspeed.eval()
        try:
            with torch.no_grad(), self._as_written():
                scores: Tensor = self._forward(move_batch(batch, self.device))
                return scores
        finally:
            self._deepspeed.train()

    def _as_written(self) -> contextlib.AbstractContextManager[None]:
        """Run layers without their compiled code: few evaluations would wait for more of it than they save."""
        return torch.compiler.set_stance("force_eager") if self._compiled else contextlib.nullcontext()

    def gather_state(self) -> TrainState:
        """Collect this rank's share of the training state on its CPU; see `copy_state`."""
        return self.copy_state()()

    def copy_state(self) -> Callable[[], TrainState]:
        """Copy this rank's share of the training state to its CPU, one whole tensor at a time; called on all.

        Returns what waits for a GPU that is still at it, on any thread: the copies come behind the steps that were
        launched before them, and training goes on.
        """
        tensors = {}
        for name, param in self._trainables.items():
            whole = [self._gather(name, param, None), *(self._gather(name, param, moment) for moment in MOMENTS)]
            if self._owners[name] == self.rank:
                # A copy, because on a CPU the gathered tensor may be the one that goes on training.
                copies = [tensor.to("cpu", torch.float32, copy=True, non_blocking=True) for tensor in whole]
                tensors[name] = TensorState(*copies)
        state, wait = TrainState(tensors, self.num_updates), self._mark()

        def read() -> TrainState:
            wait()
            return state

        return read

    def _micro_batch(self, is_last: bool) -> contextlib.AbstractContextManager[None]:
        self._deepspeed.set_gradient_accumulation_boundary(is_last)
        # One worker at ZeRO-0 has nothing to reduce; DeepSpeed would still copy all gradients twice.
        is_alone = self._stage == 0 and self.world_size == 1
        return self._deepspeed.no_sync() if is_alone else contextlib.nullcontext()

    def _forward(self, batch: Any) -> Any:
        # A graph has no Python in it: at ZeRO-0 DeepSpeed's hooks compute nothing, and are left out. Where they are, a
        # batch is no positional argument: they would warn that they find no tensors in it, which have no gradients.
        return self._deepspeed.module.forward(batch) if self._captures else self._deepspeed(batch=batch)

    def _backward(self, loss: Tensor) -> None:
        if self._captures:
            loss.backward()
        else:
            self._deepspeed.backward(loss, scale_wrt_gas=False)

    def _apply_gradients(self) -> Tensor:
        if self._stage == 0:
            figures = clip_gradients(self._optimizer, self._trainables.values(), self._optim.max_grad_norm)
            self._deepspeed.step()
            return figures
        self._deepspeed.step()  # computes the norm over all shards, clips, and refuses one that is not finite
        figures = torch.empty(2, dtype=torch.float64, device=self.device)
        figures[0], figures[1] = self._deepspeed.get_global_grad_norm(), self._deepspeed.was_step_applied()
        return figures

    def _gather(self, name: str, param: nn.Parameter, moment: str | None) -> Tensor:
        """Return a whole parameter (`moment` None) or one of its moments; collective above ZeRO-0."""
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        if moment is None:
            # Below stage 3 every rank has the whole parameter, and it is its own fp32 master.
            whole = safe_get_full_fp32_param(param) if self._stage == 3 else param.detach()
        elif self._stage == 0:
            whole = self._optimizer.state[param][moment]
        elif self.num_updates == 0:  # DeepSpeed has linked no state yet
            whole = torch.zeros(getattr(param, "ds_shape", param.shape), device=self.device)
        else:
            whole = safe_get_full_optimizer_state(param, moment)
        assert whole is not None, f"DeepSpeed gathered nothing for {moment or 'the value'} of {name}"
        return whole

    def _load_moments(self, state: TrainState) -> None:
        """Set AdamW's moments and step count; the parameters were loaded before DeepSpeed was initialised."""
        if self._stage > 0:
            # DeepSpeed links optimizer state in a step, so one is made that changes nothing: gradient 0 at rate 0.
            set_learning_rate(self._optimizer, 0.0)
            self._accumulate_gradients([self._deepspeed.module.make_empty()], [1] * len(self.loss_weights))
            _, applied = self._apply_gradients().tolist()
            assert applied, "the empty step was refused"
        for name, param in self._trainables.items():
            for moment in MOMENTS:
                self._set_moment(param, moment, getattr(state.tensors[name], moment).to(self.device))
        for param_state in self._optimizer.state.values():
            param_state["step"].fill_(state.num_updates)
        self.num_updates = state.num_updates

    def _set_moment(self, param: nn.Parameter, moment: str, value: Tensor) -> None:
        from deepspeed.utils import safe_set_full_optimizer_state, safe_set_local_optimizer_state

        if self._stage == 0:
            self._optimizer.state[param][moment].copy_(value)
        elif self._stage < 3:
            safe_set_full_optimizer_state(param, value, moment)
        else:
            # Its own division of a whole tensor fails where the number of elements is no multiple of the world size.
            size = param.ds_tensor.numel()  # type: ignore[attr-defined]
            padded = F.pad(value.flatten(), (0, size * self.world_size - value.numel()))
            safe_set_local_optimizer_state(param, padded.narrow(0, self.rank * size, size), moment)


def check_compiler(device: torch.device) -> None:
    """Raise a `ConfigError` where the device is a CPU, for which torch.compile writes C++, and no compiler is there."""
    compilers = [os.environ.get("CXX", "g++"), "clang++"]
    if device.type == "cpu" and not any(map(shutil.which, compilers)):
        raise ConfigError(
            "--engine.compile true needs a C++ compiler on a CPU and finds none; install g++ or set it false."
        )


def compile_layers(model: nn.Module, device: torch.device, *, dynamic: bool = True) -> None:
    """Have torch.compile fuse what each layer computes in training: for batches of every size, or anew for each size.

    Layers, those that transformers can checkpoint, share their compiled code, but for the first and the last one, whose
    tensors differ: twelve take no longer to compile than three. What is around them is small.
    """
    check_compiler(device)
    torch._dynamo.config.recompile_limit = MOST_COMPILED  # above it, layers would run as written
    # Since torch 2.10 a card's gradients of LayerNorms with changed weights, as bottlenecks have, may be wrong without
    # a word from some 16,000 tokens on: pytorch issue 193061.
    torch._inductor.config.triton.mix_order_reduction = False
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.compile(dynamic=dynamic)


def _share_out(sizes: Mapping[str, int], num_ranks: int) -> dict[str, int]:
    """Which rank saves which tensor, each about as many elements: none holds all of a large share."""
    loads, owners = [0] * num_ranks, {}
    for name in sorted(sizes, key=lambda key: (-sizes[key], key)):
        owners[name] = loads.index(min(loads))
        loads[owners[name]] += sizes[name]
    return owners


def _load_parameters(trainables: dict[str, nn.Parameter], state: TrainState) -> None:
    expected = {name: tuple(value.shape) for name, value in trainables.items()}
    found = {name: tuple(tensor.param.shape) for name, tensor in state.tensors.items()}
    if expected != found:
        different = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
        raise RunError(
            f"the checkpoint's trainable tensors are not this model's ({len(different)} differ, first {different[0]}: "
            f"{found.get(different[0])} instead of {expected.get(different[0])}); start under another --run.name."
        )
    with torch.no_grad():
        for name, param in trainables.items():
            param.copy_(state.tensors[name].param)


def _build_config(
    engine: EngineConfig,
    optim: OptimConfig,
    micro_batch_size: int,
    accumulation_steps: int,
    num_elements: int,
    device_type: str,
) -> dict[str, Any]:
    bucket = min(num_elements + num_elements % 2, MAX_BUCKET_ELEMENTS)  # DeepSpeed refuses an odd number
    zero: dict[str, Any] = {
        "stage": engine.zero_stage,
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": bucket,
    }
    if device_type == "cuda" and engine.zero_stage in (1, 2):
        zero["overlap_comm"] = True  # gradients are reduced while the backward pass goes on; at stage 3 by default
    if engine.offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    return {
        "train_micro_batch_size_per_gpu": micro_batch_size,
        "gradient_accumulation_steps": accumulation_steps,
        "gradient_clipping": optim.max_grad_norm if engine.zero_stage > 0 else 0.0,  # at stage 0 we clip
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,  # its own CPU optimizer is compiled at first use
        "timers": {"throughput": {"enabled": False}},  # it synchronises the device
    }


def _initialize(
    objective: nn.Module, optimizer: torch.optim.Optimizer, config: dict[str, Any], device: torch.device
) -> Any:
    """Hand model and optimizer to DeepSpeed without letting it compile, print or choose another device."""
    # DeepSpeed chooses its accelerator at import: without this, a CPU run on a machine with a GPU would use the GPU.
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    os.environ.setdefault("LOCAL_RANK", str(device.index or 0))
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # Its calls of collectives that torch has renamed would warn at every step.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    if device.type == "cpu":  # elsewhere looking at its ops would have it try some twenty of them
        _forbid_compiled_op(deepspeed)
    # `device_rank` outranks LOCAL_RANK, which counts workers of a node, not the GPUs that this process sees.
    args = SimpleNamespace(device_rank=device.index or 0)
    return deepspeed.initialize(args=args, model=objective, optimizer=optimizer, config=config)[0]


def _forbid_compiled_op(deepspeed: Any) -> None:
    """Keep DeepSpeed from compiling its shared-memory all-reduce, which needs g++ and which training never uses."""
    compatible = getattr(deepspeed.ops, "__compatible_ops__", None)
    if isinstance(compatible, dict) and _COMPILED_OP in compatible:
        compatible[_COMPILED_OP] = False
        return
    warnings.warn(
        f"DeepSpeed {deepspeed.__version__} has no switch for its compiled {_COMPILED_OP}; on a CPU it may need g++ "
        "and ninja. Install the version that cluster/constraints.txt names.",
        stacklevel=2,
    )


def describe_choices(config: SettledConfig, device: torch.device, fused: str, rows: Sequence[int]) -> list[str]:
    """Return what a run chooses for the device that it trains on, a line each, with the reason.

    `fused` says what `model.fused.fuse` has done, and `rows` are by length phase.
    """
    engine, on_gpu, bf16 = config.engine, device.type == "cuda", config.engine.uses_bf16
    where = "CUDA" if on_gpu else "CPU"
    attention, why = pick_attention(device, bf16=bf16), "fused"
    shapes = " of one shape" if engine.fixed_shapes else ""
    kind = f"packed rows{shapes}" if config.prepare.packed else "padded rows"
    if attention == "eager":
        why = "bf16, for which the fused kernel is slower"
    elif attention == VARLEN and config.train.attention_dropout_prob:
        attention, why = "sdpa", "fused; varlen, which has no dropout, with --train.attention_dropout 0"
    if on_gpu:
        version = ".".join(map(str, torch.cuda.get_device_capability(device)))
        has_units, reason = has_bf16(device), f"compute capability {version}"
    else:
        has_units = has_bf16_units()
        reason = "this CPU has bf16 units" if has_units else "this CPU has no bf16 units"
    reason = reason if bf16 == has_units else f"as asked; {reason}"
    precision = "bf16" if bf16 else "fp32, products in TF32" if on_gpu and has_units else "fp32"
    return [
        f"attention: {attention} ({kind}, {why}, {where})",
        f"precision: {precision} ({reason})",
        f"products: {_describe_products(engine, on_gpu=on_gpu)}",
        f"compile: {'on (asked)' if engine.compile else 'off (not asked)'}",
        f"fused kernels: {fused}",
        f"capture: {'on (asked)' if engine.capture else 'off (not asked)'}",
        f"micro batch: {', then '.join(map(str, rows))} rows ({'asked' if config.train.micro_batch_size else where})",
    ]


def _describe_products(engine: EngineConfig, *, on_gpu: bool) -> str:
    if engine.joins_products(on_gpu=on_gpu):
        return f"joined ({'CUDA' if engine.joined == 'auto' else 'asked'})"
    others = {"--engine.zero_stage 3": engine.zero_stage == 3, "--engine.compile true": engine.compile}
    why = next((option for option, is_so in others.items() if is_so), "CPU" if engine.joined == "auto" else "asked")
    return f"as written ({why})"
