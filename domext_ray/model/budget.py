"""A share of trainable parameters -> the sizes of a method's parts.

The papers compare methods at equal trainable size. `solve_budget` scales the parts that a method has (FFN units,
bottlenecks, LoRA's rank, modules) by one factor, then settles the finest of them one by one; extra heads and new words
stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from domext_ray.config.method import MethodConfig
from domext_ray.errors import ConfigError
from domext_ray.extensions.table import EXTENSIONS

TOLERANCE = 0.01
"""How far, relative to the budget, the share of a solved method may be from it."""
_FINE_PARTS = tuple(part for extension in EXTENSIONS for part in extension.scaled)
_STEPS = 60  # halvings of an interval: more than a float has bits


def solve_budget(
    method: MethodConfig, count_share: Callable[[MethodConfig], float], *, num_heads: int, hidden_size: int
) -> MethodConfig:
    """Size a method so that its trainable share is `method.trainable_budget`.

    Args:
        method: the method; the proportions of its parts are kept.
        count_share: trainable share of base + extension (pooler in, MLM head out) of a method, 0 to 1; it grows with
            every part.
        num_heads: attention heads of the base: a module's width is a multiple of them.
        hidden_size: width of the base, which LoRA's rank may not exceed.

    Returns:
        The method with other sizes; as it is, without a budget.

    Raises:
        ConfigError: no size comes within 1 % of the budget.
    """
    budget = method.trainable_budget
    if not budget:
        return method
    smallest = _scale(method, 0.0, num_heads)
    if count_share(smallest) > budget * (1 + TOLERANCE):
        raise ConfigError(
            f"--method.trainable_budget is {budget:g}; the smallest size of this method trains "
            f"{count_share(smallest):.2%} of base and extension: raise the budget, or give fewer heads or new words."
        )
    low, high = 0.0, 1.0
    while count_share(_scale(method, high, num_heads)) < budget:
        low, high = high, 2 * high
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if count_share(_scale(method, middle, num_heads)) < budget else (low, middle)
    solved = _settle(_scale(method, low, num_heads), budget, count_share)
    if solved.lora_rank > hidden_size:
        raise ConfigError(
            f"--method.trainable_budget is {budget:g}, which takes a rank of {solved.lora_rank} in matrices of width "
            f"{hidden_size}: lower it, or name more of them in --method.lora_targets."
        )
    if abs(count_share(solved) - budget) > TOLERANCE * budget:
        raise ConfigError(
            f"--method.trainable_budget is {budget:g}; the nearest size of this method trains "
            f"{count_share(solved):.2%} of base and extension: give that share."
        )
    return solved


def _scale(method: MethodConfig, factor: float, num_heads: int) -> MethodConfig:
    """Multiply every part that the method has; none vanishes."""
    sizes: dict[str, Any] = {}
    for extension in EXTENSIONS:
        sizes |= extension.resize(method, factor, num_heads)
    return replace(method, **sizes)


def _settle(method: MethodConfig, budget: float, count_share: Callable[[MethodConfig], float]) -> MethodConfig:
    """Grow or shrink the part of the finest steps until the share is as near as it gets."""

    def resize(part: str, size: int) -> MethodConfig:
        return replace(method, **{part: size})  # type: ignore[arg-type]

    def step_of(part: str) -> float:
        return count_share(resize(part, getattr(method, part) + 1)) - count_share(method)

    finest = min((part for part in _FINE_PARTS if getattr(method, part)), key=step_of)
    low, high = 1, 2 * getattr(method, finest)
    while count_share(resize(finest, high)) < budget:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if count_share(resize(finest, middle)) < budget else (low, middle)
    return min((resize(finest, size) for size in (low, high)), key=lambda each: abs(count_share(each) - budget))
