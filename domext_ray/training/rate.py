"""A run's model before there is a run: what a step of it computes, how fast this machine is at it, and its memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from domext_ray.config.pretrain import (
    PretrainConfig,
    count_passes,
    resolve_long_micro_batch_size,
    resolve_micro_batch_size,
)
from domext_ray.corpus.batching import round_up
from domext_ray.corpus.views import make_full_views
from domext_ray.extensions.table import is_extension
from domext_ray.model.base import Base
from domext_ray.model.graft import Extensions, build_model, choose_attention, store_base
from domext_ray.runtime.cpu_kernels import TRAINING, as_worker
from domext_ray.training.engine import MaskedLoss, Objective, move_batch
from domext_ray.training.flops import count_work
from domext_ray.training.keeping import needs_teacher
from domext_ray.training.memory import Sharding, plan_memory
from domext_ray.training.objective import MaskedBatch, ViewBatch, to_batch
from domext_ray.training.optimizer import build_optimizer
from domext_ray.training.vectors import attach_decoder, make_vector_loss

TIMED_SECONDS = 2.0
NUM_TIMED = 10
"""Micro batches that are timed, at most; one more warms up."""
COUNTED_TOKENS = 1024
"""Tokens, about, of the rows whose operations are counted."""


@dataclass(frozen=True)
class Rate:
    """What a worker computes, and how fast.

    Args:
        flops_per_token: floating-point operations per token of a full row, forward and backward; 0.0: not counted, for
            the objective makes vectors.
        tokens_per_second: of one worker that has the machine to itself; 0.0: not timed.
    """

    flops_per_token: float
    tokens_per_second: float


@dataclass(frozen=True)
class Trial:
    """A run's model and loss, and micro batches that have what the run's own have, but for their text.

    Args:
        config: the run.
        objective: model and loss.
        batches: one per length phase, on the CPU.
        device: where the model is.
        num_words: of the base.
    """

    config: PretrainConfig
    objective: Objective
    batches: Sequence[MaskedBatch | ViewBatch]
    device: torch.device
    num_words: int


def make_trial(
    config: PretrainConfig, base: Base | None, vocab_size: int, num_new_words: int, earlier: Extensions | None = None
) -> Trial:
    """Make a run's model and micro batches of random tokens; no Ray, no text.

    Args:
        config: the run, its sizes solved. On a machine without a GPU, what a GPU would train is made on the CPU.
        base: its base; None for random weights.
        vocab_size: rows of the word embedding table when there is no base.
        num_new_words: words beside the base's.
        earlier: extensions that the model has beside the method's own.
    """
    is_for_gpu = config.scale.use_gpu is True
    device = torch.device("cuda" if is_for_gpu and torch.cuda.is_available() else "cpu")
    num_words = vocab_size if base is None else base.config.vocab_size
    model = build_model(
        base,
        config.shape,
        config.method,
        vocab_size=num_words,
        new_words=[[0]] * num_new_words,
        next_sentence=config.objective.next_sentence,
        causal=config.objective.is_left_to_right,
        reads_words=config.objective.reads_words,
        pad_token_id=0,
        earlier=earlier,
        dropout=config.train.dropout,
        seed=config.seed,
    )
    longest = max(config.train.seq_length, config.train.long_seq_length)
    attach_decoder(model, config.objective, longest, config.seed)
    if config.engine.has_narrow_base:
        store_base(model, torch.bfloat16)
    choose_attention(model, torch.device("cuda" if is_for_gpu else "cpu"), bf16=config.engine.uses_bf16)
    network = cast(nn.Module, model).to(device).train()
    loss = make_vector_loss(config.objective) if config.objective.makes_vectors else MaskedLoss
    objective = loss(network, device, bf16=config.engine.uses_bf16)
    lengths = (config.train.seq_length, config.train.long_seq_length)
    sizes = zip(_list_rows(config), lengths, strict=False)
    return Trial(config, objective, [make_full_batch(config, num_words, *each) for each in sizes], device, num_words)


def measure_rate(trial: Trial) -> Rate:
    """Count the operations of full rows; time forward, backward and update of some micro batches on this machine.

    Nothing is timed where a GPU is wanted and none is here, or where `train.teraflops` says how fast a machine is.
    """
    config, device, objective = trial.config, trial.device, trial.objective
    length, flops_per_token = config.train.seq_length, 0.0
    if not config.objective.makes_vectors:  # whose two views of a row differ in length
        num_rows = max(1, COUNTED_TOKENS // length)
        batch = make_full_batch(config, trial.num_words, num_rows, length)
        flops_per_token = count_work(objective, batch, num_rows * length).per_token
    if config.train.teraflops or (config.scale.use_gpu is True and device.type != "cuda"):
        return Rate(flops_per_token, 0.0)
    trainables = {name: each for name, each in objective.named_parameters() if each.requires_grad}
    optimizer = build_optimizer(trainables, config.optim, {})
    tensors = move_batch(trial.batches[0], device)
    seconds: list[float] = []
    with as_worker(TRAINING, uses_fp32=not config.engine.uses_bf16):
        while len(seconds) <= NUM_TIMED and sum(seconds[1:]) < TIMED_SECONDS:
            start = time.perf_counter()
            objective(**tensors)[0].backward()
            optimizer.step()
            optimizer.zero_grad()
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
    return Rate(flops_per_token, resolve_micro_batch_size(config) * length / statistics.median(seconds[1:]))


def estimate_memory(trial: Trial) -> dict[str, int]:
    """Return the bytes of one rank by part, at the moment of a step that needs most; see `training.memory`.

    A run that keeps to its base without having it in its own model has a copy of it, whose passes are not counted.
    """
    config, engine = trial.config, trial.config.engine
    is_on_gpu = config.scale.use_gpu is True
    num_workers, is_offloaded = config.scale.num_workers, engine.offload and is_on_gpu
    model_config = cast(Any, trial.objective.model).config
    dropout = model_config.attention_probs_dropout_prob
    if is_on_gpu and trial.device.type == "cpu":
        # A GPU's fused attention keeps no weights with dropout either; a CPU's has no dropout, so it is left out.
        model_config.attention_probs_dropout_prob = 0.0
    plans = []
    for batch, rows in zip(trial.batches, _list_rows(config), strict=True):
        accumulates = count_passes(config, rows) > 1
        sharding = Sharding(engine.zero_stage, num_workers, accumulates, is_offloaded, is_on_gpu)
        recomputes = engine.activation_checkpointing
        plans.append(plan_memory(trial.objective, batch, sharding, recomputes=recomputes))
    model_config.attention_probs_dropout_prob = dropout
    parts = max(plans, key=lambda each: sum(each.values()))
    if needs_teacher(config) and not config.method.keeps_base:
        size = sum(each.numel() for name, each in trial.objective.model.named_parameters() if not is_extension(name))
        parts["copy_of_the_base"] = size * (2 if engine.has_narrow_base else 4)
    return parts


def _list_rows(config: PretrainConfig) -> list[int]:
    """Return the rows of a micro batch, of each length phase."""
    first = [resolve_micro_batch_size(config)]
    return [*first, resolve_long_micro_batch_size(config)] if config.train.long_seq_length else first


def make_full_batch(config: PretrainConfig, vocab_size: int, num_rows: int, length: int) -> MaskedBatch | ViewBatch:
    """Return full rows of random tokens, of which the first ones are predicted; or two views of each."""
    draw = torch.Generator().manual_seed(0)
    input_ids = torch.randint(vocab_size, (num_rows, length), generator=draw)
    if config.objective.makes_vectors:
        return cast(ViewBatch, to_batch(make_full_views(input_ids.numpy(), config.objective)))
    share = 1.0 if config.objective.is_left_to_right else config.objective.mask_prob
    num_positions = round_up(max(1, round(share * input_ids.numel())))
    positions = torch.arange(min(num_positions, input_ids.numel()))
    labels = input_ids.flatten()[positions]
    return MaskedBatch(input_ids, None, None, positions, labels, torch.ones(len(positions)))
