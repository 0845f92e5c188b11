"""What a figure does not show: a baseline that trains nothing reaches it, or train has examples of the split, too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from domext_ray.families.metrics.scores import flatten


def list_cautions(
    scored: Mapping[str, Any], split: str, metric: str, baselines: Mapping[str, Any], values: Mapping[str, float]
) -> list[str]:
    """Return a clause for each thing that a reader of figures must know, none where there is nothing.

    `scored` has the number of `examples` by split, and how many of them are `shared` with train; `metric` is a path
    into the baselines' figures, and `values` has it by the name of a model.
    """
    found = {name: flatten(dict(figures)).get(metric) for name, figures in baselines.items()}
    known = {name: value for name, value in found.items() if value is not None}
    cautions = []
    if known:
        best = max(known, key=lambda name: known[name])
        poor = [name for name, value in values.items() if value <= known[best]]
        if poor:
            cautions.append(
                f"the {best} baseline, which trains nothing, reaches {known[best]:.3f}, and {' and '.join(poor)} did "
                "no better"
            )
    if shared := scored.get("shared", {}).get(split, 0):  # of 0.1.0 it is not known
        cautions.append(
            f"{shared:,} of the {scored['examples'][split]:,} {split} examples are in train, too, so figures on "
            f"{split} are too high"
        )
    return cautions
