"""AdamW as the papers use it, and its learning rate: linear warm-up, then one of three ways to fall to 0."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn

from domext_ray.config.pretrain import OptimConfig

MOMENTS = ("exp_avg", "exp_avg_sq")  # names of AdamW's state in torch


def compute_learning_rate(step: int, optim: OptimConfig, warmup_steps: int, progress: float = 0.0) -> float:
    """Return the rate of a step, 0-based (AF Adapter section 4.1.2; BERT appendix A.2).

    Steps below `warmup_steps` have peak · (step + 1) / warmup_steps, the peak at the last of them; later ones a share
    of the peak that falls to 0 at `optim.decay_steps`, which is above `warmup_steps`, and stays there: with x from 0 to
    1 between the two, 1 - x (linear) or (1 + cos πx) / 2 (cosine).

    What follows the warm-up of the schedule wsd depends on `progress` alone, the share of the run's budget that is
    spent, 0 to 1: the peak, then (1 - progress) / `optim.decay_frac` of it. A budget that ends in the warm-up has the
    lower of the two rates, so that it ends at 0, too.
    """
    reached = optim.lr * (step + 1) / warmup_steps if step < warmup_steps else optim.lr
    if optim.schedule == "wsd":
        return min(reached, optim.lr * max(0.0, 1.0 - progress) / optim.decay_frac)
    if step < warmup_steps:
        return reached
    left, length = max(0, optim.decay_steps - step), optim.decay_steps - warmup_steps
    if optim.schedule == "cosine":
        return optim.lr * (1 - math.cos(math.pi * left / length)) / 2
    return optim.lr * left / length


def build_optimizer(
    params: Mapping[str, nn.Parameter], optim: OptimConfig, rate_scales: Mapping[str, float] | None = None
) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only, never on biases and LayerNorms; torch's own, so nothing is compiled.

    `rate_scales` are factors of the learning rate by parameter name, for those that differ from 1; a group of the
    optimizer has its own as "rate_scale".
    """
    members: dict[tuple[bool, float], list[nn.Parameter]] = {}
    for name, param in params.items():
        members.setdefault((param.ndim < 2, (rate_scales or {}).get(name, 1.0)), []).append(param)
    groups = [
        {"params": members[key], "weight_decay": 0.0 if key[0] else optim.weight_decay, "rate_scale": key[1]}
        for key in sorted(members)
    ]
    return torch.optim.AdamW(groups, lr=optim.lr, betas=(optim.beta1, optim.beta2), eps=optim.eps, fused=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set every group's rate, times its own factor."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group["rate_scale"]


def clip_gradients(optimizer: torch.optim.AdamW, params: Collection[nn.Parameter], max_norm: float) -> Tensor:
    """Scale a gradient to the largest norm allowed (0: any); if it is not finite, the next step will change nothing.

    Returns its norm before, and 1 if it is finite, else 0: float64 [2] on its device, whose host need not wait for it.
    """
    norm = nn.utils.get_total_norm([param.grad for param in params if param.grad is not None])
    if max_norm > 0:
        nn.utils.clip_grads_with_norm_(params, max_norm, norm)
    is_finite = norm.isfinite()
    optimizer.found_inf = (~is_finite).float()  # type: ignore[attr-defined]  # as torch's GradScaler tells it
    return torch.stack([norm.double(), is_finite.double()])


def create_moments(optimizer: torch.optim.AdamW) -> None:
    """Make AdamW's state before its first step.

    DeepSpeed's ZeRO 1 and 2 link the state of all parameter groups after they stepped the first of them, so the moments
    of the others, which torch makes at their own first step, would stay unlinked and could not be gathered.
    """
    for group in optimizer.param_groups:
        for param in group["params"]:
            optimizer.state[param] = {
                "step": torch.zeros((), dtype=torch.float32, device=param.device),
                **{moment: torch.zeros_like(param) for moment in MOMENTS},
            }
