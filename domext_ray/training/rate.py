"""What a step of a run's model computes, and how fast this machine does it: what a dry run reckons hours with."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn

from domext_ray.config.pretrain import PretrainConfig, resolve_micro_batch_size
from domext_ray.model.base import Base
from domext_ray.model.graft import Extensions, build_model, choose_attention
from domext_ray.training.engine import MaskedLoss, move_batch
from domext_ray.training.flops import count_work
from domext_ray.training.objective import MaskedBatch
from domext_ray.training.optimizer import build_optimizer
from domext_ray.training.vectors import attach_decoder, make_vector_loss
from domext_ray.training.views import ViewBatch, make_full_views

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
        tokens_per_second: of one worker that has the machine to itself; 0.0: it needs a GPU, and none is here.
    """

    flops_per_token: float
    tokens_per_second: float


def measure_rate(
    config: PretrainConfig, base: Base | None, vocab_size: int, num_new_words: int, earlier: Extensions | None = None
) -> Rate:
    """Time forward, backward and update of some micro batches of random tokens on this machine; no Ray, no text.

    Args:
        config: the run, its sizes solved.
        base: its base; None for random weights.
        vocab_size: rows of the word embedding table when there is no base.
        num_new_words: words beside the base's.
        earlier: extensions that the model has beside the method's own.
    """
    is_here = config.scale.use_gpu is not True or torch.cuda.is_available()
    device = torch.device("cuda" if config.scale.use_gpu is True and is_here else "cpu")
    model = build_model(
        base,
        config.shape,
        config.method,
        vocab_size=vocab_size,
        new_words=[[0]] * num_new_words,
        next_sentence=False,
        causal=config.objective.is_left_to_right,
        reads_words=config.objective.reads_words,
        pad_token_id=0,
        earlier=earlier,
        dropout=config.train.dropout,
        seed=config.seed,
    )
    attach_decoder(model, config.objective, config.train.seq_length, config.seed)
    choose_attention(model, device, bf16=config.engine.precision == "bf16")
    network = cast(nn.Module, model).to(device).train()
    loss = make_vector_loss(config.objective) if config.objective.makes_vectors else MaskedLoss
    module = loss(network, device, bf16=config.engine.precision == "bf16")
    words = vocab_size if base is None else base.config.vocab_size
    length = config.train.seq_length
    flops_per_token = 0.0
    if not config.objective.makes_vectors:  # whose two views of a row differ in length
        num_rows = max(1, COUNTED_TOKENS // length)
        batch = make_full_batch(config, words, num_rows, length)
        flops_per_token = count_work(module, batch, num_rows * length).per_token
    if not is_here:
        return Rate(flops_per_token, 0.0)
    trainables = {name: each for name, each in network.named_parameters() if each.requires_grad}
    optimizer = build_optimizer(trainables, config.optim, {})
    num_rows = resolve_micro_batch_size(config)
    tensors = move_batch(make_full_batch(config, words, num_rows, length), device)
    seconds: list[float] = []
    while len(seconds) <= NUM_TIMED and sum(seconds[1:]) < TIMED_SECONDS:
        start = time.perf_counter()
        module(**tensors)[0].backward()
        optimizer.step()
        optimizer.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return Rate(flops_per_token, num_rows * length / statistics.median(seconds[1:]))


def make_full_batch(config: PretrainConfig, vocab_size: int, num_rows: int, length: int) -> MaskedBatch | ViewBatch:
    """Return full rows of random tokens, of which the first ones are predicted; or two views of each."""
    draw = torch.Generator().manual_seed(0)
    input_ids = torch.randint(vocab_size, (num_rows, length), generator=draw)
    if config.objective.makes_vectors:
        return make_full_views(input_ids.numpy(), config.objective)
    share = 1.0 if config.objective.is_left_to_right else config.objective.mask_prob
    positions = torch.arange(max(1, round(share * input_ids.numel())))
    labels = input_ids.flatten()[positions]
    return MaskedBatch(input_ids, None, None, positions, labels, torch.ones(len(positions)))
