"""Search a space of extension sizes, heads, bottlenecks or any other option for downstream F1, with Ray Tune.

    python jobs/sweep.py                                          # AF Adapter's heads, units and rate, on any machine
    python jobs/sweep.py --tasks ner --data DIR --corpus TEXT --run.name clinic
    python jobs/sweep.py --config_path jobs/configs/sweeps/exbert_sizes_mini.yaml

A trial pre-trains under --budget, fine-tunes on --tasks and is scored on dev; test is never read. The space is in the
file (jobs/configs/sweeps/af_mini.yaml without --config_path), and all options of a training job hold for every trial.
The sweep's directory gets sweep.html (leaderboard, figures), best.yaml (python jobs/pretrain_af.py --config_path
best.yaml) and trials/, each a run that other jobs take as a model. The same command goes on where it stopped.
"""

from __future__ import annotations

from pathlib import Path

from domext_ray.config import parse_config
from domext_ray.errors import exit_on_user_error
from domext_ray.search.sweep import run_sweep
from domext_ray.search_config import SweepConfig

DEFAULTS = Path(__file__).parent / "configs" / "sweeps" / "af_mini.yaml"

if __name__ == "__main__":
    with exit_on_user_error():
        run_sweep(parse_config(SweepConfig, str(DEFAULTS)))
