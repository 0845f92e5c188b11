"""Search a space of extension sizes, heads, bottlenecks or any other option for downstream F1, with Ray Tune.

    python jobs/sweep.py --config_path jobs/configs/sweeps/af_mini.yaml
    python jobs/sweep.py --config_path jobs/configs/sweeps/af_mini.yaml --tasks ner --data DIR --run.name clinic

A trial pre-trains under --budget, fine-tunes on --tasks and is scored on dev; test is never read. The space is in the
file, and all options of a training job hold for every trial. The sweep's directory gets sweep.html (leaderboard,
figures), best.yaml (python jobs/pretrain_af.py --config_path best.yaml) and trials/, each a run that other jobs take as
a model. The same command goes on where it stopped.
"""

from __future__ import annotations

from domext_ray.config import parse_config
from domext_ray.errors import exit_on_user_error
from domext_ray.search.sweep import run_sweep
from domext_ray.search_config import SweepConfig

if __name__ == "__main__":
    with exit_on_user_error():
        run_sweep(parse_config(SweepConfig))
