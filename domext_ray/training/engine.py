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
import hashlib
import logging
import math
import os
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_layers import GradientCheckpointingLayer

from domext_ray.config.pretrain import EngineConfig, OptimConfig
from domext_ray.errors import ConfigError, RunError
from domext_ray.model.build import bypass_extensions
from domext_ray.training.objective import NO_LABEL, DistillRows, pad_batch
from domext_ray.training.optimizer import (
    MOMENTS,
    build_optimizer,
    clip_gradients,
    compute_learning_rate,
    create_moments,
    set_learning_rate,
)

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
    """Everything that training changes in a model, independent of ZeRO stage and world size.

    Args:
        tensors: trainable tensors by the model's parameter names: all of them, or one rank's share.
        num_updates: optimiser updates made (AdamW's step count; skipped steps are not counted).
    """

    tensors: Mapping[str, TensorState]
    num_updates: int


@dataclass(frozen=True)
class StepFigures:
    """Figures of one optimiser step, the same on every rank.

    Args:
        loss: mean loss over the targets of the global batch (negative log-likelihood of masked tokens), nats.
        next_sentence_loss: the same over the pairs of the global batch, nats; 0 without pairs.
        distill_loss: mean of the distillation term over its predicted tokens, before its weight, nats; 0 without it.
        part_losses: sums of the predicted tokens' losses by part of a mixture, nats; empty: there are no parts.
        grad_norm: L2 norm of the whole gradient before clipping; inf or nan when it is not finite.
        learning_rate: rate of this step.
        finite: loss and gradient were finite; else the step was skipped on all ranks.
    """

    loss: float
    next_sentence_loss: float
    distill_loss: float
    grad_norm: float
    learning_rate: float
    finite: bool
    part_losses: tuple[float, ...] = ()

    @property
    def skipped(self) -> bool:
        """The step changed neither parameters nor moments."""
        return not self.finite


def seed_step(seed: int, step: int, rank: int) -> None:
    """Seed torch's generators (CPU and GPU) from a hash of the run's seed, the step and the rank.

    Dropout of a step then depends on nothing that happened before it, so a resumed run draws what an undisturbed one
    would have drawn.
    """
    digest = hashlib.sha256(f"{seed}/{step}/{rank}".encode()).digest()
    number = int.from_bytes(digest[:8], "little") >> 1
    torch.random.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():  # torch.manual_seed formats a stack trace where there is no GPU
        torch.cuda.manual_seed_all(number)


def sum_over_ranks(tensor: Tensor) -> None:
    """Replace a tensor by its sum over all ranks; Gloo would hand one rank's to another thread and back."""
    if dist.get_world_size() > 1:
        dist.all_reduce(tensor)


def join_alone() -> None:
    """Make a process group of this process alone, unless there is one: the engine reduces over ranks."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


class Objective(nn.Module):
    """Model and loss as one module, so that DeepSpeed, autocast and the compiler see the whole forward pass.

    Its forward takes a batch's fields by name and returns first the sums of its losses (fp32 scalars; 0 for one that
    there is not), each of which the engine divides by its count over the global batch, then what else is looked at.

    Args:
        model: the model.
        device: where it is.
        bf16: run the forward pass under torch's autocast.
    """

    def __init__(self, model: nn.Module, device: torch.device, *, bf16: bool) -> None:
        super().__init__()
        self.model = model
        self.device_type = device.type
        self.bf16 = bf16
        self.loss_weights: tuple[float, ...] = (1.0,)
        """A weight for each of its losses' means."""
        self.num_watched = 0
        """Sums that its last output has, [num_watched]: added up over the global batch, and nothing more."""

    def make_empty(self) -> Any:
        """Return a batch of which nothing counts: its gradient is 0 wherever there is one."""
        empty = pad_batch([np.zeros(8)], [np.zeros(8)], [np.zeros(8, dtype=bool)], pad_id=0)
        if getattr(self.model, "predicts_next_sentence", False):
            return replace(empty, next_sentence_labels=torch.full((1,), NO_LABEL))
        return empty


class MaskedLoss(Objective):
    """Pre-training: masked words; with pairs whether the second text follows the first; what is kept of the base.

    On rows of general text the model keeps to its base's predictions: KL(base || model) over the base's words, at the
    predicted positions (Hinton et al. 2015, with a temperature of 1); or it learns their masked words, as elsewhere.

    Args:
        model: the model.
        device: where it is.
        bf16: run the forward pass under torch's autocast.
        distill_weight: weight of the distillation term.
        teacher: the base: the model itself, which then predicts without its extensions, or a frozen copy; None: general
            text is learned.
        num_words: words of the base.
        num_parts: parts of a mixture, whose losses are watched; 0: there are none.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        *,
        bf16: bool,
        distill_weight: float = 1.0,
        teacher: nn.Module | None = None,
        num_words: int = 0,
        num_parts: int = 0,
    ) -> None:
        super().__init__(model, device, bf16=bf16)
        self.num_watched = num_parts
        self.loss_weights = (1.0, 1.0, distill_weight)
        self.teaches_itself = teacher is model
        self.teacher = None if self.teaches_itself else teacher
        self.num_words = num_words

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        token_type_ids: Tensor | None,
        masked_positions: Tensor,
        labels: Tensor,
        weights: Tensor,
        next_sentence_labels: Tensor | None,
        distill_rows: DistillRows | None = None,
        kinds: Tensor | None = None,
        parts: Tensor | None = None,
        document_ids: Tensor | None = None,
        token_indices: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return sums of losses (fp32): words', pairs', distilled; exact predictions, in eval mode; losses by part."""
        rows = {"input_ids": input_ids, "attention_mask": attention_mask, "token_type_ids": token_type_ids}
        rows |= {} if document_ids is None else {"document_ids": document_ids}
        asked = self._ask_base(rows, distill_rows) if self.training else None
        with torch.autocast(self.device_type, dtype=torch.bfloat16, enabled=self.bf16):
            # A base's configuration may ask for all hidden states, which nobody reads here.
            rows |= {"masked_positions": masked_positions, "token_indices": token_indices}
            outputs = self.model(**rows, output_hidden_states=False)
        logits = outputs[0] if kinds is None else _keep_kinds(outputs[0], labels, kinds)
        losses = F.cross_entropy(logits.float(), labels, reduction="none")
        loss_sum = (losses * weights).sum()
        nothing = torch.zeros_like(labels[0])
        order_loss_sum, distill_loss_sum, num_in_order = torch.zeros_like(loss_sum), torch.zeros_like(loss_sum), nothing
        if next_sentence_labels is not None:
            order = outputs.seq_relationship_logits
            order_loss_sum = F.cross_entropy(order.float(), next_sentence_labels, reduction="sum")
            num_in_order = (order.argmax(-1) == next_sentence_labels).sum()
        if distill_rows is not None and asked is not None:
            distill_loss_sum = (self._compare(logits, asked, distill_rows) * distill_rows.weights).sum()
        elif distill_rows is not None:
            distill_loss_sum = (losses.index_select(0, distill_rows.prediction_indices) * distill_rows.weights).sum()
        watched = nothing if parts is None else self._sum_by_part(losses.detach(), parts)
        if self.training:  # nobody looks at the predictions, and they cost a pass over [P, V]
            return loss_sum, order_loss_sum, distill_loss_sum, nothing, nothing, watched
        num_correct = ((logits.argmax(-1) == labels) & (weights > 0)).sum()
        return loss_sum, order_loss_sum, distill_loss_sum, num_correct, num_in_order, watched

    def _sum_by_part(self, losses: Tensor, parts: Tensor) -> Tensor:
        """Sums of losses [P] by part, [num_parts]; without atomic additions, whose order is not fixed."""
        is_own = parts == torch.arange(self.num_watched, device=parts.device).unsqueeze(1)
        return torch.where(is_own, losses, 0.0).sum(1)

    def _ask_base(self, rows: Mapping[str, Tensor | None], asked: DistillRows | None) -> Tensor | None:
        """Return the base's log-probabilities at the asked positions, fp32 [P', V]; None where it is not asked."""
        if asked is None or (self.teacher is None and not self.teaches_itself):
            return None
        teacher = self.model if self.teacher is None else self.teacher
        own = {name: None if each is None else each.index_select(0, asked.rows) for name, each in rows.items()}
        bypass = bypass_extensions(teacher) if self.teaches_itself else contextlib.nullcontext()
        teacher.eval()
        with torch.no_grad(), bypass, torch.autocast(self.device_type, dtype=torch.bfloat16, enabled=self.bf16):
            logits = teacher(**own, masked_positions=asked.positions)[0]
        teacher.train(self.teaches_itself)
        return logits[:, : self.num_words].float().log_softmax(-1)

    def _compare(self, logits: Tensor, base: Tensor, asked: DistillRows) -> Tensor:
        """KL(base || model) over the base's words, [P']."""
        own = logits.index_select(0, asked.prediction_indices)[:, : self.num_words].float().log_softmax(-1)
        return F.kl_div(own, base, reduction="none", log_target=True).sum(-1)


def _keep_kinds(logits: Tensor, labels: Tensor, kinds: Tensor) -> Tensor:
    """Leave out the entries [P, V] that are of another kind than the label; rows without an entry are of kind 0."""
    kinds = F.pad(kinds, (0, logits.shape[-1] - len(kinds)))
    return logits.masked_fill(kinds != kinds[labels][:, None], -torch.inf)


class Engine:
    """Trains and evaluates one model on this rank; torch.distributed's process group exists already.

    Every method is collective: all ranks call it equally often.

    Args:
        model: on `device`; parameters with `requires_grad` train and are fp32, the others may be stored in bf16.
            It is taken over: at ZeRO-3 its parameters are sharded from here on.
        engine: ZeRO stage, precision and memory options.
        optim: AdamW; `decay_steps` is resolved.
        warmup_steps: length of the warm-up, steps.
        micro_batch_size: rows of one forward pass.
        accumulation_steps: micro batches of one optimiser step on this rank.
        seed: the run's seed.
        device: where to train.
        objective: the loss; its forward says what a batch is.
        state: training state to go on from; None starts with the model as it is and moments of zero.

    Raises:
        ConfigError: compilation was asked for at ZeRO-3, or on a CPU without a C++ compiler.
        RunError: `state` does not fit the model's trainable parameters.
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
        objective: Callable[..., Objective] = MaskedLoss,
        state: TrainState | None = None,
    ) -> None:
        self.device = torch.device(device)
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._stage, self._optim, self._seed = engine.zero_stage, optim, seed
        self._warmup_steps = warmup_steps
        self._trainables = {name: each for name, each in model.named_parameters() if each.requires_grad}
        assert self._trainables, "no parameter trains"
        self._owners = _share_out({name: each.numel() for name, each in self._trainables.items()}, self.world_size)
        assert all(each.dtype == torch.float32 for each in self._trainables.values()), "trainables are fp32"
        if state is not None:
            _load_parameters(self._trainables, state)
        if engine.activation_checkpointing:
            checkpoint_activations(model)
        self._compiled = engine.compile
        if engine.compile:
            compile_layers(model, self.device)
        module = objective(model, self.device, bf16=engine.uses_bf16)
        self._loss_weights, self._num_watched = module.loss_weights, module.num_watched
        self._optimizer = build_optimizer(self._trainables, optim)
        self._num_updates = 0
        num_elements = sum(each.numel() for each in self._trainables.values())
        config = _build_config(engine, optim, micro_batch_size, accumulation_steps, num_elements)
        self._deepspeed = _initialize(module, self._optimizer, config, self.device)
        self._deepspeed.train()
        if engine.zero_stage < 3:
            create_moments(self._optimizer)
        if state is not None and state.num_updates:
            self._load_moments(state)

    def train_step(
        self,
        micro_batches: Sequence[Any],
        num_targets: int,
        step: int,
        num_pairs: int = 0,
        num_distilled: int = 0,
        progress: float = 0.0,
    ) -> StepFigures:
        """Make one optimiser step on the objective's mean loss, or the weighted sum of its mean losses.

        Args:
            micro_batches: this rank's share of the global batch, equally many on all ranks.
            num_targets: targets of the global batch (masked tokens, say), over all ranks.
            step: 0-based; sets the learning rate and the dropout.
            num_pairs: pairs of the global batch, over all ranks.
            num_distilled: predicted tokens of the distillation term, likewise.
            progress: see `compute_learning_rate`.

        Returns:
            The step's figures. If they are not finite, nothing was changed on any rank.
        """
        rate = compute_learning_rate(step, self._optim, self._warmup_steps, progress)
        set_learning_rate(self._optimizer, rate)
        seed_step(self._seed, step, self.rank)
        counts = torch.tensor([num_targets, num_pairs, num_distilled], dtype=torch.float64, device=self.device)
        counts = counts.clamp_min(1)[: len(self._loss_weights)]
        sums = self._accumulate_gradients(micro_batches, counts)
        sum_over_ranks(sums)
        means, watched = (sums[: len(counts)] / counts).tolist(), sums[len(counts) :].tolist()
        grad_norm, applied = self._apply_gradients()
        self._num_updates += applied
        loss, next_sentence_loss, distill_loss = means + [0.0] * (3 - len(means))
        return StepFigures(loss, next_sentence_loss, distill_loss, grad_norm, rate, applied, tuple(watched))

    def evaluate(self, batch: Any) -> tuple[float, int, int, int]:
        """Score one batch without dropout.

        Args:
            batch: this rank's batch, as training has them; what has weight 0 does not count.

        Returns:
            Sum of the predicted tokens' negative log-likelihoods in nats, number of exact predictions, number of
            predicted tokens, number of pairs whose label was predicted; all of this rank.
        """
        loss_sum, _, _, num_correct, num_in_order, _ = self.predict(batch)
        return loss_sum.item(), int(num_correct.item()), batch.num_masked, int(num_in_order.item())

    def predict(self, batch: Any) -> tuple[Tensor, ...]:
        """Return what the objective's forward gives for one batch of this rank, without dropout and gradients."""
        self._deepspeed.eval()
        try:
            with torch.no_grad(), self._as_written():
                return self._forward(batch)
        finally:
            self._deepspeed.train()

    def _as_written(self) -> contextlib.AbstractContextManager[None]:
        """Run layers without their compiled code: few evaluations would wait for more of it than they save."""
        return torch.compiler.set_stance("force_eager") if self._compiled else contextlib.nullcontext()

    def gather_state(self) -> TrainState:
        """Collect this rank's share of the training state on its CPU, one whole tensor at a time; called on all."""
        tensors = {}
        for name, param in self._trainables.items():
            whole = [self._gather(name, param, None), *(self._gather(name, param, moment) for moment in MOMENTS)]
            if self._owners[name] == self.rank:
                # A copy, because on a CPU the gathered tensor may be the one that goes on training.
                tensors[name] = TensorState(*(each.to("cpu", torch.float32, copy=True) for each in whole))
        return TrainState(tensors, self._num_updates)

    def _forward(self, batch: Any) -> tuple[Tensor, ...]:
        return self._deepspeed(**move_batch(batch, self.device))

    def _accumulate_gradients(self, micro_batches: Sequence[Any], counts: Tensor) -> Tensor:
        """Run forward and backward over this rank's share; return the sums of its losses, and of what is watched.

        `counts`, float64 [losses], are what the global batch has of each, by which the sums will be divided.
        """
        totals = counts.new_zeros(len(counts) + self._num_watched)
        # DeepSpeed averages over ranks, so a local sum times world size / global count becomes the global mean.
        scales = (self.world_size / counts).float() * torch.tensor(self._loss_weights, device=self.device)
        for i, batch in enumerate(micro_batches):
            self._deepspeed.set_gradient_accumulation_boundary(i == len(micro_batches) - 1)
            with self._without_reduction():
                outputs = self._forward(batch)
                loss_sums = torch.stack(outputs[: len(counts)])
                totals[: len(counts)] += loss_sums.detach()
                totals[len(counts) :] += outputs[-1] if self._num_watched else 0
                # A loss that is not finite can have a finite gradient (infinite logits): it is made to show in the
                # gradient's norm, the one figure on which all ranks agree whether to make the step.
                poisoned = torch.where(loss_sums.detach().isfinite(), scales, torch.nan)
                self._deepspeed.backward((loss_sums * poisoned).sum(), scale_wrt_gas=False)
        return totals

    def _without_reduction(self) -> contextlib.AbstractContextManager[None]:
        """One worker at ZeRO-0 has nothing to reduce; DeepSpeed would still copy all gradients twice."""
        if self._stage == 0 and self.world_size == 1:
            return self._deepspeed.no_sync()
        return contextlib.nullcontext()

    def _apply_gradients(self) -> tuple[float, bool]:
        """Clip the reduced gradients and update; return their norm before clipping, and whether the update was made."""
        if self._stage > 0:  # DeepSpeed computes the norm over all shards, clips, and refuses one that is not finite
            self._deepspeed.step()
            return float(self._deepspeed.get_global_grad_norm()), self._deepspeed.was_step_applied()
        norm = clip_gradients(self._trainables.values(), self._optim.max_grad_norm).item()
        if not math.isfinite(norm):
            self._deepspeed.zero_grad()
            return norm, False
        self._deepspeed.step()
        return norm, True

    def _gather(self, name: str, param: nn.Parameter, moment: str | None) -> Tensor:
        """Return a whole parameter (`moment` None) or one of its moments; collective above ZeRO-0."""
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        if moment is None:
            # Below stage 3 every rank has the whole parameter, and it is its own fp32 master.
            whole = safe_get_full_fp32_param(param) if self._stage == 3 else param.detach()
        elif self._stage == 0:
            whole = self._optimizer.state[param][moment]
        elif self._num_updates == 0:  # DeepSpeed has linked no state yet
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
            counts = torch.ones(len(self._loss_weights), dtype=torch.float64, device=self.device)
            self._accumulate_gradients([self._deepspeed.module.make_empty()], counts)
            _, applied = self._apply_gradients()
            assert applied, "the empty step was refused"
        for name, param in self._trainables.items():
            for moment in MOMENTS:
                self._set_moment(param, moment, getattr(state.tensors[name], moment).to(self.device))
        for each in self._optimizer.state.values():
            each["step"].fill_(state.num_updates)
        self._num_updates = state.num_updates

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


def compile_layers(model: nn.Module, device: torch.device) -> None:
    """Have torch.compile fuse what each layer computes in training, for batches of every size.

    Layers share their compiled code, but for the first and the last one, whose tensors differ: twelve take no longer to
    compile than three. What is around them is small.

    Args:
        model: its layers are those that transformers can checkpoint, in any architecture.
        device: where it will be.

    Raises:
        ConfigError: the device is a CPU, and there is no C++ compiler.
    """
    compilers = [os.environ.get("CXX", "g++"), "clang++"]
    if device.type == "cpu" and not any(map(shutil.which, compilers)):
        raise ConfigError(
            "--engine.compile true needs a C++ compiler on a CPU and finds none; install g++ or set it false."
        )
    torch._dynamo.config.recompile_limit = MOST_COMPILED  # above it, layers would run as written
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.compile(dynamic=True)


def _share_out(sizes: Mapping[str, int], num_ranks: int) -> dict[str, int]:
    """Which rank saves which tensor, each about as many elements: none holds all of a large share."""
    loads, owners = [0] * num_ranks, {}
    for name in sorted(sizes, key=lambda each: (-sizes[each], each)):
        owners[name] = loads.index(min(loads))
        loads[owners[name]] += sizes[name]
    return owners


def _load_parameters(trainables: dict[str, nn.Parameter], state: TrainState) -> None:
    expected = {name: tuple(each.shape) for name, each in trainables.items()}
    found = {name: tuple(each.param.shape) for name, each in state.tensors.items()}
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
    engine: EngineConfig, optim: OptimConfig, micro_batch_size: int, accumulation_steps: int, num_elements: int
) -> dict[str, Any]:
    bucket = min(num_elements + num_elements % 2, MAX_BUCKET_ELEMENTS)  # DeepSpeed refuses an odd number
    zero: dict[str, Any] = {
        "stage": engine.zero_stage,
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": bucket,
    }
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


def checkpoint_activations(model: nn.Module) -> None:
    """Have each layer's activations computed again in the backward pass; transformers is renaming its method."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable()  # type: ignore[operator]


def move_batch(batch: Any, device: torch.device) -> dict[str, Any]:
    """Return a batch's fields by name, their tensors on a device: what an objective's forward takes."""
    return {name: _move(each, device) for name, each in vars(batch).items()}


def _move(value: Any, device: torch.device) -> Any:
    """Bring the tensors of a batch's field to a device, those in dictionaries and in parts of a batch too."""
    if isinstance(value, DistillRows):
        return DistillRows(**move_batch(value, device))
    if isinstance(value, dict):
        return {name: _move(each, device) for name, each in value.items()}
    return value.to(device, non_blocking=True) if isinstance(value, Tensor) else value
