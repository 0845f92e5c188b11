"""AdamW as the papers use it, and its learning rate: linear warm-up, linear decay (BERT appendix A.2)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from domext_ray.config.pretrain import OptimConfig

MOMENTS = ("exp_avg", "exp_avg_sq")  # names of AdamW's state in torch


def compute_learning_rate(step: int, peak: float, warmup_steps: int, decay_steps: int) -> float:
    """Return the rate of a step: linear from 0 to the peak, then linear to 0.

    Args:
        step: 0-based. Steps below `warmup_steps` have peak · (step + 1) / warmup_steps, the peak at the last of them;
            later ones peak · (decay_steps - step) / (decay_steps - warmup_steps), and 0 from `decay_steps` on.
        peak: highest rate.
        warmup_steps: length of the warm-up, 0 or more.
        decay_steps: the schedule's horizon, above `warmup_steps`.

    Source: AF Adapter section 4.1.2; BERT appendix A.2.
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    return peak * max(0, decay_steps - step) / (decay_steps - warmup_steps)


def build_optimizer(
    params: Mapping[str, nn.Parameter], optim: OptimConfig, rate_scales: Mapping[str, float] | None = None
) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only, never on biases and LayerNorms; torch's own, so nothing is compiled.

    Args:
        params: parameters by name.
        optim: its options.
        rate_scales: factors of the learning rate by parameter name, for those that differ from 1; a group of the
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
