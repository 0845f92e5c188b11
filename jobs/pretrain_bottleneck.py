"""Houlsby's bottleneck adapters: two per layer, with shifts of its LayerNorms, beside a frozen base.

    python jobs/pretrain_bottleneck.py --base bert-base-uncased --corpus 'texts/*.txt' --run.name clinic
    python jobs/pretrain_bottleneck.py … --method.bottleneck_size 8 --method.layers 6-11 --method.init paper
    python jobs/pretrain_bottleneck.py … --init_from runs/clinic --method.domain cardiology --run.name clinic-2
                                                    # a second domain; the first one is frozen now

Options come from jobs/configs/bottleneck.yaml, then from --config_path, then from flags.
"""

from __future__ import annotations

from pathlib import Path

from domext_ray.config.command_line import LENGTH, PLACE, TRAINING, WITHOUT_BASE, Job, run_job
from domext_ray.config.pretrain import PretrainConfig


def pretrain(config: PretrainConfig) -> None:
    """Carry a run from text to report."""
    from domext_ray.pipeline import run_pretraining

    run_pretraining(config)


JOB = Job(
    __doc__,
    PretrainConfig,
    pretrain,
    Path(__file__).parent / "configs" / "bottleneck.yaml",
    main=(*TRAINING, "method.bottleneck_size", "method.layers", *LENGTH, *PLACE),
    unused=WITHOUT_BASE,
)

if __name__ == "__main__":
    run_job(JOB)
