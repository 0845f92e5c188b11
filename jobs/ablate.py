"""Study bottlenecks as their paper does: remove them by layers, start them otherwise, make them smaller or larger.

    python jobs/ablate.py --study spans --finetuned runs/af-ner            # without retraining; heat map over layers
    python jobs/ablate.py --study sigma --task ner --data DIR --model runs/af --run.name ner
    python jobs/ablate.py --study size --task ner --data DIR --model bert-base-uncased --run.name ner --sizes 8,64,256

The sweeps are fine-tuning runs in RUN.DIR/NAME-..., with the options of jobs/finetune.py; dev chooses each run's rate
from --grid.lr. The same command goes on where it stopped. Figures, tables and pictures: --output.
"""

from __future__ import annotations

from pathlib import Path

from domext_ray.config import parse_config
from domext_ray.downstream.ablation import describe_spans, prepare_spans, study_spans
from domext_ray.downstream.ablation_report import write_spans, write_sweep
from domext_ray.downstream.ablation_sweeps import describe_sweep, find_sweep_folder, plan_sweep, run_sweep
from domext_ray.errors import exit_on_user_error
from domext_ray.finetune_config import AblateConfig

DEFAULTS = Path(__file__).parent / "configs" / "ablate.yaml"


def ablate(config: AblateConfig) -> str:
    """Carry out a study; return its table, or with `dry_run` its plan."""
    if config.study == "spans":
        work = prepare_spans(config)
        if config.dry_run:
            return describe_spans(work)
        return f"{write_spans(study_spans(work), work.folder)}\nfigures, table and picture: {work.folder}"
    entries = plan_sweep(config)
    if config.dry_run:
        return describe_sweep(config, entries)
    folder = find_sweep_folder(config)
    return f"{write_sweep(run_sweep(config, entries), folder)}\nfigures, table and picture: {folder}"


if __name__ == "__main__":
    with exit_on_user_error():
        print(ablate(parse_config(AblateConfig, str(DEFAULTS))))
