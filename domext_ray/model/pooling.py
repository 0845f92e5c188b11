"""An encoder's states of a text's tokens -> one vector for the text."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from domext_ray.config.vectors import Pooling


def pool_states(states: Tensor, attention_mask: Tensor | None, pooling: Pooling) -> Tensor:
    """Return a vector for each row, fp32 [B, d], of states [B, N, d].

    "mean" is of all tokens, the special ones included; "cls" is the first token's state (Reimers and Gurevych 2019,
    "Sentence-BERT", section 3; as in sentence-transformers). The mask is [B, N], 0 for padding.
    """
    if pooling == "cls":
        return states[:, 0].float()
    if attention_mask is None:
        return states.float().mean(1)
    weights = attention_mask[..., None].float()
    return (states.float() * weights).sum(1) / weights.sum(1)


def mean_layers(states: Sequence[Tensor], layers: Sequence[int]) -> Tensor:
    """Return the mean of some layers' states, [B, N, d]; number 0 is the embeddings' output."""
    return torch.stack([states[layer] for layer in layers]).mean(0)
