r"""Fine-tune a model on a labelled set: a grid with restarts, the best by dev, test scored once.

    python jobs/finetune.py                                        # code entities, made from installed packages
    python jobs/finetune.py --task ner --data DIR --model runs/af --run.name af-ner
    python jobs/finetune.py --task chemprot --data DIR --model bert-base-uncased --grid.lr 5e-5,3e-5,2e-5 \
        --grid.batch_size 16,32 --grid.epochs 2,3,4 --grid.restarts 3
    python jobs/finetune.py --task ner --data DIR --model runs/af --method.trains domain --method.bottleneck_size 64

DIR has train, dev (or devel) and test files; --task is a family (ner, nested_ner, relation, relation_extraction,
classification, regression, qa, multiple_choice, normalization), a set that is described (bc5cdr, chemprot, rte, ...)
or a YAML that describes yours. The model is a run's directory, an export, a base, or a hub id; of one that was
fine-tuned before, --keep_head true keeps the head. The run directory gets summary.json (dev and test with 95 %
intervals), predictions.jsonl, report.html, scores.png and export/; the same command goes on where it stopped.
"""

from __future__ import annotations

from pathlib import Path

from domext_ray.config.command_line import NO_EXTENSIONS, Job, run_job
from domext_ray.config.finetune import FinetuneConfig


def finetune(config: FinetuneConfig) -> None:
    """Train the grid, choose by dev, score test."""
    from domext_ray.downstream.finetune.finetune import run_finetuning

    run_finetuning(config)


def check(config: FinetuneConfig) -> None:
    """Refuse a task or a place that does not exist."""
    from domext_ray.labelled.set_description import check_set

    check_set(config.task, config.data)


JOB = Job(
    __doc__,
    FinetuneConfig,
    finetune,
    Path(__file__).parent / "configs" / "finetune.yaml",
    main=(
        *("task", "data", "model", "method.trains", "method.bottleneck_size", "grid.lr", "grid.batch_size"),
        *("grid.epochs", "grid.restarts", "labelled.max_length", "scale.use_gpu", "run.name", "run.dir", "dry_run"),
    ),
    unused=NO_EXTENSIONS,
    check=check,
)

if __name__ == "__main__":
    run_job(JOB)
