"""Compare finished runs: pre-training runs on one corpus, models fine-tuned on one labelled set, or sweeps.

    python jobs/compare_runs.py --runs runs/af,runs/exbert,runs/bert --output comparison.png
    python jobs/compare_runs.py --runs runs/base-ner,runs/af-ner,runs/exbert-ner --output ner.png
    python jobs/compare_runs.py --runs runs/asha-0,runs/asha-1,runs/random-0,runs/random-1 --output sweeps.png

Pre-training: bits per character and forgetting over training seconds. Fine-tuning: the set's metric with bootstrap
intervals, and paired differences to the first run. Sweeps that differ in how they search: the best figure by compute.
"""

from __future__ import annotations

from pathlib import Path

from domext_ray.config.command_line import Job, run_job
from domext_ray.config.jobs import CompareConfig


def compare(config: CompareConfig) -> None:
    """Draw the picture and print the table."""
    from domext_ray.downstream.finetune import comparison as finetuning
    from domext_ray.report.comparison import choose_runs, draw_comparison, format_comparison, read_run
    from domext_ray.report.report import check_picture
    from domext_ray.search.sweep_comparison import draw_sweeps, format_sweeps, is_sweep, read_sweeps

    folders = choose_runs(config.runs)
    picture = Path(config.output).expanduser()
    check_picture(picture)
    if any(finetuning.is_finetuned(each) for each in folders):
        finetuned = [finetuning.read_finetuned(each) for each in folders]
        finetuning.check_comparable(finetuned)
        finetuning.draw_finetuned(finetuned, picture)
        table = finetuning.format_finetuned(finetuned)
    elif any(is_sweep(each) for each in folders):
        sweeps = read_sweeps(folders)
        draw_sweeps(sweeps, picture)
        table = format_sweeps(sweeps)
    else:
        runs = [read_run(each) for each in folders]
        draw_comparison(runs, picture)
        table = format_comparison(runs)
    print(f"{table}\n\npicture: {config.output}")


JOB = Job(__doc__, CompareConfig, compare, found=("runs",))

if __name__ == "__main__":
    run_job(JOB)
