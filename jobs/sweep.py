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

from domext_ray.config.command_line import NO_EXTENSIONS, Job, run_job
from domext_ray.config.sweep import SweepConfig

DECIDED = (
    *("train.max_", "train.long_", "optim.decay_steps", "optim.warmup_steps", "scale.num_workers"),
    *("finetune.task", "finetune.data", "finetune.model", "finetune.model_step", "finetune.keep_head"),
    *("finetune.features.", "finetune.run.", "finetune.scale.", "finetune.dry_run", "finetune.export"),
    *(f"finetune.{each}" for each in NO_EXTENSIONS),
)
"""What a sweep decides for its trials."""


def sweep(config: SweepConfig) -> None:
    """Search the space."""
    from domext_ray.search.sweep import run_sweep

    run_sweep(config)


def check(config: SweepConfig) -> None:
    """Refuse a task or a place that does not exist."""
    from domext_ray.labelled.set_description import check_set

    for task, data in zip(config.task_names, config.places, strict=True):
        check_set(task, data)


JOB = Job(
    __doc__,
    SweepConfig,
    sweep,
    Path(__file__).parent / "configs" / "sweeps" / "af_mini.yaml",
    main=(
        *("tasks", "data", "base", "corpus", "space", "search.searcher", "search.scheduler", "search.trials"),
        *("search.objectives", "budget.steps", "budget.tokens", "budget.seconds", "scale.use_gpu"),
        *("run.name", "run.dir", "dry_run"),
    ),
    unused=DECIDED,
    check=check,
)

if __name__ == "__main__":
    run_job(JOB)
