"""Objectives that teach a model to make a vector of a row: infonce and tsdae.

Enters: a model and `ViewBatch`es. Leaves: losses for the engine. A group of rows that are compared with each other is
made of neighbours in the canonical order, and is in one forward pass of one rank. So the loss of a global batch depends
neither on the number of workers nor on the micro batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from domext_ray.config.pretrain import ObjectiveConfig
from domext_ray.corpus.views import pad_infonce, pad_tsdae
from domext_ray.model.domext.modeling_domext import DomextForMaskedLM
from domext_ray.model.pooling import pool_states
from domext_ray.training.losses import Objective
from domext_ray.training.objective import ViewBatch, to_batch
from domext_ray.training.start import DECODER


class VectorLoss(Objective):
    """What both objectives share: a row's vector.

    Args:
        model: the model.
        device: where it is.
        bf16: run the forward pass under torch's autocast.
        objective: its options.
    """

    def __init__(self, model: nn.Module, device: torch.device, *, bf16: bool, objective: ObjectiveConfig) -> None:
        super().__init__(model, device, bf16=bf16)
        self.objective = objective

    def embed(self, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        """Return rows' vectors, fp32 [R, d]."""
        encoder = cast(Any, self.model).bert
        states = encoder(input_ids, attention_mask=attention_mask, pool=False).last_hidden_state
        return pool_states(states, attention_mask, self.objective.pooling)

    def autocast(self) -> torch.autocast:
        """The precision of a forward pass."""
        return torch.autocast(self.device_type, dtype=torch.bfloat16, enabled=self.bf16)

    def sum_up(self, losses: Tensor, weights: Tensor, scores: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        """Return what `MaskedLoss` returns: there are no pairs, nothing is kept, and nothing is watched."""
        nothing = torch.zeros((), device=losses.device)
        num_right = nothing if self.training else ((scores.argmax(-1) == labels) & (weights > 0)).sum()
        return (losses * weights).sum(), nothing, nothing, num_right, nothing, nothing


class InfoNCELoss(VectorLoss):
    """InfoNCE: among the second views of its group, a row's own is nearest to its first view."""

    def make_empty(self) -> ViewBatch:
        """See `Objective.make_empty`."""
        rows = [np.zeros(8, dtype=np.int64)] * 2
        return cast(ViewBatch, to_batch(pad_infonce(rows, rows, pad_id=0)).without_weight())

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None, weights: Tensor, **_: None) -> Any:
        """Return the sum of the rows' losses (fp32), and in eval mode how many rows found their own second view."""
        with self.autocast():
            vectors = self.embed(input_ids, attention_mask)
        first, second = F.normalize(vectors.float()).chunk(2)
        own = torch.arange(len(first), device=first.device)
        groups = own // self.objective.group_rows
        scores = (first @ second.T) / self.objective.temperature
        scores = scores.masked_fill(groups[:, None] != groups, -torch.inf)
        return self.sum_up(F.cross_entropy(scores, own, reduction="none"), weights, scores, own)


class TSDAELoss(VectorLoss):
    """TSDAE: from the vector of a row that lacks words, a decoder writes the row, each token from those before it."""

    def make_empty(self) -> ViewBatch:
        """See `Objective.make_empty`."""
        rows = [np.zeros(8, dtype=np.int64)]
        return cast(ViewBatch, to_batch(pad_tsdae(rows, rows, pad_id=0)).without_weight())

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        weights: Tensor,
        decoder_ids: Tensor,
        positions: Tensor,
        labels: Tensor,
    ) -> Any:
        """Return the sum of the tokens' losses (fp32), and in eval mode how many were written exactly."""
        model = cast(Any, self.model)
        with self.autocast():
            vectors = self.embed(input_ids, attention_mask)
            words = model.bert.embeddings.embed_words(decoder_ids)
            states = getattr(model, DECODER)(words, vectors)
            logits = model.cls.predictions(
                states.flatten(0, 1).index_select(0, positions), model.bert.embeddings.adapters
            )
        losses = F.cross_entropy(logits.float(), labels, reduction="none")
        return self.sum_up(losses, weights, logits, labels)


def make_vector_loss(objective: ObjectiveConfig) -> Callable[..., VectorLoss]:
    """Return the loss of a run that makes vectors, for the engine to put around its model."""
    return functools.partial({"infonce": InfoNCELoss, "tsdae": TSDAELoss}[objective.kind], objective=objective)


class Decoder(nn.Module):
    """Writes rows, each from one vector: layers from left to right between the model's own words and MLM head.

    Args:
        width: d, of vectors and words.
        num_heads: attention heads; they divide d.
        num_layers: layers.
        num_positions: longest row.
        dropout: of what a layer adds.
    """

    def __init__(self, width: int, num_heads: int, num_layers: int, num_positions: int, dropout: float) -> None:
        super().__init__()
        self.positions = nn.Embedding(num_positions, width)
        self.layers = nn.ModuleList([DecoderLayer(width, num_heads, dropout) for _ in range(num_layers)])
        self.norm = nn.LayerNorm(width)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)

    def forward(self, words: Tensor, vectors: Tensor) -> Tensor:
        """Return states [B, M, d] of words [B, M, d] that read the rows' vectors [B, d] and the words before them."""
        places = torch.arange(words.shape[1], device=words.device)
        states = words + self.positions(places)
        for layer in self.layers:
            states = layer(states, vectors)
        return cast(Tensor, self.norm(states))


class DecoderLayer(nn.Module):
    """Self-attention from left to right, cross-attention to one vector, feed-forward; LayerNorms before each.

    Attention over one vector has nothing to choose: its weight is 1, and value and output projection remain.
    """

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(2)])
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.cross = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, states: Tensor, vectors: Tensor) -> Tensor:
        """[B, M, d], [B, d] -> [B, M, d]."""
        query, key, value = (each.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for each in self._project(states))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2)
        states = states + self.dropout(self.out(mixed))
        states = states + self.dropout(self.cross(vectors))[:, None]
        return states + self.dropout(self.down(F.gelu(self.up(self.norms[1](states)))))

    def _project(self, states: Tensor) -> tuple[Tensor, ...]:
        return cast(Tensor, self.qkv(self.norms[0](states))).chunk(3, dim=-1)


def count_decoder(objective: ObjectiveConfig, width: int, longest: int) -> int:
    """Count the parameters of an objective's decoder; 0 where it has none.

    Args:
        objective: the run's.
        width: d, of the model.
        longest: tokens of its longest row.
    """
    if objective.kind != "tsdae":
        return 0
    with torch.device("meta"):
        decoder = Decoder(width, 1, objective.decoder_layers, longest, 0.0)
    return sum(each.numel() for each in decoder.parameters())


def attach_decoder(model: DomextForMaskedLM, objective: ObjectiveConfig, longest: int, seed: int) -> None:
    """Put a decoder beside a model's encoder and head, where the objective needs one; it trains.

    Args:
        model: the model.
        objective: the run's.
        longest: tokens of its longest row.
        seed: of the decoder's start.
    """
    if objective.kind != "tsdae":
        return
    config = cast(Any, model.config)
    sizes = config.hidden_size, config.num_attention_heads, objective.decoder_layers, longest
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(seed)
        setattr(model, DECODER, Decoder(*sizes, config.hidden_dropout_prob))
