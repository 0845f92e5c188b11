"""The decoder of the objective tsdae: it writes a row from the row's vector, and no export has it."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

DECODER = "denoiser"
"""Its name beside the model; its tensors are in checkpoints, and in nothing else."""


class Decoder(nn.Module):
    """Writes rows, each from one vector: layers from left to right between the model's own words and MLM head."""

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
        parts = self.qkv(self.norms[0](states)).chunk(3, dim=-1)
        query, key, value = (each.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for each in parts)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2)
        states = states + self.dropout(self.out(mixed))
        states = states + self.dropout(self.cross(vectors))[:, None]
        return states + self.dropout(self.down(F.gelu(self.up(self.norms[1](states)))))
