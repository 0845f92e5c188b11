"""A share of trainable parameters -> the sizes of a method's parts.

The papers compare methods at equal trainable size. `solve_budget` scales the parts that a method has (FFN units,
bottlenecks, LoRA's rank, modules) by one factor, then settles the finest of them one by one; extra heads and new words
stay as they are. Parameters grow linearly with every size, so a model is counted once per part and not at each try.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from domext_ray.config.extensions.table import EXTENSIONS
from domext_ray.config.method import MethodConfig
from domext_ray.config.options.declare import MANY
from domext_ray.errors import ConfigError

TOLERANCE = 0.01
"""How far, relative to the budget, the share of a solved method may be from it."""


@dataclass(frozen=True)
class ParameterCounts:
    """Parameters of an augmented model."""

    total: int  # the MLM head included, tied ones once
    trainable: int  # those that the method trains
    encoder: int  # base and extensions, pooler in, MLM head out: the denominator of the papers' shares
    kinds: Mapping[str, int] = field(default_factory=dict)  # of those that train, by the class of `extensions.table`

    @property
    def trainable_frac(self) -> float:
        """Trainable share of base + extension; of everything, where more than these trains."""
        return self.trainable / (self.encoder if self.trainable <= self.encoder else self.total)


def solve_budget(
    method: MethodConfig, count: Callable[[MethodConfig], ParameterCounts], *, num_heads: int, hidden_size: int
) -> MethodConfig:
    """Size a method so that its trainable share is `method.trainable_budget`; without a budget it stays as it is.

    The proportions of its parts are kept.
    """
    budget = method.trainable_budget
    if not budget:
        return method
    count_share = _extrapolate(method, count, num_heads)
    smallest = _scale(method, 0.0, num_heads)
    if count_share(smallest) > budget * (1 + TOLERANCE):
        raise ConfigError(
            f"--method.trainable_budget is {budget:g}; the smallest size of this method trains "
            f"{count_share(smallest):.2%} of base and extension: raise the budget, or give fewer heads or new words."
        )
    low, high = 0.0, 1.0
    while count_share(_scale(method, high, num_heads)) < budget:
        low, high = high, 2 * high
    for _ in range(60):  # halvings: more than a float has bits
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


def _extrapolate(
    method: MethodConfig, count: Callable[[MethodConfig], ParameterCounts], num_heads: int
) -> Callable[[MethodConfig], float]:
    """Return the trainable share of base + extension as a function of a method's sizes."""
    first = _scale(method, 1.0, num_heads)
    start, growths = count(first), dict[str, ParameterCounts]()
    for extension in EXTENSIONS:
        for size in extension.resize(first, 1.0, num_heads):
            # A step that every size takes: a module's width is a multiple of the heads.
            growths[size] = count(replace(first, **{size: getattr(first, size) + num_heads}))

    def count_share(sized: MethodConfig) -> float:
        values = {}
        for name in ("total", "trainable", "encoder"):
            begin = getattr(start, name)
            steps = ((getattr(sized, size) - getattr(first, size), getattr(growths[size], name)) for size in growths)
            values[name] = begin + sum(number * (grown - begin) for number, grown in steps) // num_heads
        return ParameterCounts(**values).trainable_frac

    return count_share


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

    parts = [part for extension in EXTENSIONS for part in extension.scaled if getattr(method, part)]
    finest = min(parts, key=lambda part: count_share(resize(part, getattr(method, part) + 1)))
    size = bisect.bisect_left(range(16 * MANY), budget, lo=2, key=lambda number: count_share(resize(finest, number)))
    return min(
        (resize(finest, number) for number in (size - 1, size)), key=lambda sized: abs(count_share(sized) - budget)
    )
