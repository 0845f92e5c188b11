"""Routers: which adapter should have a row of pieces?

This file is exported as it is: it imports torch and transformers only. An adapter has a table of log-odds, of the
base's words and of hashed pairs of neighbours, by which a row is taken for the adapter's text or not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .configuration_domext import AdapterConfig, DomextConfig
from .layers_domext import AdapterPlace

ROUTER_PAIRS = 65_521
"""Entries of a router's table that pairs of words share, a prime number."""
ROUTER_UNIT = 1e-4
"""What 1 in a router's table is in log-odds."""
ROUTER_SKIPS = -(2**31)
"""In a router's table: the word does not count, as [CLS], [PAD] or [MASK]."""


class Router(nn.Module):
    """Says how much a row looks like an adapter's text, from its words and pairs of neighbouring words alone.

    The table has integers, so a sum does not depend on the order, the device, the dtype of the model or other rows. It
    has entries of `router_words` words, then those of pairs.
    """

    weight: Tensor

    def __init__(self, adapter: AdapterConfig) -> None:
        super().__init__()
        self.register_buffer("weight", torch.zeros(adapter.router_words + ROUTER_PAIRS, dtype=torch.int32))

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return the log-odds per word of rows int64 [B, N], float64 [B] on the CPU; those of no words: minus infinity.

        Special words, and words that the table does not have, do not count.
        """
        num_words = len(self.weight) - ROUTER_PAIRS
        words = self.weight[input_ids.clamp_max(num_words - 1)].long()
        counts = (input_ids < num_words) & (words != ROUTER_SKIPS)
        both = counts[:, :-1] & counts[:, 1:]
        pairs = self.weight[num_words + hash_pairs(input_ids[:, :-1], input_ids[:, 1:])].long()
        total, number = torch.stack([(words * counts).sum(1) + (pairs * both).sum(1), counts.sum(1)]).cpu()
        return (total.double() * ROUTER_UNIT / number).masked_fill(number == 0, -torch.inf)


class Routers(AdapterPlace):
    """The routers of the adapters that have one."""

    def __init__(self, config: DomextConfig) -> None:
        super().__init__(config)
        self.attach_adapters()

    def make_part(self, adapter: AdapterConfig) -> nn.Module | None:
        """Make an adapter's router."""
        return Router(adapter) if adapter.router_words else None


def choose_adapters(routers: Mapping[str, Any], thresholds: Mapping[str, float], input_ids: Tensor) -> list[str | None]:
    """Choose an adapter for each row of `input_ids` [B, N]: of those whose threshold it reaches, the one exceeded most.

    Args:
        routers: a `Router` by adapter, at least one.
        thresholds: log-odds by adapter.
        input_ids: int64 [B, N].

    Returns:
        B names; None for a row that reaches no threshold.
    """
    names = sorted(routers)
    margins = torch.stack([routers[name](input_ids) - thresholds[name] for name in names])
    best, indices = margins.max(0)
    return [names[i] if margin >= 0 else None for margin, i in zip(best.tolist(), indices.tolist(), strict=True)]


def hash_pairs(first: Any, second: Any) -> Any:
    """Return the entries of pairs of words, 0 to below `ROUTER_PAIRS`, from int64 tensors or arrays of one shape."""
    return (first * 48_271 + second) % ROUTER_PAIRS
