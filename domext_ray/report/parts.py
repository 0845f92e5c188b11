"""The parts of a mixture in a run's summary and on its page: what was read of each, and what it did to its losses.

Enters: the lines of metrics.jsonl. Leaves: figures by part, and rows of a table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

RECENT_STEPS = 100
"""A part's training loss is the mean over so many of the newest steps: one step has few rows of it."""


def measure_parts(records: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the figures of every part; empty: the run reads one text.

    Args:
        records: lines of metrics.jsonl.

    Returns:
        By part: "tokens" and "epochs" read, "train_loss" (mean over the newest steps, nats) and "held_out_loss", before
        and after; None for what is not known.
    """
    names = dict.fromkeys(key.split("/")[1] for each in records for key in each if key.startswith("parts/"))
    return {name: _measure(f"parts/{name}", records) for name in names}


def _measure(prefix: str, records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    def find(figure: str) -> list[tuple[int, Any]]:
        key = f"{prefix}/{figure}"
        return [(each["step"], each[key]) for each in records if each.get(key) is not None]

    tokens, epochs, losses, held_out = map(find, ("tokens", "epochs", "train_loss", "held_out_loss"))
    recent = [loss for _, loss in losses[-RECENT_STEPS:]]
    return {
        "tokens": tokens[-1][1] if tokens else None,
        "epochs": epochs[-1][1] if epochs else None,
        "train_loss": sum(recent) / len(recent) if recent else None,
        "held_out_loss": {
            "before": held_out[0][1] if held_out else None,
            "after": held_out[-1][1] if held_out and held_out[-1][0] else None,
        },
    }


def list_parts(summary: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return the rows part, tokens, epochs, training loss, held-out loss before, after, and its change.

    Args:
        summary: what `summary.measure_run` returns.
    """
    rows = []
    for name, each in summary.get("parts", {}).items():
        before, after = (each["held_out_loss"][when] for when in ("before", "after"))
        change = "–" if not before or after is None else f"{after / before - 1:+.1%}"
        figures = (each["tokens"], ","), (each["epochs"], ".2f"), (each["train_loss"], ".3f")
        losses = (before, ".3f"), (after, ".3f")
        shown = ("–" if value is None else format(value, form) for value, form in (*figures, *losses))
        rows.append((name, *shown, change))
    return rows
