"""No option was lost: each one of the list from before is there, or has a new name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from domext_ray.commands.main import JOBS
from domext_ray.options.kinds import list_options

BEFORE = json.loads((Path(__file__).parent / "options_before.json").read_text(encoding="utf-8"))
"""Verbs -> sections -> options, as they were before lists, --preset and --config."""
RENAMED: dict[str, str] = {
    "run.tensorboard": "run.trackers",
    "mlflow": "run.trackers",
    "train.checkpoint_every": "train.save_every",
    "train.eval_every": "train.evaluate_every",
    "domain": "adapter",
    "objective.contrast_rows": "objective.group_rows",
    "method.domain": "method.adapter",
    "method.active_domains": "method.active_adapters",
    "finetune.method.domain": "finetune.method.adapter",
    "finetune.method.active_domains": "finetune.method.active_adapters",
}
GONE = {"limit.rate": "rates belong to the proxy that does TLS"}
"""Options -> why they went."""


@pytest.mark.parametrize("verbs", BEFORE)
def test_every_option_is_there_or_has_a_new_name(verbs: str) -> None:
    for verb in verbs.split(", "):
        known = list_options(JOBS[verb].config_class)
        for section, leaves in BEFORE[verbs].items():
            for leaf in leaves.split():
                name = f"{section}.{leaf}".lstrip(".")
                assert GONE.get(name) or RENAMED.get(name, name) in known, name
