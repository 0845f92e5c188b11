"""Compare finished runs on one corpus: bits per character and forgetting over training seconds, as table and picture.

python jobs/compare_runs.py --runs runs/af,runs/exbert,runs/bert --output comparison.png
"""

from __future__ import annotations

from pathlib import Path

from domext_ray.comparison import draw_comparison, format_comparison, read_run
from domext_ray.config import parse_config
from domext_ray.errors import exit_on_user_error
from domext_ray.job_config import CompareConfig

if __name__ == "__main__":
    with exit_on_user_error():
        config = parse_config(CompareConfig)
        runs = [read_run(Path(each.strip()).expanduser()) for each in config.runs.split(",")]
        print(format_comparison(runs))
        draw_comparison(runs, Path(config.output).expanduser())
        print(f"\npicture: {config.output}")
