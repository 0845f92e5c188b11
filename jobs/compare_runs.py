"""Compare finished runs: pre-training runs on one corpus, models fine-tuned on one labelled set, or sweeps.

    python jobs/compare_runs.py --runs runs/af,runs/exbert,runs/bert --output comparison.png
    python jobs/compare_runs.py --runs runs/base-ner,runs/af-ner,runs/exbert-ner --output ner.png
    python jobs/compare_runs.py --runs runs/asha-0,runs/asha-1,runs/random-0,runs/random-1 --output sweeps.png

Pre-training: bits per character and forgetting over training seconds. Fine-tuning: the set's metric with bootstrap
intervals, and paired differences to the first run. Sweeps that differ in how they search: the best figure by compute.
"""

from __future__ import annotations

from pathlib import Path

from domext_ray.comparison import draw_comparison, format_comparison, read_run
from domext_ray.config import parse_config
from domext_ray.downstream.finetune_comparison import (
    check_comparable,
    draw_finetuned,
    format_finetuned,
    is_finetuned,
    read_finetuned,
)
from domext_ray.errors import exit_on_user_error
from domext_ray.job_config import CompareConfig
from domext_ray.search.sweep_comparison import draw_sweeps, format_sweeps, is_sweep, read_sweeps


def compare(config: CompareConfig) -> str:
    """Draw the picture and return the table."""
    folders = [Path(each.strip()).expanduser() for each in config.runs.split(",")]
    picture = Path(config.output).expanduser()
    if any(is_finetuned(each) for each in folders):
        finetuned = [read_finetuned(each) for each in folders]
        check_comparable(finetuned)
        draw_finetuned(finetuned, picture)
        return format_finetuned(finetuned)
    if any(is_sweep(each) for each in folders):
        sweeps = read_sweeps(folders)
        draw_sweeps(sweeps, picture)
        return format_sweeps(sweeps)
    runs = [read_run(each) for each in folders]
    draw_comparison(runs, picture)
    return format_comparison(runs)


if __name__ == "__main__":
    with exit_on_user_error():
        config = parse_config(CompareConfig)
        print(f"{compare(config)}\n\npicture: {config.output}")
