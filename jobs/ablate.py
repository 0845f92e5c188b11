"""Study bottlenecks as their paper does: remove them by layers, vary their start, vary their size.

    python jobs/ablate.py --study spans --finetuned runs/af-ner            # without retraining; heat map over layers
    python jobs/ablate.py --study sigma --task ner --data DIR --model runs/af --run.name ner
    python jobs/ablate.py --study size --task ner --data DIR --model bert-base-uncased --run.name ner --sizes 8,64,256

The sweeps are fine-tuning runs in RUN.DIR/NAME-..., with the options of jobs/finetune.py; dev chooses each run's rate
from --grid.lr. The same command goes on where it stopped. Figures, tables and pictures: --output.
"""

from __future__ import annotations

from pathlib import Path

from domext_ray.config.command_line import NO_EXTENSIONS, Job, run_job
from domext_ray.config.finetune import AblateConfig


def ablate(config: AblateConfig) -> None:
    """Carry out a study and print its table; with `dry_run` its plan."""
    from domext_ray.downstream.ablation import report as ablation_report
    from domext_ray.downstream.ablation import spans as ablation
    from domext_ray.downstream.ablation import sweeps as ablation_sweeps

    if config.study == "spans":
        work = ablation.prepare_spans(config)
        if config.dry_run:
            print(ablation.describe_spans(work))
            return
        folder, table = work.folder, ablation_report.write_spans(ablation.study_spans(work), work.folder)
    else:
        entries = ablation_sweeps.plan_sweep(config)
        if config.dry_run:
            print(ablation_sweeps.describe_sweep(config, entries))
            return
        folder = ablation_sweeps.find_sweep_folder(config)
        table = ablation_report.write_sweep(ablation_sweeps.run_sweep(config, entries), folder)
    print(f"{table}\nfigures, table and picture: {folder}")


def check(config: AblateConfig) -> None:
    """Refuse a task or a place that does not exist."""
    from domext_ray.labelled.set_description import check_set

    if config.study != "spans":  # which takes both from its run
        check_set(config.task, config.data)


JOB = Job(
    __doc__,
    AblateConfig,
    ablate,
    Path(__file__).parent / "configs" / "ablate.yaml",
    main=(
        *("study", "finetuned", "domain", "task", "data", "model", "sigmas", "sizes", "top_layers", "grid.lr"),
        *("grid.restarts", "scale.use_gpu", "run.name", "run.dir", "output", "dry_run"),
    ),
    unused=(*NO_EXTENSIONS, "features."),
    found=("finetuned",),
    check=check,
)

if __name__ == "__main__":
    run_job(JOB)
