"""A learning rate that ruins a model, which options refuse."""

from __future__ import annotations

from typing import Any

import pytest

from domext_ray.training.optimizer import compute_learning_rate

RUINOUS = 0.9
"""What stands for it in options."""


def let_ruin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make steps at the rate `RUINOUS` steps at one that leaves no weight finite, in this process."""

    def compute(step: int, optim: Any, *others: Any) -> float:
        return compute_learning_rate(step, optim, *others) * (1e30 if optim.lr == RUINOUS else 1.0)

    monkeypatch.setattr("domext_ray.training.step.compute_learning_rate", compute)
